"""The wire format between shell and core (WIRE-1 ... WIRE-11)."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tellin.exceptions import InvalidTypeError
from tellin.protocol import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    LoRARequest,
    SchedulerStats,
)
from tellin.sampling_params import SamplingParams, StructuredOutputsParams
from tellin.serialization import Decoder, Encoder, join_frames, split_frames
from tellin.step_protocol import LogprobsLists

DTYPES = st.sampled_from(["<f4", "<f8", "<i4", "<i8", "|u1", "|b1", "<f2"])


def a_request(**changes: object) -> EngineCoreRequest:
    fields: dict[str, object] = {
        "request_id": "r-1",
        "prompt_token_ids": [1, 2, 3],
        "mm_features": None,
        "sampling_params": SamplingParams(
            temperature=0.5,
            seed=3,
            max_tokens=7,
            stop_token_ids=[4],
            structured_outputs=StructuredOutputsParams(choice=["a", "b"]),
        ),
        "pooling_params": None,
        "arrival_time": 12.5,
        "lora_request": LoRARequest("l", 1, "/p"),
        "cache_salt": "salt",
        "priority": -2,
        "trace_headers": {"traceparent": "x"},
    }
    return EngineCoreRequest(**(fields | changes))  # type: ignore[arg-type]


def test_wire_1_requests_are_positional_arrays_and_come_back_equal() -> None:
    request = a_request()
    frames = Encoder().encode(request)
    assert len(frames) == 1
    raw = msgspec.msgpack.decode(frames[0])
    assert raw[:2] == ["r-1", [1, 2, 3]]
    assert isinstance(raw[3], dict)  # sampling params are a map
    assert raw[3]["temperature"] == 0.5
    assert Decoder(EngineCoreRequest).decode(frames) == request


def test_wire_1_outputs_come_back_equal() -> None:
    outputs = EngineCoreOutputs(
        engine_index=1,
        outputs=[
            EngineCoreOutput(
                "r-1",
                [5, 6],
                new_logprobs=LogprobsLists([[5, 1], [6, 2]], [[-0.5, -1.0], [-0.1, -9.0]], [1, 1]),
                finish_reason=FinishReason.STOP,
                stop_reason="END",
            )
        ],
        scheduler_stats=SchedulerStats(num_running_reqs=3, kv_cache_usage=0.25),
        timestamp=3.0,
    )
    assert Decoder(EngineCoreOutputs).decode(Encoder().encode(outputs)) == outputs


@given(hnp.arrays(DTYPES, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=9)))
def test_wire_5_arrays_come_back_bit_for_bit(array: np.ndarray) -> None:
    for threshold in (0, 64, 10_000):
        frames = Encoder(threshold).encode({"a": array, "b": [array]})
        result = Decoder().decode([bytes(frame) for frame in frames])
        for back in (result["a"], result["b"][0]):
            assert back.dtype == array.dtype
            assert back.shape == array.shape
            assert back.tobytes() == np.ascontiguousarray(array).tobytes()


def test_wire_6_large_arrays_are_not_copied() -> None:
    array = np.arange(1000, dtype=np.float32)
    _, frame = Encoder().encode(array)
    assert isinstance(frame, memoryview)
    assert np.shares_memory(np.frombuffer(frame, np.float32), array)


def test_wire_7_decoded_arrays_alias_the_frame_and_are_read_only() -> None:
    frames = [bytes(f) for f in Encoder().encode(np.arange(1000, dtype=np.float32))]
    back = Decoder().decode(frames)
    assert np.shares_memory(back, np.frombuffer(frames[1], np.float32))
    with pytest.raises(ValueError, match="read-only"):
        back[0] = 1


def double(x: int) -> int:
    return 2 * x


def test_wire_10_objects_travel_only_if_insecure_serialization_is_on() -> None:
    with pytest.raises(InvalidTypeError, match="TELLIN_ALLOW_INSECURE_SERIALIZATION"):
        Encoder().encode(double)
    with pytest.raises(InvalidTypeError, match=r"cannot be sent to another process: .*pickle"):
        Encoder(allow_insecure=True).encode(lambda: 1)
    frames = Encoder(allow_insecure=True).encode(double)
    assert Decoder(allow_insecure=True).decode(frames)(21) == 42
    with pytest.raises(TypeError, match="insecure serialization is off"):
        Decoder().decode(frames)


def test_wire_10_unknown_extension_codes_are_refused() -> None:
    frame = msgspec.msgpack.encode(msgspec.msgpack.Ext(77, b"x"))
    with pytest.raises(msgspec.ValidationError, match="unknown msgpack extension code 77"):
        Decoder().decode([frame])


def test_a_frame_number_outside_the_message_is_refused() -> None:
    inner = msgspec.msgpack.encode(("<f4", [1000], 1))
    frame = msgspec.msgpack.encode(msgspec.msgpack.Ext(2, inner))
    with pytest.raises(msgspec.ValidationError, match="no auxiliary frame 1"):
        Decoder().decode([frame])


@given(st.lists(st.binary(max_size=40), min_size=1, max_size=6))
def test_frames_travel_in_one_piece(frames: list[bytes]) -> None:
    """What is sent to a core is one part, so that an interrupt cannot cut it in two."""
    message = join_frames([*frames[:-1], memoryview(frames[-1])])
    assert [bytes(frame) for frame in split_frames(message)] == frames
    for wrong in (message[:-1], message + b"x", b"", b"\xff" * 8, message[1:]):
        if wrong != message:
            with pytest.raises(msgspec.DecodeError):
                split_frames(wrong)


def test_arrays_in_one_piece_are_aligned() -> None:
    array = np.arange(500, dtype=np.float64)
    frames = split_frames(memoryview(b"x" + join_frames(Encoder().encode(["r", array])))[1:])
    decoded = Decoder().decode(frames)[1]
    assert decoded.flags.aligned
    assert (decoded == array).all()
