"""The tiny hybrids of `tests.models.tiny_hybrids` as GGUF files, as their converter writes them.

Vectors are reshaped, experts stacked, rows of q and k permuted, constant factors multiplied in.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tests.loading.gguf_writer import write_gguf
from tests.loading.vocabularies import byte_level
from tests.models.tiny_hybrids import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    HYBRIDS,
    KV_HEADS,
    VOCAB,
    Arrays,
    hybrid_arrays,
    layer_kinds,
    mamba_sizes,
)

_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.embedding_norm": "token_embd_norm",
    "model.norm": "output_norm",
    "lm_head": "output",
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.out_proj": "attn_output",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "conv.conv": "shortconv.conv",
    "conv.in_proj": "shortconv.in_proj",
    "conv.out_proj": "shortconv.out_proj",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w2": "ffn_down",
    "feed_forward.w3": "ffn_up",
    "feed_forward.gate": "ffn_gate_inp",
    "mamba.in_proj": "ssm_in",
    "mamba.conv1d": "ssm_conv1d",
    "mamba.norm": "ssm_norm",
    "mamba.out_proj": "ssm_out",
    "backbone.embeddings": "token_embd",
    "backbone.norm_f": "output_norm",
    "model.final_layernorm": "output_norm",
    "norm": "attn_norm",
    "mixer.q_proj": "attn_q",
    "mixer.k_proj": "attn_k",
    "mixer.v_proj": "attn_v",
    "mixer.o_proj": "attn_output",
    "mixer.gate": "ffn_gate_inp",
    "mixer.fc1_latent_proj": "ffn_latent_down",
    "mixer.fc2_latent_proj": "ffn_latent_up",
    "mixer.shared_experts.up_proj": "ffn_up_shexp",
    "mixer.shared_experts.down_proj": "ffn_down_shexp",
    "mixer.up_proj": "ffn_up",
    "mixer.down_proj": "ffn_down",
    "feed_forward.gate_proj": "ffn_gate",
    "feed_forward.up_proj": "ffn_up",
    "feed_forward.down_proj": "ffn_down",
    "block_sparse_moe.router.layer": "ffn_gate_inp",
    "block_sparse_moe.output_linear": "ffn_down_exps",
}
_GGUF_VECTORS = {"mamba.A_log": "ssm_a", "mamba.D": "ssm_d", "mamba.dt_bias": "ssm_dt.bias"}


def write_tiny_hybrid_gguf(path: Path, name: str) -> Path:
    """Case ``name`` in float32, as the reference converter writes it; not one that rotates."""
    config = HYBRIDS[name]
    architecture = name if name.startswith("nemotron_h") else name.partition("_")[0]
    metadata = byte_level() | {"general.architecture": architecture}
    metadata |= {f"{architecture}.{key}": v for key, v in _metadata(config).items()}
    return write_gguf(path, metadata, _gguf_arrays(config, hybrid_arrays(name)))


def _metadata(config: dict[str, Any]) -> dict[str, Any]:
    kinds = layer_kinds(config)
    kv_heads = [KV_HEADS if kind in ("attention", "hybrid") else 0 for kind in kinds]
    values = {
        "block_count": len(kv_heads),
        "context_length": config.get("max_position_embeddings", 1 << 20),
        "embedding_length": HIDDEN,
        "feed_forward_length": config.get("intermediate_size", 96),
        "attention.head_count": HEADS,
        "attention.head_count_kv": np.array(kv_heads, np.int32) if 0 in kv_heads else KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10_000.0,
        "vocab_size": VOCAB,
    }
    counts = ("num_experts", "num_local_experts", "n_routed_experts")
    count = next((config[key] for key in counts if key in config), 0)
    if count:
        values |= {"expert_count": count, "expert_used_count": config["num_experts_per_tok"]}
    if "conv_L_cache" in config:
        values["shortconv.l_cache"] = config["conv_L_cache"]
        if count:
            values |= {
                "expert_feed_forward_length": config["moe_intermediate_size"],
                "leading_dense_block_count": config["num_dense_layers"],
                "expert_gating_func": 2,
            }
        return values
    heads, inner, groups, state = mamba_sizes(config)
    values |= {
        "ssm.conv_kernel": 4,
        "ssm.state_size": state,
        "ssm.group_count": groups,
        "ssm.inner_size": inner,
        "ssm.time_step_rank": heads,
    }
    if config["model_type"] == "nemotron_h":
        width = config["moe_intermediate_size" if count else "intermediate_size"]
        widths = [width if kind in ("mlp", "moe") else 0 for kind in kinds]
        if count:
            values |= {
                "expert_feed_forward_length": width,
                "expert_shared_feed_forward_length": config["moe_shared_expert_intermediate_size"],
                "expert_shared_count": 1,
                "expert_weights_norm": True,
                "expert_weights_scale": config["routed_scaling_factor"],
                "expert_group_count": 1,
                "moe_latent_size": config["moe_latent_size"],
            }
        values["feed_forward_length"] = np.array(widths, np.int32)
        values["attention.layer_norm_epsilon"] = values.pop("attention.layer_norm_rms_epsilon")
    if config["model_type"] == "mamba2":
        del values["attention.head_count_kv"]
        return values | {"attention.head_count": 0, "feed_forward_length": 0}
    if config["model_type"] != "granitemoehybrid":
        return values | {"attention.key_length": HEAD_DIM, "attention.value_length": HEAD_DIM}
    values |= {
        "rope.scaling.finetuned": False,
        "attention.scale": config["attention_multiplier"],
        "embedding_scale": config["embedding_multiplier"],
        "residual_scale": config["residual_multiplier"],
        "logit_scale": config["logits_scaling"],
        "expert_shared_feed_forward_length": config["shared_intermediate_size"],
    }
    if not count:
        values["feed_forward_length"] = config["shared_intermediate_size"]
    return values


def _gguf_arrays(config: dict[str, Any], arrays: Arrays) -> Arrays:
    named: Arrays = {}
    for key, values in arrays.items():
        stem, _, kind = key.rpartition(".")
        if not stem.startswith(("model.layers.", "backbone.layers.")):
            is_falcon = config["model_type"] == "falcon_h1"
            factor = np.float32(config.get(_FACTORS.get(stem, ""), 1.0) if is_falcon else 1.0)
            named[f"{_GGUF_NAMES[stem]}.{kind}"] = values * factor
            continue
        _, _, layer, part = key.split(".", 3)
        values = values * np.asarray(_factor(config, part), np.float32)
        part = _mamba_name(part)
        block, stem = f"blk.{layer}", part.rpartition(".")[0]
        if part in ("feed_forward.expert_bias", "mixer.gate.e_score_correction_bias"):
            named[f"{block}.exp_probs_b.bias"] = values
        elif part in _GGUF_VECTORS:
            values = -np.exp(values) if part.endswith("A_log") else values
            shape = values.shape if part.endswith("bias") else (*values.shape, 1)
            named[f"{block}.{_GGUF_VECTORS[part]}"] = values.reshape(shape)
        elif part == "pre_ff_layernorm.weight":
            named[f"{block}.ffn_norm"] = values
        elif part.endswith("input_linear.weight"):
            gate, up = np.split(values, 2, axis=-2)
            suffix = "_exps" if "moe" in part else "_shexp" if config["num_local_experts"] else ""
            named |= {
                f"{block}.ffn_gate{suffix}.weight": gate,
                f"{block}.ffn_up{suffix}.weight": up,
            }
        elif part == "shared_mlp.output_linear.weight":
            suffix = "_shexp" if config["num_local_experts"] else ""
            named[f"{block}.ffn_down{suffix}.weight"] = values
        elif ".experts." not in part:
            named[f"{block}.{_GGUF_NAMES[stem]}.{kind}"] = _reshaped(part, config, values)
    parts = {"gate": "w1", "down": "w2", "up": "w3"}
    layers, count = "model.layers", config.get("num_experts", 0)
    module = "feed_forward"
    if "n_routed_experts" in config:
        layers, module, count = "backbone.layers", "mixer", config["n_routed_experts"]
        parts = {"down": "down_proj", "up": "up_proj"}
    for i in range(config["num_hidden_layers"]):
        if not count or f"{layers}.{i}.{module}.gate.weight" not in arrays:
            continue
        for ours, theirs in parts.items():
            experts = f"{layers}.{i}.{module}.experts"
            stack = [arrays[f"{experts}.{e}.{theirs}.weight"] for e in range(count)]
            named[f"blk.{i}.ffn_{ours}_exps.weight"] = np.stack(stack)
    return named


def _mamba_name(part: str) -> str:
    """Nemotron-H calls every layer a mixer."""
    name = part.removeprefix("mixer.")
    is_mamba = name.startswith(("in_", "out_", "conv1d", "A_log", "D", "dt_bias", "norm"))
    return f"mamba.{name}" if is_mamba and name != part else part


_FACTORS = {"model.embed_tokens": "embedding_multiplier", "lm_head": "lm_head_multiplier"}


def _factor(config: dict[str, Any], part: str) -> float | np.ndarray:
    """What Falcon-H1's converter multiplies into a matrix: a number, or one for each row."""
    if "ssm_in_multiplier" not in config:
        return 1.0
    attention = config["attention_in_multiplier"]
    if part == "mamba.in_proj.weight":
        heads, inner, groups, state = mamba_sizes(config)
        rows = (inner, inner, groups * state, groups * state, heads)
        factors = np.repeat(config["ssm_multipliers"], rows)[:, None]
        return np.asarray(factors * config["ssm_in_multiplier"], np.float32)
    return {
        "self_attn.q_proj.weight": attention,
        "self_attn.k_proj.weight": attention * config["key_multiplier"],
        "self_attn.v_proj.weight": attention,
        "self_attn.o_proj.weight": config["attention_out_multiplier"],
        "mamba.out_proj.weight": config["ssm_out_multiplier"],
        "feed_forward.gate_proj.weight": config["mlp_multipliers"][0],
        "feed_forward.down_proj.weight": config["mlp_multipliers"][1],
    }.get(part, 1.0)


def _reshaped(part: str, config: dict[str, Any], values: np.ndarray) -> np.ndarray:
    if "conv.conv." in part or "conv1d.weight" in part:
        return values.squeeze(1)
    if part == "mamba.norm.weight":
        return values.reshape(mamba_sizes(config)[2], -1)
    if config["model_type"].startswith("granite") and part.endswith(
        ("q_proj.weight", "k_proj.weight")
    ):
        halves = values.reshape(-1, 2, HEAD_DIM // 2, HIDDEN)
        return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
    return values
