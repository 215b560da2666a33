"""Passes over a plan: each a pure function `Plan` -> `Plan` that changes no value, bit for bit.

The recorded plan gives every value a buffer of its own that one operation fills; the fusion passes
rely on that and must run before `reuse_buffers`, which maps values to few buffers. A pass only
moves an operation where nothing between the two places changes its inputs.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeGuard

from msgspec.structs import replace

from tellin.models.plan import ir
from tellin.models.plan.elementwise import ScaleByPosition, Xielu
from tellin.models.plan.ir import Buffer, Op, Plan, Rows
from tellin.models.plan.streams import AddScaled, KeepLargest, MatchMagnitude

Pass = Callable[[Plan], Plan]


def optimize(plan: Plan) -> Plan:
    """Run all passes, in their order."""
    for run_pass in PASSES:
        plan = run_pass(plan)
    return plan


# ---- adapters --------------------------------------------------------------------------------

LORA_SITE = re.compile(
    r"layers\.\d+\.(self_attn\.([qkvo]|gate)_proj|linear_attn\.(in_proj_[qkvzab]|out_proj)"
    r"|conv\.([bcx]|out)_proj|mamba\.([zxbc]|dt|out)_proj"
    r"|mlp\.(shared_expert\.)?(gate|up|down)_proj)(?=\.weight\Z)"
)
"""Linear layers that adapters may change."""


def with_lora(plan: Plan, max_rank: int) -> Plan:
    """The recorded plan with a `Lora` after every linear layer that adapters may change.

    Linear layers whose result such an operation changes are not fused with what comes after them.
    """
    ops: list[Op] = []
    for op in plan.ops:
        ops.append(op)
        if _is_plain_linear(op) and (match := LORA_SITE.match(op.weight.name)):
            ops.append(ir.Lora(op.x, ((match[0], op.out),), max_rank))
    return replace(plan, ops=tuple(ops))


def fuse_loras(plan: Plan) -> Plan:
    """Neighbouring `Lora` operations of one input become one, at the place of the first.

    The fusion of linear layers has brought the layers that they follow together before.
    """
    flow = _Flow.of(plan)
    ops: list[Op | None] = list(plan.ops)
    first_of: dict[Buffer, int] = {}
    for i, op in enumerate(plan.ops):
        if not isinstance(op, ir.Lora):
            continue
        first = first_of.setdefault(op.x, i)
        head = ops[first]
        assert isinstance(head, ir.Lora)
        touched = {j for out in op.writes for j in (*flow.writers[out], *flow.readers[out])}
        if first == i or any(first <= j < i for j in (*touched, *flow.writers[op.x])):
            first_of[op.x] = i
            continue
        ops[first] = replace(head, parts=head.parts + op.parts)
        ops[i] = None
    return _rebuild(plan, ops)


# ---- fusion ----------------------------------------------------------------------------------


def fuse_gated_linears(plan: Plan) -> Plan:
    """Two linears of one input that only feed an `ActMul` become a `GatedLinear` at its place."""
    flow = _Flow.of(plan)
    ops: list[Op | None] = list(plan.ops)
    for i, op in enumerate(plan.ops):
        if not isinstance(op, ir.ActMul) or op.up.width != op.gate.width:
            continue
        first, second = flow.only_writer(op.gate), flow.only_writer(op.up)
        if first is None or second is None or first == second:
            continue
        gate, up = plan.ops[first], plan.ops[second]
        if not (_is_plain_linear(gate) and _is_plain_linear(up) and gate.x == up.x):
            continue
        if flow.readers[op.gate] != [i] or flow.readers[op.up] != [i]:
            continue
        if flow.writers[gate.x][-1] > min(first, second):
            continue
        ops[first] = ops[second] = None
        ops[i] = ir.GatedLinear(
            gate.x, gate.weight, up.weight, gate.bias, up.bias, op.out, op.act
        )  # fmt: skip
    return _rebuild(plan, ops)


def fuse_residuals(plan: Plan) -> Plan:
    """A linear whose result is only added to something takes the `Add` as its residual."""
    flow = _Flow.of(plan)
    ops: list[Op | None] = list(plan.ops)
    for i, op in enumerate(plan.ops):
        if not isinstance(op, ir.Add):
            continue
        for result, residual in ((op.y, op.x), (op.x, op.y)):
            writer = flow.only_writer(result)
            if writer is None or result is residual or flow.readers[result] != [i]:
                continue
            linear = plan.ops[writer]
            if not _is_plain_linear(linear) or flow.writers[linear.x][-1] > writer:
                continue
            ops[writer] = None
            ops[i] = replace(linear, out=op.out, residual=residual)
            break
    return _rebuild(plan, ops)


def fuse_multi_linears(plan: Plan) -> Plan:
    """All plain linears of one input become one `MultiLinear` at the place of the first."""
    flow = _Flow.of(plan)
    ops: list[Op | None] = list(plan.ops)
    groups: dict[Buffer, list[int]] = defaultdict(list)
    for i, op in enumerate(plan.ops):
        if _is_plain_linear(op):
            groups[op.x].append(i)
    for x, indices in groups.items():
        if len(indices) < 2 or flow.writers[x][-1] > indices[0]:
            continue
        linears = [op for i in indices if _is_plain_linear(op := plan.ops[i])]
        for i in indices:
            ops[i] = None
        ops[indices[0]] = ir.MultiLinear(x, tuple((op.weight, op.bias, op.out) for op in linears))
    return _rebuild(plan, ops)


# ---- rows ------------------------------------------------------------------------------------

_ROWWISE = (
    ir.RmsNorm, ir.LayerNorm, ir.Linear, ir.HeadLinear, ir.MultiLinear, ir.GatedLinear, ir.Experts,
    ir.Lora, ir.Rope, ir.ActMul, ir.GateRows, ir.Activation, ir.Add, ir.Concat, ir.AddBias,
    ir.Scale, ir.ScaleByWeight, ir.Softcap, AddScaled, MatchMagnitude, KeepLargest,
    ScaleByPosition, Xielu,
)  # fmt: skip
"""Operations whose result for a row depends on nothing but that row and its position."""


def gather_early(plan: Plan) -> Plan:
    """Move `GatherRows` up past row-wise operations, so that they run on logit rows only.

    In a prefill step nearly all of the last layer's output projection and MLP is work for rows
    whose logits nobody asked for. The pass finds the operations whose results reach the end of the
    plan only through the gather, and gathers their inputs instead.
    """
    gathers = [i for i, op in enumerate(plan.ops) if isinstance(op, ir.GatherRows)]
    if len(gathers) != 1:
        return plan
    late = _ops_before_gather_only(plan, gathers[0])
    ops: list[Op] = []
    new_buffers: list[Buffer] = []
    narrow: dict[Buffer, Buffer] = {}

    def narrowed(x: Buffer) -> Buffer:
        new = Buffer(len(plan.buffers) + len(new_buffers), x.width, Rows.LOGITS, x.name)
        new_buffers.append(new)
        narrow[x] = new
        return new

    flow = _Flow.of(plan)
    begin = min(late, default=0)
    for i, op in enumerate(plan.ops):
        if i == begin and late:
            # All that is there already, at once: a backend can then run the token rows of a long
            # step in several passes, and the logit rows after them.
            reads = [x for j in sorted(late) for x in plan.ops[j].reads]
            early = [x for x in dict.fromkeys(reads) if flow.writers[x][-1] < begin]
            ops += [ir.GatherRows(x, narrowed(x)) for x in early]
        if i in late:
            ops += [ir.GatherRows(x, narrowed(x)) for x in op.reads if x not in narrow]
            for x in op.writes:
                if x not in narrow:
                    narrowed(x)
            ops.append(_replace_buffers(op, narrow))
        elif isinstance(op, ir.GatherRows) and op.x in narrow:
            narrow[op.out] = narrow[op.x]
        elif i > gathers[0]:
            ops.append(_replace_buffers(op, narrow))
        else:
            for x in op.writes:
                narrow.pop(x, None)
            ops.append(op)
    hidden = plan.hidden and narrow.get(plan.hidden, plan.hidden)
    output = narrow.get(plan.output, plan.output)
    return _rebuild(replace(plan, output=output, hidden=hidden), ops)


def _ops_before_gather_only(plan: Plan, gather: int) -> set[int]:
    """Indices of row-wise operations whose results are read, in the end, by the gather alone."""
    flow = _Flow.of(plan)
    late: set[int] = set()
    for i in reversed(range(gather)):
        op = plan.ops[i]
        readers = [r for out in op.writes for r in flow.readers[out] if r > i]
        if _is_rowwise(op) and readers and all(r == gather or r in late for r in readers):
            late.add(i)
    return late


def _is_rowwise(op: Op) -> bool:
    """Attention is so too where it reads a cache that others fill: then prompts need no more of the
    layers after the last that fills one than the rows whose logits are wanted.
    """
    return isinstance(op, _ROWWISE) or (isinstance(op, ir.Attention) and op.k is None)


# ---- buffers ---------------------------------------------------------------------------------

_MAY_ALIAS: Mapping[type[Op], tuple[str, ...]] = {
    ir.RmsNorm: ("x",),
    ir.LayerNorm: ("x",),
    ir.Linear: ("residual",),
    ir.ActMul: ("gate", "up"),
    ir.GateRows: ("x",),
    ir.Activation: ("x",),
    ir.Add: ("x", "y"),
    AddScaled: ("x",),
}
"""Operands that ``out`` may share a buffer with, as the operations' definitions say."""


def reuse_buffers(plan: Plan) -> Plan:
    """Map values to few buffers: a buffer is free again after the last reader of its value.

    An operation that may work in place does, if its operand is not needed afterwards: so the
    residual stream stays in one buffer.
    """
    flow = _Flow.of(plan)
    assigned: dict[Buffer, Buffer] = {}
    free: dict[tuple[int, Rows], list[Buffer]] = defaultdict(list)
    buffers: list[Buffer] = []
    ops: list[Op] = []
    for i, op in enumerate(plan.ops):
        dying = [x for x in dict.fromkeys(op.reads) if flow.readers[x][-1] == i]
        for out in op.writes:
            if out in assigned:
                continue
            kind = (out.width, out.rows)
            donor = _alias_donor(op, out, dying)
            if donor is not None:
                assigned[out] = assigned[donor]
                dying.remove(donor)
            elif free[kind]:
                assigned[out] = free[kind].pop(0)
            else:
                assigned[out] = Buffer(len(buffers), out.width, out.rows, f"b{len(buffers)}")
                buffers.append(assigned[out])
        ops.append(_replace_buffers(op, assigned))
        dying += [out for out in op.writes if not flow.readers[out]]
        for x in dying:
            free[x.width, x.rows].append(assigned[x])
            free[x.width, x.rows].sort(key=lambda buffer: buffer.id)
    return replace(
        plan,
        ops=tuple(ops),
        buffers=tuple(buffers),
        output=assigned[plan.output],
        hidden=plan.hidden and assigned[plan.hidden],
    )


def _alias_donor(op: Op, out: Buffer, dying: list[Buffer]) -> Buffer | None:
    """The dying operand whose buffer ``out`` may take over, if there is one."""
    allowed = _MAY_ALIAS.get(type(op), ())
    operands = dict(op.operands())
    fixed = [x for name, x in operands.items() if name not in (*allowed, "out")]
    for name in allowed:
        x = operands.get(name)
        if x in dying and x not in fixed and (x.width, x.rows) == (out.width, out.rows):
            return x
    return None


PASSES: tuple[Pass, ...] = (
    fuse_gated_linears,
    fuse_residuals,
    fuse_multi_linears,
    fuse_loras,
    gather_early,
    reuse_buffers,
)


# ---- helpers ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Flow:
    """Who writes and who reads each buffer: operation indices, ascending.

    What the plan returns counts as read by an operation after the last.
    """

    writers: Mapping[Buffer, list[int]]
    readers: Mapping[Buffer, list[int]]

    @classmethod
    def of(cls, plan: Plan) -> _Flow:
        writers: dict[Buffer, list[int]] = defaultdict(list)
        readers: dict[Buffer, list[int]] = defaultdict(list)
        for i, op in enumerate(plan.ops):
            for x in dict.fromkeys(op.writes):
                writers[x].append(i)
            for x in dict.fromkeys(op.reads):
                readers[x].append(i)
        for result in (plan.output, plan.hidden):
            if result is not None:
                readers[result].append(len(plan.ops))
        return cls(writers, readers)

    def only_writer(self, x: Buffer) -> int | None:
        """Index of the operation that writes ``x``, if it is one alone."""
        return self.writers[x][0] if len(self.writers[x]) == 1 else None


def _is_plain_linear(op: Op) -> TypeGuard[ir.Linear]:
    return isinstance(op, ir.Linear) and op.residual is None


def _replace_buffers(op: Op, mapping: Mapping[Buffer, Buffer]) -> Op:
    """The operation with each buffer replaced by what ``mapping`` has for it."""
    if isinstance(op, ir.MultiLinear):
        parts = tuple((w, bias, mapping.get(out, out)) for w, bias, out in op.parts)
        return ir.MultiLinear(mapping.get(op.x, op.x), parts)
    if isinstance(op, ir.Lora):
        outs = tuple((site, mapping.get(out, out)) for site, out in op.parts)
        return replace(op, x=mapping.get(op.x, op.x), parts=outs)
    return replace(op, **{name: mapping[x] for name, x in op.operands() if x in mapping})


def _rebuild(plan: Plan, ops: Iterable[Op | None]) -> Plan:
    """The plan with ``ops`` (None = removed); unused buffers go, the others are renumbered."""
    kept = [op for op in ops if op is not None]
    mapping: dict[Buffer, Buffer] = {}
    for op in kept:
        for buffer in (*op.reads, *op.writes):
            if buffer not in mapping:
                mapping[buffer] = replace(buffer, id=len(mapping))
    return replace(
        plan,
        ops=tuple(_replace_buffers(op, mapping) for op in kept),
        buffers=tuple(mapping.values()),
        output=mapping[plan.output],
        hidden=plan.hidden and mapping[plan.hidden],
    )
