"""From outputs of the core to outputs for the user: text, logprobs, streaming, n completions.

Owns the text of every live request; nobody else keeps a copy. `process_outputs` is the only loop
over a batch. Everything handed out is a snapshot. A stop string ends a request here first; its id
is then returned so that the caller aborts it in the core.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tellin.engine.parallel_sampling import ParentRequest
from tellin.engine.request_state import RequestState
from tellin.engine.stats import (
    LoRARequestStates,
    update_from_events,
    update_from_finished,
    update_from_output,
)
from tellin.engine.token_table import TokenizerLike, TokenTable
from tellin.exceptions import DuplicateRequestError, RequestError, RequestFailedError, TellinError
from tellin.metrics import FinishedRequestStats, IterationStats, RequestStateStats
from tellin.outputs import PoolingRequestOutput, RequestOutput
from tellin.protocol import EngineCoreOutput, EngineCoreRequest, FinishReason, SchedulerStats

Output = RequestOutput | PoolingRequestOutput


class OutputQueue(Protocol):
    """Where a streaming consumer takes its outputs from."""

    def put(self, output: Output | Exception) -> None: ...


class FinishedListener(Protocol):
    """Told when a sequence has ended (tracing)."""

    def __call__(
        self,
        state: RequestState,
        finished: FinishedRequestStats | None,
        finish_reason: FinishReason,
    ) -> None: ...

    def close(self) -> None:
        """No sequence will end any more."""


@dataclass(slots=True)
class OutputProcessorOutput:
    """Result of one batch: outputs in the core's order, and ids that the core has to abort."""

    request_outputs: list[Output] = field(default_factory=list)
    reqs_to_abort: list[str] = field(default_factory=list)


class OutputProcessor:
    """State of all live requests of one frontend."""

    def __init__(
        self,
        tokenizer: TokenizerLike | None,
        *,
        log_stats: bool,
        stream_interval: int = 1,
        on_finished: FinishedListener | None = None,
    ) -> None:
        self.log_stats = log_stats
        self.token_table = None if tokenizer is None else TokenTable(tokenizer)
        self.request_states: dict[str, RequestState] = {}
        self.parent_requests: dict[str, ParentRequest] = {}
        self.external_req_ids: dict[str, list[str]] = {}
        self._stream_interval = stream_interval
        self._on_finished = on_finished
        self._lora_states = LoRARequestStates()

    def close(self) -> None:
        """Let whoever is told about ended sequences finish its work."""
        if self._on_finished is not None:
            self._on_finished.close()

    def get_num_unfinished_requests(self) -> int:
        """Live sequences: a request with n = 3 counts as 3."""
        return len(self.request_states)

    def has_unfinished_requests(self) -> bool:
        return bool(self.request_states)

    def has_external_request(self, external_req_id: str) -> bool:
        """Whether a live request was given this id by its caller."""
        return external_req_id in self.external_req_ids

    # ------------------------------------------------------------------ coming and going

    def add_request(
        self,
        request: EngineCoreRequest,
        prompt: str | None,
        parent: ParentRequest | None = None,
        index: int = 0,
        queue: OutputQueue | None = None,
        num_truncated_prompt_tokens: int = 0,
    ) -> None:
        """Register a request (or child ``index`` of ``parent``) before it is sent to the core.

        Raises:
            DuplicateRequestError: its internal id is in use.
        """
        request_id = request.request_id
        if request_id in self.request_states:
            raise DuplicateRequestError(f"request id {request_id!r} is in use by a live request")
        state = RequestState(
            request,
            prompt,
            self.token_table,
            parent=parent,
            index=index,
            queue=queue,
            stats=RequestStateStats(request.arrival_time) if self.log_stats else None,
            stream_interval=self._stream_interval,
            num_truncated_prompt_tokens=num_truncated_prompt_tokens,
        )
        self.request_states[request_id] = state
        if parent is not None:
            self.parent_requests[parent.request_id] = parent
        self.external_req_ids.setdefault(state.external_req_id, []).append(request_id)

    def remove_requests(self, request_ids: Iterable[str], parent: ParentRequest | None) -> None:
        """Forget a request (all children of ``parent``) that could not be added.

        Whatever was done of it: an interrupt may have come in the middle of `add_request`.
        """
        if parent is not None:
            parent.child_requests.clear()
        for request_id in request_ids:
            state = self.request_states.get(request_id)
            if state is not None:
                self._free(state)

    def abort_requests(
        self,
        request_ids: Iterable[str],
        internal: bool,
        iteration_stats: IterationStats | None = None,
    ) -> tuple[list[str], list[Output]]:
        """End requests with finish reason abort; unknown ids are ignored.

        Args:
            internal: the ids are internal; a parent's id stands for its remaining children.
                Otherwise they are external, and each stands for all live requests that carry it.

        Returns:
            Internal ids that the core has to abort, and the final outputs of requests without a
            queue (those with one get theirs there). Text generated so far is kept.
        """
        resolved: dict[str, None] = {}
        for request_id in request_ids:
            if not internal:
                resolved.update(dict.fromkeys(self.external_req_ids.get(request_id, ())))
            elif request_id in self.parent_requests:
                parent = self.parent_requests[request_id]
                resolved.update(dict.fromkeys(sorted(parent.child_requests)))
            elif request_id in self.request_states:
                # Its own string: the caller's may be of a subclass that cannot travel.
                resolved[self.request_states[request_id].request_id] = None
        outputs: list[Output] = []
        for request_id in resolved:
            state = self.request_states[request_id]
            state.finish_text()
            self._deliver(state, FinishReason.ABORT, None, outputs)
            self._finish(state, FinishReason.ABORT, iteration_stats)
        return list(resolved), outputs

    def propagate_error(self, error: Exception) -> None:
        """Hand an engine failure to every consumer that waits on a queue."""
        for queue in {id(s.queue): s.queue for s in self.request_states.values()}.values():
            if queue is not None:
                queue.put(error)

    # ------------------------------------------------------------------ the loop

    def process_outputs(
        self,
        outputs: Sequence[EngineCoreOutput],
        core_timestamp: float | None = None,
        iteration_stats: IterationStats | None = None,
    ) -> OutputProcessorOutput:
        """Turn a batch into outputs for the user.

        Outputs of unknown requests are skipped: they ended here (abort, stop string) while the core
        was still computing.

        Args:
            core_timestamp: of the batch, core clock.
            iteration_stats: filled in, if given.
        """
        result = OutputProcessorOutput()
        timestamp = time.monotonic() if core_timestamp is None else core_timestamp
        for output in outputs:
            state = self.request_states.get(output.request_id)
            if state is None:
                continue
            num_kept, finish_reason, stop_reason = state.take(output)
            if iteration_stats is not None and state.stats is not None:
                self._update_stats(state, output, num_kept, timestamp, iteration_stats)
            if finish_reason == FinishReason.ERROR:
                state.error = _request_failure(output)
            self._deliver(state, finish_reason, stop_reason, result.request_outputs)
            if finish_reason is not None:
                if not output.finished:
                    result.reqs_to_abort.append(state.request_id)
                self._finish(state, finish_reason, iteration_stats)
        return result

    def update_scheduler_stats(self, scheduler_stats: SchedulerStats | None) -> None:
        """Add what only the frontend knows: requests per adapter."""
        if scheduler_stats is not None and self.log_stats:
            self._lora_states.copy_to(scheduler_stats)

    # ------------------------------------------------------------------ parts

    def _update_stats(
        self,
        state: RequestState,
        output: EngineCoreOutput,
        num_kept: int,
        core_timestamp: float,
        iteration: IterationStats,
    ) -> None:
        assert state.stats is not None
        if output.events:
            update_from_events(iteration, output.events, state.stats)
            if state.lora_name is not None:
                self._lora_states.update(state.lora_name, state.request_id, output.events)
        update_from_output(iteration, output, num_kept, core_timestamp, state.stats)

    def _deliver(
        self,
        state: RequestState,
        finish_reason: FinishReason | None,
        stop_reason: int | str | None,
        outputs: list[Output],
    ) -> None:
        output = state.make_output(finish_reason, stop_reason)
        if output is None:
            return
        if state.queue is not None:
            state.queue.put(output)
        else:
            outputs.append(output)

    def _finish(
        self,
        state: RequestState,
        finish_reason: FinishReason,
        iteration: IterationStats | None,
    ) -> None:
        parent = state.parent
        if parent is not None:
            parent.drop_child(state.request_id)
        self._free(state)
        finished = None
        if iteration is not None and state.stats is not None:
            finished = update_from_finished(
                iteration,
                state.stats,
                request_id=state.external_req_id,
                finish_reason=finish_reason,
                num_prompt_tokens=state.num_prompt_tokens,
                num_cached_tokens=state.num_cached_tokens or 0,
                max_tokens_param=state.max_tokens_param,
            )
            num_tokens = state.stats.num_generation_tokens
            if parent is None:
                iteration.n_params_iter.append(1)
                iteration.max_num_generation_tokens_iter.append(num_tokens)
            else:
                parent.observe_num_generation_tokens(num_tokens)
                if not parent.child_requests:
                    iteration.n_params_iter.append(parent.n)
                    iteration.max_num_generation_tokens_iter.append(
                        parent.max_num_generation_tokens
                    )
        if self._on_finished is not None:
            self._on_finished(state, finished, finish_reason)

    def _free(self, state: RequestState) -> None:
        """Forget a request: all of it or, if Ctrl-C comes, nothing, so that it can be repeated."""
        request_id, external_id, parent = state.request_id, state.external_req_id, state.parent
        if state.lora_name is not None:
            self._lora_states.finish(state.lora_name, request_id)
        siblings = [i for i in self.external_req_ids.get(external_id, ()) if i != request_id]
        # No calls from here on: Python looks for signals when a function is called or returns.
        if siblings:
            self.external_req_ids[external_id] = siblings
        elif external_id in self.external_req_ids:
            del self.external_req_ids[external_id]
        is_last = parent is not None and not parent.child_requests
        if parent is not None and is_last and parent.request_id in self.parent_requests:
            del self.parent_requests[parent.request_id]
        if request_id in self.request_states:
            del self.request_states[request_id]


def _request_failure(output: EngineCoreOutput) -> TellinError:
    reason = output.error or "the engine gave no reason"
    if output.error_is_client_fault:
        return RequestError(reason)
    return RequestFailedError(f"the request failed: {reason}")
