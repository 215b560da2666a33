"""Every architecture with tiny random weights: logits against golden ones, and promise 1."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tellin.exceptions import ModelLoadError, UnsupportedModelError
from tellin.kernels.reference import ReferenceBackend
from tellin.models import build_plan, supported_architectures
from tellin.models.rotary import rotary_table
from tests.models.stepping import Stepper, logits_of
from tests.models.tiny import (
    ALL_CASES,
    BASE,
    MAX_MODEL_LEN,
    MemorySource,
    golden_logits,
    memory_source,
    tiny_arrays,
    tiny_source,
    tiny_token_ids,
)

DECODERS = [name for name, hp in ALL_CASES.items() if hp.architecture != "bert"]


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    return golden_logits()


def make_backend(name: str, *, fuse: bool = True, batched: bool = False) -> ReferenceBackend:
    plan = build_plan(tiny_source(name), max_model_len=MAX_MODEL_LEN.get(name), fuse=fuse)
    return ReferenceBackend(plan, batched=batched)


@pytest.mark.parametrize("name", ALL_CASES)
def test_logits_equal_those_of_an_outside_implementation(
    name: str, golden: dict[str, np.ndarray]
) -> None:
    logits = logits_of(make_backend(name), tiny_token_ids())
    assert golden[name].std() > 1
    np.testing.assert_allclose(logits, golden[name], rtol=0, atol=5e-5)


@pytest.mark.parametrize("name", DECODERS)
def test_rotary_frequencies_equal_those_of_an_outside_implementation(
    name: str, golden: dict[str, np.ndarray]
) -> None:
    table = rotary_table(ALL_CASES[name], MAX_MODEL_LEN.get(name))
    if name != "phi3_longrope_long":  # the outside implementation shows the short ones at rest
        np.testing.assert_allclose(table.inv_freq, golden[f"{name}/inv_freq"], rtol=1e-6)
    assert table.attention_factor == pytest.approx(float(golden[f"{name}/attention_factor"]))


@pytest.mark.parametrize("name", ALL_CASES)
def test_passes_change_no_bit(name: str) -> None:
    token_ids = tiny_token_ids()
    recorded = logits_of(make_backend(name, fuse=False), token_ids)
    fused = logits_of(make_backend(name, fuse=True), token_ids)
    np.testing.assert_array_equal(recorded, fused)


@pytest.mark.parametrize("name", DECODERS)
def test_promise_1_chunks_and_batches_change_no_bit(name: str) -> None:
    """One request alone in one step, in chunks, token by token, and among others."""
    ids = tiny_token_ids().tolist()
    other = tiny_token_ids()[::-1].tolist()
    backend = make_backend(name)
    whole = Stepper(backend).step([("a", ids)])[0]
    chunked = Stepper(backend)
    parts = [chunked.step([("a", ids[i : i + 7])])[0] for i in range(0, len(ids), 7)]
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    crowd = Stepper(backend)
    crowd.step([("b", other), ("a", ids[:3]), ("c", other[:5])])
    rest = [
        crowd.step([("c", other[5 + i : 6 + i]), ("b", [i]), ("a", ids[i : i + 1])])[2]
        for i in range(3, 15)
    ]
    np.testing.assert_array_equal(np.concatenate(rest), whole[3:15])


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_batched_products_give_nearly_the_same(name: str) -> None:
    token_ids = tiny_token_ids()
    exact = logits_of(make_backend(name), token_ids)
    batched = logits_of(make_backend(name, batched=True), token_ids)
    np.testing.assert_allclose(batched, exact, rtol=0, atol=1e-4)


def test_interleaved_pairs_are_a_permutation_of_halves() -> None:
    """GGUF files of Llama store q and k with the rotated pairs side by side."""
    arrays = tiny_arrays("llama")
    token_ids = tiny_token_ids()
    expected = logits_of(make_backend("llama"), token_ids)
    for name, values in arrays.items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            halves = values.reshape(-1, 2, BASE.head_dim // 2, BASE.hidden_size)
            arrays[name] = halves.swapaxes(1, 2).reshape(values.shape)
    source = memory_source(replace(BASE, rope_interleaved=True), arrays)
    logits = logits_of(ReferenceBackend(build_plan(source)), token_ids)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5)


def test_bert_requests_do_not_see_each_other() -> None:
    ids = tiny_token_ids().tolist()
    backend = make_backend("bert")
    alone = Stepper(backend).step([("a", ids)])[0]
    first, second = Stepper(backend).step([("b", ids[:4]), ("a", ids)])
    np.testing.assert_array_equal(second, alone)
    assert first.shape == (4, BASE.hidden_size)


@pytest.mark.parametrize("name", DECODERS)
def test_the_cache_has_a_layer_per_attention(name: str) -> None:
    plan = build_plan(tiny_source(name))
    hp = ALL_CASES[name]
    assert len(plan.kv_layers) == hp.num_hidden_layers
    for i, layer in enumerate(plan.kv_layers):
        is_global = hp.sliding_window_pattern and (i + 1) % hp.sliding_window_pattern == 0
        assert layer.sliding_window == (None if is_global else hp.sliding_window)
        shape = (hp.num_key_value_heads, hp.head_dim, None)
        if hp.latent is not None:
            shape = (1, hp.latent.rank + hp.latent.rope_dim, hp.latent.rank)
        assert (layer.num_kv_heads, layer.head_dim, layer.value_dim) == shape
    assert build_plan(tiny_source("bert")).kv_layers == ()


# ---- what does not fit is refused --------------------------------------------------------------


def changed_source(name: str, **arrays: np.ndarray | None) -> MemorySource:
    """A tiny model with tensors replaced, added or (None) removed; ``__`` in names is a dot."""
    weights = tiny_arrays(name)
    for key, values in arrays.items():
        key = key.replace("__", ".")
        if values is None:
            del weights[key]
        else:
            weights[key] = values
    return memory_source(ALL_CASES[name], weights)


def test_an_unknown_architecture_is_refused_with_the_list_of_known_ones() -> None:
    source = replace(tiny_source("llama"), hparams=replace(BASE, architecture="mamba"))
    with pytest.raises(UnsupportedModelError, match="'mamba'") as error:
        build_plan(source)
    for architecture in supported_architectures():
        assert architecture in str(error.value)


def test_a_missing_tensor_is_named() -> None:
    source = changed_source("llama", layers__1__mlp__up_proj__weight=None)
    with pytest.raises(ModelLoadError, match=r"layers\.1\.mlp\.up_proj\.weight.* is missing"):
        build_plan(source)


def test_a_wrong_shape_is_named_with_both_shapes() -> None:
    source = changed_source("llama", layers__0__mlp__up_proj__weight=np.ones((96, 32)))
    with pytest.raises(ModelLoadError, match=r"up_proj\.weight' has shape \(96, 32\).*\(n, 64\)"):
        build_plan(source)


def test_heads_that_do_not_fit_are_named() -> None:
    source = changed_source("llama", layers__0__self_attn__k_proj__weight=np.ones((48, 64)))
    with pytest.raises(ModelLoadError, match=r"k_proj.* 48 .*2 \* 16 = 32"):
        build_plan(source)


def test_gate_and_up_of_different_width_are_named() -> None:
    source = changed_source("llama", layers__0__mlp__up_proj__weight=np.ones((80, 64)))
    with pytest.raises(ModelLoadError, match=r"gate_proj.*96.*up_proj.*80"):
        build_plan(source)


def test_a_vocabulary_of_another_size_is_refused() -> None:
    source = changed_source("llama", embed_tokens__weight=np.ones((65, 64)))
    with pytest.raises(ModelLoadError, match=r"65 rows; vocab_size is 64"):
        build_plan(source)


def test_a_tensor_that_the_architecture_does_not_use_is_refused() -> None:
    source = changed_source("llama", layers__0__self_attn__q_norm__weight=np.ones(16))
    with pytest.raises(UnsupportedModelError, match=r"layers\.0\.self_attn\.q_norm\.weight"):
        build_plan(source)


def test_a_copy_of_the_tied_head_is_ignored() -> None:
    source = changed_source("llama_tied", lm_head__weight=np.ones((64, 64)))
    assert build_plan(source).vocab_size == 64


def test_required_biases_are_missed() -> None:
    source = changed_source("qwen2", layers__2__self_attn__v_proj__bias=None)
    with pytest.raises(ModelLoadError, match=r"layers\.2\.self_attn\.v_proj\.bias"):
        build_plan(source)


def test_an_unknown_activation_is_refused() -> None:
    source = replace(tiny_source("llama"), hparams=replace(BASE, hidden_act="swishy"))
    with pytest.raises(UnsupportedModelError, match=r"swishy.*silu, gelu"):
        build_plan(source)
