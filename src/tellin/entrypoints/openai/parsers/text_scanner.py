"""Finds markers in a text that comes character by character."""

from __future__ import annotations

from collections.abc import Sequence


class MarkerScanner:
    """Passes text on, except markers and the white space right before them.

    White space is held back until what follows it is known; so is a beginning of a marker.
    """

    def __init__(self, markers: Sequence[str]) -> None:
        self._markers = tuple(markers)
        self._space = ""
        self._partial = ""

    def push(self, char: str) -> tuple[str, str | None]:
        """Take a character; returns text that is certain now, and the marker it completed."""
        partial = self._partial + char
        if partial in self._markers:
            self._space = self._partial = ""
            return "", partial
        if any(marker.startswith(partial) for marker in self._markers):
            self._partial = partial
            return "", None
        if not self._partial:
            if char.isspace():
                self._space += char
                return "", None
            text, self._space = self._space + char, ""
            return text, None
        # The beginning of a marker was none: its first character is text, the rest is looked at
        # again.
        text, self._space = self._space + partial[0], ""
        self._partial = ""
        for again in partial[1:]:
            more, marker = self.push(again)
            text += more
            if marker is not None:
                # Only the newest character can complete a marker, so nothing comes after it.
                return text, marker
        return text, None

    def finish(self) -> str:
        """The text ends: what was held back."""
        text = self._space + self._partial
        self._space = self._partial = ""
        return text
