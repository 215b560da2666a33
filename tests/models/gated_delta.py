"""Tiny models of Qwen3-Next and Qwen3.5 with random weights, as checkpoints and as GGUF files.

Checkpoints have the names and mixed rows that published ones have; GGUF files what the reference
converter makes of them. Weights come from NumPy's frozen `RandomState` stream, so the script that
stores golden logits makes the same ones. Nothing here needs PyTorch.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.loading.gguf_writer import RawTensor, write_gguf
from tests.loading.models import pack_safetensors
from tests.models import tiny_hybrids

HIDDEN, INNER, VOCAB, LAYERS = 64, 96, 64, 4
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 32
K_HEADS, V_HEADS, K_DIM, KERNEL = 2, 6, 16, 4
EXPERTS, WIDTH, SHARED = 5, 32, 64
PER_KEY = V_HEADS // K_HEADS
KEYS, VALUES = K_HEADS * K_DIM, V_HEADS * K_DIM
CASES = {
    "qwen35": "qwen3_5_text",
    "qwen35moe": "qwen3_5_moe_text",
    "qwen3next": "qwen3_next",
    "qwen3next_some_dense": "qwen3_next",
}
"""Name of a case: ``model_type``."""
Arrays = dict[str, np.ndarray]


def is_full(layer: int) -> bool:
    return (layer + 1) % 4 == 0


def has_experts(name: str, layer: int) -> bool:
    return name != "qwen35" and not (name == "qwen3next_some_dense" and layer in (0, 3))


def config(name: str, vocab: int = VOCAB) -> dict[str, Any]:
    """A text model's ``config.json``, without what has a default."""
    values: dict[str, Any] = {
        "model_type": CASES[name],
        "vocab_size": vocab,
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 256,
        "linear_num_key_heads": K_HEADS,
        "linear_num_value_heads": V_HEADS,
        "linear_key_head_dim": K_DIM,
        "linear_value_head_dim": K_DIM,
        "full_attention_interval": 4,
        "pad_token_id": 0,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 100_000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [2, 1, 1],
        },
    }
    if name != "qwen35":
        values |= {
            "num_experts": EXPERTS,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": WIDTH,
            "shared_expert_intermediate_size": SHARED,
        }
    if name != "qwen35moe":
        values["intermediate_size"] = INNER
    if name == "qwen3next_some_dense":
        values |= {"mlp_only_layers": [0, 3], "attention_bias": True}
    return values


def _shapes(name: str, vocab: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, HIDDEN)}
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        shapes |= {
            f"{layer}.{norm}_layernorm.weight": (HIDDEN,) for norm in ("input", "post_attention")
        }
        parts = attention_shapes(name) if is_full(i) else _linear_attention(name)
        parts |= expert_shapes(name) if has_experts(name, i) else _mlp("mlp", INNER)
        shapes |= {f"{layer}.{part}": shape for part, shape in parts.items()}
    return shapes | {"model.norm.weight": (HIDDEN,), "lm_head.weight": (vocab, HIDDEN)}


def attention_shapes(name: str) -> dict[str, tuple[int, ...]]:
    width, shared = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    linears = {"q": (2 * width, HIDDEN), "k": (shared, HIDDEN), "v": (shared, HIDDEN)}
    linears["o"] = (HIDDEN, width)
    shapes: dict[str, tuple[int, ...]] = {}
    for part, shape in linears.items():
        shapes[f"self_attn.{part}_proj.weight"] = shape
        if name == "qwen3next_some_dense":
            shapes[f"self_attn.{part}_proj.bias"] = shape[:1]
    return shapes | {f"self_attn.{part}_norm.weight": (HEAD_DIM,) for part in "qk"}


def _linear_attention(name: str) -> dict[str, tuple[int, ...]]:
    if name.startswith("qwen3next"):
        inputs = {"qkvz": 2 * KEYS + 2 * VALUES, "ba": 2 * V_HEADS}
    else:
        inputs = {"qkv": 2 * KEYS + VALUES, "z": VALUES, "b": V_HEADS, "a": V_HEADS}
    linear = "linear_attn"
    shapes: dict[str, tuple[int, ...]] = {
        f"{linear}.in_proj_{part}.weight": (rows, HIDDEN) for part, rows in inputs.items()
    }
    return shapes | {
        f"{linear}.conv1d.weight": (2 * KEYS + VALUES, 1, KERNEL),
        f"{linear}.A_log": (V_HEADS,),
        f"{linear}.dt_bias": (V_HEADS,),
        f"{linear}.norm.weight": (K_DIM,),
        f"{linear}.out_proj.weight": (HIDDEN, VALUES),
    }


def _mlp(name: str, inner: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{name}.gate_proj.weight": (inner, HIDDEN),
        f"{name}.up_proj.weight": (inner, HIDDEN),
        f"{name}.down_proj.weight": (HIDDEN, inner),
    }


def expert_shapes(name: str) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"mlp.gate.weight": (EXPERTS, HIDDEN)}
    if name == "qwen35moe":  # stacked, as its checkpoints are
        shapes["mlp.experts.gate_up_proj"] = (EXPERTS, 2 * WIDTH, HIDDEN)
        shapes["mlp.experts.down_proj"] = (EXPERTS, HIDDEN, WIDTH)
    else:
        for e in range(EXPERTS):
            shapes |= _mlp(f"mlp.experts.{e}", WIDTH)
    shapes |= _mlp("mlp.shared_expert", SHARED)
    return shapes | {"mlp.shared_expert_gate.weight": (1, HIDDEN)}


def checkpoint_arrays(name: str, vocab: int = VOCAB) -> Arrays:
    """Float32 weights of a case by their names in a checkpoint of the text model."""
    random = np.random.RandomState(zlib.crc32(name.encode()))
    arrays = {}
    for tensor, shape in _shapes(name, vocab).items():
        values = random.standard_normal(shape)
        if tensor.endswith("linear_attn.norm.weight"):
            values = 1 + 0.2 * values
        elif "norm" in tensor:
            values = 0.2 * values
        elif tensor.endswith(("conv1d.weight", ".bias")):
            values = 0.5 * values
        elif len(shape) > 1 and "embed" not in tensor:
            values = 1.3 * values / np.sqrt(shape[-1])
        arrays[tensor] = values.astype(np.float32)
    return arrays


def write_checkpoint(
    folder: Path,
    name: str,
    composite: bool = False,
    with_tokenizer: bool = False,
    changed: Arrays | None = None,
) -> Path:
    """A folder with a text model or, ``composite``, with one that sees pictures.

    Beside its layers it holds one that predicts further tokens. ``changed``: weights that are not
    the case's own, without ``model.`` in front.
    """
    vocab = tiny_hybrids.VOCAB if with_tokenizer else VOCAB
    values, arrays = config(name, vocab), checkpoint_arrays(name, vocab)
    if changed is not None:
        arrays = {key: changed[key.removeprefix("model.")] for key in arrays}
    if composite:
        kind = values["model_type"].removesuffix("_text")
        values = {"model_type": kind, "text_config": values, "vision_config": {"depth": 1}}
        renamed = {n.replace("model.", "model.language_model.", 1): a for n, a in arrays.items()}
        arrays = renamed | {"model.visual.blocks.0.norm1.weight": np.ones(4, np.float32)}
    arrays |= {
        "mtp.fc.weight": np.ones((HIDDEN, 2 * HIDDEN), np.float32),
        "mtp.layers.0.self_attn.q_proj.weight": np.ones((HIDDEN, HIDDEN), np.float32),
    }
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    (folder / "model.safetensors").write_bytes(pack_safetensors(arrays))
    if with_tokenizer:
        tiny_hybrids.write_byte_tokenizer(folder)
    return folder


# ---- GGUF ----------------------------------------------------------------------------------------

_GLOBAL = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_qkvz": "ssm_in",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}


def write_tiny_gguf(
    path: Path,
    name: str,
    quant_type: gguf.GGMLQuantizationType | None = None,
    vocab: int = VOCAB,
    keys: dict[str, Any] | None = None,
) -> Path:
    """Case ``name`` as a GGUF file; its matrices quantised, if a type is given.

    ``keys`` are metadata in the place of what it has. ``qwen3next_some_dense`` has its
    in-projections mixed, as the first files did.
    """
    named = gguf_tensors(name, checkpoint_arrays(name, vocab))
    extra = f"blk.{LAYERS}.nextn.eh_proj.weight"
    named[extra] = np.ones((HIDDEN, 2 * HIDDEN), np.float32)
    if quant_type is not None:
        quantise(named, quant_type)
    return write_gguf(path, gguf_metadata(name) | (keys or {}), named)


def quantise(named: dict[str, Any], quant_type: gguf.GGMLQuantizationType) -> None:
    """Replace the matrices of a file."""
    for key, values in named.items():
        if isinstance(values, np.ndarray) and values.ndim > 1 and "conv1d" not in key:
            packed = np.ascontiguousarray(gguf.quants.quantize(values, quant_type))
            named[key] = RawTensor(values.shape, int(quant_type), packed.tobytes())


def gguf_tensors(name: str, arrays: Arrays) -> dict[str, np.ndarray | RawTensor]:
    """A checkpoint's weights by GGUF's names."""
    arrays = dict(arrays)
    named: dict[str, np.ndarray | RawTensor] = {_GLOBAL[n]: arrays.pop(n) for n in _GLOBAL}
    named["output_norm.weight"] = np.asarray(named["output_norm.weight"]) + 1
    for i in range(LAYERS):
        prefix = f"model.layers.{i}."
        layer = {n.removeprefix(prefix): a for n, a in arrays.items() if n.startswith(prefix)}
        for key, values in converted_layer(layer, name).items():
            named[f"blk.{i}.{key}"] = values
    return named


def converted_layer(layer: Arrays, name: str) -> Arrays:
    """Tensors of a layer of case ``name`` by GGUF's names."""
    architecture = name.removesuffix("_some_dense")
    return _converted(layer, architecture, has_old_names=architecture != name)


def _converted(layer: Arrays, architecture: str, has_old_names: bool) -> Arrays:
    """Tensors of a layer by GGUF's names, as the converter changes them."""
    layer = dict(layer)
    made: Arrays = {}
    if architecture == "qwen3next":
        layer = layer if has_old_names else _unmixed(layer)
    else:
        layer = {key: _tiled(key, values) for key, values in layer.items()}
    if "mlp.experts.gate_up_proj" in layer:
        gate_up = layer.pop("mlp.experts.gate_up_proj")
        made["ffn_gate_exps.weight"], made["ffn_up_exps.weight"] = np.split(gate_up, 2, axis=1)
        made["ffn_down_exps.weight"] = layer.pop("mlp.experts.down_proj")
    elif "mlp.experts.0.up_proj.weight" in layer:
        for part in ("gate", "up", "down"):
            experts = [layer.pop(f"mlp.experts.{e}.{part}_proj.weight") for e in range(EXPERTS)]
            made[f"ffn_{part}_exps.weight"] = np.stack(experts)
    for key, values in layer.items():
        stem, _, kind = key.rpartition(".")
        if key.endswith("A_log"):
            made["ssm_a"] = -np.exp(values)
        elif key.endswith("dt_bias"):
            made["ssm_dt.bias"] = values
        elif key.endswith("norm.weight") and "linear_attn" not in key:
            made[f"{_LAYER[stem]}.{kind}"] = values + 1
        elif key.endswith(("conv1d.weight", "shared_expert_gate.weight")):
            made[f"{_LAYER[stem]}.{kind}"] = values.squeeze()
        else:
            made[f"{_LAYER[stem]}.{kind}"] = values
    return made


def _unmixed(layer: Arrays) -> Arrays:
    """q, k, v of all heads in one matrix, z in another."""
    mixed = layer.pop("linear_attn.in_proj_qkvz.weight", None)
    if mixed is None:
        return layer
    heads = mixed.reshape(K_HEADS, -1, HIDDEN)
    width = PER_KEY * K_DIM
    parts = np.split(heads, np.cumsum([K_DIM, K_DIM, width]), axis=1)
    q, k, v, z = (part.reshape(-1, HIDDEN) for part in parts)
    qkv = np.concatenate([q, k, v])
    return layer | {"linear_attn.in_proj_qkv.weight": qkv, "linear_attn.in_proj_z.weight": z}


def _tiled(key: str, values: np.ndarray) -> np.ndarray:
    """Value heads from those of a key head together to every key head's first, second, ..."""

    def rows(part: np.ndarray, size: int) -> np.ndarray:
        heads = part.reshape(K_HEADS, PER_KEY, size, *part.shape[1:])
        return np.ascontiguousarray(heads.swapaxes(0, 1)).reshape(part.shape)

    if key.endswith(("in_proj_qkv.weight", "conv1d.weight")):
        return np.concatenate([values[: 2 * KEYS], rows(values[2 * KEYS :], K_DIM)])
    if key.endswith("in_proj_z.weight"):
        return rows(values, K_DIM)
    if key.endswith(("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias")):
        return rows(values, 1)
    if key.endswith("linear_attn.out_proj.weight"):
        return np.ascontiguousarray(rows(values.T, K_DIM).T)
    return values


def gguf_metadata(name: str) -> dict[str, Any]:
    """Of a file with one layer that predicts a further token."""
    architecture = name.removesuffix("_some_dense")
    own: dict[str, Any] = {
        "block_count": LAYERS + 1,
        "nextn_predict_layers": 1,
        "context_length": 256,
        "embedding_length": HIDDEN,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": HEAD_DIM,
        "attention.value_length": HEAD_DIM,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.dimension_count": HEAD_DIM // 4,
        "rope.freq_base": 100_000.0,
        "ssm.conv_kernel": KERNEL,
        "ssm.state_size": K_DIM,
        "ssm.group_count": K_HEADS,
        "ssm.time_step_rank": V_HEADS,
        "ssm.inner_size": VALUES,
        "vocab_size": VOCAB,
    }
    if architecture == "qwen35":
        own["attention.recurrent_layers"] = np.array([True, True, True, False, False])
    else:
        own["full_attention_interval"] = 4
    if architecture != "qwen3next":
        own["rope.dimension_sections"] = np.array([2, 1, 1, 0], np.int32)
    if architecture != "qwen35moe":
        own["feed_forward_length"] = INNER
    if architecture != "qwen35":
        own |= {
            "expert_count": EXPERTS,
            "expert_used_count": 2,
            "expert_feed_forward_length": WIDTH,
            "expert_shared_feed_forward_length": SHARED,
        }
    tokens = [f"<{i}>" for i in range(VOCAB)]
    return {
        "general.architecture": architecture,
        **{f"{architecture}.{key}": value for key, value in own.items()},
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.ones(len(tokens), dtype=np.int32),
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.eos_token_id": 2,
    }
