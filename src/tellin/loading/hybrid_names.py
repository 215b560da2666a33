"""Names and shapes of the tensors that recurrent layers have, and of LFM2's own spelling.

Knows no files. What one format reshapes is brought to one form; the in-projections, which are
stored fused, become row ranges of the same bytes. Canonical names:

================================================= ===============================================
``layers.{i}.conv.{b,c,x}_proj.weight``           in-projection of a gated short convolution
``layers.{i}.conv.conv.weight``                   its convolution, ``(width, kernel)``
``layers.{i}.mamba.{z,x,b,c,dt}_proj.weight``     in-projection of Mamba2
``layers.{i}.mamba.conv1d.{weight,bias}``         its convolution of x, b and c
``layers.{i}.mamba.{A_log,D,dt_bias}``            a value per head; GGUF has ``A``: -exp(A_log)
``layers.{i}.mamba.norm.weight``                  ``(width,)``
``layers.{i}.{conv,mamba}.out_proj.weight``
================================================= ===============================================
"""

from __future__ import annotations

import re
from dataclasses import replace

from tellin.loading.tensors import ModelHParams, TensorRef

GGUF_RECURRENT = {
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.conv": "conv.conv",
    "shortconv.out_proj": "conv.out_proj",
    "ffn_latent_down": "mlp.latent_in",
    "ffn_latent_up": "mlp.latent_out",
    "ssm_in": "mamba.in_proj",
    "ssm_conv1d": "mamba.conv1d",
    "ssm_norm": "mamba.norm",
    "ssm_out": "mamba.out_proj",
}
_GGUF_OTHERS = {
    "ssm_a": "mamba.A",
    "ssm_d": "mamba.D",
    "ssm_dt.bias": "mamba.dt_bias",
    "ffn_norm": "post_attention_layernorm.weight",  # so called by the converter of Falcon-H1
}
_GGUF_OTHERS_NAME = re.compile(rf"blk\.(\d+)\.({'|'.join(map(re.escape, _GGUF_OTHERS))})\Z")

_HF_LFM2 = (
    (re.compile(r"\Aembedding_norm\."), "norm."),
    (re.compile(r"\.operator_norm\."), ".input_layernorm."),
    (re.compile(r"\.ffn_norm\."), ".post_attention_layernorm."),
    (re.compile(r"\.self_attn\.out_proj\."), ".self_attn.o_proj."),
    (re.compile(r"\.self_attn\.(q|k)_layernorm\."), r".self_attn.\1_norm."),
    (re.compile(r"\.feed_forward\.expert_bias\Z"), ".mlp.selection.bias"),
    (re.compile(r"\.feed_forward\."), ".mlp."),
    (re.compile(r"\.mlp\.w1\."), ".mlp.gate_proj."),
    (re.compile(r"\.mlp\.w2\."), ".mlp.down_proj."),
    (re.compile(r"\.mlp\.w3\."), ".mlp.up_proj."),
)
_HF_GRANITE = (
    (re.compile(r"\.block_sparse_moe\.router\.weight\Z"), ".mlp.gate.weight"),
    (re.compile(r"\.shared_mlp\.input_linear\."), ".mlp.shared_expert.gate_up_proj."),
    (re.compile(r"\.shared_mlp\.output_linear\."), ".mlp.shared_expert.down_proj."),
)
_HF_FALCON = (
    (re.compile(r"\Afinal_layernorm\."), "norm."),
    (re.compile(r"\.pre_ff_layernorm\."), ".post_attention_layernorm."),
    (re.compile(r"\.feed_forward\."), ".mlp."),
)
_HF_NEMOTRON = (
    (re.compile(r"\Abackbone\."), ""),
    (re.compile(r"\Aembeddings\."), "embed_tokens."),
    (re.compile(r"\Anorm_f\."), "norm."),
    (re.compile(r"\Alayers\.(\d+)\.norm\."), r"layers.\1.input_layernorm."),
    (re.compile(r"\.mixer\.([qkvo])_proj\."), r".self_attn.\1_proj."),
    (re.compile(r"\.mixer\.(up|down)_proj\."), r".mlp.\1_proj."),
    (re.compile(r"\.mixer\.fc1_latent_proj\."), ".mlp.latent_in."),
    (re.compile(r"\.mixer\.fc2_latent_proj\."), ".mlp.latent_out."),
    (re.compile(r"\.mixer\.gate\.e_score_correction_bias\Z"), ".mlp.selection.bias"),
    (re.compile(r"\.mixer\.(gate|experts)\."), r".mlp.\1."),
    (re.compile(r"\.mixer\.shared_experts\."), ".mlp.shared_expert."),
    (re.compile(r"\.mixer\."), ".mamba."),
)
_HF_NAMES = {
    "bamba": _HF_FALCON,
    "falcon-h1": _HF_FALCON,
    "granitehybrid": _HF_GRANITE,
    "lfm2": _HF_LFM2,
    "lfm2moe": _HF_LFM2,
    "mamba2": _HF_NEMOTRON,
    "nemotron_h": _HF_NEMOTRON,
    "nemotron_h_moe": _HF_NEMOTRON,
}


def recurrent_gguf_name(name: str) -> str | None:
    """The canonical name of a vector that files name in a way of its own; None of others."""
    match = _GGUF_OTHERS_NAME.match(name)
    return f"layers.{match[1]}.{_GGUF_OTHERS[match[2]]}" if match else None


def hybrid_hf_name(architecture: str, name: str) -> str:
    """The canonical name of a checkpoint's tensor, which has lost its ``model.``."""
    for pattern, replacement in _HF_NAMES.get(architecture, ()):
        name = pattern.sub(replacement, name)
    return name


def recurrent_tensor(name: str, tensor: TensorRef) -> TensorRef:
    """``tensor`` in the shape that plans know: norms that a file splits by groups are vectors."""
    if name.endswith(".mamba.norm.weight") and len(tensor.shape) == 2:
        return replace(tensor, shape=(tensor.num_elements,))
    return tensor


def recurrent_parts(hparams: ModelHParams, layer: str) -> list[tuple[str, int]]:
    """Name and rows of each part of a fused in-projection; none if ``layer`` is none."""
    prefix = layer.rpartition(".")[0]
    mamba = hparams.mamba
    if layer.endswith(".conv.in_proj"):
        rows = dict.fromkeys(("b_proj", "c_proj", "x_proj"), hparams.hidden_size)
    elif mamba is not None and layer.endswith(".mamba.in_proj"):
        inner, shared = mamba.num_heads * mamba.head_dim, mamba.num_groups * mamba.state_dim
        widths = {"z": inner, "x": inner, "b": shared, "c": shared, "dt": mamba.num_heads}
        rows = {f"{part}_proj": count for part, count in widths.items()}
    else:
        return []
    return [(f"{prefix}.{part}", count) for part, count in rows.items()]
