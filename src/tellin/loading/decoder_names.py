"""Names and shapes of tensors that some families of decoders call by names of their own.

Knows no files. Of xIELU, an activation with numbers of its own in every layer, GGUF files keep
these in their metadata, checkpoints in tensors; the plan gets tensors of one value:
``layers.{i}.mlp.act_fn.{alpha_p,alpha_n,beta,eps}``.
"""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np

from tellin.exceptions import ModelLoadError
from tellin.loading.tensors import ModelHParams, QuantType, TensorRef
from tellin.loading.typed_mapping import TypedMapping

_HF_APERTUS = (
    (re.compile(r"\.attention_layernorm\."), ".input_layernorm."),
    (re.compile(r"\.feedforward_layernorm\."), ".post_attention_layernorm."),
)
_HF_HUNYUAN = (
    (re.compile(r"\.self_attn\.query_layernorm\."), ".self_attn.q_norm."),
    (re.compile(r"\.self_attn\.key_layernorm\."), ".self_attn.k_norm."),
    (re.compile(r"\.mlp\.gate\.wg\."), ".mlp.gate."),
    (re.compile(r"\.mlp\.shared_mlp\."), ".mlp.shared_expert."),
)
_HF_MINIMAX = (
    (
        re.compile(r"\.(block_sparse_moe|mlp)\.e_score_correction_bias\Z"),
        ".mlp.selection.bias",
    ),
)
_HF_NAMES = {
    "apertus": _HF_APERTUS,
    "hunyuan-dense": _HF_HUNYUAN,
    "hunyuan-moe": _HF_HUNYUAN,
    "minimax-m2": _HF_MINIMAX,
}
_XIELU = ("alpha_p", "alpha_n", "beta", "eps")


def decoder_hf_name(architecture: str, name: str) -> str:
    """The canonical name of a checkpoint's tensor, which has lost its ``model.``."""
    for pattern, replacement in _HF_NAMES.get(architecture, ()):
        name = pattern.sub(replacement, name)
    return name


def decoder_tensor(name: str, tensor: TensorRef) -> TensorRef:
    """``tensor`` in the shape that plans know: single numbers are vectors of one value."""
    is_number = tensor.shape == () and ".act_fn." in name
    return replace(tensor, shape=(1,)) if is_number else tensor


def tensors_of_metadata(metadata: TypedMapping, hparams: ModelHParams) -> dict[str, TensorRef]:
    """By canonical name, what a GGUF file's metadata holds that checkpoints have as tensors.

    Raises:
        ModelLoadError: there is not one number for each layer.
    """
    if hparams.architecture != "apertus":
        return {}
    tensors = {}
    for part in _XIELU:
        key = f"xielu.{part}"
        is_one = not isinstance(metadata.get(key), np.ndarray)
        numbers = np.float32(metadata.get_float(key)) if is_one else metadata.get_numbers(key)
        values = np.asarray(numbers, dtype=np.float32).reshape(-1)
        count = hparams.num_hidden_layers
        if values.size not in (1, count):
            raise ModelLoadError(
                f"{metadata.path}: key {key!r} has {values.size} entries for {count} layers"
            )
        for i, value in enumerate(np.broadcast_to(values, count)):
            name = f"layers.{i}.mlp.act_fn.{part}"
            data = np.array([value], dtype=np.float32).view(np.uint8)
            tensors[name] = TensorRef(name, (1,), QuantType.F32, data)
    return tensors
