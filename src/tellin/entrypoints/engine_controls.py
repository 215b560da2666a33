"""The calls of an `LLM` that are passed on to its engine, each while no step is running."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tellin.config import ModelConfig
from tellin.engine.llm_engine import LLMEngine
from tellin.engine.renderer import ChatTokenizer
from tellin.entrypoints.offline_runner import OfflineRunner
from tellin.metrics import Metric
from tellin.sampling_params import SamplingParams


class EngineControls:
    """Base of `LLM`."""

    llm_engine: LLMEngine
    _runner: OfflineRunner

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Give memory back: level 1 the KV cache, level 2 the weights too; level 0 only pauses."""
        self._runner.driver.call(lambda engine: engine.sleep(level, mode))

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Undo `sleep`, or part of it (weights, kv_cache, scheduling)."""
        self._runner.driver.call(lambda engine: engine.wake_up(tags))

    def is_sleeping(self) -> bool:
        """Whether the engine is paused or has given memory back."""
        return self._runner.driver.call(lambda engine: engine.is_sleeping())

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Forget cached KV blocks; False while requests use some."""
        return self._runner.driver.call(
            lambda engine: engine.reset_prefix_cache(reset_running_requests, reset_connector)
        )

    def reset_mm_cache(self) -> None:
        """Forget processed multimodal items."""
        self._runner.driver.call(lambda engine: engine.reset_mm_cache())

    def start_profile(self, prefix: str | None = None) -> None:
        """Begin to record a trace; see `LLMEngine.start_profile`."""
        self._runner.driver.call(lambda engine: engine.start_profile(prefix))

    def stop_profile(self) -> str | None:
        """End the trace and write it; returns its path."""
        return self._runner.driver.call(lambda engine: engine.stop_profile())

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """See `LLMEngine.collective_rpc`."""
        return self._runner.driver.call(
            lambda engine: engine.collective_rpc(method, timeout, args, kwargs)
        )

    def apply_model(self, func: Callable[[Any], Any]) -> list[Any]:
        """Run ``func(model)`` on every worker."""
        return self._runner.driver.call(lambda engine: engine.apply_model(func))

    def get_metrics(self) -> list[Metric]:
        """All metrics; needs ``disable_log_stats=False``."""
        return self.llm_engine.get_metrics()

    def get_tokenizer(self) -> ChatTokenizer:
        """The model's tokenizer."""
        return self.llm_engine.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """The model's own sampling defaults, as a new object."""
        return SamplingParams.from_optional(**self.model_config.generation_defaults)

    def get_world_size(self, include_dp: bool = True) -> int:
        """Number of workers."""
        parallel = self.llm_engine.config.parallel_config
        return parallel.world_size * (parallel.data_parallel_size if include_dp else 1)

    @property
    def model_config(self) -> ModelConfig:
        return self.llm_engine.model_config

    @property
    def supported_tasks(self) -> tuple[str, ...]:
        return self.llm_engine.get_supported_tasks()

    def shutdown(self, timeout: float | None = None) -> None:
        """Give all memory and threads back. Idempotent; nothing can be run afterwards."""
        self._runner.driver.call(lambda engine: engine.shutdown(timeout))
