"""The tiny models of `tests.models.tiny` as GGUF files, in the way converters write them.

Experts are stacked, the rows of q and k permuted for families that rotate neighbours, and what a
family's files leave out is left out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tellin.loading.tensors import ModelHParams, QuantType
from tests.loading.gguf_writer import RawTensor, write_gguf
from tests.models.tiny import ALL_CASES, DENSE_LAYERS, Q_RANK, SHARED_WIDTH, tiny_arrays

_GLOBAL = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.selection": "exp_probs_b",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}
_LAYER_LATENT = {
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "self_attn.k_b_proj": "attn_k_b",
    "self_attn.v_b_proj": "attn_v_b",
}
_LAYER_GPT_OSS = {
    "self_attn.sinks": "attn_sinks",
    "post_attention_layernorm": "post_attention_norm",
}
_LAYER_NORMS_AFTER = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_PERMUTED = ("llama", "granite", "granitemoe", "internlm2", "smollm3")
Arrays = dict[str, np.ndarray]


def write_tiny_gguf(
    path: Path,
    name: str,
    quant_type: QuantType = QuantType.F32,
    *,
    joined_latents: bool = False,
    predictor: Arrays | None = None,
    architecture: str | None = None,
) -> Path:
    """Case ``name``; matrices, but for the router, are stored as ``quant_type``.

    ``joined_latents``: what makes keys and values of latents is one matrix, as in files of 2024.
    ``predictor``: the last layer predicts a further token, and has these tensors as well.
    ``architecture``: what the file calls it, if not the case's own.
    """
    hp = ALL_CASES[name]
    own = {"mixtral": "llama", "olmo3": "olmo2"}.get(hp.architecture, hp.architecture)
    architecture = architecture or own
    arrays = tiny_arrays(name)
    if architecture in _PERMUTED:
        arrays = {key: _permuted(key, values, hp) for key, values in arrays.items()}
    metadata = _metadata(architecture, hp)
    if joined_latents:
        _join_latents(arrays, metadata, hp)
    tensors: dict[str, np.ndarray | RawTensor] = {}
    for key, values in _gguf_arrays(arrays, hp, DENSE_LAYERS.get(name, ())).items():
        is_matrix = values.ndim > 1 and "gate_inp" not in key and not key.endswith(".bias")
        tensors[key] = _stored(values, quant_type) if is_matrix else values
    if predictor is not None:
        metadata[f"{architecture}.nextn_predict_layers"] = 1
        last = f"blk.{hp.num_hidden_layers - 1}.nextn"
        tensors |= {f"{last}.{key}.weight": values for key, values in predictor.items()}
    return write_gguf(path, metadata, tensors)


def _join_latents(arrays: Arrays, metadata: dict[str, Any], hp: ModelHParams) -> None:
    latent, heads = hp.latent, hp.num_attention_heads
    assert latent is not None
    for i in range(hp.num_hidden_layers):
        prefix = f"layers.{i}.self_attn."
        keys = arrays.pop(f"{prefix}k_b_proj.weight").reshape(heads, latent.rank, -1)
        values = arrays.pop(f"{prefix}v_b_proj.weight").reshape(heads, -1, latent.rank)
        both = np.concatenate([keys.swapaxes(1, 2), values], axis=1)
        arrays[f"{prefix}kv_b_proj.weight"] = both.reshape(-1, latent.rank)
    for key, size in (("key", hp.head_dim), ("value", latent.value_dim)):
        del metadata[f"deepseek2.attention.{key}_length_mla"]
        metadata[f"deepseek2.attention.{key}_length"] = size
    metadata["deepseek2.attention.head_count_kv"] = heads


def _stored(values: np.ndarray, quant_type: QuantType) -> np.ndarray | RawTensor:
    if quant_type is QuantType.F32:
        return values
    packed = gguf.quants.quantize(values, gguf.GGMLQuantizationType(int(quant_type)))
    return RawTensor(values.shape, int(quant_type), np.ascontiguousarray(packed).tobytes())


def _permuted(key: str, values: np.ndarray, hp: ModelHParams) -> np.ndarray:
    """Rows of each head from (first half, second half) to pairs of neighbours."""
    if not key.endswith(("q_proj.weight", "k_proj.weight")):
        return values
    halves = values.reshape(-1, 2, hp.head_dim // 2, values.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)


def _gguf_arrays(arrays: Arrays, hp: ModelHParams, dense_layers: tuple[int, ...]) -> Arrays:
    named: Arrays = {}
    names = dict(_LAYER)
    if hp.architecture == "gpt-oss":
        names |= _LAYER_GPT_OSS
    elif hp.latent is not None:
        names |= _LAYER_LATENT
        arrays = {
            key: values.reshape(hp.num_attention_heads, -1, values.shape[1])
            if key.endswith((".k_b_proj.weight", ".v_b_proj.weight"))
            else values
            for key, values in arrays.items()
        }
    elif hp.architecture == "glm4moe":
        names["post_attention_layernorm"] = "post_attention_norm"
    elif hp.architecture in ("glm4", "olmo2", "olmo3"):
        names |= _LAYER_NORMS_AFTER
    if hp.architecture == "glm4":
        for i in range(hp.num_hidden_layers):
            gate, up = (arrays.pop(f"layers.{i}.mlp.{part}_proj.weight") for part in ("gate", "up"))
            arrays[f"layers.{i}.mlp.up_proj.weight"] = np.concatenate([gate, up])
    for key, values in arrays.items():
        stem, _, kind = key.rpartition(".")
        if not stem.startswith("layers."):
            named[f"{_GLOBAL[stem]}.{kind}"] = values
        elif ".experts." not in stem:
            _, layer, part = stem.split(".", 2)
            flat = values[0] if part == "mlp.shared_expert_gate" else values
            named[f"blk.{layer}.{names[part]}.{kind}"] = flat
    if not hp.num_experts:
        return named
    for i in range(hp.num_hidden_layers):
        for part in ("gate", "up", "down") if i not in dense_layers else ():
            experts = [f"layers.{i}.mlp.experts.{e}.{part}_proj" for e in range(hp.num_experts)]
            for kind in ("weight", "bias") if hp.mlp_bias else ("weight",):
                stack = np.stack([arrays[f"{expert}.{kind}"] for expert in experts])
                named[f"blk.{i}.ffn_{part}_exps.{kind}"] = stack
    return named


def _latent_metadata(hp: ModelHParams) -> dict[str, Any]:
    latent = hp.latent
    assert latent is not None
    own: dict[str, Any] = {
        "attention.head_count_kv": 1,
        "attention.key_length": latent.rank + latent.rope_dim,
        "attention.value_length": latent.rank,
        "attention.key_length_mla": hp.head_dim,
        "attention.value_length_mla": latent.value_dim,
        "attention.kv_lora_rank": latent.rank,
        "attention.q_lora_rank": Q_RANK,
        "expert_group_count": hp.expert_groups,
        "expert_group_used_count": hp.expert_top_groups,
    }
    if hp.rope_scaling.kind == "yarn":
        own["rope.scaling.yarn_log_multiplier"] = 0.07
    return own


def _metadata(architecture: str, hp: ModelHParams) -> dict[str, Any]:
    own: dict[str, Any] = {
        "block_count": hp.num_hidden_layers,
        "context_length": hp.max_position_embeddings,
        "embedding_length": hp.hidden_size,
        "feed_forward_length": hp.intermediate_size,
        "attention.head_count": hp.num_attention_heads,
        "attention.head_count_kv": hp.num_key_value_heads,
        "attention.key_length": hp.head_dim,
        "attention.value_length": hp.head_dim,
        "attention.layer_norm_rms_epsilon": hp.norm_eps,
        "rope.dimension_count": hp.rope_dim or hp.head_dim,
        "rope.freq_base": hp.rope_theta,
        "vocab_size": hp.vocab_size,
    }
    if hp.latent is not None:
        own |= _latent_metadata(hp)
    if hp.num_experts:
        own |= {"expert_count": hp.num_experts, "expert_used_count": hp.num_experts_per_tok}
        if architecture.startswith(("deepseek", "ernie", "glm4", "qwen")):
            own["expert_feed_forward_length"] = hp.moe_intermediate_size
        else:
            own["feed_forward_length"] = hp.moe_intermediate_size
    if architecture == "qwen2moe":
        own["expert_shared_feed_forward_length"] = SHARED_WIDTH
    if architecture in ("deepseek2", "glm4moe"):
        own |= {
            "expert_gating_func": 2 if hp.expert_scoring == "sigmoid" else 1,
            "expert_weights_scale": hp.expert_scale,
            "expert_weights_norm": hp.norm_topk_prob,
        }
    if architecture in ("deepseek2", "ernie4_5-moe", "glm4moe"):
        own |= {
            "leading_dense_block_count": 1,
            "expert_shared_count": SHARED_WIDTH // hp.moe_intermediate_size,
            "expert_shared_feed_forward_length": SHARED_WIDTH,
            "interleave_moe_layer_step": 1,
        }
    if architecture == "qwen3moe":
        own["expert_weights_norm"] = hp.norm_topk_prob
    if hp.sliding_window:
        own["attention.sliding_window"] = hp.sliding_window
        if hp.sliding_window_pattern:
            own["attention.sliding_window_pattern"] = np.array(
                [(i + 1) % hp.sliding_window_pattern != 0 for i in range(hp.num_hidden_layers)]
            )
    if hp.rope_scaling.kind == "yarn":
        own |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": hp.rope_scaling.factor,
            "rope.scaling.original_context_length": (
                hp.rope_scaling.original_max_position_embeddings
            ),
        }
    if architecture.startswith("granite"):
        own |= {
            "attention.scale": hp.attention_scale,
            "embedding_scale": hp.embedding_scale,
            "residual_scale": hp.residual_scale,
            "logit_scale": 1 / hp.logit_scale,
        }
    tokens = [f"<{i}>" for i in range(hp.vocab_size)]
    return {
        "general.architecture": architecture,
        **{f"{architecture}.{key}": value for key, value in own.items()},
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.ones(len(tokens), dtype=np.int32),
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
