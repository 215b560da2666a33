"""Which passes give the logits that log-probabilities of prompts are made of.

A row of logits is as long as the vocabulary, so a pass holds a bounded number of them. Chunks that
have more are computed in several passes before the main one; where a picture's rows must be in one
pass, that pass is run again for each part of its rows. A row's values do not depend on the pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tellin.kernels.sampler import Sampler
from tellin.step_protocol import ModelRunnerOutput
from tellin.worker.input_batch import InputBatch, RequestState
from tellin.worker.prompt_logprobs import ProcessedRows, PromptLogprobs
from tellin.worker.seen_ends import whole_head
from tellin.worker.step_inputs import StepInputs

if TYPE_CHECKING:
    from tellin.config import ModelConfig
    from tellin.sampling_params import SamplingParams

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]

_LOGITS_BYTES = 64 << 20
"""Logits of prompt positions that one pass may hold."""


@dataclass
class PromptRows:
    """Entries of a table that a pass gives: from ``start`` on, one per row in ``token_rows``."""

    table: PromptLogprobs
    state: RequestState
    start: int
    token_rows: Int32Array


@dataclass
class PromptPass:
    """A pass for one request: ``count`` tokens from position ``computed`` on, for some rows."""

    rows: PromptRows
    computed: int
    count: int


class PromptPasses:
    """Tables of the prompts that are being scored, and the passes that fill them.

    Args:
        model: says the vocabulary and what log-probabilities are.
        batch: the worker's.
        sampler: the worker's; it turns logits into entries.
        rows_see_each_other: a picture's rows must be in one pass.
    """

    def __init__(
        self, model: ModelConfig, batch: InputBatch, sampler: Sampler, rows_see_each_other: bool
    ) -> None:
        self.max_logits = max(_LOGITS_BYTES // (4 * model.vocab_size), 16)
        """Rows of logits for entries in one pass; the main one may have one per request besides."""
        self._mode = model.logprobs_mode
        self._batch = batch
        self._sampler = sampler
        self._rows_see_each_other = rows_see_each_other
        self._tables: dict[str, PromptLogprobs] = {}

    @property
    def active(self) -> bool:
        return bool(self._tables)

    def add_request(self, state: RequestState, params: SamplingParams) -> None:
        """Begin its table, if it wants one."""
        if params.prompt_logprobs is None:
            return
        processed = None
        if self._mode.startswith("processed"):
            processed = ProcessedRows(self._sampler.num_ids, self._mode, params)
        num_prompt = int(self._batch.num_prompt_tokens[state.slot])
        table = PromptLogprobs(num_prompt, params.prompt_logprobs, processed)
        self._tables[state.req_id] = table

    def remove_request(self, req_id: str) -> None:
        self._tables.pop(req_id, None)

    # ------------------------------------------------------------------ passes

    def split(
        self, computed: Int32Array, counts: Int32Array, run: Callable[[PromptPass], None]
    ) -> list[PromptRows]:
        """Run what the main pass cannot hold.

        Args:
            computed: ``[num_rows]`` tokens before the step; changed to what is left for the main
                pass.
            counts: ``[num_rows]`` tokens of the step; changed likewise.
            run: computes a pass and fills the table (`fill`).

        Returns:
            What the main pass has to give.
        """
        budget = self.max_logits
        left = []
        for row, state in enumerate(self._batch.row_states):
            table = self._tables.get(state.req_id)
            if table is None or state.error is not None:
                continue
            start, count = int(computed[row]), int(counts[row])
            num_rows = table.num_rows(start, count)
            while num_rows > budget:
                head = self._head(state, start, num_rows, count - 1)
                if head == 0:
                    break
                self._run(table, state, start, head, table.num_rows(start, head), run)
                start, count = start + head, count - head
                num_rows = table.num_rows(start, count)
            computed[row], counts[row] = start, count
            # More than the budget only where none can be computed without those behind them.
            first = max(num_rows - max(budget, 1), 0)
            self._run(table, state, start, count, first, run)
            if num_rows > 0:
                left.append((table, state, row, first, num_rows))
                budget = max(budget - num_rows + first, 0)
        starts = np.cumsum(counts, dtype=np.int32) - counts
        return [
            PromptRows(table, state, int(computed[row]) + first, starts[row] + _range(first, end))
            for table, state, row, first, end in left
        ]

    def _head(self, state: RequestState, start: int, num_rows: int, most: int) -> int:
        """Tokens, of ``most`` from ``start`` on, for a pass before the main one; 0 = none."""
        head = min(self.max_logits, num_rows, most)
        if self._rows_see_each_other:
            head = whole_head(state.mm_features, start, head, most)
        return head

    def _run(
        self,
        table: PromptLogprobs,
        state: RequestState,
        start: int,
        count: int,
        num_rows: int,
        run: Callable[[PromptPass], None],
    ) -> None:
        """Compute ``count`` tokens as often as it takes for the logits of the first ``num_rows``.

        More than once only where rows see each other; models with a state that a second pass would
        move on have none such.
        """
        for first in range(0, num_rows, self.max_logits):
            token_rows = _range(first, min(first + self.max_logits, num_rows))
            run(PromptPass(PromptRows(table, state, start + first, token_rows), start, count))

    # ------------------------------------------------------------------ tables

    def fill(
        self, rows: PromptRows, logits: Float32Array, first: int, maxima: Float32Array | None
    ) -> None:
        """Fill a table from the rows of a pass's logits that begin at ``first``.

        Args:
            maxima: block maxima of the pass, if they are known.
        """
        end = first + len(rows.token_rows)
        ids = self._batch.token_ids[rows.state.slot, : rows.start + 1 + end - first]
        error = rows.table.fill(
            self._sampler,
            logits[first:end],
            rows.start,
            ids,
            None if maxima is None else maxima[first:end],
        )
        rows.state.error = rows.state.error or error

    def finish(self, inputs: StepInputs, output: ModelRunnerOutput) -> None:
        """Hand out the tables of prompts that have been read to their end."""
        for row in inputs.sample_rows.tolist():
            req_id = self._batch.row_states[row].req_id
            table = self._tables.pop(req_id, None)
            if table is not None and req_id not in output.errors:
                output.prompt_logprobs[req_id] = table.finish()


def _range(start: int, end: int) -> Int32Array:
    return np.arange(start, end, dtype=np.int32)
