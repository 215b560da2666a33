"""Recurrences in native code: the formulas, promise 1, and steps that make no sense.

The plans and their float64 formulas are those of `tests.models.recurrences`.
"""

from __future__ import annotations

import itertools
from functools import cache

import numpy as np
import pytest
from msgspec import structs

from tellin.exceptions import UnsupportedModelError
from tellin.kernels import _C
from tellin.kernels.batch import StepBatch
from tellin.kernels.native import NativeBackend
from tellin.loading.tensors import QuantType
from tests.models.recurrences import RECURRENCES
from tests.models.stepping import Stepper, logits_of

VARIANTS = _C.linear_variants()
IDS: list[int] = np.random.RandomState(1).randint(0, 64, 150).tolist()
"""More than the rows whose decays are computed together."""
LONG: list[int] = np.random.RandomState(2).randint(0, 64, 700).tolist()
"""More than a pass."""


def backend_of(name: str, isa: str = VARIANTS[0], num_threads: int = 2) -> NativeBackend:
    return NativeBackend(RECURRENCES[name].plan(), isa=isa, num_threads=num_threads)


@cache
def whole(name: str, isa: str) -> np.ndarray:
    """Rows of a request alone in one step, on one thread."""
    return logits_of(backend_of(name, isa, 1), IDS)


@pytest.mark.parametrize("isa", VARIANTS)
@pytest.mark.parametrize("name", RECURRENCES)
def test_rows_are_those_of_the_formula(name: str, isa: str) -> None:
    expected = RECURRENCES[name].expected(IDS)
    out = whole(name, isa)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=2e-6 * np.abs(expected).max())


@pytest.mark.parametrize("isa", VARIANTS)
@pytest.mark.parametrize("name", RECURRENCES)
def test_rows_do_not_depend_on_the_step_they_are_in(name: str, isa: str) -> None:
    """Promise 1: chunks, neighbours and threads change no bit; nor does what a slot held."""
    steps = Stepper(backend_of(name, isa), slots={"other": 3, "cut": 7, "again": 9})
    steps.step([("again", IDS[::-1])])
    steps.lengths["again"] = 0
    other = IDS[5:] + IDS[:5]
    cuts = [0, 1, 2, 40, 111, 150]
    parts, again = [], []
    for i, (start, stop) in enumerate(itertools.pairwise(cuts)):
        work = [("other", other[10 * i : 10 * i + 10]), ("cut", IDS[start:stop])]
        if i >= 3:
            work.insert(i - 3, ("again", IDS[75 * (i - 3) : 75 * (i - 2)]))
        out = dict(zip([n for n, _ in work], steps.step(work), strict=True))
        parts.append(out["cut"])
        again += [out["again"]] if i >= 3 else []
    expected = whole(name, isa)
    np.testing.assert_array_equal(np.concatenate(parts), expected)
    np.testing.assert_array_equal(np.concatenate(again), expected)


@pytest.mark.parametrize("name", RECURRENCES)
def test_variants_with_fused_products_agree_to_the_bit(name: str) -> None:
    first, *others = [isa for isa in VARIANTS if isa not in ("portable", "neon")] or VARIANTS[:1]
    for isa in others:
        np.testing.assert_array_equal(whole(name, isa), whole(name, first))


@pytest.mark.parametrize("name", ["conv_4_silu", "delta", "scan_odd"])
def test_states_may_be_saved_on_the_way_and_copied(name: str) -> None:
    """Across passes of 512 rows, too: a save belongs to the pass that its last row is in."""
    expected = logits_of(backend_of(name), LONG)
    backend = backend_of(name)
    slots = {"other": 2, "first": 4, "a": 10, "b": 11, "c": 12, "d": 13, "e": 20}
    steps = Stepper(backend, num_blocks=400, slots=slots)
    steps.step([("first", LONG[:3])])
    lengths = {"a": 4, "b": 400, "c": 515, "d": 700}
    saves = [(1, length, slots[key]) for key, length in lengths.items()]
    out = steps.step([("other", LONG[:100]), ("first", LONG[3:])], saves)
    np.testing.assert_array_equal(out[0], expected[:100])
    np.testing.assert_array_equal(out[1], expected[3:])
    backend.copy_states([(slots["c"], 30), (30, slots["e"])])
    lengths["e"] = lengths["c"]
    for key in ("a", "b", "c", "e"):
        steps.lengths[key] = lengths[key]
        rest = steps.step([(key, LONG[lengths[key] :])])[0]
        np.testing.assert_array_equal(rest, expected[lengths[key] :])
    steps.lengths["d"] = 700
    np.testing.assert_array_equal(*steps.step([("d", LONG[:9]), ("first", LONG[:9])]))


def make_batch(
    slots: object = 1, positions: tuple[int, ...] = (0, 1, 2), saves: list[list[int]] | None = None
) -> StepBatch:
    count = len(positions)
    return StepBatch(
        token_ids=np.zeros(count, np.int32),
        positions=np.array(positions, np.int32),
        query_start_loc=np.array([0, count], np.int32),
        seq_lens=np.array([max(positions) + 1], np.int32),
        block_table=np.ones((1, 1), np.int32),
        logits_indices=np.arange(count, dtype=np.int32),
        state_slots=None if slots is None else np.atleast_1d(np.array(slots, np.int32)),
        state_saves=None if saves is None else np.array(saves, np.int32).reshape(len(saves), -1),
    )


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"slots": None}, "state_slots must name a slot for each request"),
        ({"slots": [1, 2]}, "as many entries as seq_lens"),
        ({"slots": 8}, "state slot 8 is out of range; there are 8"),
        ({"slots": -1}, "state slot -1 is out of range"),
        ({"positions": (0, 1, 3)}, "positions of a request must follow each other"),
        ({"saves": [[0, 2]]}, "must have 3 columns"),
        ({"saves": [[0, 2, 1]]}, "used twice"),
        ({"saves": [[0, 2, 8]]}, "state slot 8 is out of range"),
        ({"saves": [[0, 2, 3], [0, 3, 3]]}, "used twice"),
        ({"saves": [[1, 2, 3]]}, "request 1 is out of range"),
        ({"saves": [[-1, 2, 3]]}, "request -1 is out of range"),
        ({"saves": [[0, 0, 3]]}, "no row at position -1"),
        ({"saves": [[0, 4, 3]]}, "no row at position 3"),
        ({"saves": [[0, 3, 3], [0, 2, 4]]}, "must ascend"),
        ({"saves": [[0, 3, 3], [0, 3, 4]]}, "must ascend"),
    ],
)
def test_steps_with_bad_states_are_refused(changes: dict[str, object], match: str) -> None:
    backend = backend_of("delta")
    with pytest.raises(ValueError, match="init_state_cache"):
        backend.forward(make_batch())
    backend.init_state_cache(8)
    with pytest.raises(ValueError, match=match):
        backend.forward(make_batch(**changes))  # type: ignore[arg-type]
    good = backend.forward(make_batch()).copy()
    np.testing.assert_array_equal(backend.forward(make_batch(saves=[[0, 3, 0]])), good)
    with pytest.raises(ValueError, match="state slot out of range: 3 to 8 of 8"):
        backend.copy_states([(3, 8)])


def test_two_requests_may_not_share_a_slot() -> None:
    steps = Stepper(backend_of("scan"), slots={"a": 4, "b": 4})
    with pytest.raises(ValueError, match="used twice"):
        steps.step([("a", IDS), ("b", IDS)])


def test_a_slot_holds_the_states_of_all_layers() -> None:
    assert backend_of("delta").state_bytes_per_slot() == 4 * 4 * 16 * 32
    assert backend_of("conv_2_odd").state_bytes_per_slot() == 192  # 37 values, whole cache lines
    backend = backend_of("conv_3")
    backend.init_state_cache(2)
    backend.free_state_cache()
    with pytest.raises(ValueError, match="init_state_cache"):
        backend.forward(make_batch())


def program() -> _C.Program:
    made = _C.Program(isa=VARIANTS[0], num_threads=1, block_size=16, kv_dtype="float32")
    for width in (32, 32, 4, 2, 32):
        made.add_buffer(width, False)
    made.add_vector(int(QuantType.F32), np.zeros(8, np.uint8), 1, 2, 0.0)
    made.add_vector(int(QuantType.F32), np.zeros(4 * 96, np.uint8), 32, 3, 0.0)
    made.add_state_layer(2 * 16 * 16)
    made.add_state_layer(2 * 32)
    return made


@pytest.mark.parametrize(
    ("operation", "arguments", "match"),
    [
        ("gated_delta", (0, 0, 1, 3, 3, 4, 0, 0, 0, 2, 3, False), "multiple of key heads"),
        ("gated_delta", (0, 0, 1, 2, 3, 4, 0, 0, 0, 2, 2, False), "a has 4 columns"),
        ("gated_delta", (0, 0, 1, 3, 3, 4, 0, 0, 1, 2, 2, False), "has 64 values where 512"),
        ("gated_delta", (0, 0, 1, 3, 3, 4, 0, 0, 2, 2, 2, False), "state is out of range"),
        ("gated_delta", (0, 0, 1, 3, 3, 4, 1, 0, 0, 2, 2, False), "has 96 values where 2"),
        ("gated_delta", (0, 0, 1, 3, 3, 4, -1, 0, 0, 2, 2, False), "needs decay"),
        ("gated_delta", (0, 0, 1, 3, 3, 1, 0, 0, 0, 2, 2, False), "buffer of its own"),
        ("gated_delta", (0, 0, 9, 3, 3, 1, 0, 0, 0, 2, 2, False), "id 9 is out of range"),
        ("selective_scan", (0, 1, 1, 2, 4, 0, 0, 0, 0, 2, 2, 0.0, 1.0), "dt has 4 columns"),
        ("selective_scan", (0, 1, 1, 3, 4, 0, 0, 0, 0, 2, 2, 1.0, 0.0), "no such limits"),
        ("selective_scan", (0, 1, 1, 3, 4, 0, 0, 0, 0, 2, 0, 0.0, 1.0), "multiple of groups"),
        ("short_conv", (0, 1, -1, 4, 1, 9, None), "supported are 2 to 8"),
        ("short_conv", (0, 0, -1, 4, 1, 3, None), "has 2 values where 96"),
        ("short_conv", (0, 1, 0, 4, 1, 3, None), "has 2 values where 32"),
        ("short_conv", (0, 1, -1, 4, 0, 3, None), "has 512 values where 64"),
        ("short_conv", (0, 1, -1, 0, 1, 3, None), "buffer of its own"),
        ("short_conv", (0, 1, -1, 4, 1, 3, "swiglu_oai"), "product of two"),
        ("add_state_layer", (0,), "between 1 and"),
    ],
)
def test_operations_that_do_not_fit_are_refused(
    operation: str, arguments: tuple[object, ...], match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        getattr(program(), operation)(*arguments)


def test_what_has_no_kernel_is_an_unsupported_model() -> None:
    plan = RECURRENCES["conv_3"].plan()
    broken = structs.replace(plan, state_layers=())
    with pytest.raises(UnsupportedModelError, match=r"ShortConv\(rec\.weight\).*out of range"):
        NativeBackend(broken, num_threads=1)
