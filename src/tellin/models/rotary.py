"""Rotary frequencies of a model: base frequencies and the ways of stretching them.

Everything is computed in float64 and once, when the plan is recorded. A scaling never depends on
the length of the request at hand: the same position must turn the same way in every step.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from tellin.exceptions import ModelLoadError, UnsupportedModelError
from tellin.loading.tensors import ModelHParams, RopeScaling
from tellin.models.plan.ir import RotaryTable

Frequencies = npt.NDArray[np.float64]


def rotary_table(hparams: ModelHParams, max_model_len: int | None = None) -> RotaryTable:
    """Frequencies of the model's (global) attention layers, scaling applied.

    Args:
        hparams: the model's dimensions.
        max_model_len: longest context the engine will run; None = the model's own limit. Only
            longrope depends on it: it has one set of frequencies for its original context and one
            for anything longer.

    Raises:
        ModelLoadError: the scaling lacks a value or has an impossible one.
        UnsupportedModelError: the kind of scaling is unknown.
    """
    rope_dim = _rope_dim(hparams)
    scaling = hparams.rope_scaling
    frequencies = base_frequencies(rope_dim, hparams.rope_theta)
    factor = 1.0
    if scaling.kind == "none":
        frequencies = _divide(frequencies, scaling.factors)
    elif scaling.kind == "linear":
        frequencies = frequencies / _positive(scaling.factor, "factor")
    elif scaling.kind == "llama3":
        frequencies = _llama3(frequencies, scaling)
    elif scaling.kind == "yarn":
        frequencies, factor = _yarn(frequencies, scaling, hparams)
    elif scaling.kind == "longrope":
        context = max_model_len or hparams.max_position_embeddings
        frequencies, factor = _longrope(frequencies, scaling, hparams, context)
    else:
        raise UnsupportedModelError(
            f"rope scaling {scaling.kind!r} is not supported; "
            "supported are none, linear, llama3, yarn, longrope"
        )
    axes: tuple[int, ...] = ()
    if hparams.mrope_section:
        in_blocks = hparams.mrope_in_blocks
        axes = mrope_axes(hparams.mrope_section, len(frequencies), in_blocks=in_blocks)
    return RotaryTable(tuple(frequencies.tolist()), factor, axes)


def mrope_axes(section: tuple[int, ...], count: int, *, in_blocks: bool = False) -> tuple[int, ...]:
    """Which position each of ``count`` frequencies turns by: time, height and width in turn.

    ``section`` has how many frequencies height and width get; the others are time's.
    ``in_blocks``: those of an axis are neighbours, and ``section`` has time's, too.
    Source: Bai et al. 2025 (Qwen3-VL), section 2.1 (interleaved M-RoPE); Wang et al. 2024
    (Qwen2-VL), section 2.1, for blocks.
    """
    if in_blocks:
        return tuple(axis for axis, size in enumerate(section) for _ in range(size))
    axes = [0] * count
    for axis in (1, 2):
        for i in range(axis, min(3 * section[axis], count), 3):
            axes[i] = axis
    return tuple(axes)


def local_rotary_table(hparams: ModelHParams) -> RotaryTable:
    """Frequencies of sliding-window layers that have a base of their own and no scaling."""
    if hparams.rope_local_theta is None:
        return rotary_table(hparams)
    frequencies = base_frequencies(_rope_dim(hparams), hparams.rope_local_theta)
    return RotaryTable(tuple(frequencies.tolist()))


def base_frequencies(rope_dim: int, theta: float) -> Frequencies:
    """``theta ** (-2 i / rope_dim)`` for i in ``[0, rope_dim / 2)``. Source: RoFormer, eq. 15."""
    exponents = np.arange(0, rope_dim, 2, dtype=np.float64) / rope_dim
    return np.asarray(_positive(theta, "rope_theta") ** -exponents)


def _rope_dim(hparams: ModelHParams) -> int:
    rope_dim = hparams.head_dim if hparams.rope_dim is None else hparams.rope_dim
    if rope_dim % 2 or not 0 < rope_dim <= hparams.head_dim:
        raise ModelLoadError(
            f"rope_dim is {rope_dim}; it must be even and between 2 and head_dim {hparams.head_dim}"
        )
    return rope_dim


def _divide(frequencies: Frequencies, factors: tuple[float, ...] | None) -> Frequencies:
    """Divide by factors shipped with the model, one per frequency."""
    if factors is None:
        return frequencies
    if len(factors) != len(frequencies) or not min(factors) > 0:
        raise ModelLoadError(
            f"the model has {len(factors)} rope factors, the smallest {min(factors, default=0)}; "
            f"{len(frequencies)} positive ones are needed"
        )
    return frequencies / np.asarray(factors, dtype=np.float64)


def _llama3(frequencies: Frequencies, scaling: RopeScaling) -> Frequencies:
    """Stretch long wavelengths by ``factor``, keep short ones, blend in between.

    Source: Llama 3.1 model release (Meta, 2024), function "apply_scaling" of its reference code;
    a wavelength is compared with the original context length.
    """
    context = _original_context(scaling)
    factor = _positive(scaling.factor, "factor")
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    if not high > low:
        raise ModelLoadError(f"rope high_freq_factor {high} must exceed low_freq_factor {low}")
    rotations = context * frequencies / (2 * math.pi)
    blend = np.clip((rotations - low) / (high - low), 0.0, 1.0)
    return (1 - blend) * frequencies / factor + blend * frequencies


def _yarn(
    frequencies: Frequencies, scaling: RopeScaling, hparams: ModelHParams
) -> tuple[Frequencies, float]:
    """Interpolate dimensions that turn less than ``beta_slow`` times in the original context.

    Source: Peng et al. 2023 (YaRN), section 3.2 and eq. 22. A dimension i turns
    ``context * theta ** (-2 i / d) / (2 pi)`` times; solved for i this bounds the ramp.
    """
    context = _original_context(scaling)
    factor = _positive(scaling.factor, "factor")
    rope_dim = 2 * len(frequencies)
    if not hparams.rope_theta > 1:
        raise ModelLoadError(f"rope_theta is {hparams.rope_theta}; with YaRN it must exceed 1")

    def dimension(rotations: float) -> float:
        if not 1e-9 < rotations < 1e9:
            raise ModelLoadError(f"rope beta is {rotations}; it must be between 1e-9 and 1e9")
        ratio = context / (rotations * 2 * math.pi)
        return rope_dim * math.log(ratio) / (2 * math.log(hparams.rope_theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope_dim - 1)
    width = max(high - low, 0.001)
    ramp = np.clip((np.arange(len(frequencies)) - low) / width, 0.0, 1.0)
    scaled = frequencies / factor * ramp + frequencies * (1 - ramp)
    attention_factor = scaling.attention_factor
    if attention_factor is None:
        attention_factor = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
    return scaled, attention_factor


def _longrope(
    frequencies: Frequencies, scaling: RopeScaling, hparams: ModelHParams, context: int
) -> tuple[Frequencies, float]:
    """Divide by searched factors; the long ones if ``context`` exceeds the original context.

    Source: Ding et al. 2024 (LongRoPE), section 3.2; attention factor as in Phi-3's model card
    code: ``sqrt(1 + ln(s) / ln(original context))`` with s the ratio of the contexts.
    """
    original = _original_context(scaling)
    is_long = context > original
    factors = scaling.long_factors if is_long else scaling.factors
    if factors is None:
        kind = "long" if is_long else "short"
        raise ModelLoadError(f"the model has longrope scaling but no {kind} rope factors")
    attention_factor = scaling.attention_factor
    if attention_factor is None:
        stretch = scaling.factor
        if stretch <= 1:
            stretch = hparams.max_position_embeddings / original
        attention_factor = math.sqrt(1 + max(math.log(stretch), 0) / math.log(original))
    return _divide(frequencies, factors), attention_factor


def _original_context(scaling: RopeScaling) -> int:
    context = scaling.original_max_position_embeddings
    if context < 2:
        raise ModelLoadError(
            f"rope scaling {scaling.kind!r} needs original_max_position_embeddings; got {context}"
        )
    return context


def _positive(value: float, name: str) -> float:
    if not (value > 0 and math.isfinite(value)):
        raise ModelLoadError(f"rope {name} is {value}; it must be positive")
    return value
