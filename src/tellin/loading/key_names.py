"""What files call the hyperparameters: errors speak of a file's own keys, not of our fields.

One table for all families and both formats: of a field's spellings the one that the file at hand
has is meant. GGUF's stand behind the architecture's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tellin.loading.typed_mapping import TypedMapping

_ROPES = ("rope_parameters.", "rope_parameters.full_attention.", "rope_scaling.")
_KEYS: Mapping[str, tuple[str, ...]] = {
    "hidden_size": ("hidden_size", "embedding_length"),
    "intermediate_size": ("block_ff_dim", "intermediate_size", "feed_forward_length"),
    "num_hidden_layers": ("num_hidden_layers", "block_count"),
    "num_attention_heads": ("num_attention_heads", "attention.head_count"),
    "num_key_value_heads": ("num_key_value_heads", "attention.head_count_kv"),
    "head_dim": ("head_dim", "attention.key_length"),
    "max_position_embeddings": ("max_position_embeddings", "context_length"),
    "norm_eps": (
        "rms_norm_eps",
        "norm_eps",
        "layer_norm_eps",
        "layer_norm_epsilon",
        "attention.layer_norm_rms_epsilon",
        "attention.layer_norm_epsilon",
    ),
    "rope_theta": (
        *(f"{rope}rope_theta" for rope in _ROPES),
        "rope_theta",
        "global_rope_theta",
        "rope.freq_base",
    ),
    "rope_local_theta": (
        "rope_parameters.sliding_attention.rope_theta",
        "rope_local_base_freq",
        "local_rope_theta",
        "rope.freq_base_swa",
    ),
    "rope_dim": (
        *(f"{rope}partial_rotary_factor" for rope in _ROPES),
        "partial_rotary_factor",
        "rope.dimension_count",
        "head_dim",
        "attention.key_length",
    ),
    "rope scaling factor": (
        *(f"{rope}factor" for rope in _ROPES),
        "rope.scaling.factor",
        "rope.scale_linear",
    ),
    "rope attention_factor": (
        *(f"{rope}attention_factor" for rope in _ROPES),
        "rope.scaling.attn_factor",
    ),
    "rope frequency factor": tuple(
        f"{rope}{kind}_factor" for rope in _ROPES for kind in ("short", "long")
    ),
    "embedding_scale": ("embedding_multiplier", "embedding_scale"),
    "residual_scale": ("residual_multiplier", "residual_scale"),
    "logit_scale": ("logits_scaling", "lm_head_multiplier", "logit_scale"),
    "attention_scale": ("attention_multiplier", "query_pre_attn_scalar", "attention.scale"),
    "sliding_window": ("sliding_window", "local_attention", "attention.sliding_window"),
    "sliding_window_pattern": (
        "sliding_window_pattern",
        "_sliding_window_pattern",
        "global_attn_every_n_layers",
        "attention.sliding_window_pattern",
    ),
    "no_rope_interval": ("no_rope_layer_interval",),
    "num_experts": (
        "num_local_experts",
        "n_routed_experts",
        "moe_num_experts",
        "num_experts",
        "expert_count",
    ),
    "num_experts_per_tok": ("moe_k", "num_experts_per_tok", "top_k_experts", "expert_used_count"),
    "moe_intermediate_size": ("moe_intermediate_size", "expert_feed_forward_length"),
    "expert_scale": ("routed_scaling_factor", "expert_weights_scale"),
    "expert_groups": ("n_group", "expert_group_count"),
    "expert_top_groups": ("topk_group", "expert_group_used_count"),
    "latent rank": ("kv_lora_rank", "attention.kv_lora_rank"),
    "latent nope_dim": (
        "qk_nope_head_dim",
        "attention.key_length_mla",
        "attention.key_length",
    ),
    "latent rope_dim": ("qk_rope_head_dim", "rope.dimension_count"),
    "latent value_dim": ("v_head_dim", "attention.value_length_mla", "attention.value_length"),
    "num_streams": ("altup_num_inputs", "altup.num_inputs"),
    "per_layer_input_size": ("hidden_size_per_layer_input", "embedding_length_per_layer_input"),
    "mamba num_heads": ("mamba_n_heads", "ssm.time_step_rank"),
    "mamba head_dim": ("mamba_d_head", "ssm.inner_size"),
    "mamba inner size": ("mamba_d_ssm", "mamba_expand", "ssm.inner_size"),
    "mamba state_dim": ("mamba_d_state", "ssm.state_size"),
    "mamba num_groups": ("mamba_n_groups", "ssm.group_count"),
    "conv_kernel": ("conv_L_cache", "mamba_d_conv", "shortconv.l_cache", "ssm.conv_kernel"),
    "num_key_heads": ("linear_num_key_heads", "ssm.group_count"),
    "num_value_heads": ("linear_num_value_heads", "ssm.time_step_rank"),
    "key_head_dim": ("linear_key_head_dim", "ssm.state_size"),
    "value_head_dim": ("linear_value_head_dim", "ssm.inner_size"),
    "linear conv_kernel": ("linear_conv_kernel_dim", "ssm.conv_kernel"),
}
"""By field, its spellings; one that lies in another object is written with dots."""


def describe(source: TypedMapping | None, field: str, value: object) -> str:
    """``rms_norm_eps is -1.0``: what the file says of a field whose value is ``value``.

    Where it says something else, that ``value`` follows from, or nothing, both are told.
    """
    shown = f"{value!s:.40}"
    found = None if source is None else _find(source, field)
    if source is None:
        return f"{field} is {shown}"
    if found is None and field == "head_dim":
        parts = (_find(source, name) for name in ("hidden_size", "num_attention_heads"))
        told = " and ".join(f"{key} is {given!s:.40}" for key, given in filter(None, parts))
        return f"head_dim is {shown} (the file has no key for it; {told})"
    if found is None:
        return f"{field} is {shown} (the file has no key for it)"
    key, given = found
    if type(given) in (int, float) and given == value:
        return f"{key} is {shown}"
    if isinstance(given, np.ndarray):
        given = given[:8].tolist()
    return f"{key} is {given!r:.60}, which makes {field} {shown}"


def _find(source: TypedMapping, field: str) -> tuple[str, Any] | None:
    """The file's key, and its value there."""
    architecture = source.get("general.architecture")
    prefixes = ("",) if architecture is None else (f"{architecture}.", "clip.vision.")
    for spelling in _KEYS.get(field, (field,)):
        for prefix in prefixes:
            key = f"{prefix}{spelling}"
            if source.has(key):
                return source.name_of(key), source[key]
            outer, _, inner = spelling.rpartition(".")
            value = _inside(source, outer.split("."), inner)
            if value is not None:
                return spelling, value
    return None


def _inside(values: Mapping[str, Any], path: list[str], key: str) -> Any:
    for name in path:
        inner = values.get(name)
        if not isinstance(inner, dict):
            return None
        values = inner
    return values.get(key)
