"""What tokens of prompts with pictures turn by: three positions, of time, height and width.

Text counts on in all three. A picture's rows share the time at which it begins and count down and
across from there; the text behind it goes on where the longer of its sides ends. So positions are
a function of the prompt alone, whatever the chunk; where a token lies in the cache does not change.

Source: Wang et al. 2024 (Qwen2-VL), section 2.1 (M-RoPE).
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


def has_grids(states: Sequence[RequestState]) -> bool:
    """Whether a request has pictures that count in two dimensions."""
    return any(feature.grid is not None for state in states for feature in state.mm_features)


def rope_positions(features: Sequence[MultiModalFeature], start: int, count: int) -> Int32Array:
    """``[3, count]``: of the tokens ``[start, start + count)`` of a request.

    Args:
        features: its pictures, in the order of the prompt.
    """
    positions = np.tile(np.arange(start, start + count, dtype=np.int32), (3, 1))
    shift = 0  # of text behind the pictures so far
    for feature in features:
        if feature.grid is None:
            continue
        begin, end = feature.offset, feature.offset + feature.length
        if begin >= start + count:
            break
        rows, columns = feature.grid
        first = begin + shift
        grew = max(rows, columns) - feature.length
        shift += grew
        low, high = max(begin, start), min(end, start + count)
        if low < high:
            within = np.arange(low - begin, high - begin, dtype=np.int32)
            own = positions[:, low - start : high - start]
            own[0], own[1], own[2] = first, first + within // columns, first + within % columns
        behind = max(end, start) - start
        positions[:, behind:] += np.int32(grew)
    return positions


def with_rope(
    step: StepBatch, states: Sequence[RequestState], computed: Int32Array, counts: Int32Array
) -> StepBatch:
    """The step with `StepBatch.rope_positions`, if one of its requests has such pictures."""
    if not has_grids(states):
        return step
    parts = [
        rope_positions(state.mm_features, first, count)
        for state, first, count in zip(states, computed.tolist(), counts.tolist(), strict=True)
    ]
    return replace(step, rope_positions=np.ascontiguousarray(np.concatenate(parts, axis=1)))
