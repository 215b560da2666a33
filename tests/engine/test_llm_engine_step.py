"""The steps of the synchronous shell over a scripted core: claims S8..S55, rules ENG-*."""

from __future__ import annotations

from typing import Any

import pytest

from tellin.config import LoRAConfig
from tellin.metrics import IterationStats
from tellin.protocol import EngineCoreRequest, FinishReason, LoRARequest
from tellin.sampling_params import RequestOutputKind, SamplingParams
from tellin.settings import Settings
from tests.engine.fakes import EngineMaker, make_config, run, text_ids
from tests.engine.tokenizers_for_tests import get

FINAL = RequestOutputKind.FINAL_ONLY
DELTA = RequestOutputKind.DELTA
ABC = [text_ids("a"), text_ids("b"), text_ids("c")]


def test_s08_s17_s48_the_driving_loop(make_engine: EngineMaker) -> None:
    """§1.15: every request gets exactly one final output."""
    engine = make_engine(ABC)
    for index in range(5):
        engine.add_request(str(index), "abc", SamplingParams(output_kind=FINAL))
    outputs = run(engine)
    assert sorted(output.request_id for output in outputs) == ["0", "1", "2", "3", "4"]
    assert {output.outputs[0].text for output in outputs} == {"abc"}


def test_s10_one_fetch_per_step(make_engine: EngineMaker) -> None:
    """ENG-31."""
    engine = make_engine(ABC)
    engine.add_request("x", "abc", SamplingParams())
    for count in range(1, 4):
        engine.step()
        assert make_engine.client.names().count("get_output") == count


def test_s41_s54_phases_of_a_step(make_engine: EngineMaker) -> None:
    """get_output, process_outputs, abort_requests, record; a stop string is aborted once."""
    engine = make_engine([text_ids("aSTOPb"), text_ids("c")], log_stats=True)
    order: list[str] = []
    manager = engine.logger_manager
    assert manager is not None

    def spy(owner: Any, name: str) -> None:
        original = getattr(owner, name)
        make_engine.monkeypatch.setattr(
            owner, name, lambda *a, **k: (order.append(name), original(*a, **k))[1]
        )

    spy(engine.engine_core, "get_output")
    spy(engine.output_processor, "process_outputs")
    spy(engine.engine_core, "abort_requests")
    spy(manager, "record")
    handle = engine.add_request("x", "abc", SamplingParams(stop=["STOP"]))
    (output,) = engine.step()
    assert order == ["get_output", "process_outputs", "abort_requests", "record"]
    assert output.outputs[0].text == "a"  # type: ignore[union-attr]
    assert output.outputs[0].finish_reason == "stop"  # type: ignore[union-attr]
    assert output.outputs[0].stop_reason == "STOP"  # type: ignore[union-attr]
    aborts = [call for call in make_engine.client.calls if call[0] == "abort_requests"]
    assert aborts == [("abort_requests", [handle])]
    assert not engine.has_unfinished_requests()


def test_s54_eos_finish_aborts_nothing(make_engine: EngineMaker) -> None:
    eos = get("byte_level").eos_token_id
    engine = make_engine([{"new_token_ids": [eos], "finish_reason": FinishReason.STOP}])
    engine.add_request("x", "abc", SamplingParams())
    (output,) = engine.step()
    assert make_engine.client.calls[-1] == ("abort_requests", [])
    assert output.outputs[0].token_ids == [eos]  # type: ignore[union-attr]
    assert output.outputs[0].text == ""  # type: ignore[union-attr]
    assert output.outputs[0].stop_reason is None  # type: ignore[union-attr]


def test_eng36_stop_string_of_a_silent_child_is_aborted(make_engine: EngineMaker) -> None:
    def script(request: EngineCoreRequest) -> list[list[int]]:
        return [text_ids("STOP" if request.request_id[0] == "0" else "x")] * 3

    engine = make_engine(script)
    handle = engine.add_request("x", "abc", SamplingParams(n=2, stop="STOP", output_kind=FINAL))
    assert engine.step() == []
    assert ("abort_requests", [f"0_{handle}"]) in make_engine.client.calls
    (output,) = run(engine)
    assert [c.finish_reason for c in output.outputs] == ["stop", "length"]


def test_s42_abort_order_and_late_tokens(make_engine: EngineMaker) -> None:
    """ENG-40, ENG-43, ENG-44: first the frontend, then the core; late tokens are ignored."""
    engine = make_engine(ABC)
    handle = engine.add_request("x", "abc", SamplingParams())
    order: list[str] = []
    original = engine.output_processor.abort_requests
    make_engine.monkeypatch.setattr(
        engine.output_processor,
        "abort_requests",
        lambda *a, **k: (order.append("output_processor"), original(*a, **k))[1],
    )
    client = make_engine.client
    make_engine.monkeypatch.setattr(client, "abort_requests", lambda ids: order.append("core"))
    (final,) = engine.abort_request("x")
    assert order == ["output_processor", "core"]
    assert final.finished
    assert client.live[handle], "this core has not heard of the abort and goes on"
    assert engine.step() == []


def test_eng42_aborts_of_unknown_ids_are_harmless(make_engine: EngineMaker) -> None:
    engine = make_engine(ABC)
    assert engine.abort_request(["nobody"]) == []
    handle = engine.add_request("x", "abc", SamplingParams())
    assert len(engine.abort_request(handle)) == 1
    assert engine.abort_request(handle) == []
    (sent,) = make_engine.client.calls[-2][1]
    assert type(sent) is str, "a plain string, that can travel to another process"


def test_s49_dummy_batch_comes_first(make_engine: EngineMaker) -> None:
    engine = make_engine(ABC)
    engine.add_request("x", "abc", SamplingParams())
    engine.should_execute_dummy_batch = True
    assert engine.step() == []
    assert "get_output" not in make_engine.client.names()
    assert make_engine.client.names().count("execute_dummy_batch") == 1
    assert not engine.should_execute_dummy_batch
    assert engine.step()


def test_eng33_empty_step_records_nothing(make_engine: EngineMaker) -> None:
    engine = make_engine(log_stats=True)
    make_engine.monkeypatch.setattr(engine, "_record_stats", lambda *a: pytest.fail("recorded"))
    assert engine.step() == []


def test_s50_s51_arguments_of_process_outputs(make_engine: EngineMaker) -> None:
    for log_stats in (False, True):
        engine = make_engine(ABC, log_stats=log_stats)
        seen: list[Any] = []
        original = engine.output_processor.process_outputs
        make_engine.monkeypatch.setattr(
            engine.output_processor,
            "process_outputs",
            lambda *a, o=original, s=seen: (s.append(a), o(*a))[1],
        )
        engine.add_request("x", "abc", SamplingParams())
        engine.step()
        outputs, timestamp, stats = seen[0]
        assert [output.new_token_ids for output in outputs] == [ABC[0]]
        assert timestamp == make_engine.client.clock
        assert isinstance(stats, IterationStats) if log_stats else stats is None


def test_s52_lora_states_are_pushed_into_scheduler_stats(make_engine: EngineMaker) -> None:
    engine = make_engine(ABC, log_stats=True, lora_config=LoRAConfig())
    recorded: list[Any] = []
    assert engine.logger_manager is not None
    make_engine.monkeypatch.setattr(
        engine.logger_manager, "record", lambda stats, *a: recorded.append(stats)
    )
    engine.add_request("x", "abc", SamplingParams(), lora_request=LoRARequest("cats", 1, "/a"))
    engine.step()
    assert recorded[0].running_lora_adapters == {"cats": 1}
    run(engine)
    assert recorded[-1].running_lora_adapters == {}


def test_s53_scopes(make_engine: EngineMaker) -> None:
    """ENG-30."""
    settings = Settings.from_environ({"TELLIN_PROFILING_SCOPES": "1"})
    for config, expected in ((make_config(settings=settings), 4), (make_config(), 0)):
        engine = make_engine(ABC, config=config)
        engine.add_request("x", "abc", SamplingParams())
        engine.step()
        names = [name for name, _, _ in engine.scopes.events]
        assert len(names) == expected
        assert (
            names
            == [
                f"llm_engine step: {phase}"
                for phase in ("get_output", "process_outputs", "abort_requests", "record_stats")
            ][:expected]
        )


def test_s55_recording_needs_manager_and_something_to_record(make_engine: EngineMaker) -> None:
    """The wart: stats of a step without outputs are recorded too, so gauges return to 0."""
    engine = make_engine(ABC, log_stats=True)
    engine.add_request("x", "abc", SamplingParams())
    recorded: list[Any] = []
    assert engine.logger_manager is not None
    make_engine.monkeypatch.setattr(engine.logger_manager, "record", lambda *a: recorded.append(a))
    run(engine)
    assert len(recorded) == 3
    make_engine.client.get_output = lambda timeout=None: llm_engine_outputs_without_requests()  # type: ignore[method-assign]
    engine.step()
    assert len(recorded) == 4
    engine.logger_manager = None
    engine.step()


def llm_engine_outputs_without_requests() -> Any:
    from tellin.protocol import EngineCoreOutputs, SchedulerStats

    return EngineCoreOutputs(scheduler_stats=SchedulerStats(num_running_reqs=0))
