"""From core outputs to user outputs: rules OUT-*, claims S4, S23, S26, S28, S42, report P54."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tellin.engine.output_processor import OutputProcessor
from tellin.engine.parallel_sampling import ParentRequest
from tellin.exceptions import DuplicateRequestError, RequestError, RequestFailedError
from tellin.metrics import IterationStats
from tellin.outputs import PoolingRequestOutput, RequestOutput
from tellin.protocol import EngineCoreOutput, EngineCoreRequest, FinishReason, PrefillStats
from tellin.sampling_params import PoolingParams, RequestOutputKind, SamplingParams
from tellin.step_protocol import LogprobsLists
from tests.engine.fakes import EngineMaker, run, text_ids
from tests.engine.tokenizers_for_tests import get

CUMULATIVE, DELTA, FINAL = RequestOutputKind
EOS = get("byte_level").eos_token_id
PROMPT = text_ids("the sea")


def processor(**options: Any) -> OutputProcessor:
    options.setdefault("log_stats", False)
    return OutputProcessor(get("byte_level"), **options)


def request(request_id: str = "x-1", external: str = "x", **params: Any) -> EngineCoreRequest:
    sampling = SamplingParams(**params)
    sampling.all_stop_token_ids.add(EOS or 0)
    return EngineCoreRequest(
        request_id, list(PROMPT), None, sampling, None, 1.0, external_req_id=external
    )


def output(ids: list[int], request_id: str = "x-1", **fields: Any) -> EngineCoreOutput:
    return EngineCoreOutput(request_id, ids, **fields)


def play(
    steps: list[EngineCoreOutput], made: EngineCoreRequest, **options: Any
) -> list[RequestOutput]:
    target = processor(**options)
    target.add_request(made, "the sea")
    results: list[Any] = []
    for step in steps:
        results += target.process_outputs([step], 1.0).request_outputs
    return results


def letters(
    text: str, *, last: FinishReason | None = FinishReason.LENGTH
) -> list[EngineCoreOutput]:
    """One output per character."""
    steps = [output(text_ids(char)) for char in text]
    steps[0].prefill_stats = PrefillStats(len(PROMPT), len(PROMPT) - 1, 1, 1)
    steps[-1].finish_reason = last
    return steps


# ---------------------------------------------------------------------- kinds


def test_s04_s28_all_fields_of_a_final_output() -> None:
    (result,) = play(letters("abc"), request(output_kind=FINAL))
    assert result.request_id == "x"
    assert result.prompt == "the sea"
    assert result.prompt_token_ids == PROMPT
    assert result.finished
    assert result.num_cached_tokens == 1
    assert result.metrics is None
    assert result.error is None
    (completion,) = result.outputs
    assert (completion.index, completion.text, completion.token_ids) == (
        0,
        "abc",
        text_ids("a") + text_ids("b") + text_ids("c"),
    )
    assert (completion.finish_reason, completion.stop_reason) == ("length", None)
    assert completion.cumulative_logprob is None
    assert completion.logprobs is None
    assert result.text == "abc"


def test_cumulative_outputs_are_snapshots() -> None:
    results = play(letters("abc"), request(output_kind=CUMULATIVE))
    assert [r.text for r in results] == ["a", "ab", "abc"]
    assert [len(r.outputs[0].token_ids) for r in results] == [1, 2, 3]
    assert [r.finished for r in results] == [False, False, True]
    assert [r.outputs[0].finish_reason for r in results] == [None, None, "length"]


def test_delta_outputs() -> None:
    results = play(letters("abc"), request(output_kind=DELTA))
    assert [r.text for r in results] == ["a", "b", "c"]
    assert [len(r.outputs[0].token_ids) for r in results] == [1, 1, 1]


@pytest.mark.parametrize("kind", [CUMULATIVE, DELTA])
@pytest.mark.parametrize("interval", [1, 2, 3, 10])
def test_out15_stream_interval(kind: RequestOutputKind, interval: int) -> None:
    """Emit first, last, and whenever enough tokens are unsent; for cumulative outputs too."""
    results = play(letters("abcdefg"), request(output_kind=kind), stream_interval=interval)
    counts = [len(r.outputs[0].token_ids) for r in results]
    expected = {1: [1] * 7, 2: [1, 2, 2, 2], 3: [1, 3, 3], 10: [1, 6]}[interval]
    if kind == CUMULATIVE:
        expected = [sum(expected[: i + 1]) for i in range(len(expected))]
    assert counts == expected
    whole = results[-1].text if kind == CUMULATIVE else "".join(r.text for r in results)
    assert whole == "abcdefg"


def test_p54_stop_token_counts_but_is_not_shown() -> None:
    assert EOS is not None
    steps = [*letters("ab", last=None), output([EOS], finish_reason=FinishReason.STOP)]
    shown = play(
        steps,
        request(output_kind=FINAL, include_stop_str_in_output=True, skip_special_tokens=False),
    )
    hidden = play(steps, request(output_kind=FINAL, skip_special_tokens=False))
    assert hidden[0].text == "ab"
    assert shown[0].text == "ab</s>"
    assert hidden[0].outputs[0].token_ids == shown[0].outputs[0].token_ids
    assert len(hidden[0].outputs[0].token_ids) == 3


def test_stop_without_a_stop_token_keeps_the_last_token() -> None:
    """A grammar may end a request with a token that is text."""
    (result,) = play(letters("ab", last=FinishReason.STOP), request(output_kind=FINAL))
    assert result.text == "ab"


# ---------------------------------------------------------------------- stop strings


@pytest.mark.parametrize("kind", [CUMULATIVE, DELTA, FINAL])
def test_s27_stop_inside_a_step_cuts_text_ids_and_logprobs(kind: RequestOutputKind) -> None:
    target = processor()
    target.add_request(request(output_kind=kind, stop="STOP", logprobs=0), None)
    ids = [text_ids(c)[0] for c in "abSTOPxyz"]
    lists = LogprobsLists([[i] for i in ids], [[-1.0]] * len(ids), [1] * len(ids))
    result = target.process_outputs([output(ids, new_logprobs=lists)])
    assert result.reqs_to_abort == ["x-1"]
    (final,) = result.request_outputs
    assert isinstance(final, RequestOutput)
    completion = final.outputs[0]
    assert completion.text == "ab"
    assert completion.token_ids == ids[:6]
    assert completion.logprobs is not None
    assert len(completion.logprobs) == 6
    assert completion.cumulative_logprob == -6.0
    assert (completion.finish_reason, completion.stop_reason) == ("stop", "STOP")
    assert not target.has_unfinished_requests()
    assert target.process_outputs([output(ids)]).request_outputs == [], "OUT-10: unknown now"


def test_stop_string_wins_over_the_cores_own_end() -> None:
    target = processor()
    target.add_request(request(stop="b"), None)
    result = target.process_outputs(
        [output([*text_ids("a"), *text_ids("b")], finish_reason=FinishReason.LENGTH)]
    )
    assert result.reqs_to_abort == [], "the core has ended it already"
    assert result.request_outputs[0].outputs[0].finish_reason == "stop"  # type: ignore[union-attr]


@given(
    text=st.text(alphabet="abc", min_size=1, max_size=20),
    stop=st.text(alphabet="abc", min_size=1, max_size=3),
    interval=st.integers(1, 4),
    cuts=st.lists(st.integers(1, 3), max_size=20),
)
@settings(max_examples=150, deadline=None)
def test_s26_joined_deltas_equal_final_for_all_intervals(
    text: str, stop: str, interval: int, cuts: list[int]
) -> None:
    """The concatenation law, through the whole processor."""
    ids = [text_ids(char)[0] for char in text]
    steps = []
    for length in [*cuts, len(ids)]:
        if ids[:length]:
            steps.append(output(ids[:length]))
        ids = ids[length:]
    steps[-1].finish_reason = FinishReason.LENGTH
    results = {
        kind: play(steps, request(output_kind=kind, stop=stop), stream_interval=interval)
        for kind in (CUMULATIVE, DELTA, FINAL)
    }
    final = results[FINAL][0].outputs[0]
    assert len(results[FINAL]) == 1
    assert "".join(r.text for r in results[DELTA]) == final.text
    assert [i for r in results[DELTA] for i in r.outputs[0].token_ids] == final.token_ids
    assert results[CUMULATIVE][-1].outputs[0] == final
    for earlier, later in zip(results[CUMULATIVE], results[CUMULATIVE][1:], strict=False):
        assert later.text.startswith(earlier.text)
    assert results[DELTA][-1].outputs[0].finish_reason == final.finish_reason
    assert [r.finished for r in results[DELTA]] == [False] * (len(results[DELTA]) - 1) + [True]


# ---------------------------------------------------------------------- logprobs


def lists(rows: list[list[int]], ranks: list[int] | None = None) -> LogprobsLists:
    return LogprobsLists(
        rows, [[-0.5 - i for i in range(len(row))] for row in rows], ranks or [1] * len(rows)
    )


@pytest.mark.parametrize("kind", [CUMULATIVE, DELTA, FINAL])
@pytest.mark.parametrize("flat", [False, True])
def test_prompt_logprobs_once_and_sample_logprobs_by_kind(
    kind: RequestOutputKind, flat: bool
) -> None:
    steps = letters("abc")
    for step in steps:
        step.new_logprobs = lists([[*step.new_token_ids, 1]])
    steps[0].new_prompt_logprobs = lists([[i] for i in PROMPT[1:]])
    made = request(output_kind=kind, logprobs=1, prompt_logprobs=0, flat_logprobs=flat)
    results = play(steps, made)
    sizes = [len(r.outputs[0].logprobs or ()) for r in results]
    prompt_sizes = [len(r.prompt_logprobs or ()) for r in results]
    assert sizes == {CUMULATIVE: [1, 2, 3], DELTA: [1, 1, 1], FINAL: [3]}[kind]
    assert prompt_sizes == {CUMULATIVE: [2, 2, 2], DELTA: [2, 0, 0], FINAL: [2]}[kind]
    assert results[0].prompt_logprobs is not None
    assert not results[0].prompt_logprobs[0]
    assert results[-1].outputs[0].cumulative_logprob == -1.5


def test_abort_with_logprobs_in_delta_mode_repeats_nothing() -> None:
    """Wart of 5.3.4: a slice by minus the number of new tokens returns everything when it is 0."""
    target = processor()
    target.add_request(request(output_kind=DELTA, logprobs=0), None)
    target.process_outputs([output(text_ids("a"), new_logprobs=lists([text_ids("a")]))])
    ids, (final,) = target.abort_requests(["x"], internal=False)
    assert ids == ["x-1"]
    assert isinstance(final, RequestOutput)
    assert final.outputs[0].logprobs == []
    assert final.outputs[0].token_ids == []
    assert final.outputs[0].text == ""


# ---------------------------------------------------------------------- ends


def test_abort_keeps_what_was_generated_and_releases_held_text() -> None:
    target = processor()
    target.add_request(request(output_kind=FINAL, stop="bcd"), None)
    for step in letters("abc", last=None):
        assert target.process_outputs([step]).request_outputs == []
    _, (final,) = target.abort_requests(["x"], internal=False)
    assert isinstance(final, RequestOutput)
    assert final.text == "abc"
    assert final.finished
    assert final.outputs[0].finish_reason == "abort"
    assert not target.has_unfinished_requests()
    assert target.external_req_ids == {}


def test_out3_external_ids_reach_all_that_share_them() -> None:
    target = processor()
    for number in range(3):
        target.add_request(request(f"x-{number}"), None)
    assert target.has_external_request("x")
    ids, outputs = target.abort_requests(["x", "unknown"], internal=False)
    assert ids == ["x-0", "x-1", "x-2"]
    assert len(outputs) == 3


def test_out30_an_external_id_is_known_until_its_last_child_ended() -> None:
    """ENG-41, OUT-30: what is left of a request can be aborted, and its id is still taken."""
    target = processor()
    made = request(n=3, temperature=1.0)
    parent = ParentRequest(made)
    for index in range(3):
        child_id, params = parent.get_child_info(index)
        child = EngineCoreRequest(
            child_id, list(PROMPT), None, params, None, 1.0, external_req_id="x"
        )
        target.add_request(child, None, parent, index)
    ended = output(text_ids("a"), "1_x-1", finish_reason=FinishReason.LENGTH)
    target.process_outputs([ended], 1.0)
    assert target.has_external_request("x")
    assert target.abort_requests(["x"], internal=False)[0] == ["0_x-1", "2_x-1"]
    assert target.external_req_ids == target.parent_requests == {}


def test_duplicate_internal_ids_are_refused() -> None:
    target = processor()
    target.add_request(request(), None)
    with pytest.raises(DuplicateRequestError):
        target.add_request(request(), None)


@pytest.mark.parametrize(
    ("client_fault", "kind"), [(True, RequestError), (False, RequestFailedError)]
)
def test_errors_carry_their_reason(client_fault: bool, kind: type[Exception]) -> None:
    step = output(
        [],
        finish_reason=FinishReason.ERROR,
        error="NaN in logits",
        error_is_client_fault=client_fault,
    )
    (result,) = play([step], request())
    assert result.finished
    assert result.outputs[0].finish_reason == "error"
    assert isinstance(result.error, kind)
    assert "NaN in logits" in str(result.error)


def test_error_of_one_child_marks_the_parent() -> None:
    target = processor()
    made = request(n=2, output_kind=FINAL)
    parent = ParentRequest(made)
    for index in range(2):
        child = request(output_kind=FINAL)
        child.request_id, child.sampling_params = parent.get_child_info(index)
        target.add_request(child, None, parent, index)
    assert not target.process_outputs(
        [output([], "0_x-1", finish_reason=FinishReason.ERROR, error="bad")]
    ).request_outputs
    (result,) = target.process_outputs(
        [output(text_ids("a"), "1_x-1", finish_reason=FinishReason.LENGTH)]
    ).request_outputs
    assert isinstance(result, RequestOutput)
    assert [c.finish_reason for c in result.outputs] == ["error", "length"]
    assert "bad" in str(result.error)


def test_out17_pooling() -> None:
    target = processor(stream_interval=5)
    made = EngineCoreRequest(
        "x-1", list(PROMPT), None, None, PoolingParams(), 1.0, external_req_id="x"
    )
    target.add_request(made, "the sea")
    (result,) = target.process_outputs(
        [output([], pooling_output=[0.5, 0.25], finish_reason=FinishReason.STOP)]
    ).request_outputs
    assert isinstance(result, PoolingRequestOutput)
    assert result.outputs.data == [0.5, 0.25]
    assert result.request_id == "x"
    assert result.finished
    target.add_request(made, None)
    _, (aborted,) = target.abort_requests(["x"], internal=False)
    assert isinstance(aborted, PoolingRequestOutput)
    assert aborted.outputs.data == []
    assert aborted.finish_reason == "abort"


# ---------------------------------------------------------------------- queues


class Queue:
    def __init__(self) -> None:
        self.items: list[Any] = []

    def put(self, item: Any) -> None:
        self.items.append(item)


def test_outputs_of_requests_with_a_queue_go_there() -> None:
    target, queue = processor(), Queue()
    target.add_request(request(), None, queue=queue)
    target.add_request(request("y-1", "y"), None)
    result = target.process_outputs([output(text_ids("a")), output(text_ids("b"), "y-1")])
    assert [r.request_id for r in result.request_outputs] == ["y"]
    assert [item.text for item in queue.items] == ["a"]
    ids, outputs = target.abort_requests(["x"], internal=False)
    assert (ids, outputs) == (["x-1"], [])
    assert queue.items[-1].outputs[0].finish_reason == "abort"


def test_out4_engine_errors_reach_every_queue_once() -> None:
    target, shared, own = processor(), Queue(), Queue()
    target.add_request(request("a-1", "a"), None, queue=shared)
    target.add_request(request("b-1", "b"), None, queue=shared)
    target.add_request(request("c-1", "c"), None, queue=own)
    error = RuntimeError("dead")
    target.propagate_error(error)
    assert shared.items == [error]
    assert own.items == [error]


# ---------------------------------------------------------------------- through the engine


def test_s23_trace_headers_come_back_on_their_request(make_engine: EngineMaker) -> None:
    engine = make_engine([text_ids("a")])
    engine.add_request("x", "abc", SamplingParams(), trace_headers={"traceparent": "1"})
    engine.add_request("y", "abc", SamplingParams())
    headers = {o.request_id: o.trace_headers for o in run(engine)}
    assert headers == {"x": {"traceparent": "1"}, "y": None}


def test_p16_truncation_is_visible(make_engine: EngineMaker) -> None:
    engine = make_engine([text_ids("a")])
    options = {"truncate_prompt_tokens": 3}
    engine.add_request("x", list(range(10)), SamplingParams(), tokenization_kwargs=options)
    (result,) = run(engine)
    assert result.num_truncated_prompt_tokens == 7
    assert result.prompt_token_ids == [7, 8, 9]


def test_finished_listener_is_called_once_per_sequence() -> None:
    """Tracing works without statistics (wart of OUT-11)."""
    seen: list[Any] = []

    class Listener:
        def __call__(self, *args: Any) -> None:
            seen.append(args)

        def close(self) -> None:
            seen.append("closed")

    target = processor(on_finished=Listener())
    target.add_request(request(), None)
    target.process_outputs(letters("ab")[:1])
    target.process_outputs(letters("ab")[1:], iteration_stats=IterationStats(2.0))
    ((state, finished, reason),) = seen
    assert (state.external_req_id, finished, reason) == ("x", None, FinishReason.LENGTH)
    target.close()
    assert seen[1:] == ["closed"]
