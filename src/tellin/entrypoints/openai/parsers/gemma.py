"""Gemma's tool calls.

Either ``<start_function_call>call:f{city:<escape>Rome<escape>}<end_function_call>``, or, by newer
models, ``<|tool_call>call:f{city:<|"|>Rome<|"|>}<tool_call|>``. A call is handed out when its
closing marker has come.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any

from tellin.entrypoints.openai.parsers.base import ToolParser

_CLOSING = {"<start_function_call>": "<end_function_call>", "<|tool_call>": "<tool_call|>"}
_QUOTES = ("<escape>", '<|"|>', '"')
_MAX_DEPTH = 64


class GemmaParser(ToolParser):
    markers = tuple(_CLOSING)

    def __init__(self, tool_names: Collection[str]) -> None:
        super().__init__(tool_names)
        self._raw = ""

    def _begin(self, marker: str) -> None:
        self._raw = marker
        self._marker = marker
        self._state = self._in_call

    def _in_call(self, char: str) -> None:
        self._raw += char
        closing = _CLOSING[self._marker]
        if not self._raw.endswith(closing):
            return
        raw, self._raw = self._raw, ""
        call = parse_call(raw[len(self._marker) : -len(closing)])
        if call is None:
            self._back_to_content(raw)
        else:
            self._begin_call(*call)
            self._back_to_content()

    def _end(self) -> None:
        if self._state == self._in_call:
            self._emit_content(self._raw)


def parse_call(text: str) -> tuple[str, str] | None:
    """Name and JSON arguments of ``call:f{...}``; None if it is something else."""
    match = re.fullmatch(r"\s*call:([^\s{]+)\s*(\{.*\})\s*", text, re.DOTALL)
    if match is None:
        return None
    reader = _Reader(match[2])
    try:
        arguments = reader.value(0)
    except ValueError:
        return None
    if reader.position != len(match[2]):
        return None
    return match[1], json.dumps(arguments, ensure_ascii=False)


class _Reader:
    """Reads Gemma's notation: JSON with bare keys and other quotes."""

    def __init__(self, text: str) -> None:
        self._text = text
        self.position = 0

    def value(self, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise ValueError("nested too deeply")
        self._skip_space()
        for quote in _QUOTES:
            if self._text.startswith(quote, self.position):
                return self._string(quote)
        if self._accept("{"):
            return self._object(depth)
        if self._accept("["):
            items = []
            while not self._accept("]"):
                items.append(self.value(depth + 1))
                self._accept(",")
            return items
        return self._scalar()

    def _object(self, depth: int) -> dict[str, Any]:
        result = {}
        while not self._accept("}"):
            key = self._key()
            if not self._accept(":"):
                raise ValueError("no colon")
            result[key] = self.value(depth + 1)
            self._accept(",")
        return result

    def _key(self) -> str:
        self._skip_space()
        for quote in _QUOTES:
            if self._text.startswith(quote, self.position):
                return self._string(quote)
        match = re.compile(r"[^\s:,{}\[\]]+").match(self._text, self.position)
        if match is None:
            raise ValueError("no key")
        self.position = match.end()
        return match[0]

    def _string(self, quote: str) -> str:
        start = self.position + len(quote)
        end = self._text.find(quote, start)
        if end < 0:
            raise ValueError("no closing quote")
        self.position = end + len(quote)
        return self._text[start:end]

    def _scalar(self) -> Any:
        match = re.compile(r"[^,{}\[\]]+").match(self._text, self.position)
        if match is None:
            raise ValueError("no value")
        self.position = match.end()
        word = match[0].strip()
        try:
            number: Any = json.loads(word)
        except ValueError:
            return word
        if isinstance(number, float) and number - number != 0:
            raise ValueError("not a finite number")
        return number

    def _accept(self, char: str) -> bool:
        self._skip_space()
        if self._text.startswith(char, self.position):
            self.position += len(char)
            return True
        return False

    def _skip_space(self) -> None:
        while self.position < len(self._text) and self._text[self.position].isspace():
            self.position += 1
