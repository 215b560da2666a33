"""The metrics that an engine offers: names, labels, buckets, and what each observes.

Names are vLLM's with another prefix (``ObservabilityConfig.metrics_prefix``: dashboards made for
vLLM work with ``vllm:``). Values live in a `MetricStore` of this logger's own.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

from tellin.config import EngineConfig
from tellin.engine.metric_store import Family, MetricStore
from tellin.engine.stat_loggers import StatLoggerBase
from tellin.metrics import IterationStats, Metric, Vector
from tellin.protocol import CacheStats, FinishReason, SchedulerStats, SpecDecodingStats

PROMPT_TOKEN_SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")
SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")

N_BOUNDS = (1, 2, 5, 10, 20)
ITERATION_TOKENS_BOUNDS = (1, *(2**power for power in range(3, 15)))
TTFT_BOUNDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
TOKEN_LATENCY_BOUNDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80),
)
REQUEST_LATENCY_BOUNDS = (
    *(0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60),
    *(120, 240, 480, 960, 1920, 7680),
)
BLOCK_RESIDENCY_BOUNDS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800),
)


def one_two_five_bounds(limit: int) -> list[int]:
    """1, 2, 5, 10, 20, 50, ... up to ``limit``."""
    bounds: list[int] = []
    power = 1
    while power <= limit:
        bounds.extend(power * step for step in (1, 2, 5) if power * step <= limit)
        power *= 10
    return bounds


class PrometheusStatLogger(StatLoggerBase):
    """Keeps totals of everything that happened."""

    def __init__(self, config: EngineConfig, engine_index: int = 0) -> None:
        self._config = config
        self.store = MetricStore(config.observability_config.metrics_prefix)
        model = config.model_config
        self._engine = (model.served_model_name or model.model, str(engine_index))
        self._make_gauges()
        self._make_counters()
        self._make_histograms(model.max_model_len)
        self._set_initial_values()

    # ------------------------------------------------------------------ families

    def _gauge(self, name: str, documentation: str, *labels: str) -> Family:
        return self.store.gauge(name, documentation, ("model_name", "engine", *labels))

    def _counter(self, name: str, documentation: str, *labels: str) -> Family:
        return self.store.counter(name, documentation, ("model_name", "engine", *labels))

    def _histogram(self, name: str, documentation: str, bounds: Sequence[float]) -> Family:
        return self.store.histogram(name, documentation, ("model_name", "engine"), bounds)

    def _make_gauges(self) -> None:
        self._running = self._gauge("num_requests_running", "Requests being computed.")
        self._waiting = self._gauge("num_requests_waiting", "Requests waiting to be computed.")
        self._waiting_by_reason = self._gauge(
            "num_requests_waiting_by_reason",
            "Requests waiting, by reason: capacity, or deferred (not ready to run).",
            "reason",
        )
        self._sleep_state = self._gauge(
            "engine_sleep_state", "1 for the state that the engine is in.", "sleep_state"
        )
        self._kv_usage = self._gauge("kv_cache_usage_perc", "KV cache in use; 1 = all of it.")
        cache_fields = [field.name for field in dataclasses.fields(self._config.cache_config)]
        self._cache_info = self.store.gauge(
            "cache_config_info", "Configuration of the KV cache.", [*cache_fields, "engine"]
        )
        self._lora_info: Family | None = None
        if self._config.lora_config is not None:
            self._lora_info = self.store.gauge(
                "lora_requests_info",
                "Adapters with waiting and with running requests; the value is the time.",
                ("max_lora", "waiting_lora_adapters", "running_lora_adapters"),
            )

    def _make_counters(self) -> None:
        counter = self._counter
        self._prefix_queries = counter("prefix_cache_queries", "Prompt tokens looked up.")
        self._prefix_hits = counter("prefix_cache_hits", "Prompt tokens found in the cache.")
        self._mm_queries = counter("mm_cache_queries", "Multimodal items looked up.")
        self._mm_hits = counter("mm_cache_hits", "Multimodal items found in the cache.")
        self._preemptions = counter("num_preemptions", "Preemptions.")
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens.")
        self._prompt_tokens_by_source = counter(
            "prompt_tokens_by_source", "Prompt tokens by where they came from.", "source"
        )
        self._prompt_tokens_cached = counter("prompt_tokens_cached", "Prompt tokens not computed.")
        self._generation_tokens = counter("generation_tokens", "Generated tokens.")
        self._request_success = counter(
            "request_success", "Ended sequences by reason.", "finished_reason"
        )
        self._corrupted = counter("corrupted_requests", "Sequences that saw NaN in their logits.")
        if self._config.speculative_config is not None:
            self._spec_drafts = counter("spec_decode_num_drafts", "Drafts.")
            self._spec_draft_tokens = counter("spec_decode_num_draft_tokens", "Draft tokens.")
            self._spec_accepted = counter(
                "spec_decode_num_accepted_tokens", "Accepted draft tokens."
            )
            self._spec_per_position = counter(
                "spec_decode_num_accepted_tokens_per_pos",
                "Accepted draft tokens by position in the draft.",
                "position",
            )

    def _make_histograms(self, max_model_len: int) -> None:
        histogram = self._histogram
        lengths = one_two_five_bounds(max_model_len)
        self._h_prompt = histogram("request_prompt_tokens", "Prompt tokens per sequence.", lengths)
        self._h_generation = histogram(
            "request_generation_tokens", "Generated tokens per sequence.", lengths
        )
        self._h_max_generation = histogram(
            "request_max_num_generation_tokens",
            "Tokens of the longest completion per request.",
            lengths,
        )
        self._h_max_tokens = histogram("request_params_max_tokens", "max_tokens.", lengths)
        self._h_prefill_computed = histogram(
            "request_prefill_kv_computed_tokens", "Prompt tokens computed per sequence.", lengths
        )
        self._h_n = histogram("request_params_n", "n.", N_BOUNDS)
        self._h_iteration = histogram(
            "iteration_tokens_total", "Tokens computed per step.", ITERATION_TOKENS_BOUNDS
        )
        self._h_ttft = histogram(
            "time_to_first_token_seconds", "Arrival to first token.", TTFT_BOUNDS
        )
        self._h_inter_token = histogram(
            "inter_token_latency_seconds", "Between outputs.", TOKEN_LATENCY_BOUNDS
        )
        self._h_per_token = histogram(
            "request_time_per_output_token_seconds",
            "Mean time per token after the first.",
            TOKEN_LATENCY_BOUNDS,
        )
        self._h_e2e = histogram(
            "e2e_request_latency_seconds", "Arrival to end.", REQUEST_LATENCY_BOUNDS
        )
        self._h_queue = histogram(
            "request_queue_time_seconds", "Time waiting.", REQUEST_LATENCY_BOUNDS
        )
        self._h_inference = histogram(
            "request_inference_time_seconds", "Scheduled to end.", REQUEST_LATENCY_BOUNDS
        )
        self._h_prefill = histogram(
            "request_prefill_time_seconds", "Scheduled to first token.", REQUEST_LATENCY_BOUNDS
        )
        self._h_decode = histogram(
            "request_decode_time_seconds", "First token to end.", REQUEST_LATENCY_BOUNDS
        )
        block = BLOCK_RESIDENCY_BOUNDS
        self._h_block_lifetime = histogram("kv_block_lifetime_seconds", "Block residency.", block)
        self._h_block_idle = histogram(
            "kv_block_idle_before_evict_seconds", "Block unused before eviction.", block
        )
        self._h_block_reuse = histogram("kv_block_reuse_gap_seconds", "Between two uses.", block)

    def _set_initial_values(self) -> None:
        """Series that exist from the start read 0, so that rates can be formed."""
        engine = self._engine
        with self.store.lock:
            for gauge in (self._running, self._waiting, self._kv_usage):
                gauge.set(engine, 0)
            for counter in (
                *(self._prefix_queries, self._prefix_hits, self._mm_queries, self._mm_hits),
                *(self._preemptions, self._prompt_tokens, self._prompt_tokens_cached),
                *(self._generation_tokens, self._corrupted),
            ):
                counter.inc(engine, 0)
            speculation = self._config.speculative_config
            if speculation is not None:
                for counter in (self._spec_drafts, self._spec_draft_tokens, self._spec_accepted):
                    counter.inc(engine, 0)
                for position in range(speculation.num_speculative_tokens):
                    self._spec_per_position.inc((*engine, str(position)), 0)
            for reason in ("capacity", "deferred"):
                self._waiting_by_reason.set((*engine, reason), 0)
            for source in PROMPT_TOKEN_SOURCES:
                self._prompt_tokens_by_source.inc((*engine, source), 0)
            for finish_reason in FinishReason:
                self._request_success.inc((*engine, str(finish_reason)), 0)
            for family in self.store.families:
                if family.kind == "histogram":
                    family.observe(engine, [])
        self.record_sleep_state(False, 0)

    # ------------------------------------------------------------------ recording

    def log_engine_initialized(self) -> None:
        cache_config = self._config.cache_config
        values = [str(getattr(cache_config, name)) for name in self._cache_info.label_names[:-1]]
        with self.store.lock:
            self._cache_info.set((*values, self._engine[1]), 1)

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: CacheStats | None = None,
        engine_idx: int = 0,
    ) -> None:
        with self.store.lock:
            if scheduler_stats is not None:
                self._record_scheduler(scheduler_stats)
            if mm_cache_stats is not None:
                self._mm_queries.inc(self._engine, mm_cache_stats.queries)
                self._mm_hits.inc(self._engine, mm_cache_stats.hits)
            if iteration_stats is not None:
                self._record_iteration(iteration_stats)

    def _record_scheduler(self, stats: SchedulerStats) -> None:
        engine = self._engine
        self._running.set(engine, stats.num_running_reqs)
        self._waiting.set(engine, stats.num_waiting_reqs + stats.num_skipped_waiting_reqs)
        self._waiting_by_reason.set((*engine, "capacity"), stats.num_waiting_reqs)
        self._waiting_by_reason.set((*engine, "deferred"), stats.num_skipped_waiting_reqs)
        self._kv_usage.set(engine, stats.kv_cache_usage)
        if stats.prefix_cache_stats is not None:
            self._prefix_queries.inc(engine, stats.prefix_cache_stats.queries)
            self._prefix_hits.inc(engine, stats.prefix_cache_stats.hits)
        if stats.kv_cache_eviction_events:
            events = stats.kv_cache_eviction_events
            self._h_block_lifetime.observe(engine, [event.lifetime_s for event in events])
            self._h_block_idle.observe(engine, [event.idle_s for event in events])
            self._h_block_reuse.observe(
                engine, [gap for event in events for gap in event.reuse_gaps_s]
            )
        if stats.spec_decoding_stats is not None and self._config.speculative_config is not None:
            self._record_speculation(stats.spec_decoding_stats)
        if self._lora_info is not None:
            lora_config = self._config.lora_config
            self._lora_info.values.clear()
            labels = (
                str(lora_config.max_loras if lora_config else 0),
                ",".join(stats.waiting_lora_adapters),
                ",".join(stats.running_lora_adapters),
            )
            self._lora_info.set(labels, time.time())

    def _record_speculation(self, stats: SpecDecodingStats) -> None:
        self._spec_drafts.inc(self._engine, stats.num_drafts)
        self._spec_draft_tokens.inc(self._engine, stats.num_draft_tokens)
        self._spec_accepted.inc(self._engine, stats.num_accepted_tokens)
        for position, count in enumerate(stats.num_accepted_tokens_per_pos):
            self._spec_per_position.inc((*self._engine, str(position)), count)

    def _record_iteration(self, stats: IterationStats) -> None:
        engine = self._engine
        prompt = stats.prompt_token_stats
        self._preemptions.inc(engine, stats.num_preempted_reqs)
        self._prompt_tokens.inc(engine, prompt.total)
        self._prompt_tokens_cached.inc(engine, prompt.cached_tokens)
        for source in PROMPT_TOKEN_SOURCES:
            self._prompt_tokens_by_source.inc((*engine, source), prompt.by_source(source))
        self._generation_tokens.inc(engine, stats.num_generation_tokens)
        self._corrupted.inc(engine, stats.num_corrupted_reqs)
        if prompt.computed or stats.num_generation_tokens:
            self._h_iteration.observe(engine, [prompt.computed + stats.num_generation_tokens])
        self._h_max_generation.observe(engine, stats.max_num_generation_tokens_iter)
        self._h_n.observe(engine, stats.n_params_iter)
        self._h_ttft.observe(engine, stats.time_to_first_tokens_iter)
        self._h_inter_token.observe(engine, stats.inter_token_latencies_iter)
        for request in stats.finished_requests:
            self._request_success.inc((*engine, str(request.finish_reason)))
            self._h_prompt.observe(engine, [request.num_prompt_tokens])
            self._h_generation.observe(engine, [request.num_generation_tokens])
            if request.max_tokens_param is not None:
                self._h_max_tokens.observe(engine, [request.max_tokens_param])
            computed = request.num_prompt_tokens - request.num_cached_tokens
            self._h_prefill_computed.observe(engine, [max(0, computed)])
            self._h_per_token.observe(engine, [request.mean_time_per_output_token])
            self._h_e2e.observe(engine, [request.e2e_latency])
            self._h_queue.observe(engine, [request.queued_time])
            self._h_inference.observe(engine, [request.inference_time])
            self._h_prefill.observe(engine, [request.prefill_time])
            self._h_decode.observe(engine, [request.decode_time])

    def record_sleep_state(self, is_sleeping: bool, level: int) -> None:
        state = {1: "weights_offloaded", 2: "discard_all"}.get(level) if is_sleeping else "awake"
        with self.store.lock:
            for name in SLEEP_STATES:
                self._sleep_state.set((*self._engine, name), float(name == state))

    # ------------------------------------------------------------------ reading

    def snapshot(self) -> list[Metric]:
        """All metrics now. The counter per draft position is one `Vector`."""
        metrics = self.store.snapshot()
        if self._config.speculative_config is None:
            return metrics
        with self.store.lock:
            counts = {int(key[-1]): value for key, value in self._spec_per_position.values.items()}
        name = self._spec_per_position.name
        dense = [int(counts.get(i, 0)) for i in range(max(counts, default=-1) + 1)]
        labels = dict(zip(("model_name", "engine"), self._engine, strict=True))
        return [metric for metric in metrics if metric.name != name] + [Vector(name, labels, dense)]
