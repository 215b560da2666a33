"""Decoders of a way of their own, from files: logits of `transformers`, and promise 1."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tellin.exceptions import LoadError
from tellin.kernels.native import NativeBackend
from tellin.kernels.reference import ReferenceBackend
from tellin.loading import open_model
from tellin.loading.lora import load_adapter
from tellin.models import build_plan
from tellin.models.plan import ir
from tests.loading.gguf_writer import write_gguf
from tests.models import tiny_decoders_gguf
from tests.models.adapters import write_adapter
from tests.models.stepping import Stepper, logits_of
from tests.models.tiny_decoders import (
    DECODERS,
    HIDDEN,
    decoder_arrays,
    decoder_token_ids,
    write_tiny_decoder,
)
from tests.models.tiny_decoders_gguf import write_tiny_decoder_gguf

FLOAT32: dict[str, Any] = {"activation_precision": "float32", "kv_cache_dtype": "float32"}


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    with np.load(Path(__file__).parents[1] / "data" / "decoders.npz") as stored:
        return dict(stored)


def plan_of(path: Path, **options: Any) -> ir.Plan:
    with open_model(path) as source:
        return build_plan(source, **options)


def reference_logits(path: Path, **options: Any) -> np.ndarray:
    return logits_of(ReferenceBackend(plan_of(path, **options)), decoder_token_ids())


@pytest.mark.parametrize("name", DECODERS)
def test_checkpoints_give_the_logits_of_transformers(
    name: str, golden: dict[str, np.ndarray], tmp_path: Path
) -> None:
    logits = reference_logits(write_tiny_decoder(tmp_path, name))
    assert golden[name].std() > 1
    np.testing.assert_allclose(logits, golden[name], rtol=0, atol=1e-4)
    np.testing.assert_array_equal(reference_logits(tmp_path, fuse=False), logits)


@pytest.mark.parametrize("name", DECODERS)
def test_gguf_files_give_the_logits_of_transformers(
    name: str, golden: dict[str, np.ndarray], tmp_path: Path
) -> None:
    """Stacked experts, permuted rows, rotary factors, numbers in metadata."""
    path = write_tiny_decoder_gguf(tmp_path / "tiny.gguf", name)
    np.testing.assert_allclose(reference_logits(path), golden[name], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["apertus", "hunyuan_moe", "ministral3"])
def test_adapters_give_what_merged_weights_give(name: str, tmp_path: Path) -> None:
    """7.3: between queries and their temperature, before xIELU, of a shared expert."""
    modules = {
        "apertus": ("self_attn.q_proj", "mlp.up_proj", "mlp.down_proj"),
        "hunyuan_moe": ("self_attn.k_proj", "mlp.shared_mlp.up_proj"),
        "ministral3": ("self_attn.q_proj", "self_attn.o_proj"),
    }[name]
    arrays, random, pairs = decoder_arrays(name), np.random.RandomState(3), {}
    for module in modules:
        layer = f"model.layers.1.{module}"
        num_out, num_in = arrays[f"{layer}.weight"].shape
        a = (0.1 * random.standard_normal((2, num_in))).astype(np.float32)
        b = random.standard_normal((num_out, 2)).astype(np.float32)
        pairs[f"layers.1.{module}"] = (a, b)
        arrays[f"{layer}.weight"] += b @ a
    write_adapter(tmp_path / "adapter", pairs, lora_alpha=2)
    merged = write_tiny_decoder(tmp_path / "merged", name)
    save_file(arrays, merged / "model.safetensors")
    expected = reference_logits(merged)
    with open_model(write_tiny_decoder(tmp_path / "base", name)) as source:
        plan = build_plan(source, max_lora_rank=2)
        adapter = load_adapter(tmp_path / "adapter", source.hparams, plan.lora_sites, 2)
    backend = NativeBackend(plan, **FLOAT32)
    backend.set_adapter(0, adapter.weights)
    ids = decoder_token_ids().tolist()
    logits = Stepper(backend, adapters={"a": 0}).step([("a", ids)])[0]
    np.testing.assert_allclose(logits, expected, rtol=0, atol=2e-4)
    assert np.abs(logits - logits_of(NativeBackend(plan, **FLOAT32), ids)).max() > 0.1


@pytest.mark.parametrize("name", DECODERS)
def test_promise_1_with_native_kernels(name: str, golden: Any, tmp_path: Path) -> None:
    """Logits of `transformers` in float32; in the default precision equal bits in any chunks."""
    plan = plan_of(write_tiny_decoder(tmp_path, name))
    exact = NativeBackend(plan, **FLOAT32)
    logits = logits_of(exact, decoder_token_ids())
    np.testing.assert_allclose(logits, golden[name], rtol=0, atol=2e-4)
    ids = decoder_token_ids().tolist()
    whole = logits_of(NativeBackend(plan, num_threads=1), ids)
    crowd = Stepper(NativeBackend(plan, num_threads=2))
    crowd.step([("b", ids[::-1]), ("a", ids[:3]), ("c", ids[:5])])
    rest = [crowd.step([("c", [7]), ("a", ids[i : i + 2])])[1] for i in range(3, 19, 2)]
    np.testing.assert_array_equal(np.concatenate(rest), whole[3:19])


@pytest.mark.parametrize("name", ["apertus", "cohere2", "exaone4", "ministral3"])
def test_promise_1_in_the_reference(name: str, tmp_path: Path) -> None:
    backend = ReferenceBackend(plan_of(write_tiny_decoder(tmp_path, name)))
    ids = decoder_token_ids().tolist()
    whole = logits_of(backend, ids)
    crowd = Stepper(backend)
    crowd.step([("b", ids[::-1]), ("a", ids[:3]), ("c", ids[:5])])
    rest = [crowd.step([("c", [7]), ("a", ids[i : i + 2])])[1] for i in range(3, 19, 2)]
    np.testing.assert_array_equal(np.concatenate(rest), whole[3:19])


def test_the_cache_has_windows_where_the_layers_have(tmp_path: Path) -> None:
    for name in ("cohere2", "exaone4"):
        layers = plan_of(write_tiny_decoder(tmp_path / name, name)).kv_layers
        assert [layer.sliding_window for layer in layers] == [8, 8, 8, None]


@pytest.mark.parametrize("name", ["cohere2", "exaone4"])
def test_layers_without_a_window_do_not_rotate(name: str, tmp_path: Path) -> None:
    """Where layers have a window; all layers may be global, of either format."""
    plan = plan_of(write_tiny_decoder(tmp_path / "some", name))
    assert sum(isinstance(op, ir.Rope) for op in plan.ops) == 6
    config = DECODERS[name] | {"layer_types": ["full_attention"] * 4}
    write_tiny_decoder(tmp_path, name)
    (tmp_path / "config.json").write_text(json.dumps(config))
    plan = plan_of(tmp_path)
    assert not any(isinstance(op, ir.Rope) for op in plan.ops)
    assert {layer.sliding_window for layer in plan.kv_layers} == {None}


def test_every_layer_of_a_gguf_file_may_be_global(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = DECODERS["exaone4"] | {"layer_types": ["full_attention"] * 4}
    monkeypatch.setitem(DECODERS, "exaone4", config)
    plan = plan_of(write_tiny_decoder_gguf(tmp_path / "tiny.gguf", "exaone4"))
    assert not any(isinstance(op, ir.Rope) for op in plan.ops)


def test_what_only_some_files_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Command R's longer context; a base of its own of the layers that rotate."""
    path = write_tiny_decoder(tmp_path / "cohere", "cohere") / "config.json"
    path.write_text(json.dumps(DECODERS["cohere"] | {"model_max_length": 4096}))
    with open_model(path.parent) as source:
        assert source.hparams.max_position_embeddings == 4096
    assert plan_of(path.parent, pooling=True).output.width == HIDDEN

    def write(path: Path, metadata: dict[str, Any], tensors: Any) -> Path:
        return write_gguf(path, metadata | {f"{name}.rope.freq_base_swa": 777.0}, tensors)

    monkeypatch.setattr(tiny_decoders_gguf, "write_gguf", write)
    for name, theta in (("cohere2", 777.0), ("exaone4", 777.0), ("exaone4_small", 1e6)):
        path = write_tiny_decoder_gguf(tmp_path / f"{name}.gguf", name)
        with open_model(path) as source:
            assert source.hparams.rope_theta == theta


def test_the_text_model_of_mistral3(golden: dict[str, np.ndarray], tmp_path: Path) -> None:
    """Beside an image encoder, which is not read; both spellings of names, both text models."""
    prefixes = (("language_model.model.", "language_model."), ("model.language_model.", ""))
    for i, (prefix, head) in enumerate(prefixes):
        path = write_tiny_decoder(tmp_path / str(i), "ministral3")
        config = {"model_type": "mistral3", "text_config": DECODERS["ministral3"]}
        (path / "config.json").write_text(json.dumps(config | {"vision_config": {}}))
        arrays = {
            (head + name if name.startswith("lm_head") else name.replace("model.", prefix, 1)): v
            for name, v in decoder_arrays("ministral3").items()
        }
        for tower in ("vision_tower.ln_pre.weight", "multi_modal_projector.norm.weight"):
            arrays[tower if head else f"model.{tower}"] = np.zeros(2, np.float32)
        save_file(arrays, path / "model.safetensors")
        np.testing.assert_allclose(reference_logits(path), golden["ministral3"], rtol=0, atol=1e-4)
    text = {k: v for k, v in DECODERS["ministral3"].items() if k != "rope_parameters"}
    config = {"model_type": "mistral3", "text_config": {**text, "model_type": "mistral"}}
    (path / "config.json").write_text(json.dumps(config))
    with open_model(path) as source:
        assert (source.hparams.architecture, source.hparams.rope_theta) == ("mistral", 1e9)
        assert source.hparams.query_temperature is None


def test_queries_have_the_temperature_of_their_position(tmp_path: Path) -> None:
    """Nothing in the first context; without its factor there is no such operation."""
    config = DECODERS["ministral3"]
    rope = dict(config["rope_parameters"])
    with open_model(write_tiny_decoder(tmp_path, "ministral3")) as source:
        assert source.hparams.query_temperature == (0.1, 8)
        with_it = logits_of(ReferenceBackend(build_plan(source)), decoder_token_ids())
    del rope["llama_4_scaling_beta"]
    (tmp_path / "config.json").write_text(json.dumps(config | {"rope_parameters": rope}))
    with open_model(tmp_path) as source:
        assert source.hparams.query_temperature is None
        without = logits_of(ReferenceBackend(build_plan(source)), decoder_token_ids())
    np.testing.assert_array_equal(with_it[:8], without[:8])
    assert (np.abs(with_it - without)[8:].max(axis=1) > 1e-3).all()


ROPE = DECODERS["ministral3"]["rope_parameters"]


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("apertus", {"hidden_act": "silu"}, "'hidden_act' is 'silu'.*'xielu'"),
        ("apertus", {"post_norm": True}, "'post_norm' is True"),
        ("arcee", {"hidden_act": "gelu"}, "'hidden_act' is 'gelu'.*'relu2'"),
        ("cohere", {"use_qk_norm": True}, "'use_qk_norm' is True.*'command-r'"),
        ("cohere", {"logit_scale": 0}, "logit_scale is 0"),
        ("cohere2", {"use_parallel_block": False}, "'use_parallel_block' is False"),
        ("cohere2", {"sliding_window": None}, "'sliding_window' .* is missing"),
        ("dots1", {"scoring_func": "softmax"}, "'scoring_func' is 'softmax'"),
        ("dots1", {"n_group": 2}, "'n_group' is 2"),
        ("dots1", {"sliding_window": 8, "max_window_layers": 2}, "'sliding_window' is 8 in some"),
        ("exaone4", {"sliding_window": None}, "'sliding_window' .* is missing"),
        (
            "exaone4",
            {"sliding_window_pattern": "LGLG", "layer_types": None},
            "'sliding_window_pattern' is 'LGLG'",
        ),
        ("hunyuan_dense", {"use_cla": True}, "'use_cla' is True"),
        (
            "hunyuan_dense",
            {"rope_scaling": {"type": "yarn", "alpha": 2.0, "factor": 2.0}},
            "'alpha' is 2 with rope scaling 'yarn'",
        ),
        (
            "hunyuan_dense",
            {"rope_scaling": {"type": "dynamic", "alpha": -2.0}},
            "'alpha' is -2 for heads of 16",
        ),
        ("hunyuan_moe", {"moe_topk": [2, 3, 2]}, r"'num_experts_per_tok' differs.*\[2, 3, 2\]"),
        ("minimax_m2", {"shared_intermediate_size": 64}, "'shared_intermediate_size' is 64"),
        ("ministral3", {"rope_parameters": None}, "'rope_parameters' .* is missing"),
        (
            "ministral3",
            {"rope_parameters": ROPE | {"llama_4_scaling_beta": -0.1}},
            "temperature is -0.1",
        ),
        ("seed_oss", {"attention_out_bias": True}, "'attention_out_bias' is True"),
    ],
)
def test_what_is_not_supported_is_refused_with_its_name_and_value(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = write_tiny_decoder(tmp_path, name) / "config.json"
    path.write_text(json.dumps(DECODERS[name] | changes))
    with pytest.raises(LoadError, match=message):
        plan_of(tmp_path)


def test_a_pattern_of_letters_is_read(golden: dict[str, np.ndarray], tmp_path: Path) -> None:
    write_tiny_decoder(tmp_path, "exaone4")
    config = {k: v for k, v in DECODERS["exaone4"].items() if k != "layer_types"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    np.testing.assert_allclose(reference_logits(tmp_path), golden["exaone4"], rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("apertus", {"xielu.beta": np.ones(2, np.float32)}, "'xielu.beta' has 2 entries for 3"),
        ("apertus", {"xielu.eps": None}, "'xielu.eps' .* is missing"),
        ("cohere", {"command-r.logit_scale": None}, "'command-r.logit_scale' .* is missing"),
        ("ministral3", {"mistral3.expert_count": 8}, "mixture of 8 experts.* 'mistral3'"),
        (
            "ministral3",
            {"mistral3.rope.scaling.original_context_length": 0},
            "original_max_position_embeddings; got 0|temperature is 0",
        ),
    ],
)
def test_what_gguf_files_lack_or_mean_otherwise_is_refused(
    name: str,
    keys: dict[str, Any],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def write(path: Path, metadata: dict[str, Any], tensors: Any) -> Path:
        changed = {k: v for k, v in (metadata | keys).items() if v is not None}
        return write_gguf(path, changed, tensors)

    monkeypatch.setattr(tiny_decoders_gguf, "write_gguf", write)
    path = write_tiny_decoder_gguf(tmp_path / "tiny.gguf", name)
    with pytest.raises(LoadError, match=message):
        plan_of(path)


def test_numbers_of_xielu_may_be_one_for_all_layers(
    golden: dict[str, np.ndarray], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(path: Path, metadata: dict[str, Any], tensors: Any) -> Path:
        return write_gguf(path, metadata | {"xielu.beta": 0.5, "xielu.eps": -1e-6}, tensors)

    monkeypatch.setattr(tiny_decoders_gguf, "write_gguf", write)
    path = write_tiny_decoder_gguf(tmp_path / "tiny.gguf", "apertus")
    np.testing.assert_allclose(reference_logits(path), golden["apertus"], rtol=0, atol=1e-4)


def test_logit_rows_are_gathered_before_they_are_used(tmp_path: Path) -> None:
    """So long steps run in passes; as for the other architectures, which `test_lora` has."""
    for name in DECODERS:
        ops = plan_of(write_tiny_decoder(tmp_path / name, name), max_lora_rank=2).ops
        gathers = [i for i, op in enumerate(ops) if isinstance(op, ir.GatherRows)]
        logit = [
            i
            for i, op in enumerate(ops)
            if not isinstance(op, ir.GatherRows) and op.writes[0].rows is ir.Rows.LOGITS
        ]
        assert max(gathers) < min(logit), name


@pytest.mark.parametrize("name", ["cohere", "ernie4_5", "hunyuan_dense", "seed_oss"])
def test_a_tensor_of_another_variant_is_refused(name: str, tmp_path: Path) -> None:
    write_tiny_decoder(tmp_path, name)
    extra = {"model.layers.0.self_attn.g_norm.weight": np.ones(16, np.float32)}
    save_file(decoder_arrays(name) | extra, tmp_path / "model.safetensors")
    with pytest.raises(LoadError, match=r"does not use the tensors layers\.0\.self_attn\.g_norm"):
        plan_of(tmp_path)
