"""Routers with sigmoids, biases to choose by and a factor: native code beside the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tellin.exceptions import UnsupportedModelError
from tellin.kernels import _C
from tellin.kernels.reference import ReferenceBackend
from tellin.models.plan import ir
from tests.kernels.runtime_plans import float_tensor
from tests.kernels.test_experts import Case, ids_of, native, run, with_experts

BIASES = {
    "none": None,
    "small": np.random.default_rng(9).normal(0, 0.1, 16).astype(np.float32),
    "decides": np.where(np.arange(16) < 4, 100, 0).astype(np.float32),
}


def plan_of(case: Case, bias: str, router: np.ndarray | None = None, **changes: Any) -> ir.Plan:
    vector = BIASES[bias]
    tensor = None if vector is None else float_tensor("bias", vector)
    return with_experts(case.plan(router=router), selection_bias=tensor, **changes)


@pytest.mark.parametrize("isa", _C.linear_variants())
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_shares_match_the_reference_backend(
    scoring: str, bias: str, normalize: bool, isa: str
) -> None:
    case = Case(width=64, inner=32, out_width=48, num_experts=16, top_k=3, normalize=normalize)
    plan = plan_of(case, bias, scoring=scoring, scale=2.5)
    ids = ids_of(40)
    expected = run(ReferenceBackend(plan), ids)
    backend = native(plan, isa=isa)
    out = run(backend, ids)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=2e-5 * np.abs(expected).max())
    for i in (0, 7, 39):  # promise 1: few rows choose in another stage
        np.testing.assert_array_equal(run(backend, ids[i : i + 1])[0], out[i])


def test_a_bias_chooses_and_is_no_share() -> None:
    """With all of the first four chosen, the result is that of a mixture of these four alone."""
    case = Case(width=64, inner=32, out_width=48, num_experts=16, top_k=4)
    four = Case(width=64, inner=32, out_width=48, num_experts=4, top_k=4)
    ids = ids_of(20)
    chosen = run(native(plan_of(case, "decides")), ids)
    alone = run(native(four.plan(router=case.router()[:, :4])), ids)
    np.testing.assert_allclose(chosen, alone, rtol=1e-5, atol=2e-5 * np.abs(alone).max())


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of the reference backend
@pytest.mark.parametrize("bias", ["none", "small"])
def test_sigmoids_have_a_value_at_infinity_and_none_of_nan(bias: str) -> None:
    case = Case(width=64, inner=32, out_width=48, num_experts=16, top_k=2)
    router = case.router()
    router[0, 3] = np.nan
    router[1, 7] = np.inf
    router[2] = -np.inf  # all shares are 0: so is the sum
    plan = plan_of(case, bias, router, scoring="sigmoid")
    out, expected = run(native(plan), [0, 1, 2, 3]), run(ReferenceBackend(plan), [0, 1, 2, 3])
    assert np.isnan(out[0]).all()
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=2e-5 * np.nanmax(np.abs(expected)))
    assert (out[2] == 0).all()


@pytest.mark.parametrize("isa", _C.linear_variants())
@pytest.mark.parametrize("bias", ["none", "small"])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_experts_are_chosen_from_the_best_groups(scoring: str, bias: str, isa: str) -> None:
    case = Case(width=64, inner=32, out_width=48, num_experts=16, top_k=3)
    groups = plan_of(case, bias, scoring=scoring, groups=4, top_groups=2)
    ids = ids_of(40)
    expected = run(ReferenceBackend(groups), ids)
    backend = native(groups, isa=isa)
    out = run(backend, ids)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=2e-5 * np.abs(expected).max())
    assert (
        (out != run(native(plan_of(case, bias, scoring=scoring), isa=isa), ids)).any(axis=1).any()
    )
    for i in (0, 7, 39):
        np.testing.assert_array_equal(run(backend, ids[i : i + 1])[0], out[i])
    scores = 1 / (1 + np.exp(-case.router()[ids])) if scoring == "sigmoid" else case.router()[ids]
    if bias == "none":  # the formula, once more: what a mixture without the other groups gives
        parts = np.sort(scores.reshape(-1, 4, 4), axis=2)
        best = parts[:, :, 2:].sum(axis=2) if scoring == "sigmoid" else parts[:, :, 3]
        router = case.router()
        for i, token in enumerate(ids):
            router[token].reshape(4, 4)[np.argsort(-best[i])[2:]] = -80
        alone = run(native(plan_of(case, bias, router, scoring=scoring), isa=isa), ids)
        np.testing.assert_allclose(out, alone, rtol=1e-5, atol=2e-5 * np.abs(alone).max())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"groups": 3, "top_groups": 1}, "equally many"),
        ({"groups": 4, "top_groups": 5}, "1 to all groups"),
        ({"groups": 8, "top_groups": 1}, "as many experts"),
        ({"groups": 16, "top_groups": 4, "scoring": "sigmoid"}, "two or more"),
    ],
)
def test_groups_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    case = Case(width=64, inner=32, out_width=48, num_experts=16, top_k=3)
    with pytest.raises(UnsupportedModelError, match=message):
        native(plan_of(case, "none", **changes))
