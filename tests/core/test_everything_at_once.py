"""E1, E2, promise 1: requests of every kind in one batch equal their lone runs, bit for bit.

A tiny model on native kernels, a pool too small for the batch, prompts in odd chunks, drafts that
are right and wrong, grammars, thoughts, processors, penalties: whatever is on beside a request, its
ids and log-probabilities are those of an engine that runs it alone and without drafts.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from benchmarks.synthetic import SIZES, write_llama
from tellin import LLM, SamplingParams
from tellin.outputs import RequestOutput
from tellin.sampling_params import RepetitionDetectionParams, StructuredOutputsParams

THINK = {"think_start_token_ids": (40,), "think_end_token_ids": (41, 42)}
NUM_REQUESTS = 24


def some_request(rng: random.Random, number: int) -> tuple[dict[str, Any], SamplingParams]:
    """A prompt (some share a beginning, some are thinking) and parameters of some kinds."""
    ids = [7] * 33 if rng.random() < 0.4 else []
    ids += [rng.randrange(3, 250) for _ in range(rng.randrange(1, 40))]
    ids += [40, 9] if rng.random() < 0.4 else []
    values: dict[str, Any] = {
        "temperature": rng.choice([0, 0.7, 1.2]),
        "seed": number,
        "max_tokens": rng.randrange(1, 48),
        "ignore_eos": rng.random() < 0.5,
    }
    extras: list[dict[str, Any]] = [
        {"logprobs": 2},
        {"prompt_logprobs": 1},
        {"thinking_token_budget": rng.randrange(6)},
        {"structured_outputs": StructuredOutputsParams(regex="[a-f]{2,20}")},
        {"structured_outputs": StructuredOutputsParams(json={"type": "integer"})},
        {"top_p": 0.8, "top_k": 30},
        {"min_p": 0.05},
        {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": -0.2},
        {"logit_bias": dict.fromkeys(range(60, 70), 3.0)},
        {"stop_token_ids": list(range(100, 400))},
        {"repetition_detection": RepetitionDetectionParams(3, 1, 3)},
        {"logits_processors": [lambda output, row: row * (1 + len(output) % 2)]},
    ]
    for extra in rng.sample(extras, rng.randrange(4)):
        values |= extra
    if "structured_outputs" not in values and rng.random() < 0.2:
        values["allowed_token_ids"] = list(range(50, 90))
    values["min_tokens"] = min(rng.choice([0, 0, 3]), values["max_tokens"])
    return {"prompt_token_ids": ids}, SamplingParams(**values)


def summary(output: RequestOutput) -> Any:
    """Everything that must be equal."""
    first = output.outputs[0]
    tables = [first.logprobs or [], output.prompt_logprobs or []]
    values = [
        [{i: (lp.logprob, lp.rank) for i, lp in (position or {}).items()} for position in table]
        for table in tables
    ]
    return (
        first.text,
        tuple(first.token_ids),
        first.finish_reason,
        first.stop_reason,
        values,
    )


def run_alone(model: Path, requests: list[Any]) -> list[Any]:
    with LLM(model, max_model_len=128, enable_prefix_caching=False, reasoning_config=THINK) as llm:
        return [summary(llm.generate([p], s, use_tqdm=False)[0]) for p, s in requests]


@pytest.mark.parametrize("seed", range(3))
def test_everything_at_once(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    model = write_llama(tmp_path / "tiny.gguf", SIZES["tiny"], rng.choice(["q8_0", "q4_0"]))
    requests = [some_request(rng, number) for number in range(NUM_REQUESTS)]
    prompts, params = map(list, zip(*requests, strict=True))
    expected = run_alone(model, requests)
    spec = [
        None,
        {"method": "suffix", "num_speculative_tokens": 5, "adaptive": False},
        {"method": "draft_model", "num_speculative_tokens": 3, "model": str(model)},
    ]
    preempted = 0
    for speculative in spec:
        with LLM(
            model,
            max_model_len=128,
            num_kv_blocks=rng.randrange(20, 30),
            max_num_seqs=12,
            max_num_batched_tokens=rng.choice([31, 64, 100]),
            speculative_config=speculative,
            reasoning_config=THINK,
        ) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            preempted += llm.llm_engine.engine_core.engine_core.scheduler.num_preemptions
        for number, (output, wanted) in enumerate(zip(outputs, expected, strict=True)):
            assert summary(output) == wanted, (number, params[number], speculative)
    assert preempted > 0
    assert len({reason for _, _, reason, _, _ in expected}) > 1
