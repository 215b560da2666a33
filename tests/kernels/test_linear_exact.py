"""Promise 1 in the linear kernels: a row's value depends on nothing but the row and the weights.

Every comparison here is bitwise. Also: integer extremes, values that are not finite, zero rows.
"""

from __future__ import annotations

import numpy as np
import pytest

from tellin.kernels import _C
from tellin.loading.tensors import QuantType
from tests.kernels import linear_cases as cases

VARIANTS = _C.linear_variants()
MODES = [
    (t, precision)
    for t in QuantType
    for precision in ("int8", "int16", "float32")
    if precision == "float32" or t in cases.BLOCK_TYPES
]
MODE_IDS = [f"{t.name}-{precision}" for t, precision in MODES]
SENTINEL = np.float32(-12345.0)


def pack(variant: str, w: cases.FileTensor, precision: str) -> _C.PackedLinear:
    return _C.PackedLinear(variant, int(w.quant_type), w.data, w.n, w.k, precision)


def run(packed: _C.PackedLinear, x: cases.Floats, n: int) -> cases.Floats:
    out = np.full((x.shape[0], n), SENTINEL, np.float32)
    packed.run(x, out, 0, x.shape[0], 0, packed.num_groups)
    return out


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("quant_type", "precision"), MODES, ids=MODE_IDS)
def test_rectangles_and_batches_are_bitwise_equal(
    variant: str, quant_type: QuantType, precision: str
) -> None:
    """Batches of 1 to 40 rows, random rectangles, rows at other positions; no stray writes."""
    rng = np.random.default_rng(int(quant_type))
    n, k = 150, {256: 512, 128: 640, 32: 352, 1: 301}[quant_type.block_size]
    w = cases.random_tensor(quant_type, n, k)
    packed = pack(variant, w, precision)
    x = rng.standard_normal((40, k)).astype(np.float32) * rng.uniform(0.1, 9, (40, 1))
    x = x.astype(np.float32)
    full = run(packed, x, n)
    assert np.isfinite(full).all()
    for m in range(1, 40):
        first = int(rng.integers(0, 40 - m + 1))
        part = run(packed, x[first : first + m], n)
        np.testing.assert_array_equal(part, full[first : first + m], err_msg=f"batch of {m}")
    order = rng.permutation(40)
    np.testing.assert_array_equal(run(packed, x[order], n), full[order])
    for _ in range(60):
        m0, m1 = np.sort(rng.integers(0, 41, 2)).tolist()
        g0, g1 = np.sort(rng.integers(0, packed.num_groups + 1, 2)).tolist()
        out = np.full_like(full, SENTINEL)
        packed.run(x, out, m0, m1, g0, g1)
        expected = np.full_like(full, SENTINEL)
        expected[m0:m1, 16 * g0 : 16 * g1] = full[m0:m1, 16 * g0 : 16 * g1]
        np.testing.assert_array_equal(out, expected, err_msg=f"rectangle {m0, m1, g0, g1}")


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    ("quant_type", "precision"),
    [
        (QuantType.Q4_1, "int8"),
        (QuantType.Q6_K, "int16"),
        (QuantType.IQ4_NL, "int16"),
        (QuantType.IQ4_XS, "int8"),
        (QuantType.MXFP4, "int8"),
        (QuantType.F16, "float32"),
    ],
    ids=["Q4_1", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4", "F16"],
)
def test_batches_beyond_one_pass(variant: str, quant_type: QuantType, precision: str) -> None:
    """More tokens than share one pass over the weights."""
    n, k = 48, 512
    w = cases.random_tensor(quant_type, n, k)
    packed = pack(variant, w, precision)
    x = np.random.default_rng(3).standard_normal((700, k)).astype(np.float32)
    full = run(packed, x, n)
    for m in (0, 95, 191, 192, 350, 699):
        np.testing.assert_array_equal(run(packed, x[m : m + 1], n), full[m : m + 1])


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("quant_type", cases.BLOCK_TYPES, ids=lambda t: t.name)
@pytest.mark.parametrize("code_byte", [0x00, 0xFF, 0x7F, 0x80])
@pytest.mark.parametrize("sign", ["plus", "minus", "alternating"])
@pytest.mark.parametrize("precision", ["int8", "int16"])
def test_extreme_integers_do_not_saturate(
    variant: str, quant_type: QuantType, code_byte: int, sign: str, precision: str
) -> None:
    """All codes and all activations at their extremes: int16 partial sums must not wrap or clip.

    Kernels of many rows sum in another way than those of few.
    """
    n, k = 16, 512
    blocks = np.full((n * k // quant_type.block_size, quant_type.block_bytes), code_byte, np.uint8)
    cases.set_scales(quant_type, blocks, 0.01)
    data = blocks.reshape(-1)
    w = cases.FileTensor(quant_type, data, cases.dequantize(quant_type, data, n, k))
    most, least = 223 / 128, -224 / 128  # alone in a block: 127 and -128 steps beyond a zero
    x = np.full((3, k), least if sign == "minus" else most, np.float32)
    if sign == "alternating":
        x[:, 1::2] = least
    packed = pack(variant, w, precision)
    out = run(packed, x, n)
    np.testing.assert_array_equal(run(packed, np.repeat(x[:1], 41, axis=0), n), out[[0] * 41])
    expected, magnitude = cases.reference_linear(x, w, precision)
    scale_sum = np.abs(w.values).max() * k + 2 * magnitude + 512
    assert (np.abs(out - expected) <= 4 * k * np.finfo(np.float32).eps * scale_sum).all()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("quant_type", "precision"), MODES, ids=MODE_IDS)
def test_not_finite_activations_reach_every_output(
    variant: str, bad: float, quant_type: QuantType, precision: str
) -> None:
    """A NaN or infinity in a row never looks healthy, and the neighbours do not feel it."""
    n, k = 33, 512
    w = cases.random_tensor(quant_type, n, k)
    packed = pack(variant, w, precision)
    for rows in (9, 41):
        x = np.random.default_rng(1).standard_normal((rows, k)).astype(np.float32)
        clean = run(packed, x, n)
        x[4, 77] = bad
        out = run(packed, x, n)
        assert not np.isfinite(out[4]).any()
        if precision != "float32":
            assert np.isnan(out[4]).all()
        np.testing.assert_array_equal(np.delete(out, 4, 0), np.delete(clean, 4, 0))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("quant_type", cases.BLOCK_TYPES, ids=lambda t: t.name)
@pytest.mark.parametrize("value", [0.0, 1e-40, 1e-26, 1e-23, 1e29, 1e34])
@pytest.mark.parametrize("precision", ["int8", "int16"])
def test_tiny_and_huge_activations(
    variant: str, quant_type: QuantType, value: float, precision: str
) -> None:
    """Blocks of zeros, subnormals and large values: no NaN out of finite sums up to 2**100."""
    n, k = 16, 256
    w = cases.random_tensor(quant_type, n, k)
    x = np.full((2, k), value, np.float32)
    out = run(pack(variant, w, precision), x, n)
    if value < (2.0**-80 if precision == "int8" else 2.0**-100):
        np.testing.assert_array_equal(out, 0)
    elif value > 2.0**100 and precision == "int8":
        assert np.isnan(out).all()
    else:
        expected, magnitude = cases.reference_linear(x, w, precision)
        bound = 1e-5 * (magnitude + value * float(np.abs(w.values).max()) * k)
        assert (np.abs(out - expected) <= bound).all()


def test_wide_variants_agree_bitwise() -> None:
    """All of x86-64 do the same roundings in the same order."""
    wide = [v for v in VARIANTS if v in ("avx2", "avxvnni", "avx512", "amx")]
    rng = np.random.default_rng(5)
    for quant_type, precision in MODES:
        k = {256: 512, 128: 640, 32: 608, 1: 303}[quant_type.block_size]
        w = cases.random_tensor(quant_type, 70, k)
        for rows in (7, 41):
            x = rng.standard_normal((rows, k)).astype(np.float32)
            results = [run(pack(v, w, precision), x, w.n) for v in wide]
            for other in results[1:]:
                np.testing.assert_array_equal(
                    other, results[0], err_msg=f"{quant_type.name} {precision} {rows}"
                )


@pytest.mark.skipif(not {"amx", "avx512"} <= set(VARIANTS), reason="this processor has no tiles")
@pytest.mark.parametrize("quant_type", cases.BLOCK_TYPES, ids=lambda t: t.name)
@pytest.mark.parametrize("k", [1280, 2304])
def test_tiles_agree_with_avx512(quant_type: QuantType, k: int) -> None:
    """Rows of several chunks of codes, equal and not; tiles of 11 to 16 rows; several passes."""
    w = cases.random_tensor(quant_type, 70, k)
    x = np.random.default_rng(k).standard_normal((260, k)).astype(np.float32)
    tiles, vectors = pack("amx", w, "int8"), pack("avx512", w, "int8")
    expected = run(vectors, x, w.n)
    for rows in (31, 33, 49, 97, 193, 260):
        np.testing.assert_array_equal(run(tiles, x[:rows], w.n), expected[:rows])


@pytest.mark.parametrize("precision", ["int8", "int16"])
@pytest.mark.parametrize("quant_type", cases.BLOCK_TYPES, ids=lambda t: t.name)
def test_nearly_constant_rows(quant_type: QuantType, precision: str) -> None:
    """Their 8-bit zero is at its limit; sums are the same alone, in a batch, in every variant."""
    w = cases.random_tensor(quant_type, 70, 512)
    noise = np.random.default_rng(6).standard_normal((10, 512))
    spread = np.array([0, 1e-7, 1e-6, 1e-5, 1e-4, 1e-4, 1e-3, 1e-2, 0.1, 1])[:, None]
    x = ((3.7 + spread * noise) * np.tile([1, -1], 5)[:, None]).astype(np.float32)
    wide = [v for v in VARIANTS if v in ("avx2", "avxvnni", "avx512", "amx")]
    results = []
    for variant in wide or VARIANTS:
        packed = pack(variant, w, precision)
        results.append(run(packed, x, w.n))
        alone = np.concatenate([run(packed, x[m : m + 1], w.n) for m in range(10)])
        np.testing.assert_array_equal(alone, results[-1], err_msg=variant)
        np.testing.assert_array_equal(results[-1], results[0], err_msg=variant)


@pytest.mark.parametrize("precision", ["int8", "int16", "float32"])
def test_any_exponent_of_mxfp4(precision: str) -> None:
    """Scales that no product with a scale of activations keeps normal, beside ordinary ones."""
    n, k = 96, 512
    rng = np.random.default_rng(9)
    blocks = cases.random_blocks(QuantType.MXFP4, rng, n * k // 32)
    rows = blocks.reshape(n, k // 32, -1)
    rows[:16, 3, 0] = rng.integers(0, 30, 16)
    rows[32:48, 5, 0] = np.arange(0, 16) // 8  # the two subnormal ones
    rows[64:80, :, 0] = rng.integers(0, 60, (16, k // 32))
    data = blocks.reshape(-1)
    w = cases.FileTensor(QuantType.MXFP4, data, cases.dequantize(QuantType.MXFP4, data, n, k))
    x = rng.standard_normal((64, k)).astype(np.float32)
    x[:16] *= np.float32(2.0**-70)
    x[16:32] *= np.float32(2.0**90)
    wide = [v for v in VARIANTS if v in ("avx2", "avxvnni", "avx512", "amx")]
    results = []
    for variant in wide or VARIANTS:
        packed = pack(variant, w, precision)
        results.append(run(packed, x, n))
        alone = np.concatenate([run(packed, x[m : m + 1], n) for m in range(64)])
        np.testing.assert_array_equal(alone, results[-1], err_msg=variant)
        np.testing.assert_array_equal(results[-1], results[0], err_msg=variant)
    expected, magnitude = cases.reference_linear(x, w, precision)
    bound = 1e-4 * magnitude + k * 2.0**-126
    assert (np.abs(results[0] - expected) <= bound).all()


@pytest.mark.parametrize("variant", VARIANTS)
def test_unaligned_file_bytes(variant: str) -> None:
    """Tensors of a memory map start anywhere."""
    w = cases.random_tensor(QuantType.Q4_K, 20, 512)
    expected = run(pack(variant, w, "int8"), np.ones((1, 512), np.float32), w.n)
    for shift in (1, 3, 7):
        room = np.zeros(w.data.size + 16, np.uint8)
        room[shift : shift + w.data.size] = w.data
        moved = cases.FileTensor(w.quant_type, room[shift : shift + w.data.size], w.values)
        out = run(pack(variant, moved, "int8"), np.ones((1, 512), np.float32), w.n)
        np.testing.assert_array_equal(out, expected)
