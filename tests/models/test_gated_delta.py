"""Qwen3-Next and Qwen3.5 from checkpoints and GGUF files: logits, promise 1, what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from tellin import LLM, SamplingParams
from tellin.exceptions import (
    ModelLoadError,
    TellinError,
    UnsupportedFeatureError,
    UnsupportedModelError,
)
from tellin.kernels import _C
from tellin.kernels.native import NativeBackend
from tellin.kernels.reference import ReferenceBackend
from tellin.loading import open_model
from tellin.loading.lora import load_adapter
from tellin.models import build_plan
from tellin.models.plan.ir import Plan
from tests.models.adapters import Pairs, merged, write_adapter
from tests.models.gated_delta import (
    CASES,
    V_HEADS,
    checkpoint_arrays,
    config,
    write_checkpoint,
    write_tiny_gguf,
)
from tests.models.quantised import SCHEMES, pack_tensors
from tests.models.stepping import Stepper, logits_of
from tests.models.tiny import tiny_token_ids

IDS = tiny_token_ids().tolist()


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    with np.load(Path(__file__).parents[1] / "data" / "gated_delta.npz") as stored:
        return dict(stored)


def plan_of(path: Path, **options: Any) -> Plan:
    with open_model(path) as source:
        return build_plan(source, **options)


@pytest.mark.parametrize("name", CASES)
def test_logits_of_transformers(name: str, golden: dict[str, np.ndarray], tmp_path: Path) -> None:
    """From a checkpoint, from one with a vision tower, and from GGUF with its orders of rows."""
    paths = [write_checkpoint(tmp_path / "text", name), write_tiny_gguf(tmp_path / "m.gguf", name)]
    if name.startswith("qwen35"):
        paths.append(write_checkpoint(tmp_path / "composite", name, composite=True))
    for path in paths:
        logits = logits_of(ReferenceBackend(plan_of(path)), IDS)
        np.testing.assert_allclose(logits, golden[name], rtol=0, atol=3e-4, err_msg=str(path))


def in_pieces(backend: Any) -> np.ndarray:
    """Logits of the prompt in chunks and token by token, beside another request."""
    steps = Stepper(backend, slots={"a": 7, "b": 3})
    parts = [
        steps.step([("b", IDS[::-1][:5]), ("a", IDS[:2])])[1],
        steps.step([("a", IDS[2:3]), ("b", IDS[5:9])])[0],
        steps.step([("a", IDS[3:16])])[0],
        *(steps.step([("b", [i]), ("a", IDS[i : i + 1])])[1] for i in range(16, 20)),
    ]
    return np.concatenate(parts)


@pytest.mark.parametrize("name", ["qwen35", "qwen35moe", "qwen3next"])
def test_promise_1_of_every_variant(
    name: str, golden: dict[str, np.ndarray], tmp_path: Path
) -> None:
    """Chunks and batches change no bit, in floats and integers; floats are near the reference."""
    plan = plan_of(write_tiny_gguf(tmp_path / "m.gguf", name))
    reference = ReferenceBackend(plan)
    np.testing.assert_array_equal(in_pieces(reference), logits_of(reference, IDS))
    for isa in _C.linear_variants():
        for precision in ("float32", "default"):
            backend = NativeBackend(
                plan, isa=isa, num_threads=2, activation_precision=precision,
                kv_cache_dtype="float32",
            )  # fmt: skip
            whole = logits_of(backend, IDS)
            np.testing.assert_array_equal(in_pieces(backend), whole, err_msg=isa)
            if precision == "float32":
                np.testing.assert_allclose(whole, golden[name], rtol=0, atol=3e-4)


def test_kinds_of_layers_and_what_they_keep(tmp_path: Path) -> None:
    """Three layers with states, the fourth with keys and values; MTP's is left out."""
    path = write_tiny_gguf(tmp_path / "m.gguf", "qwen35")
    with open_model(path) as source:
        assert source.hparams.layer_types == ("linear_attention",) * 3 + ("full_attention",)
        assert source.hparams.num_hidden_layers == 4
        assert not [name for name in source.tensors if "layers.4" in name]
        plan = build_plan(source)
    assert len(plan.kv_layers) == 1
    assert sum(layer.num_values for layer in plan.state_layers) == 3 * (
        V_HEADS * 16 * 16 + 3 * (2 * 32 + V_HEADS * 16)
    )


def test_what_a_nested_configuration_says_of_ends(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, "qwen35", composite=True)
    values = json.loads((path / "config.json").read_text())
    values["text_config"] |= {"eos_token_id": 7, "bos_token_id": None}
    (path / "config.json").write_text(json.dumps(values))
    with open_model(path) as source:
        assert source.metadata.eos_token_ids == (7,)
        assert source.metadata.bos_token_id is None


@pytest.mark.parametrize("name", ["Qwen3_5Text", "Qwen3Next"])
def test_classifiers_judge_the_last_token(name: str, tmp_path: Path) -> None:
    """The state of the last row goes through ``score``, which the plan leaves out."""
    case = {"Qwen3_5Text": "qwen35", "Qwen3Next": "qwen3next"}[name]
    arrays = checkpoint_arrays(case)
    arrays["score.weight"] = np.ones((3, 64), np.float32)
    del arrays["lm_head.weight"]
    values = config(case) | {"architectures": [f"{name}ForSequenceClassification"]}
    values["num_labels"] = 3
    (tmp_path / "config.json").write_text(json.dumps(values))
    (tmp_path / "model.safetensors").write_bytes(pack_tensors(arrays))
    with open_model(tmp_path) as source:
        pooler = source.metadata.pooler
        assert pooler is not None
        assert (pooler.pooling_type, pooler.num_labels) == ("LAST", 3)
        plan = build_plan(source, pooling=True)
    assert plan.output.width == 64
    assert len(plan.state_layers) == 3 * 4


def test_passes_change_no_bit(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, "qwen3next_some_dense")
    recorded, fused = (ReferenceBackend(plan_of(path, fuse=fuse)) for fuse in (False, True))
    np.testing.assert_array_equal(logits_of(recorded, IDS), logits_of(fused, IDS))


def test_mixed_rows_of_quantised_matrices(tmp_path: Path) -> None:
    """Rows of blocks change places as a whole; a weight that is not finite is still found."""
    path = write_tiny_gguf(tmp_path / "m.gguf", "qwen35", gguf.GGMLQuantizationType.Q8_0)
    with (
        open_model(path) as source,
        open_model(write_tiny_gguf(tmp_path / "f.gguf", "qwen35")) as floats,
    ):
        source.check_weights()
        for part in ("q", "gate"):
            name = f"layers.3.self_attn.{part}_proj.weight"
            tensor, expected = source.tensors[name], floats.tensors[name]
            assert (tensor.shape, tensor.format_name) == (expected.shape, "Q8_0")
            rows = expected.read_rows(3, 70).view(np.float32).reshape(-1, 64)
            blocks = gguf.quants.quantize(rows, gguf.GGMLQuantizationType.Q8_0)
            np.testing.assert_array_equal(tensor.read_rows(3, 70), blocks.reshape(-1))
    raw = bytearray(path.read_bytes())
    with open_model(path) as source:
        start = source.tensors["layers.3.self_attn.gate_proj.weight"].data.tobytes()
    at = raw.index(start) + 40 * 2 * 34  # the first scale of a row of the gate's
    raw[at : at + 2] = np.float16(np.nan).tobytes()
    path.write_bytes(raw)
    with (
        open_model(path) as source,
        pytest.raises(ModelLoadError, match=r"self_attn\.gate_proj.*NaN"),
    ):
        source.check_weights()


def test_layers_that_the_configuration_leaves_out_are_missed(tmp_path: Path) -> None:
    """Only what predicts further tokens may follow the last layer."""
    path = write_checkpoint(tmp_path, "qwen35") / "config.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps(values | {"num_hidden_layers": 3, "layer_types": None}))
    with pytest.raises(UnsupportedModelError, match=r"layers\.3\..*does not support"):
        plan_of(tmp_path)


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"attn_output_gate": False}, UnsupportedModelError, "'attn_output_gate' is False"),
        ({"layer_types": ["linear_attention"] * 3}, ModelLoadError, "kind of 3 layers.* are 4"),
        (
            {"layer_types": ["sliding_attention"] * 4},
            UnsupportedModelError,
            "'sliding_attention'.*linear_attention, full_attention",
        ),
        (
            {"linear_num_key_heads": 4},
            ModelLoadError,
            "value_heads is 6 and .*key_heads is 4",
        ),
        ({"num_hidden_layers": 1 << 40}, ModelLoadError, "num_hidden_layers is 1099511627776"),
        ({"linear_conv_kernel_dim": 5}, ModelLoadError, r"conv1d.*kernels of 5 rows"),
        ({"linear_num_key_heads": 0}, ModelLoadError, "linear_num_key_heads is 0"),
        ({"linear_num_key_heads": 1}, ModelLoadError, r"in_proj_qkv.*160 rows, expected 128"),
    ],
)
def test_what_does_not_fit_is_refused(
    changes: dict[str, Any], error: type[TellinError], match: str, tmp_path: Path
) -> None:
    path = write_checkpoint(tmp_path, "qwen35", composite=True)
    values = json.loads((path / "config.json").read_text())
    values["text_config"] |= changes
    (path / "config.json").write_text(json.dumps(values))
    with pytest.raises(error, match=match):
        plan_of(path)


@pytest.mark.parametrize("scheme", ["awq", "fp8_blocks"])
def test_mixed_rows_of_quantised_checkpoints(scheme: str, tmp_path: Path) -> None:
    """Rows that are made from words and scales change places too; as the meant weights compute."""
    tensors: dict[str, np.ndarray] = {}
    meant: dict[str, np.ndarray] = {}
    for key, values in checkpoint_arrays("qwen3next").items():
        is_layer = "linear_attn" in key or "self_attn" in key or "_expert" in key
        if is_layer and values.ndim == 2 and len(values) % 16 == 0:
            parts, meant[key] = SCHEMES[scheme].write(values)
            tensors |= {key.replace(".weight", f".{kind}"): part for kind, part in parts.items()}
        else:
            tensors[key] = meant[key] = values
    assert sum("in_proj_qkvz" in key for key in tensors) >= 6
    plain = write_checkpoint(
        tmp_path / "plain",
        "qwen3next",
        changed={key.removeprefix("model."): values for key, values in meant.items()},
    )
    folder = tmp_path / "quantised"
    folder.mkdir()
    values = config("qwen3next") | {"quantization_config": SCHEMES[scheme].config}
    (folder / "config.json").write_text(json.dumps(values))
    (folder / "model.safetensors").write_bytes(pack_tensors(tensors))
    expected = logits_of(ReferenceBackend(plan_of(plain)), IDS)
    plan = plan_of(folder)
    logits = logits_of(ReferenceBackend(plan), IDS)
    tolerance = 1e-3 if SCHEMES[scheme].is_exact else 0.02
    np.testing.assert_allclose(logits, expected, rtol=0, atol=tolerance)
    native = NativeBackend(plan, activation_precision="int16", kv_cache_dtype="float32")
    np.testing.assert_allclose(logits_of(native, IDS), expected, rtol=0, atol=0.05)


def test_adapters_fit_mixed_and_tiled_rows(tmp_path: Path) -> None:
    """An adapter of every linear layer, as trained on the checkpoint, gives the merged model."""
    for name in ("qwen35", "qwen3next"):
        base = checkpoint_arrays(name)
        random = np.random.RandomState(5)
        pairs: Pairs = {}
        for tensor, values in base.items():
            is_linear = ".layers." in tensor and values.ndim == 2
            if is_linear and not any(
                part in tensor for part in (".experts.", "shared_expert_gate", "mlp.gate.")
            ):
                a = random.standard_normal((3, values.shape[1])) / np.sqrt(values.shape[1])
                b = random.standard_normal((values.shape[0], 3)) * 0.3
                layer = tensor.removeprefix("model.").removesuffix(".weight")
                pairs[layer] = (a.astype(np.float32), b.astype(np.float32))
        assert {key.rpartition(".")[2] for key in pairs} > {"q_proj", "out_proj"}
        whole = merged({key.removeprefix("model."): a for key, a in base.items()}, pairs)
        folder = write_checkpoint(tmp_path / f"{name}-merged", name, changed=whole)
        expected = logits_of(ReferenceBackend(plan_of(folder)), IDS)
        adapter_folder = write_adapter(tmp_path / f"{name}-adapter", pairs)
        for path in (
            write_checkpoint(tmp_path / name, name),
            write_tiny_gguf(tmp_path / f"{name}.gguf", name),
        ):
            with open_model(path) as source:
                plan = build_plan(source, max_lora_rank=4)
                adapter = load_adapter(adapter_folder, source.hparams, plan.lora_sites, 4)
            assert set(adapter.weights) == set(plan.lora_sites)
            backend: Any = ReferenceBackend(plan)
            backend.set_adapter(0, adapter.weights)
            forward = backend.forward
            slot = np.zeros(1, np.int32)
            backend.forward = lambda batch, run=forward, slot=slot: run(
                replace(batch, adapter_slots=slot)
            )
            logits = logits_of(backend, IDS)
            np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-3, err_msg=str(path))


def test_pictures_are_left_out(tmp_path: Path) -> None:
    """Without its image encoder a composite model runs as a text model."""
    path = write_checkpoint(tmp_path / "m", "qwen35", composite=True, with_tokenizer=True)
    with LLM(path, max_model_len=64, num_kv_blocks=16, limit_mm_per_prompt={"image": 0}) as llm:
        params = SamplingParams(max_tokens=3, ignore_eos=True)
        assert len(llm.generate("Hi", params)[0].outputs[0].token_ids) == 3
        prompt = {"prompt": "<image>", "multi_modal_data": {"image": np.zeros((8, 8, 3), np.uint8)}}
        with pytest.raises(UnsupportedFeatureError, match="image"):
            llm.generate(prompt, params)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_checkpoints_that_transformers_saves(
    name: str, golden: dict[str, np.ndarray], tmp_path: Path
) -> None:
    import torch
    import transformers

    from tests.data.make.make_gated_delta import CLASSES

    folder = write_checkpoint(tmp_path / "made", name)
    model = getattr(transformers, CLASSES[CASES[name]]).from_pretrained(folder, dtype=torch.float32)
    model.save_pretrained(tmp_path / "saved")
    logits = logits_of(ReferenceBackend(plan_of(tmp_path / "saved")), IDS)
    np.testing.assert_allclose(logits, golden[name], rtol=0, atol=3e-4)
