"""Tiny models of Qwen's that take pictures, with random weights, as their makers store them.

Qwen2-VL and Qwen2.5-VL lie flat in ``config.json``, Qwen3-VL is nested.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from tellin.kernels.batch import StepBatch
from tellin.loading import load_image_processor, load_tokenizer, open_model
from tellin.loading.vision import open_vision
from tellin.models import build_plan
from tellin.protocol import MultiModalFeature
from tellin.worker.image_encoder import ImageEncoder
from tellin.worker.rope_positions import rope_positions
from tests.loading.models import pack_safetensors
from tests.loading.test_images import picture
from tests.models import vision

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 64, 96, 3, 4, 2, 16
WIDTH, TOWER_INNER, DEPTH, PATCH, SIDE = 32, 48, 4, 4, 5
IMAGE_TOKEN_ID = vision.IMAGE_TOKEN_ID
PAD = "<|image_pad|>"
CASES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
EXPERTS, EXPERT_INNER = 4, 24
TAPPED = (0, 2)
"""Layers of Qwen3-VL's tower whose rows go to the first layers of the text model."""
Shapes = dict[str, tuple[int, ...]]

FLOATS: dict[str, Any] = {"activation_precision": "float32", "kv_cache_dtype": "float32"}
MESSAGE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}:"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}<|image_pad|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)


def write_qwen_vl(folder: Path, case: str) -> Path:
    """Patches of 4 pixels, 2 x 2 of which make a row for the text model."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(pack_safetensors(arrays(case)))
    tokenizer = json.dumps(vision._tokenizer()).replace('"<image>"', f'"{PAD}"')
    (folder / "tokenizer.json").write_text(tokenizer)
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "min_pixels": 128,
        "max_pixels": 2048,
        "patch_size": PATCH,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5, 0.4, 0.3],
        "image_std": [0.5, 0.6, 0.7],
    }
    files = {
        "config.json": config(case),
        "preprocessor_config.json": processor,
        "tokenizer_config.json": {"chat_template": MESSAGE},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder


def config(case: str) -> dict[str, Any]:
    """The ``config.json`` of a case."""
    text: dict[str, Any] = {
        "vocab_size": vision.VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
    }
    tower: dict[str, Any] = {"depth": DEPTH, "num_heads": 2, "patch_size": PATCH}
    if case == "qwen2_vl":
        tower |= {"embed_dim": WIDTH, "hidden_size": HIDDEN, "mlp_ratio": 2}
    elif case == "qwen2_5_vl":
        tower |= {
            "hidden_size": WIDTH, "intermediate_size": TOWER_INNER, "out_hidden_size": HIDDEN,
            "window_size": 16, "fullatt_block_indexes": [1, 3],
        }  # fmt: skip
    else:
        tower |= {
            "hidden_size": WIDTH, "intermediate_size": TOWER_INNER, "out_hidden_size": HIDDEN,
            "num_position_embeddings": SIDE**2, "deepstack_visual_indexes": list(TAPPED),
        }  # fmt: skip
        text |= {
            "model_type": f"{case}_text",
            "head_dim": HEAD_DIM,
            "rope_scaling": {
                "rope_type": "default", "mrope_section": [3, 3, 2], "mrope_interleaved": True,
            },
        }  # fmt: skip
    if case == "qwen3_vl_moe":
        text |= {
            "num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": EXPERT_INNER,
        }  # fmt: skip
    values = {"model_type": case, "image_token_id": IMAGE_TOKEN_ID, "vision_config": tower}
    if case.startswith("qwen3"):
        return {**values, "text_config": text, "tie_word_embeddings": False}
    return {**text, **values}


def arrays(case: str) -> dict[str, np.ndarray]:
    """Float32 weights by their names in a checkpoint."""
    random = np.random.RandomState(zlib.crc32(case.encode()))
    is_nested = case.startswith("qwen3")
    tower, text = ("model.visual.", "model.language_model.") if is_nested else ("visual.", "model.")
    shapes: Shapes = {f"{tower}{name}": shape for name, shape in tower_shapes(case).items()}
    shapes |= {f"{text}{name}": shape for name, shape in _text_shapes(case).items()}
    shapes["lm_head.weight"] = (vision.VOCAB, HIDDEN)
    found = {}
    for name, shape in shapes.items():
        values = random.standard_normal(shape)
        if len(shape) == 1:
            is_norm = "norm" in name or ".ln_q." in name
            values = 0.2 * values + (1 if is_norm and name.endswith("weight") else 0)
        elif "embed_tokens" not in name and "pos_embed" not in name:
            inputs = shape[1] if ".experts." in name else np.prod(shape[1:])
            values *= 1.3 / np.sqrt(inputs)
        found[name] = values.astype(np.float32)
    return found


def tower_shapes(case: str) -> Shapes:
    """Tensors of an image encoder."""
    shapes: Shapes = {"patch_embed.proj.weight": (WIDTH, 3, 2, PATCH, PATCH)}
    linears = {"attn.qkv": (3 * WIDTH, WIDTH), "attn.proj": (WIDTH, WIDTH)}
    if case == "qwen2_vl":
        linears |= {"mlp.fc1": (2 * WIDTH, WIDTH), "mlp.fc2": (WIDTH, 2 * WIDTH)}
    elif case == "qwen2_5_vl":
        linears |= {f"mlp.{part}_proj": (TOWER_INNER, WIDTH) for part in ("gate", "up")}
        linears |= {"mlp.down_proj": (WIDTH, TOWER_INNER)}
    else:
        linears |= {"mlp.linear_fc1": (TOWER_INNER, WIDTH), "mlp.linear_fc2": (WIDTH, TOWER_INNER)}
    named = {f"blocks.{i}.{name}": shape for i in range(DEPTH) for name, shape in linears.items()}
    norms = dict.fromkeys((f"blocks.{i}.norm{n}" for i in range(DEPTH) for n in (1, 2)), WIDTH)
    projector = {"{}fc1": (4 * WIDTH, 4 * WIDTH), "{}fc2": (HIDDEN, 4 * WIDTH)}
    if case.startswith("qwen3"):
        shapes |= {"patch_embed.proj.bias": (WIDTH,), "pos_embed.weight": (SIDE**2, WIDTH)}
        mergers = ["merger", *(f"deepstack_merger_list.{i}" for i in range(len(TAPPED)))]
        for merger in mergers:
            named |= {name.format(f"{merger}.linear_"): s for name, s in projector.items()}
        norms |= {f"{name}.norm": WIDTH if name == "merger" else 4 * WIDTH for name in mergers}
    else:
        named |= {"merger.mlp.0": projector["{}fc1"], "merger.mlp.2": projector["{}fc2"]}
        norms["merger.ln_q"] = WIDTH
    for name, shape in named.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    for name, width in norms.items():
        shapes[f"{name}.weight"] = (width,)
        if case != "qwen2_5_vl":
            shapes[f"{name}.bias"] = (width,)
    return shapes


def _text_shapes(case: str) -> Shapes:
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes: Shapes = {"embed_tokens.weight": (vision.VOCAB, HIDDEN), "norm.weight": (HIDDEN,)}
    for i in range(LAYERS):
        attn, mlp = f"layers.{i}.self_attn", f"layers.{i}.mlp"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"layers.{i}.{norm}.weight"] = (HIDDEN,)
        for part, rows in (("q", q), ("k", kv), ("v", kv)):
            shapes[f"{attn}.{part}_proj.weight"] = (rows, HIDDEN)
            if not case.startswith("qwen3"):
                shapes[f"{attn}.{part}_proj.bias"] = (rows,)
            elif part != "v":
                shapes[f"{attn}.{part}_norm.weight"] = (HEAD_DIM,)
        shapes[f"{attn}.o_proj.weight"] = (HIDDEN, q)
        if case == "qwen3_vl_moe":  # its files have a row for each input
            shapes |= {
                f"{mlp}.gate.weight": (EXPERTS, HIDDEN),
                f"{mlp}.experts.gate_up_proj": (EXPERTS, HIDDEN, 2 * EXPERT_INNER),
                f"{mlp}.experts.down_proj": (EXPERTS, EXPERT_INNER, HIDDEN),
            }
            continue
        shapes |= {f"{mlp}.{part}_proj.weight": (INNER, HIDDEN) for part in ("gate", "up")}
        shapes[f"{mlp}.down_proj.weight"] = (HIDDEN, INNER)
    return shapes


# ---- a prompt --------------------------------------------------------------------------------


PICTURES = (picture(48, 16, 1), picture(16, 40, 2))
"""Of sizes that need no scaling: 2 x 6 rows and 5 x 2."""


class Prompt:
    """Text, a picture, text, another, text: as ids, pixels and places."""

    def __init__(self, model: Path, mmproj: Path | None = None, pictures: Any = PICTURES) -> None:
        self.model, self.mmproj = model, mmproj
        processor = load_image_processor(model, mmproj)
        assert processor is not None
        self.processor = processor
        self.images = [processor.process(image) for image in pictures]
        first, second = (image.prompt for image in self.images)
        self.ids = load_tokenizer(model).encode(f"A{first}and{second}? Yes, it is")
        self.at = np.flatnonzero(np.array(self.ids) == IMAGE_TOKEN_ID).astype(np.int32)
        features, at = [], 0
        for image in self.images:
            at = self.ids.index(IMAGE_TOKEN_ID, at)
            features.append(MultiModalFeature("image", "i", at, image.num_embeds, grid=image.grid))
            at += image.num_embeds
        self.positions = rope_positions(features, 0, len(self.ids))

    def rows(self, kind: Any) -> np.ndarray:
        """What the encoder makes of the pictures, ``[num_embeds, row_width]``."""
        source = open_vision(self.model, self.mmproj)
        assert source is not None
        table = self.processor.pixel_table
        encoder = ImageEncoder(source, kind, pixel_table=table, activation_precision="float32")
        return np.concatenate([encoder.encode(image.values, image.shapes) for image in self.images])

    def logits(self, kind: Any, rows: np.ndarray, chunk: int | None = None) -> np.ndarray:
        """Logits of all tokens; in steps of ``chunk`` tokens."""
        with open_model(self.model) as source:
            backend = kind(build_plan(source), **FLOATS)
        count, parts = len(self.ids), []
        backend.init_kv_cache(16)
        for start in range(0, count, chunk or count):
            end = min(count, start + (chunk or count))
            own = (self.at >= start) & (self.at < end)
            step = StepBatch(
                token_ids=np.array(self.ids, np.int32)[start:end],
                positions=np.arange(start, end, dtype=np.int32),
                query_start_loc=np.array([0, end - start], np.int32),
                seq_lens=np.array([end], np.int32),
                block_table=np.arange(1, 16, dtype=np.int32)[None],
                logits_indices=np.arange(end - start, dtype=np.int32),
                embeds=np.ascontiguousarray(rows[own]),
                embed_rows=self.at[own] - np.int32(start),
                rope_positions=np.ascontiguousarray(self.positions[:, start:end]),
            )
            parts.append(np.array(backend.forward(step)))
        return np.concatenate(parts)
