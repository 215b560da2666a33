"""`ModelRunner`: from a `SchedulerOutput` to arrays, through the backend, to sampled ids.

Owns the input batch, the sampler and everything a worker remembers of live requests. It knows no
files and no processes. A failure that belongs to one request (bad logits, masks that leave nothing,
a user's processor that raises) ends up in ``errors`` of the output; the others go on.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from tellin.exceptions import EngineError
from tellin.kernels.batch import StepBatch
from tellin.kernels.sampler import RowStatus, Sampler, SampleResult, SampleRows
from tellin.step_protocol import GrammarOutput, LogprobsLists, ModelRunnerOutput, SchedulerOutput
from tellin.worker.input_batch import InputBatch, RequestState
from tellin.worker.prompt_logprobs import PromptLogprobs
from tellin.worker.step_inputs import StepInputs, build_inputs, build_step

if TYPE_CHECKING:
    from tellin.config import EngineConfig

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]

_PROMPT_LOGITS_BYTES = 64 << 20
"""Logits of prompt positions that one pass may hold; longer chunks are split."""


class Backend(Protocol):
    """What a runner needs of a backend (see `tellin.kernels`)."""

    info: dict[str, Any]

    def kv_bytes_per_block(self) -> int: ...

    def init_kv_cache(self, num_blocks: int) -> None: ...

    def free_kv_cache(self) -> None: ...

    def forward(self, batch: StepBatch) -> Float32Array: ...

    def close(self) -> None: ...


class ModelRunner:
    """Runs steps on one backend."""

    def __init__(self, config: EngineConfig, backend: Backend) -> None:
        model = config.model_config
        self.config = config
        self.block_size = config.cache_config.block_size
        self.vocab_size = model.vocab_size
        self.num_ids = min(model.tokenizer_size or model.vocab_size, model.vocab_size)
        self.sampler = Sampler(self.num_ids, model.logprobs_mode)
        self._backend: Backend | None = None
        self.adopt_backend(backend)
        self.batch = InputBatch()
        self._prompt_logprobs: dict[str, PromptLogprobs] = {}
        self._max_prompt_logits = max(_PROMPT_LOGITS_BYTES // (4 * self.vocab_size), 16)
        self._pending: tuple[SchedulerOutput, StepInputs, Float32Array, float] | None = None

    # ------------------------------------------------------------------ backend

    @property
    def backend(self) -> Backend:
        """The backend.

        Raises:
            EngineError: it was released.
        """
        if self._backend is None:
            raise EngineError("the model's weights are not loaded; call wake_up first")
        return self._backend

    def kv_bytes_per_block(self) -> int:
        """Bytes of one KV block."""
        return self.backend.kv_bytes_per_block()

    def init_kv_cache(self, num_blocks: int) -> None:
        """Make the KV pool."""
        self.backend.init_kv_cache(num_blocks)

    def free_kv_cache(self) -> None:
        """Give the KV pool's memory back."""
        self.backend.free_kv_cache()

    def release_backend(self) -> None:
        """Give weights and pool back."""
        backend, self._backend = self._backend, None
        self.sampler.team = None
        if backend is not None:
            backend.close()

    def adopt_backend(self, backend: Backend) -> None:
        """Go on with a fresh backend for the same model."""
        self._backend = backend
        self.sampler.team = getattr(backend, "thread_team", None)

    # ------------------------------------------------------------------ forward

    def execute_model(self, step: SchedulerOutput) -> None:
        """Apply a step to the batch and run the forward pass; `sample_tokens` must follow."""
        if self._pending is not None:
            raise RuntimeError("execute_model was called twice without sample_tokens")
        started = time.perf_counter()
        _, new_states = self.batch.apply(step)
        for req_id in step.finished_req_ids:
            self._prompt_logprobs.pop(req_id, None)
        for state in new_states:
            self._admit(state)
        inputs, logits = self._forward(step)
        self._pending = (step, inputs, logits, time.perf_counter() - started)

    def _admit(self, state: RequestState) -> None:
        params = state.sampling_params
        if params is None:
            state.error = "this build cannot pool: it serves generation only"
            return
        self.sampler.set_slot(state.slot, params, state.rng_key)
        if params.prompt_logprobs is not None:
            num_prompt = int(self.batch.num_prompt_tokens[state.slot])
            self._prompt_logprobs[state.req_id] = PromptLogprobs(num_prompt, params.prompt_logprobs)

    def _forward(self, step: SchedulerOutput) -> tuple[StepInputs, Float32Array]:
        batch = self.batch
        scheduled = step.num_scheduled_tokens
        states = batch.row_states
        counts = np.fromiter((scheduled[s.req_id] for s in states), np.int32, len(states))
        computed = batch.num_computed_tokens[batch.row_slots]
        extra: list[tuple[PromptLogprobs, RequestState, int, Int32Array]] = []
        if self._prompt_logprobs:
            extra = self._split_prompts(computed, counts)
        extra_rows = [rows for _, _, _, rows in extra]
        extra_logits = np.concatenate(extra_rows) if extra_rows else np.zeros(0, np.int32)
        excluded = [row for row, state in enumerate(states) if state.error is not None]
        inputs = build_inputs(batch, computed, counts, extra_logits, self.block_size, excluded)
        if not states:
            return inputs, np.zeros((0, self.vocab_size), np.float32)
        logits = self.backend.forward(inputs.step)
        row = inputs.num_sample_logits
        for table, state, start, rows in extra:
            self._fill(table, state, start, logits[row : row + len(rows)])
            row += len(rows)
        return inputs, logits

    # ------------------------------------------------------------------ prompt logprobs

    def _split_prompts(
        self, computed: Int32Array, counts: Int32Array
    ) -> list[tuple[PromptLogprobs, RequestState, int, Int32Array]]:
        """Decide which passes give the logits of prompt positions.

        The head of a chunk that is too long is run at once, in passes of its own; ``computed`` and
        ``counts`` are changed to what is left for the main pass. A row's values do not depend on
        the pass it is in.

        Returns:
            (table, request, first position, token rows of the main pass) of what is left.
        """
        budget = self._max_prompt_logits
        left = []
        for row, state in enumerate(self.batch.row_states):
            table = self._prompt_logprobs.get(state.req_id)
            if table is None or state.error is not None:
                continue
            num_rows = table.num_rows(int(computed[row]), int(counts[row]))
            while num_rows > budget:
                head = min(num_rows, self._max_prompt_logits, int(counts[row]) - 1)
                if head == 0:
                    break
                self._run_head(table, state, int(computed[row]), head)
                computed[row] += head
                counts[row] -= head
                num_rows = table.num_rows(int(computed[row]), int(counts[row]))
            if num_rows > 0:
                left.append((table, state, row, num_rows))
                budget = max(budget - num_rows, 0)
        starts = np.cumsum(counts) - counts
        return [
            (table, state, int(computed[row]), np.arange(num_rows, dtype=np.int32) + starts[row])
            for table, state, row, num_rows in left
        ]

    def _run_head(self, table: PromptLogprobs, state: RequestState, start: int, count: int) -> None:
        indices = np.arange(count, dtype=np.int32)
        step = build_step(
            self.batch,
            np.array([state.slot], np.int32),
            np.array([start], np.int32),
            np.array([count], np.int32),
            indices,
            self.block_size,
        )
        self._fill(table, state, start, self.backend.forward(step))

    def _fill(
        self, table: PromptLogprobs, state: RequestState, start: int, logits: Float32Array
    ) -> None:
        next_ids = self.batch.token_ids[state.slot, start + 1 : start + 1 + len(logits)]
        state.error = state.error or table.fill(self.sampler, logits, start, next_ids)

    # ------------------------------------------------------------------ sampling

    def sample_tokens(self, grammar: GrammarOutput | None) -> ModelRunnerOutput:
        """Sample the step that `execute_model` ran."""
        if self._pending is None:
            raise RuntimeError("sample_tokens was called without execute_model")
        (_, inputs, logits, model_time), self._pending = self._pending, None
        rows = self._sample_rows(inputs, grammar)
        columns = self._num_logprob_columns(inputs)
        result = self.sampler.sample(logits, rows, num_logprob_columns=columns)
        output = ModelRunnerOutput(self.batch.req_ids, [], model_time_s=model_time)
        if self.batch.has_drafts:
            accepted, failed = self._accept_drafts(inputs, result)
        else:
            accepted, failed = self._accept_all(inputs, rows, result)
        for row, status in failed:
            self._report_failure(self.batch.row_states[row].req_id, status, output)
        self._report(inputs, result, accepted, output)
        return output

    def _sample_rows(self, inputs: StepInputs, grammar: GrammarOutput | None) -> SampleRows:
        batch = self.batch
        slots = batch.row_slots[inputs.sample_rows]
        lens = batch.num_tokens[slots]
        if batch.has_drafts:
            per_row = np.diff(inputs.sample_start)
            slots = np.repeat(slots, per_row)
            within = np.arange(len(slots), dtype=np.int32) - np.repeat(
                inputs.sample_start[:-1], per_row
            )
            lens = np.repeat(lens, per_row) + within
        rows = SampleRows(
            slots,
            np.arange(len(slots), dtype=np.int32),
            lens,
            batch.num_prompt_tokens[slots],
            batch.token_ids,
        )
        if grammar is not None:
            rows.bitmask = np.ascontiguousarray(grammar.bitmask, np.int32)
            rows.bitmask_rows = self._bitmask_rows(inputs, grammar, len(slots))
        return rows

    def _bitmask_rows(
        self, inputs: StepInputs, grammar: GrammarOutput, num_rows: int
    ) -> Int32Array:
        """Which row of the mask each sampled row obeys; -1 = none (6.5.5)."""
        index_of = {int(row): i for i, row in enumerate(inputs.sample_rows)}
        mask_rows = np.full(num_rows, -1, np.int32)
        first = 0
        for req_id, count in zip(grammar.req_ids, grammar.num_rows, strict=True):
            i = index_of.get(self.batch.row_of(req_id))
            if i is not None:
                start = int(inputs.sample_start[i])
                used = min(count, int(inputs.sample_start[i + 1]) - start)
                mask_rows[start : start + used] = np.arange(first, first + used)
            first += count
        return mask_rows

    def _num_logprob_columns(self, inputs: StepInputs) -> int:
        states = self.batch.row_states
        wanted = [
            self.sampler.num_logprob_columns(states[row].slot)
            for row in inputs.sample_rows.tolist()
            if states[row].wants_logprobs
        ]
        return max(wanted, default=0)

    def _accept_all(
        self, inputs: StepInputs, rows: SampleRows, result: SampleResult
    ) -> tuple[list[list[int]], list[tuple[int, int]]]:
        """Without drafts each row gives one id, unless it failed.

        Returns:
            Ids per sampled row; (batch row, status) of those that failed.
        """
        tokens = result.tokens.tolist()
        if not result.status.any():
            self.batch.append_sampled(rows.slots, result.tokens)
            return [[token] for token in tokens], []
        good = result.status == RowStatus.OK
        self.batch.append_sampled(rows.slots[good], result.tokens[good])
        accepted = [[t] if ok else [] for t, ok in zip(tokens, good.tolist(), strict=True)]
        bad = np.flatnonzero(~good)
        failed = zip(inputs.sample_rows[bad].tolist(), result.status[bad].tolist(), strict=True)
        return accepted, list(failed)

    def _accept_drafts(
        self, inputs: StepInputs, result: SampleResult
    ) -> tuple[list[list[int]], list[tuple[int, int]]]:
        """The run of sampled ids up to and including the first that is not its draft.

        Every position was sampled from the target's own distribution with its own random bits, so
        what is emitted is bit for bit what would be sampled without drafts. Returns as
        `_accept_all`; positions behind the end of a run were never needed and may fail unseen.
        """
        tokens, status = result.tokens.tolist(), result.status.tolist()
        starts = inputs.sample_start.tolist()
        accepted, failed = [], []
        for i, row in enumerate(inputs.sample_rows.tolist()):
            slot = self.batch.row_states[row].slot
            known = int(self.batch.num_tokens[slot])
            first, last = starts[i], starts[i + 1] - 1
            drafts = self.batch.token_ids[slot, known : known + last - first].tolist()
            run: list[int] = []
            for j in range(first, last + 1):
                if status[j] != RowStatus.OK:
                    failed.append((row, status[j]))
                    break
                run.append(tokens[j])
                if j == last or tokens[j] != drafts[j - first]:
                    break
            self.batch.append_run(slot, run)
            accepted.append(run)
        return accepted, failed

    # ------------------------------------------------------------------ reporting

    def _report(
        self,
        inputs: StepInputs,
        result: SampleResult,
        accepted: list[list[int]],
        output: ModelRunnerOutput,
    ) -> None:
        states = self.batch.row_states
        sample_rows = inputs.sample_rows.tolist()
        if len(accepted) == len(states):
            sampled = accepted
        else:
            sampled = [[] for _ in states]
            for row, run in zip(sample_rows, accepted, strict=True):
                sampled[row] = run
        output.sampled_token_ids = sampled
        if result.logprob_ids is not None:
            output.logprobs = self._logprobs(inputs, result, accepted)
        for state in states:
            if state.error is not None:
                output.errors[state.req_id] = state.error
        if self._prompt_logprobs:
            for row in sample_rows:
                req_id = states[row].req_id
                table = self._prompt_logprobs.pop(req_id, None)
                if table is not None and req_id not in output.errors:
                    output.prompt_logprobs[req_id] = table.finish()

    def _logprobs(
        self, inputs: StepInputs, result: SampleResult, accepted: list[list[int]]
    ) -> list[LogprobsLists | None]:
        assert result.logprob_ids is not None
        assert result.logprobs is not None
        assert result.ranks is not None
        states = self.batch.row_states
        lists: list[LogprobsLists | None] = [None] * len(states)
        starts = inputs.sample_start.tolist()
        for i, row in enumerate(inputs.sample_rows.tolist()):
            if not states[row].wants_logprobs:
                continue
            columns = self.sampler.num_logprob_columns(states[row].slot)
            rows = slice(starts[i], starts[i] + len(accepted[i]))
            lists[row] = LogprobsLists(
                result.logprob_ids[rows, :columns].tolist(),
                result.logprobs[rows, :columns].tolist(),
                result.ranks[rows].tolist(),
            )
        return lists

    def _report_failure(self, req_id: str, status: int, output: ModelRunnerOutput) -> None:
        if status == RowStatus.NOT_FINITE:
            output.errors[req_id] = "the model gave NaN or infinite logits for this request"
            output.num_nans_in_logits[req_id] = 1
        else:
            output.errors[req_id] = (
                "no token is allowed at this position: allowed_token_ids, bad_words, min_tokens, "
                "logit_bias and structured output together leave none"
            )
            output.client_errors.add(req_id)
