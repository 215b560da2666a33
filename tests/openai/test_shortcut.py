"""The short way of events to the connection: same events, same order, whoever writes them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, MutableMapping
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tellin.engine.output_collector import RequestOutputCollector
from tellin.entrypoints.openai.http import EventStream
from tellin.entrypoints.openai.replies import ChatChunk, ChatChunkChoice, ChatDelta
from tellin.entrypoints.openai.serving import TextSplice, event
from tellin.entrypoints.openai.shortcut import EXTENSION, Shortcut
from tellin.exceptions import RequestFailedError
from tellin.outputs import CompletionOutput, RequestOutput
from tellin.sampling_params import RequestOutputKind


def an_output(text: str, finish_reason: str | None = None, index: int = 0) -> RequestOutput:
    completion = CompletionOutput(index, text, [1], finish_reason=finish_reason)
    return RequestOutput("r", "p", [1], None, [completion], finish_reason is not None)


class Wire:
    """A connection and the server's ``send``; what was written, in order."""

    def __init__(self, can_write: bool = True) -> None:
        self.written = b""
        self.num_short = 0
        self.is_writable = can_write

    def can_write(self) -> bool:
        return self.is_writable

    def write(self, data: bytes) -> None:
        self.written += data
        self.num_short += 1

    async def send(self, message: MutableMapping[str, Any]) -> None:
        while not self.is_writable:
            await asyncio.sleep(0)
        self.written += message.get("body", b"")


def a_shortcut(wire: Wire) -> Shortcut:
    shortcut = Shortcut(lambda job, output: output.text.encode())
    shortcut.connect({EXTENSION: wire})
    shortcut.is_open = True
    return shortcut


def test_outputs_between_the_first_and_the_last_take_it() -> None:
    wire = Wire()
    shortcut = a_shortcut(wire)
    assert shortcut.take(None, an_output("a"))
    assert shortcut.take(None, an_output(""))  # nothing to show: nothing is written
    assert (wire.written, wire.num_short) == (b"a", 1)


@pytest.mark.parametrize("obstacle", ["closed", "slow", "no server", "finished", "child", "failed"])
def test_what_goes_the_long_way(obstacle: str) -> None:
    wire = Wire(can_write=obstacle != "slow")
    shortcut = a_shortcut(wire)
    output = an_output("a", "stop" if obstacle in ("finished", "child") else None)
    if obstacle == "closed":
        shortcut.is_open = False
    elif obstacle == "no server":
        shortcut.connect(None)
    elif obstacle == "child":  # one of several choices has ended, the request has not
        output.finished = False
    elif obstacle == "failed":
        output.error = RequestFailedError("it failed")
    assert not shortcut.take(None, output)
    assert wire.written == b""


STEPS = ["output", "output", "turn", "turn", "slow", "fast"]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(STEPS), min_size=8, max_size=40))
@example(["slow", "output", "turn", "turn", "fast", "output", "turn"])
def test_out_28_events_keep_their_order_however_slow_the_client_is(schedule: list[str]) -> None:
    """Outputs come, the client stops and goes on reading, tasks get turns: in any order."""

    async def run() -> None:
        wire = Wire()
        shortcut = Shortcut(lambda job, output: output.text.encode())
        collector = RequestOutputCollector(
            RequestOutputKind.DELTA, lambda output: shortcut.take(None, output)
        )

        async def events() -> AsyncGenerator[bytes, None]:
            yield b"<"
            finished = False
            while not finished:
                output = collector.get_nowait() or await collector.get()
                assert isinstance(output, RequestOutput)
                finished = output.finished
                yield output.text.encode()

        async def receive() -> MutableMapping[str, Any]:
            await asyncio.Event().wait()
            return {}

        stream = EventStream(events(), shortcut)
        scope = {"type": "http", "extensions": {EXTENSION: wire}}
        task = asyncio.create_task(stream(scope, receive, wire.send))
        expected = "<"
        for _ in range(5):
            await asyncio.sleep(0)
        for number, what in enumerate(schedule):
            if what == "output":
                collector.put(an_output(f"{number} "))
                expected += f"{number} "
            elif what == "turn":
                await asyncio.sleep(0)
            else:
                wire.is_writable = what == "fast"
        wire.is_writable = True
        collector.put(an_output(">", "stop"))
        await asyncio.wait_for(task, 10)
        assert wire.written.decode() == expected + ">"

    asyncio.run(run())


def test_a_failure_to_encode_is_the_streams_own() -> None:
    """It comes out of the stream that it belongs to, and not out of the output handler."""

    num_offered = 0

    async def run() -> None:
        def fail(output: RequestOutput) -> bool:
            nonlocal num_offered
            num_offered += 1
            raise ValueError("no")

        collector = RequestOutputCollector(RequestOutputKind.DELTA, fail)
        collector.put(an_output("a"))
        with pytest.raises(ValueError, match="no"):
            await collector.get()
        collector.put(an_output("b"))  # before the request is aborted
        assert num_offered == 1  # with "a" missing, "b" must not be sent

    asyncio.run(run())


@given(st.text(), st.text())
def test_a_spliced_event_equals_an_encoded_one(name: str, text: str) -> None:
    def chunk(content: str) -> ChatChunk:
        choice = ChatChunkChoice(0, ChatDelta(content=content))
        return ChatChunk(name, 1, '"content":""', [choice], usage=None)

    assert TextSplice(chunk(""), "content").event(text) == event(chunk(text))
    assert json.loads(event(chunk(text))[6:])["choices"][0]["delta"] == {"content": text}
