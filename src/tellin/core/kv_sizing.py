"""How many KV blocks and state slots to allocate, and whether one request of full length fits.

Pure arithmetic on the configuration and on three answers of the executor: the bytes of a block, the
bytes of a request's recurrent state, and the bytes that both pools may take together, given what
machine and control group leave after loading.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tellin.config import EngineConfig
from tellin.exceptions import InvalidParameterError, OutOfMemoryError

SNAPSHOTS_PER_REQUEST = 2
"""State slots that are kept for the prefix cache, for each request that may run, if they fit."""

MAX_EMPTY_BLOCKS = 1 << 18
"""Blocks without memory behind them; the bookkeeping of one takes about 200 bytes."""


class KVMemory(Protocol):
    """The part of an executor that is asked."""

    def kv_bytes_per_block(self) -> int: ...

    def state_bytes_per_slot(self) -> int: ...

    def determine_available_memory(self) -> int: ...


@dataclass(frozen=True)
class KVCacheSizes:
    """``num_blocks`` includes the null block, which holds nothing, ``num_state_slots`` a null slot.

    There are no slots (0) if the model has no recurrent states. Else at most ``max_num_seqs``
    requests run at once, each with a slot and one for every draft, and what they leave holds
    snapshots for the prefix cache.
    """

    num_blocks: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    num_state_slots: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of requests of full length that fit at the same time."""
        return int(self._num_requests * self.max_model_len)

    @property
    def max_concurrency(self) -> float:
        """Requests of full length that fit at the same time."""
        if self.num_state_slots:
            return min(self._num_requests, float(self.num_state_slots - 1))
        return self._num_requests

    @property
    def _num_requests(self) -> float:
        return (self.num_blocks - 1) / -(-self.max_model_len // self.block_size)


def plan_kv_cache(config: EngineConfig, executor: KVMemory) -> KVCacheSizes:
    """Size the pools.

    Raises:
        OutOfMemoryError: one request of ``max_model_len`` does not fit, or the asked size does not.
        InvalidParameterError: a size that makes no sense.
    """
    model_config, cache_config = config.model_config, config.cache_config
    block_size = cache_config.block_size
    bytes_per_block = executor.kv_bytes_per_block()
    max_model_len = model_config.max_model_len
    blocks_per_request = -(-max_model_len // block_size)
    num_slots, num_bytes, max_num_seqs = 0, 0, config.scheduler_config.max_num_seqs
    bytes_per_slot = executor.state_bytes_per_slot()
    if bytes_per_slot > 0:
        num_slots = _choose_num_slots(config, bytes_per_slot, bytes_per_block, executor)
        num_bytes = num_slots * bytes_per_slot
        max_num_seqs = min(max_num_seqs, (num_slots - 1) // _slots_per_request(config))
    if bytes_per_block <= 0:  # a model without attention keeps no KV: blocks are only counted
        num_blocks = max_num_seqs * blocks_per_request
        num_blocks = max(blocks_per_request, min(num_blocks, MAX_EMPTY_BLOCKS)) + 1
        return KVCacheSizes(num_blocks, block_size, max_model_len, max_num_seqs, num_slots)
    num_blocks = _choose_num_blocks(config, bytes_per_block, num_bytes, max_num_seqs, executor)
    num_fitting = (num_blocks - 1) * block_size
    if num_fitting < max_model_len:
        if not model_config.auto_max_model_len or num_fitting < 2:
            raise OutOfMemoryError(
                f"a request of max_model_len={max_model_len} tokens needs {blocks_per_request} KV "
                f"blocks ({_mib((blocks_per_request + 1) * bytes_per_block)} with the null block), "
                f"but the pool has {max(0, num_blocks - 1)} "
                f"({_mib(num_blocks * bytes_per_block)}): the largest max_model_len that fits is "
                f"{max(0, num_fitting)}; lower max_model_len or raise num_kv_blocks, "
                "kv_cache_memory_bytes or memory_utilization"
            )
        max_model_len = num_fitting
    return KVCacheSizes(num_blocks, block_size, max_model_len, max_num_seqs, num_slots)


def _choose_num_slots(
    config: EngineConfig, bytes_per_slot: int, bytes_per_block: int, executor: KVMemory
) -> int:
    """Slots of recurrent states: half of the memory at most, what is not fixed for KV at least one.

    Each request that may run has one, and one for every draft that is checked at once. With a
    prefix cache there are `SNAPSHOTS_PER_REQUEST` more.
    """
    per_request = _slots_per_request(config)
    num_snapshots = SNAPSHOTS_PER_REQUEST if config.cache_config.enable_prefix_caching else 0
    wanted = config.scheduler_config.max_num_seqs * (per_request + num_snapshots)
    available = executor.determine_available_memory()
    num_kv_blocks = config.cache_config.num_kv_blocks
    if num_kv_blocks is not None:
        limit = available - num_kv_blocks * bytes_per_block
    else:
        limit = available // 2 if bytes_per_block > 0 else available
    num_slots = min(1 + wanted, limit // bytes_per_slot)
    if num_slots < 1 + per_request:
        raise OutOfMemoryError(
            f"the model keeps a recurrent state of {_mib(bytes_per_slot)} per request, and "
            f"{1 + per_request} are needed at least, but only {_mib(max(0, limit))} may be used "
            "for them; raise kv_cache_memory_bytes or memory_utilization, or lower num_kv_blocks "
            "or num_speculative_tokens"
        )
    return num_slots


def _slots_per_request(config: EngineConfig) -> int:
    spec = config.speculative_config
    return 1 + (spec.num_speculative_tokens if spec is not None else 0)


def _choose_num_blocks(
    config: EngineConfig,
    bytes_per_block: int,
    num_state_bytes: int,
    max_num_seqs: int,
    executor: KVMemory,
) -> int:
    cache_config = config.cache_config
    if cache_config.num_kv_blocks is not None:
        if cache_config.num_kv_blocks < 2:
            raise InvalidParameterError(
                f"num_kv_blocks must be at least 2 (one is the null block), got "
                f"{cache_config.num_kv_blocks}",
                parameter="num_kv_blocks",
                value=cache_config.num_kv_blocks,
            )
        return cache_config.num_kv_blocks
    num_blocks = (executor.determine_available_memory() - num_state_bytes) // bytes_per_block
    if (
        cache_config.kv_cache_memory_bytes is not None
        or cache_config.memory_utilization is not None
    ):
        return num_blocks
    # By default take no more than there can be a use for.
    blocks_per_request = -(-config.model_config.max_model_len // cache_config.block_size)
    return min(num_blocks, max_num_seqs * blocks_per_request + 1)


def _mib(num_bytes: int) -> str:
    """A size; what would be 0.0 MiB in bytes."""
    if 0 < num_bytes < 1 << 17:
        return f"{num_bytes} bytes"
    return f"{num_bytes / 2**20:.1f} MiB"
