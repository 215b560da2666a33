"""Mixtures of experts, and dense families, from files: GGUF, and what `transformers` saves."""

from __future__ import annotations

import json
import re
from pathlib import Path

import gguf
import numpy as np
import pytest

from tellin.kernels.native import NativeBackend
from tellin.kernels.reference import ReferenceBackend
from tellin.loading import open_model
from tellin.loading.dequantize import dequantize, dequantize_rows
from tellin.loading.tensors import QuantType
from tellin.models import build_plan
from tests.models.stepping import logits_of
from tests.models.tiny import (
    ALL_CASES,
    EXPERT_CASES,
    LATENT_CASES,
    golden_logits,
    tiny_arrays,
    tiny_token_ids,
)
from tests.models.tiny_files import write_tiny_gguf

NAMES = ["glm4", "granite", "olmo2", "olmo3", "smollm3", *EXPERT_CASES, *LATENT_CASES]


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    return golden_logits()


def reference_logits(path: Path) -> np.ndarray:
    with open_model(path) as source:
        return logits_of(ReferenceBackend(build_plan(source)), tiny_token_ids())


@pytest.mark.parametrize("name", NAMES)
def test_gguf_files_give_the_logits_of_transformers(
    name: str, golden: dict[str, np.ndarray], tmp_path: Path
) -> None:
    """Stacked experts, permuted rows, keys that are left out."""
    path = write_tiny_gguf(tmp_path / "tiny.gguf", name)
    np.testing.assert_allclose(reference_logits(path), golden[name], rtol=0, atol=5e-5)


@pytest.mark.parametrize("name", LATENT_CASES)
def test_joined_matrices_of_latents_give_the_same(
    name: str, golden: dict[str, np.ndarray], tmp_path: Path
) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", name, joined_latents=True)
    np.testing.assert_allclose(reference_logits(path), golden[name], rtol=0, atol=5e-5)


def test_the_halves_of_a_joined_matrix_of_latents_keep_their_values(tmp_path: Path) -> None:
    """Rows in any pieces; keys are transposed, values stay in the blocks of the file."""
    path = write_tiny_gguf(tmp_path / "q8.gguf", "deepseek_v2", QuantType.Q8_0, joined_latents=True)
    latent, heads = ALL_CASES["deepseek_v2"].latent, 4
    assert latent is not None
    with open_model(path) as source:
        keys = source.tensors["layers.1.self_attn.k_b_proj.weight"]
        values = source.tensors["layers.1.self_attn.v_b_proj.weight"]
        assert (keys.quant_type, values.quant_type) == (QuantType.F32, QuantType.Q8_0)
        arrays = tiny_arrays("deepseek_v2")
        for tensor in (keys, values):
            whole = dequantize(tensor)
            expected = arrays[tensor.name]
            assert np.abs(whole - expected).max() < 0.02 * np.abs(expected).max()
            pieces = [
                dequantize_rows(tensor, i, min(i + 7, len(whole))) for i in range(0, len(whole), 7)
            ]
            np.testing.assert_array_equal(np.concatenate(pieces), whole)
        assert len(dequantize(values)) == heads * latent.value_dim
        plan = build_plan(source)
        expected = logits_of(ReferenceBackend(plan), tiny_token_ids())
        backend = NativeBackend(plan, activation_precision="float32", kv_cache_dtype="float32")
        logits = logits_of(backend, tiny_token_ids())
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "quant_type", [QuantType.Q4_0, QuantType.Q8_0, QuantType.MXFP4], ids=lambda t: t.name
)
def test_each_expert_of_a_quantised_stack_has_its_own_blocks(
    quant_type: QuantType, tmp_path: Path
) -> None:
    arrays = tiny_arrays("qwen3moe")
    path = write_tiny_gguf(tmp_path / "tiny.gguf", "qwen3moe", quant_type)
    with open_model(path) as source:
        names = [name for name in source.tensors if ".experts." in name]
        assert len(names) == 3 * 3 * 5
        for name in names:
            packed = gguf.quants.quantize(arrays[name], gguf.GGMLQuantizationType(int(quant_type)))
            tensor = source.tensors[name]
            np.testing.assert_array_equal(tensor.data, packed.reshape(-1))
            assert (tensor.shape, tensor.quant_type) == (arrays[name].shape, quant_type)


def test_gpt_oss_in_mxfp4(tmp_path: Path) -> None:
    """As it is published: in 15-bit steps the native backend gives the dequantised model."""
    path = write_tiny_gguf(tmp_path / "tiny.gguf", "gpt_oss", QuantType.MXFP4)
    expected = reference_logits(path)
    with open_model(path) as source:
        plan = build_plan(source)
        backend = NativeBackend(plan, activation_precision="int16", kv_cache_dtype="float32")
        error = logits_of(backend, tiny_token_ids()) - expected
    assert error.std() < 5e-4 * expected.std()


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if name != "gpt_oss"])
def test_checkpoints_of_transformers(
    name: str, golden: dict[str, np.ndarray], tmp_path: Path
) -> None:
    import transformers

    from tests.data.make.make_tiny_logits import class_names, make_config, state_dict

    hp = ALL_CASES[name]
    model = getattr(transformers, class_names(name, hp)[1])(make_config(name, hp))
    model.load_state_dict(state_dict(name, hp), strict=not hp.tie_word_embeddings)
    model.save_pretrained(tmp_path)
    np.testing.assert_allclose(reference_logits(tmp_path), golden[name], rtol=0, atol=5e-5)
    with open_model(tmp_path) as source:
        assert source.hparams.num_experts == hp.num_experts
        assert source.hparams.norm_topk_prob == hp.norm_topk_prob
    values = json.loads((tmp_path / "config.json").read_text())
    if hp.latent is None:
        assert values["model_type"].replace("_", "") == re.sub("[-_]", "", hp.architecture)
    with open_model(tmp_path) as source:
        assert source.hparams.latent == hp.latent
