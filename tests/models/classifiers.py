"""Tiny classifiers and cross-encoders with random weights, as Hugging Face folders.

Written without PyTorch; the script that makes the expected values opens the same folders.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

HIDDEN, INNER, LAYERS, HEADS = 32, 48, 2, 4
LETTERS = "abcdefghijklmnopqrstuvwxyz"
SPECIALS = ("[CLS]", "[PAD]", "[SEP]", "[UNK]")
"""Padding has the id 1, as in RoBERTa."""
VOCAB = {
    token: i for i, token in enumerate([*SPECIALS, *LETTERS, *(f"##{one}" for one in LETTERS)])
}
TEMPLATES = {
    "bert": ("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1"),
    "roberta": ("[CLS] $A [SEP]", "[CLS] $A [SEP] [SEP] $B [SEP]"),
}
QUERY = "which fish swims"
DOCUMENTS = (
    "a trout swims up the river",
    "bread",
    "the moon shines over the old harbour and nobody is there to see the boats go out",
)
CASES: dict[str, dict[str, Any]] = {
    "bert": {"model_type": "bert", "name": "Bert", "labels": ["relevant"]},
    "bert_identity": {
        "model_type": "bert",
        "name": "Bert",
        "labels": ["relevant"],
        "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"},
    },
    "bert_classes": {"model_type": "bert", "name": "Bert", "labels": ["bad", "fair", "good"]},
    "roberta": {"model_type": "roberta", "name": "Roberta", "labels": ["no", "yes"]},
    "xlmr": {"model_type": "xlm-roberta", "name": "XLMRoberta", "labels": ["LABEL_0"]},
    "qwen2": {"model_type": "qwen2", "name": "Qwen2", "labels": ["LABEL_0"]},
    "qwen3": {"model_type": "qwen3", "name": "Qwen3", "labels": ["a", "b", "c"]},
    "llama": {"model_type": "llama", "name": "Llama", "labels": ["a", "b"]},
}
DECODERS = ("qwen2", "qwen3", "llama")


def write_classifier(folder: Path, case: str, **config: Any) -> Path:
    """The folder of a case; ``config`` replaces entries of its ``config.json``, None drops one."""
    folder.mkdir(parents=True, exist_ok=True)
    facts = CASES[case]
    values = _config(case) | config
    values = {key: value for key, value in values.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(values))
    save_file(weights(case), folder / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(folder, facts["model_type"])
    return folder


def write_tokenizer(folder: Path, model_type: str) -> None:
    """The tokenizer's files, with the special tokens of a family."""
    _tokenizer(model_type).save(str(folder / "tokenizer.json"))
    special = {"cls": "[CLS]", "pad": "[PAD]", "sep": "[SEP]", "unk": "[UNK]"}
    names = {f"{name}_token": token for name, token in special.items()}
    tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))


def _config(case: str) -> dict[str, Any]:
    facts = CASES[case]
    labels = facts["labels"]
    values: dict[str, Any] = {
        "architectures": [f"{facts['name']}ForSequenceClassification"],
        "model_type": facts["model_type"],
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "vocab_size": len(VOCAB),
        "max_position_embeddings": 130,
        "pad_token_id": 1,
        "id2label": {str(i): label for i, label in enumerate(labels)},
        "label2id": {label: i for i, label in enumerate(labels)},
    }
    if case in DECODERS:
        values |= {"num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-6}
    else:
        values |= {
            "hidden_act": "gelu",
            "layer_norm_eps": 1e-5,
            "type_vocab_size": 2 if facts["model_type"] == "bert" else 1,
        }
    if "sentence_transformers" in facts:
        values["sentence_transformers"] = facts["sentence_transformers"]
    return values


def weights(case: str) -> dict[str, np.ndarray]:
    """Weights of a case by their Hugging Face names."""
    random = np.random.RandomState(7)
    arrays = {}
    for name, shape in _shapes(case).items():
        values = random.standard_normal(shape)
        is_norm = "LayerNorm.weight" in name or name.endswith(("norm.weight",))
        if is_norm:
            values = 1 + 0.1 * values
        elif len(shape) == 1:
            values = 0.1 * values
        elif "embed" not in name:
            values = 2 * values / np.sqrt(shape[1])
        arrays[name] = values.astype(np.float32)
    return arrays


def _shapes(case: str) -> dict[str, tuple[int, ...]]:
    facts, num_labels = CASES[case], len(CASES[case]["labels"])
    if case in DECODERS:
        return _decoder_shapes(case) | {"score.weight": (num_labels, HIDDEN)}
    prefix = "bert" if facts["model_type"] == "bert" else "roberta"
    shapes = {f"{prefix}.{name}": shape for name, shape in _encoder_shapes(case).items()}
    dense = "bert.pooler.dense" if prefix == "bert" else "classifier.dense"
    out = "classifier" if prefix == "bert" else "classifier.out_proj"
    for name, rows in ((dense, HIDDEN), (out, num_labels)):
        shapes |= {f"{name}.weight": (rows, HIDDEN), f"{name}.bias": (rows,)}
    return shapes


def _encoder_shapes(case: str) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (len(VOCAB), HIDDEN),
        "embeddings.position_embeddings.weight": (130, HIDDEN),
        "embeddings.token_type_embeddings.weight": (
            2 if CASES[case]["model_type"] == "bert" else 1,
            HIDDEN,
        ),
    }
    norms = ["embeddings.LayerNorm"]
    for i in range(LAYERS):
        layer = f"encoder.layer.{i}"
        linears = {f"attention.self.{part}": (HIDDEN, HIDDEN) for part in ("query", "key", "value")}
        linears |= {"attention.output.dense": (HIDDEN, HIDDEN)}
        linears |= {"intermediate.dense": (INNER, HIDDEN), "output.dense": (HIDDEN, INNER)}
        for name, shape in linears.items():
            shapes[f"{layer}.{name}.weight"] = shape
            shapes[f"{layer}.{name}.bias"] = shape[:1]
        norms += [f"{layer}.attention.output.LayerNorm", f"{layer}.output.LayerNorm"]
    for norm in norms:
        shapes |= {f"{norm}.weight": (HIDDEN,), f"{norm}.bias": (HIDDEN,)}
    return shapes


def _decoder_shapes(case: str) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (len(VOCAB), HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{layer}.{norm}.weight"] = (HIDDEN,)
        for part, rows in (("q", 32), ("k", 16), ("v", 16)):
            shapes[f"{layer}.self_attn.{part}_proj.weight"] = (rows, HIDDEN)
            if case == "qwen2":
                shapes[f"{layer}.self_attn.{part}_proj.bias"] = (rows,)
        if case == "qwen3":
            shapes[f"{layer}.self_attn.q_norm.weight"] = (8,)
            shapes[f"{layer}.self_attn.k_norm.weight"] = (8,)
        shapes[f"{layer}.self_attn.o_proj.weight"] = (HIDDEN, 32)
        shapes[f"{layer}.mlp.gate_proj.weight"] = (INNER, HIDDEN)
        shapes[f"{layer}.mlp.up_proj.weight"] = (INNER, HIDDEN)
        shapes[f"{layer}.mlp.down_proj.weight"] = (HIDDEN, INNER)
    return shapes


def _tokenizer(model_type: str) -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(VOCAB, unk_token="[UNK]"))
    tokenizer.add_special_tokens(list(SPECIALS))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    templates = TEMPLATES.get(model_type.removeprefix("xlm-"))
    if templates is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=templates[0],
            pair=templates[1],
            special_tokens=[(token, VOCAB[token]) for token in ("[CLS]", "[SEP]")],
        )
    return tokenizer
