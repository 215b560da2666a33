"""The blocks of the KV cache: reference counts, the free list in eviction order, the prefix map.

Works on block ids alone and never sees the memory behind them. Block 0 is the null block: never
handed out, never cached. A block is on the free list exactly when its reference count is 0; a free
block keeps its content and its hash until it is handed out again, so the free list *is* the prefix
cache's LRU list: front = evicted first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from tellin.core.kv_cache_metrics import KVCacheMetricsCollector
from tellin.core.kv_events import KVEventRecorder

NULL_BLOCK_ID = 0


class BlockPool:
    """``num_blocks`` blocks, of which ``num_blocks - 1`` are usable.

    One hash names at most one block: when two requests computed the same content at the same time,
    the second's block stays private and is reused first once it is free. Block tables never change
    under a running request.

    Besides full blocks, a block may be published as a *tail*: its first few positions complete a
    known prompt. Its owner goes on writing behind them, so a tail is copied, never shared.
    """

    def __init__(
        self,
        num_blocks: int,
        enable_caching: bool = True,
        metrics: KVCacheMetricsCollector | None = None,
        events: KVEventRecorder | None = None,
        on_evict: Callable[[bytes], None] | None = None,
    ) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        self.num_blocks = num_blocks
        self.enable_caching = enable_caching
        self.ref_cnt = [0] * num_blocks
        self.block_hash: list[bytes | None] = [None] * num_blocks
        self._cached: dict[bytes, int] = {}
        self._tails: dict[bytes, int] = {}
        self._tail_of: dict[int, bytes] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self._metrics = metrics
        self._events = events
        self._on_evict = on_evict

    # ------------------------------------------------------------------ state

    @property
    def num_usable_blocks(self) -> int:
        return self.num_blocks - 1

    def get_num_free_blocks(self) -> int:
        return len(self._free)

    def get_usage(self) -> float:
        """Fraction of the usable blocks that are referenced; 0 for a pool without any."""
        usable = self.num_blocks - 1
        return 1.0 - len(self._free) / usable if usable else 0.0

    def free_block_ids(self) -> list[int]:
        """Free blocks, next to be evicted first (a copy)."""
        return list(self._free)

    def num_cached_blocks(self) -> int:
        return len(self._cached)

    def tail_block_ids(self) -> Iterable[int]:
        """Blocks published as tails (a live view)."""
        return self._tail_of.keys()

    # ------------------------------------------------------------------ allocation

    def get_new_blocks(self, num_blocks: int) -> list[int]:
        """Take blocks from the front of the free list and forget what they cached.

        Raises:
            ValueError: fewer blocks are free.
        """
        free = self._free
        if num_blocks > len(free):
            raise ValueError(f"cannot take {num_blocks} blocks: only {len(free)} are free")
        ref_cnt, hashes, tail_of = self.ref_cnt, self.block_hash, self._tail_of
        block_ids = []
        for _ in range(num_blocks):
            block_id = free.popitem(last=False)[0]
            if hashes[block_id] is not None:
                self._evict(block_id)
            if tail_of and block_id in tail_of:
                del self._tails[tail_of.pop(block_id)]
            ref_cnt[block_id] = 1
            block_ids.append(block_id)
        if self._metrics is not None:
            self._metrics.on_allocated(block_ids)
        return block_ids

    def touch(self, block_ids: Iterable[int]) -> None:
        """Add a reference to blocks found in the prefix cache; a free one leaves the free list."""
        ref_cnt, free = self.ref_cnt, self._free
        for block_id in block_ids:
            if ref_cnt[block_id] == 0:
                del free[block_id]
            ref_cnt[block_id] += 1
            if self._metrics is not None:
                self._metrics.on_accessed(block_id)

    def free_blocks(self, ordered_block_ids: Iterable[int]) -> None:
        """Drop one reference each. Pass the blocks of a sequence last first.

        Blocks nobody references any more: those without content worth keeping go to the front of
        the free list, cached ones to its tail, each group in the given order.
        """
        ref_cnt, hashes, free = self.ref_cnt, self.block_hash, self._free
        worthless = []
        for block_id in ordered_block_ids:
            ref_cnt[block_id] -= 1
            if ref_cnt[block_id] == 0 and block_id != NULL_BLOCK_ID:
                if hashes[block_id] is None and block_id not in self._tail_of:
                    worthless.append(block_id)
                else:
                    free[block_id] = None
        for block_id in reversed(worthless):
            free[block_id] = None
            free.move_to_end(block_id, last=False)

    def refresh(self, block_id: int) -> None:
        """Mark a cached block as just used, without keeping a reference."""
        if block_id in self._free:
            self._free.move_to_end(block_id)
        if self._metrics is not None:
            self._metrics.on_accessed(block_id)

    # ------------------------------------------------------------------ prefix cache

    def get_cached_block(self, block_hash: bytes) -> int | None:
        """The block with this content, or None. Changes nothing."""
        return self._cached.get(block_hash)

    def cache_block(self, block_id: int, block_hash: bytes) -> bool:
        """Publish a fully written block; False if the content is already published."""
        if self.block_hash[block_id] is not None:
            raise ValueError(f"block {block_id} is already published")
        if block_hash in self._cached:
            return False
        self._cached[block_hash] = block_id
        self.block_hash[block_id] = block_hash
        return True

    def get_tail(self, tail_hash: bytes) -> int | None:
        """The block whose first positions complete this prompt, or None. Changes nothing."""
        return self._tails.get(tail_hash)

    def cache_tail(self, block_id: int, tail_hash: bytes) -> None:
        """Publish the written beginning of a block; nothing if that is published already."""
        if tail_hash not in self._tails and block_id not in self._tail_of:
            self._tails[tail_hash] = block_id
            self._tail_of[block_id] = tail_hash

    def evict_blocks(self, block_ids: Sequence[int]) -> None:
        """Unpublish blocks, also ones in use. Raises ValueError for an id out of range."""
        for block_id in block_ids:
            if not 0 <= block_id < self.num_blocks:
                raise ValueError(f"block id {block_id} is not in [0, {self.num_blocks})")
            if self.block_hash[block_id] is not None:
                self._evict(block_id)
            if block_id in self._tail_of:
                del self._tails[self._tail_of.pop(block_id)]

    def _evict(self, block_id: int) -> None:
        block_hash = self.block_hash[block_id]
        assert block_hash is not None
        del self._cached[block_hash]
        self.block_hash[block_id] = None
        if self._metrics is not None:
            self._metrics.on_evicted(block_id)
        if self._events is not None:
            self._events.block_removed(block_hash)
        if self._on_evict is not None:
            self._on_evict(block_hash)

    def reset_prefix_cache(self) -> bool:
        """Unpublish everything; only possible while no block is in use (else False)."""
        if len(self._free) != self.num_blocks - 1:
            return False
        self._cached.clear()
        self._tails.clear()
        self._tail_of.clear()
        self.block_hash = [None] * self.num_blocks
        if self._metrics is not None:
            self._metrics.reset()
        if self._events is not None:
            self._events.all_blocks_cleared()
        return True
