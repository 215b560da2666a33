# ruff: noqa: N999
"""Native kernels and plan executor of tellin."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

class ThreadTeam:
    def __init__(self, num_threads: int) -> None: ...
    @property
    def num_threads(self) -> int: ...

def is_finite(quant_type: int, data: NDArray[np.uint8], rows: int, columns: int) -> bool: ...
def commit_ahead(used: int, bytes: int, available: int) -> int: ...
def available_memory(root: str) -> int: ...

class Program:
    """A plan compiled for this machine (csrc/include/tellin/program.h)."""

    def __init__(
        self,
        isa: str,
        num_threads: int,
        block_size: int,
        kv_dtype: str,
        team_of: Program | None = None,
    ) -> None: ...
    def add_buffer(self, width: int, logit_rows: bool) -> int: ...
    def add_weight(
        self, quant_type: int, data: NDArray[np.uint8], rows: int, columns: int, precision: str
    ) -> int: ...
    def add_row_weight(self, quant_type: int, rows: int, columns: int, precision: str) -> int: ...
    def share_weight(self, owner: Program, weight: int) -> int: ...
    def add_vector(
        self, quant_type: int, data: NDArray[np.uint8], rows: int, columns: int, offset: float
    ) -> int: ...
    def add_kv_layer(self, num_kv_heads: int, head_dim: int, value_dim: int = 0) -> int: ...
    def add_state_layer(self, num_values: int) -> int: ...
    def add_rotary(
        self, inv_freq: Sequence[float], attention_factor: float, axes: Sequence[int] = ...
    ) -> int: ...
    def input(self, out: int) -> None: ...
    def embed(
        self,
        quant_type: int,
        data: NDArray[np.uint8],
        rows: int,
        columns: int,
        out: int,
        scale: float,
        rest_is_first: bool = False,
    ) -> None: ...
    def rms_norm(self, x: int, weight: int, out: int, eps: float, group: int) -> None: ...
    def layer_norm(self, x: int, weight: int, bias: int, out: int, eps: float) -> None: ...
    def linear(self, x: int, parts: Sequence[tuple[int, int, int]], residual: int) -> None: ...
    def gated_linear(
        self, x: int, gate: tuple[int, int, int], up: tuple[int, int, int], out: int, act: str
    ) -> None: ...
    def experts(
        self,
        x: int,
        router: int,
        gate: tuple[Sequence[int], Sequence[int]],
        up: tuple[Sequence[int], Sequence[int]],
        down: tuple[Sequence[int], Sequence[int]],
        out: int,
        act: str,
        top_k: int,
        normalize: bool,
        sigmoid: bool = False,
        selection_bias: int = -1,
        scale: float = 1.0,
        scales: int = -1,
        groups: int = 1,
        top_groups: int = 1,
    ) -> None: ...
    def head_linear(self, x: int, weight: int, out: int, num_heads: int) -> None: ...
    def concat(self, x: int, y: int, out: int) -> None: ...
    def gate_rows(self, x: int, gate: int, out: int) -> None: ...
    def lora(self, x: int, outs: Sequence[int], max_rank: int) -> int: ...
    def rope(
        self,
        x: int,
        rotary: int,
        num_heads: int,
        head_dim: int,
        interleaved: bool,
        offset: int = 0,
    ) -> None: ...
    def attention(
        self,
        q: int,
        k: int,
        v: int,
        out: int,
        layer: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float,
        window: int,
        softcap: float,
        causal: bool,
        sinks: int = -1,
        value_dim: int = 0,
        windowed: bool = False,
    ) -> None: ...
    def short_conv(
        self, x: int, weight: int, bias: int, out: int, state: int, kernel: int, act: str | None
    ) -> None: ...
    def gated_delta(
        self,
        q: int,
        k: int,
        v: int,
        a: int,
        b: int,
        out: int,
        decay: int,
        dt_bias: int,
        state: int,
        num_k_heads: int,
        num_v_heads: int,
        tiled: bool,
    ) -> None: ...
    def selective_scan(
        self,
        x: int,
        b: int,
        c: int,
        dt: int,
        out: int,
        decay: int,
        skip: int,
        dt_bias: int,
        state: int,
        num_heads: int,
        num_groups: int,
        dt_min: float,
        dt_max: float,
    ) -> None: ...
    def act_mul(self, gate: int, up: int, out: int, act: str, up_start: int = 0) -> None: ...
    def activation(self, x: int, out: int, act: str) -> None: ...
    def add(self, x: int, y: int, out: int) -> None: ...
    def add_bias(self, x: int, bias: int) -> None: ...
    def add_given(self, x: int, start: int) -> None: ...
    def add_position(
        self, x: int, quant_type: int, data: NDArray[np.uint8], rows: int, columns: int
    ) -> None: ...
    def add_token_type(
        self, x: int, quant_type: int, data: NDArray[np.uint8], rows: int, columns: int
    ) -> None: ...
    def gather_rows(self, x: int, out: int) -> None: ...
    def scale(self, x: int, factor: float) -> None: ...
    def scale_by_weight(self, x: int, weight: int) -> None: ...
    def add_scaled(
        self, x: int, y: int, coefs: int, out: int, column: int, offset: float, factor: float
    ) -> None: ...
    def match_magnitude(self, x: int, target: int) -> None: ...
    def keep_largest(self, x: int, deviations: float) -> None: ...
    def scale_by_position(self, x: int, beta: float, length: int) -> None: ...
    def xielu(self, x: int, out: int, alpha_p: int, alpha_n: int, beta: int, eps: int) -> None: ...
    def softcap(self, x: int, cap: float) -> None: ...
    def finalize(self, output: int, hidden: int, vocab_size: int) -> None: ...
    def pack_weight(self, weight: int, begin: int, end: int) -> None: ...
    def pack_rows(
        self,
        weight: int,
        begin: int,
        quant_type: int,
        data: NDArray[np.uint8],
        rows: int,
        columns: int,
    ) -> None: ...
    def set_adapter(
        self,
        slot: int,
        weights: Sequence[
            tuple[
                int,
                tuple[int, NDArray[np.uint8], int, int],
                tuple[int, NDArray[np.uint8], int, int],
            ]
        ],
    ) -> None: ...
    def clear_adapter(self, slot: int) -> None: ...
    def init_kv_cache(self, num_blocks: int, system_root: str = "") -> None: ...
    def free_kv_cache(self) -> None: ...
    def copy_kv_block(self, source: int, target: int) -> None: ...
    def init_state_cache(self, num_slots: int) -> None: ...
    def free_state_cache(self) -> None: ...
    def copy_state(self, source: int, target: int) -> None: ...
    def forward(
        self,
        token_ids: NDArray[np.int32],
        positions: NDArray[np.int32],
        query_start_loc: NDArray[np.int32],
        seq_lens: NDArray[np.int32],
        block_table: NDArray[np.int32],
        logits_indices: NDArray[np.int32],
        adapter_slots: NDArray[np.int32] | None = None,
        embeds: NDArray[np.float32] | None = None,
        embed_rows: NDArray[np.int32] | None = None,
        token_types: NDArray[np.int32] | None = None,
        state_slots: NDArray[np.int32] | None = None,
        state_saves: NDArray[np.int32] | None = None,
        rope_positions: NDArray[np.int32] | None = None,
        seen_ends: NDArray[np.int32] | None = None,
        window_starts: NDArray[np.int32] | None = None,
    ) -> NDArray[np.float32]: ...
    def hidden(self) -> NDArray[np.float32]: ...
    def block_maxima(self) -> NDArray[np.float32] | None: ...
    def set_profile(self, enabled: bool) -> None: ...
    def profile(self) -> dict[str, float]: ...
    def stage_seconds(self) -> list[float]: ...
    def take_spans(self) -> tuple[NDArray[np.int64], int]: ...
    def listing(self) -> list[str]: ...
    @property
    def num_stages(self) -> int: ...
    @property
    def kv_bytes_per_block(self) -> int: ...
    @property
    def state_bytes_per_slot(self) -> int: ...
    @property
    def num_kv_blocks(self) -> int: ...
    @property
    def kv_committed_bytes(self) -> int: ...
    @property
    def num_threads(self) -> int: ...
    @property
    def thread_team(self) -> ThreadTeam: ...
    @property
    def isa(self) -> str: ...
    @property
    def weight_bytes(self) -> int: ...
    @property
    def last_forward_s(self) -> float: ...

def linear_variants() -> list[str]:
    """Kernel variants this machine runs, best first."""

def dequantize_rows(
    isa: str, quant_type: int, data: NDArray[np.uint8], out: NDArray[np.float32]
) -> None:
    """
    Dequantises the rows of a file tensor (uint8 bytes) to out: [rows, k] float32.
    """

def quantize_rows(
    isa: str, x: NDArray[np.float32], precision: str = "int8", columns: int = 0
) -> NDArray[np.uint8]: ...

class PackedLinear:
    """A weight matrix packed for one kernel variant."""

    def __init__(
        self,
        isa: str,
        quant_type: int,
        data: NDArray[np.uint8],
        n: int,
        k: int,
        precision: str = "int8",
    ) -> None: ...
    def run(
        self, x: NDArray[np.float32], out: NDArray[np.float32], m0: int, m1: int, g0: int, g1: int
    ) -> None: ...
    @property
    def num_groups(self) -> int: ...
    @property
    def packed_bytes(self) -> int: ...
    def bytes(self) -> NDArray[np.uint8]: ...

class Sampler:
    def __init__(self, num_ids: int, mode: int, isa: str | None = None) -> None: ...
    def set_slot(
        self,
        slot: int,
        *,
        temperature: float,
        top_p: float,
        top_k: int,
        min_p: float,
        repetition_penalty: float,
        frequency_penalty: float,
        presence_penalty: float,
        rng_key: int,
        min_tokens: int,
        num_logprobs: int,
        allowed_ids: Sequence[int] | None,
        stop_ids: Sequence[int],
        bias_ids: Sequence[int],
        bias_values: Sequence[float],
        bad_words: Sequence[Sequence[int]],
        logprob_ids: Sequence[int],
    ) -> None: ...
    def sample(
        self,
        logits: NDArray[np.float32],
        slots: NDArray[np.int32],
        logits_rows: NDArray[np.int32],
        history_lens: NDArray[np.int32],
        prompt_lens: NDArray[np.int32],
        history: NDArray[np.int32],
        tokens: NDArray[np.int32],
        status: NDArray[np.int32],
        stages: int,
        bitmask: NDArray[np.int32] | None = None,
        bitmask_rows: NDArray[np.int32] | None = None,
        raw: NDArray[np.float32] | None = None,
        raw_rows: NDArray[np.int32] | None = None,
        logprob_ids: NDArray[np.int32] | None = None,
        logprobs: NDArray[np.float32] | None = None,
        ranks: NDArray[np.int32] | None = None,
        team: ThreadTeam | None = None,
        maxima: NDArray[np.float32] | None = None,
    ) -> None: ...
    def prompt_logprobs(
        self,
        logits: NDArray[np.float32],
        ids: NDArray[np.int32],
        k: int,
        out_ids: NDArray[np.int32],
        out_values: NDArray[np.float32],
        ranks: NDArray[np.int32],
        status: NDArray[np.int32],
        team: ThreadTeam | None = None,
        maxima: NDArray[np.float32] | None = None,
    ) -> None: ...
    def num_logprob_columns(self, slot: int) -> int: ...
    @property
    def isa(self) -> str: ...
    @property
    def num_ids(self) -> int: ...

def propose_ngram(
    history: NDArray[np.int32],
    slots: NDArray[np.int32],
    lens: NDArray[np.int32],
    limits: NDArray[np.int32],
    min_n: int,
    max_n: int,
    most_recent: bool,
    out: NDArray[np.int32],
    counts: NDArray[np.int32],
) -> None: ...

class SuffixDrafter:
    """Suffix decoding (csrc/include/tellin/drafting.h)."""

    def __init__(
        self,
        max_depth: int,
        max_cached_requests: int,
        max_spec_factor: float,
        min_token_prob: float,
    ) -> None: ...
    def propose(
        self,
        history: NDArray[np.int32],
        slots: NDArray[np.int32],
        lens: NDArray[np.int32],
        limits: NDArray[np.int32],
        out: NDArray[np.int32],
        counts: NDArray[np.int32],
    ) -> None: ...
    def add_finished(self, ids: NDArray[np.int32]) -> None: ...
    @property
    def num_cached_requests(self) -> int: ...

def mass_range(
    row: NDArray[np.float32], temperature: float, nats: float, isa: str, listed_nats: float
) -> list[int]: ...
def philox4x32(key: int, index: int, purpose: int) -> list[int]:
    """Four words of Philox4x32-10 for the counter (index, purpose, 0, 0)."""
