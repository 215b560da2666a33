"""Recurrent and hybrid models through the whole engine: promise 1 whatever happens around them.

Add a tiny checkpoint of another architecture to `MODELS`.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tellin.config import EngineArgs
from tellin.engine.llm_engine import LLMEngine
from tellin.sampling_params import RequestOutputKind, SamplingParams
from tests.models.gated_delta import write_checkpoint
from tests.models.tiny_hybrids import write_tiny_hybrid

BACKEND = "native"
MAX_MODEL_LEN = 192
MODELS: dict[str, Callable[[Path], Path]] = {
    "lfm2": lambda folder: write_tiny_hybrid(folder, "lfm2"),
    "granitehybrid": lambda folder: write_tiny_hybrid(folder, "granitehybrid"),
    "falcon-h1": lambda folder: write_tiny_hybrid(folder, "falcon-h1"),
    "mamba2": lambda folder: write_tiny_hybrid(folder, "mamba2"),
    "qwen35moe": lambda folder: write_checkpoint(
        folder, "qwen35moe", composite=True, with_tokenizer=True
    ),
}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return MODELS[request.param](tmp_path_factory.mktemp("models") / request.param)


@dataclass
class Case:
    prompt: list[int]
    params: SamplingParams


def cases() -> list[Case]:
    """Short and long prompts; some begin alike, or are the same; greedy and sampled."""
    rng = random.Random(11)
    system, chat = ([rng.randrange(2, 258) for _ in range(n)] for n in (70, 41))
    result = []
    for i, length in enumerate((1, 5, 17, 40, 16, 90, 3, 64, 33, 48)):
        head = [[], system, chat][i % 3]
        prompt = head + [rng.randrange(2, 258) for _ in range(length)]
        params = SamplingParams(
            temperature=0.0 if i % 4 == 0 else 0.9,
            seed=i,
            n=3 if i == 5 else 1,
            max_tokens=6 + 5 * (i % 4),
            logprobs=2,
            prompt_logprobs=1 if i == 7 else None,
            ignore_eos=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        result.append(Case(prompt, params))
    return [*result, result[1], result[4]]


def make_engine(model: Path, **options: Any) -> LLMEngine:
    settings: dict[str, Any] = {
        "max_model_len": MAX_MODEL_LEN,
        "num_kv_blocks": 128,
        "num_threads": 2,
    }
    settings["limit_mm_per_prompt"] = {"image": 0}  # composite checkpoints: their text model
    args = EngineArgs(model, backend=BACKEND, **{**settings, **options})
    engine = LLMEngine.from_engine_args(args)
    core = engine.engine_core.engine_core  # type: ignore[attr-defined]
    core.executor.worker.runner.prompts.max_logits = 16  # prompt logprobs take passes of their own
    states = core.scheduler.kv_cache_manager.states
    states.min_saved_tokens, states.checkpoint_tokens, states.decode_tokens = 16, 32, 16
    return engine


def result(output: Any) -> Any:
    return [(o.token_ids, o.logprobs) for o in output.outputs], output.prompt_logprobs


def run(engine: LLMEngine, seed: int, *, with_sleep: bool = False) -> tuple[dict[int, Any], int]:
    """Cases come at random times and some are aborted; results of the others, tokens from cache."""
    rng = random.Random(seed)
    todo = list(enumerate(cases()))
    rng.shuffle(todo)
    results: dict[int, Any] = {}
    num_cached, num_steps = 0, 0
    while todo or engine.has_unfinished_requests():
        for _ in range(rng.choice((0, 0, 1, 2, 4))):
            if todo:
                number, case = todo.pop()
                engine.add_request(str(number), {"prompt_token_ids": case.prompt}, case.params)
        for output in engine.step():
            num_cached = max(num_cached, output.num_cached_tokens or 0)
            if output.finished:
                results[int(output.request_id)] = result(output)
        num_steps += 1
        if num_steps % 9 == 0:
            engine.abort_request([str(rng.randrange(len(cases())))])
        if with_sleep and num_steps == 12:
            engine.sleep(1, mode="keep")
            engine.wake_up()
    return results, num_cached


@pytest.fixture(scope="module")
def alone(model: Path) -> list[Any]:
    """Every case in an engine that has nothing else to do."""
    engine = make_engine(model, num_threads=1, enable_prefix_caching=False)
    results = []
    for case in cases():
        engine.add_request("only", {"prompt_token_ids": case.prompt}, case.params)
        while engine.has_unfinished_requests():
            outputs = engine.step()
        results.append(result(outputs[0]))
    engine.shutdown()
    return results


def draft_from(engine: LLMEngine, alone: list[Any]) -> None:
    """Drafts are what will come, but for the last of them now and then."""
    runner = engine.engine_core.engine_core.executor.worker.runner  # type: ignore[attr-defined]
    texts = [
        case.prompt + list(ids)
        for case, (outputs, _) in zip(cases(), alone, strict=True)
        for ids, _ in outputs
    ]

    def propose(slots: Any, num_drafts: Any) -> list[list[int]]:
        drafts = []
        for slot, limit in zip(slots.tolist(), num_drafts.tolist(), strict=True):
            known = runner.batch.token_ids[slot, : runner.batch.num_tokens[slot]].tolist()
            ahead = [t[len(known) :] for t in texts if t[: len(known)] == known]
            ids = ahead[0][:limit] if ahead else []
            if ids and len(known) % 3:
                ids[-1] ^= 1
            drafts.append(ids)
        return drafts

    runner.drafter.propose = propose


SCENARIOS: dict[str, dict[str, Any]] = {
    "together": {},
    "in chunks": {"max_num_batched_tokens": 24, "max_num_seqs": 8},
    "preempted": {"num_kv_blocks": 24, "max_num_batched_tokens": 100, "max_num_seqs": 6},
    "without a cache": {"num_kv_blocks": 24, "enable_prefix_caching": False},
    "speculation": {
        "speculative_config": {
            "method": "ngram",
            "num_speculative_tokens": 3,
            "adaptive": False,
        }
    },
    "few states": {"max_num_seqs": 2, "long_prefill_token_threshold": 20},
}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_promise_1_of_recurrent_models(model: Path, alone: list[Any], scenario: str) -> None:
    """2.7.4: the same bits in any company, in any chunks, after preemption, a prefix hit, sleep."""
    options = SCENARIOS[scenario]
    engine = make_engine(model, **options)
    if "speculative_config" in options:
        draft_from(engine, alone)
    for seed in range(2):  # the second time with what the prefix cache holds
        results, num_cached = run(engine, seed, with_sleep=seed == 0)
        assert len(results) > len(alone) // 2
        for number, found in results.items():
            assert found == alone[number], f"case {number} of {scenario}, seed {seed}"
        assert (num_cached > 60) == options.get("enable_prefix_caching", True)
    counts = Counter({m.name: m.value for m in engine.get_metrics() if hasattr(m, "value")})
    if "speculative_config" in options:
        accepted, drafted = (
            counts[f"tellin:spec_decode_num_{n}_tokens"] for n in ("accepted", "draft")
        )
        assert 0 < accepted < drafted
    if "num_kv_blocks" in options:
        assert counts["tellin:num_preemptions"] > 0
    engine.shutdown()


def test_a_conversation_goes_on_from_what_was_kept_while_decoding(model: Path) -> None:
    """The state at the end of a block is kept on the way, in the cheapest kind of step too."""
    engine = make_engine(model)
    ids, cached = cases()[3].prompt, []
    for turn in range(3):
        params = SamplingParams(
            temperature=0.7,
            seed=turn,
            max_tokens=39,
            ignore_eos=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        found = []
        for use_cache in (True, False):
            params.skip_reading_prefix_cache = not use_cache
            engine.add_request("turn", {"prompt_token_ids": ids}, params)
            while engine.has_unfinished_requests():
                outputs = engine.step()
            found.append(outputs[0].outputs[0].token_ids)
            if use_cache:
                cached.append(outputs[0].num_cached_tokens)
        assert found[0] == found[1]
        ids = [*ids, *found[0], 5]
    assert cached == [0, 64, 112]  # 40, 80 and 120 ids, of which all but the last one or two ran
    engine.shutdown()
