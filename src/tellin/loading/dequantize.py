"""Dequantisation of every `QuantType` to float32, in NumPy: slow, obvious, exact.

Owns the value formulas of the storage types; kernels unpack the same values in their own layouts
and are tested against this module. The order of the float32 operations in each formula is part of
the format: values are bitwise those of the reference writer's reader.

Source of all block layouts: the GGUF specification's quantisation types; of MXFP4's values: OCP
Microscaling Formats (MX) v1.0. Every block holds
``block_size`` consecutive elements of a row; "d" and "m" are float16 scale and minimum; K types
are 256 elements in sub-blocks that have small integer scales of their own.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from tellin.exceptions import UnsupportedModelError
from tellin.loading.tensors import QuantType, TensorRef

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

_CHUNK_ELEMENTS = 1 << 20
"""Elements dequantised at a time: temporaries stay at a few MiB, about the size of the L2 cache."""


def dequantize(tensor: TensorRef) -> Floats:
    """The tensor's values, a new float32 array of ``tensor.shape``."""
    if len(tensor.shape) < 2:
        return _blocks_to_float(tensor.quant_type, tensor.data).reshape(tensor.shape)
    num_rows, width = tensor.shape[0], tensor.num_elements // tensor.shape[0]
    out = np.empty((num_rows, width), dtype=np.float32)
    step = max(1, _CHUNK_ELEMENTS // width)
    for start in range(0, num_rows, step):
        stop = min(start + step, num_rows)
        out[start:stop] = dequantize_rows(tensor, start, stop)
    return out.reshape(tensor.shape)


def dequantize_rows(tensor: TensorRef, start: int, stop: int) -> Floats:
    """Rows ``[start, stop)`` as float32 ``[stop - start, num_elements / num_rows]``."""
    data = tensor.read_rows(start, stop)
    return _blocks_to_float(tensor.quant_type, data).reshape(stop - start, -1)


def _blocks_to_float(quant_type: QuantType, data: Bytes) -> Floats:
    function = _FUNCTIONS.get(quant_type)
    if function is None:
        raise UnsupportedModelError(f"weights of type {quant_type.name} cannot be dequantised")
    return function(data.reshape(-1, quant_type.block_bytes)).reshape(-1)


# Each function takes blocks, uint8 [num_blocks, block_bytes], and returns [num_blocks, block_size].


def _half(blocks: Bytes, start: int) -> Floats:
    """The float16 at byte ``start`` of each block, ``[num_blocks, 1]``."""
    return blocks[:, start : start + 2].copy().view(np.float16).astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """``[..., n]`` bytes to ``[..., 2n]``: all low halves, then all high halves."""
    return np.concatenate([packed & 0x0F, packed >> 4], axis=-1)


def _bits(packed: Bytes) -> Bytes:
    """4 bytes to 32 values of 0 or 1, lowest bit first."""
    return np.unpackbits(packed, axis=-1, bitorder="little")


def _f32(blocks: Bytes) -> Floats:
    return blocks.copy().view(np.float32)


def _f16(blocks: Bytes) -> Floats:
    return blocks.copy().view(np.float16).astype(np.float32)


def _bf16(blocks: Bytes) -> Floats:
    """bfloat16 is the upper half of a float32."""
    upper = blocks.copy().view(np.uint16).astype(np.uint32)
    return (upper << 16).view(np.float32)


def _e4m3(blocks: Bytes) -> Floats:
    """scale (4, float32), 128 bytes of E4M3: ``value * scale``."""
    scales = blocks[:, :4].copy().view(np.float32)
    return E4M3_VALUES[blocks[:, 4:]] * scales


def _e4m3_values() -> Floats:
    """All 256 values of float8 E4M3: sign, 4 bits of exponent (bias 7), 3 of mantissa; no infinity.

    Source: Micikevicius et al., FP8 Formats for Deep Learning (2022), table 1.
    """
    bits = np.arange(256)
    exponent, mantissa = bits >> 3 & 15, bits & 7
    subnormal = np.ldexp(mantissa.astype(np.float32), -9)
    normal = np.ldexp((8 + mantissa).astype(np.float32), exponent - 10)
    values = np.where(exponent == 0, subnormal, normal).astype(np.float32)
    values[(bits & 127) == 127] = np.nan
    return np.where(bits >= 128, -values, values).astype(np.float32)


E4M3_VALUES = _e4m3_values()


def _q4_0(blocks: Bytes) -> Floats:
    """d (2), 16 bytes of nibbles: ``d * (q - 8)``."""
    q = _nibbles(blocks[:, 2:18]).astype(np.int8) - 8
    return _half(blocks, 0) * q.astype(np.float32)


def _q4_1(blocks: Bytes) -> Floats:
    """d (2), m (2), 16 bytes of nibbles: ``d * q + m``."""
    q = _nibbles(blocks[:, 4:20]).astype(np.float32)
    return _half(blocks, 0) * q + _half(blocks, 2)


def _q5_0(blocks: Bytes) -> Floats:
    """d (2), 4 bytes of fifth bits, 16 bytes of nibbles: ``d * (q - 16)``."""
    q = (_nibbles(blocks[:, 6:22]) | (_bits(blocks[:, 2:6]) << 4)).astype(np.int8) - 16
    return _half(blocks, 0) * q.astype(np.float32)


def _q5_1(blocks: Bytes) -> Floats:
    """d (2), m (2), 4 bytes of fifth bits, 16 bytes of nibbles: ``d * q + m``."""
    q = _nibbles(blocks[:, 8:24]) | (_bits(blocks[:, 4:8]) << 4)
    return _half(blocks, 0) * q.astype(np.float32) + _half(blocks, 2)


def _q8_0(blocks: Bytes) -> Floats:
    """d (2), 32 signed bytes: ``d * q``."""
    return _half(blocks, 0) * blocks[:, 2:34].copy().view(np.int8).astype(np.float32)


def _two_bits(packed: Bytes) -> Bytes:
    """64 bytes of 2-bit values to ``[num_blocks, 256]``.

    Two halves of 32 bytes; each half holds 128 elements as four planes of 32: plane p is bits
    ``[2p, 2p + 2)`` of its 32 bytes.
    """
    halves = packed.reshape(-1, 2, 1, 32)
    shifts = np.arange(0, 8, 2, dtype=np.uint8).reshape(1, 1, 4, 1)
    return ((halves >> shifts) & np.uint8(3)).reshape(-1, 256)


def _q2_k(blocks: Bytes) -> Floats:
    """16 sub-blocks of 16: scales (16: low nibble scale, high nibble minimum), 64 bytes of
    2-bit values, d (2), dmin (2): ``d * scale * q - dmin * minimum``.
    """
    scales = blocks[:, 0:16]
    q = _two_bits(blocks[:, 16:80]).reshape(-1, 16, 16).astype(np.float32)
    scale = _half(blocks, 80) * (scales & 0x0F).astype(np.float32)
    minimum = _half(blocks, 82) * (scales >> 4).astype(np.float32)
    return (scale[:, :, None] * q - minimum[:, :, None]).reshape(-1, 256)


def _q3_k(blocks: Bytes) -> Floats:
    """16 sub-blocks of 16: 32 bytes of third bits, 64 bytes of 2-bit values, 12 bytes of 6-bit
    scales, d (2): ``d * (scale - 32) * (q - 4)``, q = 2 bits + 4 * third bit.

    The third bit of element ``32 i + j`` is bit i of byte j. The scales' low nibbles are the
    nibbles of bytes ``[0, 8)``, their upper two bits are planes of bytes ``[8, 12)``.
    """
    third = (blocks[:, None, 0:32] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    q = (_two_bits(blocks[:, 32:96]) | (third.reshape(-1, 256) << 2)).astype(np.int8) - 4
    upper_shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    upper = ((blocks[:, None, 104:108] >> upper_shifts) & 3).reshape(-1, 16)
    scales = (_nibbles(blocks[:, 96:104]) | (upper << 4)).astype(np.int8) - 32
    scale = _half(blocks, 108) * scales.astype(np.float32)
    return (scale[:, :, None] * q.reshape(-1, 16, 16).astype(np.float32)).reshape(-1, 256)


def _six_bit_scales(packed: Bytes) -> tuple[Floats, Floats]:
    """12 bytes to 8 scales and 8 minimums of 6 bits, ``[num_blocks, 8]`` each.

    Scales 0-3 are the low 6 bits of bytes 0-3, minimums 0-3 of bytes 4-7. Of number 4 + j the low
    nibble is in byte 8 + j (scale low, minimum high) and the upper two bits are the top bits of
    byte j (scale) and byte 4 + j (minimum).
    """
    first, second, third = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([first & 63, (third & 15) | ((first >> 6) << 4)], axis=1)
    minimums = np.concatenate([second & 63, (third >> 4) | ((second >> 6) << 4)], axis=1)
    return scales.astype(np.float32), minimums.astype(np.float32)


def _scale_and_minimum(blocks: Bytes, q: Bytes) -> Floats:
    """``d * scale * q - dmin * minimum`` for Q4_K and Q5_K: 8 sub-blocks of 32."""
    scales, minimums = _six_bit_scales(blocks[:, 4:16])
    scale = (_half(blocks, 0) * scales)[:, :, None]
    minimum = (_half(blocks, 2) * minimums)[:, :, None]
    return (scale * q.reshape(-1, 8, 32).astype(np.float32) - minimum).reshape(-1, 256)


def _q4_k(blocks: Bytes) -> Floats:
    """d (2), dmin (2), 12 bytes of 6-bit scales, 128 bytes of nibbles.

    Each 32 bytes hold two sub-blocks: low nibbles, then high nibbles.
    """
    return _scale_and_minimum(blocks, _nibbles(blocks[:, 16:144].reshape(-1, 4, 32)))


def _q5_k(blocks: Bytes) -> Floats:
    """As Q4_K with 32 bytes of fifth bits before the nibbles: bit i of byte j for ``32 i + j``."""
    fifth = (blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]) & np.uint8(1)
    low = _nibbles(blocks[:, 48:176].reshape(-1, 4, 32))
    return _scale_and_minimum(blocks, low.reshape(-1, 8, 32) | (fifth << np.uint8(4)))


def _q6_k(blocks: Bytes) -> Floats:
    """128 bytes of nibbles, 64 bytes of upper 2 bits, 16 signed scales, d (2):
    ``d * scale * (q - 32)`` in 16 sub-blocks of 16.

    Each 64 bytes of nibbles hold 128 elements: low halves, then high halves.
    """
    low = _nibbles(blocks[:, 0:128].reshape(-1, 2, 64)).reshape(-1, 256)
    q = (low | (_two_bits(blocks[:, 128:192]) << 4)).astype(np.int8) - 32
    scales = blocks[:, 192:208].copy().view(np.int8).astype(np.float32)
    scale = _half(blocks, 208) * scales
    return (scale[:, :, None] * q.reshape(-1, 16, 16).astype(np.float32)).reshape(-1, 256)


_IQ4_LEVELS = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.float32
)
_E2M1_LEVELS = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=np.float32)
"""Twice the values of the 4-bit floats of MXFP4, by sign, exponent and mantissa bits."""


def _iq4_nl(blocks: Bytes) -> Floats:
    """d (2), 16 bytes of nibbles: ``d * level[q]``."""
    return _half(blocks, 0) * _IQ4_LEVELS[_nibbles(blocks[:, 2:18])]


def _iq4_xs(blocks: Bytes) -> Floats:
    """d (2), 2 bytes of upper 2 bits and 4 bytes of low nibbles of 8 scales, 128 bytes of nibbles:
    ``d * (scale - 32) * level[q]`` in 8 sub-blocks of 32.

    Each 16 bytes of nibbles hold a sub-block: low halves, then high halves. Of scale j the nibble
    is nibble j, low ones first, and the upper bits are bits ``[2j, 2j + 2)``.
    """
    upper = blocks[:, 2:4].copy().view(np.uint16) >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    low = np.stack([blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4], axis=-1).reshape(-1, 8)
    scales = (low | (upper << 4)).astype(np.float32) - 32
    levels = _IQ4_LEVELS[_nibbles(blocks[:, 8:136].reshape(-1, 8, 16))]
    values: Floats = (_half(blocks, 0) * scales)[:, :, None] * levels
    return values.reshape(-1, 256)


def _mxfp4(blocks: Bytes) -> Floats:
    """e (1), 16 bytes of nibbles, each a float of 4 bits: ``2**(e - 127) * value[q]``."""
    half_scale: Floats = np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128)
    return half_scale * _E2M1_LEVELS[_nibbles(blocks[:, 1:17])]


_FUNCTIONS: dict[QuantType, Callable[[Bytes], Floats]] = {
    QuantType.F32: _f32,
    QuantType.F16: _f16,
    QuantType.BF16: _bf16,
    QuantType.E4M3: _e4m3,
    QuantType.Q4_0: _q4_0,
    QuantType.Q4_1: _q4_1,
    QuantType.Q5_0: _q5_0,
    QuantType.Q5_1: _q5_1,
    QuantType.Q8_0: _q8_0,
    QuantType.Q2_K: _q2_k,
    QuantType.Q3_K: _q3_k,
    QuantType.Q4_K: _q4_k,
    QuantType.Q5_K: _q5_k,
    QuantType.Q6_K: _q6_k,
    QuantType.IQ4_NL: _iq4_nl,
    QuantType.IQ4_XS: _iq4_xs,
    QuantType.MXFP4: _mxfp4,
}
