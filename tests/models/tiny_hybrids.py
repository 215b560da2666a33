"""Tiny hybrids (models with recurrent layers) as their makers publish them, without PyTorch.

`write_tiny_hybrid` makes a folder of safetensors, `write_tiny_hybrid_gguf` a GGUF file as the
reference converter would: weights are NumPy's frozen `RandomState` stream, and the tokenizer knows
bytes. Golden logits of the folders lie in tests/data/hybrids.npz.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tests.loading.gguf_writer import write_gguf
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
_GRANITE: dict[str, Any] = {
    **_COMMON,
    "shared_intermediate_size": 48,
    "intermediate_size": 32,
    "rms_norm_eps": 1e-5,
    "layer_types": ["mamba", "mamba", "attention", "mamba"],
    "mamba_n_heads": 8,
    "mamba_n_groups": 1,
    "mamba_d_head": 16,
    "mamba_d_state": 24,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "attention_multiplier": 0.125,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "logits_scaling": 0.5,
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
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


def _shapes(config: dict[str, Any]) -> Shapes:
    is_granite = config["model_type"].startswith("granite")
    final = "model.norm" if is_granite else "model.embedding_norm"
    shapes: Shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN), f"{final}.weight": (HIDDEN,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    for i, kind in enumerate(config["layer_types"]):
        layer = (_granite_layer if is_granite else _lfm2_layer)(config, i, kind)
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
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
        heads, inner = config["mamba_n_heads"], config["mamba_expand"] * HIDDEN
        convolved = inner + 2 * config["mamba_n_groups"] * config["mamba_d_state"]
        shapes |= {
            "mamba.in_proj.weight": (inner + convolved + heads, HIDDEN),
            "mamba.conv1d.weight": (convolved, 1, config["mamba_d_conv"]),
            "mamba.conv1d.bias": (convolved,),
            "mamba.A_log": (heads,),
            "mamba.D": (heads,),
            "mamba.dt_bias": (heads,),
            "mamba.norm.weight": (inner,),
            "mamba.out_proj.weight": (HIDDEN, inner),
        }
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


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokens = byte_level()["tokenizer.ggml.tokens"]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|bos|>", "<|eos|>"])
    return tokenizer


# ---- GGUF ----------------------------------------------------------------------------------------

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
    "block_sparse_moe.router.layer": "ffn_gate_inp",
    "block_sparse_moe.output_linear": "ffn_down_exps",
}
_GGUF_VECTORS = {"mamba.A_log": "ssm_a", "mamba.D": "ssm_d", "mamba.dt_bias": "ssm_dt.bias"}


def write_tiny_hybrid_gguf(path: Path, name: str) -> Path:
    """Case ``name`` in float32, as the reference converter writes it; not one that rotates."""
    config = HYBRIDS[name]
    architecture = name.partition("_")[0]
    metadata = byte_level() | {"general.architecture": architecture}
    metadata |= {f"{architecture}.{key}": v for key, v in _metadata(config).items()}
    return write_gguf(path, metadata, _gguf_arrays(config, hybrid_arrays(name)))


def _metadata(config: dict[str, Any]) -> dict[str, Any]:
    is_granite = config["model_type"].startswith("granite")
    kv_heads = [KV_HEADS if "attention" in kind else 0 for kind in config["layer_types"]]
    values = {
        "block_count": len(kv_heads),
        "context_length": config["max_position_embeddings"],
        "embedding_length": HIDDEN,
        "feed_forward_length": config.get("intermediate_size", 96),
        "attention.head_count": HEADS,
        "attention.head_count_kv": np.array(kv_heads, np.int32),
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10_000.0,
        "vocab_size": VOCAB,
    }
    count = config.get("num_experts", config.get("num_local_experts", 0))
    if count:
        values |= {"expert_count": count, "expert_used_count": config["num_experts_per_tok"]}
    if not is_granite:
        values["shortconv.l_cache"] = config["conv_L_cache"]
        if count:
            values |= {
                "expert_feed_forward_length": config["moe_intermediate_size"],
                "leading_dense_block_count": config["num_dense_layers"],
                "expert_gating_func": 2,
            }
        return values
    values |= {
        "ssm.conv_kernel": config["mamba_d_conv"],
        "ssm.state_size": config["mamba_d_state"],
        "ssm.group_count": config["mamba_n_groups"],
        "ssm.inner_size": config["mamba_expand"] * HIDDEN,
        "ssm.time_step_rank": config["mamba_n_heads"],
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
        if not stem.startswith("model.layers."):
            named[f"{_GGUF_NAMES[stem]}.{kind}"] = values
            continue
        _, _, layer, part = key.split(".", 3)
        block, stem = f"blk.{layer}", part.rpartition(".")[0]
        if part == "feed_forward.expert_bias":
            named[f"{block}.exp_probs_b.bias"] = values
        elif part in _GGUF_VECTORS:
            values = -np.exp(values) if part.endswith("A_log") else values
            shape = values.shape if part.endswith("bias") else (*values.shape, 1)
            named[f"{block}.{_GGUF_VECTORS[part]}"] = values.reshape(shape)
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
    count = config.get("num_experts", 0)
    for i in range(config["num_dense_layers"] if count else 0, len(config["layer_types"])):
        for ours, theirs in (("gate", "w1"), ("down", "w2"), ("up", "w3")) if count else ():
            experts = f"model.layers.{i}.feed_forward.experts"
            stack = [arrays[f"{experts}.{e}.{theirs}.weight"] for e in range(count)]
            named[f"blk.{i}.ffn_{ours}_exps.weight"] = np.stack(stack)
    return named


def _reshaped(part: str, config: dict[str, Any], values: np.ndarray) -> np.ndarray:
    if "conv.conv." in part or "conv1d.weight" in part:
        return values.squeeze(1)
    if part == "mamba.norm.weight":
        return values.reshape(config["mamba_n_groups"], -1)
    if config["model_type"].startswith("granite") and part.endswith(
        ("q_proj.weight", "k_proj.weight")
    ):
        halves = values.reshape(-1, 2, HEAD_DIM // 2, HIDDEN)
        return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
    return values
