"""Two texts as one prompt, as cross-encoders read them: a query and a document.

The model's post-processor decides which special tokens stand around and between them, and each
token's type. Knows no requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tellin.exceptions import InvalidParameterError, InvalidTypeError

if TYPE_CHECKING:
    from tellin.engine.renderer import ChatTokenizer

TextPair = tuple[str, str]


def pair_of(first: Any, second: Any) -> TextPair:
    """Two prompts as texts.

    Raises:
        InvalidTypeError: one of them is neither a text nor a dict with ``prompt``.
    """
    return _text(first), _text(second)


def _text(prompt: Any) -> str:
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    if not isinstance(text, str):
        raise InvalidTypeError(
            "a cross-encoder scores pairs of texts; give strings, or dicts with 'prompt', not "
            f"{type(prompt).__name__}",
            parameter="prompt",
            value=prompt,
        )
    return text


def encode_pair(
    tokenizer: ChatTokenizer,
    pair: TextPair,
    *,
    add_special_tokens: bool = True,
    limit: int | None = None,
    truncation_side: str = "right",
) -> tuple[list[int], list[int], int]:
    """Ids and types of a pair's tokens, and how many tokens were cut off.

    The longer text is cut until both are equally long, then both are; never a special token.

    Raises:
        InvalidParameterError: a text cannot be tokenised, or ``limit`` leaves no room.
    """
    backend = tokenizer.backend
    first, second = (_encode(tokenizer, text) for text in pair)
    num_cut = 0
    if limit is not None:
        num_special = backend.num_special_tokens_to_add(True) if add_special_tokens else 0
        room = limit - num_special
        if room < 2:
            raise InvalidParameterError(
                f"truncate_prompt_tokens={limit} leaves no room for two texts beside the model's "
                f"{num_special} special tokens",
                parameter="truncate_prompt_tokens",
                value=limit,
            )
        lengths = shares_of(len(first), len(second), room)
        num_cut = len(first) + len(second) - sum(lengths)
        for encoding, length in zip((first, second), lengths, strict=True):
            if len(encoding) > length:
                encoding.truncate(length, direction=truncation_side)
    both = backend.post_process(first, second, add_special_tokens)
    return both.ids, both.type_ids, num_cut


def _encode(tokenizer: ChatTokenizer, text: str) -> Any:
    try:
        return tokenizer.backend.encode(text, add_special_tokens=False)
    except Exception:
        tokenizer.encode(text, add_special_tokens=False)  # raises what says why
        raise


def shares_of(first: int, second: int, room: int) -> tuple[int, int]:
    """Tokens that two texts keep where there is room for ``room``: the longer one gives way.

    An odd token goes to the text that was longer, or to the second of equal ones.
    """
    if first + second <= room:
        return first, second
    short = min(first, second, room // 2)
    return (room - short, short) if first > second else (short, room - short)
