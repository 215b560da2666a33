"""The synchronous shell besides requests: control calls and statistics."""

from __future__ import annotations

from typing import Any

import pytest

from tellin.engine import llm_engine
from tellin.engine.prompts import RenderedPrompt
from tellin.engine.renderer import Renderer
from tellin.exceptions import (
    UnsupportedFeatureError,
)
from tellin.protocol import CacheStats
from tellin.sampling_params import RequestOutputKind, SamplingParams
from tests.engine.fakes import EngineMaker, run, text_ids

FINAL = RequestOutputKind.FINAL_ONLY
DELTA = RequestOutputKind.DELTA
ABC = [text_ids("a"), text_ids("b"), text_ids("c")]


# ---------------------------------------------------------------------- control calls


PASS_THROUGH = [
    ("is_sleeping", (), ("is_sleeping",), False),
    ("reset_prefix_cache", (True, False), ("reset_prefix_cache", True, False), True),
    ("reset_encoder_cache", (), ("reset_encoder_cache",), None),
    ("start_profile", ("run",), ("profile", True, "run"), None),
    ("stop_profile", (), ("profile", False, None), None),
    ("remove_lora", (1,), ("remove_lora", 1), False),
    ("pin_lora", (1,), ("pin_lora", 1), False),
    ("list_loras", (), ("list_loras",), {1, 2}),
]


@pytest.mark.parametrize(
    ("name", "args", "call", "result"), PASS_THROUGH, ids=lambda x: str(x)[:20]
)
def test_s05_s15_pass_through(
    make_engine: EngineMaker, name: str, args: tuple[Any, ...], call: tuple[Any, ...], result: Any
) -> None:
    """ENG-70, ENG-71, ENG-72, ENG-81: one call of the core each, its result typed as declared."""
    engine = make_engine()
    make_engine.client.calls.clear()
    assert getattr(engine, name)(*args) == result
    assert make_engine.client.calls == [call]


def test_eng82_collective_rpc_and_apply_model(make_engine: EngineMaker) -> None:
    """ENG-82, ENG-83."""
    engine = make_engine()
    make_engine.client.utilities["collective_rpc"] = (1, 2)
    assert engine.collective_rpc("echo", 3.0, (1,), {"b": 2}) == [1, 2]
    assert make_engine.client.calls[-1] == ("collective_rpc", "echo", 3.0, (1,), {"b": 2})
    engine.apply_model(len)
    assert make_engine.client.calls[-1] == ("collective_rpc", "apply_model", None, (len,), None)


@pytest.mark.parametrize("level", [0, 1, 2])
def test_s43_s44_s71_sleep_order(make_engine: EngineMaker, level: int) -> None:
    """Level >= 1 clears the frontend's multimodal cache before the core sleeps; then the record."""
    engine = make_engine(log_stats=True)
    order: list[Any] = []
    make_engine.monkeypatch.setattr(Renderer, "clear_mm_cache", lambda self: order.append("clear"))
    make_engine.monkeypatch.setattr(
        make_engine.client, "call_utility", lambda *call: order.append(call)
    )
    assert engine.logger_manager is not None
    make_engine.monkeypatch.setattr(
        engine.logger_manager, "record_sleep_state", lambda *state: order.append(state)
    )
    engine.sleep(level, "keep")
    expected: list[Any] = [("sleep", level, "keep"), (True, level)]
    assert order == (["clear", *expected] if level else expected)
    order.clear()
    engine.wake_up()
    assert order == [("wake_up", None), ("is_sleeping",), (False, 0)]


def test_s72_after_waking_items_are_sent_with_their_data(make_engine: EngineMaker) -> None:
    """A fake modality: the frontend sends an item once, then a reference; sleep makes it forget."""

    class SenderCache:
        def __init__(self) -> None:
            self.seen: set[str] = set()

        def clear(self) -> None:
            self.seen.clear()

        def take_stats(self) -> CacheStats:
            return CacheStats()

    cache = SenderCache()
    engine = make_engine(ABC)
    engine.renderer.mm_processor = cache  # type: ignore[assignment]

    def send(request_id: str) -> Any:
        data = None if "hash" in cache.seen else "pixels"
        cache.seen.add("hash")
        prompt = RenderedPrompt(
            type="multimodal",
            prompt_token_ids=[1, 2, 3],
            mm_items={"image": {"data": [data], "hashes": ["hash"], "placeholders": [(1, 1)]}},
        )
        engine.add_request(request_id, prompt, SamplingParams())
        run(engine)
        (feature,) = make_engine.client.requests[-1].mm_features or ()
        return feature.data

    assert [send("1"), send("2")] == ["pixels", None]
    engine.sleep(0)
    engine.wake_up()
    assert send("3") is None, "level 0 drops nothing"
    engine.sleep(1)
    engine.wake_up()
    assert send("4") == "pixels"


def test_eng_60_a_lighter_sleep_wakes_nothing(make_engine: EngineMaker) -> None:
    """ENG-60 and the wart of 1.9: after levels 2 and 1 the weights are still away."""
    engine = make_engine(log_stats=True)
    levels: list[int] = []
    assert engine.logger_manager is not None
    make_engine.monkeypatch.setattr(
        engine.logger_manager, "record_sleep_state", lambda _, level: levels.append(level)
    )
    for level in (1, 2, 1, 0):
        engine.sleep(level)
    engine.wake_up()
    engine.sleep(0)
    assert levels == [1, 2, 2, 2, 0, 0]
    assert engine.sleep_level == 0


def test_wake_up_of_a_part_records_the_real_state(make_engine: EngineMaker) -> None:
    """Wart of 1.9: half awake is not awake."""
    engine = make_engine(log_stats=True)
    engine.sleep(1)
    make_engine.client.utilities["is_sleeping"] = True
    engine.wake_up(["weights"])
    states = {
        m.labels["sleep_state"]: m.value  # type: ignore[attr-defined]
        for m in engine.get_metrics()
        if m.name == "tellin:engine_sleep_state"
    }
    assert states == {"awake": 0, "weights_offloaded": 1, "discard_all": 0}


# ---------------------------------------------------------------------- statistics


def test_eng4_eng90_statistics_off(make_engine: EngineMaker) -> None:
    """ENG-4, ENG-90, ENG-91."""
    engine = make_engine(ABC)
    engine.add_request("x", "abc", SamplingParams())
    assert all(output.metrics is None for output in run(engine))
    with pytest.raises(UnsupportedFeatureError, match="disable_log_stats"):
        engine.get_metrics()
    engine.do_log_stats()


def test_s45_s46_s70_log_throttle(make_engine: EngineMaker) -> None:
    """ENG-92, ENG-93: never the first call, then one per interval; 1000 steps within one: none."""
    engine = make_engine(log_stats=True)
    assert engine._last_log_time is None, "initialised in the constructor"
    logs: list[float] = []
    now = 50.0
    make_engine.monkeypatch.setattr(llm_engine.time, "monotonic", lambda: now)
    make_engine.monkeypatch.setattr(engine, "do_log_stats", lambda: logs.append(now))
    for _ in range(1000):
        engine.do_log_stats_with_interval()
        now += 0.009
    assert logs == []
    now = 60.0
    engine.do_log_stats_with_interval()
    engine.do_log_stats_with_interval()
    now = 69.9
    engine.do_log_stats_with_interval()
    now = 70.0
    engine.do_log_stats_with_interval()
    assert logs == [60.0, 70.0]


def test_eng95_tasks_are_asked_once(make_engine: EngineMaker) -> None:
    engine = make_engine()
    assert engine.get_supported_tasks() == ("generate",)
    assert engine.get_supported_tasks() == ("generate",)
    assert make_engine.client.names().count("get_supported_tasks") == 1


def test_eng96_no_tokenizer(make_engine: EngineMaker) -> None:
    engine = make_engine(ABC, skip_tokenizer_init=True)
    assert engine.tokenizer is None
    with pytest.raises(ValueError, match="skip_tokenizer_init"):
        engine.get_tokenizer()
    engine.add_request("x", [1, 2, 3], SamplingParams(logprobs=1))
    output = run(engine)[-1]
    assert output.outputs[0].token_ids == [i for ids in ABC for i in ids]
    assert output.outputs[0].text == ""
