"""The structs that cross the border: their order on the wire, their numbers, their defaults."""

from __future__ import annotations

import time

import msgspec
import pytest

from tellin.protocol import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreRequestType,
    FinishReason,
    UtilityOutput,
)
from tellin.sampling_params import PoolingParams, SamplingParams
from tellin.serialization import Decoder, Encoder


def test_typ_2_fields_of_a_request_keep_their_places() -> None:
    """TYP-2, WIRE-1: their order is the wire format; new ones go to the end, with a default."""
    assert list(EngineCoreRequest.__struct_fields__)[:20] == [
        "request_id",
        "prompt_token_ids",
        "mm_features",
        "sampling_params",
        "pooling_params",
        "arrival_time",
        "lora_request",
        "cache_salt",
        "data_parallel_rank",
        "prompt_embeds",
        "prompt_is_token_ids",
        "client_index",
        "current_wave",
        "priority",
        "trace_headers",
        "resumable",
        "external_req_id",
        "reasoning_ended",
        "reasoning_parser_kwargs",
        "abort_immediately",
    ]
    request = EngineCoreRequest("r", [1], None, SamplingParams(), None, 1.0)
    defaults = [getattr(request, name) for name in EngineCoreRequest.__struct_fields__[6:]]
    assert defaults == [None] * 5 + [0, 0, 0, None, False, None, None, None, False, None]


def test_typ_1_params_are_the_ones_that_are_set() -> None:
    """TYP-1."""
    sampling, pooling = SamplingParams(), PoolingParams()
    assert EngineCoreRequest("r", [1], None, sampling, None, 1.0).params is sampling
    assert EngineCoreRequest("r", [1], None, None, pooling, 1.0).params is pooling


def test_typ_20_21_a_batch_is_stamped_when_it_is_made_and_not_again() -> None:
    """TYP-20, TYP-21, CLK-2: monotonic seconds of the core, which decoding keeps."""
    before = time.monotonic()
    batch = EngineCoreOutputs(utility_output=UtilityOutput(7, result=[1]))
    assert before <= batch.timestamp <= time.monotonic()
    assert EngineCoreOutputs(timestamp=2.5).timestamp == 2.5
    back = Decoder(EngineCoreOutputs).decode(Encoder().encode(batch))
    assert back.timestamp == batch.timestamp
    assert (back.outputs, back.scheduler_stats) == ([], None)
    assert before <= EngineCoreEvent.now(EngineCoreEventType.QUEUED).timestamp


def test_wire_2_trailing_fields_may_be_more_or_fewer() -> None:
    """WIRE-2: unknown ones are ignored, missing ones with a default are it, others an error."""
    decoder = Decoder(EngineCoreOutput)
    whole = msgspec.msgpack.decode(Encoder().encode(EngineCoreOutput("r", [1]))[0])
    assert whole[:2] == ["r", [1]]
    longer = [*whole, *["?"] * 30]
    for fields in (whole, longer, ["r", [1]]):
        assert decoder.decode([msgspec.msgpack.encode(fields)]) == EngineCoreOutput("r", [1])
    with pytest.raises(msgspec.ValidationError):
        decoder.decode([msgspec.msgpack.encode(["r"])])


def test_wire_3_numbers_of_enumerations() -> None:
    """WIRE-3, 2.6: enums travel as their value, sets as arrays; `str` is the external spelling."""
    reasons = {str(reason): reason.value for reason in FinishReason}
    assert reasons == {"stop": 0, "length": 1, "abort": 2, "error": 3, "repetition": 4}
    assert [kind.value for kind in EngineCoreRequestType] == [bytes([i]) for i in range(6)]
    events = [(kind.name, kind.value) for kind in EngineCoreEventType]
    assert events == [("QUEUED", 1), ("SCHEDULED", 2), ("PREEMPTED", 3)]
    output = EngineCoreOutput("r", [1], finish_reason=FinishReason.ABORT)
    batch = EngineCoreOutputs(outputs=[output], finished_requests={"r"})
    raw = msgspec.msgpack.decode(Encoder().encode(batch)[0])
    assert (raw[1][0][5], raw[5]) == (2, ["r"])
