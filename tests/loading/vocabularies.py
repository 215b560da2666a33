"""Small vocabularies as GGUF metadata, for tokenizers that a test can take in at a glance."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.synthetic import byte_tokens
from tellin.loading.tokenizer import Tokenizer, load_tokenizer
from tests.loading.gguf_writer import write_gguf

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


def byte_level(
    merges: Sequence[str] = (),
    specials: Sequence[str] = ("<|bos|>", "<|eos|>"),
    pre: str = "smollm",
    **keys: Any,
) -> dict[str, Any]:
    """Specials first, then 256 bytes, then the merges' results."""
    tokens = [*specials, *byte_tokens(), *(merge.replace(" ", "") for merge in merges)]
    types = [CONTROL] * len(specials) + [NORMAL] * (len(tokens) - len(specials))
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.merges": list(merges),
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        **{f"tokenizer.ggml.{key}": value for key, value in keys.items()},
    }


def sentencepiece(
    pieces: Sequence[str], user_defined: Sequence[str] = (), **keys: Any
) -> dict[str, Any]:
    """<unk>, <s>, </s>, user-defined ones, 256 bytes, then ``pieces``, the best score first."""
    head = ["<unk>", "<s>", "</s>", *user_defined]
    tokens = [*head, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    types = [UNKNOWN, CONTROL, CONTROL, *[USER_DEFINED] * len(user_defined), *[BYTE] * 256]
    types += [NORMAL] * len(pieces)
    scores = np.zeros(len(tokens), np.float32)
    scores[len(head) + 256 :] = -np.arange(len(pieces), dtype=np.float32)
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **{f"tokenizer.ggml.{key}": value for key, value in keys.items()},
    }


def tokenizer(folder: Path, metadata: dict[str, Any]) -> Tokenizer:
    """The tokenizer of a file with this metadata."""
    return load_tokenizer(write_gguf(folder / "vocabulary.gguf", metadata))


MERGES = ("Ġ t", "h e", "Ġt he", "i n", "Ġ s", "Ġs e", "Ġse a")
_OPT_SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")


def _token(text: str) -> dict[str, Any]:
    return {
        "__type": "AddedToken",
        "content": text,
        "lstrip": False,
        "normalized": True,
        "rstrip": False,
        "single_word": False,
    }


OPT_CONFIG = {
    "tokenizer_class": "GPT2Tokenizer",
    "errors": "replace",
    "add_prefix_space": False,
    "add_bos_token": True,
    "bos_token": _token("</s>"),
    "eos_token": _token("</s>"),
    "unk_token": _token("</s>"),
    "pad_token": _token("<pad>"),
}


def write_bpe_files(folder: Path, config: dict[str, Any] | None, model_type: str = "opt") -> Path:
    """A folder with ``vocab.json`` and ``merges.txt``; special tokens come first, GPT-2's last."""
    tokens = [*_OPT_SPECIAL, *byte_tokens(), *(merge.replace(" ", "") for merge in MERGES)]
    if model_type == "gpt2":
        tokens = [*tokens[len(_OPT_SPECIAL) :], "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *MERGES, ""]))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
