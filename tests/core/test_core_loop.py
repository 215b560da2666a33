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
