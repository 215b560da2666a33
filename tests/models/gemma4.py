"""Tiny models of the Gemma 4 family: configurations and weights as published files have them.

One case for each kind: small models (layer inputs, shared caches, a wider MLP where caches are
shared), larger ones (keys that are values), and mixtures. Imports nothing of PyTorch.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from tests.loading.gguf_writer import write_gguf
from tests.loading.models import pack_safetensors

VOCAB, HIDDEN, INNER, HEADS, LOCAL_DIM, GLOBAL_DIM, WINDOW = 64, 32, 48, 4, 16, 32, 5
SMALL_INPUT, NUM_EXPERTS, EXPERT_INNER = 8, 5, 16

_BASE: dict[str, Any] = {
    "model_type": "gemma4_text",
    "vocab_size": VOCAB,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "head_dim": LOCAL_DIM,
    "global_head_dim": GLOBAL_DIM,
    "sliding_window": WINDOW,
    "final_logit_softcapping": 4.0,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
    "use_bidirectional_attention": None,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.25,
            "rope_theta": 1000000.0,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
}
_LARGE = {
    "hidden_size_per_layer_input": 0,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "use_bidirectional_attention": "vision",
}
_TYPES = {"s": "sliding_attention", "f": "full_attention"}


def _case(layers: str, **keys: Any) -> dict[str, Any]:
    types = [_TYPES[kind] for kind in layers]
    return {**_BASE, "num_hidden_layers": len(types), "layer_types": types, **keys}


CASES: dict[str, dict[str, Any]] = {
    "small": _case(
        "sfsfssf",
        hidden_size_per_layer_input=SMALL_INPUT,
        num_kv_shared_layers=3,
        use_double_wide_mlp=True,
    ),
    "large": _case("ssf", **_LARGE),
    "mixture": _case(
        "sf",
        **_LARGE,
        enable_moe_block=True,
        num_experts=NUM_EXPERTS,
        top_k_experts=2,
        moe_intermediate_size=EXPERT_INNER,
    ),
}
CACHE_OF = {"small": [0, 1, 2, 3, 2, 2, 3], "large": [0, 1, 2], "mixture": [0, 1]}
"""Which layer of the cache every layer reads."""


def arrays(name: str) -> dict[str, np.ndarray]:
    """Float32 weights of a case, by the names of its checkpoint."""
    random = np.random.RandomState(zlib.crc32(name.encode()))
    made = {}
    for tensor, shape in _shapes(name).items():
        values = random.standard_normal(shape)
        if len(shape) == 1:
            values = 1 + 0.2 * values
        elif "embed" not in tensor:
            values = 1.3 * values / np.sqrt(shape[-1])
        made[tensor] = values.astype(np.float32)
    return made


def token_ids(num_tokens: int = 20) -> np.ndarray:
    return np.random.RandomState(7).randint(0, VOCAB, num_tokens).astype(np.int32)


def write_folder(folder: Path, name: str, **keys: Any) -> Path:
    """A checkpoint; ``keys`` are added to its configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CASES[name], **keys}))
    (folder / "model.safetensors").write_bytes(pack_safetensors(arrays(name)))
    return folder


def write_composite(folder: Path, name: str, model_type: str = "gemma4") -> Path:
    """The same inside of a model with images and sound, and keys where caches are shared."""
    folder.mkdir(parents=True, exist_ok=True)
    text = {**CASES[name], "model_type": f"{model_type}_text"}
    if model_type == "gemma4_unified":  # it does not know these
        text = {key: value for key, value in text.items() if "per_layer_input" not in key}
    config = {"model_type": model_type, "text_config": text, "vision_config": {}}
    (folder / "config.json").write_text(json.dumps(config))
    weights = {
        key.replace("model.", "model.language_model.", 1): value
        for key, value in arrays(name).items()
    }
    weights |= {
        f"model.{part}.weight": np.zeros((2, 2), np.float32)
        for part in ("vision_tower.patch", "audio_tower.conv", "embed_vision.embedding_projection")
    }
    last = f"model.language_model.layers.{CASES[name]['num_hidden_layers'] - 1}.self_attn"
    weights.setdefault(f"{last}.k_norm.weight", np.ones(GLOBAL_DIM, np.float32))
    (folder / "model.safetensors").write_bytes(pack_safetensors(weights))
    return folder


def write_gguf_file(path: Path, name: str, **keys: Any) -> Path:
    """The same as a converter writes it."""
    return write_gguf(path, _metadata(name) | keys, _gguf_arrays(name))


def _shapes(name: str) -> dict[str, tuple[int, ...]]:
    config = CASES[name]
    size, num_layers = config["hidden_size_per_layer_input"], config["num_hidden_layers"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
    if size:
        shapes |= {
            "model.embed_tokens_per_layer.weight": (VOCAB, num_layers * size),
            "model.per_layer_model_projection.weight": (num_layers * size, HIDDEN),
            "model.per_layer_projection_norm.weight": (size,),
        }
    for i, kind in enumerate(config["layer_types"]):
        shapes |= _layer_shapes(name, f"model.layers.{i}", i, kind == "sliding_attention")
    return shapes | {"model.norm.weight": (HIDDEN,)}


def _layer_shapes(name: str, layer: str, index: int, is_local: bool) -> dict[str, tuple[int, ...]]:
    config = CASES[name]
    size, is_large = config["hidden_size_per_layer_input"], "attention_k_eq_v" in config
    dim = LOCAL_DIM if is_local else GLOBAL_DIM
    kv = dim * (1 if is_large and not is_local else 2)
    shares = index >= config["num_hidden_layers"] - config.get("num_kv_shared_layers", 0)
    inner = INNER * (2 if shares and config.get("use_double_wide_mlp") else 1)
    norms = ["input", "post_attention", "pre_feedforward", "post_feedforward"]
    shapes: dict[str, tuple[int, ...]] = {f"{norm}_layernorm.weight": (HIDDEN,) for norm in norms}
    shapes |= {
        "layer_scalar": (1,),
        "self_attn.q_proj.weight": (HEADS * dim, HIDDEN),
        "self_attn.q_norm.weight": (dim,),
        "self_attn.o_proj.weight": (HIDDEN, HEADS * dim),
        "mlp.gate_proj.weight": (inner, HIDDEN),
        "mlp.up_proj.weight": (inner, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, inner),
    }
    if not shares:
        shapes |= {"self_attn.k_proj.weight": (kv, HIDDEN), "self_attn.k_norm.weight": (dim,)}
    if not shares and (is_local or not is_large):
        shapes["self_attn.v_proj.weight"] = (kv, HIDDEN)
    if size:
        shapes |= {
            "per_layer_input_gate.weight": (size, HIDDEN),
            "per_layer_projection.weight": (HIDDEN, size),
            "post_per_layer_input_norm.weight": (HIDDEN,),
        }
    if config.get("enable_moe_block"):
        parts = ("post_feedforward_layernorm_1", "post_feedforward_layernorm_2",
                 "pre_feedforward_layernorm_2")  # fmt: skip
        shapes |= {f"{part}.weight": (HIDDEN,) for part in parts}
        shapes |= {
            "router.proj.weight": (NUM_EXPERTS, HIDDEN),
            "router.scale": (HIDDEN,),
            "router.per_expert_scale": (NUM_EXPERTS,),
            "experts.gate_up_proj": (NUM_EXPERTS, 2 * EXPERT_INNER, HIDDEN),
            "experts.down_proj": (NUM_EXPERTS, HIDDEN, EXPERT_INNER),
        }
    return {f"{layer}.{part}": shape for part, shape in shapes.items()}


_GLOBAL_NAMES = {
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "embed_tokens_per_layer": "per_layer_token_embd",
    "per_layer_model_projection": "per_layer_model_proj",
    "per_layer_projection_norm": "per_layer_proj_norm",
}
_LAYER_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "pre_feedforward_layernorm.weight": "ffn_norm.weight",
    "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
    "post_feedforward_layernorm_1.weight": "post_ffw_norm_1.weight",
    "post_feedforward_layernorm_2.weight": "post_ffw_norm_2.weight",
    "pre_feedforward_layernorm_2.weight": "pre_ffw_norm_2.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "layer_scalar": "layer_output_scale.weight",
    "per_layer_input_gate.weight": "inp_gate.weight",
    "per_layer_projection.weight": "proj.weight",
    "post_per_layer_input_norm.weight": "post_norm.weight",
    "router.proj.weight": "ffn_gate_inp.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
}


def _gguf_arrays(name: str) -> dict[str, np.ndarray]:
    turning = int(0.25 * GLOBAL_DIM / 2)
    still = GLOBAL_DIM // 2 - turning
    named = {"rope_freqs.weight": np.array([1.0] * turning + [1e30] * still, np.float32)}
    for key, values in arrays(name).items():
        parts = key.split(".", 3)
        if parts[1] == "layers":
            named[f"blk.{parts[2]}.{_LAYER_NAMES[parts[3]]}"] = values
        else:
            named[f"{_GLOBAL_NAMES[parts[1]]}.{parts[2]}"] = values
    return named


def _metadata(name: str) -> dict[str, Any]:
    config = CASES[name]
    local = np.array([kind == "sliding_attention" for kind in config["layer_types"]])
    num_layers, num_shared = len(local), config.get("num_kv_shared_layers", 0)
    inner = np.full(num_layers, INNER, np.int32)
    inner[num_layers - num_shared :] *= 2
    kv_heads: Any = 2
    if "attention_k_eq_v" in config:
        kv_heads = np.where(local, 2, 1).astype(np.int32)
    own: dict[str, Any] = {
        "block_count": num_layers,
        "context_length": 128,
        "embedding_length": HIDDEN,
        "feed_forward_length": inner,
        "attention.head_count": HEADS,
        "attention.head_count_kv": kv_heads,
        "attention.key_length": GLOBAL_DIM,
        "attention.value_length": GLOBAL_DIM,
        "attention.key_length_swa": LOCAL_DIM,
        "attention.value_length_swa": LOCAL_DIM,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.sliding_window": WINDOW,
        "attention.sliding_window_pattern": local,
        "attention.shared_kv_layers": num_shared,
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
        "final_logit_softcapping": 4.0,
        "rope.freq_base": 1000000.0,
        "rope.freq_base_swa": 10000.0,
        "rope.dimension_count": GLOBAL_DIM,
        "rope.dimension_count_swa": LOCAL_DIM,
        "vocab_size": VOCAB,
    }
    if config.get("enable_moe_block"):
        own |= {
            "expert_count": NUM_EXPERTS,
            "expert_used_count": 2,
            "expert_feed_forward_length": EXPERT_INNER,
        }
    tokens = [f"<{i}>" for i in range(VOCAB)]
    return {
        "general.architecture": "gemma4",
        **{f"gemma4.{key}": value for key, value in own.items()},
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.ones(len(tokens), dtype=np.int32),
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
