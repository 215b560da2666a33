"""Hyperparameters that some families of decoders call by names of their own, or have alone.

What is common to all decoders is read where theirs is (`hf_hparams`, `gguf_hparams`); here is how
these families' configurations become such ones, and what is added afterwards. What a configuration
asks for and the plan does not do is refused with its key and value.

Source: the configuration classes' documented fields and defaults (transformers 5.24), the keys of
the published configurations, and GGUF's keys as its reference converter writes them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from tellin.exceptions import ModelLoadError, UnsupportedModelError
from tellin.loading.hparams import sliding_by_layer
from tellin.loading.tensors import ModelHParams
from tellin.loading.typed_mapping import TypedMapping

DECODER_MODEL_TYPES = {
    "apertus": "apertus",
    "arcee": "arcee",
    "cohere": "command-r",
    "cohere2": "cohere2",
    "dots1": "dots1",
    "ernie4_5": "ernie4_5",
    "exaone4": "exaone4",
    "hunyuan_v1_dense": "hunyuan-dense",
    "hunyuan_v1_moe": "hunyuan-moe",
    "minimax_m2": "minimax-m2",
    "ministral3": "mistral3",
    "seed_oss": "seed_oss",
}
"""``model_type`` to architecture."""
_HUNYUAN = ("hunyuan-dense", "hunyuan-moe")
LAYER_NORM = ("cohere2", "command-r")
"""Families whose norms are LayerNorms: GGUF calls their epsilon another name."""
GLOBAL_UNROTATED = ("cohere2", "exaone4")
"""Families whose layers without a window do not rotate, if others have one."""

_SUPPORTED: Mapping[str, Mapping[str, tuple[object, ...]]] = {
    "apertus": {
        "hidden_act": ("xielu",),
        "mlp_bias": (False,),
        "post_norm": (False,),
        "qk_norm": (True,),
    },
    "arcee": {"hidden_act": ("relu2",)},
    "cohere2": {
        "order_of_interleaved_layers": ("local_attn_first",),
        "position_embedding_type": ("rope_gptj",),
        "rotary_pct": (1.0,),
        "use_gated_activation": (True,),
        "use_parallel_block": (True,),
        "use_qk_norm": (False,),
    },
    "command-r": {"use_qk_norm": (False,)},
    "dots1": {"scoring_func": ("noaux_tc", "sigmoid")},
    "hunyuan-dense": {"use_cla": (False,), "use_qk_norm": (True,)},
    "hunyuan-moe": {
        "moe_layer_num_skipped": (0,),
        "norm_topk_prob": (True,),
        "use_cla": (False,),
        "use_mixed_mlp_moe": (True,),
        "use_qk_norm": (True,),
    },
    "minimax-m2": {
        "qk_norm_type": ("per_layer",),
        "scoring_func": ("sigmoid",),
        "shared_intermediate_size": (0,),
        "use_qk_norm": (True,),
        "use_routing_bias": (True,),
    },
    "seed_oss": {
        "attention_bias": (True,),
        "attention_out_bias": (False,),
        "mlp_bias": (False,),
    },
}
"""Keys that tell variants apart, and the values whose meaning is what the plan does."""
_LENGTH = "max_position_embeddings"
_RENAMED: Mapping[str, Mapping[str, str]] = {
    "cohere2": {"layer_norm_eps": "rms_norm_eps"},
    "command-r": {"layer_norm_eps": "rms_norm_eps", "model_max_length": _LENGTH},
    "ernie4_5": {"use_bias": "attention_bias"},
    "hunyuan-dense": {"attention_head_dim": "head_dim"},
    "hunyuan-moe": {"attention_head_dim": "head_dim", "moe_topk": "num_experts_per_tok"},
}
"""Names of their own, and what other families say; Command R tells its context twice."""
_OWN_ACTIVATION = ("apertus", "arcee")
"""Families whose MLP has no gate: their plans are written out with its activation."""
_MAX_ALPHA = 1e9


def plain_config(config: TypedMapping, architecture: str) -> TypedMapping:
    """The configuration with the keys that other families use; of others as it is.

    Raises:
        UnsupportedModelError: it is of a variant that is not supported.
    """
    if architecture not in DECODER_MODEL_TYPES.values():
        return config
    for key, supported in _SUPPORTED.get(architecture, {}).items():
        if config.has(key) and config[key] not in supported:
            raise UnsupportedModelError(
                f"{config.path}: {key!r} is {config[key]!r}, which is not supported for "
                f"{architecture!r}; supported is {supported[0]!r}"
            )
    values = dict(config.items())
    for key, name in _RENAMED.get(architecture, {}).items():
        if values.get(key) is not None and (values.get(name) is None or name == _LENGTH):
            values[name] = values[key]
    if architecture in _OWN_ACTIVATION:
        values.pop("hidden_act", None)
    if architecture == "ernie4_5":
        values["mlp_bias"] = values.get("use_bias")
    elif architecture == "cohere2":
        config.get_int("sliding_window")  # without one no layer would know positions
    elif architecture == "mistral3" and not config.has("rope_scaling"):
        config.get_mapping("rope_parameters")
    elif architecture == "hunyuan-moe":
        for key in ("moe_intermediate_size", "num_experts", "num_experts_per_tok"):
            values[key] = _uniform(config, key, values.get(key))
    elif architecture == "dots1":
        values["scoring_func"] = "sigmoid"
        _refuse_windows(config)
    elif architecture == "minimax-m2" and config.has("rotary_dim"):
        part = config.get_int("rotary_dim") / max(config.get_int("head_dim"), 1)
        values.setdefault("partial_rotary_factor", part)
    elif architecture == "exaone4" and isinstance(values.get("sliding_window_pattern"), str):
        values["sliding_window_pattern"] = _lettered_pattern(config)
    return TypedMapping(config.path, values)


def _uniform(config: TypedMapping, key: str, value: Any) -> Any:
    """A number, or one per layer if all are equal."""
    if not isinstance(value, list):
        return value
    if not value or any(one != value[0] for one in value):
        raise UnsupportedModelError(
            f"{config.path}: {key!r} differs from layer to layer, which is not supported: {value}"
        )
    return value[0]


def _refuse_windows(config: TypedMapping) -> None:
    """DOTS 1's configurations have a window, and say from which layer on it counts: from none."""
    num_layers = config.get_int("num_hidden_layers")
    if config.has("layer_types"):
        has_windows = any(sliding_by_layer(config, num_layers))
    else:
        has_windows = config.has("sliding_window")
        has_windows = has_windows and config.get_int("max_window_layers") < num_layers
    if has_windows:
        window = config.get("sliding_window")
        raise UnsupportedModelError(
            f"{config.path}: 'sliding_window' is {window!r} in some layers of 'dots1' "
            "('max_window_layers', 'layer_types'), which is not supported"
        )


def _lettered_pattern(config: TypedMapping) -> int:
    """EXAONE's "LLLG": so many layers with a window, then a global one."""
    letters = config.get_str("sliding_window_pattern")
    if letters != "L" * (len(letters) - 1) + "G":
        raise UnsupportedModelError(
            f"{config.path}: 'sliding_window_pattern' is {letters!r}, which is not supported; "
            "supported are windows in all layers but every n-th, as 'LLLG'"
        )
    return len(letters)


def with_own_config(config: TypedMapping, hparams: ModelHParams) -> ModelHParams:
    """``hparams`` with what a ``config.json`` of these families has alone; of others as they are.

    ``config``: what `plain_config` made.
    """
    architecture = hparams.architecture
    if architecture in LAYER_NORM:
        hparams = replace(hparams, logit_scale=config.get_float("logit_scale"))
    if architecture in GLOBAL_UNROTATED and config.has("layer_types"):
        if not any(sliding_by_layer(config, hparams.num_hidden_layers)):
            hparams = _all_global(hparams)
        elif hparams.sliding_window is None:
            config.get_int("sliding_window")
    keys = ("rope_parameters", "rope_scaling")
    key = next(filter(config.has, keys), None)
    if key is None:
        return hparams
    rope = config.get_mapping(key)
    if architecture in _HUNYUAN and rope.has("alpha"):
        return _with_stretched_base(config, rope, hparams)
    if architecture == "mistral3":
        beta = rope.get_float("llama_4_scaling_beta", 0.0)
        return _with_temperature(hparams, beta)
    return hparams


def _all_global(hparams: ModelHParams) -> ModelHParams:
    """Where there is a window that no layer has, every layer is global."""
    return hparams if hparams.sliding_window is None else replace(hparams, sliding_window_pattern=1)


def _with_stretched_base(
    config: TypedMapping, rope: TypedMapping, hparams: ModelHParams
) -> ModelHParams:
    """A fixed ``alpha`` makes "dynamic" scaling a larger base, the same for every length.

    Source: bloc97 2023 (NTK-aware scaled RoPE): ``theta * alpha ** (d / (d - 2))``.
    """
    alpha, dims = rope.get_float("alpha"), hparams.head_dim
    kind = rope.get_str("rope_type", rope.get_str("type", "default"))
    if kind != "dynamic":
        raise UnsupportedModelError(
            f"{config.path}: rope 'alpha' is {alpha:g} with rope scaling {kind!r}, which is not "
            "supported; supported is 'dynamic'"
        )
    if not 0 < alpha <= _MAX_ALPHA or dims <= 2:
        raise ModelLoadError(
            f"{config.path}: rope 'alpha' is {alpha:g} for heads of {dims} dimensions; it must be "
            f"positive and up to {_MAX_ALPHA:g}, for heads of more than 2"
        )
    return replace(hparams, rope_theta=hparams.rope_theta * alpha ** (dims / (dims - 2)))


def _with_temperature(hparams: ModelHParams, beta: float) -> ModelHParams:
    if beta == 0:
        return hparams
    length = hparams.rope_scaling.original_max_position_embeddings
    return replace(hparams, query_temperature=(beta, length))


def with_own_metadata(metadata: TypedMapping, hparams: ModelHParams) -> ModelHParams:
    """``hparams`` with what GGUF metadata of these families has alone; of others as they are."""
    architecture = hparams.architecture
    if architecture in LAYER_NORM:
        scale = metadata.get_float(f"{architecture}.logit_scale")
        hparams = replace(hparams, logit_scale=scale)
    if architecture in GLOBAL_UNROTATED:
        return _with_global_layers(metadata, hparams)
    if architecture != "mistral3":
        return hparams
    scaling = hparams.rope_scaling
    multiplier = metadata.get_float("mistral3.rope.scaling.yarn_log_multiplier", 0.0)
    if scaling.kind == "yarn" and multiplier:
        stretch = 0.1 * math.log(max(scaling.factor, 1.0))
        factor = (stretch + 1.0) / (stretch * multiplier + 1.0)
        hparams = replace(hparams, rope_scaling=replace(scaling, attention_factor=factor))
    return _with_temperature(
        hparams, metadata.get_float("mistral3.attention.temperature_scale", 0.0)
    )


def _with_global_layers(metadata: TypedMapping, hparams: ModelHParams) -> ModelHParams:
    architecture = hparams.architecture
    if hparams.sliding_window is not None:  # then layers with a window are all that rotate
        theta = metadata.get_float(f"{architecture}.rope.freq_base_swa", hparams.rope_theta)
        hparams = replace(hparams, rope_theta=theta)
    layers = metadata.get(f"{architecture}.attention.sliding_window_pattern")
    has_none = isinstance(layers, np.ndarray) and not layers.any()
    return _all_global(hparams) if has_none else hparams
