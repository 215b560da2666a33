"""Thinking budgets: a block of thoughts that grows too long is closed by force (core spec 3.9).

Knows where a model's thoughts begin and end (`ReasoningConfig`) and follows the ids of each request
that has a budget, a pure function of its history: so forced ids are the same whatever the batch,
drafts or preemption. A forced id overrules every other constraint of its position.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tellin.kernels.sampler import RowStatus, SampleResult
from tellin.worker.input_batch import InputBatch, RequestState
from tellin.worker.step_inputs import StepInputs

if TYPE_CHECKING:
    from tellin.config import ReasoningConfig

Float32Array = npt.NDArray[np.float32]


class ThinkingState:
    """Where one request is: outside of thoughts, inside, or being made to end them.

    Args:
        start_ids, end_ids: the markers.
        budget: most ids generated inside a block, the end marker not counted.
    """

    __slots__ = ("_budget", "_count", "_end", "_forcing", "_inside", "_matched", "_spent", "_start")

    def __init__(self, start_ids: tuple[int, ...], end_ids: tuple[int, ...], budget: int) -> None:
        self._start, self._end, self._budget = start_ids, end_ids, budget
        self._inside = False
        self._spent = False
        self._count = 0
        self._matched = 0  # ids of the next marker that the text ends in
        self._forcing = False

    @property
    def forced_id(self) -> int:
        """The id that must come next; -1 = any may."""
        return self._end[self._matched] if self._forcing else -1

    def feed_prompt(self, token_ids: Iterable[int]) -> None:
        """Follow ids that were given: they open and close blocks, and cost nothing."""
        for token_id in token_ids:
            self._follow(token_id)
        self._count = 0
        self._check()

    def feed(self, token_id: int) -> None:
        """Follow an id that was generated."""
        was_forced = self._forcing
        self._count += self._inside and not was_forced
        if self._follow(token_id) and was_forced:
            self._spent = True  # a block that is opened again is closed at once
        self._check()

    def _follow(self, token_id: int) -> bool:
        """Move on by an id; True if it completes a marker."""
        marker = self._end if self._inside else self._start
        self._matched = _next_match(marker, self._matched, token_id)
        if self._matched < len(marker):
            return False
        self._inside = not self._inside
        self._matched = self._count = 0
        return True

    def _check(self) -> None:
        self._forcing = self._inside and (self._spent or self._count >= self._budget)


def _next_match(marker: tuple[int, ...], matched: int, token_id: int) -> int:
    """Longest beginning of ``marker`` that the text ends in after one more id."""
    text = (*marker[:matched], token_id)
    for length in range(min(len(text), len(marker)), 0, -1):
        if text[len(text) - length :] == marker[:length]:
            return length
    return 0


@dataclass
class ForcedRow:
    """The id that is decided, and those whose log-probabilities are wanted (None = the best)."""

    token_id: int
    logprob_token_ids: list[int] | None


class ThinkingBudgets:
    """The budgets of live requests.

    Args:
        config: where thoughts begin and end; None = no request may have a budget.
        num_ids: ids that exist.
        logprobs_mode: what is reported as log-probabilities.
    """

    def __init__(self, config: ReasoningConfig | None, num_ids: int, logprobs_mode: str) -> None:
        self._config = config
        self._num_ids = num_ids
        self._mode = logprobs_mode
        self._states: dict[str, ThinkingState] = {}

    @property
    def active(self) -> bool:
        """Whether any live request has a budget."""
        return bool(self._states)

    def add_request(self, state: RequestState, batch: InputBatch) -> None:
        """Follow a new request if it has a budget; one that cannot be kept is its error."""
        params = state.sampling_params
        if params is None or params.thinking_token_budget is None:
            return
        if self._config is None:
            state.error = (
                "thinking_token_budget needs to know where thoughts begin and end: start the "
                "engine with a reasoning_config"
            )
            return
        thinking = ThinkingState(
            self._config.think_start_token_ids,
            self._config.think_end_token_ids,
            params.thinking_token_budget,
        )
        slot = state.slot
        num_prompt, num_tokens = batch.num_prompt_tokens[slot], batch.num_tokens[slot]
        thinking.feed_prompt(batch.token_ids[slot, :num_prompt].tolist())
        for token_id in batch.token_ids[slot, num_prompt:num_tokens].tolist():
            thinking.feed(token_id)
        self._states[state.req_id] = thinking

    def remove_request(self, req_id: str) -> None:
        """Forget a request."""
        self._states.pop(req_id, None)

    def forced_rows(self, inputs: StepInputs, batch: InputBatch) -> dict[int, ForcedRow]:
        """Sampled logits rows whose id is already decided."""
        forced: dict[int, ForcedRow] = {}
        starts = inputs.sample_start.tolist()
        for i, row in enumerate(inputs.sample_rows.tolist()):
            state = batch.row_states[row]
            thinking = self._states.get(state.req_id)
            if thinking is None:
                continue
            first, last = starts[i], starts[i + 1] - 1
            known = int(batch.num_tokens[state.slot])
            drafts = batch.token_ids[state.slot, known : known + last - first].tolist()
            ahead = copy(thinking) if drafts else thinking
            params = state.sampling_params
            wanted = params.logprob_token_ids if params is not None else None
            for j in range(first, last + 1):
                if ahead.forced_id >= 0:
                    forced[j] = ForcedRow(ahead.forced_id, wanted)
                if j < last:
                    ahead.feed(drafts[j - first])
        return forced

    def force(
        self, forced: dict[int, ForcedRow], raw: dict[int, Float32Array], result: SampleResult
    ) -> None:
        """Overrule what was sampled.

        Args:
            forced: as given by `forced_rows`.
            raw: those rows of the logits as the model gave them, if log-probabilities are wanted.
            result: is changed.
        """
        for row, what in forced.items():
            if result.status[row] not in (RowStatus.OK, RowStatus.NOTHING_LEFT):
                continue
            result.status[row] = RowStatus.OK
            result.tokens[row] = what.token_id
            if result.logprob_ids is not None:
                self._fill_logprobs(result, row, what, raw[row][: self._num_ids])

    def _fill_logprobs(
        self, result: SampleResult, row: int, what: ForcedRow, logits: Float32Array
    ) -> None:
        """Processed values are those of a distribution that has no other id."""
        assert result.logprob_ids is not None
        assert result.logprobs is not None
        assert result.ranks is not None
        token_id = what.token_id
        if self._mode.startswith("processed"):
            logits = np.full_like(logits, -np.inf)
            logits[token_id] = 0.0
        values = logits
        if self._mode.endswith("logprobs"):
            shifted = logits.astype(np.float64) - logits.max()
            values = (shifted - np.log(np.exp(shifted).sum())).astype(np.float32)
        others = what.logprob_token_ids
        if not others:
            count = min(result.logprob_ids.shape[1] - 1, len(values))
            others = np.argsort(-values, kind="stable")[:count].tolist()
        columns = np.array([token_id, *others], np.int32)
        result.logprob_ids[row, : len(columns)] = columns
        result.logprobs[row, : len(columns)] = values[columns]
        result.ranks[row] = (values >= values[token_id]).sum()

    def advance(self, inputs: StepInputs, batch: InputBatch, kept: list[list[int]]) -> None:
        """Follow the ids that were kept."""
        for row, run in zip(inputs.sample_rows.tolist(), kept, strict=True):
            thinking = self._states.get(batch.row_states[row].req_id)
            if thinking is not None:
                for token_id in run:
                    thinking.feed(token_id)
