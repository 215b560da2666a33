"""The busy loop of a core that runs beside its clients: in a process or in a thread.

Owns the order of things: first the input queue, then one step, then the outputs. Only the loop's
thread touches the scheduler and the executor. How messages get in and out is not known here:
producers put `InputMessage`s into ``input_queue``, outputs go to the ``send`` callback.
"""

from __future__ import annotations

import inspect
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import msgspec

from tellin.core.engine_core import EngineCore
from tellin.core.request import Request
from tellin.exceptions import EngineClosedError, EngineError, TellinError
from tellin.protocol import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreRequestType,
    FinishReason,
    UtilityOutput,
)

logger = logging.getLogger("tellin.core")

InputMessage = tuple[EngineCoreRequestType, Any]
Send = Callable[[int, EngineCoreOutputs], None]

UTILITIES: frozenset[str] = frozenset(
    {
        "add_lora",
        "collective_rpc",
        "execute_dummy_batch",
        "get_snapshot",
        "get_supported_tasks",
        "is_sleeping",
        "is_scheduler_paused",
        "list_loras",
        "pause_scheduler",
        "pin_lora",
        "profile",
        "remove_lora",
        "reset_encoder_cache",
        "reset_mm_cache",
        "reset_prefix_cache",
        "resume_scheduler",
        "sleep",
        "wake_up",
    }
)
"""Methods of `EngineCore` that clients may call by name."""


class EngineCoreLoop:
    """Runs an `EngineCore` until `request_shutdown`, serving any number of clients by index."""

    def __init__(self, core: EngineCore, send: Send, num_clients: int = 1) -> None:
        self.core = core
        self.input_queue: queue.SimpleQueue[InputMessage] = queue.SimpleQueue()
        self.num_clients = num_clients
        self._send = send
        self._shutdown_requested = threading.Event()
        self._drain_timeout_s = core.config.shutdown_timeout_s
        self._drain_deadline: float | None = None
        if core.executor is not None:  # one that has failed already says so now
            core.executor.register_failure_callback(self.executor_failed)

    # ------------------------------------------------------------------ called from any thread

    def add_request(self, request: EngineCoreRequest) -> None:
        """Prepare a request here and hand it to the loop; a failure becomes its error output."""
        try:
            prepared = self.core.preprocess_add_request(request)
        except Exception as error:
            logger.exception("request %s could not be prepared", request.request_id)
            client_fault = isinstance(error, ValueError)
            self.send_error(request.client_index, request.request_id, str(error), client_fault)
            return
        self.input_queue.put((EngineCoreRequestType.ADD, (request.client_index, prepared)))

    def abort_requests(self, request_ids: list[str]) -> None:
        """Abort in the middle of the running step if there is one, else before the next."""
        self.core.abort_during_step(request_ids)
        self.input_queue.put((EngineCoreRequestType.ABORT, request_ids))

    def call_utility(self, client_index: int, call_id: int, method: str, args: list[Any]) -> None:
        """Queue a call of one of `UTILITIES`; its result comes as a `UtilityOutput`."""
        self.input_queue.put((EngineCoreRequestType.UTILITY, (client_index, call_id, method, args)))

    def executor_failed(self) -> None:
        """Failure callback of the executor: ends the loop with an error."""
        self.input_queue.put((EngineCoreRequestType.EXECUTOR_FAILED, None))

    def request_shutdown(self) -> None:
        """Ask the loop to end. Safe in a signal handler's helper thread; returns at once."""
        self._shutdown_requested.set()
        self.input_queue.put((EngineCoreRequestType.WAKEUP, None))

    def send_error(
        self, client_index: int, request_id: str, message: str, client_fault: bool = False
    ) -> None:
        """Answer a request with finish reason ERROR."""
        output = EngineCoreOutput(
            request_id,
            [],
            finish_reason=FinishReason.ERROR,
            error=message,
            error_is_client_fault=client_fault,
        )
        self._send(client_index, EngineCoreOutputs(outputs=[output]))

    # ------------------------------------------------------------------ the loop's thread

    def run(self) -> None:
        """Serve until shutdown is requested and carried out.

        Raises:
            EngineError: the executor failed.
            Exception: whatever a step raised; the engine is dead then.
        """
        while self._process_input_queue():
            self._step()

    def _process_input_queue(self) -> bool:
        """Handle all queued input; waits while there is no work. False = the loop must end."""
        while True:
            if self._shutdown_requested.is_set() and self._shut_down_or_drain():
                return False
            if self.core.has_work():
                break
            self.core.run_idle_callbacks()
            if self.input_queue.empty() and self.core.has_work():
                break
            self._handle(self.input_queue.get())
        while not self.input_queue.empty():
            self._handle(self.input_queue.get())
        return True

    def _shut_down_or_drain(self) -> bool:
        """True when nothing is left to do; aborts everything once the drain time is over.

        Requests that a pause keeps from running would never end: they are aborted, not left.
        """
        now = time.monotonic()
        if self._drain_deadline is None:
            self._drain_deadline = now + self._drain_timeout_s
        if now < self._drain_deadline and self.core.has_work():
            return False
        self._emit(self.core.abort_all())
        return True

    def _step(self) -> None:
        outputs, executed = self.core.step()
        self._emit(outputs)
        self.core.post_step(executed)
        if not executed and self.core.has_work():
            time.sleep(0.001)  # lets compile threads and transfers run

    def _emit(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        for client_index, batch in outputs.items():
            self._send(client_index, batch)

    def _handle(self, message: InputMessage) -> None:
        kind, payload = message
        if kind is EngineCoreRequestType.ADD:
            client_index, request = payload
            self._add(client_index, request)
        elif kind is EngineCoreRequestType.ABORT:
            self.core.abort_requests(payload)
        elif kind is EngineCoreRequestType.UTILITY:
            self._call(*payload)
        elif kind is EngineCoreRequestType.EXECUTOR_FAILED:
            raise EngineError("the executor failed; see its log for the cause")

    def _add(self, client_index: int, request: Request) -> None:
        if self._shutdown_requested.is_set():
            output = EngineCoreOutput(request.request_id, [], finish_reason=FinishReason.ABORT)
            self._send(client_index, EngineCoreOutputs(outputs=[output]))
            return
        try:
            self.core.add_request(request)
        except (TellinError, ValueError, TypeError) as error:
            self.send_error(client_index, request.request_id, str(error), client_fault=True)
        except Exception as error:  # loading its adapter may raise anything: it alone fails
            logger.exception("request %s could not be added", request.request_id)
            message = f"{type(error).__name__}: {error}"
            self.send_error(client_index, request.request_id, message)

    def _call(self, client_index: int, call_id: int, method: str, args: list[Any]) -> None:
        def reply(output: UtilityOutput) -> None:
            self._send(client_index, EngineCoreOutputs(utility_output=output))

        def fail(error: BaseException) -> None:
            reply(UtilityOutput(call_id, str(error) or repr(error), type(error).__name__))

        def finish(result: Any) -> None:
            if isinstance(result, set | frozenset | tuple):
                result = list(result)
            reply(UtilityOutput(call_id, result=result))

        try:
            if self._shutdown_requested.is_set():
                raise EngineClosedError(f"the engine is shutting down; {method} was not called")
            if method not in UTILITIES:
                raise AttributeError(f"the engine core has no utility method {method!r}")
            function = getattr(self.core, method)
            result = function(*_convert_args(function, args))
        except Exception as error:
            logger.debug("utility call %s failed", method, exc_info=True)
            fail(error)
            return
        if isinstance(result, Future):
            result.add_done_callback(
                lambda f: fail(e) if (e := f.exception()) is not None else finish(f.result())
            )
        else:
            finish(result)


def _convert_args(function: Callable[..., Any], args: list[Any]) -> list[Any]:
    """Turn plain msgpack values back into the struct types that ``function`` declares."""
    if not args:
        return args
    hints = inspect.get_annotations(function, eval_str=True)
    names = list(inspect.signature(function).parameters)
    converted = list(args)
    for i, name in enumerate(names[: len(args)]):
        hint = hints.get(name)
        if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
            converted[i] = msgspec.convert(args[i], hint)
    return converted
