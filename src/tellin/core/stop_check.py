"""When a request is done: pure functions of ids and limits; stop strings are the shell's."""

from __future__ import annotations

from collections.abc import Sequence

from tellin.core.request import Request, RequestStatus
from tellin.sampling_params import RepetitionDetectionParams

REPETITION_STOP_REASON = "repetition_detected"


def append_until_stop(request: Request, token_ids: list[int]) -> list[int]:
    """Append ids one at a time until one ends the request; returns those that were kept."""
    for index, token_id in enumerate(token_ids):
        request.append_output_token_ids(token_id)
        status = check_stop(request, token_id)
        if status is not None:
            request.status = status
            return token_ids[: index + 1]
    return token_ids


def check_stop(request: Request, token_id: int) -> RequestStatus | None:
    """Final status after ``token_id`` was appended, or None.

    A stop id that is also the last one allowed counts as a stop. The length caps do not wait for
    ``min_tokens``: a request that can get no further must end.
    """
    num_output_tokens = request.num_tokens - request.num_prompt_tokens
    params = request.sampling_params
    if num_output_tokens >= request.min_tokens:
        if params is not None and token_id == params.eos_token_id:
            return RequestStatus.FINISHED_STOPPED
        if token_id in request.stop_ids:
            request.stop_reason = token_id
            return RequestStatus.FINISHED_STOPPED
    if request.num_tokens >= request.max_total_tokens:
        return RequestStatus.FINISHED_LENGTH_CAPPED
    if (
        params is not None
        and params.repetition_detection is not None
        and num_output_tokens >= request.min_tokens
        and is_repetition(
            request.all_token_ids, request.num_prompt_tokens, params.repetition_detection
        )
    ):
        request.stop_reason = REPETITION_STOP_REASON
        return RequestStatus.FINISHED_REPETITION
    return None


def is_repetition(
    token_ids: Sequence[int], num_prompt_tokens: int, params: RepetitionDetectionParams
) -> bool:
    """Whether the outputs end in ``min_count`` copies of one pattern of an allowed size."""
    low, high = max(1, params.min_pattern_size), params.max_pattern_size
    if high <= 0 or params.min_count < 2 or params.min_pattern_size > high:
        return False
    end = len(token_ids)
    for size in range(low, high + 1):
        start = end - size * params.min_count
        if start < num_prompt_tokens:
            return False
        if token_ids[start : end - size] == token_ids[start + size : end]:
            return True
    return False
