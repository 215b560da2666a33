"""The loop beside its clients: whatever a request brings about, it fails alone (10.1, 1.1.7)."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import pytest

from tellin.config import LoRAConfig
from tellin.core.core_loop import EngineCoreLoop
from tellin.engine.core_client import InprocClient
from tellin.exceptions import AdapterError, EngineError, InvalidParameterError
from tellin.protocol import EngineCoreOutputs, FinishReason, LoRARequest
from tests.core.driver import Driver
from tests.core.fakes import FakeExecutor, make_request


@pytest.mark.parametrize(
    ("error", "is_clients"),
    [
        (AdapterError("no such adapter"), True),
        (ValueError("rank 99"), True),
        (OSError("disk"), False),
        (KeyError("lora_alpha"), False),
        (RuntimeError("bug"), False),
        (MemoryError(), False),
    ],
)
def test_a_request_that_cannot_be_added_fails_alone(error: Exception, is_clients: bool) -> None:
    """Any exception while its adapter is loaded: an ERROR output, and the loop goes on."""
    driver = Driver(lora_config=LoRAConfig())
    answers: list[Any] = []
    done = threading.Event()

    def send(client: int, batch: EngineCoreOutputs) -> None:
        for output in batch.outputs:
            answers.append((client, output))
            if output.request_id == "good" and output.finish_reason is not None:
                done.set()

    def add_lora(_: LoRARequest) -> bool:
        raise error

    driver.core.add_lora = add_lora  # type: ignore[method-assign]
    loop = EngineCoreLoop(driver.core, send)
    thread = threading.Thread(target=loop.run, daemon=True)
    thread.start()
    bad = make_request("bad", [1, 2], lora_request=LoRARequest("x", 1, "/x"))
    loop.add_request(bad)
    loop.add_request(make_request("good", [1, 2], 3))
    assert done.wait(60)
    loop.request_shutdown()
    thread.join(60)
    assert not thread.is_alive()
    (failure,) = [output for _, output in answers if output.request_id == "bad"]
    assert failure.finish_reason is FinishReason.ERROR
    assert failure.error_is_client_fault == is_clients
    assert type(error).__name__ in failure.error or str(error) in failure.error


@pytest.mark.parametrize("method", ["pause_scheduler", "sleep"])
def test_1_15_2_nobody_can_wait_in_process(method: str) -> None:
    """The steps that ``wait`` waits for are the caller's own: refused, and nothing has changed."""
    driver = Driver()
    client = InprocClient(driver.config, FakeExecutor, False)  # type: ignore[arg-type]
    client.add_request(make_request("r", [1, 2], 3))
    args = ("wait",) if method == "pause_scheduler" else (1, "wait")
    with pytest.raises(InvalidParameterError, match=rf"{method}\(mode='wait'\)"):
        client.call_utility(method, *args)
    assert not client.call_utility("is_scheduler_paused")
    ids: list[int] = []
    while len(ids) < 3:
        for output in client.get_output().outputs:
            ids += output.new_token_ids
    client.call_utility("pause_scheduler", "keep")
    assert client.call_utility("is_scheduler_paused")
    client.shutdown()


def test_cor_26_added_and_aborted_at_once() -> None:
    """COR-26: it never runs, its last output closes the account, nothing of it is left."""
    driver = Driver()
    driver.add("gone", [1, 2], abort_immediately=True)
    driver.add("stays", [1, 2], 3)
    driver.run()
    assert driver.finish == {"gone": FinishReason.ABORT, "stays": FinishReason.LENGTH}
    assert driver.tokens["gone"] == []
    driver.check_idle()


def test_cor_91_a_drain_aborts_what_a_pause_keeps_from_running() -> None:
    """COR-91: frozen and queued requests would never end; each gets its last output at once."""
    driver = Driver()
    driver.core.config = dataclasses.replace(driver.core.config, shutdown_timeout_s=3600.0)
    driver.add("frozen", [1, 2], 50)
    driver.step()
    driver.core.pause_scheduler("keep", clear_cache=False)
    driver.add("queued", [3, 4], 50)

    def send(client_index: int, batch: EngineCoreOutputs) -> None:
        for output in batch.outputs:
            driver.take(output)

    loop = EngineCoreLoop(driver.core, send)
    loop.request_shutdown()
    loop.run()
    assert driver.finish == {"frozen": FinishReason.ABORT, "queued": FinishReason.ABORT}


@pytest.mark.parametrize("is_early", [True, False])
def test_cor_2_workers_that_fail_end_an_idle_loop(is_early: bool) -> None:
    """COR-2, COR-79: no step is needed to notice; nor is a failure before the loop forgotten."""
    driver = Driver()
    executor = driver.executor

    def register(callback: Callable[[], None]) -> None:
        if is_early:
            callback()
        executor.failure_callback = callback

    executor.register_failure_callback = register  # type: ignore[method-assign]
    loop = EngineCoreLoop(driver.core, lambda client_index, batch: None)
    if not is_early:
        threading.Timer(0.05, executor.failure_callback).start()
    with pytest.raises(EngineError, match="the executor failed"):
        loop.run()


def utility_outputs(driver: Driver, *calls: tuple[str, list[Any]]) -> list[Any]:
    """Answers of a loop to utility calls, in their order; it ends after the last."""
    answers: list[Any] = []

    def send(client_index: int, batch: EngineCoreOutputs) -> None:
        if batch.utility_output is not None:
            answers.append((client_index, batch.utility_output))
            if len(answers) == len(calls):
                loop.request_shutdown()

    loop = EngineCoreLoop(driver.core, send)
    for call_id, (method, args) in enumerate(calls):
        loop.call_utility(5, call_id, method, args)
    loop.run()
    assert [(client, output.call_id) for client, output in answers] == [
        (5, call_id) for call_id in range(len(calls))
    ]
    return [output for _, output in answers]


def test_cor_79_utility_calls_are_answered_whatever_happens() -> None:
    """COR-79 and its wart: only what is in the list can be called; structs are made again; an
    exception is the failure of its call, with its type (CLI-31)."""
    driver = Driver(lora_config=LoRAConfig())
    adapter = ["cats", 1, "/cats"]  # as a positional struct arrives
    added, tasks, hidden, private, failed, bad = utility_outputs(
        driver,
        ("add_lora", [adapter]),
        ("get_supported_tasks", []),
        ("shutdown", []),
        ("_live", []),
        ("sleep", [9, "abort"]),
        ("is_sleeping", ["too", "many"]),
    )
    assert (added.result, added.failure_message) == (True, None)
    assert driver.executor.loras == {1}
    assert tasks.result == ["generate"]
    for output in (hidden, private):
        assert output.error_type == "AttributeError"
        assert "no utility method" in output.failure_message
    assert (failed.error_type, failed.result) == ("InvalidParameterError", None)
    assert "level must be 0, 1 or 2, got 9" in failed.failure_message
    assert bad.error_type == "TypeError"


def test_cor_77_a_pause_that_waits_is_answered_when_the_core_is_idle() -> None:
    """COR-46, COR-77, COR-79: a future defers its reply; what comes after is answered before."""
    driver = Driver()
    driver.add("r", [1, 2], 5)
    driver.step()
    order: list[str] = []

    def send(client_index: int, batch: EngineCoreOutputs) -> None:
        order.extend(output.request_id for output in batch.outputs if output.finished)
        if batch.utility_output is not None:
            order.append(f"call {batch.utility_output.call_id}")
            if batch.utility_output.call_id == 1:
                loop.request_shutdown()

    loop = EngineCoreLoop(driver.core, send)
    loop._drain_timeout_s = 3600.0
    loop.call_utility(0, 1, "pause_scheduler", ["wait"])
    loop.call_utility(0, 2, "is_scheduler_paused", [])
    loop.run()
    assert order == ["call 2", "r", "call 1"]


def test_cor_92_while_it_drains_nothing_new_is_taken() -> None:
    """COR-91, COR-92: what runs ends by itself; a new request is aborted, a call is refused."""
    driver = Driver()
    driver.add("runs", [1, 2], 6)
    driver.step()
    finished: dict[str, FinishReason] = {}
    failures: list[Any] = []

    def send(client_index: int, batch: EngineCoreOutputs) -> None:
        finished.update({o.request_id: o.finish_reason for o in batch.outputs if o.finish_reason})
        if batch.utility_output is not None:
            failures.append(batch.utility_output)

    loop = EngineCoreLoop(driver.core, send)
    loop._drain_timeout_s = 3600.0
    loop.request_shutdown()
    loop.add_request(make_request("late", [1, 2]))
    loop.call_utility(0, 1, "is_sleeping", [])
    loop.run()
    assert finished == {"late": FinishReason.ABORT, "runs": FinishReason.LENGTH}
    (failure,) = failures
    assert failure.error_type == "EngineClosedError"
    assert "shutting down" in failure.failure_message


def test_cor_81_what_cannot_be_prepared_is_an_error_output() -> None:
    """COR-81, ENG-21: in the thread that received it; the loop hears nothing of it."""
    driver = Driver()
    answers: list[Any] = []
    loop = EngineCoreLoop(driver.core, lambda client, batch: answers.append((client, batch)))
    bad = make_request("bad", [1], client_index=3)
    bad.resumable = True
    loop.add_request(bad)
    ((client, batch),) = answers
    (output,) = batch.outputs
    assert (client, output.request_id, output.finish_reason) == (3, "bad", FinishReason.ERROR)
    assert "resumable" in output.error
    assert output.error_is_client_fault
    assert loop.input_queue.empty()
