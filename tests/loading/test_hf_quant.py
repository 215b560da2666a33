"""Quantised checkpoints that are refused: by configuration, and by tensors that do not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tellin.exceptions import ModelLoadError, TellinError, UnsupportedModelError
from tellin.loading import open_model
from tellin.loading.dequantize import E4M3_VALUES, dequantize
from tellin.loading.finite import is_finite
from tellin.loading.hf_quant_config import QuantConfig, quant_config
from tellin.loading.typed_mapping import TypedMapping
from tests.kernels.linear_cases import e4m3
from tests.models.quantised import SCHEMES, Arrays, Scheme, write_checkpoint

LAYER = "model.layers.0.self_attn.q_proj"


def config_of(**keys: Any) -> QuantConfig | None:
    return quant_config(TypedMapping(Path("config.json"), {"quantization_config": keys}))


def test_configurations() -> None:
    assert quant_config(TypedMapping(Path("config.json"), {})) is None
    assert config_of(quant_method="awq", w_bit=4, q_group_size=64) == QuantConfig(
        "awq", 4, 64, False
    )
    assert config_of(quant_method="gptq", bits=4, group_size=-1, desc_act=True) == QuantConfig(
        "gptq", 4, -1, True, 1, True
    )
    fp8 = config_of(quant_method="fp8", weight_block_size=[128, 64])
    assert fp8 == QuantConfig("fp8", block=(128, 64))
    assert config_of(quant_method="fbgemm_fp8") == QuantConfig("fp8")


@pytest.mark.parametrize(
    ("keys", "error", "message"),
    [
        ({}, UnsupportedModelError, "an unnamed method.*use the original weights or a GGUF file"),
        ({"quant_method": "bitsandbytes"}, UnsupportedModelError, "by 'bitsandbytes'"),
        ({"quant_method": "exl2"}, UnsupportedModelError, "by 'exl2'.*supported: awq,"),
        ({"quant_method": "awq", "version": "gemv"}, UnsupportedModelError, "'version'.*'gemv'"),
        ({"quant_method": "awq", "bits": 8}, UnsupportedModelError, "'bits'.*is 8.*supported: 4"),
        ({"quant_method": "gptq", "bits": 3}, UnsupportedModelError, "is 3.*supported: 2, 4, 8"),
        ({"quant_method": "gptq"}, ModelLoadError, "'bits'.*is missing"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, ModelLoadError, "'group_size' is 0"),
        (
            {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"},
            UnsupportedModelError,
            "'checkpoint_format'.*'marlin'",
        ),
        (
            {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
            UnsupportedModelError,
            "'nvfp4-pack-quantized'",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "sparsity_config": {"format": "sparse-24-bitmask"},
            },
            UnsupportedModelError,
            "'sparse-24-bitmask'",
        ),
        (
            {"quant_method": "compressed-tensors", "transform_config": {"config_groups": {}}},
            UnsupportedModelError,
            "rotations of activations",
        ),
        ({"quant_method": "fp8", "fmt": "e5m2"}, UnsupportedModelError, "'e5m2'"),
        (
            {"quant_method": "fp8", "weight_block_size": [128, 0]},
            ModelLoadError,
            r"'weight_block_size' is \[128, 0\]",
        ),
    ],
)
def test_refused_configurations(
    keys: dict[str, Any], error: type[TellinError], message: str
) -> None:
    with pytest.raises(error, match=message):
        config_of(**keys)


def damaged(tmp_path: Path, name: str, **changes: np.ndarray | None) -> Path:
    """A checkpoint whose first layer's tensors are replaced; None: left out."""
    scheme = SCHEMES[name]
    rest = list(changes.items())

    def write(matrix: np.ndarray) -> tuple[Arrays, np.ndarray]:
        tensors, values = scheme.write(matrix)
        while rest:
            kind, array = rest.pop()
            tensors.pop(kind, None)
            if array is not None:
                tensors[kind] = array
        return tensors, values

    write_checkpoint(tmp_path, "llama", Scheme(scheme.config, write, scheme.is_exact))
    return tmp_path


def words(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.uint32)


@pytest.mark.parametrize(
    ("scheme", "changes", "error", "message"),
    [
        ("awq", {"qzeros": None}, ModelLoadError, f"'{LAYER}.qzeros' is missing"),
        ("awq", {"scales": None}, ModelLoadError, f"'{LAYER}.scales' is missing"),
        ("awq", {"qzeros": words(3, 8)}, ModelLoadError, r"shape \(3, 8\), expected \(2, 8\)"),
        ("awq", {"qweight": words(48, 8)}, UnsupportedModelError, "groups of 32 inputs of 48"),
        ("awq", {"qweight": words(64)}, ModelLoadError, r"shape \(64,\), not a matrix's"),
        ("awq", {"scales": np.ones((2, 63), np.float16)}, ModelLoadError, r"\(2, 63\), expected"),
        ("awq", {"qzeros": np.zeros((2, 8), np.int8)}, ModelLoadError, "type I8, expected I32"),
        ("awq_no_zeros", {"qzeros": words(2, 8)}, ModelLoadError, "qzeros.*than 8.*zero_point"),
        ("awq", {"other": words(2, 2)}, UnsupportedModelError, "type I32.*quantised by awq"),
        ("awq", {"weight": np.ones((64, 64), np.float16)}, ModelLoadError, "two tensors mean"),
        ("gptq", {"qweight": words(7, 64)}, UnsupportedModelError, "groups of 32 inputs of 56"),
        ("gptq", {"g_idx": np.zeros(63, np.int32)}, ModelLoadError, r"\(63,\), expected \(64,\)"),
        ("gptq", {"g_idx": np.full(64, 2, np.int32)}, ModelLoadError, "names group 2 of 2"),
        ("gptq", {"g_idx": np.full(64, -1, np.int32)}, ModelLoadError, "names group -1 of 2"),
        ("gptq_act_order", {"g_idx": None}, ModelLoadError, "g_idx' is missing"),
        ("int4", {"weight_shape": None}, ModelLoadError, "weight_shape' is missing"),
        ("int4", {"weight_shape": np.array([64], np.int64)}, ModelLoadError, "two integers"),
        ("int4", {"weight_shape": np.array([64, -1], np.int64)}, ModelLoadError, "64, -1"),
        ("int4", {"weight_shape": np.array([64, 32], np.int64)}, UnsupportedModelError, "of 16"),
        ("int4", {"weight_shape": np.array([64, 99], np.int64)}, ModelLoadError, "neither 4 nor 8"),
        ("int4", {"weight_scale": np.ones((64, 3), np.float16)}, ModelLoadError, "3 scales for 64"),
        ("int4", {"weight_scale": np.ones((64, 4), np.float16)}, UnsupportedModelError, "of 16"),
        ("int4_asymmetric", {"weight_zero_point": words(8, 3)}, ModelLoadError, r"\(8, 2\)"),
        ("fp8", {"weight_scale": np.ones(2, np.float32)}, ModelLoadError, r"\(64, 1\) scales"),
        ("fp8", {"weight_scale": None}, ModelLoadError, "weight_scale' is missing"),
        (
            "fp8_blocks",
            {"weight_scale_inv": np.ones((4, 3), np.float32)},
            ModelLoadError,
            r"\(4, 2",
        ),
    ],
)
def test_tensors_that_do_not_fit(
    scheme: str,
    changes: dict[str, np.ndarray | None],
    error: type[TellinError],
    message: str,
    tmp_path: Path,
) -> None:
    with pytest.raises(error, match=message):
        open_model(damaged(tmp_path, scheme, **changes))


def test_a_zero_point_that_the_configuration_denies(tmp_path: Path) -> None:
    """``sym`` says that every zero point is 8."""
    folder = damaged(
        tmp_path, "gptq", qzeros=words(2, 8), qweight=np.full((8, 64), 0xFFFFFFFF, "u4")
    )
    with open_model(folder) as source, pytest.raises(ModelLoadError, match="reach from 14 to 14"):
        dequantize(source.tensors["layers.0.self_attn.q_proj.weight"])


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e6])
def test_scales_that_are_not_finite(value: float, tmp_path: Path) -> None:
    scales = np.full((64, 1), value, np.float32)
    with open_model(damaged(tmp_path, "int8", weight_scale=scales)) as source:
        tensor = source.tensors["layers.0.self_attn.q_proj.weight"]
        assert not is_finite(tensor)
        with pytest.raises(ModelLoadError, match=r"q_proj.weight'.*beyond float16"):
            dequantize(tensor)
        with pytest.raises(ModelLoadError, match="holds NaN or infinity"):
            source.check_weights()


def test_zero_points_of_eight_are_those_of_a_symmetric_awq(tmp_path: Path) -> None:
    eights = np.full((2, 8), 0x88888888, np.uint32)
    folders = [tmp_path / name for name in ("with", "without")]
    for folder, changes in zip(folders, ({"qzeros": eights}, {}), strict=True):
        folder.mkdir()
        damaged(folder, "awq_no_zeros", **changes)
    values = []
    for folder in folders:
        with open_model(folder) as source:
            values.append(dequantize(source.tensors["layers.0.self_attn.q_proj.weight"]))
    np.testing.assert_array_equal(*values)


def test_scales_of_float8_that_are_not_finite(tmp_path: Path) -> None:
    scales = np.full(1, 3e38, np.float32)
    with (
        open_model(damaged(tmp_path, "fp8", weight_scale=scales)) as source,
        pytest.raises(ModelLoadError, match="beyond float16"),
    ):
        dequantize(source.tensors["layers.0.self_attn.q_proj.weight"])


def test_every_e4m3_code() -> None:
    np.testing.assert_array_equal(E4M3_VALUES, np.array([e4m3(c) for c in range(256)], np.float32))


def test_a_bias_of_the_model_stays(tmp_path: Path) -> None:
    """GPTQ's biases of zeros are of no layer; others are weights."""
    bias = np.ones(64, np.float16)
    with open_model(damaged(tmp_path, "gptq", bias=bias)) as source:
        assert [name for name in source.tensors if name.endswith("bias")] == [
            "layers.0.self_attn.q_proj.bias"
        ]


def test_row_ranges(tmp_path: Path) -> None:
    """Rows from the middle of words, of rectangles of scales, and of ranges of ranges."""
    for name in ("awq", "gptq", "int4_asymmetric", "fp8_blocks"):
        folder = tmp_path / name
        folder.mkdir()
        write_checkpoint(folder, "llama", SCHEMES[name])
        with open_model(folder) as source:
            tensor = source.tensors["layers.1.mlp.up_proj.weight"]
            whole = dequantize(tensor)
            part = tensor.row_range(5, 90).row_range(6, 60)
            np.testing.assert_array_equal(dequantize(part), whole[11:65], err_msg=name)
            assert part.num_bytes * 96 == tensor.num_bytes * 54
