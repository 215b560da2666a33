"""From hidden states to what a pooling request asked for: one vector, one per token, or scores.

Owns the rows that unfinished prompts have left so far, and the arithmetic of pooling: a fixed order
over the request's own rows in float64, so that a result does not depend on the batch. It knows no
schedule: which rows a step has is told, and what cannot be pooled is that request's error alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tellin.config import PoolerConfig
from tellin.sampling_params import PoolingParams
from tellin.worker.backends import Backend, hidden_rows_are_tokens
from tellin.worker.classifier import ClassifierHead
from tellin.worker.dense_layers import DenseLayers
from tellin.worker.input_batch import InputBatch, RequestState

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]

TOKEN_TYPES_KEY = "compressed_token_type_ids"
"""In ``PoolingParams.extra_kwargs``."""
EMBEDDING_TASKS = ("embed", "token_embed")
_TINY_NORM = 1e-12
"""Divisor of an embedding of length 0, which stays 0."""


def token_types(
    params: Sequence[PoolingParams | None], computed: Int32Array, counts: Int32Array
) -> Int32Array | None:
    """``[num_tokens]`` which text of its pair each row of a step belongs to; None = no pairs.

    Args:
        params: of each request of the step.
        computed, counts: ``[num_requests]`` tokens before this step, and in it.
    """
    starts = [None if one is None else _second_text_start(one) for one in params]
    if not any(start is not None for start in starts):
        return None
    types = np.zeros(int(counts.sum()), np.int32)
    ends = np.cumsum(counts)
    for start, before, count, end in zip(starts, computed, counts, ends, strict=True):
        if start is not None:
            types[end - count + max(start - before, 0) : end] = 1
    return types


def _second_text_start(params: PoolingParams) -> int | None:
    """Position from which tokens have type 1, where the shell has put it; None = all have 0."""
    start: int | None = (params.extra_kwargs or {}).get(TOKEN_TYPES_KEY)
    return start


@dataclass(frozen=True)
class PoolRows:
    """Rows of a step whose hidden states one request needs.

    ``token_rows`` ``[n]`` are rows of the step; ``num_prompt``: tokens of the prompt, which
    ends with these rows if ``is_last``.
    """

    state: RequestState
    token_rows: Int32Array
    is_last: bool
    num_prompt: int


class Pooler:
    """Pools the requests of one worker."""

    def __init__(
        self,
        config: PoolerConfig,
        classifier: ClassifierHead | None = None,
        dense: DenseLayers | None = None,
    ) -> None:
        self.config = config
        self.dense = dense
        self.classifier = classifier
        self._earlier: dict[str, list[Float32Array]] = {}

    @property
    def tasks(self) -> tuple[str, ...]:
        """Pooling tasks of the model: a cross-encoder, with one label, scores pairs as well."""
        if self.classifier is None:
            return EMBEDDING_TASKS
        return ("classify", "score") if self.classifier.num_labels == 1 else ("classify",)

    def step_rows(
        self, batch: InputBatch, computed: Int32Array, counts: Int32Array
    ) -> list[PoolRows]:
        """Rows of a step that its pooling requests need, in the order of the batch."""
        wanted = []
        starts = np.cumsum(counts, dtype=np.int32) - counts
        for row, state in enumerate(batch.row_states):
            if state.pooling_params is None or state.error is not None:
                continue
            num_prompt = int(batch.num_prompt_tokens[state.slot])
            rows = self.rows(
                state, int(starts[row]), int(computed[row]), int(counts[row]), num_prompt
            )
            if rows is not None:
                wanted.append(rows)
        return wanted

    def pool_step(
        self, wanted: list[PoolRows], backend: Backend, first_logits_row: int
    ) -> dict[str, Float32Array]:
        """Results by request, from the hidden states of the pass that has just run.

        Args:
            first_logits_row: of these rows in the pass, if `Backend.hidden` has rows of logits.
        """
        hidden = backend.hidden()
        by_token = hidden_rows_are_tokens(backend)
        row, results = first_logits_row, {}
        for rows in wanted:
            # A request's rows are consecutive, in either numbering.
            count = len(rows.token_rows)
            first = int(rows.token_rows[0]) if by_token else row
            row += count
            result = self.pool(rows, hidden[first : first + count])
            if result is not None:
                results[rows.state.req_id] = result
        return results

    def rows(
        self, state: RequestState, first_row: int, computed: int, count: int, num_prompt: int
    ) -> PoolRows | None:
        """What a request needs of a step; None if nothing.

        Args:
            first_row: of its ``count`` rows in the step.
            computed: tokens of its prompt that were computed before.
            num_prompt: tokens of its prompt.
        """
        params = state.pooling_params
        assert params is not None
        if params.task not in self.tasks:
            state.error = f"this model cannot do the pooling task {params.task!r}"
            return None
        if computed == 0:  # also when it was preempted and begins anew
            self.forget(state.req_id)
        is_last = computed + count >= num_prompt
        wanted = np.arange(first_row, first_row + count, dtype=np.int32)
        by_token = params.task == "token_embed"
        if not by_token and self.config.pooling_type == "LAST":
            return PoolRows(state, wanted[-1:], True, num_prompt) if is_last else None
        is_whole = is_last and computed == 0
        if not by_token and not is_whole:
            state.error = (
                f"{self.config.pooling_type} pooling needs the whole prompt in one step, but "
                f"{computed} of its {num_prompt} tokens were computed before"
            )
            return None
        if not by_token and self.config.pooling_type == "CLS":
            wanted = wanted[:1]
        return PoolRows(state, wanted, is_last, num_prompt)

    def pool(self, rows: PoolRows, hidden: Float32Array) -> Float32Array | None:
        """Take a request's hidden states of a step; its result if the prompt is complete.

        Args:
            hidden: ``[n, hidden_size]``, one for each of ``rows.token_rows``; not kept.

        Returns:
            ``[dimensions]`` for embed, ``[num_tokens, dimensions]`` for token_embed,
            ``[num_labels]`` for classify and score.
        """
        state, params = rows.state, rows.state.pooling_params
        assert params is not None
        if params.task == "token_embed":
            chunks = self._earlier.setdefault(state.req_id, [])
            chunks.append(hidden.copy())
            if not rows.is_last:
                return None
            pooled = np.concatenate(self._earlier.pop(state.req_id)).astype(np.float64)
            if len(pooled) != rows.num_prompt:
                state.error = (
                    f"token_embed needs all {rows.num_prompt} tokens of the prompt, but "
                    f"{rows.num_prompt - len(pooled)} came from the prefix cache"
                )
                return None
        elif self.config.pooling_type == "MEAN":
            pooled = hidden.sum(axis=0, dtype=np.float64) / len(hidden)
        else:
            pooled = hidden[-1].astype(np.float64)
        if self.dense is not None and params.task == "embed":
            pooled = self.dense(pooled)
        result = self._finish(pooled, params)
        if not np.isfinite(result).all():
            state.error = "the model gave NaN or infinite hidden states for this request"
            return None
        return result

    def forget(self, req_id: str) -> None:
        """Drop what an ended request has left."""
        self._earlier.pop(req_id, None)

    def _finish(self, pooled: npt.NDArray[np.float64], params: PoolingParams) -> Float32Array:
        """Cut, then scale: a shortened vector has length 1 too. Of a classifier: its scores."""
        wanted = params.use_activation
        activate = self.config.use_activation if wanted is None else wanted
        if self.classifier is not None:
            return self.classifier(pooled, activate).astype(np.float32)
        if params.dimensions is not None:
            pooled = pooled[..., : params.dimensions]
        if activate:
            norms = np.sqrt(np.square(pooled).sum(axis=-1, keepdims=True))
            pooled = pooled / np.maximum(norms, _TINY_NORM)
        return pooled.astype(np.float32)
