"""Tiny classic decoders with random weights, as the Hugging Face folders that their makers publish.

Written without PyTorch; the script that makes the expected values opens the same folders. Prompts
are longer than the window, and rotated parts smaller than a head.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

HIDDEN, INNER, LAYERS, HEADS, VOCAB, POSITIONS = 32, 48, 2, 4, 64, 40
HEAD = HIDDEN // HEADS
NARROW = 16
"""Width of OPT's embedding where it differs."""
_SHAPE = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": INNER,
    "max_position_embeddings": POSITIONS,
}
_GPT2 = {
    "n_embd": HIDDEN,
    "n_layer": LAYERS,
    "n_head": HEADS,
    "n_inner": INNER,
    "n_positions": POSITIONS,
}
_OPT = {
    "model_type": "opt",
    **_SHAPE,
    "ffn_dim": INNER,
    "activation_function": "relu",
    "word_embed_proj_dim": HIDDEN,
    "tie_word_embeddings": True,
}
_FALCON = {"model_type": "falcon", **_SHAPE, "ffn_hidden_size": INNER, "tie_word_embeddings": True}
CASES: dict[str, dict[str, Any]] = {
    "opt": _OPT,
    "opt_350m": _OPT | {"do_layer_norm_before": False, "word_embed_proj_dim": NARROW},
    "gpt2": {"model_type": "gpt2", **_GPT2},
    "gpt_neox": {"model_type": "gpt_neox", **_SHAPE, "rotary_pct": 0.5, "rotary_emb_base": 5000},
    "gpt_neox_sequential": {
        "model_type": "gpt_neox",
        **_SHAPE,
        "use_parallel_residual": False,
        "attention_bias": False,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 20_000.0,
            "partial_rotary_factor": 1.0,
        },
    },
    "phi": {"model_type": "phi", **_SHAPE, "num_key_value_heads": HEADS},
    "starcoder2": {
        "model_type": "starcoder2",
        **_SHAPE,
        "num_key_value_heads": 2,
        "sliding_window": 8,
        "rope_theta": 100_000.0,
        "tie_word_embeddings": True,
    },
    "stablelm": {
        "model_type": "stablelm",
        **_SHAPE,
        "num_key_value_heads": 2,
        "use_qkv_bias": True,
        "partial_rotary_factor": 0.5,
    },
    "stablelm_parallel": {
        "model_type": "stablelm",
        **_SHAPE,
        "num_key_value_heads": HEADS,
        "use_parallel_residual": True,
    },
    "nemotron": {"model_type": "nemotron", **_SHAPE, "num_key_value_heads": 2, "head_dim": 16},
    "falcon": _FALCON,
    "falcon_new": _FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2},
    "falcon_one_norm": _FALCON
    | {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    "falcon_sequential": _FALCON
    | {"multi_query": False, "parallel_attn": False, "bias": True, "alibi": False},
    "gptj": {"model_type": "gptj", **_GPT2, "rotary_dim": 4},
    "gpt_bigcode": {"model_type": "gpt_bigcode", **_GPT2},
    "gpt_bigcode_many_heads": {"model_type": "gpt_bigcode", **_GPT2, "multi_query": False},
    "internlm3": {
        "model_type": "internlm3",
        **_SHAPE,
        "num_key_value_heads": 2,
        "head_dim": HEAD,
        "qkv_bias": True,
        "bias": True,
        "rope_scaling": {"rope_type": "dynamic", "factor": 6.0},
    },
}
"""``config.json``, but for what all have."""


def write_classic(folder: Path, case: str, **changes: Any) -> Path:
    """The folder of a case, without a tokenizer; ``changes`` replace entries of its configuration,
    None removes them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2} | CASES[case] | changes
    config = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights(case), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


CLASSIFIERS = {"gpt2": "GPT2", "opt_350m": "OPT", "gpt_neox": "GPTNeoX"}
"""Case to the beginning of the class's name."""


def write_classifier(folder: Path, case: str) -> Path:
    """A case with a head for three scores instead of its output matrix."""
    labels = {"id2label": {str(i): f"LABEL_{i}" for i in range(3)}}
    classes = [f"{CLASSIFIERS[case]}ForSequenceClassification"]
    write_classic(folder, case, architectures=classes, pad_token_id=0, **labels)
    arrays = {name: a for name, a in weights(case).items() if name != "embed_out.weight"}
    if case == "gpt2":
        arrays = {f"transformer.{name}": values for name, values in arrays.items()}
    width = NARROW if case == "opt_350m" else HIDDEN
    head = np.random.RandomState(9).standard_normal((3, width)) / 4
    save_file(arrays | {"score.weight": head.astype(np.float32)}, folder / "model.safetensors")
    return folder


def token_ids(count: int = 24) -> np.ndarray:
    """The prompt of the stored logits."""
    return np.random.RandomState(5).randint(0, VOCAB, count).astype(np.int32)


def weights(case: str) -> dict[str, np.ndarray]:
    """Weights of a case by the names that its checkpoints have."""
    random = np.random.RandomState(zlib.crc32(case.encode()))
    arrays = {}
    for name, shape in _SHAPES[case](case).items():
        values = random.standard_normal(shape)
        is_embedding = any(part in name for part in ("embed", "wte", "wpe"))
        if len(shape) > 1:
            width = shape[0] if case == "gpt2" else shape[1]
            values = values if is_embedding else 1.5 * values / np.sqrt(width)
        elif name.endswith("weight"):
            values = (0 if case == "nemotron" else 1) + 0.2 * values
        else:
            values = 0.2 * values
        arrays[name] = values.astype(np.float32)
    return arrays


Shapes = dict[str, tuple[int, ...]]


def linear(name: str, rows: int, columns: int, bias: bool = True) -> Shapes:
    return {f"{name}.weight": (rows, columns)} | ({f"{name}.bias": (rows,)} if bias else {})


def norm(name: str, bias: bool = True) -> Shapes:
    return {f"{name}.{kind}": (HIDDEN,) for kind in (("weight", "bias") if bias else ("weight",))}


def embedding(name: str, rows: int = VOCAB, columns: int = HIDDEN) -> Shapes:
    return {f"{name}.weight": (rows, columns)}


def _opt(case: str) -> Shapes:
    is_narrow = case == "opt_350m"
    top = "model.decoder"
    shapes = embedding(f"{top}.embed_tokens", columns=NARROW if is_narrow else HIDDEN)
    shapes |= embedding(f"{top}.embed_positions", rows=POSITIONS + 2)
    for i in range(LAYERS):
        layer = f"{top}.layers.{i}"
        for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
            shapes |= linear(f"{layer}.self_attn.{part}", HIDDEN, HIDDEN)
        shapes |= linear(f"{layer}.fc1", INNER, HIDDEN) | linear(f"{layer}.fc2", HIDDEN, INNER)
        shapes |= norm(f"{layer}.self_attn_layer_norm") | norm(f"{layer}.final_layer_norm")
    if is_narrow:
        shapes |= linear(f"{top}.project_in", HIDDEN, NARROW, bias=False)
        return shapes | linear(f"{top}.project_out", NARROW, HIDDEN, bias=False)
    return shapes | norm(f"{top}.final_layer_norm")


def _gpt2(case: str) -> Shapes:
    """As the original checkpoints: without a prefix, matrices transposed."""
    shapes = embedding("wte") | embedding("wpe", rows=POSITIONS) | norm("ln_f")
    for i in range(LAYERS):
        for name, rows, columns in (
            ("attn.c_attn", HIDDEN, 3 * HIDDEN),
            ("attn.c_proj", HIDDEN, HIDDEN),
            ("mlp.c_fc", HIDDEN, INNER),
            ("mlp.c_proj", INNER, HIDDEN),
        ):
            shapes[f"h.{i}.{name}.weight"] = (rows, columns)
            shapes[f"h.{i}.{name}.bias"] = (columns,)
        shapes |= norm(f"h.{i}.ln_1") | norm(f"h.{i}.ln_2")
    return shapes


def _gpt_neox(case: str) -> Shapes:
    has_bias = case == "gpt_neox"
    top = "gpt_neox"
    shapes = embedding(f"{top}.embed_in") | norm(f"{top}.final_layer_norm") | embedding("embed_out")
    for i in range(LAYERS):
        layer = f"{top}.layers.{i}"
        shapes |= linear(f"{layer}.attention.query_key_value", 3 * HIDDEN, HIDDEN, has_bias)
        shapes |= linear(f"{layer}.attention.dense", HIDDEN, HIDDEN, has_bias)
        shapes |= linear(f"{layer}.mlp.dense_h_to_4h", INNER, HIDDEN)
        shapes |= linear(f"{layer}.mlp.dense_4h_to_h", HIDDEN, INNER)
        shapes |= norm(f"{layer}.input_layernorm") | norm(f"{layer}.post_attention_layernorm")
    return shapes


def _phi(case: str) -> Shapes:
    shapes = embedding("model.embed_tokens") | norm("model.final_layernorm")
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        for part in ("q_proj", "k_proj", "v_proj", "dense"):
            shapes |= linear(f"{layer}.self_attn.{part}", HIDDEN, HIDDEN)
        shapes |= linear(f"{layer}.mlp.fc1", INNER, HIDDEN)
        shapes |= linear(f"{layer}.mlp.fc2", HIDDEN, INNER) | norm(f"{layer}.input_layernorm")
    return shapes | linear("lm_head", VOCAB, HIDDEN)


def _llama_like(case: str) -> Shapes:
    """StarCoder2, StableLM, Nemotron and InternLM3."""
    kv_heads, head = CASES[case]["num_key_value_heads"], CASES[case].get("head_dim", HEAD)
    has_norm_bias = case != "internlm3"
    has_bias = case in ("internlm3", "starcoder2")
    shapes = embedding("model.embed_tokens") | norm("model.norm", has_norm_bias)
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        for part, count in (("q", HEADS), ("k", kv_heads), ("v", kv_heads)):
            rows = count * head
            name = f"{layer}.self_attn.{part}_proj"
            shapes |= linear(name, rows, HIDDEN, has_bias or case == "stablelm")
        shapes |= linear(f"{layer}.self_attn.o_proj", HIDDEN, HEADS * head, has_bias)
        shapes |= norm(f"{layer}.input_layernorm", has_norm_bias)
        if case != "stablelm_parallel":
            shapes |= norm(f"{layer}.post_attention_layernorm", has_norm_bias)
        parts = [("up_proj", INNER, HIDDEN), ("down_proj", HIDDEN, INNER)]
        if case == "starcoder2":
            parts = [("c_fc", INNER, HIDDEN), ("c_proj", HIDDEN, INNER)]
        elif case != "nemotron":
            parts.append(("gate_proj", INNER, HIDDEN))
        for part, rows, columns in parts:
            shapes |= linear(f"{layer}.mlp.{part}", rows, columns, has_bias)
    return shapes | (embedding("lm_head") if case != "starcoder2" else {})


def _falcon(case: str) -> Shapes:
    kv_heads = {"falcon": 1, "falcon_sequential": HEADS}.get(case, 2)
    has_bias = case == "falcon_sequential"
    shapes = embedding("transformer.word_embeddings") | norm("transformer.ln_f")
    for i in range(LAYERS):
        layer = f"transformer.h.{i}"
        rows = (HEADS + 2 * kv_heads) * HEAD
        shapes |= linear(f"{layer}.self_attention.query_key_value", rows, HIDDEN, has_bias)
        shapes |= linear(f"{layer}.self_attention.dense", HIDDEN, HIDDEN, has_bias)
        shapes |= linear(f"{layer}.mlp.dense_h_to_4h", INNER, HIDDEN, has_bias)
        shapes |= linear(f"{layer}.mlp.dense_4h_to_h", HIDDEN, INNER, has_bias)
        norms = ["input_layernorm"]
        if case == "falcon_new":
            norms = ["ln_attn", "ln_mlp"]
        elif case == "falcon_sequential":
            norms.append("post_attention_layernorm")
        for name in norms:
            shapes |= norm(f"{layer}.{name}")
    return shapes


def _gptj(case: str) -> Shapes:
    shapes = embedding("transformer.wte") | norm("transformer.ln_f")
    for i in range(LAYERS):
        layer = f"transformer.h.{i}"
        for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
            shapes |= linear(f"{layer}.attn.{part}", HIDDEN, HIDDEN, bias=False)
        shapes |= linear(f"{layer}.mlp.fc_in", INNER, HIDDEN)
        shapes |= linear(f"{layer}.mlp.fc_out", HIDDEN, INNER) | norm(f"{layer}.ln_1")
    return shapes | linear("lm_head", VOCAB, HIDDEN)


def _gpt_bigcode(case: str) -> Shapes:
    kv_heads = 1 if case == "gpt_bigcode" else HEADS
    top = "transformer"
    shapes = embedding(f"{top}.wte") | embedding(f"{top}.wpe", rows=POSITIONS) | norm(f"{top}.ln_f")
    for i in range(LAYERS):
        layer = f"{top}.h.{i}"
        shapes |= linear(f"{layer}.attn.c_attn", (HEADS + 2 * kv_heads) * HEAD, HIDDEN)
        shapes |= linear(f"{layer}.attn.c_proj", HIDDEN, HIDDEN)
        shapes |= linear(f"{layer}.mlp.c_fc", INNER, HIDDEN)
        shapes |= linear(f"{layer}.mlp.c_proj", HIDDEN, INNER)
        shapes |= norm(f"{layer}.ln_1") | norm(f"{layer}.ln_2")
    return shapes


_FAMILIES = {
    "falcon": _falcon,
    "gpt2": _gpt2,
    "gpt_bigcode": _gpt_bigcode,
    "gpt_neox": _gpt_neox,
    "gptj": _gptj,
    "opt": _opt,
    "phi": _phi,
}
_SHAPES = {
    case: _FAMILIES.get(str(config["model_type"]), _llama_like) for case, config in CASES.items()
}
