"""The vocabulary in a GGUF file's metadata: tokens, their kinds, special ids, rules.

Reads and checks the ``tokenizer.*`` keys and decides which ids end a generation; builds no
tokenizer (`gguf_tokenizer` does). Strings stay in the file until somebody needs them.

Source: GGUF specification, "Tokenizer".
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tellin.exceptions import ModelLoadError
from tellin.loading.gguf import StringArray
from tellin.loading.typed_mapping import TypedMapping

_END_TEXTS = frozenset(
    (
        "<|im_end|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end|>",
        "<end_of_turn>",
        "<turn|>",
        "<|tool_response>",
        "<|END_OF_TURN_TOKEN|>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
        "<|return|>",
        "<|call|>",
        "<EOT>",
    )
)
"""Control tokens that end a turn or a text in the common chat formats. GGUF names only one end
token, while instruct models end with either of two: Hugging Face configurations list both."""


class TokenType(enum.IntEnum):
    """Kinds of tokens; numbers are the specification's."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_TYPE_NUMBERS = (0, *TokenType)  # 0 is undefined


class GGUFVocabulary:
    """``tokenizer.*`` metadata, checked.

    Raises:
        ModelLoadError: a key is missing, of the wrong type, or contradicts another.
    """

    def __init__(self, metadata: TypedMapping) -> None:
        self.metadata = metadata
        self.path = metadata.path
        self.model = metadata.get_str("tokenizer.ggml.model")
        """gpt2 (byte-level BPE), llama (SentencePiece with scores), bert (WordPiece), ..."""
        self.pre = metadata.get_str("tokenizer.ggml.pre", "")
        """Name of the pre-tokenizer, for byte-level BPE."""
        self.tokens: Sequence[str] = metadata.get_strings("tokenizer.ggml.tokens")
        if not self.tokens:
            raise ModelLoadError(f"{self.path}: tokenizer.ggml.tokens is empty")
        self.types = self._per_token("tokenizer.ggml.token_type", "i")
        if self.types is not None and not np.isin(self.types, _TYPE_NUMBERS).all():
            wrong = self.types[~np.isin(self.types, _TYPE_NUMBERS)][0]
            raise ModelLoadError(
                f"{self.path}: tokenizer.ggml.token_type holds {wrong}, allowed are 0 to 6"
            )
        self.size = self._size_without_padding()

    @property
    def scores(self) -> npt.NDArray[np.float32] | None:
        """Scores of a SentencePiece vocabulary, float32 ``[num_tokens]``."""
        scores = self._per_token("tokenizer.ggml.scores", "f")
        if scores is None:
            return None
        if not np.isfinite(scores).all():
            raise ModelLoadError(
                f"{self.path}: tokenizer.ggml.scores holds values that are not finite"
            )
        return scores.astype(np.float32)

    def all_tokens(self) -> list[str]:
        """Text of every token up to `size`, by id."""
        tokens = (
            self.tokens.to_list() if isinstance(self.tokens, StringArray) else list(self.tokens)
        )
        return tokens[: self.size]

    def merges(self) -> list[str]:
        """BPE merges, each "left right", first to last."""
        merges = self.metadata.get_strings("tokenizer.ggml.merges")
        return merges.to_list() if isinstance(merges, StringArray) else list(merges)

    def ids_of_type(self, *types: TokenType) -> list[int]:
        """Ids of all tokens of these kinds, ascending."""
        if self.types is None:
            return []
        return [int(i) for i in np.flatnonzero(np.isin(self.types, types)) if i < self.size]

    def special_id(self, name: str) -> int | None:
        """Id of a special token (bos, eos, eot, unknown, padding, ...), None if there is none."""
        key = f"tokenizer.ggml.{name}_token_id"
        if not self.metadata.has(key):
            return None
        token_id = self.metadata.get_int(key)
        if token_id in (-1, 0xFFFF_FFFF):
            return None
        if not 0 <= token_id < len(self.tokens):
            raise ModelLoadError(
                f"{self.path}: {key} is {token_id}, but there are {len(self.tokens)} tokens"
            )
        return token_id

    def end_token_ids(self) -> tuple[int, ...]:
        """Ids that end a generation: the declared ones first, then others known to."""
        declared = [self.special_id(name) for name in ("eos", "eot", "eom")]
        ids = [token_id for token_id in declared if token_id is not None]
        texts = {
            self.tokens[token_id]: token_id
            for token_id in self.ids_of_type(TokenType.CONTROL, TokenType.USER_DEFINED)
        }
        if "<|return|>" in texts:
            # gpt-oss: an answer is several messages, and this ends only one of them.
            ended = texts.pop("<|end|>", None)
            ids = [token_id for token_id in ids if token_id != ended]
        ids += [token_id for text, token_id in texts.items() if text in _END_TEXTS]
        return tuple(dict.fromkeys(ids))

    def _per_token(self, key: str, kind: str) -> npt.NDArray[np.generic] | None:
        if not self.metadata.has(key):
            return None
        values = self.metadata.get_numbers(key)
        if values.size != len(self.tokens):
            raise ModelLoadError(
                f"{self.path}: {key} has {values.size} entries for {len(self.tokens)} tokens"
            )
        if values.dtype.kind not in {"i": "iu", "f": "f"}[kind]:
            raise ModelLoadError(f"{self.path}: {key} is an array of {values.dtype.name}")
        return values

    def _size_without_padding(self) -> int:
        """Tokens up to the last that is used: converters pad to the size of the matrix."""
        if self.types is None:
            return len(self.tokens)
        used = np.flatnonzero(self.types != TokenType.UNUSED)
        return int(used[-1]) + 1 if used.size else len(self.tokens)
