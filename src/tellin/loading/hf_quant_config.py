"""The ``quantization_config`` of a Hugging Face checkpoint: which scheme, and is it one of ours.

Knows the configuration's keys and no tensors. Whatever changes what weights mean is read here or
refused by name; what only a GPU's kernels care for is passed over.

Source: the documented fields of transformers' quantisation configurations (5.24), AutoAWQ's and
GPTQModel's ``quantize_config.json``, the compressed-tensors format's documentation.
"""

from __future__ import annotations

from dataclasses import dataclass

from tellin.exceptions import ModelLoadError, UnsupportedModelError
from tellin.loading.typed_mapping import TypedMapping

AWQ, GPTQ, COMPRESSED, FP8 = "awq", "gptq", "compressed-tensors", "fp8"
_METHODS = {
    "awq": AWQ,
    "gptq": GPTQ,
    "compressed-tensors": COMPRESSED,
    "compressed_tensors": COMPRESSED,
    "fp8": FP8,
    "fbgemm_fp8": FP8,
}
_COMPRESSED_FORMATS = (
    "dense",
    "float-quantized",
    "int-quantized",
    "mixed-precision",
    "naive-quantized",
    "pack-quantized",
)
_GPTQ_BITS = (2, 4, 8)


@dataclass(frozen=True)
class QuantConfig:
    """How a checkpoint's quantised layers are stored."""

    method: str
    """awq, gptq, compressed-tensors or fp8."""
    bits: int = 0
    """Bits of a code (AWQ, GPTQ); the others' follow from their tensors."""
    group_size: int = 0
    """Input features that share a scale (AWQ, GPTQ); -1: all of a row."""
    is_symmetric: bool = False
    """The zero point is the middle of the codes (AWQ, GPTQ)."""
    zero_offset: int = 0
    """Added to zero points as they are stored."""
    by_activation: bool = False
    """GPTQ's ``desc_act``: groups are of any features, which ``g_idx`` tells."""
    block: tuple[int, int] | None = None
    """Output and input features that share a scale (FP8)."""


def quant_config(config: TypedMapping) -> QuantConfig | None:
    """What a ``config.json`` says; None: nothing, weights are plain.

    Raises:
        UnsupportedModelError: a scheme, or a variant of one, that is not supported; it is named.
        ModelLoadError: a key is missing or has an impossible value.
    """
    key = "quantization_config" if config.has("quantization_config") else "compression_config"
    if not config.has(key):
        return None
    values = config.get_mapping(key)
    name = values.get_str("quant_method", COMPRESSED if key == "compression_config" else "")
    method = _METHODS.get(name)
    if method is None:
        raise UnsupportedModelError(
            f"{config.path}: weights are quantised by {name or 'an unnamed method'!r} "
            f"('{key}'), which is not supported; supported: {', '.join(sorted(_METHODS))}; "
            "or use the original weights or a GGUF file"
        )
    if method == AWQ:
        return _awq(values)
    if method == GPTQ:
        return _gptq(values)
    return _compressed(values) if method == COMPRESSED else _fp8(values)


def _awq(values: TypedMapping) -> QuantConfig:
    _require(values, "version", values.get_str("version", "gemm").lower(), ("gemm",))
    bits_key = "bits" if values.has("bits") else "w_bit"
    bits = values.get_int(bits_key, 4)
    _require(values, bits_key, bits, (4,))
    group_key = "group_size" if values.has("group_size") else "q_group_size"
    has_zeros = values.get_bool("zero_point", True)
    return QuantConfig(AWQ, bits, _group_size(values, group_key, 128), not has_zeros)


def _gptq(values: TypedMapping) -> QuantConfig:
    stored = values.get_str("checkpoint_format", "gptq")
    _require(values, "checkpoint_format", stored, ("gptq", "gptq_v2"))
    bits = values.get_int("bits")
    _require(values, "bits", bits, _GPTQ_BITS)
    return QuantConfig(
        GPTQ,
        bits,
        _group_size(values, "group_size", 128),
        values.get_bool("sym", True),
        # Its first version stores zero points less one.
        1 if stored == "gptq" else 0,
        values.get_bool("desc_act", False),
    )


def _compressed(values: TypedMapping) -> QuantConfig:
    stored = values.get_str("format", "dense")
    _require(values, "format", stored, _COMPRESSED_FORMATS)
    if values.has("sparsity_config"):
        sparsity = values.get_mapping("sparsity_config")
        _require(sparsity, "format", sparsity.get_str("format", "dense"), ("dense",))
    if values.has("transform_config") and len(values.get_mapping("transform_config")):
        raise UnsupportedModelError(
            f"{values.path}: key 'transform_config' of the quantisation asks for rotations of "
            "activations, which are not supported"
        )
    block: tuple[int, int] | None = None
    groups = values.get_mapping("config_groups") if values.has("config_groups") else values
    for name in groups if values.has("config_groups") else ():
        group = groups.get_mapping(name)
        if group.has("format"):
            _require(group, "format", group.get_str("format"), _COMPRESSED_FORMATS)
        weights = group.get_mapping("weights") if group.has("weights") else None
        if weights is not None and weights.has("block_structure"):
            block = _block(weights, "block_structure")
    return QuantConfig(COMPRESSED, block=block)


def _fp8(values: TypedMapping) -> QuantConfig:
    _require(values, "fmt", values.get_str("fmt", "e4m3"), ("e4m3",))
    block = _block(values, "weight_block_size") if values.has("weight_block_size") else None
    return QuantConfig(FP8, block=block)


def _block(values: TypedMapping, key: str) -> tuple[int, int]:
    sizes = values[key]
    is_pair = isinstance(sizes, list) and len(sizes) == 2
    if not is_pair or any(type(size) is not int or size < 1 for size in sizes):
        raise ModelLoadError(
            f"{values.path}: key {key!r} is {sizes!r}, expected two positive integers"
        )
    return sizes[0], sizes[1]


def _group_size(values: TypedMapping, key: str, default: int) -> int:
    size = values.get_int(key, default)
    if size != -1 and size < 1:
        raise ModelLoadError(
            f"{values.path}: key {key!r} is {size}, expected a positive integer, or -1"
        )
    return size


def _require(values: TypedMapping, key: str, value: object, supported: tuple[object, ...]) -> None:
    if value not in supported:
        raise UnsupportedModelError(
            f"{values.path}: key {key!r} of the quantisation is {value!r}, which is not supported; "
            f"supported: {', '.join(map(str, supported))}"
        )
