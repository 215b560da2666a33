"""2.1-2.3: the free list is the LRU list, and what each operation does to it."""

from __future__ import annotations

import pytest

from tellin.core.block_pool import NULL_BLOCK_ID, BlockPool
from tellin.core.kv_cache_metrics import KVCacheMetricsCollector, PrefixCacheStats
from tellin.core.kv_events import AllBlocksCleared, BlockRemoved, KVEventRecorder


def hashed(pool: BlockPool, *block_ids: int) -> None:
    for block_id in block_ids:
        assert pool.cache_block(block_id, b"hash%d" % block_id)


def test_null_block_is_never_handed_out() -> None:
    """2.2.1, T1: a pool of N has N - 1 usable blocks."""
    pool = BlockPool(4)
    assert pool.num_usable_blocks == 3
    assert pool.get_usage() == 0.0
    assert pool.get_new_blocks(3) == [1, 2, 3]
    assert pool.get_usage() == 1.0
    with pytest.raises(ValueError, match="only 0 are free"):
        pool.get_new_blocks(1)
    assert pool.get_num_free_blocks() == 0
    assert BlockPool(1).get_usage() == 0.0


@pytest.mark.parametrize(("caching", "order"), [(True, [3, 4, 5, 2, 1]), (False, [3, 2, 1, 4, 5])])
def test_freed_blocks_go_where_they_are_worth(caching: bool, order: list[int]) -> None:
    """2.2.4 Check: hashed 1, 2 to the tail, unhashed 3 to the front, last block first."""
    pool = BlockPool(6)
    owned = pool.get_new_blocks(3)
    if caching:
        hashed(pool, 1, 2)
    pool.free_blocks(reversed(owned))
    assert pool.free_block_ids() == order


def test_initial_order_is_by_id() -> None:
    """2.1.3."""
    assert BlockPool(5).free_block_ids() == [1, 2, 3, 4]


def test_touch_takes_a_block_out_of_the_middle() -> None:
    """2.2.3."""
    pool = BlockPool(5)
    pool.free_blocks(reversed(pool.get_new_blocks(2)))
    pool.touch([2, 3])
    assert pool.free_block_ids() == [1, 4]
    pool.touch([2])
    assert pool.ref_cnt[2] == 2
    pool.free_blocks([2])
    assert pool.free_block_ids() == [1, 4]
    pool.free_blocks([2])
    assert pool.free_block_ids() == [2, 1, 4]


def test_new_blocks_lose_their_hash() -> None:
    """2.2.2: taking a cached block evicts it, with an event."""
    events = KVEventRecorder()
    pool = BlockPool(3, events=events)
    pool.get_new_blocks(2)
    hashed(pool, 1)
    pool.free_blocks([2, 1])
    assert pool.get_cached_block(b"hash1") == 1
    assert pool.get_new_blocks(2) == [2, 1]
    assert pool.get_cached_block(b"hash1") is None
    (event,) = events.take()
    assert isinstance(event, BlockRemoved)


def test_one_hash_names_one_block() -> None:
    """2.3.1: a duplicate stays private and is reused first."""
    pool = BlockPool(4)
    pool.get_new_blocks(2)
    assert pool.cache_block(1, b"x")
    assert not pool.cache_block(2, b"x")
    assert pool.get_cached_block(b"x") == 1
    pool.free_blocks([2, 1])
    assert pool.free_block_ids() == [2, 3, 1]
    with pytest.raises(ValueError, match="already published"):
        pool.cache_block(1, b"y")


def test_evict_blocks_works_on_blocks_in_use() -> None:
    """2.2.5."""
    pool = BlockPool(4)
    pool.get_new_blocks(2)
    hashed(pool, 1, 2)
    pool.evict_blocks([2])
    assert pool.get_cached_block(b"hash2") is None
    assert pool.get_cached_block(b"hash1") == 1
    assert pool.ref_cnt[2] == 1
    with pytest.raises(ValueError, match="not in"):
        pool.evict_blocks([4])


def test_reset_needs_an_idle_pool() -> None:
    """2.2.6."""
    events = KVEventRecorder()
    pool = BlockPool(4, events=events)
    pool.get_new_blocks(1)
    hashed(pool, 1)
    assert not pool.reset_prefix_cache()
    assert pool.get_cached_block(b"hash1") == 1
    pool.free_blocks([1])
    assert pool.reset_prefix_cache()
    assert pool.get_cached_block(b"hash1") is None
    assert [type(e) for e in events.take()] == [AllBlocksCleared]


def test_refresh_moves_to_the_tail_without_a_reference() -> None:
    pool = BlockPool(4)
    pool.refresh(1)
    assert pool.free_block_ids() == [2, 3, 1]
    assert pool.ref_cnt[1] == 0


def test_tails() -> None:
    """The beginning of a block is a key of its own; it goes when the block is handed out."""
    pool = BlockPool(4)
    pool.get_new_blocks(3)
    pool.cache_tail(2, b"t")
    pool.cache_tail(3, b"t")  # known already
    pool.cache_tail(2, b"u")  # one per block
    assert (pool.get_tail(b"t"), pool.get_tail(b"u")) == (2, None)
    pool.free_blocks([3, 2, 1])
    assert pool.free_block_ids() == [3, 1, 2]  # worth keeping, like a full block
    pool.get_new_blocks(2)
    assert pool.get_tail(b"t") == 2
    pool.get_new_blocks(1)
    assert pool.get_tail(b"t") is None
    pool.cache_tail(1, b"v")
    pool.evict_blocks([1])
    assert pool.get_tail(b"v") is None
    pool.cache_tail(1, b"v")
    pool.free_blocks([1, 2, 3])
    assert pool.reset_prefix_cache()
    assert pool.get_tail(b"v") is None


def test_null_block_is_not_freed() -> None:
    pool = BlockPool(3)
    pool.ref_cnt[NULL_BLOCK_ID] = 1
    pool.free_blocks([NULL_BLOCK_ID])
    assert NULL_BLOCK_ID not in pool.free_block_ids()


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_block_lives_are_sampled_at_allocation() -> None:
    """2.12: lifetime, idle time and gaps of the last accesses; emitted at eviction."""
    clock = Clock()
    metrics = KVCacheMetricsCollector(1.0, clock)
    pool = BlockPool(2, metrics=metrics)
    pool.get_new_blocks(1)
    hashed(pool, 1)
    for clock.now in (1.0, 3.0, 6.0, 10.0, 15.0):
        pool.touch([1])
    pool.ref_cnt[1] = 1
    pool.free_blocks([1])
    clock.now = 20.0
    pool.get_new_blocks(1)
    (event,) = metrics.take_events()
    assert (event.lifetime_s, event.idle_s) == (20.0, 5.0)
    assert event.reuse_gaps_s == [3.0, 4.0, 5.0]
    assert metrics.take_events() == []


def test_metrics_refuse_a_bad_sample() -> None:
    for sample in (0.0, 1.5):
        with pytest.raises(ValueError, match="sampled fraction"):
            KVCacheMetricsCollector(sample)


def test_prefix_cache_stats_are_deltas() -> None:
    """2.5.3."""
    stats = PrefixCacheStats()
    stats.record(10, 8, preempted=False)
    stats.record(5, 4, preempted=True)
    taken = stats.take()
    assert (taken.requests, taken.queries, taken.hits) == (1, 10, 8)
    assert (taken.preempted_requests, taken.preempted_queries, taken.preempted_hits) == (1, 5, 4)
    assert stats.take().queries == 0
    stats.record(10, 8, preempted=False)
    stats.mark_reset()
    assert (stats.take().reset, stats.take().reset) == (True, False)
