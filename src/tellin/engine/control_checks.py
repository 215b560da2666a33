"""Checks of the arguments of control calls and of what travels with a request besides its prompt.

Each returns the value as the core takes it, or raises an error that names parameter and value. All
clients of the core pass what they are given through `check_call`, before it leaves for a thread or
a process from which an error would come late.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tellin.checks import check_bool, check_float, check_int, check_str, check_str_list
from tellin.exceptions import InvalidParameterError, InvalidTypeError
from tellin.protocol import LoRARequest

MAX_LORA_ID = 2**31 - 1


def check_level(level: Any) -> int:
    """Level of `sleep`."""
    number = check_int("level", level)
    if not 0 <= number <= 2:
        raise InvalidParameterError(
            f"level must be 0, 1 or 2, got {number}", parameter="level", value=number
        )
    return number


def check_lora_request(lora_request: Any) -> LoRARequest:
    if not isinstance(lora_request, LoRARequest):
        raise InvalidTypeError(
            f"lora_request must be a LoRARequest, got {type(lora_request).__name__}",
            parameter="lora_request",
            value=lora_request,
        )
    return lora_request


def check_call(method: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments of a utility call of the core, checked.

    Raises:
        InvalidTypeError, InvalidParameterError: naming the argument.
    """
    check = _CHECKS.get(method)
    return args if check is None else check(*args)


def _sleep(level: Any, mode: Any) -> tuple[Any, ...]:
    return check_level(level), mode


def _wake_up(tags: Any) -> tuple[Any, ...]:
    return (None if tags is None else check_str_list("tags", tags),)


def _lora_request(lora_request: Any) -> tuple[Any, ...]:
    return (check_lora_request(lora_request),)


def _lora_id(lora_id: Any) -> tuple[Any, ...]:
    return (check_int("lora_id", lora_id, 1, MAX_LORA_ID),)


def _reset_prefix_cache(reset_running: Any, reset_connector: Any) -> tuple[Any, ...]:
    return (
        check_bool("reset_running_requests", reset_running),
        check_bool("reset_connector", reset_connector),
    )


def _profile(is_start: bool, prefix: Any) -> tuple[Any, ...]:
    return is_start, None if prefix is None else check_str("prefix", prefix)


def _collective_rpc(method: Any, timeout: Any, args: Any, kwargs: Any) -> tuple[Any, ...]:
    if not isinstance(method, str) and not callable(method):
        raise InvalidTypeError(
            f"method must be a worker's method name or a callable, got {method!r}",
            parameter="method",
            value=method,
        )
    if timeout is not None:
        timeout = check_float("timeout", timeout, 0, 1e9)
    if not isinstance(args, list | tuple):
        raise InvalidTypeError(
            f"args must be a tuple of arguments, got {args!r}", parameter="args", value=args
        )
    if method == "apply_model" and not (args and callable(args[0])):
        raise InvalidTypeError(
            f"apply_model needs a callable that takes the model, got {args!r}",
            parameter="func",
            value=args,
        )
    return method, timeout, tuple(args), check_mapping("kwargs", kwargs)


_CHECKS: dict[str, Callable[..., tuple[Any, ...]]] = {
    "add_lora": _lora_request,
    "collective_rpc": _collective_rpc,
    "pin_lora": _lora_id,
    "profile": _profile,
    "remove_lora": _lora_id,
    "reset_prefix_cache": _reset_prefix_cache,
    "sleep": _sleep,
    "wake_up": _wake_up,
}


def check_mapping(name: str, value: Any) -> dict[str, Any] | None:
    """None, or a mapping with strings as keys."""
    if value is None:
        return None
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise InvalidTypeError(
            f"{name} must be a dict with strings as keys, got {value!r:.200}",
            parameter=name,
            value=value,
        )
    return dict(value)


def check_trace_headers(headers: Any) -> dict[str, str] | None:
    """Headers of a request, names and values as strings."""
    checked = check_mapping("trace_headers", headers)
    for name, value in (checked or {}).items():
        check_str(f"trace_headers[{name!r}]", value)
    return checked


def check_request_ids(request_ids: Any) -> list[str]:
    """One request id or several, as a list."""
    if isinstance(request_ids, str):
        return [request_ids]
    if isinstance(request_ids, Mapping | bytes) or not isinstance(request_ids, Iterable):
        raise InvalidTypeError(
            f"request_ids must be a request id or several, got {request_ids!r}",
            parameter="request_ids",
            value=request_ids,
        )
    return [check_str("request_ids", request_id) for request_id in request_ids]
