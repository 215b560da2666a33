"""Starting, watching and ending the process of an engine core.

Owns the child and its standard-input pipe (the child's sign that its parent lives). Knows nothing
of requests.
"""

from __future__ import annotations

import logging
import math
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable

import psutil

from tellin.core.core_proc import StartMessage
from tellin.exceptions import EngineStartError

logger = logging.getLogger("tellin.engine")

_SLICE_S = 0.1


class CoreProcess:
    """A running ``python -m tellin.core.core_proc``."""

    def __init__(self, start: StartMessage, on_exit: Callable[[int], None]) -> None:
        """Start the child.

        Args:
            start: what the child needs to know; must be picklable.
            on_exit: called once, from a thread, with the exit code, whenever the child ends.

        Raises:
            EngineStartError: the configuration cannot be sent to another process.
        """
        title = f"EngineCore_{start.engine_index}"
        self._process = _start_child(_pickle_start(start), title)
        self._monitor = threading.Thread(
            target=_wait_for_exit, args=(self._process, on_exit), name="tellin-monitor", daemon=True
        )
        self._monitor.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Exit code of the child; negative = the signal that killed it; None while it runs."""
        return self._process.poll()

    def stop(self, timeout_s: float) -> None:
        """SIGTERM, wait up to ``timeout_s`` seconds, then kill the whole tree. Idempotent."""
        if self._process.poll() is None:
            self._process.terminate()
            if not self._ends_within(timeout_s):
                _kill_tree(self._process.pid)
                self._process.wait()
        if self._process.stdin is not None:
            try:
                self._process.stdin.close()
            except BrokenPipeError:
                pass

    def _ends_within(self, timeout_s: float) -> bool:
        """Wait for the child, in slices: time for which both were stopped does not count."""
        for _ in range(max(1, math.ceil(timeout_s / _SLICE_S))):
            try:
                self._process.wait(_SLICE_S)
            except subprocess.TimeoutExpired:
                continue
            return True
        return False


def _start_child(payload: bytes, title: str) -> subprocess.Popen[bytes]:
    """The child, with its start message written. ``title`` is for readers of process lists.

    It begins with SIGINT and SIGTERM blocked: Ctrl-C is the parent's, even while the child's
    interpreter starts.
    """
    process: subprocess.Popen[bytes] | None = None
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "tellin.core.core_proc", title],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
        )
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)
        assert process.stdin is not None
        try:
            process.stdin.write(payload)
            process.stdin.flush()
        except BrokenPipeError:
            logger.error("the engine core ended before it could read its start message")
        return process
    except BaseException:  # an interrupt
        if process is not None:
            process.kill()
            process.wait()
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def _wait_for_exit(process: subprocess.Popen[bytes], on_exit: Callable[[int], None]) -> None:
    on_exit(process.wait())


def _pickle_start(start: StartMessage) -> bytes:
    try:
        body = pickle.dumps(start)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise EngineStartError(
            f"the configuration cannot be sent to an engine core process ({error}); classes and "
            'functions in it must be importable: put them in a module and name them "module:Class"'
        ) from error
    if b"__main__" in body:
        raise EngineStartError(
            "the configuration names something defined in the script itself (module __main__), "
            "which the engine core process cannot import; move it into a module of its own or run "
            "in process"
        )
    header = pickle.dumps(list(start.sys_path))
    return len(body).to_bytes(8, "little") + len(header).to_bytes(8, "little") + header + body


def _kill_tree(pid: int) -> None:
    try:
        root = psutil.Process(pid)
        processes = [*root.children(recursive=True), root]
    except psutil.NoSuchProcess:
        return
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            pass
