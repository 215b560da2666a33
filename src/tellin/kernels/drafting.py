"""Typed facade of the native drafters that need no model: prompt lookup and suffix decoding.

Knows ids only. A proposal is a guess: whoever uses it verifies it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tellin.kernels import _C

Int32Array = npt.NDArray[np.int32]


def propose_ngram(
    history: Int32Array,
    slots: Int32Array,
    lens: Int32Array,
    limits: Int32Array,
    *,
    min_n: int,
    max_n: int,
    most_recent: bool = False,
) -> list[list[int]]:
    """What followed the earlier occurrence of the longest matching suffix (core spec 5.3).

    Args:
        history: ``[num_slots, capacity]`` ids.
        slots, lens, limits: ``[n]`` slot, number of known ids, most ids to propose.
        min_n, max_n: lengths of suffixes that are compared.
        most_recent: take the last occurrence of the longest suffix instead of the first.

    Returns:
        One list per row, possibly empty.
    """
    out, counts = _buffers(limits)
    _C.propose_ngram(history, slots, lens, limits, min_n, max_n, most_recent, out, counts)
    return _rows(out, counts)


class SuffixDrafter:
    """Suffix decoding over a request's own ids and the outputs of finished requests (5.4).

    Args:
        max_depth: longest match compared, in ids.
        max_cached_requests: finished outputs that are kept; 0 = none.
        max_spec_factor: a draft is at most this times as long as its match.
        min_token_prob: a draft ends before an id whose path is less frequent than this.
    """

    def __init__(
        self,
        max_depth: int = 24,
        max_cached_requests: int = 10_000,
        max_spec_factor: float = 1.0,
        min_token_prob: float = 0.1,
    ) -> None:
        self._native = _C.SuffixDrafter(
            max_depth, max_cached_requests, max_spec_factor, min_token_prob
        )

    @property
    def num_cached_requests(self) -> int:
        """Finished outputs that are kept."""
        return self._native.num_cached_requests

    def propose(
        self, history: Int32Array, slots: Int32Array, lens: Int32Array, limits: Int32Array
    ) -> list[list[int]]:
        """Arguments and result as for `propose_ngram`."""
        out, counts = _buffers(limits)
        self._native.propose(history, slots, lens, limits, out, counts)
        return _rows(out, counts)

    def add_finished(self, ids: Int32Array) -> None:
        """Remember the output of a finished request."""
        self._native.add_finished(np.ascontiguousarray(ids, np.int32))


def _buffers(limits: Int32Array) -> tuple[Int32Array, Int32Array]:
    width = max(int(limits.max(initial=0)), 0)
    return np.zeros((len(limits), width), np.int32), np.zeros(len(limits), np.int32)


def _rows(out: Int32Array, counts: Int32Array) -> list[list[int]]:
    ids = out.tolist()
    return [row[:count] for row, count in zip(ids, counts.tolist(), strict=True)]
