"""Canonical tensor names, and fused matrices as row ranges."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tellin.exceptions import ModelLoadError
from tellin.loading.model_source import open_model
from tellin.loading.names import canonical_from_gguf, canonical_from_hf
from tellin.loading.tensors import ModelHParams, QuantType, TensorRef
from tests.loading.models import HIDDEN, INNER, KV, Q, gguf_tensors, write_model

HPARAMS = ModelHParams(
    architecture="llama",
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=260,
    max_position_embeddings=128,
)
LAYER = {
    "input_layernorm.weight",
    "mlp.down_proj.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "post_attention_layernorm.weight",
    "self_attn.k_proj.weight",
    "self_attn.o_proj.weight",
    "self_attn.q_proj.weight",
    "self_attn.v_proj.weight",
}
AROUND = {"pre_feedforward_layernorm.weight", "post_feedforward_layernorm.weight"}
HEAD_NORMS = {"self_attn.q_norm.weight", "self_attn.k_norm.weight"}
BIASES = {"self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"}
EXPECTED = {
    "llama": LAYER,
    "qwen2": LAYER | BIASES,
    "qwen3": LAYER | HEAD_NORMS,
    "gemma2": LAYER | AROUND,
    "gemma3": LAYER | AROUND | HEAD_NORMS,
    "phi3": LAYER,
}


@pytest.mark.parametrize("architecture", EXPECTED)
def test_gguf_names(tmp_path: Path, architecture: str) -> None:
    source = open_model(write_model(tmp_path / "m.gguf", architecture))
    expected = {"embed_tokens.weight", "norm.weight"}
    expected |= {f"layers.{i}.{name}" for i in range(2) for name in EXPECTED[architecture]}
    assert set(source.tensors) == expected
    assert all(name == tensor.name for name, tensor in source.tensors.items())


def test_gemma_norms_change_places(tmp_path: Path) -> None:
    """GGUF's ffn_norm is the norm before the MLP: two names, depending on the family."""
    for architecture, name in (
        ("llama", "post_attention_layernorm"),
        ("gemma3", "pre_feedforward_layernorm"),
    ):
        source = open_model(write_model(tmp_path / "m.gguf", architecture))
        tensor = source.tensors[f"layers.1.{name}.weight"]
        assert (values(tensor) == gguf_tensors(architecture)["blk.1.ffn_norm.weight"]).all()


def values(tensor: TensorRef) -> np.ndarray:
    return tensor.data.view(np.float32).reshape(tensor.shape)


def test_phi3_fused_matrices_become_row_ranges(tmp_path: Path) -> None:
    source = open_model(write_model(tmp_path / "m.gguf", "phi3"))
    arrays = gguf_tensors("phi3")
    qkv, gate_up = arrays["blk.1.attn_qkv.weight"], arrays["blk.1.ffn_up.weight"]
    for name, expected in (
        ("self_attn.q_proj", qkv[:Q]),
        ("self_attn.k_proj", qkv[Q : Q + KV]),
        ("self_attn.v_proj", qkv[Q + KV :]),
        ("mlp.gate_proj", gate_up[:INNER]),
        ("mlp.up_proj", gate_up[INNER:]),
    ):
        tensor = source.tensors[f"layers.1.{name}.weight"]
        assert tensor.shape == expected.shape
        assert (values(tensor) == expected).all()
        assert not tensor.data.flags.owndata


def ref(name: str, *shape: int) -> TensorRef:
    return TensorRef(name, shape, QuantType.F32, np.zeros(4 * int(np.prod(shape)), np.uint8))


def test_fused_matrix_of_the_wrong_size() -> None:
    name = "model.layers.0.self_attn.qkv_proj.weight"
    with pytest.raises(ModelLoadError, match=r"has 63 rows, expected 64 \(32 \+ 16 \+ 16\)"):
        canonical_from_hf(Path("m"), HPARAMS, {name: ref(name, 63, 32)})


def test_rotary_factors_are_not_tensors() -> None:
    tensors = {name: ref(name, 4) for name in ("rope_freqs.weight", "rope_factors_long.weight")}
    assert canonical_from_gguf(Path("m"), HPARAMS, tensors) == {}


def test_unknown_names_pass_and_doubles_do_not() -> None:
    tensors = {name: ref(name, 4) for name in ("blk.0.ssm_a.weight", "strange")}
    assert set(canonical_from_gguf(Path("m"), HPARAMS, tensors)) == set(tensors)
    doubles = {name: ref(name, 4) for name in ("model.norm.weight", "norm.weight")}
    with pytest.raises(ModelLoadError, match=r"two tensors mean 'norm\.weight'"):
        canonical_from_hf(Path("m"), HPARAMS, doubles)


@pytest.mark.parametrize(
    ("name", "canonical"),
    [
        ("model.embed_tokens.weight", "embed_tokens.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("language_model.model.layers.3.mlp.up_proj.weight", "layers.3.mlp.up_proj.weight"),
        ("model.language_model.norm.weight", "norm.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
    ],
)
def test_hf_prefixes(name: str, canonical: str) -> None:
    assert list(canonical_from_hf(Path("m"), HPARAMS, {name: ref(name, 4)})) == [canonical]


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight",
        "model.vision_tower.post_layernorm.weight",
        "multi_modal_projector.mm_input_projection_weight",
    ],
)
def test_hf_names_without_use_are_dropped(name: str) -> None:
    assert canonical_from_hf(Path("m"), HPARAMS, {name: ref(name, 4)}) == {}


@pytest.mark.parametrize("prefix", ["", "bert."])
def test_bert_names(prefix: str) -> None:
    names = {
        "embeddings.word_embeddings.weight": "embed_tokens.weight",
        "embeddings.position_embeddings.weight": "embed_positions.weight",
        "embeddings.token_type_embeddings.weight": "embed_token_types.weight",
        "embeddings.LayerNorm.weight": "embed_layernorm.weight",
        "embeddings.LayerNorm.beta": "embed_layernorm.bias",
        "encoder.layer.1.attention.self.query.bias": "layers.1.self_attn.q_proj.bias",
        "encoder.layer.1.attention.output.dense.weight": "layers.1.self_attn.o_proj.weight",
        "encoder.layer.1.attention.output.LayerNorm.gamma": (
            "layers.1.post_attention_layernorm.weight"
        ),
        "encoder.layer.1.intermediate.dense.weight": "layers.1.mlp.up_proj.weight",
        "encoder.layer.1.output.dense.weight": "layers.1.mlp.down_proj.weight",
        "encoder.layer.1.output.LayerNorm.bias": "layers.1.post_feedforward_layernorm.bias",
        "pooler.dense.weight": "pooler.dense.weight",
    }
    hparams = replace(HPARAMS, architecture="bert")
    tensors = {prefix + name: ref(prefix + name, HIDDEN) for name in names}
    tensors["embeddings.position_ids"] = ref("embeddings.position_ids", 4)
    assert set(canonical_from_hf(Path("m"), hparams, tensors)) == set(names.values())


def test_bert_names_of_gguf() -> None:
    names = {
        "token_embd_norm.bias": "embed_layernorm.bias",
        "position_embd.weight": "embed_positions.weight",
        "token_types.weight": "embed_token_types.weight",
        "blk.0.attn_output_norm.weight": "layers.0.post_attention_layernorm.weight",
        "blk.0.layer_output_norm.bias": "layers.0.post_feedforward_layernorm.bias",
        "blk.0.attn_q.bias": "layers.0.self_attn.q_proj.bias",
    }
    hparams = replace(HPARAMS, architecture="bert")
    tensors = {name: ref(name, HIDDEN) for name in names}
    assert set(canonical_from_gguf(Path("m"), hparams, tensors)) == set(names.values())
