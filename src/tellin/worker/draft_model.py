"""Drafting with a backend of its own: a second, smaller model of the same vocabulary (5.5.2).

Owns that backend and its KV pool, which has a block for every block of the target's pool, so both
share the block tables. The draft model catches up with the known ids when it is asked to
propose, then feeds its own guesses one by one. What it holds of a position is valid only while the
id there is the one it was fed: a rejected draft's position is computed again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tellin.exceptions import EngineError, InvalidParameterError, UnsupportedFeatureError
from tellin.kernels.batch import StepBatch
from tellin.kernels.sampler import Sampler, SampleRows
from tellin.sampling_params import SamplingParams
from tellin.worker.backends import Backend, block_maxima, open_backend
from tellin.worker.input_batch import InputBatch
from tellin.worker.spec_decode import Drafter
from tellin.worker.step_inputs import build_step

if TYPE_CHECKING:
    from tellin.config import EngineConfig

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]


class BackendDrafter(Drafter):
    """Drafts greedily with a backend of its own, whose KV blocks are those of the target.

    Args:
        batch: the target's batch.
        max_model_len: longest sequence that both take.
        open_backend: makes the backend; called again after `release`.
        num_ids: ids the vocabularies share.
        block_size: tokens per KV block.
    """

    def __init__(
        self,
        batch: InputBatch,
        max_model_len: int,
        open_backend: Callable[[], Backend],
        num_ids: int,
        block_size: int,
    ) -> None:
        super().__init__(batch, max_model_len)
        self._open = open_backend
        self._backend: Backend | None = open_backend()
        self._block_size = block_size
        self._sampler = Sampler(num_ids)
        self._sampler.set_slot(0, SamplingParams(temperature=0.0), 0)

    # ------------------------------------------------------------------ memory

    def kv_bytes_per_block(self) -> int:
        return self._live().kv_bytes_per_block()

    def init_kv_cache(self, num_blocks: int) -> None:
        self._live().init_kv_cache(num_blocks)

    def copy_kv_blocks(self, src_dst_pairs: Sequence[tuple[int, int]]) -> None:
        self._live().copy_kv_blocks(src_dst_pairs)

    def free_kv_cache(self) -> None:
        self._live().free_kv_cache()

    def release(self) -> None:
        backend, self._backend = self._backend, None
        if backend is not None:
            backend.close()

    def reopen(self, target: Backend) -> None:
        if self._backend is None:
            self._backend = self._open()

    def _live(self) -> Backend:
        if self._backend is None:
            raise EngineError("the weights that draft are not loaded; call wake_up first")
        return self._backend

    # ------------------------------------------------------------------ drafting

    def _free_slots(self, slots: Int32Array) -> Int32Array:
        """Drafts for which the blocks have room: the last one is never written."""
        states = self.batch.states_by_slot
        blocks = [states[slot].num_blocks for slot in slots.tolist()]
        capacity = np.array(blocks, np.int32) * self._block_size
        return capacity - self.batch.num_tokens[slots] + 1

    def _single(self, slots: Int32Array, positions: Int32Array, ids: Int32Array) -> StepBatch:
        """One id per slot."""
        count = len(slots)
        num_blocks = int(positions.max()) // self._block_size + 1
        return StepBatch(
            ids,
            positions.astype(np.int32),
            np.arange(count + 1, dtype=np.int32),
            (positions + 1).astype(np.int32),
            np.ascontiguousarray(self.batch.block_table[slots, :num_blocks]),
            np.arange(count, dtype=np.int32),
        )

    def _argmax(self, logits: Float32Array) -> Int32Array:
        """Best ids by the logits of the last pass."""
        count = len(logits)
        zeros = np.zeros(count, np.int32)
        rows = SampleRows(
            zeros,
            np.arange(count, dtype=np.int32),
            zeros,
            zeros,
            np.zeros((1, 1), np.int32),
            maxima=block_maxima(self._live()),
        )
        return self._sampler.sample(logits, rows).tokens


class DraftModelDrafter(BackendDrafter):
    """Greedy drafts of a draft model.

    Args:
        max_tokens: most tokens of one pass while catching up; the others: see `BackendDrafter`.
    """

    def __init__(
        self,
        batch: InputBatch,
        max_model_len: int,
        open_draft: Callable[[], Backend],
        num_ids: int,
        block_size: int,
        max_tokens: int,
    ) -> None:
        super().__init__(batch, max_model_len, open_draft, num_ids, block_size)
        if self._live().state_bytes_per_slot():
            self.release()
            raise UnsupportedFeatureError(
                "speculative_config.model has recurrent states, which cannot be taken back when a "
                "draft is rejected; choose a draft model without them"
            )
        self._max_tokens = max_tokens

    def propose(self, slots: Int32Array, num_drafts: Int32Array) -> list[list[int]]:
        batch = self.batch
        room = np.minimum(self.limits(slots, num_drafts), self._free_slots(slots))
        drafts: list[list[int]] = [[] for _ in slots]
        rows = np.flatnonzero(room > 0)
        if len(rows) == 0:
            return drafts
        slots = slots[rows]
        known = batch.num_tokens[slots]
        ids = self._argmax(self._catch_up(slots, known))
        step = 0
        while True:
            for row, token in zip(rows.tolist(), ids.tolist(), strict=True):
                drafts[row].append(token)
            step += 1
            alive = np.flatnonzero(room[rows] > step)
            if len(alive) == 0:
                return drafts
            rows, slots, known, ids = rows[alive], slots[alive], known[alive], ids[alive]
            ids = self._argmax(self._live().forward(self._single(slots, known + step - 1, ids)))
            batch.num_draft_computed[slots] = known + step

    def _catch_up(self, slots: Int32Array, known: Int32Array) -> Float32Array:
        """Feed every known id that was not fed yet; logits after each slot's last one."""
        batch = self.batch
        computed = np.minimum(batch.num_draft_computed[slots], known - 1)
        while True:
            missing = known - computed
            before = np.cumsum(missing) - missing
            counts = np.clip(self._max_tokens - before, 0, missing).astype(np.int32)
            if counts.sum() == missing.sum():
                break
            some = np.flatnonzero(counts)
            empty = np.zeros(0, np.int32)
            self._live().forward(
                build_step(
                    batch, slots[some], computed[some], counts[some], empty, self._block_size
                )
            )
            computed = computed + counts
            # At least the last id stays for the pass that gives logits.
            computed = np.minimum(computed, known - 1)
        ends = np.cumsum(missing, dtype=np.int32) - 1
        step = build_step(batch, slots, computed, missing, ends, self._block_size)
        batch.num_draft_computed[slots] = known
        return self._live().forward(step)


def make_draft_model(config: EngineConfig, batch: InputBatch) -> DraftModelDrafter:
    """Open the draft model that ``config.speculative_config.model`` names.

    Raises:
        InvalidParameterError: its vocabulary is not the target's.
        LoadError: it cannot be opened.
    """
    from tellin import loading

    spec, model = config.speculative_config, config.model_config
    if spec is None or spec.model is None:
        raise InvalidParameterError(
            "speculative_config.method 'draft_model' needs a model", parameter="speculative_config"
        )
    path = loading.resolve_model(spec.model, config.settings)
    draft = loading.open_metadata(path)
    if draft.tokenizer_size != model.tokenizer_size:
        raise InvalidParameterError(
            f"draft model {spec.model!r} has {draft.tokenizer_size} token ids, but the model has "
            f"{model.tokenizer_size}; both must use the same vocabulary",
            parameter="speculative_config",
            value=spec.model,
        )
    return DraftModelDrafter(
        batch,
        min(draft.context_length, config.scheduler_config.max_model_len),
        lambda: open_backend(dataclasses.replace(config, lora_config=None), path),
        min(model.tokenizer_size, draft.vocab_size, model.vocab_size),
        config.cache_config.block_size,
        config.scheduler_config.max_num_batched_tokens,
    )
