"""Tensor names of encoders with rotary positions, brought to the canonical ones.

ModernBERT, nomic-bert and GTE each have names of their own; of the last two there are checkpoints
from before transformers had them, with other names. Fused matrices are parted by `names`.
"""

from __future__ import annotations

import re

_MODERN_BERT = (
    (re.compile(r"embeddings\.tok_embeddings\."), "embed_tokens."),
    (re.compile(r"embeddings\.norm\."), "embed_layernorm."),
    (re.compile(r"\.attn\.Wqkv\."), ".self_attn.qkv_proj."),
    (re.compile(r"\.attn\.Wo\."), ".self_attn.o_proj."),
    (re.compile(r"\.attn_norm\."), ".input_layernorm."),
    (re.compile(r"\.mlp\.Wi\."), ".mlp.gate_up_proj."),
    (re.compile(r"\.mlp\.Wo\."), ".mlp.down_proj."),
    (re.compile(r"\.mlp_norm\."), ".post_attention_layernorm."),
    (re.compile(r"\Afinal_norm\."), "norm."),
    (re.compile(r"\Ahead\."), "classifier."),
)
_POST_NORM = (
    (re.compile(r"\Aembeddings\.word_embeddings\."), "embed_tokens."),
    (re.compile(r"\Aembeddings\.token_type_embeddings\."), "embed_token_types."),
    (re.compile(r"\A(embeddings\.LayerNorm|emb_ln)\."), "embed_layernorm."),
    (re.compile(r"\Aencoder\.layers?\."), "layers."),
    (re.compile(r"\.attn\.Wqkv\."), ".self_attn.qkv_proj."),
    (re.compile(r"\.attention\.qkv_proj\."), ".self_attn.qkv_proj."),
    (re.compile(r"\.(attn\.out_proj|attention\.o_proj)\."), ".self_attn.o_proj."),
    (re.compile(r"\.mlp\.fc11\."), ".mlp.up_proj."),
    (re.compile(r"\.mlp\.fc12\."), ".mlp.gate_proj."),
    (re.compile(r"\.mlp\.fc2\."), ".mlp.down_proj."),
    (re.compile(r"\.(norm1|attn_ln)\."), ".post_attention_layernorm."),
    (re.compile(r"\.(norm2|mlp_ln|post_mlp_layernorm)\."), ".post_feedforward_layernorm."),
)
_PATTERNS = {"modern-bert": _MODERN_BERT, "nomic-bert": _POST_NORM, "gte": _POST_NORM}
_PREFIX = re.compile(r"\A(new|gte|nomic_bert|model)\.")


def encoder_hf_name(architecture: str, name: str) -> str:
    """The canonical name of a checkpoint's tensor; of other architectures: as it is."""
    if architecture not in _PATTERNS:
        return name
    name = _PREFIX.sub("", name, count=1)
    for pattern, replacement in _PATTERNS[architecture]:
        name = pattern.sub(replacement, name)
    return name


def encoder_gguf_layer_names(architecture: str) -> dict[str, str]:
    """What layers' tensors mean in a GGUF file, where it differs from the decoders' names."""
    if architecture == "modern-bert":
        return {"ffn_up": "mlp.gate_up_proj"}
    return {
        "attn_output_norm": "post_attention_layernorm",
        "layer_output_norm": "post_feedforward_layernorm",
    }
