"""Promise 1 on a real model: the same request gives the same tokens and logprobs, bit for bit.

Whatever else is in the batch, however the prompt is chunked, whether the prefix cache hit, whether
the request was preempted. Greedy and seeded requests of mixed length run side by side.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tellin import LLM, SamplingParams
from tellin.outputs import RequestOutput

TEXT = "the sea is wide and the old harbour keeps a light for every ship that comes home late"
WORDS = TEXT.split()
NUM_REQUESTS = 24


def prompts() -> list[str]:
    """24 prompts of 3 to about 190 tokens; some share a beginning, none is another's."""
    lengths = [3, 170, 17, 64, 8, 33, 120, 16, 48, 5, 90, 31]
    return [
        " ".join(WORDS[(i * j + j) % len(WORDS)] for j in range(length)) + f" {i}"
        for i, length in enumerate(lengths * (NUM_REQUESTS // len(lengths)))
    ]


def params() -> list[SamplingParams]:
    """Every second request is greedy; the others have seeds and different sampling settings."""
    return [
        SamplingParams(
            temperature=0.0 if i % 2 == 0 else 0.7 + 0.02 * i,
            top_p=1.0 if i % 4 < 3 else 0.9,
            top_k=0 if i % 3 else 40,
            seed=i,
            max_tokens=8 + 5 * (i % 5),
            logprobs=3,
            ignore_eos=True,
        )
        for i in range(NUM_REQUESTS)
    ]


def results(outputs: list[RequestOutput]) -> list[Any]:
    return [(o.outputs[0].token_ids, o.outputs[0].logprobs, o.outputs[0].text) for o in outputs]


def open_llm(path: Path, **settings: Any) -> LLM:
    defaults = {"max_model_len": 512, "num_kv_blocks": 512, "enable_prefix_caching": False}
    return LLM(str(path), disable_log_stats=False, **(defaults | settings))


@pytest.fixture(scope="module")
def one_by_one(smollm2_path: Path) -> Iterator[list[Any]]:
    """(a) Every request alone in the engine."""
    with open_llm(smollm2_path) as llm:
        yield [
            results(llm.generate([prompt], param))[0]
            for prompt, param in zip(prompts(), params(), strict=True)
        ]


def preemptions(llm: LLM) -> float:
    return sum(m.value for m in llm.get_metrics() if m.name.endswith("num_preemptions"))


def test_all_at_once(smollm2_path: Path, one_by_one: list[Any]) -> None:
    with open_llm(smollm2_path, max_num_seqs=NUM_REQUESTS) as llm:
        assert results(llm.generate(prompts(), params())) == one_by_one


@pytest.mark.parametrize("chunk", [16, 48, 512])
def test_prompts_in_chunks(chunk: int, smollm2_path: Path, one_by_one: list[Any]) -> None:
    settings = {"max_num_batched_tokens": chunk, "max_num_seqs": min(chunk, NUM_REQUESTS)}
    with open_llm(smollm2_path, **settings) as llm:
        assert results(llm.generate(prompts(), params())) == one_by_one


def test_preempted_in_a_small_pool(smollm2_path: Path, one_by_one: list[Any]) -> None:
    with open_llm(smollm2_path, max_model_len=256, num_kv_blocks=20) as llm:
        assert results(llm.generate(prompts(), params())) == one_by_one
        assert preemptions(llm) > 0


def test_twice_with_the_prefix_cache(smollm2_path: Path, one_by_one: list[Any]) -> None:
    with open_llm(smollm2_path, enable_prefix_caching=True) as llm:
        assert results(llm.generate(prompts(), params())) == one_by_one
        again = llm.generate(prompts(), params())
        assert results(again) == one_by_one
        assert sum(output.num_cached_tokens or 0 for output in again) > 500
