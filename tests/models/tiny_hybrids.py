"""Tiny hybrids (models with recurrent layers) as their makers publish them, without PyTorch.

`write_tiny_hybrid` makes a folder of safetensors: weights are NumPy's frozen `RandomState` stream,
and the tokenizer knows bytes. Golden logits of the folders lie in tests/data/hybrids.npz.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tests.loading.vocabularies import byte_level

VOCAB, HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 258, 64, 4, 2, 16
NUM_TOKENS = 20
Arrays = dict[str, np.ndarray]
Shapes = dict[str, tuple[int, ...]]

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 4,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "float32",
}
_LFM2: dict[str, Any] = {
    **_COMMON,
    "norm_eps": 1e-5,
    "conv_L_cache": 3,
    "conv_bias": False,
    "rope_theta": 10_000.0,
    "layer_types": ["conv", "full_attention", "conv", "conv"],
    "tie_word_embeddings": True,
}
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_n_groups": 1,
    "mamba_d_head": 16,
    "mamba_d_state": 24,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}
_FALCON_SCALES: dict[str, Any] = {
    "embedding_multiplier": 2.0,
    "lm_head_multiplier": 1.5,
    "key_multiplier": 0.75,
    "attention_in_multiplier": 1.25,
    "attention_out_multiplier": 0.875,
    "ssm_in_multiplier": 0.5,
    "ssm_out_multiplier": 1.5,
    "ssm_multipliers": [0.75, 1.25, 2.0, 1.5, 0.625],
    "mlp_multipliers": [0.7, 1.1],
}
_GRANITE: dict[str, Any] = {
    **_COMMON,
    **_MAMBA,
    "shared_intermediate_size": 48,
    "intermediate_size": 32,
    "rms_norm_eps": 1e-5,
    "layer_types": ["mamba", "mamba", "attention", "mamba"],
    "attention_multiplier": 0.125,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "logits_scaling": 0.5,
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "tie_word_embeddings": False,
}
_NEMOTRON: dict[str, Any] = {
    **_COMMON,
    "model_type": "nemotron_h",
    "architectures": ["NemotronHForCausalLM"],
    "head_dim": 16,
    "intermediate_size": 96,
    "layer_norm_epsilon": 1e-5,
    "mlp_hidden_act": "relu2",
    "mamba_num_heads": 6,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 24,
    "conv_kernel": 4,
    "use_conv_bias": True,
    "time_step_min": 0.0,
    "tie_word_embeddings": False,
}
HYBRIDS: dict[str, dict[str, Any]] = {
    "lfm2": {
        **_LFM2,
        "model_type": "lfm2",
        "architectures": ["Lfm2ForCausalLM"],
        "block_ff_dim": 140,
        "block_multiple_of": 32,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": True,
    },
    "lfm2moe": {
        **_LFM2,
        "model_type": "lfm2_moe",
        "architectures": ["Lfm2MoeForCausalLM"],
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_dense_layers": 1,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "use_expert_bias": True,
        "routed_scaling_factor": 1.0,
    },
    "granitehybrid": {
        **_GRANITE,
        "model_type": "granitemoehybrid",
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "position_embedding_type": "nope",
    },
    "bamba": {
        **_COMMON,
        **_MAMBA,
        "model_type": "bamba",
        "architectures": ["BambaForCausalLM"],
        "intermediate_size": 96,
        "rms_norm_eps": 1e-5,
        "attn_layer_indices": [2],
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.5,
        "tie_word_embeddings": False,
    },
    "falcon-h1": {
        **_COMMON,
        **_MAMBA,
        **_FALCON_SCALES,
        "model_type": "falcon_h1",
        "architectures": ["FalconH1ForCausalLM"],
        "num_hidden_layers": 2,
        "intermediate_size": 96,
        "rms_norm_eps": 1e-5,
        "mamba_d_ssm": 96,
        "mamba_d_head": 12,
        "mamba_n_groups": 2,
        "mamba_rms_norm": False,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
    },
    "falcon-h1_norm": {
        **_COMMON,
        **_MAMBA,
        "model_type": "falcon_h1",
        "architectures": ["FalconH1ForCausalLM"],
        "num_hidden_layers": 2,
        "intermediate_size": 96,
        "rms_norm_eps": 1e-5,
        "mamba_d_ssm": 128,
        "mamba_n_groups": 2,
        "mamba_rms_norm": True,
        "mamba_norm_before_gate": True,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": True,
    },
    "nemotron_h": {**_NEMOTRON, "hybrid_override_pattern": "M-*M"},
    "nemotron_h_moe": {
        **_NEMOTRON,
        "hybrid_override_pattern": "ME*E",
        "n_routed_experts": 6,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 48,
        "moe_latent_size": 32,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
    },
    "mamba2": {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "num_hidden_layers": 3,
        "model_type": "mamba2",
        "architectures": ["Mamba2ForCausalLM"],
        "num_heads": 8,
        "head_dim": 16,
        "state_size": 24,
        "n_groups": 2,
        "conv_kernel": 4,
        "expand": 2,
        "use_bias": False,
        "use_conv_bias": True,
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    },
    "granitehybrid_groups": {
        **_GRANITE,
        "model_type": "granitemoehybrid",
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "position_embedding_type": "nope",
        "mamba_n_groups": 2,
    },
    "granitehybrid_dense": {
        **_GRANITE,
        "model_type": "granitemoehybrid",
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "position_embedding_type": "rope",
        "rope_theta": 10_000.0,
        "tie_word_embeddings": True,
    },
}
"""Configurations by name."""


def write_tiny_hybrid(folder: Path, name: str) -> Path:
    """Case ``name`` as a folder: safetensors, ``config.json``, tokenizer of bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(hybrid_arrays(name), folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(HYBRIDS[name]))
    write_byte_tokenizer(folder)
    return folder


def write_byte_tokenizer(folder: Path) -> None:
    """A tokenizer of `VOCAB` tokens: bytes, beginning and end."""
    _tokenizer().save(str(folder / "tokenizer.json"))
    special = {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(special))


def hybrid_arrays(name: str) -> Arrays:
    """Float32 weights of a case under the names of its checkpoints."""
    config = HYBRIDS[name]
    random = np.random.RandomState(zlib.crc32(name.encode()))
    arrays = {}
    for tensor, shape in _shapes(config).items():
        values = random.standard_normal(shape)
        if "norm" in tensor.rsplit(".", 2)[1]:
            values = 1 + 0.2 * values
        elif tensor.endswith("A_log"):
            values = 0.5 + 0.5 * values
        elif len(shape) == 1:
            values = 0.3 * values
        elif "embed" not in tensor:
            values = 1.3 * values / np.sqrt(shape[-1])
        arrays[tensor] = values.astype(np.float32)
    return arrays


def hybrid_token_ids() -> np.ndarray:
    """The prompt of the golden logits."""
    return np.random.RandomState(7).randint(2, VOCAB, NUM_TOKENS).astype(np.int32)


def layer_kinds(config: dict[str, Any]) -> list[str]:
    """Of each layer: attention, conv, mamba, mlp; hybrid has attention and Mamba2."""
    count = config["num_hidden_layers"]
    if "hybrid_override_pattern" in config:
        letters = {"M": "mamba", "-": "mlp", "*": "attention", "E": "moe"}
        return [letters[letter] for letter in config["hybrid_override_pattern"]]
    if config["model_type"] in ("falcon_h1", "mamba2"):
        return ["hybrid" if config["model_type"] == "falcon_h1" else "mamba"] * count
    if config["model_type"] == "bamba":
        return ["attention" if i in config["attn_layer_indices"] else "mamba" for i in range(count)]
    return [kind.removeprefix("full_") for kind in config["layer_types"]]


def _shapes(config: dict[str, Any]) -> Shapes:
    prefix, embedding, norm = {
        "lfm2": ("model", "embed_tokens", "embedding_norm"),
        "lfm2_moe": ("model", "embed_tokens", "embedding_norm"),
        "granitemoehybrid": ("model", "embed_tokens", "norm"),
        "mamba2": ("backbone", "embeddings", "norm_f"),
        "nemotron_h": ("backbone", "embeddings", "norm_f"),
    }.get(config["model_type"], ("model", "embed_tokens", "final_layernorm"))
    shapes: Shapes = {
        f"{prefix}.{embedding}.weight": (VOCAB, HIDDEN),
        f"{prefix}.{norm}.weight": (HIDDEN,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    write = _LAYERS.get(config["model_type"], _falcon_layer)
    for i, kind in enumerate(layer_kinds(config)):
        layer = write(config, i, kind)
        shapes |= {f"{prefix}.layers.{i}.{name}": shape for name, shape in layer.items()}
    return shapes


def _attention(out: str) -> Shapes:
    width, kv_width = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    return {
        "self_attn.q_proj.weight": (width, HIDDEN),
        "self_attn.k_proj.weight": (kv_width, HIDDEN),
        "self_attn.v_proj.weight": (kv_width, HIDDEN),
        f"self_attn.{out}.weight": (HIDDEN, width),
    }


def _lfm2_layer(config: dict[str, Any], i: int, kind: str) -> Shapes:
    shapes: Shapes = {"operator_norm.weight": (HIDDEN,), "ffn_norm.weight": (HIDDEN,)}
    if kind == "conv":
        shapes |= {
            "conv.conv.weight": (HIDDEN, 1, config["conv_L_cache"]),
            "conv.in_proj.weight": (3 * HIDDEN, HIDDEN),
            "conv.out_proj.weight": (HIDDEN, HIDDEN),
        }
    else:
        shapes |= _attention("out_proj")
        shapes |= {f"self_attn.{part}_layernorm.weight": (HEAD_DIM,) for part in "qk"}
    count = config.get("num_experts", 0)
    if count and i >= config["num_dense_layers"]:
        shapes |= {
            "feed_forward.gate.weight": (count, HIDDEN),
            "feed_forward.expert_bias": (count,),
        }
        for e in range(count):
            expert = f"feed_forward.experts.{e}"
            shapes |= _mlp(expert, config["moe_intermediate_size"])
        return shapes
    # Two thirds of block_ff_dim are 93, up to a multiple of 32: 96.
    return shapes | _mlp("feed_forward", config.get("intermediate_size", 96))


def _mlp(name: str, width: int) -> Shapes:
    return {
        f"{name}.w1.weight": (width, HIDDEN),
        f"{name}.w2.weight": (HIDDEN, width),
        f"{name}.w3.weight": (width, HIDDEN),
    }


def _granite_layer(config: dict[str, Any], i: int, kind: str) -> Shapes:
    shapes: Shapes = {
        "input_layernorm.weight": (HIDDEN,),
        "post_attention_layernorm.weight": (HIDDEN,),
    }
    if kind == "attention":
        shapes |= _attention("o_proj")
    else:
        shapes |= _mamba(config)
    shared, width = config["shared_intermediate_size"], config["intermediate_size"]
    shapes |= {
        "shared_mlp.input_linear.weight": (2 * shared, HIDDEN),
        "shared_mlp.output_linear.weight": (HIDDEN, shared),
    }
    count = config["num_local_experts"]
    if count:
        shapes |= {
            "block_sparse_moe.router.layer.weight": (count, HIDDEN),
            "block_sparse_moe.input_linear.weight": (count, 2 * width, HIDDEN),
            "block_sparse_moe.output_linear.weight": (count, HIDDEN, width),
        }
    return shapes


def _mamba(config: dict[str, Any], name: str = "mamba") -> Shapes:
    heads, inner, groups, state = mamba_sizes(config)
    convolved = inner + 2 * groups * state
    shapes: Shapes = {
        f"{name}.in_proj.weight": (inner + convolved + heads, HIDDEN),
        f"{name}.conv1d.weight": (convolved, 1, 4),
        f"{name}.conv1d.bias": (convolved,),
        f"{name}.A_log": (heads,),
        f"{name}.D": (heads,),
        f"{name}.dt_bias": (heads,),
        f"{name}.norm.weight": (inner,),
        f"{name}.out_proj.weight": (HIDDEN, inner),
    }
    if not config.get("mamba_rms_norm", True):
        del shapes[f"{name}.norm.weight"]
    return shapes


def mamba_sizes(config: dict[str, Any]) -> tuple[int, int, int, int]:
    """Heads, width, groups and size of a state."""
    if config["model_type"] == "mamba2":
        heads = config["num_heads"]
        return heads, 2 * HIDDEN, config["n_groups"], config["state_size"]
    if config["model_type"] == "nemotron_h":
        heads = config["mamba_num_heads"]
        inner = heads * config["mamba_head_dim"]
        return heads, inner, config["n_groups"], config["ssm_state_size"]
    inner = config.get("mamba_d_ssm", config["mamba_expand"] * HIDDEN)
    return config["mamba_n_heads"], inner, config["mamba_n_groups"], config["mamba_d_state"]


def _falcon_layer(config: dict[str, Any], i: int, kind: str) -> Shapes:
    """Bamba's too."""
    width = config["intermediate_size"]
    shapes: Shapes = {
        "input_layernorm.weight": (HIDDEN,),
        "pre_ff_layernorm.weight": (HIDDEN,),
        "feed_forward.gate_proj.weight": (width, HIDDEN),
        "feed_forward.up_proj.weight": (width, HIDDEN),
        "feed_forward.down_proj.weight": (HIDDEN, width),
    }
    if kind != "mamba":
        shapes |= _attention("o_proj")
    return shapes if kind == "attention" else shapes | _mamba(config)


def _nemotron_layer(config: dict[str, Any], i: int, kind: str) -> Shapes:
    shapes: Shapes = {"norm.weight": (HIDDEN,)}
    if kind == "mamba":
        return shapes | _mamba(config, "mixer")
    if kind == "attention":
        parts = _attention("o_proj").items()
        return shapes | {name.replace("self_attn", "mixer"): shape for name, shape in parts}
    if kind == "moe":
        return shapes | _nemotron_experts(config)
    width = config["intermediate_size"]
    return shapes | {
        "mixer.up_proj.weight": (width, HIDDEN),
        "mixer.down_proj.weight": (HIDDEN, width),
    }


def _nemotron_experts(config: dict[str, Any]) -> Shapes:
    count, latent = config["n_routed_experts"], config["moe_latent_size"]
    width, shared = config["moe_intermediate_size"], config["moe_shared_expert_intermediate_size"]
    shapes: Shapes = {
        "mixer.gate.weight": (count, HIDDEN),
        "mixer.gate.e_score_correction_bias": (count,),
        "mixer.fc1_latent_proj.weight": (latent, HIDDEN),
        "mixer.fc2_latent_proj.weight": (HIDDEN, latent),
        "mixer.shared_experts.up_proj.weight": (shared, HIDDEN),
        "mixer.shared_experts.down_proj.weight": (HIDDEN, shared),
    }
    for e in range(count):
        shapes[f"mixer.experts.{e}.up_proj.weight"] = (width, latent)
        shapes[f"mixer.experts.{e}.down_proj.weight"] = (latent, width)
    return shapes


_LAYERS = {
    "lfm2": _lfm2_layer,
    "lfm2_moe": _lfm2_layer,
    "granitemoehybrid": _granite_layer,
    "mamba2": _nemotron_layer,
    "nemotron_h": _nemotron_layer,
}


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokens = byte_level()["tokenizer.ggml.tokens"]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|bos|>", "<|eos|>"])
    return tokenizer
