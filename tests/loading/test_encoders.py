"""Encoders on disk: older configurations, what is refused, tokens of ModernBERT's pairs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tellin.exceptions import ModelLoadError, UnsupportedModelError
from tellin.loading.hf_hparams import hparams_from_config
from tellin.loading.tensors import ModelHParams
from tellin.loading.typed_mapping import TypedMapping
from tellin.worker.dense_layers import open_dense_layers
from tests.loading.vocabularies import byte_level, tokenizer
from tests.models.encoders import CASES, DENSE, dense_weights, write_encoder

NOMIC = {
    "model_type": "nomic_bert",
    "n_embd": 768,
    "n_head": 12,
    "n_inner": 3072,
    "n_layer": 12,
    "n_positions": 8192,
    "max_trained_positions": 2048,
    "layer_norm_epsilon": 1e-12,
    "activation_function": "swiglu",
    "rotary_emb_base": 1000,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "rotary_scaling_factor": None,
    "qkv_proj_bias": False,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "causal": False,
    "prenorm": False,
    "moe_every_n_layers": 0,
    "vocab_size": 30528,
}
NEW = {
    "model_type": "new",
    "hidden_size": 768,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "vocab_size": 250048,
    "hidden_act": "gelu",
    "layer_norm_type": "layer_norm",
    "layer_norm_eps": 1e-12,
    "position_embedding_type": "rope",
    "rope_theta": 20000,
    "rope_scaling": {"factor": 8.0, "type": "ntk"},
}
MODERN = CASES["modernbert"] | {"hidden_size": 32, "num_attention_heads": 4, "vocab_size": 60}
MODERN |= {"intermediate_size": 48, "num_hidden_layers": 4, "layer_types": None}


def read(config: dict[str, Any], **changes: Any) -> ModelHParams:
    values = {key: value for key, value in (config | changes).items() if value is not None}
    return hparams_from_config(TypedMapping(Path("config.json"), values))


def test_configurations_from_before_transformers_had_the_models() -> None:
    hp = read(NOMIC)
    assert (hp.hidden_size, hp.head_dim, hp.num_hidden_layers) == (768, 64, 12)
    assert (hp.max_position_embeddings, hp.rope_theta, hp.hidden_act) == (2048, 1000, "silu")
    hp = read(NEW)
    assert hp.rope_theta == 160_000
    assert hp.rope_scaling.factor == 8.0 ** (2 / 64)
    assert read(NEW, rope_scaling=None).rope_theta == 20_000
    hp = read(MODERN, global_attn_every_n_layers=3, local_attention=128)
    assert (hp.sliding_window, hp.sliding_window_pattern) == (65, 3)
    old = {"global_rope_theta": 5e4, "local_rope_theta": 2e4, "rope_parameters": None}
    hp = read(MODERN, **old)
    assert (hp.rope_theta, hp.rope_local_theta) == (5e4, 2e4)


@pytest.mark.parametrize(
    ("config", "changes", "match"),
    [
        (NOMIC, {"moe_every_n_layers": 2}, "'moe_every_n_layers' is 2"),
        (NOMIC, {"rotary_emb_interleaved": True}, "'rotary_emb_interleaved' is True"),
        (NOMIC, {"activation_function": "tanh"}, "activation 'tanh'"),
        (NEW, {"position_embedding_type": "absolute"}, "'position_embedding_type'"),
        (NEW, {"logn_attention_scale": True}, "'logn_attention_scale'"),
        (NEW, {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope scaling 'yarn'"),
        (MODERN, {"rope_scaling": {"rope_type": "yarn"}}, "yarn"),
        (
            MODERN,
            {"rope_parameters": {"full_attention": {"rope_type": "linear"}}},
            "rope scaling 'linear'",
        ),
        (
            MODERN,
            {"layer_types": ["sliding_attention"] + ["full_attention"] * 3},
            "regular pattern",
        ),
    ],
)
def test_variants_are_refused_by_name(
    config: dict[str, Any], changes: dict[str, Any], match: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=match):
        read(config, **changes)


def test_pairs_of_modern_bert(tmp_path: Path) -> None:
    keys = {"add_bos_token": True, "add_eos_token": True, "add_sep_token": True}
    metadata = byte_level(specials=("[CLS]", "[SEP]"), pre="modern-bert", **keys)
    backend = tokenizer(tmp_path, metadata).backend
    assert backend.encode("ab").tokens == ["[CLS]", "a", "b", "[SEP]"]
    assert backend.encode("a", "b").tokens == ["[CLS]", "a", "[SEP]", "b", "[SEP]"]


def test_dense_layers_that_do_not_fit(tmp_path: Path) -> None:
    write_encoder(tmp_path, "gemma")
    layers = open_dense_layers(tmp_path, DENSE[-1])
    state = np.random.default_rng(0).standard_normal(32)
    first, second = dense_weights()
    np.testing.assert_allclose(layers(state), second @ (first @ state), rtol=1e-4, atol=1e-4)
    with pytest.raises(ModelLoadError, match="end with 24 values"):
        open_dense_layers(tmp_path, 23)
    place = tmp_path / "2_Dense"
    config = json.loads((place / "config.json").read_text())
    tanh = config | {"activation_function": "torch.nn.modules.activation.Tanh"}
    (place / "config.json").write_text(json.dumps(tanh))
    expected = second @ np.tanh(first @ state)
    values = open_dense_layers(tmp_path, DENSE[-1])(state)
    np.testing.assert_allclose(values, expected, rtol=1e-4, atol=1e-4)
    (place / "config.json").write_text(json.dumps(config | {"activation_function": "a.ReLU"}))
    with pytest.raises(UnsupportedModelError, match=r"a\.ReLU"):
        open_dense_layers(tmp_path, DENSE[-1])
    (place / "config.json").write_text(json.dumps(config))
    for array, match in (
        (first[:, :5], "input has 32"),
        (np.full_like(first, np.nan), "NaN"),
    ):
        save_file({"linear.weight": np.ascontiguousarray(array)}, place / "model.safetensors")
        with pytest.raises(ModelLoadError, match=match):
            open_dense_layers(tmp_path, DENSE[-1])
