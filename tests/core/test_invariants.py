"""G1-G10: each rule is checked after every step, and each is broken here once to see that it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tellin.core.invariants import check_invariants
from tellin.core.request import RequestStatus
from tests.core.driver import Driver
from tests.core.test_scheduler import unlike

Break = Callable[[Driver], None]


def running_driver() -> Driver:
    driver = Driver(max_num_seqs=2)
    for i in range(3):
        driver.add(f"r{i}", unlike(i, 9), 30)
    for _ in range(2):
        driver.step()
    return driver


def two_places(driver: Driver) -> None:
    driver.scheduler.room.waiting.add_request(driver.scheduler.running[0])


def nowhere(driver: Driver) -> None:
    driver.scheduler.running.pop()


def too_many(driver: Driver) -> None:
    driver.scheduler.max_num_seqs = 1


def lost_reference(driver: Driver) -> None:
    driver.scheduler.kv_cache_manager.pool.ref_cnt[driver.scheduler.running[0].block_ids[0]] = 0


def free_although_used(driver: Driver) -> None:
    pool = driver.scheduler.kv_cache_manager.pool
    pool._free[driver.scheduler.running[0].block_ids[0]] = None


def lost_block(driver: Driver) -> None:
    driver.scheduler.kv_cache_manager.pool._free.popitem()


def computed_beyond(driver: Driver) -> None:
    request = driver.scheduler.running[0]
    request.num_computed_tokens = request.num_tokens


def published_too_early(driver: Driver) -> None:
    request = driver.scheduler.running[0]
    request.num_cached_blocks += 1


def wrong_status(driver: Driver) -> None:
    driver.scheduler.running[0].status = RequestStatus.WAITING


@pytest.mark.parametrize(
    ("damage", "rule"),
    [
        (two_places, "G1"),
        (nowhere, "G1"),
        (too_many, "G3"),
        (lost_reference, "G4"),
        (free_although_used, "G4"),
        (lost_block, "G4"),
        (computed_beyond, "G6"),
        (published_too_early, "G8"),
        (wrong_status, "among the running"),
    ],
)
def test_a_broken_state_is_noticed(damage: Break, rule: str) -> None:
    driver = running_driver()
    check_invariants(driver.scheduler)
    damage(driver)
    with pytest.raises(AssertionError, match=rule):
        check_invariants(driver.scheduler)


def test_g5_the_free_count_is_the_length_of_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = running_driver()
    pool = driver.scheduler.kv_cache_manager.pool
    monkeypatch.setattr(pool, "get_num_free_blocks", lambda: 3)
    with pytest.raises(AssertionError, match="G5"):
        check_invariants(driver.scheduler)


def damaged_step(driver: Driver, damage: Callable[[Any], None]) -> None:
    """Schedule a step, damage what the workers are told, and check it."""
    scheduler = driver.scheduler
    build = scheduler._build_output

    def build_damaged(plan: Any) -> Any:
        output = build(plan)
        damage(output)
        return output

    scheduler._build_output = build_damaged  # type: ignore[method-assign]
    scheduler.schedule()


def more_than_the_sum(step: Any) -> None:
    step.total_num_scheduled_tokens += 1


def no_record(step: Any) -> None:
    step.scheduled_cached_reqs.pop()


def forgotten_block(step: Any) -> None:
    step.scheduled_cached_reqs[0].new_block_ids = [9]


def wrong_position(step: Any) -> None:
    step.scheduled_cached_reqs[0].num_computed_tokens -= 1


def wrong_number_of_outputs(step: Any) -> None:
    step.scheduled_cached_reqs[0].num_output_tokens += 1


@pytest.mark.parametrize(
    ("damage", "rule"),
    [
        (more_than_the_sum, "G2"),
        (no_record, "G10"),
        (forgotten_block, "G10"),
        (wrong_position, "G10"),
        (wrong_number_of_outputs, "G10"),
    ],
)
def test_a_wrong_step_is_noticed(damage: Callable[[Any], None], rule: str) -> None:
    with pytest.raises(AssertionError, match=rule):
        damaged_step(running_driver(), damage)


def test_g10_a_request_that_was_never_announced_is_noticed() -> None:
    driver = running_driver()
    checker = driver.scheduler._checker
    assert checker is not None
    checker._block_ids.clear()
    with pytest.raises(AssertionError, match="G10: r0 was never announced"):
        driver.scheduler.schedule()


def test_g7_an_id_for_a_chunk_of_a_prompt_is_noticed() -> None:
    driver = Driver(max_num_batched_tokens=8)
    driver.add("r", unlike(1, 20), 5)
    sample = driver.executor.sample_tokens

    def sample_too_much(grammar: Any) -> Any:
        output = sample(grammar)
        output.sampled_token_ids = [[5]]
        return output

    driver.executor.sample_tokens = sample_too_much  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match="G7"):
        driver.step()


def test_g9_outputs_out_of_order_are_noticed() -> None:
    driver = running_driver()
    apply = driver.scheduler.results.apply

    def apply_backwards(*args: Any) -> Any:
        return {client: batch[::-1] for client, batch in apply(*args).items()}

    driver.scheduler.results.apply = apply_backwards  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match="G9"):
        driver.step()


def test_they_can_be_switched_off() -> None:
    """A user's engine does not pay for them."""
    from tests.core.test_cost import QUIET

    driver = Driver(settings=QUIET)
    assert driver.scheduler._checker is None
