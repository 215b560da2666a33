"""Turns the name and message of an exception raised in a core back into an exception here."""

from __future__ import annotations

from tellin import exceptions
from tellin.exceptions import TellinError

_BUILTIN_ERRORS: dict[str, type[Exception]] = {
    error.__name__: error
    for error in (
        AttributeError,
        KeyError,
        MemoryError,
        NotImplementedError,
        RuntimeError,
        TimeoutError,
        TypeError,
        ValueError,
    )
}


def error_from_name(name: str | None, message: str) -> Exception:
    """Exception of the named type if it is tellin's or a common built-in, else RuntimeError."""
    own = getattr(exceptions, name or "", None)
    if isinstance(own, type) and issubclass(own, TellinError):
        return own(message)
    if name in _BUILTIN_ERRORS:
        return _BUILTIN_ERRORS[name](message)
    return RuntimeError(f"{name}: {message}" if name else message)
