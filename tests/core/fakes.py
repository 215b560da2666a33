"""A stand-in for the executor: a "model" whose next id is a function of the ids it really read.

It keeps KV as the worker does: a slot per position, written only for scheduled positions and read
through the block table. If the scheduler ever lets a request read a slot that holds another token,
or one that was never written, the fake fails at once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tellin.config import (
    CacheConfig,
    EngineConfig,
    LoRAConfig,
    ModelConfig,
    MultiModalConfig,
    ParallelConfig,
    ReasoningConfig,
    SchedulerConfig,
    SpeculativeConfig,
    StructuredOutputsConfig,
)
from tellin.protocol import EngineCoreRequest, MultiModalFeature
from tellin.sampling_params import SamplingParams
from tellin.settings import Settings
from tellin.step_protocol import GrammarOutput, LogprobsLists, ModelRunnerOutput, SchedulerOutput

VOCAB_SIZE = 1000
EOS = 999


def next_id(token_ids: list[int]) -> int:
    """The fake model: the id that follows ``token_ids``; never EOS."""
    data = ",".join(map(str, token_ids)).encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=4).digest(), "little") % 900


def lone_run(
    prompt: list[int], max_tokens: int, features: list[MultiModalFeature] | None = None
) -> list[int]:
    """What a request must get whatever else happens."""
    ids = contents(prompt, features or [])
    for _ in range(max_tokens):
        ids.append(next_id(ids))
    return ids[len(prompt) :]


@dataclass
class Mirror:
    """What a worker knows of one request."""

    token_ids: list[int]
    num_prompt_tokens: int
    block_ids: list[int]
    num_computed_tokens: int
    params: Any = None
    features: list[MultiModalFeature] = field(default_factory=list)
    state_slot: int = -1


def contents(token_ids: list[int], features: list[MultiModalFeature]) -> list[int]:
    """What the fake model reads: ids, and in place of placeholders the rows of images."""
    result = list(token_ids)
    for item in features:
        for position, row, count in item.embeds_in(0, len(result)):
            for i in range(count):
                result[position + i] = image_row(item.identifier, row + i)
    return result


def image_row(identifier: str, row: int) -> int:
    """Stands for a row of an image's encoder output; never an id."""
    data = f"{identifier}:{row}".encode()
    return -1 - int.from_bytes(hashlib.blake2b(data, digest_size=6).digest(), "little")


@dataclass
class FakeExecutor:
    """Implements the executor interface for `EngineCore`, checking everything it is told."""

    config: EngineConfig
    available_memory: int = 1 << 30
    fail_on_step: Callable[[SchedulerOutput], Exception | None] | None = None
    request_errors: dict[str, str] = field(default_factory=dict)
    healthy: bool = True

    def __post_init__(self) -> None:
        self.block_size = self.config.cache_config.block_size
        self.kv: dict[tuple[int, int], tuple[int, int]] = {}  # (block, offset) -> (position, id)
        self.requests: dict[str, Mirror] = {}
        self.outputs: list[SchedulerOutput] = []
        self.encoded: dict[str, int] = {}  # identifier -> rows: the workers' encoder cache
        self.num_encoded = 0
        self.encoder_errors: set[str] = set()  # identifiers that cannot be encoded
        self.num_blocks = 0
        self.sleep_level: int | None = None
        self.asleep: set[str] = set()
        self.was_shut_down = 0
        self.supported_tasks = ("generate",)
        self.vocab_size = VOCAB_SIZE
        self.max_model_len = self.config.model_config.max_model_len
        self.loras: set[int] = set()
        self.rpcs: list[tuple[Any, tuple[Any, ...]]] = []
        self.draft: Callable[[str, list[int], int], list[int]] | None = None
        self.model_time_s = self.draft_time_s = 0.0  # of a step
        self.num_computed = 0
        self.sampled: Callable[[str, list[int]], int] | None = None
        self.grammar_output: GrammarOutput | None = None
        self.row_in_request = 0  # which of a request's mask rows the token being sampled obeys
        self._work: list[tuple[str, Mirror, list[int], int]] = []
        self._step: SchedulerOutput | None = None

    # ------------------------------------------------------------------ start and end

    def register_failure_callback(self, callback: Callable[[], None]) -> None:
        self.failure_callback = callback

    def kv_bytes_per_block(self) -> int:
        return 1024

    def state_bytes_per_slot(self) -> int:
        return 0

    def determine_available_memory(self) -> int:
        return self.available_memory

    def initialize_kv_cache(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks

    def check_health(self) -> None:
        if not self.healthy:
            raise RuntimeError("the executor is broken")

    def shutdown(self) -> None:
        self.was_shut_down += 1

    @property
    def is_sleeping(self) -> bool:
        return bool(self.asleep)

    def sleep(self, level: int) -> None:
        self.sleep_level = level
        self.asleep = {"weights", "kv_cache"}
        self.kv.clear()

    def wake_up(self, tags: list[str] | None) -> None:
        self.asleep -= set(tags) if tags is not None else self.asleep

    def collective_rpc(
        self, method: Any, timeout: float | None = None, args: Any = (), kwargs: Any = None
    ) -> list[Any]:
        self.rpcs.append((method, tuple(args)))
        return [{"isa": "fake", "num_threads": 1} if method == "get_info" else None]

    def load_tokenizer(self) -> Any:
        raise RuntimeError("the fake has no tokenizer")

    def add_lora(self, request: Any, in_use: Any = ()) -> bool:
        self.rpcs.append(("add_lora", (request.lora_name,)))
        if request.lora_path == "missing":
            raise ValueError(f"no adapter at {request.lora_path}")
        self.loras.add(request.lora_int_id)
        return True

    def remove_lora(self, lora_id: int) -> bool:
        self.rpcs.append(("remove_lora", (lora_id,)))
        self.loras.discard(lora_id)
        return True

    def list_loras(self) -> set[int]:
        return self.loras

    # ------------------------------------------------------------------ a step

    def execute_model(self, step: SchedulerOutput, non_block: bool = False) -> Future[None] | None:
        if self.fail_on_step is not None and (error := self.fail_on_step(step)) is not None:
            raise error
        assert self._step is None, "execute_model twice without sample_tokens"
        self.outputs.append(step)
        self._step = step
        self._apply(step)
        self._encode(step)
        self._forward(step)
        return None

    def _apply(self, step: SchedulerOutput) -> None:
        for request_id in step.finished_req_ids:
            self.requests.pop(request_id, None)
        for request_id in step.preempted_req_ids:
            if request_id in self.requests:
                self.requests[request_id].block_ids = []
        for source, destination in step.kv_block_copies:
            for offset in range(self.block_size):
                self.kv.pop((destination, offset), None)
                if (source, offset) in self.kv:
                    self.kv[destination, offset] = self.kv[source, offset]
        for new in step.scheduled_new_reqs:
            assert new.req_id not in self.requests, f"{new.req_id} is new, but known"
            self.requests[new.req_id] = Mirror(
                list(new.token_ids),
                new.num_prompt_tokens,
                list(new.block_ids),
                new.num_computed_tokens,
                new.sampling_params,
                new.mm_features or [],
                new.state_slot,
            )
        for request_id, slot in step.state_moves.items():
            self.requests[request_id].state_slot = slot
        for cached in step.scheduled_cached_reqs:
            mirror = self.requests[cached.req_id]
            if cached.resumed:
                assert cached.all_token_ids is not None
                mirror.token_ids = list(cached.all_token_ids)
                mirror.block_ids = list(cached.new_block_ids)
                mirror.state_slot = cached.state_slot
            else:
                assert mirror.block_ids, f"{cached.req_id} runs, but was preempted"
                mirror.block_ids += cached.new_block_ids
            mirror.num_computed_tokens = cached.num_computed_tokens
            num_output = len(mirror.token_ids) - mirror.num_prompt_tokens
            assert cached.num_output_tokens == num_output, f"{cached}: {num_output}"

    def _encode(self, step: SchedulerOutput) -> None:
        for identifier in step.free_encoder_mm_hashes:
            self.encoded.pop(identifier, None)
        for request_id, indices in step.scheduled_encoder_inputs.items():
            for index in indices:
                item = self.requests[request_id].features[index]
                assert item.data is not None
                assert item.identifier not in self.encoded, f"{item.identifier} is encoded twice"
                if item.identifier in self.encoder_errors:
                    self.request_errors[request_id] = "the image cannot be encoded"
                    continue
                self.encoded[item.identifier] = item.num_embeds
                self.num_encoded += 1
        multimodal = self.config.multimodal_config
        if multimodal is not None:
            assert sum(self.encoded.values()) <= multimodal.encoder_cache_size

    def _check_parts(self, item: MultiModalFeature, start: int, num_tokens: int) -> None:
        """Rows that see each other are computed in one step."""
        multimodal = self.config.multimodal_config
        if multimodal is None or not multimodal.rows_see_each_other:
            return
        for run, count in item.embed_runs or [(0, item.length)]:
            first = item.offset + run
            inside = [first < at < first + count for at in (start, start + num_tokens)]
            assert inside == [False, False], f"{item.identifier} is cut: {start}, {num_tokens}"

    def _forward(self, step: SchedulerOutput) -> None:
        writes: set[tuple[int, int]] = set()
        work = []
        assert sum(step.num_scheduled_tokens.values()) == step.total_num_scheduled_tokens
        for request_id, num_tokens in step.num_scheduled_tokens.items():
            mirror = self.requests[request_id]
            ids = mirror.token_ids + step.scheduled_spec_decode_tokens.get(request_id, [])
            ids = contents(ids, mirror.features)
            start = mirror.num_computed_tokens
            for item in mirror.features:
                if item.embeds_in(start, start + num_tokens):
                    found = self.encoded.get(item.identifier)
                    known = found == item.num_embeds or item.identifier in self.encoder_errors
                    assert known, f"{request_id}: {item.identifier} is not encoded"
                self._check_parts(item, start, num_tokens)
            assert 0 < num_tokens <= len(ids) - start, f"{request_id} is fed beyond its ids"
            for position in range(start, start + num_tokens):
                slot = self._slot(mirror, position)
                assert slot not in writes, f"{request_id}: slot {slot} is written twice in a step"
                writes.add(slot)
                self.kv[slot] = (position, ids[position])
                self.num_computed += 1
            work.append((request_id, mirror, ids, start + num_tokens))
        for request_id, mirror, ids, end in work:
            self._check_context(request_id, mirror, ids, end)
        self._work = work

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> ModelRunnerOutput:
        step, self._step = self._step, None
        assert step is not None, "sample_tokens without execute_model"
        self.grammar_output = grammar_output
        sampled: list[list[int]] = []
        drafts: dict[str, list[int]] = {}
        for request_id, mirror, ids, end in self._work:
            tokens = self._sample(request_id, mirror, ids, end)
            sampled.append(tokens)
            mirror.token_ids += tokens
            mirror.num_computed_tokens = end
            limit = step.spec_token_limits.get(request_id, step.num_spec_tokens_to_schedule)
            if self.draft is not None and tokens and limit:
                drafts[request_id] = self.draft(request_id, list(mirror.token_ids), limit)
        errors = {i: e for i, e in self.request_errors.items() if i in step.num_scheduled_tokens}
        return ModelRunnerOutput(
            list(step.num_scheduled_tokens),
            sampled,
            logprobs=self._logprobs(step, sampled),
            errors=errors,
            draft_token_ids=drafts,
            model_time_s=self.model_time_s,
            draft_time_s=self.draft_time_s,
        )

    def _slot(self, mirror: Mirror, position: int) -> tuple[int, int]:
        block_id = mirror.block_ids[position // self.block_size]
        assert 0 < block_id < max(self.num_blocks, 2), f"block {block_id} does not exist"
        return block_id, position % self.block_size

    def _check_context(self, request_id: str, mirror: Mirror, ids: list[int], end: int) -> None:
        for position in range(end):
            found = self.kv.get(self._slot(mirror, position))
            expected = (position, ids[position])
            assert found == expected, f"{request_id} reads {found} instead of {expected}"

    def _sample(self, request_id: str, mirror: Mirror, ids: list[int], end: int) -> list[int]:
        num_known = len(mirror.token_ids)
        if end < num_known:
            return []
        choose = self.sampled or (lambda _, known: next_id(known))
        tokens: list[int] = []
        for self.row_in_request, position in enumerate(range(num_known, end + 1)):
            tokens.append(choose(request_id, ids[:position]))
            if position < end and ids[position] != tokens[-1]:
                break  # the draft there is wrong
        return tokens

    def _logprobs(
        self, step: SchedulerOutput, sampled: list[list[int]]
    ) -> list[LogprobsLists | None]:
        result: list[LogprobsLists | None] = []
        for request_id, tokens in zip(step.num_scheduled_tokens, sampled, strict=True):
            params = self.requests[request_id].params
            if params is None or params.logprobs is None:
                result.append(None)
            else:
                result.append(
                    LogprobsLists(
                        [[t] for t in tokens], [[-float(t)] for t in tokens], [1] * len(tokens)
                    )
                )
        return result


class StatefulExecutor(FakeExecutor):
    """A model with recurrent states: a state is the ids that made it, and must be the right ones.

    The memory holds ``max_slots`` of them, the null slot included.
    """

    max_slots = 24

    def state_bytes_per_slot(self) -> int:
        return 1 << 20

    def determine_available_memory(self) -> int:
        num_kv_blocks = self.config.cache_config.num_kv_blocks or 0
        return (self.max_slots << 20) + num_kv_blocks * self.kv_bytes_per_block()

    def initialize_state_cache(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.states: dict[int, list[int]] = {}

    def sleep(self, level: int) -> None:
        super().sleep(level)
        self.states.clear()

    def _forward(self, step: SchedulerOutput) -> None:
        super()._forward(step)
        for source, target in step.state_copies:
            assert 0 < target < self.num_slots
            self.states[target] = list(self.states[source])
        slots = [self.requests[i].state_slot for i in step.num_scheduled_tokens]
        slots += [slot for _, _, slot in step.state_saves]
        assert len(set(slots)) == len(slots), f"a slot is written twice: {slots}"
        assert all(0 < slot < self.num_slots for slot in slots)
        saves = list(step.state_saves)
        for request_id, mirror, ids, end in self._work:
            start = mirror.num_computed_tokens
            state = self.states.get(mirror.state_slot, []) if start else []
            assert state == ids[:start], f"{request_id} goes on from {state} at {start}"
            for _, num_tokens, slot in [save for save in saves if save[0] == request_id]:
                assert start < num_tokens <= end, f"{request_id} does not pass {num_tokens}"
                self.states[slot] = ids[:num_tokens]
            self.states[mirror.state_slot] = ids[:end]
        assert {i for i, _, _ in saves} <= step.num_scheduled_tokens.keys()


SETTINGS = Settings(home=Path("unused"), check_invariants=True)


def make_config(
    *,
    block_size: int = 4,
    num_kv_blocks: int | None = 64,
    max_model_len: int = 64,
    max_num_batched_tokens: int = 32,
    max_num_seqs: int = 8,
    enable_prefix_caching: bool = True,
    lora_config: LoRAConfig | None = None,
    speculative_config: SpeculativeConfig | None = None,
    structured_outputs_config: StructuredOutputsConfig | None = None,
    model: dict[str, Any] | None = None,
    cache: dict[str, Any] | None = None,
    settings: Settings = SETTINGS,
    reasoning_config: ReasoningConfig | None = None,
    multimodal_config: MultiModalConfig | None = None,
    **scheduler: Any,
) -> EngineConfig:
    """A small configuration for the fake executor."""
    return EngineConfig(
        model_config=ModelConfig(
            model="fake",
            path=Path("fake"),
            architecture="fake",
            max_model_len=max_model_len,
            vocab_size=VOCAB_SIZE,
            tokenizer_size=VOCAB_SIZE,
            hidden_size=8,
            num_hidden_layers=1,
            **(model or {}),
        ),
        cache_config=CacheConfig(
            block_size=block_size,
            num_kv_blocks=num_kv_blocks,
            enable_prefix_caching=enable_prefix_caching,
            **(cache or {}),
        ),
        scheduler_config=SchedulerConfig(
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            **scheduler,
        ),
        parallel_config=ParallelConfig(),
        settings=settings,
        structured_outputs_config=structured_outputs_config or StructuredOutputsConfig(),
        lora_config=lora_config,
        speculative_config=speculative_config,
        reasoning_config=reasoning_config,
        multimodal_config=multimodal_config,
    )


def make_request(
    request_id: str,
    prompt: list[int],
    max_tokens: int = 4,
    *,
    arrival_time: float = 0.0,
    priority: int = 0,
    client_index: int = 0,
    cache_salt: str | None = None,
    lora_request: Any = None,
    mm_features: list[MultiModalFeature] | None = None,
    abort_immediately: bool = False,
    **params: Any,
) -> EngineCoreRequest:
    """A request as it comes from the shell."""
    return EngineCoreRequest(
        request_id,
        prompt,
        mm_features,
        SamplingParams(max_tokens=max_tokens, **params),
        None,
        arrival_time,
        lora_request=lora_request,
        cache_salt=cache_salt,
        client_index=client_index,
        priority=priority,
        abort_immediately=abort_immediately,
    )
