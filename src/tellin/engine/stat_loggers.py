"""Who is told about statistics: the interface, the text logger, and the manager that fans out.

Loggers receive one `SchedulerStats` and one `IterationStats` per step. They must be cheap: they run
between two steps.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tellin.config import EngineConfig
from tellin.engine.stats import CachingMetrics
from tellin.exceptions import InvalidTypeError, UnsupportedFeatureError
from tellin.metrics import IterationStats, Metric
from tellin.protocol import CacheStats, SchedulerStats, SpecDecodingStats

if TYPE_CHECKING:
    from tellin.engine.prometheus_logger import PrometheusStatLogger

logger = logging.getLogger("tellin.engine.stats")


class StatLoggerBase(ABC):
    """Receives the statistics of one engine."""

    @abstractmethod
    def __init__(self, config: EngineConfig, engine_index: int = 0) -> None: ...

    @abstractmethod
    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: CacheStats | None = None,
        engine_idx: int = 0,
    ) -> None:
        """Take the statistics of one step."""

    @abstractmethod
    def log_engine_initialized(self) -> None:
        """The engine is ready; the configuration has its final values."""

    def log(self) -> None:  # noqa: B027  (optional)
        """Report what was recorded, if this logger reports periodically."""

    def record_sleep_state(self, is_sleeping: bool, level: int) -> None:  # noqa: B027  (optional)
        """The engine fell asleep (level 1 or 2), or woke up (level 0)."""


StatLoggerFactory = Callable[[EngineConfig, int], StatLoggerBase]

PLUGIN_GROUP = "tellin.stat_loggers"
"""Entry points of installed packages whose loggers every `AsyncLLM` gets."""


def load_plugins() -> list[StatLoggerFactory]:
    """Logger classes of installed packages.

    Raises:
        InvalidTypeError: an entry point is no `StatLoggerBase` subclass.
    """
    import importlib.metadata  # not at the top: it is slow to import

    result: list[StatLoggerFactory] = []
    for plugin in importlib.metadata.entry_points(group=PLUGIN_GROUP):
        factory = plugin.load()
        if not (isinstance(factory, type) and issubclass(factory, StatLoggerBase)):
            raise InvalidTypeError(
                f"entry point {plugin.name!r} of {PLUGIN_GROUP!r} is {factory!r}, but must be a "
                "subclass of tellin.engine.stat_loggers.StatLoggerBase",
                parameter="stat_loggers",
                value=factory,
            )
        result.append(factory)
    return result


class LoggingStatLogger(StatLoggerBase):
    """One line of text per interval."""

    def __init__(self, config: EngineConfig, engine_index: int = 0) -> None:
        self._config = config
        self._engine_index = engine_index
        self._scheduler = SchedulerStats()
        self._prefix_cache = CachingMetrics()
        self._mm_cache = CachingMetrics()
        self._has_mm_stats = False
        self._was_idle = True
        self._reset(time.monotonic())

    def _reset(self, now: float) -> None:
        self._last_log_time = now
        self._num_prompt_tokens = 0
        self._num_generation_tokens = 0
        self._num_preempted = 0
        self._num_corrupted = 0
        self._speculation: SpecDecodingStats | None = None

    def log_engine_initialized(self) -> None:
        cache = self._config.cache_config
        logger.info(
            "Engine %03d: model %s, context %d tokens, KV cache %s blocks of %d tokens",
            self._engine_index,
            self._config.model_config.model,
            self._config.model_config.max_model_len,
            cache.num_kv_blocks,
            cache.block_size,
        )

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: CacheStats | None = None,
        engine_idx: int = 0,
    ) -> None:
        if iteration_stats is not None:
            self._num_prompt_tokens += iteration_stats.prompt_token_stats.computed
            self._num_generation_tokens += iteration_stats.num_generation_tokens
            self._num_preempted += iteration_stats.num_preempted_reqs
            self._num_corrupted += iteration_stats.num_corrupted_reqs
        if scheduler_stats is not None:
            self._scheduler = scheduler_stats
            if scheduler_stats.prefix_cache_stats is not None:
                self._prefix_cache.observe(scheduler_stats.prefix_cache_stats)
            if scheduler_stats.spec_decoding_stats is not None:
                self._add_speculation(scheduler_stats.spec_decoding_stats)
        if mm_cache_stats is not None:
            self._has_mm_stats = True
            self._mm_cache.observe(mm_cache_stats)

    def _add_speculation(self, stats: SpecDecodingStats) -> None:
        if self._speculation is None:
            self._speculation = SpecDecodingStats(stats.num_spec_tokens)
        self._speculation.num_drafts += stats.num_drafts
        self._speculation.num_draft_tokens += stats.num_draft_tokens
        self._speculation.num_accepted_tokens += stats.num_accepted_tokens

    def log(self) -> None:
        now = time.monotonic()
        seconds = max(now - self._last_log_time, 1e-9)
        prompt_rate = self._num_prompt_tokens / seconds
        generation_rate = self._num_generation_tokens / seconds
        stats = self._scheduler
        parts = [
            f"prompt {prompt_rate:.1f} tokens/s",
            f"generation {generation_rate:.1f} tokens/s",
            f"running {stats.num_running_reqs}",
            f"waiting {stats.num_waiting_reqs + stats.num_skipped_waiting_reqs}",
        ]
        if stats.num_skipped_waiting_reqs:
            parts.append(f"deferred {stats.num_skipped_waiting_reqs}")
        parts.append(f"KV cache {stats.kv_cache_usage * 100:.1f} %")
        parts.append(f"prefix cache hits {self._prefix_cache.hit_rate * 100:.1f} %")
        if self._has_mm_stats:
            parts.append(f"multimodal cache hits {self._mm_cache.hit_rate * 100:.1f} %")
        if self._num_preempted:
            parts.append(f"preemptions {self._num_preempted}")
        if self._num_corrupted:
            parts.append(f"corrupted {self._num_corrupted}")
        if self._speculation is not None and self._speculation.num_draft_tokens:
            accepted = self._speculation.num_accepted_tokens
            drafted = self._speculation.num_draft_tokens
            parts.append(f"drafts accepted {accepted}/{drafted} ({100 * accepted / drafted:.1f} %)")
        is_idle = not (self._num_prompt_tokens or self._num_generation_tokens)
        level = logging.DEBUG if is_idle and self._was_idle else logging.INFO
        logger.log(level, "Engine %03d: %s", self._engine_index, ", ".join(parts))
        self._was_idle = is_idle
        self._reset(now)


class StatLoggerManager:
    """All loggers of all engines of one frontend; calls fan out in order.

    Order: custom loggers, the text logger (where INFO is enabled and this is the only frontend),
    the Prometheus logger.
    """

    def __init__(
        self,
        config: EngineConfig,
        engine_idxs: Sequence[int] = (0,),
        custom_stat_loggers: Sequence[StatLoggerFactory] | None = None,
        enable_default_loggers: bool = True,
        client_count: int = 1,
    ) -> None:
        from tellin.engine.prometheus_logger import PrometheusStatLogger

        factories: list[StatLoggerFactory] = list(custom_stat_loggers or ())
        if enable_default_loggers and logger.isEnabledFor(logging.INFO):
            if client_count > 1:
                logger.warning(
                    "statistics are not logged as text: each of the %d frontends sees a part only",
                    client_count,
                )
            else:
                factories.append(LoggingStatLogger)
        self._loggers: dict[int, list[StatLoggerBase]] = {}
        self._prometheus: dict[int, PrometheusStatLogger] = {}
        for index in engine_idxs:
            loggers = [factory(config, index) for factory in factories]
            own = next((item for item in loggers if isinstance(item, PrometheusStatLogger)), None)
            if own is None:
                own = PrometheusStatLogger(config, index)
                loggers.append(own)
            self._loggers[index] = loggers
            self._prometheus[index] = own

    def add(self, stat_logger: StatLoggerBase, engine_idx: int = 0) -> None:
        """One more logger, from now on. Raises KeyError for an engine that is not here."""
        self._loggers[engine_idx].append(stat_logger)

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: CacheStats | None = None,
        engine_idx: int = 0,
    ) -> None:
        """Hand the statistics of a step of engine ``engine_idx`` to its loggers."""
        loggers = self._loggers.get(engine_idx)
        if loggers is None:
            logger.warning("statistics of unknown engine %d were dropped", engine_idx)
            return
        for item in loggers:
            item.record(scheduler_stats, iteration_stats, mm_cache_stats, engine_idx)

    def log(self) -> None:
        for item in self._all():
            item.log()

    def log_engine_initialized(self) -> None:
        for item in self._all():
            item.log_engine_initialized()

    def record_sleep_state(self, is_sleeping: bool, level: int = 0) -> None:
        for item in self._all():
            item.record_sleep_state(is_sleeping, level)

    def get_metrics(self) -> list[Metric]:
        """Snapshot of all metrics of all engines."""
        return [metric for item in self._prometheus.values() for metric in item.snapshot()]

    def prometheus_text(self) -> str:
        """All metrics in Prometheus' text format.

        Raises:
            UnsupportedFeatureError: there are several engines; read them one by one.
        """
        if len(self._prometheus) != 1:
            raise UnsupportedFeatureError(
                f"one text for {len(self._prometheus)} engines is not supported; "
                "read each engine's own endpoint"
            )
        return next(iter(self._prometheus.values())).store.exposition()

    def _all(self) -> list[StatLoggerBase]:
        return [item for loggers in self._loggers.values() for item in loggers]
