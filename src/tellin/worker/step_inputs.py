"""Arrays of one step, from the batch's arrays (core spec 3.4), without loops over tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from tellin.kernels.batch import StepBatch
from tellin.worker.input_batch import InputBatch

Int32Array = npt.NDArray[np.int32]


@dataclass
class StepInputs:
    """A step's batch for the backend, and which of its logits are sampled.

    ``sample_rows`` ``[num_sampling]`` are the batch rows that reach their last known id. Request i
    of them owns logits rows ``[sample_start[i], sample_start[i + 1])``: one per scheduled draft,
    and one. ``num_sample_logits`` counts them all; other wanted logits come after them.
    """

    step: StepBatch
    sample_rows: Int32Array
    sample_start: Int32Array
    num_sample_logits: int


def positions_of(query_start: Int32Array, computed: Int32Array, counts: Int32Array) -> Int32Array:
    """Position of every token: ``computed[row]`` plus its offset in its row."""
    total = int(query_start[-1])
    if total == len(counts):
        return computed.astype(np.int32)
    offsets = np.repeat(computed - query_start[:-1], counts)
    return np.asarray(np.arange(total, dtype=np.int32) + offsets, np.int32)


def build_step(
    batch: InputBatch,
    slots: Int32Array,
    computed: Int32Array,
    counts: Int32Array,
    logits_indices: Int32Array,
    block_size: int,
    *,
    is_target: bool = False,
) -> StepBatch:
    """The backend's batch: ``counts[i]`` tokens of each slot from position ``computed[i]``.

    A draft model's batch (not ``is_target``) is without the requests' adapters and states.
    """
    query_start = np.zeros(len(slots) + 1, np.int32)
    np.cumsum(counts, out=query_start[1:])
    positions = positions_of(query_start, computed, counts)
    capacity = batch.token_ids.shape[1]
    # Flat indices: 64 bits, since slots * capacity may pass 2^31.
    first = slots.astype(np.int64) * capacity
    flat = (first if len(positions) == len(slots) else np.repeat(first, counts)) + positions
    seq_lens = computed + counts
    num_blocks = -(-int(seq_lens.max()) // block_size) if len(slots) else 0
    return StepBatch(
        token_ids=batch.token_ids.ravel().take(flat),
        positions=positions,
        query_start_loc=query_start,
        seq_lens=seq_lens,
        block_table=np.ascontiguousarray(batch.block_table[slots, :num_blocks]),
        logits_indices=logits_indices,
        adapter_slots=batch.adapter_slots[slots] if is_target and batch.has_adapters else None,
        state_slots=batch.state_slots[slots] if is_target and batch.has_states else None,
    )


def with_saves(
    step: StepBatch, rows: Mapping[str, int], saves: Sequence[tuple[str, int, int]]
) -> StepBatch:
    """The step with those of `SchedulerOutput.state_saves` whose tokens it computes.

    Args:
        rows: which of the step's requests each id is.
    """
    kept = []
    for req_id, num_tokens, slot in saves:
        row = rows.get(req_id)
        if row is None:
            continue
        start, end = step.query_start_loc[row : row + 2].tolist()
        num_before = int(step.positions[start])
        if num_before < num_tokens <= num_before + end - start:
            kept.append((row, num_tokens, slot))
    if not kept:
        return step
    return replace(step, state_saves=np.array(sorted(kept), np.int32))


def build_inputs(
    batch: InputBatch,
    computed: Int32Array,
    counts: Int32Array,
    extra_logits: list[Int32Array],
    block_size: int,
    excluded: list[int],
) -> StepInputs:
    """Inputs of a whole step.

    Args:
        batch: after `InputBatch.apply`.
        computed: ``[num_rows]`` tokens computed before this pass.
        counts: ``[num_rows]`` tokens of this pass.
        extra_logits: token rows whose logits are wanted besides the sampled ones.
        block_size: tokens per KV block.
        excluded: batch rows that are not to be sampled.
    """
    slots = batch.row_slots
    known = batch.num_tokens[slots]
    seq_lens = computed + counts
    ends = np.cumsum(counts, dtype=np.int32)
    sampling = seq_lens >= known
    sampling[excluded] = False
    sample_rows = np.flatnonzero(sampling).astype(np.int32)
    if batch.has_drafts:
        per_row = seq_lens[sample_rows] - known[sample_rows] + 1
        sample_start = np.zeros(len(sample_rows) + 1, np.int32)
        np.cumsum(per_row, out=sample_start[1:])
        within = np.arange(sample_start[-1], dtype=np.int32) - np.repeat(sample_start[:-1], per_row)
        sampled = np.repeat(ends[sample_rows] - per_row, per_row) + within
    else:
        sample_start = np.arange(len(sample_rows) + 1, dtype=np.int32)
        sampled = ends[sample_rows] - 1
    logits_indices = sampled.astype(np.int32)
    if extra_logits:
        logits_indices = np.concatenate([logits_indices, *extra_logits])
    step = build_step(batch, slots, computed, counts, logits_indices, block_size, is_target=True)
    return StepInputs(step, sample_rows, sample_start, len(sampled))
