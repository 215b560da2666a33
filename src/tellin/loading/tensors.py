"""Weights as they lie in a file: names, shapes, storage types, bytes. Nothing is converted here.

`QuantType` numbers are GGUF's tensor type numbers (source: GGUF specification, ggml type
enumeration).
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt


class QuantType(enum.IntEnum):
    """Storage type of a tensor; values are GGUF's."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    IQ4_NL = 20
    IQ4_XS = 23
    BF16 = 30
    E4M3 = 1000
    """Not GGUF's: a float32 scale, then float8 E4M3."""
    MXFP4 = 39

    @property
    def block_size(self) -> int:
        """Elements per block."""
        return BLOCK_SIZES[self][0]

    @property
    def block_bytes(self) -> int:
        """Bytes per block."""
        return BLOCK_SIZES[self][1]


BLOCK_SIZES: Mapping[QuantType, tuple[int, int]] = {
    QuantType.F32: (1, 4),
    QuantType.F16: (1, 2),
    QuantType.BF16: (1, 2),
    QuantType.E4M3: (128, 132),
    QuantType.Q4_0: (32, 18),
    QuantType.Q4_1: (32, 20),
    QuantType.Q5_0: (32, 22),
    QuantType.Q5_1: (32, 24),
    QuantType.Q8_0: (32, 34),
    QuantType.Q2_K: (256, 84),
    QuantType.Q3_K: (256, 110),
    QuantType.Q4_K: (256, 144),
    QuantType.Q5_K: (256, 176),
    QuantType.Q6_K: (256, 210),
    QuantType.IQ4_NL: (32, 18),
    QuantType.IQ4_XS: (256, 136),
    QuantType.MXFP4: (32, 17),
}


class RowReader(Protocol):
    """Makes rows of a matrix that its file holds in another layout than blocks of a `QuantType`."""

    @property
    def format_name(self) -> str:
        """What the file holds, for people."""

    @property
    def views(self) -> Sequence[npt.NDArray[np.uint8]]:
        """The file's bytes that rows are made of, whose pages can be released afterwards."""

    def read_rows(self, start: int, stop: int) -> npt.NDArray[np.uint8]:
        """Blocks of rows ``[start, stop)``, uint8 ``[num_bytes]``.

        Raises:
            ModelLoadError: the file holds what no weight is made of.
        """


@dataclass(frozen=True, eq=False)
class TensorRef:
    """A tensor inside a memory-mapped file; compared and hashed by identity.

    ``shape`` is row-major, as in PyTorch: a linear layer's weight is ``(out_features,
    in_features)``. ``data`` is a read-only uint8 view ``[num_bytes]`` of the map; rows are
    contiguous, each a whole number of blocks of ``quant_type``. With a ``reader``, a matrix's rows
    are made by it, from row ``first_row`` on, and ``data`` is what the file holds of the codes.
    """

    name: str
    shape: tuple[int, ...]
    quant_type: QuantType
    data: npt.NDArray[np.uint8]
    reader: RowReader | None = None
    first_row: int = 0

    @property
    def num_elements(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def num_bytes(self) -> int:
        """Size in blocks of ``quant_type``."""
        return self.num_elements // self.quant_type.block_size * self.quant_type.block_bytes

    @property
    def format_name(self) -> str:
        """What the file holds, for people."""
        return self.quant_type.name if self.reader is None else self.reader.format_name

    def read_rows(self, start: int, stop: int) -> npt.NDArray[np.uint8]:
        """Blocks of rows ``[start, stop)``, uint8 ``[num_bytes]``; a view if there is no reader."""
        if self.reader is not None:
            return self.reader.read_rows(self.first_row + start, self.first_row + stop)
        row_bytes = len(self.data) // self.shape[0]
        return self.data[start * row_bytes : stop * row_bytes]

    def row_range(self, start: int, stop: int) -> TensorRef:
        """Rows ``[start, stop)`` as a tensor of their own; nothing is copied."""
        shape = (stop - start, *self.shape[1:])
        if self.reader is not None:
            return replace(self, shape=shape, first_row=self.first_row + start)
        return replace(self, shape=shape, data=self.read_rows(start, stop))


@dataclass(frozen=True)
class RopeScaling:
    """Rotary embedding scaling.

    ``kind``: none (with ``factors``: divide by them), linear, llama3, yarn or longrope.
    """

    kind: str = "none"
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    factors: tuple[float, ...] | None = None
    """Divisors per frequency that come with the model (GGUF ``rope_freqs``; longrope: short)."""
    long_factors: tuple[float, ...] | None = None
    """longrope only: divisors for contexts beyond ``original_max_position_embeddings``."""
    truncate: bool = True
    """yarn only: the bounds of its ramp are whole dimensions."""


@dataclass(frozen=True)
class MambaHParams:
    """Dimensions of Mamba2 layers."""

    num_heads: int
    head_dim: int
    state_dim: int
    num_groups: int
    """Heads of a group share b and c."""
    conv_kernel: int
    time_step_limit: tuple[float, float] = (0.0, math.inf)
    norm_before_gate: bool = False
    """Where there is a norm: False = of the gated values, True = of those to be gated."""


@dataclass(frozen=True)
class LinearAttentionHParams:
    """Dimensions of layers with the gated delta rule."""

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel: int
    is_tiled: bool = False
    """Value head h goes with key head ``h % num_key_heads``; False: neighbours share one."""


@dataclass(frozen=True)
class AttentionLayer:
    """Attention of one layer, in models whose layers differ in more than a window (Gemma 4)."""

    head_dim: int
    num_key_value_heads: int
    is_sliding: bool
    kv_layer: int
    """The layer whose keys and values it reads: itself, or an earlier one, and it has none."""
    has_values: bool = True
    """False: what becomes its keys becomes its values, too."""


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention: keys and values of all heads come from one latent per token.

    ``rank`` values of it and ``rope_dim`` rotated ones that all heads share make a head's keys:
    ``nope_dim + rope_dim`` values. A head's values are ``value_dim`` many.
    """

    rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int


@dataclass(frozen=True)
class ModelHParams:
    """A model's dimensions, whatever file format they came from (names: Hugging Face configs)."""

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    norm_eps: float = 1e-5
    hidden_act: str = "silu"
    """silu, gelu, gelu_tanh, relu or swiglu_oai."""
    rope_theta: float = 10000.0
    rope_local_theta: float | None = None
    """Base of sliding-window layers where it differs (Gemma 3)."""
    rope_dim: int | None = None
    """Rotated dimensions of a head; None = all."""
    rope_interleaved: bool = False
    """True: pairs are (2i, 2i+1) (GGUF llama weights); False: (i, i + rope_dim/2)."""
    rope_scaling: RopeScaling = RopeScaling()
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    attention_scale: float | None = None
    """Multiplier of q·k; None = head_dim ** -0.5."""
    embedding_scale: float = 1.0
    sliding_window: int | None = None
    sliding_window_pattern: int | None = None
    """Every n-th layer is global, the others use the window; None = all alike."""
    norm_weight_offset: float = 0.0
    """Added to every RMSNorm weight (Gemma safetensors: 1; GGUF has it folded in: 0)."""
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    num_experts: int = 0
    num_experts_per_tok: int = 0
    extra: Mapping[str, object] | None = None
    moe_intermediate_size: int = 0
    """Width of one expert; ``intermediate_size`` is that of layers without experts."""
    norm_topk_prob: bool = False
    """Divide the weights of a token's experts by their sum."""
    expert_scoring: str = "softmax"
    """softmax or sigmoid of the router's logits."""
    expert_scale: float = 1.0
    """Factor of the weights of a token's experts."""
    residual_scale: float = 1.0
    """Factor of what a block adds to the residual stream (Granite)."""
    no_rope_interval: int | None = None
    """Every n-th layer does not rotate q and k (SmolLM3); None = all do."""
    logit_scale: float = 1.0
    """Factor of the logits (Granite: one over ``logits_scaling``)."""
    position_offset: int = 0
    """Row of the position table that the first token takes (RoBERTa: padding id + 1)."""
    layer_types: tuple[str, ...] = ()
    """One per layer where they differ: full_attention, linear_attention, conv, mamba, mlp, moe."""
    conv_kernel: int = 0
    """Inputs that a short convolution sees (LFM2)."""
    mamba: MambaHParams | None = None
    linear_attention: LinearAttentionHParams | None = None
    attention_layers: tuple[AttentionLayer, ...] = ()
    """One per layer, if they differ; empty: all are as the fields above say."""
    per_layer_input_size: int = 0
    """Width of what every layer gets of a token besides the residual stream (Gemma 4); 0: none."""
    num_streams: int = 1
    """Residual streams, of which layers work on the first (Gemma 3n)."""
    kept_deviations: tuple[float, ...] = ()
    """Of every layer: an MLP's gate keeps what exceeds the mean by so many standard deviations;
    -inf: all. Empty: all keep all."""
    output_scales: Mapping[str, float] | None = None
    """Factors of what linear layers give, by their name within a layer (Falcon-H1)."""
    latent: LatentAttention | None = None
    """Multi-head latent attention (DeepSeek-V2); ``head_dim`` is that of a head's keys."""
    expert_groups: int = 1
    """Of equally many neighbouring experts, from ``expert_top_groups`` of which a token chooses."""
    expert_top_groups: int = 1
    classifier_act: str = "tanh"
    """Of an encoder's classifier, behind its dense layer: tanh, or as ``hidden_act``."""
    embedding_size: int | None = None
    """Width of the token embedding where it may differ (OPT); None = hidden_size."""
    parallel_residual: bool = False
    """Attention and MLP both read the layer's input, and their sum is added to it (GPT-J)."""
    has_norms_after: bool = False
    """Norms of the sums after attention and MLP instead of before these (OPT 350M)."""
    mrope_section: tuple[int, ...] = ()
    """Frequencies that turn by time, height and width, interleaved (Qwen3.5); empty: no such."""
    query_temperature: tuple[float, int] | None = None
    """Queries at position p are multiplied by ``1 + first * ln(1 + p // second)`` (Ministral 3)."""
    mrope_in_blocks: bool = False
    """Those of time come first, then those of height, then those of width (Qwen2-VL)."""
    deepstack_layers: int = 0
    """So many layers have a row of each picture's position added to what they make (Qwen3-VL)."""

    @property
    def state_size(self) -> int:
        """Width of the token embedding, and of the final hidden states."""
        return self.embedding_size or self.hidden_size
