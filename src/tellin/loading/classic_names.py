"""Names and shapes of the tensors of the decoders from before Llama's kind, and of InternLM2.

Knows no files. What one family stores in a form of its own is brought to the common one when it is
read: GPT-2's matrices are transposed, Nemotron's norms lack the one that is added to them, and
queries, keys and values of GPT-NeoX, Falcon and InternLM2 lie group by group in one matrix.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tellin.exceptions import ModelLoadError, UnsupportedModelError
from tellin.loading.dequantize import dequantize
from tellin.loading.reordered import Order
from tellin.loading.tensors import ModelHParams, QuantType, TensorRef

_TRANSFORMER = (
    (re.compile(r"\Atransformer\."), ""),
    (re.compile(r"\Awte\."), "embed_tokens."),
    (re.compile(r"\Aword_embeddings\."), "embed_tokens."),
    (re.compile(r"\Awpe\."), "embed_positions."),
    (re.compile(r"\Aln_f\."), "norm."),
    (re.compile(r"\Ah\."), "layers."),
    (re.compile(r"\.ln_1\."), ".input_layernorm."),
    (re.compile(r"\.ln_2\."), ".post_attention_layernorm."),
    (re.compile(r"\.mlp\.c_fc\."), ".mlp.up_proj."),
    (re.compile(r"\.mlp\.c_proj\."), ".mlp.down_proj."),
    (re.compile(r"\.attn\.c_proj\."), ".self_attn.o_proj."),
)
_GPT2 = (*_TRANSFORMER, (re.compile(r"\.attn\.c_attn\."), ".self_attn.qkv_proj."))
_STARCODER = (*_TRANSFORMER, (re.compile(r"\.attn\.c_attn\."), ".self_attn.grouped_qkv_proj."))
_GPTJ = (
    *_TRANSFORMER,
    (re.compile(r"\.attn\.([qkv])_proj\."), r".self_attn.\1_proj."),
    (re.compile(r"\.attn\.out_proj\."), ".self_attn.o_proj."),
    (re.compile(r"\.mlp\.fc_in\."), ".mlp.up_proj."),
    (re.compile(r"\.mlp\.fc_out\."), ".mlp.down_proj."),
)
_FUSED = (
    (re.compile(r"\.mlp\.dense_h_to_4h\."), ".mlp.up_proj."),
    (re.compile(r"\.mlp\.dense_4h_to_h\."), ".mlp.down_proj."),
    (
        re.compile(r"\.(attention|self_attention)\.query_key_value\."),
        ".self_attn.grouped_qkv_proj.",
    ),
    (re.compile(r"\.(attention|self_attention)\.dense\."), ".self_attn.o_proj."),
)
_NAMES = {
    "falcon": (
        *_TRANSFORMER,
        *_FUSED,
        (re.compile(r"\.ln_attn\."), ".input_layernorm."),
        (re.compile(r"\.ln_mlp\."), ".post_attention_layernorm."),
    ),
    "gpt2": _GPT2,
    "gptj": _GPTJ,
    "gptneox": (
        (re.compile(r"\Agpt_neox\."), ""),
        (re.compile(r"\Aembed_in\."), "embed_tokens."),
        (re.compile(r"\Aembed_out\."), "lm_head."),
        (re.compile(r"\Afinal_layer_norm\."), "norm."),
        *_FUSED,
    ),
    "internlm2": (
        (re.compile(r"\Atok_embeddings\."), "embed_tokens."),
        (re.compile(r"\Aoutput\."), "lm_head."),
        (re.compile(r"\.attention\.wqkv\."), ".self_attn.grouped_qkv_proj."),
        (re.compile(r"\.attention\.wo\."), ".self_attn.o_proj."),
        (re.compile(r"\.attention_norm\."), ".input_layernorm."),
        (re.compile(r"\.ffn_norm\."), ".post_attention_layernorm."),
        (re.compile(r"\.feed_forward\.w1\."), ".mlp.gate_proj."),
        (re.compile(r"\.feed_forward\.w2\."), ".mlp.down_proj."),
        (re.compile(r"\.feed_forward\.w3\."), ".mlp.up_proj."),
    ),
    "opt": (
        (re.compile(r"\Adecoder\."), ""),
        (re.compile(r"\Afinal_layer_norm\."), "norm."),
        (re.compile(r"\.self_attn_layer_norm\."), ".input_layernorm."),
        (re.compile(r"\.final_layer_norm\."), ".post_attention_layernorm."),
        (re.compile(r"\.self_attn\.out_proj\."), ".self_attn.o_proj."),
        (re.compile(r"\.fc1\."), ".mlp.up_proj."),
        (re.compile(r"\.fc2\."), ".mlp.down_proj."),
    ),
    "phi2": (
        (re.compile(r"\Afinal_layernorm\."), "norm."),
        (re.compile(r"\.self_attn\.dense\."), ".self_attn.o_proj."),
        (re.compile(r"\.mlp\.fc1\."), ".mlp.up_proj."),
        (re.compile(r"\.mlp\.fc2\."), ".mlp.down_proj."),
    ),
    "starcoder": _STARCODER,
    "starcoder2": (
        (re.compile(r"\.mlp\.c_fc\."), ".mlp.up_proj."),
        (re.compile(r"\.mlp\.c_proj\."), ".mlp.down_proj."),
    ),
}
HF_MASK = r"(transformer\.|gpt_neox\.)?(h|layers)\.\d+\.(attn|attention)\.bias\Z"
"""Causal masks, which old checkpoints of GPT-2, GPT-J and GPT-NeoX store."""
_TRANSPOSED = re.compile(r"(.*\.)?(c_attn|c_proj|c_fc)\.weight\Z")
_GROUPED = "grouped_qkv_proj"


def classic_hf_name(architecture: str, name: str) -> str:
    """The canonical name of a checkpoint's tensor, which has lost its ``model.``."""
    for pattern, replacement in _NAMES.get(architecture, ()):
        name = pattern.sub(replacement, name)
    return name


def classic_gguf_layer_names(architecture: str, tensors: Mapping[str, Any]) -> dict[str, str]:
    """What layers' tensors mean in a GGUF file, where it differs from the common names."""
    if architecture == "falcon" and "blk.0.attn_norm_2.weight" in tensors:
        return {"attn_norm_2": "input_layernorm", "attn_norm": "post_attention_layernorm"}
    return {}


def classic_hf_tensors(
    path: Path, architecture: str, tensors: Iterable[TensorRef]
) -> Iterator[TensorRef]:
    """A checkpoint's tensors in the common form.

    Raises:
        UnsupportedModelError: GPT-2's matrices are quantised.
    """
    for tensor in tensors:
        if architecture == "gpt2" and _TRANSPOSED.match(tensor.name):
            yield _transposed(path, tensor)
        elif architecture == "nemotron" and tensor.name.endswith("norm.weight"):
            values = dequantize(tensor) + np.float32(1)
            yield TensorRef(tensor.name, tensor.shape, QuantType.F32, values.view(np.uint8))
        else:
            yield tensor


# ---- queries, keys and values in one matrix --------------------------------------------------


def grouped_parts(hparams: ModelHParams, layer: str) -> list[tuple[str, int]]:
    """Name and rows of what a matrix of groups holds; none if ``layer`` is no such."""
    prefix, _, name = layer.rpartition(".")
    if name != _GROUPED:
        return []
    heads, kv_heads = hparams.num_attention_heads, hparams.num_key_value_heads
    rows = {"q_proj": heads, "k_proj": kv_heads, "v_proj": kv_heads}
    return [(f"{prefix}.{part}", count * hparams.head_dim) for part, count in rows.items()]


def grouped_order(hparams: ModelHParams, layer: str) -> Order | None:
    """The file's row for each row of queries, keys and values.

    A group is the query heads that share a key head, that one, and its value head.
    """
    if layer.rpartition(".")[2] != _GROUPED:
        return None
    kv_heads, head_dim = hparams.num_key_value_heads, hparams.head_dim
    shared = hparams.num_attention_heads // kv_heads
    rows = np.arange(kv_heads * (shared + 2) * head_dim).reshape(kv_heads, shared + 2, head_dim)
    parts = (rows[:, :shared], rows[:, shared], rows[:, shared + 1])
    return np.concatenate([part.reshape(-1) for part in parts])


# ---- transposed matrices ---------------------------------------------------------------------

_FLOATS: Mapping[QuantType, type[np.unsignedinteger[Any]]] = {
    QuantType.F32: np.uint32,
    QuantType.F16: np.uint16,
    QuantType.BF16: np.uint16,
}
"""Types whose values are moved as they are, and their bits."""


def _transposed(path: Path, tensor: TensorRef) -> TensorRef:
    if tensor.reader is not None or tensor.quant_type not in _FLOATS:
        raise UnsupportedModelError(
            f"{path}: tensor {tensor.name!r} is {tensor.format_name}; of GPT-2 quantised "
            "safetensors are not supported"
        )
    if len(tensor.shape) != 2:
        raise ModelLoadError(f"{path}: tensor {tensor.name!r} has shape {tensor.shape}: no matrix")
    rows, columns = tensor.shape
    return TensorRef(
        tensor.name, (columns, rows), tensor.quant_type, tensor.data, TransposedRows(tensor)
    )


@dataclass(frozen=True, eq=False)
class TransposedRows:
    """A `RowReader`: row i is column i of ``base``, a matrix of floats."""

    base: TensorRef

    @property
    def format_name(self) -> str:
        return self.base.format_name

    @property
    def views(self) -> Sequence[npt.NDArray[np.uint8]]:
        return (self.base.data,)

    def read_rows(self, start: int, stop: int) -> npt.NDArray[np.uint8]:
        matrix = self.base.data.view(_FLOATS[self.base.quant_type]).reshape(self.base.shape)
        return np.ascontiguousarray(matrix[:, start:stop].T).reshape(-1).view(np.uint8)
