"""Finds NaN and infinity in weights, by looking at the bits of floats and scales only.

A single NaN scale in a file makes every logit NaN, and a model that answers nonsense without an
error is worse than one that does not load. Quantised levels are integers and cannot be wrong.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tellin.exceptions import ModelLoadError
from tellin.loading.tensors import QuantType, TensorRef

_CHUNK_BYTES = 1 << 22
"""Looked at in one go: temporary arrays stay in the cache."""

_SCALES: dict[QuantType, tuple[int, ...]] = {
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
}
"""Byte offsets of a block's float16 scale and minimum. Source: ggml block layouts."""


_GREATEST_EXPONENT = 252
"""Of MXFP4: the greatest value of a block, ``6 * 2**(e - 127)``, is then a float32 (255: NaN)."""


def is_finite(tensor: TensorRef) -> bool:
    """Whether all values of a tensor are finite; reads the tensor once, about as fast as memory."""
    if tensor.reader is not None:
        return _are_rows_finite(tensor)
    step = _CHUNK_BYTES // tensor.quant_type.block_bytes * tensor.quant_type.block_bytes
    return all(
        _is_chunk_finite(tensor.quant_type, tensor.data[start : start + step])
        for start in range(0, tensor.data.size, step)
    )


def _are_rows_finite(tensor: TensorRef) -> bool:
    """Of rows that a reader makes, or refuses to make."""
    step = max(1, _CHUNK_BYTES // tensor.shape[1])
    try:
        return all(
            _is_chunk_finite(
                tensor.quant_type, tensor.read_rows(start, min(start + step, tensor.shape[0]))
            )
            for start in range(0, tensor.shape[0], step)
        )
    except ModelLoadError:
        return False


def _is_chunk_finite(quant_type: QuantType, data: npt.NDArray[np.uint8]) -> bool:
    if quant_type is QuantType.F32:
        return bool(((data.view("<u4") & 0x7F80_0000) != 0x7F80_0000).all())
    if quant_type is QuantType.BF16:
        return bool(((data.view("<u2") & 0x7F80) != 0x7F80).all())
    if quant_type is QuantType.E4M3:
        return _are_float8_finite(data.reshape(-1, quant_type.block_bytes))
    if quant_type is QuantType.F16:
        return _are_halves_finite(data.view("<u2"))
    blocks = data.reshape(-1, quant_type.block_bytes)
    if quant_type is QuantType.MXFP4:
        return bool((blocks[:, 0] <= _GREATEST_EXPONENT).all())
    return all(
        _are_halves_finite(blocks[:, offset : offset + 2].copy().view("<u2"))
        for offset in _SCALES[quant_type]
    )


def _are_float8_finite(blocks: npt.NDArray[np.uint8]) -> bool:
    scales = blocks[:, :4].copy().view("<u4") & 0x7F80_0000
    return bool((scales != 0x7F80_0000).all() and ((blocks[:, 4:] & 127) != 127).all())


def _are_halves_finite(bits: npt.NDArray[np.uint16]) -> bool:
    return bool(((bits & 0x7C00) != 0x7C00).all())
