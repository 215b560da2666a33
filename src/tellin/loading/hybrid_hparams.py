"""Hyperparameters of models whose layers are not all attention: LFM2, Granite 4.

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
from tellin.loading.tensors import MambaHParams, ModelHParams
from tellin.loading.typed_mapping import TypedMapping

HYBRIDS = ("granitehybrid", "lfm2", "lfm2moe")
HYBRID_MODEL_TYPES = {
    "granitemoehybrid": "granitehybrid",
    "lfm2": "lfm2",
    "lfm2_moe": "lfm2moe",
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
HYBRID_DEFAULTS: dict[str, dict[str, Any]] = {
    "granitehybrid": {
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 2048,
        "shared_intermediate_size": 1024,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "mamba_n_heads": 128,
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
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
}
"""What configurations call the kinds of layers: Granite's linear attention is Mamba2."""
_MAX_CONV_KERNEL = 16
_MAX_STATE_DIM = 1024


def renamed_config(config: TypedMapping, architecture: str) -> TypedMapping:
    """The configuration with the keys that other families use; not of a hybrid: as it is."""
    if architecture not in HYBRIDS:
        return config
    values = dict(config.items())
    if architecture == "granitehybrid":
        values["moe_intermediate_size"] = values.get("intermediate_size")
        values["intermediate_size"] = config.get_int("shared_intermediate_size")
        return TypedMapping(config.path, values)
    values["rms_norm_eps"] = config.get_float("norm_eps")
    values["tie_word_embeddings"] = config.get_bool(
        "tie_embedding", config.get_bool("tie_word_embeddings")
    )
    if architecture == "lfm2":
        values["intermediate_size"] = _lfm2_inner_size(config)
    return TypedMapping(config.path, values)


def _lfm2_inner_size(config: TypedMapping) -> int:
    """Width of the MLP: two thirds of what is configured, up to a multiple, or that itself."""
    size = config.get_int("block_ff_dim", config.get_int("intermediate_size"))
    if not config.get_bool("block_auto_adjust_ff_dim", True):
        return size
    multiple = config.get_int("block_multiple_of", 256)
    if not 0 < multiple <= 1 << 24 or not 0 < size <= 1 << 24:
        raise ModelLoadError(
            f"{config.path}: block_multiple_of is {multiple} and the MLP's width {size}, allowed "
            f"are 1 to {1 << 24}"
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
    if architecture not in HYBRIDS:
        return hparams
    kinds = _config_kinds(config, hparams)
    if architecture != "granitehybrid":
        _refuse(config, "conv_bias", False)
        return _checked(
            config, replace(hparams, layer_types=kinds, conv_kernel=config.get_int("conv_L_cache"))
        )
    _refuse(config, "mamba_proj_bias", False)
    positions = config.get("position_embedding_type")
    if positions not in (None, "rope", "nope"):
        raise UnsupportedModelError(f"{config.path}: {positions!r} positions are not supported")
    heads = config.get_int("mamba_n_heads")
    inner = config.get_int("mamba_expand") * hparams.hidden_size
    head_dim = config.get("mamba_d_head") or "auto"
    is_given = head_dim != "auto"
    head_dim = config.get_int("mamba_d_head") if is_given else inner // max(heads, 1)
    if heads * head_dim != inner:
        raise ModelLoadError(
            f"{config.path}: {heads} mamba heads of {head_dim} are {heads * head_dim} values; "
            f"mamba_expand makes them {inner}"
        )
    limit = (0.0, float("inf"))
    if config.has("time_step_limit"):
        low, high = _pair(config, "time_step_limit")
        limit = (low, high)
    mamba = MambaHParams(
        num_heads=heads,
        head_dim=head_dim,
        state_dim=config.get_int("mamba_d_state"),
        num_groups=config.get_int("mamba_n_groups"),
        conv_kernel=config.get_int("mamba_d_conv"),
        time_step_limit=limit,
    )
    # Without rope every layer leaves q and k unrotated.
    interval = None if positions == "rope" else 1
    return _checked(
        config, replace(hparams, layer_types=kinds, mamba=mamba, no_rope_interval=interval)
    )


def _config_kinds(config: TypedMapping, hparams: ModelHParams) -> tuple[str, ...]:
    count = hparams.num_hidden_layers
    key = next((k for k in ("layer_types", "layers_block_type") if config.has(k)), None)
    if key is not None:
        names = tuple(config.get_strings(key))
    elif hparams.architecture == "granitehybrid":
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
                f"{config.path}: layers of type {name!r} are not supported for "
                f"{hparams.architecture!r}; supported are {', '.join(known)}"
            )
    if len(names) != count:
        raise ModelLoadError(f"{config.path}: {key} has {len(names)} entries for {count} layers")
    return tuple(known[name] for name in names)


def _kinds_of(architecture: str) -> tuple[str, ...]:
    return ("full_attention", "mamba" if architecture == "granitehybrid" else "conv")


def with_recurrent_metadata(metadata: TypedMapping, hparams: ModelHParams) -> ModelHParams:
    """``hparams`` with the kinds of layers and what GGUF metadata say of recurrent ones.

    A layer without key/value heads is a recurrent one.
    """
    architecture = hparams.architecture
    if architecture not in HYBRIDS:
        return hparams
    recurrent = _kinds_of(architecture)[1]
    count = hparams.num_hidden_layers
    heads: Sequence[int] = [hparams.num_key_value_heads] * count
    key = f"{architecture}.attention.head_count_kv"
    if isinstance(metadata.get(key), np.ndarray):
        heads = metadata.get_numbers(key).tolist()
        if len(heads) != count:
            raise ModelLoadError(
                f"{metadata.path}: {key} has {len(heads)} entries for {count} layers"
            )
    kinds = tuple("full_attention" if number else recurrent for number in heads)
    if recurrent == "conv":
        kernel = metadata.get_int(f"{architecture}.shortconv.l_cache")
        return _checked(metadata, replace(hparams, layer_types=kinds, conv_kernel=kernel))
    return _checked(metadata, replace(_granite_metadata(metadata, hparams), layer_types=kinds))


def _granite_metadata(metadata: TypedMapping, hparams: ModelHParams) -> ModelHParams:
    prefix = hparams.architecture
    heads = metadata.get_int(f"{prefix}.ssm.time_step_rank")
    inner = metadata.get_int(f"{prefix}.ssm.inner_size")
    if heads < 1 or inner % heads:
        raise ModelLoadError(
            f"{metadata.path}: {prefix}.ssm.inner_size {inner} is not a multiple of its "
            f"{heads} heads"
        )
    if metadata.get_bool(f"{prefix}.rope.scaling.finetuned", True):
        raise UnsupportedModelError(
            f"{metadata.path}: {prefix} with rotated positions (rope.scaling.finetuned) is not "
            "supported"
        )
    mamba = MambaHParams(
        num_heads=heads,
        head_dim=inner // heads,
        state_dim=metadata.get_int(f"{prefix}.ssm.state_size"),
        num_groups=metadata.get_int(f"{prefix}.ssm.group_count"),
        conv_kernel=metadata.get_int(f"{prefix}.ssm.conv_kernel"),
    )
    shared = metadata.get_int(f"{prefix}.expert_shared_feed_forward_length", 0)
    return replace(
        hparams,
        mamba=mamba,
        no_rope_interval=1,
        intermediate_size=shared or hparams.intermediate_size,
    )


def _checked(source: TypedMapping, hparams: ModelHParams) -> ModelHParams:
    mamba = hparams.mamba
    kernel = hparams.conv_kernel if mamba is None else mamba.conv_kernel
    if not 2 <= kernel <= _MAX_CONV_KERNEL:
        raise ModelLoadError(
            f"{source.path}: the convolutions' kernel is {kernel}, allowed are 2 to "
            f"{_MAX_CONV_KERNEL}"
        )
    if mamba is None:
        return hparams
    for name, value, limit in (
        ("mamba heads", mamba.num_heads, 1 << 16),
        ("mamba head_dim", mamba.head_dim, _MAX_STATE_DIM),
        ("mamba state_dim", mamba.state_dim, _MAX_STATE_DIM),
        ("mamba groups", mamba.num_groups, mamba.num_heads),
    ):
        if not 1 <= value <= limit:
            raise ModelLoadError(f"{source.path}: {name} is {value}, allowed are 1 to {limit}")
    if mamba.num_heads % mamba.num_groups:
        raise ModelLoadError(
            f"{source.path}: {mamba.num_heads} mamba heads cannot share {mamba.num_groups} groups "
            "evenly"
        )
    return hparams


def _pair(config: TypedMapping, key: str) -> tuple[float, float]:
    values = config.get(key)
    if not isinstance(values, list) or len(values) != 2:
        raise ModelLoadError(f"{config.path}: key {key!r} is {values!r}, expected two numbers")
    try:
        low, high = (float(_unwrapped(value)) for value in values)
    except (TypeError, ValueError):
        raise ModelLoadError(f"{config.path}: key {key!r} is {values!r}") from None
    if not 0 <= low < high:
        raise ModelLoadError(f"{config.path}: key {key!r} is {values!r}")
    return low, high


def _unwrapped(value: Any) -> Any:
    """Infinity is no JSON; transformers writes an object for it."""
    return value.get("__float__") if isinstance(value, dict) else value


def _refuse(config: TypedMapping, key: str, supported: object) -> None:
    value = config.get(key)
    if value is not None and value != supported:
        raise UnsupportedModelError(
            f"{config.path}: {key!r} is {value!r}, which is not supported; supported is "
            f"{supported!r}"
        )
