"""Where a request's thoughts end and its answer, which alone its grammar constrains, begins.

Works on ids: the markers come with `ReasoningConfig`. A request that is still thinking may write
anything but the end of the text; the ids after the end marker are the grammar's, those of the same
step included (core spec 6.6).
"""

from __future__ import annotations

from collections.abc import Sequence

from tellin.config import ReasoningConfig


class ReasoningGate:
    """Finds the end of one request's thoughts."""

    def __init__(self, end_ids: Sequence[int], ended: bool) -> None:
        self.ended = ended
        self._end = tuple(end_ids)
        self._recent: tuple[int, ...] = ()  # what may be the beginning of an end marker

    @classmethod
    def from_prompt(
        cls, config: ReasoningConfig, prompt_ids: Sequence[int], ended: bool | None
    ) -> ReasoningGate:
        """State after the prompt; ``ended`` is what the caller knows of it, if anything.

        The last marker counts: earlier answers of a conversation may hold thoughts too.
        """
        if ended is None:
            start = _last(config.think_start_token_ids, prompt_ids)
            end = _last(config.think_end_token_ids, prompt_ids)
            ended = end > start
        return cls(config.think_end_token_ids, ended)

    def num_thoughts(self, token_ids: Sequence[int]) -> int:
        """How many of the ids that come next are thoughts, the end marker included."""
        if self.ended:
            return 0
        size = len(self._end)
        text = (*self._recent, *token_ids)
        for stop in range(size, len(text) + 1):
            if text[stop - size : stop] == self._end:
                return stop - len(self._recent)
        return len(token_ids)

    def closes_within(self, token_ids: Sequence[int]) -> bool:
        """Whether the thoughts have ended after these ids."""
        if self.ended:
            return True
        text = (*self._recent, *token_ids)
        size = len(self._end)
        return any(text[i : i + size] == self._end for i in range(len(text) - size + 1))

    def advance(self, token_ids: Sequence[int]) -> int:
        """Move on; returns `num_thoughts`."""
        count = self.num_thoughts(token_ids)
        if not self.ended:
            self.ended = self.closes_within(token_ids)
            keep = len(self._end) - 1
            self._recent = (*self._recent, *token_ids)[-keep:] if keep else ()
        return count


def _last(marker: Sequence[int], token_ids: Sequence[int]) -> int:
    """Where the last occurrence begins; -1 = there is none."""
    size, wanted = len(marker), list(marker)
    for start in range(len(token_ids) - size, -1, -1):
        if list(token_ids[start : start + size]) == wanted:
            return start
    return -1
