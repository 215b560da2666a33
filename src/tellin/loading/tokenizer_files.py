"""The files of a folder that make its tokenizer: ``tokenizer.json``, or the two of GPT-2's time.

Those, ``vocab.json`` and ``merges.txt``, are all that OPT's folders have. They do not say how a
text is cut before merging, nor which tokens are special: both are the tokenizer class's, so that
others than GPT-2's are refused.

Source: Radford et al. 2019 (GPT-2), section 2.2; the documented defaults of transformers' class.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tellin.exceptions import ModelLoadError, UnsupportedModelError
from tellin.loading.hparams import MAX_SIZE
from tellin.loading.json_file import read_json_object, read_optional_json_object
from tellin.loading.typed_mapping import TypedMapping

if TYPE_CHECKING:
    from tokenizers import Tokenizer

VOCAB_NAME, MERGES_NAME = "vocab.json", "merges.txt"
ADDED_NAME = "added_tokens.json"
"""Beside them, where somebody has added tokens: their ids go on behind the vocabulary's."""
_CLASSES = ("GPT2Tokenizer", "GPT2TokenizerFast")
_MODEL_TYPES = ("gpt2", "opt")
"""Models whose folders need not name the class."""
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "additional_special_tokens")
_MAX_MERGES_BYTES = 64 << 20


def has_bpe_files(folder: Path) -> bool:
    """Whether the two files stand in for a ``tokenizer.json``."""
    has_json = (folder / "tokenizer.json").is_file()
    return not has_json and all((folder / name).is_file() for name in (VOCAB_NAME, MERGES_NAME))


def read_vocab(folder: Path) -> dict[str, int]:
    """Id of every token.

    Raises:
        ModelLoadError: the file is damaged.
    """
    values = read_json_object(folder / VOCAB_NAME)
    vocab = {token: values.get_int(token) for token in values}
    ids = set(vocab.values())
    if len(ids) < len(vocab) or not vocab or min(ids) < 0 or max(ids) >= MAX_SIZE:
        raise ModelLoadError(
            f"{values.path}: has {len(vocab)} tokens with {len(ids)} ids; each must have its own, "
            f"from 0 to {MAX_SIZE - 1}"
        )
    return vocab


def read_added_tokens(folder: Path, vocab: Mapping[str, int]) -> dict[str, int]:
    """Ids of the tokens that were added to ``vocab``, ascending.

    Raises:
        ModelLoadError: the file is damaged, or ids do not follow those of the vocabulary.
    """
    values = read_optional_json_object(folder / ADDED_NAME)
    if values is None:
        return {}
    ids = {token: values.get_int(token) for token in values}
    others = [item for item in ids.items() if vocab.get(item[0]) != item[1]]
    added = dict(sorted(others, key=lambda item: item[1]))
    first = max(vocab.values()) + 1
    follow = list(added.values()) == list(range(first, first + len(added)))
    if not follow or not added.keys().isdisjoint(vocab):
        raise ModelLoadError(
            f"{values.path}: has the ids {list(added.values())[:8]}; added tokens follow the "
            f"vocabulary, from {first} on"
        )
    return added


def tokenizer_config_of(folder: Path) -> TypedMapping:
    """``tokenizer_config.json``, with the special tokens that only another file may tell, and where
    the two files are all there is, with those that GPT-2's class has by default.
    """
    config = read_optional_json_object(folder / "tokenizer_config.json")
    values = dict(config.items()) if config is not None else {}
    if has_bpe_files(folder):
        others = read_optional_json_object(folder / "special_tokens_map.json")
        defaults = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
        values = defaults | dict(others.items() if others is not None else ()) | values
    return TypedMapping(folder / "tokenizer_config.json", values)


def token_text(config: TypedMapping, key: str) -> str | None:
    """A special token's text: a string, or an object with ``content``."""
    if not config.has(key):
        return None
    value = config[key]
    if isinstance(value, dict):
        return config.get_mapping(key).get_str("content")
    return config.get_str(key)


def backend_of_folder(folder: Path, config: TypedMapping) -> Tokenizer:
    """The library's tokenizer; ``config`` is what `tokenizer_config_of` gives.

    Raises:
        UnsupportedModelError: two files of another class than GPT-2's.
        ModelLoadError: there is none, or a file is damaged; not for all damages: the library's own
            exceptions pass.
    """
    from tokenizers import Tokenizer

    if has_bpe_files(folder):
        return _from_bpe_files(folder, config)
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelLoadError(f"{folder}: has no tokenizer.json")
    return Tokenizer.from_file(str(path))


def _from_bpe_files(folder: Path, config: TypedMapping) -> Tokenizer:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    _check_class(folder, config)
    vocab = read_vocab(folder)
    try:
        backend = Tokenizer(models.BPE(vocab, _read_merges(folder / MERGES_NAME)))
    except Exception as error:
        # The library raises plain Exception when a merge's parts or result are no tokens.
        raise ModelLoadError(f"{folder / MERGES_NAME}: does not fit: {error}") from None
    special = _special_tokens(config)
    texts = set(special.values())
    backend.add_tokens(
        [
            AddedToken(text, normalized=False, special=text in texts)
            for text in read_added_tokens(folder, vocab)
        ]
    )
    has_prefix = config.get_bool("add_prefix_space", False)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=has_prefix)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(text, normalized=False) for text in special.values() if text in vocab]
    )
    bos = special.get("bos_token")
    if config.get_bool("add_bos_token", False) and bos in vocab:
        backend.post_processor = processors.TemplateProcessing(
            single=["bos", "$A"],
            pair=["bos", "$A", "bos", "$B:1"],
            special_tokens=[{"id": "bos", "ids": [vocab[bos]], "tokens": [bos]}],
        )
    return backend


def _check_class(folder: Path, config: TypedMapping) -> None:
    name = config.get_str("tokenizer_class", "")
    if not name:
        model = read_optional_json_object(folder / "config.json")
        model_type = "" if model is None else model.get_str("model_type", "")
        if model_type in _MODEL_TYPES:
            return
        name = f"that of model_type {model_type!r}"
    if name not in _CLASSES:
        raise UnsupportedModelError(
            f"{folder}: has no tokenizer.json, and its tokenizer_class is {name}; {VOCAB_NAME} and "
            f"{MERGES_NAME} alone are read for {_CLASSES[0]}. Save it as tokenizer.json, for "
            "example with transformers' AutoTokenizer and save_pretrained"
        )


def _special_tokens(config: TypedMapping) -> dict[str, str]:
    texts = {key: token_text(config, key) for key in _SPECIAL[:-1]}
    found = {key: text for key, text in texts.items() if text is not None}
    more = config.get_strings(_SPECIAL[-1]) if config.has(_SPECIAL[-1]) else ()
    return found | {text: text for text in more}


def _read_merges(path: Path) -> list[tuple[str, str]]:
    try:
        num_bytes = path.stat().st_size
        if num_bytes > _MAX_MERGES_BYTES:
            raise ModelLoadError(f"{path}: has {num_bytes} bytes, allowed are {_MAX_MERGES_BYTES}")
        lines = path.read_text("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ModelLoadError(f"{path}: is not UTF-8: {error}") from None
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read: {error.strerror or error}") from None
    merges = []
    for number, line in enumerate(lines, start=1):
        parts = line.rstrip("\r").split(" ")
        if parts == [""] or (number == 1 and line.startswith("#version")):
            continue
        if len(parts) != 2:
            raise ModelLoadError(f"{path}: line {number} is no pair of tokens: {line[:40]!r}")
        merges.append((parts[0], parts[1]))
    return merges
