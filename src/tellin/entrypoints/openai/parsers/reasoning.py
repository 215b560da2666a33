"""Thoughts that a model writes before its answer, between marks as ``<think>``, ``</think>``."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tellin.entrypoints.openai.parsers.events import ParsedDelta
from tellin.entrypoints.openai.parsers.text_scanner import MarkerScanner

OPENING = "<think>"
CLOSING = "</think>"
GEMMA_MARKS = "<|channel>thought", "<channel|>"
"""Of Gemma 4. Where it shall not think, the prompt ends with both of them."""
_MISTRAL = "[THINK]", "[/THINK]"
_SEED = "<seed:think>", "</seed:think>"
_COHERE = "<|START_THINKING|>", "<|END_THINKING|>"
_APERTUS = "<|inner_prefix|>", "<|inner_suffix|>"
THOUGHT_MARKS = ((OPENING, CLOSING), GEMMA_MARKS, _MISTRAL, _SEED, _COHERE, _APERTUS)
"""Marks around thoughts; all but the first are tokens."""
_ANSWER = "<answer>", "</answer>"
_COHERE_RESPONSE = "<|START_RESPONSE|>", "<|END_RESPONSE|>"
ANSWER_MARKS = (_ANSWER, _COHERE_RESPONSE)
"""Around what Hunyuan and Cohere say once they have thought."""
REASONING_PARSERS: Mapping[str, tuple[tuple[str, str], tuple[str, str] | None]] = {
    "think": ((OPENING, CLOSING), None),
    "apertus": (_APERTUS, None),
    "cohere": (_COHERE, _COHERE_RESPONSE),
    "ernie45": ((OPENING, CLOSING), ("<response>", "</response>")),
    "hunyuan_a13b": ((OPENING, CLOSING), _ANSWER),
    "minimax_m2": ((OPENING, CLOSING), None),
    "mistral": (_MISTRAL, None),
    "seed_oss": (_SEED, None),
}
"""By name, marks around thoughts and those around answers, where there are any."""


class ThinkParser:
    """Splits a text into thoughts and the rest.

    White space around the thoughts belongs to neither. An opening tag counts only at the beginning.
    """

    def __init__(
        self,
        starts_inside: bool,
        *,
        is_certain: bool = False,
        opening: str = OPENING,
        closing: str = CLOSING,
    ) -> None:
        """
        Args:
            starts_inside: the prompt already ends with the opening tag.
            is_certain: the text begins with thoughts, whether it has an opening tag or not.
        """
        self._reasoning = ""
        self._content = ""
        self._held = ""
        self._opening = opening
        self._is_certain = is_certain
        self._scanner = MarkerScanner([closing])
        self._has_thought = False
        self._state: Callable[[str], None] = self._inside if starts_inside else self._at_start

    def feed(self, text: str) -> ParsedDelta:
        if self._state == self._passed:
            return ParsedDelta(content=text)
        for position, char in enumerate(text):
            self._state(char)
            if self._state == self._passed:
                self._content += text[position + 1 :]
                break
        return self._take()

    def finish(self) -> ParsedDelta:
        if self._state == self._inside:
            self._think(self._scanner.finish())
        elif self._state == self._at_start and self._is_certain:
            self._enter()
            self._think(self._scanner.finish())
        elif self._state == self._at_start:
            self._content += self._held
        self._held = ""
        return self._take()

    def _at_start(self, char: str) -> None:
        self._held += char
        text = self._held.lstrip()
        if text == self._opening:
            self._held = ""
            self._state = self._inside
        elif not text or self._opening.startswith(text):
            return
        elif self._is_certain:
            self._enter()
        else:
            self._content, self._held = self._held, ""
            self._state = self._passed

    def _enter(self) -> None:
        """What was held back is thoughts already."""
        held, self._held = self._held, ""
        self._state = self._inside
        for char in held:
            self._state(char)

    def _inside(self, char: str) -> None:
        text, marker = self._scanner.push(char)
        self._think(text)
        if marker is not None:
            self._state = self._after

    def _think(self, text: str) -> None:
        if not self._has_thought:
            text = text.lstrip()
        if text:
            self._has_thought = True
            self._reasoning += text

    def _after(self, char: str) -> None:
        if not char.isspace():
            self._content += char
            self._state = self._passed

    def _passed(self, char: str) -> None:
        self._content += char

    def _take(self) -> ParsedDelta:
        delta = ParsedDelta(content=self._content, reasoning=self._reasoning)
        self._content = self._reasoning = ""
        return delta
