"""Base of tool-call parsers: content with calls in it, after markers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from tellin.entrypoints.openai.parsers.events import ParsedDelta
from tellin.entrypoints.openai.parsers.text_scanner import MarkerScanner


class ToolParser:
    """Splits a text into content and calls.

    A subclass names the markers after which calls begin and sets ``self._state`` to the method that
    takes each further character.
    """

    markers: tuple[str, ...] = ()
    """Texts that introduce calls. They may be special tokens."""
    closing = ""
    """The text behind calls, in formats that have one."""
    id_length = 24

    schemas: Mapping[str, Any] = {}
    """Of each tool's arguments, for formats that do not tell texts from other values."""

    def __init__(self, tool_names: Collection[str]) -> None:
        self.tool_names = frozenset(tool_names)
        self.num_calls = 0
        self._delta = ParsedDelta()
        self._scanner = MarkerScanner(self.markers)
        self._drop_space = False
        self._tail = ""  # what may be the beginning of ``closing``
        self._state: Callable[[str], None] = self._in_content

    def feed(self, text: str) -> ParsedDelta:
        """What ``text`` adds to the message."""
        for char in text:
            self._state(char)
        return self._take_delta()

    def finish(self) -> ParsedDelta:
        """The text has ended: what was held back."""
        self._end()
        if self._state == self._in_content:
            self._emit_content(self._scanner.finish())
        return self._take_delta()

    # ------------------------------------------------------------------ for subclasses

    def _begin(self, marker: str) -> None:
        """A marker was found: choose the next state."""
        raise NotImplementedError

    def _end(self) -> None:
        """The text has ended inside whatever state this is."""

    def _in_content(self, char: str) -> None:
        text, marker = self._scanner.push(char)
        self._emit_content(text)
        if marker is not None:
            self._begin(marker)

    def _back_to_content(self, raw: str = "") -> None:
        """Go on with content; ``raw`` was read as a call and is none, so it is content too."""
        self._state = self._in_content
        if raw:
            self._emit_content(raw)
        else:
            self._drop_space = True

    def _expect_closing(self) -> None:
        """The calls are complete: ``closing`` may follow, or else content."""
        self._tail = ""
        self._state = self._before_closing

    def _before_closing(self, char: str) -> None:
        if not self._tail and char.isspace():
            return
        self._tail += char
        if self._tail == self.closing:
            self._back_to_content()
        elif not self.closing.startswith(self._tail):
            tail = self._tail
            self._back_to_content()
            for again in tail:
                self._state(again)

    def _emit_content(self, text: str) -> None:
        if self._drop_space:  # white space after a call separates it from what follows
            text = text.lstrip()
        if text:
            self._drop_space = False
            self._delta.content += text

    def _begin_call(self, name: str, arguments: str = "") -> None:
        self._delta.add_call(self.num_calls, name, arguments)
        self.num_calls += 1

    def _add_arguments(self, text: str) -> None:
        if text:
            self._delta.add_call(self.num_calls - 1, None, text)

    def _take_delta(self) -> ParsedDelta:
        delta, self._delta = self._delta, ParsedDelta()
        return delta
