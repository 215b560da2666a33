"""Tiny decoders of families with ways of their own, as their makers publish them.

`write_tiny_decoder` makes a folder of safetensors, without PyTorch: weights are NumPy's frozen
`RandomState` stream, and the tokenizer knows bytes. Golden logits of the folders lie in
tests/data/decoders.npz.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tests.models.tiny_hybrids import VOCAB, write_byte_tokenizer

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER = 64, 4, 2, 16, 96
NUM_TOKENS = 24
Arrays = dict[str, np.ndarray]
Shapes = dict[str, tuple[int, ...]]

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 3,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
_MINISTRAL: dict[str, Any] = {
    **_COMMON,
    "model_type": "ministral3",
    "sliding_window": None,
    "rope_parameters": {
        "type": "yarn",
        "rope_type": "yarn",
        "rope_theta": 1_000_000.0,
        "factor": 16.0,
        "original_max_position_embeddings": 8,
        "max_position_embeddings": 128,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}
_EXAONE: dict[str, Any] = {
    **_COMMON,
    "model_type": "exaone4",
    "num_hidden_layers": 4,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 1_000_000.0,
        "factor": 16.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}
_HUNYUAN: dict[str, Any] = {
    **_COMMON,
    "attention_head_dim": HEAD_DIM,
    "rope_theta": 10_000.0,
    "rope_scaling": {
        "type": "dynamic",
        "alpha": 1000.0,
        "factor": 1.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "use_qk_norm": True,
    "use_cla": False,
    "tie_word_embeddings": True,
}
_COHERE: dict[str, Any] = {
    **{key: value for key, value in _COMMON.items() if key not in ("head_dim", "rms_norm_eps")},
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.25,
    "rope_theta": 50_000.0,
    "tie_word_embeddings": True,
    "use_qk_norm": False,
}
DECODERS: dict[str, dict[str, Any]] = {
    "ministral3": _MINISTRAL,
    "exaone4": {
        **_EXAONE,
        "sliding_window": 8,
        "sliding_window_pattern": "LLLG",
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    },
    "exaone4_small": {
        **_EXAONE,
        "sliding_window": None,
        "layer_types": ["full_attention"] * 4,
        "tie_word_embeddings": True,
    },
    "cohere": {**_COHERE, "model_type": "cohere"},
    "cohere2": {
        **_COHERE,
        "model_type": "cohere2",
        "num_hidden_layers": 4,
        "sliding_window": 8,
        "sliding_window_pattern": 4,
        "order_of_interleaved_layers": "local_attn_first",
        "position_embedding_type": "rope_gptj",
        "rotary_pct": 1.0,
        "use_gated_activation": True,
        "use_parallel_block": True,
    },
    "hunyuan_dense": {**_HUNYUAN, "model_type": "hunyuan_v1_dense"},
    "ernie4_5": {
        **_COMMON,
        "model_type": "ernie4_5",
        "use_bias": True,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": True,
    },
    "seed_oss": {
        **_COMMON,
        "model_type": "seed_oss",
        "head_dim": 32,
        "attention_bias": True,
        "attention_out_bias": False,
        "mlp_bias": False,
        "rope_theta": 10_000_000.0,
        "rope_scaling": {"rope_type": "default"},
    },
    "apertus": {
        **{key: value for key, value in _COMMON.items() if key != "head_dim"},
        "model_type": "apertus",
        "hidden_act": "xielu",
        "qk_norm": True,
        "post_norm": False,
        "mlp_bias": False,
        "rope_theta": 12_000_000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "arcee": {
        **_COMMON,
        "model_type": "arcee",
        "hidden_act": "relu2",
        "rope_theta": 10_000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 20.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "original_max_position_embeddings": 16,
        },
    },
    "dots1": {
        **_COMMON,
        "model_type": "dots1",
        "rope_theta": 10_000_000.0,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 32,
        "n_routed_experts": 6,
        "n_shared_experts": 2,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "scoring_func": "noaux_tc",
        "sliding_window": None,
        "max_window_layers": 3,
    },
    "hunyuan_moe": {
        **_HUNYUAN,
        "model_type": "hunyuan_v1_moe",
        "intermediate_size": 32,
        "moe_intermediate_size": [32, 32, 32],
        "num_experts": 6,
        "moe_topk": [2, 2, 2],
        "num_shared_expert": [1, 1, 1],
        "use_mixed_mlp_moe": True,
        "moe_layer_num_skipped": 0,
        "norm_topk_prob": True,
    },
    "minimax_m2": {
        **_COMMON,
        "model_type": "minimax_m2",
        "intermediate_size": 32,
        "rotary_dim": 8,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "scoring_func": "sigmoid",
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
        "use_routing_bias": True,
        "shared_intermediate_size": 0,
        "rope_theta": 5_000_000.0,
    },
}
"""Configurations by name."""


def write_tiny_decoder(folder: Path, name: str) -> Path:
    """Case ``name`` as a folder: safetensors, ``config.json``, tokenizer of bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(decoder_arrays(name), folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(DECODERS[name]))
    write_byte_tokenizer(folder)
    return folder


def decoder_arrays(name: str) -> Arrays:
    """Float32 weights of a case under the names of its checkpoints."""
    random = np.random.RandomState(zlib.crc32(name.encode()))
    arrays = {}
    for tensor, shape in _shapes(DECODERS[name]).items():
        values = random.standard_normal(shape)
        if "norm" in tensor.rsplit(".", 2)[1]:
            values = 1 + 0.2 * values
        elif "act_fn" in tensor:
            part = tensor.rpartition(".")[2]
            values = {"beta": 0.5, "eps": -1e-6}.get(part, values)
        elif len(shape) == 1:
            values = 0.3 * values
        elif "embed" not in tensor:
            values = 1.3 * values / np.sqrt(shape[-1])
        arrays[tensor] = np.asarray(values, dtype=np.float32)
    return arrays


def decoder_token_ids() -> np.ndarray:
    """The prompt of the golden logits: three times the windows and Ministral's first context."""
    return np.random.RandomState(7).randint(2, VOCAB, NUM_TOKENS).astype(np.int32)


def _shapes(config: dict[str, Any]) -> Shapes:
    kind = config["model_type"]
    shapes: Shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    norms = {
        "apertus": ("attention_layernorm", "feedforward_layernorm"),
        "cohere": ("input_layernorm",),
        "cohere2": ("input_layernorm",),
        "exaone4": ("post_attention_layernorm", "post_feedforward_layernorm"),
    }.get(kind, ("input_layernorm", "post_attention_layernorm"))
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        shapes |= {f"{layer}.{norm}.weight": (HIDDEN,) for norm in norms}
        shapes |= _attention(config, f"{layer}.self_attn")
        is_mixture = kind in ("hunyuan_v1_moe", "minimax_m2") or (kind == "dots1" and i > 0)
        shapes |= _experts(config, layer) if is_mixture else _mlp(config, f"{layer}.mlp")
    return shapes


def _attention(config: dict[str, Any], name: str) -> Shapes:
    kind, head_dim = config["model_type"], config.get("head_dim", HEAD_DIM)
    width, kv_width = HEADS * head_dim, KV_HEADS * head_dim
    linears = {"q": (width, HIDDEN), "k": (kv_width, HIDDEN), "v": (kv_width, HIDDEN)}
    linears["o"] = (HIDDEN, width)
    shapes: Shapes = {f"{name}.{part}_proj.weight": shape for part, shape in linears.items()}
    biased = {"ernie4_5": "qkvo", "seed_oss": "qkv"}.get(kind, "")
    shapes |= {f"{name}.{part}_proj.bias": linears[part][:1] for part in biased}
    if kind.startswith("hunyuan"):
        shapes |= {f"{name}.{part}_layernorm.weight": (head_dim,) for part in ("query", "key")}
    elif kind == "minimax_m2":
        shapes |= {f"{name}.q_norm.weight": (width,), f"{name}.k_norm.weight": (kv_width,)}
    elif kind in ("apertus", "dots1", "exaone4"):
        shapes |= {f"{name}.{part}_norm.weight": (head_dim,) for part in "qk"}
    return shapes


def _mlp(config: dict[str, Any], name: str, width: int | None = None) -> Shapes:
    kind, inner = config["model_type"], width or config["intermediate_size"]
    linears = {"gate": (inner, HIDDEN), "up": (inner, HIDDEN), "down": (HIDDEN, inner)}
    if kind in ("apertus", "arcee"):
        del linears["gate"]
    shapes: Shapes = {f"{name}.{part}_proj.weight": shape for part, shape in linears.items()}
    if kind == "ernie4_5":
        shapes |= {f"{name}.{part}_proj.bias": shape[:1] for part, shape in linears.items()}
    if kind == "apertus":
        shapes |= {f"{name}.act_fn.{part}": (1,) for part in ("alpha_p", "alpha_n")}
        shapes |= {f"{name}.act_fn.{part}": () for part in ("beta", "eps")}
    return shapes


def _experts(config: dict[str, Any], layer: str) -> Shapes:
    kind = config["model_type"]
    count, width, name = 6, 32, f"{layer}.mlp"
    if kind == "minimax_m2":
        name = f"{layer}.block_sparse_moe"
        shapes: Shapes = {
            f"{name}.gate.weight": (count, HIDDEN),
            f"{name}.e_score_correction_bias": (count,),
        }
        for e in range(count):
            shapes[f"{name}.experts.{e}.w1.weight"] = (width, HIDDEN)
            shapes[f"{name}.experts.{e}.w2.weight"] = (HIDDEN, width)
            shapes[f"{name}.experts.{e}.w3.weight"] = (width, HIDDEN)
        return shapes
    if kind == "hunyuan_v1_moe":
        shapes = {f"{name}.gate.wg.weight": (count, HIDDEN)}
        shapes |= _mlp(config, f"{name}.shared_mlp")
    else:
        shapes = {
            f"{name}.gate.weight": (count, HIDDEN),
            f"{name}.gate.e_score_correction_bias": (count,),
        }
        shapes |= _mlp(config, f"{name}.shared_experts", 2 * width)
    for e in range(count):
        shapes |= _mlp(config, f"{name}.experts.{e}", width)
    return shapes
