"""What the prefix cache tells the outside: blocks stored, removed, all cleared.

A router that follows these events knows which prefixes this engine holds. Every `BlockStored`
describes one run of consecutive blocks and carries exactly their token ids, so that hashes, extra
keys and ids always line up. Hashes are published as the low 64 bits of the content hash.
"""

from __future__ import annotations

import msgspec

MEDIUM = "CPU"
MAX_PENDING_EVENTS = 10_000


def external_hash(block_hash: bytes) -> int:
    """Low 64 bits of a block hash, the form that leaves the engine."""
    return int.from_bytes(block_hash[-8:], "big")


class KVCacheEvent(msgspec.Struct, tag=True):
    """Base of all events; encoded as a map whose ``type`` is the event's name."""


class BlockStored(KVCacheEvent):
    """Blocks became available, one after the other behind ``parent_block_hash`` (None = first)."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str = MEDIUM
    lora_name: str | None = None
    extra_keys: list[bytes] | None = None
    group_idx: int = 0
    kv_cache_spec_kind: str = "full_attention"
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(KVCacheEvent):
    """These blocks can no longer be hit."""

    block_hashes: list[int]
    medium: str = MEDIUM
    group_idx: int = 0


class AllBlocksCleared(KVCacheEvent):
    """The prefix cache is empty."""


class KVEventBatch(msgspec.Struct, array_like=True):
    """Events of one step. ``ts`` is wall-clock seconds."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class KVEventRecorder:
    """Collects events until somebody takes them.

    Nobody may be listening, so the list is bounded: when it overflows, history is replaced by
    AllBlocksCleared, after which a listener is merely ignorant, never wrong.
    """

    def __init__(self, limit: int = MAX_PENDING_EVENTS) -> None:
        self._events: list[BlockStored | BlockRemoved | AllBlocksCleared] = []
        self._limit = limit

    def _add(self, event: BlockStored | BlockRemoved | AllBlocksCleared) -> None:
        if len(self._events) >= self._limit:
            self._events = [AllBlocksCleared()]
        self._events.append(event)

    def block_stored(self, event: BlockStored) -> None:
        self._add(event)

    def block_removed(self, block_hash: bytes) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved):
            last.block_hashes.append(external_hash(block_hash))
        else:
            self._add(BlockRemoved([external_hash(block_hash)]))

    def all_blocks_cleared(self) -> None:
        self._events = [AllBlocksCleared()]

    def take(self) -> list[BlockStored | BlockRemoved | AllBlocksCleared]:
        events, self._events = self._events, []
        return events
