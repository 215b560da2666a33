"""Throughput and latency of an engine in this process, without a server.

Prompts are random ids, or come from a file. Random prompts ignore the end token, so that every run
does the same work, and share no prefix.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from tellin.entrypoints.bench.dataset import BenchRequest, random_ids
from tellin.entrypoints.bench.summary import Distribution, distribution, latency_table
from tellin.sampling_params import SamplingParams

if TYPE_CHECKING:
    from tellin.entrypoints.llm import LLM
    from tellin.outputs import RequestOutput


class ThroughputSummary(msgspec.Struct):
    """Of one batch of requests, from handing them over to the last answer."""

    duration_s: float
    num_requests: int
    prompt_tokens: int
    output_tokens: int
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    latencies_ms: dict[str, Distribution]
    """ttft and e2e, from the moment that all requests were handed over."""

    def table(self) -> str:
        """For a terminal."""
        return "\n".join(
            (
                f"requests      {self.num_requests} in {self.duration_s:.2f} s",
                f"tokens        {self.prompt_tokens} read, {self.output_tokens} generated",
                f"throughput    {self.requests_per_s:.2f} requests/s, "
                f"{self.output_tokens_per_s:.1f} output tokens/s, "
                f"{self.total_tokens_per_s:.1f} total tokens/s",
                "",
                *latency_table(self.latencies_ms),
            )
        )


class LatencySummary(msgspec.Struct):
    """Of batches that were run one after the other."""

    batch_size: int
    input_len: int
    output_len: int
    latencies_ms: dict[str, Distribution]
    """``latency``: of a whole batch."""
    output_tokens_per_s: float
    """Of the median batch."""

    def table(self) -> str:
        """For a terminal."""
        return "\n".join(
            (
                f"batch         {self.batch_size} x ({self.input_len} read, "
                f"{self.output_len} generated)",
                f"throughput    {self.output_tokens_per_s:.1f} output tokens/s (median)",
                "",
                *latency_table(self.latencies_ms),
            )
        )


def random_prompts(llm: LLM, num_prompts: int, input_len: int, seed: int) -> list[Any]:
    """Prompts of random ids, none of them special."""
    tokenizer = llm.get_tokenizer()
    special = tokenizer.all_special_ids
    vocab = [i for i in range(llm.model_config.tokenizer_size) if i not in special]
    return [{"prompt_token_ids": ids} for ids in random_ids(num_prompts, input_len, vocab, seed)]


def measure_throughput(
    llm: LLM, prompts: Sequence[Any], params: Sequence[SamplingParams]
) -> tuple[ThroughputSummary, dict[str, list[float]]]:
    """Run all prompts as one job; returns the figures and the latencies in seconds by name."""
    start = time.perf_counter()
    outputs = llm.generate(list(prompts), list(params), use_tqdm=False)
    seconds = time.perf_counter() - start
    num_read = sum(len(output.prompt_token_ids or ()) for output in outputs)
    num_made = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
    latencies = _latencies(outputs)
    summary = ThroughputSummary(
        seconds,
        len(outputs),
        num_read,
        num_made,
        len(outputs) / seconds,
        num_made / seconds,
        (num_read + num_made) / seconds,
        {name: distribution(values) for name, values in latencies.items() if values},
    )
    return summary, latencies


def _latencies(outputs: Sequence[RequestOutput]) -> dict[str, list[float]]:
    """From the engine's own time stamps, which it takes if statistics are on."""
    found: dict[str, list[float]] = {"ttft": [], "e2e": []}
    for output in outputs:
        times = output.metrics
        if times is not None and times.first_token_ts:
            found["ttft"].append(times.first_token_latency)
            generating = times.last_token_ts - times.first_token_ts
            found["e2e"].append(times.first_token_latency + generating)
    return found


def dataset_prompts(llm: LLM, requests: Sequence[BenchRequest]) -> list[Any]:
    """Prompts of a file; conversations are written out by the model's template."""
    tokenizer = llm.get_tokenizer()
    prompts: list[Any] = []
    for request in requests:
        if not request.messages:
            prompts.append(request.as_text())
            continue
        text = tokenizer.apply_chat_template(request.as_messages(), add_generation_prompt=True)
        ids = tokenizer.encode(text, add_special_tokens=False)
        prompts.append({"prompt_token_ids": ids})
    return prompts


def measure_latency(
    llm: LLM, batch_size: int, input_len: int, output_len: int, iterations: int, warmups: int
) -> tuple[LatencySummary, list[float]]:
    """Run batches one after the other; returns the figures and the seconds of each batch."""
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
    seconds = []
    for i in range(warmups + iterations):
        prompts = random_prompts(llm, batch_size, input_len, seed=i)
        start = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        if i >= warmups:
            seconds.append(time.perf_counter() - start)
    found = distribution(seconds)
    rate = batch_size * output_len / (found.percentiles["p50"] / 1000)
    summary = LatencySummary(batch_size, input_len, output_len, {"latency": found}, rate)
    return summary, seconds
