"""Parses one message: thoughts first, then content and tool calls."""

from __future__ import annotations

from tellin.entrypoints.openai.parsers.base import ToolParser
from tellin.entrypoints.openai.parsers.events import ParsedDelta
from tellin.entrypoints.openai.parsers.reasoning import ThinkParser


class MessageParser:
    """A `ThinkParser` before a `ToolParser`; either may be missing."""

    def __init__(
        self,
        think: ThinkParser | None,
        tools: ToolParser | None,
        *,
        max_calls: int | None = None,
    ) -> None:
        """``max_calls``: later ones are dropped (``parallel_tool_calls=false``)."""
        self._think = think
        self._tools = tools
        self._max_calls = max_calls

    @property
    def num_calls(self) -> int:
        """Calls begun so far."""
        return 0 if self._tools is None else self._tools.num_calls

    def feed(self, text: str) -> ParsedDelta:
        delta = ParsedDelta(content=text) if self._think is None else self._think.feed(text)
        return self._call_tools(delta)

    def finish(self) -> ParsedDelta:
        delta = ParsedDelta() if self._think is None else self._think.finish()
        delta = self._call_tools(delta)
        if self._tools is not None:
            rest = self._limit(self._tools.finish())
            delta.content += rest.content
            delta.calls += rest.calls
        return delta

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
