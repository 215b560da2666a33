"""Blocks without a scale: packing makes their codes neutral, and their sums add nothing.

Kernels may then take any number for such a scale (packed_format.h); values stay what they were.
Formats with a code table have no code for that, and keep their scales.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from tellin.kernels import _C
from tellin.loading.tensors import BLOCK_SIZES, QuantType
from tests.kernels import linear_cases as cases
from tests.kernels.test_linear import assert_close, run

VARIANTS = _C.linear_variants()
NUM_BITS = {
    QuantType.Q4_0: 4,
    QuantType.Q4_1: 4,
    QuantType.Q5_0: 5,
    QuantType.Q5_1: 5,
    QuantType.Q8_0: 8,
    QuantType.Q2_K: 2,
    QuantType.Q3_K: 3,
    QuantType.Q4_K: 4,
    QuantType.Q5_K: 5,
    QuantType.Q6_K: 6,
}
# Those without minima.
ZERO_POINTS = {
    QuantType.Q4_0: 8,
    QuantType.Q5_0: 16,
    QuantType.Q8_0: 128,
    QuantType.Q3_K: 4,
    QuantType.Q6_K: 32,
}
CODE_TABLES = (QuantType.IQ4_NL, QuantType.IQ4_XS, QuantType.MXFP4)
PER_16 = (QuantType.Q2_K, QuantType.Q3_K, QuantType.Q6_K)


def clear_sub_scales(quant_type: QuantType, blocks: cases.Bytes, rng: np.random.Generator) -> None:
    """Zeroes a fifth of the scales of sub-blocks, where a format has such."""
    if quant_type is QuantType.Q6_K:
        blocks[:, 192:208] *= rng.integers(0, 5, (len(blocks), 16), dtype=np.uint8) > 0
    elif quant_type is QuantType.Q2_K:
        blocks[:, :16] &= np.where(rng.integers(0, 5, (len(blocks), 16)) == 0, 0xF0, 0xFF).astype(
            np.uint8
        )
    elif quant_type is QuantType.Q3_K:  # six bits of 32 are zero: sub-blocks 0 and 9
        blocks[:, 96] &= 0xF0
        blocks[:, 104] = (blocks[:, 104] & ~np.uint8(3)) | 2
        blocks[:, 97] &= 0x0F
        blocks[:, 105] = (blocks[:, 105] & ~np.uint8(0x30)) | 0x20
    elif quant_type in (QuantType.Q4_K, QuantType.Q5_K):  # sub-blocks 2 and 5
        blocks[:, 4 + 2] &= 0xC0
        blocks[:, 4 + 1] &= 0x3F
        blocks[:, 4 + 9] &= 0xF0
    elif quant_type is QuantType.IQ4_XS:  # six bits of 32 are zero: sub-blocks 2 and 5
        blocks[:, 5] &= 0xF0
        blocks[:, 6] &= 0x0F
        blocks[:, 2] = (blocks[:, 2] & 0xCF) | 0x20
        blocks[:, 3] = (blocks[:, 3] & 0xF3) | 0x08


def tensor_with_zero_scales(
    quant_type: QuantType, n: int, k: int, share: float
) -> cases.FileTensor:
    rng = np.random.default_rng((int(quant_type), n, k))
    blocks = cases.random_blocks(quant_type, rng, n * k // BLOCK_SIZES[quant_type][0])
    clear_sub_scales(quant_type, blocks, rng)
    for sign in (0x00, 0x80):
        chosen = rng.random(len(blocks)) < share / 2 if share < 1 else slice(sign // 128, None, 2)
        if (
            quant_type is QuantType.MXFP4
        ):  # zeros of both signs, of which writers make the least scale
            blocks[chosen] &= 0x88
            blocks[chosen, 0] = 0
        else:
            offset = cases.SCALE_OFFSETS[quant_type][0]
            blocks[chosen, offset], blocks[chosen, offset + 1] = 0, sign
    data = blocks.reshape(-1)
    return cases.FileTensor(quant_type, data, cases.dequantize(quant_type, data, n, k))


def packed_codes(w: cases.FileTensor) -> npt.NDArray[np.int64]:
    """``[rows, features]`` codes of the packed groups, padding included."""
    bits, per_256 = NUM_BITS[w.quant_type], w.quant_type.block_size == 256
    packed = _C.PackedLinear(VARIANTS[0], int(w.quant_type), w.data, w.n, w.k, "int8")
    blocks = 8 if per_256 else 2
    features = -(-w.k // (32 * blocks)) * 32 * blocks
    planes = packed.bytes().reshape(packed.num_groups, features // (32 * blocks), -1)
    planes = planes[..., planes.shape[-1] - blocks * bits * 64 :]
    planes = planes.reshape(packed.num_groups, features // 32, bits, 16, 4).astype(np.int64)

    def plane(width: int, first: int, quad: int) -> npt.NDArray[np.int64]:
        if width == 8:
            return planes[:, :, first + quad]
        if width == 4:
            return planes[:, :, first + quad % 4] >> (4 * (quad // 4)) & 15
        if width == 2:
            return planes[:, :, first + quad // 4] >> (2 * (quad % 4)) & 3
        return planes[:, :, first] >> quad & 1

    widths = {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 8: (8,)}[bits]
    quads = []
    for quad in range(8):
        code, shift = np.zeros((packed.num_groups, features // 32, 16, 4), np.int64), 0
        for width in widths:
            code |= plane(width, shift, quad) << shift
            shift += width
        quads.append(code)
    stacked = np.stack(quads, axis=2)  # group, block, quad, row, feature
    return stacked.transpose(0, 3, 1, 2, 4).reshape(packed.num_groups * 16, features)


def size_of(quant_type: QuantType) -> tuple[int, int]:
    return 40, 768 if quant_type.block_size == 256 else 608


@pytest.mark.parametrize("quant_type", NUM_BITS, ids=lambda t: t.name)
def test_codes_without_a_scale_are_neutral(quant_type: QuantType) -> None:
    n, k = size_of(quant_type)
    w = tensor_with_zero_scales(quant_type, n, k, 0.3)
    codes = packed_codes(w)
    zero_point = ZERO_POINTS.get(quant_type, 0)
    step = 16 if quant_type in PER_16 else 32
    values = w.values.reshape(n, -1, step)
    without_scale = (values == values[..., :1]).all(axis=2)  # random codes are never all equal
    assert 0.1 < without_scale.mean() < 0.6
    inside = codes[:n, :k].reshape(values.shape)
    assert (inside[without_scale] == zero_point).all()
    assert (inside[~without_scale] != zero_point).any(axis=-1).all()
    assert (codes[n:] == zero_point).all()
    assert (codes[:, k:] == zero_point).all()
    if quant_type in ZERO_POINTS:
        np.testing.assert_array_equal(inside == zero_point, values == 0)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("quant_type", cases.BLOCK_TYPES, ids=lambda t: t.name)
@pytest.mark.parametrize("precision", ["int8", "int16", "float32"])
def test_values_beside_zero_scales(variant: str, quant_type: QuantType, precision: str) -> None:
    n, k = size_of(quant_type)
    w = tensor_with_zero_scales(quant_type, n, k, 0.3)
    x = np.random.default_rng(4).standard_normal((64, k)).astype(np.float32)
    x[2] += 5  # zeros of activations at their limits
    x[3] -= 5
    out = run(variant, w, x, precision)
    assert_close(out, x, w, precision)
    for m in (1, 4, 16):
        np.testing.assert_array_equal(run(variant, w, x[:m], precision), out[:m])


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("quant_type", [*ZERO_POINTS, *CODE_TABLES], ids=lambda t: t.name)
@pytest.mark.parametrize("precision", ["int8", "int16", "float32"])
def test_nothing_but_zero_scales(variant: str, quant_type: QuantType, precision: str) -> None:
    n, k = size_of(quant_type)
    w = tensor_with_zero_scales(quant_type, n, k, 1)
    assert not w.values.any()
    x = np.random.default_rng(5).standard_normal((64, k)).astype(np.float32) + 2
    x[:8] *= np.float32(2.0**96)
    x[8:16] *= np.float32(2.0**-78)
    for m in (1, 4, 16, 64):
        np.testing.assert_array_equal(run(variant, w, x[:m], precision), 0)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("quant_type", cases.BLOCK_TYPES, ids=lambda t: t.name)
@pytest.mark.parametrize("precision", ["int8", "int16"])
@pytest.mark.parametrize("share", [0.3, 1])
def test_nan_reaches_every_output_of_its_row(
    variant: str, quant_type: QuantType, precision: str, share: float
) -> None:
    """Weights of zero included, with as many rows as kernels of every kind take."""
    n, k = size_of(quant_type)
    w = tensor_with_zero_scales(quant_type, n, k, share)
    x = np.random.default_rng(6).standard_normal((64, k)).astype(np.float32)
    for m in (1, 4, 16, 64):
        bad = x[:m].copy()
        bad[m // 2, 300] = np.nan
        out, clean = run(variant, w, bad, precision), run(variant, w, x[:m], precision)
        assert np.isnan(out[m // 2]).all()
        np.testing.assert_array_equal(np.delete(out, m // 2, 0), np.delete(clean, m // 2, 0))
