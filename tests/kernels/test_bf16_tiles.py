"""The variant "amx-bf16": weights and activations as bfloat16, alone and in batches (promise 1)."""

from __future__ import annotations

import numpy as np
import pytest

from tellin.kernels import _C
from tellin.loading.tensors import QuantType
from tests.kernels import linear_cases as cases
from tests.kernels.test_linear_exact import run


def pack(w: cases.FileTensor) -> _C.PackedLinear:
    return _C.PackedLinear("amx-bf16", int(w.quant_type), w.data, w.n, w.k, "int8")


def is_here() -> bool:
    try:
        pack(cases.random_tensor(QuantType.Q8_0, 16, 256))
    except ValueError:  # no such variant
        return False
    return True


pytestmark = pytest.mark.skipif(not is_here(), reason="this processor has no tiles of bfloat16")


def nearest_even(x: cases.Floats) -> cases.Floats:
    bits = x.view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    bits = (bits + np.uint32(0x7FFF) + odd) & np.uint32(0xFFFF0000)
    return bits.view(np.float32)


def half_up(w: cases.Floats) -> cases.Floats:
    bits = (w.view(np.uint32) + np.uint32(0x8000)) & np.uint32(0xFFFF0000)
    return bits.view(np.float32)


def tile_sums(x: cases.Floats, w: cases.Floats) -> cases.Floats:
    """For each block of 32 features the sums of even and odd ones, one product after the other."""
    out = np.zeros((len(x), len(w)), np.float32)
    for begin in range(0, x.shape[1], 32):
        sums = np.zeros((2, *out.shape), np.float32)
        for k in range(begin, begin + 32):
            sums[k % 2] += x[:, None, k] * w[None, :, k]  # the product of two bfloat16 is exact
        out += sums[0] + sums[1]
    return out


@pytest.mark.parametrize("quant_type", [QuantType.Q4_0, QuantType.Q8_0, QuantType.Q6_K])
def test_every_bit(quant_type: QuantType) -> None:
    """Formats without minima: scale times code is one rounding, whoever computes it."""
    w = cases.random_tensor(quant_type, 40, 768)
    x = np.random.default_rng(1).standard_normal((21, 768)).astype(np.float32)
    expected = tile_sums(nearest_even(x), half_up(w.values))
    np.testing.assert_array_equal(run(pack(w), x, w.n), expected)


@pytest.mark.parametrize("quant_type", cases.BLOCK_TYPES, ids=lambda t: t.name)
def test_values_and_batches(quant_type: QuantType) -> None:
    """Near float64; equal alone, in any batch, in any rectangle of it."""
    w = cases.random_tensor(quant_type, 70, 2304)
    x = np.random.default_rng(2).standard_normal((260, w.k)).astype(np.float32)
    packed = pack(w)
    every = run(packed, x, w.n)
    values, magnitudes = cases.reference_linear(x, w, "float32")
    assert np.all(np.abs(every - values) <= 2**-9 * magnitudes + 1e-30)
    for rows in (1, 2, 15, 16, 17, 32, 33, 49, 97, 192, 193):
        np.testing.assert_array_equal(run(packed, x[:rows], w.n), every[:rows], err_msg=str(rows))
    part = np.full_like(every, -1)
    packed.run(x, part, 3, 40, 1, 4)
    np.testing.assert_array_equal(part[3:40, 16:64], every[3:40, 16:64])
    part[3:40, 16:64] = -1
    assert np.all(part == -1), "nothing else is written"


def test_what_is_not_finite_makes_a_row_nan() -> None:
    w = cases.random_tensor(QuantType.Q4_1, 32, 256)
    x = np.random.default_rng(3).standard_normal((6, 256)).astype(np.float32)
    good = run(pack(w), x, w.n)
    for row, value in enumerate((np.nan, np.inf, -np.inf, 1e31)):
        x[row, 100] = value
    out = run(pack(w), x, w.n)
    assert np.isnan(out[:4]).all()
    np.testing.assert_array_equal(out[4:], good[4:])
