"""`Executor`: what the core knows of the workers that run the model.

Owns the choice of the executor class and the interface the core calls. It knows no model and no
arrays. Between `execute_model` and `sample_tokens` of one step no other call reaches a worker.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, ClassVar

from tellin.exceptions import InvalidParameterError, UnsupportedFeatureError
from tellin.trace import Span

if TYPE_CHECKING:
    from tellin.config import EngineConfig
    from tellin.protocol import LoRARequest
    from tellin.step_protocol import GrammarOutput, ModelRunnerOutput, SchedulerOutput

WorkerMethod = str | Callable[..., Any]


class Executor(ABC):
    """Runs steps on one or more workers.

    Life cycle: construct (weights are in place afterwards), `determine_available_memory`,
    `initialize_kv_cache`, steps, `shutdown`. A step is `execute_model` followed by `sample_tokens`.
    """

    uses_ray: ClassVar[bool] = False
    supports_pp: ClassVar[bool] = False

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self._failure_callback: Callable[[], None] | None = None
        self._failed = False

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        """Whether a step may be scheduled before the previous one's result is known."""
        return False

    @staticmethod
    def get_class(config: EngineConfig) -> type[Executor]:
        """Class for ``parallel_config.distributed_executor_backend``.

        A subclass of `Executor` stands for itself; ``"uni"`` is the in-process executor; any other
        dotted name is imported. None means ``"uni"`` for one worker.

        Raises:
            UnsupportedFeatureError: a backend, or a number of workers, that this build lacks.
            TypeError: the class named is not an `Executor`.
            InvalidParameterError: no such name.
        """
        backend = config.parallel_config.distributed_executor_backend
        if isinstance(backend, type):
            return _checked(backend)
        if backend is None:
            backend = "uni" if config.parallel_config.world_size == 1 else "mp"
        if not isinstance(backend, str):
            raise InvalidParameterError(
                "distributed_executor_backend must be a string or an Executor subclass, "
                f"got {backend!r}",
                parameter="distributed_executor_backend",
                value=backend,
            )
        if backend in ("mp", "ray", "external_launcher"):
            raise UnsupportedFeatureError(
                f"distributed_executor_backend={backend!r} is not available in this build; "
                "use 'uni' (one worker in the engine's process)"
            )
        if backend == "uni":
            if config.parallel_config.world_size != 1:
                raise UnsupportedFeatureError(
                    "distributed_executor_backend='uni' runs one worker, but tensor_parallel_size "
                    f"* pipeline_parallel_size is {config.parallel_config.world_size}; "
                    "set both to 1"
                )
            from tellin.executor.uniproc import UniProcExecutor

            return UniProcExecutor
        return _import_class(backend)

    # ------------------------------------------------------------------ life cycle

    @abstractmethod
    def kv_bytes_per_block(self) -> int:
        """Bytes of one KV block, all layers together, on the worker that needs most."""

    @abstractmethod
    def determine_available_memory(self) -> int:
        """Bytes the KV cache may take on the worker that has least."""

    @abstractmethod
    def initialize_kv_cache(self, num_blocks: int) -> None:
        """Make a pool of this many blocks; block 0 is the null block."""

    def state_bytes_per_slot(self) -> int:
        """Bytes of one request's recurrent state; 0 = the model has none."""
        return int(self._agreed("state_bytes_per_slot"))

    def initialize_state_cache(self, num_slots: int) -> None:
        """Make a pool of this many states; slot 0 is the null slot."""
        self.collective_rpc("initialize_state_cache", args=(num_slots,))

    @abstractmethod
    def shutdown(self) -> None:
        """Release workers, weights and pool. May be called again."""

    # ------------------------------------------------------------------ steps

    @abstractmethod
    def execute_model(
        self, scheduler_output: SchedulerOutput, non_block: bool = False
    ) -> Future[None] | None:
        """Run the forward pass of a step.

        With ``non_block`` return at once; the future ends when the pass has, and holds its
        exception if it raised one.
        """

    @abstractmethod
    def sample_tokens(self, grammar_output: GrammarOutput | None) -> ModelRunnerOutput:
        """Sample the step that `execute_model` ran; waits for it."""

    @abstractmethod
    def execute_dummy_batch(self) -> None:
        """Run a forward pass that has no effect."""

    # ------------------------------------------------------------------ control

    @abstractmethod
    def collective_rpc(
        self,
        method: WorkerMethod,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method on all workers, or a callable with each worker as its first argument.

        Returns:
            The results, by rank.

        Raises:
            UnknownMethodError: workers have no such method.
            TimeoutError: it took longer than ``timeout`` seconds.
        """

    @property
    @abstractmethod
    def is_sleeping(self) -> bool:
        """Whether `sleep` put something away that `wake_up` has not brought back."""

    @abstractmethod
    def sleep(self, level: int = 1) -> None:
        """Give memory back: level 1 the KV pool, level 2 the weights too."""

    @abstractmethod
    def wake_up(self, tags: list[str] | None = None) -> None:
        """Undo `sleep` for ``tags`` (``weights``, ``kv_cache``); None = everything."""

    @abstractmethod
    def check_health(self) -> None:
        """Raise `EngineError` if workers cannot run."""

    def profile(self, is_start: bool = True) -> list[Span]:
        """Start or stop the workers' profiler; when stopping, what their threads did."""
        return [
            span for spans in self.collective_rpc("profile", args=(is_start,)) for span in spans
        ]

    def add_lora(self, lora_request: LoRARequest, in_use: Collection[int] = ()) -> bool:
        """Load an adapter if it is not loaded; those ``in_use`` (ids) stay loaded."""
        return bool(self._agreed("add_lora", lora_request, in_use))

    def remove_lora(self, lora_id: int) -> bool:
        """Drop an adapter; False if it was not there."""
        return bool(self._agreed("remove_lora", lora_id))

    def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter loaded."""
        return bool(self._agreed("pin_lora", lora_id))

    def list_loras(self) -> set[int]:
        """Ids of the loaded adapters."""
        return set(self._agreed("list_loras"))

    @property
    def supported_tasks(self) -> tuple[str, ...]:
        """Tasks the loaded model can do."""
        return tuple(self._agreed("get_supported_tasks"))

    def load_tokenizer(self) -> Any:
        """The model's tokenizer, for grammars; loaded anew with every call."""
        from tellin.loading import load_tokenizer

        model_config = self.config.model_config
        return load_tokenizer(model_config.tokenizer_path or model_config.path)

    @property
    def vocab_size(self) -> int:
        """Columns of the model's logits."""
        return self.config.model_config.vocab_size

    @property
    def max_model_len(self) -> int:
        """Longest sequence the workers take, in tokens."""
        return self.config.scheduler_config.max_model_len

    def register_failure_callback(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called once when the workers fail; at once if they have already."""
        if self._failed:
            callback()
        else:
            self._failure_callback = callback

    def _fail(self) -> None:
        """Note that the workers are beyond use, and tell whoever asked to know."""
        self._failed = True
        callback, self._failure_callback = self._failure_callback, None
        if callback is not None:
            callback()

    def _agreed(self, method: str, *args: Any) -> Any:
        results = self.collective_rpc(method, args=args)
        if any(result != results[0] for result in results[1:]):
            raise RuntimeError(f"workers disagree about {method}: {results}")
        return results[0]


def _checked(candidate: Any) -> type[Executor]:
    if not (isinstance(candidate, type) and issubclass(candidate, Executor)):
        raise TypeError(
            f"distributed_executor_backend must be a subclass of Executor, got {candidate!r}"
        )
    return candidate


def _import_class(name: str) -> type[Executor]:
    module_name, _, class_name = name.rpartition(".")
    if not module_name:
        raise InvalidParameterError(
            f"unknown distributed_executor_backend {name!r}; use 'uni', a dotted class name "
            "or an Executor subclass",
            parameter="distributed_executor_backend",
            value=name,
        )
    try:
        candidate = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise InvalidParameterError(
            f"distributed_executor_backend {name!r} cannot be imported: {error}",
            parameter="distributed_executor_backend",
            value=name,
        ) from error
    return _checked(candidate)
