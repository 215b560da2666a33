"""What a model's files say of its pooling: rule 9.2.2, P51."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tellin.config import PoolerConfig
from tellin.exceptions import ModelLoadError, UnsupportedModelError
from tellin.loading.pooling import pooler_from_folder, pooler_from_gguf
from tellin.loading.typed_mapping import TypedMapping

MODULES = ("Transformer", "Pooling", "Normalize")
MEAN = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}


def write(folder: Path, modules: tuple[str, ...] = MODULES, pooling: Any = MEAN) -> Path:
    folders = {"Transformer": "", "Pooling": "1_Pooling"}
    listed = [
        {"type": f"sentence_transformers.models.{kind}", "path": folders.get(kind, kind)}
        for kind in modules
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


def read(folder: Path, **config: Any) -> PoolerConfig | None:
    return pooler_from_folder(folder, TypedMapping(folder, config))


def test_9_2_2_a_sentence_transformers_folder(tmp_path: Path) -> None:
    write(tmp_path)
    assert read(tmp_path) == PoolerConfig("MEAN", use_activation=True)
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 256}')
    assert read(tmp_path) == PoolerConfig("MEAN", max_seq_length=256)


def test_9_2_2_without_normalize_nothing_is_normalised(tmp_path: Path) -> None:
    pooler = read(write(tmp_path, MODULES[:2], {"pooling_mode": "lasttoken"}))
    assert pooler == PoolerConfig("LAST", use_activation=False)


def test_9_1_4_matryoshka(tmp_path: Path) -> None:
    pooler = read(write(tmp_path), matryoshka_dimensions=[64, 128])
    assert pooler == PoolerConfig("MEAN", True, True, (64, 128))


def test_a_plain_folder_says_nothing(tmp_path: Path) -> None:
    assert read(tmp_path) is None


@pytest.mark.parametrize(
    ("modules", "pooling", "words"),
    [
        ((*MODULES, "Dense"), MEAN, "Dense"),
        (MODULES, {"pooling_mode_max_tokens": True}, "pools by max"),
        (MODULES, MEAN | {"pooling_mode_cls_token": True}, "CLS and MEAN"),
        (MODULES, {}, "pools by nothing"),
    ],
)
def test_what_is_not_supported_is_named(
    tmp_path: Path, modules: tuple[str, ...], pooling: Any, words: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        read(write(tmp_path, modules, pooling))


@pytest.mark.parametrize("text", ["{", "3", "[3]", '[{"type": "a.Pooling"}]', "\xff"])
def test_damaged_modules(tmp_path: Path, text: str) -> None:
    (tmp_path / "modules.json").write_text(text, encoding="latin-1")
    with pytest.raises(ModelLoadError, match=r"modules\.json"):
        read(tmp_path)


def test_a_missing_pooling_config(tmp_path: Path) -> None:
    (write(tmp_path) / "1_Pooling" / "config.json").unlink()
    with pytest.raises(ModelLoadError, match="1_Pooling"):
        read(tmp_path)


@pytest.mark.parametrize(("number", "kind"), [(1, "MEAN"), (2, "CLS"), (3, "LAST")])
def test_gguf(number: int, kind: str) -> None:
    values = TypedMapping(Path("x.gguf"), {"bert.pooling_type": number})
    assert pooler_from_gguf(values, "bert") == PoolerConfig(kind)
    assert pooler_from_gguf(values, "llama") is None


def test_gguf_rank() -> None:
    """Encoders and Qwen3-Reranker have a head in the file; of other decoders none is known."""
    keys = {f"{name}.pooling_type": 4 for name in ("bert", "qwen3", "llama")}
    values = TypedMapping(Path("x.gguf"), keys)
    assert pooler_from_gguf(values, "bert") == PoolerConfig("CLS", num_labels=1)
    assert pooler_from_gguf(values, "qwen3") == PoolerConfig("LAST", num_labels=1)
    with pytest.raises(UnsupportedModelError, match="pooling_type is 4"):
        pooler_from_gguf(values, "llama")


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, PoolerConfig("CLS", num_labels=2)),
        ({"num_labels": 1}, PoolerConfig("CLS", num_labels=1)),
        ({"id2label": {"1": "b", "0": "a"}}, PoolerConfig("CLS", num_labels=2, labels=("a", "b"))),
        (
            {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"},
            PoolerConfig("CLS", num_labels=2, score_activation="none"),
        ),
        (
            {"sentence_transformers": {"activation_fn": "torch.nn.Sigmoid"}, "problem_type": "x"},
            PoolerConfig("CLS", num_labels=2, score_activation="sigmoid"),
        ),
        (
            {"problem_type": "multi_label_classification"},
            PoolerConfig("CLS", num_labels=2, score_activation="sigmoid"),
        ),
        (
            {"architectures": ["Qwen2ForSequenceClassification"]},
            PoolerConfig("LAST", num_labels=2),
        ),
    ],
)
def test_classifiers(config: dict[str, Any], expected: PoolerConfig, tmp_path: Path) -> None:
    """A classifier's head comes before what a sentence-transformers folder says of pooling."""
    write(tmp_path)
    names = {"architectures": ["BertForSequenceClassification"]}
    assert read(tmp_path, **(names | config)) == expected
