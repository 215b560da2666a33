"""How many draft tokens each request gets, and what became of them.

A draft token costs a row of the next step, with weights that draft also a pass of those, and gains
a token if it is right. All of that is measured: costs from the durations of decode steps and of
drafting, the chance to be right per request. Drafts are asked for only while they pay, so that
speculation is never much slower than none. What is sampled does not depend on any of this.
"""

from __future__ import annotations

import statistics
from collections import deque

from tellin.config import SpeculativeConfig
from tellin.core.request import Request
from tellin.protocol import SpecDecodingStats

DEFAULT_ROW_COST = 0.25
"""Assumed cost of one more row, relative to a step of one row, until it has been measured."""

FORGET = 0.98
"""Weight of a step's duration after each further step: about the last 50 steps count."""

OUTLIER = 1.5
"""A duration further than this factor from what was expected counts as this factor from it: a
machine that stalls must not be taken for rows that are dear."""

FADE = 0.9
"""Weight of what became of a draft after each further one: about the last ten count."""

PRIOR = 2.0
"""Weight, in drafts, of what is expected of a request because of those before it."""

LAYER_FADE, LAYER_PRIOR = 0.95, 5.0
"""The same for a layer of the model: how well it guesses depends on the model before the text."""

EXPECTED = (0.3, 0.75)
"""Chance that a short or a long draft is right, until some have been seen; drafts of a draft model
and of a model's own layer count as long."""

MIN_GAIN = 1.1
"""Drafts must promise this speed-up: a step with drafts costs a little more than its rows, and so
does the one after it (see `SteadyDecode`); what just pays is not worth the noise."""

COSTLY_MIN_GAIN = 1.03
"""The same for a draft model, whose own passes are in the account; to give it up is for good."""

RETRY_INTERVAL = 24
"""Requests whose drafts do not pay try a single one again every so many steps, all in the same
step: one without any drafts is cheaper."""

LONG_DRAFT = 4
"""Drafts of so many ids follow from a longer match, and are counted apart from shorter ones: where
a text is being copied they are right, whatever chance matches came before."""

CHEAP_DRAFT = 0.05
"""Cost of the longest draft, relative to a step, up to which tries are free of thought."""

MAX_WRONG = 2.5
"""A request gives costly drafts up after so many wrong ones in a row."""

MIN_READINGS = 3
"""What a step takes that drafts nothing is believed after so many: one may have been a stall."""

PROBE_INTERVAL = 16
"""While costly drafts do not pay, one new request in so many tries them nevertheless."""


class StepTimeModel:
    """Least squares for ``seconds = base + row_cost * rows``; the past is forgotten gradually."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def observe(self, num_rows: int, seconds: float) -> None:
        if self._weight > 8.0:
            expected = self.seconds(num_rows)
            if expected > 0.0:
                seconds = min(max(seconds, expected / OUTLIER), expected * OUTLIER)
        self._weight = self._weight * FORGET + 1.0
        self._x = self._x * FORGET + num_rows
        self._y = self._y * FORGET + seconds
        self._xx = self._xx * FORGET + num_rows * num_rows
        self._xy = self._xy * FORGET + num_rows * seconds

    def _fit(self) -> tuple[float, float] | None:
        """(base, row cost); None while too little was seen, or always the same number of rows."""
        variance = self._xx * self._weight - self._x * self._x
        if self._weight < 4.0 or variance < 0.1 * self._weight:
            return None
        row_cost = (self._xy * self._weight - self._x * self._y) / variance
        return (self._y - row_cost * self._x) / self._weight, row_cost

    def seconds(self, num_rows: int) -> float:
        """Expected duration of a step of so many rows; 0 before the first."""
        fit = self._fit()
        if fit is not None:
            return fit[0] + fit[1] * num_rows
        return self._y / self._weight if self._weight else 0.0

    def relative_row_cost(self, num_requests: int) -> float:
        """Cost of one more row, as a part of what a step costs each of its requests."""
        if num_requests < 1:
            return DEFAULT_ROW_COST
        fit = self._fit()
        if fit is None:  # guess from one row's share
            share = DEFAULT_ROW_COST * num_requests
            return share / (1.0 + DEFAULT_ROW_COST * (num_requests - 1))
        base, row_cost = fit
        step = base + row_cost * num_requests
        if row_cost <= 0.0 or step <= 0.0:
            return 0.01  # rows are as good as free
        return row_cost * num_requests / step


class SpecDecodeController:
    """Decides draft lengths and counts drafts for one engine."""

    def __init__(self, config: SpeculativeConfig | None) -> None:
        self.num_spec_tokens = config.num_speculative_tokens if config is not None else 0
        self._adaptive = config is not None and config.adaptive
        self._has_weights = config is not None and config.has_weights
        # A layer of the model has read all when it is taken up again; a draft model would have to.
        self._reads_always = config is not None and config.method == "mtp"
        self._fade = LAYER_FADE if self._reads_always else FADE
        self._prior = LAYER_PRIOR if self._reads_always else PRIOR
        self._times = StepTimeModel()
        # As parts of a step: of one that drafts nothing, and (part, number of drafts) of others.
        self._reading_parts: deque[float] = deque(maxlen=15)
        self._drafting_parts: deque[tuple[float, int]] = deque(maxlen=15)
        self._row_cost, self._draft_cost = DEFAULT_ROW_COST, 0.0
        self._best: dict[int, int] = {}
        # Of all requests together, by kind, for what is expected of a new one.
        self._num_right = [4.0 * chance for chance in EXPECTED]
        self._num_wrong = [4.0 * (1.0 - chance) for chance in EXPECTED]
        self._num_refused = 0
        self._num_steps = 1
        self._stats: SpecDecodingStats | None = None

    # ------------------------------------------------------------------ what things cost

    def observe_step(
        self,
        num_requests: int,
        num_rows: int,
        seconds: float,
        draft_seconds: float = 0.0,
        num_drafted: int = 0,
    ) -> None:
        """A step of ``num_requests`` decoding requests and nothing else took so long.

        Args:
            seconds: of the forward pass and of sampling.
            draft_seconds: of drafting for the next step, besides. A layer of the model reads every
                position, so it takes time without drafts too; that is no cost of a draft.
            num_drafted: length of the longest draft that came of it.
        """
        if not self._adaptive or seconds <= 0.0:
            return
        self._times.observe(num_rows, seconds)
        step = self._times.seconds(num_requests)
        if step > 0.0 and num_drafted > 0:
            self._drafting_parts.append((draft_seconds / step, num_drafted))
        elif step > 0.0 and self._reads_always:
            self._reading_parts.append(draft_seconds / step)
        reading, draft_cost = self._drafting_costs()
        row_cost = min(0.99, max(0.005, self._times.relative_row_cost(num_requests)))
        row_cost, draft_cost = row_cost / (1.0 + reading), draft_cost / (1.0 + reading)
        if row_cost != self._row_cost or draft_cost != self._draft_cost:
            self._row_cost, self._draft_cost = row_cost, draft_cost
            self._best.clear()

    def _drafting_costs(self) -> tuple[float, float]:
        """What every step costs for the sake of drafts, and what a draft does, as parts of a step.

        Until steps without drafts were seen, all of it counts as the drafts': if they do not pay so
        dear, such steps follow.
        """
        reading = 0.0
        if len(self._reading_parts) >= MIN_READINGS:
            reading = statistics.median(self._reading_parts)
        if not self._drafting_parts:
            return reading, 0.0
        costs = [(part - reading) / count for part, count in self._drafting_parts]
        return reading, max(statistics.median(costs), 0.0)

    @property
    def _is_costly(self) -> bool:
        return self._has_weights and self._draft_cost * self.num_spec_tokens > CHEAP_DRAFT

    # ------------------------------------------------------------------ draft length

    def limits(self, running: list[Request]) -> tuple[int, dict[str, int]]:
        """Most ids to draft after a step: for every request, and for those that get fewer.

        0 = do not draft at all. Cheap drafts are made for all that might use them, and cut to
        length once they are seen; costly ones only for those with whom they pay.
        """
        self._num_steps += 1
        if not self._adaptive or self.num_spec_tokens == 0:
            return self.num_spec_tokens, {}
        if not self._is_costly:
            return self._best_length(1.0), {}
        limits = [self._costly_limit(request) for request in running]
        most = max(limits, default=0)
        if most == 0:
            return 0, {}
        return most, {
            request.request_id: limit
            for request, limit in zip(running, limits, strict=True)
            if limit < most
        }

    def accept(self, request: Request, drafts: list[int]) -> list[int]:
        """The part of a request's drafts that is worth verifying in the next step."""
        if not self._adaptive:
            return drafts[: self.num_spec_tokens]
        if self._is_costly:
            request.draft_kind = 1
            return drafts[: self._costly_limit(request)]
        kind = request.draft_kind = int(len(drafts) >= LONG_DRAFT or self._has_weights)
        limit = self._best_length(self._chance(request, kind))
        if limit == 0 and self._num_steps % RETRY_INTERVAL == 0:
            limit = 1
        return drafts[:limit]

    def _costly_limit(self, request: Request) -> int:
        """Most drafts, each of which costs a pass, that are worth making for a request."""
        if request.is_drafting_over:
            return 0
        limit = self._best_length(self._chance(request, 1))
        if limit == 0 and self._reads_always:
            limit = int(self._num_steps % RETRY_INTERVAL == 0)
        elif limit == 0:
            limit = int(self._may_probe(request))
            request.is_drafting_over = limit == 0
        return limit

    def _may_probe(self, request: Request) -> bool:
        """Whether a request tries costly drafts although so far its own, or others', do not pay."""
        num_wrong = request.num_drafts_wrong[1]
        if num_wrong >= MAX_WRONG:
            return False
        if self._best_length(self._expected(1)) > 0:
            return True
        if not request.is_probing and num_wrong == 0.0:
            self._num_refused += 1
            request.is_probing = self._num_refused % PROBE_INTERVAL == 0
        return request.is_probing

    def _expected(self, kind: int) -> float:
        """Chance that a draft of this kind is right, over all requests."""
        return self._num_right[kind] / (self._num_right[kind] + self._num_wrong[kind])

    def _chance(self, request: Request, kind: int) -> float:
        """Estimated chance that the next draft is right after all before it were."""
        right, wrong = request.num_drafts_right[kind], request.num_drafts_wrong[kind]
        return (right + self._prior * self._expected(kind)) / (right + wrong + self._prior)

    def _best_length(self, chance: float) -> int:
        """Length with the most tokens per second, 0 if none gains.

        The i-th draft is delivered if all of the first i are right; each costs a row, and its part
        of a pass of the draft model.
        """
        bucket = min(int(chance * 64.0), 63)
        best = self._best.get(bucket)
        if best is None:
            chance = (bucket + 0.5) / 64.0
            cost = self._row_cost + self._draft_cost
            least = COSTLY_MIN_GAIN if self._has_weights else MIN_GAIN
            best, best_rate, tokens, power = 0, least, 1.0, 1.0
            for length in range(1, self.num_spec_tokens + 1):
                power *= chance
                tokens += power
                rate = tokens / (1.0 + length * cost)
                if rate > best_rate:
                    best, best_rate = length, rate
            self._best[bucket] = best
        return best

    # ------------------------------------------------------------------ counting

    def observe(self, request: Request, num_drafts: int, num_right: int) -> None:
        """``num_drafts`` drafts of a request were verified, the first ``num_right`` delivered."""
        num_wrong, kind = int(num_right < num_drafts), request.draft_kind
        right, wrong = request.num_drafts_right, request.num_drafts_wrong
        right[kind] = right[kind] * self._fade + num_right
        wrong[kind] = wrong[kind] * self._fade + num_wrong
        self._num_right[kind] = self._num_right[kind] * FORGET + num_right
        self._num_wrong[kind] = self._num_wrong[kind] * FORGET + num_wrong
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
