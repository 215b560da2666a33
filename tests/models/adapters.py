"""Llama folders and LoRA adapters with random weights, written as their libraries write them.

The layout of an adapter is that of the PEFT library: ``adapter_config.json`` and
``adapter_model.safetensors`` with ``base_model.model.`` in front of the model's own names.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tellin.loading.tensors import ModelHParams
from tests.models.tiny import BASE, tensor_shapes

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SHAPE = replace(BASE, num_hidden_layers=2, max_position_embeddings=2048)

SMOLLM2 = replace(
    BASE,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=64,
    vocab_size=49_152,
)
"""SmolLM2-135M, as far as adapters are concerned."""

Arrays = dict[str, np.ndarray]
Pairs = dict[str, tuple[np.ndarray, np.ndarray]]


def base_weights(hparams: ModelHParams = SHAPE, seed: int = 0) -> Arrays:
    """Float32 weights by canonical name."""
    random = np.random.RandomState(seed)
    arrays = {}
    for name, shape in tensor_shapes(hparams).items():
        values = random.standard_normal(shape)
        if len(shape) == 1:
            values = 1 + 0.1 * values
        elif name != "embed_tokens.weight":
            values = values / np.sqrt(shape[1])
        arrays[name] = values.astype(np.float32)
    return arrays


def write_llama_folder(
    folder: Path, arrays: Mapping[str, np.ndarray], hparams: ModelHParams = SHAPE
) -> Path:
    """A Hugging Face folder without a tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hparams.hidden_size,
        "intermediate_size": hparams.intermediate_size,
        "num_hidden_layers": hparams.num_hidden_layers,
        "num_attention_heads": hparams.num_attention_heads,
        "num_key_value_heads": hparams.num_key_value_heads,
        "head_dim": hparams.head_dim,
        "vocab_size": hparams.vocab_size,
        "max_position_embeddings": hparams.max_position_embeddings,
        "rms_norm_eps": hparams.norm_eps,
        "hidden_act": "silu",
        "rope_theta": hparams.rope_theta,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {n if n == "lm_head.weight" else f"model.{n}": a for n, a in arrays.items()},
        folder / "model.safetensors",
    )
    return folder


def adapter_pairs(
    rank: int,
    seed: int,
    modules: tuple[str, ...] = MODULES,
    hparams: ModelHParams = SHAPE,
    size: float = 1.0,
) -> Pairs:
    """Random A and B by the layer's canonical name."""
    random = np.random.RandomState(seed)
    pairs = {}
    for name, shape in tensor_shapes(hparams).items():
        layer = name.removesuffix(".weight")
        if layer.endswith(modules):
            a = random.standard_normal((rank, shape[1])) / np.sqrt(shape[1])
            b = random.standard_normal((shape[0], rank)) * size / np.sqrt(rank)
            pairs[layer] = (a.astype(np.float32), b.astype(np.float32))
    return pairs


def write_adapter(folder: Path, pairs: Pairs, **config: Any) -> Path:
    """An adapter folder; ``config`` overrules or adds keys (None takes one out)."""
    folder.mkdir(parents=True, exist_ok=True)
    rank = len(next(iter(pairs.values()))[0])
    values: dict[str, Any] = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": sorted({layer.rpartition(".")[2] for layer in pairs}),
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "fan_in_fan_out": False,
        "init_lora_weights": True,
    }
    values |= config
    values = {key: value for key, value in values.items() if value is not None}
    (folder / "adapter_config.json").write_text(json.dumps(values))
    tensors = {}
    for layer, (a, b) in pairs.items():
        tensors[f"base_model.model.model.{layer}.lora_A.weight"] = a
        tensors[f"base_model.model.model.{layer}.lora_B.weight"] = b
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def merged(arrays: Arrays, pairs: Pairs, alpha: float | None = None, rs: bool = False) -> Arrays:
    """The weights ``W + scale B A``, as the library computes them; alpha defaults to 2 r."""
    result = dict(arrays)
    for layer, (a, b) in pairs.items():
        rank = len(a)
        scale = (2 * rank if alpha is None else alpha) / (math.sqrt(rank) if rs else rank)
        product = scale * (b.astype(np.float64) @ a.astype(np.float64))
        result[f"{layer}.weight"] = (arrays[f"{layer}.weight"] + product).astype(np.float32)
    return result


def smollm2_adapters() -> dict[str, Pairs]:
    """Two adapters of SmolLM2 that change its mind: one of all layers, one of q and v."""
    return {
        "all": adapter_pairs(4, 1, hparams=SMOLLM2, size=0.05),
        "qv": adapter_pairs(8, 2, ("q_proj", "v_proj"), SMOLLM2, size=0.5),
    }
