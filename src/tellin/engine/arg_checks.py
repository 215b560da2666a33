"""Checks of engine arguments that need no model: types, and values that can be tried out at once.

Part of `tellin.engine.arg_utils`, which checks ranges where it resolves values. Everything here
raises before a file is opened.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tellin.checks import check_bool, check_str
from tellin.config import EngineArgs, ModelConfig, SpeculativeConfig
from tellin.exceptions import InvalidParameterError, InvalidTypeError, UnsupportedFeatureError

_FILLED_IN_LATER = ("eos_token_id", "all_stop_token_ids", "bad_words_token_ids")

_METRICS_PREFIX = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")


def check_arg_types(args: EngineArgs) -> None:
    """Refuse what is no bool, string or path where one is declared.

    Raises:
        InvalidTypeError: naming the argument.
    """
    for name, hint in typing.get_type_hints(EngineArgs).items():
        value = getattr(args, name)
        kinds = set(typing.get_args(hint)) or {hint}
        if value is None and type(None) in kinds:
            continue
        kinds.discard(type(None))
        if kinds == {bool}:
            check_bool(name, value)
        elif kinds == {str}:
            check_str(name, value)
        elif kinds == {str, Path} and not isinstance(value, str | Path):
            raise InvalidTypeError(
                f"{name} must be a string or a path, got {value!r} ({type(value).__name__})",
                parameter=name,
                value=value,
            )
    if not _METRICS_PREFIX.fullmatch(args.metrics_prefix):
        raise InvalidParameterError(
            "metrics_prefix must consist of letters, digits, '_' and ':', and not start with a "
            f"digit; got {args.metrics_prefix!r}",
            parameter="metrics_prefix",
            value=args.metrics_prefix,
        )


def check_logits_processors(given: Any) -> tuple[Any, ...]:
    """The classes, or their names, after a try to load them.

    Raises:
        InvalidTypeError: it is no list.
        InvalidParameterError: one is no logits processor.
    """
    if given is None:
        return ()
    if not isinstance(given, list | tuple):
        raise InvalidTypeError(
            f"logits_processors must be a list of classes or 'module:Class' names, got {given!r}",
            parameter="logits_processors",
            value=given,
        )
    if given:
        from tellin.logits_processor import load_logits_processors

        load_logits_processors(given)
    return tuple(given)


def check_chat_template(given: str | None) -> str | None:
    """Jinja text: given as such, or in a file. Text that cannot be a file name is a template.

    Raises:
        InvalidParameterError: it is neither, or no valid Jinja.
    """
    if given is None:
        return None
    text = given if "{" in given or "\n" in given else _read_template(given)
    from tellin.loading.chat_template import compile_template

    compile_template(text)
    return text


def _read_template(given: str) -> str:
    try:
        return Path(given).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError, RuntimeError) as exc:  # the last: a home of nobody (~nobody/)
        raise InvalidParameterError(
            f"chat_template={given!r} is neither a Jinja template nor a readable file: {exc}",
            parameter="chat_template",
            value=given,
        ) from None


def check_generation_overrides(given: Any, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """``defaults`` with ``given`` on top, after a try to make sampling parameters of them.

    Raises:
        InvalidTypeError: ``given`` is no dict.
        InvalidParameterError: a name is unknown, or a value impossible.
    """
    if given is None:
        return dict(defaults)
    from tellin.sampling_params import SamplingParams

    if not isinstance(given, Mapping):
        raise InvalidTypeError(
            f"override_generation_config must be a dict, got {given!r}",
            parameter="override_generation_config",
            value=given,
        )
    overrides = dict(given)
    if "max_new_tokens" in overrides:
        overrides["max_tokens"] = overrides.pop("max_new_tokens")
    known = [name for name in SamplingParams.__struct_fields__ if name not in _FILLED_IN_LATER]
    for name in overrides:
        if name not in known:
            raise InvalidParameterError(
                f"unknown key {name!r} in override_generation_config; known are the fields of "
                f"SamplingParams and max_new_tokens, for example {', '.join(known[:8])}",
                parameter="override_generation_config",
                value=name,
            )
    result = dict(defaults) | overrides
    try:
        SamplingParams.from_optional(**result)
    except (InvalidParameterError, InvalidTypeError) as error:
        raise InvalidParameterError(
            f"override_generation_config does not make valid sampling parameters: {error}",
            parameter="override_generation_config",
            value=given,
        ) from error
    return result


def check_prompt_embeds(
    enabled: bool,
    model: ModelConfig,
    speculation: SpeculativeConfig | None,
    looks_up_inputs: bool = False,
) -> None:
    """Refuse ``enable_prompt_embeds`` where rows cannot take the place of tokens.

    ``looks_up_inputs``: every layer of the model looks up something by token id.

    Raises:
        UnsupportedFeatureError: the model pools, or needs ids, or has a draft model, which does.
    """
    if not enabled:
        return
    if looks_up_inputs:
        raise UnsupportedFeatureError(
            "enable_prompt_embeds does not suit this model: each of its layers looks up an input "
            "by token id; leave it out"
        )
    if model.runner_type == "pooling":
        raise UnsupportedFeatureError(
            "enable_prompt_embeds is for models that generate; this one pools (runner='pooling'): "
            "leave it out, or use runner='both'"
        )
    if speculation is not None and speculation.has_weights:
        raise UnsupportedFeatureError(
            f"speculative_config.method={speculation.method!r} does not go with "
            "enable_prompt_embeds: it drafts from token ids; use 'ngram' or 'suffix'"
        )
