"""Rows of a step that are given instead of looked up: of pictures, and of prompts of embeddings.

Both go to the backend as one array. A prompt of embeddings has them at all its positions, a prompt
with pictures where the encoder's output belongs. What a row is does not depend on the chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from tellin.kernels.batch import StepBatch
from tellin.models.plan.ir import Embed, Plan
from tellin.worker.backends import Backend
from tellin.worker.image_inputs import ImageInputs
from tellin.worker.input_batch import NO_TOKEN, RequestState

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]


Given = tuple[Float32Array, Int32Array]
"""``embeds`` and ``embed_rows`` of `StepBatch`."""


class GivenRows:
    """Gathers a step's given rows.

    ``images`` makes those of pictures; ``takes_embeds``: prompts may be embeddings.
    """

    def __init__(self, images: ImageInputs | None, takes_embeds: bool) -> None:
        self.images = images
        self._takes_embeds = takes_embeds
        self._scale: float | None = None
        self._width: int | None = None

    def gather(
        self,
        states: Sequence[RequestState],
        computed: Int32Array,
        counts: Int32Array,
        backend: Backend,
    ) -> Given | None:
        """Rows that are given, in ascending order; a picture that fails is its request's error.

        Args:
            states: the step's requests.
            computed: tokens of each computed before the step.
            counts: tokens of each in the step.
            backend: that will run it.
        """
        pairs: list[Given] = []
        if self.images is not None:
            found = self.images.gather(states, computed, counts)
            if found is not None:
                pairs.append(found)
        if self._takes_embeds:
            pairs += self._of_prompts(states, computed, counts, backend)
        if not pairs:
            return None
        embeds = np.concatenate([values for values, _ in pairs])
        rows = np.concatenate([rows for _, rows in pairs])
        order = np.argsort(rows, kind="stable")
        return np.ascontiguousarray(embeds[order]), rows[order]

    def _of_prompts(
        self,
        states: Sequence[RequestState],
        computed: Int32Array,
        counts: Int32Array,
        backend: Backend,
    ) -> list[Given]:
        found: list[Given] = []
        start = 0
        for state, first, count in zip(states, computed.tolist(), counts.tolist(), strict=True):
            if state.prompt_embeds is not None and first < len(state.prompt_embeds):
                values = state.prompt_embeds[first : first + count]
                scale = self._find_scale(backend)
                if scale != 1.0:
                    with np.errstate(over="ignore"):  # ends the request, by its logits, alone
                        values = values * np.float32(scale)
                missing = self._given_width(backend) - values.shape[1]
                if missing:  # what only pictures add to later layers
                    values = np.pad(values, ((0, 0), (0, missing)))
                found.append((values, np.arange(start, start + len(values), dtype=np.int32)))
            start += count
        return found

    def _given_width(self, backend: Backend) -> int:
        if self._width is None:
            plan: Plan = backend.plan  # type: ignore[attr-defined]
            self._width = plan.given_width
        return self._width

    def _find_scale(self, backend: Backend) -> float:
        if self._scale is None:
            plan: Plan = backend.plan  # type: ignore[attr-defined]
            scales = (op.given_scale for op in plan.ops if isinstance(op, Embed))
            self._scale = next(scales, 1.0)
        return self._scale


def with_given(step: StepBatch, given: Given | None) -> StepBatch:
    """The step, which was made of ids, with these rows in the place of some of them."""
    if given is None:
        return step
    token_ids = step.token_ids
    token_ids[token_ids == NO_TOKEN] = 0  # read by nobody, but a backend wants ids of its table
    return replace(step, embeds=given[0], embed_rows=given[1])
