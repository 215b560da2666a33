"""Hyperparameters from GGUF metadata and from config.json: values, defaults, refusals (P48)."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tellin.exceptions import ModelLoadError, UnsupportedModelError
from tellin.loading.gguf_hparams import hparams_from_gguf
from tellin.loading.hf_hparams import hparams_from_config
from tellin.loading.hparams import SUPPORTED_ARCHITECTURES
from tellin.loading.model_source import open_model
from tellin.loading.names import is_dropped_hf_name
from tellin.loading.tensors import ModelHParams, QuantType, RopeScaling, TensorRef
from tellin.loading.typed_mapping import TypedMapping
from tests.loading.gguf_writer import write_gguf
from tests.loading.models import config, gguf_metadata, gguf_tensors, write_model

PATH = Path("model")


def gguf(
    architecture: str = "llama",
    tensors: dict[str, np.ndarray] | None = None,
    drop: tuple[str, ...] = (),
    **keys: Any,
) -> ModelHParams:
    metadata = gguf_metadata(architecture, **keys)
    for key in drop:
        del metadata[f"{architecture}.{key}"]
    arrays = gguf_tensors(architecture) | (tensors or {})
    refs = {
        name: TensorRef(name, array.shape, QuantType.F32, array.reshape(-1).view(np.uint8))
        for name, array in arrays.items()
    }
    return hparams_from_gguf(TypedMapping(PATH, metadata), refs)


def hf(model_type: str = "llama", drop: tuple[str, ...] = (), **keys: Any) -> ModelHParams:
    values = config(model_type, **keys)
    for key in drop:
        del values[key]
    return hparams_from_config(TypedMapping(PATH, values))


# ---- GGUF ----------------------------------------------------------------------------------------


def test_gguf_llama() -> None:
    assert gguf("llama", **{"rope.freq_base": 5000.0, "rope.dimension_count": 8}) == ModelHParams(
        architecture="llama",
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=260,
        max_position_embeddings=128,
        norm_eps=1e-6,
        rope_theta=5000.0,
        rope_interleaved=True,
        tie_word_embeddings=True,
    )


def test_gguf_defaults_and_choices() -> None:
    assert gguf(drop=("attention.head_count_kv",)).num_key_value_heads == 4
    assert gguf().rope_theta == 10_000.0
    assert (
        gguf(tensors={"output.weight": np.zeros((260, 32), np.float32)}).tie_word_embeddings
        is False
    )
    assert gguf(**{"attention.head_count_kv": np.array([2, 2], np.int32)}).num_key_value_heads == 2
    assert gguf(**{"rope.dimension_count": 4}).rope_dim == 4
    assert gguf(**{"attention.key_length": 16, "attention.value_length": 16}).head_dim == 16
    for name in ("qwen2", "qwen3", "phi3", "gemma3"):
        assert gguf(name).rope_interleaved is False


def test_gguf_gemma3() -> None:
    hparams = gguf("gemma3", **{"attention.sliding_window": 16, "rope.freq_base": 1e6})
    assert (hparams.sliding_window, hparams.sliding_window_pattern) == (16, 6)
    assert (hparams.rope_theta, hparams.rope_local_theta) == (1e6, 10_000.0)
    assert hparams.hidden_act == "gelu_tanh"
    assert hparams.embedding_scale == float(np.float32(math.sqrt(32)))
    assert hparams.norm_weight_offset == 0.0
    assert hparams.attention_scale is None
    assert hparams.final_logit_softcapping is None


def test_gguf_gemma2() -> None:
    hparams = gguf("gemma2", **{"attention.sliding_window": 16})
    assert hparams.sliding_window_pattern == 2
    assert (hparams.attn_logit_softcapping, hparams.final_logit_softcapping) == (50.0, 30.0)
    assert gguf("gemma2", final_logit_softcapping=0.0).final_logit_softcapping is None
    assert gguf("gemma2", **{"attention.scale": 0.25}).attention_scale == 0.25


def test_gguf_27b_scales_by_heads() -> None:
    tensors = {f"blk.{i}.x": np.zeros(1, np.float32) for i in range(62)}
    assert gguf("gemma3", tensors, block_count=62).attention_scale == 1 / math.sqrt(32 / 4)


def test_gguf_rope_scaling() -> None:
    linear = gguf(**{"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}).rope_scaling
    assert linear == RopeScaling(kind="linear", factor=8.0)
    assert gguf(**{"rope.scale_linear": 4.0}).rope_scaling == RopeScaling("linear", 4.0)
    yarn = gguf(
        **{
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 64,
        }
    ).rope_scaling
    assert yarn == RopeScaling("yarn", 4.0, original_max_position_embeddings=64)
    factors = np.array([1.0, 2.0, 4.0, 8.0], np.float32)
    assert gguf(tensors={"rope_freqs.weight": factors}).rope_scaling == RopeScaling(
        factors=(1.0, 2.0, 4.0, 8.0)
    )
    long = gguf(
        "phi3",
        {"rope_factors_short.weight": factors, "rope_factors_long.weight": factors * 2},
        **{"rope.scaling.original_context_length": 64, "rope.scaling.attn_factor": 1.19},
    ).rope_scaling
    assert (long.kind, long.attention_factor) == ("longrope", 1.19)
    assert long.factors == (1.0, 2.0, 4.0, 8.0)
    assert long.long_factors == (2.0, 4.0, 8.0, 16.0)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"block_count": 1 << 31}, "2147483648 layers, but only 20 tensors"),
        ({"block_count": 0}, r"llama\.block_count is 0, allowed are 1 to 4096"),
        ({"embedding_length": "x"}, r"'llama\.embedding_length' is a str, expected an integer"),
        ({"attention.head_count": 0}, "has 0 attention heads"),
        ({"attention.head_count_kv": 0}, "head_count_kv is 0"),
        ({"attention.head_count_kv": 3}, "4 attention heads cannot share 3"),
        ({"attention.head_count": 64}, "head_dim is 0"),
        ({"context_length": -5}, "context_length is -5"),
        ({"rope.freq_base": float("nan")}, r"'llama\.rope\.freq_base' is nan"),
        ({"rope.freq_base": 0.0}, "rope.freq_base is 0.0, expected a positive number"),
        ({"rope.dimension_count": 3}, "rope.dimension_count is 3, expected an even number"),
        ({"rope.dimension_count": 16}, "rope.dimension_count is 16, allowed are 2 to 8"),
        ({"attention.layer_norm_rms_epsilon": -1.0}, "layer_norm_rms_epsilon is -1.0"),
        ({"rope.scaling.factor": -2.0}, "rope.scaling.factor is -2.0"),
    ],
)
def test_gguf_impossible_values(keys: dict[str, Any], message: str) -> None:
    """P49"""
    with pytest.raises(ModelLoadError, match=message):
        gguf(**keys)


def test_gguf_missing_keys_and_tensors() -> None:
    with pytest.raises(ModelLoadError, match=r"'llama\.context_length' \(an integer\) is missing"):
        gguf(drop=("context_length",))
    with pytest.raises(ModelLoadError, match=r"'general\.architecture'.*is missing"):
        hparams_from_gguf(TypedMapping(PATH, {}), {})
    with pytest.raises(ModelLoadError, match=r"'rope_freqs\.weight' is not a float32 vector"):
        gguf(tensors={"rope_freqs.weight": np.ones((2, 2), np.float32)})
    with pytest.raises(ModelLoadError, match=r"rope frequency factor is 0\.0"):
        gguf(tensors={"rope_freqs.weight": np.zeros(4, np.float32)})


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"expert_count": 8, "expert_used_count": 2, "expert_gating_func": 3}, "gating_func is 3"),
        ({"use_parallel_residual": True}, "parallel residuals"),
        ({"attention.key_length": 8, "attention.value_length": 16}, "only equal ones"),
        ({"attention.head_count_kv": np.array([1, 2], np.int32)}, "differs from layer to layer"),
        ({"rope.scaling.type": "ntk"}, "rope scaling 'ntk' is not supported"),
    ],
)
def test_gguf_unsupported_variants(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        gguf(**keys)


def test_unknown_architecture_is_named_at_once(tmp_path: Path) -> None:
    """P48: named within a second, with the list of supported ones."""
    path = write_gguf(tmp_path / "x.gguf", {"general.architecture": "mamba"})
    start = time.perf_counter()
    with pytest.raises(
        UnsupportedModelError,
        match=r"x\.gguf: architecture 'mamba' .general.architecture.*llama.*qwen3",
    ):
        open_model(path)
    assert time.perf_counter() - start < 1.0
    with pytest.raises(
        UnsupportedModelError, match=r"architecture 'moth' .model_type. is not supported"
    ):
        hf("moth")


@pytest.mark.parametrize(("architecture", "text"), [("qwen2vl", "qwen2"), ("qwen3vl", "qwen3")])
def test_text_models_in_gguf_files_of_models_that_see(
    tmp_path: Path, architecture: str, text: str
) -> None:
    sections = {"rope.dimension_sections": np.array([1, 2, 1, 0], np.int32)}
    is_third = architecture == "qwen3vl"
    if is_third:
        sections["n_deepstack_layers"] = 2
    tensors = gguf_tensors(text)
    path = write_gguf(tmp_path / "m.gguf", gguf_metadata(architecture, **sections), tensors)
    with open_model(path) as source:
        assert source.hparams == replace(
            gguf(text),
            norm_eps=source.hparams.norm_eps,
            mrope_section=(1, 2, 1),
            mrope_in_blocks=not is_third,
            deepstack_layers=2 if is_third else 0,
        )


def test_sections_of_four_axes(tmp_path: Path) -> None:
    keys = {"rope.dimension_sections": np.array([1, 1, 1, 1], np.int32)}
    path = write_gguf(tmp_path / "m.gguf", gguf_metadata("qwen2vl", **keys), gguf_tensors("qwen2"))
    with pytest.raises(UnsupportedModelError, match=r"dimension_sections is \(1, 1, 1, 1\)"):
        open_model(path)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3"])
def test_every_architecture_opens(tmp_path: Path, architecture: str) -> None:
    assert architecture in SUPPORTED_ARCHITECTURES
    with open_model(write_model(tmp_path / "m.gguf", architecture)) as source:
        assert source.hparams.architecture == architecture


# ---- config.json ---------------------------------------------------------------------------------


def test_hf_llama() -> None:
    assert hf("llama") == ModelHParams(
        architecture="llama",
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=260,
        max_position_embeddings=128,
        norm_eps=1e-6,
        rope_theta=5000.0,
    )


@pytest.mark.parametrize(
    ("model_type", "text"), [("qwen2_vl", "qwen2"), ("qwen2_5_vl", "qwen2"), ("qwen3_vl", "qwen3")]
)
def test_text_models_of_models_that_see(model_type: str, text: str) -> None:
    """Nested as they are now, and flat as they were."""
    rope = {"rope_scaling": {"type": "mrope", "mrope_section": [1, 2, 1]}, "rope_theta": 5000.0}
    seeing = {"mrope_section": (1, 2, 1), "mrope_in_blocks": text == "qwen2"}
    expected = replace(hf(text, rope_theta=5000.0), **seeing)
    nested = {**config(f"{model_type}_text"), **rope}
    vision = {"deepstack_visual_indexes": []}
    values = {"model_type": model_type, "text_config": nested, "vision_config": vision}
    assert hparams_from_config(TypedMapping(PATH, values)) == expected
    assert hf(model_type, vision_config=vision, **rope) == expected
    values["text_config"] = config("llama")
    with pytest.raises(UnsupportedModelError, match="with a text model 'llama'"):
        hparams_from_config(TypedMapping(PATH, values))
    assert is_dropped_hf_name("model.visual.blocks.0.attn.qkv.weight")
    assert is_dropped_hf_name("visual.merger.mlp.0.bias")


def test_hf_llama3_scaling_in_both_generations() -> None:
    scaling = {
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    }
    old = hf(rope_scaling=scaling, rope_theta=500_000.0)
    assert old.rope_scaling == RopeScaling(
        "llama3", 32.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0
    )
    new = hf(rope_parameters={**scaling, "rope_theta": 500_000.0}, drop=("rope_theta",))
    assert new == old


def test_hf_yarn_extends_the_context() -> None:
    hparams = hf(
        "qwen2",
        rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    )
    assert hparams.rope_scaling == RopeScaling("yarn", 4.0, 128)
    assert hparams.max_position_embeddings == 512


def test_hf_other_scalings() -> None:
    assert hf(rope_scaling={"type": "linear", "factor": 2}).rope_scaling == RopeScaling(
        "linear", 2.0, 128
    )
    assert hf(rope_scaling={"rope_type": "default"}).rope_scaling == RopeScaling()
    assert hf(rope_scaling={"type": "dynamic", "factor": 2.0}).rope_scaling == RopeScaling()
    assert hf(rope_scaling=None).rope_scaling == RopeScaling()
    with pytest.raises(UnsupportedModelError, match="rope scaling 'mrope' is not supported"):
        hf(rope_scaling={"type": "mrope", "factor": 2.0})
    with pytest.raises(ModelLoadError, match=r"'factor'.*is missing"):
        hf(rope_scaling={"type": "linear"})


def test_hf_phi3() -> None:
    hparams = hf(
        "phi3",
        rope_scaling={"type": "su", "short_factor": [1, 1.5], "long_factor": [2, 3]},
        partial_rotary_factor=0.5,
        original_max_position_embeddings=64,
        sliding_window=2047,
    )
    assert hparams.rope_scaling == RopeScaling(
        "longrope", 1.0, 64, factors=(1.0, 1.5), long_factors=(2.0, 3.0)
    )
    assert (hparams.rope_dim, hparams.sliding_window) == (4, 2047)


def test_hf_gemma3_text_and_multimodal() -> None:
    keys = {
        "head_dim": 8,
        "query_pre_attn_scalar": 16,
        "sliding_window": 16,
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_local_base_freq": 20_000.0,
        "sliding_window_pattern": 6,
    }
    text = hf("gemma3_text", **keys)
    assert text.architecture == "gemma3"
    assert (text.attention_scale, text.norm_weight_offset) == (0.25, 1.0)
    assert (text.sliding_window, text.sliding_window_pattern) == (16, 6)
    assert (text.rope_local_theta, text.tie_word_embeddings) == (20_000.0, True)
    assert text.embedding_scale == float(np.float32(math.sqrt(32)))
    wrapper = {"model_type": "gemma3", "text_config": config("gemma3_text", **keys)}
    assert hparams_from_config(TypedMapping(PATH, wrapper)) == text
    newer = hf(
        "gemma3_text",
        drop=("rope_theta",),
        **{key: value for key, value in keys.items() if "rope" not in key and "pattern" not in key},
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 20_000.0},
        },
    )
    assert (newer.rope_theta, newer.rope_local_theta) == (1e6, 20_000.0)
    assert newer.rope_scaling == RopeScaling("linear", 8.0, 128)
    assert newer.sliding_window_pattern == 2


def test_hf_gemma_families() -> None:
    gemma = hf("gemma", head_dim=8, hidden_act="gelu")
    assert (gemma.hidden_act, gemma.norm_weight_offset) == ("gelu_tanh", 1.0)
    gemma2 = hf("gemma2", head_dim=8)
    assert (gemma2.sliding_window, gemma2.sliding_window_pattern) == (4096, 2)
    assert (gemma2.attn_logit_softcapping, gemma2.final_logit_softcapping) == (50.0, 30.0)
    assert gemma2.attention_scale == 256**-0.5


def test_hf_sliding_windows() -> None:
    assert hf("mistral", sliding_window=64).sliding_window == 64
    assert hf("mistral", sliding_window=None).sliding_window is None
    assert hf("qwen2", sliding_window=64, use_sliding_window=False).sliding_window is None
    assert hf("qwen2", use_sliding_window=True, max_window_layers=2).sliding_window is None
    with pytest.raises(UnsupportedModelError, match="use_sliding_window"):
        hf("qwen2", use_sliding_window=True, max_window_layers=1)
    kinds = ["sliding_attention"] * 3 + ["full_attention"] * 2
    with pytest.raises(UnsupportedModelError, match="do not follow a regular pattern"):
        hf("gemma2", layer_types=kinds, num_hidden_layers=5)


def test_hf_bert() -> None:
    hparams = hparams_from_config(
        TypedMapping(
            PATH,
            {
                "model_type": "bert",
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "vocab_size": 100,
            },
        )
    )
    assert (hparams.hidden_act, hparams.norm_eps, hparams.head_dim) == ("gelu", 1e-12, 8)


@pytest.mark.parametrize(
    ("keys", "error", "message"),
    [
        ({"hidden_act": "mish"}, UnsupportedModelError, "activation 'mish' is not supported"),
        ({"use_bidirectional_attention": True}, UnsupportedModelError, "both directions"),
        (
            {"model_type": "gemma3_text", "layer_types": ["chunked_attention"] * 64},
            UnsupportedModelError,
            "'chunked_attention', which is not supported; supported are full_attention",
        ),
        (
            {"model_type": "gemma3_text", "layer_types": []},
            ModelLoadError,
            "layer_types has 0 entries",
        ),
        (
            {
                "model_type": "olmo3",
                "rope_parameters": {
                    "full_attention": {"rope_type": "default"},
                    "sliding_attention": {"rope_type": "yarn"},
                },
            },
            UnsupportedModelError,
            "'rope_type' of 'sliding_attention' is 'yarn'",
        ),
        (
            {"model_type": "bloom"},
            UnsupportedModelError,
            r"'bloom' \(model_type\) is not supported: it has ALiBi.*deepseek_v3.*kimi_k2",
        ),
        ({"is_causal": False}, UnsupportedModelError, "both directions"),
        ({"model_type": "roberta", "pad_token_id": -3}, ModelLoadError, "pad_token_id is -3"),
        ({"hidden_size": "big"}, ModelLoadError, "'hidden_size' is a str"),
        ({"hidden_size": None}, ModelLoadError, "'hidden_size'.*is missing"),
        ({"num_attention_heads": 0}, ModelLoadError, "num_attention_heads is 0"),
        ({"rope_theta": True}, ModelLoadError, "'rope_theta' is a bool, expected a number"),
        ({"vocab_size": 1 << 40}, ModelLoadError, "vocab_size is 1099511627776"),
        ({"model_type": 5}, ModelLoadError, "'model_type' is a int"),
        ({"model_type": ""}, ModelLoadError, "'model_type'.*is missing"),
        ({"rope_scaling": "x"}, ModelLoadError, "'rope_scaling' is a str, expected an object"),
        ({"hidden_size": 10**400}, ModelLoadError, "'hidden_size' is an integer of more than 64"),
        ({"rms_norm_eps": 10**400}, ModelLoadError, "'rms_norm_eps' is inf, not a finite number"),
        ({"partial_rotary_factor": 1.7e308}, ModelLoadError, "308, which makes rope_dim"),
        (
            {
                "rope_scaling": {
                    "rope_type": "yarn", "factor": 1.7e308, "original_max_position_embeddings": 64
                }
            },
            ModelLoadError,
            "which makes max_position_embeddings 18446744073709551616",
        ),
        (
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [10**400]}},
            ModelLoadError,
            "'short_factor' holds an integer of more than 64 bits",
        ),
    ],
)  # fmt: skip
def test_hf_refusals(keys: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        hf(**keys)


def test_real_gguf_files(smollm2_path: Path) -> None:
    hparams = open_model(smollm2_path).hparams
    assert (hparams.hidden_size, hparams.num_hidden_layers, hparams.vocab_size) == (576, 30, 49_152)
    assert (hparams.head_dim, hparams.num_key_value_heads) == (64, 3)
    assert hparams.rope_interleaved
    assert hparams.tie_word_embeddings
