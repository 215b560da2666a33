"""A core in a process of its own: ZeroMQ sockets and I/O threads around `EngineCoreLoop`.

The parent starts ``python -m tellin.core.core_proc`` and writes the start message (pickled, from
the parent alone) to its standard input. So the user's main module is never imported here, no
``__main__`` guard is needed, and the end of the parent, however it ends, is seen as the end of that
pipe.

Threads: main runs the loop and sends outputs; one receives and prepares requests; one watches the
parent. Only main touches scheduler and executor.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import zmq

from tellin.config import EngineConfig
from tellin.core.core_loop import EngineCoreLoop
from tellin.core.engine_core import EngineCore
from tellin.core.mm_transfer import RESETTING_UTILITIES, MultiModalReceiver
from tellin.executor.executor import Executor
from tellin.protocol import (
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreRequestType,
)
from tellin.serialization import Decoder, Encoder, Frame, split_frames

logger = logging.getLogger("tellin.core")

ENGINE_CORE_DEAD = b"ENGINE_CORE_DEAD"
LINGER_MS = 4000


class EngineCoreHello(msgspec.Struct):
    """First message of a core, before it loads anything."""

    tellin_version: str
    engine_index: int
    pid: int


class EngineCoreFailed(msgspec.Struct):
    """Sent instead of `EngineCoreReady` when the core could not start."""

    error_type: str
    message: str
    traceback: str


@dataclass(frozen=True)
class StartMessage:
    """Everything a core process needs to know, written to its standard input."""

    config: EngineConfig
    executor_class: type[Executor]
    log_stats: bool
    engine_index: int
    input_addresses: tuple[str, ...]
    output_addresses: tuple[str, ...]
    log_level: int
    sys_path: tuple[str, ...]
    scratch: str = ""
    """Folder that the parent made for this engine and removes at its end; empty = none."""


def engine_identity(engine_index: int) -> bytes:
    """ZeroMQ identity of a core: its index as two bytes, little endian (CLI-10)."""
    return engine_index.to_bytes(2, "little")


class OutputSender:
    """Encodes outputs and sends them to the clients, at once, in the thread that has them.

    A thread of its own would get the interpreter only when the next step's forward pass has begun:
    clients would then do their part beside the model, and wait beside the scheduler. Sending waits
    for nobody: what a client does not take, ZeroMQ keeps.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], start: StartMessage) -> None:
        settings = start.config.settings
        self._engine_index = start.engine_index
        self._encoder = Encoder(
            settings.msgpack_zero_copy_threshold, settings.allow_insecure_serialization
        )
        self._lock = threading.Lock()
        self._sockets = []
        for address in start.output_addresses:
            socket = context.socket(zmq.PUSH)
            socket.setsockopt(zmq.LINGER, LINGER_MS)
            socket.setsockopt(zmq.SNDHWM, 0)  # no limit: a client that stands still stops no step
            socket.connect(address)
            self._sockets.append(socket)

    def send(self, client_index: int, outputs: EngineCoreOutputs) -> None:
        """Send a batch. Called by any thread; nothing after `close`."""
        outputs.engine_index = self._engine_index
        with self._lock:
            if self._sockets:
                self._sockets[client_index].send_multipart(self._encode(outputs), copy=False)

    def send_dead(self) -> None:
        """Tell all clients that the core has died."""
        with self._lock:
            for socket in self._sockets:
                socket.send(ENGINE_CORE_DEAD)

    def close(self) -> None:
        """Close the sockets; what was sent is on its way. Idempotent."""
        with self._lock:
            while self._sockets:
                self._sockets.pop().close()

    def _encode(self, outputs: EngineCoreOutputs) -> list[Frame]:
        """Frames of a batch; a utility result that cannot travel becomes that call's failure."""
        try:
            return self._encoder.encode(outputs)
        except Exception as error:  # a result can be anything, and pickling it can run anything
            utility = outputs.utility_output
            if utility is None:
                raise
            utility.result, utility.failure_message = None, str(error)
            utility.error_type = type(error).__name__
            return self._encoder.encode(outputs)


class EngineCoreProc:
    """Connects an `EngineCoreLoop` to the sockets of its clients."""

    def __init__(self, start: StartMessage) -> None:
        self._start = start
        self._config = start.config
        self._context = zmq.Context(io_threads=2)
        self._inputs = [self._connect_input(a) for a in start.input_addresses]
        self._sender: OutputSender | None = None
        self._threads: list[threading.Thread] = []
        self._stop_input = threading.Event()
        self.loop: EngineCoreLoop | None = None
        self._mm_receivers = [MultiModalReceiver() for _ in self._inputs]

    def _connect_input(self, address: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, engine_identity(self._start.engine_index))
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        socket.setsockopt(zmq.RCVHWM, 0)  # requests wait here rather than in the sender
        socket.connect(address)
        return socket

    def run(self) -> None:
        """Say hello, build the core, serve until told to stop.

        Raises:
            Exception: whatever ended the core; clients have been told before.
        """
        self._say_hello()
        try:
            core = EngineCore(self._config, self._start.executor_class, self._start.log_stats)
        except BaseException as error:
            self._tell_failed(error)
            raise
        try:
            self._sender = sender = OutputSender(self._context, self._start)
            self.loop = EngineCoreLoop(core, sender.send, num_clients=len(self._inputs))
            for socket in self._inputs:
                socket.send(msgspec.msgpack.encode(("ready", core.ready)))
            self._start_thread("tellin-input", self._receive_inputs)
            gc.freeze()  # what is loaded by now stays: the garbage collector need not look at it
            self.loop.run()
        except Exception:
            logger.exception("the engine core died")
            if self._sender is not None:
                self._sender.send_dead()
            raise
        finally:
            self._close(core)

    def _say_hello(self) -> None:
        from tellin import __version__

        hello = EngineCoreHello(__version__, self._start.engine_index, os.getpid())
        for socket in self._inputs:
            socket.send(msgspec.msgpack.encode(("hello", hello)))

    def _tell_failed(self, error: BaseException) -> None:
        failed = EngineCoreFailed(
            type(error).__name__,
            str(error) or repr(error),
            "".join(traceback.format_exception(error)),
        )
        for socket in self._inputs:
            socket.send(msgspec.msgpack.encode(("failed", failed)))
            socket.close()
        self._context.term()

    def _start_thread(self, name: str, target: Any) -> None:
        thread = threading.Thread(target=target, name=name, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _close(self, core: EngineCore) -> None:
        self._stop_input.set()
        for thread in self._threads:
            thread.join(timeout=LINGER_MS / 1000 + 1)
        if self._sender is not None:
            self._sender.close()
        core.shutdown()
        self._context.term()  # waits, up to the linger time, until the last outputs are sent

    # ------------------------------------------------------------------ input thread

    def _receive_inputs(self) -> None:
        decoder: Decoder[EngineCoreRequest] = Decoder(
            EngineCoreRequest, self._config.settings.allow_insecure_serialization
        )
        generic: Decoder[Any] = Decoder(Any, self._config.settings.allow_insecure_serialization)
        poller = zmq.Poller()
        for socket in self._inputs:
            poller.register(socket, zmq.POLLIN)
        while not self._stop_input.is_set():
            for socket, _ in poller.poll(timeout=200):
                client_index = self._inputs.index(socket)
                # The last part is the message. Parts before it are what is left of a message whose
                # sender was interrupted (Ctrl-C) before it got that far.
                *_, message = socket.recv_multipart(copy=True)
                self._handle_input(client_index, message, decoder, generic)
        for socket in self._inputs:
            socket.close()

    def _handle_input(
        self,
        client_index: int,
        message: bytes,
        decoder: Decoder[EngineCoreRequest],
        generic: Decoder[Any],
    ) -> None:
        loop = self.loop
        assert loop is not None, "the input thread starts after the loop exists"
        kind = message[:1]
        frames: list[memoryview] = []
        try:
            frames = split_frames(memoryview(message)[1:])
            if kind == EngineCoreRequestType.ADD.value:
                request = decoder.decode(frames)
                request.client_index = client_index
                if request.mm_features:
                    self._mm_receivers[client_index].resolve(request)
                loop.add_request(request)
            elif kind == EngineCoreRequestType.ABORT.value:
                loop.abort_requests(generic.decode(frames))
            elif kind == EngineCoreRequestType.UTILITY.value:
                call_id, method, args = generic.decode(frames)
                if method in RESETTING_UTILITIES:  # here, in the order of messages
                    self._mm_receivers[client_index].clear()
                loop.call_utility(client_index, call_id, method, args)
            else:
                logger.error("unknown message type %r from client %d", kind, client_index)
        except Exception as error:  # a bad message must not end the thread (WIRE-4)
            logger.exception("a message of client %d could not be decoded", client_index)
            request_id = _request_id_of(kind, frames)
            if request_id is not None:
                loop.send_error(
                    client_index, request_id, f"request could not be decoded: {error}", True
                )


def _request_id_of(kind: bytes, frames: Sequence[Frame]) -> str | None:
    """Id of an ADD message whose body does not decode, if at least the id does."""
    if kind != EngineCoreRequestType.ADD.value or not frames:
        return None
    try:
        fields = msgspec.msgpack.decode(frames[0], ext_hook=lambda code, data: None)
    except msgspec.DecodeError:
        return None
    return fields[0] if fields and isinstance(fields[0], str) else None


def _watch_parent(start: StartMessage) -> None:
    """End this process at once when the parent closes the pipe, which its death does too."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    _tidy_up_after_parent(start)
    os._exit(0)


def _tidy_up_after_parent(start: StartMessage) -> None:
    """Remove the sockets' files, and their folder if it was made for them: a parent that was killed
    could not."""
    with contextlib.suppress(OSError):
        for address in (*start.input_addresses, *start.output_addresses):
            if address.startswith("ipc://"):
                Path(address.removeprefix("ipc://")).unlink(missing_ok=True)
        if start.scratch:
            Path(start.scratch).rmdir()


def _wait_for_term(proc: EngineCoreProc) -> None:
    """End in good order when SIGTERM comes; at once while the core is still being built.

    A thread that waits, not a handler: that would run in the middle of other code, and only when
    the main thread next executes any.
    """
    signal.sigwait({signal.SIGTERM})
    if proc.loop is None:
        os._exit(0)
    proc.loop.request_shutdown()


def read_start_message() -> StartMessage:
    """Read the start message from standard input (8 bytes of length, then a pickle).

    Raises:
        SystemExit: the parent is gone.
    """
    stream = sys.stdin.buffer
    size = int.from_bytes(_read(stream, 8), "little")
    header_size = int.from_bytes(_read(stream, 8), "little")
    sys_path = pickle.loads(_read(stream, header_size))
    sys.path[:] = sys_path
    message = pickle.loads(_read(stream, size))
    assert isinstance(message, StartMessage)
    return message


def _read(stream: BinaryIO, size: int) -> bytes:
    data = stream.read(size)
    if len(data) < size:
        sys.exit(1)
    return data


def main() -> int:
    """Entry point of the child process; returns its exit code."""
    # The parent has blocked them before it started this process. Ctrl-C, which a terminal sends to
    # both, is the parent's. Threads started from here on have them blocked too.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    start = read_start_message()
    logging.basicConfig(
        level=start.log_level,
        format=f"%(asctime)s %(levelname)s %(name)s: [EngineCore_{start.engine_index}] %(message)s",
    )
    proc = EngineCoreProc(start)
    threading.Thread(
        target=_wait_for_term, args=(proc,), name="tellin-sigterm", daemon=True
    ).start()
    threading.Thread(target=_watch_parent, args=(start,), name="tellin-parent", daemon=True).start()
    try:
        proc.run()
    except Exception:
        return 1
    return 0


if __name__ == "__main__":
    # The pickled StartMessage names tellin.core.core_proc: run that module, not its double
    # __main__.
    from tellin.core import core_proc

    sys.exit(core_proc.main())
