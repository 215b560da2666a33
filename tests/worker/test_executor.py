"""Choice of the executor, and the in-process one: futures, calls by name, failures, shutdown."""

from __future__ import annotations

import dataclasses
import threading
import time
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

import tellin.worker.worker as worker_module
from tellin.exceptions import (
    EngineClosedError,
    EngineError,
    InvalidParameterError,
    UnknownMethodError,
    UnsupportedFeatureError,
)
from tellin.executor import Executor
from tellin.executor.uniproc import UniProcExecutor
from tellin.protocol import LoRARequest
from tests.worker.fakes import Driver, FakeBackend, make_config

V = 32


@pytest.fixture
def executor(monkeypatch: pytest.MonkeyPatch) -> UniProcExecutor:
    monkeypatch.setattr(worker_module, "open_backend", lambda config, path: FakeBackend(V))
    executor = UniProcExecutor(make_config(V))
    executor.initialize_kv_cache(64)
    return executor


def with_backend(backend: Any, world_size: int = 1) -> Any:
    config = make_config(V)
    parallel = dataclasses.replace(
        config.parallel_config,
        distributed_executor_backend=backend,
        tensor_parallel_size=world_size,
    )
    return dataclasses.replace(config, parallel_config=parallel)


class Custom(UniProcExecutor):
    pass


def test_4_1_2_class_by_configuration() -> None:
    """ENG-7."""
    get = Executor.get_class
    assert get(with_backend("uni")) is UniProcExecutor
    assert get(with_backend(None)) is UniProcExecutor
    assert get(with_backend(Custom)) is Custom
    assert get(with_backend("tests.worker.test_executor.Custom")).__name__ == "Custom"


@pytest.mark.parametrize(
    ("backend", "world_size", "error"),
    [
        ("mp", 1, UnsupportedFeatureError),
        ("ray", 1, UnsupportedFeatureError),
        ("external_launcher", 1, UnsupportedFeatureError),
        ("uni", 2, UnsupportedFeatureError),
        (None, 2, UnsupportedFeatureError),
        (dict, 1, TypeError),
        ("tests.worker.fakes.Driver", 1, TypeError),
        ("nonsense", 1, InvalidParameterError),
        ("no.such.Class", 1, InvalidParameterError),
        (7, 1, InvalidParameterError),
    ],
)
def test_4_1_2_unusable_backends(backend: Any, world_size: int, error: type[Exception]) -> None:
    with pytest.raises(error):
        Executor.get_class(with_backend(backend, world_size))


def test_steps_through_the_executor(executor: UniProcExecutor) -> None:
    d = Driver(executor)
    d.add("a", [1, 2, 3])
    assert len(d.run(4)["a"]) >= 4
    assert executor.kv_bytes_per_block() == 1024
    assert executor.supported_tasks == ("generate",)
    assert executor.vocab_size == V
    assert executor.max_model_len == 4096


def test_non_block_returns_before_the_pass_ends(executor: UniProcExecutor) -> None:
    """4.3.2: the caller is free while the pass runs; the ids are those of a blocking step."""
    backend = executor.worker.runner.backend
    gate, inner = threading.Event(), backend.forward

    def slow(batch: Any) -> Any:
        assert gate.wait(10)
        return inner(batch)

    backend.forward = slow  # type: ignore[method-assign]
    d = Driver(executor)
    d.add("a", [1, 2, 3])
    future = executor.execute_model(d.schedule(), non_block=True)
    assert isinstance(future, Future)
    assert not future.done()
    gate.set()
    output = executor.sample_tokens(None)
    assert future.result() is None
    again = Driver(UniProcLike(FakeBackend(V)))
    again.add("a", [1, 2, 3])
    assert again.step().sampled_token_ids == output.sampled_token_ids


class UniProcLike:
    """A runner by itself."""

    def __init__(self, backend: FakeBackend) -> None:
        from tellin.worker.model_runner import ModelRunner

        self.runner = ModelRunner(make_config(V), backend)
        self.execute_model = self.runner.execute_model
        self.sample_tokens = self.runner.sample_tokens


def test_4_3_2_exception_is_stored_in_the_future(executor: UniProcExecutor) -> None:
    def broken(batch: Any) -> Any:
        raise ZeroDivisionError("boom")

    backend = executor.worker.runner.backend
    inner, backend.forward = backend.forward, broken  # type: ignore[method-assign]
    d = Driver(executor)
    d.add("a", [1, 2, 3])
    future = executor.execute_model(d.schedule(), non_block=True)
    assert future is not None
    with pytest.raises(ZeroDivisionError):
        future.result()
    with pytest.raises(RuntimeError, match="without execute_model"):
        executor.sample_tokens(None)
    backend.forward = inner  # type: ignore[method-assign]
    d.finish("a")
    d.add("b", [1, 2])
    assert len(d.step().sampled_token_ids[0]) == 1, "the executor goes on"


def test_4_1_4_collective_rpc(executor: UniProcExecutor) -> None:
    assert executor.collective_rpc("kv_bytes_per_block") == [1024]
    assert executor.collective_rpc(
        lambda worker, x, y=0: (type(worker).__name__, x + y), None, (1,), {"y": 2}
    ) == [("Worker", 3)]
    for name in ("no_such_method", "_asleep", "config"):
        with pytest.raises(UnknownMethodError, match=name):
            executor.collective_rpc(name)

    def slow_call(worker: Any) -> None:
        time.sleep(0.02)

    with pytest.raises(TimeoutError, match="slow_call"):
        executor.collective_rpc(slow_call, timeout=0.001)


def test_lora_is_refused_clearly(executor: UniProcExecutor) -> None:
    with pytest.raises(UnsupportedFeatureError, match="style"):
        executor.add_lora(LoRARequest("style", 1, "/nowhere"))
    assert executor.list_loras() == set()
    assert executor.remove_lora(1) is False


def test_failure_callback_is_called_once(executor: UniProcExecutor) -> None:
    """4.1.6: once on failure; at once when it failed already."""
    calls: list[int] = []
    executor.register_failure_callback(lambda: calls.append(1))
    executor._fail()
    executor._fail()
    assert calls == [1]
    executor.register_failure_callback(lambda: calls.append(2))
    assert calls == [1, 2]


def test_shutdown_twice_and_use_after(executor: UniProcExecutor) -> None:
    before = set(threading.enumerate())  # of executors that other tests dropped
    backend = executor.worker.runner.backend
    d = Driver(executor)
    d.add("a", [1])
    executor.execute_model(d.schedule(), non_block=True)
    executor.shutdown()
    executor.shutdown()
    assert backend.closed
    with pytest.raises(EngineClosedError):
        executor.check_health()
    with pytest.raises(EngineClosedError):
        executor.execute_model(d.schedule())
    assert set(threading.enumerate()) <= before


def test_dummy_batch_has_no_effect(executor: UniProcExecutor) -> None:
    """COR-51: it runs in the null block and touches no request."""
    d, e = Driver(executor), Driver(UniProcLike(FakeBackend(V)))
    fake = executor.worker.runner.backend
    fake._slot = lambda batch, row, position: (  # type: ignore[method-assign]
        int(batch.block_table[row, position // 16]) * 16 + position % 16
    )
    for x in (d, e):
        x.add("a", [1, 2, 3])
    for _ in range(4):
        executor.execute_dummy_batch()
        assert d.step().sampled_token_ids == e.step().sampled_token_ids


def test_profile_hands_out_spans(executor: UniProcExecutor) -> None:
    """A backend without stages gives its forward passes; the profile ends where it was begun."""
    backend = executor.worker.runner.backend
    assert executor.profile(True) == []
    with pytest.raises(EngineError, match="already running"):
        executor.profile(True)
    d = Driver(executor)
    d.add("a", [1, 2])
    d.step()
    (span,) = executor.profile(False)
    assert (span.name, span.thread) == ("forward", "main")
    assert span.duration_ns > 0
    assert executor.worker.runner.backend is backend
    assert executor.worker.operation_profile() == []
    with pytest.raises(EngineError, match="not running"):
        executor.profile(False)


def test_p12_no_global_random_state(executor: UniProcExecutor) -> None:
    """P12: an engine neither seeds nor advances anybody's generator."""
    import random

    random.seed(1)
    np.random.seed(1)
    before = random.getstate(), np.random.get_state()[1].tobytes()
    d = Driver(executor)
    d.add("a", [1, 2])
    d.run(5)
    assert (random.getstate(), np.random.get_state()[1].tobytes()) == before
