"""Linear kernels against float64 references: every storage type, variant, precision and tail."""

from __future__ import annotations

import numpy as np
import pytest

from tellin.kernels import _C
from tellin.loading.tensors import QuantType
from tests.kernels import linear_cases as cases

VARIANTS = _C.linear_variants()
EPS = np.finfo(np.float32).eps


def run(variant: str, w: cases.FileTensor, x: cases.Floats, precision: str) -> cases.Floats:
    packed = _C.PackedLinear(variant, int(w.quant_type), w.data, w.n, w.k, precision)
    out = np.full((x.shape[0], w.n), -7.0, np.float32)
    packed.run(x, out, 0, x.shape[0], 0, packed.num_groups)
    return out


def assert_close(out: cases.Floats, x: cases.Floats, w: cases.FileTensor, precision: str) -> None:
    """|error| <= roundings x half an ulp x the sum of the products' magnitudes.

    Roundings: one per product (float), four per block of 32 (integers). A format with minima
    computes scale * code and minimum apart, each of which may be as large as the largest weight
    times x.
    """
    expected, magnitude = cases.reference_linear(x, w, precision)
    roundings = (w.k if precision == "float32" else 4 * w.k / 32) + 4
    largest = np.abs(w.values).max() * np.abs(x).astype(np.float64).sum(axis=1, keepdims=True)
    bound = roundings * EPS / 2 * (magnitude + largest)
    assert np.isfinite(out).all()
    error = np.abs(out - expected)
    assert (error <= bound).all(), f"worst error / bound {np.max(error / bound)}"


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("quant_type", list(QuantType), ids=lambda t: t.name)
def test_dequantize_rows_is_exact(variant: str, quant_type: QuantType) -> None:
    w = cases.random_tensor(quant_type, 5, 512)
    out = np.zeros((5, 512), np.float32)
    _C.dequantize_rows(variant, int(quant_type), w.data, out)
    np.testing.assert_array_equal(out, w.values)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("quant_type", cases.BLOCK_TYPES, ids=lambda t: t.name)
@pytest.mark.parametrize("precision", ["int8", "int16"])
@pytest.mark.parametrize(("m", "n"), [(1, 16), (3, 40), (13, 70)])
def test_integers_match_float64(
    variant: str, quant_type: QuantType, precision: str, m: int, n: int
) -> None:
    k = 768 if quant_type.block_size == 256 else 608
    w = cases.random_tensor(quant_type, n, k)
    x = np.random.default_rng(m).standard_normal((m, k)).astype(np.float32)
    assert_close(run(variant, w, x, precision), x, w, precision)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("quant_type", list(QuantType), ids=lambda t: t.name)
@pytest.mark.parametrize(("m", "n"), [(1, 16), (3, 40), (13, 70)])
def test_float32_matches_float64(variant: str, quant_type: QuantType, m: int, n: int) -> None:
    k = {256: 768, 128: 640, 32: 608, 1: 611}[quant_type.block_size]
    w = cases.random_tensor(quant_type, n, k)
    x = np.random.default_rng(m).standard_normal((m, k)).astype(np.float32)
    assert_close(run(variant, w, x, "float32"), x, w, "float32")
