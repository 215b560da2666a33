"""Hyperparameters of Gemma 4: layers of two kinds, that share keys and values, and layer inputs.

Its layers differ in the width of heads, the number of key/value heads and the base of rotation, and
the last ones read what an earlier layer of their kind has cached. So both formats end in one
`AttentionLayer` per layer, and nothing later needs to know the patterns behind them.

Source: configuration class of transformers 5.24; metadata keys as GGUF converters write them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from tellin.exceptions import ModelLoadError, UnsupportedModelError
from tellin.loading.hparams import MAX_SIZE, checked_num_layers, embedding_scale
from tellin.loading.tensors import AttentionLayer, ModelHParams, QuantType, RopeScaling, TensorRef
from tellin.loading.typed_mapping import TypedMapping

ARCHITECTURE = "gemma4"
_STILL = 1e30
"""Divisor of the frequency of pairs that do not turn, as GGUF files have it."""
_ACTIVATION = "gelu_pytorch_tanh"
_LAYER_KEYS = ("head_dim", "num_key_value_heads")
_SLIDING, _FULL = "sliding_attention", "full_attention"


def gemma4_from_config(config: TypedMapping, is_unified: bool = False) -> ModelHParams:
    """Hyperparameters of the text model that a ``config.json`` describes.

    ``is_unified``: of the model that takes images and sound without encoders (12B), which leaves
    out other values.

    Raises:
        UnsupportedModelError: a variant that does not run here.
        ModelLoadError: a key is missing or has an impossible value.
    """
    path = config.path
    if config.has("use_bidirectional_attention") and (
        config["use_bidirectional_attention"] != "vision"  # text then stays causal
    ):
        raise UnsupportedModelError(
            f"{path}: 'use_bidirectional_attention' is {config['use_bidirectional_attention']!r}, "
            "which is not supported for 'gemma4'; supported are null and 'vision'"
        )
    activation = config.get_str("hidden_activation", _ACTIVATION)
    if activation != _ACTIVATION:
        raise UnsupportedModelError(
            f"{path}: activation {activation!r} is not supported for 'gemma4'; "
            f"supported is {_ACTIVATION}"
        )
    num_layers = checked_num_layers(path, config.get_int("num_hidden_layers"), config)
    is_sliding = sliding_layers(config, num_layers)
    layers = _config_layers(config, is_sliding)
    hidden_size = config.get_int("hidden_size")
    scaling, theta, local_theta = _config_rope(config, layers)
    has_experts = config.get_bool("enable_moe_block", False)
    return ModelHParams(
        architecture=ARCHITECTURE,
        hidden_size=hidden_size,
        intermediate_size=config.get_int("intermediate_size"),
        num_hidden_layers=num_layers,
        num_attention_heads=config.get_int("num_attention_heads", 8),
        num_key_value_heads=config.get_int("num_key_value_heads", 4),
        head_dim=config.get_int("head_dim", 256),
        vocab_size=config.get_int("vocab_size", 262_144),
        max_position_embeddings=config.get_int(
            "max_position_embeddings", 262_144 if is_unified else 131_072
        ),
        norm_eps=config.get_float("rms_norm_eps", 1e-6),
        hidden_act="gelu_tanh",
        rope_theta=theta,
        rope_local_theta=local_theta,
        rope_scaling=scaling,
        tie_word_embeddings=config.get_bool("tie_word_embeddings", True),
        attention_bias=config.get_bool("attention_bias", False),
        attention_scale=1.0,
        embedding_scale=embedding_scale(ARCHITECTURE, hidden_size),
        sliding_window=config.get_int("sliding_window", 1024 if is_unified else 512),
        final_logit_softcapping=config.get_float("final_logit_softcapping", 0.0) or None,
        num_experts=config.get_int("num_experts") if has_experts else 0,
        num_experts_per_tok=config.get_int("top_k_experts") if has_experts else 0,
        moe_intermediate_size=config.get_int("moe_intermediate_size") if has_experts else 0,
        norm_topk_prob=True,
        attention_layers=layers,
        per_layer_input_size=_layer_input_size(config, is_unified),
    )


def gemma4_from_gguf(metadata: TypedMapping, tensors: Mapping[str, TensorRef]) -> ModelHParams:
    """Hyperparameters of the model in a GGUF file. Arguments and errors: `hparams_from_gguf`."""
    path = metadata.path

    def integer(key: str, default: int | None = None) -> int:
        return metadata.get_int(f"{ARCHITECTURE}.{key}", default)

    def number(key: str, default: float | None = None) -> float:
        return metadata.get_float(f"{ARCHITECTURE}.{key}", default)

    def per_layer(key: str) -> list[int]:
        full = f"{ARCHITECTURE}.{key}"
        if not isinstance(metadata.get(full), np.ndarray):
            return [metadata.get_int(full)] * num_layers
        values = metadata.get_integers(full, at_least=num_layers)
        return [int(value) for value in values[:num_layers]]

    num_layers = checked_num_layers(path, integer("block_count"), metadata)
    if num_layers > len(tensors):
        raise ModelLoadError(f"{path}: has {num_layers} layers, but only {len(tensors)} tensors")
    embedding = tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelLoadError(f"{path}: tensor 'token_embd.weight' is missing")
    is_sliding = metadata.get_flags(f"{ARCHITECTURE}.attention.sliding_window_pattern", num_layers)
    local_dim, global_dim = _gguf_head_dim(metadata, "_swa"), _gguf_head_dim(metadata, "")
    hidden_size = integer("embedding_length")
    num_experts = integer("expert_count", 0)
    return ModelHParams(
        architecture=ARCHITECTURE,
        hidden_size=hidden_size,
        intermediate_size=per_layer("feed_forward_length")[0],
        num_hidden_layers=num_layers,
        num_attention_heads=integer("attention.head_count"),
        num_key_value_heads=per_layer("attention.head_count_kv")[0],
        head_dim=local_dim,
        vocab_size=embedding.shape[0],
        max_position_embeddings=integer("context_length"),
        norm_eps=number("attention.layer_norm_rms_epsilon"),
        hidden_act="gelu_tanh",
        rope_theta=number("rope.freq_base", 10_000.0),
        rope_local_theta=number("rope.freq_base_swa", 10_000.0),
        rope_dim=integer("rope.dimension_count_swa", local_dim),
        rope_scaling=_gguf_rope(metadata, tensors, global_dim),
        tie_word_embeddings="output.weight" not in tensors,
        attention_scale=1.0,
        embedding_scale=embedding_scale(ARCHITECTURE, hidden_size),
        sliding_window=integer("attention.sliding_window"),
        final_logit_softcapping=number("final_logit_softcapping", 0.0) or None,
        num_experts=num_experts,
        num_experts_per_tok=integer("expert_used_count") if num_experts else 0,
        moe_intermediate_size=integer("expert_feed_forward_length") if num_experts else 0,
        norm_topk_prob=True,
        attention_layers=shared_layers(
            path,
            is_sliding,
            [local_dim if sliding else global_dim for sliding in is_sliding],
            per_layer("attention.head_count_kv"),
            [f"blk.{i}.attn_v.weight" in tensors for i in range(num_layers)],
            integer("attention.shared_kv_layers", 0),
        ),
        per_layer_input_size=integer("embedding_length_per_layer_input", 0),
    )


# ---- layers ----------------------------------------------------------------------------------


def shared_layers(
    path: Path,
    is_sliding: Sequence[bool],
    head_dims: Sequence[int],
    kv_heads: Sequence[int],
    has_values: Sequence[bool],
    num_shared: int,
) -> tuple[AttentionLayer, ...]:
    """Every layer; the last ``num_shared`` read the cache of the last one before of their kind."""
    num_layers = len(is_sliding)
    if not 0 <= num_shared <= num_layers:
        raise ModelLoadError(
            f"{path}: {num_shared} of {num_layers} layers share keys and values of others "
            "(num_kv_shared_layers, attention.shared_kv_layers)"
        )
    first_shared = num_layers - num_shared
    writers: dict[bool, int] = {}
    layers = []
    for i, sliding in enumerate(is_sliding):
        if i < first_shared:
            writers[sliding] = i
        if sliding not in writers:
            raise ModelLoadError(
                f"{path}: layer {i} shares keys and values of an earlier layer of its kind, "
                "but there is none (num_kv_shared_layers and layer_types, or "
                "attention.shared_kv_layers and attention.sliding_window_pattern)"
            )
        layers.append(
            AttentionLayer(head_dims[i], kv_heads[i], sliding, writers[sliding], has_values[i])
        )
        source = layers[writers[sliding]]
        if (source.head_dim, source.num_key_value_heads) != (head_dims[i], kv_heads[i]):
            raise ModelLoadError(
                f"{path}: layer {i} cannot share the keys and values of layer {writers[sliding]}, "
                "whose heads differ"
            )
    return tuple(layers)


def sliding_layers(config: TypedMapping, num_layers: int, interval: int = 6) -> list[bool]:
    """Which layers have a window; by default all but every sixth, or ``interval``-th."""
    if not config.has("layer_types"):
        return [(i + 1) % interval != 0 for i in range(num_layers)]
    types = list(config.get_strings("layer_types"))
    if len(types) != num_layers:
        raise ModelLoadError(
            f"{config.path}: layer_types has {len(types)} entries for {num_layers} layers"
        )
    unknown = sorted(set(types) - {_SLIDING, _FULL})
    if unknown:
        raise UnsupportedModelError(f"{config.path}: layer type {unknown[0]!r} is not supported")
    return [kind == _SLIDING for kind in types]


def _layer_input_size(config: TypedMapping, is_unified: bool) -> int:
    """Null is none, as is a model's that does not know them."""
    key = "hidden_size_per_layer_input"
    return config.get_int(key, 0 if is_unified or key in config else 256)


def _config_layers(config: TypedMapping, is_sliding: list[bool]) -> tuple[AttentionLayer, ...]:
    head_dim, kv_heads = config.get_int("head_dim", 256), config.get_int("num_key_value_heads", 4)
    keys_are_values = config.get_bool("attention_k_eq_v", False)
    full: dict[str, int] = {
        "head_dim": config.get_int("global_head_dim", 512),
        "num_key_value_heads": kv_heads,
    }
    if keys_are_values:
        full["num_key_value_heads"] = config.get_int("num_global_key_value_heads", kv_heads)
    shapes = [
        (head_dim, kv_heads) if sliding else (full["head_dim"], full["num_key_value_heads"])
        for sliding in is_sliding
    ]
    if config.has("per_layer_config"):
        overrides = config.get_mapping("per_layer_config")
        shapes = [(head_dim, kv_heads)] * len(is_sliding)
        for key in overrides:
            layer = overrides.get_mapping(key)
            unknown = sorted(set(layer) - set(_LAYER_KEYS))
            if unknown or not key.isdecimal() or int(key) >= len(shapes):
                raise UnsupportedModelError(
                    f"{config.path}: 'per_layer_config' has {unknown or ''} for layer {key}, "
                    "which is not supported"
                )
            shapes[int(key)] = (
                layer.get_int("head_dim", head_dim),
                layer.get_int("num_key_value_heads", kv_heads),
            )
    return shared_layers(
        config.path,
        is_sliding,
        [dim for dim, _ in shapes],
        [heads for _, heads in shapes],
        [sliding or not keys_are_values for sliding in is_sliding],
        config.get_int("num_kv_shared_layers", 0),
    )


# ---- rotation --------------------------------------------------------------------------------


def _config_rope(
    config: TypedMapping, layers: Sequence[AttentionLayer]
) -> tuple[RopeScaling, float, float]:
    """Scaling and base of global layers, and the base of those with a window.

    "proportional" turns the first part of the pairs of a head and leaves the others as they are.
    """
    theta, local_theta, part, divisor = 1_000_000.0, 10_000.0, 0.25, 1.0
    if config.has("rope_parameters"):
        ropes = config.get_mapping("rope_parameters")
        local, full = ropes.get_mapping(_SLIDING), ropes.get_mapping(_FULL)
        local_kind, kind = local.get_str("rope_type", "default"), full.get_str("rope_type")
        if local_kind != "default" or kind not in ("default", "proportional"):
            raise UnsupportedModelError(
                f"{config.path}: rope types {local_kind!r} and {kind!r} are not supported for "
                "'gemma4'; supported are 'default', and 'proportional' for global layers"
            )
        theta = full.get_float("rope_theta", theta)
        local_theta = local.get_float("rope_theta", local_theta)
        part, divisor = 1.0, 1.0
        if kind == "proportional":
            part = full.get_float("partial_rotary_factor", 1.0)
            divisor = full.get_float("factor", 1.0)
    if not 0 < part <= 1:
        raise ModelLoadError(f"{config.path}: partial_rotary_factor is {part}, allowed: 0 to 1")
    global_dims = {layer.head_dim for layer in layers if not layer.is_sliding}
    if len(global_dims) > 1:
        raise UnsupportedModelError(f"{config.path}: global layers with heads of unequal width")
    head_dim = next(iter(global_dims), 2)
    if head_dim > MAX_SIZE:
        raise ModelLoadError(
            f"{config.path}: global_head_dim is {head_dim}, allowed are up to {MAX_SIZE}"
        )
    turning = int(part * head_dim // 2)
    factors = (divisor,) * turning + (_STILL,) * (max(head_dim, 0) // 2 - turning)
    return RopeScaling(factors=factors), theta, local_theta


def _gguf_head_dim(metadata: TypedMapping, suffix: str) -> int:
    keys, values = (f"{ARCHITECTURE}.attention.{kind}_length{suffix}" for kind in ("key", "value"))
    head_dim = metadata.get_int(keys)
    value_dim = metadata.get_int(values, head_dim)
    if value_dim != head_dim:
        raise UnsupportedModelError(
            f"{metadata.path}: {keys} is {head_dim} and {values} {value_dim}; "
            "only equal ones are supported"
        )
    return head_dim


def _gguf_rope(
    metadata: TypedMapping, tensors: Mapping[str, TensorRef], head_dim: int
) -> RopeScaling:
    kind = metadata.get_str(f"{ARCHITECTURE}.rope.scaling.type", "none")
    rope_dim = metadata.get_int(f"{ARCHITECTURE}.rope.dimension_count", head_dim)
    if kind != "none" or rope_dim != head_dim:
        raise UnsupportedModelError(
            f"{metadata.path}: rope scaling {kind!r} of {rope_dim} dimensions is not supported for "
            "'gemma4'"
        )
    factors = tensors.get("rope_freqs.weight")
    if factors is None:
        return RopeScaling()
    if factors.quant_type is not QuantType.F32 or len(factors.shape) != 1:
        raise ModelLoadError(f"{metadata.path}: tensor 'rope_freqs.weight' is not a float32 vector")
    return RopeScaling(factors=tuple(factors.data.view(np.float32).tolist()))
