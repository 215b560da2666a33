"""Tiny models that bring a layer which predicts one token more, with random weights.

Checkpoints have the names that published ones have. Weights come from NumPy's frozen `RandomState`
stream, so the script that stores golden logits makes the same ones. Nothing here needs PyTorch.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.loading.gguf_writer import write_gguf
from tests.loading.models import pack_safetensors
from tests.models import gated_delta, tiny_hybrids

HIDDEN, INNER, VOCAB, LAYERS = 64, 96, tiny_hybrids.VOCAB, 2
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16
EXPERTS, WIDTH = 8, 32
Q_RANK, RANK, NOPE, ROPE, VALUE = 32, 32, 16, 8, 16
QWEN = ("qwen35", "qwen35moe", "qwen3next")
LATENT = ("deepseek_v3", "glm4_moe_lite")
CASES = (*QWEN, *LATENT, "glm4_moe", "mimo", "ernie4_5_moe")
ERNIE = "ernie4_5_moe"
Arrays = dict[str, np.ndarray]
Shapes = dict[str, tuple[int, ...]]


def config(name: str) -> dict[str, Any]:
    """A case's ``config.json``."""
    if name in QWEN:
        return gated_delta.config(name, VOCAB) | {"mtp_num_hidden_layers": 1}
    values: dict[str, Any] = {
        "model_type": name,
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_nextn_predict_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS if name in LATENT else KV_HEADS,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "rope_theta": 10_000.0,
    }
    if name == "mimo":
        return values | {"head_dim": HEAD_DIM, "attention_bias": True, "hidden_act": "silu"}
    if name == "ernie4_5_moe":
        return values | {
            "head_dim": HEAD_DIM,
            "moe_k": 2,
            "moe_num_experts": EXPERTS,
            "moe_intermediate_size": WIDTH,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 1,
        }
    values |= {
        "n_routed_experts": EXPERTS,
        "num_experts_per_tok": 3,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": WIDTH,
        "routed_scaling_factor": 1.5,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
    }
    if name == "glm4_moe":
        extra = {"head_dim": HEAD_DIM, "partial_rotary_factor": 0.5, "attention_bias": True}
        return values | extra | {"use_qk_norm": False}
    return values | {
        "q_lora_rank": Q_RANK,
        "kv_lora_rank": RANK,
        "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": ROPE,
        "v_head_dim": VALUE,
    }


def own_arrays(name: str) -> Arrays:
    """Float32 weights of the model's own layers, by their names in a checkpoint."""
    if name in QWEN:
        return gated_delta.checkpoint_arrays(name, VOCAB)
    shapes: Shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
    for i in range(LAYERS):
        layer = _layer_shapes(name, is_dense=i == 0)
        shapes |= {f"model.layers.{i}.{part}": shape for part, shape in layer.items()}
    shapes |= {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCAB, HIDDEN)}
    return _random(name, name, shapes)


def layer_arrays(name: str) -> Arrays:
    """What the predicting layer has in common with others, by names within a layer."""
    return _random(name, f"{name} predicts", _layer_shapes(name, name == ERNIE))


def input_arrays(name: str) -> Arrays:
    """``enorm``, ``hnorm``, ``norm`` and ``eh_proj`` of it; ERNIE's norm is the model's."""
    shapes: Shapes = dict.fromkeys(("enorm", "hnorm", "norm"), (HIDDEN,))
    made = _random(name, f"{name} inputs", shapes | {"eh_proj": (HIDDEN, 2 * HIDDEN)})
    return made | {"norm": own_arrays(name)["model.norm.weight"]} if name == ERNIE else made


def predictor_arrays(layer: Arrays, inputs: Arrays, name: str) -> Arrays:
    """All of the predicting layer, by names of checkpoints."""
    if name in QWEN:
        prefix, names = "mtp.layers.0", {
            "enorm": "mtp.pre_fc_norm_embedding",
            "hnorm": "mtp.pre_fc_norm_hidden",
            "eh_proj": "mtp.fc",
            "norm": "mtp.norm",
        }  # fmt: skip
    elif name == "mimo":
        prefix = "model.mtp_layers.0"
        parts = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
        own = zip(("enorm", "hnorm", "eh_proj", "norm"), parts, strict=True)
        names = {key: f"{prefix}.{part}" for key, part in own}
    elif name == ERNIE:
        prefix = "model.mtp_block.0"
        parts = ("mtp_emb_norm", "mtp_hidden_norm", "mtp_linear_proj")
        names = {
            key: f"model.{part}.0"
            for key, part in zip(("enorm", "hnorm", "eh_proj"), parts, strict=True)
        }
    else:
        prefix = f"model.layers.{LAYERS}"
        names = {key: f"{prefix}.{key}" for key in ("enorm", "hnorm", "eh_proj")}
        names["norm"] = f"{prefix}.shared_head.norm"
    arrays = {f"{prefix}.{part}": values for part, values in layer.items()}
    return arrays | {f"{names[key]}.weight": a for key, a in inputs.items() if key in names}


def write_checkpoint(
    folder: Path,
    name: str,
    *,
    own: Arrays | None = None,
    layer: Arrays | None = None,
    inputs: Arrays | None = None,
) -> Path:
    """A folder with case ``name``, or with other weights in the place of its own."""
    arrays = own_arrays(name) if own is None else own
    layer = layer_arrays(name) if layer is None else layer
    inputs = input_arrays(name) if inputs is None else inputs
    arrays = arrays | predictor_arrays(layer, inputs, name)
    if name not in (*QWEN, "mimo", ERNIE):  # as published, where they are copies; nobody reads them
        last = f"model.layers.{LAYERS}"
        arrays[f"{last}.embed_tokens.weight"] = np.zeros((VOCAB, HIDDEN), np.float32)
        arrays[f"{last}.shared_head.head.weight"] = np.zeros((VOCAB, HIDDEN), np.float32)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(name)))
    (folder / "model.safetensors").write_bytes(pack_safetensors(arrays))
    tiny_hybrids.write_byte_tokenizer(folder)
    return folder


def agreeing_checkpoint(folder: Path, name: str) -> Path:
    """A model whose next id follows from the last one alone, and a layer that knows how.

    No layer adds anything to the embedding, and the head's rows are the embedding's in another
    order; so is what the predicting layer makes of the id that it is given.
    """
    own, layer, inputs = own_arrays(name), layer_arrays(name), input_arrays(name)
    norm = 0.0 if name in QWEN else 1.0
    for arrays in (own, layer):
        for key, values in arrays.items():
            if key.split(".")[-2] in ("o_proj", "out_proj") or "down_proj" in key:
                arrays[key] = np.zeros_like(values)
    own["model.norm.weight"] = np.full(HIDDEN, norm, np.float32)
    own["lm_head.weight"] = np.roll(own["model.embed_tokens.weight"], 7, axis=0)
    inputs = {key: np.full(HIDDEN, norm, np.float32) for key in ("enorm", "hnorm", "norm")}
    halves = [np.eye(HIDDEN, dtype=np.float32), np.zeros((HIDDEN, HIDDEN), np.float32)]
    inputs["eh_proj"] = np.concatenate(halves[::-1] if name == "mimo" else halves, axis=1)
    return write_checkpoint(folder, name, own=own, layer=layer, inputs=inputs)


def write_tiny_gguf(
    path: Path, name: str, quant_type: gguf.GGMLQuantizationType | None = None
) -> Path:
    """A case of Qwen as the reference converter makes it, the predicting layer included."""
    tensors: dict[str, Any] = gated_delta.gguf_tensors(name, gated_delta.checkpoint_arrays(name))
    layer = gated_delta.converted_layer(layer_arrays(name), name)
    prefix = f"blk.{gated_delta.LAYERS}"
    tensors |= {f"{prefix}.{key}": values for key, values in layer.items()}
    inputs = input_arrays(name)
    tensors[f"{prefix}.nextn.eh_proj.weight"] = inputs.pop("eh_proj")
    for key, values in inputs.items():
        part = "shared_head_norm" if key == "norm" else key
        tensors[f"{prefix}.nextn.{part}.weight"] = values + 1
    if quant_type is not None:
        gated_delta.quantise(tensors, quant_type)
    return write_gguf(path, gated_delta.gguf_metadata(name), tensors)


def _random(name: str, seed: str, shapes: Shapes) -> Arrays:
    random = np.random.RandomState(zlib.crc32(seed.encode()))
    arrays = {}
    for tensor, shape in shapes.items():
        values = random.standard_normal(shape)
        if "norm" in tensor:
            values = (0.0 if name in QWEN else 1.0) + 0.2 * values
        elif len(shape) == 1:
            values = 0.2 * values
        elif "embed" not in tensor:
            values = 1.3 * values / np.sqrt(shape[-1])
        arrays[tensor] = values.astype(np.float32)
    return arrays


def _layer_shapes(name: str, is_dense: bool) -> Shapes:
    shapes: Shapes = {f"{norm}_layernorm.weight": (HIDDEN,) for norm in ("input", "post_attention")}
    if name in QWEN:
        has_experts = name != "qwen35"
        mlp = gated_delta.expert_shapes(name) if has_experts else _mlp("mlp", INNER)
        return shapes | gated_delta.attention_shapes(name) | mlp
    shapes |= _latent_attention() if name in LATENT else _attention(has_biases=name != ERNIE)
    if name == "mimo" or is_dense:
        return shapes | _mlp("mlp", INNER)
    shapes |= {"mlp.gate.weight": (EXPERTS, HIDDEN)}
    if name == ERNIE:
        shapes["mlp.moe_statics.e_score_correction_bias"] = (1, EXPERTS)
    else:
        shapes["mlp.gate.e_score_correction_bias"] = (EXPERTS,)
    for e in range(EXPERTS):
        shapes |= _mlp(f"mlp.experts.{e}", WIDTH)
    return shapes | _mlp("mlp.shared_experts", WIDTH)


def _attention(has_biases: bool) -> Shapes:
    rows = {"q": HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM}
    shapes: Shapes = {"self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM)}
    for part, count in rows.items():
        shapes[f"self_attn.{part}_proj.weight"] = (count, HIDDEN)
        if has_biases:
            shapes[f"self_attn.{part}_proj.bias"] = (count,)
    return shapes


def _latent_attention() -> Shapes:
    return {
        "self_attn.q_a_proj.weight": (Q_RANK, HIDDEN),
        "self_attn.q_a_layernorm.weight": (Q_RANK,),
        "self_attn.q_b_proj.weight": (HEADS * (NOPE + ROPE), Q_RANK),
        "self_attn.kv_a_proj_with_mqa.weight": (RANK + ROPE, HIDDEN),
        "self_attn.kv_a_layernorm.weight": (RANK,),
        "self_attn.kv_b_proj.weight": (HEADS * (NOPE + VALUE), RANK),
        "self_attn.o_proj.weight": (HIDDEN, HEADS * VALUE),
    }


def _mlp(name: str, inner: int) -> Shapes:
    return {
        f"{name}.gate_proj.weight": (inner, HIDDEN),
        f"{name}.up_proj.weight": (inner, HIDDEN),
        f"{name}.down_proj.weight": (HIDDEN, inner),
    }
