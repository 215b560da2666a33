"""What is common to all sources of hyperparameters: supported architectures and plausibility.

The two sources are `gguf_hparams` (GGUF metadata) and `hf_hparams` (Hugging Face ``config.json``).
Both end in `check_hparams`, so that no later layer meets a zero, a NaN or an absurd size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from tellin.exceptions import ModelLoadError, UnsupportedModelError
from tellin.loading.key_names import describe
from tellin.loading.tensors import ModelHParams, RopeScaling
from tellin.loading.typed_mapping import TypedMapping

SUPPORTED_ARCHITECTURES = (
    "apertus",
    "arcee",
    "bamba",
    "bert",
    "cohere2",
    "command-r",
    "deepseek2",
    "dots1",
    "ernie4_5",
    "ernie4_5-moe",
    "exaone4",
    "falcon",
    "falcon-h1",
    "gemma",
    "gemma-embedding",
    "gemma2",
    "gemma3",
    "gemma3n",
    "gemma4",
    "glm4",
    "glm4moe",
    "gpt-oss",
    "gpt2",
    "gptj",
    "gptneox",
    "granite",
    "granitehybrid",
    "granitemoe",
    "gte",
    "hunyuan-dense",
    "hunyuan-moe",
    "internlm2",
    "internlm3",
    "lfm2",
    "lfm2moe",
    "llama",
    "mamba2",
    "minimax-m2",
    "mistral",
    "mistral3",
    "mixtral",
    "modern-bert",
    "nemotron",
    "nemotron_h",
    "nemotron_h_moe",
    "nomic-bert",
    "olmo2",
    "olmo3",
    "olmoe",
    "opt",
    "phi2",
    "phi3",
    "qwen2",
    "qwen2moe",
    "qwen2vl",
    "qwen3",
    "qwen35",
    "qwen35moe",
    "qwen3moe",
    "qwen3next",
    "qwen3vl",
    "qwen3vlmoe",
    "seed_oss",
    "smollm3",
    "stablelm",
    "starcoder",
    "starcoder2",
)
"""Names as users know them; GGUF files of Mistral and Mixtral models call themselves llama."""

GEMMA_FAMILY = ("gemma", "gemma-embedding", "gemma2", "gemma3", "gemma3n", "gemma4")
GRANITE_FAMILY = ("granite", "granitehybrid", "granitemoe")
NORMS_AFTER_BLOCKS = (
    "exaone4",
    "gemma-embedding",
    "gemma2",
    "gemma3",
    "gemma3n",
    "gemma4",
    "glm4",
    "olmo2",
    "olmo3",
)
WITH_EXPERTS = (
    "deepseek2",
    "dots1",
    "ernie4_5-moe",
    "glm4moe",
    "gpt-oss",
    "granitehybrid",
    "granitemoe",
    "hunyuan-moe",
    "lfm2moe",
    "minimax-m2",
    "mixtral",
    "nemotron_h_moe",
    "olmoe",
    "qwen2moe",
    "qwen35moe",
    "qwen3moe",
    "qwen3next",
    "qwen3vlmoe",
)
"""Mixtures of experts."""
NORMALIZES_EXPERTS = (
    "ernie4_5-moe",
    "gpt-oss",
    "granitehybrid",
    "granitemoe",
    "hunyuan-moe",
    "minimax-m2",
    "mixtral",
    "qwen35moe",
)
"""Mixtures that always divide the weights of a token's experts by their sum."""
SIGMOID_EXPERTS = ("dots1", "glm4moe", "lfm2moe", "minimax-m2", "nemotron_h_moe")
"""Mixtures that score experts by the sigmoid of their logits."""
WITH_LATENTS = ("deepseek2",)
"""Families with multi-head latent attention."""
NEIGHBOUR_PAIRS = (
    "cohere2",
    "command-r",
    "deepseek2",
    "ernie4_5",
    "ernie4_5-moe",
    "glm4",
    "gptj",
)
"""Families whose checkpoints, not GGUF files alone, have rotated pairs side by side."""
MAX_EXPERTS = 1024
MAX_EXPERTS_PER_TOKEN = 32

_WITH_ALIBI = ("bloom", "mpt")
MAX_LAYERS = 4096
MAX_SIZE = 1 << 24
"""Far beyond any model, small enough that products of two sizes stay exact everywhere."""
_MAX_CONTEXT = 1 << 31
_MAX_FACTOR = 1e32
"""Far beyond any model; what is multiplied by it is still a float32."""


def unsupported_architecture(
    path: Path, key: str, name: str, supported: Iterable[str]
) -> UnsupportedModelError:
    """The error of a file that calls its architecture ``name`` under ``key``."""
    why = ": it has ALiBi positions" if name in _WITH_ALIBI else ""
    return UnsupportedModelError(
        f"{path}: architecture {name!r} ({key}) is not supported{why}; "
        f"supported are {', '.join(sorted(supported))}"
    )


def embedding_scale(architecture: str, hidden_size: int) -> float:
    """Factor of the token embedding: Gemma's ``sqrt(hidden_size)``, rounded to float32."""
    if architecture not in GEMMA_FAMILY or hidden_size < 1:
        return 1.0
    import numpy as np

    return float(np.float32(math.sqrt(hidden_size)))


def every_nth_layer(path: Path, what: str, is_chosen: list[bool]) -> int | None:
    """The n of "every n-th layer is chosen"; None if none is.

    Raises:
        UnsupportedModelError: the list is irregular.
    """
    if not any(is_chosen):
        return None
    n = is_chosen.index(True) + 1
    if is_chosen != [(layer + 1) % n == 0 for layer in range(len(is_chosen))]:
        raise UnsupportedModelError(
            f"{path}: {what} layers do not follow a regular pattern, which is not supported"
        )
    return n


def global_layer_pattern(path: Path, is_sliding: list[bool]) -> int | None:
    """The n of "every n-th layer is global" that a list of layers follows.

    Returns None if no layer is global or none is sliding.

    Raises:
        UnsupportedModelError: the list is irregular.
    """
    if not any(is_sliding):
        return None
    return every_nth_layer(path, "sliding-window", [not flag for flag in is_sliding])


def sliding_by_layer(config: TypedMapping, num_layers: int) -> list[bool]:
    """Which layers see only a window, as ``layer_types`` of a configuration says.

    Raises:
        ModelLoadError: it has too few entries.
        UnsupportedModelError: there are layers of other kinds.
    """
    kinds = list(config.get_strings("layer_types"))[:num_layers]
    if len(kinds) < num_layers:
        raise ModelLoadError(
            f"{config.path}: layer_types has {len(kinds)} entries for {num_layers} layers"
        )
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise UnsupportedModelError(
                f"{config.path}: layer_types has {kind!r}, which is not supported; supported are "
                "full_attention, sliding_attention"
            )
    return [kind == "sliding_attention" for kind in kinds]


def checked_num_layers(path: Path, num_layers: int, source: TypedMapping | None = None) -> int:
    """The number of layers, before anything is made for each of them.

    Raises:
        ModelLoadError: no model has so many, or so few.
    """
    _Check(path, source).range("num_hidden_layers", num_layers, 1, MAX_LAYERS)
    return num_layers


def check_hparams(
    path: Path, hparams: ModelHParams, source: TypedMapping | None = None
) -> ModelHParams:
    """Refuse impossible values; returns ``hparams``, normalised.

    ``source``: the values of the file that they were made of, for its names of them.

    Raises:
        ModelLoadError: a value is out of range, with its name, value and limit.
    """
    check = _Check(path, source)
    for name in (
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
    ):
        check.range(name, getattr(hparams, name), 1, MAX_SIZE)
    check.range("num_hidden_layers", hparams.num_hidden_layers, 1, MAX_LAYERS)
    check.range("max_position_embeddings", hparams.max_position_embeddings, 1, _MAX_CONTEXT)
    _check_heads(check, hparams)
    if hparams.embedding_size is not None:
        check.range("embedding_size", hparams.embedding_size, 1, MAX_SIZE)
    check.range("num_streams", hparams.num_streams, 1, 16)
    check.range("per_layer_input_size", hparams.per_layer_input_size, 0, MAX_SIZE)
    if hparams.num_experts:
        check.range("num_experts", hparams.num_experts, 1, MAX_EXPERTS)
        limit = min(hparams.num_experts, MAX_EXPERTS_PER_TOKEN)
        check.range("num_experts_per_tok", hparams.num_experts_per_tok, 1, limit)
        check.range("moe_intermediate_size", hparams.moe_intermediate_size, 1, MAX_SIZE)
        _check_expert_groups(check, hparams)
    if hparams.latent is not None:
        for name in ("rank", "nope_dim", "rope_dim", "value_dim"):
            check.range(f"latent {name}", getattr(hparams.latent, name), 1, MAX_SIZE)
    for name in (
        "norm_eps",
        "rope_theta",
        "embedding_scale",
        "expert_scale",
        "residual_scale",
        "logit_scale",
    ):
        check.positive(name, getattr(hparams, name))
    for name in (
        "rope_local_theta",
        "attention_scale",
        "attn_logit_softcapping",
        "final_logit_softcapping",
    ):
        value = getattr(hparams, name)
        if value is not None:
            check.positive(name, value)
    for name, limit in (
        ("sliding_window", _MAX_CONTEXT),
        ("sliding_window_pattern", MAX_LAYERS),
        ("no_rope_interval", MAX_LAYERS),
    ):
        value = getattr(hparams, name)
        if value is not None:
            check.range(name, value, 1, limit)
    if hparams.query_temperature is not None:
        beta, length = hparams.query_temperature
        check.positive("factor of the queries' temperature", beta)
        check.range("length of the queries' temperature", length, 1, _MAX_CONTEXT)
    if hparams.rope_dim is not None:
        check.range("rope_dim", hparams.rope_dim, 2, hparams.head_dim)
        check.require("rope_dim", hparams.rope_dim, hparams.rope_dim % 2 == 0, "an even number")
        if hparams.rope_dim == hparams.head_dim:
            hparams = replace(hparams, rope_dim=None)
    _check_rope_scaling(check, hparams.rope_scaling)
    return hparams


def _check_heads(check: _Check, hparams: ModelHParams) -> None:
    heads, kv_heads = hparams.num_attention_heads, hparams.num_key_value_heads
    if heads % kv_heads:
        raise check.error(
            f"{check.says('num_attention_heads', heads)} and "
            f"{check.says('num_key_value_heads', kv_heads)}: {heads} attention heads cannot share "
            f"{kv_heads} key/value heads evenly"
        )
    for layer in hparams.attention_layers:
        check.range("head_dim", layer.head_dim, 2, MAX_SIZE)
        kv_heads = layer.num_key_value_heads
        check.range("num_key_value_heads", kv_heads, 1, heads)
        if heads % kv_heads or layer.head_dim % 2:
            raise check.error(
                f"a layer has {heads} attention heads of {layer.head_dim} dimensions for "
                f"{kv_heads} key/value heads; {check.says('num_attention_heads', heads)}, "
                f"{check.says('num_key_value_heads', kv_heads)}, "
                f"{check.says('head_dim', layer.head_dim)}"
            )


def _check_expert_groups(check: _Check, hparams: ModelHParams) -> None:
    groups, chosen = hparams.expert_groups, hparams.expert_top_groups
    check.range("expert_groups", groups, 1, hparams.num_experts)
    check.range("expert_top_groups", chosen, 1, groups)
    size = hparams.num_experts // groups
    if size * groups != hparams.num_experts or chosen * size < hparams.num_experts_per_tok:
        raise check.error(
            f"a token cannot choose {hparams.num_experts_per_tok} of "
            f"{hparams.num_experts} experts from {chosen} of {groups} equal groups; "
            f"{check.says('expert_groups', groups)}, {check.says('expert_top_groups', chosen)}"
        )


def _check_rope_scaling(check: _Check, scaling: RopeScaling) -> None:
    check.positive("rope scaling factor", scaling.factor)
    if scaling.attention_factor is not None:
        check.positive("rope attention_factor", scaling.attention_factor)
    for factors in (scaling.factors, scaling.long_factors):
        for factor in factors or ():
            check.positive("rope frequency factor", factor)


class _Check:
    """Refuses values, in the file's words."""

    def __init__(self, path: Path, source: TypedMapping | None) -> None:
        self.path = path
        self.source = source

    def error(self, fault: str) -> ModelLoadError:
        return ModelLoadError(f"{self.path}: {fault}")

    def says(self, name: str, value: object) -> str:
        return describe(self.source, name, value)

    def require(self, name: str, value: object, is_good: bool, expected: str) -> None:
        if not is_good:
            raise self.error(f"{self.says(name, value)}, expected {expected}")

    def range(self, name: str, value: int, low: int, high: int) -> None:
        if not low <= value <= high:
            raise self.error(f"{self.says(name, value)}, allowed are {low} to {high}")

    def positive(self, name: str, value: float) -> None:
        is_good = 0 < value <= _MAX_FACTOR
        self.require(name, value, is_good, f"a positive number up to {_MAX_FACTOR:g}")
