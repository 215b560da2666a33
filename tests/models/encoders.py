"""Tiny encoders with random weights, as the Hugging Face folders that their makers publish.

Written without PyTorch; the script that makes the expected values opens the same folders. Windows
are so small that most tokens of the texts see a part of it only.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tests.models.classifiers import VOCAB, write_tokenizer

HIDDEN, INNER, LAYERS, HEADS = 32, 48, 3, 4
DENSE = (40, 24)
TEXTS = (
    "the moon shines over the old harbour and nobody is there to see the boats go out",
    "a trout",
)
QUERY = "which fish swims"
_SHAPE = {
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "vocab_size": len(VOCAB),
    "pad_token_id": 1,
    "bos_token_id": None,
    "eos_token_id": None,
    "cls_token_id": 0,
    "sep_token_id": 2,
    "max_position_embeddings": 512,
}
_LABEL = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
_MODERN = {
    "model_type": "modernbert",
    "local_attention": 8,
    "global_attn_every_n_layers": 2,
    "norm_eps": 1e-5,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 160_000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    },
}
_GTE = {
    "model_type": "gte",
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 20_000.0},
}
CASES: dict[str, dict[str, Any]] = {
    "gemma": {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3TextModel"],
        "use_bidirectional_attention": True,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "head_dim": 8,
        "num_key_value_heads": 2,
        "query_pre_attn_scalar": 8,
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    },
    "modernbert": _MODERN | {"architectures": ["ModernBertModel"]},
    "modernbert_scores": _MODERN
    | {
        "architectures": ["ModernBertForSequenceClassification"],
        "classifier_pooling": "mean",
        **_LABEL,
    },
    "nomic": {
        "model_type": "nomic_bert",
        "architectures": ["NomicBertModel"],
        "hidden_act": "silu",
        "layer_norm_eps": 1e-12,
        "type_vocab_size": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
    },
    "gte": _GTE | {"architectures": ["GteModel"], "type_vocab_size": 1},
    "gte_scores": _GTE
    | {"architectures": ["GteForSequenceClassification"], "type_vocab_size": 1, **_LABEL},
}
SCORERS = ("modernbert_scores", "gte_scores")
EMBEDDERS = tuple(name for name in CASES if name not in SCORERS)
POOLING = {"gemma": "mean", "modernbert": "cls", "nomic": "mean", "gte": "cls"}


def write_encoder(folder: Path, case: str, **changes: Any) -> Path:
    """The folder of a case; ``changes`` replace entries of its ``config.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    config = _SHAPE | CASES[case] | changes
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights(case), folder / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(folder, "bert" if case == "nomic" else "roberta")
    if case in POOLING:
        _write_modules(folder, case)
    return folder


def _write_modules(folder: Path, case: str) -> None:
    """What sentence-transformers adds to a model that embeds."""
    kinds = ["Transformer", "Pooling", "Normalize"]
    if case == "gemma":
        kinds[2:2] = ["Dense"] * len(DENSE)
    modules = [
        {
            "idx": i,
            "name": str(i),
            "path": "" if kind == "Transformer" else f"{i}_{kind}",
            "type": f"sentence_transformers.models.{kind}",
        }
        for i, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    pooling = {f"pooling_mode_{POOLING[case]}_{'token' if POOLING[case] == 'cls' else 'tokens'}": 1}
    pooling = dict.fromkeys(pooling, True)
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    if case == "gemma":
        for i, weight in enumerate(dense_weights(), start=2):
            place = folder / f"{i}_Dense"
            place.mkdir(exist_ok=True)
            config = {
                "in_features": weight.shape[1],
                "out_features": weight.shape[0],
                "bias": False,
                "activation_function": "torch.nn.modules.linear.Identity",
            }
            (place / "config.json").write_text(json.dumps(config))
            save_file({"linear.weight": weight}, place / "model.safetensors")


def dense_weights() -> list[np.ndarray]:
    """Of the layers behind the pooling of "gemma"."""
    random = np.random.RandomState(3)
    shapes = zip(DENSE, (HIDDEN, *DENSE), strict=False)
    return [random.standard_normal(shape).astype(np.float32) for shape in shapes]


def weights(case: str) -> dict[str, np.ndarray]:
    """Weights of a case by the names that its checkpoints have."""
    random = np.random.RandomState(11)
    arrays = {}
    for name, shape in _shapes(case).items():
        values = random.standard_normal(shape)
        if len(shape) > 1:
            values = values if "embed" in name else 2 * values / np.sqrt(shape[1])
        elif name.endswith("weight") and case != "gemma":
            values = 1 + 0.1 * values
        else:
            values = 0.1 * values
        arrays[name] = values.astype(np.float32)
    return arrays


def _shapes(case: str) -> dict[str, tuple[int, ...]]:
    family = case.removesuffix("_scores")
    return {"gemma": _gemma, "modernbert": _modern_bert, "nomic": _nomic, "gte": _gte}[family](case)


def _gemma(case: str) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (len(VOCAB), HIDDEN),
        "norm.weight": (HIDDEN,),
    }
    norms = ("input", "post_attention", "pre_feedforward", "post_feedforward")
    for i in range(LAYERS):
        layer = f"layers.{i}"
        shapes |= {f"{layer}.{norm}_layernorm.weight": (HIDDEN,) for norm in norms}
        shapes |= {f"{layer}.self_attn.{part}_norm.weight": (8,) for part in "qk"}
        for part, rows in (("q", 32), ("k", 16), ("v", 16)):
            shapes[f"{layer}.self_attn.{part}_proj.weight"] = (rows, HIDDEN)
        shapes[f"{layer}.self_attn.o_proj.weight"] = (HIDDEN, 32)
        shapes[f"{layer}.mlp.gate_proj.weight"] = (INNER, HIDDEN)
        shapes[f"{layer}.mlp.up_proj.weight"] = (INNER, HIDDEN)
        shapes[f"{layer}.mlp.down_proj.weight"] = (HIDDEN, INNER)
    return shapes


def _modern_bert(case: str) -> dict[str, tuple[int, ...]]:
    prefix = "model." if case in SCORERS else ""
    shapes: dict[str, tuple[int, ...]] = {
        f"{prefix}embeddings.tok_embeddings.weight": (len(VOCAB), HIDDEN),
        f"{prefix}embeddings.norm.weight": (HIDDEN,),
        f"{prefix}final_norm.weight": (HIDDEN,),
    }
    for i in range(LAYERS):
        layer = f"{prefix}layers.{i}"
        if i > 0:
            shapes[f"{layer}.attn_norm.weight"] = (HIDDEN,)
        shapes[f"{layer}.mlp_norm.weight"] = (HIDDEN,)
        shapes[f"{layer}.attn.Wqkv.weight"] = (3 * HIDDEN, HIDDEN)
        shapes[f"{layer}.attn.Wo.weight"] = (HIDDEN, HIDDEN)
        shapes[f"{layer}.mlp.Wi.weight"] = (2 * INNER, HIDDEN)
        shapes[f"{layer}.mlp.Wo.weight"] = (HIDDEN, INNER)
    if case in SCORERS:
        shapes |= {"head.dense.weight": (HIDDEN, HIDDEN), "head.norm.weight": (HIDDEN,)}
        shapes |= {"classifier.weight": (1, HIDDEN), "classifier.bias": (1,)}
    return shapes


def _nomic(case: str) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (len(VOCAB), HIDDEN),
        "embeddings.token_type_embeddings.weight": (2, HIDDEN),
    }
    norms = ["emb_ln"]
    for i in range(LAYERS):
        layer = f"encoder.layers.{i}"
        shapes[f"{layer}.attn.Wqkv.weight"] = (3 * HIDDEN, HIDDEN)
        shapes[f"{layer}.attn.out_proj.weight"] = (HIDDEN, HIDDEN)
        shapes[f"{layer}.mlp.fc11.weight"] = (INNER, HIDDEN)
        shapes[f"{layer}.mlp.fc12.weight"] = (INNER, HIDDEN)
        shapes[f"{layer}.mlp.fc2.weight"] = (HIDDEN, INNER)
        norms += [f"{layer}.norm1", f"{layer}.norm2"]
    return shapes | _affine(norms)


def _gte(case: str) -> dict[str, tuple[int, ...]]:
    prefix = "new." if case in SCORERS else ""
    shapes: dict[str, tuple[int, ...]] = {
        f"{prefix}embeddings.word_embeddings.weight": (len(VOCAB), HIDDEN),
        f"{prefix}embeddings.token_type_embeddings.weight": (1, HIDDEN),
    }
    norms = [f"{prefix}embeddings.LayerNorm"]
    for i in range(LAYERS):
        layer = f"{prefix}encoder.layer.{i}"
        for name, rows, columns, has_bias in (
            ("attention.qkv_proj", 3 * HIDDEN, HIDDEN, True),
            ("attention.o_proj", HIDDEN, HIDDEN, True),
            ("mlp.up_gate_proj", 2 * INNER, HIDDEN, False),
            ("mlp.down_proj", HIDDEN, INNER, True),
        ):
            shapes[f"{layer}.{name}.weight"] = (rows, columns)
            if has_bias:
                shapes[f"{layer}.{name}.bias"] = (rows,)
        norms += [f"{layer}.attn_ln", f"{layer}.mlp_ln"]
    heads = [(f"{prefix}pooler.dense", HIDDEN)]
    if case in SCORERS:
        heads.append(("classifier", 1))
    for name, rows in heads:
        shapes |= {f"{name}.weight": (rows, HIDDEN), f"{name}.bias": (rows,)}
    return shapes | _affine(norms)


def _affine(norms: list[str]) -> dict[str, tuple[int, ...]]:
    return {f"{norm}.{kind}": (HIDDEN,) for norm in norms for kind in ("weight", "bias")}
