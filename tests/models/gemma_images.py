"""A tiny Gemma 3 that takes pictures, with random weights, as `save_pretrained` leaves it.

Pictures are 8 x 8 patches of 4 pixels, 2 x 2 of which make a row for the text model: 16 rows, more
than the sliding window has.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.synthetic import byte_tokens
from tests.loading.gguf_writer import write_gguf
from tests.loading.models import pack_safetensors
from tests.loading.vocabularies import byte_level
from tests.models import vision
from tests.models.vision import VISION_HIDDEN, VISION_LAYERS, VOCAB

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 64, 96, 6, 4, 2, 16
WINDOW, ROWS, SIDE, PATCH = 12, 16, 8, 4
SOFT_TOKEN, BEGIN, END = "<image_soft_token>", "<start_of_image>", "<end_of_image>"
_MARKS = {"<image>": SOFT_TOKEN, "<row_4_col_3>": BEGIN, "<row_4_col_4>": END}
SOFT_ID, BEGIN_ID, END_ID = (256 + vision.MARKS.index(mark) for mark in _MARKS)
EXPANDED = " and then ".join([f"\n\n{BEGIN}{SOFT_TOKEN * ROWS}{END}\n\n"] * 2) + "?"
"""A prompt with two pictures, such as these."""
WIDE, TALL = (
    Image.fromarray(np.random.RandomState(seed).randint(0, 256, shape, np.uint8))
    for seed, shape in enumerate([(17, 48, 3), (41, 20, 3)])
)
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}<start_of_image>"
    "{% else %}{{ part['text'] | trim }}{% endif %}{% endfor %}{% endif %}<end_of_utterance>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>model\n{% endif %}"
)


def config() -> dict[str, Any]:
    return {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "boi_token_index": BEGIN_ID,
        "eoi_token_index": END_ID,
        "image_token_index": SOFT_ID,
        "mm_tokens_per_image": ROWS,
        "text_config": {
            "model_type": "gemma3_text",
            "hidden_size": HIDDEN,
            "intermediate_size": INNER,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": HEAD_DIM,
            "query_pre_attn_scalar": HEAD_DIM,
            "max_position_embeddings": 1024,
            "sliding_window": WINDOW,
            "sliding_window_pattern": LAYERS,
            "layer_types": ["sliding_attention"] * (LAYERS - 1) + ["full_attention"],
            "vocab_size": VOCAB,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000.0,
            "rope_local_base_freq": 10000.0,
            "hidden_activation": "gelu_pytorch_tanh",
        },
        "vision_config": {
            "model_type": "siglip_vision_model",
            "hidden_size": VISION_HIDDEN,
            "intermediate_size": 80,
            "num_hidden_layers": VISION_LAYERS,
            "num_attention_heads": 3,
            "image_size": SIDE * PATCH,
            "patch_size": PATCH,
            "vision_use_head": False,
        },
    }


def processor_config() -> dict[str, Any]:
    return {
        "image_processor_type": "Gemma3ImageProcessor",
        "do_convert_rgb": None,
        "do_normalize": True,
        "do_pan_and_scan": None,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_seq_length": ROWS,
        "image_std": [0.5, 0.5, 0.5],
        "pan_and_scan_max_num_crops": None,
        "pan_and_scan_min_crop_size": None,
        "pan_and_scan_min_ratio_to_activate": None,
        "resample": 2,
        "rescale_factor": 1 / 255,
        "size": {"height": SIDE * PATCH, "width": SIDE * PATCH},
    }


def text_shapes() -> dict[str, tuple[int, ...]]:
    """Of the text model, under the names of its own class."""
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (VOCAB, HIDDEN),
        "norm.weight": (HIDDEN,),
    }
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    for i in range(LAYERS):
        layer = f"layers.{i}"
        for norm in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            shapes[f"{layer}.{norm}_layernorm.weight"] = (HIDDEN,)
        for norm in ("q_norm", "k_norm"):
            shapes[f"{layer}.self_attn.{norm}.weight"] = (HEAD_DIM,)
        shapes |= {
            f"{layer}.self_attn.q_proj.weight": (q, HIDDEN),
            f"{layer}.self_attn.k_proj.weight": (kv, HIDDEN),
            f"{layer}.self_attn.v_proj.weight": (kv, HIDDEN),
            f"{layer}.self_attn.o_proj.weight": (HIDDEN, q),
            f"{layer}.mlp.gate_proj.weight": (INNER, HIDDEN),
            f"{layer}.mlp.up_proj.weight": (INNER, HIDDEN),
            f"{layer}.mlp.down_proj.weight": (HIDDEN, INNER),
        }
    return shapes


def arrays(seed: int = 7) -> dict[str, np.ndarray]:
    tower = "vision_tower.vision_model."
    shapes = {f"language_model.model.{name}": shape for name, shape in text_shapes().items()}
    shapes |= vision._tower_shapes(tower, SIDE**2, PATCH)
    shapes |= {
        f"{tower}embeddings.patch_embedding.bias": (VISION_HIDDEN,),
        f"{tower}post_layernorm.weight": (VISION_HIDDEN,),
        f"{tower}post_layernorm.bias": (VISION_HIDDEN,),
        "multi_modal_projector.mm_input_projection_weight": (VISION_HIDDEN, HIDDEN),
        "multi_modal_projector.mm_soft_emb_norm.weight": (VISION_HIDDEN,),
    }
    random = np.random.RandomState(seed)
    made = {}
    for name, shape in shapes.items():
        values = random.standard_normal(shape)
        if len(shape) == 1:  # Gemma adds 1 to its norms, the tower's hold it
            values = 0.2 * values + (1 if "layer_norm" in name or "post_layernorm.w" in name else 0)
        elif "projection_weight" in name:
            values = values / np.sqrt(shape[0])
        elif "embed_tokens" in name:
            values = values / np.sqrt(HIDDEN)
        elif "position" not in name:
            values = 1.3 * values / np.sqrt(np.prod(shape[1:]))
        made[name] = values.astype(np.float32)
    return made


_GGUF_NAMES = (
    (r"language_model\.model\.embed_tokens\.", "token_embd."),
    (r"language_model\.model\.norm\.", "output_norm."),
    (r"language_model\.model\.layers\.", "blk."),
    (r"vision_tower\.vision_model\.encoder\.layers\.", "v.blk."),
    (r"vision_tower\.vision_model\.", "v."),
    (r"multi_modal_projector\.mm_input_projection_weight", "mm.input_projection.weight"),
    (r"multi_modal_projector\.mm_soft_emb_norm\.", "mm.soft_emb_norm."),
    (r"embeddings\.(patch|position)_embedding\.", r"\1_embd."),
    (r"post_layernorm\.", "post_ln."),
    (r"\.layer_norm([12])\.", r".ln\1."),
    (r"mlp\.fc1\.", "ffn_up."),
    (r"mlp\.fc2\.", "ffn_down."),
    (r"mlp\.(gate|up|down)_proj\.", r"ffn_\1."),
    (r"self_attn\.([qkv])_norm\.", r"attn_\1_norm."),
    (r"self_attn\.([qkv])_proj\.", r"attn_\1."),
    (r"input_layernorm\.", "attn_norm."),
    (r"post_attention_layernorm\.", "post_attention_norm."),
    (r"pre_feedforward_layernorm\.", "ffn_norm."),
    (r"post_feedforward_layernorm\.", "post_ffw_norm."),
)


def write_gemma_gguf(folder: Path) -> Path:
    """The same model as a GGUF file, and its encoder's beside it; Gemma's norms with 1 added."""
    text, encoder = {}, {}
    for name, values in arrays().items():
        is_text = name.startswith("language_model.")
        if len(values.shape) == 1 and (is_text or "soft_emb_norm" in name):
            values = values + np.float32(1)
        o_proj = "attn_output." if is_text else "attn_out."
        name = re.sub(r"self_attn\.o(ut)?_proj\.", o_proj, name)
        for pattern, replacement in _GGUF_NAMES:
            name = re.sub(pattern, replacement, name)
        (text if is_text else encoder)[name] = values
    write_gguf(folder / "mmproj-model.gguf", mmproj_metadata(), encoder)
    return write_gguf(folder / "model.gguf", _text_metadata(), text)


def mmproj_metadata(**changes: Any) -> dict[str, Any]:
    half = np.array([0.5, 0.5, 0.5], np.float32)
    values: dict[str, Any] = {
        "general.architecture": "clip",
        "clip.has_vision_encoder": True,
        "clip.projector_type": "gemma3",
        "clip.use_gelu": True,
        "clip.vision.image_size": SIDE * PATCH,
        "clip.vision.patch_size": PATCH,
        "clip.vision.embedding_length": VISION_HIDDEN,
        "clip.vision.feed_forward_length": 80,
        "clip.vision.block_count": VISION_LAYERS,
        "clip.vision.projection_dim": HIDDEN,
        "clip.vision.attention.head_count": 3,
        "clip.vision.attention.layer_norm_epsilon": 1e-6,
        "clip.vision.projector.scale_factor": 2,
        "clip.vision.image_mean": half,
        "clip.vision.image_std": half,
    }
    return values | changes


def _text_metadata() -> dict[str, Any]:
    own = {
        "block_count": LAYERS,
        "context_length": 1024,
        "embedding_length": HIDDEN,
        "feed_forward_length": INNER,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": HEAD_DIM,
        "attention.value_length": HEAD_DIM,
        "attention.sliding_window": WINDOW,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 1000000.0,
    }
    marks = [_MARKS.get(mark, mark) for mark in vision.MARKS]
    vocabulary = byte_level(bos_token_id=257, eos_token_id=256)
    vocabulary["tokenizer.ggml.tokens"] = [*byte_tokens(), *marks]
    vocabulary["tokenizer.ggml.token_type"] = np.array([1] * 256 + [3] * len(marks), np.int32)
    vocabulary["tokenizer.ggml.add_bos_token"] = False
    vocabulary["tokenizer.chat_template"] = CHAT_TEMPLATE
    vocabulary["general.architecture"] = "gemma3"
    return vocabulary | {f"gemma3.{key}": value for key, value in own.items()}


def write_gemma(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(pack_safetensors(arrays()))
    tokenizer = json.dumps(vision._tokenizer())  # marks that no prompt of Gemma's needs give way
    for old, new in _MARKS.items():
        tokenizer = tokenizer.replace(f'"{old}"', f'"{new}"')
    (folder / "tokenizer.json").write_text(tokenizer)
    files: dict[str, Any] = {
        "config.json": config(),
        "preprocessor_config.json": processor_config(),
        "generation_config.json": {"eos_token_id": 256, "bos_token_id": 257},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|endoftext|>",
            "bos_token": "<|im_start|>",
            "chat_template": CHAT_TEMPLATE,
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder
