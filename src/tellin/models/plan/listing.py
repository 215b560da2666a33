"""The readable listing of a plan: what `tellin plan MODEL` prints.

One line per operation, with its buffers and weights and what it costs per row, then buffers and
totals. Layers like an earlier one are folded into a line unless the full listing is asked for. It
reads no tensor data.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tellin.loading.tensors import TensorRef
from tellin.models.plan import ir
from tellin.models.plan.elementwise import ScaleByPosition, Xielu
from tellin.models.plan.ir import Buffer, Op, Plan, Rows
from tellin.models.plan.streams import AddScaled, KeepLargest, MatchMagnitude


@dataclass(frozen=True)
class PlanCost:
    """What running a plan costs."""

    num_parameters: int
    weight_bytes: int
    """Size of all weights as stored, tied ones once."""
    token_macs: int
    """Multiply-accumulates of linear layers for each scheduled token, attention not counted."""
    logit_macs: int
    """The same for each row of logits."""
    token_weight_bytes: int
    """Weight bytes read to decode one token: of an embedding one row."""
    kv_values_per_token: int
    """Keys and values of all layers, in numbers."""
    state_values: int = 0
    """What the recurrences keep of a request, however long it is, in numbers."""


def plan_cost(plan: Plan) -> PlanCost:
    """Count parameters, multiplications and bytes of a plan."""
    tensors = list(dict.fromkeys(tensor for op in plan.ops for tensor in op.weights))
    return PlanCost(
        num_parameters=sum(tensor.num_elements for tensor in tensors),
        weight_bytes=sum(tensor.num_bytes for tensor in tensors),
        token_macs=sum(op_macs(op) for op in plan.ops if op.writes[0].rows is Rows.TOKENS),
        logit_macs=sum(op_macs(op) for op in plan.ops if op.writes[0].rows is Rows.LOGITS),
        token_weight_bytes=sum(op_weight_bytes(op) for op in plan.ops),
        kv_values_per_token=sum(layer.values_per_token for layer in plan.kv_layers),
        state_values=sum(layer.num_values for layer in plan.state_layers),
    )


def op_weight_bytes(op: Op) -> int:
    """Weight bytes that one row needs: of an embedding a row, of experts the chosen ones."""
    if isinstance(op, ir.Embed | ir.AddPositionEmbedding | ir.AddTokenTypeEmbedding):
        return op.weight.num_bytes // op.weight.shape[0]
    if isinstance(op, ir.Experts):
        return op.top_k * sum(tensor.num_bytes for tensor in _one_expert(op))
    return sum(tensor.num_bytes for tensor in op.weights)


def op_macs(op: Op) -> int:
    """Multiply-accumulates of an operation's matrices for one row."""
    if isinstance(op, ir.Linear | ir.HeadLinear | ir.MultiLinear | ir.GatedLinear):
        return sum(tensor.num_elements for tensor in op.weights if len(tensor.shape) == 2)
    if isinstance(op, ir.Experts):
        return op.top_k * sum(tensor.num_elements for tensor in _one_expert(op))
    return 0


def _one_expert(op: ir.Experts) -> tuple[TensorRef, ...]:
    """The matrices of one; where nothing gates, gate and up are the same one."""
    return tuple(dict.fromkeys((op.gate[0], op.up[0], op.down[0])))


def format_plan(plan: Plan, *, full: bool = False) -> str:
    """The listing as text.

    Args:
        plan: as recorded or fused.
        full: print every layer, even if it is like an earlier one.
    """
    lines = [*_header(plan), *_operations(plan, full), "", *_buffers(plan), "", *_totals(plan)]
    return "\n".join(lines)


def _header(plan: Plan) -> list[str]:
    cost = plan_cost(plan)
    kind = "encoder" if plan.output.rows is Rows.TOKENS else "generator"
    takes_ids = any(isinstance(op, ir.Embed) for op in plan.ops)
    vocabulary = f"vocabulary {plan.vocab_size:,}, " if takes_ids else ""
    return [
        f"{plan.architecture} ({kind}): {_count(cost.num_parameters)} parameters, "
        f"hidden size {plan.hidden_size}, {vocabulary}"
        f"{len(plan.ops)} operations, {len(plan.buffers)} buffers",
        "",
        f"{'':5}  {'operation':67} {'MACs':>7} {'bytes':>8}  weights",
    ]


# ---- operations ------------------------------------------------------------------------------


def _operations(plan: Plan, full: bool) -> list[str]:
    lines: list[str] = []
    first_like: dict[tuple[str, ...], int] = {}
    folded: list[tuple[int, int]] = []

    def end_of_fold() -> None:
        if folded:
            first, last, model = folded[0][0], folded[-1][0], folded[0][1]
            span = f"layer {first} is" if first == last else f"layers {first}-{last} are"
            lines.append(f"  {span} like layer {model}")
            folded.clear()

    for layer, start, stop in _sections(plan.ops):
        block = [_describe(op) for op in plan.ops[start:stop]]
        if layer is None:
            end_of_fold()
            lines.append("  input" if start == 0 else "  output")
        else:
            model = first_like.setdefault(_anonymous(block), layer)
            if model != layer and not full:
                if folded and folded[0][1] != model:
                    end_of_fold()
                folded.append((layer, model))
                continue
            end_of_fold()
            lines.append(f"  layer {layer}")
        lines += [f"{i:5}  {text}" for i, text in enumerate(block, start)]
    end_of_fold()
    return lines


def _sections(ops: Sequence[Op]) -> Iterable[tuple[int | None, int, int]]:
    """Runs ``(layer, start, stop)`` of operations; layer is None outside the layers.

    The layer is the number in the name of an operation's first weight; an operation without weights
    belongs to the one before.
    """
    start, current = 0, None
    for i, op in enumerate(ops):
        if not op.weights:
            continue
        match = re.match(r"layers\.(\d+)\.", op.weights[0].name)
        layer = int(match[1]) if match else None
        if layer != current:
            if i > start:
                yield current, start, i
            start, current = i, layer
    yield current, start, len(ops)


def _anonymous(block: list[str]) -> tuple[str, ...]:
    """Lines without what differs between equal layers: numbers of cache layers and states."""
    return tuple(re.sub(r"(kv layer|state) \d+", r"\1", line) for line in block)


def _describe(op: Op) -> str:
    name = re.sub(r"(?<!^)(?=[A-Z])", "_", type(op).__name__).lower()
    text = f"{name:14} {', '.join(map(_name, op.writes))} = {_FORMULAS[type(op)](op)}"
    if not op.weights:
        return text
    macs = _count(op_macs(op)) if op_macs(op) else ""
    weights = " ".join(map(_weight, op.weights))
    if isinstance(op, ir.Experts):
        first = " ".join(map(_weight, _one_expert(op)))
        weights = f"{len(op.gate)} x {first.replace('.0.', '.*.')}"
    return f"{text:67} {macs:>7} {_bytes(op_weight_bytes(op)):>8}  {weights}"


def _name(buffer: Buffer) -> str:
    return f"b{buffer.id}"


def _weight(tensor: TensorRef) -> str:
    name = re.sub(r"^layers\.\d+\.", "", tensor.name).removesuffix(".weight")
    shape = "x".join(str(size) for size in tensor.shape)
    return f"{name}:{tensor.format_name}[{shape}]"


def _norm(op: ir.RmsNorm) -> str:
    group = f" per {op.group}" if op.group else ""
    offset = f", weight + {op.weight_offset:g}" if op.weight_offset else ""
    return f"norm({_name(op.x)}){group}, eps {op.eps:g}{offset}"


def _product(number: int | str, x: Buffer, bias: TensorRef | None) -> str:
    return f"W{number} {_name(x)}" + (f" + c{number}" if bias is not None else "")


def _linear(op: ir.Linear) -> str:
    residual = f" + {_name(op.residual)}" if op.residual else ""
    return _product("", op.x, op.bias) + residual


def _multi_linear(op: ir.MultiLinear) -> str:
    return ", ".join(_product(i, op.x, bias) for i, (_, bias, _) in enumerate(op.parts, 1))


def _gated_linear(op: ir.GatedLinear) -> str:
    gate, up = _product(1, op.x, op.gate_bias), _product(2, op.x, op.up_bias)
    return f"{op.act}({gate}) * ({up})"


def _experts(op: ir.Experts) -> str:
    x, shares = _name(op.x), "normalized " if op.normalize else ""
    bias = "" if op.selection_bias is None else ", chosen with a bias,"
    times = "" if op.scale == 1 else f" * {op.scale:g}"
    times += "" if op.scales is None else " * c"
    groups = "" if op.groups == 1 else f" in {op.top_groups} of {op.groups} groups"
    is_gated = op.gate[0] is not op.up[0]
    formula = f"W{2 + is_gated} ({op.act}(W1 {x}) * (W{1 + is_gated} {x}))"
    return (
        f"{op.top_k} of {len(op.gate)} experts{groups} by {shares}{op.scoring}({_name(op.router)})"
        f"{times}{bias}: {formula}"
    )


def _rope(op: ir.Rope) -> str:
    dims = 2 * len(op.table.inv_freq)
    where = f"{dims} dims from {op.offset}" if op.offset else f"first {dims} dims"
    partial = "" if dims == op.head_dim else f"{where} of "
    pairs = ", adjacent pairs" if op.interleaved else ""
    return f"rotate({_name(op.x)}) {partial}{op.num_heads} heads x {op.head_dim}{pairs}"


def _attention(op: ir.Attention) -> str:
    mask = f"kv layer {op.layer}" if op.causal else "whole request"
    mask = "its window" if op.windowed else mask
    if op.sliding_window is not None:
        mask += f", window {op.sliding_window}"
    if op.softcap is not None:
        mask += f", softcap {op.softcap:g}"
    if op.sinks is not None:
        mask += ", sinks"
    operands = ", ".join(_name(x) for x in (op.q, op.k, op.v) if x is not None)
    return f"attend({operands}) {op.num_heads}/{op.num_kv_heads} heads, {mask}"


def _gated_delta(op: ir.GatedDelta) -> str:
    operands = ", ".join(map(_name, (op.q, op.k, op.v, op.a, op.b)))
    heads = f"{op.num_v_heads}/{op.num_k_heads} heads x {op.head_k_dim} x {op.head_v_dim}"
    return f"gated_delta({operands}) {heads}, state {op.state}"


def _selective_scan(op: ir.SelectiveScan) -> str:
    operands = ", ".join(map(_name, (op.x, op.b, op.c, op.dt)))
    heads = f"{op.num_heads}/{op.num_groups} heads x {op.head_dim} x {op.state_dim}"
    return f"scan({operands}) {heads}, state {op.state}"


def _short_conv(op: ir.ShortConv) -> str:
    text = f"conv({_name(op.x)}) over {op.kernel} rows, state {op.state}"
    return text if op.act is None else f"{op.act}({text})"


def _act_mul(op: ir.ActMul) -> str:
    part = "" if op.up.width == op.gate.width else f"[{op.up_start}:{op.up_start + op.gate.width}]"
    return f"{op.act}({_name(op.gate)}) * {_name(op.up)}{part}"


def _add_scaled(op: AddScaled) -> str:
    coef = f"{_name(op.coefs)}[{op.column}]" + (f" + {op.offset:g}" if op.offset else "")
    return f"{_name(op.x)} + {op.factor:g} ({coef}) {_name(op.y)}"


def _lora(op: ir.Lora) -> str:
    return ", ".join(
        f"{_name(out)} + B{i} (A{i} {_name(op.x)})" for i, (_, out) in enumerate(op.parts, 1)
    )


_FORMULAS: dict[type[Op], Callable[[Any], str]] = {
    ir.Embed: lambda op: "W[token_ids]" + (f" * {op.scale:g}" if op.scale != 1 else ""),
    ir.Input: lambda op: "given rows",
    ir.RmsNorm: _norm,
    ir.LayerNorm: lambda op: f"layer_norm({_name(op.x)}), eps {op.eps:g}",
    ir.Linear: _linear,
    ir.HeadLinear: lambda op: f"W {_name(op.x)}, in each of {op.num_heads} heads",
    ir.MultiLinear: _multi_linear,
    ir.GatedLinear: _gated_linear,
    ir.Experts: _experts,
    ir.GateRows: lambda op: f"{_name(op.x)} * sigmoid({_name(op.gate)})",
    ir.Lora: _lora,
    ir.Rope: _rope,
    ir.Attention: _attention,
    ir.ShortConv: _short_conv,
    ir.GatedDelta: _gated_delta,
    ir.SelectiveScan: _selective_scan,
    ir.ActMul: _act_mul,
    ir.Activation: lambda op: f"{op.act}({_name(op.x)})",
    ir.Add: lambda op: f"{_name(op.x)} + {_name(op.y)}",
    ir.Concat: lambda op: f"{_name(op.x)}, {_name(op.y)}",
    ir.AddBias: lambda op: f"{_name(op.x)} + c",
    ir.AddPositionEmbedding: lambda op: f"{_name(op.x)} + W[positions]",
    ir.AddTokenTypeEmbedding: lambda op: f"{_name(op.x)} + W[token_types]",
    ir.GatherRows: lambda op: f"{_name(op.x)}[logits_indices]",
    ir.Scale: lambda op: f"{_name(op.x)} * {op.factor:g}",
    ir.ScaleByWeight: lambda op: f"{_name(op.x)} * c",
    ir.AddGiven: lambda op: f"{_name(op.x)} + given[{op.start}:{op.start + op.x.width}]",
    AddScaled: _add_scaled,
    MatchMagnitude: lambda op: f"{_name(op.x)} * |{_name(op.target)}| / |{_name(op.x)}|",
    KeepLargest: lambda op: f"max(0, {_name(op.x)} - mean - {op.deviations:g} std)",
    ScaleByPosition: lambda op: (
        f"{_name(op.x)} * (1 + {op.beta:g} ln(1 + position // {op.length}))"
    ),
    Xielu: lambda op: f"xielu({_name(op.x)})",
    ir.Softcap: lambda op: f"{op.cap:g} tanh({_name(op.x)} / {op.cap:g})",
}
"""W is the (first, second ...) weight, c its bias; A and B are an adapter's matrices."""


# ---- buffers and totals ----------------------------------------------------------------------


def _buffers(plan: Plan) -> list[str]:
    lines = ["buffers (float32 values per row)"]
    for rows in Rows:
        names = [f"{_name(x)}:{x.width}" for x in plan.buffers if x.rows is rows]
        if names:
            lines.append(f"  one row per {rows.value.removesuffix('s')}: {' '.join(names)}")
    return lines


def _totals(plan: Plan) -> list[str]:
    cost = plan_cost(plan)
    types: dict[str, int] = {}
    for tensor in dict.fromkeys(tensor for op in plan.ops for tensor in op.weights):
        name = tensor.format_name
        types[name] = types.get(name, 0) + tensor.num_bytes
    lines = [
        f"weights    {_bytes(cost.weight_bytes)}: "
        + ", ".join(f"{name} {_bytes(size)}" for name, size in sorted(types.items())),
        f"per token  {_count(cost.token_macs)} multiply-accumulates, "
        f"and {_count(cost.logit_macs)} per row of logits",
        f"decode     reads {_bytes(cost.token_weight_bytes)} of weights for one token",
    ]
    if plan.kv_layers:
        values = cost.kv_values_per_token
        lines.append(
            f"KV cache   {values:,} values per token in {len(plan.kv_layers)} layers: "
            f"{2 * values:,} bytes as float16, {4 * values:,} as float32"
        )
    if plan.state_layers:
        lines.append(
            f"states     {cost.state_values:,} values per request in {len(plan.state_layers)} "
            f"recurrences: {4 * cost.state_values:,} bytes"
        )
    return lines


def _count(value: int) -> str:
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if value >= size:
            return f"{value / size:.1f} {unit}"
    return f"{value}"


def _bytes(value: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if value >= size:
            return f"{value / size:.1f} {unit}"
    return f"{value} B"
