"""Matrices of LoRA adapters on their way into the native program."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tellin.loading.tensors import QuantType


def smallest_tensor(
    matrix: npt.NDArray[np.float32],
) -> tuple[int, npt.NDArray[np.uint8], int, int]:
    """A float32 matrix as a tensor of the smallest float type that holds its values exactly.

    Returns:
        Type, bytes, rows, columns.
    """
    matrix = np.ascontiguousarray(matrix, np.float32)
    bits = matrix.view(np.uint32)
    quant_type, stored = QuantType.F32, matrix.view(np.uint8)
    if not (bits & 0xFFFF).any():
        quant_type, stored = QuantType.BF16, (bits >> 16).astype(np.uint16).view(np.uint8)
    else:
        with np.errstate(over="ignore"):
            halves = matrix.astype(np.float16)
        if (halves == matrix).all():
            quant_type, stored = QuantType.F16, halves.view(np.uint8)
    rows, columns = matrix.shape
    return int(quant_type), stored.reshape(-1), rows, columns
