"""Slots of recurrent states and the snapshots a prefix cache needs of them (2.7.4)."""

from __future__ import annotations

from typing import Any

import pytest

from tellin.config import SpeculativeConfig
from tellin.core.block_pool import BlockPool
from tellin.core.kv_sizing import plan_kv_cache
from tellin.core.state_cache import StateCacheManager
from tellin.exceptions import OutOfMemoryError
from tellin.protocol import FinishReason
from tests.core.driver import Driver
from tests.core.fakes import StatefulExecutor, make_config, next_id
from tests.core.test_engine_core import Memory
from tests.core.test_scheduler import unlike


def stateful(max_slots: int = 1000, **config: Any) -> Driver:
    """Blocks of 4 tokens; snapshots that spare 4, and of decodes every 8."""
    executor_class = type("Executor", (StatefulExecutor,), {"max_slots": max_slots})
    settings = {"max_model_len": 256, "max_num_batched_tokens": 256, "num_kv_blocks": 512}
    driver = Driver(executor_class=executor_class, **(settings | config))
    driver.scheduler.in_flight_prefixes.min_shared_tokens = 4
    manager = states(driver)
    manager.min_saved_tokens, manager.decode_tokens = 4, 8
    return driver


def states(driver: Driver) -> StateCacheManager:
    manager = driver.scheduler.kv_cache_manager.states
    assert manager is not None
    return manager


def ask(driver: Driver, name: str, prompt: list[int], max_tokens: int = 4) -> int:
    """Run a request by itself; returns how many tokens of its prompt were computed."""
    before = driver.executor.num_computed
    driver.add(name, prompt, max_tokens)
    driver.run()
    driver.check_lone(name, max_tokens)
    return driver.executor.num_computed - before - (max_tokens - 1)


# ---------------------------------------------------------------------- prefix cache


@pytest.mark.parametrize(("length", "again"), [(39, 3), (40, 4), (41, 1), (3, 3)])
def test_the_same_prompt_goes_on_from_its_last_block(length: int, again: int) -> None:
    """A state cannot be cut back: the last token is computed from the block's end before it."""
    driver = stateful()
    prompt = unlike(1, length)
    assert ask(driver, "a", prompt) == length
    assert ask(driver, "b", prompt) == again
    assert ask(driver, "c", prompt) == again


def test_no_snapshot_without_the_block_at_its_end() -> None:
    """Whatever kept a block from being published; the slot is free again."""
    driver = stateful()
    driver.add("a", unlike(1, 39), 4)
    assert driver.scheduler.schedule().state_saves
    pool = BlockPool(16, True)
    states(driver).publish(pool)
    assert states(driver).num_snapshots == 0
    states(driver).check(driver.scheduler.running, pool)


def test_where_prefixes_fork_the_second_leaves_a_snapshot_for_the_third() -> None:
    driver = stateful()
    system = unlike(1, 41)
    assert ask(driver, "a", system + [501, 502] * 5) == 51
    assert ask(driver, "b", system + [503, 504] * 5) == 51
    assert ask(driver, "c", system + [505, 506] * 5) == 51 - 40
    saves = [save[1:2] for step in driver.executor.outputs for save in step.state_saves]
    assert saves == [(48,), (40,), (48,), (48,)]


def test_a_long_prompt_leaves_snapshots_at_chunk_ends_that_go_first() -> None:
    driver = stateful(max_num_batched_tokens=50, max_num_seqs=2)
    states(driver).checkpoint_tokens = 50
    prompt = unlike(1, 190)
    ask(driver, "before", unlike(2, 30), 1)
    assert ask(driver, "a", prompt, 1) == 190
    saves = {n: slot for step in driver.executor.outputs for _, n, slot in step.state_saves}
    assert list(saves) == [28, 100, 188]  # 48 is too near to the beginning; 148 to 100
    in_order_of_eviction = list(states(driver)._snapshots.values())
    assert in_order_of_eviction == [saves[100], saves[28], saves[188]]
    assert ask(driver, "b", prompt[:160], 1) == 160 - 100
    assert ask(driver, "c", prompt[:161], 1) == 161 - 156


def test_what_was_not_worth_keeping_is_not_asked_for_when_it_is_past() -> None:
    driver = stateful(long_prefill_token_threshold=5)
    manager = states(driver)
    assert ask(driver, "a", unlike(1, 17), 1) == 17
    manager.min_saved_tokens, manager.checkpoint_tokens = 8, 4
    assert ask(driver, "b", unlike(1, 23), 1) == 23 - 16  # chunks to 21 and 23


def test_decodes_renew_one_snapshot_and_a_conversation_goes_on_from_it() -> None:
    driver = stateful()
    prompt = unlike(1, 21)
    assert ask(driver, "a", prompt, 40) == 21
    assert states(driver).num_snapshots == 2  # after 20 tokens and after 56
    history = prompt + driver.tokens["a"]
    assert ask(driver, "b", [*history, 7, 8, 9]) == 64 - 56
    assert ask(driver, "c", [*prompt, 7, 8, 9]) == 4


@pytest.mark.parametrize("suffix", [[], [700]])
def test_siblings_and_bursts_compute_their_common_prefix_once(suffix: list[int]) -> None:
    """They wait for the one who computes it, and it keeps its state where they part."""
    driver = stateful(max_num_batched_tokens=24)
    prompt = unlike(1, 42)
    for i in range(4):
        driver.add(f"r{i}", [*prompt, *(n + i for n in suffix)], 4)
    driver.run()
    for i in range(4):
        driver.check_lone(f"r{i}", 4)
    own = len(suffix) + 2
    assert driver.executor.num_computed == 40 + 4 * own + 4 * 3


def test_who_is_past_the_fork_is_not_waited_for() -> None:
    driver = stateful(max_num_batched_tokens=24)
    prompt = unlike(1, 60)
    driver.add("a", prompt)
    driver.step()
    driver.step()  # 48 tokens
    driver.add("b", [*prompt[:32], 5, 6, 7])
    assert driver.step() == {"a": 12, "b": 12}
    driver.run()
    driver.check_lone("b", 4)


def test_preempted_requests_go_on_from_snapshots() -> None:
    driver = stateful(num_kv_blocks=33, max_model_len=60, max_num_seqs=3)
    for i in range(3):
        driver.add(f"r{i}", unlike(i, 13), 40)
    driver.run()
    for i in range(3):
        driver.check_lone(f"r{i}", 40)
    assert driver.scheduler.num_preemptions > 0
    assert any(step.state_copies for step in driver.executor.outputs)


def test_a_snapshot_is_taken_over_when_there_is_no_other_slot() -> None:
    driver = stateful(max_slots=2)
    assert driver.scheduler.max_num_seqs == 1
    prompt = unlike(1, 18)
    assert ask(driver, "a", prompt) == 18
    assert states(driver).num_snapshots == 0  # the request had the only slot
    driver = stateful(max_slots=3)
    driver.scheduler.max_num_seqs = driver.scheduler.admission.max_num_seqs = 1
    assert ask(driver, "a", prompt) == 18
    driver.scheduler.max_num_seqs = driver.scheduler.admission.max_num_seqs = 2
    driver.add("b", unlike(2, 4), 20)
    driver.step()
    assert ask(driver, "c", prompt) == 2 + 19  # the other's decodes
    assert not any(step.state_copies for step in driver.executor.outputs)


def test_without_prefix_caching_there_is_a_slot_for_each_request_and_no_snapshot() -> None:
    driver = stateful(enable_prefix_caching=False, max_num_seqs=3)
    assert driver.executor.num_slots == 1 + 3
    prompt = unlike(1, 41)
    assert ask(driver, "a", prompt) == ask(driver, "b", prompt) == 41


def test_an_evicted_block_takes_its_snapshot_with_it() -> None:
    driver = stateful(num_kv_blocks=17, max_model_len=64)
    assert ask(driver, "a", unlike(1, 41)) == 41
    assert states(driver).num_snapshots == 1
    assert ask(driver, "b", unlike(2, 51)) == 51
    assert states(driver).num_snapshots == 1
    assert ask(driver, "c", unlike(1, 41)) == 41


def test_forgetting_the_prefix_cache_forgets_snapshots() -> None:
    driver = stateful()
    prompt = unlike(1, 41)
    ask(driver, "a", prompt)
    assert driver.core.reset_prefix_cache()
    assert states(driver).num_snapshots == 0
    assert ask(driver, "b", prompt) == 41
    driver.add("c", prompt, 30)
    driver.step()
    driver.core.sleep(1, mode="keep")
    assert states(driver).num_snapshots == 0
    driver.core.wake_up()
    driver.run()
    driver.check_lone("c", 30)


# ---------------------------------------------------------------------- drafts


def drafting(num_right: int, **config: Any) -> Driver:
    """Three drafts in every step, of which the first few are right."""

    def draft(request_id: str, ids: list[int], limit: int) -> list[int]:
        drafts: list[int] = []
        for i in range(min(3, limit)):
            drafts.append(next_id(ids + drafts) if i < num_right else 901)
        return drafts

    driver = stateful(speculative_config=SpeculativeConfig("ngram", 3, adaptive=False), **config)
    driver.executor.draft = draft
    return driver


@pytest.mark.parametrize("num_right", range(4))
def test_a_request_goes_on_in_the_slot_of_its_last_right_draft(num_right: int) -> None:
    driver = drafting(num_right)
    prompt = unlike(1, 9)
    for name in ("a", "b"):
        driver.add(name, prompt, 60)
    driver.run()
    for name in ("a", "b"):
        driver.check_lone(name, 60)
    moves = sum(len(step.state_moves) for step in driver.executor.outputs)
    assert (moves > 0) == (num_right < 3)
    assert len(states(driver)._free) + states(driver).num_snapshots == states(driver).num_slots - 1
    # Ends of blocks are kept on the way, if a right draft was there: 64 of 68 ids.
    history = prompt + driver.tokens["a"]
    assert ask(driver, "c", [*history, 5], 1) == (70 - 64 if num_right else 70 - 8)


def test_a_move_is_told_until_a_step_has_run() -> None:
    driver = drafting(1)
    driver.add("a", unlike(1, 9), 30)
    while not states(driver)._moved:
        driver.step()
    moves = states(driver).take_moves()
    driver.core.pause_scheduler("keep", clear_cache=False)
    driver.step()
    driver.core.resume_scheduler()
    driver.step()
    assert driver.executor.outputs[-1].state_moves == moves
    driver.run()
    driver.check_lone("a", 30)


def test_slots_for_drafts_are_part_of_a_seat() -> None:
    spec = SpeculativeConfig("ngram", 3)
    config = make_config(
        num_kv_blocks=50, max_num_seqs=8, max_model_len=64, speculative_config=spec
    )
    sizes = plan_kv_cache(config, Memory(140 * 1024, bytes_per_slot=10 * 1024))
    assert (sizes.num_state_slots, sizes.max_num_seqs) == (9, 2)
    with pytest.raises(OutOfMemoryError, match="5 are needed at least"):
        plan_kv_cache(config, Memory(99 * 1024, bytes_per_slot=10 * 1024))
    sizes = plan_kv_cache(config, Memory(1 << 40, bytes_per_slot=10 * 1024))
    assert (sizes.num_state_slots, sizes.max_num_seqs) == (1 + 8 * 6, 8)


# ---------------------------------------------------------------------- what goes wrong


def test_snapshots_of_a_step_that_failed_or_of_a_request_that_did_are_not_kept() -> None:
    driver = stateful()
    prompt = unlike(1, 41)
    ask(driver, "short", prompt[:40], 1)  # publishes 40 tokens' KV, and the state after 36
    driver.executor.fail_on_step = lambda _: ValueError("no step")
    driver.add("a", prompt)
    driver.step()
    assert driver.finish["a"] is FinishReason.ERROR
    driver.executor.fail_on_step = None
    driver.executor.request_errors["b"] = "bad rows"
    driver.add("b", prompt)
    driver.step()
    assert driver.finish["b"] is FinishReason.ERROR
    driver.add("c", prompt)
    original = driver.executor.execute_model

    def aborted(step: Any, non_block: bool = False) -> Any:
        driver.core.abort_during_step(["c"])
        return original(step, non_block)

    driver.executor.execute_model = aborted  # type: ignore[method-assign]
    driver.step()
    driver.executor.execute_model = original  # type: ignore[method-assign]
    assert [len(step.state_saves) for step in driver.executor.outputs] == [1, 0, 1, 1]
    assert states(driver).num_snapshots == 1
    assert ask(driver, "d", prompt, 1) == 41 - 36
    assert len(states(driver)._free) == states(driver).num_slots - 3


def test_ctrl_c_leaves_no_slot_behind() -> None:
    driver = stateful(max_num_seqs=3)
    for i in range(5):
        driver.add(f"r{i}", unlike(i, 20), 6)
    driver.step()
    manager: Any = states(driver)
    original = manager.plan_saves

    def interrupted(plan: Any) -> Any:
        manager.plan_saves = original
        original(plan)
        raise KeyboardInterrupt

    manager.plan_saves = interrupted
    with pytest.raises(KeyboardInterrupt):
        driver.run()
    driver.run()
    driver.check_idle()
    assert len(manager._free) + manager.num_snapshots == manager.num_slots - 1
    done = [i for i, reason in driver.finish.items() if reason is FinishReason.LENGTH]
    assert len(done) == 2
    for request_id in done:
        driver.check_lone(request_id, 6)


# ---------------------------------------------------------------------- sizes


def test_states_take_half_of_the_memory_at_most() -> None:
    config = make_config(num_kv_blocks=None, max_num_seqs=8, max_model_len=64)
    sizes = plan_kv_cache(config, Memory(1 << 40, bytes_per_slot=1 << 20))
    assert (sizes.num_state_slots, sizes.max_num_seqs, sizes.num_blocks) == (25, 8, 8 * 16 + 1)
    sizes = plan_kv_cache(config, Memory(100 * 1024, bytes_per_slot=10 * 1024))
    assert (sizes.num_state_slots, sizes.max_num_seqs, sizes.num_blocks) == (5, 4, 50)
    assert sizes.max_concurrency == 49 / 16
    sizes = plan_kv_cache(config, Memory(600 * 1024, bytes_per_slot=100 * 1024))
    assert (sizes.num_state_slots, sizes.max_num_seqs, sizes.num_blocks) == (3, 2, 33)
    # A model without attention gives all of it to states.
    sizes = plan_kv_cache(config, Memory(100 * 1024, 0, bytes_per_slot=10 * 1024))
    assert (sizes.num_state_slots, sizes.max_num_seqs, sizes.num_blocks) == (10, 8, 129)
    config = make_config(num_kv_blocks=None, max_num_seqs=64, max_model_len=1 << 20)
    assert (
        plan_kv_cache(config, Memory(1 << 30, 0, bytes_per_slot=1024)).num_blocks == (1 << 18) + 1
    )


def test_a_given_number_of_blocks_leaves_the_rest_to_states() -> None:
    config = make_config(num_kv_blocks=50, max_num_seqs=8, max_model_len=64)
    sizes = plan_kv_cache(config, Memory(100 * 1024, bytes_per_slot=10 * 1024))
    assert (sizes.num_state_slots, sizes.max_num_seqs, sizes.num_blocks) == (5, 4, 50)
    with pytest.raises(OutOfMemoryError, match=r"state of 10240 bytes per request.*num_kv_blocks"):
        plan_kv_cache(config, Memory(69 * 1024, bytes_per_slot=10 * 1024))


def test_fewer_seats_are_said_at_the_start(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="tellin.core"):
        driver = stateful(max_slots=4)
    assert driver.scheduler.max_num_seqs == 3
    assert "max_num_seqs is lowered from 8 to 3" in caplog.text
    assert "3 slots of recurrent states for 3 requests" in caplog.text
