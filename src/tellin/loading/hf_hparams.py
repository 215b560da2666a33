"""Hyperparameters from a Hugging Face ``config.json``.

Reads both generations of configurations: ``rope_theta`` and ``rope_scaling``, and the later
``rope_parameters``. What a configuration leaves out is the family's default, written down here.

Source: the configuration classes' documented fields and defaults (transformers 4.57 and 5.24).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from tellin.exceptions import ModelLoadError, UnsupportedModelError
from tellin.loading.classic_hparams import (
    CLASSIC_DEFAULTS,
    CLASSIC_MODEL_TYPES,
    CLASSICS,
    classic_config,
    with_classic_config,
)
from tellin.loading.decoder_hparams import DECODER_MODEL_TYPES, plain_config, with_own_config
from tellin.loading.encoder_hparams import (
    ENCODER_MODEL_TYPES,
    ENCODERS,
    encoder_from_config,
)
from tellin.loading.gated_delta import (
    GATED_DELTA,
    GATED_DELTA_DEFAULTS,
    linear_attention_from_config,
)
from tellin.loading.gemma3n import gemma3n_from_config
from tellin.loading.gemma4 import gemma4_from_config
from tellin.loading.hf_defaults import DEFAULTS, NESTED_LLAMA, QWEN3_VL_MOE
from tellin.loading.hparams import (
    GEMMA_FAMILY,
    GRANITE_FAMILY,
    NEIGHBOUR_PAIRS,
    NORMALIZES_EXPERTS,
    SIGMOID_EXPERTS,
    WITH_EXPERTS,
    WITH_LATENTS,
    check_hparams,
    checked_num_layers,
    embedding_scale,
    every_nth_layer,
    global_layer_pattern,
    sliding_by_layer,
    unsupported_architecture,
)
from tellin.loading.hybrid_hparams import (
    HYBRID_DEFAULTS,
    HYBRID_MODEL_TYPES,
    renamed_config,
    variant_with_experts,
    with_recurrent_config,
)
from tellin.loading.latent import DEFAULTS as LATENT_DEFAULTS
from tellin.loading.latent import MODEL_TYPES as LATENT_MODEL_TYPES
from tellin.loading.latent import latents_from_config, yarn_mscale
from tellin.loading.mrope import seeing_from_config
from tellin.loading.tensors import ModelHParams, RopeScaling
from tellin.loading.typed_mapping import TypedMapping
from tellin.loading.vision_hparams import TILED_MODELS, VISION_MODELS

_ARCHITECTURES = {
    "bert": "bert",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3": "gemma3",
    "gemma3_text": "gemma3",
    "gemma3n": "gemma3n",
    "gemma3n_text": "gemma3n",
    "gemma4": "gemma4",
    "gemma4_text": "gemma4",
    "gemma4_unified": "gemma4",
    "gemma4_unified_text": "gemma4",
    "ernie4_5_moe": "ernie4_5-moe",
    "glm4": "glm4",
    "glm4_moe": "glm4moe",
    "granite": "granite",
    "granitemoe": "granitemoe",
    "llama": "llama",
    "mistral": "mistral",
    "mimo": "qwen2",
    "mixtral": "mixtral",
    "olmo2": "olmo2",
    "olmo3": "olmo3",
    "olmoe": "olmoe",
    "phi3": "phi3",
    "qwen2": "qwen2",
    "qwen2_moe": "qwen2moe",
    "qwen3": "qwen3",
    "qwen3_5_moe_text": "qwen35moe",
    "qwen3_5_text": "qwen35",
    "qwen3_moe": "qwen3moe",
    "qwen3_next": "qwen3next",
    "roberta": "bert",
    "smollm3": "smollm3",
    "xlm-roberta": "bert",
    **DECODER_MODEL_TYPES,
    **CLASSIC_MODEL_TYPES,
    **ENCODER_MODEL_TYPES,
    **HYBRID_MODEL_TYPES,
    **dict.fromkeys(LATENT_MODEL_TYPES, "deepseek2"),
}
"""``model_type`` to architecture."""

_TEXT_PARTS: dict[str, tuple[str, float]] = {
    "lfm2_vl": ("lfm2", 1e6),
    "mistral3": ("mistral", 1e9),
    "qwen2_vl": ("qwen2", 1e6),
    "qwen2_5_vl": ("qwen2", 1e6),
    "qwen3_vl": ("qwen3", 5e5),
    "qwen3_vl_moe": ("qwen3_moe", 5e5),
    "qwen3_5": ("qwen3_5_text", 1e4),
    "qwen3_5_moe": ("qwen3_5_moe_text", 1e4),
}
"""Models that see: ``model_type`` of their text model, its ``rope_theta``."""

_ALL_DEFAULTS = DEFAULTS | CLASSIC_DEFAULTS | HYBRID_DEFAULTS | GATED_DELTA_DEFAULTS
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
_EXPERT_VARIANTS: dict[str, tuple[object, ...]] = {
    "clip_qkv": (None,),
    "n_group": (1, 0),
    "qkv_bias": (True,),
    "topk_group": (1, 0),
}
"""Keys of mixtures and the values whose meaning is what the plan does."""
_WITHOUT_WINDOW = (
    "apertus", "arcee", "bamba", "command-r", "deepseek2", "dots1", "ernie4_5", "ernie4_5-moe",
    "falcon-h1", "gemma", "glm4", "glm4moe", "hunyuan-dense", "hunyuan-moe", "lfm2", "lfm2moe",
    "llama", "mamba2", "minimax-m2", "nemotron_h", "nemotron_h_moe", "olmo2", "olmoe", "seed_oss",
    "smollm3", *GATED_DELTA, *GRANITE_FAMILY,
    *(name for name in CLASSICS if name != "starcoder2"),
)  # fmt: skip
_SLIDING_PATTERNS = {
    "cohere2": 4, "exaone4": 4, "gemma-embedding": 6, "gemma2": 2, "gemma3": 6, "olmo3": 4,
}  # fmt: skip


def hparams_from_config(config: TypedMapping) -> ModelHParams:
    """Hyperparameters of the model that a ``config.json`` describes.

    Raises:
        UnsupportedModelError: the architecture, or a variant of it, is not supported.
        ModelLoadError: a key is missing or has an impossible value.
    """
    whole = config
    config = _text_config(config)
    model_type = config.get_str("model_type", "")
    if not model_type:
        raise ModelLoadError(f"{config.path}: key 'model_type' (a string) is missing")
    if model_type == "gpt_oss":
        raise UnsupportedModelError(
            f"{config.path}: gpt-oss is read from GGUF files only; this is its safetensors folder"
        )
    architecture = _ARCHITECTURES.get(model_type)
    if architecture is None:
        known = {*_ARCHITECTURES, *_TEXT_PARTS, *VISION_MODELS}
        raise unsupported_architecture(config.path, "model_type", model_type, known)
    if architecture in ("gemma3", "gemma3n", "gemma4") and config.has("text_config"):
        config = config.get_mapping("text_config")
    if architecture == "gemma3n":
        return check_hparams(config.path, gemma3n_from_config(config), config)
    if architecture == "gemma4":
        is_unified = model_type.startswith("gemma4_unified")
        return check_hparams(config.path, gemma4_from_config(config, is_unified), config)
    architecture = variant_with_experts(config, architecture)
    if architecture == "gemma3" and config.get_bool("use_bidirectional_attention", False):
        architecture = "gemma-embedding"
    merged = {
        **_ALL_DEFAULTS.get(architecture, {}),
        **LATENT_DEFAULTS.get(model_type, {}),
        **{k: v for k, v in config.items() if v is not None},
    }
    config = renamed_config(TypedMapping(config.path, merged), architecture)
    config = plain_config(config, architecture)
    config = classic_config(config, architecture)
    if architecture in ENCODERS:
        return check_hparams(config.path, encoder_from_config(config, architecture), config)
    reader = _Reader(config, architecture)
    if architecture in WITH_LATENTS:
        hparams = latents_from_config(reader.decoder(), config)
    else:
        hparams = reader.with_experts(reader.decoder())
    hparams = with_own_config(config, with_classic_config(config, hparams))
    hparams = with_recurrent_config(config, hparams)
    hparams = linear_attention_from_config(config, hparams)
    hparams = seeing_from_config(whole, hparams)
    return check_hparams(config.path, hparams, config)


def _text_config(config: TypedMapping) -> TypedMapping:
    """The part of a configuration that describes the text model: of most all of it."""
    model_type = config.get_str("model_type", "")
    if model_type in _TEXT_PARTS:
        return _text_part(config, model_type)
    if model_type not in VISION_MODELS:
        return config
    text = config.get_mapping("text_config")
    tied = config.get_bool("tie_word_embeddings", False)
    if model_type not in TILED_MODELS:
        tied = tied or text.get_bool("tie_word_embeddings", False)
    kind = text.get_str("model_type", "llama")
    defaults = NESTED_LLAMA if kind == "llama" else {}
    given = {key: value for key, value in text.items() if value is not None}
    return TypedMapping(
        config.path,
        {**defaults, **given, "model_type": kind, "tie_word_embeddings": tied},
    )


def _text_part(config: TypedMapping, model_type: str) -> TypedMapping:
    """The text model of one that sees; old files do not nest it."""
    text = config.get_mapping("text_config") if config.has("text_config") else config
    kind, theta = _TEXT_PARTS[model_type]
    own = text.get_str("model_type", kind)
    kind = own if (model_type, own) == ("mistral3", "ministral3") else kind
    if own not in (kind, model_type, f"{model_type}_text"):
        raise UnsupportedModelError(
            f"{config.path}: {model_type!r} with a text model {own!r} is not supported"
        )
    given = {key: value for key, value in text.items() if value is not None}
    # "mrope" is no scaling: it gives a patch of a picture three positions.
    scaling = given.get("rope_scaling")
    if isinstance(scaling, Mapping) and "mrope" in (scaling.get("rope_type"), scaling.get("type")):
        del given["rope_scaling"]
    tied = text.get_bool("tie_word_embeddings", kind == "lfm2")
    tied = config.get_bool("tie_word_embeddings", tied)
    return TypedMapping(
        config.path,
        {
            "rope_theta": theta,
            **(QWEN3_VL_MOE if model_type == "qwen3_vl_moe" else {}),
            **given,
            "model_type": kind,
            "tie_word_embeddings": tied,
        },
    )


class _Reader:
    def __init__(self, config: TypedMapping, architecture: str) -> None:
        self.config = config
        self.path = config.path
        self.architecture = architecture
        self.hidden_size = config.get_int("hidden_size")
        self.num_layers = checked_num_layers(self.path, config.get_int("num_hidden_layers"), config)
        self.num_heads = config.get_int("num_attention_heads")
        if self.num_heads < 1:
            raise ModelLoadError(f"{self.path}: num_attention_heads is {self.num_heads}")
        rope = config.get_mapping("rope_parameters") if config.has("rope_parameters") else None
        if rope is not None and rope.has("full_attention"):
            self.local_rope = rope.get_mapping("sliding_attention")
            rope = rope.get_mapping("full_attention")
        else:
            self.local_rope = config
        self.rope = config if rope is None else rope
        """Where ``rope_theta`` and ``partial_rotary_factor`` are."""
        self.has_rope_parameters = rope is not None

    def decoder(self) -> ModelHParams:
        config, is_gemma = self.config, self.architecture in GEMMA_FAMILY
        is_embedder = self.architecture == "gemma-embedding"
        sees_all = not config.get_bool("is_causal", True)
        if not is_embedder and (sees_all or config.get_bool("use_bidirectional_attention", False)):
            raise UnsupportedModelError(
                f"{self.path}: {self.architecture!r} with attention in both directions "
                "('use_bidirectional_attention' or 'is_causal') is not supported"
            )
        head_dim = config.get_int("head_dim", self.hidden_size // self.num_heads)
        window = self._sliding_window()
        scaling = self._rope_scaling()
        attention_scale = None
        if config.has("query_pre_attn_scalar"):
            scalar = config.get_float("query_pre_attn_scalar")
            if scalar <= 0:
                raise ModelLoadError(
                    f"{self.path}: query_pre_attn_scalar is {scalar}, expected a positive number"
                )
            attention_scale = scalar**-0.5
        scale = embedding_scale(self.architecture, self.hidden_size)
        is_granite = self.architecture in GRANITE_FAMILY
        if is_granite:
            scale = config.get_float("embedding_multiplier", 1.0)
            attention_scale = config.get_float("attention_multiplier", 1.0)
        return ModelHParams(
            architecture=self.architecture,
            hidden_size=self.hidden_size,
            intermediate_size=config.get_int("intermediate_size"),
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            num_key_value_heads=config.get_int("num_key_value_heads", self.num_heads),
            head_dim=head_dim,
            vocab_size=config.get_int("vocab_size"),
            max_position_embeddings=self._max_position_embeddings(scaling),
            norm_eps=config.get_float("rms_norm_eps"),
            hidden_act=self._activation(),
            rope_theta=self.rope.get_float("rope_theta", config.get_float("rope_theta", 10_000.0)),
            rope_local_theta=self._rope_local_theta(),
            rope_dim=_whole(head_dim * self._rotary_part()),
            rope_interleaved=self.architecture in NEIGHBOUR_PAIRS,
            rope_scaling=scaling,
            tie_word_embeddings=config.get_bool("tie_word_embeddings", is_gemma),
            attention_bias=config.get_bool("attention_bias", False),
            mlp_bias=config.get_bool("mlp_bias", False),
            attention_scale=attention_scale,
            embedding_scale=scale,
            sliding_window=window,
            no_rope_interval=self._no_rope_interval(),
            sliding_window_pattern=self._sliding_window_pattern() if window else None,
            norm_weight_offset=1.0 if is_gemma else 0.0,
            attn_logit_softcapping=config.get_float("attn_logit_softcapping", 0.0) or None,
            final_logit_softcapping=config.get_float("final_logit_softcapping", 0.0) or None,
            residual_scale=config.get_float("residual_multiplier", 1.0) if is_granite else 1.0,
            logit_scale=self._logit_scale() if is_granite else 1.0,
        )

    def with_experts(self, hparams: ModelHParams) -> ModelHParams:
        """``hparams`` with what the configuration says of experts, if it is one of a mixture."""
        config = self.config
        if self.architecture not in WITH_EXPERTS or self._has_no_experts():
            return hparams
        is_sigmoid = self.architecture in SIGMOID_EXPERTS
        variants = _EXPERT_VARIANTS | ({} if is_sigmoid else {"routed_scaling_factor": (1, 1.0)})
        for key, supported in variants.items():
            if config.has(key) and config[key] not in supported:
                raise UnsupportedModelError(
                    f"{self.path}: {key!r} is {config[key]!r}, which is not supported for "
                    f"{self.architecture!r}; supported is {supported[0]!r}"
                )
        scoring = config.get_str("scoring_func", "softmax")
        if scoring != ("sigmoid" if is_sigmoid else "softmax"):
            raise UnsupportedModelError(
                f"{self.path}: 'scoring_func' is {scoring!r}, which is not supported for "
                f"{self.architecture!r}"
            )
        # Families spell it in their own ways, some in either of two.
        spellings = ("num_local_experts", "n_routed_experts", "moe_num_experts", "num_experts")
        return replace(
            hparams,
            num_experts=config.get_int(next(filter(config.has, spellings), spellings[0])),
            num_experts_per_tok=config.get_int("moe_k", config.get_int("num_experts_per_tok")),
            moe_intermediate_size=config.get_int(
                "moe_intermediate_size", hparams.intermediate_size
            ),
            norm_topk_prob=self.architecture in NORMALIZES_EXPERTS
            or config.get_bool("norm_topk_prob", False),
            expert_scoring=scoring,
            expert_scale=config.get_float("routed_scaling_factor", 1.0),
        )

    def _has_no_experts(self) -> bool:
        """Granite 4 has dense models, too."""
        is_hybrid = self.architecture == "granitehybrid"
        return is_hybrid and self.config.get_int("num_local_experts") == 0

    def _logit_scale(self) -> float:
        divisor = self.config.get_float("logits_scaling", 1.0)
        return 1 / divisor if divisor else math.inf

    def _activation(self, default: str = "silu") -> str:
        if self.architecture in GEMMA_FAMILY:
            # Gemma 1 configurations say "gelu" and mean the approximation by tanh.
            key, default = "hidden_activation", "gelu_pytorch_tanh"
        else:
            key = "hidden_act"
        name = self.config.get_str(key, default)
        if name not in _ACTIVATIONS:
            raise UnsupportedModelError(
                f"{self.path}: activation {name!r:.60} is not supported ({key}); "
                f"supported are {', '.join(_ACTIVATIONS)}"
            )
        return _ACTIVATIONS[name]

    def _max_position_embeddings(self, scaling: RopeScaling) -> int:
        length = self.config.get_int("max_position_embeddings")
        if scaling.kind == "yarn" and length > 0:
            # YaRN configurations keep the length of training; the scaling is what extends it.
            return max(length, _whole(scaling.original_max_position_embeddings * scaling.factor))
        return length

    def _rope_local_theta(self) -> float | None:
        if self.local_rope is not self.config:
            kind = self.local_rope.get_str("rope_type", "default")
            if kind != "default":
                raise UnsupportedModelError(
                    f"{self.path}: 'rope_type' of 'sliding_attention' is {kind!r}, which is not "
                    "supported; supported is 'default'"
                )
        if self.architecture == "olmo3":
            # Layers with a window turn as all did before the context was extended.
            theta = self.config.get_float("rope_theta", 500_000.0)
            return self.local_rope.get_float("rope_theta", theta)
        if self.architecture not in ("gemma3", "gemma-embedding"):
            return None
        if self.local_rope is not self.config:
            return self.local_rope.get_float("rope_theta", 10_000.0)
        return self.config.get_float("rope_local_base_freq", 10_000.0)

    def _rotary_part(self) -> float:
        default = self.config.get_float("partial_rotary_factor", 1.0)
        return self.rope.get_float("partial_rotary_factor", default)

    def _no_rope_interval(self) -> int | None:
        if self.architecture != "smollm3":
            return None
        if self.config.get_bool("use_sliding_window", False):
            raise UnsupportedModelError(f"{self.path}: 'use_sliding_window' is not supported")
        if not self.config.has("no_rope_layers"):
            return self.config.get_int("no_rope_layer_interval", 4)
        rotates = self.config.get_flags("no_rope_layers", self.num_layers)
        return every_nth_layer(self.path, "not rotating", [not flag for flag in rotates])

    def _rope_scaling(self) -> RopeScaling:
        if self.has_rope_parameters:
            values = self.rope
        elif self.config.has("rope_scaling"):
            values = self.config.get_mapping("rope_scaling")
        else:
            return RopeScaling()
        key = "rope_type" if values.has("rope_type") else "type"
        kind = values.get_str(key, "default")
        kind = {"default": "none", "su": "longrope", "dynamic": "none"}.get(kind, kind)
        # "dynamic" stretches only beyond max_position_embeddings, which is never exceeded here.
        if kind == "none":
            return RopeScaling()
        if kind not in ("linear", "llama3", "yarn", "longrope"):
            raise UnsupportedModelError(
                f"{self.path}: rope scaling {kind!r:.60} is not supported ({key}); "
                "supported are linear, llama3, yarn, longrope"
            )
        original = values.get_int(
            "original_max_position_embeddings",
            self.config.get_int(
                "original_max_position_embeddings",
                self.config.get_int("max_position_embeddings"),
            ),
        )
        return RopeScaling(
            kind=kind,
            factor=values.get_float("factor", 1.0 if kind == "longrope" else None),
            original_max_position_embeddings=original,
            low_freq_factor=values.get_float("low_freq_factor", 1.0),
            high_freq_factor=values.get_float("high_freq_factor", 4.0),
            attention_factor=_attention_factor(kind, values),
            beta_fast=values.get_float("beta_fast", 32.0),
            beta_slow=values.get_float("beta_slow", 1.0),
            factors=_factors(values, "short_factor") if kind == "longrope" else None,
            long_factors=_factors(values, "long_factor") if kind == "longrope" else None,
        )

    def _sliding_window(self) -> int | None:
        config = self.config
        if self.architecture in ("qwen2", "qwen2moe", "qwen3", "qwen3moe"):
            if not config.get_bool("use_sliding_window", False):
                return None
            if (
                self.architecture not in WITH_EXPERTS
                and config.get_int("max_window_layers", 0) >= self.num_layers
            ):
                return None
            raise UnsupportedModelError(f"{self.path}: 'use_sliding_window' is not supported")
        if self.architecture in _WITHOUT_WINDOW:
            return None
        window = config.get_int("sliding_window", 0) or None
        if window is not None and self.architecture == "gemma-embedding":
            return window // 2 + 1  # of either side
        return window

    def _sliding_window_pattern(self) -> int | None:
        if self.config.has("layer_types"):
            return global_layer_pattern(self.path, sliding_by_layer(self.config, self.num_layers))
        default = _SLIDING_PATTERNS.get(self.architecture, 0)
        key = (
            "sliding_window_pattern"
            if self.config.has("sliding_window_pattern")
            else ("_sliding_window_pattern")
        )
        return self.config.get_int(key, default) or None


def _whole(value: float) -> int:
    """Cut to an integer; what overflowed becomes one that no check lets through."""
    return int(value) if math.isfinite(value) else 1 << 64


def _attention_factor(kind: str, values: TypedMapping) -> float | None:
    """As given, or YaRN's of its two mscales: what multiplies the rotated part alone."""
    given = values.get_float("attention_factor", 0.0)
    mscales = [values.get_float(key, 0.0) for key in ("mscale", "mscale_all_dim")]
    if given or kind != "yarn" or not all(mscales):
        return given or None
    scale, scale_all = (yarn_mscale(values.get_float("factor"), mscale) for mscale in mscales)
    return scale / scale_all


def _factors(values: TypedMapping, key: str) -> tuple[float, ...]:
    return tuple(float(value) for value in values.get_numbers(key))
