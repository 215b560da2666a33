"""Errors as HTTP answers, in OpenAI's shape or, where its API was asked, in Anthropic's.

Every exception maps to one status and one body. What the client did is 4xx; 500 is left for bugs.
Messages of unexpected exceptions stay in the log.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from tellin import exceptions
from tellin.entrypoints.openai import requests
from tellin.entrypoints.openai.requests import UNSUPPORTED

_MAX_NAME = 100
"""Characters of a client's own name that an answer repeats."""
_BODIES = frozenset(
    name
    for name, value in vars(requests).items()
    if isinstance(value, type) and issubclass(value, BaseModel)
)
MESSAGES_PATH = "/v1/messages"
"""Below it answers have the shapes of Anthropic's API."""
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
RETRY_AFTER_S = 1
"""What an overloaded server asks clients to wait."""


@dataclass
class ApiError(Exception):
    """An answer that is an error."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    type: str = "invalid_request_error"
    headers: dict[str, str] = field(default_factory=dict)

    def body(self, path: str = "") -> dict[str, Any]:
        """The JSON body that clients of a path understand."""
        if path.startswith(MESSAGES_PATH):
            kind = _ANTHROPIC_TYPES.get(self.status, "api_error")
            return {"type": "error", "error": {"type": kind, "message": self.message}}
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }

    def encode(self, path: str = "") -> bytes:
        return msgspec.json.encode(self.body(path))


def shown(name: str) -> str:
    """A name that a client sent, as a message repeats it."""
    return repr(name) if len(name) <= _MAX_NAME else f"{name[:_MAX_NAME]!r}..."


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param, code)


def not_ready(message: str) -> ApiError:
    return ApiError(
        503,
        message,
        code="service_unavailable",
        type="server_error",
        headers={"Retry-After": str(RETRY_AFTER_S)},
    )


def to_api_error(error: BaseException) -> ApiError:
    """The answer to any exception."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ValidationError):
        return _from_validation(error)
    message = str(error)
    if isinstance(error, exceptions.ContextLengthError):
        return bad_request(message, code="context_length_exceeded")
    if isinstance(error, exceptions.InvalidParameterError):
        return bad_request(message, error.parameter, "invalid_value")
    if isinstance(error, exceptions.DuplicateRequestError):
        return ApiError(409, message, "request_id", "duplicate_request")
    if isinstance(error, exceptions.RequestError):
        return bad_request(message)
    if isinstance(error, exceptions.RequestTimeoutError):
        return ApiError(504, message, code="timeout", type="timeout_error")
    if isinstance(error, exceptions.EngineOverloadedError):
        return ApiError(
            429,
            message,
            code="engine_overloaded",
            type="rate_limit_error",
            headers={"Retry-After": str(RETRY_AFTER_S)},
        )
    if isinstance(error, exceptions.EngineError):
        return not_ready(message)
    if isinstance(error, exceptions.TellinError):
        return ApiError(500, message, code="request_failed", type="server_error")
    return ApiError(
        500,
        "the server failed on this request; its log has the cause",
        code="internal_error",
        type="server_error",
    )


_PROMPTS = ("prompt", "prompt_token_ids", "prompt_embeds")


def about(error: exceptions.RequestError, name: str) -> ApiError:
    """The answer to an error of one of several prompts; if the prompt is at fault it says which.

    Args:
        name: what the request calls the prompt: ``documents[17]``.
    """
    answer = to_api_error(error)
    is_long = isinstance(error, exceptions.ContextLengthError)
    if is_long or getattr(error, "parameter", None) in _PROMPTS:
        answer.message, answer.param = f"{name}: {answer.message}", name
    return answer


def _from_validation(error: ValidationError) -> ApiError:
    """The most telling one of a body's faults."""
    faults = error.errors(include_url=False)
    first = next((fault for fault in faults if fault["type"] == "extra_forbidden"), faults[0])
    same_field = [fault for fault in faults if fault["loc"][:1] == first["loc"][:1]]
    if first["type"] == "json_invalid":
        return bad_request(f"the body is not valid JSON: {first['msg']}", code="invalid_json")
    is_extra = first["type"] == "extra_forbidden"
    own = first["loc"][-1:] if is_extra else ()  # a name of the client's, whatever it looks like
    path = first["loc"][: len(first["loc"]) - len(own)]
    name = ".".join(str(part) for part in (*(p for p in path if not _is_type_name(p)), *own))
    if is_extra:
        reason = UNSUPPORTED.get(name)
        if reason is not None:
            return bad_request(f"{name} is not supported: {reason}", name, "unsupported_parameter")
        message = f"unknown parameter {shown(name)}: this server does not have it; leave it out"
        return bad_request(message, name[:_MAX_NAME], "unknown_parameter")
    if first["type"] == "missing":
        message = f"{name} is missing; it is required"
        return bad_request(message, name, "missing_required_parameter")
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, exceptions.InvalidParameterError):  # of several fields together
        return bad_request(str(cause), cause.parameter, "invalid_value")
    reasons = list(dict.fromkeys(_reason(fault) for fault in same_field))
    where = f"{name}: " if name else "the body: "
    return bad_request(where + "; or ".join(reasons[:4]), name or None, "invalid_value")


def _is_type_name(part: int | str) -> bool:
    """Whether a step of a fault's path names a branch of a union rather than a field."""
    return isinstance(part, str) and (
        part in ("str", "int", "float", "bool", "dict", "list") or "[" in part or part in _BODIES
    )


def _reason(fault: ErrorDetails) -> str:
    message = str(fault["msg"]).removeprefix("Value error, ")
    if fault["type"] == "value_error":
        return message
    if fault["type"] in ("model_type", "model_attributes_type", "dict_type"):
        message = "Input should be an object"
    value = fault.get("input")
    if isinstance(value, str | int | float | bool) or value is None:
        return f"{message}, got {value!r:.60}"
    return f"{message}, got {type(value).__name__}"
