"""What parsers put out, and how pieces of it join."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass
class CallDelta:
    """A piece of a tool call. ``name`` comes with the first piece, whole."""

    index: int
    name: str | None = None
    arguments: str = ""


@dataclass
class ParsedDelta:
    """What a piece of text added."""

    content: str = ""
    reasoning: str = ""
    calls: list[CallDelta] = field(default_factory=list)

    def add_call(self, index: int, name: str | None, arguments: str) -> None:
        last = self.calls[-1] if self.calls else None
        if name is None and last is not None and last.index == index:
            last.arguments += arguments
        else:
            self.calls.append(CallDelta(index, name, arguments))


@dataclass
class ParsedMessage:
    """A whole message; ``calls`` are names and arguments."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)


def join(deltas: Iterable[ParsedDelta]) -> ParsedMessage:
    """The message that a client makes of the deltas."""
    message = ParsedMessage()
    for delta in deltas:
        message.content += delta.content
        message.reasoning += delta.reasoning
        for call in delta.calls:
            if call.name is not None:
                message.calls.append((call.name, call.arguments))
            else:
                name, arguments = message.calls[call.index]
                message.calls[call.index] = (name, arguments + call.arguments)
    return message
