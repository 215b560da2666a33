"""Hyperparameters of Gemma 3n: shared caches and layer inputs as Gemma 4's, and several streams.

Source: configuration class of transformers 5.24; metadata keys as GGUF converters write them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import NormalDist

import numpy as np

from tellin.exceptions import ModelLoadError, UnsupportedModelError
from tellin.loading.gemma4 import shared_layers, sliding_layers
from tellin.loading.hparams import checked_num_layers, embedding_scale
from tellin.loading.tensors import ModelHParams, TensorRef
from tellin.loading.typed_mapping import TypedMapping

ARCHITECTURE = "gemma3n"
_ACTIVATION = "gelu_pytorch_tanh"
_SPARSITY = 0.95
_SPARSE_LAYERS = 10
"""Of files that do not say more."""
_ALL = -math.inf
_LAYERS_WITH_CACHE = 20


def gemma3n_from_config(config: TypedMapping) -> ModelHParams:
    """Hyperparameters of the text model that a ``config.json`` describes.

    Raises:
        UnsupportedModelError: a variant that does not run here.
        ModelLoadError: a key is missing or has an impossible value.
    """
    for key, supported in (
        ("hidden_activation", _ACTIVATION),
        ("altup_active_idx", 0),
        ("altup_correct_scale", True),
        ("rope_scaling", None),
    ):
        if config.has(key) and config[key] != supported:
            raise UnsupportedModelError(
                f"{config.path}: {key!r} is {config[key]!r}, which is not supported for 'gemma3n'; "
                f"supported is {supported!r}"
            )
    num_layers = checked_num_layers(config.path, config.get_int("num_hidden_layers", 35), config)
    is_sliding = sliding_layers(config, num_layers, 5)
    theta, local_theta = _thetas(config)
    kept = [_ALL] * num_layers
    if num_layers > _SPARSE_LAYERS:
        kept[:_SPARSE_LAYERS] = [_deviations(config, _SPARSITY)] * _SPARSE_LAYERS
    if config.has("activation_sparsity_pattern"):
        pattern = config.get_numbers("activation_sparsity_pattern").tolist()
        kept = [_deviations(config, part) for part in pattern]
    return _hparams(
        config,
        is_sliding,
        hidden_size=config.get_int("hidden_size", 2048),
        intermediate_size=_inner_size(config),
        num_attention_heads=config.get_int("num_attention_heads", 8),
        num_key_value_heads=config.get_int("num_key_value_heads", 2),
        head_dim=config.get_int("head_dim", 256),
        vocab_size=config.get_int("vocab_size", 262_400),
        max_position_embeddings=config.get_int("max_position_embeddings", 32_768),
        norm_eps=config.get_float("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_local_theta=local_theta,
        tie_word_embeddings=config.get_bool("tie_word_embeddings", True),
        sliding_window=config.get_int("sliding_window", 512),
        final_logit_softcapping=config.get_float("final_logit_softcapping", 30.0) or None,
        per_layer_input_size=config.get_int("hidden_size_per_layer_input", 256),
        num_streams=config.get_int("altup_num_inputs", 4),
        num_shared=config.get_int("num_kv_shared_layers", 15),
        kept=kept,
    )


def gemma3n_from_gguf(metadata: TypedMapping, tensors: Mapping[str, TensorRef]) -> ModelHParams:
    """Hyperparameters of the model in a GGUF file. Arguments and errors: `hparams_from_gguf`."""

    def integer(key: str, default: int | None = None) -> int:
        return metadata.get_int(f"{ARCHITECTURE}.{key}", default)

    def number(key: str, default: float | None = None) -> float:
        return metadata.get_float(f"{ARCHITECTURE}.{key}", default)

    num_layers = checked_num_layers(metadata.path, integer("block_count"), metadata)
    embedding = tensors.get("token_embd.weight")
    if embedding is None or num_layers > len(tensors):
        raise ModelLoadError(
            f"{metadata.path}: has {len(tensors)} tensors, 'token_embd.weight' among them or not, "
            f"for {num_layers} layers"
        )
    active = integer("altup.active_idx", 0)
    if active != 0:
        raise UnsupportedModelError(
            f"{metadata.path}: {ARCHITECTURE}.altup.active_idx is {active}; supported is 0"
        )
    pattern = f"{ARCHITECTURE}.attention.sliding_window_pattern"
    is_sliding = [(i + 1) % 5 != 0 for i in range(num_layers)]
    if metadata.has(pattern):
        is_sliding = metadata.get_flags(pattern, num_layers)
    inner = f"{ARCHITECTURE}.feed_forward_length"
    is_list = isinstance(metadata.get(inner), np.ndarray)
    kept = [NormalDist().inv_cdf(_SPARSITY)] * min(_SPARSE_LAYERS, num_layers)
    kept += [_ALL] * (num_layers - len(kept))
    scales = f"{ARCHITECTURE}.activation_sparsity_scale"
    if metadata.has(scales):
        kept = [float(value) for value in metadata.get_numbers(scales)]
    return _hparams(
        metadata,
        is_sliding,
        hidden_size=integer("embedding_length"),
        intermediate_size=int(metadata.get_integers(inner, at_least=1)[0])
        if is_list
        else integer("feed_forward_length"),
        num_attention_heads=integer("attention.head_count"),
        num_key_value_heads=integer("attention.head_count_kv"),
        head_dim=integer("attention.key_length"),
        vocab_size=embedding.shape[0],
        max_position_embeddings=integer("context_length"),
        norm_eps=number("attention.layer_norm_rms_epsilon"),
        rope_theta=number("rope.freq_base", 1_000_000.0),
        rope_local_theta=number("rope.freq_base_swa", 10_000.0),
        tie_word_embeddings="output.weight" not in tensors,
        sliding_window=integer("attention.sliding_window"),
        final_logit_softcapping=number("final_logit_softcapping", 30.0) or None,
        per_layer_input_size=integer("embedding_length_per_layer_input", 256),
        num_streams=integer("altup.num_inputs", 4),
        num_shared=integer("attention.shared_kv_layers", num_layers - _LAYERS_WITH_CACHE),
        kept=kept,
    )


def _hparams(
    source: TypedMapping,
    is_sliding: list[bool],
    *,
    num_shared: int,
    kept: list[float],
    **values: object,
) -> ModelHParams:
    num_layers = len(is_sliding)
    if len(kept) < num_layers or any(math.isnan(value) or value == math.inf for value in kept):
        raise ModelLoadError(
            f"{source.path}: a finite number is needed for the sparsity of each of {num_layers} "
            f"layers; there are {len(kept)} ({_sparsity_key(source)}): {kept[:8]}"
        )
    head_dim, kv_heads = values["head_dim"], values["num_key_value_heads"]
    hidden_size = values["hidden_size"]
    assert isinstance(head_dim, int)
    assert isinstance(kv_heads, int)
    assert isinstance(hidden_size, int)
    return ModelHParams(
        architecture=ARCHITECTURE,
        num_hidden_layers=num_layers,
        hidden_act="gelu_tanh",
        attention_scale=1.0,
        embedding_scale=embedding_scale(ARCHITECTURE, hidden_size),
        attention_layers=shared_layers(
            source.path,
            is_sliding,
            [head_dim] * num_layers,
            [kv_heads] * num_layers,
            [True] * num_layers,
            num_shared,
        ),
        kept_deviations=tuple(kept[:num_layers]),
        **values,  # type: ignore[arg-type]
    )


def _inner_size(config: TypedMapping) -> int:
    """Width of the MLPs, given once or for each layer; tensors have their own."""
    key = "intermediate_size"
    if not isinstance(config.get(key), list):
        return config.get_int(key, 16_384)
    return int(config.get_integers(key, at_least=1)[0])


def _sparsity_key(source: TypedMapping) -> str:
    key = "activation_sparsity_pattern"
    return key if source.has(key) else f"{ARCHITECTURE}.activation_sparsity_scale"


def _thetas(config: TypedMapping) -> tuple[float, float]:
    """Bases of global layers and of those with a window."""
    theta = config.get_float("rope_theta", 1_000_000.0)
    local_theta = config.get_float("rope_local_base_freq", 10_000.0)
    if not config.has("rope_parameters"):
        return theta, local_theta
    ropes = config.get_mapping("rope_parameters")
    local, full = (ropes.get_mapping(f"{kind}_attention") for kind in ("sliding", "full"))
    for rope in (local, full):
        if rope.get_str("rope_type", "default") != "default":
            raise UnsupportedModelError(
                f"{config.path}: rope type {rope['rope_type']!r} is not supported for 'gemma3n'"
            )
    return full.get_float("rope_theta", theta), local.get_float("rope_theta", local_theta)


def _deviations(config: TypedMapping, part: float) -> float:
    """Standard deviations above the mean that ``part`` of normally distributed values is below."""
    if not 0 <= part < 1:
        raise ModelLoadError(f"{config.path}: activation_sparsity_pattern has {part}, not in 0..1")
    return NormalDist().inv_cdf(part) if part > 0 else _ALL
