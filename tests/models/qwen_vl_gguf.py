"""The tiny models of `tests.models.qwen_vl` as two GGUF files each, as converters write them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.synthetic import byte_tokens
from tests.loading.gguf_writer import write_gguf
from tests.models import qwen_vl, vision
from tests.models.qwen_vl import DEPTH, HEAD_DIM, HEADS, HIDDEN, INNER, KV_HEADS, LAYERS, TAPPED

ARCHITECTURES = {
    "qwen2_vl": "qwen2vl", "qwen2_5_vl": "qwen2vl", "qwen3_vl": "qwen3vl",
    "qwen3_vl_moe": "qwen3vlmoe",
}  # fmt: skip
PROJECTORS = {"qwen2_vl": "qwen2vl_merger", "qwen2_5_vl": "qwen2.5vl_merger"}
_TEXT = (
    (r"embed_tokens\.", "token_embd."),
    (r"norm\.", "output_norm."),
    (r"lm_head\.", "output."),
    (r"layers\.(\d+)\.input_layernorm\.", r"blk.\1.attn_norm."),
    (r"layers\.(\d+)\.post_attention_layernorm\.", r"blk.\1.ffn_norm."),
    (r"layers\.(\d+)\.self_attn\.([qk])_norm\.", r"blk.\1.attn_\2_norm."),
    (r"layers\.(\d+)\.self_attn\.o_proj\.", r"blk.\1.attn_output."),
    (r"layers\.(\d+)\.self_attn\.([qkv])_proj\.", r"blk.\1.attn_\2."),
    (r"layers\.(\d+)\.mlp\.gate\.", r"blk.\1.ffn_gate_inp."),
    (r"layers\.(\d+)\.mlp\.(gate|up|down)_proj\.", r"blk.\1.ffn_\2."),
)
_TOWER = (
    (r"patch_embed\.proj\.bias", "v.patch_embd.bias"),
    (r"pos_embed\.", "v.position_embd."),
    (r"merger\.(norm|ln_q)\.", "v.post_ln."),
    (r"merger\.(mlp\.0|linear_fc1)\.", "mm.0."),
    (r"merger\.(mlp\.2|linear_fc2)\.", "mm.2."),
    (r"blocks\.(\d+)\.norm(\d)\.", r"v.blk.\1.ln\2."),
    (r"blocks\.(\d+)\.attn\.qkv\.", r"v.blk.\1.attn_qkv."),
    (r"blocks\.(\d+)\.attn\.proj\.", r"v.blk.\1.attn_out."),
    (r"blocks\.(\d+)\.mlp\.(linear_)?fc1\.", r"v.blk.\1.ffn_up."),
    (r"blocks\.(\d+)\.mlp\.(linear_)?fc2\.", r"v.blk.\1.ffn_down."),
    (r"blocks\.(\d+)\.mlp\.(gate|up|down)_proj\.", r"v.blk.\1.ffn_\2."),
)


def write_pair(folder: Path, case: str, **changes: Any) -> Path:
    """The text model's file, and the encoder's beside it; ``changes`` of the latter's metadata."""
    text: dict[str, np.ndarray] = {}
    tower: dict[str, np.ndarray] = {}
    for name, values in qwen_vl.arrays(case).items():
        own = re.sub(r"\A(model\.)?(language_model\.|visual\.)?", "", name)
        if "visual." in name:
            tower |= tower_tensors(case, own, values)
        elif ".experts." in own:
            text |= _experts(own, values)
        else:
            text[_renamed(own, _TEXT)] = values
    folder.mkdir(parents=True, exist_ok=True)
    write_gguf(folder / "mmproj-model.gguf", {**tower_metadata(case), **changes}, tower)
    return write_gguf(folder / "model.gguf", _text_metadata(case), text)


def _renamed(name: str, names: tuple[tuple[str, str], ...]) -> str:
    for pattern, replacement in names:
        name, count = re.subn(rf"\A{pattern}", replacement, name)
        if count:
            return name
    raise ValueError(name)


def _experts(name: str, values: np.ndarray) -> dict[str, np.ndarray]:
    block = f"blk.{name.split('.')[1]}"
    stack = np.ascontiguousarray(values.swapaxes(1, 2))
    if name.endswith("down_proj"):
        return {f"{block}.ffn_down_exps.weight": stack}
    gate, up = np.split(stack, 2, axis=1)
    return {
        f"{block}.ffn_gate_exps.weight": gate.copy(),
        f"{block}.ffn_up_exps.weight": up.copy(),
    }


def tower_tensors(case: str, name: str, values: np.ndarray) -> dict[str, np.ndarray]:
    """What a file has for a tensor of an image encoder."""
    if name == "patch_embed.proj.weight":
        return {
            "v.patch_embd.weight": values[:, :, 0].copy(),
            "v.patch_embd.weight.1": values[:, :, 1].copy(),
        }
    match = re.match(r"deepstack_merger_list\.(\d+)\.(norm|linear_fc\d)\.(\w+)\Z", name)
    if match:
        part = match[2].removeprefix("linear_")
        return {f"v.deepstack.{TAPPED[int(match[1])]}.{part}.{match[3]}": values}
    renamed = _renamed(name, _TOWER)
    if "attn_qkv" in renamed and case in PROJECTORS:
        parts = zip("qkv", np.split(values, 3), strict=True)
        return {renamed.replace("qkv", letter): part.copy() for letter, part in parts}
    return {renamed: values}


def tower_metadata(case: str) -> dict[str, Any]:
    """Of a file with an image encoder."""
    is_third = case not in PROJECTORS
    inner = HIDDEN if case == "qwen2_vl" else qwen_vl.TOWER_INNER  # the converter's, of the first
    values: dict[str, Any] = {
        "general.architecture": "clip",
        "clip.has_vision_encoder": True,
        "clip.projector_type": PROJECTORS.get(case, "qwen3vl_merger"),
        "clip.vision.projection_dim": HIDDEN,
        "clip.vision.image_size": qwen_vl.SIDE * qwen_vl.PATCH if is_third else 560,
        "clip.vision.patch_size": qwen_vl.PATCH,
        "clip.vision.embedding_length": qwen_vl.WIDTH,
        "clip.vision.feed_forward_length": inner,
        "clip.vision.block_count": DEPTH,
        "clip.vision.attention.head_count": 2,
        "clip.vision.attention.layer_norm_epsilon": 1e-6,
        "clip.vision.image_mean": np.array([0.5, 0.4, 0.3], np.float32),
        "clip.vision.image_std": np.array([0.5, 0.6, 0.7], np.float32),
    }
    if case == "qwen2_5_vl":
        values |= {"clip.use_silu": True, "clip.vision.n_wa_pattern": 2}
        values["clip.vision.window_size"] = 16
    if is_third:
        taps = np.array([i in TAPPED for i in range(DEPTH)])
        values |= {"clip.use_gelu": True, "clip.vision.spatial_merge_size": 2}
        values["clip.vision.is_deepstack_layers"] = taps
    return values


def vocabulary() -> dict[str, Any]:
    """Bytes and marks, as the folders' tokenizers have them."""
    marks = ["<|image_pad|>" if mark == "<image>" else mark for mark in vision.MARKS]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": [*byte_tokens(), *marks],
        "tokenizer.ggml.token_type": np.array([1] * 256 + [3] * len(marks), np.int32),
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.eos_token_id": 256,
        "tokenizer.ggml.add_bos_token": False,
    }


def _text_metadata(case: str) -> dict[str, Any]:
    is_third = case not in PROJECTORS
    own: dict[str, Any] = {
        "block_count": LAYERS,
        "context_length": 512,
        "embedding_length": HIDDEN,
        "feed_forward_length": INNER,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": HEAD_DIM,
        "attention.value_length": HEAD_DIM,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 10000.0,
        "rope.dimension_sections": np.array([3, 3, 2, 0] if is_third else [2, 3, 3, 0], np.int32),
    }
    if is_third:
        own["n_deepstack_layers"] = len(TAPPED)
    if case == "qwen3_vl_moe":
        own |= {
            "expert_count": qwen_vl.EXPERTS, "expert_used_count": 2,
            "expert_feed_forward_length": qwen_vl.EXPERT_INNER,
        }  # fmt: skip
    architecture = ARCHITECTURES[case]
    return {
        "general.architecture": architecture,
        **vocabulary(),
        **{f"{architecture}.{key}": value for key, value in own.items()},
    }
