"""Rows of a tensor in another order than its file's, or of its columns, made when they are read.

For matrices whose file mixes the rows of several layers: brought into order, each layer's rows lie
one after the other and are a row range like any other. And for those that lie across. Knows no
model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from tellin.loading.tensors import TensorRef

Order = npt.NDArray[np.int64]


class ReorderedRows:
    """A `RowReader`: row i is row ``order[i]`` of ``base``."""

    def __init__(self, base: TensorRef, order: Order) -> None:
        self._base = base
        self._order = order

    @property
    def format_name(self) -> str:
        return self._base.format_name

    @property
    def views(self) -> Sequence[npt.NDArray[np.uint8]]:
        reader = self._base.reader
        return (self._base.data,) if reader is None else reader.views

    def read_rows(self, start: int, stop: int) -> npt.NDArray[np.uint8]:
        order = self._order[start:stop]
        # Neighbours are read together: rows change places by heads.
        cuts = [0, *(np.flatnonzero(np.diff(order) != 1) + 1).tolist(), len(order)]
        first = order.tolist()
        return np.concatenate(
            [self._base.read_rows(first[a], first[a] + b - a) for a, b in pairwise(cuts)]
        )


class TransposedRows:
    """A `RowReader`: row i is column i of ``base``, whose values are floats."""

    def __init__(self, base: TensorRef) -> None:
        self._base = base

    @property
    def format_name(self) -> str:
        return self._base.format_name

    @property
    def views(self) -> Sequence[npt.NDArray[np.uint8]]:
        return (self._base.data,)

    def read_rows(self, start: int, stop: int) -> npt.NDArray[np.uint8]:
        rows, columns = self._base.shape
        values = self._base.data.reshape(rows, columns, self._base.quant_type.block_bytes)
        return np.ascontiguousarray(values[:, start:stop].swapaxes(0, 1)).reshape(-1)


def transposed(tensor: TensorRef) -> TensorRef:
    """The matrix ``tensor``, of floats in a file, with its columns as rows."""
    shape = tensor.shape[::-1]
    return replace(tensor, shape=shape, reader=TransposedRows(tensor), first_row=0)


def reordered(tensor: TensorRef, order: Order) -> TensorRef:
    """``tensor`` with its rows in another order.

    Args:
        order: the file's row for each row, ``(num_rows,)``.
    """
    reader = ReorderedRows(tensor, order)
    if len(tensor.shape) == 1:
        return replace(tensor, data=reader.read_rows(0, tensor.shape[0]))
    return replace(tensor, reader=reader, first_row=0)
