"""`UniProcExecutor`: one worker in the engine's own process.

Owns the worker and, once a non-blocking step was asked for, one thread that runs forward passes,
so that the caller can compute grammar masks meanwhile. Calls are strictly first in, first out:
whatever touches the worker waits for the pass that is running.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from tellin.exceptions import EngineClosedError, UnknownMethodError
from tellin.executor.executor import Executor, WorkerMethod

if TYPE_CHECKING:
    from tellin.config import EngineConfig
    from tellin.step_protocol import GrammarOutput, ModelRunnerOutput, SchedulerOutput
    from tellin.worker.worker import Worker


class UniProcExecutor(Executor):
    """Runs a `Worker` in this process."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        from tellin.worker.worker import Worker

        self._worker: Worker | None = Worker(config)
        self._lock = threading.RLock()
        self._thread: ThreadPoolExecutor | None = None
        self._running: Future[None] | None = None

    @property
    def worker(self) -> Worker:
        """The one worker.

        Raises:
            EngineClosedError: after `shutdown`.
        """
        if self._worker is None:
            raise EngineClosedError("the executor was shut down; create a new engine")
        return self._worker

    @property
    def driver_worker(self) -> Worker | None:
        """The worker, for tools that look for the model; None after `shutdown`."""
        return self._worker

    def kv_bytes_per_block(self) -> int:
        return self.worker.kv_bytes_per_block()

    def determine_available_memory(self) -> int:
        return self.worker.determine_available_memory()

    def initialize_kv_cache(self, num_blocks: int) -> None:
        self._wait()
        self.worker.initialize_kv_cache(num_blocks)

    def execute_model(
        self, scheduler_output: SchedulerOutput, non_block: bool = False
    ) -> Future[None] | None:
        worker = self.worker
        self._wait()
        if not non_block:
            worker.execute_model(scheduler_output)
            return None
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="tellin-forward")
        self._running = self._thread.submit(worker.execute_model, scheduler_output)
        return self._running

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> ModelRunnerOutput:
        self._wait()
        return self.worker.sample_tokens(grammar_output)

    def execute_dummy_batch(self) -> None:
        self._wait()
        self.worker.execute_dummy_batch()

    def collective_rpc(
        self,
        method: WorkerMethod,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        worker = self.worker
        started = time.monotonic()
        self._wait()
        if isinstance(method, str):
            function = None if method.startswith("_") else getattr(worker, method, None)
            if not callable(function):
                raise UnknownMethodError(
                    f"workers have no method {method!r}", parameter="method", value=method
                )
            result = function(*args, **(kwargs or {}))
        else:
            result = method(worker, *args, **(kwargs or {}))
        if timeout is not None and time.monotonic() - started > timeout:
            name = method if isinstance(method, str) else getattr(method, "__name__", repr(method))
            raise TimeoutError(f"{name} took longer than its timeout of {timeout:g} s")
        return [result]

    @property
    def is_sleeping(self) -> bool:
        return self.worker.is_sleeping

    def sleep(self, level: int = 1) -> None:
        self._wait()
        self.worker.sleep(level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        self._wait()
        self.worker.wake_up(tags)

    def check_health(self) -> None:
        self.worker.check_health()

    def shutdown(self) -> None:
        with self._lock:
            worker, self._worker = self._worker, None
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.shutdown(wait=True)
        if worker is not None:
            worker.shutdown()

    def _wait(self) -> None:
        """Wait for a running pass. Its exception belongs to whoever holds the future."""
        running, self._running = self._running, None
        if running is not None:
            running.exception()
