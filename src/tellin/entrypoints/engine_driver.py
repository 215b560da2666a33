"""Lets several threads use one `LLMEngine`: their requests share its steps.

Whoever waits for outputs steps the engine, for everybody; the others sleep until their outputs are
there or it is their turn. Threads that want to add or abort requests go before the next step. An
error in a step reaches every thread that waits.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Iterator

from tellin.engine.llm_engine import LLMEngine
from tellin.engine.output_processor import Output
from tellin.engine.request_handle import RequestHandle
from tellin.exceptions import EngineError, RequestFailedError

logger = logging.getLogger("tellin.entrypoints")

_BORROW_TIMEOUT_S = 0.05
"""How long a stream that is collected may wait before it leaves its abort to others."""


class Inbox:
    """Outputs of the requests of one call. Filled by whichever thread steps."""

    def __init__(self) -> None:
        self.outputs: deque[Output] = deque()
        self.open_ids: set[str] = set()
        """External ids of requests that have not finished."""
        self.error: BaseException | None = None


class EngineDriver:
    """Serialises access to an engine and hands its outputs to inboxes."""

    def __init__(self, engine: LLMEngine) -> None:
        self.engine = engine
        # Not re-entrant: a stream that is collected while this thread holds it must not go on.
        self._condition = threading.Condition(threading.Lock())
        self._is_busy = False
        self._owner: int | None = None
        """The thread that steps or holds the engine."""
        self._num_waiting = 0
        self._inboxes: dict[str, Inbox] = {}
        self._pending_aborts: deque[RequestHandle] = deque()
        self._warned_unclaimed = False

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[LLMEngine]:
        """The engine, for this thread alone. Waits for the running step, then goes first.

        Raises:
            EngineError: this thread is in the middle of a step, and would wait for itself.
        """
        self._check_outside()
        with self._condition:
            self._num_waiting += 1
            try:
                while self._is_busy:
                    self._condition.wait()
                self._is_busy = True
                self._owner = threading.get_ident()
            finally:
                self._num_waiting -= 1
        try:
            yield self.engine
        finally:
            self._release()

    def _check_outside(self) -> None:
        if self._owner == threading.get_ident():
            raise EngineError(
                "LLM was called from within one of its own steps (by a logits processor, say); "
                "call it from another place, or use a second LLM"
            )

    def _release(self) -> None:
        try:
            self._run_pending_aborts()
        finally:
            with self._condition:
                self._is_busy = False
                self._owner = None
                self._condition.notify_all()

    def register(self, handle: RequestHandle, inbox: Inbox) -> None:
        """Route a request's outputs. Call within `exclusive`, where the request was added."""
        self._inboxes[handle.external_id] = inbox
        inbox.open_ids.add(handle.external_id)

    def wait(self, inbox: Inbox) -> None:
        """Return when ``inbox`` has an output, stepping the engine if nobody else does.

        Raises:
            EngineError: the engine is asleep, closed or dead.
            Exception: whatever a step raised.
        """
        while self._take_turn(inbox):
            try:
                self._step()
            finally:
                self._release()
        if inbox.error is not None:
            raise inbox.error

    def _take_turn(self, inbox: Inbox) -> bool:
        """Wait until there is something in the inbox (False) or it is ours to step (True)."""
        self._check_outside()
        with self._condition:
            while not inbox.outputs and inbox.error is None:
                if not self._is_busy and not self._num_waiting:
                    self._is_busy = True
                    self._owner = threading.get_ident()
                    return True
                self._condition.wait()
        return False

    def _step(self) -> None:
        """One step; called while busy."""
        try:
            outputs = self.engine.step()
            if not outputs and self.engine.is_sleeping():
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
                inbox.open_ids.discard(output.request_id)
            inbox.outputs.append(output)
        if len(self._inboxes) > len(self.engine.output_processor.external_req_ids):
            self._fail_aborted()

    def _fail_aborted(self) -> None:
        """Requests that somebody ended through ``llm_engine`` have no output to wait for."""
        live = self.engine.output_processor.external_req_ids
        for request_id in [i for i in self._inboxes if i not in live]:
            inbox = self._inboxes.pop(request_id)
            inbox.open_ids.discard(request_id)
            inbox.error = RequestFailedError(
                f"request {request_id!r} was aborted through llm_engine while LLM waited for it"
            )

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
            inbox.open_ids.clear()
        self._inboxes.clear()

    def abort(self, handles: list[RequestHandle]) -> None:
        """End requests and forget their routes."""
        if handles:
            with self.exclusive():
                self._pending_aborts.extend(handles)

    def abort_soon(self, handles: list[RequestHandle]) -> None:
        """Like `abort`, but safe in a destructor: never waits long, whoever holds the engine."""
        self._pending_aborts.extend(handles)
        if not self._condition.acquire(timeout=_BORROW_TIMEOUT_S):
            return
        try:
            if self._is_busy:
                return  # whoever is busy runs pending aborts when it is done
            self._is_busy = True
        finally:
            self._condition.release()
        self._release()

    def _run_pending_aborts(self) -> None:
        handles = []
        while self._pending_aborts:
            handle = self._pending_aborts.popleft()
            inbox = self._inboxes.pop(handle.external_id, None)
            if inbox is not None:
                inbox.open_ids.discard(handle.external_id)
                handles.append(handle)
        if handles:
            try:
                self.engine.abort_request(handles)
            except EngineError:
                logger.debug("aborting on an engine that is gone", exc_info=True)
