"""The image encoders of Qwen2-VL to Qwen3.5: names, and tensors as the towers here want them.

Patches keep their place in pictures of any shape: queries and keys turn by row and column, and from
Qwen3-VL on a learned square of positions is stretched over the picture's grid. It knows no pixels.

Source: configuration and tensor names of the models (transformers 5.24); Wang et al. 2024
(Qwen2-VL), section 2.1; Bai et al. 2025 (Qwen2.5-VL), section 2.1, and (Qwen3-VL), section 2.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tellin.exceptions import ModelLoadError
from tellin.loading.dequantize import dequantize
from tellin.loading.tensors import QuantType, TensorRef
from tellin.loading.vision_hparams import VisionHParams

Float32Array = npt.NDArray[np.float32]

_NAMES = (
    (re.compile(r"(model\.)?visual\."), ""),
    (re.compile(r"\Apatch_embed\.proj\."), "patch_embed."),
    (re.compile(r"\Apos_embed\."), "embed_positions."),
    (re.compile(r"\Amerger\.(norm|ln_q)\."), "norm."),
    (re.compile(r"\Amerger\.linear_fc([12])\."), r"projector_\1."),
    (re.compile(r"\Amerger\.mlp\.0\."), "projector_1."),
    (re.compile(r"\Amerger\.mlp\.2\."), "projector_2."),
    (re.compile(r"\Adeepstack_merger_list\.(\d+)\.linear_fc([12])\."), r"tap_\1.projector_\2."),
    (re.compile(r"\Adeepstack_merger_list\.(\d+)\.norm\."), r"tap_\1.projector_norm."),
    (re.compile(r"\Ablocks\.(\d+)\.norm1\."), r"layers.\1.input_layernorm."),
    (re.compile(r"\Ablocks\.(\d+)\.norm2\."), r"layers.\1.post_attention_layernorm."),
    (re.compile(r"\Ablocks\.(\d+)\.attn\.qkv\."), r"layers.\1.self_attn.qkv_proj."),
    (re.compile(r"\Ablocks\.(\d+)\.attn\.proj\."), r"layers.\1.self_attn.o_proj."),
    (re.compile(r"\Ablocks\.(\d+)\.mlp\.(linear_)?fc1\."), r"layers.\1.mlp.up_proj."),
    (re.compile(r"\Ablocks\.(\d+)\.mlp\.(linear_)?fc2\."), r"layers.\1.mlp.down_proj."),
    (re.compile(r"\Ablocks\.(\d+)\.mlp\."), r"layers.\1.mlp."),
)


@dataclass(frozen=True)
class GridTower:
    """Tensors of a tower, and the square of positions that is stretched over a picture."""

    tensors: dict[str, TensorRef]
    position_table: Float32Array | None
    """``[side, side, hidden_size]``; None: the tower has none."""


def canonical_qwen_name(name: str) -> str:
    """The canonical name of a tensor of the checkpoint's image half."""
    for pattern, replacement in _NAMES:
        name = pattern.sub(replacement, name, count=1)
    return name


def prepare_grid_tower(path: Path, tensors: dict[str, TensorRef], hp: VisionHParams) -> GridTower:
    """Fused matrices taken apart, and patches with their position in one matrix.

    A picture is two equal frames, so the weights of both are added. What a patch's position gives
    is added by the same matrix, which has the identity beside the patch's weights.
    A matrix that is taken apart already stays as it is.

    Raises:
        ModelLoadError: a tensor is missing or has the wrong shape.
    """
    tensors = dict(tensors)
    hidden = hp.tower.hidden_size
    size, frames = hp.patch_size, hp.num_frames
    if "patch_embed.weight.1" in tensors:  # GGUF has a matrix per frame
        parts = ("patch_embed.weight", "patch_embed.weight.1")
        patches = np.stack(
            [take_tensor(path, tensors, name, (hidden, 3, size, size)) for name in parts]
        )
    else:
        patches = take_tensor(path, tensors, "patch_embed.weight", (hidden, 3, frames, size, size))
        patches = np.moveaxis(patches, 2, 0)
    weights = patches.sum(axis=0, dtype=np.float32).reshape(hidden, hp.patch_dim)
    table = None
    if hp.table_side:
        weights = np.concatenate([weights, np.eye(hidden, dtype=np.float32)], axis=1)
        table = take_tensor(path, tensors, "embed_positions.weight", (hp.table_side**2, hidden))
        table = table.reshape(hp.table_side, hp.table_side, hidden)
    tensors["patch_embed.weight"] = float_tensor("patch_embed.weight", weights)
    for i in range(hp.tower.num_hidden_layers):
        stem = f"layers.{i}.self_attn"
        if f"{stem}.q_proj.weight" in tensors:
            continue
        fused = tensors.pop(f"{stem}.qkv_proj.weight", None)
        if fused is None or fused.shape != (3 * hidden, hidden):
            raise ModelLoadError(
                f"{path}: the image encoder's {stem}.qkv_proj.weight must have shape "
                f"({3 * hidden}, {hidden}); it has {None if fused is None else fused.shape}"
            )
        bias = take_tensor(path, tensors, f"{stem}.qkv_proj.bias", (3 * hidden,))
        for part, letter in enumerate("qkv"):
            begin, end = part * hidden, (part + 1) * hidden
            name = f"{stem}.{letter}_proj"
            tensors[f"{name}.weight"] = replace(fused.row_range(begin, end), name=f"{name}.weight")
            tensors[f"{name}.bias"] = float_tensor(f"{name}.bias", bias[begin:end])
    return GridTower(tensors, table)


def take_tensor(
    path: Path, tensors: dict[str, TensorRef], name: str, shape: tuple[int, ...]
) -> Float32Array:
    """The values of a tensor, which leaves ``tensors``. Raises `ModelLoadError`: as above."""
    tensor = tensors.pop(name, None)
    if tensor is None or tensor.shape != shape:
        found = "is missing" if tensor is None else f"has shape {tensor.shape}"
        raise ModelLoadError(f"{path}: the image encoder's {name} {found}; expected {shape}")
    return np.array(dequantize(tensor), np.float32).reshape(shape)


def float_tensor(name: str, values: Float32Array) -> TensorRef:
    """A tensor with these values."""
    data = np.ascontiguousarray(values, np.float32).reshape(-1).view(np.uint8)
    return TensorRef(name, values.shape, QuantType.F32, data)
