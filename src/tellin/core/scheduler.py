"""Decides what every step computes, and what its results mean for the requests.

There is no prefill phase and no decode phase: every step hands each request as many of its known
but uncomputed ids as the token budget allows. Owns all live requests, the block tables (through
`KVCacheManager`) and the prefix cache; never samples and never sees text or tensors. A worker's
mirror follows from the stream of `SchedulerOutput`s alone.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence

from tellin.config import EngineConfig
from tellin.core.admission import Admission
from tellin.core.encoder_inputs import EncoderInputs
from tellin.core.invariants import StepChecker, check_invariants
from tellin.core.kv_cache_manager import KVCacheManager
from tellin.core.kv_cache_metrics import KVCacheMetricsCollector
from tellin.core.kv_events import KVEventRecorder
from tellin.core.request import Request, RequestStatus
from tellin.core.running_work import RunningWork
from tellin.core.step_plan import StepPlan
from tellin.core.step_results import StepResults
from tellin.core.structured_output import StructuredOutputManager
from tellin.core.waiting_room import WaitingRoom
from tellin.exceptions import (
    ContextLengthError,
    DuplicateRequestError,
    InvalidParameterError,
)
from tellin.protocol import (
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
)
from tellin.step_protocol import ModelRunnerOutput, SchedulerOutput

_RUNNING = RequestStatus.RUNNING


class PauseState(enum.IntEnum):
    UNPAUSED = 0
    PAUSED_NEW = 1
    """Requests that have run may go on; nothing new is admitted."""
    PAUSED_ALL = 2
    """Nothing is scheduled."""


class Scheduler:
    """One engine's scheduler. Not thread-safe: only the engine's stepping thread may call it."""

    def __init__(
        self,
        config: EngineConfig,
        num_kv_blocks: int,
        structured_output_manager: StructuredOutputManager | None = None,
        log_stats: bool = False,
        num_state_slots: int = 0,
    ) -> None:
        scheduler_config, cache_config = config.scheduler_config, config.cache_config
        spec = config.speculative_config
        self.config = config
        self.max_num_seqs = scheduler_config.max_num_seqs
        self.max_model_len = config.model_config.max_model_len
        self.enable_chunked_prefill = scheduler_config.enable_chunked_prefill
        self.num_spec_tokens = spec.num_speculative_tokens if spec is not None else 0
        writes_kv = spec is not None and spec.has_weights
        self.num_lookahead_tokens = self.num_spec_tokens if writes_kv else 0
        self.max_num_scheduled_tokens = scheduler_config.max_num_batched_tokens
        if spec is not None and spec.method == "draft_model":  # it is fed one more per request
            self.max_num_scheduled_tokens -= self.max_num_seqs
            if self.max_num_scheduled_tokens <= 0:
                raise InvalidParameterError(
                    f"max_num_batched_tokens={scheduler_config.max_num_batched_tokens} leaves "
                    f"nothing after one draft token for each of max_num_seqs={self.max_num_seqs}; "
                    "raise the former or lower the latter",
                    parameter="max_num_batched_tokens",
                    value=scheduler_config.max_num_batched_tokens,
                )
        sample = cache_config.kv_cache_metrics_sample
        self.kv_cache_manager = KVCacheManager(
            num_kv_blocks,
            cache_config.block_size,
            self.max_model_len,
            enable_caching=cache_config.enable_prefix_caching,
            hash_algorithm=cache_config.prefix_caching_hash_algo,
            watermark=scheduler_config.watermark,
            num_lookahead_tokens=self.num_lookahead_tokens,
            metrics=KVCacheMetricsCollector(sample) if log_stats and sample > 0 else None,
            events=KVEventRecorder() if cache_config.enable_kv_cache_events else None,
            num_state_slots=num_state_slots,
        )
        self.structured_output_manager = structured_output_manager
        self.log_stats = log_stats
        self._checker = StepChecker() if config.settings.check_invariants else None

        self.requests: dict[str, Request] = {}
        self.room = WaitingRoom(scheduler_config.policy)
        self.running: list[Request] = []
        self.encoder_inputs = EncoderInputs(
            config.multimodal_config, self.enable_chunked_prefill, self.max_num_scheduled_tokens
        )
        self.admission = Admission(config, self.kv_cache_manager, self.room, self.encoder_inputs)
        self.in_flight_prefixes = self.admission.prefixes
        self.finished_req_ids: set[str] = set()
        self.reset_preempted_req_ids: set[str] = set()
        self.current_step = 0
        self.num_preemptions = 0
        self.pause_state = PauseState.UNPAUSED
        self.plan: StepPlan | None = None
        self.work = RunningWork(self)
        self.results = StepResults(self)

    # ------------------------------------------------------------------ requests come and go

    def add_request(self, request: Request) -> None:
        """Queue a request.

        Raises:
            DuplicateRequestError: a live request has this id.
            ContextLengthError: it could never be completed.
        """
        if request.request_id in self.requests:
            raise DuplicateRequestError(
                f"request id {request.request_id!r} is in use by a live request; choose another id"
            )
        self.check_admissible(request)
        self.requests[request.request_id] = request
        request.record_event(EngineCoreEventType.QUEUED)
        if request.structured_output_request is not None:
            request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
            self.room.block_on_grammar(request)
            request.structured_output_request.when_done(lambda: self.room.grammar_compiled(request))
        else:
            self.room.add(request)

    def check_admissible(self, request: Request) -> None:
        """Refuse what no schedule can complete. Raises ContextLengthError."""
        num_prompt, limit = request.num_prompt_tokens, self.max_model_len
        if num_prompt == 0:
            raise ContextLengthError("the prompt is empty; it must have at least one token")
        if num_prompt > limit or (num_prompt == limit and request.sampling_params is not None):
            raise ContextLengthError(
                f"the prompt has {num_prompt} tokens, but the model's context is max_model_len="
                f"{limit} tokens including at least one output token; shorten the prompt"
            )
        if not self.enable_chunked_prefill and num_prompt > self.max_num_scheduled_tokens:
            raise ContextLengthError(
                f"the prompt has {num_prompt} tokens, but without chunked prefill a step takes at "
                f"most {self.max_num_scheduled_tokens}; raise max_num_batched_tokens"
            )
        if request.mm_features:
            self.encoder_inputs.check_admissible(request)
        pool = self.kv_cache_manager.pool
        num_tokens = request.max_total_tokens + self.num_lookahead_tokens
        num_blocks = self.kv_cache_manager.num_blocks_for(num_tokens)
        if num_blocks > pool.num_usable_blocks:
            size = self.kv_cache_manager.block_size
            raise ContextLengthError(
                f"prompt and output may take {request.max_total_tokens} tokens = {num_blocks} KV "
                f"blocks, but the pool has {pool.num_usable_blocks} blocks = "
                f"{pool.num_usable_blocks * size} tokens; lower max_tokens or enlarge the pool"
            )

    def finish_requests(
        self,
        request_ids: str | Iterable[str] | None,
        status: RequestStatus,
        *,
        error: str | None = None,
        emit: bool = False,
    ) -> list[tuple[str, int]]:
        """End live requests from outside; None = all. Unknown and finished ids are ignored.

        With ``emit`` each gets a last output, which the next step delivers.

        Returns:
            ``(request id, client index)`` of those that were ended.
        """
        if request_ids is None:
            ids = list(self.requests)
        else:
            ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        requests = [self.requests[i] for i in dict.fromkeys(ids) if i in self.requests]
        self.room.remove(requests)
        if any(request.status is _RUNNING for request in requests):
            ended = set(map(id, requests))
            self.running = [r for r in self.running if id(r) not in ended]
        for request in requests:
            request.status = status
            request.error = error or request.error
            self.free_request(request)
            if emit:
                self.results.emit_final(request)
        return [(request.request_id, request.client_index) for request in requests]

    def free_request(self, request: Request) -> None:
        """Give back everything a finished request holds. It must be in no queue any more."""
        self.release_blocks(request)
        if request.structured_output_request is not None:
            request.structured_output_request.cancel()
        del self.requests[request.request_id]
        self.finished_req_ids.add(request.request_id)
        if request.lora_request is not None:
            self.room.adapter_freed()
        self.room.dirty = True

    def release_blocks(self, request: Request) -> None:
        """Free its blocks and tell those who waited for them."""
        self.in_flight_prefixes.unregister(request)
        if request.prefix_waiters:
            self.room.release_prefix_waiters(request, None)
        if request.mm_features:
            self.encoder_inputs.cache.release_all(request)
        self.kv_cache_manager.free(request)

    # ------------------------------------------------------------------ one step

    def schedule(self) -> SchedulerOutput:
        """Choose the next step's work.

        Running requests come first: those that decode, then prompts in progress; then the line.
        Every step must be answered by `update_from_output` (or `fail_step`) before the next.
        """
        if self.plan is not None:
            raise RuntimeError("schedule() was called while a step is in flight")
        self.current_step += 1
        plan = self.plan = StepPlan(self.max_num_scheduled_tokens, self.current_step)
        self.encoder_inputs.begin_step(plan)
        if self.room.blocked:
            self._poll_blocked()
        if self.pause_state is not PauseState.PAUSED_ALL:
            preempted_only = self.pause_state is PauseState.PAUSED_NEW
            self.work.schedule_decodes(plan)
            capped: list[Request] = []
            if plan.prefills:
                capped = self.work.schedule_prefill_chunks(plan, preempted_only)
            if not plan.preempted_ids:
                self.admission.run(plan, self.running, preempted_only)
            for request in capped:
                self.work.top_up(request, plan)
        output = self._build_output(plan)
        if self._checker is not None:
            self._checker.scheduled(self, output)
        return output

    def preempt(self, request: Request) -> None:
        """Take the blocks away; known ids, grammar and randomness are kept, KV is recomputed."""
        self.running.remove(request)
        self.release_blocks(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.spec_token_ids = []
        request.num_preemptions += 1
        self.num_preemptions += 1
        request.record_event(EngineCoreEventType.PREEMPTED)
        if request.lora_request is not None:
            self.room.adapter_freed()
        self.room.add(request)

    # ------------------------------------------------------------------ blocked requests

    def _poll_blocked(self) -> None:
        """Requests whose grammar is compiled go in line; those whose grammar failed end."""
        if self.structured_output_manager is not None:
            self.structured_output_manager.expire()
        self._take_compiled(self.room.take_compiled())

    def wait_for_unblock(self, timeout_s: float) -> None:
        """Sleep until a blocked request's grammar is compiled, at most ``timeout_s``."""
        self._take_compiled(self.room.take_compiled(timeout_s))

    def _take_compiled(self, requests: Sequence[Request]) -> None:
        for request in requests:
            structured = request.structured_output_request
            assert structured is not None
            error = structured.error
            if error is None:
                request.status = RequestStatus.WAITING
                self.room.unblock(request)
            else:
                request.error_is_client_fault = structured.error_is_client_fault
                self.finish_requests(
                    request.request_id, RequestStatus.FINISHED_ERROR, error=error, emit=True
                )

    # ------------------------------------------------------------------ results

    def _build_output(self, plan: StepPlan) -> SchedulerOutput:
        finished, self.finished_req_ids = self.finished_req_ids, set()
        preempted, self.reset_preempted_req_ids = self.reset_preempted_req_ids, set()
        grammar_ids = []
        if self.structured_output_manager is not None:
            grammar_ids = [
                r.request_id
                for r in plan.requests
                if r.structured_output_request is not None and r.num_computed_tokens >= r.num_tokens
            ]
        plan.num_total = self.max_num_scheduled_tokens - plan.budget
        if plan.encoder_inputs and not plan.requests:  # whoever wanted them was preempted
            self.encoder_inputs.step_failed()
            plan.encoder_inputs = {}
        num_drafts, draft_limits = 0, dict[str, int]()
        if self.num_spec_tokens:
            num_drafts, draft_limits = self.results.spec.limits(self.running)
        states = self.kv_cache_manager.states
        return SchedulerOutput(
            plan.new,
            plan.cached,
            plan.num_scheduled_tokens,
            plan.num_total,
            plan.spec_token_ids,
            finished,
            preempted | plan.preempted_ids,
            grammar_ids,
            num_drafts,
            plan.step_counter,
            plan.copies,
            draft_limits,
            plan.encoder_inputs,
            self.encoder_inputs.take_freed(),
            plan.state_copies,
            states.plan_saves(plan) if states is not None else [],
            states.take_moves() if states is not None else {},
        )

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_output: ModelRunnerOutput | None
    ) -> dict[int, EngineCoreOutputs]:
        """Apply a step's results: append ids, stop what is done, publish blocks, make outputs.

        ``model_output`` is None for a step in which nothing was scheduled.
        """
        plan = self._get_plan(scheduler_output)
        if self._checker is not None:
            self._checker.results(plan, model_output)
        outputs = self.results.apply(plan, model_output)
        if self.kv_cache_manager.states is not None and plan.num_total:
            self.kv_cache_manager.states.publish(self.kv_cache_manager.pool)
        self.plan = None
        if self._checker is not None:
            self._checker.outputs(plan, outputs)
            check_invariants(self)
        return self.results.package(outputs, plan, model_output)

    def fail_step(self, scheduler_output: SchedulerOutput, error: str) -> None:
        """The step did not run. What was in it ends with ERROR; the next step delivers that."""
        plan = self._get_plan(scheduler_output)
        self.plan = None
        ids = [r.request_id for r in plan.requests if r.status is _RUNNING]
        # What the workers should have learned from this step they learn from the next.
        self.finished_req_ids |= scheduler_output.finished_req_ids
        self.reset_preempted_req_ids |= scheduler_output.preempted_req_ids
        self.encoder_inputs.step_failed()
        if self.kv_cache_manager.states is not None:
            self.kv_cache_manager.states.drop_saves()
        self.finish_requests(ids, RequestStatus.FINISHED_ERROR, error=error, emit=True)
        if self._checker is not None:
            check_invariants(self)

    def _get_plan(self, scheduler_output: SchedulerOutput) -> StepPlan:
        plan = self.plan
        if plan is None or plan.step_counter != scheduler_output.step_counter:
            raise RuntimeError(
                f"step {scheduler_output.step_counter} is not in flight: results must be given "
                "once, in the order in which steps were scheduled"
            )
        return plan

    def recover(self, error: str) -> None:
        """Bring the state in order after an exception (Ctrl-C) in the middle of its own code.

        Every request that is not safely in line ends with ERROR. With that no block is in use, and
        the pool and the prefix cache begin anew.
        """
        self.plan = None
        self.running = []
        self.admission.prefixes.clear()
        self.encoder_inputs.recover()
        self.kv_cache_manager.rebuild_pool()
        in_line = {r.request_id for r in (*self.room.waiting, *self.room.preempted)}
        lost = []
        for request in self.requests.values():
            self.kv_cache_manager.forget(request)
            request.num_computed_tokens = 0
            request.spec_token_ids = []
            request.in_flight_range = None
            request.prefix_waiters = []
            blocked = self.room.blocked.get(request.request_id) is request
            if blocked and request.structured_output_request is None:
                self.room.unblock(request)
            elif not blocked and request.request_id not in in_line:
                lost.append(request.request_id)
        self.finish_requests(lost, RequestStatus.FINISHED_ERROR, error=error, emit=True)

    def take_pending_outputs(self) -> dict[int, EngineCoreOutputs]:
        """Last outputs of requests that were ended between steps."""
        pending: dict[int, list[EngineCoreOutput]] = self.results.take_pending()
        return {client: EngineCoreOutputs(outputs=batch) for client, batch in pending.items()}

    # ------------------------------------------------------------------ pause, reset, counts

    def set_pause_state(self, state: PauseState) -> None:
        self.pause_state = state
        self.room.dirty = True

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all cached blocks. False, and no change, while blocks are in use.

        With ``reset_running_requests`` the running requests are preempted first and recomputed
        later, in their old order.
        """
        if reset_running_requests:
            for request in reversed(list(self.running)):
                self.preempt(request)
                self.reset_preempted_req_ids.add(request.request_id)
        return self.kv_cache_manager.reset_prefix_cache()

    def get_num_unfinished_requests(self) -> int:
        """Requests that a step could bring forward in the present pause state."""
        if self.pause_state is PauseState.PAUSED_ALL:
            return 0
        if self.pause_state is PauseState.PAUSED_NEW:
            return len(self.running) + self._num_interrupted()
        return len(self.requests)

    def _num_interrupted(self) -> int:
        """Requests that ran before and wait to go on: a drain must see them through."""
        blocked = self.room.blocked.values()
        num_blocked = sum(1 for r in blocked if r.status is RequestStatus.PREEMPTED)
        return len(self.room.preempted) + num_blocked

    def has_unfinished_requests(self) -> bool:
        return self.get_num_unfinished_requests() > 0

    def has_requests(self) -> bool:
        """Whether a step has anything to do, be it to report what has ended."""
        return (
            bool(self.finished_req_ids)
            or self.results.has_pending()
            or self.get_num_unfinished_requests() > 0
        )

    def get_request_counts(self) -> tuple[int, int]:
        """(running, waiting)."""
        return len(self.running), len(self.room)

    def shutdown(self) -> None:
        """Forget everything. Idempotent."""
        if self.plan is not None:
            self.recover("the engine was shut down")
        self.finish_requests(None, RequestStatus.FINISHED_ABORTED)
        self.results.take_pending()


__all__ = ["PauseState", "Scheduler"]
