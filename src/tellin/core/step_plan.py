"""The step that is being put together, and then the step that is in flight.

Holds what `schedule` has decided so far, can take a request out again (priority preemption), and
becomes a `SchedulerOutput`. Afterwards it keeps the `Request` objects in scheduling order, so that
results find their requests even if one was aborted and its id reused in the meantime.
"""

from __future__ import annotations

from tellin.core.request import Request
from tellin.step_protocol import CachedRequestData, NewRequestData

NO_BLOCKS: list[int] = []
"""Shared by all records of a step in which nothing was added; never modified."""


class StepPlan:
    """Work of one step. ``budget`` is the number of tokens that may still be scheduled."""

    __slots__ = (
        "budget",
        "cached",
        "copies",
        "encoder_budget",
        "encoder_inputs",
        "new",
        "num_admitted_tokens",
        "num_encoder_rows",
        "num_scheduled_tokens",
        "num_total",
        "preempted_ids",
        "prefills",
        "requests",
        "spec_token_ids",
        "state_copies",
        "step_counter",
    )

    def __init__(self, budget: int, step_counter: int) -> None:
        self.budget = budget
        self.step_counter = step_counter
        self.num_total = 0
        self.num_admitted_tokens = 0
        self.requests: list[Request] = []
        self.num_scheduled_tokens: dict[str, int] = {}
        self.cached: list[CachedRequestData] = []
        self.new: list[NewRequestData] = []
        self.spec_token_ids: dict[str, list[int]] = {}
        self.copies: list[tuple[int, int]] = []
        self.state_copies: list[tuple[int, int]] = []
        self.preempted_ids: set[str] = set()
        self.encoder_budget = 0
        self.num_encoder_rows = 0
        self.encoder_inputs: dict[str, list[int]] = {}
        self.prefills: list[Request] = []
        """Running requests that have more than their last known id to feed."""

    def add_running(self, request: Request, num_new_tokens: int, new_block_ids: list[int]) -> None:
        """A running request gets ``num_new_tokens``; advances its ``num_computed_tokens``."""
        self.cached.append(
            CachedRequestData(
                request.request_id,
                new_block_ids,
                request.num_computed_tokens,
                request.num_tokens - request.num_prompt_tokens,
            )
        )
        self._count(request, num_new_tokens)

    def extend_running(self, request: Request, num_more_tokens: int, block_ids: list[int]) -> None:
        """A running request that is already in the plan gets some more."""
        for record in reversed(self.cached):
            if record.req_id == request.request_id:
                record.new_block_ids = record.new_block_ids + block_ids
                break
        self._count(request, num_more_tokens, is_new=False)

    def add_admitted(self, request: Request, num_new_tokens: int, resumed: bool) -> None:
        """A request that was admitted now; its block table goes to the worker as a whole."""
        token_ids = list(request.all_token_ids)
        self.num_admitted_tokens += num_new_tokens
        if resumed:
            self.cached.append(
                CachedRequestData(
                    request.request_id,
                    list(request.block_ids),
                    request.num_computed_tokens,
                    request.num_output_tokens,
                    resumed=True,
                    all_token_ids=token_ids,
                    state_slot=request.state_slot,
                )
            )
        else:
            self.new.append(
                NewRequestData(
                    request.request_id,
                    token_ids,
                    request.num_prompt_tokens,
                    request.sampling_params,
                    request.pooling_params,
                    list(request.block_ids),
                    request.num_computed_tokens,
                    request.rng_key,
                    request.lora_request,
                    request.mm_features or None,
                    request.prompt_embeds,
                    state_slot=request.state_slot,
                )
            )
        self._count(request, num_new_tokens)

    def _count(self, request: Request, num_new_tokens: int, is_new: bool = True) -> None:
        request.num_computed_tokens += num_new_tokens
        self.budget -= num_new_tokens
        if is_new:
            self.requests.append(request)
            self.num_scheduled_tokens[request.request_id] = num_new_tokens
        else:
            self.num_scheduled_tokens[request.request_id] += num_new_tokens

    def take_out(self, request: Request) -> None:
        """Undo `add_running` for a request that was preempted after it was planned."""
        request_id = request.request_id
        num_tokens = self.num_scheduled_tokens.pop(request_id, None)
        if num_tokens is None:
            return
        self.budget += num_tokens
        self.spec_token_ids.pop(request_id, None)
        self.requests.remove(request)
        self.cached[:] = [record for record in self.cached if record.req_id != request_id]
