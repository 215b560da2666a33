"""Small JSON files of a model folder, read with limits.

Configurations come from strangers: a file that is huge, nested without end, not UTF-8 or not an
object gets a `ModelLoadError` with its name, not a crash.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from tellin.exceptions import ModelLoadError
from tellin.loading.typed_mapping import TypedMapping

_MAX_BYTES = 64 << 20
"""Shard indices of the largest models have about 10 MB."""


def read_json_object(path: Path) -> TypedMapping:
    """The object in a JSON file.

    Raises:
        ModelLoadError: it cannot be read, or is not a JSON object.
    """
    try:
        num_bytes = path.stat().st_size
        if num_bytes > _MAX_BYTES:
            raise ModelLoadError(f"{path}: has {num_bytes} bytes, allowed are {_MAX_BYTES}")
        values: Any = _decode(path.read_bytes())
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ModelLoadError(f"{path}: is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise ModelLoadError(f"{path}: is not a JSON object")
    return TypedMapping(path, values)


def _decode(raw: bytes) -> Any:
    try:
        return msgspec.json.decode(raw)
    except msgspec.DecodeError:
        if b"Infinity" not in raw:
            raise
        # No JSON, but Python writes it: some configurations limit a value by it.
        with suppress(ValueError):
            return json.loads(raw)
        raise


def read_optional_json_object(path: Path) -> TypedMapping | None:
    """As `read_json_object`, or None if there is no such file."""
    return read_json_object(path) if path.is_file() else None
