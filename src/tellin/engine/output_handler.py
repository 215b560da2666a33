"""The task that takes batches from the core and hands them to the consumers.

Holds the parts it needs, never the `AsyncLLM`, which could otherwise not be collected.
"""

from __future__ import annotations

import asyncio
import logging
import time

from tellin.engine.core_client import AsyncCoreClient
from tellin.engine.output_processor import OutputProcessor
from tellin.engine.renderer import Renderer
from tellin.engine.stat_loggers import StatLoggerManager
from tellin.exceptions import EngineClosedError, EngineDeadError, EngineError
from tellin.metrics import IterationStats
from tellin.protocol import EngineCoreOutputs
from tellin.trace import ScopeRecorder

logger = logging.getLogger("tellin.engine")


class OutputHandler:
    """Runs from the first request until the core ends."""

    def __init__(
        self,
        engine_core: AsyncCoreClient,
        output_processor: OutputProcessor,
        renderer: Renderer,
        logger_manager: StatLoggerManager | None,
        chunk_size: int,
    ) -> None:
        self._engine_core = engine_core
        self._output_processor = output_processor
        self._renderer = renderer
        self._logger_manager = logger_manager
        self._chunk_size = chunk_size
        self._task: asyncio.Task[None] | None = None
        self.scopes = ScopeRecorder()
        self.error: Exception | None = None
        self.last_progress = time.monotonic()
        """When the core last gave a sign of life (monotonic seconds)."""

    def start(self) -> None:
        """Start the task on the running loop, unless it runs there already."""
        if self._task is None or self._task.get_loop() is not asyncio.get_running_loop():
            self.touch()
            self._task = asyncio.get_running_loop().create_task(self._run(), name="tellin-outputs")
        elif not self._output_processor.has_unfinished_requests():
            self.touch()

    def touch(self) -> None:
        """Count from now: the core had no reason to show progress before."""
        self.last_progress = time.monotonic()

    def check_alive(self) -> None:
        """Raise what ended the task, if anything did."""
        if self.error is not None:
            raise self.error

    def ends_by_itself(self) -> bool:
        """Whether the task runs: then it hands out the core's last outputs before it ends."""
        task = self._task
        return task is not None and not task.done() and task.get_loop().is_running()

    def stop(self) -> None:
        """Cancel the task, from any thread."""
        task, self._task = self._task, None
        if task is None or task.done():
            return
        try:
            task.get_loop().call_soon_threadsafe(task.cancel)
        except RuntimeError:  # its loop is closed, and the task with it
            pass

    async def _run(self) -> None:
        try:
            while True:
                outputs = await self._engine_core.get_output_async()
                self.touch()
                await self._process(outputs)
        except EngineClosedError as error:
            self._fail(error)
        except Exception as error:
            if not isinstance(error, EngineDeadError):
                logger.exception("the output handler failed")
            self._fail(error if isinstance(error, EngineError) else EngineDeadError(str(error)))

    async def _process(self, batch: EngineCoreOutputs) -> None:
        has_stats = self._logger_manager is not None
        stats = IterationStats(time.time()) if has_stats and batch.outputs else None
        for start in range(0, len(batch.outputs), self._chunk_size):
            if start:
                await asyncio.sleep(0)
            chunk = batch.outputs[start : start + self._chunk_size]
            with self.scopes.scope("process_outputs"):
                processed = self._output_processor.process_outputs(chunk, batch.timestamp, stats)
            await self._engine_core.abort_requests_async(processed.reqs_to_abort)
        self._output_processor.update_scheduler_stats(batch.scheduler_stats)
        if self._logger_manager is not None:
            mm_cache_stats = self._renderer.stat_mm_cache()
            with self.scopes.scope("record_stats"):
                self._logger_manager.record(
                    batch.scheduler_stats, stats, mm_cache_stats, batch.engine_index
                )

    def _fail(self, error: Exception) -> None:
        self.error = error
        self._output_processor.propagate_error(error)
