"""Small JSON files of a model folder, read with limits.

Configurations come from strangers: a file that is huge, nested without end, not UTF-8 or not an
object gets a `ModelLoadError` with its name, not a crash.
"""

from __future__ import annotations

import json
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from tellin.exceptions import ModelLoadError
from tellin.loading.typed_mapping import TypedMapping

_MAX_BYTES = 64 << 20
"""Shard indices of the largest models have about 10 MB."""


def is_file(path: Path) -> bool:
    """Whether there is a file, or a link to one.

    Raises:
        ModelLoadError: there is something else, or a link that leads nowhere: a file that is meant
            to be there must not count as left out.
    """
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise ModelLoadError(f"{str(path)[:4096]!r}: cannot be read: {why}") from None
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        raise ModelLoadError(f"{path}: is a link that leads nowhere: {error.strerror}") from None
    if not stat.S_ISREG(mode):
        raise ModelLoadError(f"{path}: is not a regular file")
    return True


def read_file(path: Path, max_bytes: int = _MAX_BYTES) -> bytes:
    """All of a small file.

    Raises:
        ModelLoadError: it cannot be read, is no regular file (one that never ends), or too large.
    """
    if not is_file(path):
        raise ModelLoadError(f"{path}: is missing")
    try:
        num_bytes = path.stat().st_size
        if num_bytes > max_bytes:
            raise ModelLoadError(f"{path}: has {num_bytes} bytes, allowed are {max_bytes}")
        return path.read_bytes()
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read: {error.strerror or error}") from None


def read_json_object(path: Path) -> TypedMapping:
    """The object in a JSON file.

    Raises:
        ModelLoadError: it cannot be read, or is not a JSON object.
    """
    try:
        values: Any = _decode(read_file(path))
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
    return read_json_object(path) if is_file(path) else None
