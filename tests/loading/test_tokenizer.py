"""Tokenizers: ids of the originals, BOS rules (P44), control tokens (P47), bytes, damage."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tellin.exceptions import (
    InvalidParameterError,
    InvalidTypeError,
    ModelLoadError,
    ModelNotFoundError,
    UnsupportedModelError,
)
from tellin.loading.gguf_vocab import GGUFVocabulary
from tellin.loading.pretokenizers import PRE_TOKENIZERS
from tellin.loading.token_bytes import _byte_level_bytes
from tellin.loading.tokenizer import Tokenizer, load_tokenizer
from tellin.loading.typed_mapping import TypedMapping
from tests.loading.corpus import TEXTS, golden
from tests.loading.gguf_writer import write_gguf
from tests.loading.vocabularies import byte_level, sentencepiece, tokenizer


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Tokenizer:
    return load_tokenizer(smollm2_path)


# ---- ids of the originals ------------------------------------------------------------------------


def test_smollm2_ids_equal_the_original(smollm2: Tokenizer) -> None:
    for text, expected in zip(TEXTS, golden("smollm2"), strict=True):
        assert smollm2.encode(text, add_special_tokens=False) == expected, text


def test_names_of_the_transformers_library(smollm2: Tokenizer) -> None:
    assert (smollm2.bos_token, smollm2.eos_token) == ("<|im_start|>", "<|im_end|>")
    vocab = smollm2.get_vocab()
    assert len(vocab) == smollm2.vocab_size
    assert vocab["<|im_end|>"] == smollm2.eos_token_id
    chat = [{"role": "user", "content": "Hi"}]
    assert smollm2.apply_chat_template(chat, tokenize=False) == smollm2.apply_chat_template(chat)
    with pytest.raises(InvalidParameterError, match="add_special_tokens=False"):
        smollm2.apply_chat_template(chat, tokenize=True)


@pytest.mark.parametrize("name", sorted(golden("pretokenizers")))
def test_pieces_equal_the_original_patterns(name: str) -> None:
    definition = PRE_TOKENIZERS[name]
    pre_tokenizer, normalizer = definition.build(), definition.build_normalizer()
    for text, expected in zip(TEXTS, golden("pretokenizers")[name], strict=True):
        normalized = normalizer.normalize_str(text) if normalizer else text
        pieces = pre_tokenizer.pre_tokenize_str(normalized)
        assert [normalized[start:end] for _, (start, end) in pieces] == expected, text


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("gpt2", "it's 123 x\n\n y", ["it", "'s", " 123", " x", "\n\n", " y"]),
        ("smollm", "a 12b½", ["a", " ", "1", "2", "b", "½"]),
        ("deepseek-llm", " ab12,中\n", [" ab", "1", "2", ",", "中", "\n"]),
        ("deepseek-coder", " ab12,中\n", [" ab", "1", "2", ",", "中", "\n"]),
        ("deepseek-v3", "x1234 中文.foo", ["x", "123", "4", " ", "中文", ".foo"]),
        ("exaone4", "it's 123 x\n\n y", ["it", "'s", " 123", " x", "\n\n", " y"]),
        ("hunyuan", "It'S 12 x\n\n y", ["It", "'S", " ", "1", "2", " x", "\n\n", " y"]),
        ("hunyuan-dense", "x1234 中文.foo", ["x", "123", "4", " ", "中文", ".foo"]),
        ("minimax-m2", "fooBAR 1234/\n", ["foo", "BAR", " ", "123", "4", "/\n"]),
        ("seed-coder", "a 12 !!\n\n x", ["a", " ", "1", "2", " !!", "\n\n", " x"]),
        ("glm4", "It'S 12345 中文.\n x", ["It", "'S", " ", "123", "45", " 中文", ".\n", " x"]),
        ("phi-2", "it's 123 x\n\n y", ["it", "'s", " 123", " x", "\n\n", " y"]),
        ("stablelm2", "It'S 123 中文.\n x", ["It", "'S", " ", "1", "2", "3", " 中文", ".\n", " x"]),
        ("falcon", "a 12345, x!! it's", ["a", " ", "123", "45", ",", " x", "!!", " it", "'", "s"]),
        ("qwen35", "it's नमस्ते 12 !\u0301", ["it", "'s", " नमस्ते", " ", "1", "2", " !", "\u0301"]),
    ],
)
def test_pieces_of_other_families(name: str, text: str, expected: list[str]) -> None:
    pieces = PRE_TOKENIZERS[name].build().pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in pieces] == expected


def test_every_pre_tokenizer_compiles_and_loses_nothing() -> None:
    for name, definition in PRE_TOKENIZERS.items():
        pre_tokenizer = definition.build()
        for text in TEXTS:
            pieces = pre_tokenizer.pre_tokenize_str(text)
            found = b"".join(_byte_level_bytes(piece) for piece, _ in pieces)
            assert found == text.encode(), name


def test_falcon_cuts_within_characters_whose_bytes_stand_for_digits() -> None:
    """The second byte of this letter is written as a fraction; its own tokenizer cuts there."""
    pieces = PRE_TOKENIZERS["falcon"].build().pre_tokenize_str("м999")
    assert [piece for piece, _ in pieces] == ["Ð", "¼", "999"]


@pytest.mark.slow
def test_gemma3_ids_equal_the_original(gemma3_path: Path) -> None:
    gemma3 = load_tokenizer(gemma3_path)
    for text, expected in zip(TEXTS, golden("gemma3"), strict=True):
        ids = gemma3.encode(text, add_special_tokens=False, parse_special=False)
        assert ids == expected, text
    assert gemma3.encode("a<end_of_turn>")[0::2] == [2, 106]


@pytest.mark.slow
def test_minilm_ids_equal_the_original(minilm_path: Path) -> None:
    minilm = load_tokenizer(minilm_path)
    for text, expected in zip(TEXTS, golden("minilm"), strict=True):
        assert minilm.encode(text) == expected, text


# ---- round trips and bytes -----------------------------------------------------------------------


def test_smollm2_round_trip_and_bytes(smollm2: Tokenizer) -> None:
    for text in TEXTS:
        ids = smollm2.encode(text, add_special_tokens=False)
        assert smollm2.decode(ids, skip_special_tokens=False) == text
        assert b"".join(smollm2.id_to_bytes(i) or b"" for i in ids) == text.encode()


def test_calls_give_ids_and_masks(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("Hello world")
    one = smollm2("Hello world")
    assert one == {"input_ids": ids, "attention_mask": [1] * len(ids)}
    assert one.input_ids == one["input_ids"]
    assert not hasattr(one, "token_type_ids")
    both = smollm2(["Hello world", "x"])
    assert both["input_ids"] == [ids, smollm2.encode("x")]
    assert smollm2([]) == {"input_ids": [], "attention_mask": []}
    assert smollm2.batch_decode(both["input_ids"]) == ["Hello world", "x"]
    arrays = smollm2("Hello world", return_tensors="np")
    assert arrays.input_ids.tolist() == [ids]
    assert arrays.input_ids.dtype == np.int64


def test_calls_pad_and_cut(tmp_path: Path) -> None:
    keys = byte_level(("a b",), specials=("<s>", "</s>", "<pad>"), add_bos_token=True,
                      add_eos_token=True, padding_token_id=2)  # fmt: skip
    made = tokenizer(tmp_path, keys)
    assert (made.pad_token_id, made.pad_token) == (2, "<pad>")
    long, short = made.encode("abcd"), made.encode("c")
    assert (long[0], long[-1], len(long), len(short)) == (0, 1, 5, 3)
    padded = made(["abcd", "c"], padding=True, return_tensors="np")
    assert padded.input_ids.tolist() == [long, [*short, 2, 2]]
    assert padded.attention_mask.tolist() == [[1] * 5, [1, 1, 1, 0, 0]]
    cut = made(["abcd", "c"], truncation=True, max_length=4, padding="max_length")
    assert cut["input_ids"] == [[*long[:3], 1], [*short, 2]]  # the ends stay
    bare = made("abcd", add_special_tokens=False, truncation=True, max_length=1)
    assert bare["input_ids"] == long[1:2]


def test_calls_cut_where_the_transformers_library_does(tmp_path: Path) -> None:
    """A length alone cuts, unless there is padding; every name of a strategy counts."""
    made = tokenizer(tmp_path, byte_level(specials=("<pad>",), padding_token_id=0))
    ids = made.encode("abcd")
    for truncation in (None, True, "longest_first", "only_first"):
        assert made("abcd", truncation=truncation, max_length=2)["input_ids"] == ids[:2]
    for truncation in (False, "do_not_truncate"):
        assert made("abcd", truncation=truncation, max_length=2)["input_ids"] == ids
    for padding in (True, "longest", "max_length"):
        assert made("abcd", padding=padding, max_length=2)["input_ids"] == ids
    assert made("abcd", padding="do_not_pad", max_length=2)["input_ids"] == ids[:2]
    assert made([], return_tensors="np").input_ids.shape == (0, 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"padding": True}, "needs a model that has a padding token"),
        ({"padding": "left"}, "must be True, False"),
        ({"truncation": True}, "max_length is needed"),
        ({"truncation": True, "max_length": 1}, "must be at least 2"),
        ({"truncation": "only_second", "max_length": 3}, "truncation must be True, False"),
        ({"padding": "max_length", "max_length": -1}, "must be at least 0"),
        ({"truncation": True, "max_length": "3"}, "must be an integer"),
        ({"return_tensors": "pt"}, "must be None or 'np'"),
        ({"return_tensors": "np"}, "needs texts of one length"),
    ],
)
def test_calls_refuse_what_cannot_be(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    keys = byte_level(add_bos_token=True, add_eos_token=True)
    with pytest.raises(InvalidParameterError, match=message):
        tokenizer(tmp_path, keys)(["abcd", "c"], **options)


@pytest.mark.parametrize("text", [None, 5, b"a", {"a": 1}])
def test_calls_refuse_what_is_no_text(smollm2: Tokenizer, text: Any) -> None:
    with pytest.raises(InvalidTypeError, match="must be a string or a list of strings"):
        smollm2(text)


def test_token_bytes_is_id_to_bytes_of_all(smollm2: Tokenizer) -> None:
    table = smollm2.token_bytes()
    assert len(table) == smollm2.max_token_id + 1 == smollm2.vocab_size == len(smollm2) == 49_152
    assert table == [smollm2.id_to_bytes(i) for i in range(len(table))]
    assert None not in table


def test_smollm2_attributes(smollm2: Tokenizer) -> None:
    assert (smollm2.bos_token_id, smollm2.eos_token_id) == (1, 2)
    assert smollm2.all_special_ids == frozenset(range(17))
    assert smollm2.convert_ids_to_tokens([1, 2, 28, 49_152, -1]) == [
        "<|im_start|>",
        "<|im_end|>",
        ",",
        "",
        "",
    ]
    assert smollm2.convert_tokens_to_ids(["<|im_end|>", "no such token"]) == [2, None]
    assert smollm2.convert_tokens_to_ids("<|im_end|>") == 2
    assert smollm2.convert_tokens_to_ids("no such token") is None
    assert smollm2.convert_ids_to_tokens(2) == "<|im_end|>"
    scalar: Any = np.int64(2)
    assert smollm2.convert_ids_to_tokens(scalar) == "<|im_end|>"
    assert smollm2.convert_ids_to_tokens(49_152) == ""
    assert smollm2.id_to_bytes(49_152) is None
    assert smollm2.id_to_bytes(-1) is None
    assert smollm2.id_to_bytes(1 << 40) is None


def test_decode_skips_special_and_unknown_ids(smollm2: Tokenizer) -> None:
    ids = [1, *smollm2.encode("hi there"), 2]
    assert smollm2.decode(ids) == "hi there"
    assert smollm2.decode(ids, skip_special_tokens=False) == "<|im_start|>hi there<|im_end|>"
    assert smollm2.decode([*ids, 49_999, 4_000_000_000]) == "hi there"
    assert smollm2.decode([]) == ""
    assert smollm2.decode(np.array(ids).tolist()) == "hi there"


@pytest.mark.parametrize("ids", [[-1], [1 << 33], ["a"], [1.5], [None]])
def test_decode_refuses_what_is_no_id(smollm2: Tokenizer, ids: list[int]) -> None:
    with pytest.raises(InvalidParameterError, match="token ids must be integers"):
        smollm2.decode(ids)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "it is of type NoneType"),
        (5, "it is of type int"),
        (b"bytes", "it is of type bytes"),
        ("lone \ud800 surrogate", r"character 5 is the lone surrogate '\\ud800'"),
    ],
)
def test_encode_refuses_what_is_no_text(smollm2: Tokenizer, text: str, reason: str) -> None:
    with pytest.raises(InvalidParameterError, match=f"cannot be tokenised: {reason}"):
        smollm2.encode(text)


def test_incomplete_characters_become_replacement_characters(tmp_path: Path) -> None:
    backend = tokenizer(tmp_path, byte_level())
    ids = backend.encode("é")
    assert len(ids) == 2
    assert backend.decode(ids) == "é"
    assert backend.decode(ids[:1]) == "\ufffd"
    assert backend.id_to_bytes(ids[0]) == b"\xc3"


# ---- BOS and EOS ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, "xy"),
        ({"add_bos_token": True}, "BOS xy"),
        ({"add_bos_token": True, "add_eos_token": True}, "BOS xy EOS"),
        ({"add_eos_token": True}, "xy EOS"),
        ({"add_bos_token": False, "pre": "llama-bpe"}, "xy"),
        ({"pre": "llama-bpe"}, "BOS xy"),
    ],
)
def test_bos_and_eos_rules(tmp_path: Path, keys: dict[str, object], expected: str) -> None:
    backend = tokenizer(tmp_path, byte_level(**keys))  # type: ignore[arg-type]
    names = {0: "BOS", 1: "EOS"}
    words = [names.get(i, backend.decode([i])) for i in backend.encode("xy")]
    assert " ".join(words).replace("x y", "xy") == expected
    assert backend.decode(backend.encode("xy", add_special_tokens=False)) == "xy"
    assert set(backend.encode("xy", add_special_tokens=False)).isdisjoint({0, 1})


def test_bos_is_never_added_twice(tmp_path: Path) -> None:
    """P44: a text that a template made begins with BOS already."""
    backend = tokenizer(tmp_path, byte_level(add_bos_token=True))
    x = backend.encode("x", add_special_tokens=False)
    assert backend.encode("<|bos|>x") == [0, *x]
    assert backend.encode("<|bos|>x", add_special_tokens=False) == [0, *x]
    assert backend.encode("x<|bos|>") == [0, *x, 0]
    assert backend.encode("<|bos|>") == [0]
    assert backend.encode("") == [0]


def test_empty_text_without_bos_is_no_token(smollm2: Tokenizer) -> None:
    """P26"""
    assert smollm2.encode("") == []


# ---- control tokens in text ----------------------------------------------------------------------


def test_control_tokens_only_where_allowed(smollm2: Tokenizer) -> None:
    """P47: text of strangers can be taken literally."""
    text = "</s><|im_end|><|im_start|>system"
    assert {1, 2} <= set(smollm2.encode(text))
    literal = smollm2.encode(text, parse_special=False)
    assert smollm2.all_special_ids.isdisjoint(literal)
    assert smollm2.decode(literal) == text
    assert {1, 2} <= set(smollm2.encode(text)), "the switch must not stick"


def test_threads_share_a_tokenizer(smollm2: Tokenizer) -> None:
    expected = [smollm2.encode(text) for text in TEXTS]
    failures: list[int] = []

    def work(parse_special: bool) -> None:
        for _ in range(3):
            for index, text in enumerate(TEXTS):
                ids = smollm2.encode(text, parse_special=parse_special)
                if parse_special and ids != expected[index]:
                    failures.append(index)

    threads = [threading.Thread(target=work, args=(i % 2 == 0,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


# ---- SentencePiece-style -------------------------------------------------------------------------


def test_sentencepiece_prefix_and_byte_fallback(tmp_path: Path) -> None:
    """Llama 2's rules: a space in front, unknown characters as bytes; decoding takes it off."""
    backend = tokenizer(tmp_path, sentencepiece(["\u2581he", "he", "\u2581", "h", "e", "l"]))
    assert backend.convert_ids_to_tokens(backend.encode("he h é")) == [
        "<s>",
        "\u2581he",
        "\u2581",
        "h",
        "\u2581",
        "<0xC3>",
        "<0xA9>",
    ]
    assert backend.decode(backend.encode("he h é")) == "he h é"
    assert backend.decode(backend.encode("  he")) == "  he"
    assert backend.id_to_bytes(backend.encode("é")[-1]) == b"\xa9"
    assert backend.id_to_bytes(backend.encode("he")[1]) == b" he"
    assert backend.convert_ids_to_tokens(backend.encode("h<s>h", add_special_tokens=False)) == [
        "\u2581",
        "h",
        "<s>",
        "\u2581",
        "h",
    ]


def test_sentencepiece_without_prefix_matches_runs_of_spaces(tmp_path: Path) -> None:
    """Gemma's rules: no space in front; runs of white space are tokens that never merge."""
    backend = tokenizer(
        tmp_path,
        sentencepiece(
            ["\u2581a", "a", "\u2581", "\n"],
            user_defined=["  ", "   ", "\n\n", "<b>"],
            add_space_prefix=False,
        ),
    )
    tokens = backend.convert_ids_to_tokens(backend.encode("a a  a    a\n\n\n<b>", False))
    assert tokens == [
        *("a", "\u2581a", "\u2581\u2581", "a", "\u2581\u2581\u2581", "\u2581a", "\n\n", "\n", "<b>")
    ]
    assert backend.decode(backend.encode("a a  a    a\n\n\n<b>")) == "a a  a    a\n\n\n<b>"


def test_pieces_with_merges(tmp_path: Path) -> None:
    """Gemma 4: visible spaces, runs of newlines, bytes for the rest, marks of calls as they are."""
    merges = ["a b", "\u2581 ab", "\n \n", "\n\n \n"]
    metadata = sentencepiece(["a", "b", "\u2581", "\n", *(m.replace(" ", "") for m in merges)],
                             user_defined=["<|tool_call>", "<turn|>"])  # fmt: skip
    metadata |= {"tokenizer.ggml.model": "gemma4", "tokenizer.ggml.merges": merges}
    t = tokenizer(tmp_path, metadata)
    text = "ab ab b\n\n\n<|tool_call>\u00e9"
    expected = [
        "<s>",
        "ab",
        "\u2581ab",
        "\u2581",
        "b",
        "\n\n\n",
        "<|tool_call>",
        "<0xC3>",
        "<0xA9>",
    ]
    ids = t.encode(text)
    assert t.convert_ids_to_tokens(ids) == expected
    assert t.decode(ids) == text
    assert GGUFVocabulary(TypedMapping(tmp_path, metadata)).end_token_ids() == (2, 4)


def test_literal_byte_token_text_is_not_a_byte(tmp_path: Path) -> None:
    backend = tokenizer(tmp_path, sentencepiece([*"<0x41>", "\u2581", "\u2581<"]))
    ids = backend.encode("<0x41>", add_special_tokens=False)
    assert len(ids) == 6
    assert backend.decode(ids) == "<0x41>"


def test_unused_padding_does_not_count(tmp_path: Path) -> None:
    """P46: ids that pad the matrix are no tokens."""
    metadata = byte_level()
    metadata["tokenizer.ggml.tokens"] += ["[PAD258]", "[PAD259]"]
    types = metadata["tokenizer.ggml.token_type"]
    metadata["tokenizer.ggml.token_type"] = np.append(types, np.array([5, 5], np.int32))
    backend = tokenizer(tmp_path, metadata)
    assert backend.vocab_size == 258
    assert backend.id_to_bytes(258) is None


# ---- tokenizer.json ------------------------------------------------------------------------------


def _folder(tmp_path: Path, smollm2: Tokenizer, **config: object) -> Path:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tokenizer.json").write_text(smollm2.backend.to_str())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def test_tokenizer_json(tmp_path: Path, smollm2: Tokenizer) -> None:
    folder = _folder(
        tmp_path,
        smollm2,
        bos_token={"content": "<|im_start|>"},
        eos_token="<|im_end|>",
        chat_template="{{ messages[0].content }}",
    )
    loaded = load_tokenizer(folder)
    assert (loaded.bos_token_id, loaded.eos_token_id) == (1, 2)
    assert loaded.all_special_ids == smollm2.all_special_ids
    assert loaded.apply_chat_template([{"role": "user", "content": "x"}]) == "x"
    for text, expected in zip(TEXTS, golden("smollm2"), strict=True):
        assert loaded.encode(text) == expected


def test_truncation_and_padding_in_the_file_are_ignored(tmp_path: Path, smollm2: Tokenizer) -> None:
    folder = _folder(tmp_path, smollm2)
    file = json.loads((folder / "tokenizer.json").read_text())
    file["truncation"] = {
        "max_length": 8, "strategy": "LongestFirst", "stride": 0, "direction": "Right"
    }  # fmt: skip
    file["padding"] = {
        "strategy": {"Fixed": 32}, "direction": "Right", "pad_to_multiple_of": None,
        "pad_id": 0, "pad_type_id": 0, "pad_token": "<|endoftext|>",
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(file))
    loaded = load_tokenizer(folder)
    text = "one two three four five six seven eight nine ten"
    assert loaded.encode(text) == smollm2.encode(text)
    assert loaded.encode("hi") == smollm2.encode("hi")


def test_configuration_overrules_bos(tmp_path: Path, smollm2: Tokenizer) -> None:
    folder = _folder(
        tmp_path, smollm2, tokenizer_class="LlamaTokenizerFast", bos_token="<|im_start|>",
        eos_token="<|im_end|>", add_bos_token=True, add_eos_token=False,
    )  # fmt: skip
    assert load_tokenizer(folder).encode("hi") == [1, *smollm2.encode("hi")]


def test_tokens_that_only_the_configuration_declares(tmp_path: Path, smollm2: Tokenizer) -> None:
    entry = {"content": "<|extra|>", "special": True}
    folder = _folder(tmp_path, smollm2, added_tokens_decoder={"49152": entry})
    loaded = load_tokenizer(folder)
    assert loaded.encode("<|extra|>") == [49_152]
    assert 49_152 in loaded.all_special_ids
    assert loaded.vocab_size == 49_153


# ---- damage --------------------------------------------------------------------------------------


def test_missing_tokenizers(tmp_path: Path) -> None:
    """P48"""
    with pytest.raises(ModelNotFoundError, match="no such file"):
        load_tokenizer(tmp_path / "none.gguf")
    with pytest.raises(ModelLoadError, match="has no tokenizer"):
        load_tokenizer(write_gguf(tmp_path / "x.gguf", {"general.architecture": "llama"}))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelLoadError, match=r"has no tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": 5}')
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json: is not a usable tokenizer file"):
        load_tokenizer(tmp_path)


def _bpe(folder: Path, post_processor: object = None, **model: object) -> Path:
    """A folder with a tokenizer of a few letters."""
    bpe = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]} | model
    file = {"version": "1.0", "added_tokens": [], "model": bpe, "post_processor": post_processor}
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer.json").write_text(json.dumps(file))
    return folder


@pytest.mark.parametrize(
    "change",
    [
        {"continuing_subword_prefix": "a" * 1000},
        {
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}],
                "pair": [],
                "special_tokens": {},
            }
        },
    ],
)
def test_files_at_which_the_library_panics(tmp_path: Path, change: dict[str, object]) -> None:
    """P48. A panic is no `Exception`: it would end a server's task without an answer."""
    assert load_tokenizer(_bpe(tmp_path)).encode("ab") == [2]
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json: is not a usable tokenizer file"):
        load_tokenizer(_bpe(tmp_path, **change))


def test_a_text_without_tokens_is_its_own_fault(tmp_path: Path) -> None:
    """A vocabulary of words may have none for a text, and nothing that stands for the unknown."""
    words = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "?", "merges": None}
    loaded = load_tokenizer(_bpe(tmp_path, **words))
    assert loaded.encode("a") == [0]
    with pytest.raises(InvalidParameterError, match=r"cannot be tokenised: .*\[UNK\]|unk"):
        loaded.encode("b")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.tokens": []}, "tokens is empty"),
        ({"tokenizer.ggml.tokens": 5}, "expected an array of strings"),
        ({"tokenizer.ggml.token_type": np.array([1], np.int32)}, "1 entries for 258 tokens"),
        ({"tokenizer.ggml.token_type": np.ones(258, np.float32)}, "is an array of float32"),
        ({"tokenizer.ggml.merges": ["a"]}, "entry 0 is no pair of tokens: 'a'"),
        ({"tokenizer.ggml.merges": ["a b c"]}, "entry 0 is no pair"),
        ({"tokenizer.ggml.merges": ["a b"]}, "merges are damaged"),
        ({"tokenizer.ggml.bos_token_id": 258}, "bos_token_id is 258, but there are 258 tokens"),
        ({"tokenizer.ggml.bos_token_id": "x"}, "expected an integer"),
        ({"tokenizer.ggml.add_bos_token": 1}, "expected a boolean"),
        ({"tokenizer.ggml.model": 7}, "expected a string"),
    ],
)
def test_damaged_vocabularies(tmp_path: Path, change: dict[str, object], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        tokenizer(tmp_path, byte_level() | change)


def test_damaged_scores(tmp_path: Path) -> None:
    metadata = sentencepiece(["a"])
    scores = metadata["tokenizer.ggml.scores"] * np.float32(np.nan)
    with pytest.raises(ModelLoadError, match="not finite"):
        tokenizer(tmp_path, metadata | {"tokenizer.ggml.scores": scores})
    del metadata["tokenizer.ggml.scores"]
    with pytest.raises(ModelLoadError, match="scores is missing"):
        tokenizer(tmp_path, metadata)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"tokenizer.ggml.model": "rwkv"},
            "tokenizer 'rwkv' is not supported .*are gpt2",
        ),
        ({"tokenizer.ggml.pre": "klingon"}, "pre-tokenizer 'klingon' is not supported"),
        ({"tokenizer.ggml.pre": "default"}, "does not name its pre-tokenizer"),
    ],
)
def test_unsupported_tokenizers(tmp_path: Path, change: dict[str, object], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        tokenizer(tmp_path, byte_level() | change)


def test_token_that_is_not_utf8(tmp_path: Path) -> None:
    metadata = byte_level()
    metadata["tokenizer.ggml.tokens"][3] = b"\xff"
    with pytest.raises(ModelLoadError, match=r"'tokenizer\.ggml\.tokens': string 3 is not UTF-8"):
        tokenizer(tmp_path, metadata)


def test_duplicate_tokens_do_not_crash(tmp_path: Path) -> None:
    metadata = byte_level()
    metadata["tokenizer.ggml.tokens"][100] = metadata["tokenizer.ggml.tokens"][99]
    assert tokenizer(tmp_path, metadata).vocab_size == 257


# ---- speed ---------------------------------------------------------------------------------------


def test_smollm2_is_built_quickly(smollm2_path: Path) -> None:
    """Under 0.25 s of processor time; measured: 0.1 s."""
    seconds = []
    for _ in range(3):
        start = time.process_time()
        load_tokenizer(smollm2_path)
        seconds.append(time.process_time() - start)
    assert min(seconds) < 0.25
