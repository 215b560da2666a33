"""Drafting with the layer that the model itself brings for it (multi-token prediction).

The layer reads the target's hidden state of a position together with the next id, so it reads in
the step that computes the position, all positions alike: what it holds follows the target's cache
block by block, and a prefix that is found there is found here. At position p it has been given the
id of p + 1: of a block that requests share, the last position may stem from a text that went on
otherwise, which makes drafts worse by very little. Of a picture it sees what the model has made of
it, and its placeholders as ids. A rejected draft's position is computed again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tellin.exceptions import UnsupportedFeatureError
from tellin.kernels.batch import StepBatch
from tellin.kernels.native import NativeBackend
from tellin.models.parts import DRAFTS_BEFORE_NORM
from tellin.worker.backends import backend_class, backend_options
from tellin.worker.draft_model import BackendDrafter
from tellin.worker.input_batch import InputBatch
from tellin.worker.rope_positions import with_rope
from tellin.worker.step_inputs import build_step

if TYPE_CHECKING:
    from tellin.config import EngineConfig
    from tellin.worker.backends import Backend

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]


class PredictorDrafter(BackendDrafter):
    """Greedy drafts of the model's own layer; all after the first by its own hidden states.

    Args:
        target: the model's backend.
        open_layer: makes the layer's, given the model's; the others: see `BackendDrafter`.
    """

    needs_hidden = True

    def __init__(
        self,
        batch: InputBatch,
        max_model_len: int,
        target: Backend,
        open_layer: Callable[[Backend], Backend],
        num_ids: int,
        block_size: int,
    ) -> None:
        self._target = target
        super().__init__(
            batch, max_model_len, lambda: open_layer(self._target), num_ids, block_size
        )
        self._rows: tuple[Int32Array, StepBatch, Float32Array] | None = None

    def reopen(self, target: Backend) -> None:
        self._target = target
        super().reopen(target)

    def follow(self, slots: Int32Array, step: StepBatch, hidden: Float32Array) -> None:
        """The target has computed a step of these slots; `propose` reads it.

        Args:
            slots: ``[num_requests]``.
            step: what the target ran; read before the next one.
            hidden: ``[num_tokens, hidden_size]``, a view that the target's next pass overwrites.
        """
        self._rows = slots, step, hidden

    def propose(self, slots: Int32Array, num_drafts: Int32Array) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in slots]
        room = np.minimum(self.limits(slots, num_drafts), self._free_slots(slots) + 1)
        rows = np.flatnonzero(room > 0)
        slots = slots[rows]
        logits = self._read(slots)
        if len(rows) == 0:
            return drafts
        known, ids = self.batch.num_tokens[slots], self._argmax(logits)
        step = 0
        while True:
            for row, token in zip(rows.tolist(), ids.tolist(), strict=True):
                drafts[row].append(token)
            step += 1
            alive = np.flatnonzero(room[rows] > step)
            if len(alive) == 0:
                return drafts
            hidden = self._live().hidden()[alive]
            rows, slots, known, ids = rows[alive], slots[alive], known[alive], ids[alive]
            positions = known + (step - 2)
            single = self._single(slots, positions, ids)
            states = [self.batch.states_by_slot[slot] for slot in slots.tolist()]
            single = with_rope(single, states, positions, np.ones_like(positions))
            ids = self._argmax(self._live().forward(_with_hidden(single, hidden)))

    def _read(self, wanted: Int32Array) -> Float32Array:
        """Read what the target has computed; logits after the last position of ``wanted`` slots.

        Rows of rejected drafts are left out, and the last position of a request that got no id.
        """
        if self._rows is None:  # the step had no tokens
            return np.zeros((0, 0), np.float32)
        (slots, step, hidden), self._rows = self._rows, None
        starts = step.positions[step.query_start_loc[:-1]]
        counts = np.diff(step.query_start_loc)
        kept = np.minimum(counts, self.batch.num_tokens[slots] - 1 - starts)
        rope = step.rope_positions
        if (kept < counts).any():
            within = np.arange(len(step.positions)) - np.repeat(step.query_start_loc[:-1], counts)
            is_kept = within < np.repeat(kept, counts)
            hidden = hidden[is_kept]
            rope = None if rope is None else np.ascontiguousarray(rope[:, is_kept])
            some = kept > 0
            slots, starts, kept = slots[some], starts[some], kept[some]
        if len(slots) == 0:
            return np.zeros((0, 0), np.float32)
        ends = np.zeros(len(self.batch.num_tokens), np.int32)
        ends[slots] = np.cumsum(kept) - 1
        # The ids are those one further on.
        following = build_step(
            self.batch, slots, starts + 1, kept.astype(np.int32), ends[wanted], self._block_size
        )
        own = dataclasses.replace(
            following,
            positions=following.positions - 1,
            seq_lens=following.seq_lens - 1,
            rope_positions=rope,
        )
        return self._live().forward(_with_hidden(own, hidden))


def _with_hidden(step: StepBatch, hidden: Float32Array) -> StepBatch:
    rows = np.arange(len(hidden), dtype=np.int32)
    return dataclasses.replace(step, embeds=np.ascontiguousarray(hidden), embed_rows=rows)


def make_predictor(config: EngineConfig, batch: InputBatch, target: Backend) -> PredictorDrafter:
    """Open the layer of ``config.model_config`` that predicts further tokens.

    It uses the threads of ``target``, and the output matrix as it is packed there.

    Raises:
        UnsupportedFeatureError: the model has none, or is to pool too and gives it other states.
        UnsupportedModelError, ModelLoadError: it does not run here, or is damaged.
    """
    from tellin import loading, models

    model = config.model_config
    if model.pooler_config is not None and target.plan.architecture in DRAFTS_BEFORE_NORM:  # type: ignore[attr-defined]
        raise UnsupportedFeatureError(
            "speculative_config.method='mtp' does not go with runner='both' for this model: its "
            "layer drafts from states before the last norm, and what is pooled comes after it"
        )

    def open_layer(target: Backend) -> Backend:
        options = backend_options(config)
        if isinstance(target, NativeBackend):
            options["beside"] = target
        source = loading.open_predictor(model.path)
        try:
            plan = models.build_predictor(source, max_model_len=model.max_model_len)
            backend: Backend = backend_class(model.backend)(plan, **options)
        finally:
            source.release_pages()
        return backend

    return PredictorDrafter(
        batch,
        config.scheduler_config.max_model_len,
        target,
        open_layer,
        min(model.tokenizer_size or model.vocab_size, model.vocab_size),
        config.cache_config.block_size,
    )
