"""What a backend is given for one step: plain arrays, no requests.

Rows of one request are consecutive. Token t of request r at position p is written to slot
``block_table[r, p // block_size] * block_size + p % block_size`` of every layer's cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class StepBatch:
    """One step over R requests with T tokens in all, of which L want logits. All int32, C order."""

    token_ids: npt.NDArray[np.int32]
    """``[T]``."""
    positions: npt.NDArray[np.int32]
    """``[T]`` position of each token in its request."""
    query_start_loc: npt.NDArray[np.int32]
    """``[R + 1]``: request r owns rows ``[query_start_loc[r], query_start_loc[r + 1])``."""
    seq_lens: npt.NDArray[np.int32]
    """``[R]`` tokens of each request after this step."""
    block_table: npt.NDArray[np.int32]
    """``[R, max_blocks]`` cache blocks of each request; entries past its length are ignored."""
    logits_indices: npt.NDArray[np.int32]
    """``[L]`` rows whose logits are wanted."""
    adapter_slots: npt.NDArray[np.int32] | None = None
    """``[R]`` slot of each request's LoRA adapter, -1 = none; None = no request has one."""
    embeds: npt.NDArray[np.float32] | None = None
    """``[E, Plan.given_width]``: rows that are given instead of looked up; of wider ones the
    first values, and the rest is added later."""
    embed_rows: npt.NDArray[np.int32] | None = None
    """``[E]`` the step's rows that ``embeds`` stands for, ascending."""
    token_types: npt.NDArray[np.int32] | None = None
    """``[T]`` which of a pair's texts each token belongs to; None = all to the first (0)."""
    state_slots: npt.NDArray[np.int32] | None = None
    """``[R]`` slot of each request's recurrent state, all different; needed if the plan has states.

    A request whose first row is at position 0 begins from zeros, whatever lies in its slot.
    """
    state_saves: npt.NDArray[np.int32] | None = None
    """``[S, 3]`` rows ``(request, num_tokens, slot)``, ascending: the request's state after its row
    at position ``num_tokens - 1``, which is one of the step's, is written to that slot as well.
    Slots are all different, and none of ``state_slots``.
    """
    rope_positions: npt.NDArray[np.int32] | None = None
    """``[3, T]`` what rotary tables with axes turn by; None = three times ``positions``."""
    seen_ends: npt.NDArray[np.int32] | None = None
    """``[T]`` in causal attention: behind the last position that each row sees, at most the
    request's in ``seq_lens``; None = each row sees none behind its own."""
    window_starts: npt.NDArray[np.int32] | None = None
    """``[W + 1]`` parts of requests that windowed attention sees, as ``query_start_loc``; a request
    begins with one."""
