"""Hyperparameters of encoders: BERT and RoBERTa, ModernBERT, nomic-bert and GTE.

Of either file format, but for BERT's GGUF files, which are read where the decoders' are. What a
checkpoint can say that is not run here is refused by its name and value.

Source: the configuration classes' documented fields and defaults (transformers 5.24); Warner et al.
2024 (ModernBERT), section 2; Nussbaum et al. 2024 (nomic-embed), section 3; Zhang et al. 2024
(mGTE), section 2. GGUF's keys as its reference converter writes them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from tellin.exceptions import ModelLoadError, UnsupportedModelError
from tellin.loading.hparams import checked_num_layers, sliding_by_layer
from tellin.loading.key_names import describe
from tellin.loading.tensors import ModelHParams, RopeScaling
from tellin.loading.typed_mapping import TypedMapping

ENCODER_MODEL_TYPES = {
    "gte": "gte",
    "modernbert": "modern-bert",
    "new": "gte",
    "nomic_bert": "nomic-bert",
}
"""``model_type`` to architecture; "new" is GTE's name for itself before transformers had it."""
ROTARY_ENCODERS = tuple(sorted(set(ENCODER_MODEL_TYPES.values())))
ENCODERS = ("bert", *ROTARY_ENCODERS)
GGUF_ENCODERS = ("modern-bert", "nomic-bert")

_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_fast": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swiglu": "silu",
    "swish": "silu",
}
_NOMIC_NAMES = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_layer": "num_hidden_layers",
    "max_trained_positions": "max_position_embeddings",
    "layer_norm_epsilon": "layer_norm_eps",
    "activation_function": "hidden_act",
    "rotary_emb_base": "rope_theta",
}
"""Keys of nomic's own configurations, from before transformers had the model."""
_VARIANTS: dict[str, dict[str, tuple[Any, ...]]] = {
    "nomic-bert": {
        "causal": (False,),
        "moe_every_n_layers": (0,),
        "mlp_fc1_bias": (False,),
        "mlp_fc2_bias": (False,),
        "parallel_block": (False,),
        "prenorm": (False,),
        "qkv_proj_bias": (False,),
        "rotary_emb_fraction": (1, 1.0),
        "rotary_emb_interleaved": (False,),
        "use_rms_norm": (False,),
    },
    "gte": {
        "layer_norm_type": ("layer_norm",),
        "logn_attention_clip1": (False,),
        "logn_attention_scale": (False,),
        "position_embedding_type": ("rope",),
    },
    "modern-bert": {},
}
"""Keys and the values whose meaning is what the plans do."""


def encoder_from_config(config: TypedMapping, architecture: str) -> ModelHParams:
    """Hyperparameters of a ``config.json``.

    Raises:
        UnsupportedModelError: a variant that is not supported.
        ModelLoadError: a key is missing or has an impossible value.
    """
    if architecture == "bert":
        return _bert(config)
    if architecture == "nomic-bert":
        given = {key: value for key, value in config.items() if value is not None}
        config = TypedMapping(
            config.path,
            {_NOMIC_NAMES.get(key, key): value for key, value in given.items()},
            {_NOMIC_NAMES[key]: key for key in given if key in _NOMIC_NAMES},
        )
    for key, allowed in _VARIANTS[architecture].items():
        if config.has(key) and config[key] not in allowed:
            raise UnsupportedModelError(
                f"{config.path}: {key!r} is {config[key]!r}, which is not supported for "
                f"{architecture!r}; supported is {allowed[0]!r}"
            )
    if architecture == "modern-bert":
        return _modern_bert(config)
    is_nomic = architecture == "nomic-bert"
    positions = config.get_int("max_position_embeddings", 2048 if is_nomic else 8192)
    theta = 1000.0 if is_nomic else 160_000.0
    hparams = _common(
        config,
        architecture,
        max_position_embeddings=positions,
        norm_eps=config.get_float("layer_norm_eps", 1e-12),
        hidden_act=_activation(config, "hidden_act", "silu" if is_nomic else "gelu"),
    )
    return _with_rope(config, hparams, theta)


def encoder_from_gguf(metadata: TypedMapping, architecture: str, vocab_size: int) -> ModelHParams:
    """Hyperparameters of a GGUF file, whose token embedding has ``vocab_size`` rows.

    Raises:
        UnsupportedModelError: a variant that is not supported.
        ModelLoadError: a key is missing or has an impossible value.
    """

    def key(name: str) -> str:
        return f"{architecture}.{name}"

    if metadata.get_int(key("decision.block_count"), 0):
        raise UnsupportedModelError(
            f"{metadata.path}: {key('decision.block_count')} is not 0: heads that decide are not "
            "supported"
        )
    num_layers = metadata.get_int(key("block_count"))
    num_heads = metadata.get_int(key("attention.head_count"))
    hidden_size = metadata.get_int(key("embedding_length"))
    if num_heads < 1:
        raise ModelLoadError(
            f"{metadata.path}: key {key('attention.head_count')!r} is {num_heads}, allowed are 1 "
            "and more"
        )
    is_modern = architecture == "modern-bert"
    default_act = "gelu" if is_modern else "silu"
    hparams = ModelHParams(
        architecture=architecture,
        hidden_size=hidden_size,
        intermediate_size=metadata.get_int(key("feed_forward_length")),
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads,
        head_dim=hidden_size // num_heads,
        vocab_size=vocab_size,
        max_position_embeddings=metadata.get_int(key("context_length")),
        norm_eps=metadata.get_float(key("attention.layer_norm_epsilon")),
        hidden_act=_activation(metadata, key("hidden_activation"), default_act),
        rope_theta=metadata.get_float(key("rope.freq_base"), 160_000.0 if is_modern else 1000.0),
        tie_word_embeddings=True,
        classifier_act="gelu" if is_modern else "tanh",
    )
    window = metadata.get_int(key("attention.sliding_window"), 0)
    if not is_modern or window == 0:
        return hparams
    pattern = key("attention.sliding_window_pattern")
    if isinstance(metadata.get(pattern), np.ndarray):
        num_layers = checked_num_layers(metadata.path, num_layers, metadata)
        flags = metadata.get_flags(pattern, num_layers)
        every = _global_every(metadata, [not flag for flag in flags])
    else:
        every = metadata.get_int(pattern, 3)
    return replace(
        hparams,
        sliding_window=window // 2 + 1,
        sliding_window_pattern=every,
        rope_local_theta=metadata.get_float(key("rope.freq_base_swa"), 10_000.0),
    )


def _bert(config: TypedMapping) -> ModelHParams:
    # RoBERTa leaves the rows up to the padding id unused.
    is_roberta = config.get_str("model_type") in ("roberta", "xlm-roberta")
    offset = config.get_int("pad_token_id", 1) + 1 if is_roberta else 0
    if not 0 <= offset < 1 << 24:
        raise ModelLoadError(f"{config.path}: pad_token_id is {offset - 1}")
    positions = config.get_str("position_embedding_type", "absolute")
    if positions != "absolute":
        raise UnsupportedModelError(
            f"{config.path}: {positions!r:.60} positions (position_embedding_type) are not "
            "supported"
        )
    return _common(
        config,
        "bert",
        max_position_embeddings=config.get_int("max_position_embeddings", 512) - offset,
        norm_eps=config.get_float("layer_norm_eps", 1e-12),
        hidden_act=_activation(config, "hidden_act", "gelu"),
        attention_bias=True,
        mlp_bias=True,
        position_offset=offset,
    )


def _modern_bert(config: TypedMapping) -> ModelHParams:
    hparams = _common(
        config,
        "modern-bert",
        max_position_embeddings=config.get_int("max_position_embeddings", 8192),
        norm_eps=config.get_float("norm_eps", 1e-5),
        hidden_act=_activation(config, "hidden_activation", "gelu"),
        classifier_act=_activation(config, "classifier_activation", "gelu"),
    )
    if config.has("layer_types"):
        sliding = sliding_by_layer(config, hparams.num_hidden_layers)
        every = _global_every(config, [not flag for flag in sliding])
    else:
        every = config.get_int("global_attn_every_n_layers", 3)
    theta, local_theta = 160_000.0, 10_000.0
    if config.has("rope_parameters"):
        both = config.get_mapping("rope_parameters")
        parts = {}
        for kind in ("full_attention", "sliding_attention"):
            parts[kind] = (
                both.get_mapping(kind) if both.has(kind) else TypedMapping(config.path, {})
            )
            if parts[kind].get_str("rope_type", "default") != "default":
                raise _unsupported_rope(config, parts[kind].get_str("rope_type"))
        theta = parts["full_attention"].get_float("rope_theta", theta)
        local_theta = parts["sliding_attention"].get_float("rope_theta", local_theta)
    if config.has("rope_scaling"):
        raise _unsupported_rope(config, str(config["rope_scaling"]))
    return replace(
        hparams,
        rope_theta=config.get_float("global_rope_theta", theta),
        rope_local_theta=config.get_float("local_rope_theta", local_theta),
        # A token sees half of the window on either side of it.
        sliding_window=config.get_int("local_attention", 128) // 2 + 1,
        sliding_window_pattern=every,
    )


def _common(config: TypedMapping, architecture: str, **fields: Any) -> ModelHParams:
    hidden_size, num_heads = config.get_int("hidden_size"), config.get_int("num_attention_heads")
    if num_heads < 1:
        raise ModelLoadError(
            f"{config.path}: {describe(config, 'num_attention_heads', num_heads)}, allowed are 1 "
            "and more"
        )
    return ModelHParams(
        architecture=architecture,
        hidden_size=hidden_size,
        intermediate_size=config.get_int("intermediate_size"),
        num_hidden_layers=config.get_int("num_hidden_layers"),
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads,
        head_dim=config.get_int("head_dim", hidden_size // num_heads),
        vocab_size=config.get_int("vocab_size"),
        tie_word_embeddings=True,
        **fields,
    )


def _with_rope(config: TypedMapping, hparams: ModelHParams, theta: float) -> ModelHParams:
    """With the one rotary base of all layers, and GTE's way to reach further."""
    theta = config.get_float("rope_theta", theta)
    scaling = None
    if config.has("rope_parameters"):
        scaling = config.get_mapping("rope_parameters")
        theta = scaling.get_float("rope_theta", theta)
    elif config.has("rope_scaling"):
        scaling = config.get_mapping("rope_scaling")
    elif config.has("rotary_scaling_factor"):  # applies beyond the trained positions only
        return replace(hparams, rope_theta=theta)
    kind = "default"
    if scaling is not None:
        kind = scaling.get_str("rope_type", scaling.get_str("type", "default"))
    if kind == "default":
        return replace(hparams, rope_theta=theta)
    if kind != "ntk" or scaling is None or scaling.has("mixed_b"):
        raise _unsupported_rope(config, kind)
    # GTE's: the base grows by the factor, and all frequencies shrink by its (2 / head_dim)th power.
    factor = scaling.get_float("factor")
    if not factor >= 1:
        raise ModelLoadError(
            f"{config.path}: 'factor' of the rope scaling is {factor:g}, allowed are 1 and more"
        )
    return replace(
        hparams,
        rope_theta=theta * factor,
        rope_scaling=RopeScaling(kind="linear", factor=factor ** (2 / hparams.head_dim)),
    )


def _unsupported_rope(config: TypedMapping, kind: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{config.path}: rope scaling {kind!r:.60} is not supported ('rope_type' or 'rope_scaling')"
    )


def _activation(values: TypedMapping, key: str, default: str) -> str:
    name = values.get_str(key, default)
    if name not in _ACTIVATIONS:
        raise UnsupportedModelError(
            f"{values.path}: activation {name!r:.60} is not supported ({values.name_of(key)}); "
            "supported are "
            f"{', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name]


def _global_every(values: TypedMapping, is_global: list[bool]) -> int:
    """The n of "layers 0, n, 2n ... see the whole text"; as many as there are layers: only layer 0.

    Raises:
        UnsupportedModelError: the layers follow no such pattern.
    """
    later = [layer for layer, flag in enumerate(is_global) if flag and layer > 0]
    every = later[0] if later else len(is_global)
    if is_global != [layer % every == 0 for layer in range(len(is_global))]:
        raise UnsupportedModelError(
            f"{values.path}: layers with a window do not follow a regular pattern, which is not "
            "supported"
        )
    return every
