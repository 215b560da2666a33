"""What only pictures need of a program: attention within windows, and rows that are added later."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tellin.kernels.batch import StepBatch
from tellin.kernels.native import NativeBackend
from tellin.kernels.reference import ReferenceBackend
from tellin.loading import open_model
from tellin.loading.vision import open_vision
from tellin.models import build_plan
from tellin.models.plan.ir import Plan
from tellin.models.vision import build_vision_plans
from tests.models.qwen_vl import FLOATS, HIDDEN, write_qwen_vl


@pytest.fixture(scope="module")
def tower(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    source = open_vision(write_qwen_vl(tmp_path_factory.mktemp("models") / "m", "qwen2_5_vl"))
    assert source is not None
    return build_vision_plans(source)[0]


def step_of(sizes: list[list[int]]) -> StepBatch:
    """Pictures of windows with so many patches each."""
    counts = [sum(windows) for windows in sizes]
    total = sum(counts)
    random = np.random.RandomState(1)
    rows = random.standard_normal((total, 48)).astype(np.float32)
    turns = random.randint(0, 9, (3, 1000)).astype(np.int32)
    cuts = np.cumsum([0, *(size for windows in sizes for size in windows)])
    return StepBatch(
        token_ids=np.zeros(total, np.int32),
        positions=np.arange(total, dtype=np.int32),
        query_start_loc=np.cumsum([0, *counts]).astype(np.int32),
        seq_lens=np.array(counts, np.int32),
        block_table=np.zeros((len(sizes), 1), np.int32),
        logits_indices=np.zeros(0, np.int32),
        embeds=rows,
        embed_rows=np.arange(total, dtype=np.int32),
        rope_positions=np.ascontiguousarray(turns[:, :total]),
        window_starts=cuts.astype(np.int32),
    )


def run(kind: Any, plan: Plan, step: StepBatch, **options: Any) -> np.ndarray:
    return np.array(kind(plan, **options).forward(step))


@pytest.mark.parametrize("num_threads", [1, 3])
def test_windows(tower: Plan, num_threads: int) -> None:
    """Promise 1: a picture's rows have the same bits alone and beside others; any thread count."""
    sizes = [[16, 3, 40], [7], [300, 90]]
    together = run(NativeBackend, tower, step_of(sizes), num_threads=num_threads)
    np.testing.assert_allclose(
        together, run(ReferenceBackend, tower, step_of(sizes)), rtol=0, atol=2e-5
    )
    first = 0
    for windows in sizes:
        end = first + sum(windows)
        alone = step_of([windows])
        given = step_of(sizes)
        assert given.embeds is not None
        assert given.rope_positions is not None
        alone = replace(
            alone,
            embeds=given.embeds[first:end],
            rope_positions=np.ascontiguousarray(given.rope_positions[:, first:end]),
        )
        rows = run(NativeBackend, tower, alone, num_threads=1)
        np.testing.assert_array_equal(rows, together[first:end])
        first = end
    other = run(NativeBackend, tower, step_of([[16, 43], [7], [300, 90]]), num_threads=1)
    np.testing.assert_array_equal(other[59:], together[59:])
    assert np.abs(other[:59] - together[:59]).max() > 1e-2


@pytest.mark.parametrize(
    ("cuts", "message"),
    [
        (None, "windowed attention"),
        ([0, 5], "from 0 to the number of tokens"),
        ([1, 7, 12], "from 0 to the number of tokens"),
        ([0, 9, 7, 12], "must not decrease"),
        ([0, 6, 12], "the start of request 1"),
        ([], "must not be empty"),
    ],
)
def test_refused_windows(tower: Plan, cuts: list[int] | None, message: str) -> None:
    given = None if cuts is None else np.array(cuts, np.int32)
    step = replace(step_of([[7], [5]]), window_starts=given)
    with pytest.raises(ValueError, match=message):
        run(NativeBackend, tower, step, num_threads=1)
    if cuts is None:
        with pytest.raises(ValueError, match=message):
            run(ReferenceBackend, tower, step)


def test_given_rows_in_a_long_step(tmp_path: Path) -> None:
    """More rows than one pass of the native program takes, and chunks: the same bits."""
    count = 700
    with open_model(write_qwen_vl(tmp_path / "m", "qwen3_vl")) as source:
        plan = build_plan(source)
    random = np.random.RandomState(2)
    ids = random.randint(0, 256, count).astype(np.int32)
    at = np.array([0, 99, 100, 510, 511, 512, 699], np.int32)
    rows = random.standard_normal((len(at), 3 * HIDDEN)).astype(np.float32)
    results = []
    for kind, chunk in ((NativeBackend, count), (NativeBackend, 100), (ReferenceBackend, count)):
        backend = kind(plan, **FLOATS)
        backend.init_kv_cache(48)
        for start in range(0, count, chunk):
            own = (at >= start) & (at < start + chunk)
            step = StepBatch(
                token_ids=ids[start : start + chunk],
                positions=np.arange(start, start + chunk, dtype=np.int32),
                query_start_loc=np.array([0, chunk], np.int32),
                seq_lens=np.array([start + chunk], np.int32),
                block_table=np.arange(1, 48, dtype=np.int32)[None],
                logits_indices=np.array([chunk - 1], np.int32),
                embeds=np.ascontiguousarray(rows[own]),
                embed_rows=at[own] - np.int32(start),
            )
            logits = np.array(backend.forward(step))
        results.append(logits)
    np.testing.assert_array_equal(results[1], results[0])
    np.testing.assert_allclose(results[2], results[0], rtol=0, atol=1e-4)


def test_rows_that_are_too_narrow(tmp_path: Path) -> None:
    with open_model(write_qwen_vl(tmp_path / "m", "qwen3_vl")) as source:
        backend = NativeBackend(build_plan(source), num_threads=1)
    backend.init_kv_cache(2)
    one = np.zeros(1, np.int32)
    step = StepBatch(
        one, one, np.array([0, 1], np.int32), one + 1, one[None], one,
        embeds=np.zeros((1, HIDDEN), np.float32), embed_rows=one,
    )  # fmt: skip
    with pytest.raises(ValueError, match="rows of 64 values; the plan takes 192"):
        backend.forward(step)
