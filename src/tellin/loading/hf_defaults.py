"""What configurations of dense decoders and mixtures leave out, by architecture.

Families that bring more than numbers have theirs beside what they bring: `encoder_hparams`,
`gated_delta`, `hybrid_hparams`, `latent`.

Source: the configuration classes' documented defaults (transformers 4.57 and 5.24).
"""

from __future__ import annotations

from typing import Any

_GEMMA3: dict[str, Any] = {
    "head_dim": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 131_072,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "rope_theta": 1_000_000.0,
    "vocab_size": 262_208,
}
_COHERE: dict[str, Any] = {
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
_HUNYUAN: dict[str, Any] = {"rms_norm_eps": 1e-5, "max_position_embeddings": 2048}
DEFAULTS: dict[str, dict[str, Any]] = {
    "apertus": {
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 65_536,
        "rope_theta": 12_000_000.0,
    },
    "arcee": {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
    "cohere2": _COHERE,
    "command-r": {**_COHERE, "rope_theta": 500_000.0},
    "dots1": {
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 2048,
        "num_key_value_heads": 32,
        "max_window_layers": 62,
    },
    "ernie4_5": {
        "head_dim": 128,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131_072,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": True,
    },
    "exaone4": {"rms_norm_eps": 1e-5, "max_position_embeddings": 2048},
    "hunyuan-dense": _HUNYUAN,
    "hunyuan-moe": {**_HUNYUAN, "num_experts": 1, "moe_topk": 1},
    "minimax-m2": {
        "head_dim": 128,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 196_608,
        "rope_theta": 5_000_000.0,
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
        "scoring_func": "sigmoid",
    },
    "mistral3": {
        "head_dim": 128,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 262_144,
    },
    "seed_oss": {
        "head_dim": 128,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 524_288,
        "attention_bias": True,
    },
    "gemma": {"head_dim": 256, "rms_norm_eps": 1e-6, "max_position_embeddings": 8192},
    "gemma2": {
        "head_dim": 256,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 8192,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma-embedding": _GEMMA3,
    "gemma3": _GEMMA3,
    "ernie4_5-moe": {
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131_072,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": True,
        "num_experts": 64,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1536,
    },
    "glm4moe": {
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131_072,
        "partial_rotary_factor": 0.5,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1408,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
    },
    "glm4": {
        "head_dim": 128,
        "rms_norm_eps": 1.5625e-7,
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 2,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
    },
    "granite": {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048},
    "granitemoe": {
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 2048,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    },
    "llama": {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048},
    "mistral": {"rms_norm_eps": 1e-6, "num_key_value_heads": 8},
    "mixtral": {
        "rms_norm_eps": 1e-5,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "rope_theta": 1_000_000.0,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    },
    "olmo2": {"rms_norm_eps": 1e-5, "max_position_embeddings": 2048},
    "olmo3": {
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
        "rope_theta": 500_000.0,
        "sliding_window": 4096,
    },
    "olmoe": {
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "num_experts": 64,
        "num_experts_per_tok": 8,
    },
    "qwen2": {"rms_norm_eps": 1e-6},
    "qwen2moe": {
        "rms_norm_eps": 1e-6,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
    },
    "qwen3": {"rms_norm_eps": 1e-6, "head_dim": 128},
    "qwen3moe": {
        "rms_norm_eps": 1e-6,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
    "phi3": {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
    "smollm3": {
        "rms_norm_eps": 1e-6,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32_768,
        "rope_theta": 2_000_000.0,
        "tie_word_embeddings": True,
    },
}
NESTED_LLAMA = {
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32_000,
}
"""What a text model inside of another one leaves out: Llama's own configuration names it."""
QWEN3_VL_MOE = {
    "norm_topk_prob": True,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
}
"""What the text model of Qwen3-VL-MoE leaves out."""
