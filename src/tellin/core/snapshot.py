"""A picture of a scheduler between two steps, for somebody who watches.

Reads, changes nothing, and is made only when asked for: a core that nobody watches pays nothing.
It holds no token ids. The cost is kept low by working on whole byte strings: well under a
millisecond with 10,000 blocks.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from itertools import islice
from typing import TYPE_CHECKING

from tellin.core.block_pool import BlockPool
from tellin.core.request import Request
from tellin.protocol import BlockState, EngineCoreSnapshot, RequestSnapshot

if TYPE_CHECKING:
    from tellin.core.scheduler import Scheduler

MAX_REQUESTS = 256
"""Most requests that are listed one by one; the counts cover all."""

_HOLDERS_TO_STATE = bytes(
    BlockState.FREE if n == 0 else BlockState.USED if n == 1 else BlockState.SHARED
    for n in range(256)
)
_MERGED_TO_STATE = bytes(n & 0x7F or (BlockState.CACHED if n else 0) for n in range(256))


def make_snapshot(scheduler: Scheduler, max_requests: int = MAX_REQUESTS) -> EngineCoreSnapshot:
    """The scheduler's state now; call it between steps."""
    room, pool = scheduler.room, scheduler.kv_cache_manager.pool
    now = time.time()
    snapshot = EngineCoreSnapshot(
        timestamp=time.monotonic(),
        step_counter=scheduler.current_step,
        num_running_reqs=len(scheduler.running),
        num_waiting_reqs=len(room.waiting) + len(room.preempted),
        num_blocked_reqs=len(room.blocked),
        num_preemptions=scheduler.num_preemptions,
        is_paused=scheduler.pause_state.value > 0,
        block_size=scheduler.kv_cache_manager.block_size,
        block_states=block_states(pool),
    )
    requests = snapshot.requests
    requests.extend(_picture(r, _phase(r), now) for r in islice(scheduler.running, max_requests))
    lines: tuple[tuple[str, Iterable[Request]], ...] = (
        ("preempted", room.preempted),
        ("waiting", room.waiting),
        ("blocked", room.blocked.values()),
    )
    for state, line in lines:
        left = max_requests - len(requests)
        if left > 0 and line:
            requests.extend(_picture(request, state, now) for request in islice(line, left))
    return snapshot


def block_states(pool: BlockPool) -> bytes:
    """One `BlockState` per usable block, in the order of ids (the null block is left out)."""
    try:
        holders = bytes(pool.ref_cnt)
    except ValueError:  # a block with more than 255 holders
        holders = bytes(min(count, 2) for count in pool.ref_cnt)
    # A block that is not referenced still has its content, if that is published. Both strings are
    # merged as one long number: the high bit says "published".
    states = int.from_bytes(holders.translate(_HOLDERS_TO_STATE), "little")
    published = bytearray(bytes(map(bool, pool.block_hash)))
    for block_id in pool.tail_block_ids():
        published[block_id] = 1
    merged = states | (int.from_bytes(published, "little") << 7)
    return merged.to_bytes(pool.num_blocks, "little").translate(_MERGED_TO_STATE)[1:]


def _picture(request: Request, state: str, now: float) -> RequestSnapshot:
    return RequestSnapshot(
        request.request_id,
        state,
        age_s=max(0.0, now - request.arrival_time),
        num_prompt_tokens=request.num_prompt_tokens,
        num_computed_tokens=request.num_computed_tokens,
        num_output_tokens=request.num_output_tokens,
        max_tokens=request.max_total_tokens - request.num_prompt_tokens,
        num_blocks=len(request.block_ids),
        num_preemptions=request.num_preemptions,
        priority=request.priority,
    )


def _phase(request: Request) -> str:
    """What a running request does; in decode only its last token is left to compute."""
    num_left = request.num_tokens - request.num_computed_tokens
    return "decode" if request.num_output_tokens and num_left <= 1 else "prefill"
