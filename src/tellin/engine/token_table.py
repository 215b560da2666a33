"""What each token of a vocabulary is as bytes and as text.

One table per engine, filled as tokens are met. It knows how the tokenizer's decoder turns pieces
into bytes for the two families that nearly all generators use: byte-level BPE, and SentencePiece
with byte fallback. Other decoders (``knows_bytes`` is False) have to be asked for the text of a
window of tokens. Text of bytes is strict UTF-8, each maximal invalid part replaced by one U+FFFD.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence
from typing import Any, Protocol


MAX_TOKEN_ID = 2**32 - 1
"""Tokenizers take no larger ids."""


class TokenizerLike(Protocol):
    """The part of a tokenizer that detokenisation needs."""

    @property
    def backend(self) -> Any: ...
    @property
    def all_special_ids(self) -> frozenset[int]: ...
    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


def decode_partial(data: bytes) -> tuple[str, bytes]:
    """Text of the complete characters in ``data``, and the incomplete tail (at most 3 bytes)."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = decoder.decode(data)
    return text, decoder.getstate()[0]


def _byte_of_char() -> dict[str, int]:
    """GPT-2's printable stand-in of every byte.

    Source: the byte-level BPE encoding of Radford et al. 2019: printable Latin-1 characters stand
    for themselves, the other 68 bytes for U+0100 and up, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return table


class TokenTable:
    """Bytes and text of tokens, cached."""

    def __init__(self, tokenizer: TokenizerLike) -> None:
        self.tokenizer = tokenizer
        self.special_ids = tokenizer.all_special_ids
        self._family, self.num_stripped = _decoder_family(tokenizer.backend.decoder)
        self.knows_bytes = self._family != "other"
        self._bytes: dict[int, bytes] = {}
        self._added: dict[int, str] = {
            token_id: token.content
            for token_id, token in tokenizer.backend.get_added_tokens_decoder().items()
        }
        self._byte_of_char = _byte_of_char() if self._family == "byte_level" else {}
        self.complete_text: dict[int, str] = {}
        """Text of the tokens met so far whose bytes are whole characters."""

    def bytes_of(self, token_id: int) -> bytes:
        """Bytes that a token adds to the text; empty for an id outside the vocabulary."""
        raw = self._bytes.get(token_id)
        if raw is None:
            raw = self._bytes[token_id] = self._compute_bytes(token_id)
            try:
                self.complete_text[token_id] = raw.decode()
            except UnicodeDecodeError:
                pass
        return raw

    def _compute_bytes(self, token_id: int) -> bytes:
        piece = self._added.get(token_id)
        if piece is not None and self._family == "byte_level":
            return piece.encode()
        if piece is None:
            if not 0 <= token_id <= MAX_TOKEN_ID:
                return b""
            piece = self.tokenizer.backend.id_to_token(token_id)
        if piece is None:
            return b""
        if self._family == "byte_level":
            try:
                return bytes([self._byte_of_char[char] for char in piece])
            except KeyError:
                return piece.encode()
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            try:
                return bytes([int(piece[3:5], 16)])
            except ValueError:
                pass
        return piece.replace("\u2581", " ").encode()

    def decoded_token(self, token_id: int, pending: bytes = b"") -> str:
        """Readable text of one token.

        Args:
            pending: incomplete character left by the tokens before it. The token that completes a
                character gets the whole of it; a token that completes none is "".
        """
        if not self.knows_bytes:
            text = self.tokenizer.decode([token_id], skip_special_tokens=False)
            return "" if text.endswith("\ufffd") else text
        raw = self.bytes_of(token_id)
        text = self.complete_text.get(token_id, "")
        if text or not raw:
            return text
        return decode_partial(pending + raw)[0]

    def pending_after(self, token_id: int, pending: bytes) -> bytes:
        """Incomplete character after ``token_id``, given the one before it."""
        if not self.knows_bytes:
            return b""
        raw = self.bytes_of(token_id)
        if token_id in self.complete_text:
            return b"" if raw else pending
        return decode_partial(pending + raw)[1]


def _decoder_family(decoder: Any) -> tuple[str, int]:
    """``(family, num_stripped)``: which bytes rule applies, and leading spaces taken off a text."""
    if decoder is None:
        return "other", 0
    spec = json.loads(decoder.__getstate__())
    steps = spec["decoders"] if spec["type"] == "Sequence" else [spec]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return "byte_level", 0
    known = {"Replace", "Metaspace", "ByteFallback", "Fuse", "Strip"}
    if not set(kinds) <= known or not {"Replace", "Metaspace"} & set(kinds):
        return "other", 0
    num_stripped = 0
    for step in steps:
        if step["type"] == "Replace" and (
            step["pattern"] != {"String": "\u2581"} or step["content"] != " "
        ):
            return "other", 0
        if step["type"] == "Strip":
            if "Fuse" not in kinds or step["content"] != " " or step["stop"]:
                return "other", 0
            num_stripped += step["start"]
        if step["type"] == "Metaspace":
            if step.get("replacement") != "\u2581":
                return "other", 0
            num_stripped += step.get("prepend_scheme", "always") != "never"
    if "ByteFallback" not in kinds:
        return "other", 0
    return "byte_fallback", num_stripped
