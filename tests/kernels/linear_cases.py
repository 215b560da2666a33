"""Random file tensors of every storage type and float64 references for the linear kernels' tests.

Bytes are drawn at random except for the scales, which stay finite and of ordinary size, so every
code, sub-scale and minimum a format can express occurs. Values come from the `gguf` package.
"""

from __future__ import annotations

from dataclasses import dataclass

import gguf
import numpy as np
import numpy.typing as npt

from tellin.loading.tensors import BLOCK_SIZES, QuantType

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

FLOAT_TYPES = (QuantType.F32, QuantType.F16, QuantType.BF16)
GGUF_TYPES = tuple(t for t in QuantType if t is not QuantType.E4M3)
BLOCK_TYPES = tuple(t for t in QuantType if t not in (*FLOAT_TYPES, QuantType.E4M3))

# Byte offsets of the float16 scales inside a block.
SCALE_OFFSETS = {
    QuantType.Q4_0: (0,),
    QuantType.Q4_1: (0, 2),
    QuantType.Q5_0: (0,),
    QuantType.Q5_1: (0, 2),
    QuantType.Q8_0: (0,),
    QuantType.Q2_K: (80, 82),
    QuantType.Q3_K: (108,),
    QuantType.Q4_K: (0, 2),
    QuantType.Q5_K: (0, 2),
    QuantType.Q6_K: (208,),
    QuantType.IQ4_NL: (0,),
    QuantType.IQ4_XS: (0,),
    QuantType.MXFP4: (),  # byte 0: the exponent of a power of two
}


@dataclass(frozen=True)
class FileTensor:
    """A random tensor: ``data`` uint8 ``[num_bytes]``, exact float32 ``values`` ``[n, k]``."""

    quant_type: QuantType
    data: Bytes
    values: Floats

    @property
    def n(self) -> int:
        return int(self.values.shape[0])

    @property
    def k(self) -> int:
        return int(self.values.shape[1])


def _float_tensor(quant_type: QuantType, rng: np.random.Generator, n: int, k: int) -> FileTensor:
    values = rng.standard_normal((n, k)).astype(np.float32)
    if quant_type is QuantType.F16:
        stored = values.astype(np.float16)
        return FileTensor(quant_type, stored.view(np.uint8).reshape(-1), stored.astype(np.float32))
    if quant_type is QuantType.BF16:
        bits = (values.view(np.uint32) >> 16).astype(np.uint16)
        values = (bits.astype(np.uint32) << 16).view(np.float32)
        return FileTensor(quant_type, bits.view(np.uint8).reshape(-1), values)
    return FileTensor(quant_type, values.view(np.uint8).reshape(-1), values)


def _e4m3_tensor(rng: np.random.Generator, n: int, k: int) -> FileTensor:
    codes = rng.integers(0, 127, (n, k // 128, 128), dtype=np.uint8)
    codes |= rng.integers(0, 2, codes.shape, dtype=np.uint8) << np.uint8(7)
    scales = rng.uniform(1e-4, 1e-2, (n, k // 128, 1)).astype(np.float32)
    data = np.concatenate([scales.view(np.uint8), codes], axis=2).reshape(-1)
    values = np.array([e4m3(code) for code in range(256)], np.float32)[codes] * scales
    return FileTensor(QuantType.E4M3, data, values.reshape(n, k))


def e4m3(code: int) -> float:
    """The value of one float8 E4M3."""
    sign = -1.0 if code & 128 else 1.0
    exponent, mantissa = code >> 3 & 15, code & 7
    if code & 127 == 127:
        return float("nan")
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def dequantize(quant_type: QuantType, data: Bytes, n: int, k: int) -> Floats:
    """The `gguf` package's float32 values of ``data``."""
    values = gguf.quants.dequantize(data.reshape(n, -1), gguf.GGMLQuantizationType(quant_type))
    return np.ascontiguousarray(values.reshape(n, k), dtype=np.float32)


def random_blocks(quant_type: QuantType, rng: np.random.Generator, num_blocks: int) -> Bytes:
    """``[num_blocks, block_bytes]`` random valid blocks."""
    blocks = rng.integers(0, 256, (num_blocks, quant_type.block_bytes), dtype=np.uint8)
    if quant_type is QuantType.MXFP4:
        blocks[:, 0] = rng.integers(118, 122, num_blocks)
    for offset in SCALE_OFFSETS[quant_type]:
        scales = rng.uniform(0.002, 0.02, num_blocks) * rng.choice((-1.0, 1.0), num_blocks)
        blocks[:, offset : offset + 2] = scales.astype(np.float16).view(np.uint8).reshape(-1, 2)
    return blocks


def set_scales(quant_type: QuantType, blocks: Bytes, scale: float) -> None:
    """Makes all scales and minima of blocks ``scale``, to the format's precision."""
    for offset in SCALE_OFFSETS[quant_type]:
        blocks[:, offset : offset + 2] = np.array([scale], np.float16).view(np.uint8)
    if quant_type is QuantType.MXFP4:
        blocks[:, 0] = 127 + round(np.log2(scale))


def random_tensor(quant_type: QuantType, n: int, k: int, seed: int = 0) -> FileTensor:
    """A random ``[n, k]`` tensor; equal arguments give equal tensors."""
    rng = np.random.default_rng((seed, int(quant_type), n, k))
    if quant_type is QuantType.E4M3:
        return _e4m3_tensor(rng, n, k)
    if quant_type in FLOAT_TYPES:
        return _float_tensor(quant_type, rng, n, k)
    block_size = BLOCK_SIZES[quant_type][0]
    data = random_blocks(quant_type, rng, n * k // block_size).reshape(-1)
    return FileTensor(quant_type, data, dequantize(quant_type, data, n, k))


def int8_records(x: Floats) -> tuple[Floats, npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """8-bit activations by the definition in packed_format.h, of finite x ``[m, k]``.

    k must be a multiple of 32. Returns scales float32, zeros and values q int32 of the blocks:
    ``[m, k / 32, 1]`` twice, and ``[m, k / 32, 32]``.
    """
    blocks = x.reshape(len(x), -1, 32)
    high, low = blocks.max(axis=2, keepdims=True), blocks.min(axis=2, keepdims=True)
    tiny = np.maximum(high, -low) < np.float32(2.0**-80)
    with np.errstate(divide="ignore", invalid="ignore"):
        middle = (high + low) * np.float32(127 / 32) / (high - low)
    steps = np.rint(np.clip(np.where(tiny, 0, middle), -3, 3)).astype(np.int32)
    zero = 32 * steps
    up, down = (np.float32(1) / (ends).astype(np.float32) for ends in (127 + zero, 128 - zero))
    need = np.where(tiny, np.float32(1), np.maximum(high * up, -low * down))
    scale = ((need.view(np.uint32) + 0x1FFFFF) & ~np.uint32(0x1FFFFF)).view(np.float32)
    q = np.rint(blocks * (np.float32(1) / scale)).astype(np.int32) - zero
    return scale, zero, np.where(tiny, 0, q)


def quantized_activations(x: Floats, precision: str) -> Doubles:
    """What the activations are after quantisation, by the definition the kernels promise.

    Per 32 features (k must be a multiple) and in float32, rounding half to even. int16: 127 * 128
    steps to either side; blocks below 2**-100 are zero. int8: `int8_records`. Returns float64
    ``[m, k]``.
    """
    m, k = x.shape
    if precision == "int8":
        scale, zero, q = int8_records(x)
        return (scale.astype(np.float64) * (q + zero)).reshape(m, k)
    blocks = x.reshape(m, -1, 32)
    magnitude = np.abs(blocks).max(axis=2, keepdims=True)
    tiny = magnitude < np.float32(2.0**-100)
    span, steps = np.where(tiny, np.float32(1), magnitude), np.float32(127 * 128)
    values = np.rint(blocks * (steps / span)) * (span / steps).astype(np.float64)
    return np.where(tiny, 0, values).reshape(m, k)


def reference_linear(x: Floats, w: FileTensor, precision: str) -> tuple[Doubles, Doubles]:
    """``x @ values.T`` in float64 and the sum of the products' magnitudes (both ``[m, n]``)."""
    exact = x.astype(np.float64)
    if precision != "float32":
        exact = quantized_activations(x, precision)
    values = w.values.astype(np.float64)
    return exact @ values.T, np.abs(exact) @ np.abs(values).T
