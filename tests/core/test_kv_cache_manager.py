"""2.5, 2.6, 2.11: lookup, allocation, publishing, events."""

from __future__ import annotations

from typing import Any

import pytest

from tellin.core.kv_cache_manager import KVCacheManager
from tellin.core.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventRecorder,
    external_hash,
)
from tellin.core.request import Request
from tellin.sampling_params import SamplingParams
from tests.core.driver import Driver
from tests.core.test_scheduler import unlike


def make(length: int, **kwargs: Any) -> Request:
    params = SamplingParams(max_tokens=4)
    return Request("r", list(range(length)), params, None, max_model_len=64, **kwargs)


def run(manager: KVCacheManager, request: Request) -> None:
    """Compute and publish all of a request's tokens, then free it."""
    hit = manager.get_computed_blocks(request)
    manager.admit(request, hit, request.num_tokens - hit.num_tokens)
    manager.cache_blocks(request, request.num_tokens)
    manager.free(request)


@pytest.mark.parametrize(
    ("length", "num_tokens", "num_shared", "is_copied"),
    [(8, 7, 1, True), (9, 8, 2, False), (7, 4, 1, False), (3, 0, 0, False), (13, 8, 2, False)],
)
def test_lookup(length: int, num_tokens: int, num_shared: int, is_copied: bool) -> None:
    """2.5.2 Check, ours being better: a full hit computes one token, not a block."""
    manager = KVCacheManager(20, 4, 64)
    run(manager, make(9))
    before = (list(manager.pool.ref_cnt), manager.pool.free_block_ids())
    hit = manager.get_computed_blocks(make(length))
    assert (hit.num_tokens, len(hit.block_ids)) == (num_tokens, num_shared)
    assert (hit.copy_from is not None) == is_copied
    assert (list(manager.pool.ref_cnt), manager.pool.free_block_ids()) == before  # 2.5.4


def test_block_of_one_token_needs_no_copy() -> None:
    manager = KVCacheManager(20, 1, 64)
    run(manager, make(4))
    hit = manager.get_computed_blocks(make(4))
    assert (hit.num_tokens, len(hit.block_ids), hit.copy_from) == (3, 3, None)


def test_no_reading() -> None:
    """1.2.5, 2.5.1: prompt logprobs and an explicit wish disable reading, not publishing."""
    manager = KVCacheManager(20, 4, 64)
    run(manager, make(9))
    for params in (
        SamplingParams(max_tokens=1, prompt_logprobs=1),
        SamplingParams(max_tokens=1, skip_reading_prefix_cache=True),
    ):
        request = Request("s", list(range(9)), params, None, max_model_len=64)
        assert manager.get_computed_blocks(request).num_tokens == 0
    # Cached positions have no logits: asking to read the cache would lose their logprobs.
    explicit = SamplingParams(max_tokens=1, prompt_logprobs=1, skip_reading_prefix_cache=False)
    request = Request("s", list(range(9)), explicit, None, max_model_len=64)
    assert manager.get_computed_blocks(request).num_tokens == 0
    off = KVCacheManager(20, 4, 64, enable_caching=False)
    run(off, make(9))
    assert off.get_computed_blocks(make(9)).num_tokens == 0
    assert off.pool.num_cached_blocks() == 0


def test_prompt_logprobs_are_delivered_once_then_reading_is_allowed() -> None:
    """A preempted request whose prompt logprobs are out need not compute its prompt again."""
    params = SamplingParams(max_tokens=4, prompt_logprobs=1)
    request = Request("s", list(range(9)), params, None, max_model_len=64)
    assert request.skip_reading_prefix_cache
    request.append_output_token_ids(1)
    assert not request.skip_reading_prefix_cache


def test_hits_leave_the_free_list_before_new_blocks_are_taken() -> None:
    """2.6.5: or the request's own allocation would evict its hits."""
    manager = KVCacheManager(5, 4, 64)
    run(manager, make(8))
    request = make(16)
    hit = manager.get_computed_blocks(request)
    assert manager.num_blocks_to_admit(request, hit, 8, whole=True) == 4
    manager.admit(request, hit, 8)
    assert request.block_ids[:2] == hit.block_ids
    assert len(set(request.block_ids)) == 4
    assert manager.pool.get_num_free_blocks() == 0


def test_a_copy_may_reuse_its_own_source() -> None:
    """The last free block is the source: it is taken over, nothing needs copying."""
    manager = KVCacheManager(3, 4, 64)
    run(manager, make(8))
    request = make(8)
    hit = manager.get_computed_blocks(request)
    assert hit.copy_from is not None
    assert manager.admit(request, hit, 1) == []
    assert request.block_ids[1] == hit.copy_from


def test_a_copy_refreshes_its_source() -> None:
    manager = KVCacheManager(6, 4, 64)
    run(manager, make(8))
    run(manager, Request("later", [90, 91, 92, 93], SamplingParams(), None, max_model_len=64))
    request = make(8)
    hit = manager.get_computed_blocks(request)
    assert hit.copy_from != manager.pool.free_block_ids()[-1]
    assert manager.admit(request, hit, 1) == [(hit.copy_from, request.block_ids[1])]
    assert manager.pool.free_block_ids()[-1] == hit.copy_from


def test_allocate_slots_fails_without_a_trace() -> None:
    """2.6.4."""
    manager = KVCacheManager(4, 4, 64)
    request = make(12)
    manager.admit(request, manager.get_computed_blocks(request), 8)
    request.num_computed_tokens = 8
    assert manager.allocate_slots(request, 9) is None
    assert len(request.block_ids) == 2
    assert manager.allocate_slots(request, 4) == [3]
    assert manager.allocate_slots(request, 4) == []


def test_lookahead_is_reserved_but_not_beyond_the_limit() -> None:
    """5.2.4."""
    manager = KVCacheManager(20, 4, 16, num_lookahead_tokens=3)
    request = make(14)
    hit = manager.get_computed_blocks(request)
    assert manager.num_blocks_to_admit(request, hit, 6, whole=False) == 3
    assert manager.num_blocks_to_admit(request, hit, 14, whole=False) == 4


def test_free_is_idempotent_and_reversed() -> None:
    """2.6.8."""
    manager = KVCacheManager(6, 4, 64, enable_caching=False)
    request = make(12)
    manager.free(request)
    manager.admit(request, manager.get_computed_blocks(request), 12)
    manager.free(request)
    manager.free(request)
    assert manager.pool.free_block_ids() == [3, 2, 1, 4, 5]


def test_events_describe_runs_of_blocks() -> None:
    """2.11.1 and its Wart: hashes, ids and extra keys always line up."""
    events = KVEventRecorder()
    manager = KVCacheManager(8, 4, 64, events=events)
    first = make(8)
    run(manager, first)
    (stored,) = events.take()
    assert isinstance(stored, BlockStored)
    assert stored.block_hashes == [external_hash(h) for h in first.block_hashes]
    assert (stored.token_ids, stored.parent_block_hash) == (list(range(8)), None)
    assert (stored.block_size, stored.medium, stored.extra_keys) == (4, "CPU", None)
    longer = make(16, cache_salt=None)
    run(manager, longer)
    (stored,) = events.take()
    assert isinstance(stored, BlockStored)
    assert stored.parent_block_hash == external_hash(first.block_hashes[-1])
    assert stored.token_ids == list(range(8, 16))
    salted = make(4, cache_salt="s")
    run(manager, salted)
    (stored,) = events.take()
    assert isinstance(stored, BlockStored)
    assert stored.extra_keys == [manager.hasher.extra_keys(salted, 0)]


def test_events_split_at_blocks_that_others_published() -> None:
    """2.11 Wart: a gap never hides inside one event."""
    events = KVEventRecorder()
    manager = KVCacheManager(12, 4, 64, events=events)
    a, b = make(12), make(12)
    for request in (a, b):
        manager.admit(request, manager.get_computed_blocks(request), 12)
    manager.cache_blocks(a, 4)
    a_middle = a.block_ids[1]
    manager.hasher.extend(b)
    manager.pool.cache_block(a_middle, b.block_hashes[1])
    a.num_cached_blocks = 2
    events.take()
    manager.cache_blocks(b, 12)
    (stored,) = events.take()
    assert isinstance(stored, BlockStored)
    assert stored.token_ids == list(range(8, 12))
    assert len(stored.block_hashes) == 1


def test_events_are_bounded() -> None:
    """P35: nobody may be listening."""
    events = KVEventRecorder(limit=10)
    for i in range(100):
        events.block_removed(b"%32d" % i)
        events.block_stored(BlockStored([i], None, [], 4))
    taken = events.take()
    assert len(taken) <= 11
    assert isinstance(taken[0], AllBlocksCleared)
    assert isinstance(taken[1], BlockStored | BlockRemoved)
    assert events.take() == []


def test_events_of_an_engine() -> None:
    """2.10-2.11 through the engine: stored, removed, cleared."""
    driver = Driver(cache={"enable_kv_cache_events": True}, num_kv_blocks=18)
    driver.add("a", unlike(1, 10), 3)
    driver.run()
    events = driver.core.take_kv_events().events
    assert [type(e) for e in events] == [BlockStored, BlockStored]
    assert driver.core.reset_prefix_cache()
    assert [type(e) for e in driver.core.take_kv_events().events] == [AllBlocksCleared]
