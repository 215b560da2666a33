"""`NativeBackend`: compiles a plan into a native program and runs a step of it in one call.

Owns the translation of plan operations into `_C.Program` calls, the packing of weights and the
release of their file pages. It knows no requests and no scheduler. Inside a step there is no
Python: the program walks its stages with its own threads, without the GIL
(csrc/include/tellin/program.h). Promise 1 holds for every variant, thread count and cache type: a
row's bits depend on its own tokens only.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from tellin.exceptions import (
    EngineError,
    InvalidParameterError,
    OutOfMemoryError,
    UnsupportedModelError,
)
from tellin.kernels import _C
from tellin.kernels.adapters import smallest_tensor
from tellin.kernels.batch import StepBatch
from tellin.kernels.cpu import ThreadChoice, default_num_threads
from tellin.kernels.file_pages import release_pages
from tellin.kernels.packing import Identity, identity, pack, require_finite, tensor_arguments
from tellin.loading.tensors import TensorRef
from tellin.models.plan import ir

logger = logging.getLogger("tellin.kernels")

_KV_DTYPES = {
    "auto": "float16",
    "float16": "float16",
    "float32": "float32",
    "int16": "int16",
    "int8": "int8",
}
_ISAS = ("portable", "avx2", "avxvnni", "avx512", "neon")
_NONE = -1


def resolve_activation_precision(name: str) -> str:
    """Arithmetic of an ``activation_precision`` setting: int8, mixed, int16 or float32.

    ``default`` is int8: asymmetric steps per 32 values, whose divergence from float32 is 0.6 to 0.2
    times llama.cpp's (``python -m benchmarks fidelity``). ``mixed`` is int8 but for the value
    projections and the output layer, a few percent of a large model's work, where half of that
    divergence comes from. ``high`` is int16 (15 bits): as good as float32 at twice the
    multiplications of int8, which costs prefill and large batches; one stream waits for memory
    either way.

    Raises:
        InvalidParameterError: unknown name.
    """
    choices = ("default", "high", "int8", "mixed", "int16", "float32")
    _check_choice("activation_precision", name, choices)
    return {"default": "int8", "high": "int16"}.get(name, name)


class NativeBackend:
    """Runs a `Plan` on this machine's CPU.

    Args:
        plan: what to compute. Embedding tables are read from its tensors during steps.
        num_threads: size of the kernel team; None = `default_num_threads`.
        isa: kernel variant (avx512, avxvnni, avx2, neon, portable); None = the best that this
            machine runs.
        activation_precision: of quantised weights' inputs: ``int8``, ``mixed``, ``int16`` (15
            bits), ``float32``, ``high`` or ``default`` (see `resolve_activation_precision`).
        kv_cache_dtype: ``auto`` (float16), ``float16``, ``float32``, ``int8`` or ``int16``, codes
            of 13 bits that are multiplied as integers: faster with long prompts.
        block_size: tokens per cache block, a multiple of 16.

    Raises:
        InvalidParameterError: an argument has a bad value.
        UnsupportedModelError: there is no kernel for a weight or a shape of the plan.
        ModelLoadError: a tensor holds NaN or infinity.
        OutOfMemoryError: the packed weights do not fit.
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
    ) -> None:
        if plan.state_layers:
            raise UnsupportedModelError("there are no native kernels for recurrent layers yet")
        precision = resolve_activation_precision(activation_precision)
        _check_choice("kv_cache_dtype", kv_cache_dtype, tuple(_KV_DTYPES))
        if isa:
            _check_choice("isa", isa, _ISAS)
        choice = default_num_threads()
        if num_threads is not None:
            choice = ThreadChoice(num_threads, "as num_threads says")
        self.plan = plan
        self.block_size = block_size
        try:
            program = _C.Program(
                isa=isa or "",
                num_threads=choice.num_threads,
                block_size=block_size,
                kv_dtype=_KV_DTYPES[kv_cache_dtype],
            )
        except ValueError as error:
            raise InvalidParameterError(str(error)) from None
        logger.info("%d kernel threads: %s; %s", choice.num_threads, choice.reason, program.isa)
        self._program: _C.Program | None = program
        compiler = _Compiler(program, plan, precision)
        try:
            compiler.run()
        except MemoryError as error:
            raise OutOfMemoryError("the packed weights do not fit into memory") from error
        self.op_stages: tuple[int, ...] = tuple(compiler.op_stages)
        """For each operation of the plan the stage, an index of `listing`, that computes it."""
        self.stage_parts: dict[int, int] = compiler.stage_parts
        """Stages that belong to an operation but are not its stage in ``op_stages``, and that."""
        self._lora_sites = compiler.lora_sites
        self.info: dict[str, Any] = {
            "backend": "native",
            "isa": program.isa,
            "num_threads": program.num_threads,
            "weight_bytes": program.weight_bytes,
            "kv_cache_dtype": _KV_DTYPES[kv_cache_dtype],
            "activation_precision": precision,
        }

    # ---- KV cache ----------------------------------------------------------------------------

    def kv_bytes_per_block(self) -> int:
        """Bytes of one block, keys and values of all layers together."""
        return self._live().kv_bytes_per_block

    def init_kv_cache(self, num_blocks: int) -> None:
        """Reserve a cache of ``num_blocks`` blocks.

        Memory is committed as blocks are used, and a little ahead of that while a processor has
        nothing else to do (csrc/include/tellin/commit_ahead.h).

        Raises:
            OutOfMemoryError: the system refuses the address space.
        """
        try:
            self._live().init_kv_cache(num_blocks)
        except MemoryError as error:
            size = num_blocks * self.kv_bytes_per_block()
            raise OutOfMemoryError(
                f"no memory for a KV cache of {num_blocks} blocks ({size} bytes); use fewer blocks"
            ) from error

    def free_kv_cache(self) -> None:
        """Give the cache's memory back to the system."""
        self._live().free_kv_cache()

    def copy_kv_blocks(self, src_dst_pairs: Iterable[tuple[int, int]]) -> None:
        """Copy whole blocks, in the order given."""
        program = self._live()
        for source, target in src_dst_pairs:
            program.copy_kv_block(source, target)

    # ---- recurrent states --------------------------------------------------------------------

    def state_bytes_per_slot(self) -> int:
        """Bytes of one request's recurrent state, all layers together; 0 if the plan has none."""
        return 0

    def init_state_cache(self, num_slots: int) -> None:
        """Reserve ``num_slots`` slots; what was in earlier ones is lost."""

    def free_state_cache(self) -> None:
        """Give the states' memory back to the system."""

    def copy_states(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy slots, each ``(source, target)``, in the order given."""

    # ---- adapters ----------------------------------------------------------------------------

    def set_adapter(
        self,
        slot: int,
        weights: Mapping[str, tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]],
    ) -> None:
        """Load a LoRA adapter into a slot, in the place of what was there.

        Matrices whose values are all 16-bit floats, as most are saved, take half of the memory.

        Args:
            weights: by site of `Plan.lora_sites` A ``[rank, in]`` and B ``[out, rank]``, scaled.

        Raises:
            KeyError, ValueError: a site or a shape that the plan does not have.
            OutOfMemoryError: the packed matrices do not fit.
        """
        try:
            self._live().set_adapter(
                slot,
                [
                    (self._lora_sites[site], smallest_tensor(a), smallest_tensor(b))
                    for site, (a, b) in weights.items()
                ],
            )
        except MemoryError as error:
            raise OutOfMemoryError("the LoRA adapter does not fit into memory") from error

    def clear_adapter(self, slot: int) -> None:
        """Empty a slot and give its memory back."""
        self._live().clear_adapter(slot)

    def close(self) -> None:
        """Give all memory back; the backend cannot run afterwards. Views of results stay valid."""
        self._program = None

    # ---- a step ------------------------------------------------------------------------------

    def forward(self, batch: StepBatch) -> npt.NDArray[np.float32]:
        """Run the plan: logits ``[num_logits, vocab_size]`` f32, or an encoder's hidden states.

        The result is a view of native memory that the next call overwrites.

        Raises:
            ValueError, TypeError: an array has the wrong type or shape, or an index out of range;
                nothing was computed.
        """
        return self._live().forward(
            batch.token_ids,
            batch.positions,
            batch.query_start_loc,
            batch.seq_lens,
            batch.block_table,
            batch.logits_indices,
            batch.adapter_slots,
            batch.embeds,
            batch.embed_rows,
            batch.token_types,
        )

    def hidden(self) -> npt.NDArray[np.float32]:
        """Final hidden states of the last step, rows as in `Plan.hidden`; a view."""
        program = self._live()
        try:
            return program.hidden()
        except ValueError as error:
            raise EngineError(f"no hidden states: {error}") from None

    def block_maxima(self) -> npt.NDArray[np.float32] | None:
        """Maxima of the last step's logits in blocks of 64 ids, found when they were written.

        Returns:
            ``[num_logits, blocks]``, a view, infinite for blocks that hold NaN or infinity; None
            for an encoder.
        """
        return self._live().block_maxima()

    @property
    def thread_team(self) -> _C.ThreadTeam:
        """The threads that run steps, for other native work between steps."""
        return self._live().thread_team

    @property
    def last_forward_s(self) -> float:
        """Seconds spent in the last `forward`, all of them native."""
        return self._live().last_forward_s

    def set_profile(self, enabled: bool) -> None:
        """Start (from zero) or stop measuring the time of each kind of stage."""
        self._live().set_profile(enabled)

    def profile(self) -> dict[str, float]:
        """Seconds by kind of stage since profiling began, largest first."""
        seconds = self._live().profile()
        return dict(sorted(seconds.items(), key=lambda item: -item[1]))

    def stage_seconds(self) -> list[float]:
        """Seconds of every stage since profiling began."""
        return self._live().stage_seconds()

    def take_spans(self) -> npt.NDArray[np.int64]:
        """When each thread worked on which stage while profiling; every span is handed out once.

        Returns:
            ``[n, 4]``: stage, thread (0 called `forward`), begin and end in nanoseconds of
            `time.monotonic_ns`. A thread keeps the first 200,000 spans since the last call.
        """
        before = time.monotonic_ns()
        spans, now = self._live().take_spans()
        after = time.monotonic_ns()
        # `now` was read between the two. Clocks are the same on most systems: then it shows none of
        # the time that this thread may have lost in between.
        spans[:, 2:] += max(before - now, min(0, after - now))
        return spans

    def listing(self) -> list[str]:
        """The compiled stages in order, one line each."""
        return self._live().listing()

    def _live(self) -> _C.Program:
        if self._program is None:
            raise EngineError("the backend is closed; make a new one")
        return self._program


def _check_choice(parameter: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise InvalidParameterError(
            f"{parameter} is {value!r}; choose one of {', '.join(choices)}",
            parameter=parameter,
            value=value,
        )


def _sensitive_weights(plan: ir.Plan) -> frozenset[Identity]:
    """Weights that make attention values, and the one that makes the logits."""
    weight_of: dict[int, TensorRef] = {}  # by buffer: the layer that filled it last
    found: list[TensorRef | None] = []
    for op in plan.ops:
        if isinstance(op, ir.Attention):
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


class _Compiler:
    """Translates one plan into calls of a fresh program, then packs the weights."""

    def __init__(self, program: _C.Program, plan: ir.Plan, precision: str) -> None:
        self.program = program
        self.plan = plan
        self.precision = "int8" if precision == "mixed" else precision
        self.precise = _sensitive_weights(plan) if precision == "mixed" else frozenset()
        self.buffers: dict[int, int] = {}
        self.weights: dict[Identity, int] = {}
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
            self._call(None, self.program.add_kv_layer, layer.num_kv_heads, layer.head_dim)
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

    def _buffer(self, buffer: ir.Buffer) -> int:
        return self.buffers[buffer.id]

    def _weight(self, op: ir.Op, tensor: TensorRef) -> int:
        # Tied matrices are two references to the same bytes: packed once.
        key = identity(tensor)
        if key not in self.weights:
            precision = "int16" if key in self.precise else self.precision
            quant_type, data, rows, columns = tensor_arguments(tensor)
            if tensor.reader is None:
                arguments: tuple[Any, ...] = (quant_type, data, rows, columns, precision)
                weight = self._call(op, self.program.add_weight, *arguments)
            else:
                arguments = (quant_type, rows, columns, precision)
                weight = self._call(op, self.program.add_row_weight, *arguments)
            self.weights[key] = weight
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
                op, self.program.add_rotary, list(table.inv_freq), table.attention_factor
            )
            self.rotaries[table] = rotary
        return self.rotaries[table]

    # ---- operations --------------------------------------------------------------------------

    def _embed(self, op: ir.Embed) -> None:
        self.tables.append(op.weight)
        self._call(
            op, self.program.embed, *tensor_arguments(op.weight), self._buffer(op.out), op.scale
        )

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
        )

    def _act_mul(self, op: ir.ActMul) -> None:
        gate, up, out = self._buffer(op.gate), self._buffer(op.up), self._buffer(op.out)
        self._call(op, self.program.act_mul, gate, up, out, op.act)

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

    def _softcap(self, op: ir.Softcap) -> None:
        self._call(op, self.program.softcap, self._buffer(op.x), op.cap)


_EMIT: dict[type[ir.Op], Callable[[_Compiler, Any], None]] = {
    ir.Embed: _Compiler._embed,
    ir.Input: _Compiler._input,
    ir.RmsNorm: _Compiler._rms_norm,
    ir.LayerNorm: _Compiler._layer_norm,
    ir.Linear: _Compiler._linear,
    ir.MultiLinear: _Compiler._multi_linear,
    ir.GatedLinear: _Compiler._gated_linear,
    ir.Experts: _Compiler._experts,
    ir.GateRows: _Compiler._gate_rows,
    ir.Lora: _Compiler._lora,
    ir.Rope: _Compiler._rope,
    ir.Attention: _Compiler._attention,
    ir.ActMul: _Compiler._act_mul,
    ir.Activation: _Compiler._activation,
    ir.Add: _Compiler._add,
    ir.AddBias: _Compiler._add_bias,
    ir.AddPositionEmbedding: _Compiler._add_position,
    ir.AddTokenTypeEmbedding: _Compiler._add_token_type,
    ir.GatherRows: _Compiler._gather_rows,
    ir.Scale: _Compiler._scale,
    ir.Softcap: _Compiler._softcap,
}
