"""Rows of weights that Hugging Face checkpoints hold as integers or 8-bit floats.

Turns the layouts of AWQ, GPTQ, compressed-tensors and FP8 into blocks of a `QuantType` the kernels
read, a few rows at a time. Knows arrays, no names and no configurations (`loading.hf_quant`).

A weight is ``scale * (code - zero)``, with a scale and a zero for each group of neighbouring input
features. The difference is a small integer: ``Q4_0``, ``Q5_0`` and ``Q8_0`` hold it and the scale
exactly; a group repeats its scale for every block of 32. What no block can hold becomes float16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tellin.exceptions import ModelLoadError
from tellin.loading.dequantize import E4M3_VALUES
from tellin.loading.tensors import QuantType

Bytes = npt.NDArray[np.uint8]
Integers = npt.NDArray[np.int16]
Floats = npt.NDArray[np.float32]

BLOCK = 32
SIGNED_RANGES = {
    QuantType.Q4_0: (-8, 7),
    QuantType.Q5_0: (-16, 15),
    QuantType.Q8_0: (-128, 127),
}
"""Code minus zero, least and greatest, of each block type."""


class IntegerMatrix(Protocol):
    """Integers ``[rows, columns]``, whatever their layout in a file; a row is an output feature."""

    @property
    def views(self) -> Sequence[Bytes]: ...

    def read(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Rows ``[start, stop)``, uint8 or int8."""
        ...


@dataclass(frozen=True, eq=False)
class PackedIntegers:
    """Unsigned integers of ``bits`` bits in 32-bit words, the first in the lowest bits.

    Args:
        words: ``[rows, columns]`` in words along one axis; a transposed view is fine.
        bits: 2, 4 or 8.
        along_rows: whether a word holds neighbouring rows (of one column) or columns (of one row).
        columns: how many columns there are; the last word of a row may be filled up.
        order: which of the neighbours lies at each place of a word; default: 0, 1, 2, ...
    """

    words: npt.NDArray[np.uint32]
    bits: int
    along_rows: bool
    columns: int
    order: tuple[int, ...] = ()

    @property
    def views(self) -> Sequence[Bytes]:
        return [_bytes_of(self.words)]

    def read(self, start: int, stop: int) -> Bytes:
        per_word = 32 // self.bits
        order = self.order or tuple(range(per_word))
        mask = np.uint32((1 << self.bits) - 1)
        first = start // per_word if self.along_rows else start
        last = -(-stop // per_word) if self.along_rows else stop
        words = np.ascontiguousarray(self.words[first:last])
        shape = (len(words), per_word, words.shape[1])
        out = np.empty(shape if self.along_rows else (shape[0], shape[2], per_word), np.uint8)
        for place, neighbour in enumerate(order):
            values = (words >> np.uint32(place * self.bits)) & mask
            if self.along_rows:
                out[:, neighbour, :] = values
            else:
                out[:, :, neighbour] = values
        if self.along_rows:
            skipped = start - first * per_word
            return out.reshape(-1, self.columns)[skipped : skipped + stop - start]
        return out.reshape(stop - start, -1)[:, : self.columns]


@dataclass(frozen=True, eq=False)
class SignedBytes:
    """One signed byte for each integer, ``[rows, columns]``."""

    values: npt.NDArray[np.int8]

    @property
    def views(self) -> Sequence[Bytes]:
        return [_bytes_of(self.values)]

    def read(self, start: int, stop: int) -> npt.NDArray[np.int8]:
        return self.values[start:stop]


@dataclass(frozen=True, eq=False)
class Scales:
    """Scales ``[rows, groups]``, stored as floats of any type; a transposed view is fine."""

    values: npt.NDArray[Any]
    is_bfloat16: bool = False

    @property
    def views(self) -> Sequence[Bytes]:
        return [_bytes_of(self.values)]

    def read(self, start: int, stop: int) -> Floats:
        part = np.ascontiguousarray(self.values[start:stop])
        if self.is_bfloat16:
            return (part.astype(np.uint32) << 16).view(np.float32)
        return part.astype(np.float32)


@dataclass(frozen=True, eq=False)
class IntegerRows:
    """Reader of integer weights: ``scale * (code - zero)``.

    Args:
        name: of the tensor, for errors.
        format_name: for people.
        quant_type: what rows become: Q4_0, Q5_0, Q8_0; or F16, rounded.
        codes: ``[rows, columns]``.
        zeros: ``[rows, groups]``, or one number for all.
        zero_offset: added to ``zeros``.
        scales: ``[rows, groups]``.
        group_of: group of each column, for float16; blocks need groups of neighbours.
    """

    name: str
    format_name: str
    quant_type: QuantType
    columns: int
    codes: IntegerMatrix
    zeros: IntegerMatrix | int
    zero_offset: int
    scales: Scales
    num_groups: int
    group_of: npt.NDArray[np.int64] | None = None

    @property
    def views(self) -> Sequence[Bytes]:
        zeros: Sequence[Bytes] = [] if isinstance(self.zeros, int) else self.zeros.views
        return [*self.codes.views, *zeros, *self.scales.views]

    def read_rows(self, start: int, stop: int) -> Bytes:
        codes, scales = self.codes.read(start, stop), self.scales.read(start, stop)
        if isinstance(self.zeros, int):
            zeros = np.full((stop - start, self.num_groups), self.zeros, np.int16)
        else:
            zeros = self.zeros.read(start, stop) + np.int16(self.zero_offset)
        if self.group_of is not None:
            values = (codes - zeros[:, self.group_of]).astype(np.float32)
            return _as_float16(values * scales[:, self.group_of], self.name)
        grouped = codes.reshape(stop - start, self.num_groups, -1)
        if self.quant_type is QuantType.F16:
            values = (grouped - zeros[:, :, None]).astype(np.float32)
            return _as_float16(values * scales[:, :, None], self.name)
        halves = _as_float16(scales, self.name).view(np.uint16).reshape(scales.shape)
        repeated = np.repeat(halves, self.columns // BLOCK // self.num_groups, axis=1)
        blocks = self._block_codes(grouped, zeros).reshape(-1, BLOCK)
        return _ENCODERS[self.quant_type](blocks, repeated.reshape(-1, 1))

    def _block_codes(self, codes: npt.NDArray[Any], zeros: Integers) -> Bytes:
        """Codes less zero points ``[rows, groups, columns]``, plus the zero point of a block."""
        least, greatest = SIGNED_RANGES[self.quant_type]
        shift = (-least - zeros)[:, :, None]
        if codes.dtype == np.int8 or self.quant_type is QuantType.Q8_0:
            shifted = codes + shift
            is_bad = shifted.min() < 0 or shifted.max() > greatest - least
        else:  # in bytes, which is faster: 4 bits more or less than 16 do not come round
            shifted = codes + shift.astype(np.uint8)
            is_bad = shifted.max() > greatest - least
        if is_bad:
            signed = codes.astype(np.int16) - zeros[:, :, None]
            raise ModelLoadError(
                f"tensor {self.name!r}: codes less their zero points reach from {signed.min()} to "
                f"{signed.max()}; [{least}, {greatest}] is what the checkpoint's configuration "
                "leads to"
            )
        return shifted.astype(np.uint8, copy=False)


@dataclass(frozen=True, eq=False)
class Float8Rows:
    """Reader of E4M3 weights with a float scale for each rectangle of a matrix.

    They stay what they are (`QuantType.E4M3`) where 128 neighbours share a scale, else become F16.

    Args:
        name: of the tensor, for errors.
        format_name: for people.
        values: E4M3 bytes, ``[rows, columns]``.
        scales: float32 ``[ceil(rows / block[0]), ceil(columns / block[1])]``.
        block: rows and columns that share a scale.
    """

    name: str
    format_name: str
    values: Bytes
    scales: Floats
    block: tuple[int, int]

    @property
    def views(self) -> Sequence[Bytes]:
        return [_bytes_of(self.values)]

    @property
    def quant_type(self) -> QuantType:
        columns, size = self.values.shape[1], QuantType.E4M3.block_size
        is_shared = self.block[1] % size == 0 or self.block[1] >= columns
        return QuantType.E4M3 if columns % size == 0 and is_shared else QuantType.F16

    def read_rows(self, start: int, stop: int) -> Bytes:
        if self.quant_type is QuantType.E4M3:
            return self._read_e4m3(start, stop)
        rows = np.arange(start, stop) // self.block[0]
        columns = np.arange(self.values.shape[1]) // self.block[1]
        values = E4M3_VALUES[self.values[start:stop]]
        with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is refused below
            values *= self.scales[rows][:, columns]
        return _as_float16(values, self.name)

    def _read_e4m3(self, start: int, stop: int) -> Bytes:
        size = QuantType.E4M3.block_size
        values = self.values[start:stop].reshape(stop - start, -1, size)
        firsts = np.arange(values.shape[1]) * size
        scales = self.scales[np.arange(start, stop) // self.block[0]][:, firsts // self.block[1]]
        if ((values & np.uint8(127)) == 127).any() or not np.isfinite(scales).all():
            raise ModelLoadError(
                f"tensor {self.name!r} holds NaN, or a scale of it is not finite; the file is "
                "damaged, or was badly converted"
            )
        stored = np.ascontiguousarray(scales)[:, :, None].view(np.uint8)
        return np.concatenate([stored, values], axis=2).reshape(-1)


def _as_float16(values: Floats, name: str) -> Bytes:
    with np.errstate(over="ignore"):
        halves = values.astype(np.float16)
    if not np.isfinite(halves).all():
        raise ModelLoadError(
            f"tensor {name!r}: a scale or a weight is NaN, infinite or beyond float16 (65504); "
            "the file is damaged, or was badly converted"
        )
    return np.ascontiguousarray(halves).reshape(-1).view(np.uint8)


def _bytes_of(array: npt.NDArray[np.generic]) -> Bytes:
    """The file's bytes under a view of any shape; transposing leaves them where they are."""
    plain = array if array.flags.c_contiguous else array.T
    return plain.reshape(-1).view(np.uint8)


# ---- blocks: codes from zero on, uint8 [blocks, 32], and scales, uint16 [blocks, 1] --------------


def _nibbles(codes: Bytes) -> Bytes:
    """Codes below 16: low halves are features 0 to 15, high ones 16 to 31."""
    return codes[:, : BLOCK // 2] | (codes[:, BLOCK // 2 :] << np.uint8(4))


def _block_bytes(scales: npt.NDArray[np.uint16], *parts: Bytes) -> Bytes:
    return np.concatenate([scales.view(np.uint8), *parts], axis=1).reshape(-1)


def _q4_0(codes: Bytes, scales: npt.NDArray[np.uint16]) -> Bytes:
    return _block_bytes(scales, _nibbles(codes))


def _q5_0(codes: Bytes, scales: npt.NDArray[np.uint16]) -> Bytes:
    fifth = np.packbits(codes >> np.uint8(4), axis=1, bitorder="little")
    return _block_bytes(scales, fifth, _nibbles(codes & np.uint8(15)))


def _q8_0(codes: Bytes, scales: npt.NDArray[np.uint16]) -> Bytes:
    return _block_bytes(scales, codes ^ np.uint8(128))


_ENCODERS = {QuantType.Q4_0: _q4_0, QuantType.Q5_0: _q5_0, QuantType.Q8_0: _q8_0}
