"""What ends a streamed answer: the usage, an error in place of what is missing, ``[DONE]``."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest

from tellin.entrypoints.openai.serving import DONE, stream_events
from tellin.exceptions import RequestFailedError, RequestTimeoutError
from tellin.outputs import CompletionOutput, RequestOutput

JobOutputs = AsyncGenerator[tuple[Any, RequestOutput], None]


async def outputs(steps: Sequence[str | Exception], ended: list[bool]) -> JobOutputs:
    try:
        for step in steps:
            if isinstance(step, Exception):
                raise step
            yield None, RequestOutput("r", "p", [1], None, [CompletionOutput(0, step, [1])], False)
    finally:
        ended.append(True)


def encode(job: Any, output: RequestOutput) -> bytes:
    return output.outputs[0].text.encode()


def collect(steps: Sequence[str | Exception], **options: Any) -> list[bytes]:
    async def run() -> list[bytes]:
        stream = stream_events(outputs(steps, []), encode, **options)
        return [data async for data in stream]

    return asyncio.run(run())


def test_outputs_without_events_and_the_last_event() -> None:
    assert collect(["a", "", "b"]) == [b"a", b"b", DONE]
    assert collect(["a"], last_event=lambda: b"usage") == [b"a", b"usage", DONE]


def test_an_error_in_the_stream_is_its_last_event() -> None:
    """Clients see that something is missing; no usage follows, which would say that all is."""
    steps = ["a", RequestTimeoutError("took more than 1 s"), "never"]
    first, error, done = collect(steps, last_event=lambda: b"usage")
    assert (first, done) == (b"a", DONE)
    assert error.endswith(b"\n\n")
    body = json.loads(error.removeprefix(b"data: "))["error"]
    assert (body["message"], body["type"]) == ("took more than 1 s", "timeout_error")


def test_an_error_before_the_first_event_is_raised() -> None:
    """It gets a status of its own."""
    with pytest.raises(RequestFailedError, match="at once"):
        collect(["", RequestFailedError("at once")])


def test_outputs_end_with_their_events() -> None:
    """Who stops reading stops the request."""
    ended: list[bool] = []

    async def run() -> None:
        source = outputs(["a", "b"], ended)  # kept: what is collected ends, too
        stream = stream_events(source, encode)
        assert await anext(stream) == b"a"
        await stream.aclose()
        assert ended == [True]

    asyncio.run(run())
