"""Quantised Hugging Face checkpoints: AWQ, GPTQ, compressed-tensors, FP8."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tellin.exceptions import ModelLoadError
from tellin.kernels import _C, packing
from tellin.kernels.native import NativeBackend
from tellin.kernels.reference import ReferenceBackend
from tellin.loading import open_model
from tellin.loading.dequantize import dequantize
from tellin.loading.tensors import QuantType
from tellin.models import build_plan
from tests.models.quantised import SCHEMES, WIDE, write_checkpoint, write_folder
from tests.models.stepping import logits_of
from tests.models.tiny import ALL_CASES, memory_source, tiny_arrays, tiny_token_ids


@pytest.mark.parametrize("scheme", SCHEMES)
def test_weights_are_what_the_checkpoint_means(scheme: str, tmp_path: Path) -> None:
    """Bitwise where blocks hold codes and scales; else rounded once, to float16."""
    meant = write_checkpoint(tmp_path, "llama", SCHEMES[scheme])
    with open_model(tmp_path) as source:
        assert set(source.tensors) == set(meant)
        for name, expected in meant.items():
            tensor = source.tensors[name]
            assert tensor.shape == expected.shape
            values = dequantize(tensor)
            if tensor.reader is not None and not SCHEMES[scheme].is_exact:
                assert tensor.quant_type.name == "F16"
                expected = expected.astype(np.float16).astype(np.float32)
            np.testing.assert_array_equal(values, expected, err_msg=name)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_native_logits(scheme: str, tmp_path: Path) -> None:
    """Rows go from the file to the kernels' layout in slices; the reference runs on float32."""
    meant = write_checkpoint(tmp_path, "llama", SCHEMES[scheme])
    tokens = tiny_token_ids()
    expected = logits_of(
        ReferenceBackend(build_plan(memory_source(ALL_CASES["llama"], meant))), tokens
    )
    with open_model(tmp_path) as source:
        plan = build_plan(source)
        options = {"kv_cache_dtype": "float32", "activation_precision": "float32"}
        logits = logits_of(NativeBackend(plan, **options), tokens)
        tolerance = 1e-4 if SCHEMES[scheme].is_exact else 2e-2
        np.testing.assert_allclose(logits, expected, rtol=0, atol=tolerance)
        reference = logits_of(ReferenceBackend(plan), tokens)
        np.testing.assert_allclose(logits, reference, rtol=0, atol=1e-4)


@pytest.mark.parametrize("scheme", ["float8", "fp8", "fp8_wide_blocks", "awq", "int8_packed"])
def test_wide_layers(scheme: str, tmp_path: Path) -> None:
    """E4M3 stays E4M3 where 128 inputs share a scale: no rounding at all."""
    scheme_config = SCHEMES[scheme]
    meant = write_checkpoint(tmp_path, "", scheme_config, wide=True)
    tokens = tiny_token_ids()
    expected = logits_of(ReferenceBackend(build_plan(memory_source(WIDE, meant))), tokens)
    with open_model(tmp_path) as source:
        for name, values in meant.items():
            np.testing.assert_array_equal(dequantize(source.tensors[name]), values, err_msg=name)
        if "8" in scheme and not scheme.startswith("int8"):
            down = source.tensors["layers.0.mlp.down_proj.weight"]
            assert down.quant_type is QuantType.E4M3
            assert down.format_name == "FP8"
        plan = build_plan(source)
        for isa in _C.linear_variants():
            backend = NativeBackend(
                plan, isa=isa, kv_cache_dtype="float32", activation_precision="float32"
            )
            np.testing.assert_allclose(logits_of(backend, tokens), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("scheme", ["awq", "gptq", "fp8_blocks"])
def test_experts(scheme: str, tmp_path: Path) -> None:
    """One layer per expert, as these checkpoints have them."""
    meant = write_checkpoint(tmp_path, "qwen3moe", SCHEMES[scheme])
    tokens = tiny_token_ids()
    with open_model(tmp_path) as source:
        assert set(source.tensors) == set(meant)
        plan = build_plan(source)
        logits = logits_of(
            NativeBackend(plan, kv_cache_dtype="float32", activation_precision="float32"), tokens
        )
        reference = logits_of(ReferenceBackend(plan), tokens)
    np.testing.assert_allclose(logits, reference, rtol=0, atol=1e-4)
    expected = logits_of(
        ReferenceBackend(build_plan(memory_source(ALL_CASES["qwen3moe"], meant))), tokens
    )
    np.testing.assert_allclose(reference, expected, rtol=0, atol=2e-2)


@pytest.mark.parametrize("scheme", ["awq", "gptq", "int4_asymmetric", "fp8_blocks"])
def test_fused_layers_are_parted_into_rows(scheme: str, tmp_path: Path) -> None:
    """Phi-3 stores q, k and v in one layer, gate and up in another."""
    hp, arrays = ALL_CASES["phi3"], tiny_arrays("phi3")
    meant = dict(arrays)
    tensors: dict[str, np.ndarray] = {}
    for i in range(hp.num_hidden_layers):
        for fused, names in (("self_attn.qkv", "qkv"), ("mlp.gate_up", ("gate", "up"))):
            block = f"layers.{i}.{fused.split('.')[0]}"
            parts = [f"{block}.{name}_proj.weight" for name in names]
            matrix = np.concatenate([arrays.pop(part) for part in parts])
            stored, values = SCHEMES[scheme].write(matrix)
            layer = f"model.layers.{i}.{fused}_proj"
            tensors |= {f"{layer}.{kind}": array for kind, array in stored.items()}
            ends = np.cumsum([len(meant[part]) for part in parts])[:-1]
            meant |= dict(zip(parts, np.split(values, ends), strict=True))
    for key, values in arrays.items():
        tensors[key if key.startswith("lm_head") else f"model.{key}"] = values
    config = SCHEMES[scheme].config
    write_folder(tmp_path, hp, tensors, config, sliding_window=hp.sliding_window)
    tokens = tiny_token_ids()
    expected = logits_of(ReferenceBackend(build_plan(memory_source(hp, meant))), tokens)
    with open_model(tmp_path) as source:
        backend = NativeBackend(
            build_plan(source), kv_cache_dtype="float32", activation_precision="float32"
        )
        tolerance = 1e-4 if SCHEMES[scheme].is_exact else 2e-2
        np.testing.assert_allclose(logits_of(backend, tokens), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_rows_are_made_ahead_in_small_slices(
    num_threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bitwise what one slice gives, whatever thread is ready first."""
    write_checkpoint(tmp_path, "llama", SCHEMES["awq"])
    tokens = tiny_token_ids()
    with open_model(tmp_path) as source:
        expected = logits_of(NativeBackend(build_plan(source)), tokens)
        monkeypatch.setattr(packing, "_READ_SLICE_BYTES", 1)
        backend = NativeBackend(build_plan(source), num_threads=num_threads)
        np.testing.assert_array_equal(logits_of(backend, tokens), expected)


def test_a_scale_that_is_not_finite_stops_the_load(tmp_path: Path) -> None:
    def write(matrix: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
        tensors, values = SCHEMES["awq"].write(matrix)
        tensors["scales"][0, 5] = np.inf
        return tensors, values

    write_checkpoint(tmp_path, "llama", replace(SCHEMES["awq"], write=write))
    with open_model(tmp_path) as source:
        plan = build_plan(source)
        with pytest.raises(ModelLoadError, match=r"_proj.qweight'.*NaN, infinite or beyond"):
            NativeBackend(plan)


def test_a_program_refuses_rows_that_do_not_fit() -> None:
    program = _C.Program("", 1, 16, "float32")
    with pytest.raises(ValueError, match="whole blocks of 32"):
        program.add_row_weight(2, 16, 40, "int8")
