"""`ReferenceBackend`: runs a plan in NumPy float32, slow and obvious. The oracle of every test.

It dequantises all weights to float32 when it is made and interprets one operation after the other.
It keeps promise 1: every product is computed row by row with the same call, so a row's value does
not depend on what else is in the step. It knows no threads, no instruction sets, no requests.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from tellin.exceptions import EngineError, InvalidParameterError
from tellin.kernels import reference_formulas as formulas
from tellin.kernels import reference_recurrent as recurrent
from tellin.kernels.batch import StepBatch
from tellin.loading.dequantize import dequantize
from tellin.loading.tensors import TensorRef
from tellin.models.plan import elementwise, ir, streams

Floats = formulas.Floats


class ReferenceBackend:
    """NumPy interpreter of a `Plan`.

    Args:
        plan: what to compute.
        num_threads, isa, activation_precision: taken for the sake of the common interface and of no
            effect: NumPy has its own threads, and activations are always float32.
        kv_cache_dtype: ``auto`` or ``float32``; the cache is float32.
        block_size: tokens per cache block.
        batched: compute all rows of a linear layer in one product. Several times faster for long
            prompts, but the last bits of a row may then depend on the number of rows.
    """

    def __init__(
        self,
        plan: ir.Plan,
        *,
        num_threads: int | None = None,
        isa: str | None = None,
        activation_precision: str = "default",
        kv_cache_dtype: str = "auto",
        block_size: int = 16,
        batched: bool = False,
    ) -> None:
        if kv_cache_dtype not in ("auto", "float32"):
            raise InvalidParameterError(
                f"kv_cache_dtype is {kv_cache_dtype!r}; the reference backend has float32 only",
                parameter="kv_cache_dtype",
                value=kv_cache_dtype,
            )
        self.plan = plan
        self.block_size = block_size
        self.batched = batched
        tensors = dict.fromkeys(tensor for op in plan.ops for tensor in op.weights)
        self._weights: dict[TensorRef, Floats] = {t: dequantize(t) for t in tensors}
        self._values: dict[int, Floats] = {}
        self._adapters: dict[int, Mapping[str, tuple[Floats, Floats]]] = {}
        self._kv_cache: list[tuple[Floats, Floats]] | None = None
        self._states = recurrent.StatePool(plan.state_layers)
        self._has_input = any(isinstance(op, ir.Input) for op in plan.ops)
        self._batch: StepBatch | None = None
        self.info: dict[str, Any] = {
            "backend": "reference",
            "isa": "numpy",
            "num_threads": 1,
            "weight_bytes": sum(w.nbytes for w in self._weights.values()),
        }

    # ---- KV cache ----------------------------------------------------------------------------

    def kv_bytes_per_block(self) -> int:
        """Bytes of one block, keys and values of all layers together."""
        values = sum(layer.values_per_token for layer in self.plan.kv_layers)
        return values * 4 * self.block_size

    def init_kv_cache(self, num_blocks: int) -> None:
        """Make a cache of ``num_blocks`` blocks; what was in an earlier one is lost."""
        self._kv_cache = [
            (np.zeros((*shape, layer.head_dim), np.float32), np.zeros((*shape, values), np.float32))
            for layer in self.plan.kv_layers
            for shape in [(num_blocks, self.block_size, layer.num_kv_heads)]
            for values in [layer.value_dim or layer.head_dim]
        ]

    def free_kv_cache(self) -> None:
        """Give the cache's memory back."""
        self._kv_cache = None

    def copy_kv_blocks(self, src_dst_pairs: Iterable[tuple[int, int]]) -> None:
        """Copy whole blocks, in the order given."""
        for src, dst in src_dst_pairs:
            for keys, values in self._cache():
                keys[dst] = keys[src]
                values[dst] = values[src]

    # ---- recurrent states --------------------------------------------------------------------

    def state_bytes_per_slot(self) -> int:
        """Bytes of one request's recurrent state, all layers together; 0 if the plan has none."""
        return self._states.bytes_per_slot()

    def init_state_cache(self, num_slots: int) -> None:
        """Make ``num_slots`` slots; what was in earlier ones is lost."""
        self._states.allocate(num_slots)

    def free_state_cache(self) -> None:
        """Give the states' memory back."""
        self._states.free()

    def copy_states(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy slots, each ``(source, target)``, in the order given."""
        self._states.copy(pairs)

    # ---- adapters ----------------------------------------------------------------------------

    def set_adapter(self, slot: int, weights: Mapping[str, tuple[Floats, Floats]]) -> None:
        """Put a LoRA adapter into a slot: by site, A ``[rank, in]`` and B ``[out, rank]``."""
        self._adapters[slot] = dict(weights)

    def clear_adapter(self, slot: int) -> None:
        """Empty a slot."""
        self._adapters.pop(slot, None)

    def close(self) -> None:
        """Give all memory back; the backend cannot run afterwards."""
        self._kv_cache = None
        self._states.free()
        self._weights.clear()
        self._values.clear()

    # ---- a step ------------------------------------------------------------------------------

    def forward(self, batch: StepBatch) -> Floats:
        """Run the plan: logits ``[num_logits, vocab_size]`` f32, or an encoder's hidden states.

        The result is valid until the next call.
        """
        if not self._weights:
            raise EngineError("the backend is closed; make a new one")
        self._states.check(batch)
        self._batch = batch
        self._values.clear()
        with np.errstate(over="ignore", under="ignore"):
            for op in self.plan.ops:
                _RUN[type(op)](self, op)
        self._batch = None
        return self._values[self.plan.output.id]

    def hidden(self) -> Floats:
        """Final hidden states of the last step, rows as in `Plan.hidden`."""
        if self.plan.hidden is None or self.plan.hidden.id not in self._values:
            raise EngineError("no hidden states: the plan has none, or no step has run yet")
        return self._values[self.plan.hidden.id]

    def _step(self) -> StepBatch:
        if self._batch is None:
            raise EngineError("operations run inside forward() only")
        return self._batch

    def _cache(self) -> list[tuple[Floats, Floats]]:
        if self._kv_cache is None:
            raise EngineError("no KV cache: call init_kv_cache() first")
        return self._kv_cache

    def _get(self, buffer: ir.Buffer) -> Floats:
        return self._values[buffer.id]

    def _set(self, buffer: ir.Buffer, value: Floats) -> None:
        self._values[buffer.id] = np.ascontiguousarray(value, dtype=np.float32)

    # ---- operations --------------------------------------------------------------------------

    def _embed(self, op: ir.Embed) -> None:
        batch = self._step()
        table, ids = self._weights[op.weight], batch.token_ids
        ids = np.where(ids < len(table), ids, 0) if op.rest_is_first else ids
        rows = table[ids] * np.float32(op.scale)
        if batch.embeds is not None and not self._has_input:
            rows[batch.embed_rows] = batch.embeds[:, : op.out.width]
        self._set(op.out, rows)

    def _input(self, op: ir.Input) -> None:
        batch = self._step()
        if batch.embeds is None or batch.embeds.shape != (len(batch.token_ids), op.out.width):
            raise ValueError(f"the plan needs {op.out.width} values for every row of the step")
        self._set(op.out, batch.embeds)

    def _rms_norm(self, op: ir.RmsNorm) -> None:
        x = self._get(op.x)
        size = op.group or op.x.width  # not left to NumPy: there may be no rows
        groups = x.reshape(len(x), op.x.width // size, size)
        mean_square = np.mean(np.square(groups), axis=-1, keepdims=True)
        weight = self._weights[op.weight] + np.float32(op.weight_offset)
        weight = weight.reshape(-1, size)  # one part, or one for each group
        normed = groups / np.sqrt(mean_square + np.float32(op.eps)) * weight
        self._set(op.out, normed.reshape(x.shape))

    def _layer_norm(self, op: ir.LayerNorm) -> None:
        x = self._get(op.x)
        centred = x - np.mean(x, axis=-1, keepdims=True)
        variance = np.mean(np.square(centred), axis=-1, keepdims=True)
        out = centred / np.sqrt(variance + np.float32(op.eps)) * self._weights[op.weight]
        if op.bias is not None:
            out = out + self._weights[op.bias]
        self._set(op.out, out)

    def _project(self, x: Floats, weight: TensorRef, bias: TensorRef | None) -> Floats:
        """``x @ weight.T + bias``, a row at a time unless batched."""
        matrix = self._weights[weight]
        out = np.empty((len(x), len(matrix)), dtype=np.float32)
        if self.batched:
            np.matmul(x, matrix.T, out=out)
        else:
            for row_in, row_out in zip(x, out, strict=True):
                np.matmul(matrix, row_in, out=row_out)
        if bias is not None:
            out += self._weights[bias]
        return out

    def _linear(self, op: ir.Linear) -> None:
        out = self._project(self._get(op.x), op.weight, op.bias)
        if op.residual is not None:
            out += self._get(op.residual)
        self._set(op.out, out)

    def _head_linear(self, op: ir.HeadLinear) -> None:
        x = self._get(op.x).reshape(-1, op.num_heads, op.x.width // op.num_heads)
        weight = self._weights[op.weight].reshape(op.num_heads, -1, op.weight.shape[1])
        rows, count = op.weight.shape[1], weight.shape[1]
        out = np.empty((len(x), op.num_heads, op.out.width // op.num_heads), dtype=np.float32)
        for row_in, row_out in zip(x, out, strict=True):
            for head in range(op.num_heads):
                np.matmul(weight[head], row_in[head, :rows], out=row_out[head, :count])
        out[:, :, count:] = x[:, :, rows:]
        self._set(op.out, out.reshape(len(x), op.out.width))

    def _concat(self, op: ir.Concat) -> None:
        self._set(op.out, np.concatenate([self._get(op.x), self._get(op.y)], axis=1))

    def _multi_linear(self, op: ir.MultiLinear) -> None:
        x = self._get(op.x)
        for weight, bias, out in op.parts:
            self._set(out, self._project(x, weight, bias))

    def _gated_linear(self, op: ir.GatedLinear) -> None:
        x = self._get(op.x)
        gate = self._project(x, op.gate, op.gate_bias)
        up = self._project(x, op.up, op.up_bias)
        self._set(op.out, formulas.gated(op.act, gate, up))

    def _experts(self, op: ir.Experts) -> None:
        x, logits = self._get(op.x), self._get(op.router)
        out = np.zeros((len(x), op.out.width), dtype=np.float32)
        for row in range(len(x)):
            bias = None if op.selection_bias is None else self._weights[op.selection_bias]
            chosen, shares = formulas.route(logits[row], op, bias)
            if op.scales is not None:
                shares = shares * self._weights[op.scales][chosen]
            for expert, share in zip(chosen.tolist(), shares, strict=True):
                gate = self._weights[op.gate[expert]] @ x[row]
                up = self._weights[op.up[expert]] @ x[row]
                if op.gate_bias:
                    gate += self._weights[op.gate_bias[expert]]
                    up += self._weights[op.up_bias[expert]]
                down = self._weights[op.down[expert]] @ formulas.gated(op.act, gate, up)
                if op.down_bias:
                    down += self._weights[op.down_bias[expert]]
                out[row] += share * down
        self._set(op.out, out)

    def _gate_rows(self, op: ir.GateRows) -> None:
        self._set(op.out, self._get(op.x) / (1 + np.exp(-self._get(op.gate))))

    def _lora(self, op: ir.Lora) -> None:
        batch = self._step()
        if batch.adapter_slots is None:
            return
        slots = np.repeat(batch.adapter_slots, np.diff(batch.query_start_loc))
        if op.x.rows is ir.Rows.LOGITS:
            slots = slots[batch.logits_indices]
        x = self._get(op.x)
        for site, buffer in op.parts:
            out = self._get(buffer).copy()
            for row in np.flatnonzero(slots >= 0).tolist():
                weights = self._adapters[int(slots[row])].get(site)
                if weights is not None:
                    out[row] += weights[1] @ (weights[0] @ x[row])
            self._set(buffer, out)

    def _rope(self, op: ir.Rope) -> None:
        x = self._get(op.x)
        heads = x.reshape(len(x), op.num_heads, op.head_dim)
        half, at = len(op.table.inv_freq), op.offset
        step, tokens = self._step(), self._tokens_of(op.x)
        positions = step.positions[tokens][:, None]
        if op.table.axes and step.rope_positions is not None:
            positions = step.rope_positions[:, tokens][list(op.table.axes)].T
        angles = positions.astype(np.float64) * np.array(op.table.inv_freq)
        cos = (np.cos(angles) * op.table.attention_factor).astype(np.float32)[:, None, :]
        sin = (np.sin(angles) * op.table.attention_factor).astype(np.float32)[:, None, :]
        if op.interleaved:
            first, second = slice(at, at + 2 * half, 2), slice(at + 1, at + 2 * half, 2)
        else:
            first, second = slice(at, at + half), slice(at + half, at + 2 * half)
        a, b = heads[:, :, first], heads[:, :, second]
        out = heads.copy()
        out[:, :, first] = a * cos - b * sin
        out[:, :, second] = a * sin + b * cos
        self._set(op.x, out.reshape(x.shape))

    def _attention(self, op: ir.Attention) -> None:
        batch = self._step()
        tokens = self._tokens_of(op.q)
        group = op.num_heads // op.num_kv_heads
        q = self._get(op.q).reshape(len(tokens), op.num_kv_heads, group, op.head_dim)
        value_dim = op.value_dim or op.head_dim
        k, v = (
            None if x is None else self._get(x).reshape(len(tokens), op.num_kv_heads, dim)
            for x, dim in ((op.k, op.head_dim), (op.v, value_dim))
        )
        out = np.empty((*q.shape[:3], value_dim), dtype=np.float32)
        sinks = None
        if op.sinks is not None:
            sinks = self._weights[op.sinks].reshape(op.num_kv_heads, -1)
        if op.causal and k is not None and v is not None:
            self._write_cache(op.layer, k, v)
        cuts = batch.window_starts if op.windowed else batch.query_start_loc
        if cuts is None:
            raise ValueError("window_starts are missing: the plan has windowed attention")
        for r, (start, stop) in enumerate(itertools.pairwise(cuts.tolist())):
            if k is None or v is None or op.causal:
                keys, values = self._read_cache(op.layer, r)
            else:
                keys, values = formulas.by_head(k[start:stop]), formulas.by_head(v[start:stop])
            for row in np.flatnonzero((tokens >= start) & (tokens < stop)).tolist():
                t = int(tokens[row])
                end = int(batch.positions[t]) + 1 if op.causal else stop - start
                begin, window = 0, op.sliding_window
                if op.causal:
                    if window is not None:
                        begin = max(0, end - window)  # whatever it sees behind itself
                    if batch.seen_ends is not None:
                        end = int(batch.seen_ends[t])
                elif window is not None:
                    begin = max(0, t - start - window + 1)
                    end = min(end, t - start + window)
                for head in range(op.num_kv_heads):
                    out[row, head] = formulas.attend(
                        q[row, head],
                        keys[head, begin:end],
                        values[head, begin:end],
                        op,
                        None if sinks is None else sinks[head],
                    )
        self._set(op.out, out.reshape(len(tokens), op.out.width))

    def _tokens_of(self, x: ir.Buffer) -> npt.NDArray[Any]:
        """Which token each row of ``x`` belongs to."""
        batch = self._step()
        is_logits = x.rows is ir.Rows.LOGITS
        return batch.logits_indices if is_logits else np.arange(len(batch.token_ids))

    def _write_cache(self, layer: int, k: Floats, v: Floats) -> None:
        """Store the step's keys and values, ``[num_tokens, num_kv_heads, their dim]``."""
        batch = self._step()
        keys, values = self._cache()[layer]
        requests = np.repeat(np.arange(len(batch.seq_lens)), np.diff(batch.query_start_loc))
        blocks = batch.block_table[requests, batch.positions // self.block_size]
        offsets = batch.positions % self.block_size
        keys[blocks, offsets] = k
        values[blocks, offsets] = v

    def _read_cache(self, layer: int, request: int) -> tuple[Floats, Floats]:
        """All keys and values of one request, each ``[num_kv_heads, seq_len, head_dim]``."""
        batch = self._step()
        seq_len = int(batch.seq_lens[request])
        blocks = batch.block_table[request, : math.ceil(seq_len / self.block_size)]
        keys, values = (
            cache[blocks].reshape(-1, *cache.shape[2:])[:seq_len] for cache in self._cache()[layer]
        )
        return formulas.by_head(keys), formulas.by_head(values)

    def _short_conv(self, op: ir.ShortConv) -> None:
        x = self._get(op.x)
        weight = self._weights[op.weight].reshape(op.x.width, op.kernel)
        bias = None if op.bias is None else self._weights[op.bias]
        act = None if op.act is None else formulas.ACTIVATIONS[op.act]
        out = np.empty_like(x)

        def run(rows: slice, state: Floats) -> None:
            out[rows] = recurrent.short_conv(x[rows], weight, bias, act, state)

        self._states.run(self._step(), op.state, run)
        self._set(op.out, out)

    def _gated_delta(self, op: ir.GatedDelta) -> None:
        operands = [self._get(x) for x in (op.q, op.k, op.v, op.a, op.b)]
        decay = recurrent.decay_factor(self._weights[op.decay], op.log_decay)
        dt_bias = self._weights[op.dt_bias]
        out = np.empty_like(operands[2])

        def run(rows: slice, state: Floats) -> None:
            q, k, v, a, b = (x[rows] for x in operands)
            out[rows] = recurrent.gated_delta(op, q, k, v, a, b, decay, dt_bias, state)

        self._states.run(self._step(), op.state, run)
        self._set(op.out, out)

    def _selective_scan(self, op: ir.SelectiveScan) -> None:
        operands = [self._get(x) for x in (op.x, op.b, op.c, op.dt)]
        decay = recurrent.decay_factor(self._weights[op.decay], op.log_decay)
        skip, dt_bias = self._weights[op.skip], self._weights[op.dt_bias]
        out = np.empty_like(operands[0])

        def run(rows: slice, state: Floats) -> None:
            x, b, c, dt = (operand[rows] for operand in operands)
            out[rows] = recurrent.selective_scan(op, x, b, c, dt, decay, skip, dt_bias, state)

        self._states.run(self._step(), op.state, run)
        self._set(op.out, out)

    def _act_mul(self, op: ir.ActMul) -> None:
        up = self._get(op.up)[:, op.up_start : op.up_start + op.gate.width]
        self._set(op.out, formulas.gated(op.act, self._get(op.gate), up))

    def _activation(self, op: ir.Activation) -> None:
        self._set(op.out, formulas.ACTIVATIONS[op.act](self._get(op.x)))

    def _add(self, op: ir.Add) -> None:
        self._set(op.out, self._get(op.x) + self._get(op.y))

    def _add_bias(self, op: ir.AddBias) -> None:
        self._set(op.x, self._get(op.x) + self._weights[op.bias].reshape(-1))

    def _add_position_embedding(self, op: ir.AddPositionEmbedding) -> None:
        self._set(op.x, self._get(op.x) + self._weights[op.weight][self._step().positions])

    def _add_token_type_embedding(self, op: ir.AddTokenTypeEmbedding) -> None:
        types = self._step().token_types
        table = self._weights[op.weight]
        self._set(op.x, self._get(op.x) + (table[:1] if types is None else table[types]))

    def _gather_rows(self, op: ir.GatherRows) -> None:
        self._set(op.out, self._get(op.x)[self._step().logits_indices])

    def _scale(self, op: ir.Scale) -> None:
        self._set(op.x, self._get(op.x) * np.float32(op.factor))

    def _scale_by_weight(self, op: ir.ScaleByWeight) -> None:
        self._set(op.x, self._get(op.x) * self._weights[op.weight])

    def _add_given(self, op: ir.AddGiven) -> None:
        batch = self._step()
        if batch.embeds is not None:
            given = batch.embeds[:, op.start : op.start + op.x.width]
            x = self._get(op.x).copy()
            x[batch.embed_rows] += given
            self._set(op.x, x)

    def _add_scaled(self, op: streams.AddScaled) -> None:
        coef = (self._get(op.coefs)[:, op.column, None] + np.float32(op.offset)) * op.factor
        self._set(op.out, self._get(op.x) + coef.astype(np.float32) * self._get(op.y))

    def _match_magnitude(self, op: streams.MatchMagnitude) -> None:
        self._set(op.x, formulas.match_magnitude(self._get(op.x), self._get(op.target)))

    def _keep_largest(self, op: streams.KeepLargest) -> None:
        self._set(op.x, formulas.keep_largest(self._get(op.x), op.deviations))

    def _scale_by_position(self, op: elementwise.ScaleByPosition) -> None:
        positions = self._step().positions[self._tokens_of(op.x)]
        factor = formulas.position_factor(positions, op.beta, op.length)
        self._set(op.x, self._get(op.x) * factor[:, None])

    def _xielu(self, op: elementwise.Xielu) -> None:
        tensors = (op.alpha_p, op.alpha_n, op.beta, op.eps)
        numbers = [float(self._weights[tensor][0]) for tensor in tensors]
        self._set(op.out, formulas.xielu(self._get(op.x), *numbers))

    def _softcap(self, op: ir.Softcap) -> None:
        self._set(op.x, formulas.softcap(self._get(op.x), op.cap))


_RUN: dict[type[ir.Op], Callable[[ReferenceBackend, Any], None]] = {
    ir.Embed: ReferenceBackend._embed,
    ir.Input: ReferenceBackend._input,
    ir.RmsNorm: ReferenceBackend._rms_norm,
    ir.LayerNorm: ReferenceBackend._layer_norm,
    ir.Linear: ReferenceBackend._linear,
    ir.HeadLinear: ReferenceBackend._head_linear,
    ir.MultiLinear: ReferenceBackend._multi_linear,
    ir.GatedLinear: ReferenceBackend._gated_linear,
    ir.Experts: ReferenceBackend._experts,
    ir.GateRows: ReferenceBackend._gate_rows,
    ir.Lora: ReferenceBackend._lora,
    ir.Rope: ReferenceBackend._rope,
    ir.Attention: ReferenceBackend._attention,
    ir.ShortConv: ReferenceBackend._short_conv,
    ir.GatedDelta: ReferenceBackend._gated_delta,
    ir.SelectiveScan: ReferenceBackend._selective_scan,
    ir.ActMul: ReferenceBackend._act_mul,
    ir.Activation: ReferenceBackend._activation,
    ir.Add: ReferenceBackend._add,
    ir.Concat: ReferenceBackend._concat,
    ir.AddBias: ReferenceBackend._add_bias,
    ir.AddPositionEmbedding: ReferenceBackend._add_position_embedding,
    ir.AddTokenTypeEmbedding: ReferenceBackend._add_token_type_embedding,
    ir.GatherRows: ReferenceBackend._gather_rows,
    ir.Scale: ReferenceBackend._scale,
    ir.ScaleByWeight: ReferenceBackend._scale_by_weight,
    ir.Softcap: ReferenceBackend._softcap,
    elementwise.ScaleByPosition: ReferenceBackend._scale_by_position,
    elementwise.Xielu: ReferenceBackend._xielu,
    ir.AddGiven: ReferenceBackend._add_given,
    streams.AddScaled: ReferenceBackend._add_scaled,
    streams.MatchMagnitude: ReferenceBackend._match_magnitude,
    streams.KeepLargest: ReferenceBackend._keep_largest,
}
