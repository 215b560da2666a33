"""The image encoder of LFM2-VL: its tensors as the towers here want them.

A SigLIP whose learned square of positions is scaled to the grid of each tile, with the values of a
patch ordered by row, column, then channel. It knows no pixels.

Source: tensor names of LiquidAI/LFM2-VL-1.6B (transformers 5.24); Tschannen et al. 2025 (SigLIP 2),
section 2.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tellin.loading.tensors import TensorRef
from tellin.loading.vision_hparams import VisionHParams
from tellin.loading.vision_qwen import GridTower, float_tensor, take_tensor


def prepare_naflex_tower(path: Path, tensors: dict[str, TensorRef], hp: VisionHParams) -> GridTower:
    """Patches with their position in one matrix, as `vision_qwen.prepare_grid_tower` has them.

    Raises:
        ModelLoadError: a tensor is missing or has the wrong shape.
    """
    tensors = dict(tensors)
    hidden, size = hp.tower.hidden_size, hp.patch_size
    name = "patch_embed.weight"
    if name in tensors and len(tensors[name].shape) == 4:  # GGUF has them by channel
        by_channel = take_tensor(path, tensors, name, (hidden, 3, size, size))
    else:
        patches = take_tensor(path, tensors, name, (hidden, hp.patch_dim))
        by_channel = patches.reshape(hidden, size, size, 3).transpose(0, 3, 1, 2)
    wide = np.concatenate(
        [by_channel.reshape(hidden, hp.patch_dim), np.eye(hidden, dtype=np.float32)], axis=1
    )
    tensors["patch_embed.weight"] = float_tensor("patch_embed.weight", wide)
    table = take_tensor(path, tensors, "embed_positions.weight", (hp.table_side**2, hidden))
    return GridTower(tensors, table.reshape(hp.table_side, hp.table_side, hidden))
