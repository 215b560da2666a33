"""Checks of single values given by users: type, range, finiteness.

Each returns the value in its plain Python type (so that a NumPy scalar cannot reach the wire) or
raises an error that names the parameter and the value. Knows no particular parameter.
"""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Iterable, Mapping
from typing import Any

from tellin.exceptions import InvalidParameterError, InvalidTypeError


def check_int(name: str, value: Any, low: int | None = None, high: int | None = None) -> int:
    """Return ``value`` as an int in ``[low, high]``.

    Raises:
        InvalidTypeError: it is not an integer (booleans are not).
        InvalidParameterError: it is out of range.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise InvalidTypeError(
            f"{name} must be an integer, got {value!r} ({type(value).__name__})",
            parameter=name,
            value=value,
        )
    number = operator.index(value)
    if (low is not None and number < low) or (high is not None and number > high):
        bounds = f"at least {low}" if high is None else f"in [{low}, {high}]"
        raise InvalidParameterError(
            f"{name} must be {bounds}, got {number}", parameter=name, value=number
        )
    return number


def check_float(name: str, value: Any, low: float, high: float, *, open_low: bool = False) -> float:
    """Return ``value`` as a finite float in ``[low, high]`` (``(low, high]`` with ``open_low``).

    Raises:
        InvalidTypeError: it is not a real number (booleans and strings are not).
        InvalidParameterError: it is NaN, infinite or out of range.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise InvalidTypeError(
            f"{name} must be a number, got {value!r} ({type(value).__name__})",
            parameter=name,
            value=value,
        )
    number = float(value)
    # Written so that NaN, for which every comparison is false, is refused.
    inside = (low < number if open_low else low <= number) and number <= high
    if not (inside and math.isfinite(number)):
        if high == math.inf:
            bounds = f"finite and {'greater than' if open_low else 'at least'} {low:g}"
        else:
            bounds = f"in {'(' if open_low else '['}{low:g}, {high:g}]"
        raise InvalidParameterError(
            f"{name} must be {bounds}, got {number}", parameter=name, value=number
        )
    return number


def check_bool(name: str, value: Any) -> bool:
    """Return ``value`` if it is a bool.

    Raises:
        InvalidTypeError: it is anything else.
    """
    if not isinstance(value, bool):
        raise InvalidTypeError(
            f"{name} must be true or false, got {value!r} ({type(value).__name__})",
            parameter=name,
            value=value,
        )
    return value


def check_str(name: str, value: Any) -> str:
    """Return ``value`` if it is a string.

    Raises:
        InvalidTypeError: it is anything else.
    """
    if not isinstance(value, str):
        raise InvalidTypeError(
            f"{name} must be a string, got {value!r} ({type(value).__name__})",
            parameter=name,
            value=value,
        )
    return value


def check_str_list(name: str, value: Any) -> list[str]:
    """None, one string, or several non-empty strings, as a list."""
    if value is None:
        return []
    result = [value] if isinstance(value, str) else _listed(value)
    if result is None:
        raise InvalidTypeError(
            f"{name} must be a string or a list of strings, got {value!r}",
            parameter=name,
            value=value,
        )
    for item in result:
        if not isinstance(item, str):
            raise InvalidTypeError(
                f"{name} must contain strings only, got {item!r} ({type(item).__name__})",
                parameter=name,
                value=value,
            )
        if not item:
            raise InvalidParameterError(
                f"{name} must not contain an empty string", parameter=name, value=value
            )
    return result


def check_int_list(name: str, value: Any) -> list[int]:
    """None or several integers, as a list."""
    if value is None:
        return []
    items = _listed(value)
    if items is None:
        raise InvalidTypeError(
            f"{name} must be a list of integers, got {value!r}", parameter=name, value=value
        )
    return [check_int(name, item) for item in items]


def _listed(value: Any) -> list[Any] | None:
    """The items, or None if it has none that are meant as such."""
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        return None
    try:
        return list(value)
    except TypeError:  # an array without dimensions calls itself iterable
        return None
