"""Small plans made of bare operations, and steps for them.

`AttentionCase` looks q, k and v up in three embedding tables, so that a test knows every value
that attention sees. `llama_plan` is a whole decoder with weights of any storage type.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from tellin.kernels.batch import StepBatch
from tellin.kernels.native import NativeBackend
from tellin.loading.tensors import QuantType, TensorRef
from tellin.models.plan import ir
from tests.kernels import linear_cases

TOKENS = ir.Rows.TOKENS
LOGITS = ir.Rows.LOGITS


def float_tensor(name: str, values: np.ndarray) -> TensorRef:
    data = np.ascontiguousarray(values, dtype=np.float32).reshape(-1).view(np.uint8)
    return TensorRef(name, values.shape, QuantType.F32, data)


@dataclass(frozen=True)
class AttentionCase:
    """Shape of one attention layer and the tables its operands are looked up in."""

    num_kv_heads: int = 2
    group: int = 1
    head_dim: int = 16
    vocab_size: int = 512
    window: int | None = None
    softcap: float | None = None
    causal: bool = True
    scale: float = 0.3
    seed: int = 0
    sinks: bool = False
    value_dim: int | None = None
    tables: dict[str, np.ndarray] = field(default_factory=dict)

    def table(self, name: str) -> np.ndarray:
        """Float32 values ``[vocab_size, heads * their dim]`` of q, k or v."""
        if name not in self.tables:
            heads = self.num_kv_heads * (self.group if name == "q" else 1)
            random = np.random.default_rng((self.seed, "qkv".index(name)))
            dim = (self.value_dim or self.head_dim) if name == "v" else self.head_dim
            values = random.standard_normal((self.vocab_size, heads * dim))
            self.tables[name] = values.astype(np.float32)
        return self.tables[name]

    def sink_scores(self) -> np.ndarray:
        """Float32 ``[num_heads]``: far below, among and far above what scores come to."""
        heads = self.num_kv_heads * self.group
        return np.linspace(-30, 60, heads, dtype=np.float32)

    def plan(self) -> ir.Plan:
        widths = {name: self.table(name).shape[1] for name in "qkv"}
        widths["out"] = widths["v"] * self.group
        buffers = {
            name: ir.Buffer(i, width, TOKENS, name)
            for i, (name, width) in enumerate(widths.items())
        }
        ops: list[ir.Op] = [
            ir.Embed(float_tensor(name, self.table(name)), buffers[name]) for name in "qkv"
        ]
        ops.append(
            ir.Attention(
                **buffers,
                layer=0 if self.causal else -1,
                num_heads=self.num_kv_heads * self.group,
                num_kv_heads=self.num_kv_heads,
                head_dim=self.head_dim,
                scale=self.scale,
                sliding_window=self.window,
                softcap=self.softcap,
                causal=self.causal,
                sinks=float_tensor("sinks", self.sink_scores()) if self.sinks else None,
                value_dim=self.value_dim,
            )
        )
        shape = self.num_kv_heads, self.head_dim, self.window, self.value_dim
        layers = (ir.KVCacheLayer(*shape),)
        return ir.Plan(
            architecture="attention",
            ops=tuple(ops),
            buffers=tuple(buffers.values()),
            kv_layers=layers if self.causal else (),
            output=buffers["out"],
            vocab_size=self.vocab_size,
            hidden_size=buffers["out"].width,
            hidden=buffers["out"],
        )

    def expected(self, token_ids: Sequence[int], *, kv_dtype: str = "float32") -> np.ndarray:
        """Attention of one request in float64, keys and values stored as ``kv_dtype``.

        Queries are rounded as keys are where the products are integers (int16).
        """
        ids = np.asarray(token_ids)
        n, d = len(ids), self.head_dim
        q = self.table("q")[ids].reshape(n, self.num_kv_heads, self.group, d)
        q = stored(q, kv_dtype) if kv_dtype == "int16" else q.astype(np.float64)
        k, v = (
            stored(self.table(name)[ids].reshape(n, self.num_kv_heads, -1), kv_dtype)
            for name in "kv"
        )
        scores = np.einsum("qhgd,khd->hgqk", q, k) * self.scale
        if self.softcap is not None:
            scores = self.softcap * np.tanh(scores / self.softcap)
        if self.causal:
            distance = np.arange(n)[:, None] - np.arange(n)[None, :]
            hidden = distance < 0
            if self.window is not None:
                hidden |= distance >= self.window
            scores = np.where(hidden, -np.inf, scores)
        top = scores.max(axis=-1, keepdims=True)
        weights = np.exp(scores - top)
        total = weights.sum(axis=-1, keepdims=True)
        if self.sinks:
            sinks = self.sink_scores().reshape(self.num_kv_heads, self.group, 1, 1)
            total += np.exp(sinks.astype(np.float64) - top)
        weights /= total
        return np.einsum("hgqk,khd->qhgd", weights, v).reshape(n, -1)


def stored(values: np.ndarray, kv_dtype: str) -> np.ndarray:
    """What the cache keeps of float32 values, as float64. int8: one scale per token and head."""
    if kv_dtype == "float16":
        return values.astype(np.float16).astype(np.float64)
    if kv_dtype == "int16":
        scale = np.abs(values).max(axis=-1, keepdims=True) / np.float32(4095)
        scale = ((scale.view(np.uint32) + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000)).view(
            np.float32
        )
        return np.rint(values * (np.float32(1) / scale)).astype(np.float64) * scale
    if kv_dtype == "int8":
        scale = np.abs(values).max(axis=-1, keepdims=True) / np.float32(127)
        codes = np.rint(values * (np.float32(1) / scale))
        return codes.astype(np.float64) * scale
    return values.astype(np.float64)


@dataclass
class Cache:
    """Requests as lists of tokens over one backend, with any order of blocks."""

    backend: NativeBackend
    num_blocks: int = 128
    block_order: Sequence[int] | None = None
    lengths: dict[str, int] = field(default_factory=dict)
    tables: dict[str, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.backend.init_kv_cache(self.num_blocks)
        self.free = list(self.block_order or range(1, self.num_blocks))

    def batch(self, work: Sequence[tuple[str, Sequence[int]]]) -> StepBatch:
        """The step that appends tokens to requests and wants the logits of all of them."""
        size = self.backend.block_size
        positions: list[int] = []
        starts = [0]
        for name, ids in work:
            begin = self.lengths.get(name, 0)
            self.lengths[name] = begin + len(ids)
            positions += range(begin, self.lengths[name])
            starts.append(len(positions))
            table = self.tables.setdefault(name, [])
            while len(table) * size < self.lengths[name]:
                table.append(self.free.pop(0))
        width = max(len(self.tables[name]) for name, _ in work)
        block_table = np.full((len(work), width), -1, dtype=np.int32)
        for row, (name, _) in zip(block_table, work, strict=True):
            row[: len(self.tables[name])] = self.tables[name]
        return StepBatch(
            token_ids=np.array([i for _, ids in work for i in ids], dtype=np.int32),
            positions=np.array(positions, dtype=np.int32),
            query_start_loc=np.array(starts, dtype=np.int32),
            seq_lens=np.array([self.lengths[name] for name, _ in work], dtype=np.int32),
            block_table=block_table,
            logits_indices=np.arange(len(positions), dtype=np.int32),
        )

    def step(self, *work: tuple[str, Sequence[int]]) -> list[np.ndarray]:
        """Run such a step; output rows of each item of ``work``."""
        batch = self.batch(work)
        rows = np.array(self.backend.forward(batch))
        return [rows[a:b] for a, b in pairwise(batch.query_start_loc.tolist())]

    def feed(self, name: str, ids: Sequence[int], chunk: int) -> np.ndarray:
        """Append tokens in chunks; all output rows."""
        parts = [self.step((name, ids[i : i + chunk]))[0] for i in range(0, len(ids), chunk)]
        return np.concatenate(parts)


def random_ids(count: int, *, seed: int = 0, vocab_size: int = 512) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(0, vocab_size, count).tolist()
    return ids


def llama_plan(
    quant_type: QuantType = QuantType.F32,
    *,
    num_layers: int = 2,
    hidden: int = 256,
    inner: int = 512,
    num_kv_heads: int = 2,
    group: int = 2,
    head_dim: int = 64,
    vocab_size: int = 512,
) -> ir.Plan:
    """A Llama-like decoder, fused as the passes would: norm, q/k/v, rope, attention, gated MLP."""
    builder = _LlamaBuilder(quant_type)
    q_width, kv_width = num_kv_heads * group * head_dim, num_kv_heads * head_dim
    x, normed = builder.buffer("x", hidden), builder.buffer("normed", hidden)
    q, k, v = (builder.buffer(n, w) for n, w in (("q", q_width), ("k", kv_width), ("v", kv_width)))
    attended, gated = builder.buffer("attended", q_width), builder.buffer("gated", inner)
    table = ir.RotaryTable(tuple(10000.0 ** (-2 * i / head_dim) for i in range(head_dim // 2)))
    builder.ops.append(ir.Embed(builder.matrix("embed", vocab_size, hidden), x))
    for layer in range(num_layers):
        builder.norm(x, normed)
        parts = tuple(
            (builder.matrix(f"{layer}.{out.name}", out.width, hidden), None, out)
            for out in (q, k, v)
        )
        builder.ops += [
            ir.MultiLinear(normed, parts),
            ir.Rope(q, table, num_kv_heads * group, head_dim, interleaved=False),
            ir.Rope(k, table, num_kv_heads, head_dim, interleaved=False),
            ir.Attention(
                q,
                k,
                v,
                attended,
                layer,
                num_kv_heads * group,
                num_kv_heads,
                head_dim,
                head_dim**-0.5,
            ),
            ir.Linear(attended, builder.matrix(f"{layer}.o", hidden, q_width), None, x, residual=x),
        ]
        builder.norm(x, normed)
        gate, up = (builder.matrix(f"{layer}.{n}", inner, hidden) for n in ("gate", "up"))
        down = builder.matrix(f"{layer}.down", hidden, inner)
        builder.ops += [
            ir.GatedLinear(normed, gate, up, None, None, gated, "silu"),
            ir.Linear(gated, down, None, x, residual=x),
        ]
    last = builder.buffer("last", hidden, LOGITS)
    logits = builder.buffer("logits", vocab_size, LOGITS)
    builder.ops.append(ir.GatherRows(x, last))
    builder.norm(last, last)
    builder.ops.append(ir.Linear(last, builder.matrix("head", vocab_size, hidden), None, logits))
    return ir.Plan(
        architecture="llama",
        ops=tuple(builder.ops),
        buffers=tuple(builder.buffers),
        kv_layers=tuple(ir.KVCacheLayer(num_kv_heads, head_dim) for _ in range(num_layers)),
        output=logits,
        vocab_size=vocab_size,
        hidden_size=hidden,
        hidden=last,
    )


class _LlamaBuilder:
    def __init__(self, quant_type: QuantType) -> None:
        self.quant_type = quant_type
        self.random = np.random.default_rng(5)
        self.seed = 0
        self.ops: list[ir.Op] = []
        self.buffers: list[ir.Buffer] = []

    def buffer(self, name: str, width: int, rows: ir.Rows = TOKENS) -> ir.Buffer:
        self.buffers.append(ir.Buffer(len(self.buffers), width, rows, name))
        return self.buffers[-1]

    def matrix(self, name: str, rows: int, columns: int) -> TensorRef:
        self.seed += 1
        tensor = linear_cases.random_tensor(self.quant_type, rows, columns, self.seed)
        data = _scaled(tensor, columns**-0.5 / float(tensor.values.std()))
        return TensorRef(name, (rows, columns), self.quant_type, data)

    def norm(self, x: ir.Buffer, out: ir.Buffer) -> None:
        weight = 1 + 0.2 * self.random.standard_normal(x.width)
        self.ops.append(ir.RmsNorm(x, float_tensor("norm", weight), out, eps=1e-5))


def _scaled(tensor: linear_cases.FileTensor, factor: float) -> np.ndarray:
    """Bytes of the tensor times about ``factor``: float values, or the scales of blocks."""
    if tensor.quant_type is QuantType.F32:
        return (tensor.values * np.float32(factor)).reshape(-1).view(np.uint8)
    if tensor.quant_type is QuantType.F16:
        return (tensor.values * factor).astype(np.float16).reshape(-1).view(np.uint8)
    blocks = tensor.data.reshape(-1, tensor.quant_type.block_bytes).copy()
    if tensor.quant_type is QuantType.MXFP4:
        blocks[:, 0] += round(np.log2(factor))
    for offset in linear_cases.SCALE_OFFSETS[tensor.quant_type]:
        scales = np.ascontiguousarray(blocks[:, offset : offset + 2]).view(np.float16)
        blocks[:, offset : offset + 2] = (scales * factor).astype(np.float16).view(np.uint8)
    return blocks.reshape(-1)
