"""Checks of request parameters that need the model's sizes or the engine's configuration.

Part of the admission gate (`tellin.engine.input_processor`). Each check raises a `RequestError`
that names the parameter, the value, the limit and the way out; none changes its argument.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tellin.checks import check_int
from tellin.config import EngineConfig, ModelConfig
from tellin.exceptions import (
    ContextLengthError,
    InvalidParameterError,
    UnsupportedFeatureError,
)
from tellin.logits_processor import check_by_processors
from tellin.protocol import EngineCoreReady
from tellin.sampling_params import PoolingParams, SamplingParams

POOLING_TASKS = ("embed", "classify", "token_embed", "token_classify", "score")


def check_sampling_params(
    params: SamplingParams, config: EngineConfig, *, has_tokenizer: bool
) -> None:
    """Check what does not depend on the prompt.

    Raises:
        RequestError: the first parameter that cannot be served.
    """
    model = config.model_config
    _check_num_logprobs(params, model)
    for name, ids, limit in (
        ("logprob_token_ids", params.logprob_token_ids, model.vocab_size),
        ("logit_bias", params.logit_bias, model.vocab_size),
        ("stop_token_ids", params.stop_token_ids, model.vocab_size),
        ("allowed_token_ids", params.allowed_token_ids, model.tokenizer_size),
    ):
        _check_ids(name, ids or (), limit)
    if params.n > config.settings.max_n_sequences:
        raise InvalidParameterError(
            f"n must be at most {config.settings.max_n_sequences} "
            f"(TELLIN_MAX_N_SEQUENCES), got {params.n}",
            parameter="n",
            value=params.n,
        )
    if params.thinking_token_budget is not None and config.reasoning_config is None:
        raise UnsupportedFeatureError(
            "thinking_token_budget needs to know where thoughts begin and end: start the engine "
            "with a reasoning_config, or leave it out"
        )
    check_by_processors(params, model.logits_processors)
    if not has_tokenizer:
        _check_needs_no_tokenizer(params)
    if params.structured_outputs is not None:
        from tellin.grammar_validation import validate_structured_outputs

        if not model.eos_token_ids:
            raise UnsupportedFeatureError(
                "structured_outputs needs a token that ends a text, but this model's files name "
                "none (eos_token_id)"
            )
        validate_structured_outputs(
            params.structured_outputs,
            disable_any_whitespace=config.structured_outputs_config.disable_any_whitespace,
        )


def _check_num_logprobs(params: SamplingParams, model: ModelConfig) -> None:
    limit = model.vocab_size if model.max_logprobs == -1 else model.max_logprobs
    for name in ("logprobs", "prompt_logprobs"):
        wanted = getattr(params, name)
        num = model.vocab_size if wanted == -1 else wanted
        if num is not None and num > limit:
            raise InvalidParameterError(
                f"{name}={wanted} asks for {num} entries, but the limit is {limit}; "
                "raise max_logprobs of the engine (-1 = the vocabulary)",
                parameter=name,
                value=wanted,
            )


def _check_ids(name: str, ids: Iterable[int], limit: int) -> None:
    for token_id in ids:
        if not 0 <= token_id < limit:
            raise InvalidParameterError(
                f"{name} holds token id {token_id}, but ids of this model are in [0, {limit})",
                parameter=name,
                value=token_id,
            )


def _check_needs_no_tokenizer(params: SamplingParams) -> None:
    for name in ("stop", "bad_words", "structured_outputs"):
        if getattr(params, name):
            raise UnsupportedFeatureError(
                f"{name} needs a tokenizer, but this engine has none (skip_tokenizer_init=True)"
            )


def check_contradictions(params: SamplingParams) -> None:
    """Refuse masks that together forbid every token. ``params`` is final (stop and bad-word ids).

    Raises:
        InvalidParameterError: nothing could be sampled.
    """
    if params.allowed_token_ids is None:
        return
    allowed = set(params.allowed_token_ids)
    banned = {ids[0] for ids in params.bad_words_token_ids or () if len(ids) == 1}
    if allowed <= banned:
        raise InvalidParameterError(
            f"allowed_token_ids {sorted(allowed)} are all forbidden by bad_words: "
            "nothing could be sampled",
            parameter="allowed_token_ids",
            value=params.allowed_token_ids,
        )
    if params.min_tokens > 0 and allowed - banned <= params.all_stop_token_ids:
        raise InvalidParameterError(
            f"min_tokens={params.min_tokens} forbids all allowed_token_ids {sorted(allowed)}, "
            "because each of them ends the output: nothing could be sampled",
            parameter="min_tokens",
            value=params.min_tokens,
        )


def check_prompt(token_ids: Sequence[int], vocab_size: int, max_model_len: int) -> None:
    """Check length and ids of a prompt.

    Raises:
        InvalidParameterError: it is empty, or holds an id outside the vocabulary.
        ContextLengthError: it is longer than the context.
    """
    if not token_ids:
        raise InvalidParameterError(
            "the prompt is empty; it must have at least one token", parameter="prompt"
        )
    if len(token_ids) > max_model_len:
        raise ContextLengthError(
            f"the prompt has {len(token_ids)} tokens, but the context (max_model_len) is "
            f"{max_model_len}; shorten it, raise max_model_len, or set truncate_prompt_tokens"
        )
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        offending = next(i for i in token_ids if not 0 <= i < vocab_size)
        raise InvalidParameterError(
            f"token id {offending} of the prompt is out of the vocabulary [0, {vocab_size})",
            parameter="prompt_token_ids",
            value=offending,
        )


def check_room(
    num_prompt_tokens: int,
    params: SamplingParams,
    config: EngineConfig,
    ready: EngineCoreReady | None,
) -> None:
    """Check that the output has room in the context and in the KV pool.

    Args:
        params: final, with ``max_tokens`` set.
        ready: sizes of the running core; None before it is known.

    Raises:
        ContextLengthError: it has not.
        InvalidParameterError: ``min_tokens`` exceeds the room in the context.
    """
    max_model_len = config.model_config.max_model_len
    room = max_model_len - num_prompt_tokens
    if room < 1:
        raise ContextLengthError(
            f"the prompt has {num_prompt_tokens} tokens, which fill the context of "
            f"{max_model_len}: there is no room for even one output token; shorten it by "
            f"{1 - room}"
        )
    if params.min_tokens > room:
        raise InvalidParameterError(
            f"min_tokens={params.min_tokens} does not fit: a prompt of {num_prompt_tokens} tokens "
            f"leaves {room} of the context of {max_model_len}",
            parameter="min_tokens",
            value=params.min_tokens,
        )
    if ready is None:
        return
    num_tokens = num_prompt_tokens + min(params.max_tokens or room, room)
    num_blocks = -(-num_tokens // ready.block_size)
    if num_blocks > ready.num_kv_blocks - 1:  # one block is the null block
        raise ContextLengthError(
            f"prompt ({num_prompt_tokens} tokens) and output may take {num_tokens} tokens, but the "
            f"KV cache holds {(ready.num_kv_blocks - 1) * ready.block_size}; lower max_tokens or "
            "enlarge the cache (num_kv_blocks, kv_cache_memory_bytes)"
        )


def check_pooling_params(
    params: PoolingParams, supported_tasks: Sequence[str], model: ModelConfig
) -> None:
    """Check the task and what goes with it. ``params.task`` is set.

    Raises:
        RequestError: the model cannot do it.
    """
    task = params.task
    if task not in supported_tasks:
        raise UnsupportedFeatureError(
            f"this model does not support the pooling task {task!r}; supported: "
            f"{', '.join(t for t in supported_tasks if t != 'generate') or 'none'}"
        )
    if params.dimensions is not None and task not in ("embed", "token_embed"):
        raise InvalidParameterError(
            f"dimensions is for embeddings, not for the task {task!r}",
            parameter="dimensions",
            value=params.dimensions,
        )
    if task == "token_embed" and params.skip_reading_prefix_cache is False:
        raise InvalidParameterError(
            "skip_reading_prefix_cache=False is not possible with token_embed, which needs the "
            "hidden states of all tokens; leave it out",
            parameter="skip_reading_prefix_cache",
            value=False,
        )
    if params.dimensions is not None:
        _check_dimensions(params.dimensions, model)
    start = (params.extra_kwargs or {}).get("compressed_token_type_ids")
    if start is not None:
        check_int("compressed_token_type_ids", start, 0)


def _check_dimensions(dimensions: int, model: ModelConfig) -> None:
    pooler = model.pooler_config
    if pooler is None or not pooler.is_matryoshka:
        raise InvalidParameterError(
            f"dimensions={dimensions} cuts embeddings, which this model was not trained for "
            "(its configuration does not say matryoshka_dimensions); leave it out, or set "
            "pooler_config={'is_matryoshka': true} if you know better",
            parameter="dimensions",
            value=dimensions,
        )
    sizes = pooler.matryoshka_dimensions
    longest = pooler.embedding_size or model.hidden_size
    if (sizes and dimensions not in sizes) or dimensions > longest:
        allowed = ", ".join(map(str, sizes)) if sizes else f"1 to {longest}"
        raise InvalidParameterError(
            f"dimensions={dimensions} is not possible; this model can do {allowed}",
            parameter="dimensions",
            value=dimensions,
        )
