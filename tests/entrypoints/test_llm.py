"""`LLM` over a scripted core: rules LLM-*, claims S1 and S17, P10, P13, P14."""

from __future__ import annotations

import gc
from typing import Any

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
from tellin.sampling_params import (
    RequestOutputKind,
    SamplingParams,
)
from tests.engine.fakes import EngineMaker, FakeClient, text_ids
from tests.entrypoints.conftest import LONG, echo, failing, is_idle

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


def test_llm14_a_failed_enqueue_leaves_what_was_there_before(llm: LLM) -> None:
    llm.enqueue("abc")
    with pytest.raises(InvalidParameterError, match="empty"):
        llm.enqueue(["a", "", "b"])
    assert llm.llm_engine.get_num_unfinished_requests() == 1
    assert [output.text for output in llm.wait_for_completion()] == ["abc"]  # type: ignore[union-attr]
    assert is_idle(llm)


def test_enqueue_chat_waits_like_enqueue(llm: LLM) -> None:
    """What was enqueued comes in the order of submission, chats and prompts alike."""
    llm.enqueue("abc")
    ids = llm.enqueue_chat([{"role": "user", "content": "hi"}])
    assert [request_id.split("-")[0] for request_id in ids] == ["1"]
    prompts = [output.prompt for output in llm.wait_for_completion()]  # type: ignore[union-attr]
    assert prompts == ["abc", "<s><|im_start|>user\nhi<|im_end|><|im_start|>assistant\n"]


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


def test_engine_is_the_users_too(llm: LLM) -> None:
    assert isinstance(llm.llm_engine, LLMEngine)

    llm.llm_engine.add_request("mine", "ab", SamplingParams())
    outputs = []
    while llm.llm_engine.has_unfinished_requests():
        outputs += llm.llm_engine.step()
    assert outputs[-1].request_id == "mine"
