"""`NativeBackend`: compiles a plan into a native program and runs a step of it in one call.

Owns the program that `tellin.kernels.compiler` makes of a plan, and its caches. It knows no
requests and no scheduler. Inside a step there is no Python: the program walks its stages with its
own threads, without the GIL (csrc/include/tellin/program.h). Promise 1 holds for every variant,
thread count and cache type: a row's bits depend on its own tokens only.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from tellin.exceptions import (
    EngineError,
    InvalidParameterError,
    OutOfMemoryError,
)
from tellin.kernels import _C
from tellin.kernels.adapters import smallest_tensor
from tellin.kernels.batch import StepBatch
from tellin.kernels.compiler import Compiler, PackedWeights
from tellin.kernels.cpu import ThreadChoice, default_num_threads
from tellin.models.plan import ir

logger = logging.getLogger("tellin.kernels")

_KV_DTYPES = {
    "auto": "float16",
    "float16": "float16",
    "float32": "float32",
    "int16": "int16",
    "int8": "int8",
}
_ISAS = ("portable", "avx2", "avxvnni", "avx512", "amx", "amx-bf16", "neon")


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
        isa: kernel variant (amx, avx512, avxvnni, avx2, neon, portable; amx-bf16, whose quantised
            weights and their inputs are bfloat16); None = the best that this machine runs.
        activation_precision: of quantised weights' inputs: ``int8``, ``mixed``, ``int16`` (15
            bits), ``float32``, ``high`` or ``default`` (see `resolve_activation_precision`).
        kv_cache_dtype: ``auto`` (float16), ``float16``, ``float32``, ``int8`` or ``int16``, codes
            of 13 bits that are multiplied as integers: faster with long prompts.
        block_size: tokens per cache block, a multiple of 16.
        beside: a backend of the same files that runs in turns with this one: its threads are used,
            and its packed weights where names are equal.

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
        beside: NativeBackend | None = None,
    ) -> None:
        precision = resolve_activation_precision(activation_precision)
        _check_choice("kv_cache_dtype", kv_cache_dtype, tuple(_KV_DTYPES))
        if isa:
            _check_choice("isa", isa, _ISAS)
        choice = default_num_threads()
        if num_threads is not None:
            choice = ThreadChoice(num_threads, "as num_threads says")
        elif beside is not None:
            choice = ThreadChoice(beside._live().num_threads, "those of the model")
        self.plan = plan
        self.block_size = block_size
        try:
            program = _C.Program(
                isa=isa or "",
                num_threads=choice.num_threads,
                block_size=block_size,
                kv_dtype=_KV_DTYPES[kv_cache_dtype],
                team_of=None if beside is None else beside._live(),
            )
        except ValueError as error:
            raise InvalidParameterError(str(error)) from None
        logger.info("%d kernel threads: %s; %s", choice.num_threads, choice.reason, program.isa)
        self._program: _C.Program | None = program
        shared = None
        if beside is not None:
            shared = PackedWeights(beside._live(), beside._weight_ids)
        compiler = Compiler(program, plan, precision, shared)
        try:
            compiler.run()
        except MemoryError as error:
            raise OutOfMemoryError("the packed weights do not fit into memory") from error
        self.op_stages: tuple[int, ...] = tuple(compiler.op_stages)
        """For each operation of the plan the stage, an index of `listing`, that computes it."""
        self.stage_parts: dict[int, int] = compiler.stage_parts
        """Stages that belong to an operation but are not its stage in ``op_stages``, and that."""
        self._lora_sites = compiler.lora_sites
        self._weight_ids: dict[str, int] = compiler.ids
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
        return self._live().state_bytes_per_slot

    def init_state_cache(self, num_slots: int) -> None:
        """Reserve ``num_slots`` slots; what was in earlier ones is lost.

        Memory is committed as slots are used.

        Raises:
            OutOfMemoryError: the system refuses the address space.
        """
        try:
            self._live().init_state_cache(num_slots)
        except MemoryError as error:
            size = num_slots * self.state_bytes_per_slot()
            raise OutOfMemoryError(
                f"no memory for {num_slots} recurrent states ({size} bytes); use fewer"
            ) from error

    def free_state_cache(self) -> None:
        """Give the states' memory back to the system."""
        self._live().free_state_cache()

    def copy_states(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy slots, each ``(source, target)``, in the order given."""
        program = self._live()
        for source, target in pairs:
            program.copy_state(source, target)

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
            batch.state_slots,
            batch.state_saves,
            batch.rope_positions,
            batch.seen_ends,
            batch.window_starts,
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
