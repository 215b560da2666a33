"""Hyperparameters of models whose layers are not all attention: LFM2, and those with Mamba2.

What is common to all decoders is read where theirs is; here is what recurrent layers add, of either
file format, and what these families' configurations call by other names.

Source: the configuration classes' documented fields and defaults (transformers 5.24); GGUF's keys
``shortconv`` and ``ssm`` as its reference converter writes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tellin.exceptions import ModelLoadError, UnsupportedModelError
from tellin.loading.hparams import MAX_LAYERS
from tellin.loading.mamba_hparams import (
    checked_kernel,
    mamba_from_config,
    mamba_from_metadata,
    refuse_unless,
)
from tellin.loading.tensors import ModelHParams
from tellin.loading.typed_mapping import TypedMapping

NEMOTRON = ("nemotron_h", "nemotron_h_moe")
WITH_MAMBA = ("bamba", "falcon-h1", "granitehybrid", "mamba2", *NEMOTRON)
HYBRIDS = (*WITH_MAMBA, "lfm2", "lfm2moe")
HYBRID_MODEL_TYPES = {
    "bamba": "bamba",
    "falcon_h1": "falcon-h1",
    "granitemoehybrid": "granitehybrid",
    "lfm2": "lfm2",
    "lfm2_moe": "lfm2moe",
    "mamba2": "mamba2",
    "nemotron_h": "nemotron_h",
}
"""``model_type`` to architecture."""
_LFM2 = {
    "norm_eps": 1e-5,
    "max_position_embeddings": 128_000,
    "num_key_value_heads": 8,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
    "conv_L_cache": 3,
}
_NEMOTRON = {
    "layer_norm_epsilon": 1e-5,
    "max_position_embeddings": 4096,
    "num_key_value_heads": 8,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "conv_kernel": 4,
    "mlp_hidden_act": "relu2",
    "mamba_hidden_act": "silu",
}
_MAMBA = {
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
HYBRID_DEFAULTS: dict[str, dict[str, Any]] = {
    "bamba": {
        **_MAMBA,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 262_144,
        "num_key_value_heads": 8,
        "partial_rotary_factor": 0.5,
    },
    "falcon-h1": {
        **_MAMBA,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        "num_key_value_heads": 8,
        "mamba_d_ssm": 1024,
    },
    "granitehybrid": {
        **_MAMBA,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 2048,
        "shared_intermediate_size": 1024,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "mamba2": {
        "layer_norm_epsilon": 1e-5,
        "num_heads": 128,
        "head_dim": 64,
        "state_size": 128,
        "n_groups": 8,
        "conv_kernel": 4,
        "expand": 2,
    },
    "nemotron_h": _NEMOTRON,
    "nemotron_h_moe": {
        **_NEMOTRON,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 7688,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
    },
    "lfm2": {**_LFM2, "intermediate_size": 12_288},
    "lfm2moe": {
        **_LFM2,
        "moe_intermediate_size": 1792,
        "num_dense_layers": 2,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
    },
}
_KINDS = {
    "attention": "full_attention",
    "full_attention": "full_attention",
    "conv": "conv",
    "mamba": "mamba",
    "linear_attention": "mamba",
    "mlp": "mlp",
    "moe": "moe",
}
"""What configurations call the kinds of layers: linear attention is Mamba2 in these."""
_PATTERN = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
"""Nemotron-H's letters for them."""
_RENAMED = {
    "attention_head_dim": "head_dim",
    "conv_kernel": "mamba_d_conv",
    "layer_norm_epsilon": "rms_norm_eps",
    "mamba_head_dim": "mamba_d_head",
    "mamba_num_heads": "mamba_n_heads",
    "n_groups": "mamba_n_groups",
    "ssm_state_size": "mamba_d_state",
}
"""Nemotron-H's keys, and what other families call them."""
_RENAMED_MAMBA2 = {
    "expand": "mamba_expand",
    "head_dim": "mamba_d_head",
    "num_heads": "mamba_n_heads",
    "state_size": "mamba_d_state",
}
_GRANITE_SPELLINGS = {
    "intermediate_size": "shared_intermediate_size",
    "moe_intermediate_size": "intermediate_size",
}
_ENDLESS = 1 << 20
"""Context length of a model that has no positions at all; GGUF's converter writes the same."""


def variant_with_experts(config: TypedMapping, architecture: str) -> str:
    """Nemotron-H's configurations call both variants alike; GGUF's name of the one at hand."""
    if architecture != "nemotron_h":
        return architecture
    return "nemotron_h_moe" if "moe" in _nemotron_kinds(config) else architecture


def _nemotron_kinds(config: TypedMapping) -> list[str]:
    if config.has("hybrid_override_pattern"):
        letters = config.get_str("hybrid_override_pattern")
        return [_PATTERN.get(letter, letter) for letter in letters]
    keys = [key for key in ("layers_block_type", "layer_types") if config.has(key)]
    return list(config.get_strings(keys[0])) if keys else []


def renamed_config(config: TypedMapping, architecture: str) -> TypedMapping:
    """The configuration with the keys that other families use; not of a hybrid: as it is."""
    if architecture not in HYBRIDS:
        return config
    values = dict(config.items())
    if architecture == "granitehybrid":
        values["moe_intermediate_size"] = values.get("intermediate_size")
        values["intermediate_size"] = config.get_int("shared_intermediate_size")
        return TypedMapping(config.path, values, _GRANITE_SPELLINGS)
    if architecture == "mamba2":
        return _mamba2_config(config)
    if architecture in NEMOTRON:
        return _nemotron_config(config)
    if architecture not in ("lfm2", "lfm2moe"):
        return config
    classes = config.get("architectures")
    classes = classes if isinstance(classes, list) else []
    if any("Bidirectional" in str(name) for name in classes):
        raise UnsupportedModelError(
            f"{config.path}: {architecture!r} with attention in both directions "
            f"({', '.join(map(str, classes))}) is not supported"
        )
    values["rms_norm_eps"] = config.get_float("norm_eps")
    values["tie_word_embeddings"] = config.get_bool(
        "tie_embedding", config.get_bool("tie_word_embeddings")
    )
    if architecture == "lfm2":
        values["intermediate_size"] = _lfm2_inner_size(config)
    return TypedMapping(config.path, values, {"rms_norm_eps": "norm_eps"})


def _renamed(config: TypedMapping, names: dict[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Values under the names of other families too, and what the file calls these."""
    values, spellings = dict(config.items()), {}
    for key, name in names.items():
        if values.get(key) is not None and values.get(name) is None:
            values[name] = values[key]
            spellings[name] = key
    return values, spellings


def _mamba2_config(config: TypedMapping) -> TypedMapping:
    values, spellings = _renamed(config, _RENAMED | _RENAMED_MAMBA2)
    # Sizes that mean nothing where there is no attention.
    values |= {
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": config.get_int("hidden_size"),
        "intermediate_size": config.get_int("hidden_size"),
        "max_position_embeddings": _ENDLESS,
    }
    unsaid = dict.fromkeys(("head_dim", "intermediate_size"), "hidden_size")
    return TypedMapping(config.path, values, spellings | unsaid)


def completed_metadata(metadata: TypedMapping, architecture: str) -> TypedMapping:
    """GGUF metadata with sizes of attention and MLP, which are 0 where there is only Mamba2."""
    if architecture != "mamba2":
        return metadata
    width = metadata.get_int("mamba2.embedding_length")
    sizes = {"mamba2.attention.head_count": 1, "mamba2.feed_forward_length": width}
    return TypedMapping(metadata.path, {**dict(metadata.items()), **sizes})


def _nemotron_config(config: TypedMapping) -> TypedMapping:
    """``time_step_min`` and its like say how biases began; what limits is ``time_step_limit``."""
    values, spellings = _renamed(config, _RENAMED)
    kinds = _nemotron_kinds(config)
    values["layer_types"] = kinds or None
    if kinds and config.get_int("num_hidden_layers", len(kinds)) != len(kinds):
        raise ModelLoadError(
            f"{config.path}: num_hidden_layers is {config['num_hidden_layers']}, but "
            f"hybrid_override_pattern (or layers_block_type) names {len(kinds)} layers"
        )
    values["num_hidden_layers"] = len(kinds) or values.get("num_hidden_layers")
    values.setdefault("head_dim", 128)
    return TypedMapping(config.path, values, spellings)


def _lfm2_inner_size(config: TypedMapping) -> int:
    """Width of the MLP: two thirds of what is configured, up to a multiple, or that itself."""
    size = config.get_int("block_ff_dim", config.get_int("intermediate_size"))
    if not config.get_bool("block_auto_adjust_ff_dim", True):
        return size
    multiple = config.get_int("block_multiple_of", 256)
    if not 0 < multiple <= 1 << 24 or not 0 < size <= 1 << 24:
        raise ModelLoadError(
            f"{config.path}: block_multiple_of is {multiple} and the MLP's width (block_ff_dim or "
            f"intermediate_size) {size}, allowed are 1 to {1 << 24}"
        )
    factor = config.get_float("block_ffn_dim_multiplier", 1.0)
    if not 0 < factor <= 1024:
        raise ModelLoadError(
            f"{config.path}: block_ffn_dim_multiplier is {factor:g}, allowed is up to 1024"
        )
    return -(-int(factor * int(2 * size / 3)) // multiple) * multiple


def with_recurrent_config(config: TypedMapping, hparams: ModelHParams) -> ModelHParams:
    """``hparams`` with the kinds of layers and what a ``config.json`` says of recurrent ones."""
    architecture = hparams.architecture
    if architecture not in HYBRIDS or not 0 < hparams.num_hidden_layers <= MAX_LAYERS:
        return hparams  # the check of all hyperparameters refuses such a number
    kinds = _config_kinds(config, hparams)
    if architecture not in WITH_MAMBA:
        refuse_unless(config, "conv_bias", False)
        kernel = config.get_int("conv_L_cache")
        return replace(hparams, layer_types=kinds, conv_kernel=checked_kernel(config, kernel))
    return mamba_from_config(config, replace(hparams, layer_types=kinds))


def _config_kinds(config: TypedMapping, hparams: ModelHParams) -> tuple[str, ...]:
    count = hparams.num_hidden_layers
    if hparams.architecture == "falcon-h1":
        return ("full_attention",) * count  # each layer has Mamba2 beside its attention
    key = next((k for k in ("layer_types", "layers_block_type") if config.has(k)), None)
    if key is not None:
        names = tuple(config.get_strings(key))
    elif hparams.architecture == "bamba":
        chosen = set(config.get_numbers("attn_layer_indices").tolist())
        names = tuple("attention" if i in chosen else "mamba" for i in range(count))
    elif hparams.architecture in ("granitehybrid", "mamba2", *NEMOTRON):
        names = ("mamba",) * count
    elif config.has("full_attn_idxs"):
        chosen = set(config.get_numbers("full_attn_idxs").tolist())
        names = tuple("full_attention" if i in chosen else "conv" for i in range(count))
    else:
        names = ("full_attention",) * count
    known = {k: v for k, v in _KINDS.items() if v in _kinds_of(hparams.architecture)}
    for name in names:
        if name not in known:
            raise UnsupportedModelError(
                f"{config.path}: layers of type {name!r:.60} are not supported for "
                f"{hparams.architecture!r} ({key}); supported are {', '.join(known)}"
            )
    if len(names) != count:
        raise ModelLoadError(f"{config.path}: {key} has {len(names)} entries for {count} layers")
    return tuple(known[name] for name in names)


def _kinds_of(architecture: str) -> tuple[str, ...]:
    if architecture in NEMOTRON:
        return ("full_attention", "mamba", "mlp", "moe")
    return ("full_attention", "mamba" if architecture in WITH_MAMBA else "conv")


def with_recurrent_metadata(metadata: TypedMapping, hparams: ModelHParams) -> ModelHParams:
    """``hparams`` with the kinds of layers and what GGUF metadata say of recurrent ones.

    A layer without key/value heads is a recurrent one.
    """
    architecture = hparams.architecture
    if architecture not in HYBRIDS:
        return hparams
    kinds = _metadata_kinds(metadata, hparams)
    if architecture in WITH_MAMBA:
        return replace(mamba_from_metadata(metadata, hparams), layer_types=kinds)
    kernel = checked_kernel(metadata, metadata.get_int(f"{architecture}.shortconv.l_cache"))
    return replace(hparams, layer_types=kinds, conv_kernel=kernel)


def _metadata_kinds(metadata: TypedMapping, hparams: ModelHParams) -> tuple[str, ...]:
    recurrent = _kinds_of(hparams.architecture)[1]
    if hparams.architecture == "mamba2":
        return (recurrent,) * hparams.num_hidden_layers
    heads = _per_layer(metadata, hparams, "attention.head_count_kv")
    kinds = ["full_attention" if number else recurrent for number in heads]
    if hparams.architecture in NEMOTRON:
        wide = "moe" if hparams.num_experts else "mlp"
        for i, width in enumerate(_per_layer(metadata, hparams, "feed_forward_length")):
            kinds[i] = wide if width else kinds[i]
    return tuple(kinds)


def _per_layer(metadata: TypedMapping, hparams: ModelHParams, key: str) -> Sequence[int]:
    """A number for each layer; one number stands for all."""
    prefix, count = hparams.architecture, hparams.num_hidden_layers
    full = f"{prefix}.{key}"
    if not isinstance(metadata.get(full), np.ndarray):
        return [metadata.get_int(full)] * count
    numbers: list[int] = metadata.get_integers(full).tolist()
    # Layers that predict further tokens come last.
    if len(numbers) != count + metadata.get_int(f"{prefix}.nextn_predict_layers", 0):
        raise ModelLoadError(
            f"{metadata.path}: {full} has {len(numbers)} entries for {count} layers"
        )
    return numbers[:count]
