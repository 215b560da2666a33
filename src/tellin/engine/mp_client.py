"""Clients of an engine core that runs in a process of its own.

`MPClient` owns the sockets, the child process and the thread that receives; its two faces are
`SyncMPClient`, whose results are taken from a queue, and `AsyncMPClient`, whose results are
awaited.

Whatever happens to the core, nobody waits for ever: when it dies, every blocked ``get_output``,
every pending utility call and every later call raises `EngineDeadError`. In a fork of this process
every call raises `EngineClosedError`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import sys
import tempfile
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import zmq

from tellin.config import EngineConfig
from tellin.core.core_proc import (
    ENGINE_CORE_DEAD,
    EngineCoreFailed,
    EngineCoreHello,
    StartMessage,
    engine_identity,
)
from tellin.core.mm_transfer import RESETTING_UTILITIES, make_sender
from tellin.engine.control_checks import check_call
from tellin.engine.core_process import CoreProcess
from tellin.engine.fork_guard import close_in_forks
from tellin.engine.output_bridge import OutputBridge
from tellin.engine.remote_errors import error_from_name
from tellin.exceptions import EngineClosedError, EngineDeadError, EngineStartError
from tellin.protocol import (
    EngineCoreOutputs,
    EngineCoreReady,
    EngineCoreRequest,
    EngineCoreRequestType,
    UtilityOutput,
)
from tellin.serialization import Decoder, Encoder, join_frames

logger = logging.getLogger("tellin.engine")

WAIT_SLICE_S = 0.25
"""Longest wait in one piece. Python notices a signal (Ctrl-C) that arrives between its last check
and the start of a wait only when that wait ends."""

OutputSink = Callable[[EngineCoreOutputs | Exception], None]


class _Reply:
    """Result of a utility call, for a thread that waits for it.

    A `Future` would not do: Ctrl-C while it holds its condition leaves that locked for ever, and
    the output thread with it.
    """

    def __init__(self) -> None:
        self._pending = threading.Lock()
        self._pending.acquire()
        self._result: Any = None
        self._error: Exception | None = None

    def done(self) -> bool:
        return not self._pending.locked()

    def set_running_or_notify_cancel(self) -> bool:
        return True

    def set_result(self, result: Any) -> None:
        self._result = result
        self._open()

    def set_exception(self, error: Exception) -> None:
        self._error = error
        self._open()

    def _open(self) -> None:
        with contextlib.suppress(RuntimeError):  # answered already, by another thread
            self._pending.release()

    def wait(self) -> Any:
        while not self._pending.acquire(timeout=WAIT_SLICE_S):
            pass
        if self._error is not None:
            raise self._error
        return self._result


class _Resources:
    """Everything that must be ended, kept apart from the client so that a finalizer can hold it."""

    def __init__(self, timeout_s: float) -> None:
        self.context = zmq.Context(io_threads=2)
        self.folder = tempfile.TemporaryDirectory(prefix="tellin-", ignore_cleanup_errors=True)
        self.input_socket: zmq.Socket[bytes] | None = None
        self.send_lock = threading.RLock()
        self.process: CoreProcess | None = None
        self.output_thread: threading.Thread | None = None
        self.pending: dict[int, Future[Any] | _Reply] = {}
        self.sink: OutputSink | None = None
        self.dead: Exception | None = None
        self.exit_error: Exception | None = (
            None  # the process ended; outputs may still be in flight
        )
        self.closing = False
        self.process_ended = False
        self.timeout_s = timeout_s
        self.owner_pid = os.getpid()
        close_in_forks(self)

    def fail(self, error: Exception) -> None:
        """The core is gone: remember it and wake everybody who waits. First call wins."""
        if self.dead is not None:
            return
        self.dead = error
        for future in list(self.pending.values()):
            if not future.done():
                future.set_exception(error)
        self.pending.clear()
        if self.sink is not None:
            self.sink(error)

    def close(self) -> None:
        """End the child, the thread and the sockets. Idempotent; nothing in a forked copy."""
        if self.closing or os.getpid() != self.owner_pid:
            return
        self.closing = True
        if self.process is not None:
            # Its last outputs are still received: it does not end before they are gone.
            self.process.stop(self.timeout_s)
        self.process_ended = True
        thread = self.output_thread
        if thread is not None and thread.is_alive() and thread is not threading.current_thread():
            thread.join(timeout=5)
        self.fail(EngineClosedError("the engine has been shut down"))
        with self.send_lock:
            if self.input_socket is not None:
                self.input_socket.close(linger=0)
                self.input_socket = None
        self.context.destroy(linger=0)
        self.folder.cleanup()


class MPClient:
    """Common part: start, send, utility calls, liveness, shutdown."""

    def __init__(
        self,
        config: EngineConfig,
        executor_class: type[Any],
        log_stats: bool,
        engine_index: int = 0,
    ) -> None:
        """Start the core process and wait until it can serve.

        Raises:
            EngineStartError: the core failed to start (the message carries its reason), has another
                version, or is not ready within ``settings.engine_ready_timeout_s``.
        """
        self.config = config
        self._resources = _Resources(
            max(config.settings.shutdown_timeout_s, config.shutdown_timeout_s + 1)
        )
        self._finalizer = weakref.finalize(self, self._resources.close)
        self._identity = engine_identity(engine_index)
        self._encoder = Encoder(
            config.settings.msgpack_zero_copy_threshold,
            config.settings.allow_insecure_serialization,
        )
        self._mm_sender = make_sender(config.multimodal_config)
        try:
            self._start(config, executor_class, log_stats, engine_index)
        except BaseException:
            self._finalizer()
            raise

    def _start(
        self, config: EngineConfig, executor_class: type[Any], log_stats: bool, engine_index: int
    ) -> None:
        resources = self._resources
        base = Path(config.settings.rpc_base_path or resources.folder.name)
        unique = uuid.uuid4().hex[:12]
        input_address = f"ipc://{base / f'in-{unique}'}"
        output_address = f"ipc://{base / f'out-{unique}'}"
        resources.input_socket = resources.context.socket(zmq.ROUTER)
        # A router drops what exceeds its limit and what has no receiver, and says nothing. How many
        # requests may wait is limited where they are admitted (`max_num_queued_reqs`).
        resources.input_socket.setsockopt(zmq.SNDHWM, 0)
        resources.input_socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        output_socket = resources.context.socket(zmq.PULL)
        _bind(resources.input_socket, input_address)
        _bind(output_socket, output_address)
        resources.output_thread = threading.Thread(
            target=_receive_outputs,
            args=(resources, output_socket, config.settings.allow_insecure_serialization),
            name="tellin-client-output",
            daemon=True,
        )
        start = StartMessage(
            config=config,
            executor_class=executor_class,
            log_stats=log_stats,
            engine_index=engine_index,
            input_addresses=(input_address,),
            output_addresses=(output_address,),
            log_level=logging.getLogger("tellin").getEffectiveLevel(),
            sys_path=tuple(sys.path),
            scratch=resources.folder.name,
        )
        resources.process = CoreProcess(start, _exit_callback(resources))
        self.ready = self._wait_until_ready(config.settings.engine_ready_timeout_s)
        resources.output_thread.start()

    def _wait_until_ready(self, timeout_s: float) -> EngineCoreReady:
        deadline = time.monotonic() + timeout_s
        while True:
            kind, payload = self._receive_start_message(deadline, timeout_s)
            if kind == "hello":
                _check_version(msgspec.convert(payload, EngineCoreHello))
            elif kind == "failed":
                failed = msgspec.convert(payload, EngineCoreFailed)
                logger.debug("traceback of the engine core:\n%s", failed.traceback)
                cause = error_from_name(failed.error_type, failed.message)
                raise EngineStartError(
                    f"the engine core could not start: {failed.error_type}: {failed.message}"
                ) from cause
            elif kind == "ready":
                return msgspec.convert(payload, EngineCoreReady)

    def _receive_start_message(self, deadline: float, timeout_s: float) -> tuple[str, Any]:
        socket, process = self._resources.input_socket, self._resources.process
        assert socket is not None
        assert process is not None
        while not socket.poll(timeout=100):
            exit_code = process.exit_code
            if exit_code is not None and not socket.poll(timeout=100):
                raise EngineStartError(
                    f"the engine core process ended while starting, exit code {exit_code}"
                    + (" (killed, perhaps for lack of memory)" if exit_code == -9 else "")
                )
            if time.monotonic() > deadline:
                raise EngineStartError(
                    f"the engine core was not ready after {timeout_s:g} s; loading may be slow: "
                    "raise TELLIN_ENGINE_READY_TIMEOUT_S"
                )
        _, message = socket.recv_multipart()
        kind, payload = msgspec.msgpack.decode(message)
        return kind, payload

    # ------------------------------------------------------------------ sending

    @property
    def engine_dead(self) -> bool:
        return self._resources.dead is not None or self._resources.exit_error is not None

    @property
    def core_pid(self) -> int:
        """Process id of the core."""
        assert self._resources.process is not None
        return self._resources.process.pid

    def check_alive(self) -> None:
        """Raise `EngineDeadError` (or `EngineClosedError` after shutdown) if the core is gone."""
        error = self._resources.dead or self._resources.exit_error
        if error is not None:
            raise error

    def _send_request(self, request: EngineCoreRequest) -> None:
        """Send a request; images that the core has already travel as names."""
        sender = self._mm_sender
        if sender is None or not request.mm_features:
            self._send(EngineCoreRequestType.ADD, request)
            return
        with self._resources.send_lock:
            travelling = sender.prepare(request)
            self._send(EngineCoreRequestType.ADD, travelling)
            sender.sent(travelling)

    def _send(self, kind: EngineCoreRequestType, obj: Any) -> None:
        self.check_alive()
        with self._resources.send_lock:
            # One part besides the address: a Ctrl-C between parts would leave half a message in the
            # socket, and the next one would be taken for its end. Copied, because the deallocator
            # of zero-copy frames swallows the exception of a signal that arrives just then.
            message = kind.value + join_frames(self._encoder.encode(obj))
            if self._resources.input_socket is None:
                raise EngineClosedError("the engine has been shut down")
            try:
                self._resources.input_socket.send(self._identity, zmq.SNDMORE)
                self._resources.input_socket.send(message)
            except zmq.ZMQError as error:
                raise EngineDeadError(f"nothing can be sent to it: {error}") from error

    def _call_utility(self, reply: Future[Any] | _Reply, method: str, args: Sequence[Any]) -> None:
        args = check_call(method, tuple(args))
        call_id = uuid.uuid1().int >> 64
        self._resources.pending[call_id] = reply
        try:
            with self._resources.send_lock:
                if self._mm_sender is not None and method in RESETTING_UTILITIES:
                    self._mm_sender.clear()
                self._send(EngineCoreRequestType.UTILITY, (call_id, method, list(args)))
        except BaseException:
            self._resources.pending.pop(call_id, None)
            raise
        if self._resources.dead is not None and not reply.done():
            reply.set_exception(self._resources.dead)

    def dp_engines_running(self) -> bool:
        return False

    def shutdown(self, timeout: float | None = None) -> None:
        """End the core: SIGTERM, ``timeout`` seconds of grace, then kill. Idempotent."""
        if timeout is not None:
            self._resources.timeout_s = timeout
        self._finalizer()


def _bind(socket: zmq.Socket[bytes], address: str) -> None:
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        raise EngineStartError(
            f"no socket can be made for the engine core: {error}; name an existing folder with a "
            "short path in TELLIN_RPC_BASE_PATH"
        ) from error


def _exit_callback(resources: _Resources) -> Callable[[int], None]:
    reference = weakref.ref(resources)

    def on_exit(exit_code: int) -> None:
        alive = reference()
        if alive is None or alive.closing:
            return
        logger.error("the engine core process ended unexpectedly, exit code %d", exit_code)
        # the output thread delivers what was sent before the end, then fails everything that waits
        alive.exit_error = EngineDeadError(f"its process ended with exit code {exit_code}")

    return on_exit


def _receive_outputs(
    resources: _Resources, socket: zmq.Socket[bytes], allow_insecure: bool
) -> None:
    """Output thread: must not hold the client, or it would never be collected."""
    decoder: Decoder[EngineCoreOutputs] = Decoder(EngineCoreOutputs, allow_insecure)
    try:
        while True:
            has_ended = resources.process_ended  # asked first: what it sent is on its way by then
            if not socket.poll(timeout=100):
                if has_ended:
                    break
                if resources.exit_error is not None:
                    resources.fail(resources.exit_error)
                    break
                continue
            frames = socket.recv_multipart()
            if frames[0] == ENGINE_CORE_DEAD:
                resources.fail(EngineDeadError())
                break
            outputs = decoder.decode(frames)
            if outputs.utility_output is not None:
                _complete_utility(resources, outputs.utility_output)
            elif resources.sink is not None:
                resources.sink(outputs)
    except Exception as error:
        if not resources.closing:
            logger.exception("the output thread of the engine client failed")
            resources.fail(EngineDeadError(f"its outputs could not be read: {error}"))
    finally:
        socket.close(linger=0)


def _complete_utility(resources: _Resources, output: UtilityOutput) -> None:
    future = resources.pending.pop(output.call_id, None)
    if future is None or not future.set_running_or_notify_cancel():
        if output.failure_message is not None:
            logger.warning("a cancelled utility call failed: %s", output.failure_message)
        return
    if output.failure_message is not None:
        future.set_exception(error_from_name(output.error_type, output.failure_message))
    else:
        future.set_result(output.result)


def _check_version(hello: EngineCoreHello) -> None:
    from tellin import __version__

    if hello.tellin_version != __version__:
        raise EngineStartError(
            f"the engine core runs tellin {hello.tellin_version} but this process runs "
            f"{__version__}; both must use the same installation"
        )


class SyncMPClient(MPClient):
    """Client of `LLMEngine`: ``get_output`` takes batches from a queue."""

    def __init__(self, config: EngineConfig, executor_class: type[Any], log_stats: bool) -> None:
        super().__init__(config, executor_class, log_stats)
        self._outputs: queue.SimpleQueue[EngineCoreOutputs | Exception] = queue.SimpleQueue()
        self._resources.sink = self._outputs.put

    def get_output(self, timeout: float | None = None) -> EngineCoreOutputs:
        """Next batch of the core; an empty batch when ``timeout`` seconds passed without one.

        Raises:
            EngineDeadError: the core died; also on every later call.
            EngineClosedError: after shutdown, and in a fork: what had come is the original's.
        """
        dead = self._resources.dead
        if isinstance(dead, EngineClosedError) or (dead is not None and self._outputs.empty()):
            raise dead
        item = self._take(timeout)
        if item is None:
            return EngineCoreOutputs()
        if isinstance(item, Exception):
            raise item
        return item

    def _take(self, timeout: float | None) -> EngineCoreOutputs | Exception | None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = WAIT_SLICE_S if deadline is None else deadline - time.monotonic()
            try:
                return self._outputs.get(timeout=max(0.0, min(left, WAIT_SLICE_S)))
            except queue.Empty:
                if left <= WAIT_SLICE_S and deadline is not None:
                    return None

    def add_request(self, request: EngineCoreRequest) -> None:
        self._send_request(request)

    def abort_requests(self, request_ids: list[str]) -> None:
        """Abort by internal ids; nothing for an empty list or a dead core."""
        with contextlib.suppress(EngineDeadError):
            if request_ids and not self.engine_dead:
                self._send(EngineCoreRequestType.ABORT, request_ids)

    def call_utility(self, method: str, *args: Any) -> Any:
        """Call a method of the core by name and wait for its result."""
        reply = _Reply()
        self._call_utility(reply, method, args)
        return reply.wait()


class AsyncMPClient(MPClient):
    """Client of `AsyncLLM`: outputs and results are awaited on the event loop that first asks for
    them."""

    def __init__(self, config: EngineConfig, executor_class: type[Any], log_stats: bool) -> None:
        super().__init__(config, executor_class, log_stats)
        self._bridge = OutputBridge()
        self._resources.sink = self._bridge.put

    async def get_output_async(self) -> EngineCoreOutputs:
        """Next batch of the core. Raises `EngineDeadError` when it died."""
        return await self._bridge.get()

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        self._send_request(request)

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        with contextlib.suppress(EngineDeadError):
            if request_ids and not self.engine_dead:
                self._send(EngineCoreRequestType.ABORT, request_ids)

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        future: Future[Any] = Future()
        self._call_utility(future, method, args)
        return await asyncio.wrap_future(future)
