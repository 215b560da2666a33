"""P09, P18-P23, P39: what users of other engines reported, replayed on the whole engine.

A tiny model with random weights and native kernels: its outputs are nonsense, but any difference
between two ways to compute them is a difference.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from benchmarks.synthetic import SIZES, write_llama
from tellin import LLM, SamplingParams
from tellin.exceptions import ContextLengthError
from tellin.outputs import RequestOutput
from tellin.sampling_params import StructuredOutputsParams

BLOCK = 16
Answer = tuple[tuple[int, ...], list[Any]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("tiny") / "tiny.gguf", SIZES["tiny"], "q4_0")


def open_llm(model: Path, **kwargs: Any) -> LLM:
    values = {"max_model_len": 1024, "max_num_seqs": 16, **kwargs}
    return LLM(model, **values)


def prompt(length: int, seed: int = 0) -> dict[str, list[int]]:
    rng = random.Random(seed)
    return {"prompt_token_ids": [rng.randrange(3, 400) for _ in range(length)]}


def answers(llm: LLM, prompts: Any, params: Any) -> list[Answer]:
    """Ids and their log-probabilities."""
    return [answer(output) for output in llm.generate(prompts, params, use_tqdm=False)]


def answer(output: RequestOutput) -> Answer:
    first = output.outputs[0]
    logprobs = first.logprobs or []
    values = [{i: lp.logprob for i, lp in position.items()} for position in logprobs]
    return tuple(first.token_ids), values


def greedy(max_tokens: int, **kwargs: Any) -> SamplingParams:
    return SamplingParams(
        temperature=0.0, max_tokens=max_tokens, ignore_eos=True, logprobs=2, **kwargs
    )


def test_p18_every_identical_request_gets_the_same_answer(model: Path) -> None:
    """First, second and third time, cache on and off, at and around the borders of blocks."""
    lengths = [100, 6 * BLOCK - 1, 6 * BLOCK, 6 * BLOCK + 1]
    prompts = [prompt(length, 1) for length in lengths]  # all share their beginning
    with open_llm(model, enable_prefix_caching=False) as llm:
        expected = [answers(llm, [p], greedy(64))[0] for p in prompts]
    with open_llm(model) as llm:
        for _ in range(3):
            assert [answers(llm, [p], greedy(64))[0] for p in prompts] == expected


def test_p19_nobody_reads_what_is_a_neighbours(model: Path) -> None:
    """16 at once with markers of their own, a pool too small for them, several rounds."""
    shared = prompt(40, 2)["prompt_token_ids"]
    prompts = [{"prompt_token_ids": [*shared, 400 + i, 400 + i, 7, i + 3]} for i in range(16)]
    with open_llm(model, enable_prefix_caching=False) as llm:
        alone = [answers(llm, [p], greedy(40))[0] for p in prompts]
    with open_llm(model, num_kv_blocks=30, max_model_len=128) as llm:
        for _ in range(3):
            assert answers(llm, prompts, greedy(40)) == alone
        core = llm.llm_engine.engine_core.engine_core
        assert core.scheduler.num_preemptions > 0


@pytest.mark.parametrize("threshold", [0, 13])
def test_p20_chunks_change_nothing(model: Path, threshold: int) -> None:
    """One 500-token prompt in chunks that split blocks anywhere: ids and values bit for bit."""
    with open_llm(model, max_num_batched_tokens=8192) as llm:
        expected = answers(llm, [prompt(500)], greedy(32))
    for budget in (16, 17, 64):
        with open_llm(
            model, max_num_batched_tokens=budget, long_prefill_token_threshold=threshold
        ) as llm:
            assert answers(llm, [prompt(500)], greedy(32)) == expected


def test_p09_prompt_logprobs_in_chunks_beside_others(model: Path) -> None:
    """A 300-token prompt in steps of 64 with two short ones: complete, once, the same."""
    params = [greedy(4, prompt_logprobs=1), greedy(4), greedy(4)]
    prompts = [prompt(300), prompt(5, 1), prompt(6, 2)]
    tables = []
    for budget in (64, 8192):
        with open_llm(model, max_num_batched_tokens=budget) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            table = outputs[0].prompt_logprobs
            assert table is not None
            assert len(table) == 300
            assert table[0] is None
            tables.append([{i: (v.logprob, v.rank) for i, v in (p or {}).items()} for p in table])
    assert tables[0] == tables[1]


def test_p21_what_can_never_fit_is_refused_and_the_next_is_served(model: Path) -> None:
    """49 usable blocks of 16, a 1000-token prompt, then a short one."""
    with open_llm(model, num_kv_blocks=50, max_model_len=49 * BLOCK) as llm:
        with pytest.raises(ContextLengthError, match="1000"):
            llm.generate([prompt(1000)], greedy(4), use_tqdm=False)
        assert len(answers(llm, [prompt(5)], greedy(4))) == 1
        assert llm.llm_engine.get_num_unfinished_requests() == 0


def test_p22_priorities_under_memory_pressure(model: Path) -> None:
    """A pool for about two, six requests with equal and unequal priorities: all end, and right."""
    prompts = [prompt(20, i) for i in range(6)]
    with open_llm(model) as llm:
        alone = [answers(llm, [p], greedy(64))[0] for p in prompts]
    with open_llm(model, scheduling_policy="priority", num_kv_blocks=13, max_model_len=128) as llm:
        outputs = llm.generate(prompts, greedy(64), priority=[2, 1, 1, 0, 2, 0], use_tqdm=False)
        assert [answer(output) for output in outputs] == alone
        core = llm.llm_engine.engine_core.engine_core
        assert core.scheduler.num_preemptions > 0


def test_p23_small_requests_behind_a_huge_one(model: Path) -> None:
    """Their first token comes within three steps, and the huge prompt is not starved either."""
    with open_llm(model, max_num_batched_tokens=64) as llm:
        engine = llm.llm_engine
        engine.add_request("huge", prompt(900), greedy(2))
        for i in range(5):
            engine.add_request(f"tiny{i}", prompt(5, i), greedy(2))
        first: dict[str, int] = {}
        steps = 0
        while engine.has_unfinished_requests():
            steps += 1
            for output in engine.step():
                first.setdefault(output.request_id, steps)
        assert max(first[f"tiny{i}"] for i in range(5)) <= 3
        assert first["huge"] <= 2 * 900 // 64 + 3


def constrained() -> list[tuple[Any, SamplingParams]]:
    a = {"type": "object", "properties": {"a": {"enum": ["x", "yy"]}}, "required": ["a"]}
    b = {"type": "array", "items": {"type": "boolean"}, "maxItems": 6, "minItems": 3}
    constraints: list[dict[str, Any]] = [
        {"json": {**a, "additionalProperties": False}},
        {"json": b},
        {},
        {"regex": "[ab]{3,30}c"},
    ]
    return [
        (
            prompt(30, i),
            SamplingParams(
                temperature=0.0,
                max_tokens=60,
                structured_outputs=StructuredOutputsParams(**c) if c else None,
            ),
        )
        for i, c in enumerate(constraints * 2)
    ]


@pytest.mark.parametrize("drafts", [False, True])
def test_p39_free_and_constrained_requests_in_one_batch(model: Path, drafts: bool) -> None:
    """Each as alone; with preemption in the middle, and with drafts."""
    requests = constrained()
    prompts, params = map(list, zip(*requests, strict=True))
    with open_llm(model, max_model_len=128) as llm:
        alone = [llm.generate([p], s, use_tqdm=False)[0] for p, s in requests]
    spec = {"method": "suffix", "num_speculative_tokens": 4, "adaptive": False}
    with open_llm(
        model,
        num_kv_blocks=16,
        max_model_len=128,
        speculative_config=spec if drafts else None,
    ) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        core = llm.llm_engine.engine_core.engine_core
        assert core.scheduler.num_preemptions > 0
    assert [o.outputs[0].text for o in outputs] == [o.outputs[0].text for o in alone]
    for output in outputs[:2]:
        if output.outputs[0].finish_reason == "stop":
            json.loads(output.outputs[0].text)
