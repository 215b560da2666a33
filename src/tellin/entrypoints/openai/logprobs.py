"""Logprobs in OpenAI's two shapes: of chat, and of text completions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tellin.entrypoints.openai.replies import (
    ChatLogprobs,
    CompletionLogprobs,
    TokenLogprob,
    TokenLogprobs,
)
from tellin.outputs import Logprob, LogprobsOnePosition

MIN_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have."""


def finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)


class LogprobWriter:
    """Writes logprobs for one request."""

    def __init__(self, num_top: int, token_table: Any, *, as_ids: bool) -> None:
        """
        Args:
            num_top: alternatives per position; 0 = the sampled token alone.
            token_table: knows the bytes of tokens; None without a tokenizer.
            as_ids: write tokens as ``token_id:N``.
        """
        self._num_top = num_top
        self._table = token_table
        self._as_ids = as_ids

    def chat(
        self, token_ids: Iterable[int], positions: Iterable[LogprobsOnePosition]
    ) -> ChatLogprobs:
        """One entry per generated token."""
        content = []
        for token_id, entries in zip(token_ids, positions, strict=True):
            sampled = self._entry(token_id, entries[token_id])
            top = [self._entry(i, entry) for i, entry in self._top(entries)]
            content.append(
                TokenLogprobs(sampled.token, sampled.logprob, sampled.bytes, top_logprobs=top)
            )
        return ChatLogprobs(content)

    def completion(
        self,
        token_ids: Sequence[int],
        positions: Sequence[LogprobsOnePosition | None],
        offset: int,
    ) -> tuple[CompletionLogprobs, int]:
        """Parallel lists, one item per token.

        Args:
            positions: None for the first token of a prompt, which has no probability.
            offset: characters of the text before these tokens.

        Returns:
            The lists, and the offset after these tokens.
        """
        result = CompletionLogprobs()
        for token_id, entries in zip(token_ids, positions, strict=True):
            if not entries:
                text = self._text_of(token_id, None)
                result.tokens.append(self._token(token_id, None))
                result.token_logprobs.append(None)
                result.top_logprobs.append(None)
            else:
                sampled = entries[token_id]
                text = self._text_of(token_id, sampled)
                result.tokens.append(self._token(token_id, sampled))
                result.token_logprobs.append(finite(sampled.logprob))
                chosen = dict(self._top(entries)) | {token_id: sampled}
                result.top_logprobs.append(
                    {self._token(i, entry): finite(entry.logprob) for i, entry in chosen.items()}
                )
            result.text_offset.append(offset)
            offset += len(text)
        return result, offset

    def _top(self, entries: LogprobsOnePosition) -> list[tuple[int, Logprob]]:
        """The most likely tokens, best first, without a sampled one that is not among them."""
        ranked = [
            (entry.rank, token_id, entry)
            for token_id, entry in entries.items()
            if entry.rank is not None and (self._num_top < 0 or entry.rank <= self._num_top)
        ]
        return [(token_id, entry) for _, token_id, entry in sorted(ranked, key=lambda r: r[:2])]

    def _entry(self, token_id: int, entry: Logprob) -> TokenLogprob:
        raw = None if self._table is None else list(self._table.bytes_of(token_id))
        return TokenLogprob(self._token(token_id, entry), finite(entry.logprob), raw)

    def _token(self, token_id: int, entry: Logprob | None) -> str:
        return f"token_id:{token_id}" if self._as_ids else self._text_of(token_id, entry)

    def _text_of(self, token_id: int, entry: Logprob | None) -> str:
        if entry is not None:
            return entry.decoded_token or ""
        return "" if self._table is None else str(self._table.decoded_token(token_id))


def prompt_logprobs(positions: Sequence[LogprobsOnePosition | None] | None) -> list[Any] | None:
    """vLLM's shape: per position, token id to logprob, rank and text."""
    if positions is None:
        return None
    return [
        None
        if not entries
        else {
            str(token_id): {
                "logprob": finite(entry.logprob),
                "rank": entry.rank,
                "decoded_token": entry.decoded_token,
            }
            for token_id, entry in entries.items()
        }
        for entries in positions
    ]
