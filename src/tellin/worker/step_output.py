"""From sampled rows to a step's output: which ids are kept, what is reported, who failed."""

from __future__ import annotations

import numpy as np

from tellin.kernels.sampler import RowStatus, Sampler, SampleResult
from tellin.step_protocol import LogprobsLists, ModelRunnerOutput
from tellin.worker.input_batch import InputBatch
from tellin.worker.step_inputs import StepInputs

_NOT_FINITE = "the model gave NaN or infinite logits for this request"
_NOTHING_LEFT = (
    "no token is allowed at this position: allowed_token_ids, bad_words, min_tokens, logit_bias "
    "and structured output together leave none"
)


class StepOutput:
    """Keeps the ids of one step and builds its `ModelRunnerOutput`.

    ``kept[i]`` are the ids of sampled request i (``inputs.sample_rows[i]``); ``processor_errors``
    maps sampled logits rows to what a logits processor had to say.
    """

    def __init__(
        self,
        batch: InputBatch,
        inputs: StepInputs,
        result: SampleResult,
        processor_errors: dict[int, str],
    ) -> None:
        self._batch = batch
        self._inputs = inputs
        self._result = result
        self._processor_errors = processor_errors
        self._failed: list[tuple[int, int]] = []  # (batch row, sampled logits row)
        self.kept: list[list[int]] = []

    def keep(self) -> None:
        """Decide which ids are kept, and append them to the batch."""
        if self._batch.has_drafts:
            self._keep_runs()
        else:
            self._keep_single()

    def _keep_single(self) -> None:
        """Without drafts each row gives one id, unless it failed."""
        result, rows = self._result, self._inputs.sample_rows
        slots = self._batch.row_slots[rows]
        tokens = result.tokens.tolist()
        if not result.status.any():
            self._batch.append_sampled(slots, result.tokens)
            self.kept = [[token] for token in tokens]
            return
        good = result.status == RowStatus.OK
        self._batch.append_sampled(slots[good], result.tokens[good])
        self.kept = [[t] if ok else [] for t, ok in zip(tokens, good.tolist(), strict=True)]
        self._failed = [(int(rows[i]), int(i)) for i in np.flatnonzero(~good)]

    def _keep_runs(self) -> None:
        """Keep the sampled ids up to and including the first that is not its draft.

        Every position was sampled from the target's own distribution with its own random bits, so
        what is kept is bit for bit what would be sampled without drafts. Positions behind the end
        of a run were never needed and may have failed unseen.
        """
        batch, result = self._batch, self._result
        tokens, status = result.tokens.tolist(), result.status.tolist()
        starts = self._inputs.sample_start.tolist()
        for i, row in enumerate(self._inputs.sample_rows.tolist()):
            slot = batch.row_states[row].slot
            known = int(batch.num_tokens[slot])
            first, last = starts[i], starts[i + 1] - 1
            drafts = batch.token_ids[slot, known : known + last - first].tolist()
            run: list[int] = []
            for j in range(first, last + 1):
                if status[j] != RowStatus.OK:
                    self._failed.append((row, j))
                    break
                run.append(tokens[j])
                if j == last or tokens[j] != drafts[j - first]:
                    break
            batch.append_run(slot, run)
            self.kept.append(run)

    def build(self, sampler: Sampler, model_time_s: float) -> ModelRunnerOutput:
        """The output of the step, without prompt log-probabilities and drafts."""
        states = self._batch.row_states
        sample_rows = self._inputs.sample_rows.tolist()
        sampled: list[list[int]] = [[] for _ in states]
        for row, run in zip(sample_rows, self.kept, strict=True):
            sampled[row] = run
        output = ModelRunnerOutput(self._batch.req_ids, sampled, model_time_s=model_time_s)
        if self._result.logprob_ids is not None:
            output.logprobs = self._logprobs(sampler)
        for row, j in self._failed:
            self._report_failure(states[row].req_id, j, output)
        if self._batch.track_outputs:
            for row, run in zip(sample_rows, self.kept, strict=True):
                states[row].output_token_ids.extend(run)
        return output

    def _logprobs(self, sampler: Sampler) -> list[LogprobsLists | None]:
        result = self._result
        assert result.logprob_ids is not None
        assert result.logprobs is not None
        assert result.ranks is not None
        states = self._batch.row_states
        lists: list[LogprobsLists | None] = [None] * len(states)
        starts = self._inputs.sample_start.tolist()
        for i, row in enumerate(self._inputs.sample_rows.tolist()):
            if not states[row].wants_logprobs:
                continue
            columns = sampler.num_logprob_columns(states[row].slot)
            rows = slice(starts[i], starts[i] + len(self.kept[i]))
            lists[row] = LogprobsLists(
                result.logprob_ids[rows, :columns].tolist(),
                result.logprobs[rows, :columns].tolist(),
                result.ranks[rows].tolist(),
            )
        return lists

    def _report_failure(self, req_id: str, logits_row: int, output: ModelRunnerOutput) -> None:
        status = self._result.status[logits_row]
        if status == RowStatus.NOT_FINITE:
            output.errors[req_id] = _NOT_FINITE
            output.num_nans_in_logits[req_id] = 1
            return
        message = self._processor_errors.get(logits_row)
        output.errors[req_id] = _NOTHING_LEFT if message is None else message
        output.client_errors.add(req_id)
