"""Dimensions of a model's image encoder, from the ``config.json`` of its folder.

Covers SmolVLM, SmolVLM2 and Idefics3 (a SigLIP tower, groups of patches, one matrix), Gemma 3 (the
same with means of groups), LLaVA-1.5 (a CLIP tower, two matrices) and Qwen3.5 (pictures of any
shape, two matrices). It knows no tensors and no pixels.

Source: the configuration classes' documented fields and defaults (transformers 5.24).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from tellin.exceptions import ModelLoadError, UnsupportedModelError
from tellin.loading.hparams import check_hparams
from tellin.loading.tensors import ModelHParams
from tellin.loading.typed_mapping import TypedMapping

TILED_MODELS = ("idefics3", "smolvlm")
"""``model_type`` of models that cut a picture into tiles."""
GRID_MODELS = ("qwen3_5", "qwen3_5_moe")
"""``model_type`` of models whose pictures keep their shape."""
VISION_MODELS = (*TILED_MODELS, "llava", *GRID_MODELS)
"""``model_type`` of models with an image encoder beside a text model of any kind."""
POOLED_MODELS = ("gemma3",)
"""``model_type`` of models whose groups of patches are averaged, beside Gemma's text model."""

_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "quick_gelu": "quick_gelu",
}
_MAX_PATCHES = 1 << 14
_DEEPSTACK = "deepstack_visual_indexes"


@dataclass(frozen=True)
class VisionHParams:
    """An image encoder: a tower over the patches of a tile, and what fits it to the text model."""

    tower: ModelHParams
    """``max_position_embeddings`` is the number of rows of its position table."""
    patch_size: int
    """Width and height of a patch in pixels."""
    num_channels: int
    table_side: int
    """Patches on a side of the square that the position table was made for."""
    group_side: int
    """Patches on a side of the square that becomes one row for the text model."""
    has_class_row: bool
    """The tower has a row, the first, that is no patch (CLIP)."""
    keeps_class_row: bool
    """That row goes to the text model too."""
    projector_act: str | None
    """Between the two matrices of the projector; None: there is one matrix."""
    text_hidden_size: int
    image_token_id: int
    num_frames: int = 1
    """Frames of a film that a patch spans; a picture is as many equal ones."""
    takes_grids: bool = False
    """A picture is one tile of any shape, whose patches turn by row and column (Qwen3.5)."""
    pools: bool = False
    """A group of patches becomes their mean, and rows of a tile see each other in the text model
    (Gemma 3)."""
    begin_token_id: int | None = None
    """Stands for a picture in a user's prompt, where it is another than ``image_token_id``."""

    @property
    def patch_dim(self) -> int:
        """Values of a patch."""
        return self.num_channels * self.patch_size**2

    def embeds_per_tile(self, side: int) -> int:
        """Rows for the text model of a tile of ``side * side`` patches."""
        return (side // self.group_side) ** 2 + int(self.has_class_row and self.keeps_class_row)


def vision_hparams(config: TypedMapping, text: ModelHParams) -> VisionHParams | None:
    """The image encoder that a ``config.json`` describes; None for a model without one.

    Args:
        config: the whole file.
        text: the text model's hyperparameters.

    Raises:
        ModelLoadError: a key is missing or has an impossible value.
        UnsupportedModelError: a variant that does not run here.
    """
    model_type = config.get_str("model_type", "")
    if model_type not in (*VISION_MODELS, *POOLED_MODELS) or not config.has("vision_config"):
        return None
    vision = config.get_mapping("vision_config")
    if model_type in TILED_MODELS:
        hparams = _tiled(config, vision, text)
    elif model_type in GRID_MODELS:
        hparams = _grid(config, vision, text)
    elif model_type in POOLED_MODELS:
        hparams = _pooled(config, vision, text)
    else:
        hparams = _llava(config, vision, text)
    check_hparams(config.path, hparams.tower, vision)
    if hparams.table_side % hparams.group_side and model_type == "llava":
        raise ModelLoadError(f"{config.path}: patches do not form whole groups")
    for token_id in (hparams.image_token_id, hparams.begin_token_id or 0):
        if not 0 <= token_id < text.vocab_size:
            raise ModelLoadError(
                f"{config.path}: the image token has id {token_id} (image_token_id, or "
                f"image_token_index and the like), but the vocabulary has {text.vocab_size} tokens"
            )
    return hparams


def _tiled(config: TypedMapping, vision: TypedMapping, text: ModelHParams) -> VisionHParams:
    image_size, patch_size = _sizes(vision, 224, 32)
    side = image_size // patch_size
    group_side = config.get_int("scale_factor", 2)
    if group_side < 1:
        raise ModelLoadError(f"{config.path}: scale_factor is {group_side}")
    return VisionHParams(
        tower=_tower(vision, "siglip", side**2, 1152, "gelu_pytorch_tanh", 1e-6),
        patch_size=patch_size,
        num_channels=vision.get_int("num_channels", 3),
        table_side=side,
        group_side=group_side,
        has_class_row=False,
        keeps_class_row=False,
        projector_act=None,
        text_hidden_size=text.hidden_size,
        image_token_id=config.get_int("image_token_id", 128_257),
    )


def _pooled(config: TypedMapping, vision: TypedMapping, text: ModelHParams) -> VisionHParams:
    kind = vision.get_str("model_type", "siglip_vision_model")
    if kind != "siglip_vision_model":
        raise UnsupportedModelError(
            f"{config.path}: an image encoder of type {kind!r} is not supported in a Gemma 3; "
            "supported is siglip_vision_model; limit_mm_per_prompt={'image': 0} runs the text model"
        )
    given = {key: value for key, value in vision.items() if value is not None}
    vision = TypedMapping(config.path, {"hidden_size": 768, "num_attention_heads": 12, **given})
    image_size, patch_size = _sizes(vision, 224, 16)
    side = image_size // patch_size
    count = config.get_int("mm_tokens_per_image", 256)
    return VisionHParams(
        tower=_tower(vision, "siglip", side**2, 768, "gelu_pytorch_tanh", 1e-6),
        patch_size=patch_size,
        num_channels=vision.get_int("num_channels", 3),
        table_side=side,
        group_side=pooled_group(config.path, side, count),
        has_class_row=False,
        keeps_class_row=False,
        projector_act=None,
        text_hidden_size=text.hidden_size,
        image_token_id=config.get_int(
            "image_token_index", config.get_int("image_token_id", 262_144)
        ),
        pools=True,
        begin_token_id=config.get_int("boi_token_index", 255_999),
    )


def pooled_group(path: Path, side: int, count: int) -> int:
    """Patches on a side of a group, ``count`` of which make a tile of ``side * side`` patches."""
    rows = math.isqrt(max(count, 0))
    if rows < 1 or rows**2 != count or side % rows:
        raise ModelLoadError(
            f"{path}: mm_tokens_per_image is {count}, but an image encoder of {side} x {side} "
            "patches makes squares of equal groups of them"
        )
    return side // rows


def _llava(config: TypedMapping, vision: TypedMapping, text: ModelHParams) -> VisionHParams:
    kind = vision.get_str("model_type", "clip_vision_model")
    if kind != "clip_vision_model":
        raise UnsupportedModelError(
            f"{config.path}: a LLaVA model with a {kind!r} tower is not supported; "
            "supported is clip_vision_model"
        )
    image_size, patch_size = _sizes(vision, 336, 14)
    side = image_size // patch_size
    tower = _tower(vision, "clip", side**2 + 1, 1024, "quick_gelu", 1e-5)
    layer = config.get_int("vision_feature_layer", -2)
    # Index into the hidden states: those before the first layer, then after each one.
    num_layers = layer if layer >= 0 else tower.num_hidden_layers + 1 + layer
    if not 1 <= num_layers <= tower.num_hidden_layers:
        raise ModelLoadError(
            f"{config.path}: vision_feature_layer is {layer}, but the tower has "
            f"{tower.num_hidden_layers} layers"
        )
    strategy = config.get_str("vision_feature_select_strategy", "default")
    if strategy not in ("default", "full"):
        raise ModelLoadError(f"{config.path}: vision_feature_select_strategy is {strategy!r}")
    return VisionHParams(
        tower=replace(tower, num_hidden_layers=num_layers),
        patch_size=patch_size,
        num_channels=vision.get_int("num_channels", 3),
        table_side=side,
        group_side=1,
        has_class_row=True,
        keeps_class_row=strategy == "full",
        projector_act=_activation(config, "projector_hidden_act", "gelu"),
        text_hidden_size=text.hidden_size,
        image_token_id=config.get_int(
            "image_token_index", config.get_int("image_token_id", 32_000)
        ),
    )


def _grid(config: TypedMapping, vision: TypedMapping, text: ModelHParams) -> VisionHParams:
    if vision.has("deepstack_visual_indexes") and len(vision.get_numbers(_DEEPSTACK)):
        raise UnsupportedModelError(
            f"{config.path}: {_DEEPSTACK} of the image encoder is not empty, which is not "
            "supported; limit_mm_per_prompt={'image': 0} runs the text model"
        )
    num_rows = vision.get_int("num_position_embeddings", 2304)
    side = math.isqrt(max(num_rows, 0))
    values = {
        "patch_size": vision.get_int("patch_size", 16),
        "spatial_merge_size": vision.get_int("spatial_merge_size", 2),
        "temporal_patch_size": vision.get_int("temporal_patch_size", 2),
    }
    if side < 1 or side**2 != num_rows or not all(1 <= v <= 64 for v in values.values()):
        raise ModelLoadError(
            f"{config.path}: vision_config has num_position_embeddings {num_rows}, "
            f"which must be a square, and {values}"
        )
    hidden = vision.get_int("hidden_size", 1152)
    own = {
        "hidden_size": hidden,
        "num_attention_heads": vision.get_int("num_heads", 16),
        "num_hidden_layers": vision.get_int("depth", 27),
        "intermediate_size": vision.get_int("intermediate_size", 4304),
        "hidden_act": vision.get_str("hidden_act", "gelu_pytorch_tanh"),
    }
    tower = _tower(TypedMapping(config.path, own), "qwen", num_rows, hidden, "gelu", 1e-6)
    rope = vision.get_mapping("rope_parameters") if vision.has("rope_parameters") else vision
    kind = rope.get_str("rope_type", "axial")
    if kind != "axial" or tower.head_dim % 4:
        raise UnsupportedModelError(
            f"{config.path}: an image encoder with rope_type {kind!r} "
            f"and heads of {tower.head_dim} is not supported; supported is axial, in fours"
        )
    return VisionHParams(
        tower=replace(tower, rope_theta=rope.get_float("rope_theta", 10000.0)),
        patch_size=values["patch_size"],
        num_channels=vision.get_int("in_channels", 3),
        table_side=side,
        group_side=values["spatial_merge_size"],
        has_class_row=False,
        keeps_class_row=False,
        projector_act="gelu",
        text_hidden_size=text.hidden_size,
        image_token_id=config.get_int("image_token_id", 248_056),
        num_frames=values["temporal_patch_size"],
        takes_grids=True,
    )


def _sizes(vision: TypedMapping, image_size: int, patch_size: int) -> tuple[int, int]:
    image_size = vision.get_int("image_size", image_size)
    patch_size = vision.get_int("patch_size", patch_size)
    if not 1 <= patch_size <= image_size or (image_size // patch_size) ** 2 > _MAX_PATCHES:
        raise ModelLoadError(
            f"{vision.path}: vision_config has image_size {image_size} and patch_size {patch_size}"
        )
    return image_size, patch_size


def _tower(
    vision: TypedMapping, architecture: str, num_rows: int, hidden: int, act: str, eps: float
) -> ModelHParams:
    """Dimensions of a tower; what the configuration leaves out is its class's default."""
    heads, layers = (16, 12) if architecture == "siglip" else (16, 24)
    inner = 3072 if architecture == "siglip" else 4096
    hidden = vision.get_int("hidden_size", hidden)
    num_heads = vision.get_int("num_attention_heads", heads)
    if num_heads < 1 or hidden % num_heads:
        raise ModelLoadError(
            f"{vision.path}: vision_config has hidden_size {hidden}, which {num_heads} "
            "num_attention_heads do not divide"
        )
    return ModelHParams(
        architecture=architecture,
        hidden_size=hidden,
        intermediate_size=vision.get_int("intermediate_size", inner),
        num_hidden_layers=vision.get_int("num_hidden_layers", layers),
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads,
        head_dim=hidden // num_heads,
        vocab_size=1,
        max_position_embeddings=num_rows,
        norm_eps=vision.get_float("layer_norm_eps", eps),
        hidden_act=_activation(vision, "hidden_act", act),
        attention_bias=True,
        mlp_bias=True,
    )


def _activation(config: TypedMapping, key: str, default: str) -> str:
    name = config.get_str(key, default)
    if name not in _ACTIVATIONS:
        raise UnsupportedModelError(
            f"{config.path}: {key} {name!r} of the image encoder is not supported; "
            f"supported are {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name]
