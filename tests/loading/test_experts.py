"""Mixtures of experts in files: names, stacked matrices as views, hyperparameters, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tellin.exceptions import ModelLoadError, TellinError, UnsupportedModelError
from tellin.loading.hf_hparams import hparams_from_config
from tellin.loading.model_source import ModelSource, open_model
from tellin.loading.names import is_dropped_hf_name
from tellin.loading.tensors import ModelHParams, TensorRef
from tellin.loading.typed_mapping import TypedMapping
from tests.loading.gguf_writer import write_gguf
from tests.loading.models import (
    HIDDEN,
    LAYERS,
    config,
    gguf_metadata,
    gguf_tensors,
    hf_tensors,
    pack_safetensors,
)

EXPERTS, WIDTH, SHARED = 3, 16, 24
KEYS = {"expert_count": EXPERTS, "expert_used_count": 2, "expert_feed_forward_length": WIDTH}
PARTS = ("gate", "up", "down")
Arrays = dict[str, np.ndarray]


def matrices(layer: int) -> Arrays:
    """Router and stacked experts of a layer, by GGUF's last names."""
    random = np.random.default_rng(layer)
    shapes: dict[str, tuple[int, ...]] = {
        "gate_inp": (EXPERTS, HIDDEN),
        "gate_exps": (EXPERTS, WIDTH, HIDDEN),
        "up_exps": (EXPERTS, WIDTH, HIDDEN),
        "down_exps": (EXPERTS, HIDDEN, WIDTH),
    }
    return {
        name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()
    }


def without_mlp(arrays: Arrays) -> Arrays:
    names = ("ffn_gate", "ffn_up", "ffn_down", "mlp.")
    return {k: v for k, v in arrays.items() if not any(name in k for name in names)}


def stacked(architecture: str = "qwen3") -> Arrays:
    """A GGUF model with stacked experts, as converters write it."""
    arrays = without_mlp(gguf_tensors(architecture))
    for i in range(LAYERS):
        arrays |= {f"blk.{i}.ffn_{name}.weight": array for name, array in matrices(i).items()}
    return arrays


def open_gguf(
    folder: Path, arrays: Arrays, architecture: str = "qwen3moe", **keys: Any
) -> ModelSource:
    metadata = gguf_metadata(architecture, **(KEYS | keys))
    return open_model(write_gguf(folder / "m.gguf", metadata, arrays))


def open_hf(folder: Path, arrays: Arrays, model_type: str, **keys: Any) -> ModelSource:
    values = config(model_type, num_experts_per_tok=2, **keys)
    (folder / "config.json").write_text(json.dumps(values))
    (folder / "model.safetensors").write_bytes(pack_safetensors(arrays))
    return open_model(folder)


def values(tensor: TensorRef) -> np.ndarray:
    return tensor.data.view(np.float32).reshape(tensor.shape)


def assert_experts(source: ModelSource) -> None:
    """Every expert's matrices, whatever way they were stored; each a view into the file."""
    for i in range(LAYERS):
        arrays, mlp = matrices(i), f"layers.{i}.mlp"
        np.testing.assert_array_equal(
            values(source.tensors[f"{mlp}.gate.weight"]), arrays["gate_inp"]
        )
        for e in range(EXPERTS):
            for part in PARTS:
                tensor = source.tensors[f"{mlp}.experts.{e}.{part}_proj.weight"]
                np.testing.assert_array_equal(values(tensor), arrays[f"{part}_exps"][e])
                assert not tensor.data.flags.owndata
                assert tensor.name == f"{mlp}.experts.{e}.{part}_proj.weight"
    assert not [name for name in source.tensors if "exps" in name or "block_sparse" in name]


# ---- names and views -----------------------------------------------------------------------------


def test_stacked_experts_of_gguf(tmp_path: Path) -> None:
    source = open_gguf(tmp_path, stacked())
    assert_experts(source)
    hparams = source.hparams
    assert (hparams.num_experts, hparams.num_experts_per_tok) == (EXPERTS, 2)
    assert (hparams.moe_intermediate_size, hparams.intermediate_size) == (WIDTH, 48)


def test_gate_and_up_stacked_in_one(tmp_path: Path) -> None:
    arrays = stacked()
    for i in range(LAYERS):
        gate, up = (arrays.pop(f"blk.{i}.ffn_{part}_exps.weight") for part in ("gate", "up"))
        arrays[f"blk.{i}.ffn_gate_up_exps.weight"] = np.concatenate([gate, up], axis=1)
    assert_experts(open_gguf(tmp_path, arrays))


def test_one_tensor_per_expert_as_the_first_files_of_mixtral(tmp_path: Path) -> None:
    arrays = stacked("llama")
    for i in range(LAYERS):
        for part in PARTS:
            for e, matrix in enumerate(arrays.pop(f"blk.{i}.ffn_{part}_exps.weight")):
                arrays[f"blk.{i}.ffn_{part}.{e}.weight"] = matrix
    source = open_gguf(tmp_path, arrays, "llama")
    assert_experts(source)
    assert source.hparams.architecture == "mixtral"
    assert source.hparams.rope_interleaved
    assert source.hparams.norm_topk_prob


def test_the_shared_expert_of_qwen2moe(tmp_path: Path) -> None:
    arrays = stacked("qwen2")
    for i in range(LAYERS):
        arrays |= {
            f"blk.{i}.ffn_gate_inp_shexp.weight": np.arange(HIDDEN, dtype=np.float32),
            f"blk.{i}.ffn_gate_shexp.weight": np.ones((SHARED, HIDDEN), np.float32),
            f"blk.{i}.ffn_up_shexp.weight": np.ones((SHARED, HIDDEN), np.float32),
            f"blk.{i}.ffn_down_shexp.weight": np.ones((HIDDEN, SHARED), np.float32),
        }
    source = open_gguf(tmp_path, arrays, "qwen2moe", expert_shared_feed_forward_length=SHARED)
    assert_experts(source)
    gate = source.tensors["layers.1.mlp.shared_expert_gate.weight"]
    np.testing.assert_array_equal(values(gate), np.arange(HIDDEN)[None])
    assert source.tensors["layers.1.mlp.shared_expert.down_proj.weight"].shape == (HIDDEN, SHARED)
    assert not source.hparams.norm_topk_prob


def hf_arrays(names: dict[str, str]) -> Arrays:
    """A Hugging Face model with one tensor per expert, named as ``names`` says."""
    arrays = without_mlp(hf_tensors(tie=False))
    for i in range(LAYERS):
        layer = matrices(i)
        arrays[f"model.layers.{i}.{names['router']}"] = layer["gate_inp"]
        for part in PARTS:
            for e, matrix in enumerate(layer[f"{part}_exps"]):
                arrays[f"model.layers.{i}.{names[part].format(e)}"] = matrix
    return arrays


MIXTRAL_NAMES = {
    "router": "block_sparse_moe.gate.weight",
    "gate": "block_sparse_moe.experts.{}.w1.weight",
    "up": "block_sparse_moe.experts.{}.w3.weight",
    "down": "block_sparse_moe.experts.{}.w2.weight",
}
QWEN_NAMES = {
    "router": "mlp.gate.weight",
    "gate": "mlp.experts.{}.gate_proj.weight",
    "up": "mlp.experts.{}.up_proj.weight",
    "down": "mlp.experts.{}.down_proj.weight",
}


def test_experts_of_hugging_face(tmp_path: Path) -> None:
    source = open_hf(
        tmp_path,
        hf_arrays(MIXTRAL_NAMES),
        "mixtral",
        intermediate_size=WIDTH,
        num_local_experts=EXPERTS,
    )
    assert_experts(source)
    assert source.hparams.norm_topk_prob
    keys = {"num_experts": EXPERTS, "moe_intermediate_size": WIDTH, "norm_topk_prob": True}
    for model_type in ("qwen3_moe", "qwen2_moe"):
        source = open_hf(tmp_path, hf_arrays(QWEN_NAMES), model_type, **keys)
        assert_experts(source)
        assert source.hparams.norm_topk_prob


@pytest.mark.parametrize("suffix", ["", ".weight"])
def test_stacked_experts_of_hugging_face(tmp_path: Path, suffix: str) -> None:
    """As `transformers` holds them, and as Granite's files do."""
    arrays = without_mlp(hf_tensors(tie=False))
    names = {"router": "mlp.gate.weight", "in": "mlp.experts.gate_up_proj", "out": "mlp.experts"}
    if suffix:
        names = {
            "router": "block_sparse_moe.router.layer.weight",
            "in": "block_sparse_moe.input_linear",
            "out": "block_sparse_moe.output_linear",
        }
    else:
        names["out"] = "mlp.experts.down_proj"
    for i in range(LAYERS):
        layer, prefix = matrices(i), f"model.layers.{i}."
        arrays[prefix + names["router"]] = layer["gate_inp"]
        arrays[prefix + names["in"] + suffix] = np.concatenate(
            [layer["gate_exps"], layer["up_exps"]], axis=1
        )
        arrays[prefix + names["out"] + suffix] = layer["down_exps"]
    keys = {"num_local_experts": EXPERTS, "intermediate_size": WIDTH}
    model_type = "granitemoe" if suffix else "olmoe"
    assert_experts(open_hf(tmp_path, arrays, model_type, **keys))


def test_stacks_of_another_size_are_refused(tmp_path: Path) -> None:
    """P49"""
    arrays = stacked()
    arrays["blk.1.ffn_up_exps.weight"] = np.ones((EXPERTS + 1, WIDTH, HIDDEN), np.float32)
    with pytest.raises(ModelLoadError, match=r"blk\.1\.ffn_up_exps.*a matrix for each of the 3"):
        open_gguf(tmp_path, arrays)
    arrays["blk.1.ffn_up_exps.weight"] = np.ones((EXPERTS, HIDDEN), np.float32)
    with pytest.raises(ModelLoadError, match=r"has shape \(3, 32\), expected a matrix for each"):
        open_gguf(tmp_path, arrays)
    arrays["blk.1.ffn_gate_up_exps.weight"] = np.ones((EXPERTS, WIDTH, HIDDEN), np.float32)
    del arrays["blk.1.ffn_up_exps.weight"]
    with pytest.raises(ModelLoadError, match=r"has 16 rows, expected 32 \(16 \+ 16\)"):
        open_gguf(tmp_path, arrays)


# ---- hyperparameters -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "normalizes"),
    [
        ("llama", True),
        ("qwen3moe", True),
        ("granitemoe", True),
        ("qwen2moe", False),
        ("olmoe", False),
    ],
)
def test_gguf_shares_that_the_file_does_not_tell(
    tmp_path: Path, architecture: str, normalizes: bool
) -> None:
    base = "llama" if architecture == "llama" else "qwen3"
    source = open_gguf(tmp_path, stacked(base), architecture)
    assert source.hparams.norm_topk_prob is normalizes
    told = open_gguf(tmp_path, stacked(base), architecture, expert_weights_norm=not normalizes)
    assert told.hparams.norm_topk_prob is not normalizes


def test_scores_of_experts(tmp_path: Path) -> None:
    keys = {"expert_gating_func": 2, "expert_weights_scale": 2.5}
    for architecture, told, scoring, scale in (
        ("qwen3moe", {}, "softmax", 1.0),
        ("qwen3moe", keys, "sigmoid", 2.5),
        ("glm4moe", {}, "sigmoid", 1.0),
        ("glm4moe", {"expert_gating_func": 1, "expert_weights_scale": 0.0}, "softmax", 1.0),
    ):
        hparams = open_gguf(tmp_path, stacked(), architecture, **told).hparams
        assert (hparams.expert_scoring, hparams.expert_scale) == (scoring, scale)
    assert hf("glm4_moe", routed_scaling_factor=1.5).expert_scale == 1.5
    assert hf("glm4_moe").rope_dim == 4
    ernie = hf("ernie4_5_moe", moe_num_experts=7, moe_k=3, num_experts=9)
    assert (ernie.num_experts, ernie.num_experts_per_tok) == (7, 3)
    assert ernie.rope_interleaved


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    arrays = stacked()
    arrays["blk.1.nextn.eh_proj.weight"] = np.ones((HIDDEN, 2 * HIDDEN), np.float32)
    source = open_gguf(tmp_path, arrays, "glm4moe", nextn_predict_layers=1)
    assert source.hparams.num_hidden_layers == LAYERS - 1
    assert {name.split(".")[1] for name in source.tensors if name.startswith("layers")} == {"0"}
    assert not [name for name in source.tensors if "nextn" in name]
    names = ("model.mtp_block.0.norm.weight", "model.mtp_emb_norm.0.weight")
    assert all(is_dropped_hf_name(name) for name in names)


def test_the_width_of_experts_may_be_that_of_the_mlp(tmp_path: Path) -> None:
    metadata = gguf_metadata("llama", expert_count=EXPERTS, expert_used_count=1)
    source = open_model(write_gguf(tmp_path / "m.gguf", metadata, stacked("llama")))
    assert source.hparams.moe_intermediate_size == 48


def test_factors_of_granite(tmp_path: Path) -> None:
    keys = {
        "embedding_scale": 12.0,
        "residual_scale": 0.25,
        "logit_scale": 8.0,
        "attention.scale": 0.5,
    }
    told = open_gguf(tmp_path, stacked("llama"), "granitemoe", **keys).hparams
    assert (told.embedding_scale, told.residual_scale) == (12.0, 0.25)
    assert (told.logit_scale, told.attention_scale) == (0.125, 0.5)
    assert told.rope_interleaved
    plain = open_gguf(tmp_path, stacked("llama"), "granitemoe", logit_scale=0.0).hparams
    assert (plain.embedding_scale, plain.residual_scale, plain.logit_scale) == (1.0, 1.0, 1.0)
    same = hf(
        "granitemoe",
        embedding_multiplier=12.0,
        residual_multiplier=0.25,
        logits_scaling=8.0,
        attention_multiplier=0.5,
    )
    assert (same.embedding_scale, same.residual_scale) == (12.0, 0.25)
    assert (same.logit_scale, same.attention_scale) == (0.125, 0.5)
    with pytest.raises(ModelLoadError, match="logits_scaling is 0, which makes logit_scale inf"):
        hf("granite", logits_scaling=0)


def hf(model_type: str, **keys: Any) -> ModelHParams:
    return hparams_from_config(TypedMapping(Path("model"), config(model_type, **keys)))


@pytest.mark.parametrize(
    ("model_type", "experts", "per_token", "width", "normalizes"),
    [
        ("mixtral", 8, 2, 48, True),
        ("qwen3_moe", 128, 8, 768, False),
        ("qwen2_moe", 60, 4, 1408, False),
        ("olmoe", 64, 8, 48, False),
        ("granitemoe", 8, 2, 48, True),
        ("glm4_moe", 128, 8, 1408, True),
    ],
)
def test_hf_defaults(
    model_type: str, experts: int, per_token: int, width: int, normalizes: bool
) -> None:
    hparams = hf(model_type)
    assert hparams.architecture == model_type.replace("_", "")
    assert (hparams.num_experts, hparams.num_experts_per_tok) == (experts, per_token)
    assert (hparams.moe_intermediate_size, hparams.norm_topk_prob) == (width, normalizes)
    for key in ("num_experts", "num_local_experts"):
        assert hf(model_type, **{key: 5, "num_experts_per_tok": 3}).num_experts == 5


@pytest.mark.parametrize(
    ("keys", "error", "message"),
    [
        ({"expert_gating_func": 3}, UnsupportedModelError, r"qwen3moe\.expert_gating_func is 3"),
        ({"expert_group_count": 4}, UnsupportedModelError, "expert_group_count is 4"),
        (
            {"expert_weights_scale": -2.5},
            ModelLoadError,
            "qwen3moe.expert_weights_scale is -2",
        ),
        ({"expert_count": 2000}, ModelLoadError, "expert_count is 2000, allowed are 1 to 1024"),
        ({"expert_used_count": 4}, ModelLoadError, "expert_used_count is 4, allowed are 1 to 3"),
        ({"expert_used_count": 0}, ModelLoadError, "expert_used_count is 0"),
        ({"expert_feed_forward_length": 0}, ModelLoadError, "expert_feed_forward_length is 0"),
        ({"expert_used_count": "x"}, ModelLoadError, "expert_used_count' is a str"),
    ],
)
def test_gguf_refusals(
    tmp_path: Path, keys: dict[str, Any], error: type[TellinError], message: str
) -> None:
    with pytest.raises(error, match=message):
        open_gguf(tmp_path, stacked(), **keys)


@pytest.mark.parametrize(
    ("model_type", "keys", "error", "message"),
    [
        ("olmoe", {"clip_qkv": 8.0}, UnsupportedModelError, "'clip_qkv' is 8.0"),
        ("qwen2_moe", {"qkv_bias": False}, UnsupportedModelError, "'qkv_bias' is False"),
        ("mixtral", {"scoring_func": "sigmoid"}, UnsupportedModelError, "is 'sigmoid'"),
        ("qwen3_moe", {"n_group": 8}, UnsupportedModelError, "'n_group' is 8"),
        ("qwen3_moe", {"use_sliding_window": True, "max_window_layers": 99},
         UnsupportedModelError, "'use_sliding_window' is not supported"),
        ("glm4_moe", {"scoring_func": "softmax"}, UnsupportedModelError, "is 'softmax'"),
        ("mixtral", {"routed_scaling_factor": 2}, UnsupportedModelError, "'routed_scaling_factor'"),
        ("mixtral", {"num_local_experts": -1}, ModelLoadError, "num_local_experts is -1"),
        ("mixtral", {"num_experts_per_tok": 9}, ModelLoadError, "allowed are 1 to 8"),
    ],
)  # fmt: skip
def test_hf_refusals(
    model_type: str, keys: dict[str, Any], error: type[TellinError], message: str
) -> None:
    with pytest.raises(error, match=message):
        hf(model_type, **keys)


def test_experts_of_other_architectures_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"mixture of 3 experts.*'qwen3'.*qwen3moe"):
        open_gguf(tmp_path, stacked(), "qwen3")
