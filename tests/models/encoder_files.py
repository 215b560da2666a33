"""The tiny encoders of `tests.models.encoders` as GGUF files, in the way converters write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tests.loading.gguf_writer import write_gguf
from tests.models.encoders import (
    DENSE,
    HEADS,
    HIDDEN,
    INNER,
    LAYERS,
    SCORERS,
    dense_weights,
    weights,
)

_NAMES = {
    "gemma": {
        "embed_tokens": "token_embd",
        "norm": "output_norm",
        "input_layernorm": "attn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "self_attn.o_proj": "attn_output",
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
    "modernbert": {
        "embeddings.tok_embeddings": "token_embd",
        "embeddings.norm": "token_embd_norm",
        "final_norm": "output_norm",
        "attn_norm": "attn_norm",
        "attn.Wqkv": "attn_qkv",
        "attn.Wo": "attn_output",
        "mlp_norm": "ffn_norm",
        "mlp.Wi": "ffn_up",
        "mlp.Wo": "ffn_down",
        "head.dense": "cls",
        "head.norm": "cls.norm",
        "classifier": "cls.output",
    },
    "nomic": {
        "embeddings.word_embeddings": "token_embd",
        "embeddings.token_type_embeddings": "token_types",
        "emb_ln": "token_embd_norm",
        "attn.Wqkv": "attn_qkv",
        "attn.out_proj": "attn_output",
        "norm1": "attn_output_norm",
        "mlp.fc11": "ffn_up",
        "mlp.fc12": "ffn_gate",
        "mlp.fc2": "ffn_down",
        "norm2": "layer_output_norm",
    },
}
_FACTS: dict[str, dict[str, Any]] = {
    "gemma": {
        "architecture": "gemma-embedding",
        "attention.head_count_kv": 2,
        "attention.key_length": 8,
        "attention.value_length": 8,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.sliding_window": 8,
        "attention.sliding_window_pattern": 3,
        "rope.freq_base": 1_000_000.0,
        "rope.freq_base_swa": 10_000.0,
        "pooling_type": 1,
        "dense_2_feat_in": HIDDEN,
        "dense_2_feat_out": DENSE[0],
        "dense_3_feat_in": DENSE[0],
        "dense_3_feat_out": DENSE[1],
    },
    "modernbert": {
        "architecture": "modern-bert",
        "attention.layer_norm_epsilon": 1e-5,
        "attention.sliding_window": 8,
        "attention.sliding_window_pattern": 2,
        "rope.freq_base": 160_000.0,
        "rope.freq_base_swa": 10_000.0,
        "hidden_activation": "gelu",
        "pooling_type": 2,
    },
    "nomic": {
        "architecture": "nomic-bert",
        "attention.layer_norm_epsilon": 1e-12,
        "rope.freq_base": 1000.0,
        "pooling_type": 1,
    },
}


def write_encoder_gguf(path: Path, case: str, **changes: Any) -> Path:
    """The file of a case, without a tokenizer; ``changes`` replace entries of its metadata."""
    family = case.removesuffix("_scores")
    facts = dict(_FACTS[family])
    architecture = facts.pop("architecture")
    facts |= {
        "block_count": LAYERS,
        "context_length": 512,
        "embedding_length": HIDDEN,
        "feed_forward_length": INNER,
        "attention.head_count": HEADS,
    }
    if case in SCORERS:
        facts |= {"pooling_type": 4, "classifier.pooling_type": 1}
        facts["classifier.output_labels"] = ["LABEL_0"]
    values = {f"{architecture}.{name}": value for name, value in (facts | changes).items()}
    tensors: dict[str, np.ndarray] = {}
    for name, array in weights(case).items():
        stem, _, kind = name.removeprefix("model.").removeprefix("encoder.").rpartition(".")
        layer = ""
        if stem.startswith("layers."):
            _, number, stem = stem.split(".", 2)
            layer = f"blk.{number}."
        if family == "gemma" and stem.endswith("norm"):
            array = array + 1
        tensors[f"{layer}{_NAMES[family][stem]}.{kind}"] = array
    if family == "gemma":
        for number, matrix in enumerate(dense_weights(), start=2):
            tensors[f"dense_{number}.weight"] = matrix
    return write_gguf(path, {"general.architecture": architecture} | values, tensors)
