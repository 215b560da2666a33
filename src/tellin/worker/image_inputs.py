"""`ImageInputs`: which rows of a step are pictures', and what the encoder made of them.

The scheduler says from when to when a picture's rows are kept, by identifier. A chunk takes those
that fall into it, so a picture may be spread over several steps; a tile is encoded when the first
of its rows is needed, and tiles that a prefix-cache hit covers never are.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tellin.exceptions import EngineError
from tellin.protocol import MultiModalFeature
from tellin.step_protocol import SchedulerOutput
from tellin.trace import MAIN_THREAD, Span
from tellin.worker.image_encoder import ImageEncoder
from tellin.worker.input_batch import RequestState

ENCODE_IMAGES = "encode images"
"""Name of the phase in profiles."""

logger = logging.getLogger("tellin.worker")

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]


@dataclass
class _Output:
    """What is known of a picture's rows, ``[num_embeds, row_width]``: those of ``done`` tiles."""

    rows: Float32Array
    starts: Int32Array
    """``[num_tiles + 1]``: tile t has the rows from ``starts[t]`` to ``starts[t + 1]``."""
    done: list[bool]


class ImageInputs:
    """Encoder outputs of live pictures."""

    def __init__(self, encoder: ImageEncoder) -> None:
        self.encoder: ImageEncoder | None = encoder
        self._outputs: dict[str, _Output] = {}
        self._spans: list[Span] | None = None

    def set_profile(self, is_on: bool) -> list[Span]:
        """Start to note when tiles are encoded, or stop: then what was noted, one span a call."""
        spans, self._spans = self._spans, [] if is_on else None
        return spans or []

    def apply(self, step: SchedulerOutput, states: Mapping[str, RequestState]) -> None:
        """Drop what the step frees, then make room for what it lists.

        A picture that does not fit its places is its request's error.
        """
        for identifier in step.free_encoder_mm_hashes:
            self._outputs.pop(identifier, None)
        for req_id, indices in step.scheduled_encoder_inputs.items():
            state = states[req_id]
            for index in indices:
                feature = state.mm_features[index]
                try:
                    self._outputs[feature.identifier] = self._new(feature)
                except (EngineError, ValueError) as error:
                    state.error = f"image {index} of the prompt cannot be encoded: {error}"

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
                    try:
                        values.append(self._rows(feature, row, row + length))
                    except Exception as error:
                        if state.error is None:
                            logger.exception("an image of request %s failed", state.req_id)
                            state.error = f"an image of the prompt could not be encoded: {error}"
                        continue
                    at = start + position - first
                    rows.append(np.arange(at, at + length, dtype=np.int32))
            start += count
        return (np.concatenate(values), np.concatenate(rows)) if rows else None

    def release(self) -> None:
        """Give the encoder's weights back."""
        if self.encoder is not None:
            self.encoder.close()
        self.encoder = None

    def _new(self, feature: MultiModalFeature) -> _Output:
        encoder = self._live()
        if feature.data is None:
            raise EngineError("its pixels did not come with it")
        encoder.check(feature.data, feature.shapes)
        sizes = encoder.rows_of_tiles(feature.data, feature.shapes)
        count = sum(sizes)
        if count != feature.num_embeds:
            raise EngineError(
                f"the encoder makes {count} rows of it, but the prompt has "
                f"{feature.num_embeds} places"
            )
        rows = np.empty((count, encoder.hparams.row_width), np.float32)
        starts = np.cumsum([0, *sizes], dtype=np.int32)
        return _Output(rows, starts, [False] * len(sizes))

    def _rows(self, feature: MultiModalFeature, first: int, end: int) -> Float32Array:
        """Rows ``[first, end)`` of a picture; encodes the tiles of which they are the first."""
        output = self._outputs.get(feature.identifier)
        if output is None:
            raise EngineError("it was not scheduled to be encoded before its use")
        starts = output.starts
        first_tile = int(np.searchsorted(starts, first, side="right")) - 1
        tiles = range(first_tile, int(np.searchsorted(starts, end, side="left")))
        missing = [tile for tile in tiles if not output.done[tile]]
        if missing:
            low, high = missing[0], missing[-1] + 1
            begin = time.monotonic_ns()
            shapes = None if feature.shapes is None else feature.shapes[low:high]
            output.rows[starts[low] : starts[high]] = self._live().encode(
                feature.data[low:high], shapes
            )
            if self._spans is not None:
                took = time.monotonic_ns() - begin
                self._spans.append(Span(ENCODE_IMAGES, MAIN_THREAD, begin, took))
            output.done[low:high] = [True] * (high - low)
        return output.rows[first:end]

    def _live(self) -> ImageEncoder:
        if self.encoder is None:
            raise EngineError("the image encoder is not loaded; call wake_up first")
        return self.encoder
