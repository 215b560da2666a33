"""A mixture of experts through the whole engine: promise 1 however it is scheduled."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.synthetic import SIZES, write_llama
from tellin.entrypoints.llm import LLM
from tellin.sampling_params import SamplingParams

PROMPTS = [
    {"prompt_token_ids": [(7 * i + 3 * k) % 500 + 3 for i in range(length)]}
    for k, length in enumerate((3, 70, 1, 40, 17))
]
PARAMS = SamplingParams(temperature=0.8, seed=5, max_tokens=12, ignore_eos=True, logprobs=2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("models") / "moe.gguf", SIZES["tiny-moe"], "q4_0")


def make_llm(model: Path, **options: Any) -> LLM:
    return LLM(model, **{"max_model_len": 128, "num_kv_blocks": 64, "num_threads": 2, **options})


@pytest.fixture(scope="module")
def alone(model: Path) -> Iterator[list[Any]]:
    """Every prompt in an engine that has nothing else to do."""
    with make_llm(model, num_threads=1, enable_prefix_caching=False) as llm:
        yield [result(llm.generate(prompt, PARAMS)[0]) for prompt in PROMPTS]


def result(output: Any) -> Any:
    return output.outputs[0].token_ids, output.outputs[0].logprobs


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 16, "max_num_seqs": 4},
        {"num_kv_blocks": 12, "enable_prefix_caching": False},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    ],
    ids=["together", "in chunks", "preempted", "speculation"],
)
def test_promise_1_neighbours_change_no_bit(
    model: Path, alone: list[Any], options: dict[str, Any]
) -> None:
    with make_llm(model, **options) as llm:
        for _ in range(2):  # with and without what the prefix cache holds
            assert [result(output) for output in llm.generate(PROMPTS, PARAMS)] == alone


def test_a_mixture_wakes_from_a_deep_sleep(model: Path) -> None:
    with make_llm(model) as llm:
        info = llm.collective_rpc("get_info")[0]
        llm.sleep(2)
        llm.wake_up()
        assert len(llm.generate(PROMPTS[0], PARAMS)[0].outputs[0].token_ids) == 12
    assert info["weight_bytes"] > 0.9 * model.stat().st_size
