"""The tiny decoders of `tests.models.tiny_decoders` as GGUF files, as their converter writes them.

Experts are stacked, rows of q and k permuted, factors of rotary frequencies a tensor, xIELU's
numbers metadata; a base that a fixed alpha stretches is written stretched.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from tests.loading.gguf_writer import write_gguf
from tests.loading.vocabularies import byte_level
from tests.models.tiny_decoders import (
    DECODERS,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    VOCAB,
    Arrays,
    decoder_arrays,
)

ARCHITECTURES = {
    "cohere": "command-r",
    "hunyuan_v1_dense": "hunyuan-dense",
    "hunyuan_v1_moe": "hunyuan-moe",
    "minimax_m2": "minimax-m2",
    "ministral3": "mistral3",
}
"""``model_type`` to GGUF's name, where they differ."""
_GLOBAL = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_LAYER = {
    "input_layernorm": "attn_norm",
    "attention_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.query_layernorm": "attn_q_norm",
    "self_attn.key_layernorm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.gate.wg": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
}
_SHARED = {f"mlp.{module}.": "shexp" for module in ("shared_mlp", "shared_experts")}
_PARTS = {"w1": "gate", "w2": "down", "w3": "up"}
_PERMUTED = ("arcee", "ministral3")


def write_tiny_decoder_gguf(path: Path, name: str) -> Path:
    """Case ``name`` in float32."""
    config = DECODERS[name]
    architecture = ARCHITECTURES.get(config["model_type"], config["model_type"])
    metadata = byte_level() | {"general.architecture": architecture}
    arrays = decoder_arrays(name)
    metadata |= {f"{architecture}.{key}": v for key, v in _metadata(config).items()}
    metadata |= _xielu(config, arrays)
    return write_gguf(path, metadata, _gguf_arrays(config, arrays))


def _metadata(config: dict[str, Any]) -> dict[str, Any]:
    kind, head_dim = config["model_type"], config.get("head_dim", HEAD_DIM)
    values: dict[str, Any] = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": HIDDEN,
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.dimension_count": config.get("rotary_dim", head_dim),
        "vocab_size": VOCAB,
    }
    if "logit_scale" in config:
        values["attention.layer_norm_epsilon"] = config["layer_norm_eps"]
        values["logit_scale"] = config["logit_scale"]
    else:
        values["attention.layer_norm_rms_epsilon"] = config["rms_norm_eps"]
    if config.get("sliding_window"):
        values["attention.sliding_window"] = config["sliding_window"]
    if "layer_types" in config and config["sliding_window"]:
        values["attention.sliding_window_pattern"] = np.array(
            [layer == "sliding_attention" for layer in config["layer_types"]]
        )
    values |= _rope(config, head_dim)
    if kind in ("dots1", "hunyuan_v1_moe", "minimax_m2"):
        values |= _experts(config)
    return values


def _rope(config: dict[str, Any], head_dim: int) -> dict[str, Any]:
    rope = config.get("rope_parameters", config.get("rope_scaling", {}))
    theta = rope.get("rope_theta", config.get("rope_theta"))
    if "alpha" in rope:
        theta *= rope["alpha"] ** (head_dim / (head_dim - 2))
    values: dict[str, Any] = {"rope.freq_base": theta}
    if rope.get("rope_type") == "yarn":
        values |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": rope["factor"],
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
            "rope.scaling.yarn_beta_fast": rope["beta_fast"],
            "rope.scaling.yarn_beta_slow": rope["beta_slow"],
        }
    if config["model_type"] == "ministral3":
        values["rope.scaling.yarn_log_multiplier"] = rope["mscale_all_dim"]
        values["attention.temperature_scale"] = rope["llama_4_scaling_beta"]
    return values


def _experts(config: dict[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {
        "expert_count": 6,
        "expert_used_count": 2,
        "expert_feed_forward_length": 32,
    }
    if config["model_type"] != "hunyuan_v1_moe":
        values["expert_gating_func"] = 2
    else:
        values["expert_shared_feed_forward_length"] = 32
    if config["model_type"] == "dots1":
        values |= {
            "leading_dense_block_count": 1,
            "expert_shared_count": 2,
            "expert_weights_scale": config["routed_scaling_factor"],
            "expert_weights_norm": True,
        }
    return values


def _xielu(config: dict[str, Any], arrays: Arrays) -> dict[str, Any]:
    if config["model_type"] != "apertus":
        return {}
    return {
        f"xielu.{part}": np.array(
            [
                float(arrays.pop(f"model.layers.{i}.mlp.act_fn.{part}").reshape(()))
                for i in range(config["num_hidden_layers"])
            ],
            dtype=np.float32,
        )
        for part in ("alpha_p", "alpha_n", "beta", "eps")
    }


def _gguf_arrays(config: dict[str, Any], arrays: Arrays) -> Arrays:
    named: Arrays = {}
    names = dict(_LAYER)
    if config["model_type"] in ("exaone4", "seed_oss"):
        names["post_attention_layernorm"] = "post_attention_norm"
    stacks: dict[str, dict[int, np.ndarray]] = {}
    for key, values in arrays.items():
        stem, _, kind = key.rpartition(".")
        if stem in _GLOBAL:
            named[f"{_GLOBAL[stem]}.{kind}"] = values
            continue
        layer, part = stem.removeprefix("model.layers.").split(".", 1)
        shared = next((p for p in _SHARED if part.startswith(p)), None)
        if kind == "e_score_correction_bias":
            named[f"blk.{layer}.exp_probs_b.bias"] = values
        elif ".experts." in part:
            _, _, expert, matrix = part.split(".")
            matrix = _PARTS.get(matrix, matrix.removesuffix("_proj"))
            stacks.setdefault(f"blk.{layer}.ffn_{matrix}_exps.weight", {})[int(expert)] = values
        elif shared is not None:
            matrix = part.removeprefix(shared).removesuffix("_proj")
            named[f"blk.{layer}.ffn_{matrix}_{_SHARED[shared]}.weight"] = values
        else:
            is_rotated = part in ("self_attn.q_proj", "self_attn.k_proj")
            if is_rotated and config["model_type"] in _PERMUTED:
                values = _permuted(values)
            named[f"blk.{layer}.{names[part]}.{kind}"] = values
    for key, stack in stacks.items():
        named[key] = np.stack([stack[e] for e in range(len(stack))])
    return named | _rotary_factors(config)


def _permuted(values: np.ndarray) -> np.ndarray:
    """Rows of each head from (first half, second half) to pairs of neighbours."""
    halves = values.reshape(-1, 2, HEAD_DIM // 2, values.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)


def _rotary_factors(config: dict[str, Any]) -> Arrays:
    """Llama 3's scaling: what each frequency is divided by."""
    rope = config.get("rope_parameters", config.get("rope_scaling", {}))
    if rope.get("rope_type") != "llama3":
        return {}
    theta = rope.get("rope_theta", config.get("rope_theta"))
    frequencies = theta ** -(np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    rotations = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    blend = np.clip((rotations - low) / (high - low), 0.0, 1.0)
    factors = 1 / (blend + (1 - blend) / rope["factor"])
    return {"rope_freqs.weight": factors.astype(np.float32)}
