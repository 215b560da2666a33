"""What crosses between the scheduler and a worker in one step.

The scheduler sends a `SchedulerOutput`; the worker answers with a `ModelRunnerOutput`. All that a
worker knows about requests follows from the stream of `SchedulerOutput`s it has seen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from tellin.protocol import LoRARequest, MultiModalFeature
    from tellin.sampling_params import PoolingParams, SamplingParams


class LogprobsLists(msgspec.Struct, array_like=True):
    """Log-probabilities of k consecutive positions of one request.

    Every inner list starts with the sampled (or actual prompt) token and goes on with the top
    tokens by value. ``sampled_token_ranks`` are 1-based ranks over the vocabulary.
    """

    logprob_token_ids: list[list[int]]
    logprobs: list[list[float]]
    sampled_token_ranks: list[int]

    def __len__(self) -> int:
        return len(self.logprob_token_ids)

    def slice(self, start: int, stop: int) -> LogprobsLists:
        """Copy of positions ``[start, stop)``."""
        return LogprobsLists(
            self.logprob_token_ids[start:stop],
            self.logprobs[start:stop],
            self.sampled_token_ranks[start:stop],
        )


class NewRequestData(msgspec.Struct):
    """A request the worker has not seen before.

    ``rng_key`` seeds its counter-based randomness: the user's seed, or a random key drawn at
    admission. ``token_ids`` are all known ids (prompt, then outputs if it was preempted before its
    first step). ``state_slot`` is its slot of recurrent states; -1 = the model has none.
    """

    req_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    sampling_params: SamplingParams | None
    pooling_params: PoolingParams | None
    block_ids: list[int]
    num_computed_tokens: int
    rng_key: int
    lora_request: LoRARequest | None = None
    mm_features: list[MultiModalFeature] | None = None
    prompt_embeds: Any = None
    state_slot: int = -1

    def __repr__(self) -> str:  # never prompt contents in a log
        return (
            f"NewRequestData({self.req_id!r}, num_tokens={len(self.token_ids)}, "
            f"num_blocks={len(self.block_ids)}, num_computed_tokens={self.num_computed_tokens})"
        )


class CachedRequestData(msgspec.Struct):
    """A request the worker already knows.

    ``new_block_ids`` are appended to its block table, or replace it when ``resumed`` (it was
    preempted; then ``all_token_ids`` holds every known id, and ``state_slot`` is its new slot of
    recurrent states). ``num_computed_tokens`` is the value before this step.
    """

    req_id: str
    new_block_ids: list[int]
    num_computed_tokens: int
    num_output_tokens: int
    resumed: bool = False
    all_token_ids: list[int] | None = None
    state_slot: int = -1


class SchedulerOutput(msgspec.Struct):
    """One step's work.

    ``num_scheduled_tokens`` is ordered: running requests first, then newly admitted ones; grammar
    bitmask rows and outputs follow that order. ``scheduled_spec_decode_tokens`` lists the draft ids
    that follow a request's last known token. ``finished_req_ids`` may be dropped by the worker
    before anything else is applied; an id may be in it and be new again in the same step. Likewise
    an id may be preempted and resumed in the same step. ``kv_block_copies`` are ``(source,
    destination)`` KV blocks of all layers, to be copied one after the other, in this order, before
    the forward pass. After the step up to ``num_spec_tokens_to_schedule`` ids are drafted for each
    request, or as many as ``spec_token_limits`` says of it. Before anything is encoded, the encoder
    outputs named by ``free_encoder_mm_hashes`` are dropped; then the items of each request that
    ``scheduled_encoder_inputs`` lists (indices into its ``mm_features``) are encoded and kept under
    their identifiers. An identifier may be in both, and is encoded anew then.

    Of models with recurrent states: ``state_copies`` are (source, destination) slots to be copied,
    one after the other, before anything is computed; ``state_saves`` lists (request id, number of
    tokens, slot): the state after so many of the request's tokens is also written to that slot.
    ``state_moves`` are requests whose state lies in another slot from now on: where drafts were
    rejected, in that of the last token before them.
    """

    scheduled_new_reqs: list[NewRequestData]
    scheduled_cached_reqs: list[CachedRequestData]
    num_scheduled_tokens: dict[str, int]
    total_num_scheduled_tokens: int
    scheduled_spec_decode_tokens: dict[str, list[int]]
    finished_req_ids: set[str]
    preempted_req_ids: set[str]
    structured_output_req_ids: list[str] = msgspec.field(default_factory=list)
    num_spec_tokens_to_schedule: int = 0
    step_counter: int = 0
    kv_block_copies: list[tuple[int, int]] = msgspec.field(default_factory=list)
    spec_token_limits: dict[str, int] = msgspec.field(default_factory=dict)
    scheduled_encoder_inputs: dict[str, list[int]] = msgspec.field(default_factory=dict)
    free_encoder_mm_hashes: list[str] = msgspec.field(default_factory=list)
    state_copies: list[tuple[int, int]] = msgspec.field(default_factory=list)
    state_saves: list[tuple[str, int, int]] = msgspec.field(default_factory=list)
    state_moves: dict[str, int] = msgspec.field(default_factory=dict)

    @classmethod
    def make_empty(cls) -> SchedulerOutput:
        """A step that schedules nothing."""
        return cls([], [], {}, 0, {}, set(), set())


class GrammarOutput(msgspec.Struct):
    """Token masks for the constrained requests of a step.

    ``bitmask`` is an int32 array ``[rows, ceil(vocab_size / 32)]``, least significant bit first, 1
    = allowed. Request ``req_ids[i]`` owns ``num_rows[i]`` consecutive rows: one per scheduled draft
    plus one.
    """

    req_ids: list[str]
    num_rows: list[int]
    bitmask: Any


class ModelRunnerOutput(msgspec.Struct):
    """Result of one step.

    ``sampled_token_ids[i]`` belongs to ``req_ids[i]``; empty when the request did not reach its
    last known token. ``logprobs[i]`` describes exactly these ids. ``prompt_logprobs`` appears once
    per request that asked, with the step that samples its first token. ``errors`` maps a request to
    the reason why it alone failed; ``client_errors`` are those of them that are the client's fault.
    ``model_time_s`` is what the forward pass and sampling took. ``draft_token_ids`` are proposals
    for the next step; ``draft_time_s`` is what drafting took besides. A layer of the model that
    drafts reads in every step: its time is there without drafts, too.
    """

    req_ids: list[str]
    sampled_token_ids: list[list[int]]
    logprobs: list[LogprobsLists | None] | None = None
    prompt_logprobs: dict[str, LogprobsLists] = msgspec.field(default_factory=dict)
    pooler_output: dict[str, Any] = msgspec.field(default_factory=dict)
    num_nans_in_logits: dict[str, int] = msgspec.field(default_factory=dict)
    errors: dict[str, str] = msgspec.field(default_factory=dict)
    client_errors: set[str] = msgspec.field(default_factory=set)
    draft_token_ids: dict[str, list[int]] = msgspec.field(default_factory=dict)
    model_time_s: float = 0.0
    draft_time_s: float = 0.0
