"""Finds JSON values inside other notations, so that they can be handed on as they were written.

Nothing is converted: numbers may be larger than a double, strings may hold half of a surrogate
pair, and values may be nested as deeply as they like. A grammar allows all of these.
"""

from __future__ import annotations

import re

# Groups are not possessive: Python before 3.11.5 does not go back behind one that fails half-way.
_STRING = r'"[^"\\\x00-\x1f]*+(?:\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})[^"\\\x00-\x1f]*+)*"'
_SCALAR = r"-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?(?:[eE][+-]?[0-9]++)?|true|false|null"
_TOKEN = re.compile(rf"[ \t\n\r]*+({_STRING}|{_SCALAR}|[{{}}\[\],:])")
_CLOSING = {"{": "}", "[": "]"}
_SINGLE = frozenset("{}[],:")
_KEY_AFTER = {"}": "key", "]": "value"}


def is_scalar(text: str) -> bool:
    """Whether this is a JSON number, true, false or null."""
    return re.fullmatch(_SCALAR, text) is not None


def value_end(text: str, start: int = 0) -> int | None:
    """Where the JSON value that begins at ``start`` ends; None if there is none."""
    closers: list[str] = []
    state, position = "value", start
    while match := _TOKEN.match(text, position):
        token, position = match[1], match.end()
        if state in ("value", "first value") and token in _CLOSING:
            closers.append(_CLOSING[token])
            state = f"first {_KEY_AFTER[closers[-1]]}"
            continue
        if state in ("key", "first key") and token.startswith('"'):
            state = "colon"
            continue
        if state == "colon" and token == ":":
            state = "value"
            continue
        if state == "next" and token == ",":
            state = _KEY_AFTER[closers[-1]]
            continue
        if state in ("next", "first key", "first value") and token == closers[-1]:
            closers.pop()
        elif state not in ("value", "first value") or token in _SINGLE:
            return None
        if not closers:
            return position
        state = "next"
    return None
