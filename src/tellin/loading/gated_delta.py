"""Qwen3-Next and Qwen3.5 in files: dimensions of linear attention, names, rows that are mixed.

Their layers take turns: linear attention by the gated delta rule, and attention whose output is
gated. Canonical names are those of Qwen3.5's checkpoints, with every projection by itself:

====================================================== =========================================
``layers.{i}.linear_attn.in_proj_{q,k,v,z,a,b}.weight`` in-projections; z gates the output
``layers.{i}.linear_attn.conv1d.weight``               convolution of q, k and v, one on the other
``layers.{i}.linear_attn.{A_log,dt_bias}``             a value per value head; GGUF has ``A``:
                                                       -exp(A_log)
``layers.{i}.linear_attn.{norm,out_proj}.weight``
``layers.{i}.self_attn.{q,gate}_proj.weight``          rows that files mix head by head
====================================================== =========================================

Source: the checkpoints' model classes (transformers 5.24); conventions of the reference converter
to GGUF, which brings value heads of Qwen3.5 into an order of its own.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tellin.exceptions import ModelLoadError, UnsupportedModelError
from tellin.loading.key_names import describe
from tellin.loading.mrope import mrope_section
from tellin.loading.reordered import Order
from tellin.loading.tensors import LinearAttentionHParams, ModelHParams
from tellin.loading.typed_mapping import TypedMapping

GATED_DELTA = ("qwen35", "qwen35moe", "qwen3next")
"""Architectures of these families, as GGUF calls them."""
KINDS = ("linear_attention", "full_attention")
_TILED = ("qwen35", "qwen35moe")
"""Whose GGUF files have value head h beside key head ``h % num_key_heads``."""
_MAX_SIZE = 1 << 16
_TEXT = {"rms_norm_eps": 1e-6, "head_dim": 256, "partial_rotary_factor": 0.25}
GATED_DELTA_DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen35": _TEXT,
    "qwen35moe": {
        **_TEXT,
        "intermediate_size": 512,  # of no layer: all have experts
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
    },
    "qwen3next": {
        **_TEXT,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "norm_topk_prob": True,
    },
}
"""What a ``config.json`` leaves out, by architecture."""
_DEFAULTS = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_GGUF_LAYER = {
    "attn_qkv.weight": "linear_attn.in_proj_qkv.weight",
    "attn_gate.weight": "linear_attn.in_proj_z.weight",
    "ssm_in.weight": "linear_attn.in_proj_qkvz.weight",
    "ssm_ba.weight": "linear_attn.in_proj_ba.weight",
    "ssm_alpha.weight": "linear_attn.in_proj_a.weight",
    "ssm_beta.weight": "linear_attn.in_proj_b.weight",
    "ssm_conv1d.weight": "linear_attn.conv1d.weight",
    "ssm_norm.weight": "linear_attn.norm.weight",
    "ssm_out.weight": "linear_attn.out_proj.weight",
    "ssm_a": "linear_attn.A",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "post_attention_norm.weight": "post_attention_layernorm.weight",
}
_GGUF_NAME = re.compile(r"blk\.(\d+)\.(.+)\Z")


def gated_delta_gguf_name(name: str) -> str | None:
    """The canonical name of a GGUF tensor that only these families have; None for others."""
    match = _GGUF_NAME.match(name)
    own = _GGUF_LAYER.get(match[2]) if match else None
    return f"layers.{match[1]}.{own}" if match and own else None


# ---- hyperparameters -----------------------------------------------------------------------------


def linear_attention_from_config(config: TypedMapping, hparams: ModelHParams) -> ModelHParams:
    """``hparams`` with what a ``config.json`` says of linear attention, if it is of these families.

    Raises:
        UnsupportedModelError: a variant that does not run here.
        ModelLoadError: a value is impossible.
    """
    if hparams.architecture not in GATED_DELTA:
        return hparams
    if not config.get_bool("attn_output_gate", True):
        raise UnsupportedModelError(
            f"{config.path}: 'attn_output_gate' is False, which is not supported for "
            f"{hparams.architecture!r}"
        )
    sizes = {key: config.get_int(key, default) for key, default in _DEFAULTS.items()}
    if config.has("layer_types"):
        kinds = tuple(config.get_strings("layer_types"))[: hparams.num_hidden_layers]
    else:
        kinds = _every_nth(config.get_int("full_attention_interval", 4), hparams)
    linear = LinearAttentionHParams(
        num_key_heads=sizes["linear_num_key_heads"],
        num_value_heads=sizes["linear_num_value_heads"],
        key_head_dim=sizes["linear_key_head_dim"],
        value_head_dim=sizes["linear_value_head_dim"],
        conv_kernel=sizes["linear_conv_kernel_dim"],
    )
    hparams = replace(hparams, norm_weight_offset=1.0, mrope_section=_mrope(config, hparams))
    return _checked(config, hparams, linear, kinds)


def _mrope(config: TypedMapping, hparams: ModelHParams) -> tuple[int, ...]:
    if hparams.architecture not in _TILED:
        return ()
    rope = config.get_mapping("rope_parameters") if config.has("rope_parameters") else config
    return mrope_section(rope, (11, 11, 10))


def linear_attention_from_gguf(metadata: TypedMapping, hparams: ModelHParams) -> ModelHParams:
    """``hparams`` with what a GGUF file says of linear attention. Raises: as with a config."""
    architecture = hparams.architecture
    if architecture not in GATED_DELTA:
        return hparams

    def number(key: str) -> int:
        return metadata.get_int(f"{architecture}.ssm.{key}")

    num_values, inner = number("time_step_rank"), number("inner_size")
    if num_values < 1 or inner % num_values:
        raise ModelLoadError(
            f"{metadata.path}: {architecture}.ssm.inner_size is {inner}, not a multiple of "
            f"time_step_rank, {num_values}"
        )
    linear = LinearAttentionHParams(
        num_key_heads=number("group_count"),
        num_value_heads=num_values,
        key_head_dim=number("state_size"),
        value_head_dim=inner // num_values,
        conv_kernel=number("conv_kernel"),
        is_tiled=architecture in _TILED,
    )
    recurrent = f"{architecture}.attention.recurrent_layers"
    if metadata.has(recurrent):
        flags = metadata.get_flags(recurrent, hparams.num_hidden_layers)
        kinds = tuple(KINDS[0] if flag else KINDS[1] for flag in flags)
    else:
        interval = metadata.get_int(f"{architecture}.full_attention_interval", 4)
        kinds = _every_nth(interval, hparams)
    return _checked(metadata, hparams, linear, kinds)


def _every_nth(interval: int, hparams: ModelHParams) -> tuple[str, ...]:
    """Every ``interval``-th layer attends to all."""
    layers = range(1, hparams.num_hidden_layers + 1)
    return tuple(KINDS[int(interval > 0 and i % interval == 0)] for i in layers)


def _checked(
    source: TypedMapping,
    hparams: ModelHParams,
    linear: LinearAttentionHParams,
    kinds: Sequence[str],
) -> ModelHParams:
    path = source.path
    for name in (
        "num_key_heads",
        "num_value_heads",
        "key_head_dim",
        "value_head_dim",
        "conv_kernel",
    ):
        value = getattr(linear, name)
        if not 1 <= value <= _MAX_SIZE:
            field = "linear conv_kernel" if name == "conv_kernel" else name
            raise ModelLoadError(
                f"{path}: {describe(source, field, value)}, allowed are 1 to {_MAX_SIZE}"
            )
    if linear.num_value_heads % linear.num_key_heads:
        raise ModelLoadError(
            f"{path}: {describe(source, 'num_value_heads', linear.num_value_heads)} and "
            f"{describe(source, 'num_key_heads', linear.num_key_heads)}: value heads of linear "
            "attention cannot share key heads evenly"
        )
    if len(kinds) != hparams.num_hidden_layers:
        raise ModelLoadError(
            f"{path}: tells the kind of {len(kinds)} layers; there are {hparams.num_hidden_layers}"
        )
    for kind in kinds:
        if kind not in KINDS:
            raise UnsupportedModelError(
                f"{path}: has a layer of kind {kind!r}, which is not supported for "
                f"{hparams.architecture!r}; supported are {', '.join(KINDS)}"
            )
    return replace(hparams, linear_attention=linear, layer_types=tuple(kinds))


# ---- mixed rows ----------------------------------------------------------------------------------


def gated_delta_parts(hparams: ModelHParams, layer: str) -> list[tuple[str, int]]:
    """Name and rows of each linear layer in a matrix of these families; none if it is just one."""
    linear = hparams.linear_attention
    prefix, _, name = layer.rpartition(".")
    if linear is None:
        return []
    keys = linear.num_key_heads * linear.key_head_dim
    values = linear.num_value_heads * linear.value_head_dim
    if name == "q_proj" and prefix.endswith(".self_attn"):
        rows = dict.fromkeys(
            ("q_proj", "gate_proj"), hparams.num_attention_heads * hparams.head_dim
        )
    elif name == "in_proj_qkv":
        rows = {"in_proj_q": keys, "in_proj_k": keys, "in_proj_v": values}
    elif name == "in_proj_qkvz":
        rows = {"in_proj_q": keys, "in_proj_k": keys, "in_proj_v": values, "in_proj_z": values}
    elif name == "in_proj_ba":
        rows = dict.fromkeys(("in_proj_b", "in_proj_a"), linear.num_value_heads)
    else:
        return []
    return [(f"{prefix}.{part}", count) for part, count in rows.items()]


def gated_delta_order(hparams: ModelHParams, layer: str) -> Order | None:
    """The file's row for each row of a matrix whose parts lie one after the other.

    None where they do so in the file. Where not, its rows are groups (by attention head, or by key
    head) of which every part has a piece.
    """
    linear = hparams.linear_attention
    prefix, _, name = layer.rpartition(".")
    if linear is None:
        return None
    groups, per_key = linear.num_key_heads, linear.num_value_heads // linear.num_key_heads
    keys, values = linear.key_head_dim, per_key * linear.value_head_dim
    if name == "q_proj" and prefix.endswith(".self_attn"):
        groups, pieces = hparams.num_attention_heads, [hparams.head_dim, hparams.head_dim]
    elif name == "in_proj_qkvz":
        pieces = [keys, keys, values, values]
    elif name == "in_proj_ba":
        pieces = [per_key, per_key]
    else:
        return None
    rows = np.arange(groups * sum(pieces), dtype=np.int64).reshape(groups, -1)
    ends = np.cumsum(pieces).tolist()
    return np.concatenate([part.reshape(-1) for part in np.split(rows, ends[:-1], axis=1)])


def value_head_order(hparams: ModelHParams, layer: str) -> Order | None:
    """The checkpoint's place for each output of a layer (of out_proj: input) that value heads have.

    None where the model has the checkpoint's order.
    """
    linear = hparams.linear_attention
    prefix, _, name = layer.rpartition(".")
    if linear is None or not linear.is_tiled or not prefix.endswith(".linear_attn"):
        return None
    if name in ("in_proj_v", "in_proj_z", "out_proj"):
        width = linear.value_head_dim
    elif name in ("in_proj_a", "in_proj_b"):
        width = 1
    else:
        return None
    places = np.arange(linear.num_value_heads * width, dtype=np.int64)
    return places.reshape(linear.num_key_heads, -1, width).swapaxes(0, 1).reshape(-1)
