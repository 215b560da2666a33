"""A tiny LFM2-VL with random weights, as `save_pretrained` leaves it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.synthetic import byte_tokens
from tests.loading.gguf_writer import write_gguf
from tests.loading.models import pack_safetensors
from tests.loading.test_images import picture
from tests.models import vision
from tests.models.tiny_hybrids import HIDDEN, HYBRIDS, hybrid_arrays
from tests.models.tiny_hybrids_gguf import _gguf_arrays, _metadata

WIDTH, INNER, DEPTH, PATCH, SIDE = 32, 48, 2, 4, 5
MARKS = (
    "<|endoftext|>",
    "<image>",
    "<|image_start|>",
    "<|image_end|>",
    "<|img_thumbnail|>",
    *(f"<|img_row_{row}_col_{column}|>" for row in range(1, 5) for column in range(1, 5)),
)
_GGUF = (
    (r"vision_tower\.vision_model\.embeddings\.patch_embedding", "v.patch_embd"),
    (r"vision_tower\.vision_model\.embeddings\.position_embedding", "v.position_embd"),
    (r"vision_tower\.vision_model\.post_layernorm", "v.post_ln"),
    (r"vision_tower\.vision_model\.encoder\.layers\.(\d+)", r"v.blk.\1"),
    (r"self_attn\.out_proj", "attn_out"),
    (r"self_attn\.([qkv])_proj", r"attn_\1"),
    (r"blk\.(\d+)\.layer_norm(\d)", r"blk.\1.ln\2"),
    (r"mlp\.fc1", "ffn_up"),
    (r"mlp\.fc2", "ffn_down"),
    (r"multi_modal_projector\.layer_norm", "mm.input_norm"),
    (r"multi_modal_projector\.linear_", "mm."),
)
PICTURES = (picture(32, 24, 1), picture(64, 64, 2))
"""Of sizes that need no scaling: 3 x 4 rows, and four tiles of 4 x 4 with the whole."""
PROMPT = "A{}and{}? Yes, it is"
VOCAB = 256 + len(MARKS)
IMAGE_TOKEN_ID = 256 + MARKS.index("<image>")
SIZES: dict[str, Any] = {
    "tile_size": 32, "min_tiles": 2, "max_tiles": 4, "min_image_tokens": 4, "max_image_tokens": 16,
    "max_pixels_tolerance": 2.0, "encoder_patch_size": PATCH, "downsample_factor": 2,
}  # fmt: skip


def write_lfm2_vl(folder: Path, **changes: Any) -> Path:
    """Patches of 4 pixels, 2 x 2 of which make a row; tiles of 4 x 4 rows, at most 4 and a whole.

    ``changes`` are of the image processor's settings.
    """
    folder.mkdir(parents=True, exist_ok=True)
    text, tower = arrays_of()
    arrays = {f"model.{name}": values for name, values in tower.items()}
    arrays |= {
        name.replace("model.", "model.language_model.", 1): values for name, values in text.items()
    }
    (folder / "model.safetensors").write_bytes(pack_safetensors(arrays))
    tokenizer = vision._tokenizer()
    tokenizer["added_tokens"] = [
        {**tokenizer["added_tokens"][0], "id": 256 + i, "content": mark}
        for i, mark in enumerate(MARKS)
    ]
    config = {
        "model_type": "lfm2_vl",
        "image_token_id": IMAGE_TOKEN_ID,
        "downsample_factor": 2,
        "projector_hidden_size": 40,
        "tie_word_embeddings": True,
        "text_config": HYBRIDS["lfm2"] | {"vocab_size": VOCAB, "max_position_embeddings": 512},
        "vision_config": {
            "model_type": "siglip2_vision_model",
            "hidden_size": WIDTH,
            "intermediate_size": INNER,
            "num_hidden_layers": DEPTH,
            "num_attention_heads": 2,
            "num_patches": SIDE**2,
            "patch_size": PATCH,
            "vision_use_head": False,
        },
    }
    processor = {
        "image_processor_type": "Lfm2VlImageProcessorFast",
        "image_mean": [0.5, 0.4, 0.3],
        "image_std": [0.5, 0.6, 0.7],
        **SIZES,
        **changes,
    }
    files = {
        "config.json": config,
        "preprocessor_config.json": processor,
        "tokenizer.json": tokenizer,
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder


def arrays_of() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Float32 weights of the text model, and of the encoder without ``model.`` in front."""
    random = np.random.RandomState(6)
    text = hybrid_arrays("lfm2")
    text["model.embed_tokens.weight"] = random.standard_normal((VOCAB, HIDDEN)).astype(np.float32)
    tower = {}
    for name, shape in _shapes().items():
        values = random.standard_normal(shape)
        if len(shape) == 1:
            values = 0.2 * values + (1 if "norm" in name and name.endswith("weight") else 0)
        elif "position_embedding" not in name:
            values *= 1.3 / np.sqrt(shape[-1])
        tower[name] = values.astype(np.float32)
    return text, tower


def write_pair(folder: Path, **changes: Any) -> Path:
    """The same as two GGUF files; ``changes`` are of the encoder's metadata."""
    folder.mkdir(parents=True, exist_ok=True)
    text, tower = arrays_of()
    tensors = {}
    for name, values in tower.items():
        if name.endswith("patch_embedding.weight"):
            values = values.reshape(WIDTH, PATCH, PATCH, 3).transpose(0, 3, 1, 2).copy()
        for pattern, replacement in _GGUF:
            name = re.sub(pattern, replacement, name)
        tensors[name] = values
    metadata: dict[str, Any] = {
        "general.architecture": "clip",
        "clip.has_vision_encoder": True,
        "clip.projector_type": "lfm2",
        "clip.use_gelu": True,
        "clip.vision.image_size": SIDE * PATCH,
        "clip.vision.patch_size": PATCH,
        "clip.vision.embedding_length": WIDTH,
        "clip.vision.feed_forward_length": INNER,
        "clip.vision.projection_dim": HIDDEN,
        "clip.vision.block_count": DEPTH,
        "clip.vision.attention.head_count": 2,
        "clip.vision.attention.layer_norm_epsilon": 1e-6,
        "clip.vision.projector.scale_factor": 2,
        "clip.vision.image_mean": np.array([0.5, 0.4, 0.3], np.float32),
        "clip.vision.image_std": np.array([0.5, 0.6, 0.7], np.float32),
    }
    write_gguf(folder / "mmproj-model.gguf", metadata | changes, tensors)
    own = {f"lfm2.{key}": value for key, value in _metadata(HYBRIDS["lfm2"]).items()}
    own |= {"general.architecture": "lfm2", "lfm2.vocab_size": VOCAB, "lfm2.context_length": 512}
    vocabulary = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "lfm2",
        "tokenizer.ggml.tokens": [*byte_tokens(), *MARKS],
        "tokenizer.ggml.token_type": np.array([1] * 256 + [3] * len(MARKS), np.int32),
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.eos_token_id": 256,
        "tokenizer.ggml.add_bos_token": False,
    }
    arrays = _gguf_arrays(HYBRIDS["lfm2"], text)
    return write_gguf(folder / "model.gguf", own | vocabulary, arrays)


def _shapes() -> dict[str, tuple[int, ...]]:
    tower, projector = "vision_tower.vision_model.", "multi_modal_projector."
    linears = {
        f"{tower}embeddings.patch_embedding": (WIDTH, 3 * PATCH**2),
        f"{projector}linear_1": (40, 4 * WIDTH),
        f"{projector}linear_2": (HIDDEN, 40),
    }
    norms = {f"{tower}post_layernorm": WIDTH, f"{projector}layer_norm": 4 * WIDTH}
    for i in range(DEPTH):
        layer = f"{tower}encoder.layers.{i}"
        linears |= {
            f"{layer}.self_attn.{part}_proj": (WIDTH, WIDTH) for part in ("q", "k", "v", "out")
        }
        linears |= {f"{layer}.mlp.fc1": (INNER, WIDTH), f"{layer}.mlp.fc2": (WIDTH, INNER)}
        norms |= {f"{layer}.layer_norm{n}": WIDTH for n in (1, 2)}
    shapes: dict[str, tuple[int, ...]] = {
        f"{tower}embeddings.position_embedding.weight": (SIDE**2, WIDTH)
    }
    for name, shape in linears.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    for name, width in norms.items():
        shapes |= {f"{name}.weight": (width,), f"{name}.bias": (width,)}
    return shapes
