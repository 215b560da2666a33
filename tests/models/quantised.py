"""Quantised Hugging Face checkpoints, written with NumPy alone from the description of each layout.

Every writer takes a matrix ``[n, k]`` and returns the tensors that stand for it, by the end of
their names, and the float32 values that they mean. Words are unsigned 32-bit integers; the first of
what a word holds is in its lowest bits.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tellin.loading.tensors import ModelHParams
from tests.kernels.linear_cases import e4m3
from tests.loading.models import safetensors_bytes, safetensors_entry
from tests.models.tiny import ALL_CASES, BASE, tensor_shapes, tiny_arrays

Arrays = dict[str, np.ndarray]
Written = tuple[Arrays, np.ndarray]
GROUP = 32
_DTYPES = {
    "float32": "F32",
    "float16": "F16",
    "uint16": "BF16",
    "uint32": "I32",
    "int32": "I32",
    "int64": "I64",
    "int8": "I8",
    "uint8": "F8_E4M3",
}


@dataclass(frozen=True)
class Scheme:
    """One way to store a layer, and what its configuration says."""

    config: dict[str, Any]
    write: Callable[[np.ndarray], Written]
    is_exact: bool
    """Whether the kernels' blocks hold the same values; else they are rounded to float16."""


def pack_words(codes: np.ndarray, bits: int, order: tuple[int, ...] = ()) -> np.ndarray:
    """``[rows, columns]`` codes to words ``[rows, ceil(columns * bits / 32)]``."""
    per_word = 32 // bits
    rows, columns = codes.shape
    padded = np.zeros((rows, -(-columns // per_word) * per_word), np.uint32)
    padded[:, :columns] = codes
    words = np.zeros((rows, padded.shape[1] // per_word), np.uint32)
    for place, neighbour in enumerate(order or range(per_word)):
        words |= padded[:, neighbour::per_word] << np.uint32(place * bits)
    return words


def quantise(
    matrix: np.ndarray, bits: int, group: int, symmetric: bool, scale_type: type = np.float16
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes ``[n, k]``, zero points and scales ``[n, groups]``."""
    n, k = matrix.shape
    grouped = matrix.reshape(n, k // group, group)
    top = (1 << bits) - 1
    if symmetric:
        scales = (np.abs(grouped).max(axis=2) / (top // 2)).astype(scale_type)
        zeros = np.full(scales.shape, (top + 1) // 2)
    else:
        low, high = grouped.min(axis=2), grouped.max(axis=2)
        scales = ((high - low) / top).astype(scale_type)
        zeros = np.clip(np.rint(-low / scales.astype(np.float32)), 1, top).astype(int)
    steps = grouped / scales.astype(np.float32)[:, :, None]
    codes = np.clip(np.rint(steps) + zeros[:, :, None], 0, top).astype(int)
    return codes.reshape(n, k), zeros, scales


def values_of(
    codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray, group_of: np.ndarray
) -> np.ndarray:
    """``scale * (code - zero)``, each exact in float32."""
    signed = (codes - zeros[:, group_of]).astype(np.float32)
    return signed * scales.astype(np.float32)[:, group_of]


def awq(matrix: np.ndarray, group: int = GROUP, symmetric: bool = False) -> Written:
    """``qweight [k, n/8]``, ``qzeros [k/g, n/8]``: outputs 0, 2, 4, 6, 1, 3, 5, 7 of eight in a
    word; ``scales [k/g, n]``."""
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    codes, zeros, scales = quantise(matrix, 4, group, symmetric)
    tensors = {
        "qweight": pack_words(codes.T, 4, order),
        "scales": np.ascontiguousarray(scales.T),
    }
    if not symmetric:
        tensors["qzeros"] = pack_words(zeros.T, 4, order)
    return tensors, values_of(codes, zeros, scales, np.arange(matrix.shape[1]) // group)


def gptq(
    matrix: np.ndarray,
    bits: int = 4,
    group: int = GROUP,
    symmetric: bool = True,
    offset: int = 1,
    by_activation: bool = False,
) -> Written:
    """``qweight [k/8, n]``: eight inputs in a word; ``qzeros [k/g, n/8]``, less ``offset``: eight
    outputs; ``scales [k/g, n]``; ``g_idx [k]``. 4 and 16 to a word with 8 and 2 bits.
    ``bias``: zeros that the model does not have."""
    n, k = matrix.shape
    group = k if group == -1 else group
    order = np.random.RandomState(k).permutation(k) if by_activation else np.arange(k)
    group_of = np.empty(k, int)
    group_of[order] = np.arange(k) // group
    codes = np.empty((n, k), int)
    codes[:, order], zeros, scales = quantise(matrix[:, order], bits, group, symmetric)
    tensors = {
        "qweight": np.ascontiguousarray(pack_words(codes, bits).T),
        "qzeros": pack_words(zeros.T - offset, bits),
        "scales": np.ascontiguousarray(scales.T),
        "g_idx": group_of.astype(np.int32),
        "bias": np.zeros(n, np.float16),
    }
    return tensors, values_of(codes, zeros, scales, group_of)


def packed(
    matrix: np.ndarray,
    bits: int = 4,
    group: int = GROUP,
    symmetric: bool = True,
    by_activation: bool = False,
    bfloat16: bool = False,
) -> Written:
    """``weight_packed [n, k/8]``, ``weight_scale [n, k/g]``, ``weight_shape``, and
    ``weight_zero_point [n/8, k/g]``: eight outputs in a word."""
    n, k = matrix.shape
    group = k if group == -1 else group
    order = np.random.RandomState(k).permutation(k) if by_activation else np.arange(k)
    group_of = np.empty(k, int)
    group_of[order] = np.arange(k) // group
    codes = np.empty((n, k), int)
    if bfloat16:
        matrix = matrix.astype(np.float32)
    codes[:, order], zeros, scales = quantise(matrix[:, order], bits, group, symmetric)
    if bfloat16:
        bits_of = scales.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
        scales = bits_of.view(np.float32)
        stored = (bits_of >> 16).astype(np.uint16)
    else:
        stored = scales
    tensors = {
        "weight_packed": pack_words(codes, bits),
        "weight_scale": stored,
        "weight_shape": np.array([n, k], np.int64),
    }
    if not symmetric:
        tensors["weight_zero_point"] = np.ascontiguousarray(pack_words(zeros.T, bits).T)
    if by_activation:
        tensors["weight_g_idx"] = group_of.astype(np.int32)
    return tensors, values_of(codes, zeros, scales, group_of)


def int8(matrix: np.ndarray) -> Written:
    """``weight [n, k]`` in signed bytes, ``weight_scale [n, 1]``."""
    scales = (np.abs(matrix).max(axis=1, keepdims=True) / 127).astype(np.float16)
    codes = np.rint(matrix / scales.astype(np.float32)).clip(-128, 127).astype(np.int8)
    values = codes.astype(np.float32) * scales.astype(np.float32)
    return {"weight": codes, "weight_scale": scales, "input_scale": np.ones(1, np.float32)}, values


def fp8(matrix: np.ndarray, block: tuple[int, int] | None = None, name: str = "") -> Written:
    """``weight [n, k]`` in E4M3, and a float32 scale: for each ``block``, each output ((1, k)) or
    the matrix (None)."""
    n, k = matrix.shape
    table = np.array([e4m3(code) for code in range(256)], np.float32)
    rows, columns = block or (n, k)
    columns = min(columns, k)
    counts = (-(-n // rows), -(-k // columns))
    scales = np.empty(counts, np.float32)
    for i in range(counts[0]):
        for j in range(counts[1]):
            part = matrix[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
            scales[i, j] = np.abs(part).max() / 448
    wide = scales[np.arange(n) // rows][:, np.arange(k) // columns]
    by_value = np.argsort(table[:255], kind="stable")
    by_value = by_value[np.isfinite(table[by_value])]
    middles = (table[by_value][1:] + table[by_value][:-1]) / 2
    codes = by_value[np.searchsorted(middles, matrix / wide)].astype(np.uint8)
    stored = scales if block else scales.reshape(-1)
    scale_name = name or ("weight_scale_inv" if block and block[0] > 1 else "weight_scale")
    return {"weight": codes, scale_name: stored}, table[codes] * wide


def fp8_static(matrix: np.ndarray) -> Written:
    """One scale for the matrix, one for what is multiplied by it: numbers without a dimension."""
    tensors, values = fp8(matrix, name="weight_scale_inv")
    tensors["weight_scale_inv"] = tensors["weight_scale_inv"].reshape(())
    return tensors | {"activation_scale": np.ones((), np.float32)}, values


def _compressed(stored: str, **weights: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": stored,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }


_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
_PACKED = _compressed("pack-quantized", num_bits=4, type="int")
SCHEMES: dict[str, Scheme] = {
    "awq": Scheme(_AWQ, awq, True),
    "awq_no_zeros": Scheme({**_AWQ, "zero_point": False}, lambda m: awq(m, 32, True), True),
    "gptq": Scheme(_GPTQ, gptq, True),
    "gptq_rows": Scheme({**_GPTQ, "group_size": -1}, lambda m: gptq(m, group=-1), True),
    "gptq_v2": Scheme(
        {**_GPTQ, "checkpoint_format": "gptq_v2", "sym": False},
        lambda m: gptq(m, symmetric=False, offset=0),
        True,
    ),
    "gptq_asymmetric": Scheme({**_GPTQ, "sym": False}, lambda m: gptq(m, symmetric=False), True),
    "gptq_2bit": Scheme({**_GPTQ, "bits": 2}, lambda m: gptq(m, 2), True),
    "gptq_8bit": Scheme({**_GPTQ, "bits": 8}, lambda m: gptq(m, 8), True),
    "gptq_8bit_asymmetric": Scheme(
        {**_GPTQ, "bits": 8, "sym": False}, lambda m: gptq(m, 8, symmetric=False), False
    ),
    "gptq_act_order": Scheme(
        {**_GPTQ, "desc_act": True}, lambda m: gptq(m, by_activation=True), False
    ),
    "int4": Scheme(_PACKED, packed, True),
    "int4_bfloat16": Scheme(_PACKED, lambda m: packed(m, bfloat16=True), True),
    "int4_asymmetric": Scheme(_PACKED, lambda m: packed(m, symmetric=False), True),
    "int4_act_order": Scheme(_PACKED, lambda m: packed(m, by_activation=True), False),
    "int8_packed": Scheme(_PACKED, lambda m: packed(m, 8, group=-1), True),
    "int8": Scheme(_compressed("int-quantized", num_bits=8, type="int"), int8, True),
    "float8": Scheme(
        _compressed("float-quantized", num_bits=8, type="float"),
        lambda m: fp8(m, (1, 1 << 20)),
        False,
    ),
    "fp8": Scheme({"quant_method": "fp8"}, fp8, False),
    "fp8_static": Scheme(
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
        fp8_static,
        False,
    ),
    "fp8_wide_blocks": Scheme(
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        lambda m: fp8(m, (128, 128)),
        False,
    ),
    "fp8_blocks": Scheme(
        {"quant_method": "fp8", "weight_block_size": [16, 32]}, lambda m: fp8(m, (16, 32)), False
    ),
}


WIDE = replace(BASE, hidden_size=128, intermediate_size=384, head_dim=32, num_hidden_layers=2)
"""Dimensions of whole blocks of E4M3."""


def wide_arrays() -> Arrays:
    """Weights of `WIDE`."""
    random = np.random.RandomState(11)
    arrays = {}
    for name, shape in tensor_shapes(WIDE).items():
        values = random.standard_normal(shape) / np.sqrt(shape[-1])
        arrays[name] = (1 + values if "norm" in name else values).astype(np.float32)
    return arrays


def write_checkpoint(
    folder: Path, name: str, scheme: Scheme, wide: bool = False, **keys: Any
) -> Arrays:
    """Write a tiny model (or `WIDE`) with its layers' linears quantised; returns what its weights
    mean, by canonical name."""
    tensors: Arrays = {}
    meant: Arrays = {}
    for key, values in (wide_arrays() if wide else tiny_arrays(name)).items():
        stored = key if key.startswith("lm_head") else f"model.{key}"
        is_linear = key.startswith("layers.") and key.endswith("_proj.weight")
        if not is_linear:
            tensors[stored] = meant[key] = values
            continue
        layer = stored.removesuffix(".weight")
        parts, meant[key] = scheme.write(values)
        tensors |= {f"{layer}.{kind}": array for kind, array in parts.items()}
    write_folder(folder, WIDE if wide else ALL_CASES[name], tensors, scheme.config, **keys)
    return meant


def write_folder(
    folder: Path, hp: ModelHParams, tensors: Arrays, quantisation: dict[str, Any], **keys: Any
) -> None:
    """``config.json`` and ``model.safetensors`` of a tiny model."""
    model_type = {"qwen3moe": "qwen3_moe"}.get(hp.architecture, hp.architecture)
    config = {
        "model_type": model_type,
        "hidden_size": hp.hidden_size,
        "intermediate_size": hp.intermediate_size,
        "num_hidden_layers": hp.num_hidden_layers,
        "num_attention_heads": hp.num_attention_heads,
        "num_key_value_heads": hp.num_key_value_heads,
        "head_dim": hp.head_dim,
        "max_position_embeddings": hp.max_position_embeddings,
        "vocab_size": hp.vocab_size,
        "rms_norm_eps": hp.norm_eps,
        "rope_theta": hp.rope_theta,
        "tie_word_embeddings": hp.tie_word_embeddings,
        "quantization_config": quantisation,
        **keys,
    }
    if hp.num_experts:
        config |= {
            "num_experts": hp.num_experts,
            "num_experts_per_tok": hp.num_experts_per_tok,
            "moe_intermediate_size": hp.moe_intermediate_size,
            "norm_topk_prob": hp.norm_topk_prob,
        }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(pack_tensors(tensors))


def pack_tensors(tensors: Arrays) -> bytes:
    """A safetensors file; uint8 is E4M3, uint16 BF16."""
    header: dict[str, Any] = {}
    data = b""
    for name, array in tensors.items():
        end = len(data) + array.nbytes
        header[name] = safetensors_entry(_DTYPES[array.dtype.name], array.shape, len(data), end)
        data += array.tobytes()
    return safetensors_bytes(header, data)
