"""Parses one message: thoughts first, then content and tool calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tellin.entrypoints.openai.parsers.base import ToolParser
from tellin.entrypoints.openai.parsers.events import ParsedDelta
from tellin.entrypoints.openai.parsers.reasoning import ThinkParser


class CallReader(Protocol):
    """What splits a text into content and calls."""

    @property
    def num_calls(self) -> int:
        """Calls begun so far."""

    def feed(self, text: str) -> ParsedDelta:
        """What ``text`` adds to the message."""

    def finish(self) -> ParsedDelta:
        """The text has ended: what was held back."""


class AnswerParser(Protocol):
    """What splits one answer into thoughts, content and calls."""

    @property
    def is_plain(self) -> bool:
        """Whether all text is content as it is."""

    @property
    def num_calls(self) -> int:
        """Calls begun so far."""

    def feed(self, text: str) -> ParsedDelta:
        """What ``text`` adds to the message."""

    def finish(self) -> ParsedDelta:
        """The text has ended: what was held back."""


class AnswerOrCalls:
    """For a text that holds calls or an answer, never both: how it begins tells which.

    An answer is content as it is, even where a string in it looks like a call.
    """

    def __init__(self, calls: ToolParser, starts: Sequence[str]) -> None:
        """``starts``: how calls begin, white space left out."""
        self._calls = calls
        self._starts = tuple(starts)
        self._held = ""
        self._has_calls: bool | None = None

    @property
    def num_calls(self) -> int:
        return self._calls.num_calls

    def feed(self, text: str) -> ParsedDelta:
        if self._has_calls is None:
            self._held += text
            begin = "".join(self._held.split())
            if any(begin.startswith(start) for start in self._starts):
                self._has_calls = True
            elif any(start.startswith(begin) for start in self._starts):
                return ParsedDelta()
            else:
                self._has_calls = False
            text, self._held = self._held, ""
        return self._calls.feed(text) if self._has_calls else ParsedDelta(content=text)

    def finish(self) -> ParsedDelta:
        if self._has_calls:
            return self._calls.finish()
        held, self._held = self._held, ""
        return ParsedDelta(content=held)


class MessageParser:
    """A `ThinkParser` before a `ToolParser`; either may be missing."""

    def __init__(
        self,
        think: ThinkParser | None,
        tools: CallReader | None,
        *,
        max_calls: int | None = None,
        answer_marks: tuple[str, str] | None = None,
    ) -> None:
        """
        Args:
            max_calls: later ones are dropped (``parallel_tool_calls=false``).
            answer_marks: what a model may write around its answer, which is dropped.
        """
        self._think = think
        self._answer: ThinkParser | None = None
        if answer_marks is not None:
            opening, closing = answer_marks
            self._answer = ThinkParser(False, opening=opening, closing=closing)
        self._tools = tools
        self._max_calls = max_calls

    @property
    def is_plain(self) -> bool:
        """Whether all text is content as it is."""
        return self._think is None and self._tools is None and self._answer is None

    @property
    def num_calls(self) -> int:
        """Calls begun so far."""
        return 0 if self._tools is None else self._tools.num_calls

    def feed(self, text: str) -> ParsedDelta:
        delta = ParsedDelta(content=text) if self._think is None else self._think.feed(text)
        return self._call_tools(self._unwrap(delta))

    def finish(self) -> ParsedDelta:
        delta = ParsedDelta() if self._think is None else self._think.finish()
        delta = self._unwrap(delta)
        if self._answer is not None:
            rest = self._answer.finish()
            delta.content += rest.reasoning + rest.content
        delta = self._call_tools(delta)
        if self._tools is not None:
            rest = self._limit(self._tools.finish())
            delta.content += rest.content
            delta.calls += rest.calls
        return delta

    def _unwrap(self, delta: ParsedDelta) -> ParsedDelta:
        """Without the marks around the answer: content is what is between and behind them."""
        if self._answer is None or not delta.content:
            return delta
        parts = self._answer.feed(delta.content)
        return ParsedDelta(content=parts.reasoning + parts.content, reasoning=delta.reasoning)

    def _call_tools(self, delta: ParsedDelta) -> ParsedDelta:
        if self._tools is None or not delta.content:
            return delta
        parsed = self._limit(self._tools.feed(delta.content))
        parsed.reasoning = delta.reasoning
        return parsed

    def _limit(self, delta: ParsedDelta) -> ParsedDelta:
        if self._max_calls is not None:
            delta.calls = [call for call in delta.calls if call.index < self._max_calls]
        return delta
