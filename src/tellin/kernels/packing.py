"""Packing of weights into a program, slice by slice, and the release of their file pages.

Knows tensors and the program's calls for them; what a plan makes of them is the compiler's
(`tellin.kernels.native`). A weight is never in memory twice: what was packed is given back.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from tellin.exceptions import ModelLoadError
from tellin.kernels import _C
from tellin.kernels.file_pages import release_pages
from tellin.loading.tensors import RowReader, TensorRef

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
    if tensor.reader is not None:
        return _pack_made_rows(program, weight, tensor, tensor.reader)
    num_rows = tensor.shape[0]
    row_bytes = tensor.num_bytes // num_rows
    step = max(1, _PACK_SLICE_BYTES // (16 * row_bytes)) * 16
    for begin in range(0, num_rows, step):
        end = min(begin + step, num_rows)
        _packed(tensor, program.pack_weight, weight, begin, end)
        release_pages(tensor.data[begin * row_bytes : end * row_bytes])


def _pack_made_rows(program: _C.Program, weight: int, tensor: TensorRef, reader: RowReader) -> None:
    """Pack rows that a reader makes, in the order of the rows: by several threads ahead of use."""
    row_bytes = tensor.num_bytes // tensor.shape[0]
    step = max(1, _READ_SLICE_BYTES // (16 * row_bytes)) * 16
    num_threads = program.thread_team.num_threads
    begins = iter(range(0, tensor.shape[0], step))
    made: deque[tuple[int, Future[npt.NDArray[np.uint8]]]] = deque()
    with ThreadPoolExecutor(num_threads, thread_name_prefix="tellin-rows") as pool:

        def make_next() -> None:
            for begin in itertools.islice(begins, 1):
                end = min(begin + step, tensor.shape[0])
                made.append((begin, pool.submit(tensor.read_rows, begin, end)))

        for _ in range(num_threads + 1):
            make_next()
        while made:
            begin, future = made.popleft()
            rows = future.result()
            make_next()
            count = len(rows) // row_bytes
            described = int(tensor.quant_type), rows, count, tensor.shape[1]
            _packed(tensor, program.pack_rows, weight, begin, *described)
    for view in reader.views:
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
