"""Architectures: one short file each, named as the architecture, that records a plan.

`build_plan` finds the file, lets it record, and runs the passes. Adding an architecture means
adding a module with ``record(b: PlanBuilder) -> Plan`` and its name to `_ARCHITECTURES`.
"""

from __future__ import annotations

from importlib import import_module

from tellin.exceptions import ModelLoadError, UnsupportedModelError
from tellin.models.plan.builder import PlanBuilder
from tellin.models.plan.ir import Plan
from tellin.models.plan.passes import optimize, with_lora
from tellin.models.plan.recorder import WeightSource

_ARCHITECTURES = {
    "apertus": "apertus",
    "arcee": "arcee",
    "bamba": "granitehybrid",
    "bert": "bert",
    "cohere2": "cohere",
    "command-r": "cohere",
    "deepseek2": "deepseek2",
    "dots1": "glm4moe",
    "ernie4_5": "llama",
    "ernie4_5-moe": "ernie4_5_moe",
    "exaone4": "exaone4",
    "falcon": "gptneox",
    "falcon-h1": "falcon_h1",
    "gemma": "llama",
    "gemma-embedding": "gemma3",
    "gemma2": "gemma2",
    "gemma3": "gemma3",
    "gemma3_text": "gemma3",
    "gemma3n": "gemma3n",
    "gemma4": "gemma4",
    "glm4": "glm4",
    "glm4moe": "glm4moe",
    "gpt-oss": "gpt_oss",
    "gpt2": "gpt2",
    "gptj": "gptneox",
    "gptneox": "gptneox",
    "granite": "granite",
    "granitehybrid": "granitehybrid",
    "granitemoe": "granite",
    "gte": "nomic_bert",
    "hunyuan-dense": "hunyuan",
    "hunyuan-moe": "hunyuan",
    "internlm2": "llama",
    "internlm3": "llama",
    "lfm2": "lfm2",
    "lfm2moe": "lfm2",
    "llama": "llama",
    "mamba2": "nemotron_h",
    "minimax-m2": "olmoe",
    "mistral": "llama",
    "mistral3": "mistral3",
    "mixtral": "mixtral",
    "modern-bert": "modern_bert",
    "nemotron": "starcoder2",
    "nemotron_h": "nemotron_h",
    "nemotron_h_moe": "nemotron_h",
    "nomic-bert": "nomic_bert",
    "olmo2": "olmo2",
    "olmo3": "olmo2",
    "olmoe": "olmoe",
    "opt": "opt",
    "phi2": "gptneox",
    "phi3": "llama",
    "qwen2": "qwen2",
    "qwen2moe": "qwen2moe",
    "qwen3": "qwen3",
    "qwen35": "qwen3next",
    "qwen35moe": "qwen3next",
    "qwen3moe": "qwen3moe",
    "qwen3next": "qwen3next",
    "seed_oss": "qwen2",
    "smollm3": "smollm3",
    "stablelm": "stablelm",
    "starcoder": "gpt2",
    "starcoder2": "starcoder2",
}
"""Architecture name (GGUF ``general.architecture``, Hugging Face ``model_type``) to module name."""


def supported_architectures() -> tuple[str, ...]:
    """Names that `build_plan` accepts, sorted."""
    return tuple(sorted(_ARCHITECTURES))


def build_plan(
    source: WeightSource,
    *,
    max_model_len: int | None = None,
    fuse: bool = True,
    pooling: bool = False,
    max_lora_rank: int | None = None,
    all_hidden: bool = False,
) -> Plan:
    """Record the plan of a model.

    Args:
        source: hyperparameters and tensors, see `tellin.loading.open_model`.
        max_model_len: longest context the engine will run; None = the model's own limit.
        fuse: run the fusion passes. Without them the plan shows the architecture as recorded, one
            buffer per value; it computes the same values.
        pooling: end with the hidden states; what makes logits of them is left out.
        max_lora_rank: let LoRA adapters of at most this rank change linear layers; None = none.
        all_hidden: hidden states of all tokens are wanted beside the logits (`build_predictor`).

    Raises:
        UnsupportedModelError: no such architecture, or a variant of it that is not supported.
        ModelLoadError: a tensor is missing or has the wrong shape.
    """
    architecture = source.hparams.architecture
    module_name = _ARCHITECTURES.get(architecture)
    if module_name is None:
        raise UnsupportedModelError(
            f"{source.path}: architecture {architecture!r} is not supported; "
            f"supported are {', '.join(supported_architectures())}"
        )
    try:
        plan: Plan = import_module(f"tellin.models.{module_name}").record(
            PlanBuilder(source, max_model_len, pooling, all_hidden)
        )
    except ModelLoadError as error:  # of hyperparameters alone: it does not know the file
        if str(source.path) in str(error):
            raise
        raise ModelLoadError(f"{source.path}: {error}") from None
    if max_lora_rank is not None:
        plan = with_lora(plan, max_lora_rank)
    return optimize(plan) if fuse else plan


def build_predictor(
    source: WeightSource, *, max_model_len: int | None = None, fuse: bool = True
) -> Plan:
    """Record the plan of a model's layer that predicts one token more (`tellin.models.predictor`).

    Args:
        source: of that layer, see `tellin.loading.open_predictor`.
        max_model_len, fuse: as for `build_plan`.

    Raises:
        UnsupportedModelError: layers of this architecture do not run.
        ModelLoadError: a tensor is missing or has the wrong shape.
    """
    from tellin.models import predictor

    plan = predictor.record(PlanBuilder(source, max_model_len))
    return optimize(plan) if fuse else plan
