"""Parses answers in gpt-oss's format: messages on channels, each to a recipient.

``<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…``: what is on
the channel ``analysis`` is thoughts, a message to ``functions.NAME`` is a call, all else is
content. A text without such marks, as a grammar may force it, is content as it is.
Source: OpenAI 2025, "OpenAI harmony response format".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection

from tellin.entrypoints.openai.parsers.events import ParsedDelta

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
FINAL = f"{CHANNEL}final{MESSAGE}"
"""After this comes what the user reads."""
ENDS = ("<|end|>", "<|return|>", "<|call|>")
_OPENINGS = (START, CHANNEL, "<|constrain|>", MESSAGE, "to=")
"""How the header of a first message may begin."""
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL_NAME = re.compile(re.escape(CHANNEL) + r"\s*([a-z]+)")
_FUNCTIONS = "functions."


class HarmonyParser:
    """Splits one answer into thoughts, content and calls of ``tool_names``.

    Args:
        tool_names: functions that may be called; a message to any other recipient is thoughts.
        max_calls: later ones are dropped (``parallel_tool_calls=false``).
    """

    is_plain = False

    def __init__(self, tool_names: Collection[str] = (), *, max_calls: int | None = None) -> None:
        self.num_calls = 0
        self._tool_names = frozenset(tool_names)
        self._max_calls = max_calls
        self._held = ""  # not yet known to be text, or a header that has not ended
        self._delta = ParsedDelta()
        self._has_message = False
        self._state: Callable[[], bool] = self._at_start
        self._emit: Callable[[str], None] = self._add_content

    def feed(self, text: str) -> ParsedDelta:
        """What ``text`` adds to the message."""
        self._held += text
        while self._state():
            pass
        return self._take()

    def finish(self) -> ParsedDelta:
        """The text has ended: what was held back."""
        is_header = self._state == self._in_header and (self._has_message or "<|" in self._held)
        if not is_header:  # a text may only begin like one
            self._emit(self._held)
        self._held = ""
        return self._take()

    # Each state takes what it can from the held text; False: more text is needed.

    def _at_start(self) -> bool:
        begin = self._held.lstrip()
        if any(begin.startswith(opening) for opening in _OPENINGS):
            self._state = self._in_header
        elif any(opening.startswith(begin) for opening in _OPENINGS):
            return False
        else:
            self._state = self._passed
        return True

    def _in_header(self) -> bool:
        header, mark, rest = self._held.partition(MESSAGE)
        if not mark:
            return False
        self._held = rest
        self._has_message = True
        self._emit = self._reader_of(header)
        self._state = self._in_text
        return True

    def _in_text(self) -> bool:
        """Text up to the mark that ends it; a new message without one ends it, too."""
        found = [(at, m) for m in (*ENDS, START) if (at := self._held.find(m)) >= 0]
        if not found:
            kept = _partial_mark(self._held)
            self._emit(self._held[: len(self._held) - kept])
            self._held = self._held[len(self._held) - kept :]
            return False
        at, mark = min(found)
        self._emit(self._held[:at])
        self._held = self._held[at + (len(mark) if mark in ENDS else 0) :]
        self._state = self._in_header
        return True

    def _passed(self) -> bool:
        self._emit(self._held)
        self._held = ""
        return False

    def _reader_of(self, header: str) -> Callable[[str], None]:
        """Where the text after a header goes; before its start may be another without a text."""
        header = header.rpartition(START)[2]
        recipient = _RECIPIENT.search(header)
        if recipient is not None:
            name = recipient[1].removeprefix(_FUNCTIONS)
            if recipient[1].startswith(_FUNCTIONS) and name in self._tool_names:
                return self._begin_call(name)
            return self._add_reasoning
        channel = _CHANNEL_NAME.search(header)
        is_thought = channel is not None and channel[1] == "analysis"
        return self._add_reasoning if is_thought else self._add_content

    def _begin_call(self, name: str) -> Callable[[str], None]:
        index = self.num_calls
        if self._max_calls is not None and index >= self._max_calls:
            return lambda _: None
        self.num_calls += 1
        self._delta.add_call(index, name, "")
        return lambda text: self._delta.add_call(index, None, text) if text else None

    def _add_content(self, text: str) -> None:
        self._delta.content += text

    def _add_reasoning(self, text: str) -> None:
        self._delta.reasoning += text

    def _take(self) -> ParsedDelta:
        delta, self._delta = self._delta, ParsedDelta()
        return delta


def _partial_mark(text: str) -> int:
    """How many of the last characters may begin a mark that ends a message."""
    for count in range(min(len(text), max(map(len, ENDS))), 0, -1):
        if any(mark.startswith(text[-count:]) for mark in (*ENDS, START)):
            return count
    return 0
