"""1.11: when a request is done."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tellin.core.request import Request, RequestStatus
from tellin.core.stop_check import append_until_stop, is_repetition
from tellin.protocol import FinishReason
from tellin.sampling_params import RepetitionDetectionParams, SamplingParams

EOS = 2


def feed(token_ids: list[int], prompt: int = 3, limit: int = 100, **params: Any) -> Any:
    params = {"max_tokens": 50, **params}
    request = Request("r", [1] * prompt, SamplingParams(**params), None, max_model_len=limit)
    request.status = RequestStatus.RUNNING
    assert request.sampling_params is not None
    request.sampling_params.eos_token_id = None if params.get("ignore_eos") else EOS
    request._read_sampling_params(request.sampling_params)
    kept = append_until_stop(request, token_ids)
    return kept, request.finish_reason, request.stop_reason


def test_nothing_stops() -> None:
    assert feed([5, 6, 7]) == ([5, 6, 7], None, None)


def test_eos_has_no_stop_reason() -> None:
    """1.11.2; ids after it are dropped (1.10.2d)."""
    assert feed([5, EOS, 7]) == ([5, EOS], FinishReason.STOP, None)


def test_ignore_eos() -> None:
    assert feed([5, EOS, 7], ignore_eos=True) == ([5, EOS, 7], None, None)


def test_stop_token_ids_are_named() -> None:
    """1.11.3."""
    assert feed([5, 9, 7], stop_token_ids=[9]) == ([5, 9], FinishReason.STOP, 9)


def test_max_tokens() -> None:
    """1.11.4."""
    assert feed([5, 6, 7], max_tokens=2) == ([5, 6], FinishReason.LENGTH, None)


def test_model_length() -> None:
    assert feed([5, 6, 7], prompt=3, limit=5) == ([5, 6], FinishReason.LENGTH, None)


def test_a_stop_on_the_last_allowed_token_is_a_stop() -> None:
    assert feed([5, EOS], max_tokens=2) == ([5, EOS], FinishReason.STOP, None)


def test_min_tokens_holds_stops_back() -> None:
    """1.11.1."""
    assert feed([EOS, 9, EOS, 4], min_tokens=3, stop_token_ids=[9]) == (
        [EOS, 9, EOS],
        FinishReason.STOP,
        None,
    )


def test_length_wins_over_min_tokens() -> None:
    """1.11 Wart, T2: min_tokens beyond what fits must not keep the request for ever."""
    kept, reason, _ = feed([EOS] * 9, prompt=3, limit=6, min_tokens=20)
    assert (kept, reason) == ([EOS] * 3, FinishReason.LENGTH)


@pytest.mark.parametrize(("ids", "num_kept"), [([4, 5, 4, 5, 9], 4), ([7, 7, 9], 2)])
def test_repetition(ids: list[int], num_kept: int) -> None:
    """1.11.5-6 Check: a,b,a,b stops at the 4th id; x,x at the 2nd."""
    detection = RepetitionDetectionParams(max_pattern_size=3, min_pattern_size=0, min_count=2)
    kept, reason, why = feed(ids, repetition_detection=detection)
    assert (len(kept), reason, why) == (num_kept, FinishReason.REPETITION, "repetition_detected")


@pytest.mark.parametrize(("min_tokens", "num_kept"), [(0, 3), (3, 3), (5, 5)])
def test_repetition_waits_for_min_tokens(min_tokens: int, num_kept: int) -> None:
    """1.11.1, TYP-11: before that nothing but the length caps ends a request."""
    detection = {"max_pattern_size": 1, "min_count": 3}
    params = {"repetition_detection": detection, "min_tokens": min_tokens}
    kept, reason, _ = feed([7] * 8, **params)
    assert (len(kept), reason) == (num_kept, FinishReason.REPETITION)


def test_repetition_does_not_look_into_the_prompt() -> None:
    detection = RepetitionDetectionParams(max_pattern_size=1, min_count=2)
    assert feed([1], prompt=3, repetition_detection=detection)[1] is None


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 1), max_size=14),
    st.integers(0, 4),
    st.integers(0, 4),
    st.integers(0, 4),
)
def test_repetition_equals_its_definition(
    outputs: list[int], low: int, high: int, count: int
) -> None:
    """1.11.6, TYP-12, written out."""
    expected = False
    if high > 0 and count >= 2 and low <= high:
        for size in range(max(1, low), high + 1):
            if size * count > len(outputs):
                break
            tail = outputs[len(outputs) - size * count :]
            if tail == tail[:size] * count:
                expected = True
    params = RepetitionDetectionParams()
    params.max_pattern_size, params.min_pattern_size, params.min_count = high, low, count
    assert is_repetition([0, 0, *outputs], 2, params) == expected


def test_finish_reasons() -> None:
    """TYP-5, TYP-6, 1.3: status to reason; nothing else has one."""
    reasons = {
        RequestStatus.FINISHED_STOPPED: "stop",
        RequestStatus.FINISHED_LENGTH_CAPPED: "length",
        RequestStatus.FINISHED_IGNORED: "length",
        RequestStatus.FINISHED_ABORTED: "abort",
        RequestStatus.FINISHED_ERROR: "error",
        RequestStatus.FINISHED_REPETITION: "repetition",
    }
    request = Request("r", [1], SamplingParams(max_tokens=1), None, max_model_len=9)
    for status in RequestStatus:
        request.status = status
        expected = reasons.get(status)
        assert request.is_finished == (expected is not None) == RequestStatus.is_finished(status)
        assert (str(request.finish_reason) if expected else None) == expected
