"""What running requests get of a step: decodes first, then chunks of prompts in progress.

Works for the scheduler, which owns the requests and preempts those that must give way. Decides how
many tokens each request gets and finds room for them; who may start is `Admission`'s affair.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tellin.core.request import Request, RequestStatus
from tellin.core.step_plan import NO_BLOCKS, StepPlan
from tellin.step_protocol import CachedRequestData

if TYPE_CHECKING:
    from tellin.core.scheduler import Scheduler

MIN_PREFILL_CHUNK = 32
"""A prompt that leaves budget to others still gets this many tokens a step (or half of the whole
budget): a smaller chunk costs a pass over the weights almost as long."""

_RUNNING = RequestStatus.RUNNING


class RunningWork:
    """Plans the running requests of one scheduler."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._kv = scheduler.kv_cache_manager
        self._encoder = scheduler.encoder_inputs
        self._lookahead = scheduler.num_lookahead_tokens
        self._chunk_limit = scheduler.config.scheduler_config.long_prefill_token_threshold
        self._min_prefill_chunk = min(MIN_PREFILL_CHUNK, scheduler.max_num_scheduled_tokens // 2)

    def schedule_decodes(self, plan: StepPlan) -> None:
        """One token, plus drafts, for every request of which only the last id is uncomputed.

        The rest go to ``plan.prefills``. The first branch is what nearly every request takes in
        nearly every step; it avoids calls.
        """
        budget = plan.budget
        lookahead = self._lookahead
        running = tuple(self._scheduler.running)
        spare = budget - len(running)  # what drafts may use: every decode gets its one token
        num_scheduled_tokens, add_request = plan.num_scheduled_tokens, plan.requests.append
        for request in running:
            num_computed = request.num_computed_tokens
            if (
                request.num_tokens - num_computed != 1
                or request.status is not _RUNNING
                or (request.mm_features and num_computed < request.num_prompt_tokens)
            ):
                if request.status is _RUNNING:
                    plan.prefills.append(request)
                continue
            if num_computed + lookahead < request.num_slots and not request.spec_token_ids:
                plan.cached.append(
                    CachedRequestData(
                        request.request_id,
                        NO_BLOCKS,
                        num_computed,
                        num_computed + 1 - request.num_prompt_tokens,
                    )
                )
                request.num_computed_tokens = num_computed + 1
                num_scheduled_tokens[request.request_id] = 1
                add_request(request)
                budget -= 1
                continue
            plan.budget = budget
            spare -= self._schedule_decode_with_drafts(request, plan, spare)
            budget = plan.budget
            add_request = plan.requests.append
        plan.budget = budget

    def _schedule_decode_with_drafts(self, request: Request, plan: StepPlan, spare: int) -> int:
        """Returns how many draft tokens were scheduled."""
        drafts = request.spec_token_ids
        request.spec_token_ids = []
        if drafts:
            num_drafts = min(len(drafts), spare, request.max_total_tokens - request.num_tokens - 1)
            if self._kv.pool.get_num_free_blocks() < len(self._scheduler.running):
                # Drafts must not take the block that another needs for its next token.
                num_slots = request.num_slots - self._lookahead
                num_drafts = min(num_drafts, num_slots - request.num_computed_tokens - 1)
            drafts = drafts[: max(0, num_drafts)]
        if drafts:
            new_block_ids = self._kv.allocate_slots(request, 1 + len(drafts))
            if new_block_ids is not None:
                plan.add_running(request, 1 + len(drafts), new_block_ids)
                plan.spec_token_ids[request.request_id] = drafts
                return len(drafts)
        self._schedule_running(request, 1, plan)
        return 0

    def schedule_prefill_chunks(self, plan: StepPlan, preempted_only: bool) -> list[Request]:
        """A chunk for every running request whose prompt is in progress.

        Fairness: a prompt that cannot be finished in this step leaves half of the budget to those
        behind it, in the running set or in line; returns such prompts, to be topped up with what
        the others did not use. ``preempted_only``: nobody starts now who has not run before.
        """
        capped = []
        line = self._scheduler.room.has_candidates(preempted_only)
        for index, request in enumerate(plan.prefills):
            if plan.budget < 1:
                break
            if request.status is not _RUNNING:
                continue
            num_tokens = request.num_tokens - request.num_computed_tokens
            if 0 < self._chunk_limit < num_tokens:
                num_tokens = self._chunk_limit
            if num_tokens > plan.budget:
                num_tokens = plan.budget
                if line or index + 1 < len(plan.prefills):
                    num_tokens = min(num_tokens, max(num_tokens // 2, self._min_prefill_chunk))
                    capped.append(request)
            if request.mm_features:
                start = request.num_computed_tokens
                num_tokens = self._encoder.without_cuts(request, start, num_tokens, plan.budget)
                num_tokens = self._encoder.fit(request, start, num_tokens, plan)
                if num_tokens == 0:  # others hold the encoder's cache, or have used its budget
                    self._encoder.release_unused(request)
                    continue
            self._schedule_running(request, num_tokens, plan)
            if request.num_computed_tokens == request.num_tokens:
                self._scheduler.room.dirty = True  # a prompt less in progress
        return capped

    def _schedule_running(self, request: Request, num_tokens: int, plan: StepPlan) -> None:
        """Plan a running request; preempts others, or itself, when blocks are short."""
        while True:
            new_block_ids = self._kv.allocate_slots(request, num_tokens)
            if new_block_ids is not None:
                if request.mm_features:
                    start = request.num_computed_tokens
                    self._encoder.commit(request, start, num_tokens, plan)
                plan.add_running(request, num_tokens, new_block_ids)
                return
            # The last in the policy's order pays: the first of them is never preempted, and ends.
            victim = max(self._scheduler.running, key=self._scheduler.room.key)
            plan.take_out(victim)
            if victim.mm_features:
                self._encoder.take_out(victim, plan)
            self._scheduler.preempt(victim)
            plan.preempted_ids.add(victim.request_id)
            if victim is request:
                return

    def top_up(self, request: Request, plan: StepPlan) -> None:
        """Give a prompt that had held back for others what they left."""
        num_planned = plan.num_scheduled_tokens.get(request.request_id, 0)
        num_tokens = min(request.num_tokens - request.num_computed_tokens, plan.budget)
        if self._chunk_limit > 0:
            num_tokens = min(num_tokens, self._chunk_limit - num_planned)
        if num_planned == 0 or num_tokens <= 0:
            return
        start = request.num_computed_tokens
        if request.mm_features:
            num_tokens = self._encoder.without_cuts(request, start, num_tokens, plan.budget)
            num_tokens = self._encoder.fit(request, start, num_tokens, plan)
            if num_tokens == 0:
                return
        new_block_ids = self._kv.allocate_slots(request, num_tokens)
        if new_block_ids is not None:
            if request.mm_features:
                self._encoder.commit(request, start, num_tokens, plan)
            plan.extend_running(request, num_tokens, new_block_ids)
