"""Compiles a plan into a native program: each operation becomes `_C.Program` calls.

Owns the translation of operations, the numbering of buffers, weights and vectors, and the order in
which weights are packed. It runs nothing: `tellin.kernels.native` does, with what comes out of it.
A plan that the program refuses has a shape or a weight without a kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tellin.exceptions import UnsupportedModelError
from tellin.kernels import _C
from tellin.kernels.file_pages import release_pages
from tellin.kernels.packing import Identity, identity, pack, require_finite, tensor_arguments
from tellin.loading.dequantize import dequantize
from tellin.loading.tensors import QuantType, TensorRef
from tellin.models.plan import elementwise, ir, streams

_NONE = -1


def _sensitive_weights(plan: ir.Plan) -> frozenset[Identity]:
    """Weights that make attention values, and the one that makes the logits."""
    weight_of: dict[int, TensorRef] = {}  # by buffer: the layer that filled it last
    found: list[TensorRef | None] = []
    for op in plan.ops:
        if isinstance(op, ir.Attention) and op.v is not None:
            found.append(weight_of.get(op.v.id))
        if isinstance(op, ir.MultiLinear):
            weight_of |= {out.id: weight for weight, _, out in op.parts}
        elif isinstance(op, ir.Linear):
            weight_of[op.out.id] = op.weight
        elif not set(op.writes) <= set(op.reads):
            for buffer in op.writes:
                weight_of.pop(buffer.id, None)
    found.append(weight_of.get(plan.output.id))
    return frozenset(identity(tensor) for tensor in found if tensor is not None)


@dataclass(frozen=True)
class PackedWeights:
    """A program whose weights others may use, which have the same tensors under the same names."""

    program: _C.Program
    ids: Mapping[str, int]


class Compiler:
    """Translates one plan into calls of a fresh program, then packs the weights.

    ``shared``: what is packed there is not packed again.
    """

    def __init__(
        self,
        program: _C.Program,
        plan: ir.Plan,
        precision: str,
        shared: PackedWeights | None = None,
    ) -> None:
        self.program = program
        self.plan = plan
        self.shared = shared
        self.precision = "int8" if precision == "mixed" else precision
        self.precise = _sensitive_weights(plan) if precision == "mixed" else frozenset()
        self.buffers: dict[int, int] = {}
        self.weights: dict[Identity, int] = {}
        self.ids: dict[str, int] = {}
        """Those packed here, by name."""
        self.packed: list[tuple[int, TensorRef]] = []
        self.tables: list[TensorRef] = []
        self.vectors: dict[tuple[int, float], int] = {}
        self.rotaries: dict[ir.RotaryTable, int] = {}
        self.op_stages: list[int] = []
        self.stage_parts: dict[int, int] = {}
        self.lora_sites: dict[str, int] = {}

    def run(self) -> None:
        for buffer in self.plan.buffers:
            logit_rows = buffer.rows is ir.Rows.LOGITS
            self.buffers[buffer.id] = self.program.add_buffer(buffer.width, logit_rows)
        for layer in self.plan.kv_layers:
            shape = layer.num_kv_heads, layer.head_dim, layer.value_dim or 0
            self._call(None, self.program.add_kv_layer, *shape)
        for state in self.plan.state_layers:
            self._call(None, self.program.add_state_layer, state.num_values)
        for op in self.plan.ops:
            _EMIT[type(op)](self, op)
            # Joined a chain of row operations, or its main stage is the last it made.
            self.op_stages.append(self.program.num_stages - 1)
        hidden = _NONE if self.plan.hidden is None else self.buffers[self.plan.hidden.id]
        self.program.finalize(self.buffers[self.plan.output.id], hidden, self.plan.vocab_size)
        for weight, tensor in self.packed:
            pack(self.program, weight, tensor)
        for table in self.tables:
            if identity(table) not in self.weights:  # else looked at while it was packed
                require_finite(table)
                release_pages(table.data)

    def _call(self, op: ir.Op | None, function: Callable[..., Any], *args: Any) -> Any:
        """Call the program; what it refuses is a plan that this backend cannot run."""
        try:
            return function(*args)
        except ValueError as error:
            names = [] if op is None else [t.name for t in op.weights]
            tensors = ", ".join(names if len(names) < 8 else [names[0], "...", names[-1]])
            where = "" if op is None else f"{type(op).__name__}({tensors}): "
            raise UnsupportedModelError(f"{where}{error}") from None

    # ---- operands ----------------------------------------------------------------------------

    def _buffer(self, buffer: ir.Buffer | None) -> int:
        return _NONE if buffer is None else self.buffers[buffer.id]

    def _weight(self, op: ir.Op, tensor: TensorRef, precision: str | None = None) -> int:
        # Tied matrices are two references to the same bytes: packed once.
        key = identity(tensor)
        if self.shared is not None and tensor.name in self.shared.ids and key not in self.weights:
            owner = self.shared.program
            self.weights[key] = self.program.share_weight(owner, self.shared.ids[tensor.name])
        if key not in self.weights:
            if precision is None:
                precision = "int16" if key in self.precise else self.precision
            quant_type, data, rows, columns = tensor_arguments(tensor)
            if tensor.reader is None:
                arguments: tuple[Any, ...] = (quant_type, data, rows, columns, precision)
                weight = self._call(op, self.program.add_weight, *arguments)
            else:
                arguments = (quant_type, rows, columns, precision)
                weight = self._call(op, self.program.add_row_weight, *arguments)
            self.weights[key] = weight
            self.ids[tensor.name] = weight
            self.packed.append((weight, tensor))
        return self.weights[key]

    def _vector(self, op: ir.Op, tensor: TensorRef | None, offset: float = 0.0) -> int:
        if tensor is None:
            return _NONE
        key = (id(tensor), offset)
        if key not in self.vectors:
            require_finite(tensor)
            vector: int = self._call(op, self.program.add_vector, *tensor_arguments(tensor), offset)
            self.vectors[key] = vector
        return self.vectors[key]

    def _rotary(self, op: ir.Op, table: ir.RotaryTable) -> int:
        if table not in self.rotaries:
            rotary: int = self._call(
                op,
                self.program.add_rotary,
                list(table.inv_freq),
                table.attention_factor,
                list(table.axes),
            )
            self.rotaries[table] = rotary
        return self.rotaries[table]

    # ---- operations --------------------------------------------------------------------------

    def _embed(self, op: ir.Embed) -> None:
        self.tables.append(op.weight)
        self._call(
            op, self.program.embed, *tensor_arguments(op.weight), self._buffer(op.out), op.scale,
            op.rest_is_first,
        )  # fmt: skip

    def _input(self, op: ir.Input) -> None:
        self._call(op, self.program.input, self._buffer(op.out))

    def _rms_norm(self, op: ir.RmsNorm) -> None:
        weight = self._vector(op, op.weight, op.weight_offset)
        self._call(
            op,
            self.program.rms_norm,
            self._buffer(op.x),
            weight,
            self._buffer(op.out),
            op.eps,
            op.group or 0,
        )

    def _layer_norm(self, op: ir.LayerNorm) -> None:
        weight, bias = self._vector(op, op.weight), self._vector(op, op.bias)
        x, out = self._buffer(op.x), self._buffer(op.out)
        self._call(op, self.program.layer_norm, x, weight, bias, out, op.eps)

    def _linear(self, op: ir.Linear) -> None:
        part = (self._weight(op, op.weight), self._vector(op, op.bias), self._buffer(op.out))
        residual = _NONE if op.residual is None else self._buffer(op.residual)
        self._call(op, self.program.linear, self._buffer(op.x), [part], residual)

    def _head_linear(self, op: ir.HeadLinear) -> None:
        weight = self._weight(op, op.weight, "float32")
        x, out = self._buffer(op.x), self._buffer(op.out)
        self._call(op, self.program.head_linear, x, weight, out, op.num_heads)

    def _concat(self, op: ir.Concat) -> None:
        x, y, out = self._buffer(op.x), self._buffer(op.y), self._buffer(op.out)
        self._call(op, self.program.concat, x, y, out)

    def _multi_linear(self, op: ir.MultiLinear) -> None:
        parts = [
            (self._weight(op, weight), self._vector(op, bias), self._buffer(out))
            for weight, bias, out in op.parts
        ]
        self._call(op, self.program.linear, self._buffer(op.x), parts, _NONE)

    def _gated_linear(self, op: ir.GatedLinear) -> None:
        out = self._buffer(op.out)
        gate = (self._weight(op, op.gate), self._vector(op, op.gate_bias), out)
        up = (self._weight(op, op.up), self._vector(op, op.up_bias), out)
        self._call(op, self.program.gated_linear, self._buffer(op.x), gate, up, out, op.act)

    def _experts(self, op: ir.Experts) -> None:
        x, router, out = self._buffer(op.x), self._buffer(op.router), self._buffer(op.out)
        parts = (op.gate, op.gate_bias), (op.up, op.up_bias), (op.down, op.down_bias)
        matrices = [
            ([self._weight(op, w) for w in weights], [self._vector(op, b) for b in biases])
            for weights, biases in parts
        ]
        self._call(
            op, self.program.experts, x, router, *matrices, out, op.act, op.top_k, op.normalize,
            op.scoring == "sigmoid", self._vector(op, op.selection_bias), op.scale,
            self._vector(op, op.scales), op.groups, op.top_groups,
        )  # fmt: skip
        last = self.program.num_stages - 1  # choosing, gate and up, down
        self.stage_parts |= {last - 2: last, last - 1: last}

    def _gate_rows(self, op: ir.GateRows) -> None:
        x, gate, out = self._buffer(op.x), self._buffer(op.gate), self._buffer(op.out)
        self._call(op, self.program.gate_rows, x, gate, out)

    def _lora(self, op: ir.Lora) -> None:
        outs = [self._buffer(out) for out in op.writes]
        first: int = self._call(op, self.program.lora, self._buffer(op.x), outs, op.max_rank)
        self.lora_sites |= {site: first + i for i, (site, _) in enumerate(op.parts)}

    def _rope(self, op: ir.Rope) -> None:
        self._call(
            op,
            self.program.rope,
            self._buffer(op.x),
            self._rotary(op, op.table),
            op.num_heads,
            op.head_dim,
            op.interleaved,
            op.offset,
        )

    def _attention(self, op: ir.Attention) -> None:
        self._call(
            op,
            self.program.attention,
            self._buffer(op.q),
            self._buffer(op.k),
            self._buffer(op.v),
            self._buffer(op.out),
            op.layer,
            op.num_heads,
            op.num_kv_heads,
            op.head_dim,
            op.scale,
            op.sliding_window or 0,
            op.softcap or 0.0,
            op.causal,
            self._vector(op, op.sinks),
            op.value_dim or 0,
            op.windowed,
        )

    def _decay(self, op: ir.GatedDelta | ir.SelectiveScan) -> int:
        """A of each head, as the program takes it."""
        if not op.log_decay:
            return self._vector(op, op.decay)
        require_finite(op.decay)
        values = -np.exp(dequantize(op.decay).reshape(-1).astype(np.float64))
        data = values.astype(np.float32).view(np.uint8)
        columns = len(values)
        vector: int = self._call(
            op, self.program.add_vector, int(QuantType.F32), data, 1, columns, 0.0
        )
        return vector

    def _short_conv(self, op: ir.ShortConv) -> None:
        weight, bias = self._vector(op, op.weight), self._vector(op, op.bias)
        x, out = self._buffer(op.x), self._buffer(op.out)
        self._call(op, self.program.short_conv, x, weight, bias, out, op.state, op.kernel, op.act)

    def _gated_delta(self, op: ir.GatedDelta) -> None:
        buffers = [self._buffer(x) for x in (op.q, op.k, op.v, op.a, op.b, op.out)]
        self._call(
            op, self.program.gated_delta, *buffers, self._decay(op), self._vector(op, op.dt_bias),
            op.state, op.num_k_heads, op.num_v_heads, op.tiled,
        )  # fmt: skip

    def _selective_scan(self, op: ir.SelectiveScan) -> None:
        buffers = [self._buffer(x) for x in (op.x, op.b, op.c, op.dt, op.out)]
        vectors = self._decay(op), self._vector(op, op.skip), self._vector(op, op.dt_bias)
        self._call(
            op, self.program.selective_scan, *buffers, *vectors, op.state, op.num_heads,
            op.num_groups, op.dt_min, op.dt_max,
        )  # fmt: skip

    def _act_mul(self, op: ir.ActMul) -> None:
        gate, up, out = self._buffer(op.gate), self._buffer(op.up), self._buffer(op.out)
        self._call(op, self.program.act_mul, gate, up, out, op.act, op.up_start)

    def _activation(self, op: ir.Activation) -> None:
        self._call(op, self.program.activation, self._buffer(op.x), self._buffer(op.out), op.act)

    def _add(self, op: ir.Add) -> None:
        x, y, out = self._buffer(op.x), self._buffer(op.y), self._buffer(op.out)
        self._call(op, self.program.add, x, y, out)

    def _add_bias(self, op: ir.AddBias) -> None:
        self._call(op, self.program.add_bias, self._buffer(op.x), self._vector(op, op.bias))

    def _add_position(self, op: ir.AddPositionEmbedding) -> None:
        self.tables.append(op.weight)
        self._call(op, self.program.add_position, self._buffer(op.x), *tensor_arguments(op.weight))

    def _add_token_type(self, op: ir.AddTokenTypeEmbedding) -> None:
        self.tables.append(op.weight)
        table = tensor_arguments(op.weight)
        self._call(op, self.program.add_token_type, self._buffer(op.x), *table)

    def _gather_rows(self, op: ir.GatherRows) -> None:
        self._call(op, self.program.gather_rows, self._buffer(op.x), self._buffer(op.out))

    def _scale(self, op: ir.Scale) -> None:
        self._call(op, self.program.scale, self._buffer(op.x), op.factor)

    def _scale_by_weight(self, op: ir.ScaleByWeight) -> None:
        weight = self._vector(op, op.weight)
        self._call(op, self.program.scale_by_weight, self._buffer(op.x), weight)

    def _add_given(self, op: ir.AddGiven) -> None:
        self._call(op, self.program.add_given, self._buffer(op.x), op.start)

    def _add_scaled(self, op: streams.AddScaled) -> None:
        x, y, coefs, out = map(self._buffer, (op.x, op.y, op.coefs, op.out))
        numbers = op.column, op.offset, op.factor
        self._call(op, self.program.add_scaled, x, y, coefs, out, *numbers)

    def _match_magnitude(self, op: streams.MatchMagnitude) -> None:
        x, target = self._buffer(op.x), self._buffer(op.target)
        self._call(op, self.program.match_magnitude, x, target)

    def _keep_largest(self, op: streams.KeepLargest) -> None:
        self._call(op, self.program.keep_largest, self._buffer(op.x), op.deviations)

    def _scale_by_position(self, op: elementwise.ScaleByPosition) -> None:
        self._call(op, self.program.scale_by_position, self._buffer(op.x), op.beta, op.length)

    def _xielu(self, op: elementwise.Xielu) -> None:
        numbers = [self._vector(op, x) for x in (op.alpha_p, op.alpha_n, op.beta, op.eps)]
        self._call(op, self.program.xielu, self._buffer(op.x), self._buffer(op.out), *numbers)

    def _softcap(self, op: ir.Softcap) -> None:
        self._call(op, self.program.softcap, self._buffer(op.x), op.cap)


_EMIT: dict[type[ir.Op], Callable[[Compiler, Any], None]] = {
    ir.Embed: Compiler._embed,
    ir.Input: Compiler._input,
    ir.RmsNorm: Compiler._rms_norm,
    ir.LayerNorm: Compiler._layer_norm,
    ir.Linear: Compiler._linear,
    ir.HeadLinear: Compiler._head_linear,
    ir.MultiLinear: Compiler._multi_linear,
    ir.GatedLinear: Compiler._gated_linear,
    ir.Experts: Compiler._experts,
    ir.GateRows: Compiler._gate_rows,
    ir.Lora: Compiler._lora,
    ir.Rope: Compiler._rope,
    ir.Attention: Compiler._attention,
    ir.ShortConv: Compiler._short_conv,
    ir.GatedDelta: Compiler._gated_delta,
    ir.SelectiveScan: Compiler._selective_scan,
    ir.ActMul: Compiler._act_mul,
    ir.Activation: Compiler._activation,
    ir.Add: Compiler._add,
    ir.Concat: Compiler._concat,
    ir.AddBias: Compiler._add_bias,
    ir.AddPositionEmbedding: Compiler._add_position,
    ir.AddTokenTypeEmbedding: Compiler._add_token_type,
    ir.GatherRows: Compiler._gather_rows,
    ir.Scale: Compiler._scale,
    ir.ScaleByWeight: Compiler._scale_by_weight,
    ir.Softcap: Compiler._softcap,
    elementwise.ScaleByPosition: Compiler._scale_by_position,
    elementwise.Xielu: Compiler._xielu,
    ir.AddGiven: Compiler._add_given,
    streams.AddScaled: Compiler._add_scaled,
    streams.MatchMagnitude: Compiler._match_magnitude,
    streams.KeepLargest: Compiler._keep_largest,
}
