"""`RecurrentBuilder`: the operations that keep a state of each request, recorded.

It gives every recurrence a number in the requests' state and checks its weights and shapes; what
the operations compute stands in `tellin.models.plan.ir`.
"""

from __future__ import annotations

import math

from tellin.exceptions import UnsupportedModelError
from tellin.loading.tensors import TensorRef
from tellin.models.plan import ir
from tellin.models.plan.ir import Buffer, Rows
from tellin.models.plan.recorder import Recorder

MAX_CONV_KERNEL = 8
"""Rows that a short convolution may reach over; models have 3 or 4."""
MAX_STATE_DIM = 256
"""Of the matrices that a head's recurrence keeps; models have 64 to 256."""


class RecurrentBuilder(Recorder):
    """Records `ShortConv`, `GatedDelta` and `SelectiveScan`."""

    def short_conv(
        self,
        x: Buffer,
        name: str,
        *,
        kernel: int,
        act: str | None = None,
        rows: tuple[int, int] | None = None,
    ) -> Buffer:
        """Causal convolution of each column of ``x``, with the bias if the model has one.

        ``kernel``: over how many rows it reaches. ``rows``: columns of ``x`` are those of a wider
        convolution, ``[start, stop)``.
        """
        self._needs_token_rows(x, "a convolution")
        weight = self.weight(f"{name}.weight", rows)
        if weight.shape not in ((x.width, kernel), (x.width, 1, kernel)):
            raise self._shape_error(weight, f"({x.width}, {kernel}): kernels of {kernel} rows")
        if not 2 <= kernel <= MAX_CONV_KERNEL:
            raise UnsupportedModelError(
                f"{self.source.path}: {name} reaches over {kernel} rows; supported are 2 to "
                f"{MAX_CONV_KERNEL}"
            )
        bias = None
        if self.has(f"{name}.bias"):
            bias = self.weight(f"{name}.bias", rows)
            if bias.shape != (x.width,):
                raise self._shape_error(bias, f"({x.width},)")
        if act is not None:
            act = self._activation(act=act)
        out = self._buffer(x.width, Rows.TOKENS, name)
        state = self._state((kernel - 1) * x.width)
        self._ops.append(ir.ShortConv(x, weight, bias, out, state, act))
        return out

    def gated_delta(
        self,
        q: Buffer,
        k: Buffer,
        v: Buffer,
        a: Buffer,
        b: Buffer,
        name: str,
        *,
        num_k_heads: int,
        num_v_heads: int,
        tiled: bool = False,
    ) -> Buffer:
        """The gated delta rule; see `ir.GatedDelta`.

        The model has ``{name}.dt_bias`` and either ``{name}.A_log`` or ``{name}.A``, which is
        -exp(A_log) already. Heads are of the size that the widths of ``q`` and ``v`` give.
        """
        for x in (q, k, v, a, b):
            self._needs_token_rows(x, "the gated delta rule")
        if num_k_heads < 1 or num_v_heads < 1 or num_v_heads % num_k_heads:
            raise self._error(f"{name}: {num_k_heads} key heads and {num_v_heads} value heads")
        k_dim, v_dim = q.width // num_k_heads, v.width // num_v_heads
        self._needs_width(name, q, num_k_heads, k_dim)
        self._needs_width(name, k, num_k_heads, k_dim)
        self._needs_width(name, v, num_v_heads, v_dim)
        self._needs_width(name, a, num_v_heads, 1)
        self._needs_width(name, b, num_v_heads, 1)
        self._check_state_dims(name, k_dim, v_dim)
        decay, log_decay = self._decay(name, num_v_heads)
        dt_bias = self._per_head(f"{name}.dt_bias", num_v_heads)
        out = self._buffer(v.width, Rows.TOKENS, name)
        state = self._state(num_v_heads * k_dim * v_dim)
        self._ops.append(
            ir.GatedDelta(
                q, k, v, a, b, decay, dt_bias, out, state, num_k_heads, num_v_heads, k_dim, v_dim,
                log_decay, tiled,
            )
        )  # fmt: skip
        return out

    def selective_scan(
        self,
        x: Buffer,
        b: Buffer,
        c: Buffer,
        dt: Buffer,
        name: str,
        *,
        num_heads: int,
        num_groups: int,
        dt_limits: tuple[float, float] = (0.0, math.inf),
    ) -> Buffer:
        """Mamba 2's recurrence; see `ir.SelectiveScan`.

        The model has ``{name}.D``, ``{name}.dt_bias`` and either ``{name}.A_log`` or ``{name}.A``,
        which is -exp(A_log) already.
        """
        for operand in (x, b, c, dt):
            self._needs_token_rows(operand, "a selective scan")
        if num_heads < 1 or num_groups < 1 or num_heads % num_groups:
            raise self._error(f"{name}: {num_heads} heads in {num_groups} groups")
        head_dim, state_dim = x.width // num_heads, b.width // num_groups
        self._needs_width(name, x, num_heads, head_dim)
        self._needs_width(name, b, num_groups, state_dim)
        self._needs_width(name, c, num_groups, state_dim)
        self._needs_width(name, dt, num_heads, 1)
        self._check_state_dims(name, head_dim, state_dim)
        dt_min, dt_max = dt_limits
        if not 0 <= dt_min <= dt_max:
            raise self._error(f"{name}: time steps are limited to {dt_min} to {dt_max}")
        decay, log_decay = self._decay(name, num_heads)
        skip = self._per_head(f"{name}.D", num_heads)
        dt_bias = self._per_head(f"{name}.dt_bias", num_heads)
        out = self._buffer(x.width, Rows.TOKENS, name)
        state = self._state(num_heads * head_dim * state_dim)
        self._ops.append(
            ir.SelectiveScan(
                x, b, c, dt, decay, skip, dt_bias, out, state, num_heads, head_dim, state_dim,
                num_groups, log_decay, dt_min, dt_max,
            )
        )  # fmt: skip
        return out

    # ---- checks ------------------------------------------------------------------------------

    def _state(self, num_values: int) -> int:
        self._state_layers.append(ir.StateLayer(num_values))
        return len(self._state_layers) - 1

    def _decay(self, name: str, num_heads: int) -> tuple[TensorRef, bool]:
        """The decay of each head, and whether it is its logarithm that the model has."""
        log_decay = not self.has(f"{name}.A")
        return self._per_head(f"{name}.{'A_log' if log_decay else 'A'}", num_heads), log_decay

    def _per_head(self, name: str, num_heads: int) -> TensorRef:
        """One value per head, in whatever shape."""
        tensor = self.weight(name)
        if tensor.num_elements != num_heads:
            raise self._shape_error(tensor, f"({num_heads},)")
        return tensor

    def _needs_width(self, name: str, x: Buffer, count: int, size: int) -> None:
        if x.width != count * size or size < 1:
            raise self._error(f"{name}: {x.name} has {x.width} columns for {count} heads")

    def _check_state_dims(self, name: str, *dims: int) -> None:
        if max(dims) > MAX_STATE_DIM:
            raise UnsupportedModelError(
                f"{self.source.path}: {name} keeps matrices of {dims[0]} x {dims[1]} values; "
                f"supported are up to {MAX_STATE_DIM} each way"
            )
