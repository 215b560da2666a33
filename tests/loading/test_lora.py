"""LoRA adapters on disk: rules 7.2.1 to 7.2.7, P50."""

from __future__ import annotations

import json
import re
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tellin.exceptions import AdapterError, AdapterNotFoundError
from tellin.loading.lora import Adapter, load_adapter
from tests.models.adapters import SHAPE, Arrays, Pairs, adapter_pairs, write_adapter
from tests.models.tiny import CASES, EXPERT_CASES, tensor_shapes


def sites(hparams: Any = SHAPE) -> dict[str, tuple[int, int]]:
    return {
        name.removesuffix(".weight"): (shape[1], shape[0])
        for name, shape in tensor_shapes(hparams).items()
        if name.endswith("_proj.weight")
    }


def load(path: Path, hparams: Any = SHAPE, max_rank: int = 16) -> Adapter:
    return load_adapter(path, hparams, sites(hparams), max_rank)


def assert_pairs(adapter: Adapter, pairs: Pairs, scale: float) -> None:
    assert set(adapter.weights) == set(pairs)
    for layer, (a, b) in pairs.items():
        np.testing.assert_array_equal(adapter.weights[layer][0], a)
        np.testing.assert_allclose(adapter.weights[layer][1], scale * b, rtol=1e-6)


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        ({"lora_alpha": 8}, 2.0),
        ({"lora_alpha": 8, "use_rslora": True}, 4.0),
        ({"lora_alpha": 8, "target_modules": ".*_proj"}, 2.0),
        ({"lora_alpha": 8, "init_lora_weights": "gaussian"}, 2.0),
    ],
)
def test_7_2_3_scale(tmp_path: Path, config: dict[str, Any], scale: float) -> None:
    """The spec's check: r = 4 and alpha = 8 give 2, with rsLoRA 4."""
    pairs = adapter_pairs(4, 1)
    assert_pairs(load(write_adapter(tmp_path, pairs, **config)), pairs, scale)


def test_alpha_pattern(tmp_path: Path) -> None:
    pairs = adapter_pairs(4, 1, ("q_proj", "v_proj"))
    write_adapter(tmp_path, pairs, lora_alpha=4, alpha_pattern={"q_proj": 12})
    adapter = load(tmp_path)
    for layer, (_, b) in pairs.items():
        factor = 3 if layer.endswith("q_proj") else 1
        np.testing.assert_allclose(adapter.weights[layer][1], factor * b, rtol=1e-6)


@pytest.mark.parametrize(
    ("pattern", "scaled"),
    [
        ("q_proj", "q"),
        ("proj", ""),
        ("model.layers.1.self_attn.q_proj", "q"),
        ("^q_proj", ""),
        (r"^model\.layers\.\d+\.self_attn\.(?:q|v)_proj$", "qv"),
        (r"(k|v)_proj|self_attn.[a-m]_proj", "kv"),
        (r"(model|layers)\..*(q_proj)+", "q"),
        (r".{1,40}\.[^kq]_pro{0,1}j", "v"),
        (r"layers\.\d\.(\w+\.){2,}v_proj", ""),
        (r"((a|l)(y|a)*)*e?rs(\.\w+){3}", "qkv"),
    ],
)
def test_alpha_patterns_match_as_pythons_do(tmp_path: Path, pattern: str, scaled: str) -> None:
    pairs = adapter_pairs(4, 1, ("q_proj", "k_proj", "v_proj"))
    write_adapter(tmp_path, pairs, lora_alpha=4, alpha_pattern={pattern: 12})
    adapter = load(tmp_path)
    found = set()
    for layer, (_, b) in pairs.items():
        is_scaled = re.match(rf"(.*\.)?({pattern})\Z", f"model.{layer}") is not None
        np.testing.assert_allclose(
            adapter.weights[layer][1], (3 if is_scaled else 1) * b, rtol=1e-6
        )
        found |= {layer[-6]} if is_scaled else set()
    assert found == set(scaled)


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("(", "'(' that nothing closes"),
        ("q_proj)", "')' that closes nothing"),
        ("*a", "nothing to repeat"),
        ("a**", "a quantifier of a quantifier"),
        ("a{3,1}", "a count from 3 to 1"),
        ("(?=a)a", "a group of a kind"),
        (r"(a)\1", "a class or escape"),
        ("[z-a]", "bad character range"),
        ("(" * 30, "groups in more than"),
        ("a" * 2000, "more than 1000 characters"),
    ],
)
def test_patterns_that_are_not_understood(tmp_path: Path, pattern: str, words: str) -> None:
    write_adapter(tmp_path, adapter_pairs(4, 1), alpha_pattern={pattern: 12})
    with pytest.raises(
        AdapterError, match=rf"adapter_config\.json: key 'alpha_pattern'.*{re.escape(words)}"
    ):
        load(tmp_path)


@pytest.mark.parametrize("pattern", ["((\\w|_)*)*!", "(a?|_?|.?)" * 90, "(.*.*){9}" * 100])
def test_hostile_patterns_end(tmp_path: Path, pattern: str) -> None:
    """Python's own matcher would try all ways to read the name: 2 to the power of its length."""
    write_adapter(tmp_path, adapter_pairs(4, 1), alpha_pattern={pattern: 12})
    start = time.process_time()
    with suppress(AdapterError):
        load(tmp_path)
    assert time.process_time() - start < 20


def test_a_rank_that_the_configuration_does_not_give(tmp_path: Path) -> None:
    """The scale would be another one than it was trained with."""
    write_adapter(tmp_path, adapter_pairs(4, 1), r=8)
    with pytest.raises(AdapterError, match=r"rank 8 \('r' or 'rank_pattern'\).* have 4"):
        load(tmp_path)
    write_adapter(tmp_path, adapter_pairs(4, 1), rank_pattern={"q_proj": 3})
    with pytest.raises(AdapterError, match=r"q_proj rank 3 .* have 4"):
        load(tmp_path)
    write_adapter(tmp_path, adapter_pairs(4, 1), r="4")
    with pytest.raises(AdapterError, match=r"adapter_config\.json: key 'r' is a str"):
        load(tmp_path)


def test_layers_may_have_ranks_of_their_own(tmp_path: Path) -> None:
    """7.2.6; half precision as it is usually saved; `base_layer` copies are ignored."""
    pairs = adapter_pairs(2, 1, ("q_proj",)) | adapter_pairs(6, 2, ("down_proj",))
    write_adapter(tmp_path, pairs, r=2, lora_alpha=2, rank_pattern={"down_proj": 6})
    file = tmp_path / "adapter_model.safetensors"
    tensors = {name: array.astype(np.float16) for name, array in load_file(file).items()}
    tensors["base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight"] = np.zeros(
        (4, 4), np.float16
    )
    save_file(tensors, file)
    adapter = load(tmp_path)
    for layer, (a, _) in pairs.items():
        np.testing.assert_allclose(adapter.weights[layer][0], a, rtol=1e-3, atol=1e-3)
    assert adapter.num_bytes == sum(a.nbytes + b.nbytes for a, b in pairs.values())


def rename(folder: Path, change: Any) -> Path:
    file = folder / "adapter_model.safetensors"
    tensors: Arrays = load_file(file)
    save_file({change(name): array for name, array in tensors.items()}, file)
    return folder


@pytest.mark.parametrize(
    "change",
    [
        lambda name: name.replace(".weight", ".default.weight"),
        lambda name: name.removeprefix("base_model.model."),
    ],
)
def test_7_2_5_ways_to_write_names(tmp_path: Path, change: Any) -> None:
    pairs = adapter_pairs(4, 1)
    assert_pairs(load(rename(write_adapter(tmp_path, pairs), change)), pairs, 2.0)


def test_names_of_an_encoder(tmp_path: Path) -> None:
    hparams = CASES["bert"]
    pairs = {
        layer: pair
        for layer, pair in adapter_pairs(4, 1, ("q_proj",), hparams).items()
        if layer.startswith("layers.1.")
    }
    write_adapter(tmp_path, pairs)
    rename(
        tmp_path,
        lambda name: name.replace(
            "model.layers.1.self_attn.q_proj", "encoder.layer.1.attention.self.query"
        ),
    )
    assert_pairs(load(tmp_path, hparams), pairs, 2.0)


def test_7_2_6_fused_layers_are_split(tmp_path: Path) -> None:
    """Phi-3 checkpoints have q, k and v in one matrix: they share A."""
    hparams = CASES["phi3"]
    parts = [f"layers.0.self_attn.{p}_proj" for p in "qkv"]
    rows = [tensor_shapes(hparams)[f"{part}.weight"][0] for part in parts]
    random = np.random.RandomState(3)
    a = random.standard_normal((4, hparams.hidden_size)).astype(np.float32)
    b = random.standard_normal((sum(rows), 4)).astype(np.float32)
    write_adapter(tmp_path, {"layers.0.self_attn.qkv_proj": (a, b)}, lora_alpha=4)
    adapter = load(tmp_path, hparams)
    assert list(adapter.weights) == parts
    start = 0
    for part, count in zip(parts, rows, strict=True):
        np.testing.assert_array_equal(adapter.weights[part][0], a)
        np.testing.assert_array_equal(adapter.weights[part][1], b[start : start + count])
        start += count


def test_rows_follow_the_order_of_a_gguf_file(tmp_path: Path) -> None:
    """GGUF Llamas interleave the halves of rotated pairs in q and k: the converter's own order."""
    pairs = adapter_pairs(4, 1)
    adapter = load(write_adapter(tmp_path, pairs), replace(SHAPE, rope_interleaved=True))
    for layer, (_, b) in pairs.items():
        expected = 2 * b
        if layer.endswith(("q_proj", "k_proj")):
            head = np.arange(SHAPE.head_dim).reshape(2, -1).T.ravel()
            order = [h * SHAPE.head_dim + i for h in range(len(b) // SHAPE.head_dim) for i in head]
            expected = expected[order]
        np.testing.assert_allclose(adapter.weights[layer][1], expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias='all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"peft_type": "LOHA"}, "LOHA"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"init_lora_weights": "pissa_niter_4"}, "pissa"),
        ({"lora_alpha": None}, "lacks 'lora_alpha'"),
        ({"r": None}, "lacks 'r'"),
        ({"target_modules": None}, "lacks 'target_modules'"),
        ({"lora_alpha": "many"}, "lora_alpha"),
    ],
)
def test_7_2_4_unsupported_configurations_are_named(
    tmp_path: Path, config: dict[str, Any], words: str
) -> None:
    write_adapter(tmp_path, adapter_pairs(4, 1), **config)
    with pytest.raises(AdapterError, match=words) as caught:
        load(tmp_path)
    assert isinstance(caught.value, ValueError)


def test_7_2_4_every_reason_at_once(tmp_path: Path) -> None:
    write_adapter(tmp_path, adapter_pairs(4, 1), use_dora=True, bias="all")
    rename(tmp_path, lambda name: name.replace("layers.1.mlp.up_proj", "layers.9.mlp.up_proj"))
    with pytest.raises(AdapterError, match=r"bias.*use_dora.*layers\.9\.mlp\.up_proj"):
        load(tmp_path)


def bad_matrices(kind: str) -> Pairs:
    pairs = adapter_pairs(4, 1)
    layer = "layers.0.mlp.up_proj"
    a, b = pairs[layer]
    pairs[layer] = {
        "rank": (np.repeat(a, 5, axis=0), np.repeat(b, 5, axis=1)),
        "in": (a[:, :-1], b),
        "out": (a, b[:-1]),
        "pair": (a[:3], b),
        "nan": (a, np.where(np.arange(4) == 2, np.float32("nan"), b)),
        "dimensions": (a[0], b),
    }[kind]
    return {
        name: (np.ascontiguousarray(x), np.ascontiguousarray(y)) for name, (x, y) in pairs.items()
    }


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("rank", "its rank is 20, the engine's max_lora_rank 16"),
        ("in", r"\(r, 64\)"),
        ("out", r"\(96, r\)"),
        ("pair", "shapes"),
        ("nan", "NaN"),
        ("dimensions", "shapes"),
    ],
)
def test_p50_matrices_that_do_not_fit(tmp_path: Path, kind: str, words: str) -> None:
    with pytest.raises(AdapterError, match=words):
        load(write_adapter(tmp_path, bad_matrices(kind), r=4))


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("layers.0.self_attn.q_proj", "lm_head", "lm_head is not a layer"),
        ("q_proj.lora_A", "q_proj.lora_embedding_A", "lora_embedding_A"),
        ("q_proj.lora_B.weight", "q_proj.lora_magnitude_vector", "magnitude"),
        ("layers.0.self_attn.q_proj.lora_B", "layers.0.self_attn.q_proj.lora_C", "lora_C"),
    ],
)
def test_tensors_that_nobody_knows(tmp_path: Path, old: str, new: str, words: str) -> None:
    write_adapter(tmp_path, adapter_pairs(4, 1, ("q_proj",)))
    with pytest.raises(AdapterError, match=words):
        load(rename(tmp_path, lambda name: name.replace(old, new)))


@pytest.mark.parametrize("name", ["mixtral", "qwen3moe"])
def test_adapters_of_experts_are_refused_in_one_reason(tmp_path: Path, name: str) -> None:
    """Those of attention and of the router fit; the many layers of experts are not listed."""
    hparams = EXPERT_CASES[name]
    attention = adapter_pairs(4, 1, ("q_proj", "v_proj", "mlp.gate"), hparams)
    known = {
        layer: (shape[1], shape[0])
        for key, shape in tensor_shapes(hparams).items()
        if (layer := key.removesuffix(".weight")) and ".experts." not in layer and len(shape) == 2
    }
    adapter = load_adapter(write_adapter(tmp_path, attention), hparams, known, 16)
    assert_pairs(adapter, attention, 2.0)
    write_adapter(tmp_path, attention | adapter_pairs(4, 1, ("gate_proj", "up_proj"), hparams))
    if name == "mixtral":
        old = {"mlp.experts": "block_sparse_moe.experts", "gate_proj": "w1", "up_proj": "w3"}
        for ours, theirs in old.items():
            rename(tmp_path, lambda key, a=ours, b=theirs: key.replace(a, b))
    with pytest.raises(AdapterError, match=r"used: it changes the experts.*o_proj\)\Z"):
        load_adapter(tmp_path, hparams, known, 16)


def test_half_a_pair(tmp_path: Path) -> None:
    file = write_adapter(tmp_path, adapter_pairs(4, 1)) / "adapter_model.safetensors"
    tensors = load_file(file)
    del tensors["base_model.model.model.layers.0.mlp.up_proj.lora_B.weight"]
    save_file(tensors, file)
    with pytest.raises(AdapterError, match="only one"):
        load(tmp_path)
    save_file({}, file)
    with pytest.raises(AdapterError, match="no matrices"):
        load(tmp_path)


@pytest.mark.parametrize("alpha", [1e37, 1e308])
def test_p50_scaling_beyond_all_numbers(tmp_path: Path, alpha: float) -> None:
    """Weights that are infinite would make every answer NaN."""
    write_adapter(tmp_path, adapter_pairs(4, 1, size=1e3), lora_alpha=alpha)
    with pytest.raises(AdapterError, match="overflows when it is scaled by its alpha"):
        load(tmp_path)


def test_p50_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(AdapterNotFoundError, match="no such folder"):
        load(tmp_path / "missing")
    with pytest.raises(AdapterNotFoundError, match="home"):
        load(Path("~nobody-here/adapter"))
    with pytest.raises(AdapterNotFoundError, match=r"adapter_config\.json"):
        load(tmp_path)
    write_adapter(tmp_path, adapter_pairs(4, 1))
    (tmp_path / "adapter_model.safetensors").rename(tmp_path / "adapter_model.bin")
    with pytest.raises(AdapterNotFoundError, match=r"adapter_model\.bin is a pickle"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff" * 64])
def test_damaged_files(tmp_path: Path, name: str, content: bytes) -> None:
    write_adapter(tmp_path, adapter_pairs(4, 1))
    (tmp_path / name).write_bytes(content)
    with pytest.raises(AdapterError, match=name):
        load(tmp_path)


@pytest.mark.parametrize("values", [{"alpha_pattern": [1]}, {"use_rslora": 3}])
def test_damaged_values(tmp_path: Path, values: dict[str, Any]) -> None:
    write_adapter(tmp_path, adapter_pairs(4, 1), **values)
    with pytest.raises(AdapterError):
        load(tmp_path)


def test_the_configuration_of_the_library_itself(tmp_path: Path) -> None:
    """Keys that say nothing about the arithmetic do not matter."""
    pairs = adapter_pairs(4, 1)
    write_adapter(tmp_path, pairs, task_type="CAUSAL_LM", lora_dropout=0.1, revision=None)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    config |= {"megatron_config": None, "layer_replication": None, "eva_config": None}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    assert_pairs(load(tmp_path), pairs, 2.0)
