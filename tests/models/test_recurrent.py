"""Recurrences: what is recorded and refused, the listing, and the reference's formulas."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tellin.exceptions import EngineError, ModelLoadError, UnsupportedModelError
from tellin.kernels.reference import ReferenceBackend
from tellin.models.plan import ir, passes
from tellin.models.plan.builder import PlanBuilder
from tellin.models.plan.ir import Buffer
from tellin.models.plan.listing import format_plan, plan_cost
from tests.models.recurrences import RECURRENCES, Conv, Delta, Recurrence, Scan
from tests.models.stepping import Stepper, logits_of
from tests.models.tiny import tiny_token_ids

IDS = tiny_token_ids(11).tolist()


@pytest.mark.parametrize("name", RECURRENCES)
def test_rows_are_those_of_the_formula_however_they_were_cut(name: str) -> None:
    """Promise 1: the bits of a row depend on the request's tokens alone."""
    recurrence = RECURRENCES[name]
    backend = ReferenceBackend(recurrence.plan())
    whole = logits_of(backend, IDS)
    np.testing.assert_allclose(whole, recurrence.expected(IDS), rtol=2e-4, atol=2e-5)
    steps = Stepper(backend, slots={"cut": 5, "other": 2})
    other = IDS[::-1]
    parts = [
        steps.step([("cut", IDS[:1])])[0],
        steps.step([("other", other[:4]), ("cut", IDS[1:7])])[1],
        steps.step([("cut", IDS[7:9]), ("other", other[4:])])[0],
        steps.step([("cut", IDS[9:])])[0],
    ]
    np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_a_copied_state_goes_on_where_the_first_one_was() -> None:
    backend = ReferenceBackend(RECURRENCES["delta"].plan())
    whole = logits_of(backend, IDS)
    steps = Stepper(backend, slots={"first": 3, "second": 6})
    steps.step([("first", IDS[:6])])
    backend.copy_states([(3, 1), (1, 6)])
    steps.lengths["second"] = 6
    for name in ("second", "first"):
        np.testing.assert_array_equal(steps.step([(name, IDS[6:])])[0], whole[6:])
    values = sum(layer.num_values for layer in backend.plan.state_layers)
    assert backend.state_bytes_per_slot() == 4 * values == 4 * 4 * 16 * 32
    backend.free_state_cache()
    with pytest.raises(EngineError, match="init_state_cache"):
        steps.step([("first", IDS[:1])])


@pytest.mark.parametrize("name", ["conv_4_silu", "delta", "scan"])
def test_states_may_be_saved_on_the_way(name: str) -> None:
    backend = ReferenceBackend(RECURRENCES[name].plan())
    whole = logits_of(backend, IDS)
    steps = Stepper(backend, slots={"first": 3, "other": 9, "a": 5, "b": 6, "c": 7})
    steps.step([("first", IDS[:2])])
    out = steps.step([("other", IDS), ("first", IDS[2:])], [(1, 4, 5), (1, 7, 6), (1, 11, 7)])
    np.testing.assert_array_equal(out[1], whole[2:])
    for copy, length in (("a", 4), ("b", 7)):
        steps.lengths[copy] = length
        np.testing.assert_array_equal(steps.step([(copy, IDS[length:])])[0], whole[length:])
    more = [("c", IDS[:3]), ("first", IDS[:3])]
    steps.lengths["c"] = len(IDS)
    np.testing.assert_array_equal(*steps.step(more))


def test_a_step_without_good_slots_is_refused() -> None:
    steps = Stepper(ReferenceBackend(RECURRENCES["scan"].plan()), slots={"a": 0, "b": 0, "c": 64})
    for names, match in (("ab", "not all different"), ("ac", "not all within 0 to 63")):
        with pytest.raises(ValueError, match=match):
            steps.step([(name, IDS) for name in names])
    for saves, match in (
        ([(0, 3, 0)], "not all different"),
        ([(0, 3, 64)], "within 0 to 63"),
        ([(0, 3, 1), (0, 2, 2)], "ascend"),
        ([(0, 12, 1)], "no row at 11"),
        ([(1, 3, 1)], "no row at 2"),
    ):
        steps.lengths["a"] = 0
        with pytest.raises(ValueError, match=match):
            steps.step([("a", IDS)], saves)


def test_widths_that_do_not_fit_are_refused() -> None:
    def refused(
        recurrence: Recurrence, match: str, error: type[Exception], **changes: np.ndarray | None
    ) -> None:
        arrays = recurrence.arrays
        changed = arrays | {name.replace("__", "."): values for name, values in changes.items()}
        recurrence.arrays = {n: values for n, values in changed.items() if values is not None}
        try:
            with pytest.raises(error, match=match):
                recurrence.plan()
        finally:
            recurrence.arrays = arrays

    conv, delta, scan = (RECURRENCES[name] for name in ("conv_3", "delta", "scan"))
    refused(Conv(9, 64), r"rec reaches over 9 rows", UnsupportedModelError)
    refused(conv, r"expected \(64, 3\)", ModelLoadError, rec__weight=np.ones((63, 3)))
    refused(conv, "kernels of 3 rows", ModelLoadError, rec__weight=np.ones((64, 4)))
    refused(conv, r"rec\.bias.*expected \(64,\)", ModelLoadError, rec__bias=np.ones(63))
    refused(delta, "rec: k has 34 columns for 2", ModelLoadError, k__weight=np.ones((34, 64)))
    refused(delta, r"rec\.dt_bias.*expected \(4,\)", ModelLoadError, rec__dt_bias=np.ones(3))
    refused(delta, r"'rec\.A_log' is missing", ModelLoadError, rec__A_log=None)
    refused(scan, "rec: b has 65 columns for 2", ModelLoadError, b__weight=np.ones((65, 64)))
    refused(Delta(1, 1, 257, 8), "matrices of 257 x 8", UnsupportedModelError)
    refused(Delta(2, 3, 8, 8), "2 key heads and 3 value heads", ModelLoadError)
    refused(Scan(3, 2, 8, 8), "3 heads in 2 groups", ModelLoadError)
    refused(Scan(2, 2, 8, 8, dt_limits=(1.0, 0.5)), "limited to 1.0 to 0.5", ModelLoadError)


def test_a_wider_convolution_may_be_read_by_parts() -> None:
    wide = RECURRENCES["conv_4_silu"]
    halves = [(0, 40), (40, 72)]

    def part(rows: tuple[int, int]) -> np.ndarray:
        b = wide.builder()
        x = b.embed("embed")
        weight = b.weight("x.weight", rows)
        out = b._buffer(weight.shape[0], ir.Rows.TOKENS, "x")
        b._ops.append(ir.Linear(x, weight, None, out))
        conv = b.short_conv(out, "rec", kernel=4, act="silu", rows=rows)
        return logits_of(ReferenceBackend(b.finish(b.gather_rows(conv))), IDS)

    whole = logits_of(ReferenceBackend(wide.plan()), IDS)
    np.testing.assert_array_equal(np.concatenate([part(rows) for rows in halves], axis=1), whole)


@pytest.mark.parametrize(
    ("record", "formula"),
    [
        (lambda b, x, y: b.mul(x, y), lambda x, y: x * y),
        (lambda b, x, y: b.act_mul(x, y, "sigmoid"), lambda x, y: y / (1 + np.exp(-x))),
    ],
)
def test_products_with_and_without_a_sigmoid(
    record: Callable[[PlanBuilder, Buffer, Buffer], Buffer],
    formula: Callable[[np.ndarray, np.ndarray], np.ndarray],
) -> None:
    recurrence = RECURRENCES["scan"]
    b = recurrence.builder()
    x = b.embed("embed")
    plan = b.finish(b.gather_rows(record(b, b.linear(x, "b"), b.linear(x, "c"))), ignore=("",))
    fused = passes.optimize(plan)
    assert isinstance(fused.ops[-1], ir.GatedLinear)
    expected = formula(*recurrence.operands(IDS, "b", "c"))
    for backend in (ReferenceBackend(plan), ReferenceBackend(fused)):
        np.testing.assert_allclose(logits_of(backend, IDS), expected, rtol=1e-4, atol=1e-6)


def test_the_listing_names_states() -> None:
    plan = RECURRENCES["delta"].plan()
    text = format_plan(plan)
    assert "gated_delta(b1, b2, b3, b4, b5) 4/2 heads x 16 x 32, state 0" in text
    assert "states     2,048 values per request in 1 recurrences: 8,192 bytes" in text
    assert plan_cost(plan).state_values == 2048
    assert "silu(conv(b1) over 4 rows, state 0)" in format_plan(RECURRENCES["conv_4_silu"].plan())
    assert "scan(b1, b2, b3, b4) 4/2 heads x 16 x 32, state 0" in format_plan(
        RECURRENCES["scan"].plan()
    )
