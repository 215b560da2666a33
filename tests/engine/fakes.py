"""A scripted core, and engines around it: the shell without a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tellin.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from tellin.engine.llm_engine import LLMEngine
from tellin.loading.tokenizer import Tokenizer
from tellin.protocol import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreReady,
    EngineCoreRequest,
    FinishReason,
    PrefillStats,
    SchedulerStats,
)
from tellin.settings import Settings
from tests.engine.tokenizers_for_tests import get

Script = Callable[[EngineCoreRequest], Sequence[Any]]
"""For a request: what it outputs in each step, a list of ids, or keyword arguments of
`EngineCoreOutput`. The last one is finished with reason length unless it says otherwise."""


def make_config(tokenizer: Tokenizer | None = None, **overrides: Any) -> EngineConfig:
    """A configuration for a tokenizer. ``overrides``: sub-configs, or fields of the model's."""
    tokenizer = tokenizer or get("byte_level")
    model: dict[str, Any] = {
        "model": "test-model",
        "path": Path("/nowhere"),
        "architecture": "llama",
        "max_model_len": 64,
        "vocab_size": tokenizer.vocab_size + 4,
        "tokenizer_size": tokenizer.vocab_size,
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "eos_token_ids": (tokenizer.eos_token_id,),
        "bos_token_id": tokenizer.bos_token_id,
    }
    fields = set(ModelConfig.__dataclass_fields__)
    model |= {name: value for name, value in overrides.items() if name in fields}
    model["own_chat_template"] = model.get("chat_template")
    parts: dict[str, Any] = {
        "model_config": ModelConfig(**model),
        "cache_config": CacheConfig(num_kv_blocks=33),
        "scheduler_config": SchedulerConfig(max_model_len=model["max_model_len"]),
        "parallel_config": ParallelConfig(),
        "settings": Settings.from_environ({}),
    }
    parts |= {name: value for name, value in overrides.items() if name not in fields}
    return EngineConfig(**parts)


class FakeClient:
    """Plays a script per request, one entry per step, and records every call in order."""

    def __init__(self, config: EngineConfig, script: Script, log_stats: bool) -> None:
        self.config = config
        self.script = script
        self.log_stats = log_stats
        self.calls: list[tuple[Any, ...]] = []
        self.requests: list[EngineCoreRequest] = []
        self.live: dict[str, list[Any]] = {}
        self.utilities: dict[str, Any] = {
            "get_supported_tasks": ["generate"],
            "is_sleeping": False,
            "list_loras": [1, 2],
            "reset_prefix_cache": True,
        }
        self.fail_on_add: Exception | None = None
        self.fail_on_add_number = 0
        self.clock = 100.0
        self.is_closed = False
        self.ready = EngineCoreReady(
            tellin_version="test",
            max_model_len=config.model_config.max_model_len,
            num_kv_blocks=33,
            block_size=16,
            dtype="float32",
        )

    def names(self) -> list[str]:
        """Names of the calls made so far."""
        return [call[0] for call in self.calls]

    def add_request(self, request: EngineCoreRequest) -> None:
        self.calls.append(("add_request", request.request_id))
        if self.fail_on_add is not None and len(self.requests) >= self.fail_on_add_number:
            raise self.fail_on_add
        self.requests.append(request)
        self.live[request.request_id] = list(self.script(request))

    def abort_requests(self, request_ids: list[str]) -> None:
        self.calls.append(("abort_requests", list(request_ids)))
        for request_id in request_ids:
            self.live.pop(request_id, None)

    def get_output(self, timeout: float | None = None) -> EngineCoreOutputs:
        self.calls.append(("get_output",))
        self.clock += 1.0
        outputs = [self._next(request_id, steps) for request_id, steps in self.live.items()]
        for output in outputs:
            if output.finished:
                del self.live[output.request_id]
        if not outputs:
            return EngineCoreOutputs()
        stats = SchedulerStats(num_running_reqs=len(self.live)) if self.log_stats else None
        return EngineCoreOutputs(outputs=outputs, scheduler_stats=stats, timestamp=self.clock)

    def _next(self, request_id: str, steps: list[Any]) -> EngineCoreOutput:
        request = next(r for r in self.requests if r.request_id == request_id)
        is_first = len(steps) == len(self.script(request))
        entry = steps.pop(0)
        fields = dict(entry) if isinstance(entry, dict) else {"new_token_ids": list(entry)}
        if not steps:
            fields.setdefault("finish_reason", FinishReason.LENGTH)
        if is_first:
            num_prompt = len(request.prompt_token_ids or ())
            fields.setdefault("prefill_stats", PrefillStats(num_prompt, num_prompt, 0))
            if self.log_stats:
                fields["events"] = [
                    EngineCoreEvent(EngineCoreEventType.QUEUED, self.clock - 0.5),
                    EngineCoreEvent(EngineCoreEventType.SCHEDULED, self.clock - 0.25),
                ]
        return EngineCoreOutput(request_id=request_id, **fields)

    def call_utility(self, method: str, *args: Any) -> Any:
        self.calls.append((method, *args))
        result = self.utilities.get(method)
        if isinstance(result, Exception):
            raise result
        return result

    def dp_engines_running(self) -> bool:
        return False

    def shutdown(self, timeout: float | None = None) -> None:
        self.calls.append(("shutdown",))
        self.is_closed = True


class EngineMaker:
    """Builds engines whose core is a `FakeClient`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch
        self.client: FakeClient
        self.make_client_calls: list[dict[str, Any]] = []

    def __call__(
        self,
        script: Script | Sequence[Any] = (),
        *,
        tokenizer: Tokenizer | None = None,
        log_stats: bool = False,
        config: EngineConfig | None = None,
        client_class: type[FakeClient] = FakeClient,
        **overrides: Any,
    ) -> LLMEngine:
        tokenizer = tokenizer or get("byte_level")
        config = config or make_config(tokenizer, **overrides)
        play = script if callable(script) else lambda request: script

        def make_client(**kwargs: Any) -> FakeClient:
            self.make_client_calls.append(kwargs)
            self.client = client_class(kwargs["config"], play, kwargs["log_stats"])
            return self.client

        module = "tellin.engine.llm_engine."
        self.monkeypatch.setattr(module + "EngineCoreClient.make_client", make_client)
        loaded = None if config.model_config.skip_tokenizer_init else tokenizer
        self.monkeypatch.setattr(module + "load_engine_tokenizer", lambda config: loaded)
        return LLMEngine(config, log_stats=log_stats)


def text_ids(text: str, kind: str = "byte_level") -> list[int]:
    """Ids of a text, without special tokens."""
    return get(kind).encode(text, add_special_tokens=False)


def run(engine: LLMEngine) -> list[Any]:
    """The driving loop of the specification (1.15): all outputs, in order."""
    outputs: list[Any] = []
    for _ in range(1000):
        if not engine.has_unfinished_requests():
            return outputs
        outputs += engine.step()
    raise AssertionError("the loop does not end")
