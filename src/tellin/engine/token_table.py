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
    def id_to_bytes(self, token_id: int) -> bytes | None: ...


def decode_partial(data: bytes) -> tuple[str, bytes]:
    """Text of the complete characters in ``data``, and the incomplete tail (at most 3 bytes)."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = decoder.decode(data)
    return text, decoder.getstate()[0]


class TokenTable:
    """Bytes and text of tokens, cached."""

    def __init__(self, tokenizer: TokenizerLike) -> None:
        self.tokenizer = tokenizer
        self.special_ids = tokenizer.all_special_ids
        self.knows_bytes, self.num_stripped = _decoder_facts(tokenizer.backend.decoder)
        self._bytes: dict[int, bytes] = {}
        self.complete_text: dict[int, str] = {}
        """Text of the tokens met so far whose bytes are whole characters."""

    def bytes_of(self, token_id: int) -> bytes:
        """Bytes that a token adds to the text; empty for an id outside the vocabulary."""
        raw = self._bytes.get(token_id)
        if raw is None:
            raw = self._bytes[token_id] = self.tokenizer.id_to_bytes(token_id) or b""
            try:
                self.complete_text[token_id] = raw.decode()
            except UnicodeDecodeError:
                pass
        return raw

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


def _decoder_facts(decoder: Any) -> tuple[bool, int]:
    """Whether a text is the bytes of its tokens, joined; and leading spaces taken off a text."""
    if decoder is None:
        return False, 0
    spec = json.loads(decoder.__getstate__())
    steps = spec["decoders"] if spec["type"] == "Sequence" else [spec]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return True, 0
    known = {"Replace", "Metaspace", "ByteFallback", "Fuse", "Strip"}
    if not set(kinds) <= known or "ByteFallback" not in kinds:
        return False, 0
    num_stripped = 0
    for step in steps:
        if step["type"] == "Replace" and (
            step["pattern"] != {"String": "\u2581"} or step["content"] != " "
        ):
            return False, 0
        if step["type"] == "Strip":
            if "Fuse" not in kinds or step["content"] != " " or step["stop"]:
                return False, 0
            num_stripped += step["start"]
        if step["type"] == "Metaspace":
            if step.get("replacement") != "\u2581":
                return False, 0
            num_stripped += step.get("prepend_scheme", "always") != "never"
    return True, num_stripped
