"""Tiny models that take pictures, with random weights: folders as `save_pretrained` leaves them.

Nothing here needs PyTorch or Pillow. Tokens are bytes and the marks that stand around pictures.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.synthetic import byte_tokens
from tests.loading.models import pack_safetensors

HIDDEN = 64
LAYERS = 2
VISION_HIDDEN = 48
VISION_LAYERS = 3
MARKS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<end_of_utterance>",
    "<fake_token_around_image>",
    "<global-img>",
    "<image>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)),
)
IMAGE_TOKEN_ID = 256 + MARKS.index("<image>")
VOCAB = 256 + len(MARKS)
CHAT_TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}:"
    "{% if message['content'] is string %} {{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<end_of_utterance>\n"
    "{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)


def write_smolvlm(
    folder: Path,
    *,
    model_type: str = "smolvlm",
    tile: int = 16,
    longest_edge: int = 64,
    image_size: int = 16,
    splits: bool = True,
    seed: int = 1,
) -> Path:
    """A SmolVLM with patches of 4 pixels, 2 x 2 of which make a row for the text model.

    With the sizes given a tile makes 4 rows, and a picture at most 17 tiles.
    """
    side = image_size // 4
    config = {
        "architectures": ["SmolVLMForConditionalGeneration"],
        "model_type": model_type,
        "image_token_id": IMAGE_TOKEN_ID,
        "scale_factor": 2,
        "tie_word_embeddings": False,
        "text_config": _text_config(),
        "vision_config": {
            "model_type": f"{model_type}_vision",
            "hidden_size": VISION_HIDDEN,
            "intermediate_size": 80,
            "num_hidden_layers": VISION_LAYERS,
            "num_attention_heads": 3,
            "image_size": image_size,
            "patch_size": 4,
            "num_channels": 3,
            "hidden_act": "gelu_pytorch_tanh",
            "layer_norm_eps": 1e-6,
        },
    }
    processor = {
        "image_processor_type": "SmolVLMImageProcessor",
        "do_convert_rgb": True,
        "do_image_splitting": splits,
        "do_normalize": True,
        "do_pad": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "max_image_size": {"longest_edge": tile},
        "resample": 1,
        "rescale_factor": 1 / 255,
        "size": {"longest_edge": longest_edge},
    }
    shapes = _text_shapes("model.text_model.")
    tower = "model.vision_model."
    shapes |= _tower_shapes(tower, side**2)
    shapes |= {
        f"{tower}embeddings.patch_embedding.bias": (VISION_HIDDEN,),
        f"{tower}post_layernorm.weight": (VISION_HIDDEN,),
        f"{tower}post_layernorm.bias": (VISION_HIDDEN,),
        "model.connector.modality_projection.proj.weight": (HIDDEN, 4 * VISION_HIDDEN),
    }
    return _write(folder, config, processor, shapes, seed)


def write_llava(folder: Path, *, seed: int = 2) -> Path:
    """A LLaVA-1.5 with pictures of 5 x 5 patches of 6 pixels, so of 25 rows."""
    config = {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "image_token_index": IMAGE_TOKEN_ID,
        "image_seq_length": 25,
        "projector_hidden_act": "gelu",
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
        "tie_word_embeddings": False,
        "text_config": _text_config(),
        "vision_config": {
            "model_type": "clip_vision_model",
            "hidden_size": VISION_HIDDEN,
            "intermediate_size": 80,
            "num_hidden_layers": VISION_LAYERS,
            "num_attention_heads": 3,
            "image_size": 30,
            "patch_size": 6,
            "projection_dim": 32,
        },
    }
    processor = {
        "image_processor_type": "CLIPImageProcessor",
        "crop_size": {"height": 30, "width": 30},
        "do_center_crop": True,
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
        "resample": 3,
        "size": {"shortest_edge": 30},
    }
    shapes = _text_shapes("language_model.model.", "language_model.lm_head.weight")
    tower = "vision_tower.vision_model."
    shapes |= _tower_shapes(tower, 26, patch_size=6)
    shapes[f"{tower}embeddings.class_embedding"] = (VISION_HIDDEN,)
    for norm in ("pre_layrnorm", "post_layernorm"):
        shapes |= {f"{tower}{norm}.{kind}": (VISION_HIDDEN,) for kind in ("weight", "bias")}
    for name, width in (("linear_1", VISION_HIDDEN), ("linear_2", HIDDEN)):
        shapes[f"multi_modal_projector.{name}.weight"] = (HIDDEN, width)
        shapes[f"multi_modal_projector.{name}.bias"] = (HIDDEN,)
    return _write(folder, config, processor, shapes, seed)


def _text_config() -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": 96,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
    }


def _text_shapes(prefix: str, head: str = "lm_head.weight") -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        f"{prefix}embed_tokens.weight": (VOCAB, HIDDEN),
        f"{prefix}norm.weight": (HIDDEN,),
        head: (VOCAB, HIDDEN),
    }
    for i in range(LAYERS):
        layer = f"{prefix}layers.{i}"
        shapes |= {
            f"{layer}.input_layernorm.weight": (HIDDEN,),
            f"{layer}.post_attention_layernorm.weight": (HIDDEN,),
            f"{layer}.self_attn.q_proj.weight": (64, HIDDEN),
            f"{layer}.self_attn.k_proj.weight": (32, HIDDEN),
            f"{layer}.self_attn.v_proj.weight": (32, HIDDEN),
            f"{layer}.self_attn.o_proj.weight": (HIDDEN, 64),
            f"{layer}.mlp.gate_proj.weight": (96, HIDDEN),
            f"{layer}.mlp.up_proj.weight": (96, HIDDEN),
            f"{layer}.mlp.down_proj.weight": (HIDDEN, 96),
        }
    return shapes


def _tower_shapes(prefix: str, num_rows: int, patch_size: int = 4) -> dict[str, tuple[int, ...]]:
    width = VISION_HIDDEN
    shapes: dict[str, tuple[int, ...]] = {
        f"{prefix}embeddings.patch_embedding.weight": (width, 3, patch_size, patch_size),
        f"{prefix}embeddings.position_embedding.weight": (num_rows, width),
    }
    for i in range(VISION_LAYERS):
        layer = f"{prefix}encoder.layers.{i}"
        linears = {f"self_attn.{name}_proj": (width, width) for name in ("q", "k", "v", "out")}
        linears |= {"mlp.fc1": (80, width), "mlp.fc2": (width, 80)}
        linears |= {"layer_norm1": (width,), "layer_norm2": (width,)}  # type: ignore[dict-item]
        for name, shape in linears.items():
            shapes[f"{layer}.{name}.weight"] = shape
            shapes[f"{layer}.{name}.bias"] = shape[:1]
    return shapes


def _write(
    folder: Path,
    config: dict[str, Any],
    processor: dict[str, Any],
    shapes: dict[str, tuple[int, ...]],
    seed: int,
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.RandomState(seed)
    arrays = {}
    for name, shape in shapes.items():
        values = random.standard_normal(shape)
        if "norm" in name and name.endswith(".weight"):
            values = 1 + 0.2 * values
        elif name.endswith("bias"):
            values = 0.2 * values
        elif len(shape) > 1 and "embed_tokens" not in name and "position" not in name:
            values = 1.3 * values / np.sqrt(np.prod(shape[1:]))
        arrays[name] = values.astype(np.float32)
    (folder / "model.safetensors").write_bytes(pack_safetensors(arrays))
    files: dict[str, Any] = {
        "config.json": config,
        "preprocessor_config.json": processor,
        "generation_config.json": {"eos_token_id": 256, "bos_token_id": 257},
        "tokenizer.json": _tokenizer(),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|endoftext|>",
            "chat_template": CHAT_TEMPLATE,
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder


def _tokenizer() -> dict[str, Any]:
    """Byte-level BPE without merges: the marks' ids come after those of the bytes."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
                  "use_regex": False}  # fmt: skip
    added = [
        {"id": 256 + i, "content": mark, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": True}
        for i, mark in enumerate(MARKS)
    ]  # fmt: skip
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {token: i for i, token in enumerate(byte_tokens())},
            "merges": [],
        },
    }
