"""Dequantisation against the `gguf` package: every type, bit for bit, and in any split of rows."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tellin.exceptions import UnsupportedModelError
from tellin.loading import dequantize as module
from tellin.loading.dequantize import dequantize, dequantize_rows
from tellin.loading.tensors import BLOCK_SIZES, QuantType, TensorRef
from tests.kernels.linear_cases import GGUF_TYPES


def random_tensor(quant_type: QuantType, num_rows: int, num_blocks: int, seed: int) -> TensorRef:
    """Random bytes: every code, every small scale; infinities and NaN among float16 scales."""
    row_bytes = num_blocks * quant_type.block_bytes
    data = np.random.RandomState(seed).randint(0, 256, num_rows * row_bytes).astype(np.uint8)
    shape = (num_rows, num_blocks * quant_type.block_size)
    return TensorRef("t", shape, quant_type, data)


def bits(values: np.ndarray) -> np.ndarray:
    """Bit patterns, with all NaNs alike."""
    values = np.where(np.isnan(values), np.float32(np.nan), values.astype(np.float32))
    return values.view(np.uint32)


@pytest.mark.parametrize("quant_type", GGUF_TYPES, ids=lambda t: t.name)
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@given(num_rows=st.integers(1, 5), num_blocks=st.integers(1, 6), seed=st.integers(0, 2**32 - 1))
def test_values_are_bitwise_those_of_the_reference_reader(
    quant_type: QuantType, num_rows: int, num_blocks: int, seed: int
) -> None:
    tensor = random_tensor(quant_type, num_rows, num_blocks, seed)
    expected = gguf.quants.dequantize(
        tensor.data.reshape(num_rows, -1), gguf.GGMLQuantizationType(int(quant_type))
    )
    values = dequantize(tensor)
    assert values.dtype == np.float32
    assert values.shape == tensor.shape
    np.testing.assert_array_equal(bits(values), bits(expected))


@pytest.mark.parametrize("quant_type", GGUF_TYPES, ids=lambda t: t.name)
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
def test_rows_are_the_rows_of_the_whole(
    quant_type: QuantType, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = random_tensor(quant_type, num_rows=7, num_blocks=2, seed=1)
    whole = dequantize(tensor)
    np.testing.assert_array_equal(bits(dequantize_rows(tensor, 2, 5)), bits(whole[2:5]))
    monkeypatch.setattr(module, "_CHUNK_ELEMENTS", tensor.shape[1] * 2)
    np.testing.assert_array_equal(bits(dequantize(tensor)), bits(whole))


def test_vectors_keep_their_shape() -> None:
    values = np.arange(5, dtype=np.float32)
    tensor = TensorRef("bias", (5,), QuantType.F32, values.view(np.uint8))
    np.testing.assert_array_equal(dequantize(tensor), values)


def test_every_type_has_a_formula() -> None:
    assert set(module._FUNCTIONS) == set(QuantType) == set(BLOCK_SIZES)


def test_a_type_without_a_formula_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(module._FUNCTIONS, QuantType.Q6_K)
    with pytest.raises(UnsupportedModelError, match="Q6_K"):
        dequantize(random_tensor(QuantType.Q6_K, 1, 1, 0))
