"""How many drafts to ask for, and what became of them."""

from __future__ import annotations

from tellin.config import SpeculativeConfig
from tellin.core.request import Request
from tellin.protocol import SpecDecodingStats


class SpecDecodeController:
    """Counts drafts and accepted drafts."""

    def __init__(self, config: SpeculativeConfig | None) -> None:
        self.num_spec_tokens = config.num_speculative_tokens if config is not None else 0
        self._stats: SpecDecodingStats | None = None

    def observe(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """One request verified ``num_drafts`` drafts, of which ``num_accepted`` were delivered."""
        stats = self._stats
        if stats is None:
            k = self.num_spec_tokens
            stats = self._stats = SpecDecodingStats(
                k, num_accepted_tokens_per_pos=[0] * k, num_draft_tokens_per_pos=[0] * k
            )
        stats.num_drafts += 1
        stats.num_draft_tokens += num_drafts
        stats.num_accepted_tokens += num_accepted
        for position in range(num_drafts):
            stats.num_draft_tokens_per_pos[position] += 1
        for position in range(num_accepted):
            stats.num_accepted_tokens_per_pos[position] += 1

    def take_stats(self) -> SpecDecodingStats | None:
        stats, self._stats = self._stats, None
        return stats
