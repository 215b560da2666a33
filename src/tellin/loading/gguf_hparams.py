"""Hyperparameters from GGUF metadata.

GGUF names a model's keys after its architecture (``llama.block_count``). What the keys leave out is
the converter's convention and is written down here: which families have their q/k rows permuted for
interleaved rotation, Gemma's layer pattern, activations.

Source: GGUF specification, "Standardized key-value pairs"; conventions of the reference converter,
checked against files made by it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from tellin.exceptions import ModelLoadError, UnsupportedModelError
from tellin.loading.classic_hparams import (
    CLASSICS,
    GGUF_ACTIVATIONS,
    WITH_RMS_NORMS,
    WITHOUT_GGUF,
    with_classic_metadata,
)
from tellin.loading.decoder_hparams import LAYER_NORM, with_own_metadata
from tellin.loading.encoder_hparams import GGUF_ENCODERS, encoder_from_gguf
from tellin.loading.gated_delta import linear_attention_from_gguf
from tellin.loading.gemma3n import gemma3n_from_gguf
from tellin.loading.gemma4 import gemma4_from_gguf
from tellin.loading.hparams import (
    GEMMA_FAMILY,
    GRANITE_FAMILY,
    NEIGHBOUR_PAIRS,
    NORMALIZES_EXPERTS,
    SIGMOID_EXPERTS,
    SUPPORTED_ARCHITECTURES,
    WITH_EXPERTS,
    WITH_LATENTS,
    check_hparams,
    embedding_scale,
    global_layer_pattern,
    unsupported_architecture,
)
from tellin.loading.hybrid_hparams import HYBRIDS, completed_metadata, with_recurrent_metadata
from tellin.loading.latent import latents_from_gguf
from tellin.loading.mrope import seeing_from_gguf
from tellin.loading.tensors import ModelHParams, QuantType, RopeScaling, TensorRef
from tellin.loading.typed_mapping import TypedMapping

_NO_GGUF = ("bamba", "gte", *WITHOUT_GGUF)
_GELU_TANH = frozenset(GEMMA_FAMILY)
_SOFTCAP_DEFAULTS = {"gemma2": (50.0, 30.0)}
_SLIDING_PATTERN_DEFAULTS = {
    "cohere2": 4,
    "exaone4": 4,
    "gemma-embedding": 6,
    "gemma2": 2,
    "gemma3": 6,
    "gpt-oss": 2,
    "olmo2": 4,
}
_INTERLEAVED = (
    *NEIGHBOUR_PAIRS,
    "arcee",
    "granite",
    "granitehybrid",
    "granitemoe",
    "internlm2",
    "llama",
    "mistral",
    "mistral3",
    "smollm3",
)
"""Families whose rotated pairs are neighbours: by nature (GLM-4), or because their converter
permutes the rows of q and k."""
_TEXT_MODELS = {"qwen2vl": "qwen2", "qwen3vl": "qwen3", "qwen3vlmoe": "qwen3moe"}
"""Of models that see pictures: the architecture of their text model."""
_EXPERT_VARIANTS = {
    "expert_gating_func": (0.0, 1.0, 2.0),  # not told, softmax, sigmoid
    "expert_group_count": (0.0, 1.0),
}
"""Keys of mixtures and the values whose meaning is what the plan does."""
_27B_LAYERS = {"gemma2": 46, "gemma3": 62}
"""The one size per family that scales q·k by hidden_size / num_heads instead of head_dim."""


def hparams_from_gguf(metadata: TypedMapping, tensors: Mapping[str, TensorRef]) -> ModelHParams:
    """Hyperparameters of the model in a GGUF file.

    Args:
        metadata: the file's metadata.
        tensors: its tensors under GGUF names (of all parts, if split).

    Raises:
        UnsupportedModelError: the architecture, or a variant of it, is not supported.
        ModelLoadError: a key is missing or has an impossible value.
    """
    architecture = metadata.get_str("general.architecture")
    known = [name for name in SUPPORTED_ARCHITECTURES if name not in _NO_GGUF]
    if architecture not in known:
        raise unsupported_architecture(metadata.path, "general.architecture", architecture, known)
    if architecture == "gemma3n":
        return check_hparams(metadata.path, gemma3n_from_gguf(metadata, tensors), metadata)
    if architecture == "gemma4":
        return check_hparams(metadata.path, gemma4_from_gguf(metadata, tensors), metadata)
    metadata = completed_metadata(metadata, architecture)
    reader = _Reader(metadata, architecture, tensors)
    if architecture in GGUF_ENCODERS:
        hparams = encoder_from_gguf(metadata, architecture, reader.vocab_size())
    elif architecture == "bert":
        hparams = reader.bert()
    else:
        hparams = reader.with_experts(reader.decoder())
    hparams = with_own_metadata(metadata, hparams)
    hparams = with_classic_metadata(metadata, hparams, tensors)
    hparams = with_recurrent_metadata(metadata, hparams)
    hparams = linear_attention_from_gguf(metadata, hparams)
    hparams = seeing_from_gguf(metadata, hparams)
    hparams = replace(hparams, architecture=_TEXT_MODELS.get(architecture, hparams.architecture))
    if architecture in WITH_LATENTS:
        hparams = latents_from_gguf(hparams, metadata)
    return check_hparams(metadata.path, hparams, metadata)


class _Reader:
    def __init__(
        self, metadata: TypedMapping, architecture: str, tensors: Mapping[str, TensorRef]
    ) -> None:
        self.metadata = metadata
        self.path = metadata.path
        self.architecture = architecture
        self.tensors = tensors
        self.hidden_size = self._int("embedding_length")
        # Layers that predict further tokens come last and are not run.
        self.num_layers = self._int("block_count") - self._int("nextn_predict_layers", 0)
        self.num_heads = self._uniform_int("attention.head_count")
        if self.num_layers > len(tensors):
            raise ModelLoadError(
                f"{self.path}: has {self.num_layers} layers, but only {len(tensors)} tensors "
                f"({architecture}.block_count is {self._int('block_count')})"
            )
        if self.num_heads < 1:
            raise ModelLoadError(
                f"{self.path}: has {self.num_heads} attention heads "
                f"({architecture}.attention.head_count)"
            )

    def decoder(self) -> ModelHParams:
        self._refuse_variants()
        head_dim = self._head_dim()
        window = self._int("attention.sliding_window", 0) or None
        if window is not None and self.architecture == "gemma-embedding":
            window = window // 2 + 1  # of either side
        is_granite = self.architecture in GRANITE_FAMILY
        scale = embedding_scale(self.architecture, self.hidden_size)
        return ModelHParams(
            architecture=self.architecture,
            hidden_size=self.hidden_size,
            # Files of some mixtures tell the width of experts only.
            intermediate_size=self._uniform_int(
                "feed_forward_length", self._int("expert_feed_forward_length", 0) or None
            ),
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self._uniform_int("attention.head_count_kv", self.num_heads),
            head_dim=head_dim,
            vocab_size=self.vocab_size(),
            max_position_embeddings=self._int("context_length"),
            norm_eps=self._norm_eps(),
            hidden_act=self._activation(),
            rope_theta=self._float("rope.freq_base", 10_000.0),
            rope_local_theta=self._rope_local_theta(window),
            rope_dim=self._int("rope.dimension_count", head_dim),
            rope_interleaved=self.architecture in _INTERLEAVED,
            rope_scaling=self._rope_scaling(),
            tie_word_embeddings="output.weight" not in self.tensors,
            attention_scale=self._attention_scale(),
            embedding_scale=self._scale("embedding_scale") if is_granite else scale,
            sliding_window=window,
            no_rope_interval=4 if self.architecture == "smollm3" else None,
            sliding_window_pattern=self._sliding_window_pattern() if window else None,
            attn_logit_softcapping=self._softcap("attn_logit_softcapping", 0),
            final_logit_softcapping=self._softcap("final_logit_softcapping", 1),
            residual_scale=self._scale("residual_scale") if is_granite else 1.0,
            logit_scale=1 / self._scale("logit_scale") if is_granite else 1.0,
        )

    def bert(self) -> ModelHParams:
        return ModelHParams(
            architecture="bert",
            hidden_size=self.hidden_size,
            intermediate_size=self._uniform_int("feed_forward_length"),
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_heads,
            head_dim=self.hidden_size // self.num_heads,
            vocab_size=self.vocab_size(),
            max_position_embeddings=self._int("context_length"),
            norm_eps=self._float("attention.layer_norm_epsilon"),
            hidden_act="gelu",
            tie_word_embeddings=True,
            attention_bias=True,
            mlp_bias=True,
        )

    def with_experts(self, hparams: ModelHParams) -> ModelHParams:
        """``hparams`` with what the file says of experts, if it has any."""
        num_experts = self._int("expert_count", 0)
        architecture = self.architecture
        if architecture == "llama" and num_experts > 0:
            architecture = "mixtral"
        if architecture not in WITH_EXPERTS:
            if num_experts > 0:
                raise UnsupportedModelError(
                    f"{self.path}: is a mixture of {num_experts} experts, which is not supported "
                    f"for {architecture!r} (expert_count); it is for llama, "
                    f"{', '.join(WITH_EXPERTS)}"
                )
            return hparams
        if architecture == "granitehybrid" and num_experts == 0:
            return hparams
        if architecture in WITH_LATENTS and num_experts == 0:
            return hparams
        has_groups = architecture in WITH_LATENTS
        for key, allowed in _EXPERT_VARIANTS.items():
            if has_groups and key == "expert_group_count":
                continue
            value = self._float(key, allowed[0])
            if value not in allowed:
                raise UnsupportedModelError(
                    f"{self.path}: {self.architecture}.{key} is {value:g}, which is not supported; "
                    f"supported are {' and '.join(f'{one:g}' for one in allowed)}"
                )
        # Qwen2-MoE and OLMoE take the weights as they are; files of the others need not say more.
        others = ("lfm2moe", "qwen3moe", "qwen3next", "qwen3vlmoe")
        normalizes = architecture in (*NORMALIZES_EXPERTS, *others)
        return replace(
            hparams,
            architecture=architecture,
            num_experts=self._int("expert_count"),
            num_experts_per_tok=self._int("expert_used_count"),
            moe_intermediate_size=self._int(
                "expert_feed_forward_length", hparams.intermediate_size
            ),
            norm_topk_prob=self._bool("expert_weights_norm", normalizes),
            expert_scoring=self._expert_scoring(),
            expert_scale=self._scale("expert_weights_scale"),
            expert_groups=self._int("expert_group_count", 1) or 1 if has_groups else 1,
            expert_top_groups=self._int("expert_group_used_count", 1) or 1 if has_groups else 1,
        )

    def _expert_scoring(self) -> str:
        has_bias = any(name.endswith("exp_probs_b.bias") for name in self.tensors)
        is_sigmoid = self.architecture in SIGMOID_EXPERTS or (
            self.architecture in WITH_LATENTS and has_bias
        )
        default = 2 if is_sigmoid else 1
        kind = self._int("expert_gating_func", 0) or default
        return "sigmoid" if kind == 2 else "softmax"

    def _scale(self, key: str) -> float:
        """A factor; files write 0 for none."""
        return self._float(key, 1.0) or 1.0

    def _norm_eps(self) -> float:
        is_classic = self.architecture in CLASSICS and self.architecture not in WITH_RMS_NORMS
        if is_classic or self.architecture in LAYER_NORM:
            return self._float("attention.layer_norm_epsilon")
        if self.architecture not in ("nemotron_h", "nemotron_h_moe"):
            return self._float("attention.layer_norm_rms_epsilon")
        # Its configurations call that of RMSNorm layer_norm_epsilon.
        eps = self._float("attention.layer_norm_epsilon", 0.0)
        return self._float("attention.layer_norm_rms_epsilon", eps or None)

    def _rope_local_theta(self, window: int | None) -> float | None:
        if self.architecture in ("gemma3", "gemma-embedding"):
            return self._float("rope.freq_base_swa", 10_000.0)
        # OLMo 3, whose files say olmo2: layers with a window turn as they were trained.
        has_windows = self.architecture == "olmo2" and window is not None
        return self._float("rope.freq_base", 10_000.0) if has_windows else None

    def _activation(self) -> str:
        if self.architecture in _GELU_TANH:
            return "gelu_tanh"
        if self.architecture in GGUF_ACTIVATIONS:
            return GGUF_ACTIVATIONS[self.architecture]
        return "swiglu_oai" if self.architecture == "gpt-oss" else "silu"

    def _refuse_variants(self) -> None:
        if self.architecture in CLASSICS or not self._bool("use_parallel_residual", False):
            return
        raise UnsupportedModelError(
            f"{self.path}: parallel residuals ({self.architecture}.use_parallel_residual) are not "
            "supported"
        )

    def _head_dim(self) -> int:
        head_dim = self._int("attention.key_length", self.hidden_size // self.num_heads)
        value_dim = self._int("attention.value_length", head_dim)
        if value_dim != head_dim and self.architecture not in WITH_LATENTS:
            raise UnsupportedModelError(
                f"{self.path}: {self.architecture}.attention.value_length is {value_dim} and "
                f"attention.key_length {head_dim}; only equal ones are supported"
            )
        return head_dim

    def vocab_size(self) -> int:
        embedding = self.tensors.get("token_embd.weight")
        if embedding is None:
            raise ModelLoadError(f"{self.path}: tensor 'token_embd.weight' is missing")
        return embedding.shape[0]

    def _attention_scale(self) -> float | None:
        if self.metadata.has(f"{self.architecture}.attention.scale"):
            scale = self._float("attention.scale")
            return scale or None
        if _27B_LAYERS.get(self.architecture) == self.num_layers:
            return 1 / math.sqrt(self.hidden_size / self.num_heads)
        return None

    def _sliding_window_pattern(self) -> int | None:
        key = f"{self.architecture}.attention.sliding_window_pattern"
        if isinstance(self.metadata.get(key), np.ndarray):
            layers = self.metadata.get_flags(key, self.num_layers)
            return global_layer_pattern(self.path, layers)
        default = _SLIDING_PATTERN_DEFAULTS.get(self.architecture, 0)
        return self.metadata.get_int(key, default) or None

    def _softcap(self, key: str, index: int) -> float | None:
        default = _SOFTCAP_DEFAULTS.get(self.architecture, (0.0, 0.0))[index]
        return self._float(key, default) or None

    def _rope_scaling(self) -> RopeScaling:
        kind = self._str("rope.scaling.type", "none")
        factor = self._float("rope.scaling.factor", self._float("rope.scale_linear", 1.0))
        if kind == "none" and self.metadata.has(f"{self.architecture}.rope.scale_linear"):
            kind = "linear"
        short = self._factors("rope_factors_short.weight")
        long = self._factors("rope_factors_long.weight")
        if short or long:
            kind = "longrope"
        elif kind not in ("none", "linear", "yarn"):
            raise UnsupportedModelError(
                f"{self.path}: rope scaling {kind!r} is not supported "
                f"({self.architecture}.rope.scaling.type); "
                "supported are none, linear, yarn, longrope"
            )
        attention_factor = self._float("rope.scaling.attn_factor", 0.0) or None
        if kind == "yarn" and attention_factor is not None:
            # ggml multiplies YaRN's own factor by this one; RopeScaling holds the product.
            attention_factor *= 0.1 * math.log(max(factor, 1.0)) + 1.0
        return RopeScaling(
            kind=kind,
            factor=factor or 1.0,
            original_max_position_embeddings=self._int("rope.scaling.original_context_length", 0),
            attention_factor=attention_factor,
            beta_fast=self._float("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=self._float("rope.scaling.yarn_beta_slow", 1.0),
            factors=short if kind == "longrope" else self._factors("rope_freqs.weight"),
            long_factors=long,
            truncate=self.architecture != "gpt-oss",
        )

    def _factors(self, name: str) -> tuple[float, ...] | None:
        """Divisors of the rotary frequencies, shipped as a small float32 tensor."""
        tensor = self.tensors.get(name)
        if tensor is None:
            return None
        if tensor.quant_type is not QuantType.F32 or len(tensor.shape) != 1:
            raise ModelLoadError(f"{self.path}: tensor {name!r} is not a float32 vector")
        return tuple(tensor.data.view(np.float32).tolist())

    def _uniform_int(self, key: str, default: int | None = None) -> int:
        """An integer, or one per layer if all are equal."""
        full = f"{self.architecture}.{key}"
        if not isinstance(self.metadata.get(full), np.ndarray):
            return self.metadata.get_int(full, default)
        values = self.metadata.get_integers(full)
        if self.architecture in HYBRIDS:
            values = values[values != 0]  # recurrent layers have no heads
        if values.size == 0 or (values != values[0]).any():
            raise UnsupportedModelError(
                f"{self.path}: {full} differs from layer to layer, which is not supported"
            )
        return int(values[0])

    def _int(self, key: str, default: int | None = None) -> int:
        return self.metadata.get_int(f"{self.architecture}.{key}", default)

    def _float(self, key: str, default: float | None = None) -> float:
        return self.metadata.get_float(f"{self.architecture}.{key}", default)

    def _bool(self, key: str, default: bool) -> bool:
        return self.metadata.get_bool(f"{self.architecture}.{key}", default)

    def _str(self, key: str, default: str) -> str:
        return self.metadata.get_str(f"{self.architecture}.{key}", default)
