"""Image encoders in GGUF files of their own: ``mmproj-*.gguf`` beside a text model's file.

Reads those whose projector is Idefics3's, so SmolVLM's, Gemma 3's, LFM2-VL's or one of Qwen's: the
text model's vocabulary has a token for an image. It knows names and keys; the tensors themselves
are `tellin.loading.vision`'s.

Source: key and tensor names of the gguf package (0.19), conventions of the reference converter.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tellin.exceptions import ModelLoadError, UnsupportedModelError
from tellin.loading import gguf
from tellin.loading.gguf_hparams import hparams_from_gguf
from tellin.loading.gguf_vocab import GGUFVocabulary
from tellin.loading.hparams import check_hparams
from tellin.loading.names import is_mmproj_name
from tellin.loading.tensors import ModelHParams, TensorRef
from tellin.loading.typed_mapping import TypedMapping
from tellin.loading.vision_gguf_qwen import (
    QWEN_IMAGE_TOKEN,
    QWEN_PROJECTORS,
    gguf_grid_hparams,
    gguf_grid_settings,
)
from tellin.loading.vision_hparams import VisionHParams

_IMAGE_TOKENS = {
    "idefics3": ("<image>",),
    "gemma3": ("<image_soft_token>", "<start_of_image>"),
    "lfm2": ("<image>",),
    **dict.fromkeys(QWEN_PROJECTORS, (QWEN_IMAGE_TOKEN,)),
}
"""By projector: what stands for a row in an expanded prompt, and what for a picture in a user's."""
_GROUPS = {"idefics3": 2, "gemma3": 4, "lfm2": 2}
"""By projector: patches on a side of a group, where the file does not say."""
_NAMES = (
    (re.compile(r"v\.patch_embd\."), "patch_embed."),
    (re.compile(r"v\.position_embd\."), "embed_positions."),
    (re.compile(r"v\.post_ln\."), "norm."),
    (re.compile(r"mm\.(model\.fc|input_projection|0|1)\."), "projector_1."),
    (re.compile(r"mm\.2\."), "projector_2."),
    (re.compile(r"mm\.(soft_emb_norm|input_norm)\."), "projector_norm."),
    (re.compile(r"v\.blk\.(\d+)\.ln1\."), r"layers.\1.input_layernorm."),
    (re.compile(r"v\.blk\.(\d+)\.ln2\."), r"layers.\1.post_attention_layernorm."),
    (re.compile(r"v\.blk\.(\d+)\.attn_([qkv])\."), r"layers.\1.self_attn.\2_proj."),
    (re.compile(r"v\.blk\.(\d+)\.attn_qkv\."), r"layers.\1.self_attn.qkv_proj."),
    (re.compile(r"v\.blk\.(\d+)\.attn_out\."), r"layers.\1.self_attn.o_proj."),
    (re.compile(r"v\.blk\.(\d+)\.ffn_(gate|up|down)\."), r"layers.\1.mlp.\2_proj."),
)

_TAP = re.compile(r"v\.deepstack\.(\d+)\.(norm|fc1|fc2)\.(weight|bias)\Z")
_TAP_PARTS = {"norm": "projector_norm", "fc1": "projector_1", "fc2": "projector_2"}


def mmproj_files(model: Path) -> list[Path]:
    """Files beside a GGUF model that are named as an image encoder."""
    if is_mmproj_name(model.name):
        return []
    return sorted(path for path in model.parent.glob("*.gguf") if is_mmproj_name(path.name))


def gguf_vision_hparams(model: Path, metadata: TypedMapping) -> VisionHParams:
    """Dimensions of the encoder in a file with this ``metadata``.

    Args:
        model: GGUF file of the text model.

    Raises:
        ModelLoadError: a key is missing, or the two files do not go together.
        UnsupportedModelError: another kind of projector or activation.
    """
    path = metadata.path
    kind = _projector(metadata)
    if metadata.get_str("general.architecture") != "clip" or kind not in _IMAGE_TOKENS:
        raise UnsupportedModelError(
            f"{path}: an image encoder with projector {kind!r} is not supported in GGUF; "
            f"supported are {', '.join(_IMAGE_TOKENS)}; limit_mm_per_prompt={{'image': 0}} runs "
            "the text model"
        )
    if kind in QWEN_PROJECTORS:
        text, token_ids = _text_model(model, _IMAGE_TOKENS[kind])
        return gguf_grid_hparams(metadata, kind, text, token_ids[0])
    if metadata.get_bool("clip.use_silu", False):
        raise UnsupportedModelError(f"{path}: an image encoder with silu is not supported")
    text, token_ids = _text_model(model, _IMAGE_TOKENS[kind])
    keys = "clip.vision"
    hidden = metadata.get_int(f"{keys}.embedding_length")
    heads = metadata.get_int(f"{keys}.attention.head_count")
    patch_size = metadata.get_int(f"{keys}.patch_size")
    side = metadata.get_int(f"{keys}.image_size") // max(patch_size, 1)
    group = metadata.get_int(f"{keys}.projector.scale_factor", _GROUPS[kind])
    sizes_fit = patch_size >= 1 and 1 <= side <= 128 and 1 <= group <= side
    if not sizes_fit or heads < 1 or hidden % heads:
        raise ModelLoadError(
            f"{path}: embedding_length {hidden}, head_count {heads}, patch_size {patch_size}, "
            f"{side} patches on a side and scale_factor {group} do not make an image encoder"
        )
    is_lfm2 = kind == "lfm2"
    if is_lfm2 and not text.architecture.startswith("lfm2"):
        raise UnsupportedModelError(
            f"{path}: an image encoder with projector 'lfm2' does not go with a text model "
            f"{text.architecture!r}"
        )
    if kind == "gemma3" and side % group:
        raise ModelLoadError(
            f"{path}: {side} patches on a side are no whole groups of scale_factor {group}"
        )
    tower = ModelHParams(
        architecture="siglip2" if is_lfm2 else "siglip",
        hidden_size=hidden,
        intermediate_size=metadata.get_int(f"{keys}.feed_forward_length"),
        num_hidden_layers=metadata.get_int(f"{keys}.block_count"),
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=hidden // heads,
        vocab_size=1,
        max_position_embeddings=side**2,
        norm_eps=metadata.get_float(f"{keys}.attention.layer_norm_epsilon", 1e-6),
        hidden_act="gelu_tanh" if metadata.get_bool("clip.use_gelu", False) else "quick_gelu",
        attention_bias=True,
        mlp_bias=True,
    )
    return VisionHParams(
        tower=check_hparams(path, tower, metadata),
        patch_size=patch_size,
        num_channels=3,
        table_side=side,
        group_side=group,
        has_class_row=False,
        keeps_class_row=False,
        projector_act="gelu" if is_lfm2 else None,
        text_hidden_size=text.hidden_size,
        image_token_id=token_ids[0],
        pools=kind == "gemma3",
        begin_token_id=token_ids[1] if len(token_ids) > 1 else None,
        takes_grids=is_lfm2,
        projector_norm_eps=1e-5 if is_lfm2 else None,
    )


def gguf_image_settings(metadata: TypedMapping, hparams: VisionHParams) -> TypedMapping:
    """How pictures are prepared, under the names of a ``preprocessor_config.json``.

    Files that do not say how large a picture becomes are of models whose pictures are four tiles
    long.
    """
    if hparams.turns:
        return gguf_grid_settings(metadata)
    if hparams.takes_grids:
        return TypedMapping(metadata.path, _mixed_settings(metadata))
    tile = metadata.get_int("clip.vision.image_size")
    settings: dict[str, Any] = {"size": {"height": tile, "width": tile}}
    if _projector(metadata) == "idefics3":
        longest = metadata.get_int("clip.vision.preproc_image_size", 4 * tile)
        settings = {
            "max_image_size": {"longest_edge": tile},
            "size": {"longest_edge": longest},
        }
    for key in ("image_mean", "image_std"):
        if metadata.has(f"clip.vision.{key}"):
            settings[key] = metadata.get_numbers(f"clip.vision.{key}").tolist()
    return TypedMapping(metadata.path, settings)


def _mixed_settings(metadata: TypedMapping) -> dict[str, object]:
    """Of LFM2-VL's pictures; what a file does not say is the same in all of its models."""
    settings: dict[str, object] = {}
    for key in ("image_mean", "image_std"):
        if metadata.has(f"clip.vision.{key}"):
            settings[key] = metadata.get_numbers(f"clip.vision.{key}").tolist()
    for key in ("min_tiles", "max_tiles"):
        if metadata.has(f"clip.vision.preproc_{key}"):
            settings[key] = metadata.get_int(f"clip.vision.preproc_{key}")
    return settings


def canonical_gguf_vision(
    tensors: dict[str, TensorRef], hparams: VisionHParams
) -> dict[str, TensorRef]:
    """Tensors under canonical names."""
    named = {_canonical(name, hparams): tensor for name, tensor in tensors.items()}
    up = named.get("layers.0.mlp.up_proj.weight")
    hidden = hparams.tower.hidden_size
    if up is None or up.shape[-1] == hidden or up.shape[0] != hidden:
        return named
    # Older files call the two matrices of an MLP by each other's name.
    swap = {"up_proj": "down_proj", "down_proj": "up_proj"}
    return {
        re.sub(r"\b(up|down)_proj\b", lambda match: swap[match[0]], name): tensor
        for name, tensor in named.items()
    }


def _projector(metadata: TypedMapping) -> str:
    return metadata.get_str(
        "clip.projector_type", metadata.get_str("clip.vision.projector_type", "mlp")
    )


def _text_model(model: Path, wanted: tuple[str, ...]) -> tuple[ModelHParams, list[int]]:
    """Hyperparameters of a text model, and the ids of its tokens for images."""
    files = gguf.open_gguf(model)
    try:
        tensors = {name: tensor for file in files for name, tensor in file.tensors.items()}
        hparams = hparams_from_gguf(files[0].metadata, tensors)
        tokens = GGUFVocabulary(files[0].metadata).all_tokens()
    finally:
        for file in files:
            file.close()
    for token in wanted:
        if token not in tokens:
            raise UnsupportedModelError(
                f"{model}: an image encoder lies beside it, but its vocabulary has no {token}"
            )
    return hparams, [tokens.index(token) for token in wanted]


def _canonical(name: str, hparams: VisionHParams) -> str:
    tap = _TAP.match(name)
    if tap and int(tap[1]) in hparams.tapped_layers:
        return f"tap_{hparams.tapped_layers.index(int(tap[1]))}.{_TAP_PARTS[tap[2]]}.{tap[3]}"
    for pattern, replacement in _NAMES:
        name, count = pattern.subn(replacement, name, count=1)
        if count:
            break
    return name
