"""A JSON object that describes a tool call, read character by character.

``{"name": "f", "arguments": {...}}``, in any order and with other keys beside them. The text of the
arguments is passed on verbatim as it comes, once the name is known.
"""

from __future__ import annotations

import enum
import json

NAME_KEYS = ("name",)
ARGUMENT_KEYS = ("arguments", "parameters")
_CLOSING = {"{": "}", "[": "]"}


class ValueScanner:
    """Follows one JSON value and knows where it ends. Lenient: checks brackets and strings only."""

    def __init__(self, first: str) -> None:
        self._expected: list[str] = []
        self._in_string = first == '"'
        self._is_escaped = False
        self._is_scalar = False
        self.failed = False
        if first in _CLOSING:
            self._expected.append(_CLOSING[first])
        elif not self._in_string:
            self._is_scalar = True
            self.failed = not (first.isalnum() or first == "-")

    def push(self, char: str) -> tuple[bool, bool]:
        """Take a character after the first; returns whether it belongs, and whether it ends."""
        if self._in_string:
            if self._is_escaped:
                self._is_escaped = False
            elif char == "\\":
                self._is_escaped = True
            elif char == '"':
                self._in_string = False
                return True, not self._expected
            return True, False
        if self._is_scalar:
            belongs = char.isalnum() or char in "+-."
            return belongs, not belongs
        if char == '"':
            self._in_string = True
        elif char in _CLOSING:
            self._expected.append(_CLOSING[char])
        elif char in "}]":
            if char != self._expected.pop():
                self.failed = True
                return True, True
            return True, not self._expected
        return True, False


class _State(enum.Enum):
    KEY_OR_END = enum.auto()
    KEY = enum.auto()
    IN_KEY = enum.auto()
    COLON = enum.auto()
    VALUE = enum.auto()
    IN_VALUE = enum.auto()
    COMMA_OR_END = enum.auto()
    DONE = enum.auto()
    FAILED = enum.auto()


class CallScanner:
    """Reads one call object, after its opening brace.

    `push` returns pieces of the arguments' text; `name` is set once it is known. Until then
    arguments are kept back.
    """

    def __init__(self, name_keys: tuple[str, ...] = NAME_KEYS) -> None:
        """``name_keys``: under which of them an object names its function."""
        self.name: str | None = None
        self._name_keys = name_keys
        self.raw = "{"
        """All characters of the object, for when it turns out to be no call."""
        self._state = _State.KEY_OR_END
        self._text = ""
        self._key = ""
        self._value: ValueScanner | None = None
        self._waiting = ""
        self._has_arguments = False
        self._streams = False
        self._rescan: str | None = None

    @property
    def done(self) -> bool:
        return self._state is _State.DONE

    @property
    def failed(self) -> bool:
        return self._state is _State.FAILED

    def push(self, char: str) -> str:
        """Take a character; returns what it adds to the arguments that can be handed out."""
        self.raw += char
        self._step(char)
        if self.name is None:
            return ""
        ready, self._waiting = self._waiting, ""
        if self.done and not self._has_arguments:
            ready += "{}"
        return ready

    def _step(self, char: str) -> None:
        state = self._state
        if state is _State.IN_KEY:
            self._in_string(char)
        elif state is _State.IN_VALUE:
            self._in_value(char)
        elif char.isspace():
            return
        elif state is _State.COLON and char == ":":
            self._state = _State.VALUE
        elif state is _State.VALUE:
            self._begin_value(char)
        elif state in (_State.KEY, _State.KEY_OR_END) and char == '"':
            self._text, self._value = char, ValueScanner(char)
            self._state = _State.IN_KEY
        elif state is _State.COMMA_OR_END and char == ",":
            self._state = _State.KEY
        elif state in (_State.COMMA_OR_END, _State.KEY_OR_END) and char == "}":
            self._state = _State.DONE if self.name is not None else _State.FAILED
        else:
            self._state = _State.FAILED

    def _in_string(self, char: str) -> None:
        assert self._value is not None
        self._text += char
        if self._value.push(char)[1]:
            self._key = text_of_string(self._text) or ""
            self._state = _State.COLON

    def _begin_value(self, char: str) -> None:
        self._text, self._value = "", ValueScanner(char)
        if self._value.failed:
            self._state = _State.FAILED
            return
        self._state = _State.IN_VALUE
        is_arguments = self._key in ARGUMENT_KEYS and not self._has_arguments
        # Arguments that are a string hold JSON themselves: decoded when the string is complete.
        self._streams = is_arguments and char != '"'
        self._has_arguments |= is_arguments
        self._take(char)

    def _take(self, char: str) -> None:
        if self._streams:
            self._waiting += char
        else:
            self._text += char

    def _in_value(self, char: str) -> None:
        assert self._value is not None
        belongs, ends = self._value.push(char)
        if belongs:
            self._take(char)
        if self._value.failed:
            self._state = _State.FAILED
        elif ends:
            self._end_value()
            if not belongs:
                self._step(char)

    def _end_value(self) -> None:
        self._state = _State.COMMA_OR_END
        if self._key in self._name_keys and self.name is None:
            self.name = text_of_string(self._text)
            if not self.name:
                self.name, self._state = None, _State.FAILED
        elif self._key in ARGUMENT_KEYS and not self._streams and self._text.startswith('"'):
            self._waiting += text_of_string(self._text) or "{}"


def text_of_string(text: str) -> str | None:
    """The value of a JSON string; None if the text is none."""
    try:
        value = json.loads(text, strict=False)
    except ValueError:
        return None
    return value if isinstance(value, str) else None
