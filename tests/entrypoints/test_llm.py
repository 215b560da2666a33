"""`LLM` over a scripted core: rules LLM-*, BEAM-*, POOL-*, claims S1 and S17, P10, P13, P14."""

from __future__ import annotations

import gc
import math
import threading
import time
from typing import Any, ClassVar

import pytest

from tellin.engine.llm_engine import LLMEngine
from tellin.entrypoints.llm import LLM
from tellin.exceptions import (
    ContextLengthError,
    EngineClosedError,
    EngineError,
    InvalidParameterError,
    RequestFailedError,
    UnsupportedFeatureError,
)
from tellin.outputs import PoolingRequestOutput, RequestOutput
from tellin.protocol import EngineCoreRequest, FinishReason
from tellin.sampling_params import (
    BeamSearchParams,
    PoolingParams,
    RequestOutputKind,
    SamplingParams,
)
from tellin.step_protocol import LogprobsLists
from tests.engine.fakes import EngineMaker, FakeClient, text_ids
from tests.engine.tokenizers_for_tests import get


def echo(request: EngineCoreRequest) -> list[list[int]]:
    """Says the prompt again, one token per step: longer prompts end later."""
    return [[token_id] for token_id in request.prompt_token_ids or ()]


@pytest.fixture
def llm(make_engine: EngineMaker) -> LLM:
    return LLM.from_engine(make_engine(echo))


def is_idle(llm: LLM) -> bool:
    engine = llm.llm_engine
    return (
        not engine.has_unfinished_requests()
        and engine.output_processor.external_req_ids == {}
        and engine.engine_core.live == {}  # type: ignore[attr-defined]
        and llm._runner.driver._inboxes == {}
    )


# ---------------------------------------------------------------------- generate


def test_s01_s17_only_the_public_engine_calls(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[str] = []
    for name in ("add_request", "step", "abort_request"):
        original = getattr(llm.llm_engine, name)
        monkeypatch.setattr(
            llm.llm_engine,
            name,
            lambda *a, o=original, n=name, **k: (used.append(n), o(*a, **k))[1],
        )
    llm.generate(["ab", "c"])
    assert used == ["add_request", "add_request", "step", "step"]
    used.clear()
    llm.chat([{"role": "user", "content": "x"}])
    assert used[0] == "add_request"
    assert set(used[1:]) == {"step"}


@pytest.mark.parametrize(
    "prompts",
    [
        "ab",
        ["ab"],
        text_ids("ab"),
        [text_ids("ab")],
        {"prompt": "ab"},
        [{"prompt_token_ids": text_ids("ab")}],
    ],
)
def test_llm10_llm17_one_prompt_in_all_forms(llm: LLM, prompts: Any) -> None:
    (output,) = llm.generate(prompts)
    assert output.outputs[0].text == "ab"
    assert output.finished


def test_llm10_no_prompts_no_outputs(llm: LLM) -> None:
    assert llm.generate([]) == []
    assert llm.chat([]) == []


def test_llm16_results_are_in_order_of_the_prompts(llm: LLM) -> None:
    prompts = ["abcdef", "a", "abc", "ab"]
    assert [output.prompt for output in llm.generate(prompts)] == prompts
    assert [output.outputs[0].text for output in llm.generate(prompts)] == prompts


def test_llm15_callers_params_are_not_touched(llm: LLM) -> None:
    params = SamplingParams(output_kind=RequestOutputKind.DELTA)
    (output,) = llm.generate("abc", params)
    assert params.output_kind == RequestOutputKind.DELTA
    assert output.outputs[0].text == "abc"


def test_llm11_scalars_and_sequences(llm: LLM) -> None:
    params = [SamplingParams(stop="b"), SamplingParams(stop="c")]
    assert [o.outputs[0].text for o in llm.generate(["abc", "abc"], params)] == ["a", "ab"]
    with pytest.raises(InvalidParameterError, match=r"sampling_params has 2 entries for 3 prompts"):
        llm.generate(["a", "b", "c"], params)
    with pytest.raises(InvalidParameterError, match=r"priority has 1 entries for 2"):
        llm.generate(["a", "b"], priority=[1])
    with pytest.raises(InvalidParameterError, match=r"lora_request has 0 entries"):
        llm.generate(["a", "b"], lora_request=[])
    assert is_idle(llm)
    llm.generate(["a", "b"], priority=[5, -5])
    client = llm.llm_engine.engine_core
    assert [r.priority for r in client.requests[-2:]] == [5, -5]  # type: ignore[attr-defined]


def test_p10_n_completions(llm: LLM) -> None:
    (output,) = llm.generate("abc", SamplingParams(n=3))
    assert [completion.index for completion in output.outputs] == [0, 1, 2]
    assert {completion.text for completion in output.outputs} == {"abc"}


def test_default_params_are_the_models(make_engine: EngineMaker) -> None:
    llm = LLM.from_engine(make_engine(echo, generation_defaults={"temperature": 0.3, "top_k": 9}))
    params = llm.get_default_sampling_params()
    assert (params.temperature, params.top_k, params.max_tokens) == (0.3, 9, 16)
    llm.generate("a")
    sent = llm.llm_engine.engine_core.requests[0].sampling_params  # type: ignore[attr-defined]
    assert (sent.temperature, sent.top_k) == (0.3, 9)


# ---------------------------------------------------------------------- errors


LONG = "x" * 100


def test_p13_p14_llm14_one_bad_prompt_raises_and_leaves_nothing(llm: LLM) -> None:
    with pytest.raises(ContextLengthError, match="100"):
        llm.generate(["ab", LONG, "c"])
    assert is_idle(llm)
    (output,) = llm.generate(["hello"])
    assert output.outputs[0].text == "hello"


def test_p14_on_error_return_gives_one_output_per_prompt(llm: LLM) -> None:
    outputs = llm.generate(["ab", LONG, "", "c"], on_error="return")
    assert [output.text for output in outputs] == ["ab", "", "", "c"]
    assert [output.prompt for output in outputs] == ["ab", LONG, "", "c"]
    assert [type(output.error) for output in outputs] == [
        type(None),
        ContextLengthError,
        InvalidParameterError,
        type(None),
    ]
    assert outputs[1].finished
    assert outputs[1].outputs[0].finish_reason == "error"
    assert is_idle(llm)
    with pytest.raises(InvalidParameterError, match="on_error"):
        llm.generate("a", on_error="ignore")  # type: ignore[arg-type]


def failing(request: EngineCoreRequest) -> list[Any]:
    if request.prompt_token_ids == text_ids("bad"):
        return [{"new_token_ids": [], "finish_reason": FinishReason.ERROR, "error": "NaN"}]
    return echo(request)


def test_requests_that_fail_later(make_engine: EngineMaker) -> None:
    llm = LLM.from_engine(make_engine(failing))
    with pytest.raises(RequestFailedError, match="NaN"):
        llm.generate(["abcdef", "bad"])
    assert is_idle(llm)
    good, bad = llm.generate(["abcdef", "bad"], on_error="return")
    assert good.text == "abcdef"
    assert "NaN" in str(bad.error)


def test_llm19_a_step_that_raises_leaves_nothing(make_engine: EngineMaker) -> None:
    class Client(FakeClient):
        fails = True

        def get_output(self, timeout: float | None = None) -> Any:
            if self.fails:
                raise RuntimeError("model broke")
            return super().get_output(timeout)

    llm = LLM.from_engine(make_engine(echo, client_class=Client))
    with pytest.raises(RuntimeError, match="model broke"):
        llm.generate(["ab", "c"])
    assert is_idle(llm)
    Client.fails = False
    assert llm.generate("ab")[0].text == "ab"


def test_interrupt_leaves_nothing(make_engine: EngineMaker) -> None:
    class Client(FakeClient):
        def get_output(self, timeout: float | None = None) -> Any:
            if self.names().count("get_output") == 3:
                raise KeyboardInterrupt
            return super().get_output(timeout)

    llm = LLM.from_engine(make_engine(echo, client_class=Client))
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["abcdefghijklm"] * 2)
    assert is_idle(llm)


def test_a_sleeping_engine_says_so_instead_of_waiting(make_engine: EngineMaker) -> None:
    class Client(FakeClient):
        def get_output(self, timeout: float | None = None) -> Any:
            from tellin.protocol import EngineCoreOutputs

            return EngineCoreOutputs()

    llm = LLM.from_engine(make_engine(echo, client_class=Client))
    llm.sleep(0)
    with pytest.raises(EngineError, match="wake_up"):
        llm.generate("a")
    assert is_idle(llm)


# ---------------------------------------------------------------------- chat


def test_chat_renders_the_template(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "hi"}]
    (output,) = llm.chat(conversation)
    assert output.prompt == "<s><|im_start|>user\nhi<|im_end|><|im_start|>assistant\n"
    assert len(llm.chat([conversation, conversation])) == 2
    with pytest.raises(ValueError, match="add_generation_prompt"):
        llm.chat(conversation, continue_final_message=True)
    with pytest.raises(ValueError, match="message"):
        llm.chat([[]])
    first, second = llm.chat([conversation, []], on_error="return")
    assert first.error is None
    assert second.error is not None


# ---------------------------------------------------------------------- stream


def test_stream_yields_deltas(llm: LLM) -> None:
    outputs = list(llm.stream("abc"))
    assert [output.text for output in outputs] == ["a", "b", "c"]
    assert [output.finished for output in outputs] == [False, False, True]
    assert is_idle(llm)
    pieces = [output.text for output in llm.stream([{"role": "user", "content": "hi"}])]
    assert "".join(pieces).startswith("user\nhi")


def test_stream_refuses_at_once(llm: LLM) -> None:
    with pytest.raises(ContextLengthError):
        llm.stream(LONG)
    with pytest.raises(InvalidParameterError):
        llm.stream("")
    assert is_idle(llm)


@pytest.mark.parametrize("how", ["break", "close", "never started", "with"])
def test_an_abandoned_stream_aborts(llm: LLM, how: str) -> None:
    stream = llm.stream("abcdef")
    if how == "break":
        for _ in stream:
            break
        del stream
    elif how == "close":
        next(stream)
        stream.close()
        stream.close()
        assert list(stream) == []
    elif how == "with":
        with stream:
            next(stream)
    else:
        del stream
    gc.collect()
    assert is_idle(llm)


def test_streams_and_calls_can_be_mixed(llm: LLM) -> None:
    first, second = llm.stream("abc"), llm.stream("xyz")
    assert next(first).text == "a"
    assert llm.generate("hello")[0].text == "hello"
    assert [output.text for output in second] == ["x", "y", "z"]
    assert [output.text for output in first] == ["b", "c"]


def test_stream_of_several_completions(llm: LLM) -> None:
    texts = {0: "", 1: ""}
    for output in llm.stream("abc", SamplingParams(n=2)):
        (completion,) = output.outputs
        texts[completion.index] += completion.text
    assert texts == {0: "abc", 1: "abc"}


def test_stream_raises_the_requests_error(make_engine: EngineMaker) -> None:
    llm = LLM.from_engine(make_engine(failing))
    with pytest.raises(RequestFailedError, match="NaN"):
        list(llm.stream("bad"))


def test_a_stream_dropped_inside_a_step_does_not_block(make_engine: EngineMaker) -> None:
    """A garbage collector may run anywhere, also in the thread that is stepping."""
    holder: list[Any] = []

    class Client(FakeClient):
        def get_output(self, timeout: float | None = None) -> Any:
            holder.clear()
            return super().get_output(timeout)

    llm = LLM.from_engine(make_engine(echo, client_class=Client))
    holder.append(llm.stream("abcdef"))
    assert llm.generate("xy")[0].text == "xy"
    assert is_idle(llm)


# ---------------------------------------------------------------------- enqueue


def test_enqueue_and_wait(llm: LLM) -> None:
    ids = llm.enqueue(["abc", "a"])
    ids += llm.enqueue("xy")
    assert [request_id.split("-")[0] for request_id in ids] == ["0", "1", "2"]
    assert llm.generate("other")[0].text == "other"
    outputs = llm.wait_for_completion(RequestOutput)
    assert [output.text for output in outputs] == ["abc", "a", "xy"]  # type: ignore[union-attr]
    assert llm.wait_for_completion() == []
    llm.enqueue("a")
    with pytest.raises(InvalidParameterError, match="PoolingRequestOutput"):
        llm.wait_for_completion(PoolingRequestOutput)


# ---------------------------------------------------------------------- threads


class SlowClient(FakeClient):
    """Steps that take a moment, so that threads meet; records how many requests each step had."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.batch_sizes: list[int] = []
        self.is_stepping = False

    def get_output(self, timeout: float | None = None) -> Any:
        assert not self.is_stepping, "two threads in the engine"
        self.is_stepping = True
        time.sleep(0.001)
        self.batch_sizes.append(len(self.live))
        result = super().get_output(timeout)
        self.is_stepping = False
        return result

    def add_request(self, request: EngineCoreRequest) -> None:
        assert not self.is_stepping
        super().add_request(request)


def test_threads_share_batches(make_engine: EngineMaker) -> None:
    """Thread safety: results are each caller's own, and requests of all run together."""
    llm = LLM.from_engine(make_engine(echo, client_class=SlowClient))
    results: dict[int, list[str]] = {}
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            prompts = [f"{number}{index}abcdefghij" for index in range(4)]
            if number % 2:
                texts = [o.text for o in llm.generate(prompts)]
            else:
                texts = ["".join(d.text for d in llm.stream(prompt)) for prompt in prompts]
            assert texts == prompts
            with pytest.raises(ContextLengthError):
                llm.generate(LONG)
            results[number] = texts
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert failures == []
    assert sorted(results) == list(range(8))
    client = llm.llm_engine.engine_core
    assert max(client.batch_sizes) > 8  # type: ignore[attr-defined]
    assert is_idle(llm)


def test_an_error_in_a_step_reaches_every_thread(make_engine: EngineMaker) -> None:
    class Client(SlowClient):
        has_failed = False

        def get_output(self, timeout: float | None = None) -> Any:
            if len(self.live) == 3 and len(self.batch_sizes) > 20 and not self.has_failed:
                self.has_failed = True
                raise RuntimeError("model broke")
            return super().get_output(timeout)

    llm = LLM.from_engine(make_engine(echo, client_class=Client))
    errors: list[str] = []

    def work() -> None:
        try:
            llm.generate("x" * 60)
        except RuntimeError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert errors == ["model broke"] * 3
    assert is_idle(llm)


# ---------------------------------------------------------------------- progress


def test_p57_silent_unless_asked(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    llm.generate(["ab", "c"])
    assert capfd.readouterr() == ("", "")
    llm.generate(["ab", "c"], use_tqdm=True)
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "Processed prompts" in captured.err
    assert "tokens/s" in captured.err


def test_llm20_progress_bars(llm: LLM) -> None:
    bars: list[Any] = []

    class Bar:
        def __init__(self, **options: Any) -> None:
            self.options, self.count, self.postfix, self.closed = options, 0, "", False
            self.format_dict = {"elapsed": 2.0}
            bars.append(self)

        def update(self, count: int) -> None:
            self.count += count

        def set_postfix_str(self, text: str, refresh: bool) -> None:
            self.postfix = text

        def close(self) -> None:
            self.closed = True

    llm.generate(["ab", "cd"], SamplingParams(n=2), use_tqdm=Bar)
    rendering, running = bars
    assert (rendering.options["total"], rendering.count, rendering.closed) == (2, 2, True)
    assert (running.options["total"], running.count, running.closed) == (4, 4, True)
    assert running.postfix == "input 4.0 tokens/s, output 4.0 tokens/s"


# ---------------------------------------------------------------------- life cycle


def test_context_manager_and_use_after_shutdown(make_engine: EngineMaker) -> None:
    with LLM.from_engine(make_engine(echo)) as llm:
        stream = llm.stream("abc")
    llm.shutdown()
    assert make_engine.client.is_closed
    with pytest.raises(EngineClosedError):
        llm.generate("a")
    with pytest.raises(EngineClosedError):
        next(stream)


def test_llm3_data_parallel_is_refused() -> None:
    with pytest.raises(ValueError, match="data_parallel_size"):
        LLM("m", data_parallel_size=2)


def test_unknown_arguments_are_refused() -> None:
    with pytest.raises(InvalidParameterError, match="max_num_seqs"):
        LLM("m", max_num_seq=2)


def test_controls_reach_the_engine(llm: LLM) -> None:
    calls = llm.llm_engine.engine_core.calls  # type: ignore[attr-defined]
    calls.clear()
    llm.sleep(2, "keep")
    llm.wake_up(["weights"])
    assert llm.reset_prefix_cache()
    llm.start_profile("p")
    llm.stop_profile()
    names = [call[0] for call in calls]
    assert names == ["sleep", "wake_up", "is_sleeping", "reset_prefix_cache", "profile", "profile"]
    assert llm.get_world_size() == 1
    assert llm.supported_tasks == ("generate",)
    assert "test-model" in repr(llm)
    with pytest.raises(UnsupportedFeatureError):
        llm.get_metrics()


def test_p35_nothing_is_kept_of_finished_requests(make_engine: EngineMaker) -> None:
    """Steady traffic: the number of objects does not grow with the number of requests."""
    llm = LLM.from_engine(make_engine(echo, log_stats=True))
    client = llm.llm_engine.engine_core

    def traffic() -> int:
        for number in range(60):
            llm.generate([f"{number}a", f"{number}b"], SamplingParams(n=2, stop="zz", logprobs=0))
            next(llm.stream(f"{number}c"))
        client.calls.clear()  # type: ignore[attr-defined]
        client.requests.clear()  # type: ignore[attr-defined]
        gc.collect()
        return len(gc.get_objects())

    traffic()
    first = traffic()
    assert traffic() - first < 60
    assert is_idle(llm)


# ---------------------------------------------------------------------- beam search

WORDS = text_ids("abcd")


class BeamClient(FakeClient):
    """A language model of a few words: next-token logprobs depend on the last token only."""

    TABLE: ClassVar[dict[str, dict[str, float]]] = {
        "a": {"b": 0.6, "c": 0.4},
        "b": {"a": 0.5, "d": 0.5},
        "c": {"d": 0.9, "a": 0.1},
        "d": {"a": 1.0},
    }

    def _next(self, request_id: str, steps: list[Any]) -> Any:
        output = super()._next(request_id, steps)
        request = next(r for r in self.requests if r.request_id == request_id)
        last = get("byte_level").decode((request.prompt_token_ids or [])[-1:])
        entries = [(text_ids(word)[0], math.log(p)) for word, p in self.TABLE[last].items()]
        best = max(entries, key=lambda entry: entry[1])
        rows = [best, *entries]
        output.new_token_ids = [best[0]]
        output.new_logprobs = LogprobsLists([[i for i, _ in rows]], [[p for _, p in rows]], [1])
        return output


def best_paths(start: str, length: int, width: int) -> list[tuple[str, float]]:
    paths = [(start, 0.0)]
    for _ in range(length):
        paths = [
            (p + w, s + math.log(q)) for p, s in paths for w, q in BeamClient.TABLE[p[-1]].items()
        ]
        paths = sorted(paths, key=lambda path: -path[1])[:width]
    return [(path[len(start) :], score) for path, score in paths]


@pytest.mark.parametrize("limit", [None, 1])
def test_beam_search(make_engine: EngineMaker, limit: int | None) -> None:
    llm = LLM.from_engine(make_engine([[0]], client_class=BeamClient))
    params = BeamSearchParams(beam_width=3, max_tokens=4)
    outputs = llm.beam_search(["a", "c"], params, concurrency_limit=limit)
    for start, output in zip("ac", outputs, strict=True):
        expected = best_paths(start, 4, 3)
        assert [beam.text for beam in output.sequences] == [text for text, _ in expected]
        for beam, (_, score) in zip(output.sequences, expected, strict=True):
            assert beam.cum_logprob == pytest.approx(score)
            assert beam.tokens[0] == text_ids(start)[0]
            assert beam.finish_reason == "length"
    assert llm.beam_search([], params) == []
    assert is_idle(llm)


def test_beam4_end_of_sequence_completes_a_beam(make_engine: EngineMaker) -> None:
    eos = text_ids("d")[0]
    llm = LLM.from_engine(make_engine([[0]], client_class=BeamClient, eos_token_ids=(eos,)))
    (output,) = llm.beam_search("c", BeamSearchParams(beam_width=2, max_tokens=2))
    best = output.sequences[0]
    assert best.tokens == [*text_ids("c"), eos]
    assert best.finish_reason == "stop"
    ignoring = BeamSearchParams(beam_width=2, max_tokens=2, ignore_eos=True)
    (output,) = llm.beam_search("c", ignoring)
    assert all(len(beam.tokens) == 3 for beam in output.sequences)


# ---------------------------------------------------------------------- pooling

VECTORS = {"a": [1.0, 0.0], "b": [0.6, 0.8], "c": [0.0, 1.0]}


@pytest.fixture
def embedder(make_engine: EngineMaker) -> LLM:
    def script(request: EngineCoreRequest) -> list[dict[str, Any]]:
        text = get("byte_level").decode(request.prompt_token_ids or [])
        return [
            {
                "new_token_ids": [],
                "pooling_output": VECTORS[text],
                "finish_reason": FinishReason.STOP,
            }
        ]

    engine = make_engine(script, runner_type="pooling")
    make_engine.client.utilities["get_supported_tasks"] = ["embed", "token_embed"]
    return LLM.from_engine(engine)


def test_pool4_embed(embedder: LLM) -> None:
    outputs = embedder.embed(["a", "b"])
    assert [output.outputs.embedding for output in outputs] == [VECTORS["a"], VECTORS["b"]]
    assert outputs[0].outputs.hidden_size == 2
    assert embedder.embed([]) == []
    (raw,) = embedder.encode("c", pooling_task="embed")
    assert raw.outputs.data == VECTORS["c"]


def test_pool1_pool2_pool3_refusals(embedder: LLM, llm: LLM) -> None:
    with pytest.raises(InvalidParameterError, match="pooling_task"):
        embedder.encode("a")
    with pytest.raises(UnsupportedFeatureError, match="classify"):
        embedder.classify("a")
    with pytest.raises(InvalidParameterError, match="token_embed"):
        embedder.encode("a", PoolingParams(task="token_embed"), pooling_task="embed")
    with pytest.raises(UnsupportedFeatureError, match="generate"):
        embedder.generate("a")
    with pytest.raises(UnsupportedFeatureError, match="generate text"):
        llm.embed("a")


def test_pool5_score(embedder: LLM) -> None:
    scores = [output.outputs.score for output in embedder.score("a", ["a", "b", "c"])]
    assert scores == pytest.approx([1.0, 0.6, 0.0])
    paired = embedder.score(["a", "b"], ["b", "b"])
    assert [output.outputs.score for output in paired] == pytest.approx([0.6, 1.0])
    assert "_" in paired[0].request_id
    for bad in (([], ["a"]), (["a", "b"], ["a"]), (["a", "b"], ["a"] * 3)):
        with pytest.raises(InvalidParameterError, match="score"):
            embedder.score(*bad)


def test_engine_is_the_users_too(llm: LLM) -> None:
    assert isinstance(llm.llm_engine, LLMEngine)

    llm.llm_engine.add_request("mine", "ab", SamplingParams())
    outputs = []
    while llm.llm_engine.has_unfinished_requests():
        outputs += llm.llm_engine.step()
    assert outputs[-1].request_id == "mine"
