"""Finding stop strings in text that arrives in pieces.

`StopMatcher` reads one character at a time, so its result does not depend on how the text was cut:
the match that ends first wins, the longest of those that end together. It also knows how many of
the last characters could still be the beginning of a stop string: exactly those must be held back.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Several patterns matched at once, each with its Knuth-Morris-Pratt automaton.

    Source: Knuth, Morris, Pratt 1977, "Fast Pattern Matching in Strings": ``failure[k]`` is the
    length of the longest proper border of the pattern's first k characters.
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        """``patterns`` must not contain an empty string."""
        # Longest first: the first automaton to report a match is the longest of its position.
        self._patterns = sorted(set(patterns), key=lambda pattern: (-len(pattern), pattern))
        self._failures = [_failure_function(pattern) for pattern in self._patterns]
        self._states = [0] * len(self._patterns)
        self._first_chars = frozenset(pattern[0] for pattern in self._patterns)
        self.num_partial = 0
        """Length of the longest suffix of the text so far that begins a pattern."""

    def may_skip(self, text: str) -> bool:
        """Whether feeding ``text`` would change nothing: no match is under way, none can begin."""
        return not self.num_partial and self._first_chars.isdisjoint(text)

    def feed(self, char: str) -> str | None:
        """Read one character; the pattern that ends with it, if one does."""
        found = None
        longest = 0
        for index, pattern in enumerate(self._patterns):
            failure = self._failures[index]
            state = self._states[index]
            while state and pattern[state] != char:
                state = failure[state]
            if pattern[state] == char:
                state += 1
            if state == len(pattern):
                found = found or pattern
                state = failure[state]
            self._states[index] = state
            longest = max(longest, state)
        self.num_partial = longest
        return found


def _failure_function(pattern: str) -> list[int]:
    failure = [0] * (len(pattern) + 1)
    border = 0
    for end in range(1, len(pattern)):
        while border and pattern[border] != pattern[end]:
            border = failure[border]
        if pattern[border] == pattern[end]:
            border += 1
        failure[end + 1] = border
    return failure


class ThoughtGate:
    """Parts a model's thoughts, in which stop strings do not count, from the text behind them.

    White space behind the thoughts belongs to them: most models put a blank line there.
    """

    def __init__(self, opening: str, closing: str) -> None:
        """``opening``: with what the output has to begin; empty = it begins inside the thoughts."""
        self._opening = opening
        self._closing = closing
        self._pending = ""  # may become the opening
        self._tail = ""  # of the thoughts: may be the beginning of the closing
        self._is_inside = not opening
        self._is_behind = False
        self.is_open = False
        """Whether the thoughts have ended, or never were."""

    def split(self, text: str) -> tuple[str, str]:
        """What is to be shown unsearched, and what is to be searched; the rest waits."""
        shown = ""
        if not self._is_inside and not self._is_behind:
            text, self._pending = self._pending + text, ""
            begin = text.lstrip()
            if self._opening.startswith(begin) and begin != self._opening:
                self._pending = text
                return "", ""
            if not begin.startswith(self._opening):
                self.is_open = True
                return "", text
            self._is_inside = True
            shown = text[: len(text) - len(begin) + len(self._opening)]
            text = text[len(shown) :]
        if self._is_inside:
            known = self._tail + text
            end = known.find(self._closing)
            if end < 0:
                self._tail = known[max(len(known) - len(self._closing) + 1, 0) :]
                return shown + text, ""
            end += len(self._closing) - len(self._tail)
            shown, text = shown + text[:end], text[end:]
            self._is_inside, self._is_behind = False, True
        rest = text.lstrip()
        self.is_open = bool(rest)
        return shown + text[: len(text) - len(rest)], rest

    def finish(self) -> str:
        """No more text will come: what still waits."""
        pending, self._pending = self._pending, ""
        return pending
