"""Regular expressions that a file applies to names of layers, matched in bounded time.

Python's own matcher tries every way to read a pattern, which takes longer than anybody waits if it
is a hostile one (``(a+)+b``). Here all ways are followed at once, as sets of positions, so that
time grows with pattern times name; a budget ends what is left. Knows the syntax that names need:
characters, ``.``, classes, groups, alternatives, quantifiers and both anchors.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tellin.exceptions import ModelLoadError
from tellin.loading.typed_mapping import TypedMapping

_MAX_PATTERNS = 10_000
_MAX_CHARS = 1_000
_MAX_DEPTH = 20
_MAX_STEPS = 10_000_000
"""Characters looked at for one file: real ones take thousands; these take a few seconds."""
_PLAIN = re.compile(r"[\w.-]+\Z")
_CLASS = re.compile(r"\[\^?(?:\w-\w|[\w.]|\\[.dDsSwW-])+-?\]")
_ESCAPE = re.compile(r"\\(?:[dDsSwW]|[^\w\s])")
_QUANTIFIERS = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_COUNTS = re.compile(r"\{(\d{1,4})(?:(,)(\d{0,4}))?\}")


@dataclass(frozen=True)
class _Char:
    """One character."""

    pattern: re.Pattern[str]


@dataclass(frozen=True)
class _Anchor:
    """``^`` or ``$``."""

    is_end: bool


@dataclass(frozen=True)
class _Group:
    """One of several sequences."""

    options: tuple[tuple[_Node, ...], ...]


@dataclass(frozen=True)
class _Repeat:
    """``least`` times, up to ``most`` (None: any number of) times."""

    node: _Node
    least: int
    most: int | None


_Node = _Char | _Anchor | _Group | _Repeat


class NamePatterns:
    """An object of a file whose keys are patterns of a whole name, or of what follows a dot in it.

    Args:
        config: the file's values.
        key: of the object; it may be missing, then no name matches.

    Raises:
        ModelLoadError: a pattern is not understood, or there are too many.
    """

    def __init__(self, config: TypedMapping, key: str) -> None:
        values = config.get_mapping(key) if config.has(key) else TypedMapping(config.path, {})
        self._what = f"{config.path}: key {key!r}"
        if len(values) > _MAX_PATTERNS:
            raise ModelLoadError(
                f"{self._what} has {len(values)} patterns, allowed are {_MAX_PATTERNS}"
            )
        self._patterns = {text: _compile(text, self._what) for text in values}
        self._steps = 0

    def find(self, name: str) -> str | None:
        """The first key of the object that matches.

        Raises:
            ModelLoadError: the patterns take too long.
        """
        for key, pattern in self._patterns.items():
            if isinstance(pattern, re.Pattern):
                is_match = pattern.match(name) is not None
            else:
                starts = {0, *(i + 1 for i, char in enumerate(name) if char == ".")}
                is_match = len(name) in self._ends(pattern, name, starts)
            if is_match:
                return key
        return None

    def _ends(self, node: _Node, text: str, starts: set[int]) -> set[int]:
        """Where a match of ``node`` can end that begins at one of ``starts``."""
        self._steps += 1 + len(starts)
        if self._steps > _MAX_STEPS:
            raise ModelLoadError(f"{self._what} has patterns that take too long to match")
        if isinstance(node, _Char):
            fits = node.pattern.match
            return {i + 1 for i in starts if i < len(text) and fits(text, i)}
        if isinstance(node, _Anchor):
            return starts & {len(text) if node.is_end else 0}
        if isinstance(node, _Repeat):
            return self._repeated(node, text, starts)
        found: set[int] = set()
        for option in node.options:
            ends = starts
            for part in option:
                ends = self._ends(part, text, ends)
                if not ends:
                    break
            found |= ends
        return found

    def _repeated(self, node: _Repeat, text: str, starts: set[int]) -> set[int]:
        ends = starts
        for _ in range(node.least):
            before, ends = ends, self._ends(node.node, text, ends)
            if ends in (set(), before):
                break
        found = ends
        for _ in range(len(text) + 1 if node.most is None else node.most - node.least):
            ends = self._ends(node.node, text, ends) - found
            if not ends:
                break
            found = found | ends
        return found


def _compile(text: str, what: str) -> re.Pattern[str] | _Group:
    """Python's pattern of a plain name, which is what most are, or a tree."""
    if len(text) > _MAX_CHARS:
        raise ModelLoadError(
            f"{what}: the pattern {text[:40]!r}... has more than {_MAX_CHARS} characters"
        )
    if _PLAIN.match(text):
        return re.compile(rf"(?:.*\.)?{text}\Z", re.DOTALL)
    parser = _Parser(text, what)
    tree = parser.group(0)
    if parser.position != len(text):
        raise parser.error("a ')' that closes nothing")
    return tree


class _Parser:
    def __init__(self, text: str, what: str) -> None:
        self.text = text
        self.what = what
        self.position = 0

    def error(self, fault: str) -> ModelLoadError:
        return ModelLoadError(
            f"{self.what}: the pattern {self.text!r:.200} has at character {self.position} {fault}"
        )

    def group(self, depth: int) -> _Group:
        """Alternatives, up to a ``)`` or the end."""
        if depth > _MAX_DEPTH:
            raise self.error(f"groups in more than {_MAX_DEPTH} groups")
        options: list[tuple[_Node, ...]] = []
        nodes: list[_Node] = []
        while self.position < len(self.text) and self.text[self.position] != ")":
            if self._take("|"):
                options.append(tuple(nodes))
                nodes = []
            else:
                nodes.append(self._repeats(self._atom(depth)))
        return _Group((*options, tuple(nodes)))

    def _take(self, token: str) -> bool:
        is_there = self.text.startswith(token, self.position)
        self.position += len(token) * is_there
        return is_there

    def _atom(self, depth: int) -> _Node:
        if self._take("("):
            if not self._take("?:") and self.text.startswith("?", self.position):
                raise self.error("a group of a kind that is not supported")
            inner = self.group(depth + 1)
            if not self._take(")"):
                raise self.error("a '(' that nothing closes")
            return inner
        for anchor in "^$":
            if self._take(anchor):
                return _Anchor(anchor == "$")
        char = self.text[self.position]
        if char in "*+?{":
            raise self.error(f"{char!r} with nothing to repeat")
        found = {"[": _CLASS, "\\": _ESCAPE}.get(char)
        if found is None:
            self.position += 1
            return _Char(re.compile("." if char == "." else re.escape(char)))
        match = found.match(self.text, self.position)
        if match is None:
            raise self.error("a class or escape that is not supported")
        self.position = match.end()
        try:
            return _Char(re.compile(match[0]))
        except re.error as error:  # a range from a larger to a smaller character
            raise self.error(str(error)) from None

    def _repeats(self, node: _Node) -> _Node:
        counts = _COUNTS.match(self.text, self.position)
        if counts is not None:
            self.position = counts.end()
            least = int(counts[1])
            most = least if counts[2] is None else int(counts[3]) if counts[3] else None
            if most is not None and most < least:
                raise self.error(f"a count from {least} to {most}")
        elif self.text[self.position : self.position + 1] in _QUANTIFIERS:
            least, most = _QUANTIFIERS[self.text[self.position]]
            self.position += 1
        else:
            return node
        self._take("?")  # which of several matches is taken makes no difference
        if self.text[self.position : self.position + 1] in ("*", "+", "?", "{"):
            raise self.error("a quantifier of a quantifier")
        return _Repeat(node, least, most)
