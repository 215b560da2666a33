"""Tensor names: from GGUF's and from Hugging Face's to one canonical set.

Canonical names are Hugging Face's Llama names without the ``model.`` in front; BERT's are brought
to the same pattern. Matrices that a family stores fused (Phi-3's q/k/v and gate/up) become row
ranges of the same bytes. Names that nobody knows pass unchanged: the plan refuses a model with
tensors that its architecture did not use, so nothing is dropped in silence.

=============================================== =================================================
``embed_tokens.weight``                         ``layers.{i}.mlp.{gate,up,down}_proj.{weight,bias}``
``layers.{i}.self_attn.{q,k,v,o}_proj.weight``  ``layers.{i}.self_attn.{q,k}_norm.weight``
``layers.{i}.input_layernorm.weight``           ``layers.{i}.post_attention_layernorm.weight``
``layers.{i}.pre_feedforward_layernorm.weight`` ``layers.{i}.post_feedforward_layernorm.weight``
``norm.weight``                                 ``lm_head.weight`` (absent when tied)
``embed_positions``, ``embed_token_types``      ``embed_layernorm.{weight,bias}`` (BERT)
``layers.{i}.mlp.gate.weight`` (router)         ``layers.{i}.mlp.experts.{e}.{gate,up,down}_proj``
``layers.{i}.mlp.shared_expert_gate.weight``    ``layers.{i}.mlp.shared_expert.{gate,up,down}_proj``
``classifier.out_proj.{weight,bias}`` (scores)  ``classifier.dense``, ``pooler.dense`` (before it)
``layers.{i}.mlp.selection.bias``               of experts, to choose by
``layers.{i}.self_attn.{k,v}_b_proj.weight``    of latents (`tellin.loading.latent`)
``dense_{n}.{weight,bias}``                     layers after pooling
``layers.{num_hidden_layers}.{enorm,...}``      predicts one token more (`tellin.loading.predictor`)
=============================================== =================================================

Matrices that a file stacks, one expert on the other, become one tensor per expert: views again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from tellin.exceptions import ModelLoadError
from tellin.loading.classic_names import (
    HF_MASK,
    classic_gguf_layer_names,
    classic_hf_name,
    classic_hf_tensors,
    grouped_order,
    grouped_parts,
)
from tellin.loading.decoder_names import decoder_hf_name, decoder_tensor
from tellin.loading.encoder_hparams import ROTARY_ENCODERS
from tellin.loading.encoder_names import encoder_gguf_layer_names, encoder_hf_name
from tellin.loading.gated_delta import (
    GATED_DELTA,
    gated_delta_gguf_name,
    gated_delta_order,
    gated_delta_parts,
)
from tellin.loading.hparams import NORMS_AFTER_BLOCKS, WITH_EXPERTS
from tellin.loading.hybrid_names import (
    GGUF_RECURRENT,
    hybrid_hf_name,
    recurrent_gguf_name,
    recurrent_parts,
    recurrent_tensor,
)
from tellin.loading.latent import split_latent
from tellin.loading.predictor import (
    GGUF_PREDICTOR,
    is_predictor_hf_name,
    only_predictor,
    own_layers,
    predictor_layer,
)
from tellin.loading.reordered import Order, reordered, transposed
from tellin.loading.tensors import ModelHParams, TensorRef

_GGUF_GLOBAL = {
    "token_embd": "embed_tokens",
    "output": "lm_head",
    "output_norm": "norm",
    "position_embd": "embed_positions",
    "token_types": "embed_token_types",
    "token_embd_norm": "embed_layernorm",
    "cls": "classifier.dense",
    "per_layer_token_embd": "embed_tokens_per_layer",
    "per_layer_model_proj": "per_layer_model_projection",
    "per_layer_proj_norm": "per_layer_projection_norm",
    "altup_proj": "altup_projections",
    "altup_unembd_proj": "altup_unembed_projections",
    "cls.norm": "classifier.norm",
}
_GGUF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "exp_probs_b": "mlp.selection",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_up_exps": "mlp.experts.gate_up_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_GGUF_LAYER_NORMS_AFTER = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GGUF_LAYER_BERT = {
    "attn_output_norm": "post_attention_layernorm",
    "layer_output_norm": "post_feedforward_layernorm",
}
_GGUF_LAYER_GPT_OSS = {
    "attn_sinks": "self_attn.sinks",
    "post_attention_norm": "post_attention_layernorm",
}
_GGUF_LAYER_GEMMA4 = {
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "layer_output_scale": "layer_scalar",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
}
_GGUF_LAYER_GEMMA3N = {
    "altup_correct_coef": "altup.correction_coefs",
    "altup_correct_scale": "altup.correct_output_scale",
    "altup_predict_coef": "altup.prediction_coefs",
    "altup_router": "altup.modality_router",
    "altup_router_norm": "altup.router_norm",
    "laurel_l": "laurel.linear_left",
    "laurel_r": "laurel.linear_right",
    "laurel_post_norm": "laurel.post_laurel_norm",
}
_GGUF_LAYER_SCALES = {
    "ffn_gate_inp": "mlp.router_norm.weight",
    "ffn_down_exps": "mlp.expert_scales.weight",
}
"""Of Gemma 4's mixtures: weight of the norm before the router, factors of the experts' shares."""
_GGUF_LAYER_LATENT = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
}
_GGUF_DROPPED = re.compile(r"(.*\.)?(rope_freqs|rope_factors_(long|short)|attn_rot_embd)\.weight\Z")
"""Rotary factors: they are in the hyperparameters."""
_GGUF_LAYER_NAME = re.compile(r"blk\.(\d+)\.([^.]+(?:\.[^.]+)?)\.(weight|bias)\Z")
_GGUF_EXPERT_NAME = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down)\.(\d+)\.weight\Z")
"""One tensor per expert: the first files of Mixtral."""
_GGUF_SCALE_NAME = re.compile(r"blk\.(\d+)\.([^.]+)\.scale\Z")
_GGUF_GLOBAL_NAME = re.compile(r"(cls\.norm|[^.]+)\.(weight|bias)\Z")

_HF_GLM4 = {
    "post_self_attn_layernorm": "post_attention_layernorm",
    "post_attention_layernorm": "pre_feedforward_layernorm",
    "post_mlp_layernorm": "post_feedforward_layernorm",
}
_HF_GEMMA4 = (
    (re.compile(r"(layers\.\d+)\.experts\."), r"\1.mlp.experts."),
    (re.compile(r"\.experts\.(gate_up|up|down)_proj\Z"), r".experts.\1_proj.weight"),
    (re.compile(r"\.router\.proj\."), ".mlp.gate."),
    (re.compile(r"\.router\.scale\Z"), ".mlp.router_norm.weight"),
    (re.compile(r"\.router\.per_expert_scale\Z"), ".mlp.expert_scales.weight"),
    (re.compile(r"\.(layer_scalar|correct_output_scale)\Z"), r".\1.weight"),
)
_HF_PREFIX = re.compile(
    r"(model\.(language_model|text_model)\.|language_model\.(model\.)?|model\.|bert\.|roberta\.)"
)
_HF_CONSTANT = re.compile(rf"(.*\.)?(rotary_emb\.inv_freq|position_ids|masked_bias)\Z|{HF_MASK}")
"""Constants that old checkpoints store."""
_HF_VISION = re.compile(
    r"(model\.)?(visual|vision_tower|multi_modal_projector|vision_model|connector)\."
)
"""The image half of a model: `tellin.loading.vision` reads it."""
_HF_OTHER = re.compile(r"(model\.)?(audio_tower|embed_vision|embed_audio)\.")
"""Halves of Gemma 4 that nothing here reads."""
_HF_BERT = (
    (re.compile(r"embeddings\.word_embeddings\."), "embed_tokens."),
    (re.compile(r"embeddings\.position_embeddings\."), "embed_positions."),
    (re.compile(r"embeddings\.token_type_embeddings\."), "embed_token_types."),
    (re.compile(r"embeddings\.LayerNorm\."), "embed_layernorm."),
    (
        re.compile(r"encoder\.layer\.(\d+)\.attention\.self\.query\."),
        r"layers.\1.self_attn.q_proj.",
    ),
    (re.compile(r"encoder\.layer\.(\d+)\.attention\.self\.key\."), r"layers.\1.self_attn.k_proj."),
    (
        re.compile(r"encoder\.layer\.(\d+)\.attention\.self\.value\."),
        r"layers.\1.self_attn.v_proj.",
    ),
    (
        re.compile(r"encoder\.layer\.(\d+)\.attention\.output\.dense\."),
        r"layers.\1.self_attn.o_proj.",
    ),
    (
        re.compile(r"encoder\.layer\.(\d+)\.attention\.output\.LayerNorm\."),
        r"layers.\1.post_attention_layernorm.",
    ),
    (re.compile(r"encoder\.layer\.(\d+)\.intermediate\.dense\."), r"layers.\1.mlp.up_proj."),
    (re.compile(r"encoder\.layer\.(\d+)\.output\.dense\."), r"layers.\1.mlp.down_proj."),
    (
        re.compile(r"encoder\.layer\.(\d+)\.output\.LayerNorm\."),
        r"layers.\1.post_feedforward_layernorm.",
    ),
    (re.compile(r"LayerNorm\.gamma\Z|layernorm\.gamma\Z"), "layernorm.weight"),
    (re.compile(r"LayerNorm\.beta\Z|layernorm\.beta\Z"), "layernorm.bias"),
)
_HF_EXPERT_PARTS = (
    ".block_sparse_moe.",
    ".experts.",
    ".shared_experts.",
    "e_score_correction_bias",
)
_HF_EXPERTS = (
    (re.compile(r"\.mlp\.shared_experts\."), ".mlp.shared_expert."),
    (
        re.compile(r"\.mlp\.(gate|moe_statics|gate\.moe_statics)\.e_score_correction_bias\Z"),
        ".mlp.selection.bias",
    ),
    (re.compile(r"\.block_sparse_moe\.router\.layer\.weight\Z"), ".mlp.gate.weight"),
    (
        re.compile(r"\.block_sparse_moe\.input_linear\.weight\Z"),
        ".mlp.experts.gate_up_proj.weight",
    ),
    (re.compile(r"\.block_sparse_moe\.output_linear\.weight\Z"), ".mlp.experts.down_proj.weight"),
    (re.compile(r"\.block_sparse_moe\."), ".mlp."),
    (re.compile(r"\.experts\.(\d+)\.w1\."), r".experts.\1.gate_proj."),
    (re.compile(r"\.experts\.(\d+)\.w2\."), r".experts.\1.down_proj."),
    (re.compile(r"\.experts\.(\d+)\.w3\."), r".experts.\1.up_proj."),
    (re.compile(r"\.experts\.(gate_up|down)_proj\Z"), r".experts.\1_proj.weight"),
)
_STACKED = re.compile(
    r"(layers\.\d+\.mlp\.experts)\.((?:gate|up|down|gate_up)_proj\.(weight|bias))\Z"
)


def canonical_from_gguf(
    path: Path,
    hparams: ModelHParams,
    tensors: Mapping[str, TensorRef],
    of_predictor: bool = False,
) -> dict[str, TensorRef]:
    """A GGUF file's tensors under canonical names.

    ``of_predictor``: those of the layer that predicts one token more, not those of the model's.
    """
    architecture = hparams.architecture
    layer_names = _GGUF_LAYER | GGUF_RECURRENT | GGUF_PREDICTOR
    layer_names |= classic_gguf_layer_names(architecture, tensors)
    global_names = dict(_GGUF_GLOBAL)
    if architecture in ("lfm2", "lfm2moe"):
        global_names["token_embd_norm"] = "norm"  # what its converter has called it
    if architecture in NORMS_AFTER_BLOCKS:
        layer_names |= _GGUF_LAYER_NORMS_AFTER
    elif architecture == "bert":
        layer_names |= _GGUF_LAYER_BERT
    elif architecture in ROTARY_ENCODERS:
        layer_names |= encoder_gguf_layer_names(architecture)
    elif architecture == "gpt-oss":
        layer_names |= _GGUF_LAYER_GPT_OSS
    elif hparams.latent is not None:
        layer_names |= _GGUF_LAYER_LATENT
    elif architecture in ("glm4moe", "seed_oss"):
        layer_names["post_attention_norm"] = "post_attention_layernorm"
    if architecture in ("gemma3n", "gemma4"):
        layer_names |= _GGUF_LAYER_GEMMA4 | _GGUF_LAYER_GEMMA3N
    if architecture in ("glm4", "phi3"):
        # These converters store gate and up in one matrix under the name of the latter.
        layer_names["ffn_up"] = "mlp.gate_up_proj"

    def rename(name: str) -> str | None:
        if _GGUF_DROPPED.match(name):
            return None
        own_name = gated_delta_gguf_name(name) if architecture in GATED_DELTA else None
        if own_name is not None:
            return own_name
        match = _GGUF_LAYER_NAME.match(name)
        if match and match[2] in layer_names:
            return f"layers.{match[1]}.{layer_names[match[2]]}.{match[3]}"
        match = _GGUF_SCALE_NAME.match(name) if architecture == "gemma4" else None
        if match and match[2] in _GGUF_LAYER_SCALES:
            return f"layers.{match[1]}.{_GGUF_LAYER_SCALES[match[2]]}"
        match = _GGUF_EXPERT_NAME.match(name)
        if match:
            return f"layers.{match[1]}.mlp.experts.{match[3]}.{match[2]}_proj.weight"
        match = _GGUF_GLOBAL_NAME.match(name)
        if match and match[1] in global_names:
            return f"{global_names[match[1]]}.{match[2]}"
        return recurrent_gguf_name(name) or _canonical_head(name)

    return _canonical(path, hparams, tensors, rename, of_predictor)


def canonical_from_hf(
    path: Path,
    hparams: ModelHParams,
    tensors: Mapping[str, TensorRef],
    of_predictor: bool = False,
) -> dict[str, TensorRef]:
    """A Hugging Face checkpoint's tensors under canonical names; as `canonical_from_gguf`."""

    def rename(name: str) -> str | None:
        return None if is_dropped_hf_name(name) else canonical_hf_name(hparams.architecture, name)

    own = classic_hf_tensors(path, hparams.architecture, tensors.values())
    return _canonical(path, hparams, {t.name: t for t in own}, rename, of_predictor)


def canonical_hf_name(architecture: str, name: str) -> str:
    """The canonical name of one Hugging Face tensor; fused matrices keep theirs."""
    name = _HF_PREFIX.sub("", name, count=1) if _HF_PREFIX.match(name) else name
    name = decoder_hf_name(architecture, hybrid_hf_name(architecture, name))
    name = encoder_hf_name(architecture, name)
    name = classic_hf_name(architecture, name)
    if architecture == "bert":
        for pattern, replacement in _HF_BERT:
            name = pattern.sub(replacement, name)
    elif architecture == "glm4":
        layer, _, rest = name.rpartition(".post_")
        norm, _, kind = f"post_{rest}".partition(".")
        name = f"{layer}.{_HF_GLM4[norm]}.{kind}" if norm in _HF_GLM4 else name
    elif architecture in ("gemma3n", "gemma4"):
        for pattern, replacement in _HF_GEMMA4:
            name = pattern.sub(replacement, name)
    elif architecture in WITH_EXPERTS and any(part in name for part in _HF_EXPERT_PARTS):
        for pattern, replacement in _HF_EXPERTS:
            name = pattern.sub(replacement, name)
    return _canonical_head(name)


def _canonical_head(name: str) -> str:
    """A classifier's last matrix has three names; the others keep theirs."""
    stem, _, kind = name.rpartition(".")
    return f"classifier.out_proj.{kind}" if stem in ("classifier", "score", "cls.output") else name


def is_dropped_hf_name(name: str) -> bool:
    """Whether a checkpoint's tensor is of no use to its text model, whatever its type."""
    return is_predictor_hf_name(name) or is_never_read_hf_name(name)


def is_never_read_hf_name(name: str) -> bool:
    """The same, if the layer that predicts one token more is wanted."""
    patterns = (_HF_CONSTANT, _HF_VISION, _HF_OTHER)
    return any(pattern.match(name) is not None for pattern in patterns)


def is_mmproj_name(file_name: str) -> bool:
    """Whether a GGUF file is named as those that hold image encoders are."""
    return file_name.endswith(".gguf") and "mmproj" in file_name.lower()


def is_vision_hf_name(name: str) -> bool:
    """Whether a checkpoint's tensor belongs to its image encoder."""
    return _HF_VISION.match(name) is not None and _HF_CONSTANT.match(name) is None


def _canonical(
    path: Path,
    hparams: ModelHParams,
    tensors: Mapping[str, TensorRef],
    rename: Callable[[str], str | None],
    of_predictor: bool,
) -> dict[str, TensorRef]:
    named: dict[str, TensorRef] = {}
    layers = predictor_layer if of_predictor else own_layers
    for tensor in layers(hparams, tensors):
        name = rename(tensor.name)
        if name is None:
            continue
        tensor = decoder_tensor(name, recurrent_tensor(name, tensor))
        for expert_name, matrix in _split_stacked(path, hparams, name, tensor):
            for part_name, part in _split_fused(path, hparams, expert_name, matrix):
                if part_name in named:
                    raise ModelLoadError(f"{path}: two tensors mean {part_name!r}")
                named[part_name] = replace(part, name=part_name)
    return only_predictor(hparams, named) if of_predictor else named


def _split_stacked(
    path: Path, hparams: ModelHParams, name: str, tensor: TensorRef
) -> list[tuple[str, TensorRef]]:
    """One matrix per expert, of a tensor ``(num_experts, n, k)``; others as they are.

    Biases are ``(num_experts, n)``.
    """
    if name.endswith(".shared_expert_gate.weight") and len(tensor.shape) == 1:
        row = TensorRef(tensor.name, (1, *tensor.shape), tensor.quant_type, tensor.data)
        return [(name, row)]
    if name.endswith(".mlp.selection.bias") and tensor.shape[:-1] == (1,):
        vector = TensorRef(tensor.name, tensor.shape[1:], tensor.quant_type, tensor.data)
        return [(name, vector)]
    if hparams.latent is not None and "_b_proj" in name:
        return split_latent(path, hparams, name, tensor)
    if name.startswith("altup_") and len(tensor.shape) == 3:
        stem = name.removesuffix(".weight")
        rows = [tensor.row_range(i, i + 1) for i in range(tensor.shape[0])]
        return [
            (f"{stem}.{i}.weight", TensorRef(name, tensor.shape[1:], row.quant_type, row.data))
            for i, row in enumerate(rows)
        ]
    match = _STACKED.match(name)
    if not match or not hparams.num_experts:
        return [(name, tensor)]
    dims, what = (3, "matrix") if match[3] == "weight" else (2, "vector")
    if len(tensor.shape) != dims or tensor.shape[0] != hparams.num_experts:
        raise ModelLoadError(
            f"{path}: tensor {tensor.name!r} has shape {tensor.shape}, "
            f"expected a {what} for each of the {hparams.num_experts} experts"
        )
    matrices = []
    across = _is_across(hparams, match[2], tensor)
    for expert in range(hparams.num_experts):
        one = tensor.row_range(expert, expert + 1)
        matrix = TensorRef(tensor.name, tensor.shape[1:], tensor.quant_type, one.data)
        matrix = transposed(matrix) if across else matrix
        matrices.append((f"{match[1]}.{expert}.{match[2]}", matrix))
    return matrices


def _is_across(hparams: ModelHParams, part: str, stack: TensorRef) -> bool:
    """Whether matrices have a row for each input: files of Qwen3-VL-MoE have such."""
    hidden, inner = hparams.hidden_size, hparams.moe_intermediate_size
    shapes = {"gate_up_proj.weight": (2 * inner, hidden), "down_proj.weight": (hidden, inner)}
    is_plain = stack.reader is None and stack.quant_type.block_size == 1
    wanted = shapes.get(part) if is_plain and hparams.architecture == "qwen3moe" else None
    return wanted is not None and stack.shape[1:] == wanted[::-1] != wanted


def _split_fused(
    path: Path, hparams: ModelHParams, name: str, tensor: TensorRef
) -> list[tuple[str, TensorRef]]:
    stem, _, kind = name.rpartition(".")
    parts = fused_parts(hparams, stem)
    if not parts:
        return [(name, tensor)]
    counts = [count for _, count in parts]
    if tensor.shape[0] != sum(counts):
        raise ModelLoadError(
            f"{path}: tensor {tensor.name!r} has {tensor.shape[0]} rows, expected {sum(counts)} "
            f"({' + '.join(map(str, counts))})"
        )
    order = fused_order(hparams, stem)
    if order is not None:
        tensor = reordered(tensor, order)
    split = []
    start = 0
    for part, count in parts:
        split.append((f"{part}.{kind}", tensor.row_range(start, start + count)))
        start += count
    return split


def fused_order(hparams: ModelHParams, layer: str) -> Order | None:
    """The file's row for each row of a fused layer whose parts lie one after the other.

    None where they do so in the file.
    """
    order = gated_delta_order(hparams, layer)
    return grouped_order(hparams, layer) if order is None else order


def fused_parts(hparams: ModelHParams, layer: str) -> list[tuple[str, int]]:
    """Name and rows of each linear layer that a fused one consists of; none if it is not fused."""
    mixed = gated_delta_parts(hparams, layer) or grouped_parts(hparams, layer)
    if mixed:
        return mixed
    prefix, _, name = layer.rpartition(".")
    kv_rows = hparams.num_key_value_heads * hparams.head_dim
    if name == "qkv_proj":
        rows = {
            "q_proj": hparams.num_attention_heads * hparams.head_dim,
            "k_proj": kv_rows,
            "v_proj": kv_rows,
        }
    elif name == "up_gate_proj":
        rows = dict.fromkeys(("up_proj", "gate_proj"), hparams.intermediate_size)
    elif name == "gate_up_proj":
        is_expert = ".experts." in f"{prefix}."
        width = hparams.moe_intermediate_size if is_expert else hparams.intermediate_size
        rows = dict.fromkeys(("gate_proj", "up_proj"), width)
    else:
        return recurrent_parts(hparams, layer)
    return [(f"{prefix}.{part}", count) for part, count in rows.items()]
