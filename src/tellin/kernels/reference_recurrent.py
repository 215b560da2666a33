"""The reference backend's recurrences: states of requests, and what goes from row to row.

Owns the pool of states and the formulas of `ir.ShortConv`, `ir.GatedDelta` and `ir.SelectiveScan`
in NumPy float32. A row is computed from its own values and the state before it, one row after the
other, so it is the same bits however a request's rows were spread over steps.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from tellin.exceptions import EngineError
from tellin.kernels.batch import StepBatch
from tellin.models.plan import ir

Floats = npt.NDArray[np.float32]
RowsOf = Callable[[slice, Floats], None]


class StatePool:
    """The states of all slots: for each layer ``[num_slots, num_values]``."""

    def __init__(self, layers: tuple[ir.StateLayer, ...]) -> None:
        self._layers = layers
        self._states: list[Floats] | None = None

    def bytes_per_slot(self) -> int:
        return sum(layer.num_values for layer in self._layers) * 4

    def allocate(self, num_slots: int) -> None:
        """``num_slots`` slots, without anything that earlier ones held."""
        self._states = [np.zeros((num_slots, n.num_values), np.float32) for n in self._layers]

    def free(self) -> None:
        self._states = None

    def copy(self, pairs: Iterable[tuple[int, int]]) -> None:
        for source, target in pairs:
            for states in self._live():
                states[target] = states[source]

    def check(self, batch: StepBatch) -> None:
        """Raises ValueError unless the step has good ``state_slots`` and ``state_saves``."""
        if not self._layers:
            return
        slots = batch.state_slots
        num_requests = len(batch.query_start_loc) - 1
        if slots is None or slots.shape != (num_requests,):
            raise ValueError(f"state_slots must name a slot for each of {num_requests} requests")
        saves = [] if batch.state_saves is None else batch.state_saves.tolist()
        used = slots.tolist() + [slot for _, _, slot in saves]
        num_slots = len(self._live()[0])
        if min(used, default=0) < 0 or max(used, default=0) >= num_slots:
            raise ValueError(f"state slots {used} are not all within 0 to {num_slots - 1}")
        if len(set(used)) != len(used):
            raise ValueError(f"state slots {used} are not all different")
        if saves != sorted(saves):
            raise ValueError(f"state_saves {saves} do not ascend")
        for r, num_tokens, _ in saves:
            rows = batch.query_start_loc[r : r + 2] if 0 <= r < num_requests else np.zeros(2, int)
            if num_tokens - 1 not in batch.positions[rows[0] : rows[1]]:
                raise ValueError(f"state_saves: request {r} has no row at {num_tokens - 1}")

    def run(self, batch: StepBatch, layer: int, rows_of: RowsOf) -> None:
        """Go through each request's rows with its state, which changes in place.

        ``rows_of(rows, state)`` is called for all rows of a request, or for runs of them in order
        where the state between two of them is saved.
        """
        assert batch.state_slots is not None
        states = self._live()[layer]
        saves = [] if batch.state_saves is None else batch.state_saves.tolist()
        for r, (start, stop) in enumerate(itertools.pairwise(batch.query_start_loc.tolist())):
            if start == stop:
                continue
            state = states[batch.state_slots[r]]
            begin = int(batch.positions[start])
            if begin == 0:
                state[:] = 0
            at = start
            for _, num_tokens, slot in (save for save in saves if save[0] == r):
                rows_of(slice(at, start + num_tokens - begin), state)
                at = start + num_tokens - begin
                states[slot] = state
            if at < stop:
                rows_of(slice(at, stop), state)

    def _live(self) -> list[Floats]:
        if self._states is None:
            raise EngineError("no recurrent states: call init_state_cache() first")
        return self._states


def short_conv(
    x: Floats,
    weight: Floats,
    bias: Floats | None,
    act: Callable[[Floats], Floats] | None,
    state: Floats,
) -> Floats:
    """One request's rows ``[n, width]`` of `ir.ShortConv`; weight ``[width, kernel]``."""
    width, kernel = weight.shape
    history = state.reshape(kernel - 1, width)
    rows = np.concatenate([history, x])
    out = np.zeros_like(x)
    for j in range(kernel):
        out += weight[:, j] * rows[j : j + len(x)]
    if bias is not None:
        out += bias
    history[:] = rows[len(x) :]
    return out if act is None else act(out)


def decay_factor(decay: Floats, log_decay: bool) -> Floats:
    """A of `ir.GatedDelta` and `ir.SelectiveScan`, ``[num_heads]``."""
    flat = decay.reshape(-1)
    return np.asarray(-np.exp(flat.astype(np.float64)), np.float32) if log_decay else flat


def gated_delta(
    op: ir.GatedDelta,
    q: Floats,
    k: Floats,
    v: Floats,
    a: Floats,
    b: Floats,
    decay: Floats,
    dt_bias: Floats,
    state: Floats,
) -> Floats:
    """One request's rows of `ir.GatedDelta`; decay is A."""
    heads = op.num_v_heads
    matrices = state.reshape(heads, op.head_k_dim, op.head_v_dim)
    groups = np.arange(heads)
    key_head = groups % op.num_k_heads if op.tiled else groups // (heads // op.num_k_heads)
    q = _normalised(q.reshape(len(q), op.num_k_heads, op.head_k_dim))[:, key_head]
    q = q * np.float32(op.head_k_dim**-0.5)
    k = _normalised(k.reshape(len(k), op.num_k_heads, op.head_k_dim))[:, key_head]
    v = v.reshape(len(v), heads, op.head_v_dim)
    out = np.empty_like(v)
    shrink = np.exp(decay * softplus(a + dt_bias.reshape(-1)))
    beta = np.float32(1) / (1 + np.exp(-b))
    for t in range(len(v)):
        matrices *= shrink[t][:, None, None]
        known = np.einsum("hkv,hk->hv", matrices, k[t])
        change = beta[t][:, None] * (v[t] - known)
        matrices += k[t][:, :, None] * change[:, None, :]
        out[t] = np.einsum("hkv,hk->hv", matrices, q[t])
    return out.reshape(len(v), -1)


def selective_scan(
    op: ir.SelectiveScan,
    x: Floats,
    b: Floats,
    c: Floats,
    dt: Floats,
    decay: Floats,
    skip: Floats,
    dt_bias: Floats,
    state: Floats,
) -> Floats:
    """One request's rows of `ir.SelectiveScan`; decay is A."""
    heads, per_group = op.num_heads, op.num_heads // op.num_groups
    matrices = state.reshape(heads, op.head_dim, op.state_dim)
    x = x.reshape(len(x), heads, op.head_dim)
    b = np.repeat(b.reshape(len(b), op.num_groups, op.state_dim), per_group, axis=1)
    c = np.repeat(c.reshape(len(c), op.num_groups, op.state_dim), per_group, axis=1)
    step = np.clip(softplus(dt + dt_bias.reshape(-1)), op.dt_min, op.dt_max).astype(np.float32)
    shrink = np.exp(decay * step)
    out = np.empty_like(x)
    for t in range(len(x)):
        matrices *= shrink[t][:, None, None]
        matrices += (step[t][:, None] * x[t])[:, :, None] * b[t][:, None, :]
        out[t] = np.einsum("hds,hs->hd", matrices, c[t]) + skip.reshape(-1, 1) * x[t]
    return out.reshape(len(x), -1)


def softplus(x: Floats) -> Floats:
    """``log(1 + exp(x))``."""
    return np.asarray(np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x))))


def _normalised(x: Floats) -> Floats:
    """Vectors over their length, ``[..., n]``. Source of the 1e-6: Qwen3-Next's model file."""
    squares = np.sum(np.square(x), axis=-1, keepdims=True)
    return np.asarray(x / np.sqrt(squares + np.float32(1e-6)))
