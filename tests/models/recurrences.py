"""Plans with recurrences over random weights, and what they compute, in NumPy float64.

The plans' logits are the recurrence's own rows: nothing comes after it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tellin.models.plan import passes
from tellin.models.plan.builder import PlanBuilder
from tellin.models.plan.ir import Buffer, Plan
from tests.models.tiny import BASE, memory_source

WIDTH, VOCAB = BASE.hidden_size, BASE.vocab_size
Arrays = dict[str, np.ndarray]


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def silu(x: np.ndarray) -> np.ndarray:
    return x * sigmoid(x)


def softplus(x: np.ndarray) -> np.ndarray:
    return np.log1p(np.exp(-np.abs(x))) + np.maximum(x, 0)


class Recurrence:
    """A recurrence of token embeddings: its weights, its plan, its rows in float64."""

    def __init__(self, seed: int = 7) -> None:
        self.random = np.random.RandomState(seed)
        self.arrays: Arrays = {"embed.weight": self.values(VOCAB, WIDTH)}

    def values(self, *shape: int, scale: float = 1.0) -> np.ndarray:
        return (self.random.randn(*shape) * scale).astype(np.float32)

    def inputs(self, **widths: int) -> None:
        """Adds the matrices that make operands of these widths."""
        for name, width in widths.items():
            self.arrays[f"{name}.weight"] = self.values(width, WIDTH, scale=WIDTH**-0.5)

    def builder(self) -> PlanBuilder:
        return PlanBuilder(memory_source(BASE, self.arrays))

    def plan(self) -> Plan:
        b = self.builder()
        return passes.optimize(b.finish(b.gather_rows(self.record(b, b.embed("embed")))))

    def record(self, b: PlanBuilder, x: Buffer) -> Buffer:
        raise NotImplementedError

    def operands(self, ids: Sequence[int], *names: str) -> list[np.ndarray]:
        rows = self.arrays["embed.weight"][list(ids)].astype(np.float64)
        return [rows @ self.arrays[f"{name}.weight"].T.astype(np.float64) for name in names]

    def expected(self, ids: Sequence[int]) -> np.ndarray:
        raise NotImplementedError

    def decay(self, log_decay: bool, num_heads: int) -> None:
        """Adds A, or the logarithm of -A."""
        log = self.random.uniform(-2, 1, num_heads).astype(np.float32)
        self.a = -np.exp(log.astype(np.float64))
        name, values = ("A_log", log) if log_decay else ("A", self.a.astype(np.float32))
        self.arrays[f"rec.{name}"] = values


class Conv(Recurrence):
    """`ShortConv`."""

    def __init__(self, kernel: int, width: int, act: str | None = None, bias: bool = True) -> None:
        super().__init__()
        self.act, self.kernel = act, kernel
        self.inputs(x=width)
        self.arrays["rec.weight"] = self.values(width, 1, kernel)
        if bias:
            self.arrays["rec.bias"] = self.values(width)

    def record(self, b: PlanBuilder, x: Buffer) -> Buffer:
        return b.short_conv(b.linear(x, "x"), "rec", kernel=self.kernel, act=self.act)

    def expected(self, ids: Sequence[int]) -> np.ndarray:
        (x,) = self.operands(ids, "x")
        rows = np.concatenate([np.zeros((self.kernel - 1, x.shape[1])), x])
        weight = self.arrays["rec.weight"][:, 0, :].astype(np.float64)
        out = sum(weight[:, j] * rows[j : j + len(x)] for j in range(self.kernel))
        out = out + self.arrays.get("rec.bias", 0)
        return {None: out, "silu": silu(out), "relu": np.maximum(out, 0)}[self.act]


class Delta(Recurrence):
    """`GatedDelta`."""

    def __init__(
        self,
        k_heads: int,
        v_heads: int,
        k_dim: int,
        v_dim: int,
        tiled: bool = False,
        log_decay: bool = True,
    ) -> None:
        super().__init__()
        self.k_heads, self.v_heads, self.tiled = k_heads, v_heads, tiled
        self.inputs(q=k_heads * k_dim, k=k_heads * k_dim, v=v_heads * v_dim, a=v_heads, b=v_heads)
        self.decay(log_decay, v_heads)
        self.arrays["rec.dt_bias"] = self.values(v_heads)

    def record(self, b: PlanBuilder, x: Buffer) -> Buffer:
        operands = [b.linear(x, name) for name in ("q", "k", "v", "a", "b")]
        q, k, v, a, beta = operands
        return b.gated_delta(
            q, k, v, a, beta, "rec", num_k_heads=self.k_heads, num_v_heads=self.v_heads,
            tiled=self.tiled,
        )  # fmt: skip

    def expected(self, ids: Sequence[int]) -> np.ndarray:
        q, k, v, a, beta = self.operands(ids, "q", "k", "v", "a", "b")
        shrink = np.exp(self.a * softplus(a + self.arrays["rec.dt_bias"]))
        q, k = (x.reshape(len(x), self.k_heads, -1) for x in (q, k))
        v = v.reshape(len(v), self.v_heads, -1)
        out = np.zeros_like(v)
        for h in range(self.v_heads):
            key = h % self.k_heads if self.tiled else h * self.k_heads // self.v_heads
            state = np.zeros((k.shape[2], v.shape[2]))
            for t in range(len(v)):
                state *= shrink[t, h]
                kt, qt = (x[t, key] / np.sqrt(np.sum(x[t, key] ** 2) + 1e-6) for x in (k, q))
                change = sigmoid(beta[t, h]) * (v[t, h] - state.T @ kt)
                state += np.outer(kt, change)
                out[t, h] = state.T @ qt / np.sqrt(k.shape[2])
        return out.reshape(len(v), -1)


class Scan(Recurrence):
    """`SelectiveScan`."""

    def __init__(
        self,
        heads: int,
        groups: int,
        head_dim: int,
        state_dim: int,
        dt_limits: tuple[float, float] = (0.0, float("inf")),
        log_decay: bool = True,
    ) -> None:
        super().__init__()
        self.heads, self.groups, self.dt_limits = heads, groups, dt_limits
        self.inputs(x=heads * head_dim, b=groups * state_dim, c=groups * state_dim, dt=heads)
        self.decay(log_decay, heads)
        self.arrays["rec.dt_bias"] = self.values(heads)
        self.arrays["rec.D"] = self.values(heads, 1)

    def record(self, b: PlanBuilder, x: Buffer) -> Buffer:
        operands = [b.linear(x, name) for name in ("x", "b", "c", "dt")]
        return b.selective_scan(
            *operands, "rec", num_heads=self.heads, num_groups=self.groups, dt_limits=self.dt_limits
        )

    def expected(self, ids: Sequence[int]) -> np.ndarray:
        x, b, c, dt = self.operands(ids, "x", "b", "c", "dt")
        dt = np.clip(softplus(dt + self.arrays["rec.dt_bias"]), *self.dt_limits)
        x = x.reshape(len(x), self.heads, -1)
        b, c = (y.reshape(len(y), self.groups, -1) for y in (b, c))
        out = np.zeros_like(x)
        for h in range(self.heads):
            group = h * self.groups // self.heads
            state = np.zeros((x.shape[2], b.shape[2]))
            for t in range(len(x)):
                state *= np.exp(self.a[h] * dt[t, h])
                state += np.outer(dt[t, h] * x[t, h], b[t, group])
                out[t, h] = state @ c[t, group] + self.arrays["rec.D"][h, 0] * x[t, h]
        return out.reshape(len(x), -1)


RECURRENCES: dict[str, Recurrence] = {
    "conv_3": Conv(3, WIDTH, bias=False),
    "conv_4_silu": Conv(4, 72, act="silu"),
    "conv_2_odd": Conv(2, 37, act="relu"),
    "conv_8": Conv(8, 16),
    "delta": Delta(2, 4, 16, 32),
    "delta_tiled": Delta(2, 4, 32, 16, tiled=True, log_decay=False),
    "delta_odd": Delta(1, 3, 12, 21),
    "delta_128": Delta(1, 2, 128, 128),
    "scan": Scan(4, 2, 16, 32),
    "scan_limits": Scan(3, 1, 24, 16, dt_limits=(0.05, 1.5), log_decay=False),
    "scan_odd": Scan(3, 3, 5, 11),
    "scan_128": Scan(2, 1, 64, 128),
}
