"""Layers that predict one token more: their logits, promise 1, what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from tellin.exceptions import (
    InvalidParameterError,
    ModelLoadError,
    UnsupportedFeatureError,
    UnsupportedModelError,
)
from tellin.kernels import _C
from tellin.kernels.batch import StepBatch
from tellin.kernels.native import NativeBackend
from tellin.kernels.reference import ReferenceBackend
from tellin.loading import open_model, open_predictor
from tellin.models import build_plan, build_predictor
from tests.models import gated_delta, predictors, tiny, tiny_files
from tests.models.predictors import (
    CASES,
    LAYERS,
    QWEN,
    config,
    own_arrays,
    write_checkpoint,
    write_tiny_gguf,
)
from tests.models.quantised import SCHEMES, pack_tensors
from tests.models.stepping import logits_of
from tests.models.tiny import tiny_token_ids

IDS = tiny_token_ids()
COUNT = len(IDS) - 1


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    with np.load(Path(__file__).parents[1] / "data" / "predictors.npz") as stored:
        return dict(stored)


def rows(
    backend: Any, start: int, ids: np.ndarray, hidden: np.ndarray, wanted: list[int]
) -> np.ndarray:
    """Logits of ``wanted`` rows of a pass from position ``start`` on."""
    count = len(ids)
    table = np.arange(1, 5, dtype=np.int32)[None]
    starts = np.array([0, count], np.int32)
    positions = np.arange(start, start + count, dtype=np.int32)
    ends = np.array([start + count], np.int32)
    step = StepBatch(
        ids.astype(np.int32), positions, starts, ends, table, np.array(wanted, np.int32),
        embeds=np.ascontiguousarray(hidden), embed_rows=np.arange(count, dtype=np.int32),
    )  # fmt: skip
    return np.array(backend.forward(step))


def open_both(path: Path, make: Callable[[Any], Any]) -> tuple[Any, Any]:
    """The model, and its layer that predicts one token more."""
    with open_model(path) as source:
        target = make(build_plan(source, all_hidden=True))
    with open_predictor(path) as source:
        predictor = make(build_predictor(source))
    predictor.init_kv_cache(6)
    return target, predictor


def native(isa: str | None = None, precision: str = "float32") -> Callable[[Any], Any]:
    return lambda plan: NativeBackend(
        plan, isa=isa, num_threads=2, activation_precision=precision, kv_cache_dtype="float32"
    )


@pytest.mark.parametrize("name", CASES)
def test_logits_of_transformers(name: str, golden: dict[str, np.ndarray], tmp_path: Path) -> None:
    """All rows at once, and one more by the layer's own state; with both backends."""
    path = write_checkpoint(tmp_path / name, name)
    for make in (ReferenceBackend, native()):
        target, predictor = open_both(path, make)
        logits_of(target, IDS)
        hidden = target.hidden()[:COUNT]
        logits = rows(predictor, 0, IDS[1:], hidden, list(range(COUNT)))
        np.testing.assert_allclose(logits, golden[name], rtol=0, atol=3e-4)
        own = np.array(predictor.hidden()[-1:])
        more = rows(predictor, COUNT, logits[-1:].argmax(1), own, [0])
        np.testing.assert_allclose(more[0], golden[f"{name}.chained"], rtol=0, atol=3e-4)


@pytest.mark.parametrize("name", QWEN)
def test_gguf_gives_the_same(name: str, tmp_path: Path) -> None:
    """Names, norms that hold one more, and mixed rows, as the reference converter writes them."""
    vocab = gated_delta.VOCAB
    folder = write_checkpoint(tmp_path / name, name, own=gated_delta.checkpoint_arrays(name, vocab))
    values = json.loads((folder / "config.json").read_text()) | {"vocab_size": vocab}
    (folder / "config.json").write_text(json.dumps(values))
    found = []
    for path in (folder, write_tiny_gguf(tmp_path / "m.gguf", name)):
        target, predictor = open_both(path, ReferenceBackend)
        logits_of(target, IDS % vocab)
        found.append(rows(predictor, 0, IDS[1:] % vocab, target.hidden()[:COUNT], [3, COUNT - 1]))
    np.testing.assert_allclose(found[1], found[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe_lite", "glm4moe"])
def test_gguf_of_numbered_layers(name: str, tmp_path: Path) -> None:
    """The layer after the last, and its ``nextn`` tensors, give what the same in memory gives."""
    case, arrays = tiny.ALL_CASES[name], tiny.tiny_arrays(name)
    random, hidden = np.random.RandomState(3), case.hidden_size
    shapes = dict.fromkeys(("enorm", "hnorm", "shared_head.norm"), (hidden,))
    own = {
        key: random.standard_normal(shape).astype(np.float32) / 8
        for key, shape in (shapes | {"eh_proj": (hidden, 2 * hidden)}).items()
    }
    files = {key.replace("shared_head.", "shared_head_"): values for key, values in own.items()}
    path = tiny_files.write_tiny_gguf(tmp_path / "m.gguf", name, predictor=files)
    last = f"layers.{case.num_hidden_layers - 1}"
    kept = (last, "embed_tokens", "lm_head")
    arrays = {key: values for key, values in arrays.items() if key.startswith(kept)}
    arrays |= {f"{last}.{key}.weight": values for key, values in own.items()}
    hparams = replace(case, num_hidden_layers=case.num_hidden_layers - 1)
    with open_predictor(path) as source:
        assert source.hparams.num_hidden_layers == hparams.num_hidden_layers
        plans = [build_predictor(source), build_predictor(tiny.memory_source(hparams, arrays))]
    given = random.standard_normal((COUNT, hidden)).astype(np.float32)
    found = []
    for plan in plans:
        backend = ReferenceBackend(plan)
        backend.init_kv_cache(6)
        found.append(rows(backend, 0, IDS[1:], given, list(range(COUNT))))
    np.testing.assert_allclose(found[0], found[1], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["qwen35", "deepseek_v3", "mimo"])
def test_promise_1(name: str, tmp_path: Path) -> None:
    """Hidden states of all tokens change no logit; chunks change no bit of the layer's rows."""
    path = write_checkpoint(tmp_path / name, name)
    with open_model(path) as source:
        plan = build_plan(source)
    for isa in _C.linear_variants():
        make = native(isa, "default")
        target, predictor = open_both(path, make)
        np.testing.assert_array_equal(logits_of(target, IDS), logits_of(make(plan), IDS))
        hidden = np.array(target.hidden()[:COUNT])
        whole = rows(predictor, 0, IDS[1:], hidden, list(range(COUNT)))
        predictor.init_kv_cache(6)
        pieces = []
        for a, b in ((0, 5), (5, 6), (6, COUNT)):
            wanted = [] if a == 0 else list(range(b - a))
            pieces.append(rows(predictor, a, IDS[a + 1 : b + 1], hidden[a:b], wanted))
        np.testing.assert_array_equal(np.concatenate(pieces), whole[5:], err_msg=isa)


@pytest.mark.parametrize("scheme", ["awq", "fp8_blocks"])
def test_quantised_checkpoints(scheme: str, tmp_path: Path) -> None:
    """The layer's matrices as they are, mixed rows too, compute as the meant weights."""
    layer = predictors.layer_arrays("qwen3next")
    meant, parts = dict(layer), dict[str, np.ndarray]()
    for key, values in layer.items():
        if values.ndim == 2 and len(values) % 16 == 0:
            written, meant[key] = SCHEMES[scheme].write(values)
            name = f"mtp.layers.0.{key}"
            parts |= {name.replace(".weight", f".{kind}"): part for kind, part in written.items()}
    plain = write_checkpoint(tmp_path / "plain", "qwen3next", layer=meant)
    path = write_checkpoint(tmp_path / "quantised", "qwen3next", layer=meant)
    arrays = predictors.own_arrays("qwen3next")
    arrays |= predictors.predictor_arrays(layer, predictors.input_arrays("qwen3next"), "qwen3next")
    layers = {part.rpartition(".")[0] for part in parts}
    arrays = {key: a for key, a in arrays.items() if key.rpartition(".")[0] not in layers}
    (path / "model.safetensors").write_bytes(pack_tensors(arrays | parts))
    values = config("qwen3next") | {"quantization_config": SCHEMES[scheme].config}
    (path / "config.json").write_text(json.dumps(values))
    found = []
    for folder in (plain, path):
        target, predictor = open_both(folder, ReferenceBackend)
        logits_of(target, IDS)
        found.append(rows(predictor, 0, IDS[1:], target.hidden()[:COUNT], list(range(COUNT))))
    tolerance = 1e-3 if SCHEMES[scheme].is_exact else 0.02
    np.testing.assert_allclose(found[1], found[0], rtol=0, atol=tolerance)


@pytest.mark.parametrize("precision", ["float32", "mixed"])
def test_the_output_matrix_is_packed_once(precision: str, tmp_path: Path) -> None:
    """The layer uses the model's, which outlives the model; the same bits as with its own."""
    path = write_tiny_gguf(tmp_path / "m.gguf", "qwen35", gguf.GGMLQuantizationType.Q8_0)
    make = native(None, precision)
    target, predictor = open_both(path, make)
    with open_predictor(path) as source:
        plan = build_predictor(source)
    shared = NativeBackend(
        plan, num_threads=2, activation_precision=precision, kv_cache_dtype="float32",
        beside=target,
    )  # fmt: skip
    shared.init_kv_cache(6)
    logits_of(target, IDS)
    hidden, wanted = np.array(target.hidden()[:COUNT]), list(range(COUNT))
    expected = rows(predictor, 0, IDS[1:], hidden, wanted)
    target.close()
    del target
    np.testing.assert_array_equal(rows(shared, 0, IDS[1:], hidden, wanted), expected)
    saved = predictor.info["weight_bytes"] - shared.info["weight_bytes"]
    assert saved >= gated_delta.VOCAB * 64
    assert NativeBackend(plan, beside=predictor).info["num_threads"] == 2
    with pytest.raises(InvalidParameterError, match="num_threads must be that of the program"):
        NativeBackend(plan, num_threads=3, beside=predictor)
    with pytest.raises(ValueError, match="weights are shared by programs of the same instruction"):
        NativeBackend(plan, num_threads=2, isa="portable", beside=predictor)


def test_hidden_states_of_a_long_step(tmp_path: Path) -> None:
    """A step that is computed in several passes keeps the states of all of them."""
    path = write_checkpoint(tmp_path / "m", "mimo")
    with open_model(path) as source:
        plan = build_plan(source, all_hidden=True)
    ids = np.arange(1100) % 250
    whole, reference = native()(plan), ReferenceBackend(plan, block_size=16)
    expected = logits_of(reference, ids[:600])
    np.testing.assert_allclose(logits_of(whole, ids[:600]), expected, rtol=0, atol=5e-4)
    np.testing.assert_allclose(whole.hidden(), reference.hidden(), rtol=0, atol=5e-4)


def test_a_model_without_such_a_layer(tmp_path: Path) -> None:
    """The model opens as before; who asks for the layer is told that there is none."""
    path = write_checkpoint(tmp_path / "m", "deepseek_v3")
    with open_model(path) as source:
        assert not [name for name in source.tensors if name.startswith(f"layers.{LAYERS}")]
    arrays = own_arrays("deepseek_v3")
    (path / "model.safetensors").write_bytes(gated_delta.pack_safetensors(arrays))
    with pytest.raises(UnsupportedFeatureError, match="'deepseek2' has no layer that predicts"):
        open_predictor(path)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    """A tensor of the layer that is missing or too narrow is named; others keep their names."""
    from safetensors.numpy import load_file, save_file

    path = write_checkpoint(tmp_path / "m", "qwen35")
    file = path / "model.safetensors"
    arrays = load_file(file)
    for name, match in (
        ("mtp.pre_fc_norm_hidden.weight", "'layers.4.hnorm.weight' is missing"),
        ("mtp.layers.0.self_attn.k_proj.weight", "'layers.4.self_attn.k_proj.weight' is missing"),
    ):
        save_file({key: values for key, values in arrays.items() if key != name}, file)
        with open_predictor(path) as source, pytest.raises(ModelLoadError, match=match):
            build_predictor(source)
    save_file(arrays | {"mtp.fc.weight": arrays["mtp.fc.weight"][:, :64].copy()}, file)
    with open_predictor(path) as source, pytest.raises(ModelLoadError, match=r"\(n, 128\)"):
        build_predictor(source)
    save_file(arrays | {"mtp.layers.0.extra.weight": arrays["mtp.norm.weight"]}, file)
    with open_predictor(path) as source, pytest.raises(UnsupportedModelError, match="extra"):
        build_predictor(source)
    save_file(arrays | {"mtp.layers.1.extra.weight": arrays["mtp.norm.weight"]}, file)
    with open_predictor(path) as source:
        build_predictor(source)  # of several layers the first is used


def test_families_that_do_not_run_are_named(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "m", "mimo")
    (path / "config.json").write_text(json.dumps(config("mimo") | {"model_type": "qwen3"}))
    with (
        open_predictor(path) as source,
        pytest.raises(UnsupportedModelError, match=r"'qwen3'.*supported are those of deepseek2"),
    ):
        build_predictor(source)
