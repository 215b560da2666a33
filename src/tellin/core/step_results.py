"""What the results of a step mean: ids are appended, requests stop, blocks are published.

Works for the scheduler, which owns the requests; holds only outputs that wait for delivery and the
speculation counters. The last step of a request frees it here.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from tellin.core.request import Request, RequestStatus
from tellin.core.scheduler_stats import make_stats
from tellin.core.spec_decode import SpecDecodeController
from tellin.core.step_plan import StepPlan
from tellin.core.stop_check import append_until_stop
from tellin.protocol import EngineCoreOutput, EngineCoreOutputs
from tellin.step_protocol import ModelRunnerOutput

if TYPE_CHECKING:
    from tellin.core.scheduler import Scheduler

_RUNNING = RequestStatus.RUNNING

OutputsByClient = dict[int, list[EngineCoreOutput]]


class StepResults:
    """Applies `ModelRunnerOutput`s to the scheduler's requests."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._pending: OutputsByClient = {}
        self.spec = SpecDecodeController(scheduler.config.speculative_config)

    # ------------------------------------------------------------------ outputs between steps

    def emit_final(self, request: Request) -> None:
        """Queue the last output of a request that was ended outside a step."""
        output = self._make_output(request, [])
        self._pending.setdefault(request.client_index, []).append(output)

    def has_pending(self) -> bool:
        return bool(self._pending)

    def take_pending(self) -> OutputsByClient:
        pending, self._pending = self._pending, {}
        return pending

    # ------------------------------------------------------------------ a step

    def apply(self, plan: StepPlan, model_output: ModelRunnerOutput | None) -> OutputsByClient:
        """Returns the outputs by client, in scheduling order.

        The first branch is what nearly every request takes in nearly every step: one id, no stop,
        no full block.
        """
        outputs = self.take_pending()
        if model_output is None or not plan.requests:
            return outputs
        if model_output.req_ids != list(plan.num_scheduled_tokens):
            _reorder(model_output, list(plan.num_scheduled_tokens))
        exceptional = bool(
            plan.spec_token_ids or model_output.errors or model_output.num_nans_in_logits
        )
        client_index = -1
        any_stopped = False
        manager = self._scheduler.kv_cache_manager
        for index, request in enumerate(plan.requests):
            if request.status is not _RUNNING:
                continue  # aborted while the step ran
            token_ids = model_output.sampled_token_ids[index]
            num_tokens = request.num_tokens + 1
            if (
                request.has_fast_update
                and not exceptional
                and num_tokens < request.max_total_tokens
                and token_ids[0] not in request.stop_ids
            ):
                request.append_token_id(token_ids[0])
                request.num_tokens = num_tokens
                if request.num_computed_tokens >= request.next_publish_at:
                    manager.cache_blocks(request, request.num_computed_tokens)
                output: EngineCoreOutput | None = EngineCoreOutput(request.request_id, token_ids)
            else:
                output = self._update_request(request, index, plan, model_output)
                any_stopped = any_stopped or request.status is not _RUNNING
            if output is not None:
                if request.client_index != client_index:
                    client_index = request.client_index
                    add_output = outputs.setdefault(client_index, []).append
                add_output(output)
        if any_stopped:
            scheduler = self._scheduler
            scheduler.running = [r for r in scheduler.running if r.status is _RUNNING]
        if self.spec.num_spec_tokens:
            if not plan.prefills and not plan.new:
                self.spec.observe_step(
                    len(plan.requests),
                    plan.num_total,
                    model_output.model_time_s,
                    model_output.draft_time_s,
                    max(map(len, model_output.draft_token_ids.values()), default=0),
                )
            self._accept_drafts(model_output)
        return outputs

    def _update_request(
        self, request: Request, index: int, plan: StepPlan, model_output: ModelRunnerOutput
    ) -> EngineCoreOutput | None:
        """The general case of one request; returns its output, if there is anything to say."""
        scheduler, request_id = self._scheduler, request.request_id
        request.num_nans_in_logits = model_output.num_nans_in_logits.get(request_id, 0)
        token_ids = model_output.sampled_token_ids[index]
        grammar_failure = _grammar_failure(request)
        error = model_output.errors.get(request_id) or grammar_failure
        if error:
            request.error_is_client_fault = (
                request_id in model_output.client_errors or error == grammar_failure
            )
            self._fail(request, error)
            token_ids = []
            if request.mm_features:
                scheduler.encoder_inputs.request_failed(request, plan)
        else:
            num_verified = self._settle_drafts(request, token_ids, plan)
            if token_ids and request.first_output_pending:
                scheduler.kv_cache_manager.cache_prompt_tail(request)
            if token_ids and request.max_tokens > 0:
                token_ids = self._append(request, token_ids)
                # Counted after stops have cut the ids: what is not delivered was not gained.
                self._observe_drafts(request, min(num_verified, len(token_ids)), plan)
            elif token_ids:  # only the prompt was to be scored
                token_ids = []
                request.status = RequestStatus.FINISHED_LENGTH_CAPPED
            if request_id in model_output.pooler_output:
                request.status = RequestStatus.FINISHED_STOPPED
            self._publish(request)
            if request.mm_features:
                scheduler.encoder_inputs.release_unused(request)
        if request.status is not _RUNNING:
            scheduler.free_request(request)
        elif not token_ids:
            return None
        return self._make_output(request, token_ids, index, model_output)

    def _settle_drafts(self, request: Request, token_ids: list[int], plan: StepPlan) -> int:
        """Take back the positions of rejected drafts; returns how many drafts were right."""
        drafts = plan.spec_token_ids.get(request.request_id)
        if drafts is None or not token_ids:
            return 0
        request.num_computed_tokens -= len(drafts) + 1 - len(token_ids)
        return len(token_ids) - 1

    def _observe_drafts(self, request: Request, num_accepted: int, plan: StepPlan) -> None:
        drafts = plan.spec_token_ids.get(request.request_id)
        if drafts is not None:
            self.spec.observe(request, len(drafts), num_accepted)

    def _append(self, request: Request, token_ids: list[int]) -> list[int]:
        """Append ids up to a stop, advance the grammar by them; returns those that were kept."""
        structured, params = request.structured_output_request, request.sampling_params
        if structured is None or params is None:
            return append_until_stop(request, token_ids)
        if params.eos_token_id is not None:
            kept = append_until_stop(request, token_ids)
            refused, completed = not structured.accept_tokens(kept), False
        else:
            # No end of sequence will come: the output is complete as soon as the grammar is.
            accepted, completed = structured.accept_until_complete(token_ids)
            kept = append_until_stop(request, accepted)
            refused = not completed and len(accepted) < len(token_ids)
        if refused:
            request.error_is_client_fault = structured.error_is_client_fault
            what = "the output does not match its grammar"
            if structured.error_is_client_fault:
                what = "the grammar could not be followed"
            self._fail(request, f"{what}: {structured.error}")
        elif completed and request.status is _RUNNING:
            request.status = RequestStatus.FINISHED_STOPPED
        return kept

    def _fail(self, request: Request, error: str) -> None:
        request.status = RequestStatus.FINISHED_ERROR
        request.stop_reason = None
        request.error = error

    def _publish(self, request: Request) -> None:
        """Publish what this step completed and wake those who waited for it."""
        scheduler = self._scheduler
        # The last id's KV is not written; after drafts, neither is that of positions cut by a stop.
        num_final = min(request.num_computed_tokens, request.num_tokens)
        if num_final >= request.next_publish_at:
            scheduler.kv_cache_manager.cache_blocks(request, num_final)
        if request.prefix_waiters:
            scheduler.room.release_prefix_waiters(request, num_final)
        if request.first_output_pending and num_final >= request.num_tokens - 1:
            scheduler.in_flight_prefixes.unregister(request)

    def _make_output(
        self,
        request: Request,
        token_ids: list[int],
        index: int | None = None,
        model_output: ModelRunnerOutput | None = None,
    ) -> EngineCoreOutput:
        """The output of a request, with all that is due besides ids."""
        output = EngineCoreOutput(
            request.request_id,
            token_ids,
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            events=request.take_events(),
            trace_headers=request.trace_headers,
            prefill_stats=request.prefill_stats,
            num_nans_in_logits=request.num_nans_in_logits,
            error=request.error,
            error_is_client_fault=request.error_is_client_fault,
        )
        request.prefill_stats = None
        request.first_output_pending = False
        request.has_fast_update = _may_update_fast(request)
        if model_output is not None and index is not None:
            if model_output.logprobs is not None:
                logprobs = model_output.logprobs[index]
                if logprobs is not None and len(logprobs) > len(token_ids):
                    logprobs = logprobs.slice(0, len(token_ids))
                output.new_logprobs = logprobs
            output.new_prompt_logprobs = model_output.prompt_logprobs.get(request.request_id)
            output.pooling_output = model_output.pooler_output.get(request.request_id)
        return output

    # ------------------------------------------------------------------ drafts for the next step

    def _accept_drafts(self, model_output: ModelRunnerOutput) -> None:
        """Keep proposals for requests that decode; trim them to what their grammar allows."""
        requests = self._scheduler.requests
        for request_id, drafts in model_output.draft_token_ids.items():
            request = requests.get(request_id)
            if request is None or request.status is not _RUNNING:
                continue
            if request.num_tokens - request.num_computed_tokens != 1:
                continue  # still in its prompt
            structured = request.structured_output_request
            drafts = self.spec.accept(request, drafts)
            if structured is not None and drafts:
                drafts = structured.validate_tokens(drafts)
            request.spec_token_ids = drafts

    # ------------------------------------------------------------------ packaging

    def package(
        self, outputs: OutputsByClient, plan: StepPlan, model_output: ModelRunnerOutput | None
    ) -> dict[int, EngineCoreOutputs]:
        """One batch per client; statistics go to exactly one of them."""
        now = time.monotonic()
        batches = {
            client: EngineCoreOutputs(outputs=batch, timestamp=now)
            for client, batch in outputs.items()
        }
        if self._scheduler.log_stats:
            client = next(iter(batches), 0)
            batch = batches.setdefault(client, EngineCoreOutputs(timestamp=now))
            batch.scheduler_stats = make_stats(self._scheduler, plan, model_output)
        return batches


def _may_update_fast(request: Request) -> bool:
    """Whether a step that samples one id for it means nothing but that id, unless it stops."""
    params = request.sampling_params
    return (
        params is not None
        and params.logprobs is None
        and not params.logprob_token_ids
        and params.repetition_detection is None
        and request.structured_output_request is None
        and request.trace_headers is None
        and not request.events
    )


def _grammar_failure(request: Request) -> str:
    """A grammar whose mask could not be computed constrains nothing: its request ends."""
    structured = request.structured_output_request
    failure = structured.failure() if structured is not None else ""
    return f"the grammar could not be followed: {failure}" if failure else ""


def _reorder(model_output: ModelRunnerOutput, req_ids: list[str]) -> None:
    """Bring the rows into scheduling order; a request without a row sampled nothing."""
    rows = {req_id: row for row, req_id in enumerate(model_output.req_ids)}
    order = [rows.get(req_id) for req_id in req_ids]
    sampled, logprobs = model_output.sampled_token_ids, model_output.logprobs
    model_output.sampled_token_ids = [[] if row is None else sampled[row] for row in order]
    if logprobs is not None:
        model_output.logprobs = [None if row is None else logprobs[row] for row in order]
    model_output.req_ids = req_ids
