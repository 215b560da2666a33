"""What may be asked of an `AsyncLLM` besides requests: pause, sleep, caches, adapters, statistics.

The asynchronous counterpart of `tellin.core.engine_core_controls`: most of it is a call of the core
by name. It holds no part of the engine itself; `AsyncLLM` makes them, and serves the requests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from tellin.config import EngineConfig
from tellin.engine.control_checks import check_level
from tellin.engine.core_client import AsyncCoreClient
from tellin.engine.output_handler import OutputHandler
from tellin.engine.renderer import Renderer
from tellin.engine.stat_loggers import StatLoggerManager
from tellin.exceptions import UnsupportedFeatureError
from tellin.metrics import Metric
from tellin.protocol import EngineCoreSnapshot, LoRARequest


class AsyncControls:
    """The utility calls of an engine that is awaited."""

    config: EngineConfig
    engine_core: AsyncCoreClient
    renderer: Renderer
    logger_manager: StatLoggerManager | None
    _handler: OutputHandler
    _is_paused: bool
    _sleep_level: int

    # ------------------------------------------------------------------ control

    async def pause_generation(self, *, mode: str = "abort", clear_cache: bool = True) -> None:
        """Stop admitting requests.

        Args:
            mode: of live requests: abort, wait (returns when they are done) or keep (frozen).
            clear_cache: forget cached prompts too (needed after a change of weights).
        """
        if clear_cache:
            self.renderer.clear_mm_cache()
        await self._pause("pause_scheduler", mode, clear_cache)

    async def _pause(self, method: str, *args: Any) -> None:
        """Call what pauses the core; it is not expected to make progress from then on."""
        was_paused, self._is_paused = self._is_paused, True
        try:
            await self.engine_core.call_utility_async(method, *args)
        except Exception:  # no cancellation: the core pauses all the same
            self._is_paused = was_paused
            raise

    async def resume_generation(self) -> None:
        await self.engine_core.call_utility_async("resume_scheduler")
        self._is_paused = False
        self._handler.touch()

    async def is_paused(self) -> bool:
        return bool(await self.engine_core.call_utility_async("is_scheduler_paused"))

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """As `LLMEngine.sleep`."""
        if check_level(level) >= 1:
            self.renderer.clear_mm_cache()
        await self._pause("sleep", level, mode)
        self._sleep_level = max(level, self._sleep_level)  # a lighter one gives nothing back
        if self.logger_manager is not None:
            self.logger_manager.record_sleep_state(True, self._sleep_level)

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """As `LLMEngine.wake_up`."""
        await self.engine_core.call_utility_async("wake_up", tags)
        sleeping = await self.is_sleeping()
        self._is_paused = sleeping
        self._sleep_level = self._sleep_level if sleeping else 0
        self._handler.touch()
        if self.logger_manager is not None and not sleeping:
            self.logger_manager.record_sleep_state(False, 0)

    async def is_sleeping(self) -> bool:
        return bool(await self.engine_core.call_utility_async("is_sleeping"))

    async def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """As `LLMEngine.reset_prefix_cache`."""
        return bool(
            await self.engine_core.call_utility_async(
                "reset_prefix_cache", reset_running_requests, reset_connector
            )
        )

    async def reset_mm_cache(self) -> None:
        self.renderer.clear_mm_cache()
        await self.engine_core.call_utility_async("reset_mm_cache")

    async def reset_encoder_cache(self) -> None:
        await self.engine_core.call_utility_async("reset_encoder_cache")

    async def start_profile(self, prefix: str | None = None) -> None:
        """As `LLMEngine.start_profile`."""
        await self.engine_core.call_utility_async("profile", True, prefix)
        self._handler.scopes.start()

    async def stop_profile(self) -> str | None:
        """As `LLMEngine.stop_profile`."""
        path = await self.engine_core.call_utility_async("profile", False, None)
        return self._handler.scopes.add_to(path, "shell")

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        return bool(await self.engine_core.call_utility_async("add_lora", lora_request))

    async def remove_lora(self, lora_id: int) -> bool:
        return bool(await self.engine_core.call_utility_async("remove_lora", lora_id))

    async def list_loras(self) -> set[int]:
        return set(await self.engine_core.call_utility_async("list_loras"))

    async def pin_lora(self, lora_id: int) -> bool:
        return bool(await self.engine_core.call_utility_async("pin_lora", lora_id))

    async def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """As `LLMEngine.collective_rpc`."""
        return list(
            await self.engine_core.call_utility_async(
                "collective_rpc", method, timeout, args, kwargs
            )
        )

    # ------------------------------------------------------------------ statistics

    async def get_snapshot(self) -> EngineCoreSnapshot:
        """Live requests and KV blocks, as they are between two steps."""
        result = await self.engine_core.call_utility_async("get_snapshot")
        return msgspec.convert(result, EngineCoreSnapshot)

    def get_metrics(self) -> list[Metric]:
        """As `LLMEngine.get_metrics`."""
        return self._loggers().get_metrics()

    def prometheus_text(self) -> str:
        """All metrics in Prometheus' text format."""
        return self._loggers().prometheus_text()

    def _loggers(self) -> StatLoggerManager:
        if self.logger_manager is None:
            raise UnsupportedFeatureError(
                "statistics are off; create the engine with disable_log_stats=False"
            )
        return self.logger_manager

    async def is_tracing_enabled(self) -> bool:
        """Whether requests are traced."""
        return self.config.observability_config.otlp_traces_endpoint is not None

    async def do_log_stats(self) -> None:
        """Report statistics through the loggers, now. A timer of the server calls this."""
        if self.logger_manager is not None:
            self.logger_manager.log()
