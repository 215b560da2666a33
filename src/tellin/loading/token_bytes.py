"""The bytes that a token adds to a text, by the way in which a vocabulary writes them.

Knows the spelling of tokens and no tokenizer: which spelling it is, the decoder tells. What is no
valid spelling stands for its own characters.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from tellin.loading.gguf_tokenizer import SPACE

if TYPE_CHECKING:
    import tokenizers


def decoder_kind(backend: tokenizers.Tokenizer) -> str:
    """How tokens stand for bytes, a key of `TOKEN_BYTES`."""
    if backend.decoder is None:
        return "text"
    spec = json.loads(backend.decoder.__getstate__())
    kinds = {step["type"] for step in spec.get("decoders", [spec])}
    if "ByteLevel" in kinds:
        return "byte_level"
    if kinds & {"ByteFallback", "Metaspace"}:
        return "byte_fallback"
    return "wordpiece" if "WordPiece" in kinds else "text"


@functools.cache
def _byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte in byte-level vocabularies.

    Printable Latin-1 characters stand for themselves, the other 68 bytes for U+0100 and up, in
    order. Source: Radford et al. 2019 (GPT-2), section 2.2.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + index): byte for index, byte in enumerate(others)
    }


def _byte_level_bytes(token: str) -> bytes:
    alphabet = _byte_alphabet()
    try:
        return bytes([alphabet[char] for char in token])
    except KeyError:
        return token.encode()


def _byte_fallback_bytes(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return token.replace(SPACE, " ").encode()


def _wordpiece_bytes(token: str) -> bytes:
    return token.removeprefix("##").encode()


TOKEN_BYTES: Mapping[str, Callable[[str], bytes]] = {
    "byte_level": _byte_level_bytes,
    "byte_fallback": _byte_fallback_bytes,
    "wordpiece": _wordpiece_bytes,
    "text": str.encode,
}
