"""Which rules of a Lark grammar can come to an end.

A leaf. ``start: "a" start`` is a sound grammar of no finite text: an output that follows it could
only be cut off. The reader below knows as much of the syntax as that question needs; of a grammar
that it cannot read it says nothing, so no sound grammar is ever refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

_TOKEN = re.compile(
    r"""
      (?P<skip>[ \t\r\f]+ | //[^\n]*)
    | (?P<newline>\n)
    | (?P<text>"(?:[^"\\\n]|\\.)*"i? | /(?![/*])(?:[^/\\\n]|\\.)+/[imslux]* | <[^>\n]*>)
    | (?P<directive>%[a-z]+)
    | (?P<name>[?!]?[A-Za-z_][\w-]*)
    | (?P<number>\d+)
    | (?P<mark>\.\. | -> | [:|()\[\]?*+~.,{}=])
    """,
    re.VERBOSE,
)
MAX_STEPS = 500_000
"""Parts that are looked at before a grammar counts as one that cannot be read."""
_EMBEDDED = ("%json", "%regex", "%lark")


class _UnreadableError(Exception):
    """The grammar uses syntax that this module does not know."""


@dataclass(frozen=True)
class _Part:
    """A piece of a rule: it can end if all (any) of its parts can. A name refers to a rule."""

    parts: tuple[_Part, ...] = ()
    is_choice: bool = False
    name: str = ""

    def names(self) -> Iterator[str]:
        """All names in it, more than once if they come more than once."""
        if self.name:
            yield self.name
        for part in self.parts:
            yield from part.names()


_NOTHING = _Part()
"""What can always end."""


def endless_start(grammar: str) -> bool:
    """Whether no finite text satisfies the rule ``start``; False if that cannot be told."""
    try:
        rules = _Reader(grammar).rules()
        return "start" in rules and "start" not in _ending_rules(rules)
    except (_UnreadableError, RecursionError):
        return False


def _ending_rules(rules: dict[str, _Part]) -> set[str]:
    """Names of rules that have a derivation of finite height."""
    users: dict[str, set[str]] = {name: set() for name in rules}
    for user, part in rules.items():
        for name in part.names():
            if name in users:
                users[name].add(user)
    ending: set[str] = set()
    num_steps = 0

    def ends(part: _Part) -> bool:
        nonlocal num_steps
        num_steps += 1
        if num_steps > MAX_STEPS:
            raise _UnreadableError
        if part.name:
            return part.name in ending or part.name not in rules
        results = map(ends, part.parts)
        return any(results) if part.is_choice else all(results)

    waiting = list(rules)
    while waiting:
        name = waiting.pop()
        if name not in ending and ends(rules[name]):
            ending.add(name)
            waiting += users[name] - ending
    return ending


class _Reader:
    """Recursive descent over the tokens of one grammar."""

    def __init__(self, grammar: str) -> None:
        self._tokens = list(_tokens(grammar))
        self._at = 0

    def rules(self) -> dict[str, _Part]:
        rules: dict[str, _Part] = {}
        while self._at < len(self._tokens):
            kind, text = self._next()
            if kind == "directive":
                self._skip_line()
            elif kind == "name":
                self._read_head()
                name = text.lstrip("?!")
                if name in rules:
                    raise _UnreadableError
                rules[name] = self._alternatives()
                if self._peek() not in ("\n", ""):
                    raise _UnreadableError
            elif kind != "newline":
                raise _UnreadableError
        return rules

    def _peek(self) -> str:
        return self._tokens[self._at][1] if self._at < len(self._tokens) else ""

    def _next(self) -> tuple[str, str]:
        if self._at >= len(self._tokens):
            raise _UnreadableError
        self._at += 1
        return self._tokens[self._at - 1]

    def _skip_line(self) -> None:
        while self._at < len(self._tokens) and self._next()[0] != "newline":
            pass

    def _read_head(self) -> None:
        """Attributes and priority, up to the colon."""
        while (token := self._next())[1] != ":":
            if token[0] == "newline":
                raise _UnreadableError

    def _alternatives(self, closing: str = "") -> _Part:
        choices = [self._sequence(closing)]
        while self._continues(closing):
            choices.append(self._sequence(closing))
        return _Part(tuple(choices), is_choice=True)

    def _continues(self, closing: str) -> bool:
        """Whether another alternative follows, perhaps on a later line."""
        ahead = self._at
        while ahead < len(self._tokens) and self._tokens[ahead][0] == "newline":
            ahead += 1
        if ahead < len(self._tokens) and self._tokens[ahead][1] == "|":
            self._at = ahead + 1
            return True
        if closing:
            self._at = ahead
        return False

    def _sequence(self, closing: str) -> _Part:
        parts: list[_Part] = []
        while True:
            token = self._peek()
            if token == "\n" and closing:
                self._at += 1
            elif token in ("\n", "", "|", closing):
                return _Part(tuple(parts))
            else:
                parts.append(self._repeated(self._item()))

    def _item(self) -> _Part:
        kind, text = self._next()
        if text in ("(", "["):
            closing = ")" if text == "(" else "]"
            inner = self._alternatives(closing)
            if self._next()[1] != closing:
                raise _UnreadableError
            return inner if text == "(" else _NOTHING
        if text == "->":
            self._next()
            return _NOTHING
        if kind == "text":
            if self._peek() == "..":
                self._at += 1
                self._next()
            return _NOTHING
        if kind == "name" and self._peek() != "{":
            return _Part(name=text)
        if kind == "embedded":
            return _NOTHING
        raise _UnreadableError

    def _repeated(self, part: _Part) -> _Part:
        while True:
            token = self._peek()
            if token in ("?", "*"):
                self._at += 1
                part = _NOTHING
            elif token == "+":
                self._at += 1
            elif token == "~":
                self._at += 1
                kind, least = self._next()
                if kind != "number":
                    raise _UnreadableError
                if self._peek() == "..":
                    self._at += 1
                    self._next()
                part = _NOTHING if int(least) == 0 else part
            elif token == "{":
                raise _UnreadableError
            else:
                return part


def _tokens(grammar: str) -> Iterator[tuple[str, str]]:
    position = 0
    while position < len(grammar):
        match = _TOKEN.match(grammar, position)
        if match is None:
            raise _UnreadableError
        position = match.end()
        kind, text = str(match.lastgroup), match.group()
        if kind == "directive" and text in _EMBEDDED:
            if text == "%lark":
                raise _UnreadableError
            while position < len(grammar) and grammar[position] in " \t\r\n":
                position += 1
            try:
                _, position = json.JSONDecoder().raw_decode(grammar, position)
            except (ValueError, RecursionError):
                raise _UnreadableError from None
            yield "embedded", text
        elif kind != "skip":
            yield kind, text
