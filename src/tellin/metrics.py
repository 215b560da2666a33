"""Records of what happened: per request, per step, and snapshots of metrics.

Plain data, no rules about when to update it (see `tellin.engine.stats`). Two clocks are used and
never mixed: wall clock seconds of the frontend (``arrival_time``, latencies to the first token and
to the end) and monotonic seconds of the core (everything that ends in ``_ts``).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from tellin.exceptions import InvalidParameterError
from tellin.protocol import FinishReason, PrefillStats


class RequestStateStats(msgspec.Struct, gc=False):
    """Progress of one sequence; exposed as ``RequestOutput.metrics``. Zero timestamps are unset."""

    arrival_time: float = 0.0
    """Wall clock seconds."""
    num_generation_tokens: int = 0
    queued_ts: float = 0.0
    scheduled_ts: float = 0.0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    first_token_latency: float = 0.0
    """Seconds from arrival to the first token, wall clock."""
    is_corrupted: bool = False
    """NaN was seen in its logits."""


@dataclass(slots=True)
class FinishedRequestStats:
    """Totals of one sequence that has ended. Intervals in seconds, 0 where it never came so far."""

    finish_reason: FinishReason
    request_id: str
    e2e_latency: float
    num_prompt_tokens: int
    num_generation_tokens: int
    max_tokens_param: int | None
    queued_time: float
    prefill_time: float
    inference_time: float
    decode_time: float
    mean_time_per_output_token: float
    is_corrupted: bool
    num_cached_tokens: int


@dataclass(slots=True)
class PromptTokenStats:
    """Where prompt tokens came from. computed + local_cache_hit + external_kv_transfer = total."""

    computed: int = 0
    local_cache_hit: int = 0
    external_kv_transfer: int = 0
    cached_tokens: int = 0
    total: int = 0

    def add(self, stats: PrefillStats) -> None:
        """Count one request's prompt."""
        self.computed += stats.num_prompt_tokens - stats.num_cached_tokens
        self.local_cache_hit += stats.num_local_cached_tokens
        self.external_kv_transfer += stats.num_external_cached_tokens
        self.cached_tokens += stats.num_cached_tokens
        self.total += stats.num_prompt_tokens

    def by_source(self, source: str) -> int:
        """Tokens of one source: local_compute, local_cache_hit or external_kv_transfer.

        Raises:
            InvalidParameterError: another name.
        """
        sources = {
            "local_compute": self.computed,
            "local_cache_hit": self.local_cache_hit,
            "external_kv_transfer": self.external_kv_transfer,
        }
        if source not in sources:
            raise InvalidParameterError(
                f"unknown source of prompt tokens {source!r}; known: {', '.join(sources)}",
                parameter="source",
                value=source,
            )
        return sources[source]


@dataclass(slots=True)
class IterationStats:
    """What one processed batch of outputs brought."""

    iteration_timestamp: float
    """Wall clock seconds."""
    num_generation_tokens: int = 0
    prompt_token_stats: PromptTokenStats = field(default_factory=PromptTokenStats)
    num_preempted_reqs: int = 0
    finished_requests: list[FinishedRequestStats] = field(default_factory=list)
    max_num_generation_tokens_iter: list[int] = field(default_factory=list)
    """Per request that ended as a whole: tokens of its longest completion."""
    n_params_iter: list[int] = field(default_factory=list)
    time_to_first_tokens_iter: list[float] = field(default_factory=list)
    inter_token_latencies_iter: list[float] = field(default_factory=list)
    num_corrupted_reqs: int = 0

    @property
    def num_prompt_tokens(self) -> int:
        return self.prompt_token_stats.total


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric with one set of labels, at one moment."""

    name: str
    """Without the ``_total`` that the text exposition adds to counters."""
    labels: dict[str, str]


@dataclass(frozen=True, slots=True)
class Counter(Metric):
    value: int


@dataclass(frozen=True, slots=True)
class Gauge(Metric):
    value: float


@dataclass(frozen=True, slots=True)
class Histogram(Metric):
    """``buckets`` maps an upper bound, as text, to the number of values at or below it."""

    count: int
    sum: float
    buckets: dict[str, int]


@dataclass(frozen=True, slots=True)
class Vector(Metric):
    """A counter per position (speculative decoding)."""

    values: list[int]
