"""Rules by which outputs of the core become statistics.

Owns no totals: it fills the `IterationStats` of one batch and the `RequestStateStats` of a request.
Every token and every ended sequence is counted once, whoever ended it. Intervals are differences of
timestamps of the same clock, and 0 where a sequence never came so far.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from tellin.metrics import FinishedRequestStats, IterationStats, RequestStateStats
from tellin.protocol import (
    CacheStats,
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    FinishReason,
    SchedulerStats,
)


def update_from_output(
    iteration: IterationStats,
    output: EngineCoreOutput,
    num_new_tokens: int,
    core_timestamp: float,
    stats: RequestStateStats,
) -> None:
    """Count one output of a live request.

    Args:
        num_new_tokens: tokens kept (a stop string may have cut some of the output's).
        core_timestamp: of the batch, core clock.
    """
    iteration.num_generation_tokens += num_new_tokens
    if output.prefill_stats is not None:
        iteration.prompt_token_stats.add(output.prefill_stats)
    if output.num_nans_in_logits > 0:
        stats.is_corrupted = True
    if num_new_tokens == 0:
        return
    if stats.num_generation_tokens == 0:
        stats.first_token_latency = max(0.0, iteration.iteration_timestamp - stats.arrival_time)
        stats.first_token_ts = core_timestamp
        iteration.time_to_first_tokens_iter.append(stats.first_token_latency)
    else:
        iteration.inter_token_latencies_iter.append(max(0.0, core_timestamp - stats.last_token_ts))
    stats.num_generation_tokens += num_new_tokens
    stats.last_token_ts = core_timestamp


def update_from_events(
    iteration: IterationStats, events: Sequence[EngineCoreEvent], stats: RequestStateStats
) -> None:
    """Take over timestamps of the core's events; preemptions are counted."""
    for event in events:
        if event.type == EngineCoreEventType.QUEUED:
            stats.queued_ts = event.timestamp
        elif event.type == EngineCoreEventType.SCHEDULED:
            if stats.scheduled_ts == 0.0:
                stats.scheduled_ts = event.timestamp
        elif event.type == EngineCoreEventType.PREEMPTED:
            iteration.num_preempted_reqs += 1


def update_from_finished(
    iteration: IterationStats,
    stats: RequestStateStats,
    *,
    request_id: str,
    finish_reason: FinishReason,
    num_prompt_tokens: int,
    num_cached_tokens: int,
    max_tokens_param: int | None,
) -> FinishedRequestStats:
    """Count the end of a sequence."""
    decode_time = _interval(stats.first_token_ts, stats.last_token_ts)
    finished = FinishedRequestStats(
        finish_reason=finish_reason,
        request_id=request_id,
        e2e_latency=max(0.0, iteration.iteration_timestamp - stats.arrival_time),
        num_prompt_tokens=num_prompt_tokens,
        num_generation_tokens=stats.num_generation_tokens,
        max_tokens_param=max_tokens_param,
        queued_time=_interval(stats.queued_ts, stats.scheduled_ts),
        prefill_time=_interval(stats.scheduled_ts, stats.first_token_ts),
        inference_time=_interval(stats.scheduled_ts, stats.last_token_ts),
        decode_time=decode_time,
        mean_time_per_output_token=decode_time / max(1, stats.num_generation_tokens - 1),
        is_corrupted=stats.is_corrupted,
        num_cached_tokens=num_cached_tokens,
    )
    iteration.finished_requests.append(finished)
    iteration.num_corrupted_reqs += stats.is_corrupted
    return finished


def _interval(start: float, end: float) -> float:
    """Seconds from start to end; 0 if either is unset."""
    return max(0.0, end - start) if start and end else 0.0


def idle_scheduler_stats(stats: SchedulerStats | None) -> SchedulerStats:
    """The stats of a step after which nothing is left to do.

    What ended in the frontend (a stop string, an abort) the core still counted as running, and no
    later step would say otherwise: gauges would never return to 0.
    """
    stats = stats or SchedulerStats()
    stats.num_running_reqs = stats.num_waiting_reqs = stats.num_skipped_waiting_reqs = 0
    stats.kv_cache_usage = 0.0
    return stats


class LoRARequestStates:
    """Which requests of each adapter wait and which run, from the core's events."""

    def __init__(self) -> None:
        self._waiting: dict[str, set[str]] = {}
        self._running: dict[str, set[str]] = {}

    def update(self, lora_name: str, request_id: str, events: Sequence[EngineCoreEvent]) -> None:
        """Apply a request's events, in order."""
        for event in events:
            is_running = event.type == EngineCoreEventType.SCHEDULED
            source, target = self._waiting, self._running
            if not is_running:
                source, target = target, source
            _discard(source, lora_name, request_id)
            target.setdefault(lora_name, set()).add(request_id)

    def finish(self, lora_name: str, request_id: str) -> None:
        """The request has ended."""
        _discard(self._waiting, lora_name, request_id)
        _discard(self._running, lora_name, request_id)

    def copy_to(self, scheduler_stats: SchedulerStats) -> None:
        """Set the counts per adapter in the stats of a step."""
        scheduler_stats.waiting_lora_adapters = {k: len(v) for k, v in self._waiting.items()}
        scheduler_stats.running_lora_adapters = {k: len(v) for k, v in self._running.items()}


def _discard(states: dict[str, set[str]], lora_name: str, request_id: str) -> None:
    requests = states.get(lora_name)
    if requests is not None:
        requests.discard(request_id)
        if not requests:
            del states[lora_name]


class CachingMetrics:
    """Hit rate of a cache over the most recent requests."""

    def __init__(self, max_recent_requests: int = 1000) -> None:
        self._max_recent_requests = max_recent_requests
        self._records: deque[CacheStats] = deque()
        self._requests = 0
        self._queries = 0
        self._hits = 0

    def observe(self, stats: CacheStats) -> None:
        """Add a report. One with ``reset`` forgets the past; one without requests is ignored."""
        if stats.reset:
            self._records.clear()
            self._requests = self._queries = self._hits = 0
        if stats.requests == 0:
            return
        self._records.append(stats)
        self._add(stats, 1)
        while len(self._records) > 1 and self._requests > self._max_recent_requests:
            self._add(self._records.popleft(), -1)

    def _add(self, stats: CacheStats, sign: int) -> None:
        self._requests += sign * stats.requests
        self._queries += sign * stats.queries
        self._hits += sign * stats.hits

    @property
    def hit_rate(self) -> float:
        """Hits / queries in [0, 1]; 0 without queries."""
        return self._hits / self._queries if self._queries else 0.0
