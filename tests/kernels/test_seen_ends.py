"""Rows that see some behind themselves in causal attention: passes, chunks, variants, refusals."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tellin.kernels import _C
from tellin.kernels.batch import StepBatch
from tellin.kernels.native import NativeBackend
from tellin.kernels.reference import ReferenceBackend
from tellin.models import build_plan
from tests.models.tiny import tiny_source

COUNT = 600
SPANS = ((3, 9), (40, 76), (490, 540), (560, 600))
"""Longer and shorter than the sliding window (8), one across the 512 rows of a pass, one at the
end."""


def backend(kind: Any = NativeBackend, **options: Any) -> Any:
    made = kind(build_plan(tiny_source("gemma3")), **options)
    made.init_kv_cache(200)
    return made


def ends_of(spans: tuple[tuple[int, int], ...], count: int) -> np.ndarray:
    ends = np.arange(1, count + 1, dtype=np.int32)
    for start, end in spans:
        ends[start:end] = end
    return ends


def step(start: int, end: int, ends: np.ndarray | None, first_block: int = 1) -> StepBatch:
    """Rows ``[start, end)`` of one request whose ids are a function of their positions."""
    positions = np.arange(start, end, dtype=np.int32)
    return StepBatch(
        token_ids=(positions * 7 + 3) % 61,
        positions=positions,
        query_start_loc=np.array([0, end - start], np.int32),
        seq_lens=np.array([end], np.int32),
        block_table=np.arange(first_block, first_block + 90, dtype=np.int32)[None],
        logits_indices=np.arange(end - start, dtype=np.int32),
        seen_ends=None if ends is None else ends[start:end].copy(),
    )


def run(made: Any, cuts: list[int], ends: np.ndarray | None) -> np.ndarray:
    return np.concatenate(
        [np.array(made.forward(step(a, b, ends))) for a, b in itertools.pairwise(cuts)]
    )


def test_like_the_reference() -> None:
    ends = ends_of(SPANS, COUNT)
    exact = {"activation_precision": "float32", "kv_cache_dtype": "float32"}
    expected = run(backend(ReferenceBackend, batched=True), [0, COUNT], ends)
    found = run(backend(num_threads=2, **exact), [0, COUNT], ends)
    np.testing.assert_allclose(found, expected, rtol=0, atol=5e-4)
    plain = run(backend(num_threads=2, **exact), [0, COUNT], None)
    differ = np.abs(found - plain).max(axis=1) > 1e-3
    assert not differ[:3].any()  # before the first row that sees more
    assert differ[3:8].all()
    assert differ[490:539].all()


@pytest.mark.parametrize("isa", _C.linear_variants())
@pytest.mark.parametrize("kv", ["float16", "float32", "int8", "int16"])
def test_promise_1(isa: str, kv: str) -> None:
    """Whatever the chunk and the threads: the same bits."""
    ends = ends_of(SPANS, COUNT)
    one = backend(num_threads=1, isa=isa, kv_cache_dtype=kv)
    two = backend(num_threads=2, isa=isa, kv_cache_dtype=kv)
    whole = run(one, [0, COUNT], ends)
    for cuts in ([0, 3, 9, 40, 76, 90, 490, 545, 560, 600], [0, 1, 2, 39, 481, 560, 600]):
        np.testing.assert_array_equal(run(two, cuts, ends), whole)


def test_rows_of_others_beside_them() -> None:
    """Two requests in one step, of which one has such rows."""
    ends = ends_of(((4, 30),), 40)
    made = backend(num_threads=2)
    alone = run(made, [0, 40], ends), run(made, [0, 40], None)
    first, second = step(0, 40, ends), step(0, 40, np.arange(1, 41, dtype=np.int32), 100)
    joined = replace(
        first,
        token_ids=np.concatenate([first.token_ids, second.token_ids]),
        positions=np.concatenate([first.positions, second.positions]),
        query_start_loc=np.array([0, 40, 80], np.int32),
        seq_lens=np.array([40, 40], np.int32),
        block_table=np.concatenate([first.block_table, second.block_table]),
        logits_indices=np.arange(80, dtype=np.int32),
        seen_ends=np.concatenate([ends, np.arange(1, 41, dtype=np.int32)]),
    )
    np.testing.assert_array_equal(np.array(made.forward(joined)), np.concatenate(alone))


def test_more_rows_than_a_pass_has() -> None:
    """They are computed in one pass all the same."""
    ends = ends_of(((20, 700),), 720)
    made = backend(num_threads=2)
    whole = run(made, [0, 720], ends)
    np.testing.assert_array_equal(run(made, [0, 20, 700, 720], ends), whole)
    assert np.abs(whole[20] - run(made, [0, 720], None)[20]).max() > 1e-3


@pytest.mark.parametrize(("row", "value"), [(5, 5), (5, 11), (9, 11), (0, -1)])
def test_refused(row: int, value: int) -> None:
    ends = np.arange(1, 11, dtype=np.int32)
    ends[row] = value
    with pytest.raises(ValueError, match=rf"seen_ends\[{row}\] is {value}"):
        backend(num_threads=1).forward(step(0, 10, ends))
    short = replace(step(0, 10, None), seen_ends=np.ones(3, np.int32))
    with pytest.raises(ValueError, match="as many entries"):
        backend(num_threads=1).forward(short)
