"""OPT, GPT-2, GPT-NeoX, Falcon and their like: transformers' logits, promise 1, what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tellin import LLM, PoolingParams, SamplingParams
from tellin.exceptions import InvalidParameterError, ModelLoadError, UnsupportedModelError
from tellin.kernels.native import NativeBackend
from tellin.kernels.reference import ReferenceBackend
from tellin.loading import load_tokenizer, open_model
from tellin.loading.dequantize import dequantize, dequantize_rows
from tellin.loading.lora import load_adapter
from tellin.loading.tensors import QuantType
from tellin.models import build_plan
from tests.loading.gguf_writer import write_gguf
from tests.loading.vocabularies import OPT_CONFIG, write_bpe_files
from tests.models.adapters import write_adapter
from tests.models.classic import (
    CASES,
    CLASSIFIERS,
    HEADS,
    HIDDEN,
    NARROW,
    POSITIONS,
    token_ids,
    weights,
    write_classic,
    write_classifier,
)
from tests.models.classic_gguf import GGUF_CASES, write_classic_gguf
from tests.models.quantised import fp8, pack_tensors
from tests.models.stepping import Stepper, logits_of
from tests.models.tiny import golden_logits, tiny_arrays, tiny_token_ids
from tests.models.tiny_files import write_tiny_gguf

STORED = np.load(Path(__file__).parents[1] / "data" / "classic.npz")


def reference_logits(path: Path, ids: np.ndarray | None = None) -> np.ndarray:
    with open_model(path) as source:
        backend = ReferenceBackend(build_plan(source))
        return logits_of(backend, token_ids() if ids is None else ids)


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(tmp_path: Path, case: str) -> None:
    """Recorded and fused alike, bit for bit, and with the native kernels."""
    with open_model(write_classic(tmp_path, case)) as source:
        logits = logits_of(ReferenceBackend(build_plan(source)), token_ids())
        recorded = logits_of(ReferenceBackend(build_plan(source, fuse=False)), token_ids())
        plan = build_plan(source)
        native = NativeBackend(plan, activation_precision="float32", kv_cache_dtype="float32")
        native_logits = logits_of(native, token_ids())
    assert STORED[case].std() > 1
    np.testing.assert_allclose(logits, STORED[case], rtol=0, atol=1e-4)
    np.testing.assert_array_equal(recorded, logits)
    np.testing.assert_allclose(native_logits, STORED[case], rtol=0, atol=2e-4)


@pytest.mark.parametrize("case", CASES)
def test_promise_1_chunks_and_batches_change_no_bit(tmp_path: Path, case: str) -> None:
    """One request alone in one step, in chunks, and token by token among others."""
    ids = token_ids().tolist()
    with open_model(write_classic(tmp_path, case)) as source:
        backend = NativeBackend(build_plan(source), num_threads=2)
        whole = Stepper(backend).step([("a", ids)])[0]
        chunked = Stepper(backend)
        parts = [chunked.step([("a", ids[i : i + 7])])[0] for i in range(0, len(ids), 7)]
        crowd = Stepper(backend)
        crowd.step([("b", ids[::-1]), ("a", ids[:3]), ("c", ids[5:9])])
        rest = [crowd.step([("c", [i]), ("a", ids[i : i + 1])])[1] for i in range(3, len(ids))]
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    np.testing.assert_array_equal(np.concatenate(rest), whole[3:])


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_checkpoints_that_transformers_saves(tmp_path: Path, case: str) -> None:
    """What it computes now is what is stored, and its own folder says the same in its own words."""
    import torch

    from tests.data.make.make_classic import load_case

    model = load_case(case, tmp_path / "made")
    with torch.no_grad():
        logits = model(torch.from_numpy(token_ids()).long()[None]).logits[0].numpy()
    np.testing.assert_allclose(logits, STORED[case], rtol=0, atol=1e-4)
    model.save_pretrained(tmp_path / "saved")
    np.testing.assert_allclose(reference_logits(tmp_path / "saved"), logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize("case", GGUF_CASES)
def test_gguf_files_give_the_logits_of_transformers(tmp_path: Path, case: str) -> None:
    path = write_classic_gguf(tmp_path / "tiny.gguf", case)
    np.testing.assert_allclose(reference_logits(path), STORED[case], rtol=0, atol=1e-4)


def test_internlm2_is_llama_in_other_words(tmp_path: Path) -> None:
    """Its matrix of queries, keys and values holds one group per head of keys."""
    write_classic(tmp_path, "internlm3", model_type="internlm2", num_key_value_heads=2, **_LLAMA)
    save_file(_internlm2_weights(), tmp_path / "model.safetensors")
    logits = reference_logits(tmp_path, tiny_token_ids())
    np.testing.assert_allclose(logits, golden_logits()["llama"], rtol=0, atol=5e-5)


def test_internlm2_in_gguf_files(tmp_path: Path) -> None:
    """Its converter permutes the rows of queries and keys, as Llama's does."""
    path = write_tiny_gguf(tmp_path / "tiny.gguf", "llama", architecture="internlm2")
    logits = reference_logits(path, tiny_token_ids())
    np.testing.assert_allclose(logits, golden_logits()["llama"], rtol=0, atol=5e-5)


_LLAMA: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": HEADS,
    "head_dim": None,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "qkv_bias": None,
    "bias": False,
}


def _internlm2_weights() -> dict[str, np.ndarray]:
    names = {
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.o_proj": "attention.wo",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.down_proj": "feed_forward.w2",
        "mlp.up_proj": "feed_forward.w3",
    }
    arrays = tiny_arrays("llama")
    found = {
        "model.tok_embeddings.weight": arrays.pop("embed_tokens.weight"),
        "model.norm.weight": arrays.pop("norm.weight"),
        "output.weight": arrays.pop("lm_head.weight"),
    }
    for i in range(3):
        q, k, v = (
            arrays.pop(f"layers.{i}.self_attn.{part}_proj.weight").reshape(2, -1, 16, 64)
            for part in "qkv"
        )
        fused = np.concatenate([q, k, v], axis=1)
        found[f"model.layers.{i}.attention.wqkv.weight"] = fused.reshape(-1, 64)
    for name, values in arrays.items():
        _, layer, part = name.removesuffix(".weight").split(".", 2)
        found[f"model.layers.{layer}.{names[part]}.weight"] = values
    return found


# ---- forms of files --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_transposed_matrices_keep_their_values(tmp_path: Path, dtype: type) -> None:
    """Rows in any pieces are columns of the file's matrix."""
    write_classic(tmp_path, "gpt2")
    arrays = {name: values.astype(dtype) for name, values in weights("gpt2").items()}
    save_file(arrays, tmp_path / "model.safetensors")
    with open_model(tmp_path) as source:
        down = source.tensors["layers.1.mlp.down_proj.weight"]
        k = source.tensors["layers.0.self_attn.k_proj.weight"]
        assert down.quant_type is (QuantType.F32 if dtype is np.float32 else QuantType.F16)
        expected = arrays["h.1.mlp.c_proj.weight"].T.astype(np.float32)
        np.testing.assert_array_equal(dequantize(down), expected)
        np.testing.assert_array_equal(dequantize_rows(down, 3, 10), expected[3:10])
        width = len(dequantize(k))
        fused = arrays["h.0.attn.c_attn.weight"].T.astype(np.float32)
        np.testing.assert_array_equal(dequantize(k), fused[width : 2 * width])
        source.check_weights()


@pytest.mark.parametrize(
    ("case", "masks"),
    [
        ("gpt2", ["h.0.attn.bias", "h.1.attn.masked_bias"]),
        ("gptj", ["transformer.h.0.attn.bias", "transformer.h.0.attn.masked_bias"]),
        ("gpt_neox", ["gpt_neox.layers.0.attention.bias", "gpt_neox.layers.1.attention.bias"]),
    ],
)
def test_masks_in_old_checkpoints_are_left_out(tmp_path: Path, case: str, masks: list[str]) -> None:
    """Some store them as bytes, which no weight may be."""
    arrays = weights(case)
    write_classic(tmp_path, case)
    arrays |= {name: np.ones((1, 1, POSITIONS, POSITIONS), np.uint8) for name in masks}
    save_file(arrays, tmp_path / "model.safetensors")
    np.testing.assert_allclose(reference_logits(tmp_path), STORED[case], rtol=0, atol=1e-4)


def test_gpt2_with_a_prefix_and_a_copy_of_the_tied_head(tmp_path: Path) -> None:
    """What later versions save, and what some of them saved besides."""
    write_classic(tmp_path, "gpt2", n_inner=None, n_ctx=POSITIONS)
    arrays = {f"transformer.{name}": values for name, values in weights("gpt2").items()}
    arrays["lm_head.weight"] = arrays["transformer.wte.weight"]
    save_file(arrays, tmp_path / "model.safetensors")
    np.testing.assert_allclose(reference_logits(tmp_path), STORED["gpt2"], rtol=0, atol=1e-4)


def test_attention_that_is_not_scaled(tmp_path: Path) -> None:
    with open_model(write_classic(tmp_path, "gpt2", scale_attn_weights=False)) as source:
        assert source.hparams.attention_scale == 1


# ---- what is refused -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "key", "value", "supported"),
    [
        ("opt", "_remove_final_layer_norm", True, False),
        ("opt", "layer_norm_elementwise_affine", False, True),
        ("gpt2", "scale_attn_by_inverse_layer_idx", True, False),
        ("gpt2", "add_cross_attention", True, False),
        ("gpt_bigcode", "add_cross_attention", True, False),
        ("phi", "qk_layernorm", True, False),
        ("starcoder2", "mlp_type", "gated", "default"),
        ("starcoder2", "norm_type", "rms_norm", "layer_norm"),
        ("stablelm", "qk_layernorm", True, False),
        ("nemotron", "hidden_act", "gelu", "relu2"),
        ("falcon", "alibi", True, False),
    ],
)
def test_variants_are_refused_by_key_and_value(
    tmp_path: Path, case: str, key: str, value: object, supported: object
) -> None:
    path = write_classic(tmp_path, case, **{key: value})
    with pytest.raises(UnsupportedModelError) as error:
        open_model(path)
    message = str(error.value)
    assert f"'{key}' is {value!r}" in message
    assert f"supported is {supported!r}" in message
    assert "config.json" in message


def test_biases_of_internlm3_that_differ_are_refused(tmp_path: Path) -> None:
    path = write_classic(tmp_path, "internlm3", bias=False)
    with pytest.raises(UnsupportedModelError, match="'qkv_bias' is True and 'bias' False"):
        open_model(path)


def test_a_later_falcon_whose_layers_are_not_parallel_is_refused(tmp_path: Path) -> None:
    path = write_classic(tmp_path, "falcon_new", parallel_attn=False)
    with pytest.raises(ModelLoadError, match="'parallel_attn' is False"):
        open_model(path)


@pytest.mark.parametrize(
    ("case", "key", "expected"),
    [
        ("opt", "enable_bias", "bias"),
        ("stablelm", "use_qkv_bias", "bias"),
        ("gpt_neox", "attention_bias", "bias"),
        ("falcon_sequential", "bias", "bias"),
    ],
)
def test_biases_must_be_there_where_they_are_announced(
    tmp_path: Path, case: str, key: str, expected: str
) -> None:
    path = write_classic(tmp_path, case, **{key: True})
    arrays = weights(case)
    gone = next(n for n in arrays if n.endswith(expected) and ("query" in n or "q_proj" in n))
    del arrays[gone]
    save_file(arrays, path / "model.safetensors")
    with open_model(path) as source, pytest.raises(ModelLoadError, match=r"q_proj\.bias.*missing"):
        build_plan(source)


@pytest.mark.parametrize(
    ("case", "key"), [("opt", "max_position_embeddings"), ("gpt2", "n_positions")]
)
def test_positions_that_the_table_lacks_are_refused(tmp_path: Path, case: str, key: str) -> None:
    path = write_classic(tmp_path, case, **{key: POSITIONS + 1})
    with (
        open_model(path) as source,
        pytest.raises(ModelLoadError, match=rf"rows; max_position_embeddings is {POSITIONS + 1}"),
    ):
        build_plan(source)


@pytest.mark.parametrize("case", ["opt", "gpt2", "gpt_bigcode"])
def test_a_context_beyond_the_table_is_refused_with_both_numbers(tmp_path: Path, case: str) -> None:
    path = write_classic(tmp_path, case)
    with pytest.raises(InvalidParameterError, match=f"max_model_len=41 .* {POSITIONS} tokens"):
        LLM(str(path), skip_tokenizer_init=True, max_model_len=41)


def test_what_is_to_be_transposed_must_be_a_matrix(tmp_path: Path) -> None:
    path = write_classic(tmp_path, "gpt2")
    arrays = load_file(path / "model.safetensors")
    arrays["h.0.mlp.c_fc.weight"] = arrays["h.0.mlp.c_fc.weight"].reshape(1, 32, 48)
    save_file(arrays, path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"h\.0\.mlp\.c_fc\.weight.*no matrix"):
        open_model(path)


def test_quantised_matrices_of_gpt2_are_refused(tmp_path: Path) -> None:
    """Which way round they are depends on who quantised them."""
    path = write_classic(tmp_path, "gpt2", quantization_config={"quant_method": "fp8"})
    arrays = weights("gpt2")
    name = "h.0.mlp.c_fc"
    written, _ = fp8(arrays.pop(f"{name}.weight"))
    arrays |= {f"{name}.{part}": values for part, values in written.items()}
    (path / "model.safetensors").write_bytes(pack_tensors(arrays))
    with pytest.raises(UnsupportedModelError, match=r"c_fc\.weight' is FP8; of GPT-2 quantised"):
        open_model(path)


# ---- the quickstart of vLLM's documentation --------------------------------------------------


def test_opt_answers_prompts_of_text(tmp_path: Path) -> None:
    """From a folder as it is published, but for the weights' format: BOS is ``</s>``, and what the
    embedding has behind the vocabulary is never drawn.
    """
    vocab_size = 280
    write_classic(tmp_path, "opt", vocab_size=vocab_size)
    config = json.loads((tmp_path / "config.json").read_text())
    write_bpe_files(tmp_path, OPT_CONFIG)
    (tmp_path / "config.json").write_text(json.dumps(config))
    arrays = weights("opt")
    rows = np.random.RandomState(1).standard_normal((vocab_size, HIDDEN))
    arrays["model.decoder.embed_tokens.weight"] = rows.astype(np.float32)
    save_file(arrays, tmp_path / "model.safetensors")
    prompts = ["Hello", "The sea", "", "AI is"]
    params = SamplingParams(temperature=0.8, top_p=0.95, seed=3, max_tokens=6, ignore_eos=True)
    with LLM(model=str(tmp_path), num_threads=1) as llm:
        outputs = llm.generate(prompts, params)
        assert llm.llm_engine.model_config.max_model_len == POSITIONS
        alone = llm.generate(prompts[1], params)[0]
    size = len(load_tokenizer(tmp_path))
    assert size == 267
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.prompt == prompt
        assert output.prompt_token_ids[0] == 2
        assert len(output.outputs[0].token_ids) == 6
        assert max(output.outputs[0].token_ids) < size
    assert alone.outputs[0].token_ids == outputs[1].outputs[0].token_ids


def test_a_narrow_embedding_is_what_prompts_and_vectors_have(tmp_path: Path) -> None:
    """OPT 350M's: rows given in its place, and pooled states, are as wide as the table."""
    path = write_classic(tmp_path, "opt_350m")
    ids = token_ids(5).tolist()
    table = weights("opt_350m")["model.decoder.embed_tokens.weight"]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
    options: dict[str, Any] = {"skip_tokenizer_init": True, "num_threads": 1}
    with LLM(str(path), enable_prompt_embeds=True, **options) as llm:
        expected, found = (
            llm.generate([prompt], params)[0].outputs[0].token_ids
            for prompt in ({"prompt_token_ids": ids}, {"prompt_embeds": table[ids]})
        )
        assert found == expected
    with LLM(str(path), runner="pooling", **options) as llm:
        assert len(llm.embed([{"prompt_token_ids": ids}])[0].outputs.embedding) == NARROW


@pytest.mark.parametrize("case", ["gpt2", "opt", "gpt_neox", "phi", "falcon_new"])
def test_adapters_of_these_checkpoints(tmp_path: Path, case: str) -> None:
    """Named, transposed and fused as the checkpoint is; the logits are those of merged weights."""
    random = np.random.RandomState(3)
    pairs, merged = {}, weights(case)
    for name, matrix in merged.items():
        if matrix.ndim != 2 or not re.search(r"(h|layers)\.\d", name):
            continue
        rows, columns = matrix.T.shape if case == "gpt2" else matrix.shape
        a = (random.standard_normal((4, columns)) / 6).astype(np.float32)
        b = (0.3 * random.standard_normal((rows, 4))).astype(np.float32)
        product = 2 * (b @ a)  # alpha is twice the rank
        merged[name] = matrix + (product.T if case == "gpt2" else product)
        pairs[name.removesuffix(".weight")] = (a, b)
    adapter = write_adapter(tmp_path / "adapter", pairs, fan_in_fan_out=case == "gpt2")
    tensors = load_file(adapter / "adapter_model.safetensors")
    own = {name.replace(".model.model.", ".model.", 1): array for name, array in tensors.items()}
    save_file(own, adapter / "adapter_model.safetensors")
    path = write_classic(tmp_path / "model", case)
    with open_model(path) as source:
        plan = build_plan(source, max_lora_rank=4)
        backend = ReferenceBackend(plan)
        backend.set_adapter(0, load_adapter(adapter, source.hparams, plan.lora_sites, 4).weights)
        stepper = Stepper(backend, adapters={"only": 0})
        logits = stepper.step([("only", token_ids().tolist())])[0]
    save_file(merged, path / "model.safetensors")
    np.testing.assert_allclose(logits, reference_logits(path), rtol=0, atol=3e-4)
    assert np.abs(logits - STORED[case]).max() > 1


@pytest.mark.parametrize("case", CLASSIFIERS)
def test_classifiers_judge_the_last_state(tmp_path: Path, case: str) -> None:
    path = write_classifier(tmp_path, case)
    options: dict[str, Any] = {"skip_tokenizer_init": True, "num_threads": 1}
    with LLM(str(path), kv_cache_dtype="float32", **options) as llm:
        raw = PoolingParams(use_activation=False)
        [output] = llm.classify([{"prompt_token_ids": token_ids().tolist()}], pooling_params=raw)
    np.testing.assert_allclose(output.outputs.probs, STORED[f"{case}_scores"], rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("case", "key", "value", "words"),
    [
        ("gpt2", "n_embd", None, r"'n_embd' \(an integer\) is missing"),
        ("gptj", "n_layer", "many", "'n_layer' is a str, expected an integer"),
        ("opt", "ffn_dim", 1.5, "'ffn_dim' is a float, expected an integer"),
        ("gpt_neox", "layer_norm_eps", "x", "'layer_norm_eps' is a str, expected a number"),
        ("falcon", "bias", 1, "'bias' is a int, expected a boolean"),
        ("gpt_neox", "num_attention_heads", 0, "num_attention_heads is 0"),
        ("gptj", "rotary_dim", 9, "rope_dim is 9"),
    ],
)
def test_bad_values_are_named_as_the_file_does(
    tmp_path: Path, case: str, key: str, value: object, words: str
) -> None:
    path = write_classic(tmp_path, case, **{key: value})
    with pytest.raises(ModelLoadError, match=words):
        open_model(path)


def test_a_familys_own_key_counts_before_the_common_one(tmp_path: Path) -> None:
    """What `transformers` does not read of a configuration is not read here."""
    path = write_classic(tmp_path, "opt", hidden_act="gelu", intermediate_size=7)
    np.testing.assert_allclose(reference_logits(path), STORED["opt"], rtol=0, atol=1e-4)


@pytest.mark.parametrize("architecture", ["opt", "gptj", "internlm3"])
def test_gguf_files_that_no_converter_writes_are_refused(tmp_path: Path, architecture: str) -> None:
    path = write_gguf(tmp_path / "x.gguf", {"general.architecture": architecture})
    with pytest.raises(UnsupportedModelError, match=f"'{architecture}' .*supported are .*gptneox"):
        open_model(path)


def test_norms_of_heads_in_gguf_files_of_stablelm_are_refused(tmp_path: Path) -> None:
    more = {"blk.0.attn_q_norm.weight": np.ones((HEADS, 8), np.float32)}
    path = write_classic_gguf(tmp_path / "x.gguf", "stablelm", tensors=more)
    with (
        open_model(path) as source,
        pytest.raises(UnsupportedModelError, match=r"does not use the tensors .*q_norm\.weight"),
    ):
        build_plan(source)
