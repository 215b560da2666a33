"""Requests that somebody else built pass the same gate as all others (ENG-11 and its wart)."""

from __future__ import annotations

from typing import Any

import pytest

from tellin.exceptions import InvalidParameterError, InvalidTypeError, UnsupportedFeatureError
from tellin.protocol import EngineCoreRequest
from tellin.sampling_params import PoolingParams, SamplingParams
from tests.engine.fakes import EngineMaker, run, text_ids

ABC = [text_ids("a"), text_ids("b"), text_ids("c")]


def core_request(**changes: Any) -> EngineCoreRequest:
    fields: dict[str, Any] = {
        "request_id": "x",
        "prompt_token_ids": text_ids("abc"),
        "mm_features": None,
        "sampling_params": SamplingParams(max_tokens=3),
        "pooling_params": None,
        "arrival_time": 12.5,
    }
    return EngineCoreRequest(**(fields | changes))


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"sampling_params": None}, InvalidParameterError, "pooling_params, got neither"),
        ({"pooling_params": PoolingParams()}, InvalidParameterError, "pooling_params, got both"),
        ({"prompt_token_ids": None}, InvalidParameterError, "prompt_embeds, got neither"),
        ({"prompt_embeds": [[1.0]]}, InvalidParameterError, "prompt_embeds, got both"),
        ({"arrival_time": "noon"}, InvalidTypeError, "arrival_time .*'noon'"),
        ({"trace_headers": 5}, InvalidTypeError, "trace_headers .*5"),
        ({"cache_salt": ""}, InvalidParameterError, "cache_salt"),
        ({"reasoning_ended": "no"}, InvalidTypeError, "reasoning_ended"),
        ({"mm_features": [1]}, InvalidTypeError, r"mm_features .*\[1\]"),
        ({"resumable": True}, UnsupportedFeatureError, "resumable"),
        ({"prompt_is_token_ids": [True]}, UnsupportedFeatureError, "prompt_is_token_ids"),
    ],
)
def test_what_contradicts_itself_is_refused_and_nothing_is_left(
    changes: dict[str, Any], error: type[Exception], match: str, make_engine: EngineMaker
) -> None:
    """TYP-1: exactly one set of parameters; a bad field fails its request, not a later step."""
    engine = make_engine(ABC)
    with pytest.raises(error, match=match):
        engine.add_request("x", core_request(**changes), SamplingParams())
    assert make_engine.client.requests == []
    assert not engine.has_unfinished_requests()


def test_what_a_request_brings_arrives_and_the_route_is_the_engines(
    make_engine: EngineMaker,
) -> None:
    """ENG-11, ENG-13, CLI-36: outputs for another client would never be seen here."""
    engine = make_engine(ABC)
    given: dict[str, Any] = {
        "cache_salt": "salt",
        "priority": 3,
        "trace_headers": {"traceparent": "00-1"},
        "reasoning_ended": True,
    }
    request = core_request(client_index=7, current_wave=4, **given)
    handle = engine.add_request("x", request, SamplingParams())
    (sent,) = make_engine.client.requests
    assert {name: getattr(sent, name) for name in given} == given
    assert (sent.arrival_time, sent.client_index, sent.current_wave) == (12.5, 0, 0)
    assert (sent.request_id, sent.external_req_id) == (handle, "x")
    assert request.request_id == handle, "it cannot be added twice"
    assert run(engine)[-1].finished
