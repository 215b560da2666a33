"""The common case made cheap: the same requests as in the previous step, one id each.

Most steps decode one id for every request of an unchanged batch. Then all arrays of the step are
those of the previous one, moved on by one position, and are changed in place: weights stream
through the caches between two steps, so every line of Python that is touched is expensive. Whatever
is unusual ends the steady state, and the general path goes on from the same batch. Both paths give
the same bits.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tellin.kernels.batch import StepBatch
from tellin.kernels.sampler import Sampler, SampleResult, SampleRows
from tellin.step_protocol import ModelRunnerOutput, SchedulerOutput
from tellin.worker.input_batch import InputBatch
from tellin.worker.step_inputs import StepInputs, with_saves

Int32Array = npt.NDArray[np.int32]

_SPARE_BLOCKS = 16
"""Columns of the block table beyond those in use, so that it is rebuilt only now and then."""


class SteadyDecode:
    """Arrays of a batch in which every request decodes one id per step."""

    def __init__(self, batch: InputBatch, req_ids: list[str], block_size: int) -> None:
        """Take over a batch whose last step sampled one id for every row.

        Args:
            batch: the batch.
            req_ids: its requests in the order in which the scheduler lists them.
            block_size: tokens per KV block.
        """
        self._batch = batch
        self._req_ids = req_ids
        self.states = [batch.states[req_id] for req_id in req_ids]
        count = len(req_ids)
        slots = np.array([state.slot for state in self.states], np.int32)
        known = batch.num_tokens[slots]
        max_len = int(known.max())
        self.slots = slots
        self._lens = known - 1  # ids before the one to be sampled; `advance` moves it on
        self._next_computed = (known - 1).tolist()
        self._num_steps = 0
        self._steps_left = batch.token_ids.shape[1] - max_len - 2
        self._width = -(-max_len // block_size) + _SPARE_BLOCKS
        table = np.zeros((count, self._width), np.int32)
        used = min(self._width, batch.block_table.shape[1])
        table[:, :used] = batch.block_table[slots, :used]
        # The sampler writes its ids where the next step reads them.
        self.result = SampleResult(batch.token_ids[slots, known - 1], np.zeros(count, np.int32))
        rows = np.arange(count + 1, dtype=np.int32)
        step = StepBatch(
            token_ids=self.result.tokens,
            positions=known - 2,
            query_start_loc=rows,
            seq_lens=known - 1,
            block_table=table,
            logits_indices=rows[:-1],
            adapter_slots=batch.adapter_slots[slots] if batch.has_adapters else None,
            state_slots=batch.state_slots[slots] if batch.has_states else None,
        )
        sample_rows = np.array([batch.row_of(req_id) for req_id in req_ids], np.int32)
        self.inputs = StepInputs(step, sample_rows, rows, count)
        self._rows = SampleRows(
            slots, rows[:-1], self._lens, batch.num_prompt_tokens[slots], batch.token_ids
        )

    def advance(self, step: SchedulerOutput) -> bool:
        """Move on to this step if it is steady; False leaves everything as it was."""
        cached = step.scheduled_cached_reqs
        count = len(self.states)
        if (
            len(cached) != count
            or step.total_num_scheduled_tokens != count
            or step.scheduled_new_reqs
            or step.finished_req_ids
            or step.scheduled_spec_decode_tokens
            or step.kv_block_copies
            or step.state_copies
            or step.state_moves
            or self._num_steps >= self._steps_left
        ):
            return False
        ahead = self._num_steps
        with_blocks = False
        for data, req_id, computed in zip(cached, self._req_ids, self._next_computed, strict=True):
            if (
                data.req_id != req_id
                or data.num_computed_tokens != computed + ahead
                or data.resumed
            ):
                return False
            if data.new_block_ids:
                with_blocks = True
        if with_blocks and not self._take_blocks(step):
            return False
        self._num_steps = ahead + 1
        np.add(self.inputs.step.positions, 1, out=self.inputs.step.positions)
        np.add(self.inputs.step.seq_lens, 1, out=self.inputs.step.seq_lens)
        np.add(self._lens, 1, out=self._lens)
        return True

    def current(self, step: SchedulerOutput) -> StepBatch:
        """The backend's batch for a step to which `advance` has moved on."""
        if not step.state_saves:
            return self.inputs.step
        rows = {req_id: row for row, req_id in enumerate(self._req_ids)}
        return with_saves(self.inputs.step, rows, step.state_saves)

    def _take_blocks(self, step: SchedulerOutput) -> bool:
        """Append new blocks to both tables; False if the spare columns are used up."""
        cached = step.scheduled_cached_reqs
        for data, state in zip(cached, self.states, strict=True):
            if state.num_blocks + len(data.new_block_ids) > self._width:
                return False
        table = self.inputs.step.block_table
        for row, (data, state) in enumerate(zip(cached, self.states, strict=True)):
            if data.new_block_ids:
                start = state.num_blocks
                self._batch.append_blocks(state, data.new_block_ids)
                table[row, start : state.num_blocks] = data.new_block_ids
        return True

    def sample(
        self,
        sampler: Sampler,
        logits: npt.NDArray[np.float32],
        maxima: npt.NDArray[np.float32] | None,
    ) -> ModelRunnerOutput | None:
        """Sample all rows and keep the ids; None, with nothing kept, if a row failed.

        Args:
            sampler: the sampler.
            logits: of this step.
            maxima: their block maxima, if they are known.
        """
        self._rows.maxima = maxima
        sampler.sample_into(logits, self._rows, self.result)
        if self.result.status.any():
            return None
        batch, tokens = self._batch, self.result.tokens
        batch.token_ids[self.slots, self._lens] = tokens
        batch.num_tokens[self.slots] = self._lens + 1
        return ModelRunnerOutput(self._req_ids, [[token] for token in tokens.tolist()])
