"""`Worker`: one model with its weights, its KV pool and its runner.

Owns opening the model, how much memory the pool may take, and putting weights and pool away and
back. Between `sleep` and `wake_up` the parts that were put away really are gone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from tellin.exceptions import (
    EngineError,
    InvalidParameterError,
    OutOfMemoryError,
    UnsupportedFeatureError,
)
from tellin.kernels.batch import StepBatch
from tellin.trace import Span
from tellin.worker.backends import Backend, open_backend
from tellin.worker.classifier import open_classifier
from tellin.worker.dense_layers import open_dense_layers
from tellin.worker.image_encoder import open_image_encoder
from tellin.worker.image_inputs import ENCODE_IMAGES, ImageInputs
from tellin.worker.lora import AdapterBackend, LoRAManager
from tellin.worker.memory import process_memory, resident_bytes
from tellin.worker.model_runner import ModelRunner
from tellin.worker.profiler import OperationProfile, ProfiledBackend

if TYPE_CHECKING:
    from tellin.config import EngineConfig
    from tellin.models.plan.ir import Plan
    from tellin.protocol import LoRARequest
    from tellin.step_protocol import GrammarOutput, ModelRunnerOutput, SchedulerOutput

logger = logging.getLogger("tellin.worker")

WAKE_TAGS = ("weights", "kv_cache")


class Worker:
    """Runs steps of one model in this process.

    Args:
        config: everything resolved.
        backend: a ready backend, for tests; None = open ``config.model_config.path``.
    """

    def __init__(self, config: EngineConfig, backend: Backend | None = None) -> None:
        self.config = config
        self._given_backend = backend is not None
        self._num_kv_blocks = 0
        self._num_state_slots = 0
        self._asleep: set[str] = set()
        self._profiled: ProfiledBackend | None = None
        self._operations: list[OperationProfile] = []
        backend = backend or open_backend(config, config.model_config.path)
        encoder = open_image_encoder(config)
        images = None if encoder is None else ImageInputs(encoder)
        pooler = config.model_config.pooler_config
        classifier = None
        if pooler is not None and pooler.num_labels:
            classifier = open_classifier(config.model_config.path, pooler)
        dense = None
        if pooler is not None and pooler.embedding_size is not None:
            dense = open_dense_layers(config.model_config.path, pooler.embedding_size)
        self.runner = ModelRunner(config, backend, images, classifier, dense)

    @property
    def model_runner(self) -> ModelRunner:
        """What runs the model's steps."""
        return self.runner

    # ------------------------------------------------------------------ memory

    def kv_bytes_per_block(self) -> int:
        """Bytes of one KV block, all layers together."""
        return self.runner.kv_bytes_per_block()

    def state_bytes_per_slot(self) -> int:
        """Bytes of one request's recurrent state, all layers together; 0 = the model has none."""
        return self.runner.backend.state_bytes_per_slot()

    def determine_available_memory(self) -> int:
        """Bytes the pools of KV and of states may take together, weights being in place.

        Raises:
            OutOfMemoryError: what the configuration asks for is not there.
        """
        cache = self.config.cache_config
        memory = process_memory()
        if cache.kv_cache_memory_bytes is not None:
            if cache.kv_cache_memory_bytes > memory.available:
                raise OutOfMemoryError(
                    f"kv_cache_memory_bytes is {cache.kv_cache_memory_bytes}, but only "
                    f"{memory.available} bytes are available; lower it"
                )
            return cache.kv_cache_memory_bytes
        if cache.memory_utilization is None:
            return memory.available // 2
        wanted = int(memory.total * cache.memory_utilization) - resident_bytes()
        wanted -= self._lora_bytes()
        if wanted <= 0:
            raise OutOfMemoryError(
                f"memory_utilization is {cache.memory_utilization:g} of {memory.total} bytes, "
                f"which the weights alone exceed ({resident_bytes()} bytes in use); raise it"
            )
        return min(wanted, memory.available)

    def _lora_bytes(self) -> int:
        """What adapters may take: each is there as it was read, and in its slot if it is used."""
        config = self.config.lora_config
        if config is None:
            return 0
        plan: Plan = self.runner.backend.plan  # type: ignore[attr-defined]
        widths = sum(num_in + num_out for num_in, num_out in plan.lora_sites.values())
        return 4 * config.max_lora_rank * widths * (config.max_loras + config.max_cpu_loras)

    def initialize_kv_cache(self, num_blocks: int) -> None:
        """Make the pool. Its memory is touched only as it is used."""
        self._num_kv_blocks = num_blocks
        self.runner.init_kv_cache(num_blocks)

    def initialize_state_cache(self, num_slots: int) -> None:
        """Make the pool of recurrent states. Its memory is touched only as it is used."""
        self._num_state_slots = num_slots
        self.runner.backend.init_state_cache(num_slots)

    # ------------------------------------------------------------------ steps

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        """Run the forward pass of a step. One without tokens only forgets what has ended.

        Raises:
            EngineError: the worker sleeps and the step has tokens.
        """
        if self._asleep and scheduler_output.total_num_scheduled_tokens:
            raise EngineError(
                f"the worker sleeps ({', '.join(sorted(self._asleep))} put away); "
                "call wake_up first"
            )
        self.runner.execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> ModelRunnerOutput:
        """Sample the step whose forward pass ran last."""
        return self.runner.sample_tokens(grammar_output)

    def execute_dummy_batch(self) -> None:
        """A forward pass of one token in the null block and slot: no effect on any request."""
        if self._asleep or self._num_kv_blocks == 0:
            return
        zero, one = np.zeros(1, np.int32), np.ones(1, np.int32)
        table = np.zeros((1, 1), np.int32)
        step = StepBatch(zero, zero, np.array([0, 1], np.int32), one, table, zero)
        if self._num_state_slots:
            step = replace(step, state_slots=zero)
        self.runner.backend.forward(step)

    # ------------------------------------------------------------------ sleep

    @property
    def is_sleeping(self) -> bool:
        """Whether something is put away."""
        return bool(self._asleep)

    def sleep(self, level: int = 1) -> None:
        """Give memory back. The caller has seen to it that no request is running.

        Args:
            level: 0 does nothing here; 1 drops the pools; 2 drops the weights too.
        """
        if level not in (0, 1, 2):
            raise InvalidParameterError(
                f"sleep level must be 0, 1 or 2, got {level!r}", parameter="level", value=level
            )
        drops_weights = level == 2 and "weights" not in self._asleep
        if drops_weights and self._profiled is not None:
            raise EngineError("the profiler is running; stop it before sleep level 2")
        if drops_weights and self._given_backend:
            raise UnsupportedFeatureError(
                "sleep level 2 needs a model that the worker opened itself"
            )
        if level >= 1 and "kv_cache" not in self._asleep:
            self.runner.free_kv_cache()
            self._asleep.add("kv_cache")
        if drops_weights:
            self.runner.release_backend()
            self._asleep.add("weights")

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Bring back what sleeps.

        Args:
            tags: of `WAKE_TAGS`; None = all. ``scheduling`` is the core's and ignored here.
        """
        for tag in tags or WAKE_TAGS:
            if tag not in (*WAKE_TAGS, "scheduling"):
                raise InvalidParameterError(
                    f"wake_up tags are {', '.join(WAKE_TAGS)}, got {tag!r}",
                    parameter="tags",
                    value=tag,
                )
            if tags is not None and tag in WAKE_TAGS and tag not in self._asleep:
                logger.warning("wake_up: %s does not sleep; ignored", tag)
        wanted = set(tags or WAKE_TAGS) & self._asleep
        if "weights" in wanted:
            self.runner.adopt_backend(open_backend(self.config, self.config.model_config.path))
            if self.runner.images is not None:
                self.runner.images.encoder = open_image_encoder(self.config)
            self._asleep.discard("weights")
        if "kv_cache" in wanted and "weights" not in self._asleep:
            self.runner.init_kv_cache(self._num_kv_blocks)
            if self._num_state_slots:
                self.runner.backend.init_state_cache(self._num_state_slots)
            self._asleep.discard("kv_cache")

    # ------------------------------------------------------------------ control

    def get_supported_tasks(self) -> tuple[str, ...]:
        """Tasks of the loaded model."""
        if self.runner.pooler is None:
            return ("generate",)
        if self.config.model_config.runner_type == "pooling":
            return self.runner.pooler.tasks
        # Both: one row of logits is the price of a vector, so not one per token.
        return ("generate", "embed")

    def check_health(self) -> None:
        """Raise `EngineError` if the worker cannot run. One that lives in this process can."""

    def get_info(self) -> dict[str, Any]:
        """What the backend says of itself: instruction set, threads, bytes of weights."""
        return dict(self.runner.backend.info)

    def apply_model(self, func: Callable[[Any], Any]) -> Any:
        """``func`` of the model: the backend that runs it, with its ``plan`` and ``info``."""
        return func(self.runner.backend)

    def profile(self, is_start: bool = True) -> list[Span]:
        """Start or stop to profile steps.

        Returns:
            When stopping, what each thread did since the start; `operation_profile` has the sums.

        Raises:
            EngineError: it runs already, or does not run.
        """
        if is_start:
            self._profiled = ProfiledBackend(self.runner.backend)
            if self.runner.images is not None:
                self.runner.images.set_profile(True)
            self.runner.replace_backend(cast("Backend", self._profiled))
            return []
        if self._profiled is None:
            raise EngineError("the profiler is not running")
        profiled, self._profiled = self._profiled, None
        spans, self._operations = profiled.finish()
        if self.runner.images is not None:
            encoding = self.runner.images.set_profile(False)
            spans += encoding
            if encoding:
                seconds = sum(span.duration_ns for span in encoding) / 1e9
                self._operations.insert(0, OperationProfile(ENCODE_IMAGES, seconds))
        self.runner.replace_backend(profiled.wrapped)
        return spans

    def operation_profile(self) -> list[dict[str, Any]]:
        """What the operations of the plan cost in the last profile: `OperationProfile` as dicts."""
        return [asdict(operation) for operation in self._operations]

    # ------------------------------------------------------------------ adapters

    def add_lora(self, lora_request: LoRARequest, in_use: Collection[int] = ()) -> bool:
        """Load an adapter, if it is not loaded; also while the model sleeps.

        Args:
            in_use: ids of adapters that live requests need, which must stay.

        Raises:
            UnsupportedFeatureError: the engine was started without LoRA.
            AdapterError: it cannot be loaded; nothing has changed.
        """
        backend = cast("AdapterBackend | None", self.runner.model)
        return self._lora(lora_request.lora_name).add(lora_request, backend, in_use)

    def remove_lora(self, lora_id: int) -> bool:
        """Drop an adapter; False if it is not loaded."""
        backend = cast("AdapterBackend | None", self.runner.model)
        return self.runner.lora is not None and self.runner.lora.remove(lora_id, backend)

    def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter loaded until it is removed.

        Raises:
            UnsupportedFeatureError: the engine was started without LoRA.
            AdapterError: it is not loaded.
        """
        return self._lora(str(lora_id)).pin(lora_id)

    def list_loras(self) -> list[int]:
        """Ids of the loaded adapters."""
        return [] if self.runner.lora is None else self.runner.lora.list()

    def _lora(self, name: str) -> LoRAManager:
        if self.runner.lora is None:
            raise UnsupportedFeatureError(
                f"LoRA is off, so adapter {name} cannot be used; start the engine with "
                "enable_lora=True"
            )
        return self.runner.lora

    def shutdown(self) -> None:
        """Release weights and pool. May be called again."""
        self.runner.release_backend()
