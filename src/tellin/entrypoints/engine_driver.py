"""Lets several threads use one `LLMEngine`: their requests share its steps.

Whoever waits for outputs steps the engine, for everybody; the others sleep until their outputs are
there or it is their turn. Threads that want to add or abort requests go before the next step. An
error in a step reaches every thread that waits.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from tellin.engine.llm_engine import LLMEngine
from tellin.engine.output_processor import Output
from tellin.engine.request_handle import RequestHandle
from tellin.exceptions import EngineError, RequestFailedError

logger = logging.getLogger("tellin.entrypoints")

_WAIT_SLICE_S = 0.25
"""Longest wait in one piece: a thread that is interrupted may have no time to wake the others."""

_LAST_OUTPUTS_TIMEOUT_S = 2.0
"""How long to wait for outputs that a core in another process sent before it fell asleep."""

T = TypeVar("T")


class Inbox:
    """Outputs of the requests of one call. Filled by whichever thread steps."""

    def __init__(self) -> None:
        self.outputs: deque[Output] = deque()
        self.lost: deque[str] = deque()
        """External ids of requests that somebody aborted through ``llm_engine``."""
        self.handles: dict[str, RequestHandle] = {}
        """Requests that have not ended, by external id."""
        self.error: BaseException | None = None

    @property
    def has_news(self) -> bool:
        """Whether its reader has something to do."""
        return bool(self.outputs or self.lost or self.error)


def lost_error(request_id: str) -> RequestFailedError:
    """Why a request of `Inbox.lost` has no output."""
    return RequestFailedError(
        f"request {request_id!r} was aborted through llm_engine while LLM waited for it"
    )


class EngineDriver:
    """Serialises access to an engine and hands its outputs to inboxes."""

    def __init__(self, engine: LLMEngine) -> None:
        self.engine = engine
        self._lock = threading.Lock()
        """Held for a few instructions only, and never while anything is allocated: a stream that is
        collected takes it too."""
        self._owner: int | None = None
        """The thread that steps or calls the engine."""
        self._callers: dict[int, bool] = {}
        """Threads that wait to call the engine; they go before the next step."""
        self._waiters: deque[threading.Lock] = deque()
        """One closed lock for each wait; opened when things may have changed."""
        self._inboxes: dict[str, Inbox] = {}
        self._pending_aborts: deque[RequestHandle] = deque()
        self._warned_unclaimed = False

    def call(self, function: Callable[[LLMEngine], T]) -> T:
        """``function`` of the engine, for this thread alone. Goes before the next step.

        Raises:
            EngineError: this thread is in the middle of a step, and would wait for itself.
            Exception: whatever ``function`` raises.
        """
        self._check_outside()
        me = threading.get_ident()
        try:
            self._callers[me] = True
            self._take_turn(me, None)
            del self._callers[me]
            return function(self.engine)
        finally:
            # Ctrl-C can come with any call, so what must be done is done here and without one.
            if me in self._callers:
                del self._callers[me]
            try:
                self._run_pending_aborts()
            finally:
                if self._owner == me:
                    self._owner = None
                self._notify()

    def _check_outside(self) -> None:
        if self._owner == threading.get_ident():
            raise EngineError(
                "LLM was called from within one of its own steps (by a logits processor, say); "
                "call it from another place, or use a second LLM"
            )

    def _take_turn(self, me: int, inbox: Inbox | None) -> bool:
        """Wait until the engine is ours (True), or there is something in the inbox (False)."""
        while True:
            ticket = threading.Lock()
            ticket.acquire()
            self._waiters.append(ticket)  # before the checks: what changes after them opens it
            if inbox is not None and inbox.has_news:
                return False
            with self._lock:
                if self._owner is None and (inbox is None or not self._callers):
                    self._owner = me
                    return True
            ticket.acquire(timeout=_WAIT_SLICE_S)

    def _notify(self) -> None:
        while self._waiters:
            try:
                self._waiters.popleft().release()
            except IndexError:  # another thread was faster
                return

    def register(self, handle: RequestHandle, inbox: Inbox) -> None:
        """Route a request's outputs. Call within `call`, where the request was added."""
        self._inboxes[handle.external_id] = inbox
        inbox.handles[handle.external_id] = handle

    def wait(self, inbox: Inbox) -> None:
        """Return when ``inbox`` has news, stepping the engine if nobody else does.

        Raises:
            EngineError: the engine is asleep, closed or dead.
            Exception: whatever a step raised.
        """
        self._check_outside()
        me = threading.get_ident()
        is_my_turn = True
        while is_my_turn:
            try:
                is_my_turn = self._take_turn(me, inbox)
                if is_my_turn:
                    self._step()
            finally:
                try:
                    self._run_pending_aborts()
                finally:
                    if self._owner == me:
                        self._owner = None
                    self._notify()
        if inbox.error is not None:
            raise inbox.error

    def _step(self) -> None:
        """One step; called while busy."""
        try:
            is_asleep = self.engine.sleep_level is not None
            outputs = self.engine.step(_LAST_OUTPUTS_TIMEOUT_S if is_asleep else None)
            if is_asleep and not outputs:
                raise EngineError("the engine is asleep and computes nothing; call wake_up() first")
        except BaseException as error:
            self._fail_all(error)
            raise
        for output in outputs:
            inbox = self._inboxes.get(output.request_id)
            if inbox is None:
                self._warn_unclaimed(output)
                continue
            if output.finished:
                del self._inboxes[output.request_id]
                inbox.handles.pop(output.request_id, None)
            inbox.outputs.append(output)
        if len(self._inboxes) > len(self.engine.output_processor.external_req_ids):
            self._report_lost()

    def _report_lost(self) -> None:
        """Requests that somebody ended through ``llm_engine`` have no output to wait for."""
        live = self.engine.output_processor.external_req_ids
        for request_id in [i for i in self._inboxes if i not in live]:
            inbox = self._inboxes.pop(request_id)
            inbox.handles.pop(request_id, None)
            inbox.lost.append(request_id)

    def _warn_unclaimed(self, output: Output) -> None:
        if not self._warned_unclaimed:
            self._warned_unclaimed = True
            logger.warning(
                "an output of request %r was dropped: it was added through llm_engine while LLM "
                "was generating; use either of them at a time",
                output.request_id,
            )

    def _fail_all(self, error: BaseException) -> None:
        """A step failed: nothing that was running can be relied on. End it all, tell everybody."""
        if not isinstance(error, Exception):  # Ctrl-C is for the thread that got it
            error = RequestFailedError("another thread was interrupted while it ran a step for all")
        try:
            self.engine.abort_request(list(self._inboxes))
        except Exception:
            logger.debug("aborting after a failed step failed too", exc_info=True)
        for inbox in {id(box): box for box in self._inboxes.values()}.values():
            inbox.error = error
            inbox.handles.clear()
        self._inboxes.clear()

    def abort(self, handles: list[RequestHandle]) -> None:
        """End requests and forget their routes."""
        if handles:
            self.call(lambda _: self._pending_aborts.extend(handles))

    def abort_soon(self, handles: list[RequestHandle]) -> None:
        """Like `abort`, but safe in a destructor: never waits long, whoever holds the engine."""
        self._pending_aborts.extend(handles)
        if self._lock.locked():
            return  # perhaps by this very thread; whoever gets the engine next does it
        me = threading.get_ident()
        is_mine = False
        try:
            with self._lock:
                if self._owner is None:
                    is_mine = True
                    self._owner = me
            if is_mine:  # otherwise whoever has it runs pending aborts when it is done
                self._run_pending_aborts()
        finally:
            if is_mine:
                self._owner = None
                self._notify()

    def _run_pending_aborts(self) -> None:
        """Carry out `abort_soon`, if this thread has the engine."""
        if self._owner != threading.get_ident():
            return
        handles = []
        while self._pending_aborts:
            handle = self._pending_aborts.popleft()
            inbox = self._inboxes.pop(handle.external_id, None)
            if inbox is not None:
                inbox.handles.pop(handle.external_id, None)
                handles.append(handle)
        if handles:
            try:
                self.engine.abort_request(handles)
            except EngineError:
                logger.debug("aborting on an engine that is gone", exc_info=True)
