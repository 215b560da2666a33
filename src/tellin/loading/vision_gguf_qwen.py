"""Dimensions of Qwen's image encoders in GGUF files of their own, part of `vision_gguf`.

Reads those of Qwen2-VL, Qwen2.5-VL, and Qwen3-VL, whose file Qwen3.5 has, too. What such a file
does not say is the same in all models of its kind.

Source: key and tensor names of the gguf package (0.19), conventions of the reference converter.
"""

from __future__ import annotations

from tellin.exceptions import ModelLoadError, UnsupportedModelError
from tellin.loading.hparams import check_hparams
from tellin.loading.tensors import ModelHParams
from tellin.loading.typed_mapping import TypedMapping
from tellin.loading.vision_hparams import VisionHParams

QWEN_PROJECTORS = ("qwen2vl_merger", "qwen2.5vl_merger", "qwen3vl_merger")
QWEN_IMAGE_TOKEN = "<|image_pad|>"
_KEYS = "clip.vision"
_WINDOW = 112
"""Pixels on a side of a window of Qwen2.5-VL."""
_LEAST_ROWS, _MOST_ROWS = 8, 4096
"""Rows of a picture where a file does not say how many pixels it may have."""


def gguf_grid_hparams(
    metadata: TypedMapping, kind: str, text: ModelHParams, token_id: int
) -> VisionHParams:
    """Dimensions of the encoder with projector ``kind`` in a file with this ``metadata``.

    Args:
        text: the text model's hyperparameters.
        token_id: of the token for a row of a picture.

    Raises:
        ModelLoadError: a key is missing or has an impossible value.
        UnsupportedModelError: the text model is none that goes with it.
    """
    path = metadata.path
    has_table = kind == "qwen3vl_merger"
    if not text.mrope_section or text.mrope_in_blocks == has_table:
        raise UnsupportedModelError(
            f"{path}: an image encoder with projector {kind!r} does not go with a text model "
            f"{text.architecture!r} whose rope.dimension_sections are {text.mrope_section}"
        )
    patch_size = metadata.get_int(f"{_KEYS}.patch_size")
    group = metadata.get_int(f"{_KEYS}.spatial_merge_size", 2)
    side = metadata.get_int(f"{_KEYS}.image_size") // max(patch_size, 1) if has_table else 0
    if not 1 <= patch_size <= 64 or not 1 <= group <= 64 or not int(has_table) <= side <= 1024:
        raise ModelLoadError(
            f"{path}: patch_size {patch_size}, spatial_merge_size {group} and {side} patches on a "
            "side of the image do not make an image encoder"
        )
    return VisionHParams(
        tower=check_hparams(path, _tower(metadata, kind, max(side, 1) ** 2)),
        patch_size=patch_size,
        num_channels=3,
        table_side=side,
        group_side=group,
        has_class_row=False,
        keeps_class_row=False,
        projector_act="gelu",
        text_hidden_size=text.hidden_size,
        image_token_id=token_id,
        num_frames=2,
        takes_grids=True,
        window_side=_window_side(metadata, patch_size, group) if kind == QWEN_PROJECTORS[1] else 0,
        full_layers=_full_layers(metadata) if kind == QWEN_PROJECTORS[1] else (),
        tapped_layers=_tapped_layers(metadata, text) if has_table else (),
    )


def gguf_grid_settings(metadata: TypedMapping) -> TypedMapping:
    """How pictures are prepared, under the names of a ``preprocessor_config.json``."""
    block = metadata.get_int(f"{_KEYS}.patch_size") * metadata.get_int(
        f"{_KEYS}.spatial_merge_size", 2
    )
    settings = {
        "min_pixels": metadata.get_int(f"{_KEYS}.image_min_pixels", _LEAST_ROWS * block**2),
        "max_pixels": metadata.get_int(f"{_KEYS}.image_max_pixels", _MOST_ROWS * block**2),
    }
    means = {
        key: metadata.get_numbers(f"{_KEYS}.{key}").tolist() for key in ("image_mean", "image_std")
    }
    return TypedMapping(metadata.path, {**settings, **means})


def _tower(metadata: TypedMapping, kind: str, num_rows: int) -> ModelHParams:
    path = metadata.path
    hidden = metadata.get_int(f"{_KEYS}.embedding_length")
    heads = metadata.get_int(f"{_KEYS}.attention.head_count")
    if heads < 1 or hidden % (4 * heads):
        raise ModelLoadError(
            f"{path}: {_KEYS}.embedding_length is {hidden}, which {_KEYS}.attention.head_count, "
            f"{heads}, does not divide into fours"
        )
    acts = {"qwen2vl_merger": "quick_gelu", "qwen2.5vl_merger": "silu"}
    flags = {"silu": "clip.use_silu", "gelu_tanh": "clip.use_gelu"}
    act = acts.get(kind, "gelu_tanh")
    for name, flag in flags.items():
        if metadata.get_bool(flag, False) != (name == act):
            raise UnsupportedModelError(
                f"{path}: {flag} is {metadata.get_bool(flag, False)}, which is not supported for "
                f"an image encoder with projector {kind!r}"
            )
    return ModelHParams(
        architecture="qwen2.5" if kind == "qwen2.5vl_merger" else "qwen",
        hidden_size=hidden,
        intermediate_size=metadata.get_int(f"{_KEYS}.feed_forward_length"),
        num_hidden_layers=metadata.get_int(f"{_KEYS}.block_count"),
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=hidden // heads,
        vocab_size=1,
        max_position_embeddings=num_rows,
        norm_eps=metadata.get_float(f"{_KEYS}.attention.layer_norm_epsilon", 1e-6),
        hidden_act=act,
        attention_bias=True,
        mlp_bias=True,
    )


def _window_side(metadata: TypedMapping, patch_size: int, group: int) -> int:
    window = metadata.get_int(f"{_KEYS}.window_size", _WINDOW)
    side = window // group // patch_size
    if side < 1:
        raise ModelLoadError(
            f"{metadata.path}: a window of {window} pixels does not hold {group} x {group} patches "
            f"of {patch_size}"
        )
    return side


def _full_layers(metadata: TypedMapping) -> tuple[int, ...]:
    key = f"{_KEYS}.n_wa_pattern"
    every = metadata.get_int(key)
    if every < 1:
        raise ModelLoadError(f"{metadata.path}: {key} is {every}; it must be positive")
    return tuple(range(every - 1, metadata.get_int(f"{_KEYS}.block_count"), every))


def _tapped_layers(metadata: TypedMapping, text: ModelHParams) -> tuple[int, ...]:
    key = f"{_KEYS}.is_deepstack_layers"
    flags = metadata.get_numbers(key).tolist() if metadata.has(key) else []
    layers = tuple(i for i, flag in enumerate(flags) if flag)
    if len(flags) not in (0, metadata.get_int(f"{_KEYS}.block_count")):
        raise ModelLoadError(f"{metadata.path}: {key} has {len(flags)} entries, not one per layer")
    if len(layers) != text.deepstack_layers:
        raise UnsupportedModelError(
            f"{metadata.path}: {key} names {len(layers)} layers, but the text model takes rows of "
            f"{text.deepstack_layers} (n_deepstack_layers)"
        )
    return layers
