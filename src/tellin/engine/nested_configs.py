"""Configurations inside the engine's arguments: from dicts that users write to checked objects.

Part of `tellin.engine.arg_utils`. Every value is checked here, before weights are loaded, and an
error names it as the user wrote it: ``speculative_config.method``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

from tellin.checks import check_bool, check_float, check_int, check_int_list, check_str
from tellin.config import ModelConfig, ReasoningConfig, SpeculativeConfig, StructuredOutputsConfig
from tellin.exceptions import InvalidParameterError, InvalidTypeError, UnsupportedFeatureError

MAX_DRAFT_TOKENS = 128
MAX_LOOKUP = 2**31 - 1
MAX_TREE_DEPTH = 2**31 - 1
MAX_CACHED_REQUESTS = 2**31 - 1
DEFAULT_TREE_DEPTH = 24
SPECULATIVE_METHODS = ("ngram", "suffix", "draft_model", "mtp")
_MTP_NAMES = (
    "deepseek_mtp",
    "ernie_mtp",
    "glm4_moe_lite_mtp",
    "glm4_moe_mtp",
    "mimo_mtp",
    "qwen3_5_mtp",
    "qwen3_next_mtp",
)
"""vLLM's names for method mtp of single families."""
LOOKUP_POLICIES = ("earliest", "most_recent")

_T = TypeVar("_T")


def structured_outputs_config(given: Any) -> StructuredOutputsConfig:
    """Of a dict, or as it is. Raises InvalidParameterError, UnsupportedFeatureError."""
    config = config_from_dict("structured_outputs_config", StructuredOutputsConfig, given)
    if config is not None and config.reasoning_parser is not None:
        raise UnsupportedFeatureError(
            f"structured_outputs_config.reasoning_parser={config.reasoning_parser!r} is not "
            "supported: say where thoughts begin and end with reasoning_config"
        )
    if config is not None:
        for name in ("enable_in_reasoning", "disable_any_whitespace"):
            check_bool(f"structured_outputs_config.{name}", getattr(config, name))
        check_float(
            "structured_outputs_config.compile_timeout_s",
            config.compile_timeout_s,
            0,
            1e6,
            open_low=True,
        )
        if config.backend not in ("auto", "guidance"):
            raise UnsupportedFeatureError(
                f"structured_outputs_config.backend={config.backend!r} is not supported: grammars "
                "are compiled by llguidance; use 'guidance', or leave it out"
            )
    return config or StructuredOutputsConfig()


def reasoning_config(given: Any, path: Path, model: ModelConfig) -> ReasoningConfig | None:
    """The markers as ids: those given, or what the tokenizer makes of their texts."""
    config = config_from_dict("reasoning_config", ReasoningConfig, given)
    if config is None:
        return None
    tokenizer: Any = None
    found: dict[str, tuple[int, ...]] = {}
    for name in ("think_start", "think_end"):
        option = f"reasoning_config.{name}_token_ids"
        ids = tuple(check_int_list(option, getattr(config, f"{name}_token_ids")))
        if not ids:
            if model.skip_tokenizer_init:
                raise InvalidParameterError(
                    f"reasoning_config.{name}_token_ids must be given: there is no tokenizer",
                    parameter="reasoning_config",
                )
            if tokenizer is None:
                from tellin.loading import load_tokenizer

                tokenizer = load_tokenizer(model.tokenizer_path or path)
            text = check_str(f"reasoning_config.{name}_str", getattr(config, f"{name}_str"))
            ids = tuple(tokenizer.encode(text, add_special_tokens=False)) if text else ()
        if not ids or not all(0 <= i < model.vocab_size for i in ids):
            raise InvalidParameterError(
                f"reasoning_config.{name} must be at least one id below {model.vocab_size}, "
                f"got {list(ids)}",
                parameter="reasoning_config",
                value=list(ids),
            )
        found[f"{name}_token_ids"] = ids
    return dataclasses.replace(
        config,
        think_start_token_ids=found["think_start_token_ids"],
        think_end_token_ids=found["think_end_token_ids"],
    )


def speculative_config(
    given: Any, target: str = "", target_path: Path | None = None
) -> SpeculativeConfig | None:
    """Of a dict, in which what follows may be left out, or as it is.

    Args:
        target: the engine's model as the user wrote it; method mtp may name it.
        target_path: where that is.

    Raises:
        InvalidTypeError, InvalidParameterError: naming the option.
    """
    if isinstance(given, Mapping):
        given = _complete_speculative(given)
    config = config_from_dict("speculative_config", SpeculativeConfig, given)
    if config is None:
        return None
    check_choice("speculative_config.method", config.method, SPECULATIVE_METHODS)
    wanted = config.num_speculative_tokens
    check_int("speculative_config.num_speculative_tokens", wanted, 1, MAX_DRAFT_TOKENS)
    if config.method == "mtp" and config.model is not None:
        config = _without_own_model(config, target, target_path)
    if (config.method == "draft_model") != (config.model is not None):
        raise InvalidParameterError(
            "speculative_config.model is needed by method 'draft_model' and by no other, got "
            f"method={config.method!r}, model={config.model!r}",
            parameter="speculative_config.model",
            value=config.model,
        )
    _check_drafters(config)
    return config


def _without_own_model(
    config: SpeculativeConfig, target: str, target_path: Path | None
) -> SpeculativeConfig:
    """Of method mtp: ``model`` may only say again which model the engine has."""
    named = str(config.model)
    is_target = named == target
    if not is_target and target_path is not None:
        is_target = Path(named).resolve() == target_path.resolve()
    if not is_target:
        raise InvalidParameterError(
            "speculative_config.method='mtp' drafts with a layer of the engine's own model "
            f"({target!r}), got model={named!r}; leave model out, or use method 'draft_model'",
            parameter="speculative_config.model",
            value=config.model,
        )
    return dataclasses.replace(config, model=None)


def _complete_speculative(given: Mapping[str, Any]) -> dict[str, Any]:
    """Method, number of tokens and lengths of n-grams, where others say what they are."""
    options = dict(given)
    if options.get("num_speculative_tokens") is None:
        options.pop("num_speculative_tokens", None)
    if options.get("method") is None and options.get("model") is not None:
        options["method"] = "draft_model"
        if options["model"] in ("ngram", "[ngram]"):
            options["method"], options["model"] = "ngram", None
    if options.get("method") in _MTP_NAMES:
        options["method"] = "mtp"
    if options.get("method") == "mtp":
        options.setdefault("num_speculative_tokens", 1)
    if options.get("method") == "suffix":
        depth = options.get("suffix_decoding_max_tree_depth", DEFAULT_TREE_DEPTH)
        is_depth = isinstance(depth, int) and depth > 0  # what is none is refused by its own name
        options.setdefault(
            "num_speculative_tokens", min(depth, MAX_DRAFT_TOKENS) if is_depth else 1
        )
    lengths = ("prompt_lookup_min", "prompt_lookup_max")
    for name, other in (lengths, lengths[::-1]):
        if options.get(name) is None:
            options.pop(name, None)
            if options.get(other) is not None:
                options[name] = options[other]
    return options


def _check_drafters(config: SpeculativeConfig) -> None:
    """Options of single methods, whichever is used."""
    prefix = "speculative_config."
    low = check_int(prefix + "prompt_lookup_min", config.prompt_lookup_min, 1, MAX_LOOKUP)
    check_int(prefix + "prompt_lookup_max", config.prompt_lookup_max, low, MAX_LOOKUP)
    check_choice(prefix + "prompt_lookup_policy", config.prompt_lookup_policy, LOOKUP_POLICIES)
    check_bool(prefix + "adaptive", config.adaptive)
    name = "suffix_decoding_max_tree_depth"
    check_int(prefix + name, config.suffix_decoding_max_tree_depth, 1, MAX_TREE_DEPTH)
    name = "suffix_decoding_max_cached_requests"
    check_int(prefix + name, config.suffix_decoding_max_cached_requests, 0, MAX_CACHED_REQUESTS)
    name = "suffix_decoding_max_spec_factor"
    check_float(prefix + name, config.suffix_decoding_max_spec_factor, 0, 1e6)
    name = "suffix_decoding_min_token_prob"
    check_float(prefix + name, config.suffix_decoding_min_token_prob, 0, 1)


def config_from_dict(name: str, cls: type[_T], given: Any) -> _T | None:
    """A configuration object from a dict, or as it is.

    Raises:
        InvalidTypeError, InvalidParameterError: it is neither, or a key is unknown or missing.
    """
    if given is None or isinstance(given, cls):
        return given
    if not isinstance(given, Mapping):
        raise InvalidTypeError(
            f"{name} must be a dict or a {cls.__name__}, got {type(given).__name__}",
            parameter=name,
            value=given,
        )
    known = {field.name for field in dataclasses.fields(cast("Any", cls))}
    unknown = sorted(set(given) - known)
    if unknown:
        raise InvalidParameterError(
            f"unknown key {unknown[0]!r} in {name}; known: {', '.join(sorted(known))}",
            parameter=f"{name}.{unknown[0]}",
        )
    for item in dataclasses.fields(cast("Any", cls)):
        if item.default is dataclasses.MISSING and item.name not in given:
            raise InvalidParameterError(
                f"{name}.{item.name} is missing; it is required", parameter=f"{name}.{item.name}"
            )
    return cls(**given)


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raise InvalidParameterError unless it is among the choices."""
    if value not in choices:
        raise InvalidParameterError(
            f"{name} must be one of {', '.join(choices)}, got {value!r}",
            parameter=name,
            value=value,
        )
