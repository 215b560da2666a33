"""How many draft tokens each request gets, and what became of them.

A draft token costs a row of the next step and gains a token if it is right. Both are measured: the
cost of a row from the durations of decode steps, the chance to be right per request. Drafts are
asked for only while they pay, so that speculation is never much slower than none. What is sampled
does not depend on any of this.
"""

from __future__ import annotations

import math

from tellin.config import SpeculativeConfig
from tellin.core.request import Request
from tellin.protocol import SpecDecodingStats

DEFAULT_ROW_COST = 0.25
"""Assumed cost of one more row, relative to a step of one row, until it has been measured."""

FORGET = 0.98
"""Weight of a step's duration after each further step: about the last 50 steps count."""

RETRY_INTERVAL = 24
"""A request whose drafts do not pay tries a single one again after so many tokens."""


class StepTimeModel:
    """Least squares for ``seconds = base + row_cost * rows``; the past is forgotten gradually."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def observe(self, num_rows: int, seconds: float) -> None:
        self._weight = self._weight * FORGET + 1.0
        self._x = self._x * FORGET + num_rows
        self._y = self._y * FORGET + seconds
        self._xx = self._xx * FORGET + num_rows * num_rows
        self._xy = self._xy * FORGET + num_rows * seconds

    def relative_row_cost(self, num_requests: int) -> float:
        """Cost of one more row, as a part of what a step costs each of its requests."""
        if num_requests < 1:
            return DEFAULT_ROW_COST
        variance = self._xx * self._weight - self._x * self._x
        if self._weight < 4.0 or variance < 0.1 * self._weight:
            # Seen too little, or always the same number of rows: guess from one row's share.
            share = DEFAULT_ROW_COST * num_requests
            return share / (1.0 + DEFAULT_ROW_COST * (num_requests - 1))
        row_cost = (self._xy * self._weight - self._x * self._y) / variance
        base = (self._y - row_cost * self._x) / self._weight
        step = base + row_cost * num_requests
        if row_cost <= 0.0 or step <= 0.0:
            return 0.01  # rows are as good as free
        return row_cost * num_requests / step


class SpecDecodeController:
    """Decides draft lengths and counts drafts for one engine."""

    def __init__(self, config: SpeculativeConfig | None) -> None:
        self.num_spec_tokens = config.num_speculative_tokens if config is not None else 0
        self._adaptive = config is not None and config.adaptive
        self._times = StepTimeModel()
        self._num_decodes = 1
        self._stats: SpecDecodingStats | None = None

    # ------------------------------------------------------------------ draft length

    def observe_step(self, num_requests: int, num_rows: int, seconds: float) -> None:
        """A step of ``num_requests`` decoding requests and nothing else took so long."""
        self._num_decodes = num_requests
        if self._adaptive and seconds > 0.0:
            self._times.observe(num_rows, seconds)

    def draft_limit(self, request: Request) -> int:
        """Most drafts that are worth verifying for this request in the next step.

        The i-th draft is delivered if all of the first i are right. It pays while that chance is
        above the cost of its row.
        """
        if not self._adaptive:
            return self.num_spec_tokens
        right, wrong = request.num_drafts_right, request.num_drafts_wrong
        chance = (right + 1.0) / (right + wrong + 1.5)
        cost = min(0.99, max(0.005, self._times.relative_row_cost(self._num_decodes)))
        limit = min(self.num_spec_tokens, int(math.log(cost) / math.log(chance)))
        if limit > 0:
            return limit
        is_due = request.num_tokens - request.last_drafted_at >= RETRY_INTERVAL
        return 1 if is_due else 0

    def num_to_schedule(self, running: list[Request]) -> int:
        """Most drafts any request may use after the next step; 0 = do not draft at all."""
        if not self._adaptive or self.num_spec_tokens == 0:
            return self.num_spec_tokens
        return max(map(self.draft_limit, running), default=0)

    # ------------------------------------------------------------------ counting

    def observe(self, request: Request, num_drafts: int, num_right: int) -> None:
        """``num_drafts`` drafts of a request were verified, the first ``num_right`` delivered."""
        request.last_drafted_at = request.num_tokens
        request.num_drafts_right = request.num_drafts_right * 0.8 + num_right
        request.num_drafts_wrong = request.num_drafts_wrong * 0.8 + (num_right < num_drafts)
        stats = self._stats
        if stats is None:
            k = self.num_spec_tokens
            stats = self._stats = SpecDecodingStats(
                k, num_accepted_tokens_per_pos=[0] * k, num_draft_tokens_per_pos=[0] * k
            )
        stats.num_drafts += 1
        stats.num_draft_tokens += num_drafts
        stats.num_accepted_tokens += num_right
        for position in range(num_drafts):
            stats.num_draft_tokens_per_pos[position] += 1
        for position in range(num_right):
            stats.num_accepted_tokens_per_pos[position] += 1

    def take_stats(self) -> SpecDecodingStats | None:
        """What was counted since the last call; None if nothing was drafted."""
        stats, self._stats = self._stats, None
        return stats
