"""What the text half of a model that sees has besides a text model: positions in three axes
(M-RoPE), and how many of its layers get rows of pictures (DeepStack).

Qwen2-VL and Qwen2.5-VL give time, height and width neighbouring frequencies, Qwen3-VL and Qwen3.5
every third.

Source: Wang et al. 2024 (Qwen2-VL), section 2.1; Bai et al. 2025 (Qwen3-VL), section 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tellin.exceptions import ModelLoadError, UnsupportedModelError
from tellin.loading.tensors import ModelHParams
from tellin.loading.typed_mapping import TypedMapping

_IN_BLOCKS = ("qwen2_vl", "qwen2_5_vl")
_INTERLEAVED = ("qwen3_vl", "qwen3_vl_moe")
_GGUF_IN_BLOCKS = ("qwen2vl",)
_GGUF_INTERLEAVED = ("qwen3vl", "qwen3vlmoe", "qwen35", "qwen35moe")
DEEPSTACK = "deepstack_visual_indexes"
DEEPSTACK_LAYERS = (8, 16, 24)
"""Layers of Qwen3-VL's tower whose rows the text model gets, where the configuration is silent."""


def seeing_from_config(config: TypedMapping, hparams: ModelHParams) -> ModelHParams:
    """``hparams`` of a text model, with what the whole ``config.json`` says of pictures.

    Raises:
        ModelLoadError: the sections do not fit the heads.
        UnsupportedModelError: a variant that does not run here.
    """
    model_type = config.get_str("model_type", "")
    if model_type not in (*_IN_BLOCKS, *_INTERLEAVED):
        return hparams
    text = config.get_mapping("text_config") if config.has("text_config") else config
    key = "rope_parameters" if text.has("rope_parameters") else "rope_scaling"
    rope = text.get_mapping(key) if text.has(key) else text
    interleaved = model_type in _INTERLEAVED
    if interleaved and not rope.get_bool("mrope_interleaved", True):
        raise UnsupportedModelError(
            f"{config.path}: mrope_interleaved is False, which is not supported for {model_type!r}"
        )
    section = mrope_section(rope, (24, 20, 20) if interleaved else (16, 24, 24))
    hparams = replace(hparams, mrope_section=section, mrope_in_blocks=not interleaved)
    if interleaved and config.has("vision_config"):
        vision = config.get_mapping("vision_config")
        layers = deepstack_layers(vision)
        hparams = replace(hparams, deepstack_layers=len(layers))
    return _checked(config.path, hparams)


def seeing_from_gguf(metadata: TypedMapping, hparams: ModelHParams) -> ModelHParams:
    """``hparams`` of a text model, with what its GGUF file says of pictures. Raises: as above."""
    architecture = metadata.get_str("general.architecture")
    key = f"{architecture}.rope.dimension_sections"
    if architecture not in (*_GGUF_IN_BLOCKS, *_GGUF_INTERLEAVED) or not metadata.has(key):
        return hparams
    given = tuple(int(n) for n in metadata.get_integers(key).tolist())
    if any(given[3:]):
        raise UnsupportedModelError(f"{metadata.path}: {key} is {given}; supported are three sizes")
    section = _three_sizes(metadata.path, key, given[:3])
    hparams = replace(
        hparams,
        mrope_section=section,
        mrope_in_blocks=architecture in _GGUF_IN_BLOCKS,
        deepstack_layers=metadata.get_int(f"{architecture}.n_deepstack_layers", 0),
    )
    return _checked(metadata.path, hparams)


def mrope_section(rope: TypedMapping, default: tuple[int, ...]) -> tuple[int, ...]:
    """Frequencies of time, height and width, as ``mrope_section`` says."""
    if not rope.has("mrope_section"):
        return default
    section = rope.get_integers("mrope_section").tolist()
    return _three_sizes(rope.path, "mrope_section", section)


def deepstack_layers(vision: TypedMapping) -> tuple[int, ...]:
    """Layers of the tower whose rows go to the first layers of the text model, in their order."""
    if not vision.has(DEEPSTACK):
        return DEEPSTACK_LAYERS
    return tuple(int(n) for n in vision.get_integers(DEEPSTACK).tolist())


def _three_sizes(path: Path, key: str, section: Sequence[int]) -> tuple[int, ...]:
    if len(section) != 3 or min(section) < 0:
        raise ModelLoadError(f"{path}: {key} is {tuple(section)}; it must be three sizes")
    return tuple(int(size) for size in section)


def _checked(path: Path, hparams: ModelHParams) -> ModelHParams:
    rotated = hparams.head_dim if hparams.rope_dim is None else hparams.rope_dim
    section = hparams.mrope_section
    if hparams.mrope_in_blocks and sum(section) != rotated // 2:
        raise ModelLoadError(
            f"{path}: mrope_section is {section}, which makes {sum(section)} frequencies; "
            f"heads have {rotated // 2}"
        )
    count = hparams.deepstack_layers
    if not 0 <= count <= hparams.num_hidden_layers:
        raise ModelLoadError(
            f"{path}: rows of {count} layers of the image encoder ({DEEPSTACK}) are for as many "
            f"layers of the text model, which has {hparams.num_hidden_layers}"
        )
    return hparams
