"""The global invariants G1-G10, asserted after every step when TELLIN_CHECK_INVARIANTS is set.

Most are statements about the scheduler's whole state, recomputed from scratch. `StepChecker` holds
what a step's own rules need: a mirror of what the workers have been told.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tellin.core.block_pool import NULL_BLOCK_ID
from tellin.core.request import RequestStatus

if TYPE_CHECKING:
    from tellin.core.scheduler import Scheduler
    from tellin.core.step_plan import StepPlan
    from tellin.protocol import EngineCoreOutput
    from tellin.step_protocol import ModelRunnerOutput, SchedulerOutput


class StepChecker:
    """Follows the stream of steps as a worker does, and compares."""

    def __init__(self) -> None:
        self._block_ids: dict[str, list[int]] = {}
        self._num_prompt: dict[str, int] = {}

    def scheduled(self, scheduler: Scheduler, step: SchedulerOutput) -> None:
        """G2, G3, G6 and G10 of a step that was just scheduled; raises AssertionError."""
        check_step(scheduler, step)
        for request_id in step.finished_req_ids:
            self._block_ids.pop(request_id, None)
            self._num_prompt.pop(request_id, None)
        for new in step.scheduled_new_reqs:
            self._block_ids[new.req_id] = list(new.block_ids)
            self._num_prompt[new.req_id] = new.num_prompt_tokens
            self._compare(scheduler, step, new.req_id, new.num_computed_tokens, len(new.token_ids))
        for cached in step.scheduled_cached_reqs:
            request_id = cached.req_id
            assert request_id in self._block_ids, f"G10: {request_id} was never announced"
            num_tokens = self._num_prompt[request_id] + cached.num_output_tokens
            if cached.resumed:
                self._block_ids[request_id] = list(cached.new_block_ids)
                assert cached.all_token_ids is not None, f"G10: {request_id} without its ids"
                assert len(cached.all_token_ids) == num_tokens, f"G10: ids of {request_id}"
            else:
                self._block_ids[request_id] += cached.new_block_ids
            self._compare(scheduler, step, request_id, cached.num_computed_tokens, num_tokens)

    def _compare(
        self, scheduler: Scheduler, step: SchedulerOutput, req_id: str, computed: int, known: int
    ) -> None:
        """G10: what the stream says of a request is what the scheduler has."""
        request = scheduler.requests[req_id]
        assert self._block_ids[req_id] == request.block_ids, f"G10: block table of {request}"
        assert known == request.num_tokens, f"G10: {request} has {known} ids in the stream"
        computed += step.num_scheduled_tokens[req_id]
        assert computed == request.num_computed_tokens, f"G10: position of {request}"

    def results(self, plan: StepPlan, model_output: ModelRunnerOutput | None) -> None:
        """G7: who has not reached the last known id gets none. Call it before they are applied."""
        if model_output is None:
            return
        rows = dict(zip(model_output.req_ids, model_output.sampled_token_ids, strict=True))
        for request in plan.requests:
            ids = rows.get(request.request_id)
            if request.status is RequestStatus.RUNNING and ids:
                assert request.num_computed_tokens >= request.num_tokens, f"G7: {request} got {ids}"

    def outputs(self, plan: StepPlan, outputs: dict[int, list[EngineCoreOutput]]) -> None:
        """G9: outputs come in the order in which their requests were scheduled, each once."""
        order = {request.request_id: i for i, request in enumerate(plan.requests)}
        for batch in outputs.values():
            places = [
                order[output.request_id]
                for output in batch
                if output.request_id in order and output.new_token_ids
            ]
            assert places == sorted(set(places)), "G9: outputs are not in scheduling order"


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
    for request_id in step.scheduled_encoder_inputs:
        assert request_id in scheduler.requests, f"{request_id} is to be encoded, but not live"
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
    scheduler.encoder_inputs.cache.check({r.request_id for r in scheduler.running})
    manager = scheduler.kv_cache_manager
    if manager.states is not None:
        manager.states.check(scheduler.running, manager.pool)


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
