"""Which tokens of a prompt that is too long are kept: ``truncate_prompt_tokens``.

Knows ids and limits, no texts. What is cut off is counted by the caller and told to the user.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tellin.engine.prompts import TokenizeParams
from tellin.exceptions import InvalidParameterError


class _Encodes(Protocol):
    @property
    def encode(self) -> Callable[..., list[int]]: ...


def truncation_limit(params: TokenizeParams, max_model_len: int) -> int | None:
    """Tokens to keep; None = all.

    Raises:
        InvalidParameterError: more than the context holds.
    """
    limit = params.truncate_prompt_tokens
    if limit is None:
        return None
    longest = max_model_len if params.pools else max_model_len - 1
    if limit > longest:
        less = "" if params.pools else f" (the context of {longest + 1} tokens less one for output)"
        raise InvalidParameterError(
            f"truncate_prompt_tokens must be at most {longest}{less}, got {limit}",
            parameter="truncate_prompt_tokens",
            value=limit,
        )
    return longest if limit == -1 else limit


def special_ends(
    tokenizer: _Encodes, text: str, token_ids: list[int]
) -> tuple[list[int], list[int]]:
    """The special tokens around a text that is to be pooled: they are never cut off.

    An encoder's first token and its separator, or a decoder's end token, are part of what the model
    was trained on; a prompt to be continued has none at its end.
    """
    plain = tokenizer.encode(text, add_special_tokens=False)
    num_special = len(token_ids) - len(plain)
    for start in range(num_special + 1):
        if token_ids[start : start + len(plain)] == plain:
            return token_ids[:start], token_ids[start + len(plain) :]
    return [], []


def truncate(
    tokens: Any,
    limit: int | None,
    params: TokenizeParams,
    ends: tuple[Sequence[int], Sequence[int]] = ((), ()),
) -> Any:
    """The tokens to keep, of a list of ids or an array of rows.

    Args:
        tokens: all of them.
        limit: of `truncation_limit`.
        params: which side is cut.
        ends: tokens at both ends of a list that stay, whatever is cut between them.

    Raises:
        InvalidParameterError: nothing would be left between the ends.
    """
    if limit is None or len(tokens) <= limit:
        return tokens
    first, last = ends
    room = limit - len(first) - len(last)
    if room < 1:
        raise InvalidParameterError(
            f"truncate_prompt_tokens={limit} leaves no room for the text beside the model's "
            f"{len(first) + len(last)} special tokens",
            parameter="truncate_prompt_tokens",
            value=limit,
        )
    body = tokens[len(first) : len(tokens) - len(last)]
    side = params.truncation_side or ("right" if params.pools else "left")
    body = body[-room:] if side == "left" else body[:room]
    return [*first, *body, *last] if first or last else body
