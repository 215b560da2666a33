"""Hyperparameters of the decoders from before Llama's kind: OPT, GPT-2, GPT-NeoX, Falcon and so on.

What is common to all decoders is read where theirs is; here is what these families call by other
names, leave out, or have besides, in either file format. A variant that a plan does not compute is
refused by its key and value.

Source: the configuration classes' documented fields and defaults (transformers 5.24); GGUF's keys
as its reference converter writes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tellin.exceptions import ModelLoadError, UnsupportedModelError
from tellin.loading.tensors import ModelHParams, TensorRef
from tellin.loading.typed_mapping import TypedMapping

CLASSIC_MODEL_TYPES = {
    "falcon": "falcon",
    "gpt2": "gpt2",
    "gpt_bigcode": "starcoder",
    "gpt_neox": "gptneox",
    "gptj": "gptj",
    "internlm2": "internlm2",
    "internlm3": "internlm3",
    "nemotron": "nemotron",
    "opt": "opt",
    "phi": "phi2",
    "stablelm": "stablelm",
    "starcoder2": "starcoder2",
}
"""``model_type`` to architecture."""
CLASSICS = tuple(sorted(CLASSIC_MODEL_TYPES.values()))
WITHOUT_GGUF = ("gptj", "internlm3", "opt")
"""Those that llama.cpp does not know, or calls llama."""
WITH_RMS_NORMS = ("internlm2", "internlm3")

CLASSIC_CLASSIFIERS = (
    "Falcon",
    "GPT2",
    "GPTBigCode",
    "GPTJ",
    "GPTNeoX",
    "Nemotron",
    "OPT",
    "Phi",
    "StableLm",
    "Starcoder2",
)
"""What their classes with a head for scores are called, before ``ForSequenceClassification``."""

_GPT2_NAMES = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
    "n_inner": "intermediate_size",
    "activation_function": "hidden_act",
    "layer_norm_epsilon": "norm_eps",
}
_NAMES: dict[str, dict[str, str]] = {
    "falcon": {
        "activation": "hidden_act",
        "bias": "attention_bias",
        "ffn_hidden_size": "intermediate_size",
        "layer_norm_epsilon": "norm_eps",
        "n_embed": "hidden_size",
        "n_head": "num_attention_heads",
        "n_layer": "num_hidden_layers",
    },
    "gpt2": _GPT2_NAMES,
    "gptj": _GPT2_NAMES,
    "gptneox": {
        "layer_norm_eps": "norm_eps",
        "rotary_emb_base": "rope_theta",
        "rotary_pct": "partial_rotary_factor",
    },
    "internlm2": {"bias": "attention_bias"},
    "internlm3": {"bias": "mlp_bias", "qkv_bias": "attention_bias"},
    "opt": {
        "activation_function": "hidden_act",
        "enable_bias": "attention_bias",
        "ffn_dim": "intermediate_size",
    },
    "phi2": {"layer_norm_eps": "norm_eps"},
    "stablelm": {"layer_norm_eps": "norm_eps", "use_qkv_bias": "attention_bias"},
    "starcoder": _GPT2_NAMES,
    "starcoder2": {"norm_epsilon": "norm_eps", "use_bias": "attention_bias"},
}
"""What a family's configurations call what the others call otherwise."""
_GPT2 = {
    "hidden_act": "gelu_new",
    "norm_eps": 1e-5,
    "max_position_embeddings": 1024,
    "attention_bias": True,
    "mlp_bias": True,
    "tie_word_embeddings": True,
}
CLASSIC_DEFAULTS: dict[str, dict[str, Any]] = {
    "falcon": {
        "hidden_act": "gelu",
        "attention_bias": False,
        "norm_eps": 1e-5,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    },
    "gpt2": _GPT2,
    "gptj": {
        **_GPT2,
        "max_position_embeddings": 2048,
        "attention_bias": False,
        "tie_word_embeddings": False,
    },
    "gptneox": {
        "attention_bias": True,
        "hidden_act": "gelu",
        "norm_eps": 1e-5,
        "max_position_embeddings": 2048,
        "mlp_bias": True,
        "partial_rotary_factor": 0.25,
    },
    "internlm2": {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048},
    "internlm3": {
        "head_dim": 128,
        "max_position_embeddings": 32_768,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
    },
    "nemotron": {
        "hidden_act": "relu2",
        "max_position_embeddings": 4096,
        "norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
    },
    "opt": {
        "hidden_act": "relu",
        "attention_bias": True,
        "max_position_embeddings": 2048,
        "norm_eps": 1e-5,
        "tie_word_embeddings": True,
    },
    "phi2": {
        "attention_bias": True,
        "hidden_act": "gelu_new",
        "norm_eps": 1e-5,
        "max_position_embeddings": 2048,
        "mlp_bias": True,
        "partial_rotary_factor": 0.5,
    },
    "stablelm": {
        "norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "partial_rotary_factor": 0.25,
    },
    "starcoder": {**_GPT2, "hidden_act": "gelu_pytorch_tanh"},
    "starcoder2": {
        "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 4096,
        "norm_eps": 1e-5,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "attention_bias": True,
    },
}
"""What configurations leave out, by architecture."""
_VARIANTS: dict[str, dict[str, Any]] = {
    "falcon": {"alibi": False},
    "gpt2": {"add_cross_attention": False, "scale_attn_by_inverse_layer_idx": False},
    "nemotron": {"hidden_act": "relu2"},
    "opt": {
        "_remove_final_layer_norm": False,
        "layer_norm_elementwise_affine": True,
        "learned_embeddings": True,
        "scale_embeddings": False,
    },
    "phi2": {"qk_layernorm": False},
    "stablelm": {"qk_layernorm": False},
    "starcoder": {"add_cross_attention": False},
    "starcoder2": {"mlp_type": "default", "norm_type": "layer_norm"},
}
"""Keys, and the values whose meaning is what the plans compute."""
_OPT_OFFSET = 2
"""Rows of OPT's position table before that of the first token."""


def classic_config(config: TypedMapping, architecture: str) -> TypedMapping:
    """A configuration in the words of the later families; of those it is returned as it is.

    Raises:
        UnsupportedModelError: a variant that is not supported.
    """
    if architecture not in CLASSICS:
        return config
    for key, supported in _VARIANTS.get(architecture, {}).items():
        if config.has(key) and config[key] != supported:
            raise UnsupportedModelError(
                f"{config.path}: {key!r} is {config[key]!r}, which is not supported for "
                f"{architecture!r}; supported is {supported!r}"
            )
    values = dict(config.items())
    own_names = {}
    for key, name in _NAMES.get(architecture, {}).items():
        if key in values or name not in values:
            own_names[name] = key
        if key in values:
            values[name] = values[key]
    config = TypedMapping(config.path, values, own_names)
    values.setdefault("intermediate_size", 4 * config.get_int("hidden_size"))
    if architecture not in WITH_RMS_NORMS:
        values["rms_norm_eps"] = config.get_float("norm_eps")
    if architecture in ("falcon", "opt", "starcoder2"):
        values["mlp_bias"] = values["attention_bias"]
    if architecture == "nemotron":
        values["hidden_act"] = "relu"  # whose square the plan makes
    if architecture == "internlm3":
        biases = [config.get_bool(key, False) for key in ("attention_bias", "mlp_bias")]
        if biases[0] != biases[1]:
            raise UnsupportedModelError(
                f"{config.path}: 'qkv_bias' is {biases[0]} and 'bias' {biases[1]}; only equal ones "
                "are supported"
            )
    if architecture in ("falcon", "starcoder"):
        values["num_key_value_heads"] = _kv_heads(config, architecture)
    return TypedMapping(config.path, values, own_names)


def _kv_heads(config: TypedMapping, architecture: str) -> int:
    """Falcon says how many only where its layers are of the later kind."""
    heads = config.get_int("num_attention_heads")
    if architecture == "falcon" and config.get_bool("new_decoder_architecture", False):
        return config.get_int("num_kv_heads", heads)
    return 1 if config.get_bool("multi_query", True) else heads


def with_classic_config(config: TypedMapping, hparams: ModelHParams) -> ModelHParams:
    """``hparams`` with what a configuration, as `classic_config` has left it, says besides.

    Raises:
        ModelLoadError: a value is impossible.
    """
    architecture = hparams.architecture
    if architecture == "opt":
        return replace(
            hparams,
            embedding_size=config.get_int("word_embed_proj_dim", hparams.hidden_size),
            position_offset=_OPT_OFFSET,
            has_norms_after=not config.get_bool("do_layer_norm_before", True),
        )
    if architecture in ("gpt2", "starcoder") and not config.get_bool("scale_attn_weights", True):
        return replace(hparams, attention_scale=1.0)
    if architecture == "gptj":
        return replace(hparams, rope_dim=config.get_int("rotary_dim", 64), parallel_residual=True)
    if architecture in ("gptneox", "stablelm"):
        is_parallel = config.get_bool("use_parallel_residual", architecture == "gptneox")
        return replace(hparams, parallel_residual=is_parallel)
    if architecture == "falcon":
        is_new = config.get_bool("new_decoder_architecture", False)
        is_parallel = config.get_bool("parallel_attn", True)
        if is_new and not is_parallel:
            raise ModelLoadError(
                f"{config.path}: 'parallel_attn' is False beside 'new_decoder_architecture', "
                "whose layers are parallel"
            )
        return replace(hparams, parallel_residual=is_parallel)
    return replace(hparams, parallel_residual=True) if architecture == "phi2" else hparams


# ---- GGUF ------------------------------------------------------------------------------------

GGUF_ACTIVATIONS = {
    "falcon": "gelu",
    "gpt2": "gelu_tanh",
    "gptneox": "gelu",
    "nemotron": "relu",
    "phi2": "gelu_tanh",
    "starcoder": "gelu_tanh",
    "starcoder2": "gelu_tanh",
}
"""Of the models themselves: files do not tell."""
_GGUF_WITH_BIASES = ("gpt2", "phi2", "starcoder")


def with_classic_metadata(
    metadata: TypedMapping, hparams: ModelHParams, tensors: Mapping[str, TensorRef]
) -> ModelHParams:
    """``hparams`` with what a GGUF file of these families says besides, or takes as known.

    Files of StableLM say that layers are parallel where the checkpoint said nothing: only their
    tensors tell.
    """
    architecture = hparams.architecture
    if architecture not in CLASSICS:
        return hparams
    is_parallel = architecture in ("falcon", "phi2")
    if architecture == "gptneox":
        is_parallel = metadata.get_bool("gptneox.use_parallel_residual", True)
    elif architecture == "stablelm":
        is_parallel = "blk.0.ffn_norm.weight" not in tensors
    has_biases = architecture in _GGUF_WITH_BIASES
    return replace(
        hparams,
        parallel_residual=is_parallel,
        attention_bias=has_biases,
        mlp_bias=has_biases or architecture == "gptneox",
    )
