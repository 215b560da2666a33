"""Drives an `EngineCore` on the fake executor and collects what each request got."""

from __future__ import annotations

from typing import Any

from tellin.core.engine_core import EngineCore
from tellin.protocol import EngineCoreOutput, FinishReason, MultiModalFeature
from tests.core.fakes import FakeExecutor, lone_run, make_config, make_request


class Driver:
    """An engine core, its fake executor, and the outputs so far."""

    def __init__(
        self,
        log_stats: bool = False,
        executor_class: type[FakeExecutor] = FakeExecutor,
        **config: Any,
    ) -> None:
        self.config = make_config(**config)
        self.core = EngineCore(self.config, executor_class, log_stats)  # type: ignore[arg-type]
        assert isinstance(self.core.executor, FakeExecutor)
        self.executor: FakeExecutor = self.core.executor
        assert self.core.scheduler is not None
        self.scheduler = self.core.scheduler
        self.tokens: dict[str, list[int]] = {}
        self.finish: dict[str, FinishReason] = {}
        self.last: dict[str, EngineCoreOutput] = {}
        self.outputs: dict[str, list[EngineCoreOutput]] = {}
        self.stats: list[Any] = []
        self.prompts: dict[str, list[int]] = {}
        self.features: dict[str, list[MultiModalFeature]] = {}

    def add(self, request_id: str, prompt: list[int], max_tokens: int = 4, **kwargs: Any) -> None:
        request = make_request(request_id, prompt, max_tokens, **kwargs)
        self.core.add_request(self.core.preprocess_add_request(request))
        self.prompts[request_id] = prompt
        self.features[request_id] = kwargs.get("mm_features") or []
        self.tokens[request_id] = []
        self.outputs[request_id] = []
        self.finish.pop(request_id, None)

    def step(self) -> dict[str, int]:
        """One step; returns what was scheduled."""
        num_steps = len(self.executor.outputs)
        batches, executed = self.core.step()
        for batch in batches.values():
            if batch.scheduler_stats is not None:
                self.stats.append(batch.scheduler_stats)
            for output in batch.outputs:
                self.take(output)
        if executed:
            return dict(self.executor.outputs[num_steps].num_scheduled_tokens)
        return {}

    def take(self, output: EngineCoreOutput) -> None:
        request_id = output.request_id
        assert request_id not in self.finish, f"{request_id} goes on after its end"
        self.tokens[request_id] += output.new_token_ids
        self.outputs[request_id].append(output)
        self.last[request_id] = output
        if output.finish_reason is not None:
            self.finish[request_id] = output.finish_reason

    def run(self, max_steps: int = 10_000) -> list[dict[str, int]]:
        """Step until nothing is unfinished; returns what each step scheduled."""
        steps = []
        while self.scheduler.has_unfinished_requests() or self.scheduler.has_requests():
            assert len(steps) < max_steps, "the engine makes no progress"
            steps.append(self.step())
        return steps

    def check_idle(self) -> None:
        """Nothing of any request is left."""
        scheduler = self.scheduler
        pool = scheduler.kv_cache_manager.pool
        assert pool.get_num_free_blocks() == pool.num_usable_blocks
        assert not scheduler.requests
        assert not scheduler.running
        assert len(scheduler.room) == 0
        assert len(scheduler.in_flight_prefixes) == 0
        assert not scheduler.room._deferred
        cache = scheduler.encoder_inputs.cache
        assert cache.num_freeable_slots == cache.cache_size
        assert not self.core.has_work()

    def check_lone(self, request_id: str, max_tokens: int) -> None:
        """The request got exactly what it gets alone."""
        prompt, features = self.prompts[request_id], self.features[request_id]
        assert self.tokens[request_id] == lone_run(prompt, max_tokens, features)
