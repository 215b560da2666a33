"""One request inside the core: ids, limits, place in the life cycle, block table.

Knows nothing of text or tensors. The scheduler moves `status`, `KVCacheManager` owns `block_ids`,
and `append_output_token_ids` is the only way in which ids are added. Everything the per-step loops
read is a plain slot, kept up to date by its owner, so that a decode step touches no property.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tellin.protocol import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreRequest,
    FinishReason,
    LoRARequest,
    MultiModalFeature,
    PrefillStats,
)
from tellin.sampling_params import PoolingParams, SamplingParams

if TYPE_CHECKING:
    from tellin.core.structured_output import StructuredOutputRequest

TOKEN_WISE_TASKS = ("token_embed", "token_classify", "encode")
"""Pooling tasks that need the hidden state of every position."""

_UINT64_MASK = (1 << 64) - 1


class RequestStatus(enum.IntEnum):
    """Where a request is in its life. Everything after PREEMPTED is final."""

    WAITING = 0
    WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR = 1
    WAITING_FOR_REMOTE_KVS = 2
    WAITING_FOR_STREAMING_REQ = 3
    RUNNING = 4
    PREEMPTED = 5
    FINISHED_STOPPED = 6
    FINISHED_LENGTH_CAPPED = 7
    FINISHED_ABORTED = 8
    FINISHED_IGNORED = 9
    FINISHED_ERROR = 10
    FINISHED_REPETITION = 11

    @staticmethod
    def is_finished(status: RequestStatus) -> bool:
        return status > RequestStatus.PREEMPTED


_FINISH_REASONS = {
    RequestStatus.FINISHED_STOPPED: FinishReason.STOP,
    RequestStatus.FINISHED_LENGTH_CAPPED: FinishReason.LENGTH,
    RequestStatus.FINISHED_ABORTED: FinishReason.ABORT,
    RequestStatus.FINISHED_IGNORED: FinishReason.LENGTH,
    RequestStatus.FINISHED_ERROR: FinishReason.ERROR,
    RequestStatus.FINISHED_REPETITION: FinishReason.REPETITION,
}


class Request:
    """A request and all that the core knows about it.

    Lengths follow the specification's letters: ``num_prompt_tokens`` P, ``num_tokens`` T = P + O,
    ``num_computed_tokens`` C: positions ``[0, C)`` have their KV written, or scheduled to be.
    ``max_total_tokens`` is the number of tokens at which the length cap ends it.
    """

    __slots__ = (
        "_all_token_ids",
        "abort_immediately",
        "append_token_id",
        "arrival_rank",
        "arrival_time",
        "block_hashes",
        "block_ids",
        "cache_salt",
        "client_index",
        "decode_snapshot",
        "draft_kind",
        "error",
        "error_is_client_fault",
        "events",
        "first_output_pending",
        "has_fast_update",
        "in_flight_range",
        "is_drafting_over",
        "is_probing",
        "lora_generation",
        "lora_request",
        "max_tokens",
        "max_total_tokens",
        "min_tokens",
        "mm_features",
        "next_publish_at",
        "num_cached_blocks",
        "num_computed_tokens",
        "num_deferrals",
        "num_drafts_right",
        "num_drafts_wrong",
        "num_missing_at_start",
        "num_nans_in_logits",
        "num_overtaken",
        "num_preemptions",
        "num_prompt_tokens",
        "num_saved_tokens",
        "num_slots",
        "num_tokens",
        "pooling_params",
        "prefill_stats",
        "prefix_waiters",
        "priority",
        "prompt_embeds",
        "request_id",
        "rng_key",
        "sampling_params",
        "spec_token_ids",
        "state_save_points",
        "state_slot",
        "status",
        "stop_ids",
        "stop_reason",
        "structured_output_request",
        "trace_headers",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling_params: SamplingParams | None,
        pooling_params: PoolingParams | None,
        *,
        max_model_len: int,
        arrival_time: float = 0.0,
        client_index: int = 0,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
        lora_generation: int = 0,
        mm_features: list[MultiModalFeature] | None = None,
        cache_salt: str | None = None,
        trace_headers: dict[str, str] | None = None,
        rng_key: int = 0,
        log_events: bool = False,
        prompt_embeds: Any = None,
        abort_immediately: bool = False,
    ) -> None:
        if (sampling_params is None) == (pooling_params is None):
            raise ValueError("exactly one of sampling_params and pooling_params must be set")
        self.request_id = request_id
        self.client_index = client_index
        self.priority = priority
        self.arrival_time = arrival_time
        self.arrival_rank = -1  # set when it is queued first, kept ever after
        self.sampling_params = sampling_params
        self.pooling_params = pooling_params
        self.lora_request = lora_request
        self.lora_generation = lora_generation
        self.mm_features = mm_features or []
        self.prompt_embeds = prompt_embeds  # [num_prompt_tokens, hidden_size] f32; its ids are 0
        self.cache_salt = cache_salt
        self.trace_headers = trace_headers
        self.abort_immediately = abort_immediately
        self.structured_output_request: StructuredOutputRequest | None = None

        self.status = RequestStatus.WAITING
        self.stop_reason: int | str | None = None
        self.error: str | None = None
        self.error_is_client_fault = False
        self.events: list[EngineCoreEvent] | None = [] if log_events else None
        self.prefill_stats: PrefillStats | None = None
        self.num_nans_in_logits = 0
        self.num_preemptions = 0
        self.num_overtaken = 0
        self.num_deferrals = 0
        self.num_missing_at_start = 0  # of its present stay in the running set

        self._all_token_ids = list(prompt_token_ids)
        self.append_token_id = self._all_token_ids.append  # the caller counts num_tokens
        self.num_prompt_tokens = self.num_tokens = len(self._all_token_ids)
        self.num_computed_tokens = 0
        # Drafts for the next step, and how good earlier ones were: counts that fade, by kind.
        self.spec_token_ids: list[int] = []
        self.draft_kind = 0
        self.num_drafts_right = [0.0, 0.0]
        self.num_drafts_wrong = [0.0, 0.0]
        self.is_drafting_over = False
        self.is_probing = False

        self.max_tokens = 1
        self.min_tokens = 0
        self.stop_ids: frozenset[int] = frozenset()
        self.rng_key = rng_key & _UINT64_MASK
        if sampling_params is not None:
            self._read_sampling_params(sampling_params)
        self.max_total_tokens = min(max_model_len, self.num_prompt_tokens + self.max_tokens)

        # The block table; see KVCacheManager.
        self.block_ids: list[int] = []
        self.num_slots = 0
        self.block_hashes: list[bytes] = []
        self.num_cached_blocks = 0
        self.next_publish_at = 0

        # Its slot of recurrent states, and where that was or will be kept; see StateCacheManager.
        self.state_slot = -1
        self.state_save_points: list[int] = []
        self.num_saved_tokens = 0
        self.decode_snapshot: bytes | None = None

        # Requests that wait for blocks which this one is computing: (tokens needed, request).
        self.in_flight_range: tuple[int, int] | None = None
        self.prefix_waiters: list[tuple[int, Request]] = []

        self.first_output_pending = True
        self.has_fast_update = False

    def _read_sampling_params(self, params: SamplingParams) -> None:
        if params.max_tokens is None:
            raise ValueError("max_tokens must be resolved before a request reaches the core")
        self.max_tokens = params.max_tokens
        self.min_tokens = params.min_tokens
        stop_ids = set(params.stop_token_ids or ())
        if params.eos_token_id is not None:
            stop_ids.add(params.eos_token_id)
        self.stop_ids = frozenset(stop_ids)
        if params.seed is not None:
            self.rng_key = params.seed & _UINT64_MASK

    @classmethod
    def from_engine_core_request(
        cls,
        request: EngineCoreRequest,
        *,
        max_model_len: int,
        rng_key: int = 0,
        lora_generation: int = 0,
        log_events: bool = False,
    ) -> Request:
        """Build from the wire form. Raises ValueError when it is inconsistent."""
        token_ids, embeds = request.prompt_token_ids, request.prompt_embeds
        if token_ids is None:
            if embeds is None:
                raise ValueError("prompt_token_ids or prompt_embeds must be set")
            token_ids = [0] * len(embeds)
        return cls(
            request.request_id,
            token_ids,
            request.sampling_params,
            request.pooling_params,
            max_model_len=max_model_len,
            arrival_time=request.arrival_time,
            client_index=request.client_index,
            priority=request.priority,
            lora_request=request.lora_request,
            lora_generation=lora_generation,
            mm_features=request.mm_features,
            cache_salt=request.cache_salt,
            trace_headers=request.trace_headers,
            rng_key=rng_key,
            log_events=log_events,
            prompt_embeds=embeds,
            abort_immediately=request.abort_immediately,
        )

    def __repr__(self) -> str:  # never prompt contents in a log
        return (
            f"Request({self.request_id!r}, {self.status.name}, num_prompt_tokens="
            f"{self.num_prompt_tokens}, num_tokens={self.num_tokens}, "
            f"num_computed_tokens={self.num_computed_tokens}, num_blocks={len(self.block_ids)})"
        )

    # ------------------------------------------------------------------ token ids

    def append_output_token_ids(self, token_ids: int | list[int]) -> None:
        """Add sampled ids."""
        if isinstance(token_ids, int):
            self._all_token_ids.append(token_ids)
        else:
            self._all_token_ids.extend(token_ids)
        self.num_tokens = len(self._all_token_ids)

    @property
    def all_token_ids(self) -> Sequence[int]:
        """Prompt and outputs, a live read-only view."""
        return self._all_token_ids

    @property
    def prompt_token_ids(self) -> list[int]:
        return self._all_token_ids[: self.num_prompt_tokens]

    @property
    def output_token_ids(self) -> list[int]:
        return self._all_token_ids[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_tokens_with_spec(self) -> int:
        return self.num_tokens + len(self.spec_token_ids)

    # ------------------------------------------------------------------ derived facts

    @property
    def use_structured_output(self) -> bool:
        return self.structured_output_request is not None

    @property
    def lora_int_id(self) -> int:
        """Id of its adapter; 0 = none."""
        return self.lora_request.lora_int_id if self.lora_request is not None else 0

    @property
    def skip_reading_prefix_cache(self) -> bool:
        """Whether every position must be computed (it still publishes its own blocks).

        Prompt logprobs need each prompt position's logits, whatever was asked for, until they have
        been delivered.
        """
        params = self.sampling_params
        if params is not None:
            if params.prompt_logprobs is not None:
                return self.num_tokens == self.num_prompt_tokens
            return bool(params.skip_reading_prefix_cache)
        pooling = self.pooling_params
        assert pooling is not None
        if pooling.skip_reading_prefix_cache is not None:
            return pooling.skip_reading_prefix_cache
        return pooling.task in TOKEN_WISE_TASKS

    @property
    def is_finished(self) -> bool:
        return self.status > RequestStatus.PREEMPTED

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it ended; None while it lives."""
        return _FINISH_REASONS.get(self.status)

    def set_lora_generation(self, generation: int) -> None:
        """Which load of its adapter it uses; hashes made for another one are dropped."""
        if generation != self.lora_generation:
            self.lora_generation = generation
            self.block_hashes.clear()

    # ------------------------------------------------------------------ events

    def record_event(self, event_type: EngineCoreEventType) -> None:
        """Note an event if statistics are on; they leave with the next output."""
        if self.events is not None:
            self.events.append(EngineCoreEvent.now(event_type))
            self.has_fast_update = False

    def take_events(self) -> list[EngineCoreEvent] | None:
        if not self.events:
            return None
        events, self.events = self.events, []
        return events
