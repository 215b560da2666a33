"""How well the KV cache does: prefix-cache hits, and sampled life stories of blocks.

`PrefixCacheStats` counts tokens asked for and found since the last report.
`KVCacheMetricsCollector` follows a small sample of the blocks from allocation to eviction.
"""

from __future__ import annotations

import itertools
import random
import time
from collections import deque
from collections.abc import Callable, Iterable

from tellin.protocol import CacheStats, KVCacheEvictionEvent

MAX_ACCESSES_KEPT = 4


class PrefixCacheStats:
    """Accumulates `CacheStats` between two reports."""

    def __init__(self) -> None:
        self._stats = CacheStats()

    def record(self, num_tokens: int, num_hits: int, preempted: bool) -> None:
        """One admitted request asked for ``num_tokens`` and found ``num_hits`` of them."""
        stats = self._stats
        if preempted:
            stats.preempted_requests += 1
            stats.preempted_queries += num_tokens
            stats.preempted_hits += num_hits
        else:
            stats.requests += 1
            stats.queries += num_tokens
            stats.hits += num_hits

    def mark_reset(self) -> None:
        """The cache was cleared: what was counted before no longer describes it."""
        self._stats = CacheStats(reset=True)

    def take(self) -> CacheStats:
        stats, self._stats = self._stats, CacheStats()
        return stats


class _BlockLife:
    __slots__ = ("accesses", "born")

    def __init__(self, now: float) -> None:
        self.born = now
        self.accesses: deque[float] = deque(maxlen=MAX_ACCESSES_KEPT)


class KVCacheMetricsCollector:
    """Residency of sampled blocks. Whether a block is sampled is decided when it is allocated."""

    def __init__(
        self,
        sample: float,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        if not 0.0 < sample <= 1.0:
            raise ValueError(f"the sampled fraction must be in (0, 1], got {sample}")
        self._sample = sample
        self._clock = clock
        self._rng = rng or random.Random()
        self._lives: dict[int, _BlockLife] = {}
        self._events: list[KVCacheEvictionEvent] = []

    def on_allocated(self, block_ids: Iterable[int]) -> None:
        rng, sample, lives = self._rng.random, self._sample, self._lives
        for block_id in block_ids:
            if rng() < sample:
                lives[block_id] = _BlockLife(self._clock())
            elif lives:
                lives.pop(block_id, None)

    def on_accessed(self, block_id: int) -> None:
        life = self._lives.get(block_id)
        if life is not None:
            life.accesses.append(self._clock())

    def on_evicted(self, block_id: int) -> None:
        life = self._lives.pop(block_id, None)
        if life is None:
            return
        now = self._clock()
        times = list(life.accesses)
        self._events.append(
            KVCacheEvictionEvent(
                lifetime_s=now - life.born,
                idle_s=now - (times[-1] if times else life.born),
                reuse_gaps_s=[b - a for a, b in itertools.pairwise(times)],
            )
        )

    def reset(self) -> None:
        self._lives.clear()

    def take_events(self) -> list[KVCacheEvictionEvent]:
        events, self._events = self._events, []
        return events
