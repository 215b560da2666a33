"""`ModelRunner`: from a `SchedulerOutput` to arrays, through the backend, to sampled ids.

Owns the input batch, the sampler and everything a worker remembers of live requests. A step is
`execute_model`, then `sample_tokens`; what log-probabilities of prompts need of it is in
`prompt_passes`, when drafts are made in `drafting`, the steps that most are in `steady_decode`. It
knows no files and no processes. A failure that belongs to one request (bad parameters or logits,
masks that leave nothing, a user's processor that raises) ends up in ``errors``; the others go on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import numpy as np
import numpy.typing as npt

from tellin.exceptions import EngineError
from tellin.kernels.batch import StepBatch
from tellin.kernels.sampler import Sampler, SampleResult, SampleRows
from tellin.step_protocol import GrammarOutput, ModelRunnerOutput, SchedulerOutput
from tellin.worker import drafting
from tellin.worker.backends import Backend, block_maxima, has_token_types
from tellin.worker.classifier import ClassifierHead
from tellin.worker.dense_layers import DenseLayers
from tellin.worker.given_rows import Given, GivenRows, with_given
from tellin.worker.image_inputs import ImageInputs
from tellin.worker.input_batch import InputBatch, RequestState
from tellin.worker.logits_processors import LogitsProcessors
from tellin.worker.lora import AdapterBackend, LoRAManager
from tellin.worker.pooler import Pooler, token_types
from tellin.worker.prompt_passes import PromptPass, PromptPasses, PromptRows
from tellin.worker.rope_positions import has_grids, with_rope
from tellin.worker.seen_ends import with_seen_ends
from tellin.worker.spec_decode import make_drafter
from tellin.worker.steady_decode import SteadyDecode
from tellin.worker.step_inputs import StepInputs, build_inputs, build_step, with_saves
from tellin.worker.step_output import StepOutput
from tellin.worker.thinking import ThinkingBudgets

if TYPE_CHECKING:
    from tellin.config import EngineConfig
    from tellin.models.plan.ir import Plan

logger = logging.getLogger("tellin.worker")

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]


class ModelRunner:
    """Runs steps on one backend.

    ``images`` makes the rows of pictures in prompts, ``classifier`` scores of pooled states,
    ``dense`` embeddings of them.
    """

    def __init__(
        self,
        config: EngineConfig,
        backend: Backend,
        images: ImageInputs | None = None,
        classifier: ClassifierHead | None = None,
        dense: DenseLayers | None = None,
    ) -> None:
        model = config.model_config
        self.images = images
        self.given = GivenRows(images, model.enable_prompt_embeds)
        multimodal = config.multimodal_config
        self._rows_see_each_other = multimodal is not None and multimodal.rows_see_each_other
        self.config = config
        self.block_size = config.cache_config.block_size
        self.vocab_size = model.vocab_size
        self.num_ids = min(model.tokenizer_size or model.vocab_size, model.vocab_size)
        self.sampler = Sampler(self.num_ids, model.logprobs_mode)
        self.processors = LogitsProcessors(config, self.sampler)
        self.thinking = ThinkingBudgets(config.reasoning_config, self.num_ids, model.logprobs_mode)
        self.batch = InputBatch(track_outputs=self.processors.engine_wide)
        self.prompts = PromptPasses(model, self.batch, self.sampler, self._rows_see_each_other)
        self.drafter = make_drafter(config, self.batch, backend)
        self.pooler = None
        if model.pooler_config is not None:
            self.pooler = Pooler(model.pooler_config, classifier, dense)
        self.lora = None
        if config.lora_config is not None:
            plan: Plan = backend.plan  # type: ignore[attr-defined]
            self.lora = LoRAManager(config.lora_config, model.path, plan.lora_sites)
        self._lora_version = 0
        self._backend: Backend | None = None
        self.adopt_backend(backend)
        self._pooled: dict[str, Float32Array] = {}
        self._steady: SteadyDecode | None = None
        self._rows_changed = True
        self._pending: tuple[SchedulerOutput, StepInputs, Float32Array, float] | None = None

    # ------------------------------------------------------------------ forward

    def execute_model(self, step: SchedulerOutput) -> None:
        """Apply a step to the batch and run the forward pass; `sample_tokens` must follow."""
        if self._pending is not None:
            raise RuntimeError("execute_model was called twice without sample_tokens")
        started = time.perf_counter()
        steady = self._steady
        if steady is not None:
            if (
                not (step.free_encoder_mm_hashes or step.scheduled_encoder_inputs)
                and self._slots_are_unchanged()
                and steady.advance(step)
            ):
                logits = self.backend.forward(steady.current(step))
                seconds = time.perf_counter() - started
                self._pending = (step, steady.inputs, logits, seconds)
                return
            self._steady = None
        for req_id in step.finished_req_ids:
            self._forget(req_id)
        update, new_states = self.batch.apply(step)
        for state in new_states:
            try:
                self._admit(state)
            except Exception as error:
                logger.exception("request %s could not be set up", state.req_id)
                state.error = f"its parameters could not be set up: {error}"
        if self.processors.engine_wide:
            self.processors.update_state(update)
        if step.state_copies:
            self.backend.copy_states(step.state_copies)
        if step.kv_block_copies:
            self.backend.copy_kv_blocks(step.kv_block_copies)
            if self.drafter is not None:
                self.drafter.copy_kv_blocks(step.kv_block_copies)
        if self.images is not None:
            self.images.apply(step, self.batch.states)
        self._rows_changed = update is not None
        if self.lora is not None:
            self._activate_adapters(self.lora)
        inputs, logits = self._forward(step)
        self._pending = (step, inputs, logits, time.perf_counter() - started)

    def _slots_are_unchanged(self) -> bool:
        """Whether adapters lie where they lay in the last step."""
        return self.lora is None or self.lora.version == self._lora_version

    def _activate_adapters(self, lora: LoRAManager) -> None:
        """See to it that the adapters of this step's requests are in the backend."""
        batch = self.batch
        wanted = {state.lora_id for state in batch.row_states if state.lora_id}
        slots = lora.activate(wanted, cast("AdapterBackend", self.backend)) if wanted else {}
        batch.has_adapters = bool(slots)
        for state in batch.row_states:
            if state.lora_id:
                batch.adapter_slots[state.slot] = slots.get(state.lora_id, -1)
                if state.lora_id not in slots:
                    state.error = f"its LoRA adapter (id {state.lora_id}) is not loaded any more"
        self._lora_version = lora.version

    def _admit(self, state: RequestState) -> None:
        params = state.sampling_params
        if params is None:
            if self.pooler is None:
                state.error = "this engine cannot pool: it was started to generate"
            return
        self.sampler.set_slot(state.slot, params, state.rng_key)
        self.processors.add_request(state)
        self.thinking.add_request(state, self.batch)
        self.prompts.add_request(state, params)

    def _forget(self, req_id: str) -> None:
        self.prompts.remove_request(req_id)
        self.processors.remove_request(req_id)
        self.thinking.remove_request(req_id)
        if self.pooler is not None:
            self.pooler.forget(req_id)
        state = self.batch.states.get(req_id)
        if state is not None and self.drafter is not None:
            self.drafter.finish(state)

    def _forward(self, step: SchedulerOutput) -> tuple[StepInputs, Float32Array]:
        batch = self.batch
        scheduled = step.num_scheduled_tokens
        states = batch.row_states
        counts = np.fromiter((scheduled[s.req_id] for s in states), np.int32, len(states))
        computed = batch.num_computed_tokens[batch.row_slots]
        extra: Sequence[PromptRows] = ()
        if self.prompts.active:
            extra = self.prompts.split(computed, counts, lambda one: self._run_prompt(step, one))
        pooler = self.pooler
        pooling = [] if pooler is None else pooler.step_rows(batch, computed, counts)
        given = self.given.gather(states, computed, counts, self.backend) if states else None
        excluded = [
            row
            for row, state in enumerate(states)
            if state.error is not None or state.sampling_params is None
        ]
        extra_logits = [rows.token_rows for rows in extra]
        extra_logits += [rows.token_rows for rows in pooling]
        inputs = build_inputs(batch, computed, counts, extra_logits, self.block_size, excluded)
        if not states:
            return inputs, np.zeros((0, self.vocab_size), np.float32)
        inputs.step = self._with_parts(
            inputs.step, states, computed, counts, given, batch.rows, step
        )
        if pooling and self._has_token_types:
            types = token_types([state.pooling_params for state in states], computed, counts)
            inputs.step = replace(inputs.step, token_types=types)
        logits = self.backend.forward(inputs.step)
        row = inputs.num_sample_logits
        for rows in extra:
            self.prompts.fill(rows, logits, row, block_maxima(self._backend))
            row += len(rows.token_rows)
        if pooler is not None and pooling:
            self._pooled |= pooler.pool_step(pooling, self.backend, row)
        return inputs, logits

    def _with_parts(
        self,
        inputs: StepBatch,
        states: Sequence[RequestState],
        computed: Int32Array,
        counts: Int32Array,
        given: Given | None,
        rows: Mapping[str, int],
        step: SchedulerOutput,
    ) -> StepBatch:
        """A pass's batch with what it needs besides ids: rows that are given, snapshots to take.

        Args:
            inputs: of these states' ids.
            rows: which of the pass's requests each id is.
        """
        if step.state_saves:
            inputs = with_saves(inputs, rows, step.state_saves)
        inputs = with_rope(with_given(inputs, given), states, computed, counts)
        if self._rows_see_each_other:
            inputs = with_seen_ends(inputs, states, computed, counts)
        return inputs

    def _run_prompt(self, step: SchedulerOutput, one: PromptPass) -> None:
        """Run a pass before the main one, for the log-probabilities of a prompt."""
        state, rows = one.rows.state, one.rows.token_rows
        slots, starts, counts = (
            np.array([x], np.int32) for x in (state.slot, one.computed, one.count)
        )
        inputs = build_step(
            self.batch, slots, starts, counts, rows, self.block_size, is_target=True
        )
        given = self.given.gather([state], starts, counts, self.backend)
        names = {state.req_id: 0}
        inputs = self._with_parts(inputs, [state], starts, counts, given, names, step)
        logits = self.backend.forward(inputs)
        self.prompts.fill(one.rows, logits, 0, block_maxima(self._backend))
        drafting.follow(self.drafter, slots, inputs, self.backend)
        if self.drafter is not None and self.drafter.needs_hidden:
            self.drafter.propose(_range(0), _range(0))

    # ------------------------------------------------------------------ sampling

    def sample_tokens(self, grammar: GrammarOutput | None) -> ModelRunnerOutput:
        """Sample the step that `execute_model` ran, and draft for the next one."""
        if self._pending is None:
            raise RuntimeError("sample_tokens was called without execute_model")
        (step, inputs, logits, seconds), self._pending = self._pending, None
        started = time.perf_counter()
        processor_errors: dict[int, str] = {}
        steady, self._steady = self._steady, None
        if steady is not None and grammar is None:
            steady_output = steady.sample(self.sampler, logits, block_maxima(self._backend))
            if steady_output is not None:
                self._steady = steady
                steady_output.model_time_s = seconds + time.perf_counter() - started
                if self.drafter is not None:
                    drafting.follow(self.drafter, steady.slots, inputs.step, self.backend)
                    drafting.draft(self.drafter, step, steady.states, steady_output)
                return steady_output
            result = steady.result
        else:
            result, processor_errors = self._sample(inputs, logits, grammar)
        kept = StepOutput(self.batch, inputs, result, processor_errors)
        kept.keep()
        if self.thinking.active:
            self.thinking.advance(inputs, self.batch, kept.kept)
        output = kept.build(self.sampler, 0.0)
        for state in self.batch.row_states:
            if state.error is not None:
                output.errors[state.req_id] = state.error
        if self._pooled:
            output.pooler_output, self._pooled = self._pooled, {}
        if self.prompts.active:
            self.prompts.finish(inputs, output)
        output.model_time_s = seconds + time.perf_counter() - started
        if self.drafter is not None:
            states = self.batch.row_states
            sampled = zip(inputs.sample_rows.tolist(), kept.kept, strict=True)
            going_on = [states[row] for row, run in sampled if run]
            slots = steady.slots if steady is not None else self.batch.row_slots
            going_on = [state for state in going_on if state.req_id not in output.errors]
            drafting.follow(self.drafter, slots, inputs.step, self.backend)
            drafting.draft(self.drafter, step, going_on, output)
        if steady is None:
            self._start_steady(step, inputs, output)
        return output

    def _start_steady(
        self, step: SchedulerOutput, inputs: StepInputs, output: ModelRunnerOutput
    ) -> None:
        """Expect more of the same if this step was of the simplest kind."""
        batch = self.batch
        if (
            self._rows_changed
            or step.structured_output_req_ids
            or self.processors.active
            or self.thinking.active
            or self.prompts.active
            or output.errors
            or output.logprobs is not None
            or not 0 < batch.num_rows == len(inputs.sample_rows)
            or batch.has_drafts
            or has_grids(batch.row_states)
        ):
            return
        req_ids = [data.req_id for data in step.scheduled_cached_reqs]
        self._steady = SteadyDecode(batch, req_ids, self.block_size)

    def _sample(
        self, inputs: StepInputs, logits: Float32Array, grammar: GrammarOutput | None
    ) -> tuple[SampleResult, dict[int, str]]:
        if inputs.num_sample_logits == 0:  # unfinished prompts, or prompts to be pooled
            return SampleResult(_range(0), _range(0)), {}
        rows = self._sample_rows(inputs, grammar)
        columns = self._num_logprob_columns(inputs)
        forced = self.thinking.forced_rows(inputs, self.batch) if self.thinking.active else {}
        raw = {row: logits[row].copy() for row in forced} if columns else {}
        errors: dict[int, str] = {}
        if self.processors.active:
            row_of = np.repeat(inputs.sample_rows, np.diff(inputs.sample_start))
            result, errors = self.processors.sample(logits, rows, self.batch, row_of, columns)
        else:
            result = self.sampler.sample(logits, rows, num_logprob_columns=columns)
        if forced:
            self.thinking.force(forced, raw, result)
        return result, errors

    def _sample_rows(self, inputs: StepInputs, grammar: GrammarOutput | None) -> SampleRows:
        batch = self.batch
        slots = batch.row_slots[inputs.sample_rows]
        lens = batch.num_tokens[slots]
        if batch.has_drafts:
            per_row = np.diff(inputs.sample_start)
            slots = np.repeat(slots, per_row)
            lens = np.repeat(lens - inputs.sample_start[:-1], per_row) + _range(len(slots))
        rows = SampleRows(
            slots,
            _range(len(slots)),
            lens,
            batch.num_prompt_tokens[slots],
            batch.token_ids,
            maxima=block_maxima(self._backend),
        )
        if grammar is not None:
            rows.bitmask = np.ascontiguousarray(grammar.bitmask, np.int32)
            rows.bitmask_rows = self._bitmask_rows(inputs, grammar, len(slots))
        return rows

    def _bitmask_rows(
        self, inputs: StepInputs, grammar: GrammarOutput, num_rows: int
    ) -> Int32Array:
        """Which row of the mask each sampled row obeys; -1 = none (6.5.5)."""
        index_of = {row: i for i, row in enumerate(inputs.sample_rows.tolist())}
        starts = inputs.sample_start.tolist()
        mask_rows = np.full(num_rows, -1, np.int32)
        first = 0
        for req_id, count in zip(grammar.req_ids, grammar.num_rows, strict=True):
            i = index_of.get(self.batch.row_of(req_id))
            if i is not None:
                used = min(count, starts[i + 1] - starts[i])
                mask_rows[starts[i] : starts[i] + used] = first + _range(used)
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

    @property
    def model(self) -> Backend | None:
        """The backend, or None while it is released."""
        return self._backend

    def kv_bytes_per_block(self) -> int:
        """Bytes of one KV block, a draft model's included."""
        draft = 0 if self.drafter is None else self.drafter.kv_bytes_per_block()
        return self.backend.kv_bytes_per_block() + draft

    def init_kv_cache(self, num_blocks: int) -> None:
        """Make the KV pools."""
        self.backend.init_kv_cache(num_blocks)
        if self.drafter is not None:
            self.drafter.init_kv_cache(num_blocks)

    def free_kv_cache(self) -> None:
        """Give the memory of the pools of KV and of states back."""
        self.backend.free_kv_cache()
        if self.batch.has_states:
            self.backend.free_state_cache()
        if self.drafter is not None:
            self.drafter.free_kv_cache()

    def release_backend(self) -> None:
        """Give weights and pools back."""
        backend, self._backend = self._backend, None
        self.sampler.team = None
        self._steady = None
        self._pending = None  # its logits are a view of the backend's memory
        if backend is not None:
            backend.close()
        if self.images is not None:
            self.images.release()
        if self.drafter is not None:
            self.drafter.release()

    def adopt_backend(self, backend: Backend) -> None:
        """Go on with a fresh backend for the same model."""
        self._backend = backend
        self._has_token_types = has_token_types(backend)
        self.batch.has_states = backend.state_bytes_per_slot() > 0
        self.sampler.team = getattr(backend, "thread_team", None)
        if self.lora is not None:
            self.lora.forget_slots()
        if self.drafter is not None:
            self.drafter.reopen(backend)

    def replace_backend(self, backend: Backend) -> None:
        """Go on with a wrapper of the backend, or without one: same weights, same pool."""
        self._backend = backend


def _range(count: int) -> Int32Array:
    return np.arange(count, dtype=np.int32)
