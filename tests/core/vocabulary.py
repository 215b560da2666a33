"""A small vocabulary with multi-byte tokens, as `GuidanceBackend` wants its tokenizer."""

from __future__ import annotations

import random

PIECES = [
    b"true", b"false", b"null", b'{"', b'":', b'": ', b'", "', b'"}', b"}}", b"[]", b", ", b"\n  ",
    b"\n\n", b"  ", b"ab", b"abc", b"name", b"12", b"00", b"</f>", b"<f=", "é".encode(),
    "😀".encode(),
]  # fmt: skip
EOS_ID = 256 + len(PIECES)
TOOL_ID, END_TOOL_ID = EOS_ID + 1, EOS_ID + 2
SIZE = EOS_ID + 3


class ByteTokenizer:
    """Ids 0-255 are bytes; then the pieces; then special tokens."""

    vocab_size = SIZE
    eos_token_id = EOS_ID
    all_special_ids = frozenset({EOS_ID, TOOL_ID, END_TOOL_ID})

    def token_bytes(self) -> list[bytes | None]:
        return [bytes([i]) for i in range(256)] + PIECES + [None, None, None]

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        names = {EOS_ID: "<eos>", TOOL_ID: "<tool>", END_TOOL_ID: "</tool>"}
        return [names[i] for i in ids]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        data = self.token_bytes()
        return b"".join(data[i] or b"" for i in ids).decode("utf-8", "replace")


def tokenize_somehow(text: str, rng: random.Random) -> list[int]:
    """One of the many ways to write a text in this vocabulary."""
    data, ids = text.encode(), []
    while data:
        fitting = [i for i, piece in enumerate(PIECES) if data.startswith(piece)]
        if fitting and rng.random() < 0.7:
            index = rng.choice(fitting)
            ids.append(256 + index)
            data = data[len(PIECES[index]) :]
        else:
            ids.append(data[0])
            data = data[1:]
    return ids
