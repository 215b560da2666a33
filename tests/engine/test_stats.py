"""Statistics add up: rules STA-*, claim S44, report P56; the metric store and its text format."""

from __future__ import annotations

import logging
from typing import Any, ClassVar

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tellin.config import LoRAConfig, ObservabilityConfig, SpeculativeConfig
from tellin.engine.metric_store import MetricStore
from tellin.engine.prometheus_logger import PrometheusStatLogger, one_two_five_bounds
from tellin.engine.stat_loggers import LoggingStatLogger, StatLoggerBase, StatLoggerManager
from tellin.engine.stats import (
    CachingMetrics,
    update_from_events,
    update_from_finished,
    update_from_output,
)
from tellin.exceptions import InvalidParameterError
from tellin.metrics import (
    Counter,
    Gauge,
    Histogram,
    IterationStats,
    Metric,
    PromptTokenStats,
    RequestStateStats,
    Vector,
)
from tellin.protocol import (
    CacheStats,
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    KVCacheEvictionEvent,
    PrefillStats,
    SchedulerStats,
    SpecDecodingStats,
)
from tellin.sampling_params import RequestOutputKind, SamplingParams
from tests.engine.fakes import EngineMaker, make_config, run, text_ids

QUEUED, SCHEDULED, PREEMPTED = EngineCoreEventType


def value(metrics: list[Metric], name: str, **labels: str) -> Any:
    """Of the one series with this name and these labels (among others)."""
    found = [
        metric
        for metric in metrics
        if metric.name == "tellin:" + name and labels.items() <= metric.labels.items()
    ]
    assert len(found) == 1, (name, found)
    metric = found[0]
    return metric.count if isinstance(metric, Histogram) else metric.value  # type: ignore[attr-defined]


# ---------------------------------------------------------------------- per request


def test_sta1_first_and_later_outputs() -> None:
    """CLK-1, CLK-3."""
    stats = RequestStateStats(arrival_time=100.0)
    iteration = IterationStats(iteration_timestamp=100.5)
    first = EngineCoreOutput("x", [1], prefill_stats=PrefillStats(10, 6, 4, 3, 1))
    update_from_output(iteration, first, 1, 7.0, stats)
    update_from_output(iteration, EngineCoreOutput("x", [2, 3]), 2, 7.25, stats)
    assert iteration.num_generation_tokens == 3
    assert iteration.time_to_first_tokens_iter == [0.5]
    assert iteration.inter_token_latencies_iter == [0.25], "one value per output"
    assert stats.first_token_latency == 0.5
    assert (stats.first_token_ts, stats.last_token_ts) == (7.0, 7.25)
    assert stats.num_generation_tokens == 3
    prompt = iteration.prompt_token_stats
    assert (prompt.computed, prompt.local_cache_hit, prompt.external_kv_transfer) == (6, 3, 1)
    assert prompt.computed + prompt.local_cache_hit + prompt.external_kv_transfer == prompt.total
    assert prompt.local_cache_hit + prompt.external_kv_transfer == prompt.cached_tokens
    assert iteration.num_prompt_tokens == 10


def test_sta2_events() -> None:
    """CLK-2, CLK-3."""
    stats, iteration = RequestStateStats(), IterationStats(0.0)
    events = [
        EngineCoreEvent(QUEUED, 1.0),
        EngineCoreEvent(SCHEDULED, 2.0),
        EngineCoreEvent(PREEMPTED, 3.0),
        EngineCoreEvent(SCHEDULED, 4.0),
    ]
    update_from_events(iteration, events, stats)
    assert (stats.queued_ts, stats.scheduled_ts) == (1.0, 2.0)
    assert iteration.num_preempted_reqs == 1


def finish(stats: RequestStateStats, iteration: IterationStats, **fields: Any) -> Any:
    values = {
        "request_id": "x",
        "finish_reason": FinishReason.STOP,
        "num_prompt_tokens": 10,
        "num_cached_tokens": 4,
        "max_tokens_param": 16,
    }
    return update_from_finished(iteration, stats, **{**values, **fields})


def test_intervals_of_a_finished_request() -> None:
    stats = RequestStateStats(
        arrival_time=100.0,
        num_generation_tokens=5,
        queued_ts=1.0,
        scheduled_ts=2.0,
        first_token_ts=4.0,
        last_token_ts=8.0,
    )
    done = finish(stats, IterationStats(109.0))
    assert (done.queued_time, done.prefill_time, done.decode_time) == (1.0, 2.0, 4.0)
    assert (done.inference_time, done.e2e_latency) == (6.0, 9.0)
    assert done.mean_time_per_output_token == 1.0


def test_sta5_a_request_that_never_ran_has_no_intervals() -> None:
    """Wart: no token, no first token; unset timestamps are not subtracted."""
    stats, iteration = RequestStateStats(arrival_time=100.0, queued_ts=5.0), IterationStats(101.0)
    update_from_output(iteration, EngineCoreOutput("x", []), 0, 6.0, stats)
    done = finish(stats, iteration, finish_reason=FinishReason.ABORT)
    assert iteration.time_to_first_tokens_iter == []
    times = (done.queued_time, done.prefill_time, done.decode_time, done.inference_time)
    assert times == (0, 0, 0, 0)
    assert done.mean_time_per_output_token == 0


def test_clock_jumps_give_no_negative_values() -> None:
    """CLK-4."""
    stats, iteration = RequestStateStats(arrival_time=200.0), IterationStats(100.0)
    update_from_output(iteration, EngineCoreOutput("x", [1]), 1, 7.0, stats)
    assert iteration.time_to_first_tokens_iter == [0.0]
    assert finish(stats, iteration).e2e_latency == 0.0


def test_sta3_corrupted_requests_count_once() -> None:
    stats, iteration = RequestStateStats(), IterationStats(0.0)
    for _ in range(2):
        update_from_output(
            iteration, EngineCoreOutput("x", [1], num_nans_in_logits=3), 1, 1.0, stats
        )
    finish(stats, iteration)
    assert iteration.num_corrupted_reqs == 1


def test_prompt_sources() -> None:
    stats = PromptTokenStats(1, 2, 3, 5, 6)
    assert [
        stats.by_source(s) for s in ("local_compute", "local_cache_hit", "external_kv_transfer")
    ] == [1, 2, 3]
    with pytest.raises(InvalidParameterError, match="moon"):
        stats.by_source("moon")


def test_8_3_hit_rate_window() -> None:
    metrics = CachingMetrics(max_recent_requests=5)
    assert metrics.hit_rate == 0
    metrics.observe(CacheStats(requests=0, queries=100, hits=0))
    assert metrics.hit_rate == 0
    metrics.observe(CacheStats(requests=3, queries=10, hits=0))
    metrics.observe(CacheStats(requests=3, queries=10, hits=10))
    assert metrics.hit_rate == 1.0, "the oldest left the window"
    metrics.observe(CacheStats(requests=100, queries=10, hits=5))
    assert metrics.hit_rate == 0.5, "the newest always stays"
    metrics.observe(CacheStats(reset=True, requests=1, queries=4, hits=1))
    assert metrics.hit_rate == 0.25


# ---------------------------------------------------------------------- accounting


def test_p56_every_request_and_token_is_counted_once(make_engine: EngineMaker) -> None:
    """Normal ends, n = 3, stop strings, aborts while queued and running, an error, a refusal."""

    def script(request: EngineCoreRequest) -> list[Any]:
        name = str(request.external_req_id)
        if name == "fails":
            return [{"new_token_ids": [], "finish_reason": FinishReason.ERROR, "error": "bad"}]
        if name == "stops":
            return [text_ids("aSTOPxyz"), text_ids("b")]
        return [text_ids(char) for char in "abcd"]

    engine = make_engine(script, log_stats=True)
    final = RequestOutputKind.FINAL_ONLY
    engine.add_request("queued", "abc", SamplingParams())
    engine.abort_request("queued")
    engine.add_request("normal", "abc", SamplingParams())
    engine.add_request("three", "abc", SamplingParams(n=3, output_kind=final))
    engine.add_request("stops", "abc", SamplingParams(stop="STOP"))
    engine.add_request("running", "abc", SamplingParams())
    engine.add_request("fails", "abc", SamplingParams())
    with pytest.raises(ValueError):
        engine.add_request("refused", "", SamplingParams())
    engine.step()
    engine.abort_request("running")
    outputs = run(engine)
    metrics = engine.get_metrics()
    reasons = {
        str(r): value(metrics, "request_success", finished_reason=str(r)) for r in FinishReason
    }
    assert reasons == {"stop": 1, "length": 4, "abort": 2, "error": 1, "repetition": 0}
    num_prompt = len(text_ids("abc"))
    num_stop = len(text_ids("aSTOP"))
    assert value(metrics, "generation_tokens") == 4 * 4 + num_stop + 1
    assert value(metrics, "prompt_tokens") == 7 * num_prompt, "of those that ran"
    assert value(metrics, "prompt_tokens_by_source", source="local_compute") == 7 * num_prompt
    assert value(metrics, "time_to_first_token_seconds") == 6, "those with a token"
    assert value(metrics, "e2e_request_latency_seconds") == 8
    assert value(metrics, "request_prompt_tokens") == 8
    assert value(metrics, "request_params_n") == 6, "n = 3 counts once"
    assert value(metrics, "num_requests_running") == 0
    histogram = next(m for m in metrics if m.name == "tellin:request_generation_tokens")
    assert isinstance(histogram, Histogram)
    assert histogram.sum == value(metrics, "generation_tokens")
    for metric in metrics:
        number = metric.sum if isinstance(metric, Histogram) else metric.value  # type: ignore[attr-defined]
        assert number >= 0
    assert outputs[-1].metrics is not None


def test_request_metrics_are_snapshots(make_engine: EngineMaker) -> None:
    engine = make_engine([text_ids("a"), text_ids("b")], log_stats=True)
    engine.add_request("x", "abc", SamplingParams())
    first, second = run(engine)
    assert first.metrics.num_generation_tokens == 1
    assert second.metrics.num_generation_tokens == 2
    assert first.metrics.scheduled_ts > first.metrics.queued_ts > 0


# ---------------------------------------------------------------------- loggers


class Recorder(StatLoggerBase):
    made: ClassVar[list[Recorder]] = []

    def __init__(self, config: Any, engine_index: int = 0) -> None:
        self.calls: list[str] = []
        Recorder.made.append(self)

    def record(self, *args: Any, **kwargs: Any) -> None:
        self.calls.append("record")

    def log_engine_initialized(self) -> None:
        self.calls.append("init")

    def log(self) -> None:
        self.calls.append("log")

    def record_sleep_state(self, is_sleeping: bool, level: int) -> None:
        self.calls.append(f"sleep {is_sleeping} {level}")


def test_sta15_16_17_manager_fans_out(caplog: pytest.LogCaptureFixture) -> None:
    Recorder.made.clear()
    manager = StatLoggerManager(make_config(), (0, 3), [Recorder])
    manager.log_engine_initialized()
    manager.record(SchedulerStats(), IterationStats(0.0), engine_idx=3)
    manager.record_sleep_state(True, 1)
    manager.log()
    first, second = Recorder.made
    assert first.calls == ["init", "sleep True 1", "log"]
    assert second.calls == ["init", "record", "sleep True 1", "log"]
    caplog.set_level(logging.WARNING, "tellin")
    manager.record(None, None, engine_idx=9)
    assert "engine 9" in caplog.text


def test_a_custom_prometheus_logger_replaces_the_default() -> None:
    class Own(PrometheusStatLogger): ...

    manager = StatLoggerManager(make_config(), custom_stat_loggers=[Own])
    assert isinstance(manager._prometheus[0], Own)
    assert sum(isinstance(item, PrometheusStatLogger) for item in manager._all()) == 1


def test_text_logger(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Computed prompt tokens, rates since the last line, preemptions shown; idle at debug."""
    now = 10.0
    monkeypatch.setattr("tellin.engine.stat_loggers.time.monotonic", lambda: now)
    logger = LoggingStatLogger(make_config(), 0)
    caplog.set_level(logging.DEBUG, "tellin")
    logger.log_engine_initialized()
    logger.log()
    assert caplog.records[-1].levelno == logging.DEBUG
    iteration = IterationStats(0.0, num_generation_tokens=20, num_preempted_reqs=2)
    iteration.prompt_token_stats.add(PrefillStats(100, 60, 40, 40))
    scheduler = SchedulerStats(
        num_running_reqs=3,
        num_waiting_reqs=1,
        num_skipped_waiting_reqs=1,
        kv_cache_usage=0.5,
        prefix_cache_stats=CacheStats(requests=1, queries=100, hits=40),
        spec_decoding_stats=SpecDecodingStats(2, 5, 10, 5),
    )
    logger.record(scheduler, iteration)
    now = 20.0
    logger.log()
    line = caplog.records[-1].getMessage()
    assert caplog.records[-1].levelno == logging.INFO
    for part in (
        "Engine 000:",
        "prompt 6.0 tokens/s",
        "generation 2.0 tokens/s",
        "running 3",
        "waiting 2",
        "deferred 1",
        "KV cache 50.0 %",
        "prefix cache hits 40.0 %",
        "preemptions 2",
        "drafts accepted 5/10",
    ):
        assert part in line
    now = 30.0
    logger.log()
    assert caplog.records[-1].levelno == logging.INFO, "the line that says the rates fell to 0"
    assert "preemptions" not in caplog.records[-1].getMessage()
    logger.log()
    assert caplog.records[-1].levelno == logging.DEBUG


def test_silent_by_default(make_engine: EngineMaker) -> None:
    """No text logger unless somebody listens at INFO."""
    engine = make_engine(log_stats=True)
    assert engine.logger_manager is not None
    kinds = [type(item).__name__ for item in engine.logger_manager._all()]
    assert kinds == ["PrometheusStatLogger"]


# ---------------------------------------------------------------------- metrics


def full_logger() -> PrometheusStatLogger:
    config = make_config(
        speculative_config=SpeculativeConfig("ngram", 3),
        lora_config=LoRAConfig(),
        served_model_name='a"b\\c',
    )
    logger = PrometheusStatLogger(config, 1)
    logger.log_engine_initialized()
    stats = SchedulerStats(
        num_running_reqs=2,
        num_waiting_reqs=3,
        num_skipped_waiting_reqs=4,
        kv_cache_usage=0.25,
        prefix_cache_stats=CacheStats(requests=1, queries=8, hits=4),
        kv_cache_eviction_events=[KVCacheEvictionEvent(1.0, 0.5, [0.1, 0.2])],
        spec_decoding_stats=SpecDecodingStats(3, 2, 6, 3, [2, 1, 0]),
        waiting_lora_adapters={"cats": 1},
    )
    logger.record(
        stats, IterationStats(0.0, num_generation_tokens=5), CacheStats(queries=2, hits=1)
    )
    return logger


def test_8_5_names_and_values() -> None:
    metrics = full_logger().snapshot()
    assert value(metrics, "num_requests_waiting") == 7
    assert value(metrics, "num_requests_waiting_by_reason", reason="capacity") == 3
    assert value(metrics, "num_requests_waiting_by_reason", reason="deferred") == 4
    assert value(metrics, "kv_cache_usage_perc") == 0.25
    assert value(metrics, "prefix_cache_hits") == 4
    assert value(metrics, "mm_cache_queries") == 2
    assert value(metrics, "spec_decode_num_accepted_tokens") == 3
    assert value(metrics, "cache_config_info", block_size="16", engine="1") == 1
    assert value(metrics, "kv_block_reuse_gap_seconds") == 2
    (vector,) = [metric for metric in metrics if isinstance(metric, Vector)]
    assert vector.name == "tellin:spec_decode_num_accepted_tokens_per_pos"
    assert vector.values == [2, 1, 0]
    (lora,) = [metric for metric in metrics if metric.name == "tellin:lora_requests_info"]
    assert lora.labels["waiting_lora_adapters"] == "cats"
    assert all(
        metric.labels.get("model_name") == 'a"b\\c'
        for metric in metrics
        if not metric.name.endswith("_info")
    )


def test_8_6_counters_of_speculation_are_there_before_the_first_draft() -> None:
    """What a dashboard asks for exists at 0; the vector has one place for each position."""
    logger = PrometheusStatLogger(make_config(speculative_config=SpeculativeConfig("ngram", 3)), 0)
    metrics = logger.snapshot()
    for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
        assert value(metrics, f"spec_decode_{name}") == 0
    (vector,) = [metric for metric in metrics if isinstance(metric, Vector)]
    assert vector.values == [0, 0, 0]


def test_s44_sta25_sleep_states() -> None:
    logger = full_logger()
    states = []
    for state in ((True, 1), (True, 2), (False, 0)):
        logger.record_sleep_state(*state)
        metrics = logger.snapshot()
        names = ("awake", "weights_offloaded", "discard_all")
        states.append([value(metrics, "engine_sleep_state", sleep_state=name) for name in names])
    assert states == [[0, 1, 0], [0, 0, 1], [1, 0, 0]]


def test_exposition_is_what_prometheus_reads() -> None:
    """The text, and the same through a prometheus_client registry, parse to equal samples."""
    logger = full_logger()
    registry = CollectorRegistry()
    registry.register(logger.store.prometheus_collector())
    parsed = []
    for text in (logger.store.exposition(), generate_latest(registry).decode()):
        samples = {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
        parsed.append(samples)
    assert parsed[0] == parsed[1]
    assert len(parsed[0]) > 200
    names = {name for name, _ in parsed[0]}
    assert "tellin:generation_tokens_total" in names
    assert "tellin:iteration_tokens_total_bucket" in names
    assert not any(name.endswith("_total_total") for name in names)


def test_prefix_is_a_switch_and_engines_do_not_collide() -> None:
    config = make_config(observability_config=ObservabilityConfig(metrics_prefix="vllm:"))
    first, second = PrometheusStatLogger(config), PrometheusStatLogger(config)
    first.record(None, IterationStats(0.0, num_generation_tokens=3))
    name = "vllm:generation_tokens"
    assert [m.value for m in first.snapshot() if m.name == name and isinstance(m, Counter)] == [3]
    assert [m.value for m in second.snapshot() if m.name == name and isinstance(m, Counter)] == [0]


def test_histogram_buckets_are_cumulative() -> None:
    store = MetricStore("t:")
    family = store.histogram("h", "help", ("a",), [1, 2.5])
    family.observe(("x",), [0.5, 1, 1.5, 99])
    store.gauge("g", "help", ()).set((), 1.5)
    histogram, gauge = sorted(store.snapshot(), key=lambda m: m.name, reverse=True)
    assert isinstance(histogram, Histogram)
    assert histogram.buckets == {"1.0": 2, "2.5": 3, "+Inf": 4}
    assert (histogram.count, histogram.sum) == (4, 102.0)
    assert gauge == Gauge("t:g", {}, 1.5)


def test_length_buckets() -> None:
    assert one_two_five_bounds(64) == [1, 2, 5, 10, 20, 50]
    assert one_two_five_bounds(100) == [1, 2, 5, 10, 20, 50, 100]
