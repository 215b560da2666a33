"""The core of an engine: schedule, execute, update.

Owns the executor, the scheduler and the structured-output manager, and the order in which they are
built and torn down. Sees ids and parameters only. One thread steps it; `abort_during_step` and
`preprocess_add_request` may be called from others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import itertools
import logging
import queue
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from tellin.config import EngineConfig, ModelConfig
from tellin.core.encoder_inputs import check_features
from tellin.core.engine_core_controls import EngineCoreControls
from tellin.core.kv_sizing import KVCacheSizes, plan_kv_cache
from tellin.core.request import Request, RequestStatus
from tellin.core.scheduler import Scheduler
from tellin.core.structured_output import StructuredOutputManager
from tellin.exceptions import EngineDeadError, InvalidParameterError, UnsupportedFeatureError
from tellin.protocol import EngineCoreOutputs, EngineCoreReady, EngineCoreRequest
from tellin.step_protocol import ModelRunnerOutput, SchedulerOutput

if TYPE_CHECKING:
    from tellin.core.kv_event_publisher import KVEventPublisher
    from tellin.executor.executor import Executor

logger = logging.getLogger("tellin.core")

UNBLOCK_WAIT_S = 0.001
"""How long a step without work waits for a grammar, instead of spinning."""


class EngineCore(EngineCoreControls):
    """Requests go in with `add_request`, outputs come out of `step`."""

    def __init__(
        self,
        config: EngineConfig,
        executor_class: type[Executor],
        log_stats: bool = False,
        failure_callback: Callable[[], None] | None = None,
        tokenizer_info_factory: Callable[[], Any] | None = None,
    ) -> None:
        """Load the model, size the KV cache, get ready.

        Raises:
            LoadError: the model or the KV cache does not fit, or the file is not usable.
        """
        super().__init__()
        self._kv_event_publisher: KVEventPublisher | None = None
        self._is_stepping = False
        self._aborts: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
        self._admission_counter = itertools.count()
        self.log_stats = log_stats
        try:
            self._start(config, executor_class, failure_callback, tokenizer_info_factory)
        except BaseException:
            self.shutdown()
            raise

    def _start(
        self,
        config: EngineConfig,
        executor_class: type[Executor],
        failure_callback: Callable[[], None] | None,
        tokenizer_info_factory: Callable[[], Any] | None,
    ) -> None:
        start = time.monotonic()
        executor = self.executor = executor_class(config)
        if failure_callback is not None:
            executor.register_failure_callback(failure_callback)
        sizes = plan_kv_cache(config, executor)
        if sizes.max_model_len != config.model_config.max_model_len:
            config = _with_max_model_len(config, sizes.max_model_len)
        executor.initialize_kv_cache(sizes.num_blocks)
        if sizes.num_state_slots:
            config = _start_states(config, executor, sizes)
        self.config = config
        if tokenizer_info_factory is None and not config.model_config.skip_tokenizer_init:
            tokenizer_info_factory = executor.load_tokenizer
        self.structured_output_manager = StructuredOutputManager(config, tokenizer_info_factory)
        self.scheduler = Scheduler(
            config,
            sizes.num_blocks,
            self.structured_output_manager,
            self.log_stats,
            sizes.num_state_slots,
        )
        cache_config = config.cache_config
        if cache_config.kv_events_endpoint is not None:
            from tellin.core.kv_event_publisher import KVEventPublisher

            self._kv_event_publisher = KVEventPublisher(
                cache_config.kv_events_endpoint,
                cache_config.kv_events_replay_endpoint,
                cache_config.kv_events_topic,
            )
        info = executor.collective_rpc("get_info")[0]
        self.ready = EngineCoreReady(
            tellin_version=importlib.metadata.version("tellin"),
            max_model_len=sizes.max_model_len,
            num_kv_blocks=sizes.num_blocks,
            block_size=config.cache_config.block_size,
            dtype=config.model_config.dtype,
            world_size=config.parallel_config.world_size,
            data_parallel_size=config.parallel_config.data_parallel_size,
            kv_cache_size_tokens=sizes.num_tokens,
            kv_cache_max_concurrency=sizes.max_concurrency,
            supported_tasks=list(executor.supported_tasks),
            isa=str(info.get("isa", "")),
            num_threads=int(info.get("num_threads", 0)),
        )
        logger.info(
            "engine core ready in %.2f s: %d KV blocks of %d tokens, %.1f requests of %d tokens",
            time.monotonic() - start,
            sizes.num_blocks,
            config.cache_config.block_size,
            sizes.max_concurrency,
            sizes.max_model_len,
        )

    # ------------------------------------------------------------------ requests

    def preprocess_add_request(self, request: EngineCoreRequest) -> Request:
        """Make a `Request` and start to compile its grammar. Safe on any thread.

        Raises:
            TypeError: the id is not a string.
            ValueError: the request is inconsistent or asks for what this engine cannot do.
        """
        if not isinstance(request.request_id, str):
            raise TypeError(f"request_id must be a string, got {type(request.request_id).__name__}")
        self._check_features(request)
        lora = request.lora_request
        prepared = Request.from_engine_core_request(
            request,
            max_model_len=self.config.model_config.max_model_len,
            rng_key=self._draw_rng_key(),
            lora_generation=self._lora_generations.get(lora.lora_name, 0) if lora else 0,
            log_events=self.log_stats,
        )
        scheduler, manager = self._live()
        scheduler.check_admissible(prepared)
        if self.config.cache_config.enable_prefix_caching:
            scheduler.kv_cache_manager.hasher.extend(prepared)
        params = request.sampling_params
        if params is not None and params.structured_outputs is not None:
            manager.start(prepared, params.structured_outputs, request.reasoning_ended)
        return prepared

    def _check_features(self, request: EngineCoreRequest) -> None:
        if request.prompt_embeds is not None:
            check_embeds(request, self.config.model_config)
        if request.mm_features:
            if self.config.multimodal_config is None:
                raise UnsupportedFeatureError("this model takes text only, no multimodal items")
            check_features(request.mm_features, len(request.prompt_token_ids or ()))
        if request.resumable:
            raise UnsupportedFeatureError("streaming input (resumable=True) is not supported")
        if request.lora_request is not None and self.config.lora_config is None:
            raise UnsupportedFeatureError("LoRA is off; start the engine with enable_lora=True")
        if request.pooling_params is not None:
            task = request.pooling_params.task
            if task not in self.ready.supported_tasks:
                raise UnsupportedFeatureError(
                    f"this model does not support the task {task!r}, only "
                    f"{self.ready.supported_tasks}"
                )
        elif "generate" not in self.ready.supported_tasks:
            raise UnsupportedFeatureError(
                f"this model does not generate; it supports {self.ready.supported_tasks}"
            )

    def _draw_rng_key(self) -> int:
        """Key of a request without a seed: from the engine's seed and the order of admission."""
        data = f"{self.config.model_config.seed}:{next(self._admission_counter)}".encode()
        return int.from_bytes(hashlib.sha256(data).digest()[:8], "little")

    def add_request(self, request: Request) -> None:
        """Hand a prepared request to the scheduler, its adapter being loaded first.

        With ``abort_immediately`` it ends at once; its last output comes with the next step.

        Raises:
            DuplicateRequestError, ContextLengthError: see `Scheduler.add_request`.
            Exception: what loading the adapter raises.
        """
        scheduler, _ = self._live()
        lora = request.lora_request
        if lora is not None:
            config = self.config.lora_config
            if self._loaded_loras.get(lora.lora_int_id) != (lora.lora_name, lora.lora_path):
                self.add_lora(lora)
            elif config is not None and len(self._loaded_loras) > config.max_cpu_loras:
                self._load_lora(lora)  # those that had to stay for their requests can go now
            request.set_lora_generation(self._lora_generations[lora.lora_name])
        scheduler.add_request(request)
        if request.abort_immediately:
            scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED, emit=True)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """End requests without a further output. Unknown ids are ignored.

        From within a step (a callback) it takes effect before results are applied.
        """
        if self._is_stepping:
            self.abort_during_step(request_ids)
            return
        scheduler, _ = self._live()
        self._recover_if_interrupted(scheduler)
        self._apply_aborts(scheduler)  # or they might hit a later request with the same id
        scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)

    def abort_during_step(self, request_ids: Iterable[str]) -> None:
        """Like `abort_requests`, from any thread; takes effect before results are applied."""
        self._aborts.put(list(request_ids))

    def abort_all(self) -> dict[int, EngineCoreOutputs]:
        """End everything; returns the last output of each request, by client."""
        scheduler = self._live()[0]
        scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED, emit=True)
        return scheduler.take_pending_outputs()

    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return self.scheduler is not None and self.scheduler.has_requests()

    # ------------------------------------------------------------------ the step

    def step(self) -> tuple[dict[int, EngineCoreOutputs], bool]:
        """Schedule, execute, update.

        Returns:
            Outputs by client index, and whether the model ran.

        Raises:
            EngineDeadError: the model failed and the executor is not intact.
        """
        scheduler, _ = self._live()
        self._recover_if_interrupted(scheduler)
        self._apply_aborts(scheduler)
        if not scheduler.has_requests():
            return {}, False
        self._is_stepping = True
        try:
            result = self._run_step(scheduler)
        finally:
            self._is_stepping = False
        if self._retiring_loras:
            self._remove_retired()
        return result

    def _run_step(self, scheduler: Scheduler) -> tuple[dict[int, EngineCoreOutputs], bool]:
        with self.scopes.scope("schedule"):
            scheduler_output = scheduler.schedule()
        start = time.monotonic()
        try:
            model_output = self._execute(scheduler_output)
        except BaseException as error:
            self._fail_step(scheduler_output, error)
            return scheduler.take_pending_outputs(), False
        self._apply_aborts(scheduler)
        with self.scopes.scope("update_from_output"):
            outputs = scheduler.update_from_output(scheduler_output, model_output)
        if self._kv_event_publisher is not None:
            self._kv_event_publisher.publish(self.take_kv_events())
        executed = scheduler_output.total_num_scheduled_tokens > 0
        if executed:
            _stamp_step_time(outputs, time.monotonic() - start)
        elif not outputs and scheduler.room.blocked:
            scheduler.wait_for_unblock(UNBLOCK_WAIT_S)
        return outputs, executed

    def _execute(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        """Run the model on a step; None when nothing was scheduled."""
        executor = self.executor
        assert executor is not None
        scheduler, manager = self._live()
        if scheduler_output.total_num_scheduled_tokens == 0:
            if (
                scheduler_output.finished_req_ids
                or scheduler_output.preempted_req_ids
                or scheduler_output.free_encoder_mm_hashes
            ):
                executor.execute_model(scheduler_output)  # only to let the worker forget them
                executor.sample_tokens(None)
            return None
        if not scheduler_output.structured_output_req_ids:
            with self.scopes.scope("execute_model"):
                executor.execute_model(scheduler_output)
            with self.scopes.scope("sample_tokens"):
                return executor.sample_tokens(None)
        future = executor.execute_model(scheduler_output, non_block=True)
        with self.scopes.scope("grammar_output"):
            grammar_output = manager.grammar_output(scheduler_output, scheduler.requests)
        with self.scopes.scope("execute_model"):
            if future is not None:
                future.result()
        with self.scopes.scope("sample_tokens"):
            return executor.sample_tokens(grammar_output)

    def _apply_aborts(self, scheduler: Scheduler) -> None:
        while not self._aborts.empty():
            scheduler.finish_requests(self._aborts.get(), RequestStatus.FINISHED_ABORTED)

    def _recover_if_interrupted(self, scheduler: Scheduler) -> None:
        """Ctrl-C may have hit the scheduler's own code in the last step."""
        if scheduler.plan is not None:
            scheduler.recover("the step was interrupted")

    def _fail_step(self, scheduler_output: SchedulerOutput, error: BaseException) -> None:
        """End what was in a step that raised; the engine goes on if the executor is intact.

        Raises:
            EngineDeadError: it is not.
            BaseException: ``error`` again, if it was an interrupt and not a failure.
        """
        assert self.executor is not None
        message = f"the step failed: {type(error).__name__}: {error}"
        self._live()[0].fail_step(scheduler_output, message)
        with contextlib.suppress(Exception):
            self.executor.sample_tokens(None)  # a forward pass that did run is not left pending
        if not isinstance(error, Exception):
            raise error
        logger.error("step failed: %s", describe_step(scheduler_output), exc_info=error)
        try:
            self.executor.check_health()
        except Exception as cause:
            self._death = f"{message} ({cause})"
            raise EngineDeadError(self._death) from error

    def post_step(self, executed: bool) -> None:
        """Called after every step by the loop that drives this core; a hook for subclasses."""

    # ------------------------------------------------------------------ end

    def shutdown(self) -> None:
        """Give everything back. Idempotent, and safe after a constructor that failed half-way."""
        manager, self.structured_output_manager = self.structured_output_manager, None
        scheduler, self.scheduler = self.scheduler, None
        executor, self.executor = self.executor, None
        publisher, self._kv_event_publisher = self._kv_event_publisher, None
        for part in (manager, scheduler, executor, publisher):
            if part is None:
                continue
            try:
                part.shutdown()
            except Exception:
                logger.exception("shutting down %s failed", type(part).__name__)


def check_embeds(request: EngineCoreRequest, model: ModelConfig) -> None:
    """Refuse rows that do not have the form the worker computes with.

    Raises:
        UnsupportedFeatureError: the engine does not take embeddings.
        InvalidParameterError: another form, or ids beside them.
    """
    if not model.enable_prompt_embeds:
        raise UnsupportedFeatureError(
            "prompt_embeds are off; start the engine with enable_prompt_embeds=True"
        )
    try:
        view = memoryview(request.prompt_embeds)
    except TypeError:
        raise InvalidParameterError("prompt_embeds must be an array of float32") from None
    is_matrix = view.ndim == 2 and view.shape is not None and view.shape[1] == model.hidden_size
    if not is_matrix or view.format != "f" or not view.c_contiguous:
        raise InvalidParameterError(
            f"prompt_embeds must be [num_tokens, {model.hidden_size}] float32 in C order, got "
            f"{view.shape} of format {view.format!r}"
        )
    if request.prompt_token_ids is not None or request.mm_features:
        raise InvalidParameterError("prompt_embeds are the whole prompt; leave out ids and items")


def describe_step(scheduler_output: SchedulerOutput) -> str:
    """A step in lengths only, for a log: never ids."""
    try:
        return (
            f"step {scheduler_output.step_counter}, "
            f"{scheduler_output.total_num_scheduled_tokens} tokens of "
            f"{len(scheduler_output.num_scheduled_tokens)} requests, new: "
            f"{scheduler_output.scheduled_new_reqs}"
        )
    except Exception as error:
        return f"(not describable: {error})"


def _stamp_step_time(outputs: dict[int, EngineCoreOutputs], step_time_s: float) -> None:
    for batch in outputs.values():
        if batch.scheduler_stats is not None:
            batch.scheduler_stats.step_time_s = step_time_s


def _start_states(config: EngineConfig, executor: Executor, sizes: KVCacheSizes) -> EngineConfig:
    """Make the slots of a model with recurrent states; no more requests run than have one."""
    executor.initialize_state_cache(sizes.num_state_slots)
    wanted, count = config.scheduler_config.max_num_seqs, sizes.max_num_seqs
    logger.info(
        "%d slots of recurrent states for %d requests, their drafts and the prefix cache",
        sizes.num_state_slots - 1,
        count,
    )
    if count < wanted:
        logger.warning(
            "max_num_seqs is lowered from %d to %d: the memory holds no more recurrent states",
            wanted,
            count,
        )
    scheduler_config = dataclasses.replace(config.scheduler_config, max_num_seqs=count)
    return dataclasses.replace(config, scheduler_config=scheduler_config)


def _with_max_model_len(config: EngineConfig, max_model_len: int) -> EngineConfig:
    return dataclasses.replace(
        config,
        model_config=dataclasses.replace(config.model_config, max_model_len=max_model_len),
        scheduler_config=dataclasses.replace(config.scheduler_config, max_model_len=max_model_len),
    )
