"""Which request holds which KV blocks: lookup in the prefix cache, allocation, publishing, freeing.

Owns every request's ``block_ids``, the block pool and recurrent models' state slots. One KV group
of full attention: block i of a request holds positions ``[i * block_size, (i + 1) * block_size)``
and nothing is released before the request ends. Blocks are published only by `cache_blocks`, which
the scheduler calls after the step that wrote them has run, so a hit never reads what was not
computed.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

from tellin.core.block_hash import BlockHasher
from tellin.core.block_pool import BlockPool
from tellin.core.kv_cache_metrics import KVCacheMetricsCollector, PrefixCacheStats
from tellin.core.kv_events import BlockStored, KVEventRecorder, external_hash
from tellin.core.request import Request
from tellin.core.state_cache import StateCacheManager, forget_state

NEVER = sys.maxsize
"""A number of tokens no request reaches."""


@dataclass(slots=True)
class PrefixHit:
    """What the prefix cache holds of a request.

    ``block_ids`` can be shared as they are. ``copy_from`` is a block whose first
    ``num_tokens % block_size`` positions are also right, but which must be copied first, because
    the request is going to write into it. ``num_matching_tokens`` are those whose KV is known; a
    recurrent model needs a snapshot of its state too and may have to start earlier.
    """

    num_tokens: int = 0
    block_ids: list[int] = field(default_factory=list)
    copy_from: int | None = None
    num_matching_tokens: int = 0


class KVCacheManager:
    """KV bookkeeping for all requests of one engine."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        *,
        enable_caching: bool = True,
        hash_algorithm: str = "sha256",
        watermark: float = 0.0,
        num_lookahead_tokens: int = 0,
        metrics: KVCacheMetricsCollector | None = None,
        events: KVEventRecorder | None = None,
        num_state_slots: int = 0,
    ) -> None:
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.enable_caching = enable_caching
        self.num_lookahead_tokens = num_lookahead_tokens
        self.watermark_blocks = int(watermark * num_blocks)
        self.hasher = BlockHasher(block_size, hash_algorithm)
        self.states: StateCacheManager | None = None
        if num_state_slots:
            self.states = StateCacheManager(num_state_slots, self.hasher, enable_caching)
        self._on_evict = self.states.forget_block if self.states is not None else None
        self.pool = BlockPool(num_blocks, enable_caching, metrics, events, self._on_evict)
        self.prefix_cache_stats = PrefixCacheStats()
        self.metrics = metrics
        self.events = events

    # ------------------------------------------------------------------ sizes

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that ``num_tokens`` positions occupy, never more than ``max_model_len`` needs."""
        return -(-min(num_tokens, self.max_model_len) // self.block_size)

    def num_missing_blocks(self, request: Request) -> int:
        """Blocks that a request in the middle of its prompt has still to get for its known ids."""
        return max(0, self.num_blocks_for(request.num_tokens) - len(request.block_ids))

    @property
    def usage(self) -> float:
        return self.pool.get_usage()

    # ------------------------------------------------------------------ prefix cache

    def get_computed_blocks(self, request: Request) -> PrefixHit:
        """Longest cached prefix of the known ids, except the last id, whose logits are needed.

        Changes no reference count and no order: a lookup that leads to nothing leaves no trace.
        """
        if not self.enable_caching or request.skip_reading_prefix_cache:
            return PrefixHit()
        self.hasher.extend(request)
        lookup = self.pool.get_cached_block
        block_ids: list[int] = []
        for block_hash in request.block_hashes:
            block_id = lookup(block_hash)
            if block_id is None:
                break
            block_ids.append(block_id)
        if self.states is not None:
            num_matching = min(len(block_ids), (request.num_tokens - 1) // self.block_size)
            num_blocks = self.states.find(request.block_hashes, num_matching)
            return PrefixHit(
                num_blocks * self.block_size,
                block_ids[:num_blocks],
                num_matching_tokens=num_matching * self.block_size,
            )
        num_tokens = len(block_ids) * self.block_size
        if num_tokens < request.num_tokens:
            if 1 < request.num_tokens - num_tokens < self.block_size:
                tail = self.pool.get_tail(self.hasher.tail_hash(request))
                if tail is not None:
                    return PrefixHit(request.num_tokens - 1, block_ids, tail)
            return PrefixHit(num_tokens, block_ids)
        # Everything is cached. One id is computed again, in a copy of the last block: others may be
        # reading the block itself.
        copy_from: int | None = block_ids.pop()
        num_tokens = request.num_tokens - 1
        if num_tokens % self.block_size == 0:
            copy_from = None
        return PrefixHit(num_tokens, block_ids, copy_from)

    def cache_prompt_tail(self, request: Request) -> None:
        """Publish the end of a prompt that does not fill its last block.

        Call it before an output is appended, when all positions are written. The same prompt, asked
        again or n times at once, then needs one position to be computed, not a part of a block.
        """
        if self.states is not None:
            return  # a state cannot be taken back to before the last token
        if self.enable_caching and request.num_tokens % self.block_size > 1:
            self.hasher.extend(request)
            block_id = request.block_ids[request.num_tokens // self.block_size]
            self.pool.cache_tail(block_id, self.hasher.tail_hash(request))

    def cache_blocks(self, request: Request, num_final_tokens: int) -> None:
        """Publish the full blocks among the first ``num_final_tokens`` positions.

        These positions must have been written by steps that ran, from ids that cannot be rejected.
        """
        if not self.enable_caching:
            return
        self.hasher.extend(request)
        first, last = request.num_cached_blocks, num_final_tokens // self.block_size
        block_ids, hashes, cache_block = (
            request.block_ids,
            request.block_hashes,
            self.pool.cache_block,
        )
        run_start = first
        for index in range(first, last):
            if not cache_block(block_ids[index], hashes[index]) and self.events is not None:
                self._record_stored(request, run_start, index)
                run_start = index + 1
        if self.events is not None:
            self._record_stored(request, run_start, last)
        request.num_cached_blocks = last
        request.next_publish_at = (last + 1) * self.block_size

    def _record_stored(self, request: Request, first: int, last: int) -> None:
        if first >= last or self.events is None:
            return
        hashes, size = request.block_hashes, self.block_size
        lora = request.lora_request
        extra_keys = [self.hasher.extra_keys(request, i * size) for i in range(first, last)]
        self.events.block_stored(
            BlockStored(
                [external_hash(h) for h in hashes[first:last]],
                external_hash(hashes[first - 1]) if first else None,
                list(request.all_token_ids[first * size : last * size]),
                size,
                lora_id=request.lora_int_id or None,
                lora_name=lora.lora_name if lora is not None else None,
                extra_keys=extra_keys if any(extra_keys) else None,
            )
        )

    def reset_prefix_cache(self) -> bool:
        """Forget everything cached; False, and no change, while any block is in use."""
        if not self.pool.reset_prefix_cache():
            return False
        if self.states is not None:
            self.states.reset()
        self.prefix_cache_stats.mark_reset()
        return True

    # ------------------------------------------------------------------ allocation

    def num_blocks_to_admit(
        self, request: Request, hit: PrefixHit, num_new_tokens: int, whole: bool
    ) -> int:
        """Free blocks it takes to admit a request with ``num_new_tokens`` computed now.

        With ``whole`` all its known ids must find room. Cached blocks that are free at present
        count: they leave the free list.
        """
        num_tokens = hit.num_tokens + num_new_tokens + self.num_lookahead_tokens
        if whole:
            num_tokens = max(num_tokens, request.num_tokens)
        ref_cnt = self.pool.ref_cnt
        num_free_hits = sum(1 for block_id in hit.block_ids if ref_cnt[block_id] == 0)
        return self.num_blocks_for(num_tokens) - len(hit.block_ids) + num_free_hits

    def admit(self, request: Request, hit: PrefixHit, num_new_tokens: int) -> list[tuple[int, int]]:
        """Give a request its cached blocks and room for ``num_new_tokens`` more.

        Returns:
            ``(source, destination)`` block pairs that must be copied before the step runs.

        Raises:
            ValueError: fewer blocks are free than `num_blocks_to_admit` said.
        """
        pool = self.pool
        pool.touch(hit.block_ids)  # first, so that the new blocks cannot evict them
        if hit.copy_from is not None:
            pool.refresh(hit.copy_from)
        num_tokens = hit.num_tokens + num_new_tokens + self.num_lookahead_tokens
        new_blocks = pool.get_new_blocks(self.num_blocks_for(num_tokens) - len(hit.block_ids))
        request.block_ids = hit.block_ids + new_blocks
        request.num_slots = len(request.block_ids) * self.block_size
        request.num_cached_blocks = len(hit.block_ids)
        request.next_publish_at = (
            (request.num_cached_blocks + 1) * self.block_size if self.enable_caching else NEVER
        )
        if hit.copy_from is None or hit.copy_from == new_blocks[0]:
            return []
        return [(hit.copy_from, new_blocks[0])]

    def admit_state(self, request: Request, hit: PrefixHit) -> list[tuple[int, int]]:
        """Give a request its slot of recurrent states, where the model has any.

        Returns:
            ``(source, destination)`` slots that must be copied before the step runs.
        """
        if self.states is None:
            return []
        num_blocks = len(hit.block_ids)
        snapshot = request.block_hashes[num_blocks - 1] if num_blocks else None
        copies = self.states.admit(request, snapshot)
        self.states.begin(request, hit.num_tokens, hit.num_matching_tokens)
        return copies

    def allocate_slots(self, request: Request, num_new_tokens: int) -> list[int] | None:
        """Room for ``num_new_tokens`` more positions of a running request.

        Returns:
            The blocks that were added (often none), or None, and no change, when too few are free.
        """
        num_tokens = request.num_computed_tokens + num_new_tokens + self.num_lookahead_tokens
        num_new_blocks = self.num_blocks_for(num_tokens) - len(request.block_ids)
        if num_new_blocks <= 0:
            return []
        if num_new_blocks > self.pool.get_num_free_blocks():
            return None
        new_blocks = self.pool.get_new_blocks(num_new_blocks)
        request.block_ids.extend(new_blocks)
        request.num_slots = len(request.block_ids) * self.block_size
        return new_blocks

    def free(self, request: Request) -> None:
        """Give back all blocks, the end of the sequence first in line for eviction. Idempotent."""
        self.pool.free_blocks(reversed(request.block_ids))
        if self.states is not None:
            self.states.free(request)
        self.forget(request)

    def forget(self, request: Request) -> None:
        """Empty the block table without telling the pool, and forget that it had a state."""
        request.block_ids = []
        request.num_slots = 0
        request.num_cached_blocks = 0
        request.next_publish_at = NEVER
        forget_state(request)

    def rebuild_pool(self) -> None:
        """Begin anew with an empty pool, whatever state the old one is in."""
        self.pool = BlockPool(
            self.pool.num_blocks, self.enable_caching, self.metrics, self.events, self._on_evict
        )
        if self.states is not None:
            self.states.rebuild()
        self.prefix_cache_stats.mark_reset()
        if self.metrics is not None:
            self.metrics.reset()
        if self.events is not None:
            self.events.all_blocks_cleared()
