"""The worker's mirror of the scheduler's requests, as arrays.

A request has a *slot* from the step it is first scheduled in until it finishes: one row of the
growing arrays below. It has a *row* of the batch only while it is scheduled; rows are dense. Moving
a row moves a number, never ids. Everything here follows from the stream of `SchedulerOutput`s: the
mirror never asks, and knows no logits.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tellin.logits_processor import BatchUpdate, MoveDirectionality
from tellin.protocol import MultiModalFeature
from tellin.sampling_params import PoolingParams, SamplingParams
from tellin.step_protocol import CachedRequestData, NewRequestData, SchedulerOutput

Int32Array = npt.NDArray[np.int32]

NO_TOKEN = -1
"""Stands for a prompt's token that has no id, only a row: nothing counts it or looks it up."""

_MIN_SLOTS = 16
_MIN_TOKENS = 1024
_MIN_BLOCKS = 64


@dataclass(eq=False)
class RequestState:
    """What a worker holds of one request besides its row of the arrays.

    ``output_token_ids`` is kept only if engine-wide logits processors watch it. ``error`` is set
    when the worker cannot serve this request; it is reported with every step until the scheduler
    lets go of it.
    """

    req_id: str
    slot: int
    sampling_params: SamplingParams | None
    pooling_params: PoolingParams | None
    rng_key: int
    lora_id: int = 0
    wants_logprobs: bool = False
    num_blocks: int = 0
    output_token_ids: list[int] = field(default_factory=list)
    error: str | None = None
    mm_features: list[MultiModalFeature] = field(default_factory=list)
    prompt_embeds: npt.NDArray[np.float32] | None = None
    """Rows that the prompt has in the place of ids, which are `NO_TOKEN`."""


class InputBatch:
    """Slots and rows.

    Arrays, indexed by slot (all int32; the first dimension and the widths grow as needed):
        token_ids ``[num_slots, capacity]``: known ids, then scheduled drafts.
        num_tokens, num_prompt_tokens, num_computed_tokens ``[num_slots]``.
        num_draft_tokens ``[num_slots]``: drafts scheduled in this step.
        num_draft_computed ``[num_slots]``: tokens that a draft model has been fed.
        adapter_slots ``[num_slots]``: the backend's slot of its LoRA adapter, -1 = none.
        state_slots ``[num_slots]``: the backend's slot of its recurrent state, where there is one.
        block_table ``[num_slots, block_capacity]``.
    """

    def __init__(self, track_outputs: bool = False) -> None:
        self.track_outputs = track_outputs
        self.token_ids: Int32Array = np.zeros((_MIN_SLOTS, _MIN_TOKENS), np.int32)
        self.block_table: Int32Array = np.zeros((_MIN_SLOTS, _MIN_BLOCKS), np.int32)
        self.num_tokens: Int32Array = np.zeros(_MIN_SLOTS, np.int32)
        self.num_prompt_tokens: Int32Array = np.zeros(_MIN_SLOTS, np.int32)
        self.num_computed_tokens: Int32Array = np.zeros(_MIN_SLOTS, np.int32)
        self.num_draft_tokens: Int32Array = np.zeros(_MIN_SLOTS, np.int32)
        self.num_draft_computed: Int32Array = np.zeros(_MIN_SLOTS, np.int32)
        self.adapter_slots: Int32Array = np.full(_MIN_SLOTS, -1, np.int32)
        self.state_slots: Int32Array = np.full(_MIN_SLOTS, -1, np.int32)
        self.has_adapters = False
        self.has_states = False
        self.has_drafts = False
        self.states: dict[str, RequestState] = {}
        self.states_by_slot: dict[int, RequestState] = {}
        self.row_states: list[RequestState] = []
        self.row_slots: Int32Array = np.zeros(0, np.int32)
        self._row_of: dict[str, int] = {}
        self._free_slots: list[int] = []
        self._num_slots = 0
        self._is_consistent = True

    @property
    def num_rows(self) -> int:
        """Requests scheduled in this step."""
        return len(self.row_states)

    @property
    def req_ids(self) -> list[str]:
        """Ids in the order of rows."""
        return [state.req_id for state in self.row_states]

    @property
    def rows(self) -> Mapping[str, int]:
        """Row of every scheduled request (a live view)."""
        return self._row_of

    def row_of(self, req_id: str) -> int:
        """Row of a scheduled request."""
        return self._row_of[req_id]

    # ------------------------------------------------------------------ applying a step

    def apply(self, step: SchedulerOutput) -> tuple[BatchUpdate | None, list[RequestState]]:
        """Bring the mirror up to date with a step (core spec 3.2).

        Returns:
            How the rows changed, or None; and the states that are new.
        """
        removed = [] if self._is_consistent else self._recover()
        self._is_consistent = False
        for req_id in step.finished_req_ids:
            row = self._finish(req_id)
            if row >= 0:
                removed.append(row)
        scheduled = step.num_scheduled_tokens
        entering: list[RequestState] = []
        in_rows = len(self._row_of)
        num_kept = 0
        for data in step.scheduled_cached_reqs:
            row = self._row_of.get(data.req_id, -1)
            if row >= 0 and not data.resumed:
                num_kept += 1
        if num_kept != in_rows:
            resumed = {data.req_id for data in step.scheduled_cached_reqs if data.resumed}
            leaving = [r for r in self._row_of if r not in scheduled or r in resumed]
            removed.extend(self._row_of.pop(req_id) for req_id in leaving)
        for req_id, slot in step.state_moves.items():
            if req_id in self.states:
                self.state_slots[self.states[req_id].slot] = slot
        new_states = [self._add(data) for data in step.scheduled_new_reqs]
        self._update_cached(step.scheduled_cached_reqs, entering)
        entering.extend(new_states)
        self._write_drafts(step.scheduled_spec_decode_tokens)
        update = self._place(removed, entering) if removed or entering else None
        self._is_consistent = True
        return update, new_states

    def _recover(self) -> list[int]:
        """Repair what an interrupt in `apply` left: all requests leave the rows.

        Those of the interrupted step are finished with the next one; the others enter again.

        Returns:
            The rows that are free now: all of them.
        """
        self.states_by_slot = {state.slot: state for state in self.states.values()}
        self._free_slots = [s for s in range(self._num_slots) if s not in self.states_by_slot]
        self._row_of = {}
        return list(range(len(self.row_states)))

    def _finish(self, req_id: str) -> int:
        """Forget a request; returns the row it had, or -1."""
        state = self.states.pop(req_id, None)
        if state is None:
            return -1
        del self.states_by_slot[state.slot]
        heapq.heappush(self._free_slots, state.slot)
        return self._row_of.pop(req_id, -1)

    def _add(self, data: NewRequestData) -> RequestState:
        if self._free_slots:
            slot = heapq.heappop(self._free_slots)
        else:
            slot = self._num_slots
            self._num_slots += 1
        num_tokens = len(data.token_ids)
        self._reserve(slot + 1, num_tokens + 1, len(data.block_ids))
        lora = data.lora_request
        state = RequestState(
            data.req_id,
            slot,
            data.sampling_params,
            data.pooling_params,
            data.rng_key,
            0 if lora is None else lora.lora_int_id,
            mm_features=data.mm_features or [],
            prompt_embeds=data.prompt_embeds,
        )
        self.adapter_slots[slot] = -1
        self.state_slots[slot] = data.state_slot
        if data.req_id in self.states:  # left over from a step that was interrupted
            self._finish(data.req_id)
        self.states[data.req_id] = state
        self.states_by_slot[slot] = state
        self.token_ids[slot, :num_tokens] = data.token_ids
        self.num_tokens[slot] = num_tokens
        self.num_prompt_tokens[slot] = data.num_prompt_tokens
        self._hide_prompt(state)
        self.num_computed_tokens[slot] = data.num_computed_tokens
        self.num_draft_computed[slot] = data.num_computed_tokens
        self.append_blocks(state, data.block_ids)
        params = data.sampling_params
        if params is not None:
            state.wants_logprobs = params.num_logprobs is not None
        if self.track_outputs:
            state.output_token_ids = data.token_ids[data.num_prompt_tokens :]
        return state

    def _update_cached(self, cached: list[CachedRequestData], entering: list[RequestState]) -> None:
        if not cached:
            return
        states = self.states
        slots = np.fromiter((states[data.req_id].slot for data in cached), np.int32, len(cached))
        computed = [data.num_computed_tokens for data in cached]
        outputs = np.fromiter((data.num_output_tokens for data in cached), np.int32, len(cached))
        self.num_computed_tokens[slots] = computed
        known = self.num_prompt_tokens[slots] + outputs
        self._reserve(0, int(known.max()) + 2, 0)
        if (known < self.num_tokens[slots]).any():  # the scheduler cut what it was given
            for data in cached:
                del states[data.req_id].output_token_ids[data.num_output_tokens :]
            self.num_tokens[slots] = np.minimum(known, self.num_tokens[slots])
        for data in cached:
            if data.new_block_ids or data.resumed:
                state = states[data.req_id]
                if data.resumed:
                    self._resume(state, data)
                self.append_blocks(state, data.new_block_ids)
            if data.req_id not in self._row_of:
                entering.append(states[data.req_id])

    def _resume(self, state: RequestState, data: CachedRequestData) -> None:
        """A preempted request comes back: blocks and slot are replaced, its ids told anew."""
        state.num_blocks = 0
        self.state_slots[state.slot] = data.state_slot
        self.num_draft_computed[state.slot] = data.num_computed_tokens
        if data.all_token_ids is None:
            return
        num_tokens = len(data.all_token_ids)
        self._reserve(state.slot + 1, num_tokens + 1, 0)
        self.token_ids[state.slot, :num_tokens] = data.all_token_ids
        self.num_tokens[state.slot] = num_tokens
        self._hide_prompt(state)
        if self.track_outputs:
            num_prompt = int(self.num_prompt_tokens[state.slot])
            state.output_token_ids[:] = data.all_token_ids[num_prompt:]

    def _hide_prompt(self, state: RequestState) -> None:
        """A prompt of embeddings has no ids, whatever the scheduler counts in their place."""
        if state.prompt_embeds is not None:
            self.token_ids[state.slot, : len(state.prompt_embeds)] = NO_TOKEN

    def append_blocks(self, state: RequestState, block_ids: list[int]) -> None:
        """Add blocks to the end of a request's table."""
        end = state.num_blocks + len(block_ids)
        if end > self.block_table.shape[1]:
            self._reserve(0, 0, end)
        self.block_table[state.slot, state.num_blocks : end] = block_ids
        state.num_blocks = end

    def _write_drafts(self, scheduled: dict[str, list[int]]) -> None:
        """Put drafts behind the last known ids, for this step only."""
        if self.has_drafts:
            self.num_draft_tokens[:] = 0
        self.has_drafts = bool(scheduled)
        for req_id, drafts in scheduled.items():
            slot = self.states[req_id].slot
            start = int(self.num_tokens[slot])
            self._reserve(0, start + len(drafts) + 1, 0)
            self.token_ids[slot, start : start + len(drafts)] = drafts
            self.num_draft_tokens[slot] = len(drafts)

    # ------------------------------------------------------------------ rows

    def _place(self, removed: list[int], entering: list[RequestState]) -> BatchUpdate:
        """Give rows to the entering requests, lowest hole first, then close the holes (3.3.4)."""
        rows: list[RequestState | None] = list(self.row_states)
        holes = sorted(removed)
        for row in holes:
            rows[row] = None
        update = BatchUpdate(0)
        for i, state in enumerate(entering):
            if i < len(holes):
                row = holes[i]
                rows[row] = state
            else:
                row = len(rows)
                rows.append(state)
            update.added.append(self._added(row, state))
        holes = holes[len(entering) :]
        update.removed = list(holes)
        for hole in holes:
            while rows and rows[-1] is None:
                rows.pop()
            if hole >= len(rows):
                break
            last = len(rows) - 1
            rows[hole] = rows.pop()
            update.moved.append((last, hole, MoveDirectionality.UNIDIRECTIONAL))
        self.row_states = [state for state in rows if state is not None]
        self.row_slots = np.array([state.slot for state in self.row_states], np.int32)
        self._row_of = {state.req_id: row for row, state in enumerate(self.row_states)}
        update.batch_size = len(self.row_states)
        return update

    def _added(
        self, row: int, state: RequestState
    ) -> tuple[int, SamplingParams, list[int] | None, list[int]]:
        params = state.sampling_params or SamplingParams()
        if not self.track_outputs:
            return row, params, None, []
        if state.prompt_embeds is not None:
            return row, params, None, state.output_token_ids
        num_prompt = int(self.num_prompt_tokens[state.slot])
        prompt = self.token_ids[state.slot, :num_prompt].tolist()
        return row, params, prompt, state.output_token_ids

    # ------------------------------------------------------------------ arrays

    def append_sampled(self, slots: Int32Array, token_ids: Int32Array) -> None:
        """Add one sampled id to each of these slots."""
        positions = self.num_tokens[slots]
        self.token_ids[slots, positions] = token_ids
        self.num_tokens[slots] = positions + 1

    def append_run(self, slot: int, token_ids: list[int]) -> None:
        """Add several accepted ids to one slot."""
        start = int(self.num_tokens[slot])
        self.token_ids[slot, start : start + len(token_ids)] = token_ids
        self.num_tokens[slot] = start + len(token_ids)

    def _reserve(self, num_slots: int, num_tokens: int, num_blocks: int) -> None:
        """Grow to at least these sizes, by doubling. New memory is not touched until it is used."""
        old_slots, old_tokens = self.token_ids.shape
        old_blocks = self.block_table.shape[1]
        if num_slots <= old_slots and num_tokens <= old_tokens and num_blocks <= old_blocks:
            return
        slots = _grown(old_slots, num_slots)
        if slots != old_slots:
            self.num_tokens = _extended(self.num_tokens, slots)
            self.num_prompt_tokens = _extended(self.num_prompt_tokens, slots)
            self.num_computed_tokens = _extended(self.num_computed_tokens, slots)
            self.num_draft_tokens = _extended(self.num_draft_tokens, slots)
            self.num_draft_computed = _extended(self.num_draft_computed, slots)
            self.adapter_slots = _extended(self.adapter_slots, slots)
            self.state_slots = _extended(self.state_slots, slots)
        if slots != old_slots or num_tokens > old_tokens:
            self.token_ids = self._copied(self.token_ids, slots, _grown(old_tokens, num_tokens))
        if slots != old_slots or num_blocks > old_blocks:
            self.block_table = self._copied(self.block_table, slots, _grown(old_blocks, num_blocks))

    def _copied(self, old: Int32Array, num_slots: int, width: int) -> Int32Array:
        new = np.zeros((num_slots, width), np.int32)
        for state in self.states.values():
            slot = state.slot
            if slot < old.shape[0]:
                used = state.num_blocks
                if old is self.token_ids:
                    used = int(self.num_tokens[slot] + self.num_draft_tokens[slot])
                new[slot, :used] = old[slot, :used]
        return new


def _extended(old: Int32Array, size: int) -> Int32Array:
    new = np.zeros(size, np.int32)
    new[: len(old)] = old
    return new


def _grown(old: int, wanted: int) -> int:
    while old < wanted:
        old *= 2
    return old
