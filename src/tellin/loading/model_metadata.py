"""What shell and core need to know of a model before any weight is touched.

`ModelMetadata` is the same for both file formats; building it reads headers and small files only.
It holds no tensors and no open files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from tellin.config import PoolerConfig
from tellin.exceptions import ModelLoadError
from tellin.loading.encoder_hparams import ROTARY_ENCODERS
from tellin.loading.gguf_vocab import GGUFVocabulary
from tellin.loading.hparams import MAX_SIZE, check_hparams
from tellin.loading.json_file import is_file, read_file, read_optional_json_object
from tellin.loading.pooling import pooler_from_folder, pooler_from_gguf
from tellin.loading.templates import templates_from_folder, templates_from_gguf
from tellin.loading.tensors import ModelHParams
from tellin.loading.tokenizer_files import (
    has_bpe_files,
    read_added_tokens,
    read_vocab,
    token_text,
    tokenizer_config_of,
)
from tellin.loading.typed_mapping import TypedMapping

ENCODER_ARCHITECTURES = ("bert", "gemma-embedding", *ROTARY_ENCODERS)
"""Those whose tokens see the whole text: they cannot generate."""

_MAX_TOKENIZER_BYTES = 256 << 20
"""Of a ``tokenizer.json``: those of the largest vocabularies have 35 MB."""
_GGUF_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
_HF_SAMPLING = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


@dataclass(frozen=True)
class ModelMetadata:
    """Facts about a model; no tensors."""

    path: Path
    file_format: str
    """``gguf`` or ``safetensors``."""
    name: str
    """The model's own name, or the file's."""
    hparams: ModelHParams
    num_bytes: int
    """Size of the weight files."""
    tokenizer_size: int
    """Tokens including added ones; ids at or above it must never be sampled."""
    eos_token_ids: tuple[int, ...] = ()
    """Primary end-of-sequence id first, then the others that end a generation."""
    bos_token_id: int | None = None
    chat_templates: Mapping[str, str] = field(default_factory=dict)
    """By name; ``default`` is the usual one."""
    generation_defaults: Mapping[str, Any] = field(default_factory=dict)
    """Sampling defaults that come with the model, under the names of `SamplingParams`."""
    pooler: PoolerConfig | None = None
    """How the model's files say that it pools; None = they do not."""

    @property
    def architecture(self) -> str:
        return self.hparams.architecture

    @property
    def context_length(self) -> int:
        """Longest context the model was made for, in tokens."""
        return self.hparams.max_position_embeddings

    @property
    def vocab_size(self) -> int:
        """Rows of the output matrix."""
        return self.hparams.vocab_size

    @property
    def hidden_size(self) -> int:
        """Width of the token embedding, and of the final hidden states."""
        return self.hparams.state_size

    @property
    def num_hidden_layers(self) -> int:
        return self.hparams.num_hidden_layers

    @property
    def chat_template(self) -> str | None:
        return self.chat_templates.get("default")

    def sampling_key(self, name: str) -> str:
        """What the model's file calls one of `generation_defaults`."""
        names = _GGUF_SAMPLING if self.file_format == "gguf" else _HF_SAMPLING
        key = next(key for key, value in names.items() if value == name)
        return f"general.sampling.{key}" if self.file_format == "gguf" else key

    @property
    def is_encoder(self) -> bool:
        """Whether every token sees the whole text, so that a text is computed in one step."""
        return self.architecture in ENCODER_ARCHITECTURES

    @property
    def is_classifier(self) -> bool:
        """Whether the model gives scores of labels, or of pairs of texts, instead of vectors."""
        return self.pooler is not None and self.pooler.num_labels > 0

    @property
    def runner_type(self) -> str:
        """``generate`` or ``pooling``: what the model is made for."""
        return "pooling" if self.is_encoder or self.pooler is not None else "generate"


def metadata_from_gguf(
    path: Path, values: TypedMapping, hparams: ModelHParams, num_bytes: int
) -> ModelMetadata:
    """Metadata of a GGUF file.

    Raises:
        ModelLoadError: the tokenizer's keys are damaged.
    """
    check_hparams(path, hparams)
    vocabulary = GGUFVocabulary(values) if values.has("tokenizer.ggml.tokens") else None
    sampling = {
        name: values.get_float(f"general.sampling.{key}")
        for key, name in _GGUF_SAMPLING.items()
        if values.has(f"general.sampling.{key}")
    }
    if "top_k" in sampling:
        sampling["top_k"] = int(sampling["top_k"])
    return ModelMetadata(
        path=path,
        file_format="gguf",
        name=values.get_str("general.name", path.stem) or path.stem,
        hparams=hparams,
        num_bytes=num_bytes,
        tokenizer_size=hparams.vocab_size if vocabulary is None else vocabulary.size,
        eos_token_ids=() if vocabulary is None else vocabulary.end_token_ids(),
        bos_token_id=None if vocabulary is None else vocabulary.special_id("bos"),
        chat_templates=templates_from_gguf(values),
        generation_defaults=sampling,
        pooler=pooler_from_gguf(values, values.get_str("general.architecture", "")),
    )


def metadata_from_folder(folder: Path, hparams: ModelHParams, num_bytes: int) -> ModelMetadata:
    """Metadata of a Hugging Face folder.

    Raises:
        ModelLoadError: one of its JSON files is damaged.
    """
    none = TypedMapping(folder, {})
    config = read_optional_json_object(folder / "config.json") or none
    generation = read_optional_json_object(folder / "generation_config.json") or none
    tokenizer_config = tokenizer_config_of(folder)
    inventory = _TokenInventory.read(folder)
    text = config.get_mapping("text_config") if config.has("text_config") else none
    eos = [
        *inventory.find(token_text(tokenizer_config, "eos_token")),
        *_ids(generation, "eos_token_id", hparams.vocab_size),
        *_ids(config, "eos_token_id", hparams.vocab_size),
        *_ids(text, "eos_token_id", hparams.vocab_size),
    ]
    bos = [
        *inventory.find(token_text(tokenizer_config, "bos_token")),
        *_ids(config, "bos_token_id", hparams.vocab_size),
        *_ids(text, "bos_token_id", hparams.vocab_size),
    ]
    return ModelMetadata(
        path=folder,
        file_format="safetensors",
        name=config.get_str("_name_or_path", folder.name) or folder.name,
        hparams=hparams,
        num_bytes=num_bytes,
        tokenizer_size=inventory.size or hparams.vocab_size,
        eos_token_ids=tuple(dict.fromkeys(eos)),
        bos_token_id=bos[0] if bos else None,
        chat_templates=templates_from_folder(folder),
        generation_defaults={
            name: generation[key] for key, name in _HF_SAMPLING.items() if generation.has(key)
        },
        pooler=pooler_from_folder(folder, config),
    )


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]]


class _TokenizerFile(msgspec.Struct):
    model: _Model
    added_tokens: list[_AddedToken] = []


@dataclass(frozen=True)
class _TokenInventory:
    """How many tokens a folder's tokenizer has, and the ids of those that may be special."""

    size: int
    added: Mapping[str, int]

    @classmethod
    def read(cls, folder: Path) -> _TokenInventory:
        if has_bpe_files(folder):
            ids = read_vocab(folder)
            ids |= read_added_tokens(folder, ids)
            return cls(max(ids.values()) + 1, ids)
        path = folder / "tokenizer.json"
        if not is_file(path):
            return cls(0, {})
        file = _read_tokenizer(path)
        vocab = file.model.vocab
        last = max(vocab.values(), default=-1) if isinstance(vocab, dict) else len(vocab) - 1
        added = {token.content: token.id for token in file.added_tokens}
        size = max(last, *added.values(), -1) + 1
        if size > MAX_SIZE:
            raise ModelLoadError(
                f"{path}: has a token with id {size - 1}, allowed are ids below {MAX_SIZE}"
            )
        return cls(size, added)

    def find(self, text: str | None) -> list[int]:
        return [self.added[text]] if text is not None and text in self.added else []


def _read_tokenizer(path: Path) -> _TokenizerFile:
    try:
        return msgspec.json.decode(read_file(path, _MAX_TOKENIZER_BYTES), type=_TokenizerFile)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ModelLoadError(f"{path}: is not a usable tokenizer file: {error}") from None


def find_token(path: Path, text: str) -> int | None:
    """Id of the token that is stored as ``text`` in a ``tokenizer.json``; None if there is none."""
    file = _read_tokenizer(path)
    vocab = file.model.vocab
    if not isinstance(vocab, dict):
        vocab = {token: number for number, (token, _) in enumerate(vocab)}
    added = {token.content: token.id for token in file.added_tokens}
    return added.get(text, vocab.get(text))


def _ids(config: TypedMapping, key: str, vocab_size: int) -> list[int]:
    """Token ids given as one integer or a list of them; -1 stands for none."""
    if not config.has(key):
        return []
    value = config[key]
    ids = value if isinstance(value, list) else [config.get_int(key)]
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise ModelLoadError(
                f"{config.path}: key {key!r} holds {str(token_id)[:40]!r}, expected integers"
            )
        if not -1 <= token_id < vocab_size:
            raise ModelLoadError(
                f"{config.path}: key {key!r} holds the id {token_id}, "
                f"but the vocabulary has {vocab_size} tokens"
            )
    return [token_id for token_id in ids if token_id != -1]
