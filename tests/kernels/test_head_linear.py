"""Linear layers of each head: native code beside the reference, whatever the weights' type."""

from __future__ import annotations

import numpy as np
import pytest

from tellin.exceptions import UnsupportedModelError
from tellin.kernels import _C
from tellin.kernels.reference import ReferenceBackend
from tellin.loading.tensors import QuantType
from tellin.models.plan import ir
from tests.kernels.runtime_plans import TOKENS, float_tensor
from tests.kernels.test_experts import ids_of, matrices, native, run

HEADS = 3


def plan_of(
    quant_type: QuantType = QuantType.F32, rows: int = 48, columns: int = 64, rest: int = 8
) -> ir.Plan:
    """``concat(x, head_linear(x))`` of rows that are looked up."""
    x = ir.Buffer(0, HEADS * (columns + rest), TOKENS, "x")
    y = ir.Buffer(1, HEADS * (rows + rest), TOKENS, "y")
    out = ir.Buffer(2, x.width + y.width, TOKENS, "out")
    table = np.random.default_rng(1).standard_normal((256, x.width), dtype=np.float32)
    weight = matrices(quant_type, "gate", 1, HEADS * rows, columns)[0]
    ops = (
        ir.Embed(float_tensor("table", table), x),
        ir.HeadLinear(x, weight, y, HEADS),
        ir.Concat(x, y, out),
    )
    return ir.Plan("heads", ops, (x, y, out), (), out, out.width, out.width, out)


@pytest.mark.parametrize("isa", _C.linear_variants())
@pytest.mark.parametrize("quant_type", [QuantType.F32, QuantType.BF16, QuantType.Q8_0], ids=str)
@pytest.mark.parametrize("rest", [0, 8])
def test_heads_match_the_reference_backend(quant_type: QuantType, rest: int, isa: str) -> None:
    """Activations are float32 for quantised weights, too; rows depend on nothing else."""
    plan = plan_of(quant_type, rest=rest)
    ids = ids_of(230)
    expected = run(ReferenceBackend(plan), ids)
    backend = native(plan, isa=isa, activation_precision="int8")
    out = run(backend, ids)
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    for i in (0, 191, 229):
        np.testing.assert_array_equal(run(backend, ids[i : i + 1])[0], out[i])


def test_rows_of_a_head_must_be_whole_groups() -> None:
    with pytest.raises(UnsupportedModelError, match=r"24 rows .* multiple of 16"):
        native(plan_of(rows=24))
