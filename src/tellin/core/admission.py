"""Who may start: takes requests from the line into the running set.

Looks at the line only if something has changed since it was found blocked, so that waiting
requests cost a step nothing. Fairness: a request that does not fit is looked past, for a bounded
number of others, after which the line waits for it: neither it nor small ones behind it starve.
"""

from __future__ import annotations

import enum

from tellin.config import EngineConfig
from tellin.core.encoder_inputs import EncoderInputs
from tellin.core.kv_cache_manager import KVCacheManager, PrefixHit
from tellin.core.prefix_sharing import InFlightPrefixes
from tellin.core.request import Request, RequestStatus
from tellin.core.step_plan import StepPlan
from tellin.core.waiting_room import WaitingRoom
from tellin.protocol import EngineCoreEventType, PrefillStats

MAX_LOOK_PAST = 8
"""How many requests that cannot start are looked past in one step, in search of one that can."""

MAX_OVERTAKEN = 32
"""A request that did not fit may be overtaken so often; then the line waits for it."""


class _Verdict(enum.Enum):
    ADMITTED = 0
    PARKED = 1
    """It waits for an event, out of line."""
    NO_ROOM = 2
    """Too few blocks are free."""
    TOO_MANY_PROMPTS = 3
    """It would leave one more prompt unfinished than is allowed."""
    NO_BUDGET = 4
    """It needs more budget than is left, and prompts may not be cut."""


class Admission:
    """Starts requests. ``prefixes`` are the blocks that running requests are computing."""

    def __init__(
        self,
        config: EngineConfig,
        kv_cache_manager: KVCacheManager,
        room: WaitingRoom,
        encoder_inputs: EncoderInputs,
    ) -> None:
        scheduler_config = config.scheduler_config
        self.max_num_seqs = scheduler_config.max_num_seqs
        self.chunk_limit = scheduler_config.long_prefill_token_threshold
        self.enable_chunked_prefill = scheduler_config.enable_chunked_prefill
        self.reserve_full_isl = scheduler_config.scheduler_reserve_full_isl
        self.max_partial_prefills = scheduler_config.max_num_partial_prefills
        self.max_long_partial_prefills = scheduler_config.max_long_partial_prefills
        self.max_loras = config.lora_config.max_loras if config.lora_config is not None else None
        self.kv_cache_manager = kv_cache_manager
        self.room = room
        self.encoder_inputs = encoder_inputs
        self.prefixes = InFlightPrefixes(kv_cache_manager.block_size)
        self._num_promised = 0

    def run(self, plan: StepPlan, running: list[Request], preempted_only: bool) -> None:
        """Move requests from the line to the end of ``running`` and into ``plan``.

        With ``preempted_only`` nothing starts that has not run before.
        """
        room = self.room
        if not room.dirty or not room.has_candidates(preempted_only):
            return
        room.dirty = False
        missing = self.kv_cache_manager.num_missing_blocks
        self._num_promised = room.num_reserved_blocks + sum(map(missing, plan.prefills))
        passed: list[Request] = []
        without_room: list[Request] = []
        while len(passed) < MAX_LOOK_PAST:
            if plan.budget < 1:
                room.dirty = True  # the next step has a new budget
                break
            if len(running) + room.num_reserved_seats >= self.max_num_seqs:
                break
            request = room.pop(preempted_only)
            if request is None:
                break
            verdict = self._try(request, plan, running)
            if verdict is _Verdict.ADMITTED:
                for other in without_room:
                    other.num_overtaken += 1
            elif verdict is not _Verdict.PARKED:
                passed.append(request)
                if verdict is _Verdict.NO_ROOM:
                    without_room.append(request)
                    if request.num_overtaken >= MAX_OVERTAKEN:
                        break
                elif verdict is _Verdict.NO_BUDGET:
                    room.dirty = True
                    break
        room.put_back(passed)

    def _try(self, request: Request, plan: StepPlan, running: list[Request]) -> _Verdict:
        manager = self.kv_cache_manager
        hit = manager.get_computed_blocks(request)
        if self._defer(request, hit, plan) or self._lacks_adapter_slot(request, running):
            return _Verdict.PARKED
        if request.mm_features:
            self._end_outside_parts(request, hit)
        num_missing = num_tokens = request.num_tokens - hit.num_tokens
        if 0 < self.chunk_limit < num_tokens:
            num_tokens = self.chunk_limit
        if num_tokens > plan.budget:
            if not self.enable_chunked_prefill:
                return _Verdict.NO_BUDGET
            num_tokens = plan.budget
        if request.mm_features:
            start = hit.num_tokens
            num_tokens = self.encoder_inputs.without_cuts(request, start, num_tokens, plan.budget)
            if num_tokens == 0:
                return _Verdict.NO_BUDGET
        if num_tokens < num_missing and self._too_many_prompts(num_missing, running):
            return _Verdict.TOO_MANY_PROMPTS
        if not self._has_room(request, hit, num_tokens, running):
            return _Verdict.NO_ROOM
        if request.mm_features:
            wanted = num_tokens
            num_tokens = self.encoder_inputs.fit(request, hit.num_tokens, wanted, plan)
            if num_tokens < wanted and not self._may_cut(num_tokens, num_missing, running):
                self.encoder_inputs.cache.release_all(request)
                return _Verdict.NO_BUDGET
            self.encoder_inputs.commit(request, hit.num_tokens, num_tokens, plan)
        self._admit(request, hit, num_tokens, plan)
        running.append(request)
        return _Verdict.ADMITTED

    def _end_outside_parts(self, request: Request, hit: PrefixHit) -> None:
        """Let a hit end before rows that see each other, if it ends among them."""
        size = self.kv_cache_manager.block_size
        while True:
            start = self.encoder_inputs.start_of_part(request, hit.num_tokens)
            if start == hit.num_tokens:
                return
            hit.num_tokens = start // size * size
            del hit.block_ids[start // size :]
            hit.copy_from = None

    # ------------------------------------------------------------------ reasons to wait

    def _may_cut(self, num_tokens: int, num_missing: int, running: list[Request]) -> bool:
        """Whether a prompt may begin with fewer tokens than there is budget for."""
        if num_tokens == 0 or not self.enable_chunked_prefill:
            return False
        return not self._too_many_prompts(num_missing, running)

    def _has_room(
        self, request: Request, hit: PrefixHit, num_tokens: int, running: list[Request]
    ) -> bool:
        """Whether enough blocks are free, besides those promised to others.

        Promised are the rest of every prompt in progress, and what requests need that wait for a
        prefix.
        """
        manager = self.kv_cache_manager
        num_needed = manager.num_blocks_to_admit(request, hit, num_tokens, self.reserve_full_isl)
        if running:
            num_needed += manager.watermark_blocks
            if request.status is RequestStatus.PREEMPTED:
                # Room for everybody's next block, or it would be preempted again at once.
                num_needed += len(running)
        return num_needed + self._num_promised <= manager.pool.get_num_free_blocks()

    def _too_many_prompts(self, num_missing: int, running: list[Request]) -> bool:
        """Whether one more prompt in progress would break a configured limit."""
        if not (self.max_partial_prefills or self.max_long_partial_prefills):
            return False
        prompts = [r for r in running if r.num_computed_tokens < r.num_tokens]
        if 0 < self.max_partial_prefills <= len(prompts):
            return True
        if not 0 < self.chunk_limit < num_missing:
            return False
        num_long = sum(1 for r in prompts if r.num_missing_at_start > self.chunk_limit)
        return 0 < self.max_long_partial_prefills <= num_long

    def _defer(self, request: Request, hit: PrefixHit, plan: StepPlan) -> bool:
        """Let it wait for a prefix that a running request is computing now, if there is one."""
        if not self.prefixes or request.skip_reading_prefix_cache:
            return False
        found = self.prefixes.find_owner(request, len(hit.block_ids))
        if found is None:
            return False
        owner, num_tokens = found
        states = self.kv_cache_manager.states
        if states is not None:
            # It can go on only from a state that the owner keeps for it.
            size = self.kv_cache_manager.block_size
            num_tokens = min(num_tokens, (request.num_tokens - 1) // size * size)
            if num_tokens - hit.num_tokens < self.prefixes.min_shared_tokens:
                return False
            scheduled = plan.num_scheduled_tokens.get(owner.request_id, 0)
            if not states.expect(owner, num_tokens, owner.num_computed_tokens - scheduled):
                return False
        request.num_deferrals += 1
        num_blocks = self.kv_cache_manager.num_blocks_for(request.num_tokens)
        num_shared = num_tokens // self.kv_cache_manager.block_size
        self._num_promised += num_blocks - num_shared
        self.room.block_on_prefix(request, owner, num_tokens, num_blocks - num_shared)
        return True

    def _lacks_adapter_slot(self, request: Request, running: list[Request]) -> bool:
        if request.lora_request is None or self.max_loras is None:
            return False
        adapters = {r.lora_int_id for r in running if r.lora_request is not None}
        if request.lora_int_id in adapters or len(adapters) < self.max_loras:
            return False
        self.room.block_on_adapter(request)
        return True

    # ------------------------------------------------------------------ start

    def _admit(self, request: Request, hit: PrefixHit, num_tokens: int, plan: StepPlan) -> None:
        resumed = request.status is RequestStatus.PREEMPTED
        if not resumed and request.status is not RequestStatus.WAITING:
            raise RuntimeError(f"request {request.request_id} in line is {request.status.name}")
        manager = self.kv_cache_manager
        plan.copies += manager.admit(request, hit, num_tokens)
        plan.state_copies += manager.admit_state(request, hit)
        if manager.enable_caching:
            if not request.skip_reading_prefix_cache:
                manager.prefix_cache_stats.record(request.num_tokens, hit.num_tokens, resumed)
            manager.hasher.extend(request)
            self.prefixes.register(request, len(hit.block_ids), len(request.block_hashes))
        if not resumed:
            num_cached = min(hit.num_tokens, request.num_prompt_tokens)
            request.prefill_stats = PrefillStats(
                request.num_prompt_tokens,
                request.num_prompt_tokens - num_cached,
                num_cached,
                num_cached,
            )
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = hit.num_tokens
        request.num_missing_at_start = request.num_tokens - hit.num_tokens
        request.first_output_pending = True
        request.has_fast_update = False
        request.record_event(EngineCoreEventType.SCHEDULED)
        plan.add_admitted(request, num_tokens, resumed)
        self._num_promised += manager.num_missing_blocks(request)
