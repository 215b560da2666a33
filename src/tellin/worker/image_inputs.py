"""`ImageInputs`: which rows of a step are pictures', and what the encoder made of them.

Encoder outputs are kept by identifier from the step that encodes them until the scheduler frees
them; it decides what is encoded when and what stays. A chunk takes the rows that fall into it, so a
picture may be spread over several steps.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from tellin.protocol import MultiModalFeature
from tellin.step_protocol import SchedulerOutput
from tellin.worker.image_encoder import ImageEncoder
from tellin.worker.input_batch import RequestState

logger = logging.getLogger("tellin.worker")

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]


class ImageInputs:
    """Encoder outputs of live pictures."""

    def __init__(self, encoder: ImageEncoder) -> None:
        self.encoder: ImageEncoder | None = encoder
        self._outputs: dict[str, Float32Array] = {}

    def apply(self, step: SchedulerOutput, states: Mapping[str, RequestState]) -> None:
        """Drop what the step frees, then encode what it lists.

        A picture that cannot be encoded is its request's error.
        """
        for identifier in step.free_encoder_mm_hashes:
            self._outputs.pop(identifier, None)
        for req_id, indices in step.scheduled_encoder_inputs.items():
            state = states[req_id]
            for index in indices:
                feature = state.mm_features[index]
                try:
                    self._outputs[feature.identifier] = self._encode(feature)
                except Exception as error:
                    logger.exception("an image of request %s could not be encoded", req_id)
                    state.error = f"image {index} of the prompt could not be encoded: {error}"

    def gather(
        self, states: Sequence[RequestState], computed: Int32Array, counts: Int32Array
    ) -> tuple[Float32Array, Int32Array] | None:
        """Rows of a step that are pictures'.

        Args:
            states: the step's requests.
            computed: tokens of each computed before the step.
            counts: tokens of each in the step.

        Returns:
            ``embeds`` and ``embed_rows`` of `StepBatch`, or None.
        """
        values: list[Float32Array] = []
        rows: list[Int32Array] = []
        start = 0
        for state, first, count in zip(states, computed.tolist(), counts.tolist(), strict=True):
            for feature in state.mm_features:
                for position, row, length in feature.embeds_in(first, first + count):
                    output = self._outputs.get(feature.identifier)
                    if output is None:
                        state.error = state.error or "an image was not encoded before its use"
                        continue
                    values.append(output[row : row + length])
                    at = start + position - first
                    rows.append(np.arange(at, at + length, dtype=np.int32))
            start += count
        return (np.concatenate(values), np.concatenate(rows)) if rows else None

    def release(self) -> None:
        """Give the encoder's weights back."""
        if self.encoder is not None:
            self.encoder.close()
        self.encoder = None

    def _encode(self, feature: MultiModalFeature) -> Float32Array:
        if self.encoder is None:
            raise RuntimeError("the image encoder is not loaded; call wake_up first")
        if feature.data is None:
            raise RuntimeError("its pixels did not come with it")
        output = self.encoder.encode(feature.data)
        if len(output) != feature.num_embeds:
            raise RuntimeError(
                f"the encoder made {len(output)} rows of it, but the prompt has "
                f"{feature.num_embeds} places"
            )
        return output
