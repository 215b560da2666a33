"""`LLM.stream`, calls from several threads, progress: rules LLM-*, P57."""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

import pytest

from tellin.entrypoints.llm import LLM
from tellin.exceptions import (
    ContextLengthError,
    InvalidParameterError,
    RequestFailedError,
)
from tellin.protocol import EngineCoreRequest
from tellin.sampling_params import (
    SamplingParams,
)
from tests.engine.fakes import EngineMaker, FakeClient
from tests.entrypoints.conftest import LONG, echo, failing, is_idle

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
