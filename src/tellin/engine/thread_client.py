"""Client of a core that runs in a thread of this process: asynchronous, but no child and no socket.

The fourth cell of `make_client`'s table: for notebooks and small servers. The model runs without
the GIL, so the event loop stays responsive while a step is computed.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import weakref
from concurrent.futures import Future
from typing import Any

from tellin.config import EngineConfig
from tellin.core.core_loop import EngineCoreLoop
from tellin.core.engine_core import EngineCore
from tellin.engine.control_checks import check_call
from tellin.engine.fork_guard import close_in_forks
from tellin.engine.output_bridge import OutputBridge
from tellin.engine.remote_errors import error_from_name
from tellin.exceptions import EngineClosedError, EngineDeadError
from tellin.protocol import EngineCoreOutputs, EngineCoreRequest

logger = logging.getLogger("tellin.engine")


class _CoreThread:
    """The loop, its thread, and what waits for it; apart from the client so that it can be
    collected."""

    def __init__(self, core: EngineCore) -> None:
        self.bridge = OutputBridge()
        self.pending: dict[int, Future[Any]] = {}
        self.dead: Exception | None = None
        close_in_forks(self)
        self.core = core
        self.loop = EngineCoreLoop(core, self._receive)
        self.thread = threading.Thread(target=self._run, name="tellin-core", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.loop.run()
            error: Exception = EngineClosedError("the engine has been shut down")
        except BaseException as failure:  # SystemExit too, of a callable that was to run there
            logger.exception("the engine core died")
            is_plain = isinstance(failure, Exception) and str(failure)
            error = EngineDeadError(str(failure) if is_plain else repr(failure))
        self.dead = error
        for future in list(self.pending.values()):
            if not future.done():
                future.set_exception(error)
        self.bridge.put(error)
        self.core.shutdown()

    def _receive(self, client_index: int, outputs: EngineCoreOutputs) -> None:
        utility = outputs.utility_output
        if utility is None:
            self.bridge.put(outputs)
            return
        future = self.pending.pop(utility.call_id, None)
        if future is None or not future.set_running_or_notify_cancel():
            return
        if utility.failure_message is not None:
            future.set_exception(error_from_name(utility.error_type, utility.failure_message))
        else:
            future.set_result(utility.result)

    def close(self) -> None:
        self.loop.request_shutdown()
        if self.thread is not threading.current_thread():
            self.thread.join()


class AsyncThreadClient:
    """Same face as `AsyncMPClient`."""

    def __init__(self, config: EngineConfig, executor_class: type[Any], log_stats: bool) -> None:
        """Build the core here (errors are raised as they are), then start its thread."""
        core = EngineCore(config, executor_class, log_stats)
        self.config = config
        self.ready = core.ready
        self._core_thread = _CoreThread(core)
        self._call_ids = itertools.count()
        self._finalizer = weakref.finalize(self, self._core_thread.close)

    @property
    def engine_dead(self) -> bool:
        return self._core_thread.dead is not None

    def check_alive(self) -> None:
        """Raise `EngineDeadError` (or `EngineClosedError` after shutdown) if the core is gone."""
        if self._core_thread.dead is not None:
            raise self._core_thread.dead

    async def get_output_async(self) -> EngineCoreOutputs:
        """Next batch of the core. Raises `EngineDeadError` when it died."""
        return await self._core_thread.bridge.get()

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        self.check_alive()
        self._core_thread.loop.add_request(request)

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        if request_ids and not self.engine_dead:
            self._core_thread.loop.abort_requests(request_ids)

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        self.check_alive()
        args = check_call(method, args)
        call_id = next(self._call_ids)
        future: Future[Any] = Future()
        self._core_thread.pending[call_id] = future
        self._core_thread.loop.call_utility(0, call_id, method, list(args))
        if self._core_thread.dead is not None and not future.done():
            future.set_exception(self._core_thread.dead)
        return await asyncio.wrap_future(future)

    def dp_engines_running(self) -> bool:
        return False

    def shutdown(self, timeout: float | None = None) -> None:
        """End the core: live requests are aborted. Idempotent."""
        self._finalizer()
