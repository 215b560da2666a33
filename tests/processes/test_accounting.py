"""P56: every request and token is counted exactly once, wherever the core runs.

Completed, aborted, refused, and failed in the core: with and without tokens before the failure.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest

from tellin.engine.async_llm import AsyncLLM
from tellin.engine.llm_engine import LLMEngine
from tellin.exceptions import RequestError, RequestFailedError
from tellin.metrics import Counter, Gauge, Histogram, Metric
from tellin.outputs import RequestOutput
from tellin.sampling_params import RequestOutputKind, SamplingParams
from tests.processes.conftest import MakeArgs, wait_until_async

Run = Callable[[Any], tuple[list[RequestOutput], list[Metric]]]
DELTA = RequestOutputKind.DELTA


def params(max_tokens: int, **fields: Any) -> SamplingParams:
    given = {"temperature": 1.0, "seed": 5, "ignore_eos": True, "output_kind": DELTA} | fields
    return SamplingParams(max_tokens=max_tokens, **given)


WORK = {
    "one": params(8),
    "two": params(3),
    "three": params(6, n=3),
    "running": params(16_000),
    "queued": params(16_000),
}
"""With room for 5 sequences, ``queued`` comes last and waits; it and ``running`` are aborted."""

TOO_LONG = {"prompt_token_ids": [3] * 30_000}
"""Refused by the core, if the shell lets it pass."""


def fail_at_the_third(token_ids: list[int], logits: Any) -> Any:
    if len(token_ids) == 2:
        raise RuntimeError("broken processor")
    return logits


@contextmanager
def lenient_shell() -> Iterator[None]:
    """Checks of prompts are left to the core."""
    with (
        patch("tellin.engine.input_processor.check_prompt"),
        patch("tellin.engine.input_processor.check_room"),
    ):
        yield


def run_sync(args: Any, multiprocess: bool) -> tuple[list[RequestOutput], list[Metric]]:
    outputs: list[Any] = []
    with LLMEngine.from_engine_args(args, enable_multiprocessing=multiprocess) as engine:
        engine.add_request("running", "hello running", WORK["running"])
        while not outputs:
            outputs += engine.step(timeout=20)
        for name in ("one", "three", "two", "queued"):
            engine.add_request(name, f"hello {name}", WORK[name])
        if multiprocess:
            with lenient_shell():
                engine.add_request("failed", TOO_LONG, params(3))
        else:
            failing = params(8, logits_processors=[fail_at_the_third])
            engine.add_request("failed", "hello failed", failing)
        with pytest.raises(RequestError):
            engine.add_request("refused", "", params(3))
        outputs += engine.abort_request("queued")
        while engine.get_num_unfinished_requests() > 1:
            outputs += engine.step(timeout=20)
        outputs += engine.abort_request("running")
        engine.step(timeout=0.3)  # what the core had sent is nobody's any more
        return outputs, engine.get_metrics()


def run_async(args: Any, multiprocess: bool) -> tuple[list[RequestOutput], list[Metric]]:
    outputs: list[RequestOutput] = []

    async def work() -> list[Metric]:
        async with AsyncLLM.from_engine_args(args, multiprocess_mode=multiprocess) as engine:

            async def consume(name: str) -> None:
                async for output in engine.generate(f"hello {name}", WORK[name], name):
                    outputs.append(output)  # noqa: PERF401  (each as it comes)

            async def fail() -> None:
                with lenient_shell():
                    _, collector = await engine.add_request("failed", TOO_LONG, params(3))
                output = await collector.get()
                assert isinstance(output, RequestOutput)
                outputs.append(output)

            running = asyncio.create_task(consume("running"))
            while not outputs:
                await asyncio.sleep(0.001)
            tasks = [asyncio.create_task(consume(n)) for n in ("one", "three", "two", "queued")]
            tasks.append(asyncio.create_task(fail()))
            await asyncio.sleep(0)
            with pytest.raises(RequestError):
                await anext(engine.generate("", params(3), "refused"))
            await engine.abort("queued")
            await asyncio.gather(*tasks)
            await engine.abort("running")
            await running
            await wait_until_async(lambda: value(engine.get_metrics(), "num_requests_running") == 0)
            await asyncio.sleep(0.3)  # what the core had sent is nobody's any more
            return engine.get_metrics()

    metrics = asyncio.run(work())
    return outputs, metrics


RUNNERS: dict[str, Run] = {
    "in process": lambda args: run_sync(args, False),
    "multi-process": lambda args: run_sync(args, True),
    "async thread": lambda args: run_async(args, False),
    "async multi-process": lambda args: run_async(args, True),
}


def value(metrics: list[Metric], name: str, **labels: str) -> float:
    (metric,) = [
        m
        for m in metrics
        if m.name == f"tellin:{name}" and all(m.labels.get(k) == v for k, v in labels.items())
    ]
    return metric.count if isinstance(metric, Histogram) else metric.value  # type: ignore[union-attr]


@pytest.mark.parametrize("mode", RUNNERS)
def test_p56_counters_add_up(mode: str, make_args: MakeArgs) -> None:
    args = make_args(
        disable_log_stats=False,
        max_num_seqs=5,
        enable_prefix_caching=False,
        max_model_len=20_000,
        num_kv_blocks=1300,
    )
    outputs, metrics = RUNNERS[mode](args)
    num_tokens = sum(len(c.token_ids) for output in outputs for c in output.outputs)
    failed = [output for output in outputs if output.request_id == "failed"]
    assert isinstance(failed[-1].error, RequestError | RequestFailedError)
    ended = {"length": 5, "abort": 2, "stop": 0, "error": 1}
    for reason, count in ended.items():
        assert value(metrics, "request_success", finished_reason=reason) == count, reason
    assert value(metrics, "generation_tokens") == num_tokens, "what was handed out, no more"
    lengths = next(m for m in metrics if m.name == "tellin:request_generation_tokens")
    assert isinstance(lengths, Histogram)
    assert (lengths.count, lengths.sum) == (8, num_tokens)
    sequences = {
        (output.request_id, completion.index): len(output.prompt_token_ids or ())
        for output in outputs
        for completion in output.outputs
        if completion.token_ids
    }
    first_tokens = value(metrics, "time_to_first_token_seconds")
    assert first_tokens == len(sequences) == (7 if mode == "in process" else 6)
    assert value(metrics, "prompt_tokens") == sum(sequences.values())
    sources = ("local_compute", "local_cache_hit", "external_kv_transfer")
    by_source = [value(metrics, "prompt_tokens_by_source", source=s) for s in sources]
    assert sum(by_source) == value(metrics, "prompt_tokens")
    assert value(metrics, "request_params_n") == 6, "n = 3 is one request"
    assert value(metrics, "e2e_request_latency_seconds") == 8
    inter_token = value(metrics, "inter_token_latency_seconds")
    assert inter_token == num_tokens - first_tokens
    for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert value(metrics, gauge) == 0, gauge
    for metric in metrics:
        if isinstance(metric, Counter | Gauge):
            assert metric.value >= 0
        elif isinstance(metric, Histogram):
            assert metric.sum >= 0
            assert list(metric.buckets.values()) == sorted(metric.buckets.values())
            assert metric.buckets["+Inf"] == metric.count


def test_sta21_two_engines_count_apart(make_args: MakeArgs) -> None:
    args = make_args(disable_log_stats=False)
    with LLMEngine.from_engine_args(args) as first, LLMEngine.from_engine_args(args) as second:
        for engine, count in ((first, 2), (second, 3)):
            for i in range(count):
                engine.add_request(str(i), "hello", params(4))
        while first.has_unfinished_requests() or second.has_unfinished_requests():
            first.step()
            second.step()
        assert value(first.get_metrics(), "generation_tokens") == 8
        assert value(second.get_metrics(), "generation_tokens") == 12
        first.shutdown()
        assert value(second.get_metrics(), "request_success", finished_reason="length") == 3


DASHBOARD = [
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "num_preemptions",
    "prompt_tokens",
    "generation_tokens",
    "request_success",
    "iteration_tokens_total",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_inference_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_params_n",
    "request_params_max_tokens",
    "request_max_num_generation_tokens",
    "cache_config_info",
]


def test_the_prefix_of_existing_dashboards_is_a_switch(make_args: MakeArgs) -> None:
    args = make_args(disable_log_stats=False, metrics_prefix="vllm:")
    with LLMEngine.from_engine_args(args) as engine:
        engine.add_request("x", "hello", params(4))
        while engine.has_unfinished_requests():
            engine.step()
        names = {metric.name for metric in engine.get_metrics()}
        assert all(name.startswith("vllm:") for name in names)
        assert {f"vllm:{name}" for name in DASHBOARD} <= names
        assert engine.logger_manager is not None
        text = engine.logger_manager.prometheus_text()
        assert "vllm:generation_tokens_total{" in text
        assert "tellin:" not in text
