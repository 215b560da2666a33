"""Tool calls as tags with values as plain text: Qwen3-Coder and Qwen3.5, Seed-OSS, MiniMax-M2.

``<tool_call><function=f><parameter=city>Rome</parameter></function></tool_call>``, with line breaks
between all of them; other families have other tags. Texts have no quotes, so that only the tool's
schema tells ``1`` from ``"1"``. What can only be a text is handed out while it comes, other
parameters at their closing tag.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tellin.entrypoints.openai.parsers.base import ToolParser
from tellin.entrypoints.openai.parsers.json_text import value_end
from tellin.entrypoints.openai.schema_tools import referenced

END_PARAMETER = "</parameter>"
_PYTHONS = {"True": "true", "False": "false", "None": "null"}
_KIND_OF_START = {'"': "string", "{": "object", "[": "array", "t": "boolean", "f": "boolean",
                  "n": "null"}  # fmt: skip
TEXT_ONLY = frozenset({"string"})
_MAX_DEPTH = 16
"""References and branches that are followed."""


class QwenXmlParser(ToolParser):
    markers = ("<tool_call>", "<function=")
    """The tag around calls, and how that of a function begins, which may come alone."""
    closing = "</tool_call>"
    end_function = "</function>"
    parameter = "<parameter="
    """How the tag of a parameter begins."""

    def _begin(self, marker: str) -> None:
        self._raw = marker
        self._tag = ""
        self._state = self._in_name if marker == self.markers[1] else self._before_function

    def _before_function(self, char: str) -> None:
        self._raw += char
        if not self._tag and char.isspace():
            return
        self._tag += char
        if self._tag == self.markers[1]:
            self._tag = ""
            self._state = self._in_name
        elif not self.markers[1].startswith(self._tag):
            self._back_to_content(self._raw)

    def _in_name(self, char: str) -> None:
        self._raw += char
        if char == ">":
            self._function, self._tag = self._named(self._tag), ""
            self._num_arguments = 0
            self._begin_call(self._function)
            self._state = self._between
        elif char == "<" or char == "\n":
            self._back_to_content(self._raw)
        else:
            self._tag += char

    def _between(self, char: str) -> None:
        """Among the parameters."""
        if not self._tag and char.isspace():
            return
        self._tag += char
        tags = (self.parameter, self.end_function, self.closing)
        if self._tag == self.parameter:
            self._tag = ""
            self._state = self._in_key
        elif self._tag in tags:
            is_end = self._tag == self.closing
            self._close_call()
            if is_end:
                self._back_to_content()
        elif not any(tag.startswith(self._tag) for tag in tags):
            self._leave_call()

    def _in_key(self, char: str) -> None:
        if char != ">":
            self._tag += char
            return
        name, self._tag, self._raw = self._named(self._tag), "", ""
        self._kinds = _kinds_of(self.schemas.get(self._function, True), name)
        opening = ", " if self._num_arguments else "{"
        self._opening = f"{opening}{json.dumps(name, ensure_ascii=False)}: "
        self._num_arguments += 1
        if self._kinds != TEXT_ONLY:
            self._state = self._in_value
            return
        self._add_arguments(f'{self._opening}"')
        self._closing = END_PARAMETER
        self._is_first = self._is_leading = True
        self._state = self._in_text

    def _in_value(self, char: str) -> None:
        self._raw += char
        if char != ">" or not self._raw.endswith(END_PARAMETER):
            return
        value = self._raw.removesuffix(END_PARAMETER)
        if value.startswith("\n"):  # a value on lines of its own ends on one: in JSON none can
            if value == "\n":
                value = ""
            elif value.endswith("\n"):
                value = value[1:-1]
            else:
                return
        self._add_arguments(f"{self._opening}{_as_json(value, self._kinds)}")
        self._state = self._between

    def _in_text(self, char: str) -> None:
        """In a value that is a text: what may be its closing tag is held back."""
        if self._is_first and char == "\n":  # it stands on lines of its own
            self._closing = f"\n{END_PARAMETER}"
        self._raw += char
        if self._raw == self._closing:
            self._raw = ""
            self._add_arguments('"')
            self._state = self._between
            return
        text = ""
        while not self._closing.startswith(self._raw):
            text, self._raw = text + self._raw[0], self._raw[1:]
        if text and self._closing[0] == "\n" and self._is_leading:
            text, self._is_leading = text[1:], False
        self._is_first = False
        self._add_arguments(json.dumps(text, ensure_ascii=False)[1:-1])

    def _close_call(self) -> None:
        self._add_arguments("}" if self._num_arguments else "{}")
        self._tag = ""
        self._state = self._after_call

    def _after_call(self, char: str) -> None:
        if not self._tag and char.isspace():
            return
        self._tag += char
        function = self.markers[1]
        if self._tag == self.closing:
            self._back_to_content()
        elif self._tag == function:
            self._raw, self._tag = function, ""
            self._state = self._in_name
        elif not any(tag.startswith(self._tag) for tag in (self.closing, function)):
            self._read_again()

    def _leave_call(self) -> None:
        """What comes is no parameter: the call is over."""
        self._add_arguments("}" if self._num_arguments else "{}")
        self._read_again()

    def _read_again(self) -> None:
        text, self._tag = self._tag, ""
        self._back_to_content()
        for char in text:
            self._state(char)

    def _end(self) -> None:
        if self._state in (self._before_function, self._in_name):
            self._emit_content(self._raw)

    def _named(self, text: str) -> str:
        """The name in a tag."""
        return text.strip()


class SeedParser(QwenXmlParser):
    markers = ("<seed:tool_call>", "<function=")
    closing = "</seed:tool_call>"


class MiniMaxParser(QwenXmlParser):
    """``<invoke name="f"><parameter name="city">Rome</parameter></invoke>``, any number of them."""

    markers = ("<minimax:tool_call>", "<invoke name=")
    closing = "</minimax:tool_call>"
    end_function = "</invoke>"
    parameter = "<parameter name="

    def _named(self, text: str) -> str:
        return text.strip().removeprefix('"').removesuffix('"')


def _as_json(text: str, kinds: frozenset[str] | None) -> str:
    """The value in JSON: as it stands if it is JSON of an allowed kind, else a string."""
    bare = text.strip()
    bare = _PYTHONS.get(bare, bare)
    if kinds != TEXT_ONLY and bare and value_end(bare) == len(bare):
        kind = _KIND_OF_START.get(bare[0], "number")
        if kinds is None or kind in kinds or "string" not in kinds:
            return bare
    return json.dumps(text, ensure_ascii=False)


def _kinds_of(parameters: Any, name: str) -> frozenset[str] | None:
    """Kinds of JSON values that an argument may be of; None = any."""
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    if not isinstance(properties, Mapping) or name not in properties:
        return None
    return kinds_of(properties[name], parameters)


def kinds_of(schema: Any, root: Any, depth: int = 0) -> frozenset[str] | None:
    """Kinds of JSON values (integers are numbers) that a schema allows; None = any, or unknown."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return None
    if isinstance(schema.get("$ref"), str):
        return kinds_of(referenced(root, schema["$ref"]), root, depth + 1)
    choices = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(choices, list):
        starts = [json.dumps(choice)[0] for choice in choices]
        return frozenset(_KIND_OF_START.get(start, "number") for start in starts)
    for key in ("anyOf", "oneOf", "allOf"):
        branches = schema.get(key)
        if isinstance(branches, list) and branches and (key != "allOf" or len(branches) == 1):
            parts = [kinds_of(branch, root, depth + 1) for branch in branches]
            known = [part for part in parts if part is not None]
            return frozenset().union(*known) if len(known) == len(parts) else None
    kinds = schema.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if not all(isinstance(kind, str) for kind in kinds):
        return None
    return frozenset("number" if kind == "integer" else kind for kind in kinds)
