"""From a request to `SamplingParams`: its own values, else the model's, else OpenAI's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tellin.checks import check_int
from tellin.entrypoints.openai.errors import bad_request
from tellin.entrypoints.openai.requests import GenerationRequest
from tellin.sampling_params import (
    GREEDY_EPS,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)

MAX_N = 128
"""Most choices per prompt, as at OpenAI."""

SAMPLING_FIELDS = (
    "seed",
    "stop",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "min_tokens",
    "stop_token_ids",
    "bad_words",
    "allowed_token_ids",
    "ignore_eos",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
    "prompt_logprobs",
    "thinking_token_budget",
)
"""Names that mean the same in a request and in `SamplingParams`."""


def make_sampling_params(
    request: GenerationRequest,
    defaults: Mapping[str, Any],
    *,
    max_tokens: int | None,
    logprobs: int | None,
    constraint: StructuredOutputsParams | None = None,
    **overrides: Any,
) -> SamplingParams:
    """The parameters for the engine.

    Args:
        defaults: shipped with the model.
        max_tokens: None = the model's default, else up to the context limit.
        constraint: what the request's tools force.
        overrides: win over everything.

    Raises:
        InvalidParameterError: a value is out of range; ``parameter`` names it.
    """
    values: dict[str, Any] = {"max_tokens": None, **defaults}
    for name in SAMPLING_FIELDS:
        value = getattr(request, name)
        if value is not None:
            values[name] = value
    if max_tokens is not None:
        values["max_tokens"] = max_tokens
    if request.repetition_detection is not None:
        values["repetition_detection"] = request.repetition_detection.model_dump()
    if request.vllm_xargs is not None:
        values["extra_args"] = request.vllm_xargs
    values["logprobs"] = logprobs
    values["structured_outputs"] = constraint or _constraint(request)
    kind = RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY
    return SamplingParams(**{**values, "output_kind": kind, **overrides})


def _constraint(request: GenerationRequest) -> StructuredOutputsParams | None:
    if request.structured_outputs is not None:
        given = request.structured_outputs.model_dump(by_alias=True, exclude_none=True)
        return StructuredOutputsParams(**given)
    response_format = request.response_format
    if response_format is None or response_format.type == "text":
        return None
    if response_format.json_schema is None:
        return StructuredOutputsParams(json_object=True)
    return StructuredOutputsParams(json=response_format.json_schema.schema_)


def check_best_of(request: GenerationRequest) -> None:
    """Raise 400 for an old parameter that asks for more completions than are returned."""
    n = 1 if request.n is None else request.n
    if request.best_of not in (None, 1, n):
        raise bad_request(
            f"best_of={request.best_of} is not supported; leave it out or set it to n ({n})",
            "best_of",
        )


def split_n(request: GenerationRequest, defaults: Mapping[str, Any]) -> tuple[int, int]:
    """Choices per prompt, and how many of them one engine request makes.

    Greedy choices are equal, so the engine makes them one by one.
    """
    n = check_int("n", 1 if request.n is None else request.n, 1, MAX_N)
    temperature = request.temperature
    if temperature is None:
        temperature = defaults.get("temperature", 1.0)
    return n, 1 if temperature < GREEDY_EPS else n
