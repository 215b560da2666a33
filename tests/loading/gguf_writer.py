"""Writes small GGUF files for tests and benchmarks, valid or deliberately wrong.

`gguf_bytes` lays out any metadata and tensors, with every field of the header open to change.
Python values map to GGUF types: bool, int (u32, or i64/u64 if it does not fit), float (f32), str,
lists of those, NumPy arrays (arrays of their dtype), and `Typed` for an exact type.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_DTYPES = {
    "uint8": 0,
    "int8": 1,
    "uint16": 2,
    "int16": 3,
    "uint32": 4,
    "int32": 5,
    "float32": 6,
    "bool": 7,
    "uint64": 10,
    "int64": 11,
    "float64": 12,
}
STRING, ARRAY = 8, 9


@dataclass(frozen=True)
class Typed:
    """A value with an explicit GGUF type number."""

    type: int
    value: Any


@dataclass(frozen=True)
class RawTensor:
    """A tensor as bytes: shape in row-major order, GGUF type number, payload."""

    shape: tuple[int, ...]
    type: int
    data: bytes


def string_bytes(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def value_bytes(value: Any) -> bytes:
    """A value with its type number in front."""
    if isinstance(value, Typed):
        if value.type == STRING:
            return struct.pack("<I", STRING) + string_bytes(value.value)
        return struct.pack("<I" + _CODES[value.type], value.type, value.value)
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        if 0 <= value < 1 << 32:
            return struct.pack("<II", 4, value)
        return struct.pack("<Iq", 11, value) if value < 1 << 63 else struct.pack("<IQ", 10, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, (str, bytes)):
        return struct.pack("<I", STRING) + string_bytes(value)
    if isinstance(value, np.ndarray):
        head = struct.pack("<IIQ", ARRAY, _DTYPES[value.dtype.name], value.size)
        return head + value.tobytes()
    return struct.pack("<I", ARRAY) + _list_bytes(value)


def _list_bytes(values: Sequence[Any]) -> bytes:
    encoded = [value_bytes(value) for value in values]
    element_type = struct.unpack_from("<I", encoded[0])[0] if encoded else STRING
    return struct.pack("<IQ", element_type, len(values)) + b"".join(item[4:] for item in encoded)


@dataclass(frozen=True)
class TensorEntry:
    """What the header says of a tensor; shape in row-major order."""

    name: str
    shape: tuple[int, ...]
    type: int
    offset: int


def header_bytes(
    metadata: Mapping[str, Any] | Sequence[tuple[str, Any]],
    entries: Sequence[TensorEntry],
    *,
    version: int = 3,
    magic: bytes = b"GGUF",
    num_keys: int | None = None,
    num_tensors: int | None = None,
    alignment: int = 32,
) -> bytes:
    """Everything in front of the tensors' data, padded. Counts can be overruled."""
    pairs = list(metadata.items()) if isinstance(metadata, Mapping) else list(metadata)
    counts = (
        len(entries) if num_tensors is None else num_tensors,
        len(pairs) if num_keys is None else num_keys,
    )
    parts = [magic, struct.pack("<IQQ", version, *counts)]
    parts += [string_bytes(key) + value_bytes(value) for key, value in pairs]
    for entry in entries:
        dims = struct.pack(f"<I{len(entry.shape)}Q", len(entry.shape), *reversed(entry.shape))
        parts.append(string_bytes(entry.name) + dims + struct.pack("<IQ", entry.type, entry.offset))
    head = b"".join(parts)
    return head + bytes(-len(head) % alignment)


def gguf_bytes(
    metadata: Mapping[str, Any] | Sequence[tuple[str, Any]],
    tensors: Mapping[str, np.ndarray | RawTensor] | None = None,
    *,
    alignment: int = 32,
    offsets: Mapping[str, int] | None = None,
    **header: Any,
) -> bytes:
    """A whole file. ``offsets`` and ``header`` overrule what the header would truthfully say."""
    entries, payload, offset = [], [], 0
    for name, tensor in (tensors or {}).items():
        raw = tensor if isinstance(tensor, RawTensor) else _raw_tensor(tensor)
        place = (offsets or {}).get(name, offset)
        entries.append(TensorEntry(name, raw.shape, raw.type, place))
        payload.append(raw.data + bytes(-len(raw.data) % alignment))
        offset += len(payload[-1])
    return header_bytes(metadata, entries, alignment=alignment, **header) + b"".join(payload)


def write_gguf(path: Path, *args: Any, **kwargs: Any) -> Path:
    path.write_bytes(gguf_bytes(*args, **kwargs))
    return path


def _raw_tensor(array: np.ndarray) -> RawTensor:
    type_number = {"float32": 0, "float16": 1}[array.dtype.name]
    return RawTensor(array.shape, type_number, np.ascontiguousarray(array).tobytes())
