"""Gemma's tool calls.

Either ``<start_function_call>call:f{city:<escape>Rome<escape>}<end_function_call>``, or, by newer
models, ``<|tool_call>call:f{city:<|"|>Rome<|"|>}<tool_call|>``. A call is handed out when its
closing marker has come.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection

from tellin.entrypoints.openai.parsers.base import ToolParser
from tellin.entrypoints.openai.parsers.json_text import is_scalar

_CLOSING = {"<start_function_call>": "<end_function_call>", "<|tool_call>": "<tool_call|>"}
_QUOTES = ("<escape>", '<|"|>', '"')
_CLOSING_BRACKETS = {"{": "}", "[": "]"}


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
    try:
        return match[1], _Reader(match[2]).json()
    except ValueError:
        return None


class _Reader:
    """Reads Gemma's notation: JSON with bare keys and other quotes."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._position = 0

    def json(self) -> str:
        """The whole text, one value, in JSON. However deeply nested it is, and numbers as written.

        Raises:
            ValueError: it is something else.
        """
        pieces: list[str] = []
        closers: list[str] = []
        while True:
            if closers and self._accept(closers[-1]):
                pieces.append(closers.pop())
            else:
                if closers and pieces[-1] not in _CLOSING_BRACKETS:
                    pieces.append(", ")
                if closers and closers[-1] == "}":
                    pieces.append(f"{self._key()}: ")
                opening = next((char for char in _CLOSING_BRACKETS if self._accept(char)), None)
                if opening is not None:
                    pieces.append(opening)
                    closers.append(_CLOSING_BRACKETS[opening])
                    continue
                pieces.append(self._string() or self._scalar())
            if not closers:
                break
            self._accept(",")
        if self._position != len(self._text):
            raise ValueError("more than one value")
        return "".join(pieces)

    def _key(self) -> str:
        """A key and its colon; returns the key as a JSON string."""
        key = self._string()
        if key is None:
            match = re.compile(r"[^\s:,{}\[\]]+").match(self._text, self._position)
            if match is None:
                raise ValueError("no key")
            self._position = match.end()
            key = json.dumps(match[0], ensure_ascii=False)
        if not self._accept(":"):
            raise ValueError("no colon")
        return key

    def _string(self) -> str | None:
        """A JSON string of what is quoted here; None if nothing is."""
        self._skip_space()
        for quote in _QUOTES:
            if self._text.startswith(quote, self._position):
                start = self._position + len(quote)
                end = self._text.find(quote, start)
                if end < 0:
                    raise ValueError("no closing quote")
                self._position = end + len(quote)
                return json.dumps(self._text[start:end], ensure_ascii=False)
        return None

    def _scalar(self) -> str:
        """A number or one of JSON's words; any other word is a string."""
        match = re.compile(r"[^,{}\[\]]+").match(self._text, self._position)
        if match is None:
            raise ValueError("no value")
        self._position = match.end()
        word = match[0].strip()
        return word if is_scalar(word) else json.dumps(word, ensure_ascii=False)

    def _accept(self, char: str) -> bool:
        self._skip_space()
        if self._text.startswith(char, self._position):
            self._position += len(char)
            return True
        return False

    def _skip_space(self) -> None:
        while self._position < len(self._text) and self._text[self._position].isspace():
            self._position += 1
