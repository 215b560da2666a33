"""Times of a backend's steps: spans for a trace, and what each plan operation cost and achieved.

`ProfiledBackend` stands in for a backend while a profile runs; between profiles it does not exist,
so it costs nothing. It counts the work of every step (rows, passes, keys attended) from the step's
arrays; the backend counts time by stage.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from tellin.exceptions import EngineError
from tellin.kernels.batch import StepBatch
from tellin.models.plan import ir
from tellin.models.plan.listing import op_macs, op_weight_bytes
from tellin.trace import MAIN_THREAD, Span
from tellin.worker.backends import Backend

PASS_ROWS = 512
"""Rows that the native backend computes at once: weights are read once per so many."""
_KV_BYTES = {"float32": 4.0, "float16": 2.0, "int16": 2.0, "int8": 1.0}


@dataclass
class OperationProfile:
    """One operation of a plan, or all stages of a backend that no operation claims."""

    name: str
    """Kind and weights, e.g. ``linear layers.3.mlp.down_proj``."""
    seconds: float = 0.0
    macs: float = 0.0
    """Multiply-accumulates of matrices and of attention."""
    num_bytes: float = 0.0
    """Weights read as stored in the model's file, and keys and values read."""


class ProfiledBackend:
    """A backend that notes what it does; everything else is the wrapped backend's own."""

    def __init__(self, backend: Backend) -> None:
        if isinstance(backend, ProfiledBackend):
            raise EngineError("the profiler is already running; stop it first")
        self.wrapped = cast("Any", backend)
        self._forwards: list[Span] = []
        self._rows = {ir.Rows.TOKENS: 0, ir.Rows.LOGITS: 0}
        self._passes = {ir.Rows.TOKENS: 0, ir.Rows.LOGITS: 0}
        self._views = {_view(op) for op in self._plan_ops() if isinstance(op, ir.Attention)}
        self._pairs = dict.fromkeys(self._views, 0)
        self._keys_read = dict.fromkeys(self._views, 0)
        if self._has_stages:
            self.wrapped.set_profile(True)
            self.wrapped.take_spans()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.wrapped, name)

    @property
    def _has_stages(self) -> bool:
        return hasattr(self.wrapped, "stage_seconds")

    def _plan_ops(self) -> tuple[ir.Op, ...]:
        plan: ir.Plan | None = getattr(self.wrapped, "plan", None)
        return () if plan is None else plan.ops

    def forward(self, batch: StepBatch) -> npt.NDArray[np.float32]:
        """As the wrapped backend's, which see."""
        start = time.monotonic_ns()
        logits: npt.NDArray[np.float32] = self.wrapped.forward(batch)
        duration = time.monotonic_ns() - start
        self._forwards.append(Span("forward", MAIN_THREAD, start, duration))
        self._count(batch)
        return logits

    def _count(self, batch: StepBatch) -> None:
        num_tokens, num_logits = len(batch.token_ids), len(batch.logits_indices)
        self._rows[ir.Rows.TOKENS] += num_tokens
        self._rows[ir.Rows.LOGITS] += num_logits
        self._passes[ir.Rows.TOKENS] += -(-num_tokens // PASS_ROWS)
        self._passes[ir.Rows.LOGITS] += min(num_logits, 1)
        for window, causal, rows in self._views:
            tokens = np.arange(num_tokens) if rows is ir.Rows.TOKENS else batch.logits_indices
            requests = np.searchsorted(batch.query_start_loc, tokens, side="right") - 1
            counts = np.bincount(requests, minlength=len(batch.seq_lens))
            seen = batch.positions[tokens].astype(np.int64) + 1
            lens = np.where(counts > 0, batch.seq_lens, 0)
            if not causal:
                after = batch.seq_lens[requests] - seen
                if window is not None:
                    seen, after = np.minimum(seen, window), np.minimum(after, window - 1)
                seen = seen + after
            elif window is not None:
                seen = np.minimum(seen, window)
                lens = np.minimum(lens, counts + window - 1)
            self._pairs[window, causal, rows] += int(seen.sum())
            self._keys_read[window, causal, rows] += int(lens.sum())

    def finish(self) -> tuple[list[Span], list[OperationProfile]]:
        """Stop measuring: spans of all threads, and operations in plan order."""
        if not self._has_stages:
            return self._forwards, []
        self.wrapped.set_profile(False)
        names = self._stage_names()
        spans = [
            Span(
                names[stage],
                MAIN_THREAD if thread == 0 else f"kernel thread {thread}",
                begin,
                end - begin,
            )
            for stage, thread, begin, end in self.wrapped.take_spans().tolist()
        ]
        return self._forwards + spans, self._operations()

    def _stage_names(self) -> list[str]:
        names: list[str] = self.wrapped.listing()
        of_stage: dict[int, list[str]] = {}
        for op, stage in zip(self._plan_ops(), self.wrapped.op_stages, strict=True):
            of_stage.setdefault(stage, []).append(operation_name(op))
        return [" + ".join(of_stage.get(stage, [name])) for stage, name in enumerate(names)]

    def _operations(self) -> list[OperationProfile]:
        names = self._stage_names()
        operations = [
            OperationProfile(name, seconds)
            for name, seconds in zip(names, self.wrapped.stage_seconds(), strict=True)
        ]
        parts: dict[int, int] = self.wrapped.stage_parts
        for part, whole in parts.items():
            operations[whole].seconds += operations[part].seconds
        for op, stage in zip(self._plan_ops(), self.wrapped.op_stages, strict=True):
            macs, num_bytes = self._work(op)
            operations[stage].macs += macs
            operations[stage].num_bytes += num_bytes
        return [op for stage, op in enumerate(operations) if stage not in parts]

    def _work(self, op: ir.Op) -> tuple[float, float]:
        """Multiply-accumulates and bytes read of all steps."""
        if isinstance(op, ir.Attention):
            size = _KV_BYTES[self.wrapped.info["kv_cache_dtype"]]
            keys = self._keys_read[_view(op)] * op.num_kv_heads
            dims = float(op.head_dim + (op.value_dim or op.head_dim))
            pairs = self._pairs[_view(op)] * op.num_heads
            return pairs * dims, keys * dims * size
        rows = op.writes[0].rows
        reads: float = self._rows[rows] if isinstance(op, ir.Embed) else self._passes[rows]
        if isinstance(op, ir.Experts):
            reads *= _experts_read(op, self._rows[rows] / max(1, self._passes[rows]))
        return float(op_macs(op) * self._rows[rows]), float(op_weight_bytes(op) * reads)


def _view(op: ir.Attention) -> tuple[int | None, bool, ir.Rows]:
    """What operations that see the same keys have in common."""
    return op.sliding_window, op.causal, op.q.rows


def _experts_read(op: ir.Experts, rows: float) -> float:
    """Experts that so many rows read between them, in those of one row, if they choose evenly."""
    count = len(op.gate)
    missed: float = (1 - op.top_k / count) ** rows
    return count / op.top_k * (1 - missed)


def operation_name(op: ir.Op) -> str:
    """Kind and matrices of an operation."""
    kind = re.sub(r"(?<!^)(?=[A-Z])", "_", type(op).__name__).lower()
    weights = [t.name.removesuffix(".weight") for t in op.weights if not t.name.endswith(".bias")]
    if isinstance(op, ir.Lora):
        weights = [site for site, _ in op.parts]
    if isinstance(op, ir.Attention):
        return f"{kind} layers.{op.layer}"
    if isinstance(op, ir.Experts):
        return f"{kind} {op.gate[0].name.partition('.experts.')[0]}"
    if len(weights) > 1:  # of one layer: say its name once
        prefix = weights[0].rpartition(".")[0] + "."
        weights = [weights[0], *(name.removeprefix(prefix) for name in weights[1:])]
    return " ".join([kind, "/".join(weights)]).strip()


def merge_layers(operations: list[OperationProfile]) -> list[tuple[OperationProfile, int]]:
    """Operations that differ in the number of their layer only, added up, and how many they are."""
    merged: dict[str, tuple[OperationProfile, int]] = {}
    for op in operations:
        name = re.sub(r"layers\.\d+", "layers.*", op.name)
        total, count = merged.setdefault(name, (OperationProfile(name), 0))
        total.seconds += op.seconds
        total.macs += op.macs
        total.num_bytes += op.num_bytes
        merged[name] = (total, count + 1)
    return list(merged.values())
