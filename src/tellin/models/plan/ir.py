"""The plan: what a model computes, as a flat list of operations over numbered buffers.

A model file records a plan once, at load time (`PlanBuilder`); a backend runs it for every step. A
plan is polymorphic in the number of rows: a buffer has a fixed width and either one row per
scheduled token (`Rows.TOKENS`) or one row per position whose logits are wanted (`Rows.LOGITS`). All
values are float32 `[num_rows, width]`, row-major; an operation may read and write the same buffer
only where it says so. All buffers of one operation have the same kind of rows, except `GatherRows`;
any operation that fills no cache may run on logit rows, whose positions are those of their tokens
(the fusion passes move work there).

Every operation treats each row by itself, except `Attention`, which reads the request's own KV
cache, and the recurrences (`ShortConv`, `GatedDelta`, `SelectiveScan`), which go from row to row of
a request and keep what they need of earlier rows in its state. So a row's result cannot depend on
what else is in the step, nor on how a request's rows were spread over steps.

The module knows no kernels and no files: weights are `TensorRef`s, passed on untouched.
"""

from __future__ import annotations

import msgspec

from tellin.loading.tensors import TensorRef
from tellin.models.plan.operands import (
    Buffer,
    KVCacheLayer,
    Op,
    RotaryTable,
    Rows,
    StateLayer,
)
from tellin.models.plan.sequence_ops import Attention, GatedDelta, SelectiveScan, ShortConv

__all__ = [
    "ActMul",
    "Activation",
    "Add",
    "AddBias",
    "AddPositionEmbedding",
    "AddTokenTypeEmbedding",
    "Attention",
    "Buffer",
    "Concat",
    "Embed",
    "Experts",
    "GateRows",
    "GatedDelta",
    "GatedLinear",
    "GatherRows",
    "HeadLinear",
    "Input",
    "KVCacheLayer",
    "LayerNorm",
    "Linear",
    "Lora",
    "MultiLinear",
    "Op",
    "Plan",
    "RmsNorm",
    "Rope",
    "RotaryTable",
    "Rows",
    "Scale",
    "ScaleByWeight",
    "SelectiveScan",
    "ShortConv",
    "Softcap",
    "StateLayer",
]


class Embed(Op, frozen=True):
    """``out[t] = weight[token_ids[t]] * scale``; weight ``(vocab_size, width)``.

    ``rest_is_first``: the table may end before the vocabulary does; ids behind it take row 0.

    A row that the caller gives (`StepBatch.embeds`) stays as it was given, without the scale; of a
    wider one the first values count. A plan with tables of different widths takes no such rows.
    After an `Input`, to which they belong then, every id is looked up. Rows of a prompt of
    embeddings are given multiplied by ``given_scale``: 1 in models whose scale is part of their
    input embeddings.
    """

    weight: TensorRef
    out: Buffer
    scale: float = 1.0
    rest_is_first: bool = False
    given_scale: float = 1.0


class Input(Op, frozen=True):
    """``out[t]`` is the caller's row for token t (`StepBatch.embeds`); every row must be given."""

    out: Buffer


class AddGiven(Op, frozen=True):
    """``x[t] += given[start : start + x.width]`` in place, for rows that the caller gives.

    Others stay as they are. Source: Meng et al. 2024 (DeepStack), section 3.
    """

    x: Buffer
    start: int


class RmsNorm(Op, frozen=True):
    """``out = x / sqrt(mean(x^2) + eps) * (weight + weight_offset)``.

    Source: Zhang & Sennrich 2019, eq. 4. With ``group`` set the row is split into groups of that
    many values which share the weight ``(group,)`` (per-head q/k norm), or have each their own part
    of a weight as wide as the row. ``out`` may be ``x``.
    """

    x: Buffer
    weight: TensorRef
    out: Buffer
    eps: float
    weight_offset: float = 0.0
    group: int | None = None


class LayerNorm(Op, frozen=True):
    """``out = (x - mean) / sqrt(var + eps) * weight + bias``. ``out`` may be ``x``."""

    x: Buffer
    weight: TensorRef
    bias: TensorRef | None
    out: Buffer
    eps: float


class Linear(Op, frozen=True):
    """``out = (x @ weight.T + bias) + residual``, each if given; ``out`` may be ``residual`` only.

    weight ``(out.width, x.width)``, bias ``(out.width,)``.
    """

    x: Buffer
    weight: TensorRef
    bias: TensorRef | None
    out: Buffer
    residual: Buffer | None = None


class HeadLinear(Op, frozen=True):
    """A linear layer for each head: ``out_h = (x_h[:k] @ weight_h.T, x_h[k:])``.

    A row of ``x`` and of ``out`` is ``num_heads`` parts of equal width; ``weight``
    ``(num_heads * n, k)`` has n rows for each. What lies behind a part's first k values passes.
    Source: DeepSeek-AI 2024 (DeepSeek-V2), appendix C: matrices taken into queries and output.
    """

    x: Buffer
    weight: TensorRef
    out: Buffer
    num_heads: int


class Concat(Op, frozen=True):
    """``out = (x, y)``: the values of y behind those of x, row by row."""

    x: Buffer
    y: Buffer
    out: Buffer


class MultiLinear(Op, frozen=True):
    """Several linear layers of the same input (made by the fusion pass: q/k/v).

    ``parts[i] = (weight, bias, out)``, each as in `Linear` without residual.
    """

    x: Buffer
    parts: tuple[tuple[TensorRef, TensorRef | None, Buffer], ...]

    @property
    def writes(self) -> tuple[Buffer, ...]:
        return tuple(out for _, _, out in self.parts)

    @property
    def weights(self) -> tuple[TensorRef, ...]:
        return tuple(t for weight, bias, _ in self.parts for t in (weight, bias) if t is not None)


class GatedLinear(Op, frozen=True):
    """``out = act(x @ gate.T + gate_bias) * (x @ up.T + up_bias)``.

    Made by the fusion pass from two linear layers of the same input and `ActMul`.
    """

    x: Buffer
    gate: TensorRef
    up: TensorRef
    gate_bias: TensorRef | None
    up_bias: TensorRef | None
    out: Buffer
    act: str


class Experts(Op, frozen=True):
    """Mixture of experts: ``out = sum p_e * down_e(act(gate_e(x)) * up_e(x))`` over chosen ones.

    ``router`` ``[num_rows, num_experts]`` holds a logit for each expert; p is their softmax, or
    with ``scoring`` sigmoid the sigmoid of each. A row chooses the ``top_k`` largest of p plus
    ``selection_bias`` ``(num_experts,)``, if given (of equal ones the lowest id), from the
    ``top_groups`` best of ``groups`` parts of the experts: a part is as good as its best expert, or
    with sigmoid as the two best together. ``normalize``
    divides their p by the sum of them; ``scale`` multiplies them at last, and ``scales``
    ``(num_experts,)``, if given, each by a factor of its expert. The sum over the chosen
    ones is made in the order of their ids. ``gate[e]`` and ``up[e]`` ``(expert width, x.width)``,
    ``down[e]`` ``(out.width, expert width)``; each of the three has one storage type; ``gate`` and
    ``up`` may be the same matrices, held once (with relu: its square). A row whose logits are not
    numbers, or with softmax hold +inf, becomes NaN.
    Source: Shazeer et al. 2017, eq. 1-5; Jiang et al. 2024 (Mixtral), section 2.1; DeepSeek-AI 2024
    (DeepSeek-V3), eq. 13-16, for sigmoid and bias; DeepSeek-V2, section 2.2.2, for groups.
    """

    x: Buffer
    router: Buffer
    gate: tuple[TensorRef, ...]
    up: tuple[TensorRef, ...]
    down: tuple[TensorRef, ...]
    out: Buffer
    act: str
    top_k: int
    normalize: bool
    gate_bias: tuple[TensorRef, ...] = ()
    """One per expert, as `up_bias` and `down_bias`; all three or none."""
    up_bias: tuple[TensorRef, ...] = ()
    down_bias: tuple[TensorRef, ...] = ()
    scoring: str = "softmax"
    selection_bias: TensorRef | None = None
    scale: float = 1.0
    scales: TensorRef | None = None
    groups: int = 1
    top_groups: int = 1

    @property
    def weights(self) -> tuple[TensorRef, ...]:
        matrices = (*self.gate, *self.up, *self.down)
        vectors = tuple(v for v in (self.selection_bias, self.scales) if v is not None)
        return (*matrices, *self.gate_bias, *self.up_bias, *self.down_bias, *vectors)


class GateRows(Op, frozen=True):
    """``out = x * sigmoid(gate)``; ``gate`` has one value per row. ``out`` may be ``x``."""

    x: Buffer
    gate: Buffer
    out: Buffer


class Lora(Op, frozen=True):
    """``out += (x @ A.T) @ B.T`` in place, for rows of requests that have a LoRA adapter.

    ``parts[i] = (site, out)``: a site is a linear layer, named as its weight is without
    ``.weight``. A ``(rank, x.width)`` and B ``(out.width, rank)``, rank at most ``max_rank``, are
    given to the backend while it runs. Rows without an adapter, or whose adapter has nothing for a
    site, are left as they are. Source: Hu et al. 2021 (LoRA), eq. 3.
    """

    x: Buffer
    parts: tuple[tuple[str, Buffer], ...]
    max_rank: int

    @property
    def reads(self) -> tuple[Buffer, ...]:
        return (self.x, *self.writes)

    @property
    def writes(self) -> tuple[Buffer, ...]:
        return tuple(out for _, out in self.parts)


class Rope(Op, frozen=True):
    """Rotate each head of ``x`` in place by its token's position.

    ``x`` ``[num_tokens, num_heads * head_dim]``. Pair (a, b) of frequency i becomes
    (a cos - b sin, a sin + b cos), angle = position * inv_freq[i]. ``interleaved``: pairs are
    (2i, 2i+1), else (i, i + rope_dim/2), of the rope_dim = 2 len(inv_freq) dimensions from
    ``offset`` on; the others pass unchanged. Source: Su et al. 2021 (RoFormer), eq. 34.
    """

    x: Buffer
    table: RotaryTable
    num_heads: int
    head_dim: int
    interleaved: bool
    offset: int = 0


class ActMul(Op, frozen=True):
    """``out = act(gate) * up``. ``out`` may be either input. act: silu, gelu, gelu_tanh,
    quick_gelu, relu, sigmoid, identity.

    ``swiglu_oai`` cuts both: with g = min(gate, 7) and u = up within [-7, 7],
    ``out = g * sigmoid(1.702 g) * (u + 1)``. Source: OpenAI 2025 (gpt-oss model card), section 2.
    ``up`` may be wider: columns ``[up_start, up_start + gate.width)`` of it are meant.
    """

    gate: Buffer
    up: Buffer
    out: Buffer
    act: str
    up_start: int = 0


class Activation(Op, frozen=True):
    """``out = act(x)``. ``out`` may be ``x``."""

    x: Buffer
    out: Buffer
    act: str


class Add(Op, frozen=True):
    """``out = x + y``. ``out`` may be either input."""

    x: Buffer
    y: Buffer
    out: Buffer


class AddBias(Op, frozen=True):
    """``x += bias`` in place, the same vector for every row; bias ``(width,)``."""

    x: Buffer
    bias: TensorRef


class AddPositionEmbedding(Op, frozen=True):
    """``x[t] += weight[positions[t]]`` in place: learned positions, ``(max_positions, width)``."""

    x: Buffer
    weight: TensorRef


class AddTokenTypeEmbedding(Op, frozen=True):
    """``x[t] += weight[token_types[t]]`` in place: which text of a pair, ``(num_types, width)``."""

    x: Buffer
    weight: TensorRef


class GatherRows(Op, frozen=True):
    """``out[i] = x[logits_indices[i]]``: from token rows to logit rows."""

    x: Buffer
    out: Buffer


class Scale(Op, frozen=True):
    """``x *= factor`` in place."""

    x: Buffer
    factor: float


class ScaleByWeight(Op, frozen=True):
    """``x *= weight`` in place; weight ``(1,)`` or ``(width,)``."""

    x: Buffer
    weight: TensorRef


class Softcap(Op, frozen=True):
    """``x = cap * tanh(x / cap)`` in place."""

    x: Buffer
    cap: float


class Plan(msgspec.Struct, frozen=True):
    """A recorded model.

    ``output`` is the logits buffer ``[num_logits, vocab_size]`` of a generator, or the hidden
    states ``[num_tokens, hidden_size]`` of an encoder (then ``hidden`` is the same buffer).
    ``hidden`` is the buffer of final hidden states (after the last norm) that pooling reads: in a
    generator it has logit rows, so a pooler asks for the rows it needs through ``logits_indices``.
    It has token rows where a layer drafts that wants all of them (`tellin.models.predictor`).
    ``buffers[i].id == i``; several operations may write one buffer.
    """

    architecture: str
    ops: tuple[Op, ...]
    buffers: tuple[Buffer, ...]
    kv_layers: tuple[KVCacheLayer, ...]
    output: Buffer
    vocab_size: int
    hidden_size: int
    hidden: Buffer | None = None
    state_layers: tuple[StateLayer, ...] = ()
    """By number, what the recurrences keep of a request."""

    @property
    def given_width(self) -> int:
        """Values of a row that the caller gives (`StepBatch.embeds`)."""
        return max(
            op.start + op.x.width if isinstance(op, AddGiven) else op.writes[0].width
            for op in self.ops
            if isinstance(op, Embed | Input | AddGiven)
        )

    @property
    def lora_sites(self) -> dict[str, tuple[int, int]]:
        """Linear layers that adapters may change: ``(input, output)`` width by name."""
        return {
            site: (op.x.width, out.width)
            for op in self.ops
            if isinstance(op, Lora)
            for site, out in op.parts
        }
