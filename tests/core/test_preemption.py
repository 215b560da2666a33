"""1.6.3: who pays when blocks run out, and that nobody notices."""

from __future__ import annotations

import pytest

from tellin.config import LoRAConfig
from tellin.core.request import Request
from tellin.core.scheduler import Scheduler
from tellin.protocol import EngineCoreEventType, LoRARequest
from tellin.step_protocol import ModelRunnerOutput
from tests.core.driver import Driver
from tests.core.fakes import make_config, make_request, next_id
from tests.core.test_scheduler import unlike


def test_the_youngest_pays_under_fcfs() -> None:
    """1.6.3: the last admitted; its outputs are kept and fed again."""
    driver = Driver(num_kv_blocks=9, max_model_len=32, block_size=4, enable_prefix_caching=False)
    for i in range(3):
        driver.add(f"r{i}", unlike(i, 7), 12)
    driver.step()
    driver.step()
    scheduled = driver.step()
    assert scheduled == {"r0": 1, "r1": 1}
    step = driver.executor.outputs[-1]
    assert step.preempted_req_ids == {"r2"}
    request = driver.scheduler.requests["r2"]
    assert (request.num_computed_tokens, request.num_output_tokens) == (0, 2)
    assert (request.num_preemptions, request.block_ids) == (1, [])
    driver.run()
    for i in range(3):
        driver.check_lone(f"r{i}", 12)
    driver.check_idle()


def test_a_resumed_request_gets_a_new_block_table() -> None:
    """1.8.3: the table replaces the old one, all ids are sent."""
    driver = Driver(num_kv_blocks=9, max_model_len=32, block_size=4, enable_prefix_caching=False)
    for i in range(3):
        driver.add(f"r{i}", unlike(i, 7), 12)
    driver.run()
    resumed = [
        record
        for step in driver.executor.outputs
        for record in step.scheduled_cached_reqs
        if record.resumed
    ]
    assert resumed
    for record in resumed:
        assert record.all_token_ids is not None
        prompt = driver.prompts[record.req_id]
        output = driver.tokens[record.req_id][: record.num_output_tokens]
        assert record.all_token_ids == prompt + output
        assert len(record.new_block_ids) * 4 >= len(record.all_token_ids)


def test_a_preempted_request_hits_its_own_blocks() -> None:
    """2.5.3: recomputation is cheap while the blocks are still there; counted apart."""
    driver = Driver(num_kv_blocks=9, max_model_len=32, block_size=4, log_stats=True)
    for i in range(3):
        driver.add(f"r{i}", unlike(i, 7), 12)
    driver.run()
    stats = [s.prefix_cache_stats for s in driver.stats if s.prefix_cache_stats is not None]
    assert sum(s.preempted_requests for s in stats) == driver.scheduler.num_preemptions > 0
    assert sum(s.preempted_hits for s in stats) > 0
    for i in range(3):
        driver.check_lone(f"r{i}", 12)


def priority_driver(**config: object) -> Driver:
    return Driver(
        policy="priority",
        num_kv_blocks=7,
        max_model_len=24,
        block_size=4,
        enable_prefix_caching=False,
        **config,
    )


def test_a_planned_victim_is_taken_out_of_the_step() -> None:
    """1.6.3, T4, P22: the victim was already scheduled; its tokens go back to the budget."""
    driver = priority_driver(max_num_batched_tokens=8)
    driver.add("low", unlike(1, 4), 16, priority=5, arrival_time=1.0)
    driver.step()
    driver.add("high", unlike(2, 6), 12, priority=0, arrival_time=2.0)
    while driver.scheduler.num_preemptions == 0:
        before = driver.step()
    assert list(before) == ["high"]
    step = driver.executor.outputs[-1]
    assert step.preempted_req_ids == {"low"}
    assert step.total_num_scheduled_tokens == 1
    assert [r.req_id for r in step.scheduled_cached_reqs] == ["high"]
    driver.run()
    driver.check_lone("low", 16)
    driver.check_lone("high", 12)
    driver.check_idle()


def test_equal_priorities_and_times_have_an_order() -> None:
    """P22: six requests, some equal in everything but their order; lower number ends first."""
    driver = priority_driver(max_num_seqs=2)
    priorities = [1, 0, 1, 0, 2, 0]
    for i, priority in enumerate(priorities):
        driver.add(f"r{i}", unlike(i, 5), 15, priority=priority, arrival_time=7.0)
    driver.run()
    for i in range(6):
        driver.check_lone(f"r{i}", 15)
    order = [priorities[int(request_id[1])] for request_id in driver.finish]
    assert order[:3] == [0, 0, 0]
    assert order[-1] == 2
    driver.check_idle()


def test_nobody_is_skipped_when_the_running_set_shrinks() -> None:
    """1.6.3 Wart: a victim ahead in the list must not make the loop miss the next request."""
    driver = Driver(
        policy="priority",
        num_kv_blocks=10,
        max_model_len=36,
        block_size=4,
        max_num_seqs=3,
        enable_prefix_caching=False,
    )
    driver.add("victim", unlike(1, 9), 9, priority=9)
    driver.step()
    driver.add("a", unlike(2, 12), 9, priority=0)
    driver.add("b", unlike(3, 9), 9, priority=1)
    driver.step()
    while driver.scheduler.num_preemptions == 0:
        scheduled = driver.step()
    assert driver.executor.outputs[-1].preempted_req_ids == {"victim"}
    assert sorted(scheduled) == ["a", "b"]
    driver.run()


def test_rolled_back_blocks_are_not_published() -> None:
    """T3: what a planned but taken-out request would have written is in no cache."""
    driver = Driver(
        policy="priority",
        num_kv_blocks=7,
        max_model_len=24,
        block_size=4,
    )
    driver.add("low", unlike(1, 3), 16, priority=5)
    driver.step()
    driver.add("high", unlike(2, 7), 12, priority=0)
    driver.run()
    driver.add("again", unlike(1, 3), 16)
    driver.run()
    driver.check_lone("again", 16)


def test_a_preempted_adapter_gives_its_slot_back() -> None:
    """T4."""
    driver = priority_driver(lora_config=LoRAConfig(max_loras=1))
    a, b = LoRARequest("a", 1, "/a"), LoRARequest("b", 2, "/b")
    driver.add("low", unlike(1, 4), 16, priority=5, lora_request=a)
    driver.step()
    driver.add("high", unlike(2, 6), 12, priority=0)
    driver.add("other", unlike(3, 2), 3, priority=1, lora_request=b)
    driver.run()
    driver.check_idle()
    assert driver.scheduler.num_preemptions > 0
    assert len(driver.finish) == 3


def test_preemption_with_n_children() -> None:
    """Priority, preemption and n > 1 together: every child gets its own complete output."""
    driver = Driver(
        policy="priority", num_kv_blocks=13, max_model_len=48, block_size=4, max_num_seqs=6
    )
    driver.scheduler.in_flight_prefixes.min_shared_tokens = 4
    for parent in range(2):
        for child in range(3):
            driver.add(f"{child}_p{parent}", unlike(parent, 14), 20, priority=parent)
    driver.run()
    assert driver.scheduler.num_preemptions > 0
    for request_id in driver.tokens:
        driver.check_lone(request_id, 20)
    driver.check_idle()


def test_the_first_in_line_is_never_preempted() -> None:
    """E5: progress is guaranteed, because the head of the policy's order keeps its blocks."""
    driver = Driver(num_kv_blocks=9, max_model_len=32, block_size=4, enable_prefix_caching=False)
    for i in range(6):
        driver.add(f"r{i}", unlike(i, 6), 20)
    driver.run()
    for request in driver.executor.outputs:
        assert "r0" not in request.preempted_req_ids
    assert next(iter(driver.finish)) == "r0"


def test_preemption_is_an_event() -> None:
    driver = Driver(num_kv_blocks=9, max_model_len=32, enable_prefix_caching=False, log_stats=True)
    for i in range(3):
        driver.add(f"r{i}", unlike(i, 7), 12)
    driver.run()
    events = [e.type for o in driver.outputs["r2"] for e in o.events or ()]
    assert events[:2] == [EngineCoreEventType.QUEUED, EngineCoreEventType.SCHEDULED]
    assert events[2:4] == [EngineCoreEventType.PREEMPTED, EngineCoreEventType.SCHEDULED]


def test_a_preempted_request_is_not_resumed_only_to_be_preempted_again() -> None:
    """It comes back when there is room for everybody's next block, not at the first chance."""
    driver = Driver(num_kv_blocks=9, max_model_len=32, block_size=4, enable_prefix_caching=False)
    for i in range(3):
        driver.add(f"r{i}", unlike(i, 7), 20)
    driver.run()
    assert driver.scheduler.num_preemptions <= 3


@pytest.mark.parametrize("failing", [True, False])
def test_a_hash_is_published_only_after_its_step_ran(failing: bool) -> None:
    """DESIGN, 2.6.6, T3: nothing is cached between schedule and update, nor after a failure."""
    scheduler = Scheduler(make_config(), 64)
    for request_id in ("a", "b"):
        wire = make_request(request_id, [1] * 8, 4)
        scheduler.add_request(Request.from_engine_core_request(wire, max_model_len=64))
    step = scheduler.schedule()
    assert step.num_scheduled_tokens == {"a": 8, "b": 8}
    pool = scheduler.kv_cache_manager.pool
    assert pool.num_cached_blocks() == 0
    if failing:
        scheduler.fail_step(step, "no")
        assert pool.num_cached_blocks() == 0
        assert pool.get_num_free_blocks() == 63
    else:
        scheduler.update_from_output(step, ModelRunnerOutput(["a", "b"], [[1], [1]]))
        assert pool.num_cached_blocks() == 2


def test_next_id_is_a_function_of_all_ids() -> None:
    """The fake model must notice every difference, or these tests prove nothing."""
    assert len({next_id([i, j]) for i in range(20) for j in range(20)}) > 300
