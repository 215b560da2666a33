"""How far tokens of prompts with pictures see, in models where a picture's rows see each other.

Text sees what is before it, as ever; a row of a picture sees its whole part of the picture too,
which the scheduler keeps in one step. So what a row sees is a function of the prompt alone.

Source: Gemma Team 2025 (Gemma 3), section 2.1; masks of transformers 5.24.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from tellin.kernels.batch import StepBatch
from tellin.protocol import MultiModalFeature
from tellin.worker.input_batch import RequestState

Int32Array = npt.NDArray[np.int32]


def with_seen_ends(
    step: StepBatch, states: Sequence[RequestState], computed: Int32Array, counts: Int32Array
) -> StepBatch:
    """The step with `StepBatch.seen_ends`, if rows of pictures are in it.

    Args:
        states: the step's requests.
        computed: tokens of each computed before the step.
        counts: tokens of each in the step.
    """
    ends: Int32Array | None = None
    row = 0
    for state, first, count in zip(states, computed.tolist(), counts.tolist(), strict=True):
        for feature in state.mm_features:
            for position, _, length in feature.embeds_in(first, first + count):
                if ends is None:
                    ends = step.positions + np.int32(1)
                at = row + position - first
                ends[at : at + length] = position + length
        row += count
    return step if ends is None else replace(step, seen_ends=ends)


def whole_head(features: Sequence[MultiModalFeature], start: int, count: int, most: int) -> int:
    """How many tokens from ``start`` on can be computed without those behind them: about ``count``.

    None of a picture's part is left to the others: the nearest end before, or else behind it.

    Args:
        most: tokens that there are to choose from; 0 is returned where none of them is an end.
    """
    for feature in features:
        for run, length in feature.embed_runs or [(0, feature.length)]:
            first = feature.offset + run
            if first < start + count < first + length:
                if first > start:
                    return first - start
                end = first + length - start
                return end if end <= most else 0
    return count
