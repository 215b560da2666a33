"""Records of 8-bit activations: the definition in packed_format.h, in all variants bit for bit."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tellin.kernels import _C
from tests.kernels.linear_cases import Floats, int8_records

VARIANTS = _C.linear_variants()
RECORD = np.dtype(
    [
        ("q", np.int8, 32),
        ("scale", np.float32),
        ("sum", np.float32),
        ("half_sum", np.float32, 2),
        ("zero_pair", np.int16, (3, 2)),
        ("scale_offset", np.uint16),
        ("zero_offset", np.uint16),
    ]
)
GRID = np.array([1, 1.25, 1.5, 1.75])
LARGEST, TINY = np.float32(2.0**100), np.float32(2.0**-80)
ZERO = np.zeros(1, RECORD)
ZERO["scale"], ZERO["zero_offset"] = 1, 64 * 3
NAN = ZERO.copy()
NAN["scale"], NAN["sum"], NAN["half_sum"], NAN["scale_offset"] = np.nan, np.nan, np.nan, 64 * 4

Records = npt.NDArray[np.void]


def records(variant: str, x: Floats) -> Records:
    """``[m, k / 32 rounded up to 8]`` records of ``x``."""
    rows = np.ascontiguousarray(x, dtype=np.float32)
    in_bytes = _C.quantize_rows(variant, rows).reshape(len(x), -1)
    num_records = -(-rows.shape[1] // 256) * 8  # a variant may keep more behind them
    return np.ascontiguousarray(in_bytes[:, : num_records * RECORD.itemsize]).view(RECORD)


def expected_records(x: Floats) -> Records:
    """Records of finite values, by formula."""
    scale, zero, q = int8_records(x)
    out = np.zeros((*q.shape[:2], 1), RECORD)
    sums = np.stack([q.sum(axis=2), q[..., :16].sum(axis=2), q[..., 16:].sum(axis=2)], axis=-1)
    whole = (sums + zero * np.array([32, 16, 16])) * scale.astype(np.float64)
    out["q"], out["scale"], out["sum"] = q[:, :, None], scale, whole[..., :1]
    out["half_sum"] = whole[:, :, None, 1:]
    out["zero_pair"][..., 0], out["zero_pair"][..., 1] = zero[..., None], -sums[:, :, None]
    mantissa = np.frexp(scale)[0] * 2
    out["scale_offset"] = 64 * np.searchsorted(GRID, mantissa)
    out["zero_offset"] = 64 * (zero // 32 + 3)
    return out[..., 0]


def blocks_of_all_kinds(seed: int, count: int) -> Floats:
    """``[count, 32]``: balanced, lopsided, constant, sparse, of any magnitude."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((count, 32)) * np.exp2(rng.uniform(-79, 88, (count, 1)))
    x[0::4] += np.abs(x[0::4]).max(axis=1, keepdims=True) * rng.uniform(-3, 3, (len(x[0::4]), 1))
    x[1::7] = x[1::7, :1]
    x[2::7, rng.integers(0, 32)] *= 100
    x[3::7] *= rng.integers(0, 2, x[3::7].shape)
    x[4::7] = np.abs(x[4::7]) * rng.choice((-1, 1), (len(x[4::7]), 1))
    return x.astype(np.float32)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("k", [32, 96, 576, 1536])
def test_records_follow_the_definition(variant: str, k: int) -> None:
    x = blocks_of_all_kinds(k, 40 * k // 32).reshape(40, k)
    actual = records(variant, x)
    assert actual[:, : k // 32].tobytes() == expected_records(x).tobytes()
    padding = np.ascontiguousarray(actual[:, k // 32 :])
    assert padding.tobytes() == ZERO.tobytes() * padding.size


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("precision", ["int8", "int16"])
@pytest.mark.parametrize("count", [1, 2, 3, 17])
def test_columns_of_many_rows_are_those_of_single_rows(
    variant: str, precision: str, count: int
) -> None:
    """Whatever the number of blocks and rows in a call, blocks of every kind side by side."""
    k = 352
    x = blocks_of_all_kinds(count, count * k // 32)
    x[3::11], x[5::13], x[7::17, 5] = 0, 1e-45, np.nan
    x = x.reshape(count, k)
    expected = _C.quantize_rows(variant, x, precision)
    for columns in (32, 64, 96, 128, k):
        actual = _C.quantize_rows(variant, x, precision, columns=columns)
        assert actual.tobytes() == expected.tobytes(), columns


@pytest.mark.parametrize("variant", VARIANTS)
@given(
    values=st.lists(st.floats(-1, 1, width=32), min_size=32, max_size=32),
    shift=st.floats(-4, 4, width=32),
    exponent=st.integers(-78, 97),
)
@settings(max_examples=60, deadline=None)
def test_scales_zeros_and_values(
    variant: str, values: list[float], shift: float, exponent: int
) -> None:
    """What kernels rely on, whatever the block: ranges, the grid, and half a step's distance."""
    x = ((np.array(values) + shift) * 2.0**exponent).astype(np.float32)
    record = records(variant, x[None])[0, 0]
    if np.abs(x).max() < TINY:
        assert record.tobytes() == ZERO.tobytes()
        return
    scale, q = float(record["scale"]), record["q"].astype(int)
    zero = int(record["zero_pair"][0, 0])
    assert (record["zero_pair"][:, 0] == zero).all()
    assert zero % 32 == 0
    assert abs(zero) <= 96
    assert record["zero_offset"] == 64 * (zero // 32 + 3)
    fraction, power = np.frexp(scale)
    assert 2 * fraction == GRID[record["scale_offset"] // 64]
    assert -88 <= power - 1 <= 94
    error = np.abs(scale * (q + zero) - x.astype(np.float64))
    assert (error <= scale * (0.5 + 2.0**-15)).all()
    # The next smaller scale of three significant bits would not cover the block.
    smaller = scale * (1 - 2.0**-3 if fraction == 0.5 else 1 - 0.25 / (2 * fraction))
    ends = max(x.max() / (127 + zero), -x.min() / (128 - zero))
    assert ends > smaller * (1 - 1e-6)
    for value, part in (
        (record["sum"], q),
        *zip(record["half_sum"], (q[:16], q[16:]), strict=True),
    ):
        assert float(value) == scale * (part.sum() + zero * part.size)
    assert record["zero_pair"][:, 1].tolist() == [-q.sum(), -q[:16].sum(), -q[16:].sum()]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("position", [0, 7, 15, 16, 31])
def test_special_blocks_and_their_neighbours(variant: str, position: int) -> None:
    """Values that are not finite, or too large, spoil their block only; tiny blocks are zero."""
    usual = blocks_of_all_kinds(3, 9)
    for value, expected in (
        (np.nan, NAN),
        (np.inf, NAN),
        (-np.inf, NAN),
        (-np.nan, NAN),
        (np.nextafter(LARGEST, np.float32(np.inf)), NAN),
        (-3e38, NAN),
    ):
        for block in (0, 3, 8):
            x = usual.copy()
            x[block, position] = value
            actual = records(variant, x.reshape(1, -1))[0, :9]
            rest = expected_records(np.delete(usual, block, 0).reshape(1, -1))[0]
            assert actual[block].tobytes() == expected.tobytes(), (value, block)
            assert np.delete(actual, block).tobytes() == rest.tobytes(), (value, block)
    for value in (0.0, -0.0, 1e-45, -1e-38, np.nextafter(TINY, np.float32(0))):
        x = usual.copy()
        x[4] = 0
        x[4, position] = value
        assert records(variant, x.reshape(1, -1))[0, 4].tobytes() == ZERO.tobytes(), value
    for value in (LARGEST, -LARGEST, TINY, -TINY):
        x = np.zeros((1, 32), np.float32)
        x[0, position] = value
        assert records(variant, x)[0, :1].tobytes() == expected_records(x)[0].tobytes(), value


@pytest.mark.parametrize("variant", VARIANTS)
def test_zeros_at_their_ties(variant: str) -> None:
    """Middles halfway between two zeros go to the even number of steps."""
    ratio = 32 / 127 * np.arange(-3.5, 4, 0.5)
    spread = np.exp2(np.arange(0, 6))[:, None]
    x = np.zeros((6, len(ratio), 32))
    x[..., 3], x[..., 20] = spread * (ratio + 1), spread * (ratio - 1)
    x = x.astype(np.float32).reshape(6, -1)
    actual = records(variant, x)[:, : len(ratio)]
    assert actual.tobytes() == expected_records(x).tobytes()
