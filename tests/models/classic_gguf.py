"""The tiny models of `tests.models.classic` as GGUF files, in the way converters write them.

Queries, keys and values lie one after the other whatever the checkpoint has, matrices of GPT-2 are
turned, one is added to the norms' weights of Nemotron, and what a family's files leave out is left
out.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from tests.loading.gguf_writer import write_gguf
from tests.models.classic import CASES, HEAD, HEADS, HIDDEN, INNER, LAYERS, POSITIONS, weights

_ARCHITECTURES = {
    "gpt_neox": "gptneox",
    "gpt_bigcode": "starcoder",
    "phi": "phi2",
}
GGUF_CASES = (
    "gpt2",
    "gpt_neox",
    "gpt_neox_sequential",
    "phi",
    "starcoder2",
    "stablelm",
    "stablelm_parallel",
    "nemotron",
    "falcon",
    "falcon_new",
    "falcon_one_norm",
    "gpt_bigcode",
)
_NAMES = (
    (r"(transformer|gpt_neox|model)\.", ""),
    (r"(wte|word_embeddings|embed_in|embed_tokens)\.", "token_embd."),
    (r"wpe\.", "position_embd."),
    (r"(ln_f|final_layer_norm|final_layernorm|norm)\.", "output_norm."),
    (r"(lm_head|embed_out)\.", "output."),
    (r"(h|layers)\.(\d+)\.", r"blk.\2."),
    (r"blk\.(\d+)\.(ln_1|input_layernorm|ln_mlp)\.", r"blk.\1.attn_norm."),
    (r"blk\.(\d+)\.ln_attn\.", r"blk.\1.attn_norm_2."),
    (r"blk\.(\d+)\.(ln_2|post_attention_layernorm)\.", r"blk.\1.ffn_norm."),
    (
        r"blk\.(\d+)\.(attn|attention|self_attention)\.(c_attn|query_key_value)\.",
        r"blk.\1.attn_qkv.",
    ),
    (r"blk\.(\d+)\.self_attn\.([qkv])_proj\.", r"blk.\1.attn_\2."),
    (r"blk\.(\d+)\.\w+\.(c_proj|dense|o_proj)\.(?<!mlp\.c_proj\.)", r"blk.\1.attn_output."),
    (r"blk\.(\d+)\.mlp\.(c_fc|dense_h_to_4h|fc1|up_proj)\.", r"blk.\1.ffn_up."),
    (r"blk\.(\d+)\.mlp\.(c_proj|dense_4h_to_h|fc2|down_proj)\.", r"blk.\1.ffn_down."),
    (r"blk\.(\d+)\.mlp\.gate_proj\.", r"blk.\1.ffn_gate."),
)
"""Beginnings of names, in turn."""


def write_classic_gguf(
    path: Path, case: str, tensors: dict[str, np.ndarray] | None = None, **changes: Any
) -> Path:
    """The file of a case with further ``tensors``; ``changes`` replace entries of its metadata,
    None removes them.
    """
    config = CASES[case]
    model_type = str(config["model_type"])
    architecture = _ARCHITECTURES.get(model_type, model_type)
    arrays = dict(tensors or {})
    for name, values in weights(case).items():
        if model_type == "gpt2" and values.ndim == 2 and name.startswith("h."):
            values = values.T
        elif "query_key_value" in name:
            values = _in_turn(values, _kv_heads(case))
        elif model_type == "nemotron" and name.endswith("norm.weight"):
            values = values + np.float32(1)
        arrays[_gguf_name(name)] = np.ascontiguousarray(values)
    own = {key: value for key, value in (_facts(case) | changes).items() if value is not None}
    metadata = {f"{architecture}.{key}": value for key, value in own.items()}
    return write_gguf(path, {"general.architecture": architecture} | metadata | _VOCAB, arrays)


_TOKENS = [f"<{i}>" for i in range(64)]
_VOCAB: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": _TOKENS,
    "tokenizer.ggml.token_type": np.ones(len(_TOKENS), dtype=np.int32),
    "tokenizer.ggml.merges": [],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}


def _gguf_name(name: str) -> str:
    for pattern, replacement in _NAMES:
        name = re.sub(rf"\A{pattern}", replacement, name)
    return name


def _kv_heads(case: str) -> int:
    if case in ("falcon", "gpt_bigcode"):
        return 1
    config = CASES[case]
    return int(config.get("num_key_value_heads", config.get("num_kv_heads", HEADS)))


def _in_turn(values: np.ndarray, kv_heads: int) -> np.ndarray:
    """All queries, all keys, all values, from groups of them."""
    groups = values.reshape(kv_heads, HEADS // kv_heads + 2, HEAD, -1)
    parts = (groups[:, :-2], groups[:, -2], groups[:, -1])
    rows = np.concatenate([part.reshape(-1, groups.shape[-1]) for part in parts])
    return rows.reshape(values.shape)


def _facts(case: str) -> dict[str, Any]:
    config = CASES[case]
    head = config.get("head_dim", HEAD)
    facts: dict[str, Any] = {
        "block_count": LAYERS,
        "context_length": POSITIONS,
        "embedding_length": HIDDEN,
        "feed_forward_length": INNER,
        "attention.head_count": HEADS,
        "attention.layer_norm_epsilon": 1e-5,
    }
    if _kv_heads(case) != HEADS:
        facts["attention.head_count_kv"] = _kv_heads(case)
    if case == "nemotron":
        facts |= {"attention.key_length": head, "attention.value_length": head}
    rotated = {"gpt_neox": 0.5, "phi": 0.5, "stablelm": 0.5, "stablelm_parallel": 0.25}
    if case == "nemotron" or case in rotated:
        facts["rope.dimension_count"] = int(head * rotated.get(case, 0.5))
    theta = {"gpt_neox": 5000.0, "gpt_neox_sequential": 20_000.0, "starcoder2": 100_000.0}
    if case in theta:
        facts["rope.freq_base"] = theta[case]
    if case.startswith(("gpt_neox", "stablelm")):
        facts["use_parallel_residual"] = case in ("gpt_neox", "stablelm_parallel")
    if case == "starcoder2":
        facts["attention.sliding_window"] = config["sliding_window"]
    return facts
