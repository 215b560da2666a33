"""The global invariants G1-G10, asserted after every step when TELLIN_CHECK_INVARIANTS is set.

Each is a statement about the scheduler's whole state, recomputed from scratch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tellin.core.block_pool import NULL_BLOCK_ID
from tellin.core.request import RequestStatus

if TYPE_CHECKING:
    from tellin.core.scheduler import Scheduler
    from tellin.step_protocol import SchedulerOutput


def check_step(scheduler: Scheduler, step: SchedulerOutput) -> None:
    """G2, G3 and G6 of a step that was just scheduled; raises AssertionError."""
    total = sum(step.num_scheduled_tokens.values())
    assert total == step.total_num_scheduled_tokens, "G2: the sum differs from the total"
    assert total <= scheduler.max_num_scheduled_tokens, "G2: more than the budget"
    assert len(scheduler.running) <= scheduler.max_num_seqs, "G3: more running than seats"
    assert all(n > 0 for n in step.num_scheduled_tokens.values()), "an empty share"
    for request_id in step.num_scheduled_tokens:
        request = scheduler.requests[request_id]
        drafts = step.scheduled_spec_decode_tokens.get(request_id, [])
        limit = request.num_tokens + len(drafts)
        assert request.num_computed_tokens <= limit, f"G6: {request}"
        assert request.num_computed_tokens <= request.num_slots, f"{request}: KV without a slot"
    scheduled = [*(r.req_id for r in step.scheduled_cached_reqs)]
    scheduled += [r.req_id for r in step.scheduled_new_reqs]
    assert len(scheduled) == len(set(scheduled)), "a request is scheduled twice"
    assert set(scheduled) == step.num_scheduled_tokens.keys(), "G10: records differ from shares"


def check_invariants(scheduler: Scheduler) -> None:
    """Raises AssertionError naming the first broken rule. Call it between steps."""
    _check_places(scheduler)
    _check_requests(scheduler)
    _check_blocks(scheduler)
    _check_cache(scheduler)


def _check_places(scheduler: Scheduler) -> None:
    """G1: every live request is in exactly one place; G3: seats."""
    room = scheduler.room
    places: dict[str, list[str]] = {}
    for name, ids in (
        ("running", [r.request_id for r in scheduler.running]),
        ("waiting", [r.request_id for r in room.waiting]),
        ("preempted", [r.request_id for r in room.preempted]),
        ("blocked", list(room.blocked)),
    ):
        for request_id in ids:
            places.setdefault(request_id, []).append(name)
    for request_id, found in places.items():
        assert len(found) == 1, f"G1: {request_id} is in {found}"
        assert request_id in scheduler.requests, f"G1: {request_id} is queued but not live"
    missing = scheduler.requests.keys() - places.keys()
    assert not missing, f"G1: {missing} are live but nowhere"
    assert len(scheduler.running) <= scheduler.max_num_seqs, "G3: more running than seats"


def _check_requests(scheduler: Scheduler) -> None:
    """G6 and the status of every place."""
    for request in scheduler.requests.values():
        total = len(request.all_token_ids)
        assert request.num_tokens == total, f"{request}: num_tokens is not {total}"
        assert request.num_tokens <= scheduler.max_model_len, f"{request} is too long"
    for request in scheduler.running:
        assert request.status is RequestStatus.RUNNING, f"{request} is among the running"
        assert request.num_computed_tokens < request.num_tokens, f"G6: {request}"
        assert request.num_computed_tokens <= request.num_slots, f"{request}: KV without a slot"
        size = scheduler.kv_cache_manager.block_size
        assert request.num_slots == len(request.block_ids) * size
    for request in [*scheduler.room.waiting, *scheduler.room.preempted]:
        assert request.num_computed_tokens == 0, f"{request} waits, yet has computed tokens"
        assert not request.block_ids, f"{request} waits, yet holds blocks"
        assert not request.spec_token_ids
        assert not request.prefix_waiters
        assert request.in_flight_range is None


def _check_blocks(scheduler: Scheduler) -> None:
    """G4: reference counts equal the block tables; G5: the free list is what is unreferenced."""
    pool = scheduler.kv_cache_manager.pool
    expected = [0] * pool.num_blocks
    for request in scheduler.requests.values():
        assert len(set(request.block_ids)) == len(request.block_ids), f"{request}: a block twice"
        for block_id in request.block_ids:
            assert block_id != NULL_BLOCK_ID, f"{request} holds the null block"
            expected[block_id] += 1
    assert expected == pool.ref_cnt, "G4: reference counts differ from the block tables"
    free = pool.free_block_ids()
    assert len(free) == pool.get_num_free_blocks(), "G5: free count"
    unreferenced = {i for i in range(1, pool.num_blocks) if expected[i] == 0}
    assert set(free) == unreferenced, "G4: the free list is not what is unreferenced"
    assert len(free) == len(unreferenced), "G5: a block is on the free list twice"


def _check_cache(scheduler: Scheduler) -> None:
    """G8: published blocks of running requests hold final, computed tokens."""
    manager = scheduler.kv_cache_manager
    pool = manager.pool
    published = {h: i for i, h in enumerate(pool.block_hash) if h is not None}
    assert len(published) == pool.num_cached_blocks(), "a hash names two blocks"
    for block_hash, block_id in published.items():
        assert pool.get_cached_block(block_hash) == block_id
    assert {b: h for h, b in pool._tails.items()} == pool._tail_of, "tails differ from their blocks"
    for request in scheduler.running:
        num_final = min(request.num_computed_tokens, request.num_tokens)
        assert request.num_cached_blocks * manager.block_size <= num_final, f"G8: {request}"
        for index, block_id in enumerate(request.block_ids):
            own_hash = pool.block_hash[block_id]
            if own_hash is not None:
                assert index < request.num_cached_blocks, f"G8: {request} published block {index}"
                assert own_hash == request.block_hashes[index]
    live = set(map(id, scheduler.running))
    owners = scheduler.in_flight_prefixes.owners()
    assert all(id(owner) in live for owner in owners), "a prefix is owned by nobody who runs"
