"""The synchronous shell: `add_request`, `step`, and control calls that are passed on.

The engine of the first generation's loop, kept for programs written for it; `AsyncLLM` is for those
that await. Glue between renderer, processors and a client of the core: no model, no scheduling, no
KV memory. Not thread-safe: one caller at a time (`tellin.LLM` serves several threads).
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any

from tellin.config import EngineArgs, EngineConfig
from tellin.engine.arg_utils import apply_ready, create_engine_config, load_engine_tokenizer
from tellin.engine.control_checks import check_level, check_request_ids
from tellin.engine.core_client import EngineCoreClient, SyncCoreClient
from tellin.engine.input_processor import InputProcessor
from tellin.engine.mm_config import load_mm_processor
from tellin.engine.output_processor import Output, OutputProcessor
from tellin.engine.parallel_sampling import ParentRequest
from tellin.engine.renderer import ChatTokenizer, Renderer
from tellin.engine.request_handle import RequestHandle
from tellin.engine.stat_loggers import StatLoggerFactory, StatLoggerManager
from tellin.engine.stats import idle_scheduler_stats
from tellin.engine.teardown import close_engine, close_on_error, finalize_driver_model, get_executor
from tellin.engine.tracing import make_tracer
from tellin.exceptions import (
    DuplicateRequestError,
    EngineClosedError,
    InvalidParameterError,
    InvalidTypeError,
    UnsupportedFeatureError,
)
from tellin.metrics import IterationStats, Metric
from tellin.protocol import EngineCoreRequest, LoRARequest, SchedulerStats
from tellin.sampling_params import PoolingParams, SamplingParams
from tellin.trace import ScopeRecorder

if TYPE_CHECKING:
    from tellin.engine.dp_group import DataParallelGroup


class LLMEngine:
    """The classic engine: its caller adds requests, then calls `step` while some are unfinished."""

    def __init__(
        self,
        config: EngineConfig,
        executor_class: type[Any] | None = None,
        log_stats: bool = False,
        *,
        stat_loggers: Sequence[StatLoggerFactory] | None = None,
        multiprocess_mode: bool = False,
        dp_group: DataParallelGroup | None = None,
    ) -> None:
        """Load the model and get ready.

        Args:
            executor_class: None = what the configuration names.
            log_stats: keep statistics (`get_metrics`, ``RequestOutput.metrics``).
            stat_loggers: receive statistics besides the default loggers.
            multiprocess_mode: run the core in a child process.
            dp_group: group of the data-parallel ranks that step together, if there is one.

        Raises:
            LoadError, EngineStartError: the core could not start; nothing is left running.
        """
        self.config = config
        self.model_config = config.model_config
        self.observability_config = config.observability_config
        self.log_stats = log_stats
        self.dp_group = dp_group
        if config.parallel_config.data_parallel_size > 1 and dp_group is None:
            raise InvalidParameterError(
                "data_parallel_size > 1 needs a dp_group: a single engine would wait for ever",
                parameter="data_parallel_size",
                value=config.parallel_config.data_parallel_size,
            )
        self.should_execute_dummy_batch = False
        self.scopes = ScopeRecorder(config.settings.profiling_scopes)
        self._supported_tasks: tuple[str, ...] | None = None
        self._last_log_time: float | None = None
        self.sleep_level: int | None = None  # None = awake
        self._is_closed = False
        tokenizer = load_engine_tokenizer(config)
        self.renderer = Renderer(config, tokenizer, load_mm_processor(config))
        self.input_processor = InputProcessor(config, self.renderer)
        self.output_processor = OutputProcessor(
            tokenizer,
            log_stats=log_stats,
            stream_interval=config.scheduler_config.stream_interval,
            on_finished=make_tracer(config),
        )
        with close_on_error(self.output_processor.close, self.renderer.shutdown):
            self.engine_core: SyncCoreClient = EngineCoreClient.make_client(
                multiprocess_mode=multiprocess_mode,
                asyncio_mode=False,
                config=config,
                executor_class=executor_class,
                log_stats=log_stats,
            )
        parts = (self.engine_core, self.output_processor, dp_group)
        self._finalizer = weakref.finalize(self, close_engine, *parts)
        try:
            self._finish_start(stat_loggers)
        except BaseException:
            self._finalizer()
            raise

    def _finish_start(self, stat_loggers: Sequence[StatLoggerFactory] | None) -> None:
        """The core has settled lengths and sizes: adopt them, and build what needs them."""
        ready = self.engine_core.ready
        self.config = apply_ready(self.config, ready)
        self.model_config = self.config.model_config
        self.input_processor.update_config(self.config, ready)
        self.logger_manager: StatLoggerManager | None = None
        if self.log_stats:
            self.logger_manager = StatLoggerManager(self.config, custom_stat_loggers=stat_loggers)
            self.logger_manager.log_engine_initialized()
        self.model_executor = get_executor(self.engine_core)
        self._model_finalizer = finalize_driver_model(self, self.model_executor)
        self.reset_mm_cache()

    @classmethod
    def from_engine_config(
        cls,
        config: EngineConfig,
        stat_loggers: Sequence[StatLoggerFactory] | None = None,
        disable_log_stats: bool = False,
    ) -> LLMEngine:
        """An engine of a finished configuration, whose settings choose the process mode."""
        return cls(
            config,
            log_stats=not disable_log_stats,
            stat_loggers=stat_loggers,
            multiprocess_mode=config.settings.enable_multiprocessing,
        )

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs,
        stat_loggers: Sequence[StatLoggerFactory] | None = None,
        enable_multiprocessing: bool = False,
    ) -> LLMEngine:
        """An engine of raw arguments. The environment can only switch multiprocessing on."""
        config = create_engine_config(engine_args)
        return cls(
            config,
            log_stats=not engine_args.disable_log_stats,
            stat_loggers=stat_loggers,
            multiprocess_mode=enable_multiprocessing or config.settings.enable_multiprocessing,
        )

    # ------------------------------------------------------------------ requests

    def add_request(
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams | PoolingParams,
        *,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        prompt_text: str | None = None,
    ) -> RequestHandle:
        """Queue a request. Never waits for the model.

        Args:
            prompt: output of ``renderer.render_cmpl`` or ``render_chat``. Raw prompts and
                `EngineCoreRequest` are accepted too, but deprecated.
            prompt_text: text of an `EngineCoreRequest`; otherwise it is known from ``prompt``.

        Returns:
            The internal id; its ``external_id`` is ``request_id``, which outputs carry.

        Raises:
            RequestError: the request cannot be served. Nothing was queued.
            DuplicateRequestError: a live request has this id.
            EngineDeadError, EngineClosedError: there is no engine any more.
        """
        if not isinstance(request_id, str):
            raise InvalidTypeError(f"request_id must be a string, got {type(request_id).__name__}")
        self._check_open()
        num_truncated = 0
        if isinstance(prompt, EngineCoreRequest):
            tasks = self.get_supported_tasks()
            request = self.input_processor.adopt_core_request(request_id, prompt, tasks)
        else:
            pools = isinstance(params, PoolingParams)
            rendered = self.input_processor.render(prompt, tokenization_kwargs, pools)
            prompt_text = rendered.get("prompt")
            num_truncated = rendered.get("num_truncated_tokens", 0)
            request = self.input_processor.process_inputs(
                request_id,
                rendered,
                params,
                self.get_supported_tasks(),
                arrival_time=arrival_time,
                lora_request=lora_request,
                trace_headers=trace_headers,
                priority=priority,
            )
        if self.output_processor.has_external_request(request.request_id):
            raise DuplicateRequestError(
                f"request id {request.request_id!r} is in use by a live request; "
                "wait for it to finish, abort it, or choose another id"
            )
        self.input_processor.assign_request_id(request)
        handle = RequestHandle(request.request_id, request.external_req_id or request_id)
        self._send(request, prompt_text, num_truncated)
        return handle

    def _send(self, request: EngineCoreRequest, prompt_text: str | None, truncated: int) -> None:
        """Register, then hand over to the core; all of it or nothing."""
        params = request.sampling_params
        n = 1 if params is None else params.n
        parent = ParentRequest(request) if n > 1 else None
        added: list[str] = []
        try:
            for index in range(n):
                child = copy(request) if index < n - 1 else request
                if parent is not None:
                    child.request_id, child.sampling_params = parent.get_child_info(index)
                added.append(child.request_id)
                self.output_processor.add_request(
                    child, prompt_text, parent, index, num_truncated_prompt_tokens=truncated
                )
                self.engine_core.add_request(child)
        except BaseException:
            self.output_processor.remove_requests(added, parent)
            self.engine_core.abort_requests(added)
            raise

    def abort_request(
        self, request_ids: str | Iterable[str], internal: bool = False
    ) -> list[Output]:
        """End requests. Unknown ids are ignored.

        Args:
            request_ids: handles from `add_request`, or ids: external ones unless ``internal``.

        Returns:
            Final outputs, finish reason abort, with what was generated so far.
        """
        ids = check_request_ids(request_ids)
        handles = [request_id for request_id in ids if isinstance(request_id, RequestHandle)]
        others = [request_id for request_id in ids if not isinstance(request_id, RequestHandle)]
        stats = self._new_iteration_stats()
        outputs: list[Output] = []
        to_abort: list[str] = []
        for group, is_internal in ((handles, True), (others, internal)):
            if group:
                resolved, finals = self.output_processor.abort_requests(group, is_internal, stats)
                to_abort += resolved
                outputs += finals
        self.engine_core.abort_requests(to_abort)
        if stats is not None and to_abort:
            self._record_stats(None, stats)
        return outputs

    # ------------------------------------------------------------------ the step

    def step(self, timeout: float | None = None) -> list[Output]:
        """Take one batch from the core (in process: run one step of it).

        Args:
            timeout: seconds to wait for a core in another process; None = until it sends
                something, so do not call without unfinished requests.

        Returns:
            Outputs produced now, in the core's order; may be empty.

        Raises:
            EngineDeadError: the core is gone.
        """
        self._check_open()
        if self.should_execute_dummy_batch:
            self.should_execute_dummy_batch = False
            self.engine_core.call_utility("execute_dummy_batch")
            return []
        with self.scopes.scope("llm_engine step: get_output"):
            outputs = self.engine_core.get_output(timeout)
        with self.scopes.scope("llm_engine step: process_outputs"):
            iteration_stats = self._new_iteration_stats()
            processed = self.output_processor.process_outputs(
                outputs.outputs, outputs.timestamp, iteration_stats
            )
            self.output_processor.update_scheduler_stats(outputs.scheduler_stats)
        with self.scopes.scope("llm_engine step: abort_requests"):
            self.engine_core.abort_requests(processed.reqs_to_abort)
        with self.scopes.scope("llm_engine step: record_stats"):
            if outputs.scheduler_stats is not None or outputs.outputs:
                self._record_stats(outputs.scheduler_stats, iteration_stats)
                self.do_log_stats_with_interval()
        return processed.request_outputs

    def _new_iteration_stats(self) -> IterationStats | None:
        return IterationStats(time.time()) if self.log_stats else None

    def _record_stats(
        self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats | None
    ) -> None:
        mm_cache_stats = self.renderer.stat_mm_cache()
        if not self.output_processor.has_unfinished_requests():
            scheduler_stats = idle_scheduler_stats(scheduler_stats)
        if self.logger_manager is not None:
            self.logger_manager.record(scheduler_stats, iteration_stats, mm_cache_stats)

    def get_num_unfinished_requests(self) -> int:
        """Live sequences (n = 3 counts as 3)."""
        return self.output_processor.get_num_unfinished_requests()

    def has_unfinished_requests(self) -> bool:
        """Whether to go on stepping. A collective if there is a data-parallel group."""
        local = self.output_processor.has_unfinished_requests()
        if self.dp_group is not None:
            return self.has_unfinished_requests_dp(local)
        return local or self.engine_core.dp_engines_running()

    def has_unfinished_requests_dp(self, has_unfinished: bool) -> bool:
        """Whether any rank has work. A collective: every rank must call it equally often.

        A rank without work of its own runs a dummy batch in its next step if others have some.
        """
        if self.dp_group is None:
            return has_unfinished
        any_unfinished = bool(self.dp_group.all_reduce_max(int(has_unfinished)))
        if any_unfinished and not has_unfinished:
            self.should_execute_dummy_batch = True
        return any_unfinished

    # ------------------------------------------------------------------ control

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Give memory back. Level 0 only pauses; 1 frees the KV cache; 2 the weights too.

        Args:
            mode: of live requests: abort (their last outputs come with the next `step`), wait
                (only with the core in another process), keep.
        """
        if check_level(level) >= 1:
            self.renderer.clear_mm_cache()
        self.engine_core.call_utility("sleep", level, mode)
        self.sleep_level = level = max(level, self.sleep_level or 0)  # nothing came back
        if self.logger_manager is not None:
            self.logger_manager.record_sleep_state(True, level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Undo `sleep`. ``tags``: weights, kv_cache, scheduling; None = everything."""
        self.engine_core.call_utility("wake_up", tags)
        is_sleeping = self.is_sleeping()
        self.sleep_level = self.sleep_level if is_sleeping else None
        if self.logger_manager is not None:
            self.logger_manager.record_sleep_state(is_sleeping, self.sleep_level or 0)

    def is_sleeping(self) -> bool:
        """Whether scheduling is paused or memory was given back."""
        return bool(self.engine_core.call_utility("is_sleeping"))

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Forget cached KV blocks. False while requests use some, unless these may be preempted."""
        return bool(
            self.engine_core.call_utility(
                "reset_prefix_cache", reset_running_requests, reset_connector
            )
        )

    def reset_mm_cache(self) -> None:
        """Forget processed multimodal items, here and in the core."""
        self.renderer.clear_mm_cache()
        self.engine_core.call_utility("reset_mm_cache")

    def reset_encoder_cache(self) -> None:
        """Forget encoder outputs."""
        self.engine_core.call_utility("reset_encoder_cache")

    def start_profile(self, prefix: str | None = None) -> None:
        """Begin to record a trace of phases, plan operations and threads.

        Args:
            prefix: of the trace file's path; default: ``tellin-trace`` in the working folder.
        """
        self.engine_core.call_utility("profile", True, prefix)
        self.scopes.start()

    def stop_profile(self) -> str | None:
        """End the trace and write it; returns its path. It opens in https://ui.perfetto.dev."""
        return self.scopes.add_to(self.engine_core.call_utility("profile", False, None), "shell")

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter; whether it was new."""
        return bool(self.engine_core.call_utility("add_lora", lora_request))

    def remove_lora(self, lora_id: int) -> bool:
        return bool(self.engine_core.call_utility("remove_lora", lora_id))

    def list_loras(self) -> set[int]:
        """Integer ids of the loaded adapters."""
        return set(self.engine_core.call_utility("list_loras"))

    def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter loaded."""
        return bool(self.engine_core.call_utility("pin_lora", lora_id))

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Run a worker's method, or a callable that takes the worker, on every worker.

        Returns the results by rank. Raises `TimeoutError` after ``timeout`` seconds.
        """
        return list(self.engine_core.call_utility("collective_rpc", method, timeout, args, kwargs))

    def apply_model(self, func: Callable[[Any], Any]) -> list[Any]:
        """Run ``func(model)`` on every worker."""
        return self.collective_rpc("apply_model", args=(func,))

    # ------------------------------------------------------------------ statistics, facts

    def get_metrics(self) -> list[Metric]:
        """All metrics, now. Raises `UnsupportedFeatureError` if statistics are off."""
        if self.logger_manager is None:
            raise UnsupportedFeatureError(
                "statistics are off; create the engine with disable_log_stats=False"
            )
        return self.logger_manager.get_metrics()

    def do_log_stats(self) -> None:
        """Report statistics through the loggers, now."""
        if self.logger_manager is not None:
            self.logger_manager.log()

    def do_log_stats_with_interval(self) -> None:
        """`do_log_stats`, at most once per interval and never on the first call.

        Runs with productive steps only: nothing is logged while the engine is idle.
        """
        now = time.monotonic()
        if self._last_log_time is None:
            self._last_log_time = now
        elif now - self._last_log_time >= self.config.settings.log_stats_interval_s:
            self.do_log_stats()
            self._last_log_time = now

    def get_supported_tasks(self) -> tuple[str, ...]:
        if self._supported_tasks is None:
            self._supported_tasks = tuple(self.engine_core.call_utility("get_supported_tasks"))
        return self._supported_tasks

    @property
    def tokenizer(self) -> ChatTokenizer | None:
        return self.renderer.tokenizer

    def get_tokenizer(self) -> ChatTokenizer:
        """The tokenizer. Raises `UnsupportedFeatureError` if the engine has none."""
        return self.renderer.get_tokenizer()

    # ------------------------------------------------------------------ end

    def _check_open(self) -> None:
        if self._is_closed:
            raise EngineClosedError("the engine has been shut down; create a new one")

    def shutdown(self, timeout: float | None = None) -> None:
        """Give back memory, threads and processes. Live requests are dropped. Idempotent.

        Args:
            timeout: seconds that a core in another process gets to end by itself.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self.model_executor = None
        self.renderer.shutdown()
        self.engine_core.shutdown(timeout)
        self._finalizer()
        if self._model_finalizer is not None:
            self._model_finalizer()

    def __enter__(self) -> LLMEngine:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()
