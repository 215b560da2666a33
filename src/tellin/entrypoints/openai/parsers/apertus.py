"""Apertus' tool calls: objects whose one key is the function's name, in an array between marks.

``<|tools_prefix|>[{"f": {"city": "Rome"}}, {"now": {}}]<|tools_suffix|>``
"""

from __future__ import annotations

from tellin.entrypoints.openai.parsers.base import ToolParser
from tellin.entrypoints.openai.parsers.json_scanner import ValueScanner, text_of_string


class ApertusParser(ToolParser):
    markers = ("<|tools_prefix|>",)
    closing = "<|tools_suffix|>"

    def _begin(self, marker: str) -> None:
        self._before = marker
        self._state = self._before_array

    def _before_array(self, char: str) -> None:
        self._before += char
        if char == "[":
            self._state = self._in_array
        elif not char.isspace():
            self._back_to_content(self._before)

    def _in_array(self, char: str) -> None:
        self._before += char
        if char == "{":
            self._state = self._before_name
        elif char == "]":
            self._expect_closing()
        elif not char.isspace() and char != ",":
            self._back_to_content(self._before)

    def _before_name(self, char: str) -> None:
        self._before += char
        if char == '"':
            self._name, self._value = char, ValueScanner(char)
            self._state = self._in_name
        elif not char.isspace():
            self._back_to_content(self._before)

    def _in_name(self, char: str) -> None:
        self._before += char
        self._name += char
        if self._value.push(char)[1]:
            self._state = self._before_arguments

    def _before_arguments(self, char: str) -> None:
        """A colon, and what opens the object."""
        self._before += char
        if char == "{" and self._name.endswith(":"):
            name = text_of_string(self._name[:-1])
            if name is None:
                return self._back_to_content(self._before)
            self._value = ValueScanner(char)
            self._begin_call(name, char)
            self._state = self._in_arguments
        elif char == ":" and not self._name.endswith(":"):
            self._name += char
        elif not char.isspace():
            self._back_to_content(self._before)

    def _in_arguments(self, char: str) -> None:
        self._add_arguments(char)
        if self._value.push(char)[1]:
            self._before = ""
            self._state = self._after_arguments

    def _after_arguments(self, char: str) -> None:
        if char == "}":
            self._state = self._in_array
        elif not char.isspace():
            self._back_to_content()
            self._state(char)

    def _end(self) -> None:
        held = (
            self._before_array,
            self._in_array,
            self._before_name,
            self._in_name,
            self._before_arguments,
        )
        if self._state in held:
            self._emit_content(self._before)
