"""Quantised layers of a Hugging Face checkpoint: from their several tensors to one weight each.

Finds the tensors of each layer by their names, checks that their shapes fit together, and gives the
layer's weight a reader (`tellin.loading.hf_quant_rows`) that makes its rows when they are packed.
Layers that a checkpoint left as they were pass unchanged. Nothing of a weight is read here but
GPTQ's lists of groups.

Layouts, for a layer of n outputs and k inputs (words are 32 bits, codes from the lowest bits on):

====================  ==============================================================================
AWQ (gemm)            ``qweight [k, n/8]``, ``qzeros [k/g, n/8]``: a word holds outputs 0, 2, 4, 6,
                      1, 3, 5, 7 of eight; ``scales [k/g, n]``
GPTQ                  ``qweight [k/8, n]``: eight inputs of an output; ``qzeros [k/g, n/8]``;
                      ``scales [k/g, n]``; ``g_idx [k]``: the group of each input
compressed-tensors    ``weight_packed [n, k/8]``: codes plus 8; ``weight_scale [n, k/g]``;
                      ``weight_zero_point [n/8, k/g]``; ``weight_shape [2]``; ``weight_g_idx [k]``;
                      or ``weight`` itself as signed bytes or E4M3
FP8                   ``weight [n, k]`` in E4M3; ``weight_scale_inv`` or ``weight_scale``, of which
                      it is a multiple: one, one per output, or one per rectangle
====================  ==============================================================================

Scales of activations (``input_scale``, ``activation_scale``) and of KV caches are not used:
activations are not E4M3 here, but of higher precision.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tellin.exceptions import ModelLoadError, UnsupportedModelError
from tellin.loading.dequantize import dequantize
from tellin.loading.hf_quant_config import AWQ, GPTQ, QuantConfig
from tellin.loading.hf_quant_rows import (
    BLOCK,
    Float8Rows,
    IntegerMatrix,
    IntegerRows,
    PackedIntegers,
    Scales,
    SignedBytes,
)
from tellin.loading.safetensors import RawTensor
from tellin.loading.tensors import QuantType, TensorRef

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_DROPPED = re.compile(
    r".*\.(input_scale|input_zero_point|output_scale|output_zero_point|input_scale_ub"
    r"|activation_scale|[qkv]_scale|[qkv]_zero_point|weight_shape)\Z"
)
_FLOATS = (QuantType.F16, QuantType.BF16, QuantType.F32)
_FLOAT8 = "F8_E4M3"
_EIGHTS = 0x88888888
"""A word of eight zero points in the middle of 4 bits."""


def assemble(
    path: Path,
    config: QuantConfig,
    tensors: Mapping[str, TensorRef],
    raw: Mapping[str, RawTensor],
) -> dict[str, TensorRef]:
    """All weights of a checkpoint under Hugging Face's names, those of quantised layers read by a
    reader.

    Args:
        path: of the checkpoint, for errors.
        tensors: the float tensors.
        raw: the others.

    Raises:
        ModelLoadError: tensors of a layer are missing or do not fit together.
        UnsupportedModelError: a layer is stored in a way that is not supported.
    """
    return _Assembler(path, config, tensors, raw).run()


class _Assembler:
    def __init__(
        self,
        path: Path,
        config: QuantConfig,
        tensors: Mapping[str, TensorRef],
        raw: Mapping[str, RawTensor],
    ) -> None:
        self.path = path
        self.config = config
        self.tensors = dict(tensors)
        self.raw = dict(raw)

    def run(self) -> dict[str, TensorRef]:
        made: dict[str, TensorRef] = {}
        for name in list(self.raw):
            layer, _, kind = name.rpartition(".")
            if kind == "qweight" and self.config.method == AWQ:
                weight = self._awq(layer)
            elif kind == "qweight" and self.config.method == GPTQ:
                weight = self._gptq(layer)
            elif kind == "weight_packed":
                weight = self._packed(layer)
            elif kind == "weight" and self.raw[name].dtype == _FLOAT8:
                weight = self._float8(layer)
            elif kind == "weight" and self.raw[name].dtype == "I8":
                weight = self._bytes(layer)
            else:
                continue
            if layer.endswith("embed_tokens"):
                raise UnsupportedModelError(
                    f"{self.path}: tensor {name!r}: quantised embeddings are not supported"
                )
            made[weight.name] = weight
            self._drop_zero_bias(layer)
        for name in [*self.raw, *self.tensors]:
            if _DROPPED.match(name):
                self.raw.pop(name, None)
                self.tensors.pop(name, None)
        for name, tensor in self.raw.items():
            raise UnsupportedModelError(
                f"{self.path}: tensor {name!r} has type {tensor.dtype}, which is not supported in "
                f"a checkpoint quantised by {self.config.method}"
            )
        for name in made:
            if name in self.tensors:
                raise ModelLoadError(f"{self.path}: two tensors mean {name!r}")
        return self.tensors | made

    # ---- schemes -----------------------------------------------------------------------------

    def _awq(self, layer: str) -> TensorRef:
        words = self._words(f"{layer}.qweight")
        columns, rows = words.shape[0], words.shape[1] * 8
        scales, num_groups = self._transposed_scales(layer, rows, columns)
        zeros: IntegerMatrix | int = 8
        if not self.config.is_symmetric:
            zeros = self._zero_words(f"{layer}.qzeros", (num_groups, rows // 8), 4, AWQ_ORDER)
        elif f"{layer}.qzeros" in self.raw and (self._words(f"{layer}.qzeros") != _EIGHTS).any():
            raise self._error(
                f"tensor '{layer}.qzeros' has zero points other than 8, but the configuration says "
                "zero_point false"
            )
        codes = PackedIntegers(words.T, 4, True, columns, AWQ_ORDER)
        quant_type = QuantType.Q4_0 if self.config.is_symmetric else QuantType.Q5_0
        reader = IntegerRows(
            f"{layer}.qweight",
            "AWQ4",
            quant_type,
            columns,
            codes,
            zeros,
            0,
            scales,
            num_groups,
        )
        return self._weight(layer, (rows, columns), quant_type, reader)

    def _gptq(self, layer: str) -> TensorRef:
        config = self.config
        words = self._words(f"{layer}.qweight")
        per_word = 32 // config.bits
        columns, rows = words.shape[0] * per_word, words.shape[1]
        scales, num_groups = self._transposed_scales(layer, rows, columns)
        zeros: IntegerMatrix = self._zero_words(
            f"{layer}.qzeros", (num_groups, -(-rows // per_word)), config.bits, ()
        )
        group_of = self._groups(f"{layer}.g_idx", columns, num_groups)
        quant_type = QuantType.Q4_0 if config.bits < 8 else QuantType.Q8_0
        if not config.is_symmetric and config.bits == 4:
            quant_type = QuantType.Q5_0
        if group_of is not None or (not config.is_symmetric and config.bits == 8):
            quant_type = QuantType.F16
        reader = IntegerRows(
            f"{layer}.qweight",
            f"GPTQ{config.bits}",
            quant_type,
            columns,
            PackedIntegers(words.T, config.bits, False, columns),
            zeros,
            config.zero_offset,
            scales,
            num_groups,
            group_of,
        )
        return self._weight(layer, (rows, columns), quant_type, reader)

    def _packed(self, layer: str) -> TensorRef:
        words = self._words(f"{layer}.weight_packed")
        rows, columns = self._stored_shape(f"{layer}.weight_shape")
        bits = next((b for b in (4, 8) if words.shape == (rows, -(-columns * b // 32))), 0)
        if bits == 0:
            raise self._error(
                f"tensor '{layer}.weight_packed' has shape {words.shape}; {rows} rows of {columns} "
                "codes would be of neither 4 nor 8 bits"
            )
        scales, num_groups = self._scales(layer, rows, columns)
        per_word = 32 // bits
        zeros: IntegerMatrix | int = 1 << (bits - 1)
        zero_name = f"{layer}.weight_zero_point"
        is_symmetric = zero_name not in self.raw
        if not is_symmetric:
            stored = self._words(zero_name)
            self._require_shape(zero_name, stored.shape, (-(-rows // per_word), num_groups))
            zeros = PackedIntegers(stored, bits, True, num_groups)
        group_of = self._groups(f"{layer}.weight_g_idx", columns, num_groups)
        quant_type = {4: QuantType.Q4_0, 8: QuantType.Q8_0}[bits]
        if not is_symmetric:
            quant_type = QuantType.Q5_0 if bits == 4 else QuantType.F16
        if group_of is not None:
            quant_type = QuantType.F16
        codes = PackedIntegers(words, bits, False, columns)
        reader = IntegerRows(
            f"{layer}.weight_packed",
            f"INT{bits}",
            quant_type,
            columns,
            codes,
            zeros,
            0,
            scales,
            num_groups,
            group_of,
        )
        return self._weight(layer, (rows, columns), quant_type, reader)

    def _bytes(self, layer: str) -> TensorRef:
        name = f"{layer}.weight"
        rows, columns = self._matrix_shape(self.raw[name])
        values = SignedBytes(self.raw.pop(name).data.view(np.int8).reshape(rows, columns))
        scales, num_groups = self._scales(layer, rows, columns)
        zeros: IntegerMatrix | int = 0
        quant_type = QuantType.Q8_0
        stored = self.raw.pop(f"{layer}.weight_zero_point", None)
        if stored is not None:
            self._require_type(stored, "I8")
            self._require_shape(stored.name, stored.shape, (rows, num_groups))
            zeros = SignedBytes(stored.data.view(np.int8).reshape(rows, num_groups))
            quant_type = QuantType.F16
        reader = IntegerRows(
            name, "INT8", quant_type, columns, values, zeros, 0, scales, num_groups
        )
        return self._weight(layer, (rows, columns), quant_type, reader)

    def _float8(self, layer: str) -> TensorRef:
        name = f"{layer}.weight"
        rows, columns = self._matrix_shape(self.raw[name])
        values = self.raw.pop(name).data.reshape(rows, columns)
        scale = self.tensors.pop(f"{layer}.weight_scale_inv", None)
        if scale is None:
            scale = self._float(f"{layer}.weight_scale")
        block = (rows, columns) if scale.num_elements == 1 else (1, columns)
        counts = _counts(rows, columns, block)
        if self.config.block is not None:
            rectangles = _counts(rows, columns, self.config.block)
            if scale.shape == rectangles or scale.num_elements not in (1, rows):
                block, counts = self.config.block, rectangles
        if scale.num_elements != counts[0] * counts[1] or scale.quant_type not in _FLOATS:
            raise self._error(
                f"tensor {scale.name!r} has shape {scale.shape} and type {scale.quant_type.name}; "
                f"{counts} scales are expected for {rows} rows of {columns} weights"
            )
        scales = dequantize(scale).reshape(counts)
        reader = Float8Rows(name, "FP8", values, scales, block)
        return self._weight(layer, (rows, columns), reader.quant_type, reader)

    # ---- tensors -----------------------------------------------------------------------------

    def _weight(
        self,
        layer: str,
        shape: tuple[int, int],
        quant_type: QuantType,
        reader: IntegerRows | Float8Rows,
    ) -> TensorRef:
        return TensorRef(f"{layer}.weight", shape, quant_type, reader.views[0], reader)

    def _transposed_scales(self, layer: str, rows: int, columns: int) -> tuple[Scales, int]:
        """``scales [groups, rows]``, whose groups are of the configuration's size."""
        size = columns if self.config.group_size == -1 else self.config.group_size
        num_groups = self._num_groups(layer, columns, size)
        stored = self._float(f"{layer}.scales")
        self._require_shape(stored.name, stored.shape, (num_groups, rows))
        return _scales_of(stored, (num_groups, rows), transpose=True), num_groups

    def _scales(self, layer: str, rows: int, columns: int) -> tuple[Scales, int]:
        """``weight_scale``: one, or ``[rows]``, or ``[rows, groups]``."""
        stored = self._float(f"{layer}.weight_scale")
        if stored.num_elements == 1:
            one = _scales_of(stored, (1, 1))
            return Scales(np.broadcast_to(one.values, (rows, 1)), one.is_bfloat16), 1
        if len(stored.shape) == 1:
            shape = (*stored.shape, 1)
        else:
            self._require_shape(stored.name, stored.shape, (rows, stored.shape[-1]))
            shape = (rows, stored.shape[-1])
        self._require_shape(stored.name, shape, (rows, shape[1]))
        num_groups = shape[1]
        if columns % num_groups:
            raise self._error(
                f"tensor {stored.name!r} has {num_groups} scales for {columns} columns"
            )
        self._num_groups(layer, columns, columns // num_groups)
        return _scales_of(stored, (rows, num_groups)), num_groups

    def _num_groups(self, layer: str, columns: int, size: int) -> int:
        if columns % size or size % BLOCK:
            raise UnsupportedModelError(
                f"{self.path}: layer {layer!r} has groups of {size} inputs of {columns}; groups "
                f"must be a multiple of {BLOCK} and divide the inputs"
            )
        return columns // size

    def _zero_words(
        self, name: str, shape: tuple[int, int], bits: int, order: tuple[int, ...]
    ) -> PackedIntegers:
        """Zero points ``[groups, outputs]``, words of neighbouring outputs."""
        words = self._words(name)
        self._require_shape(name, words.shape, shape)
        return PackedIntegers(words.T, bits, True, shape[0], order)

    def _groups(self, name: str, columns: int, num_groups: int) -> npt.NDArray[np.int64] | None:
        """Group of each column; None if neighbours are together, in order."""
        stored = self.raw.pop(name, None)
        if stored is None:
            if self.config.by_activation:
                raise self._error(f"tensor {name!r} is missing")
            return None
        self._require_type(stored, "I32")
        self._require_shape(name, stored.shape, (columns,))
        groups = stored.data.view("<i4").astype(np.int64)
        if groups.min() < 0 or groups.max() >= num_groups:
            raise self._error(
                f"tensor {name!r} names group {groups.min() if groups.min() < 0 else groups.max()}"
                f" of {num_groups}"
            )
        in_order = np.arange(columns) // (columns // num_groups)
        return None if np.array_equal(groups, in_order) else groups

    def _stored_shape(self, name: str) -> tuple[int, int]:
        stored = self.raw.pop(name, None)
        if stored is None:
            raise self._error(f"tensor {name!r} is missing")
        if stored.dtype not in ("I32", "I64") or stored.shape != (2,):
            raise self._error(
                f"tensor {name!r} has shape {stored.shape} and type {stored.dtype}, expected two "
                "integers"
            )
        rows, columns = stored.data.view("<i4" if stored.dtype == "I32" else "<i8").tolist()
        if not (0 < rows < 1 << 31 and 0 < columns < 1 << 31):
            raise self._error(f"tensor {name!r} is {rows}, {columns}, not a matrix's shape")
        return rows, columns

    def _words(self, name: str) -> npt.NDArray[np.uint32]:
        stored = self.raw.pop(name, None)
        if stored is None:
            raise self._error(f"tensor {name!r} is missing")
        self._require_type(stored, "I32")
        return stored.data.view("<u4").reshape(self._matrix_shape(stored))

    def _float(self, name: str) -> TensorRef:
        stored = self.tensors.pop(name, None)
        if stored is None:
            raise self._error(f"tensor {name!r} is missing (or is not F16, BF16 or F32)")
        return stored

    def _drop_zero_bias(self, layer: str) -> None:
        """GPTQ's writers add a bias of zeros to every layer, whether the model has one or not."""
        bias = self.tensors.get(f"{layer}.bias")
        if self.config.method == GPTQ and bias is not None and not bias.data.any():
            del self.tensors[bias.name]

    def _matrix_shape(self, tensor: RawTensor) -> tuple[int, int]:
        if len(tensor.shape) != 2:
            raise self._error(f"tensor {tensor.name!r} has shape {tensor.shape}, not a matrix's")
        return tensor.shape[0], tensor.shape[1]

    def _require_type(self, tensor: RawTensor, dtype: str) -> None:
        if tensor.dtype != dtype:
            raise self._error(f"tensor {tensor.name!r} has type {tensor.dtype}, expected {dtype}")

    def _require_shape(self, name: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
        if tuple(shape) != expected:
            raise self._error(f"tensor {name!r} has shape {tuple(shape)}, expected {expected}")

    def _error(self, message: str) -> ModelLoadError:
        return ModelLoadError(f"{self.path}: {message}")


def _counts(rows: int, columns: int, block: tuple[int, int]) -> tuple[int, int]:
    """Rectangles of a matrix, down and across."""
    return -(-rows // block[0]), -(-columns // block[1])


def _scales_of(tensor: TensorRef, shape: tuple[int, int], transpose: bool = False) -> Scales:
    dtype = {QuantType.F16: "<f2", QuantType.BF16: "<u2", QuantType.F32: "<f4"}[tensor.quant_type]
    values = tensor.data.view(dtype).reshape(shape)
    return Scales(values.T if transpose else values, tensor.quant_type is QuantType.BF16)
