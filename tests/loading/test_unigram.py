"""XLM-RoBERTa's GGUF files: a unigram tokenizer, and a cross-encoder's head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tellin import LLM
from tellin.exceptions import ModelLoadError
from tellin.loading.tokenizer import Tokenizer, tokenizer_from_gguf
from tellin.loading.typed_mapping import TypedMapping
from tests.loading.gguf_writer import write_gguf
from tests.models.classifiers import DOCUMENTS, LETTERS, QUERY, weights, write_classifier

DATA = Path(__file__).parents[1] / "data"
SPECIALS = {"bos": 0, "padding": 1, "eos": 2, "unknown": 3}
_LAYER = {
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
}
_GLOBAL = {
    "roberta.embeddings.word_embeddings": "token_embd",
    "roberta.embeddings.position_embeddings": "position_embd",
    "roberta.embeddings.token_type_embeddings": "token_types",
    "roberta.embeddings.LayerNorm": "token_embd_norm",
    "classifier.dense": "cls",
    "classifier.out_proj": "cls.output",
}


def unigram_metadata(tokens: list[str], scores: np.ndarray, types: np.ndarray) -> dict[str, Any]:
    ids = {f"tokenizer.ggml.{name}_token_id": number for name, number in SPECIALS.items()}
    return ids | {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.add_space_prefix": True,
        "tokenizer.ggml.remove_extra_whitespaces": True,
    }


@pytest.fixture(scope="module")
def stored() -> dict[str, np.ndarray]:
    with np.load(DATA / "unigram.npz") as values:
        return dict(values)


def tokenizer_of(stored: dict[str, np.ndarray], **changed: Any) -> Tokenizer:
    values = unigram_metadata(stored["tokens"].tolist(), stored["scores"], stored["types"])
    values |= {"general.architecture": "bert"}
    values["tokenizer.ggml.precompiled_charsmap"] = stored["charsmap"]
    values |= {f"tokenizer.ggml.{key}": value for key, value in changed.items()}
    return tokenizer_from_gguf(TypedMapping(Path("x.gguf"), values))


def test_ids_are_those_of_sentencepiece(stored: dict[str, np.ndarray]) -> None:
    tokenizer = tokenizer_of(stored)
    expected = np.split(stored["ids"], np.cumsum(stored["lengths"])[:-1])
    for text, ids in zip(stored["texts"].tolist(), expected, strict=True):
        assert tokenizer.encode(text) == ids.tolist()
    assert tokenizer.decode(expected[2].tolist()) == "fine and 1/2 of THIS, in full width"


def test_special_tokens_of_a_pair(stored: dict[str, np.ndarray]) -> None:
    pair = tokenizer_of(stored).backend.encode("a b", "c")
    assert pair.tokens == ["<s>", "▁a", "▁b", "</s>", "</s>", "▁", "c", "</s>"]
    assert set(pair.type_ids) == {0}


def test_special_tokens_of_a_bert_pair() -> None:
    values = {
        "general.architecture": "bert",
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.tokens": ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "▁a", "▁b"],
        "tokenizer.ggml.token_type": np.array([3, 3, 3, 3, 1, 1], np.int32),
        "tokenizer.ggml.unknown_token_id": 1,
        "tokenizer.ggml.cls_token_id": 2,
        "tokenizer.ggml.seperator_token_id": 3,
    }
    pair = tokenizer_from_gguf(TypedMapping(Path("x.gguf"), values)).backend.encode("a", "b")
    assert [pair.tokens[i] for i in (0, 2, 4)] == ["[CLS]", "[SEP]", "[SEP]"]
    assert pair.type_ids == [0, 0, 0, 1, 1]


@pytest.mark.parametrize(
    "changed",
    [
        {"scores": None},
        {"precompiled_charsmap": np.array([255, 255, 255, 127, 1], np.uint8)},
    ],
)
def test_damaged_vocabularies(stored: dict[str, np.ndarray], changed: dict[str, Any]) -> None:
    with pytest.raises(ModelLoadError, match=r"scores|damaged"):
        tokenizer_of(stored, **changed)


# ---------------------------------------------------------------------- a cross-encoder


def write_reranker(path: Path, **changed: Any) -> Path:
    """The tiny XLM-RoBERTa of tests.models.classifiers as converters write it."""
    tensors = {}
    for name, values in weights("xlmr").items():
        stem, _, kind = name.rpartition(".")
        if stem.startswith("roberta.encoder.layer."):
            layer, _, part = stem.removeprefix("roberta.encoder.layer.").partition(".")
            tensors[f"blk.{layer}.{_LAYER[part]}.{kind}"] = values
        else:
            tensors[f"{_GLOBAL[stem]}.{kind}"] = values
    # The rows up to the padding id are cut off.
    tensors["position_embd.weight"] = tensors["position_embd.weight"][2:]
    tokens = ["<s>", "<pad>", "</s>", "<unk>", *LETTERS, *(f"▁{one}" for one in LETTERS)]
    scores = -np.arange(len(tokens), dtype=np.float32) / 8
    types = np.array([3, 3, 3, 2, *[1] * 52], np.int32)
    values = unigram_metadata(tokens, scores, types) | {
        "general.architecture": "bert",
        "bert.block_count": 2,
        "bert.context_length": 128,
        "bert.embedding_length": 32,
        "bert.feed_forward_length": 48,
        "bert.attention.head_count": 4,
        "bert.attention.layer_norm_epsilon": 1e-5,
        "bert.pooling_type": 4,
        "bert.classifier.output_labels": ["LABEL_0"],
    }
    for name in changed.get("without", ()):
        del tensors[name]
    return write_gguf(path, values, tensors)


def test_a_gguf_reranker_scores_as_its_folder(tmp_path: Path) -> None:
    """Same ids, same bits, whatever the file format."""
    with (
        LLM(write_reranker(tmp_path / "x.gguf")) as of_file,
        LLM(write_classifier(tmp_path / "folder", "xlmr")) as of_folder,
    ):
        assert of_file.supported_tasks == ("classify", "score")
        for output in of_file.score(QUERY, list(DOCUMENTS)):
            ids = output.prompt_token_ids
            assert (ids[0], ids[-1], ids.count(2)) == (0, 2, 3)
            (same,) = of_folder.classify({"prompt_token_ids": ids})
            assert same.outputs.probs == [output.outputs.score]


def test_a_file_without_its_head(tmp_path: Path) -> None:
    """Converters leave BERT's pooler out: what is missing is named, and nothing computed."""
    path = write_reranker(tmp_path / "x.gguf", without=("cls.weight", "cls.bias"))
    with pytest.raises(ModelLoadError, match=r"classifier\.dense\.weight.*head, is missing"):
        LLM(path)
