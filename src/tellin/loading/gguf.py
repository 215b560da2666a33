"""Reader of GGUF files, version 2 and 3: metadata and memory-mapped tensors.

Knows the container and no model. Every count, length and offset is checked against the file's size
before it is used, so that a damaged or hostile file gets a `ModelLoadError` that names the file and
the fault, at once and without a large allocation. String arrays (vocabularies) are skipped while
reading and decoded on demand.

Source of the format: GGUF specification (ggml documentation), "File Structure".
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from tellin.exceptions import ModelLoadError, UnsupportedModelError
from tellin.loading.mapped_file import MappedFile
from tellin.loading.tensors import QuantType, TensorRef
from tellin.loading.typed_mapping import TypedMapping

MAGIC = b"GGUF"
DEFAULT_ALIGNMENT = 32
_SUPPORTED_VERSIONS = (2, 3)

_MAX_KEY_BYTES = 65_535
"""The specification's limit for metadata keys; used for tensor names too (ggml allows 63)."""
_MAX_DIMS = 4
_MAX_DEPTH = 4
"""Nested arrays: the format allows any depth, real files use one level."""
_MAX_ITEMS = 1 << 22
"""Strings, keys, tensors and nested arrays that one file may hold. The largest vocabularies with
their merges have under a million; skipping this many strings takes 0.3 s (58 ns each, Zen 5)."""

_STRING = 8
_ARRAY = 9
_BOOL = 7
_SCALARS: Mapping[int, tuple[str, str]] = {
    0: ("B", "<u1"),
    1: ("b", "<i1"),
    2: ("H", "<u2"),
    3: ("h", "<i2"),
    4: ("I", "<u4"),
    5: ("i", "<i4"),
    6: ("f", "<f4"),
    _BOOL: ("B", "<u1"),
    10: ("Q", "<u8"),
    11: ("q", "<i8"),
    12: ("d", "<f8"),
}
"""Value type number → (struct code, NumPy dtype)."""

_FIRST_FOREIGN_TYPE = 1000
"""From here on `QuantType` has types that GGUF does not."""
_OTHER_TENSOR_TYPES: Mapping[int, str] = {
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    21: "IQ3_S",
    22: "IQ2_S",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
}
"""Valid tensor types that tellin has no kernels for."""

_SPLIT_NAME = re.compile(r"(?P<prefix>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf\Z", re.DOTALL)


class StringArray(Sequence[str]):
    """An array of strings inside a mapped file, decoded when asked for.

    Holds the file's map alive. ``list(array)`` decodes all of it in one pass and keeps nothing.
    """

    def __init__(self, file: MappedFile, start: int, count: int, what: str) -> None:
        self._file = file
        self._buffer = file.map
        self._start = start
        self._count = count
        self._what = what
        self._offsets: npt.NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[str]: ...
    def __getitem__(self, index: int | slice) -> str | Sequence[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._count))]
        if not -self._count <= index < self._count:
            raise IndexError(index)
        if self._offsets is None:
            self._offsets = self._find_offsets()
        start = int(self._offsets[index % self._count])
        return self._decode(self._bytes_at(start), index % self._count)

    def __iter__(self) -> Iterator[str]:
        for index, raw in enumerate(self.iter_bytes()):
            yield self._decode(raw, index)

    def iter_bytes(self) -> Iterator[bytes]:
        """Each string's bytes, in order."""
        buffer, unpack, position = self._buffer, struct.Struct("<Q").unpack_from, self._start
        for _ in range(self._count):
            end = position + 8 + unpack(buffer, position)[0]
            yield buffer[position + 8 : end]
            position = end

    def to_list(self) -> list[str]:
        """All strings, decoded: one pass, faster than iterating."""
        buffer, unpack, position = self._buffer, struct.Struct("<Q").unpack_from, self._start
        strings: list[str] = []
        append = strings.append
        try:
            for _ in range(self._count):
                end = position + 8 + unpack(buffer, position)[0]
                append(buffer[position + 8 : end].decode())
                position = end
        except UnicodeDecodeError:
            self._decode(self._bytes_at(position), len(strings))
            raise
        return strings

    def _bytes_at(self, position: int) -> bytes:
        (length,) = struct.unpack_from("<Q", self._buffer, position)
        return self._buffer[position + 8 : position + 8 + length]

    def _decode(self, raw: bytes, index: int) -> str:
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise ModelLoadError(
                f"{self._file.path}: {self._what}: string {index} is not UTF-8: {error.reason}"
            ) from None

    def _find_offsets(self) -> npt.NDArray[np.int64]:
        buffer, unpack, position = self._buffer, struct.Struct("<Q").unpack_from, self._start
        offsets: list[int] = []
        append = offsets.append
        for _ in range(self._count):
            append(position)
            position += 8 + unpack(buffer, position)[0]
        return np.array(offsets, dtype=np.int64)


Value = bool | int | float | str | npt.NDArray[Any] | StringArray | list[Any]
"""Arrays of numbers are read-only NumPy views (bool arrays too); arrays of arrays are lists."""


class GGUFFile:
    """One GGUF file, memory-mapped: ``version``, ``metadata`` and ``tensors`` by GGUF names.

    Raises:
        ModelNotFoundError: there is no such file.
        ModelLoadError: the file is damaged; the message names it and says what is wrong and where.
        UnsupportedModelError: a tensor has a storage type that tellin cannot compute with.
    """

    def __init__(self, path: Path, *, read_tensors: bool = True) -> None:
        self.path = path
        self._file = MappedFile(path)
        try:
            parser = _Parser(self._file)
            self.version = parser.version
            self.metadata = TypedMapping(path, parser.read_metadata())
            self.alignment = self._read_alignment()
            self.tensors: dict[str, TensorRef] = (
                parser.read_tensors(self.alignment) if read_tensors else {}
            )
        except BaseException:
            self._file.close()
            raise

    @property
    def num_bytes(self) -> int:
        return self._file.num_bytes

    def release_pages(self, tensor: TensorRef | None = None) -> bool:
        """Give back the pages of a tensor (None: of the file); see `MappedFile.release_pages`."""
        return self._file.release_pages(None if tensor is None else tensor.data)

    def close(self) -> None:
        """Let go of the file. Tensors that are still held stay valid."""
        self.tensors = {}
        self._file.close()

    def _read_alignment(self) -> int:
        alignment = self.metadata.get_int("general.alignment", DEFAULT_ALIGNMENT)
        if alignment < 1 or alignment & (alignment - 1) or alignment > 1 << 30:
            raise ModelLoadError(
                f"{self.path}: general.alignment is {alignment}, expected a power of two"
            )
        return alignment


class _Parser:
    """Reads a file front to back; ``_position`` never passes the end of the file unnoticed."""

    def __init__(self, file: MappedFile) -> None:
        self._file = file
        self._buffer = file.map
        self._num_bytes = file.num_bytes
        self._position = 0
        self._num_items = 0
        self.version = self._read_version()
        self._num_tensors = self._scalar("Q", "tensor count")
        self._num_keys = self._scalar("Q", "metadata key count")
        # Smallest tensor entry: name length 8, dimensions 4, one size 8, type 4, offset 8.
        self._check_count(self._num_tensors, 32, "tensor count")
        # Smallest key-value pair: key length 8, type 4, value 1.
        self._check_count(self._num_keys, 13, "metadata key count")

    def read_metadata(self) -> dict[str, Value]:
        values: dict[str, Value] = {}
        for index in range(self._num_keys):
            key = self._name(f"key {index} of the metadata")
            if key in values:
                raise self._error(f"metadata key {key!r} appears twice")
            value_type = self._scalar("I", f"type of metadata key {key!r}")
            values[key] = self._value(value_type, f"metadata key {key!r}", 0)
        return values

    def read_tensors(self, alignment: int) -> dict[str, TensorRef]:
        entries: dict[str, tuple[tuple[int, ...], QuantType, int, int]] = {}
        for index in range(self._num_tensors):
            name = self._name(f"name of tensor {index}")
            if name in entries:
                raise self._error(f"tensor {name!r} appears twice")
            entries[name] = self._tensor_entry(name, alignment)
        data_start = -(-self._position // alignment) * alignment
        tensors: dict[str, TensorRef] = {}
        for name, (shape, quant_type, offset, num_bytes) in entries.items():
            start = data_start + offset
            if start + num_bytes > self._num_bytes:
                raise self._error(
                    f"tensor {name!r} needs bytes {start} to {start + num_bytes}, "
                    f"but the file ends at {self._num_bytes} (truncated?)"
                )
            data = self._file.view(start, num_bytes)
            tensors[name] = TensorRef(name, shape, quant_type, data)
        return tensors

    def _tensor_entry(
        self, name: str, alignment: int
    ) -> tuple[tuple[int, ...], QuantType, int, int]:
        num_dims = self._scalar("I", f"dimensions of tensor {name!r}")
        if not 1 <= num_dims <= _MAX_DIMS:
            raise self._error(f"tensor {name!r} has {num_dims} dimensions, allowed are 1 to 4")
        sizes = [self._scalar("Q", f"shape of tensor {name!r}") for _ in range(num_dims)]
        type_number = self._scalar("I", f"type of tensor {name!r}")
        offset = self._scalar("Q", f"offset of tensor {name!r}")
        num_elements = math.prod(sizes)
        # The densest types store 8 elements in a byte at most, so this bounds the product for good.
        if num_elements < 1 or num_elements > 8 * self._num_bytes:
            raise self._error(f"tensor {name!r} has shape {sizes}, impossible in this file")
        quant_type = self._quant_type(name, type_number)
        if sizes[0] % quant_type.block_size:
            raise self._error(
                f"tensor {name!r} has rows of {sizes[0]} elements, "
                f"not a multiple of {quant_type.name}'s block size {quant_type.block_size}"
            )
        if offset % alignment:
            raise self._error(f"tensor {name!r} has offset {offset}, not a multiple of {alignment}")
        num_bytes = num_elements // quant_type.block_size * quant_type.block_bytes
        return tuple(reversed(sizes)), quant_type, offset, num_bytes

    def _quant_type(self, name: str, number: int) -> QuantType:
        if number < _FIRST_FOREIGN_TYPE and number in {int(t) for t in QuantType}:
            return QuantType(number)
        if number in _OTHER_TENSOR_TYPES:
            supported = ", ".join(t.name for t in QuantType if t < _FIRST_FOREIGN_TYPE)
            raise UnsupportedModelError(
                f"{self._file.path}: tensor {name!r} has type {_OTHER_TENSOR_TYPES[number]}, "
                f"which is not supported; supported types: {supported}"
            )
        raise self._error(f"tensor {name!r} has unknown type number {number}")

    def _read_version(self) -> int:
        if self._num_bytes < 24:
            raise self._error(f"is {self._num_bytes} bytes long, a GGUF header has 24")
        if self._buffer[:4] != MAGIC:
            raise self._error(f"is not a GGUF file (starts with {self._buffer[:4]!r})")
        self._position = 4
        version = int(self._scalar("I", "version"))
        if version not in _SUPPORTED_VERSIONS:
            if version & 0xFFFF == 0:
                raise UnsupportedModelError(f"{self._file.path}: big-endian GGUF is not supported")
            raise UnsupportedModelError(
                f"{self._file.path}: GGUF version {version} is not supported; "
                "supported versions: 2, 3"
            )
        return version

    def _scalar(self, code: str, what: str) -> Any:
        try:
            (value,) = struct.unpack_from("<" + code, self._buffer, self._position)
        except struct.error:
            raise self._truncated(what) from None
        self._position += struct.calcsize(code)
        return value

    def _value(self, value_type: int, what: str, depth: int) -> Value:
        if value_type == _STRING:
            return self._string(what)
        if value_type == _ARRAY:
            return self._array(what, depth)
        if value_type not in _SCALARS:
            raise self._error(f"{what} has unknown type number {value_type}")
        value = self._scalar(_SCALARS[value_type][0], what)
        if value_type == _BOOL:
            if value not in (0, 1):
                raise self._error(f"{what} is a boolean with the value {value}, expected 0 or 1")
            return bool(value)
        return value  # type: ignore[no-any-return]

    def _array(self, what: str, depth: int) -> Value:
        element_type = self._scalar("I", f"element type of {what}")
        count = self._scalar("Q", f"length of {what}")
        if element_type == _STRING:
            return self._string_array(count, what)
        if element_type == _ARRAY:
            if depth == _MAX_DEPTH:
                raise self._error(f"{what} has arrays nested more than {_MAX_DEPTH} deep")
            self._check_count(count, 12, f"length of {what}")
            return [self._array(what, depth + 1) for _ in range(count)]
        if element_type not in _SCALARS:
            raise self._error(f"{what} has unknown element type number {element_type}")
        dtype = np.dtype(_SCALARS[element_type][1])
        start, num_bytes = self._position, count * dtype.itemsize
        if num_bytes > self._num_bytes - start:
            raise self._truncated(f"{what} ({count} elements)")
        self._position += num_bytes
        array = self._file.view(start, num_bytes).view(dtype)
        if element_type == _BOOL:
            if num_bytes and array.max() > 1:
                raise self._error(f"{what} has a boolean that is neither 0 nor 1")
            return array.view(np.bool_)
        return array

    def _string_array(self, count: int, what: str) -> StringArray:
        self._check_count(count, 8, f"length of {what}")
        start = position = self._position
        buffer, unpack = self._buffer, struct.Struct("<Q").unpack_from
        try:
            for _ in range(count):
                position += 8 + unpack(buffer, position)[0]
        except (struct.error, OverflowError):
            raise self._truncated(what) from None
        if position > self._num_bytes:
            raise self._truncated(what)
        self._position = position
        return StringArray(self._file, start, count, what)

    def _string(self, what: str) -> str:
        length = self._scalar("Q", f"length of {what}")
        if length > self._num_bytes - self._position:
            raise self._truncated(f"{what} ({length} bytes long)")
        raw = self._buffer[self._position : self._position + length]
        self._position += length
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise self._error(f"{what} is not valid UTF-8: {error.reason}") from None

    def _name(self, what: str) -> str:
        """A key or tensor name: 1 to 65,535 bytes."""
        try:
            (length,) = struct.unpack_from("<Q", self._buffer, self._position)
        except struct.error:
            raise self._truncated(what) from None
        if length == 0:
            raise self._error(f"{what} is empty")
        if length > _MAX_KEY_BYTES:
            raise self._error(f"{what} is {length} bytes long, allowed are {_MAX_KEY_BYTES}")
        return self._string(what)

    def _check_count(self, count: int, least_bytes: int, what: str) -> None:
        """Refuse counts that the rest of the file cannot hold, before anything is read."""
        if count * least_bytes > self._num_bytes - self._position:
            raise self._error(
                f"{what} is {count}, more than the rest of the file "
                f"({self._num_bytes - self._position} bytes) can hold"
            )
        self._num_items += count
        if self._num_items > _MAX_ITEMS:
            raise self._error(
                f"{what} is {count}; a file may hold {_MAX_ITEMS} strings and entries"
            )

    def _truncated(self, what: str) -> ModelLoadError:
        return self._error(
            f"ends inside {what} (at byte {self._position} of {self._num_bytes}); truncated?"
        )

    def _error(self, message: str) -> ModelLoadError:
        return ModelLoadError(f"{self._file.path}: {message}")


def open_gguf(path: Path, *, read_tensors: bool = True) -> list[GGUFFile]:
    """Open a GGUF file; of a split model, all parts in order, whichever part is named.

    Raises: as `GGUFFile`; `ModelLoadError` also if a part is missing or does not belong to the set.
    """
    first = GGUFFile(path, read_tensors=read_tensors)
    count = first.metadata.get_int("split.count", 1)
    if count in (0, 1):
        return [first]
    files: list[GGUFFile] = []
    try:
        for index, part_path in enumerate(_split_paths(path, count)):
            part = first if part_path == path else _open_part(part_path, path, count, read_tensors)
            files.append(part)
            number = part.metadata.get_int("split.no")
            if number != index:
                raise ModelLoadError(f"{part_path}: says it is part {number + 1}, not {index + 1}")
        if read_tensors:
            _check_parts(path, files)
    except BaseException:
        for part in {first, *files}:
            part.close()
        raise
    return files


def is_later_part(path: Path) -> bool:
    """Whether a file is named as part 2 or later of a split model."""
    match = _SPLIT_NAME.match(path.name)
    return match is not None and int(match["number"]) > 1


def _split_paths(path: Path, count: int) -> Iterator[Path]:
    match = _SPLIT_NAME.match(path.name)
    if match is None or int(match["count"]) != count:
        raise ModelLoadError(
            f"{path}: is one of {count} parts (split.count), but is not named like "
            f"'*-00001-of-{count:05d}.gguf', so the other parts cannot be found"
        )
    for number in range(1, count + 1):
        yield path.with_name(f"{match['prefix']}-{number:05d}-of-{count:05d}.gguf")


def _open_part(part_path: Path, path: Path, count: int, read_tensors: bool) -> GGUFFile:
    if not part_path.exists():
        raise ModelLoadError(f"{path}: is one of {count} parts, and {part_path.name} is missing")
    part = GGUFFile(part_path, read_tensors=read_tensors)
    if part.metadata.get_int("split.count", 1) != count:
        part.close()
        raise ModelLoadError(f"{part_path}: does not belong to a model of {count} parts")
    return part


def _check_parts(path: Path, files: list[GGUFFile]) -> None:
    seen: set[str] = set()
    for part in files:
        for name in part.tensors:
            if name in seen:
                raise ModelLoadError(f"{part.path}: tensor {name!r} is in another part too")
            seen.add(name)
    expected = files[0].metadata.get_int("split.tensors.count", len(seen))
    if expected != len(seen):
        raise ModelLoadError(f"{path}: its parts hold {len(seen)} tensors, expected {expected}")
