"""P35: a long run of the whole engine on a real (tiny) model; nothing may grow.

20,000 short requests of every kind, a part of them aborted at any moment, with a KV pool that is
always full. Resident memory and the number of Python objects are taken at every thousand.
"""

from __future__ import annotations

import gc
import random
from pathlib import Path
from typing import Any

import pytest

from benchmarks.synthetic import SIZES, write_llama
from tellin.config import EngineArgs
from tellin.engine.llm_engine import LLMEngine
from tellin.sampling_params import SamplingParams, StructuredOutputsParams
from tests.core.test_cost import resident_mib

WARM_UP = 6
"""Thousands after which caches are full and the allocator has what it needs."""


def some_params(rng: random.Random) -> SamplingParams:
    kind = rng.randrange(10)
    values: dict[str, Any] = {"max_tokens": rng.randrange(1, 7), "temperature": rng.choice([0, 1])}
    if kind == 0:
        values |= {"n": 2, "temperature": 1}
    elif kind == 1:
        values |= {"logprobs": 2, "prompt_logprobs": 1}
    elif kind == 2:
        values |= {"stop": ["ab", "é"], "include_stop_str_in_output": True}
    elif kind == 3:
        values |= {"structured_outputs": StructuredOutputsParams(choice=["aa", "b", "ac"])}
    elif kind == 4:
        values |= {"seed": rng.randrange(99), "top_p": 0.9, "repetition_penalty": 1.2}
    elif kind == 5:
        values |= {"logits_processors": [lambda output, row: row], "min_tokens": 1}
    return SamplingParams(**values)


def soak(
    engine: LLMEngine, num_requests: int, every: int
) -> tuple[list[float], list[int], dict[str, int]]:
    """RSS in MiB, object counts, and how the requests ended."""
    rng = random.Random(7)
    sizes, objects = [], []
    ends = {"finished": 0, "aborted": 0}
    live: dict[str, None] = {}

    def step() -> None:
        for output in engine.step():
            if output.finished:
                ends["finished"] += 1
                live.pop(output.request_id, None)

    for number in range(1, num_requests + 1):
        request_id = f"r{number}"
        prefix = [7] * 20 if rng.random() < 0.3 else []
        ids = [*prefix, *(rng.randrange(3, 250) for _ in range(rng.randrange(1, 20)))]
        engine.add_request(request_id, {"prompt_token_ids": ids}, some_params(rng))
        live[request_id] = None
        if rng.random() < 0.15:
            victim = rng.choice(list(live))
            engine.abort_request([victim])
            ends["aborted"] += victim in live
            live.pop(victim, None)
        while len(live) > 32:
            step()
        if number % every == 0:
            while engine.has_unfinished_requests():
                step()
            gc.collect()
            sizes.append(resident_mib())
            objects.append(len(gc.get_objects()))
    return sizes, objects, ends


def make_engine(folder: Path, **kwargs: Any) -> LLMEngine:
    model = write_llama(folder / "tiny.gguf", SIZES["tiny"], "q8_0")
    args = EngineArgs(
        model=model,
        num_kv_blocks=120,
        max_num_seqs=16,
        max_num_batched_tokens=128,
        max_model_len=64,
        enable_kv_cache_events=False,
        **kwargs,
    )
    return LLMEngine.from_engine_args(args)


@pytest.mark.slow
def test_memory_stays_flat_through_20_000_requests(tmp_path: Path) -> None:
    """After warm-up memory grows by less than 2 %."""
    engine = make_engine(tmp_path)
    try:
        sizes, objects, ends = soak(engine, 20_000, 1000)
    finally:
        engine.shutdown()
    assert sum(ends.values()) == 20_000
    assert ends["aborted"] > 1000
    assert max(sizes[WARM_UP:]) < 1.02 * sizes[WARM_UP - 1], sizes
    assert max(objects[WARM_UP:]) < 1.02 * objects[WARM_UP - 1], objects


def test_objects_stay_flat_for_a_while(tmp_path: Path) -> None:
    """The same over 1,000 requests with drafts, objects only."""
    spec = {
        "method": "suffix",
        "num_speculative_tokens": 3,
        "suffix_decoding_max_cached_requests": 9,
    }
    engine = make_engine(tmp_path, speculative_config=spec)
    try:
        _, objects, ends = soak(engine, 1000, 100)
    finally:
        engine.shutdown()
    assert sum(ends.values()) == 1000
    assert max(objects[6:]) < 1.02 * objects[5] + 300, objects
