"""What crosses between the shell and the core: msgspec structs, and nothing else.

Owns the types of requests going down and outputs coming up. They hold ids, parameters and arrays,
never text and never a model. Field order is the wire order (positional msgpack arrays), so new
fields go to the end, with a default.
"""

from __future__ import annotations

import enum
import time
from typing import Any

import msgspec

from tellin.checks import check_int, check_str
from tellin.exceptions import InvalidParameterError
from tellin.sampling_params import PoolingParams, SamplingParams
from tellin.step_protocol import LogprobsLists


class FinishReason(enum.IntEnum):
    """Why a request ended. ``str()`` gives the external (OpenAI) spelling."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3
    REPETITION = 4

    def __str__(self) -> str:
        return self.name.lower()


class EngineCoreRequestType(enum.Enum):
    """First byte of a message to a core process."""

    ADD = b"\x00"
    ABORT = b"\x01"
    START_DP_WAVE = b"\x02"
    UTILITY = b"\x03"
    EXECUTOR_FAILED = b"\x04"  # sentinel inside the core process, never on the wire
    WAKEUP = b"\x05"  # likewise


class EngineCoreEventType(enum.IntEnum):
    QUEUED = 1
    SCHEDULED = 2
    PREEMPTED = 3


class EngineCoreEvent(msgspec.Struct, array_like=True, gc=False):
    """Something that happened to a request inside the core.

    ``timestamp`` is ``time.monotonic()`` of the core: compare it only with other core timestamps.
    """

    type: EngineCoreEventType
    timestamp: float

    @classmethod
    def now(cls, event_type: EngineCoreEventType) -> EngineCoreEvent:
        return cls(event_type, time.monotonic())


class LoRARequest(msgspec.Struct, array_like=True, frozen=True):
    """Names an adapter. Equality and hash use the name only."""

    lora_name: str
    lora_int_id: int
    lora_path: str
    base_model_name: str | None = None
    load_inplace: bool = False

    def __post_init__(self) -> None:
        for name in ("lora_name", "lora_path"):
            if not check_str(name, getattr(self, name)):
                raise InvalidParameterError(f"{name} must not be empty", parameter=name, value="")
        check_int("lora_int_id", self.lora_int_id, 1)

    @property
    def name(self) -> str:
        return self.lora_name

    @property
    def path(self) -> str:
        return self.lora_path

    @property
    def adapter_id(self) -> int:
        return self.lora_int_id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LoRARequest) and self.lora_name == other.lora_name

    def __hash__(self) -> int:
        return hash(self.lora_name)


class MultiModalFeature(msgspec.Struct, array_like=True):
    """One multimodal item of a prompt.

    ``offset`` and ``length`` give its span in prompt tokens, marks around and between its parts
    included; ``embed_runs`` says which positions of the span stand for rows of the encoder's
    output, as ``(start, count)`` relative to ``offset``, ascending (None = all). ``identifier`` is
    the key of its encoder output. ``data`` is what the encoder takes (of an image: pixels,
    ``[num_tiles, num_patches, patch_dim]`` u8), or None when the receiver already caches it under
    ``mm_hash``. ``grid``: rows and columns that its embedding rows count their positions by.
    ``shapes``: of each tile's rows, where tiles have shapes of their own.
    """

    modality: str
    identifier: str
    offset: int
    length: int
    data: Any = None
    mm_hash: str | None = None
    embed_runs: list[tuple[int, int]] | None = None
    grid: tuple[int, int] | None = None
    shapes: list[tuple[int, int]] | None = None

    @property
    def num_embeds(self) -> int:
        """Rows that the encoder makes of it."""
        if self.embed_runs is None:
            return self.length
        return sum(count for _, count in self.embed_runs)

    def embeds_in(self, start: int, end: int) -> list[tuple[int, int, int]]:
        """Embedding rows at prompt positions ``[start, end)``.

        Returns:
            Runs ``(position, row, count)``: row ``row + i`` of its encoder output belongs to prompt
            position ``position + i``.
        """
        runs, row = [], 0
        for run_start, count in self.embed_runs or [(0, self.length)]:
            first = self.offset + run_start
            low, high = max(first, start), min(first + count, end)
            if low < high:
                runs.append((low, row + low - first, high - low))
            row += count
        return runs


class EngineCoreRequest(msgspec.Struct, array_like=True, omit_defaults=True):
    """A request as the core sees it. Exactly one of the two params is set.

    ``request_id`` is the internal id (external id + ``-`` + 8 hex characters) once assigned.
    ``arrival_time`` is wall clock seconds of the frontend.
    """

    request_id: str
    prompt_token_ids: list[int] | None
    mm_features: list[MultiModalFeature] | None
    sampling_params: SamplingParams | None
    pooling_params: PoolingParams | None
    arrival_time: float
    lora_request: LoRARequest | None = None
    cache_salt: str | None = None
    data_parallel_rank: int | None = None
    prompt_embeds: Any = None
    prompt_is_token_ids: list[bool] | None = None
    client_index: int = 0
    current_wave: int = 0
    priority: int = 0
    trace_headers: dict[str, str] | None = None
    resumable: bool = False
    external_req_id: str | None = None
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: dict[str, Any] | None = None
    abort_immediately: bool = False
    mm_hashes_to_drop: list[str] | None = None
    """Items that the receiver need not keep after this request."""

    @property
    def params(self) -> SamplingParams | PoolingParams:
        """The one set of parameters that is set."""
        params = self.sampling_params if self.sampling_params is not None else self.pooling_params
        assert params is not None, "a request has sampling or pooling params"
        return params


class PrefillStats(msgspec.Struct, array_like=True, omit_defaults=True):
    """How the prompt was obtained, in tokens; sent once, with the first output."""

    num_prompt_tokens: int = 0
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_local_cached_tokens: int = 0
    num_external_cached_tokens: int = 0


class EngineCoreOutput(msgspec.Struct, array_like=True, omit_defaults=True):
    """What one request produced in one step.

    ``error`` carries the reason when ``finish_reason`` is ERROR.
    """

    request_id: str
    new_token_ids: list[int]
    new_logprobs: LogprobsLists | None = None
    new_prompt_logprobs: LogprobsLists | None = None
    pooling_output: Any = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    events: list[EngineCoreEvent] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    trace_headers: dict[str, str] | None = None
    prefill_stats: PrefillStats | None = None
    num_nans_in_logits: int = 0
    error: str | None = None
    error_is_client_fault: bool = False

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


class CacheStats(msgspec.Struct, array_like=True, omit_defaults=True):
    """Hits since the previous report, in tokens (prefix cache) or items (multimodal cache)."""

    reset: bool = False
    requests: int = 0
    queries: int = 0
    hits: int = 0
    preempted_requests: int = 0
    preempted_queries: int = 0
    preempted_hits: int = 0


class SpecDecodingStats(msgspec.Struct, array_like=True, omit_defaults=True):
    """Speculation since the previous report."""

    num_spec_tokens: int
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = msgspec.field(default_factory=list)
    num_draft_tokens_per_pos: list[int] = msgspec.field(default_factory=list)


class KVCacheEvictionEvent(msgspec.Struct, array_like=True):
    """Sampled residency of one evicted block, in seconds."""

    lifetime_s: float
    idle_s: float
    reuse_gaps_s: list[float]


class SchedulerStats(msgspec.Struct, omit_defaults=True):
    """State of the core after one step. Gauges, except the nested stats, which are deltas."""

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    num_skipped_waiting_reqs: int = 0
    step_counter: int = 0
    current_wave: int = 0
    kv_cache_usage: float = 0.0
    prefix_cache_stats: CacheStats | None = None
    kv_cache_eviction_events: list[KVCacheEvictionEvent] = msgspec.field(default_factory=list)
    spec_decoding_stats: SpecDecodingStats | None = None
    waiting_lora_adapters: dict[str, int] = msgspec.field(default_factory=dict)
    running_lora_adapters: dict[str, int] = msgspec.field(default_factory=dict)
    num_scheduled_tokens: int = 0
    step_time_s: float = 0.0
    model_time_s: float = 0.0
    num_prefill_tokens: int = 0
    """Of ``num_scheduled_tokens``, those of prompts (and of what is computed again)."""


class BlockState(enum.IntEnum):
    """What a KV block is, to somebody who watches."""

    FREE = 0
    CACHED = 1
    """Nobody refers to it, but its content is in the prefix cache and can be used again."""
    USED = 2
    """One request refers to it."""
    SHARED = 3
    """Several requests do."""


class RequestSnapshot(msgspec.Struct, array_like=True):
    """One live request, without anything of its text.

    ``state``: decode, prefill, waiting, preempted, or blocked (it waits for its grammar, its
    adapter, or a prefix that another request is computing). ``age_s`` counts from its arrival.
    """

    request_id: str
    state: str
    age_s: float
    num_prompt_tokens: int
    num_computed_tokens: int
    num_output_tokens: int
    max_tokens: int
    num_blocks: int
    num_preemptions: int
    priority: int


class EngineCoreSnapshot(msgspec.Struct):
    """A core between two steps.

    ``timestamp`` is its monotonic clock; ``block_states`` holds one `BlockState` per usable KV
    block, in the order of ids. ``requests`` may be cut off; the counts are not.
    """

    timestamp: float
    step_counter: int
    num_running_reqs: int
    num_waiting_reqs: int
    num_blocked_reqs: int
    num_preemptions: int
    is_paused: bool
    block_size: int
    block_states: bytes
    requests: list[RequestSnapshot] = msgspec.field(default_factory=list)


class UtilityOutput(msgspec.Struct, array_like=True, omit_defaults=True):
    """Reply to a utility call. A failure has ``error_type`` and ``failure_message``."""

    call_id: int
    failure_message: str | None = None
    error_type: str | None = None
    result: Any = None


class EngineCoreOutputs(msgspec.Struct, array_like=True, omit_defaults=True):
    """One batch for one client: request outputs, a utility reply, or a wave notice."""

    engine_index: int = 0
    outputs: list[EngineCoreOutput] = msgspec.field(default_factory=list)
    scheduler_stats: SchedulerStats | None = None
    timestamp: float = 0.0
    utility_output: UtilityOutput | None = None
    finished_requests: set[str] | None = None
    wave_complete: int | None = None
    start_wave: int | None = None

    def __post_init__(self) -> None:
        if self.timestamp == 0.0:
            self.timestamp = time.monotonic()


class EngineCoreReady(msgspec.Struct, omit_defaults=True):
    """What a core tells its clients once it can serve."""

    tellin_version: str
    max_model_len: int
    num_kv_blocks: int
    block_size: int
    dtype: str
    world_size: int = 1
    data_parallel_size: int = 1
    kv_cache_size_tokens: int | None = None
    kv_cache_max_concurrency: float | None = None
    supported_tasks: list[str] = msgspec.field(default_factory=lambda: ["generate"])
    isa: str = ""
    num_threads: int = 0
