"""1.15, 4.8, COR-45..50, ENG-60..65, TYP-25..26: pause, resume, sleep, wake up."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from tellin.core.scheduler import PauseState
from tellin.exceptions import EngineError, InvalidParameterError
from tellin.protocol import FinishReason
from tests.core.driver import Driver
from tests.core.test_scheduler import unlike


def running_driver(**config: object) -> Driver:
    driver = Driver(**config)
    for i in range(3):
        driver.add(f"r{i}", unlike(i, 7), 8, client_index=i % 2)
    driver.step()
    driver.step()
    return driver


def test_abort_mode_delivers_abort_outputs() -> None:
    """ENG Wart: every request that a pause ends gets a last output with the next step."""
    driver = running_driver()
    assert driver.core.pause_scheduler("abort") is None
    assert driver.core.has_work()
    batches, executed = driver.core.step()
    assert not executed
    reasons = {o.request_id: o.finish_reason for b in batches.values() for o in b.outputs}
    assert reasons == dict.fromkeys(["r0", "r1", "r2"], FinishReason.ABORT)
    assert {o.request_id for o in batches[1].outputs} == {"r1"}
    assert not driver.core.has_work()
    assert driver.scheduler.pause_state is PauseState.PAUSED_NEW
    driver.check_idle()


def test_pause_clears_the_prefix_cache() -> None:
    """1.15.2."""
    for clear in (True, False):
        driver = running_driver()
        driver.core.pause_scheduler("abort", clear_cache=clear)
        num_cached = driver.scheduler.kv_cache_manager.pool.num_cached_blocks()
        assert (num_cached == 0) == clear


def test_new_requests_queue_while_paused() -> None:
    """2.7: accepted, not run; and not counted as unfinished."""
    driver = running_driver()
    driver.core.pause_scheduler("abort")
    driver.step()
    driver.add("new", unlike(9, 5), 2)
    assert driver.scheduler.get_num_unfinished_requests() == 0
    assert not driver.core.has_work()
    assert driver.step() == {}
    driver.core.resume_scheduler()
    assert driver.step() == {"new": 5}


def test_keep_freezes_in_place() -> None:
    driver = running_driver()
    driver.core.pause_scheduler("keep", clear_cache=False)
    assert driver.core.is_scheduler_paused()
    assert driver.scheduler.get_num_unfinished_requests() == 0
    assert driver.step() == {}
    assert len(driver.scheduler.running) == 3
    driver.core.resume_scheduler()
    driver.run()
    for i in range(3):
        driver.check_lone(f"r{i}", 8)


def test_keep_with_a_cleared_cache_recomputes() -> None:
    driver = running_driver()
    driver.core.pause_scheduler("keep")
    assert driver.scheduler.running == []
    driver.core.resume_scheduler()
    driver.run()
    for i in range(3):
        driver.check_lone(f"r{i}", 8)


def test_wait_completes_when_drained() -> None:
    """TYP-25: the future is done once those that ran have ended; new ones stay queued."""
    driver = running_driver()
    future = driver.core.pause_scheduler("wait")
    assert isinstance(future, Future)
    driver.add("new", unlike(9, 5), 2)
    while driver.core.has_work():
        assert "new" not in driver.step()
    assert not future.done()
    driver.core.run_idle_callbacks()
    assert future.result(timeout=0) is None
    assert driver.scheduler.kv_cache_manager.pool.num_cached_blocks() == 0
    for i in range(3):
        driver.check_lone(f"r{i}", 8)
    driver.core.resume_scheduler()
    driver.run()
    driver.check_lone("new", 2)


def test_wait_drains_preempted_requests_too() -> None:
    """T5: a request preempted during the drain counts as unfinished and is admitted again."""
    driver = Driver(num_kv_blocks=9, max_model_len=32, enable_prefix_caching=False)
    for i in range(3):
        driver.add(f"r{i}", unlike(i, 7), 12)
    driver.step()
    future = driver.core.pause_scheduler("wait", clear_cache=False)
    assert future is not None
    driver.add("new", unlike(9, 5), 2)
    while driver.core.has_work():
        driver.step()
    assert driver.scheduler.num_preemptions > 0
    for i in range(3):
        driver.check_lone(f"r{i}", 12)
    assert driver.tokens["new"] == []


def test_wait_is_not_over_while_all_that_ran_are_preempted() -> None:
    """T5: with nothing running, requests that ran before are still in flight."""
    driver = running_driver()
    future = driver.core.pause_scheduler("wait", clear_cache=False)
    assert future is not None
    assert driver.core.reset_prefix_cache(reset_running_requests=True)
    assert driver.scheduler.running == []
    assert driver.scheduler.get_num_unfinished_requests() == 3
    while driver.core.has_work():
        driver.step()
    driver.core.run_idle_callbacks()
    assert future.done()
    for i in range(3):
        driver.check_lone(f"r{i}", 8)


def test_wait_on_an_idle_engine_is_done_at_once() -> None:
    driver = Driver()
    assert driver.core.pause_scheduler("wait") is None


@pytest.mark.parametrize("mode", ["", "stop", "ABORT"])
def test_unknown_modes_are_refused(mode: str) -> None:
    """TYP-25."""
    driver = running_driver()
    with pytest.raises(InvalidParameterError, match="mode"):
        driver.core.pause_scheduler(mode)
    with pytest.raises(ValueError, match="mode"):
        driver.core.sleep(1, mode)
    assert not driver.core.is_sleeping()


@pytest.mark.parametrize("level", [0, 1, 2])
def test_sleep_levels(level: int) -> None:
    """COR-48, ENG-62: level 0 pauses; higher levels reach the executor, after the pause."""
    driver = running_driver()
    driver.core.sleep(level, "keep")
    assert driver.core.is_sleeping()
    assert driver.executor.sleep_level == (level or None)
    driver.core.wake_up()
    assert not driver.core.is_sleeping()
    driver.run()
    for i in range(3):
        driver.check_lone(f"r{i}", 8)  # nothing of the dropped KV cache is read again


def test_sleep_aborts_by_default() -> None:
    driver = running_driver()
    driver.core.sleep()
    driver.run()
    assert set(driver.finish.values()) == {FinishReason.ABORT}


def test_sleep_after_waiting() -> None:
    """COR-48: the executor sleeps only when the drain is over."""
    driver = running_driver()
    future = driver.core.sleep(1, "wait")
    assert future is not None
    while driver.core.has_work():
        driver.step()
    assert driver.executor.sleep_level is None
    driver.core.run_idle_callbacks()
    future.result(timeout=0)
    assert driver.executor.sleep_level == 1
    for i in range(3):
        driver.check_lone(f"r{i}", 8)


def test_scheduling_resumes_when_all_is_awake() -> None:
    """COR-49, ENG-65."""
    driver = running_driver()
    driver.core.sleep(2, "keep")
    driver.core.wake_up(["weights"])
    assert driver.core.is_scheduler_paused()
    driver.core.wake_up(["scheduling"])
    assert driver.core.is_scheduler_paused()  # the KV cache still sleeps
    driver.core.wake_up(["kv_cache"])
    assert not driver.core.is_sleeping()


def test_level_0_is_undone_by_scheduling() -> None:
    """ENG-65."""
    driver = running_driver()
    driver.core.sleep(0, "keep")
    driver.core.wake_up(["scheduling"])
    assert not driver.core.is_sleeping()


def test_unknown_tags_and_levels_are_refused() -> None:
    """COR-50 Wart: not silently ignored."""
    driver = running_driver()
    with pytest.raises(InvalidParameterError, match="tags"):
        driver.core.wake_up(["weights", "cache"])
    for level in (-1, 3):
        with pytest.raises(InvalidParameterError, match="level"):
            driver.core.sleep(level)


# ---------------------------------------------------------------------- calls that cross


@pytest.mark.parametrize("resume", ["wake_up", "resume_scheduler"])
def test_who_resumes_ends_a_sleep_that_still_waits(resume: str) -> None:
    """It must not fall asleep later, with a scheduler that runs: every step would fail."""
    driver = running_driver()
    future = driver.core.sleep(1, "wait")
    assert future is not None
    getattr(driver.core, resume)()
    with pytest.raises(EngineError, match="resumed before"):
        future.result(timeout=0)
    driver.run()
    driver.core.run_idle_callbacks()
    assert not driver.core.is_sleeping()
    for i in range(3):
        driver.check_lone(f"r{i}", 8)


@pytest.mark.parametrize("call", ["sleep", "pause"])
def test_requests_that_sleep_are_not_waited_for(call: str) -> None:
    driver = running_driver()
    driver.core.sleep(1, "keep")
    with pytest.raises(EngineError, match="cannot finish"):
        driver.core.sleep(1, "wait") if call == "sleep" else driver.core.pause_scheduler("wait")
    assert driver.scheduler.pause_state is PauseState.PAUSED_ALL
    assert not driver.core.has_work()
    driver.core.wake_up()
    driver.run()
    for i in range(3):
        driver.check_lone(f"r{i}", 8)


def test_an_engine_that_sleeps_empty_can_be_told_to_wait() -> None:
    driver = running_driver()
    driver.core.sleep(1, "abort")
    driver.run()
    assert driver.core.sleep(2, "wait") is None
    assert driver.executor.sleep_level == 2


def test_resuming_does_not_schedule_on_what_sleeps() -> None:
    driver = running_driver()
    driver.core.sleep(1, "keep")
    with pytest.raises(EngineError, match="wake_up"):
        driver.core.resume_scheduler()
    assert not driver.core.has_work()
    driver.core.wake_up()
    driver.run()
    for i in range(3):
        driver.check_lone(f"r{i}", 8)


@pytest.mark.parametrize("mode", ["keep", "wait"])
def test_a_refused_sleep_leaves_the_engine_running(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = running_driver()

    def refuse(level: int) -> None:
        raise EngineError("the profiler is running")

    monkeypatch.setattr(driver.executor, "sleep", refuse)
    if mode == "keep":
        with pytest.raises(EngineError, match="profiler"):
            driver.core.sleep(2, mode)
    else:
        future = driver.core.sleep(2, mode)
        assert future is not None
        driver.run()
        driver.core.run_idle_callbacks()
        with pytest.raises(EngineError, match="profiler"):
            future.result(timeout=0)
    assert not driver.core.is_sleeping()
    driver.run()
    for i in range(3):
        driver.check_lone(f"r{i}", 8)
