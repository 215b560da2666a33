"""Forms in which a prompt may arrive, and the rendered form that the engine works with.

A raw prompt is a string, a list of token ids, or a dict (`TextPrompt`, `TokensPrompt`). Rendering
turns it into a `RenderedPrompt`: token ids, ready to be admitted.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NotRequired, TypedDict, cast

from tellin.checks import check_bool, check_float, check_int, check_str
from tellin.engine.mm_inputs import ImageItem, read_items
from tellin.exceptions import InvalidParameterError, InvalidTypeError, UnsupportedFeatureError
from tellin.sampling_params import PoolingParams


class TextPrompt(TypedDict, total=False):
    """A prompt as text.

    With a model that sees images: ``multi_modal_data={"image": picture or list of pictures}``, and
    the model's placeholder in the text where each belongs. A picture is a PIL image, a uint8 array
    ``[height, width, 3]``, the bytes of an image file, or a ``data:`` URL.
    """

    prompt: str
    multi_modal_data: Mapping[str, Any]
    multi_modal_uuids: Mapping[str, Any]
    """Names of the pictures: what came first under a name counts, later its data may be None."""
    cache_salt: str


class TokensPrompt(TypedDict, total=False):
    """A prompt as token ids, with its text if known."""

    prompt_token_ids: list[int]
    prompt: str
    multi_modal_data: Mapping[str, Any]
    multi_modal_uuids: Mapping[str, Any]
    cache_salt: str
    token_type_ids: list[int]
    """Of a pair of texts, for cross-encoders: 0 for tokens of the first, then 1."""


class EmbedsPrompt(TypedDict, total=False):
    """A prompt as embeddings, for engines with ``enable_prompt_embeds``.

    ``prompt_embeds`` is an array or a torch tensor ``[num_tokens, hidden_size]``: what the model's
    input embeddings (``get_input_embeddings()`` in transformers) give for tokens, or any rows in
    their place. ``prompt`` is their text, if they have one; it is shown and not read.
    """

    prompt_embeds: Any
    prompt: str
    cache_salt: str


Prompt = str | list[int] | TextPrompt | TokensPrompt | EmbedsPrompt | Mapping[str, Any]
"""A raw prompt."""


class MultiModalItems(TypedDict):
    """Items of one modality in a rendered prompt, in order of appearance."""

    data: list[Any]
    hashes: list[str]
    placeholders: list[tuple[int, int]]
    """``(offset, length)`` in prompt tokens."""
    embed_runs: NotRequired[list[list[tuple[int, int]]]]
    """Of each item: which positions of its span take rows (`tellin.protocol.MultiModalFeature`)."""
    grids: NotRequired[list[tuple[int, int] | None]]
    """Of each item: rows and columns of its rows, where positions count by them."""
    shapes: NotRequired[list[list[tuple[int, int]] | None]]
    """Of each item: those of each of its tiles, where tiles have shapes of their own."""


class RenderedPrompt(TypedDict, total=False):
    """A tokenised prompt. ``type``: token, multimodal, or embeds, whose ids are all 0."""

    type: Literal["token", "multimodal", "embeds"]
    prompt_token_ids: list[int]
    prompt: str | None
    cache_salt: str | None
    arrival_time: float
    num_truncated_tokens: int
    mm_items: dict[str, MultiModalItems]
    token_type_ids: list[int]
    """Of a pair of texts: 0 for tokens of the first, then 1 for those of the second."""
    prompt_embeds: Any
    """Rows in the place of tokens: see `tellin.engine.prompt_embeds`."""


@dataclass(frozen=True)
class TokenizeParams:
    """How to turn a text into token ids."""

    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    """Keep at most this many tokens; -1 = as many as the context holds (with one of output)."""
    truncation_side: str | None = None
    """Side that is cut off; None = left, or right where the prompt is pooled."""
    pools: bool = False
    """For an embedding: the context needs no room for output, special tokens are never cut."""

    def with_options(self, options: Mapping[str, Any] | None) -> TokenizeParams:
        """These, changed by what a caller gave as ``tokenization_kwargs``.

        Raises:
            InvalidParameterError: an unknown name or a bad value.
        """
        if options is None:
            return self
        if not isinstance(options, Mapping):
            raise InvalidTypeError(
                f"tokenization_kwargs must be a dict, got {options!r}",
                parameter="tokenization_kwargs",
                value=options,
            )
        known = ("add_special_tokens", "truncate_prompt_tokens", "truncation_side")
        for name in options:
            if name not in known:
                raise InvalidParameterError(
                    f"unknown tokenization option {name!r}; known: {', '.join(known)}",
                    parameter=name,
                )
        add_special = options.get("add_special_tokens", self.add_special_tokens)
        limit = options.get("truncate_prompt_tokens", self.truncate_prompt_tokens)
        side = options.get("truncation_side", self.truncation_side)
        check_bool("add_special_tokens", add_special)
        if limit is not None:
            limit = check_int("truncate_prompt_tokens", limit, -1)
            if limit == 0:
                raise InvalidParameterError(
                    "truncate_prompt_tokens must be -1 or at least 1, got 0",
                    parameter="truncate_prompt_tokens",
                    value=0,
                )
        if side not in (None, "left", "right"):
            raise InvalidParameterError(
                f"truncation_side must be left or right, got {side!r}",
                parameter="truncation_side",
                value=side,
            )
        return TokenizeParams(add_special, limit, side, self.pools)


COMPLETION_TOKENIZE_PARAMS = TokenizeParams()
POOLING_TOKENIZE_PARAMS = TokenizeParams(pools=True)
CHAT_TOKENIZE_PARAMS = TokenizeParams(add_special_tokens=False)
"""The chat template writes special tokens itself."""


_RAW_KEYS = frozenset(
    {
        "prompt",
        "prompt_token_ids",
        "token_type_ids",
        "cache_salt",
        "prompt_embeds",
        "multi_modal_data",
        "multi_modal_uuids",
        "mm_processor_kwargs",
        "encoder_prompt",
        "decoder_prompt",
    }
)


def is_rendered(prompt: Any) -> bool:
    return isinstance(prompt, dict) and prompt.get("type") in ("token", "multimodal", "embeds")


def check_rendered(prompt: Mapping[str, Any]) -> RenderedPrompt:
    """A rendered prompt that may have been written by hand, as a new one.

    Raises:
        InvalidTypeError, InvalidParameterError: naming what is wrong in it.
    """
    _check_keys(prompt, frozenset(RenderedPrompt.__annotations__), "a rendered prompt")
    result = cast("RenderedPrompt", dict(prompt))
    embeds = prompt.get("prompt_embeds")
    if (embeds is None) == (prompt["type"] == "embeds"):
        raise InvalidTypeError(
            "a rendered prompt has prompt_embeds if its type is 'embeds', and only then",
            parameter="prompt_embeds",
        )
    if embeds is None:
        result["prompt_token_ids"] = check_token_ids(prompt.get("prompt_token_ids"))
    _check_text(prompt.get("prompt"), prompt.get("cache_salt"))
    types = prompt.get("token_type_ids") if embeds is None else None
    if types is not None:
        result["token_type_ids"] = _check_token_types(types, len(result["prompt_token_ids"]))
    arrival_time = prompt.get("arrival_time")
    if arrival_time is not None:
        check_float("arrival_time", arrival_time, 0, math.inf)
    if not isinstance(prompt.get("mm_items") or {}, Mapping):
        raise InvalidTypeError(
            f"mm_items must be a dict of modalities, got {prompt['mm_items']!r:.80}",
            parameter="mm_items",
        )
    return result


def _check_token_types(types: Any, num_tokens: int) -> list[int]:
    is_list = isinstance(types, list | tuple) and all(type(one) is int for one in types)
    if not is_list or len(types) != num_tokens or list(types) != sorted(types):
        raise InvalidParameterError(
            f"token_type_ids must be {num_tokens} integers, one for each token: 0 for the first "
            "text of a pair, then 1",
            parameter="token_type_ids",
        )
    if types and (types[0] < 0 or types[-1] > 1):
        raise InvalidParameterError(
            f"token_type_ids are 0 or 1, got {types[0] if types[0] < 0 else types[-1]}",
            parameter="token_type_ids",
        )
    return list(types)


def note_token_types(params: PoolingParams, prompt: RenderedPrompt) -> None:
    """Put into ``params`` where the second text of a pair begins, for the worker."""
    types = prompt.get("token_type_ids")
    if types is not None and 1 in types:
        start = types.index(1)
        params.extra_kwargs = {**(params.extra_kwargs or {}), "compressed_token_type_ids": start}


def _check_keys(prompt: Mapping[str, Any], known: frozenset[str], what: str) -> None:
    unknown = [key for key in prompt if key not in known]
    if unknown:
        raise InvalidParameterError(
            f"unknown key {unknown[0]!r} in {what}; known are {', '.join(sorted(known))}",
            parameter="prompt",
            value=unknown[0],
        )


def _check_text(text: Any, salt: Any) -> None:
    for name, value in (("prompt", text), ("cache_salt", salt)):
        if value is not None:
            check_str(name, value)
    if salt == "":
        raise InvalidParameterError(
            "cache_salt must not be empty; leave it out instead", parameter="cache_salt", value=""
        )


def is_token_ids(prompt: Any) -> bool:
    """Whether a list is meant as token ids, judged by its first element."""
    return isinstance(prompt, list | tuple) and bool(prompt) and _is_integer(prompt[0])


def _is_integer(value: Any) -> bool:
    if isinstance(value, bool):
        return False
    try:
        operator.index(value)
    except TypeError:  # all arrays have an __index__, which works for some
        return False
    return True


def check_token_ids(ids: Any) -> list[int]:
    """A new list of plain ints.

    Raises:
        InvalidTypeError: not a list, or an element is not an integer.
    """
    if not isinstance(ids, list | tuple):
        raise InvalidTypeError(
            f"prompt_token_ids must be a list of integers, got {type(ids).__name__}",
            parameter="prompt_token_ids",
            value=ids,
        )
    if set(map(type, ids)) <= {int}:
        return list(ids)
    for position, item in enumerate(ids):
        if not _is_integer(item):
            raise InvalidTypeError(
                f"prompt_token_ids[{position}] must be an integer, got {item!r} "
                f"({type(item).__name__})",
                parameter="prompt_token_ids",
                value=item,
            )
    return [operator.index(item) for item in ids]


@dataclass(frozen=True)
class ParsedPrompt:
    """A raw prompt taken apart: ``embeds`` drive rendering, else ``token_ids``, else ``text``."""

    text: str | None
    token_ids: list[int] | None
    cache_salt: str | None = None
    images: list[ImageItem] = field(default_factory=list)
    token_type_ids: list[int] | None = None
    embeds: Any = None


def parse_prompt(prompt: Any) -> ParsedPrompt:
    """Understand a raw prompt.

    Raises:
        InvalidTypeError: it is not one of the accepted forms.
        UnsupportedFeatureError: an encoder-decoder pair, or other data than images.
    """
    if isinstance(prompt, str):
        return ParsedPrompt(prompt, None)
    if isinstance(prompt, list | tuple):
        if prompt and isinstance(prompt[0], str | list | tuple | Mapping):
            raise InvalidTypeError(
                "one prompt is wanted, a text or a list of token ids, got a list of "
                f"{type(prompt[0]).__name__}; only generate() and embed() take several at a time",
                parameter="prompt",
                value=prompt,
            )
        return ParsedPrompt(None, check_token_ids(prompt))
    if not isinstance(prompt, Mapping):
        raise InvalidTypeError(
            "a prompt must be a string, a list of token ids, or a dict with 'prompt', "
            f"'prompt_token_ids' or 'prompt_embeds'; got {type(prompt).__name__}",
            parameter="prompt",
            value=prompt,
        )
    for name, what in (
        ("encoder_prompt", "encoder-decoder prompts are"),
        ("decoder_prompt", "encoder-decoder prompts are"),
    ):
        value = prompt.get(name)
        if value is not None and not (isinstance(value, Mapping) and not value):
            raise UnsupportedFeatureError(f"{what} not supported by this model ({name} was given)")
    if prompt.get("mm_processor_kwargs"):
        raise UnsupportedFeatureError(
            "mm_processor_kwargs is for all prompts of an engine: give it when the engine starts"
        )
    if prompt.get("prompt_embeds") is not None:
        return _parse_embeds(prompt)
    text, ids, salt = (prompt.get(k) for k in ("prompt", "prompt_token_ids", "cache_salt"))
    if text is None and ids is None:
        raise InvalidTypeError(
            "a prompt dict needs 'prompt' (text), 'prompt_token_ids' or 'prompt_embeds'; "
            f"got the keys {sorted(map(str, prompt))}",
            parameter="prompt",
        )
    _check_text(text, salt)
    _check_keys(prompt, _RAW_KEYS, "a prompt")
    images = read_items(prompt.get("multi_modal_data"), prompt.get("multi_modal_uuids"))
    token_ids = None if ids is None else check_token_ids(ids)
    types = prompt.get("token_type_ids")
    if types is not None:
        if token_ids is None or images:
            raise InvalidParameterError(
                "token_type_ids go with prompt_token_ids alone: one for each token",
                parameter="token_type_ids",
            )
        types = _check_token_types(types, len(token_ids))
    return ParsedPrompt(text, token_ids, salt, images, types)


def _parse_embeds(prompt: Mapping[str, Any]) -> ParsedPrompt:
    """A prompt of embeddings, with nothing beside them that says what the prompt is."""
    _check_keys(prompt, _RAW_KEYS, "a prompt")
    for name in ("prompt_token_ids", "token_type_ids", "multi_modal_data", "multi_modal_uuids"):
        if prompt.get(name):
            raise InvalidParameterError(
                f"prompt_embeds and {name} cannot be given together: the embeddings are the whole "
                "prompt",
                parameter=name,
            )
    text, salt = prompt.get("prompt"), prompt.get("cache_salt")
    _check_text(text, salt)
    return ParsedPrompt(text, None, salt, embeds=prompt["prompt_embeds"])


def prompts_to_list(prompts: Any) -> list[Any]:
    """One prompt or a sequence of prompts, as a list.

    A string, a dict, or a non-empty list that starts with an integer is one prompt.
    """
    if isinstance(prompts, str | bytes | Mapping) or is_token_ids(prompts):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise InvalidTypeError(
            f"prompts must be a prompt or a list of prompts, got {type(prompts).__name__}",
            parameter="prompts",
            value=prompts,
        )
    return list(prompts)


def conversations_to_list(messages: Any) -> list[list[dict[str, Any]]]:
    """One conversation (a non-empty list that starts with a dict) or several, as a list."""
    if not isinstance(messages, list | tuple):
        raise InvalidTypeError(
            "messages must be a list of {'role': ..., 'content': ...} or a list of such lists, "
            f"got {type(messages).__name__}",
            parameter="messages",
            value=messages,
        )
    if messages and isinstance(messages[0], Mapping):
        return [list(messages)]
    return list(messages)
