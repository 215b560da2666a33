"""Slots of recurrent states: which running request has which, and which hold a prefix's state.

A model with recurrences (short convolutions, linear attention, state spaces) keeps a state of fixed
size per request. It cannot be cut back to an earlier position, so the prefix cache of such a model
needs, beside the KV blocks, *snapshots*: states after a whole number of blocks, kept under the hash
of the last one. Every slot but the null slot is free, a running request's, a snapshot, or, while
a step is in flight, about to become a snapshot. Running requests go first: the least recently used
snapshot gives its slot away. Drafts have a slot each while they are checked: the request goes on in
the slot of the last right one. Works on slot ids alone and never sees the memory behind them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from tellin.core.block_hash import BlockHasher
from tellin.core.block_pool import BlockPool
from tellin.core.request import Request, RequestStatus
from tellin.core.step_plan import StepPlan

NULL_SLOT = 0
"""Holds nobody's state: passes without effect write into it."""

MIN_SAVED_TOKENS = 32
"""A snapshot must spare at least this many tokens beyond the one before it."""

CHECKPOINT_TOKENS = 512
"""Within a long prompt, snapshots at the ends of chunks are at least this far apart."""

DECODE_TOKENS = 64
"""A request that decodes renews its one snapshot after so many tokens."""

_LOST = (RequestStatus.FINISHED_ERROR, RequestStatus.FINISHED_ABORTED)


@dataclass(slots=True)
class _Save:
    """A snapshot that the step in flight makes."""

    request: Request
    block_hash: bytes
    slot: int
    is_checkpoint: bool = False
    """Of little worth: the first to be evicted."""
    is_decode: bool = False


@dataclass(slots=True)
class _Drafts:
    """Drafts that the step in flight checks: slot i has the state after ``first + i`` tokens."""

    request: Request
    first: int
    slots: list[int]


class StateCacheManager:
    """``num_slots`` slots, the null slot included.

    They must suffice for all requests that may run at once, each with the most drafts.
    """

    def __init__(self, num_slots: int, hasher: BlockHasher, enable_caching: bool) -> None:
        if num_slots < 2:
            raise ValueError(f"num_slots must be at least 2, got {num_slots}")
        self.num_slots = num_slots
        self.enable_caching = enable_caching
        self.min_saved_tokens = MIN_SAVED_TOKENS
        self.checkpoint_tokens = CHECKPOINT_TOKENS
        block_size = self._block_size = hasher.block_size
        self.decode_tokens = -(-DECODE_TOKENS // block_size) * block_size
        self._hasher = hasher
        self.rebuild()

    def rebuild(self) -> None:
        """Begin anew: every slot is free."""
        self._free = list(range(self.num_slots - 1, NULL_SLOT, -1))
        self._snapshots: OrderedDict[bytes, int] = OrderedDict()  # front = evicted first
        self._saves: list[_Save] = []
        self._drafts: list[_Drafts] = []
        self._moved: list[Request] = []

    # ------------------------------------------------------------------ running requests

    def admit(self, request: Request, block_hash: bytes | None) -> list[tuple[int, int]]:
        """Give a request a slot; with a hash it goes on from that snapshot.

        Returns:
            ``(source, destination)`` slots that must be copied before the step runs.

        Raises:
            ValueError: no slot is left: more requests run than there are slots for.
        """
        source = None
        if block_hash is not None:
            source = self._snapshots[block_hash]
            self._snapshots.move_to_end(block_hash)
        slot = request.state_slot = self._need_slot()
        # The snapshot itself is taken over when every other slot belongs to a request.
        return [] if source is None or source == slot else [(source, slot)]

    def free(self, request: Request) -> None:
        """Take a request's slot back. Idempotent."""
        if request.state_slot != -1:
            self._free.append(request.state_slot)
        forget_state(request)

    def take_moves(self) -> dict[str, int]:
        """Requests whose slot is another one since the workers were told last."""
        if not self._moved:
            return {}
        return {r.request_id: r.state_slot for r in self._moved if r.state_slot != -1}

    def _need_slot(self) -> int:
        slot = self._take_slot()
        if slot is None:
            raise ValueError(f"all {self.num_slots - 1} state slots are taken")
        return slot

    def _take_slot(self) -> int | None:
        if self._free:
            return self._free.pop()
        if self._snapshots:
            return self._snapshots.popitem(last=False)[1]
        return None

    # ------------------------------------------------------------------ prefix cache

    def find(self, block_hashes: list[bytes], num_blocks: int) -> int:
        """The most blocks, of the first ``num_blocks``, after which there is a snapshot; or 0."""
        snapshots = self._snapshots
        while num_blocks > 0 and block_hashes[num_blocks - 1] not in snapshots:
            num_blocks -= 1
        return num_blocks

    def begin(self, request: Request, num_tokens: int, num_matching_tokens: int) -> None:
        """An admitted request starts after ``num_tokens``, though KV is known for more tokens.

        Where the known KV ends, prefixes fork: the next one that comes by shall find a snapshot.
        """
        request.num_saved_tokens = num_tokens
        if num_matching_tokens - num_tokens >= self.min_saved_tokens:
            request.state_save_points = [num_matching_tokens]

    def expect(self, owner: Request, num_tokens: int, start: int) -> bool:
        """Have ``owner``, which has computed ``start`` tokens, keep its state after ``num_tokens``.

        Returns:
            Whether it will: not if it is past that, or if no slot is left for snapshots.
        """
        if num_tokens <= start or not (self._free or self._snapshots):
            return False
        if num_tokens not in owner.state_save_points:
            owner.state_save_points.append(num_tokens)
        return True

    def plan_saves(self, plan: StepPlan) -> list[tuple[str, int, int]]:
        """States that a step is to keep; call it when everything else of the step is decided.

        Returns:
            ``(request id, number of tokens, slot)``, by requests, each by tokens.
        """
        result: list[tuple[str, int, int]] = []
        if plan.spec_token_ids:
            self._plan_drafts(plan, result)
        if self.enable_caching:
            self._plan_snapshots(plan, result)
        return result

    def _plan_drafts(self, plan: StepPlan, result: list[tuple[str, int, int]]) -> None:
        for request in plan.requests:
            count = len(plan.spec_token_ids.get(request.request_id, ()))
            if count:
                first = request.num_computed_tokens - count
                drafts = _Drafts(request, first, [self._need_slot() for _ in range(count)])
                self._drafts.append(drafts)
                for i, slot in enumerate(drafts.slots):
                    result.append((request.request_id, first + i, slot))

    def _plan_snapshots(self, plan: StepPlan, result: list[tuple[str, int, int]]) -> None:
        size = self._block_size
        for request in plan.requests:
            if request.request_id in plan.spec_token_ids:
                continue  # what of it is right is not known before `publish`
            end = request.num_computed_tokens
            start = end - plan.num_scheduled_tokens[request.request_id]
            if request.state_save_points:
                for position in sorted(p for p in request.state_save_points if start < p <= end):
                    request.state_save_points.remove(position)
                    self._plan(request, position, result)
            if end - start == 1 and end == request.num_tokens:
                if end % self.decode_tokens == 0:
                    self._plan(request, end, result, is_decode=True)
                continue
            # The last block's end before the last token: what the same prompt can begin from.
            last = (request.num_tokens - 1) // size * size
            if start < last <= end:
                if last - request.num_saved_tokens >= self.min_saved_tokens:
                    self._plan(request, last, result)
                continue
            checkpoint = end // size * size
            is_far = checkpoint - request.num_saved_tokens >= self.checkpoint_tokens
            if is_far and checkpoint > start:
                self._plan(request, checkpoint, result, is_checkpoint=True)

    def _plan(
        self,
        request: Request,
        num_tokens: int,
        result: list[tuple[str, int, int]],
        *,
        is_checkpoint: bool = False,
        is_decode: bool = False,
    ) -> None:
        block_hash = self._wanted(request, num_tokens, is_checkpoint)
        if block_hash is None:
            return
        slot = self._give_up_decode(request) if is_decode else None
        if slot is None:
            slot = self._take_slot()
        if slot is not None:
            self._saves.append(_Save(request, block_hash, slot, is_checkpoint, is_decode))
            result.append((request.request_id, num_tokens, slot))

    def _wanted(self, request: Request, num_tokens: int, is_checkpoint: bool) -> bytes | None:
        """Hash of a snapshot, unless there is one already."""
        self._hasher.extend(request)
        block_hash = request.block_hashes[num_tokens // self._block_size - 1]
        request.num_saved_tokens = num_tokens
        if block_hash in self._snapshots:
            if not is_checkpoint:
                self._snapshots.move_to_end(block_hash)
            return None
        if any(save.block_hash == block_hash for save in self._saves):
            return None
        return block_hash

    def _give_up_decode(self, request: Request) -> int | None:
        """The slot of the snapshot that a request left in decoding, if it is still there."""
        block_hash, request.decode_snapshot = request.decode_snapshot, None
        return None if block_hash is None else self._snapshots.pop(block_hash, None)

    def publish(self, pool: BlockPool) -> None:
        """A step with tokens ran and its KV blocks are published: so are the snapshots it made."""
        self._moved = []
        for drafts in self._drafts:
            self._settle(drafts)
        self._drafts = []
        for save in self._saves:
            has_block = pool.get_cached_block(save.block_hash) is not None
            if save.request.status in _LOST or not has_block:
                self._free.append(save.slot)
                continue
            self._snapshots[save.block_hash] = save.slot
            if save.is_checkpoint:
                self._snapshots.move_to_end(save.block_hash, last=False)
            if save.is_decode and save.request.state_slot != -1:
                save.request.decode_snapshot = save.block_hash
        self._saves = []

    def _settle(self, drafts: _Drafts) -> None:
        """Move a request to the slot of its last right draft; keep what ends a block for later."""
        request, slots = drafts.request, drafts.slots
        index = request.num_computed_tokens - drafts.first
        if request.state_slot != -1 and index < len(slots):
            request.state_slot, slots[index] = slots[index], request.state_slot
            self._moved.append(request)
        num_right = min(request.num_computed_tokens, request.num_tokens)
        for i, slot in enumerate(slots):
            position = drafts.first + i
            is_end = position < num_right and position % self.decode_tokens == 0
            block_hash = None
            if is_end and self.enable_caching:
                block_hash = self._wanted(request, position, is_checkpoint=False)
            if block_hash is None:
                self._free.append(slot)
                continue
            old = self._give_up_decode(request)
            if old is not None:
                self._free.append(old)
            self._saves.append(_Save(request, block_hash, slot, is_decode=True))

    def drop_saves(self) -> None:
        """The step did not run."""
        for drafts in self._drafts:
            self._free += drafts.slots
        self._drafts = []
        self._free += [save.slot for save in self._saves]
        self._saves = []

    def forget_block(self, block_hash: bytes) -> None:
        """A KV block was evicted: without it the snapshot at its end is of no use."""
        slot = self._snapshots.pop(block_hash, None)
        if slot is not None:
            self._free.append(slot)

    def reset(self) -> None:
        """Forget all snapshots."""
        self._free += self._snapshots.values()
        self._snapshots.clear()

    @property
    def num_snapshots(self) -> int:
        return len(self._snapshots)

    # ------------------------------------------------------------------ invariants

    def check(self, running: Iterable[Request], pool: BlockPool) -> None:
        """Every slot has exactly one use; raises AssertionError. Call it between steps."""
        assert not self._saves, "a snapshot is neither published nor dropped"
        assert not self._drafts, "drafts are not settled"
        owners = [request.state_slot for request in running]
        used = [NULL_SLOT, *owners, *self._free, *self._snapshots.values()]
        assert sorted(used) == list(range(self.num_slots)), f"state slots in use: {sorted(used)}"
        for block_hash in self._snapshots:
            assert pool.get_cached_block(block_hash) is not None, "a snapshot without its block"


def forget_state(request: Request) -> None:
    """A request has no state any more."""
    request.state_slot = -1
    request.state_save_points = []
    request.num_saved_tokens = 0
    request.decode_snapshot = None


__all__ = ["NULL_SLOT", "StateCacheManager", "forget_state"]
