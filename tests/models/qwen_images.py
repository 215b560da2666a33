"""A tiny Qwen3.5 that takes pictures, with random weights, as `save_pretrained` leaves it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from tests.loading.models import pack_safetensors
from tests.models import gated_delta, vision

WIDTH, INNER, DEPTH, PATCH, SIDE = 32, 48, 2, 4, 4
IMAGE_TOKEN_ID = vision.IMAGE_TOKEN_ID


def write_qwen(folder: Path, case: str = "qwen35", extra: gated_delta.Arrays | None = None) -> Path:
    """Patches of 4 pixels, 2 x 2 of which make a row for the text model, ``case``.

    ``extra``: weights beside these.
    """
    arrays = {
        name.replace("model.", "model.language_model.", 1): values
        for name, values in gated_delta.checkpoint_arrays(case, vision.VOCAB).items()
    }
    arrays |= {f"model.visual.{name}": values for name, values in tower_arrays().items()}
    config = {
        "model_type": gated_delta.CASES[case].removesuffix("_text"),
        "image_token_id": IMAGE_TOKEN_ID,
        "tie_word_embeddings": False,
        "text_config": gated_delta.config(case, vision.VOCAB),
        "vision_config": {
            "depth": DEPTH,
            "hidden_size": WIDTH,
            "intermediate_size": INNER,
            "num_heads": 2,
            "patch_size": PATCH,
            "out_hidden_size": gated_delta.HIDDEN,
            "num_position_embeddings": SIDE**2,
            "deepstack_visual_indexes": [],
        },
    }
    processor = {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "size": {"shortest_edge": 128, "longest_edge": 2048},
        "patch_size": PATCH,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(pack_safetensors(arrays | (extra or {})))
    tokenizer = json.dumps(vision._tokenizer()).replace('"<image>"', '"<|image_pad|>"')
    (folder / "tokenizer.json").write_text(tokenizer)
    for name, content in (("config.json", config), ("preprocessor_config.json", processor)):
        (folder / name).write_text(json.dumps(content))
    return folder


def tower_arrays() -> dict[str, np.ndarray]:
    """Float32 weights of the image encoder."""
    random = np.random.RandomState(5)
    shapes: dict[str, tuple[int, ...]] = {
        "patch_embed.proj.weight": (WIDTH, 3, 2, PATCH, PATCH),
        "patch_embed.proj.bias": (WIDTH,),
        "pos_embed.weight": (SIDE**2, WIDTH),
    }
    linears = {"attn.qkv": (3 * WIDTH, WIDTH), "attn.proj": (WIDTH, WIDTH)}
    linears |= {"mlp.linear_fc1": (INNER, WIDTH), "mlp.linear_fc2": (WIDTH, INNER)}
    named = {f"blocks.{i}.{name}": shape for i in range(DEPTH) for name, shape in linears.items()}
    named["merger.linear_fc1"] = (4 * WIDTH, 4 * WIDTH)
    named["merger.linear_fc2"] = (gated_delta.HIDDEN, 4 * WIDTH)
    norms = [f"blocks.{i}.norm{n}" for i in range(DEPTH) for n in (1, 2)] + ["merger.norm"]
    for name, shape in named.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    for name in norms:
        shapes |= {f"{name}.weight": (WIDTH,), f"{name}.bias": (WIDTH,)}
    arrays = {}
    for name, shape in shapes.items():
        values = random.standard_normal(shape)
        if len(shape) > 1 and "pos_embed" not in name:
            values *= 1.3 / np.sqrt(np.prod(shape[1:]))
        elif len(shape) == 1:
            values = 0.2 * values + (1 if "norm" in name and name.endswith("weight") else 0)
        arrays[name] = values.astype(np.float32)
    return arrays
