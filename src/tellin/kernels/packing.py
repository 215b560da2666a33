"""Packing of weights into a program, slice by slice, and the release of their file pages.

Knows tensors and the program's calls for them; what a plan makes of them is the compiler's
(`tellin.kernels.native`). A weight is never in memory twice: what was packed is given back.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from tellin.exceptions import ModelLoadError
from tellin.kernels import _C
from tellin.kernels.file_pages import release_pages
from tellin.loading.tensors import TensorRef

_PACK_SLICE_BYTES = 8 << 20
"""Of a file, packed before its pages are released: what a load needs beyond the packed weights."""
_READ_SLICE_BYTES = 1 << 20
"""Of rows that are made of other bytes: what makes them stays in a cache."""

Identity = tuple[int, int, tuple[int, ...], int]


def identity(tensor: TensorRef) -> Identity:
    """Equal for references to the same bytes: address, first row, shape, type."""
    return tensor.data.ctypes.data, tensor.first_row, tensor.shape, int(tensor.quant_type)


def pack(program: _C.Program, weight: int, tensor: TensorRef) -> None:
    """Pack slice by slice, so that a large matrix is never in memory twice."""
    num_rows = tensor.shape[0]
    row_bytes = tensor.num_bytes // num_rows
    slice_bytes = _PACK_SLICE_BYTES if tensor.reader is None else _READ_SLICE_BYTES
    step = max(1, slice_bytes // (16 * row_bytes)) * 16
    for begin in range(0, num_rows, step):
        end = min(begin + step, num_rows)
        if tensor.reader is None:
            _packed(tensor, program.pack_weight, weight, begin, end)
            release_pages(tensor.data[begin * row_bytes : end * row_bytes])
        else:
            rows = tensor.read_rows(begin, end)
            described = int(tensor.quant_type), rows, end - begin, tensor.shape[1]
            _packed(tensor, program.pack_rows, weight, begin, *described)
    if tensor.reader is not None:
        for view in tensor.reader.views:
            release_pages(view)


def _packed(tensor: TensorRef, call: Callable[..., None], *arguments: object) -> None:
    try:
        call(*arguments)
    except ValueError as error:
        raise damaged(tensor) from error


def tensor_arguments(tensor: TensorRef) -> tuple[int, npt.NDArray[np.uint8], int, int]:
    """Arguments that describe a tensor to the program: type, bytes, rows, columns."""
    columns = tensor.shape[-1]
    return int(tensor.quant_type), tensor.data, tensor.num_elements // columns, columns


def require_finite(tensor: TensorRef) -> None:
    """Raises `ModelLoadError` if the tensor holds NaN or infinity."""
    if not _C.is_finite(*tensor_arguments(tensor)):
        raise damaged(tensor)


def damaged(tensor: TensorRef) -> ModelLoadError:
    """The error for a tensor that holds NaN or infinity."""
    return ModelLoadError(
        f"tensor {tensor.name!r} holds NaN or infinity; the file is damaged, or was badly converted"
    )
