"""``vocab.json`` and ``merges.txt``: all that OPT's folders have of a tokenizer."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tellin.exceptions import LoadError, ModelLoadError, UnsupportedModelError
from tellin.loading import load_tokenizer
from tests.loading.vocabularies import MERGES, OPT_CONFIG, write_bpe_files

TEXT = "In the sea, 12 whales'll\n sing é"


def test_opt_begins_a_text_with_its_end_token(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_bpe_files(tmp_path, OPT_CONFIG))
    ids = tokenizer.encode(TEXT)
    assert ids[0] == 2 == tokenizer.bos_token_id == tokenizer.eos_token_id
    assert tokenizer.pad_token_id == 1
    assert tokenizer.encode(TEXT, add_special_tokens=False) == ids[1:]
    tokens = tokenizer.convert_ids_to_tokens(ids)
    assert tokens[:6] == ["</s>", "I", "n", "Ġthe", "Ġsea", ","]
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.encode("</s>the")[:2] == [2, tokenizer.convert_tokens_to_ids("t")]
    assert tokenizer.all_special_ids == {1, 2}


def test_gpt2_adds_nothing(tmp_path: Path) -> None:
    """Its folder need not name the class, nor its one special token."""
    tokenizer = load_tokenizer(write_bpe_files(tmp_path, None, "gpt2"))
    assert tokenizer.bos_token_id == tokenizer.eos_token_id == 256 + len(MERGES)
    assert tokenizer.encode("the")[0] == tokenizer.convert_tokens_to_ids("t")
    assert tokenizer.encode("<|endoftext|>") == [263]


def test_special_tokens_that_only_the_other_file_tells(tmp_path: Path) -> None:
    write_bpe_files(tmp_path, {"add_bos_token": True})
    special = {"bos_token": "<s>", "eos_token": "</s>", "additional_special_tokens": ["<unk>"]}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(special))
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 2)
    assert tokenizer.encode("a")[0] == 0
    assert tokenizer.all_special_ids == {0, 2, 3}


@pytest.mark.slow
def test_ids_are_those_of_transformers(tmp_path: Path) -> None:
    from transformers import GPT2Tokenizer

    theirs = GPT2Tokenizer.from_pretrained(write_bpe_files(tmp_path, OPT_CONFIG))
    ours = load_tokenizer(tmp_path)
    assert ours.encode(TEXT, add_special_tokens=False) == theirs.encode(
        TEXT, add_special_tokens=False
    )
    assert ours.encode(TEXT) == theirs.encode(TEXT)


@pytest.mark.parametrize("name", ["Qwen2Tokenizer", ""])
def test_other_classes_are_refused(tmp_path: Path, name: str) -> None:
    write_bpe_files(tmp_path, {"tokenizer_class": name}, "roberta")
    what = name or "that of model_type 'roberta'"
    with pytest.raises(UnsupportedModelError, match=f"no tokenizer.json.* {what}; vocab.json"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        (
            "merges.txt",
            "#version: 0.2\nh e\nĠthe",
            "merges.txt: line 3 is no pair of tokens: 'Ġthe'",
        ),
        ("merges.txt", "h e\nh q", "merges.txt: does not fit: "),
        ("vocab.json", '{"a": 0, "b": 0}', "vocab.json: has 2 tokens with 1 ids"),
        ("vocab.json", '{"a": -1, "b": 0}', "each must have its own, from 0 to"),
        ("vocab.json", "{}", "vocab.json: has 0 tokens"),
        ("vocab.json", '{"a": "x"}', "key 'a'"),
        ("vocab.json", "[]", "vocab.json: is not a JSON object"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, file: str, text: str, message: str) -> None:
    write_bpe_files(tmp_path, OPT_CONFIG)
    (tmp_path / file).write_text(text)
    with pytest.raises(ModelLoadError, match=re.escape(message)):
        load_tokenizer(tmp_path)


def test_files_that_cannot_be_read_are_load_errors(tmp_path: Path) -> None:
    write_bpe_files(tmp_path, OPT_CONFIG)
    (tmp_path / "merges.txt").write_bytes(b"\xff\xfe h")
    with pytest.raises(LoadError, match=r"merges\.txt: is not UTF-8"):
        load_tokenizer(tmp_path)


def test_tokens_that_somebody_added(tmp_path: Path) -> None:
    """Their ids follow the vocabulary's; those that the configuration names are special."""
    size = 257 + len(MERGES)
    write_bpe_files(tmp_path, {"additional_special_tokens": ["<|call|>"]}, "gpt2")
    added = {"<|call|>": size + 1, "<sea>": size}
    (tmp_path / "added_tokens.json").write_text(json.dumps(added))
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer.encode("a<sea><|call|>b")
    assert ids == [*tokenizer.encode("a"), size, size + 1, *tokenizer.encode("b")]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a<sea>b"
    for damaged in ({"<sea>": size + 1}, {"<sea>": 3}, {"x": size, "y": size}):
        (tmp_path / "added_tokens.json").write_text(json.dumps(damaged))
        with pytest.raises(ModelLoadError, match=rf"has the ids .*, from {size} on"):
            load_tokenizer(tmp_path)
