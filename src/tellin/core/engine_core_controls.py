"""What may be asked of a core besides running requests: pause, sleep, caches, adapters, calls.

The part of `EngineCore` that clients call by name. It holds the core's parts and says who is alive;
the order of a step is none of its business.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from tellin.config import EngineConfig
from tellin.core.kv_events import KVEventBatch
from tellin.core.request import RequestStatus
from tellin.core.scheduler import PauseState, Scheduler
from tellin.core.snapshot import make_snapshot
from tellin.core.structured_output import StructuredOutputManager
from tellin.exceptions import AdapterError, EngineDeadError, EngineError, InvalidParameterError
from tellin.protocol import EngineCoreReady, EngineCoreSnapshot, LoRARequest
from tellin.trace import ScopeRecorder, trace_path, write_trace

if TYPE_CHECKING:
    from tellin.executor.executor import Executor

PAUSE_MODES = ("abort", "wait", "keep")


class EngineCoreControls:
    """The parts of a core, and the utility calls on them."""

    config: EngineConfig
    ready: EngineCoreReady

    def __init__(self) -> None:
        self.executor: Executor | None = None
        self.scheduler: Scheduler | None = None
        self.structured_output_manager: StructuredOutputManager | None = None
        self._death: str | None = None
        self._waiting_pauses: list[tuple[Future[None], bool]] = []  # and if each clears the cache
        self._lora_generations: dict[str, int] = {}
        self._loaded_loras: dict[int, tuple[str, str]] = {}
        self._retiring_loras: dict[int, LoRARequest] = {}  # removed, but in use
        self.scopes = ScopeRecorder()
        self._trace_prefix: str | None = None

    # ------------------------------------------------------------------ who is alive

    def _executor(self) -> Executor:
        if self.executor is None:
            raise EngineDeadError("it was shut down")
        return self.executor

    def _live(self) -> tuple[Scheduler, StructuredOutputManager]:
        if self.scheduler is None or self.structured_output_manager is None:
            raise EngineDeadError("it was shut down")
        if self._death is not None:
            raise EngineDeadError(self._death)
        return self.scheduler, self.structured_output_manager

    # ------------------------------------------------------------------ pause, sleep, caches

    def pause_scheduler(self, mode: str = "abort", clear_cache: bool = True) -> Future[None] | None:
        """Stop admitting requests; new ones are queued.

        ``abort`` ends every request (their last outputs come with the next step), ``keep`` freezes
        them, ``wait`` lets those that run finish and returns a future that is done when they have.

        Raises:
            InvalidParameterError: unknown mode.
            EngineError: ``wait`` for requests that are frozen, while the executor sleeps.
        """
        if mode not in PAUSE_MODES:
            raise InvalidParameterError(
                f"mode must be one of {list(PAUSE_MODES)}, got {mode!r}",
                parameter="mode",
                value=mode,
            )
        scheduler, _ = self._live()
        previous = scheduler.pause_state
        if mode == "keep":
            scheduler.set_pause_state(PauseState.PAUSED_ALL)
        else:
            scheduler.set_pause_state(PauseState.PAUSED_NEW)
        if mode == "wait" and self._executor().is_sleeping and scheduler.has_unfinished_requests():
            scheduler.set_pause_state(previous)
            raise EngineError(
                "the engine sleeps and keeps requests that cannot finish meanwhile; call wake_up() "
                "first, or use mode='keep' or 'abort'"
            )
        if mode == "abort":
            scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED, emit=True)
        if mode == "wait" and scheduler.has_unfinished_requests():
            future: Future[None] = Future()
            self._waiting_pauses.append((future, clear_cache))
            return future
        if clear_cache:
            self._clear_caches()
        return None

    def _finish_pause(self, future: Future[None], clear_cache: bool) -> None:
        try:
            if clear_cache:
                self._clear_caches()
        except Exception as error:
            future.set_exception(error)
        else:
            future.set_result(None)

    def run_idle_callbacks(self) -> None:
        """Called by the driving loop when there is no work."""
        pauses, self._waiting_pauses = self._waiting_pauses, []
        for future, clear_cache in pauses:
            self._finish_pause(future, clear_cache)

    def _clear_caches(self) -> None:
        self.reset_prefix_cache(reset_running_requests=True)
        self.reset_mm_cache()
        self.reset_encoder_cache()

    def resume_scheduler(self) -> None:
        """Undo `pause_scheduler`; a pause that still waits for requests fails.

        Raises:
            EngineError: the executor sleeps, and would fail every step.
        """
        scheduler, _ = self._live()
        if self._executor().is_sleeping:
            raise EngineError("the engine sleeps: call wake_up(), which resumes it too")
        scheduler.set_pause_state(PauseState.UNPAUSED)
        pauses, self._waiting_pauses = self._waiting_pauses, []
        for future, _ in pauses:
            future.set_exception(EngineError("it was resumed before its requests had finished"))

    def is_scheduler_paused(self) -> bool:
        return self._live()[0].pause_state is not PauseState.UNPAUSED

    def sleep(self, level: int = 1, mode: str = "abort") -> Future[None] | None:
        """Pause; from level 1 on also give back the KV cache, from level 2 on the weights.

        Raises:
            InvalidParameterError: unknown level or mode.
            EngineError: the executor cannot sleep so deep now; scheduling goes on as before.
        """
        if level not in (0, 1, 2):
            raise InvalidParameterError(
                f"level must be 0, 1 or 2, got {level!r}", parameter="level", value=level
            )
        previous = self._live()[0].pause_state
        pending = self.pause_scheduler(mode, clear_cache=level >= 1)
        if level == 0:
            return pending
        if pending is None:
            self._put_away(level, previous)
            return None
        done: Future[None] = Future()

        def asleep(paused: Future[None]) -> None:
            try:
                paused.result()
                self._put_away(level, previous)
            except Exception as error:
                done.set_exception(error)
            else:
                done.set_result(None)

        pending.add_done_callback(asleep)
        return done

    def _put_away(self, level: int, previous: PauseState) -> None:
        executor = self._executor()
        try:
            executor.sleep(level)
        except Exception:
            if not executor.is_sleeping:  # else a step could not run
                self._live()[0].set_pause_state(previous)
            raise

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Undo `sleep`. Scheduling resumes once all of the executor is awake.

        Raises:
            InvalidParameterError: a tag other than weights, kv_cache, scheduling.
        """
        unknown = set(tags or ()) - {"weights", "kv_cache", "scheduling"}
        if unknown:
            raise InvalidParameterError(
                f"tags must be among weights, kv_cache and scheduling, got {sorted(unknown)}",
                parameter="tags",
                value=tags,
            )
        executor = self._executor()
        executor_tags = None if tags is None else [tag for tag in tags if tag != "scheduling"]
        if executor.is_sleeping and (executor_tags is None or executor_tags):
            executor.wake_up(executor_tags)
        if not executor.is_sleeping:
            self.resume_scheduler()

    def is_sleeping(self) -> bool:
        return self.is_scheduler_paused() or bool(self._executor().is_sleeping)

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Forget cached KV blocks; False while blocks are in use (see the scheduler).

        ``reset_connector`` also clears an external KV store; without one that part succeeds.
        """
        return self._live()[0].reset_prefix_cache(reset_running_requests)

    def reset_mm_cache(self) -> None:
        """Forget processed multimodal items. The core keeps none: what receives requests does."""

    def reset_encoder_cache(self) -> None:
        """Forget encoder outputs; what prompts in progress still need is encoded again."""
        self._live()[0].encoder_inputs.cache.reset()

    def take_kv_events(self) -> KVEventBatch:
        """What the prefix cache stored and dropped since the last call, for outside routers."""
        recorder = self._live()[0].kv_cache_manager.events
        rank = self.config.parallel_config.data_parallel_rank
        return KVEventBatch(time.time(), recorder.take() if recorder is not None else [], rank)

    # ------------------------------------------------------------------ pass-through

    def profile(self, is_start: bool = True, prefix: str | None = None) -> str | None:
        """Start to record phases, plan operations and threads, or stop and write the trace.

        Args:
            prefix: of the trace's path; what was given at the start counts if none is at the end.

        Returns:
            When stopping, the absolute path of the trace.
        """
        spans = self._executor().profile(is_start)
        if is_start:
            self._trace_prefix = prefix
            self.scopes.start()
            return None
        path = trace_path(prefix or self._trace_prefix)
        write_trace(path, "engine core", self.scopes.finish() + spans)
        return str(path)

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        return self._executor().collective_rpc(method, timeout, tuple(args), kwargs or {})

    def execute_dummy_batch(self) -> None:
        self._executor().execute_dummy_batch()

    def get_snapshot(self) -> EngineCoreSnapshot:
        """Requests and KV blocks as they are between two steps."""
        return make_snapshot(self._live()[0])

    def get_supported_tasks(self) -> tuple[str, ...]:
        return tuple(self.ready.supported_tasks)

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter. What was cached under its name before is not served any more.

        Raises:
            AdapterError: it cannot be loaded, or one that is being removed has its name or id.
        """
        added = self._load_lora(lora_request)
        name = lora_request.lora_name
        self._lora_generations[name] = self._lora_generations.get(name, 0) + 1
        return added

    def _load_lora(self, lora_request: LoRARequest) -> bool:
        """Have the workers load an adapter, or note that it is wanted if they have it."""
        self._remove_retired()
        lora_id = lora_request.lora_int_id
        for other_id, other in self._retiring_loras.items():
            is_same = other_id == lora_id and other == lora_request
            if (other_id == lora_id or other == lora_request) and (
                not is_same or lora_request.load_inplace
            ):
                raise AdapterError(
                    f"the LoRA adapter {other.lora_name!r} with id {other_id} was removed, but "
                    "requests in progress still use it; try again when they have ended"
                )
        executor = self._executor()
        added = executor.add_lora(lora_request, sorted(self._loras_in_use()))
        self._retiring_loras.pop(lora_id, None)
        self._loaded_loras[lora_id] = (lora_request.lora_name, lora_request.lora_path)
        for evicted in self._loaded_loras.keys() - executor.list_loras():
            del self._loaded_loras[evicted]
        return bool(added)

    def remove_lora(self, lora_id: int) -> bool:
        """Drop an adapter; False if it is not loaded.

        While live requests use it, it is only hidden, and dropped after the last of them.
        """
        self._remove_retired()
        known = self._loaded_loras.pop(lora_id, None)
        users = self._loras_in_use()
        if lora_id in users:
            is_new = lora_id not in self._retiring_loras
            self._retiring_loras[lora_id] = users[lora_id]
            return is_new or known is not None
        return bool(self._executor().remove_lora(lora_id))

    def _loras_in_use(self) -> dict[int, LoRARequest]:
        """Adapters of live requests, by id."""
        requests = self._live()[0].requests.values()
        return {r.lora_int_id: r.lora_request for r in requests if r.lora_request is not None}

    def _remove_retired(self) -> None:
        """Drop removed adapters whose last request has ended."""
        if not self._retiring_loras:
            return
        for lora_id in self._retiring_loras.keys() - self._loras_in_use().keys():
            del self._retiring_loras[lora_id]
            self._executor().remove_lora(lora_id)

    def pin_lora(self, lora_id: int) -> bool:
        return bool(self._executor().pin_lora(lora_id))

    def list_loras(self) -> set[int]:
        """Ids of the loaded adapters, without those that are being removed."""
        self._remove_retired()
        return set(self._executor().list_loras()) - self._retiring_loras.keys()
