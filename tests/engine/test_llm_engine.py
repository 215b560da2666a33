"""The synchronous shell over a scripted core: claims S1..S75 that concern it, rules ENG-*."""

from __future__ import annotations

import ast
import gc
import inspect
import logging
import sys
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tellin.config import ParallelConfig
from tellin.engine import llm_engine, teardown
from tellin.engine.llm_engine import LLMEngine
from tellin.exceptions import (
    DuplicateRequestError,
    EngineClosedError,
    InvalidParameterError,
)
from tellin.protocol import EngineCoreRequest
from tellin.sampling_params import RequestOutputKind, SamplingParams
from tellin.settings import Settings
from tests.engine.fakes import EngineMaker, FakeClient, make_config, run, text_ids

FINAL = RequestOutputKind.FINAL_ONLY
DELTA = RequestOutputKind.DELTA
ABC = [text_ids("a"), text_ids("b"), text_ids("c")]


# ---------------------------------------------------------------------- construction


def test_s06_s36_s37_construction_order(
    make_engine: EngineMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """§1.2: renderer, input processor, output processor, client, loggers; then the cache reset."""
    order: list[str] = []

    def spy(name: str) -> None:
        original = getattr(llm_engine, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            order.append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(llm_engine, name, wrapped)

    for name in ("Renderer", "InputProcessor", "OutputProcessor", "StatLoggerManager"):
        spy(name)
    original_reset = LLMEngine.reset_mm_cache
    monkeypatch.setattr(
        LLMEngine,
        "reset_mm_cache",
        lambda self: (order.append("reset_mm_cache"), original_reset(self)),
    )

    class Client(FakeClient):
        def __init__(self, *args: Any) -> None:
            order.append("make_client")
            super().__init__(*args)

    engine = make_engine(log_stats=True, client_class=Client)
    assert order == [
        "Renderer",
        "InputProcessor",
        "OutputProcessor",
        "make_client",
        "StatLoggerManager",
        "reset_mm_cache",
    ]
    assert make_engine.make_client_calls[0]["asyncio_mode"] is False
    assert make_engine.make_client_calls[0]["multiprocess_mode"] is False
    assert make_engine.client.calls == [("reset_mm_cache",)]
    engine.shutdown()


def test_eng1_lengths_settled_by_the_core_are_adopted(make_engine: EngineMaker) -> None:
    class Client(FakeClient):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.ready.max_model_len = 32
            self.ready.num_kv_blocks = 5

    engine = make_engine(ABC, client_class=Client, max_model_len=64)
    assert engine.model_config.max_model_len == 32
    assert engine.config.scheduler_config.max_model_len == 32
    assert engine.config.cache_config.num_kv_blocks == 5
    with pytest.raises(ValueError, match="32"):
        engine.add_request("x", list(range(32)), SamplingParams())


def test_eng2_nothing_is_left_when_a_later_part_fails(make_engine: EngineMaker) -> None:
    class Client(FakeClient):
        def call_utility(self, method: str, *args: Any) -> Any:
            raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        make_engine(client_class=Client)
    assert make_engine.client.is_closed


def test_s19_s38_s73_s74_mode_is_fixed_at_construction(
    make_engine: EngineMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The environment can only switch multiprocessing on; nothing switches it later (TOP-1)."""
    make_engine()
    modes = []
    for env, argument in (("0", True), ("1", False), ("0", False)):
        config = make_config(settings=Settings.from_environ({"TELLIN_ENABLE_MULTIPROCESSING": env}))
        monkeypatch.setattr(llm_engine, "create_engine_config", lambda args, config=config: config)
        LLMEngine.from_engine_args(
            llm_engine.EngineArgs(model="m"), enable_multiprocessing=argument
        )
        modes.append(make_engine.make_client_calls[-1]["multiprocess_mode"])
        LLMEngine.from_engine_config(config)
        modes.append(make_engine.make_client_calls[-1]["multiprocess_mode"])
    assert modes == [True, False, True, True, False, False]


def test_s09_s33_s34_s47_finalizer_of_the_driver_model(
    make_engine: EngineMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ENG-101/102: after the engine is collected the model's caches are released, and it dies."""

    class Model:
        def release_cached_artefacts(self) -> None:
            released.append(self.name)

        name = "driver model"

    released: list[str] = []
    model = Model()
    chain = SimpleNamespace(
        driver_worker=SimpleNamespace(model_runner=SimpleNamespace(model=model))
    )

    class Client(FakeClient):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.engine_core = SimpleNamespace(executor=chain)

    engine = make_engine(client_class=Client)
    assert engine.model_executor is chain
    reference = weakref.ref(model)
    make_engine.client = None  # type: ignore[assignment]
    chain.driver_worker = None
    del engine, model
    gc.collect()
    assert released == ["driver model"]
    assert reference() is None


@pytest.mark.parametrize("missing", ["executor", "driver_worker", "model_runner", "model"])
def test_s47_a_missing_hop_means_no_model(missing: str) -> None:
    found: Any = SimpleNamespace()
    for name in reversed(["executor", "driver_worker", "model_runner", "model"]):
        found = SimpleNamespace() if name == missing else SimpleNamespace(**{name: found})
    assert teardown.get_driver_model(getattr(found, "executor", None)) is None


def test_s68_s69_model_executor_is_none_out_of_reach(make_engine: EngineMaker) -> None:
    """ENG-100."""
    assert make_engine().model_executor is None


# ---------------------------------------------------------------------- add


def test_s39_request_id_must_be_a_string(make_engine: EngineMaker) -> None:
    """ENG-10."""
    engine = make_engine(ABC)
    before = list(make_engine.client.calls)
    with pytest.raises(TypeError, match="int"):
        engine.add_request(7, "abc", SamplingParams())  # type: ignore[arg-type]
    assert make_engine.client.calls == before
    assert not engine.has_unfinished_requests()


def test_s40_s60_call_order_of_add(
    make_engine: EngineMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ENG-12, ENG-16, ENG-19: input processing, then per child: registration before the send."""
    engine = make_engine(ABC)
    order: list[str] = []
    for owner, name in (
        (engine.input_processor, "process_inputs"),
        (engine.output_processor, "add_request"),
        (engine.engine_core, "add_request"),
    ):
        original = getattr(owner, name)

        def wrapped(
            *args: Any, _o: Any = original, _n: str = f"{type(owner).__name__}.{name}", **kw: Any
        ) -> Any:
            order.append(_n)
            return _o(*args, **kw)

        monkeypatch.setattr(owner, name, wrapped)
    engine.add_request("x", "abc", SamplingParams(n=2))
    assert order == [
        "InputProcessor.process_inputs",
        *["OutputProcessor.add_request", "FakeClient.add_request"] * 2,
    ]


def test_s62_add_returns_internal_id_outputs_carry_the_callers(make_engine: EngineMaker) -> None:
    """ENG-13, ENG-18."""
    engine = make_engine(ABC)
    handle = engine.add_request("mine", "abc", SamplingParams())
    assert handle.startswith("mine-")
    assert len(handle) == len("mine-") + 8
    assert handle.external_id == "mine"
    assert make_engine.client.requests[0].request_id == handle
    assert {output.request_id for output in run(engine)} == {"mine"}


def test_s29_text_never_reaches_the_core(make_engine: EngineMaker) -> None:
    engine = make_engine(ABC)
    engine.add_request("x", "the sea", SamplingParams())
    request = make_engine.client.requests[0]
    assert isinstance(request, EngineCoreRequest)
    assert request.prompt_token_ids == text_ids("the sea")
    assert "the sea" not in repr(request)


def test_eng14_callers_params_are_not_touched(make_engine: EngineMaker) -> None:
    engine = make_engine(ABC)
    params = SamplingParams(max_tokens=None, bad_words=["the"])
    before = repr(params)
    engine.add_request("x", "abc", params)
    assert repr(params) == before
    sent = make_engine.client.requests[0].sampling_params
    assert sent is not None
    assert sent.max_tokens == 64 - len(text_ids("abc"))


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("fail_at", [0, 1, 2])
def test_failed_add_leaves_nothing(make_engine: EngineMaker, n: int, fail_at: int) -> None:
    """Wart of 1.5: whatever fails, nothing of the call stays registered or running."""
    engine = make_engine(ABC)
    client = make_engine.client
    client.fail_on_add, client.fail_on_add_number = RuntimeError("send failed"), min(fail_at, n - 1)
    with pytest.raises(RuntimeError, match="send failed"):
        engine.add_request("x", "abc", SamplingParams(n=n))
    assert not engine.has_unfinished_requests()
    assert engine.output_processor.parent_requests == {}
    assert engine.output_processor.external_req_ids == {}
    assert client.live == {}
    client.fail_on_add = None
    engine.add_request("x", "abc", SamplingParams())
    assert run(engine)[-1].finished


def test_p25_duplicate_id_is_refused_and_the_first_unharmed(make_engine: EngineMaker) -> None:
    """ENG-20, which P25 overrules."""
    engine = make_engine(ABC)
    engine.add_request("x", "abc", SamplingParams(output_kind=FINAL))
    with pytest.raises(DuplicateRequestError, match="'x'"):
        engine.add_request("x", "abc", SamplingParams())
    with pytest.raises(ValueError):
        engine.add_request("x", "abc", SamplingParams(n=2))
    (output,) = run(engine)
    assert output.outputs[0].text == "abc"
    engine.add_request("x", "abc", SamplingParams())  # again after the end
    engine.abort_request("x")
    engine.add_request("x", "abc", SamplingParams())  # and after an abort
    assert run(engine)[-1].finished


def test_s63_s64_core_request_is_deprecated_but_works(
    make_engine: EngineMaker, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(ABC)
    caplog.set_level(logging.WARNING, "tellin")

    def core_request(request_id: str) -> EngineCoreRequest:
        return EngineCoreRequest(request_id, text_ids("abc"), None, SamplingParams(), None, 1.0)

    first = core_request("object-id")
    engine.add_request("argument-id", first, SamplingParams(), prompt_text="abc")
    engine.add_request("second", core_request("second"), SamplingParams())
    deprecations = [r.message for r in caplog.records if "deprecated" in r.message]
    assert len(deprecations) == 1
    assert "render_cmpl" in deprecations[0]
    assert "render_chat" in deprecations[0]
    assert any("argument-id" in r.message and "object-id" in r.message for r in caplog.records)
    with pytest.raises(InvalidParameterError, match="external_req_id"):
        engine.add_request("again", first, SamplingParams())
    outputs = run(engine)
    assert {output.request_id for output in outputs} == {"object-id", "second"}
    assert outputs[0].prompt == "abc"


def test_core_request_passes_the_same_gate(make_engine: EngineMaker) -> None:
    """Wart of ENG-11: no way around validation."""
    engine = make_engine(ABC)
    request = EngineCoreRequest("x", [10**6], None, SamplingParams(), None, 1.0)
    with pytest.raises(InvalidParameterError, match="1000000"):
        engine.add_request("x", request, SamplingParams())
    request = EngineCoreRequest("x", [1], None, SamplingParams(max_tokens=None), None, 1.0)
    engine.add_request("x", request, SamplingParams())
    sent = make_engine.client.requests[0].sampling_params
    assert sent is not None
    assert sent.max_tokens == 63


# ---------------------------------------------------------------------- n > 1


def test_s30_s31_s56_s57_s58_s59_fan_out(make_engine: EngineMaker) -> None:
    """ENG-15, ENG-17, ENG-50."""
    engine = make_engine(ABC)
    copies = 0
    original = llm_engine.copy

    def counting(request: EngineCoreRequest) -> EngineCoreRequest:
        nonlocal copies
        copies += 1
        return original(request)

    make_engine.monkeypatch.setattr(llm_engine, "copy", counting)
    built = []
    original_process = engine.input_processor.process_inputs

    def process(*args: Any, **kwargs: Any) -> EngineCoreRequest:
        built.append(original_process(*args, **kwargs))
        return built[-1]

    make_engine.monkeypatch.setattr(engine.input_processor, "process_inputs", process)
    handle = engine.add_request("x", "abc", SamplingParams(n=3, seed=10))
    sent = make_engine.client.requests
    assert copies == 2
    assert [request.request_id for request in sent] == [f"{i}_{handle}" for i in range(3)]
    assert sent[-1] is built[0]
    assert sent[0] is not built[0]
    params = [request.sampling_params for request in sent]
    assert [p.n for p in params if p] == [1, 1, 1]
    assert [p.seed for p in params if p] == [10, 11, 12]
    assert {request.external_req_id for request in sent} == {"x"}
    assert engine.get_num_unfinished_requests() == 3


@pytest.mark.parametrize("kind", [FINAL, DELTA, RequestOutputKind.CUMULATIVE])
def test_s32_s61_p10_children_are_aggregated(
    make_engine: EngineMaker, kind: RequestOutputKind
) -> None:
    """Children end at different times; nothing of any is lost, indices are right."""

    def script(request: EngineCoreRequest) -> list[list[int]]:
        return ABC[: 3 - int(request.request_id[0])]  # child 0 says abc, 1 ab, 2 a

    engine = make_engine(script)
    engine.add_request("x", "abc", SamplingParams(n=3, output_kind=kind))
    outputs = run(engine)
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    texts = {0: "", 1: "", 2: ""}
    reasons: dict[int, str | None] = {}
    for output in outputs:
        for completion in output.outputs:
            old = texts[completion.index] if kind == DELTA else ""
            texts[completion.index] = old + completion.text
            if completion.finish_reason is not None:
                assert completion.index not in reasons, "a finish reason comes once"
                reasons[completion.index] = completion.finish_reason
    assert texts == {0: "abc", 1: "ab", 2: "a"}
    assert reasons == dict.fromkeys(range(3), "length")
    if kind == FINAL:
        assert len(outputs) == 1
        assert [completion.index for completion in outputs[0].outputs] == [0, 1, 2]
    else:
        assert all(len(output.outputs) == 1 for output in outputs)
    assert engine.output_processor.parent_requests == {}


@pytest.mark.parametrize("by", ["external", "handle", "internal"])
def test_aborting_a_parent_leaves_nothing(make_engine: EngineMaker, by: str) -> None:
    """ENG-41 and the wart of OUT-3: all children go, and so does the parent."""
    engine = make_engine(ABC)
    handle = engine.add_request("x", "abc", SamplingParams(n=3, output_kind=FINAL))
    engine.step()
    if by == "internal":
        outputs = engine.abort_request(str(handle), internal=True)
    else:
        outputs = engine.abort_request("x" if by == "external" else handle)
    assert len(outputs) == 1
    assert [c.text for c in outputs[0].outputs] == ["a"] * 3  # type: ignore[union-attr]
    assert [c.finish_reason for c in outputs[0].outputs] == ["abort"] * 3  # type: ignore[union-attr]
    assert make_engine.client.calls[-1] == ("abort_requests", [f"{i}_{handle}" for i in range(3)])
    assert not engine.has_unfinished_requests()
    assert engine.output_processor.parent_requests == {}
    assert engine.output_processor.external_req_ids == {}


# ---------------------------------------------------------------------- data parallel


class Group:
    rank, size = 0, 2

    def __init__(self, others_have_work: bool) -> None:
        self.others_have_work = others_have_work
        self.is_closed = False

    def all_reduce_max(self, value: int) -> int:
        return max(value, int(self.others_have_work))

    def close(self) -> None:
        self.is_closed = True


def test_s65_idle_rank_joins_with_a_dummy_batch(make_engine: EngineMaker) -> None:
    """ENG-51, ENG-52."""
    engine = make_engine(ABC)
    engine.dp_group = Group(others_have_work=True)
    assert engine.has_unfinished_requests()
    assert engine.should_execute_dummy_batch
    assert engine.step() == []
    engine.dp_group = Group(others_have_work=False)
    assert not engine.has_unfinished_requests()
    assert not engine.should_execute_dummy_batch


def test_data_parallel_without_a_group_is_refused(make_engine: EngineMaker) -> None:
    with pytest.raises(InvalidParameterError, match="dp_group"):
        make_engine(parallel_config=ParallelConfig(data_parallel_size=2))


# ---------------------------------------------------------------------- end


def test_shutdown_is_idempotent_and_later_calls_are_clear(make_engine: EngineMaker) -> None:
    with make_engine(ABC) as engine:
        engine.add_request("x", "abc", SamplingParams())
    engine.shutdown()
    assert make_engine.client.is_closed
    with pytest.raises(EngineClosedError, match="shut down"):
        engine.add_request("y", "abc", SamplingParams())
    with pytest.raises(EngineClosedError):
        engine.step()


def test_a_dropped_engine_ends_its_core(make_engine: EngineMaker) -> None:
    """ENG-103, ENG-104."""
    engine = make_engine(ABC)
    group = Group(False)
    client = make_engine.client
    del engine
    gc.collect()
    assert client.is_closed
    assert not group.is_closed


# ---------------------------------------------------------------------- design


SOURCE = Path(inspect.getfile(llm_engine)).read_text()


def test_s14_s75_the_shell_is_small() -> None:
    assert len(SOURCE.splitlines()) < 500


def test_s18_no_branches_on_the_kind_of_client() -> None:
    tree = ast.parse(SOURCE)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance":
            assert "Client" not in ast.unparse(node)
    assert "multiprocess_mode" not in {
        node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)
    }


def test_s02_s11_s16_the_shell_needs_no_model_no_threads_no_event_loop(
    make_engine: EngineMaker,
) -> None:
    """In a fresh interpreter: a whole generation over a fake core loads none of these."""
    import subprocess

    code = (
        "import sys, threading\n"
        "sys.addaudithook(lambda e, a: (_ for _ in ()).throw(SystemExit(e)) "
        "if e in ('socket.__new__', 'asyncio.get_event_loop_policy') else None)\n"
        "from _pytest.monkeypatch import MonkeyPatch\n"
        "from tests.engine.fakes import EngineMaker, run, text_ids\n"
        "from tellin import SamplingParams\n"
        "engine = EngineMaker(MonkeyPatch())([text_ids('a')])\n"
        "engine.add_request('x', 'abc', SamplingParams())\n"
        "assert run(engine)[-1].outputs[0].text == 'a'\n"
        "assert threading.active_count() == 1\n"
        "bad = ('zmq', 'tellin.core', 'tellin.executor', 'tellin.worker', 'tellin.models',\n"
        "       'tellin.kernels', 'torch', 'fastapi')\n"
        "print([m for m in sys.modules if m.startswith(bad)])\n"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
    assert threading.current_thread() is threading.main_thread()
