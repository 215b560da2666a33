"""What a watcher is told of the core: counts and states are right, text stays out, it is cheap."""

from __future__ import annotations

import time
from collections import Counter

import hypothesis.strategies as st
import msgspec
from hypothesis import given

from tellin.core.block_pool import BlockPool
from tellin.core.snapshot import MAX_REQUESTS, block_states
from tellin.protocol import BlockState, EngineCoreSnapshot
from tests.core.driver import Driver

MAX_COST_S = 0.001
SECRET_ID = 777


def slow_states(pool: BlockPool) -> list[BlockState]:
    """The same, one block at a time."""
    states = []
    for block_id in range(1, pool.num_blocks):
        published = pool.block_hash[block_id] is not None or block_id in set(pool.tail_block_ids())
        match pool.ref_cnt[block_id]:
            case 0:
                states.append(BlockState.CACHED if published else BlockState.FREE)
            case 1:
                states.append(BlockState.USED)
            case _:
                states.append(BlockState.SHARED)
    return states


@given(st.data(), st.integers(1, 40))
def test_states_equal_those_of_each_block(data: st.DataObject, num_blocks: int) -> None:
    pool = BlockPool(num_blocks)
    for block_id in pool.get_new_blocks(num_blocks - 1):
        fate = data.draw(st.sampled_from(["free", "used", "cached", "tail", "published", "shared"]))
        if fate in ("cached", "published"):
            pool.cache_block(block_id, b"%d" % block_id)
        if fate == "tail":
            pool.cache_tail(block_id, b"%d" % block_id)
        if fate in ("free", "cached", "tail"):
            pool.free_blocks([block_id])
        if fate == "shared":
            pool.touch([block_id] * data.draw(st.sampled_from([1, 2, 300])))
    assert list(block_states(pool)) == slow_states(pool)


def test_states_cost_under_a_millisecond_with_ten_thousand_blocks() -> None:
    pool = BlockPool(10_001)
    owned = pool.get_new_blocks(8_000)
    for block_id in owned[::2]:
        pool.cache_block(block_id, b"%d" % block_id)
    pool.free_blocks(owned[:4_000])
    costs = []
    for _ in range(50):
        start = time.process_time()
        states = block_states(pool)
        costs.append(time.process_time() - start)
    assert len(states) == 10_000
    assert min(costs) < MAX_COST_S


def test_requests_in_all_phases() -> None:
    driver = Driver(max_num_seqs=2, max_model_len=256, num_kv_blocks=128)
    driver.add("a", list(range(10)), max_tokens=50)
    driver.step()
    driver.add("b", list(range(100))[::-1], max_tokens=5)
    driver.step()
    driver.add("c", [7, 8, 9], max_tokens=3, priority=4)
    snapshot = driver.core.get_snapshot()
    assert [(r.request_id, r.state) for r in snapshot.requests] == [
        ("a", "decode"),
        ("b", "prefill"),
        ("c", "waiting"),
    ]
    a, b, c = snapshot.requests
    assert (a.num_prompt_tokens, a.num_output_tokens, a.max_tokens) == (10, 2, 50)
    assert 0 < b.num_computed_tokens < b.num_prompt_tokens == 100
    assert c.num_blocks == c.num_computed_tokens == 0
    assert c.priority == 4
    assert all(request.age_s >= 0 for request in snapshot.requests)
    assert (snapshot.num_running_reqs, snapshot.num_waiting_reqs) == (2, 1)
    counts = Counter(snapshot.block_states)
    assert counts[BlockState.USED] == a.num_blocks + b.num_blocks > 0
    driver.run()
    driver.check_idle()
    after = driver.core.get_snapshot()
    assert after.requests == []
    assert set(after.block_states) <= {BlockState.FREE, BlockState.CACHED}
    assert BlockState.CACHED in after.block_states


def test_shared_prefixes_are_seen() -> None:
    driver = Driver(block_size=4)
    driver.add("a", list(range(12)), max_tokens=8)
    driver.step()
    driver.add("b", list(range(12)), max_tokens=8)
    driver.step()
    assert Counter(driver.core.get_snapshot().block_states)[BlockState.SHARED] >= 2


def test_a_request_that_waits_for_anothers_prefix_is_blocked() -> None:
    driver = Driver(max_model_len=128)
    prompt = list(range(70))
    driver.add("a", prompt, max_tokens=4)
    driver.step()
    driver.add("b", prompt, max_tokens=4)
    driver.step()
    snapshot = driver.core.get_snapshot()
    assert [(r.request_id, r.state) for r in snapshot.requests] == [
        ("a", "prefill"),
        ("b", "blocked"),
    ]
    assert (snapshot.num_running_reqs, snapshot.num_blocked_reqs) == (1, 1)
    driver.run()
    driver.check_idle()


def test_a_preempted_request_says_so() -> None:
    driver = Driver(num_kv_blocks=9, max_model_len=32)
    driver.add("a", list(range(12)), max_tokens=16)
    driver.add("b", list(range(50, 62)), max_tokens=16)
    seen = set()
    while driver.scheduler.has_unfinished_requests():
        driver.step()
        seen |= {(r.state, r.num_preemptions > 0) for r in driver.core.get_snapshot().requests}
    assert ("preempted", True) in seen


def test_no_ids_and_few_requests_cross() -> None:
    """The list is cut off, the counts are not; it survives the wire; no prompt is in it."""
    driver = Driver(max_num_seqs=4)
    for index in range(MAX_REQUESTS + 10):
        driver.add(f"r{index}", [SECRET_ID] * 3, max_tokens=4)
    driver.step()
    snapshot = driver.core.get_snapshot()
    assert len(snapshot.requests) == MAX_REQUESTS
    assert snapshot.num_running_reqs + snapshot.num_waiting_reqs == MAX_REQUESTS + 10
    wire = msgspec.msgpack.encode(snapshot)
    assert msgspec.convert(msgspec.msgpack.decode(wire), EngineCoreSnapshot) == snapshot
    assert msgspec.msgpack.encode([SECRET_ID] * 3)[1:] not in wire


def test_a_snapshot_changes_nothing() -> None:
    driver = Driver(max_num_seqs=2)
    for name, prompt in (("a", [1, 2, 3]), ("b", [4, 5]), ("c", [6])):
        driver.add(name, prompt, max_tokens=6)
    while driver.core.has_work():
        driver.step()
        assert driver.core.get_snapshot().block_states == driver.core.get_snapshot().block_states
    for name in ("a", "b", "c"):
        driver.check_lone(name, 6)
    driver.check_idle()


def test_steps_tell_prompts_from_decoded_tokens() -> None:
    """Prefill tokens of a step are those of prompts, however they are chunked."""
    driver = Driver(log_stats=True, max_model_len=128)
    driver.add("a", list(range(70)), max_tokens=5)
    driver.add("b", list(range(20))[::-1], max_tokens=5)
    driver.run()
    stats = [s for s in driver.stats if s.num_scheduled_tokens]
    assert sum(s.num_prefill_tokens for s in stats) == 90
    assert sum(s.num_scheduled_tokens - s.num_prefill_tokens for s in stats) == 2 * 4
    assert stats[-1].num_prefill_tokens == 0
