"""Key-value pairs of a model file, with getters that check types.

GGUF metadata and JSON configurations are read through this, so that a key of the wrong type, or a
missing one, gives the same error everywhere: file, key, what it is, what it should be.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tellin.exceptions import ModelLoadError


class TypedMapping(Mapping[str, Any]):
    """A file's key-value pairs, in file order. A value of None counts as missing.

    The getters raise `ModelLoadError` when a key has the wrong type, or is missing and no default
    is given.

    ``spellings``: of keys that are called otherwise in the file, the file's own names.
    """

    def __init__(
        self, path: Path, values: Mapping[str, Any], spellings: Mapping[str, str] | None = None
    ) -> None:
        self.path = path
        self._values = values
        self._spellings = spellings or {}

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def name_of(self, key: str) -> str:
        """What the file calls a key."""
        return self._spellings.get(key, key)

    @property
    def spellings(self) -> Mapping[str, str]:
        """By key, the file's name of those that it calls otherwise."""
        return self._spellings

    def has(self, key: str) -> bool:
        """Whether the key is there and not null."""
        return self._values.get(key) is not None

    def get_int(self, key: str, default: int | None = None) -> int:
        value = self._get(key, default, "an integer")
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong_type(key, value, "an integer")
        if abs(value) >= 1 << 64:
            raise ModelLoadError(
                f"{self._named(key)} is an integer of more than 64 bits (got {value!s:.40})"
            )
        return value

    def get_float(self, key: str, default: float | None = None) -> float:
        """A finite number; integers are accepted."""
        value = self._get(key, default, "a number")
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self._wrong_type(key, value, "a number")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise ModelLoadError(f"{self._named(key)} is {number}, not a finite number")
        return number

    def get_bool(self, key: str, default: bool | None = None) -> bool:
        value = self._get(key, default, "a boolean")
        if not isinstance(value, bool):
            raise self._wrong_type(key, value, "a boolean")
        return value

    def get_str(self, key: str, default: str | None = None) -> str:
        value = self._get(key, default, "a string")
        if not isinstance(value, str):
            raise self._wrong_type(key, value, "a string")
        return value

    def get_strings(self, key: str) -> Sequence[str]:
        """An array of strings; of a GGUF file a lazy `StringArray`."""
        value = self._get(key, None, "an array of strings")
        is_list = isinstance(value, list) and all(isinstance(item, str) for item in value)
        if not is_list and (not isinstance(value, Sequence) or isinstance(value, (str, list))):
            raise self._wrong_type(key, value, "an array of strings")
        strings: Sequence[str] = value
        return strings

    def get_numbers(self, key: str) -> npt.NDArray[Any]:
        """An array of numbers: a view of a GGUF file, or a copy of a JSON list."""
        value = self._get(key, None, "an array of numbers")
        if isinstance(value, list) and all(
            isinstance(item, (int, float)) and not isinstance(item, bool) for item in value
        ):
            value = np.array(value)
            if value.dtype == object:
                raise ModelLoadError(f"{self._named(key)} holds an integer of more than 64 bits")
        if not isinstance(value, np.ndarray):
            raise self._wrong_type(key, value, "an array of numbers")
        return value

    def get_integers(self, key: str, at_least: int = 0) -> npt.NDArray[Any]:
        """An array of integers, or of true and false, with so many entries or more."""
        value = self.get_numbers(key)
        if value.size < at_least:
            raise ModelLoadError(
                f"{self._named(key)} has {value.size} entries, expected {at_least} or more"
            )
        if value.size and value.dtype.kind not in "iub":
            raise ModelLoadError(f"{self._named(key)} is an array of {value.dtype}s, not integers")
        return value

    def get_flags(self, key: str, count: int) -> list[bool]:
        """The first ``count`` entries of an array that has as many, each true or false, or 1 or 0.

        Raises `ModelLoadError` also if there are too few, or others.
        """
        flags: list[int] = self.get_integers(key, count)[:count].tolist()
        for index, flag in enumerate(flags):
            if flag not in (0, 1):
                raise ModelLoadError(
                    f"{self._named(key)} holds {flag} for layer {index}, expected true or false"
                )
        return [bool(flag) for flag in flags]

    def get_mapping(self, key: str) -> TypedMapping:
        value = self._get(key, None, "an object")
        if not isinstance(value, dict):
            raise self._wrong_type(key, value, "an object")
        return TypedMapping(self.path, value)

    def _get(self, key: str, default: Any, expected: str) -> Any:
        value = self._values.get(key)
        if value is None:
            value = default
        if value is None:
            raise ModelLoadError(f"{self._named(key)} ({expected}) is missing")
        return value

    def _named(self, key: str) -> str:
        return f"{self.path}: key {self.name_of(key)!r}"

    def _wrong_type(self, key: str, value: Any, expected: str) -> ModelLoadError:
        if isinstance(value, np.ndarray):
            name, value = "an array of numbers", value[:4].tolist()
        elif isinstance(value, Sequence) and not isinstance(value, str):
            name, value = "an array", value[:4]
        else:
            name = f"a {type(value).__name__}"
        return ModelLoadError(
            f"{self._named(key)} is {name}, expected {expected} (got {value!r:.40})"
        )
