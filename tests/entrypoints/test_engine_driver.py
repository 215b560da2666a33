"""An `LLM` and its engine used at the same time, or from within a step: errors, never a hang."""

from __future__ import annotations

from typing import Any

import pytest

from tellin import LLM
from tellin.exceptions import EngineError, RequestFailedError
from tests.engine.fakes import EngineMaker, FakeClient
from tests.entrypoints.conftest import echo


def aborting_after(make_engine: EngineMaker, request_ids: list[str]) -> LLM:
    """An `LLM` whose user aborts these requests through ``llm_engine`` in the third step."""

    class Client(FakeClient):
        num_steps = 0

        def get_output(self, timeout: float | None = None) -> Any:
            self.num_steps += 1
            assert self.num_steps < 100, "waits for ever"
            if self.num_steps == 3:
                llm.llm_engine.abort_request(request_ids)
            return super().get_output(timeout)

    llm = LLM.from_engine(make_engine(echo, client_class=Client))
    return llm


@pytest.mark.parametrize("request_ids", [["0"], ["1"], ["0", "1"]])
def test_a_request_aborted_behind_its_back_is_an_error(
    make_engine: EngineMaker, request_ids: list[str]
) -> None:
    llm = aborting_after(make_engine, request_ids)
    with pytest.raises(RequestFailedError, match="aborted through llm_engine"):
        llm.generate(["abcdefgh", "ijklmnop"])
    assert not llm.llm_engine.has_unfinished_requests()
    assert llm.generate("xy")[0].text == "xy"


@pytest.mark.parametrize("request_ids", [["0"], ["1"], ["0", "1"]])
def test_5_8_the_others_complete_with_on_error_return(
    make_engine: EngineMaker, request_ids: list[str]
) -> None:
    llm = aborting_after(make_engine, request_ids)
    outputs = llm.generate(["abcdefgh", "ijklmnop"], on_error="return")
    assert [o.request_id for o in outputs] == ["0", "1"]
    for output, prompt in zip(outputs, ["abcdefgh", "ijklmnop"], strict=True):
        assert output.prompt == prompt
        if output.request_id in request_ids:
            assert isinstance(output.error, RequestFailedError)
            assert "aborted through llm_engine" in str(output.error)
            assert output.outputs[0].finish_reason == "abort"
        else:
            assert output.error is None
            assert output.text == prompt
    assert not llm.llm_engine.has_unfinished_requests()


def test_a_stream_aborted_behind_its_back_is_an_error(make_engine: EngineMaker) -> None:
    llm = aborting_after(make_engine, ["0"])
    stream = llm.stream("abcdefgh")
    assert next(stream).text == "a"
    with pytest.raises(RequestFailedError, match="aborted through llm_engine"):
        list(stream)
    assert llm.generate("xy")[0].text == "xy"


@pytest.mark.parametrize("how", ["generate", "next"])
def test_calls_from_within_a_step_are_refused(make_engine: EngineMaker, how: str) -> None:
    """A logits processor that generates would wait for the step that it is part of."""
    errors: list[str] = []

    class Client(FakeClient):
        def get_output(self, timeout: float | None = None) -> Any:
            if not errors:
                with pytest.raises(EngineError) as caught:
                    llm.generate("inner") if how == "generate" else next(stream)
                errors.append(str(caught.value))
            return super().get_output(timeout)

    llm = LLM.from_engine(make_engine(echo, client_class=Client))
    stream = llm.stream("abc")
    assert llm.generate("outer")[0].text == "outer"
    assert "within one of its own steps" in errors[0]
    assert not llm.llm_engine.has_unfinished_requests() or how == "generate"
