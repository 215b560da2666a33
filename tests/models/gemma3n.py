"""A tiny Gemma 3n: configuration and weights as published files have them, without PyTorch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.loading.gguf_writer import write_gguf
from tests.loading.models import pack_safetensors

VOCAB, KNOWN, HIDDEN, INNER, HEADS, DIM, SIZE, RANK = 64, 56, 32, 48, 4, 16, 8, 4
LAYERS, SHARED, STREAMS = "ssfsfsf", 3, 4
CACHE_OF = [0, 1, 2, 3, 2, 3, 2]
CONFIG: dict[str, Any] = {
    "model_type": "gemma3n_text",
    "vocab_size": VOCAB,
    "vocab_size_per_layer_input": KNOWN,
    "hidden_size": HIDDEN,
    "hidden_size_per_layer_input": SIZE,
    "intermediate_size": [INNER] * len(LAYERS),
    "num_hidden_layers": len(LAYERS),
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "head_dim": DIM,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "sliding_window": 5,
    "layer_types": [{"s": "sliding_attention", "f": "full_attention"}[kind] for kind in LAYERS],
    "final_logit_softcapping": 4.0,
    "altup_active_idx": 0,
    "altup_coef_clip": 120.0,
    "altup_correct_scale": True,
    "altup_num_inputs": STREAMS,
    "num_kv_shared_layers": SHARED,
    "laurel_rank": RANK,
    "activation_sparsity_pattern": [0.6, 0.6, 0.0, 0.0, 0.0, 0.5, 0.0],
    "tie_word_embeddings": True,
}


def arrays() -> dict[str, np.ndarray]:
    """Float32 weights by the names of a checkpoint."""
    random = np.random.RandomState(3)
    made = {}
    for tensor, shape in _shapes().items():
        values = random.standard_normal(shape)
        if len(shape) == 1:
            values = 1 + 0.2 * values
        elif "coefs" in tensor:
            values = 0.3 * values
        elif "embed_tokens" not in tensor:
            values = 1.3 * values / np.sqrt(shape[-1])
        made[tensor] = values.astype(np.float32)
    return made


def write_folder(folder: Path, **keys: Any) -> Path:
    """A checkpoint; ``keys`` are added to its configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **keys}))
    (folder / "model.safetensors").write_bytes(pack_safetensors(arrays()))
    return folder


def write_gguf_file(path: Path, **keys: Any) -> Path:
    """The same as a converter writes it."""
    own: dict[str, Any] = {
        "block_count": len(LAYERS),
        "context_length": 128,
        "embedding_length": HIDDEN,
        "feed_forward_length": np.full(len(LAYERS), INNER, np.int32),
        "attention.head_count": HEADS,
        "attention.head_count_kv": 2,
        "attention.key_length": DIM,
        "attention.value_length": DIM,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.sliding_window": 5,
        "attention.sliding_window_pattern": np.array([kind == "s" for kind in LAYERS]),
        "attention.shared_kv_layers": SHARED,
        "embedding_length_per_layer_input": SIZE,
        "altup.active_idx": 0,
        "altup.num_inputs": STREAMS,
        "activation_sparsity_scale": np.array(
            [0.2533471, 0.2533471, -np.inf, -np.inf, -np.inf, 0.0, -np.inf], np.float32
        ),
        "final_logit_softcapping": 4.0,
        "rope.freq_base": 1000000.0,
        "vocab_size": VOCAB,
    }
    tokens = [f"<{i}>" for i in range(VOCAB)]
    metadata = {
        "general.architecture": "gemma3n",
        **{f"gemma3n.{key}": value for key, value in (own | keys).items()},
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.ones(VOCAB, dtype=np.int32),
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    return write_gguf(path, metadata, _gguf_arrays())


def _shapes() -> dict[str, tuple[int, ...]]:
    n, width = STREAMS, len(LAYERS) * SIZE
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (VOCAB, HIDDEN),
        "embed_tokens_per_layer.weight": (KNOWN, width),
        "per_layer_model_projection.weight": (width, HIDDEN),
        "per_layer_projection_norm.weight": (SIZE,),
        "norm.weight": (HIDDEN,),
    }
    for i in range(n - 1):
        shapes[f"altup_projections.{i}.weight"] = (HIDDEN, HIDDEN)
        shapes[f"altup_unembed_projections.{i}.weight"] = (HIDDEN, HIDDEN)
    norms = ["input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm",
             "post_feedforward_layernorm", "post_per_layer_input_norm", "laurel.post_laurel_norm",
             "altup.router_norm"]  # fmt: skip
    for i in range(len(LAYERS)):
        layer: dict[str, tuple[int, ...]] = {f"{norm}.weight": (HIDDEN,) for norm in norms}
        layer |= {
            "self_attn.q_proj.weight": (HEADS * DIM, HIDDEN),
            "self_attn.o_proj.weight": (HIDDEN, HEADS * DIM),
            "self_attn.q_norm.weight": (DIM,),
            "mlp.gate_proj.weight": (INNER, HIDDEN),
            "mlp.up_proj.weight": (INNER, HIDDEN),
            "mlp.down_proj.weight": (HIDDEN, INNER),
            "per_layer_input_gate.weight": (SIZE, HIDDEN),
            "per_layer_projection.weight": (HIDDEN, SIZE),
            "laurel.linear_left.weight": (RANK, HIDDEN),
            "laurel.linear_right.weight": (HIDDEN, RANK),
            "altup.correct_output_scale": (HIDDEN,),
            "altup.correction_coefs.weight": (n, n),
            "altup.prediction_coefs.weight": (n * n, n),
            "altup.modality_router.weight": (n, HIDDEN),
        }
        if i < len(LAYERS) - SHARED:
            layer |= {f"self_attn.{p}_proj.weight": (2 * DIM, HIDDEN) for p in "kv"}
            layer["self_attn.k_norm.weight"] = (DIM,)
        shapes |= {f"layers.{i}.{part}": shape for part, shape in layer.items()}
    return {f"model.{name}": shape for name, shape in shapes.items()}


_GLOBAL_NAMES = {
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "embed_tokens_per_layer": "per_layer_token_embd",
    "per_layer_model_projection": "per_layer_model_proj",
    "per_layer_projection_norm": "per_layer_proj_norm",
}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
    "laurel.linear_left": "laurel_l",
    "laurel.linear_right": "laurel_r",
    "laurel.post_laurel_norm": "laurel_post_norm",
    "altup.router_norm": "altup_router_norm",
    "altup.correct_output_scale": "altup_correct_scale",
    "altup.correction_coefs": "altup_correct_coef",
    "altup.prediction_coefs": "altup_predict_coef",
    "altup.modality_router": "altup_router",
}


def _gguf_arrays() -> dict[str, np.ndarray]:
    weights, named = arrays(), {}
    for ours, theirs in (("projections", "proj"), ("unembed_projections", "unembd_proj")):
        stack = [weights.pop(f"model.altup_{ours}.{i}.weight") for i in range(STREAMS - 1)]
        named[f"altup_{theirs}.weight"] = np.stack(stack)
    for key, values in weights.items():
        parts = key.removesuffix(".weight").split(".", 3)
        if parts[1] == "layers":
            named[f"blk.{parts[2]}.{_LAYER_NAMES[parts[3]]}.weight"] = values
        else:
            named[f"{_GLOBAL_NAMES[parts[1]]}.weight"] = values
    return named
