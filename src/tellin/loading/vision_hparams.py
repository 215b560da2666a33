"""Dimensions of a model's image encoder, from the ``config.json`` of its folder.

Covers SmolVLM, SmolVLM2 and Idefics3 (a SigLIP tower, groups of patches, one matrix), Gemma 3 (the
same with means of groups), LLaVA-1.5 (a CLIP tower, two matrices), Qwen2-VL and its successors and
LFM2-VL (pictures of any shape, two matrices). It knows no tensors and no pixels.

Source: the configuration classes' documented fields and defaults (transformers 5.24).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tellin.exceptions import ModelLoadError, UnsupportedModelError
from tellin.loading.hparams import check_hparams
from tellin.loading.mrope import DEEPSTACK, deepstack_layers
from tellin.loading.tensors import ModelHParams
from tellin.loading.typed_mapping import TypedMapping

TILED_MODELS = ("idefics3", "smolvlm")
"""``model_type`` of models that cut a picture into tiles."""
GRID_MODELS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
"""``model_type`` of models whose pictures keep their shape."""
VISION_MODELS = (*TILED_MODELS, "llava", *GRID_MODELS, "lfm2_vl")
"""``model_type`` of models with an image encoder beside a text model of any kind."""
POOLED_MODELS = ("gemma3",)
"""``model_type`` of models whose groups of patches are averaged, beside Gemma's text model."""

_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "silu": "silu",
}
_MAX_PATCHES = 1 << 14


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
    """Tiles have any shape (Qwen, LFM2-VL)."""
    window_side: int = 0
    """Groups on a side of the squares that most layers attend within; 0: all see all patches."""
    full_layers: tuple[int, ...] = ()
    """Layers that see all patches though others have windows."""
    tapped_layers: tuple[int, ...] = ()
    """Layers whose rows become rows for the text model, too (DeepStack)."""
    pools: bool = False
    """A group of patches becomes their mean, and rows of a tile see each other in the text model
    (Gemma 3)."""
    begin_token_id: int | None = None
    """Stands for a picture in a user's prompt, where it is another than ``image_token_id``."""
    projector_norm_eps: float | None = None
    """Of a norm before the projector's matrices; None: there is none."""

    @property
    def turns(self) -> bool:
        """Patches turn by row and column (Qwen)."""
        return self.takes_grids and self.tower.architecture != "siglip2"

    @property
    def patch_dim(self) -> int:
        """Values of a patch."""
        return self.num_channels * self.patch_size**2

    @property
    def row_width(self) -> int:
        """Values of a row for the text model: its embedding, then what its first layers add."""
        return self.text_hidden_size * (1 + len(self.tapped_layers))

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
    elif model_type == "lfm2_vl":
        hparams = _naflex(config, vision, text)
    elif model_type in POOLED_MODELS:
        hparams = _pooled(config, vision, text)
    else:
        hparams = _llava(config, vision, text)
    check_hparams(config.path, hparams.tower, vision)
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


_GRID_DEFAULTS: dict[str, dict[str, int | str]] = {
    "qwen2_vl": {"embed_dim": 1280, "patch_size": 14, "depth": 32, "hidden_act": "quick_gelu"},
    "qwen2_5_vl": {
        "hidden_size": 3584, "intermediate_size": 3420, "patch_size": 14, "depth": 32,
        "hidden_act": "silu",
    },
}  # fmt: skip
_QWEN3_DEFAULTS: dict[str, int | str] = {
    "hidden_size": 1152, "intermediate_size": 4304, "patch_size": 16, "depth": 27,
    "hidden_act": "gelu_pytorch_tanh",
}  # fmt: skip


def _grid(config: TypedMapping, vision: TypedMapping, text: ModelHParams) -> VisionHParams:
    """The towers of Qwen2-VL and what came after it."""
    model_type = config.get_str("model_type", "")
    given = {key: value for key, value in vision.items() if value is not None}
    defaults = _GRID_DEFAULTS.get(model_type, _QWEN3_DEFAULTS)
    vision = TypedMapping(config.path, {**defaults, **given})
    has_table = model_type not in _GRID_DEFAULTS
    num_rows = vision.get_int("num_position_embeddings", 2304) if has_table else 0
    side = math.isqrt(max(num_rows, 0))
    values = {
        "patch_size": vision.get_int("patch_size"),
        "spatial_merge_size": vision.get_int("spatial_merge_size", 2),
        "temporal_patch_size": vision.get_int("temporal_patch_size", 2),
    }
    if side**2 != num_rows or has_table > side or not all(1 <= v <= 64 for v in values.values()):
        raise ModelLoadError(
            f"{config.path}: vision_config has num_position_embeddings {num_rows}, "
            f"which must be a square, and {values}"
        )
    tower = _grid_tower(vision, model_type, max(num_rows, 1))
    hparams = VisionHParams(
        tower=tower,
        patch_size=values["patch_size"],
        num_channels=vision.get_int("in_channels", vision.get_int("in_chans", 3)),
        table_side=side,
        group_side=values["spatial_merge_size"],
        has_class_row=False,
        keeps_class_row=False,
        projector_act="gelu",
        text_hidden_size=text.hidden_size,
        image_token_id=config.get_int(
            "image_token_id", 248_056 if model_type.startswith("qwen3_5") else 151_655
        ),
        num_frames=values["temporal_patch_size"],
        takes_grids=True,
    )
    if model_type == "qwen2_5_vl":
        return _with_windows(vision, hparams)
    return _with_taps(vision, hparams, text.deepstack_layers) if has_table else hparams


def _grid_tower(vision: TypedMapping, model_type: str, num_rows: int) -> ModelHParams:
    is_first = model_type == "qwen2_vl"
    hidden = vision.get_int("embed_dim" if is_first else "hidden_size")
    own = {
        "hidden_size": hidden,
        "num_attention_heads": vision.get_int("num_heads", 16),
        "num_hidden_layers": vision.get_int("depth"),
        "intermediate_size": (
            hidden * vision.get_int("mlp_ratio", 4)
            if is_first
            else vision.get_int("intermediate_size")
        ),
        "hidden_act": vision.get_str("hidden_act"),
    }
    kind = "qwen2.5" if model_type == "qwen2_5_vl" else "qwen"
    tower = _tower(TypedMapping(vision.path, own), kind, num_rows, hidden, "gelu", 1e-6)
    rope = vision.get_mapping("rope_parameters") if vision.has("rope_parameters") else vision
    rope_type = rope.get_str("rope_type", "axial")
    if rope_type != "axial" or tower.head_dim % 4:
        raise UnsupportedModelError(
            f"{vision.path}: an image encoder with rope_type {rope_type!r} "
            f"and heads of {tower.head_dim} is not supported; supported is axial, in fours"
        )
    return replace(tower, rope_theta=rope.get_float("rope_theta", 10000.0))


def _with_windows(vision: TypedMapping, hparams: VisionHParams) -> VisionHParams:
    window = vision.get_int("window_size", 112)
    side = window // hparams.group_side // hparams.patch_size
    if not 1 <= side <= _MAX_PATCHES:
        raise ModelLoadError(
            f"{vision.path}: window_size is {window}; a window must hold a group of "
            f"{hparams.group_side} x {hparams.group_side} patches of {hparams.patch_size} pixels"
        )
    key = "fullatt_block_indexes"
    layers = vision.get_integers(key).tolist() if vision.has(key) else (7, 15, 23, 31)
    return replace(hparams, window_side=side, full_layers=_layers(vision, key, layers, hparams))


def _with_taps(vision: TypedMapping, hparams: VisionHParams, count: int) -> VisionHParams:
    layers = deepstack_layers(vision) if vision.has(DEEPSTACK) or count else ()
    if len(layers) != count or list(layers) != sorted(set(layers)):
        raise UnsupportedModelError(
            f"{vision.path}: {DEEPSTACK} of the image encoder is {list(layers)}, which is not "
            f"supported: it must ascend, and the text model takes rows of {count} layers; "
            "limit_mm_per_prompt={'image': 0} runs the text model"
        )
    return replace(hparams, tapped_layers=_layers(vision, DEEPSTACK, layers, hparams))


def _layers(
    vision: TypedMapping, key: str, layers: Sequence[int], hparams: VisionHParams
) -> tuple[int, ...]:
    for layer in layers:
        if not 0 <= layer < hparams.tower.num_hidden_layers:
            raise ModelLoadError(
                f"{vision.path}: {key} has layer {layer}; the image encoder has "
                f"{hparams.tower.num_hidden_layers}"
            )
    return tuple(int(layer) for layer in layers)


def _naflex(config: TypedMapping, vision: TypedMapping, text: ModelHParams) -> VisionHParams:
    """LFM2-VL's tower, a SigLIP for tiles of any shape."""
    num_rows = vision.get_int("num_patches", 256)
    side = math.isqrt(max(num_rows, 0))
    patch_size = vision.get_int("patch_size", 16)
    group_side = config.get_int("downsample_factor", 2)
    if side**2 != num_rows or not 1 <= side <= 1024 or not 1 <= patch_size <= 64:
        raise ModelLoadError(
            f"{config.path}: vision_config has num_patches {num_rows}, which must be a square, "
            f"and patch_size {patch_size}"
        )
    if not 1 <= group_side <= 64:
        raise ModelLoadError(f"{config.path}: downsample_factor is {group_side}")
    layer = config.get_int("vision_feature_layer", -1)
    if layer != -1:
        raise UnsupportedModelError(
            f"{config.path}: vision_feature_layer is {layer}, which is not supported; supported "
            "is -1, the last"
        )
    given = {"num_attention_heads": 12, **{k: v for k, v in vision.items() if v is not None}}
    tower = _tower(
        TypedMapping(config.path, given), "siglip2", num_rows, 768, "gelu_pytorch_tanh", 1e-6
    )
    has_norm = config.get_bool("projector_use_layernorm", True)
    return VisionHParams(
        tower=tower,
        patch_size=patch_size,
        num_channels=vision.get_int("num_channels", 3),
        table_side=side,
        group_side=group_side,
        has_class_row=False,
        keeps_class_row=False,
        projector_act=_activation(config, "projector_hidden_act", "gelu"),
        text_hidden_size=text.hidden_size,
        image_token_id=config.get_int("image_token_id", 396),
        takes_grids=True,
        projector_norm_eps=1e-5 if has_norm else None,
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
    is_siglip = architecture.startswith("siglip")
    heads, layers = (16, 12) if is_siglip else (16, 24)
    inner = 3072 if is_siglip else 4096
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
