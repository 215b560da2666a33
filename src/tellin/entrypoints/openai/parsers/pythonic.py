"""Tool calls written as Python: ``[get_weather(city="Rome"), now()]``.

A call is handed out when its closing parenthesis has come: its arguments are literals that become
JSON. Those that are JSON already stay as they are written.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from tellin.entrypoints.openai.parsers.base import ToolParser
from tellin.entrypoints.openai.parsers.json_text import value_end

_OPENING = "([{"
_CLOSING = ")]}"
_KEYWORD = re.compile(r"([^\s=,()]+)\s*=\s*")
_AFTER_VALUE = re.compile(r"\s*(?:,\s*|(?=\)$))")


class PythonicParser(ToolParser):
    """A list of calls, perhaps between ``<|python_start|>`` and ``<|python_end|>``."""

    markers = ("<|python_start|>",)
    closing = "<|python_end|>"

    def __init__(self, tool_names: Collection[str]) -> None:
        super().__init__(tool_names)
        self._raw = ""
        self._state = self._at_start

    def _at_start(self, char: str) -> None:
        if char == "[":
            self._raw += char
            self._begin_text()
        elif char.isspace():
            self._raw += char
        else:
            raw, self._raw = self._raw, ""
            self._state = self._in_content
            for again in raw + char:
                self._in_content(again)

    def _begin(self, marker: str) -> None:
        self._raw = ""
        self._state = self._at_start

    def _begin_text(self) -> None:
        self._call = ""
        self._depth = 0
        self._quote = ""
        self._is_escaped = False
        self._state = self._in_list

    def _in_list(self, char: str) -> None:
        self._raw += char
        if self._depth == 0 and not self._call and (char.isspace() or char == ","):
            return
        if self._depth == 0 and char == "]" and not self._call.strip():
            if self.num_calls == 0:
                self._back_to_content(self._raw)
            else:
                self._raw = ""
                self._expect_closing()
            return
        self._call += char
        self._follow(char)
        if self._depth == 0 and char == ")" and not self._quote:
            self._end_call()
        elif self._depth == 0 and not self._may_be_name():
            self._back_to_content(self._raw)

    def _follow(self, char: str) -> None:
        """Keep track of strings and brackets."""
        if self._quote:
            if self._is_escaped:
                self._is_escaped = False
            elif char == "\\":
                self._is_escaped = True
            elif char == self._quote:
                self._quote = ""
        elif char in "\"'" and self._depth:
            self._quote = char
        elif char in _OPENING:
            self._depth += 1
        elif char in _CLOSING:
            self._depth -= 1

    def _may_be_name(self) -> bool:
        """Whether what came so far, outside of parentheses, can be the name of a tool."""
        return any(name.startswith(self._call) for name in self.tool_names)

    def _end_call(self) -> None:
        call = parse_call(self._call)
        if call is None or call[0] not in self.tool_names:
            self._back_to_content(self._raw)
            return
        self._begin_call(*call)
        self._raw = self._call = ""

    def _end(self) -> None:
        if self._state in (self._at_start, self._in_list):
            self._emit_content(self._raw)


class Lfm2Parser(PythonicParser):
    """The same between LFM2's own marks."""

    markers = ("<|tool_call_start|>",)
    closing = "<|tool_call_end|>"


def written_calls(calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """Names and arguments of calls as LFM2 writes them."""
    texts = []
    for name, arguments in calls:
        pairs = (f"{key}={_python(value)}" for key, value in arguments.items())
        texts.append(f"{name}({', '.join(pairs)})")
    return f"{Lfm2Parser.markers[0]}[{', '.join(texts)}]{Lfm2Parser.closing}"


def _python(value: Any) -> str:
    """A JSON value as a Python literal."""
    if value is None or isinstance(value, bool):
        return str(value)
    if isinstance(value, dict):
        pairs = (f"{_python(key)}: {_python(item)}" for key, item in value.items())
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_python, value))}]"
    return json.dumps(value, ensure_ascii=False)


def parse_call(text: str) -> tuple[str, str] | None:
    """Name and JSON arguments of ``f(a=1)``; None if it is no call with literal keywords."""
    text = text.strip()
    return _json_call(text) or _python_call(text)


def _json_call(text: str) -> tuple[str, str] | None:
    """A call whose values are all JSON: they are handed on as they stand."""
    match = re.match(r"([^\s(]+)\(\s*", text)
    if match is None:
        return None
    name, position = match[1], match.end()
    arguments: dict[str, str] = {}
    while text[position:] != ")":
        key = _KEYWORD.match(text, position)
        end = None if key is None else value_end(text, key.end())
        if key is None or end is None or key[1] in arguments or not key[1].isidentifier():
            return None
        arguments[key[1]] = text[key.end() : end]
        match = _AFTER_VALUE.match(text, end)
        if match is None:
            return None
        position = match.end()
    return name, _written(arguments)


def _python_call(text: str) -> tuple[str, str] | None:
    try:
        node = ast.parse(text, mode="eval").body
        if not isinstance(node, ast.Call) or node.args:
            return None
        arguments: dict[str, str] = {}
        for keyword in node.keywords:
            if keyword.arg is None:
                return None
            arguments[keyword.arg] = _value(text, keyword.value)
        written = _written(arguments)
        written.encode()  # half of a surrogate pair is no text
        return ast.unparse(node.func), written
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _written(arguments: dict[str, str]) -> str:
    """The JSON object of these arguments, whose values are JSON."""
    pairs = (f"{json.dumps(key, ensure_ascii=False)}: {value}" for key, value in arguments.items())
    return f"{{{', '.join(pairs)}}}"


def _value(text: str, node: ast.expr) -> str:
    """An argument: what JSON and Python both read is JSON, whose escapes models write."""
    written = ast.get_source_segment(text, node) or ""
    if value_end(written) == len(written):
        return written
    return json.dumps(_literal(node), ensure_ascii=False, allow_nan=False)


def _literal(node: ast.expr) -> Any:
    """A literal; also JSON's words, which models mix in."""
    words = {"true": True, "false": False, "null": None}
    if isinstance(node, ast.Name) and node.id in words:
        return words[node.id]
    if isinstance(node, ast.Dict):
        keys = [None if key is None else _literal(key) for key in node.keys]
        return dict(zip(keys, (_literal(value) for value in node.values), strict=True))
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(item) for item in node.elts]
    return ast.literal_eval(node)
