"""Requests for the core that somebody else than the input processor built (deprecated)."""

from __future__ import annotations

from tellin.engine.prompts import RenderedPrompt
from tellin.exceptions import InvalidParameterError, InvalidTypeError, UnsupportedFeatureError
from tellin.protocol import EngineCoreRequest, MultiModalFeature


def prompt_of(request: EngineCoreRequest) -> RenderedPrompt:
    """What the admission gate takes as the prompt of ``request``.

    Raises:
        InvalidParameterError, InvalidTypeError: the request contradicts itself.
        UnsupportedFeatureError: it asks for more input later, or mixes ids and embeddings.
    """
    for one, other in (
        ("sampling_params", "pooling_params"),
        ("prompt_token_ids", "prompt_embeds"),
    ):
        has_one, has_other = (getattr(request, name) is not None for name in (one, other))
        if has_one == has_other:
            got = "both" if has_one else "neither"
            raise InvalidParameterError(
                f"an EngineCoreRequest has {one} or {other}, got {got}",
                parameter=one,
            )
    if request.resumable or request.prompt_is_token_ids is not None:
        raise UnsupportedFeatureError(
            "streaming input (resumable) and prompts of ids mixed with embeddings "
            "(prompt_is_token_ids) are not supported; leave them out"
        )
    items = request.mm_features or []
    if not isinstance(items, list) or not all(isinstance(i, MultiModalFeature) for i in items):
        raise InvalidTypeError(
            f"mm_features must be a list of MultiModalFeature, got {items!r:.80}",
            parameter="mm_features",
        )
    salt = request.cache_salt
    if request.prompt_embeds is not None:
        embeds = request.prompt_embeds
        return RenderedPrompt(type="embeds", prompt_embeds=embeds, cache_salt=salt)
    ids = list(request.prompt_token_ids or ())
    return RenderedPrompt(type="token", prompt_token_ids=ids, cache_salt=salt)
