"""The single-slot hand-over of AsyncLLM (OUT-25 ... OUT-28)."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tellin.engine.output_collector import RequestOutputCollector
from tellin.exceptions import EngineDeadError, RequestFailedError
from tellin.metrics import RequestStateStats
from tellin.outputs import CompletionOutput, Logprob, RequestOutput
from tellin.sampling_params import RequestOutputKind


def an_output(
    text: str, token_ids: list[int], index: int = 0, finished: bool = False
) -> RequestOutput:
    completion = CompletionOutput(
        index=index,
        text=text,
        token_ids=token_ids,
        cumulative_logprob=None,
        logprobs=None,
        finish_reason="stop" if finished else None,
    )
    return RequestOutput("r", "p", [1], None, [completion], finished)


@given(
    pieces=st.lists(st.text(max_size=3), min_size=1, max_size=20),
    reads=st.lists(st.booleans(), min_size=20, max_size=20),
    num_children=st.integers(1, 3),
)
def test_out_28_no_delta_is_lost_or_repeated(
    pieces: list[str], reads: list[bool], num_children: int
) -> None:
    """However puts and gets interleave, the joined deltas are the whole text."""

    async def run() -> None:
        collector = RequestOutputCollector(RequestOutputKind.DELTA)
        texts, ids = [""] * num_children, [[] for _ in range(num_children)]

        def read() -> None:
            output = collector.get_nowait()
            if isinstance(output, RequestOutput):
                for completion in output.outputs:
                    texts[completion.index] += completion.text
                    ids[completion.index] += completion.token_ids

        for i, piece in enumerate(pieces):
            collector.put(an_output(piece, [i], index=i % num_children))
            if reads[i]:
                read()
        read()
        for child in range(num_children):
            assert texts[child] == "".join(pieces[child::num_children])
            assert ids[child] == list(range(len(pieces)))[child::num_children]

    asyncio.run(run())


def test_out_26_a_later_cumulative_output_replaces_the_earlier() -> None:
    collector = RequestOutputCollector(RequestOutputKind.CUMULATIVE)
    collector.put(an_output("a", [1]))
    collector.put(an_output("ab", [1, 2], finished=True))
    output = collector.get_nowait()
    assert isinstance(output, RequestOutput)
    assert (output.text, output.outputs[0].token_ids, output.finished) == ("ab", [1, 2], True)


@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE])
def test_out_26_a_merged_output_says_why_the_request_failed(kind: RequestOutputKind) -> None:
    """What belongs to the request, not to a completion, comes from the output that has it."""
    collector = RequestOutputCollector(kind)
    first, last = an_output("a", [1]), an_output("", [], finished=True)
    first.num_cached_tokens = 7
    last.error = RequestFailedError("NaN in logits")
    last.metrics = RequestStateStats(1.0)
    collector.put(first)
    collector.put(last)
    merged = collector.get_nowait()
    assert isinstance(merged, RequestOutput)
    assert merged.finished
    assert merged.error is last.error
    assert merged.metrics is last.metrics
    assert merged.num_cached_tokens == 7


def test_out_26_prompt_logprobs_of_either_output_are_kept() -> None:
    """With deltas they come once, at the beginning; a later output has an empty list."""
    for early, late in ((True, False), (False, True)):
        collector = RequestOutputCollector(RequestOutputKind.DELTA)
        for has_them in (early, late):
            output = an_output("a", [1])
            output.prompt_logprobs = [None, {1: Logprob(-1.0, 1)}] if has_them else []
            collector.put(output)
        merged = collector.get_nowait()
        assert isinstance(merged, RequestOutput)
        assert merged.prompt_logprobs == [None, {1: Logprob(-1.0, 1)}]


def test_out_27_a_stored_exception_is_raised_once() -> None:
    async def run() -> None:
        collector = RequestOutputCollector(RequestOutputKind.DELTA)
        collector.put(an_output("a", [1]))
        collector.put(EngineDeadError())
        collector.put(an_output("b", [2]))  # nothing follows a failure
        with pytest.raises(EngineDeadError):
            await collector.get()
        assert collector.get_nowait() is None

    asyncio.run(run())


def test_out_27_get_waits_for_the_next_output() -> None:
    async def run() -> str:
        collector = RequestOutputCollector(RequestOutputKind.DELTA)
        asyncio.get_running_loop().call_later(0.01, collector.put, an_output("late", [1]))
        output = await collector.get()
        assert isinstance(output, RequestOutput)
        return output.text

    assert asyncio.run(run()) == "late"
