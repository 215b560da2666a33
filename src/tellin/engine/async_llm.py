"""The asynchronous shell: many concurrent streams over one engine core.

Same parts as `LLMEngine`, but outputs are taken from the core by one handler task and handed to a
collector per request. The handler holds no reference to the `AsyncLLM`, so a dropped one is
collected. Not thread-safe: one event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
import weakref
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from copy import copy
from types import TracebackType
from typing import Any, TypeVar

from tellin.checks import check_float
from tellin.config import EngineArgs, EngineConfig
from tellin.engine.arg_utils import apply_ready, create_engine_config, load_engine_tokenizer
from tellin.engine.async_controls import AsyncControls
from tellin.engine.control_checks import check_request_ids
from tellin.engine.core_client import AsyncCoreClient, EngineCoreClient
from tellin.engine.input_processor import InputProcessor
from tellin.engine.mm_config import load_mm_processor
from tellin.engine.output_collector import OutputTap, RequestOutputCollector, is_finished
from tellin.engine.output_handler import OutputHandler
from tellin.engine.output_processor import OutputProcessor
from tellin.engine.parallel_sampling import ParentRequest
from tellin.engine.renderer import ChatTokenizer, Renderer
from tellin.engine.stat_loggers import StatLoggerFactory, StatLoggerManager, load_plugins
from tellin.engine.teardown import close_engine, close_on_error
from tellin.engine.tracing import make_tracer
from tellin.exceptions import (
    DuplicateRequestError,
    EngineClosedError,
    EngineDeadError,
    EngineOverloadedError,
    InvalidParameterError,
)
from tellin.metrics import IterationStats
from tellin.outputs import PoolingRequestOutput, RequestOutput
from tellin.protocol import EngineCoreRequest, LoRARequest
from tellin.sampling_params import PoolingParams, SamplingParams, StructuredOutputsParams

logger = logging.getLogger("tellin.engine")

MAX_TIMEOUT_S = 366 * 86_400.0
"""Longest deadline: timers of an event loop take no infinite ones."""

AnyOutput = TypeVar("AnyOutput", RequestOutput, PoolingRequestOutput)


class AsyncLLM(AsyncControls):
    """An engine whose requests are awaited.

    The core runs in a child process, or (``multiprocess_mode=False``) in a thread of this one.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor_class: type[Any] | None = None,
        log_stats: bool = True,
        *,
        stat_loggers: Sequence[StatLoggerFactory] | None = None,
        multiprocess_mode: bool = True,
    ) -> None:
        """Load the model and get ready; blocks until the core can serve.

        Args:
            executor_class: None = what the configuration names.
            log_stats: keep statistics, with the default loggers.
            stat_loggers: receive statistics too, those of installed packages besides
                (`tellin.engine.stat_loggers.PLUGIN_GROUP`); any of them switches statistics on.
            multiprocess_mode: run the core in a child process.

        Raises:
            InvalidParameterError: ``data_parallel_size`` is more than the one core it runs.
            LoadError, EngineStartError: the core could not start; nothing is left running.
        """
        if config.parallel_config.data_parallel_size > 1:
            raise InvalidParameterError(
                "AsyncLLM runs one engine core and cannot divide requests among "
                f"data_parallel_size={config.parallel_config.data_parallel_size}; start as many "
                "engines or servers, with num_threads each, and a proxy before them",
                parameter="data_parallel_size",
                value=config.parallel_config.data_parallel_size,
            )
        custom_loggers = [*(stat_loggers or ()), *load_plugins()]
        self.log_stats = log_stats or bool(custom_loggers)
        tokenizer = load_engine_tokenizer(config)
        self.renderer = Renderer(config, tokenizer, load_mm_processor(config))
        self.input_processor = InputProcessor(config, self.renderer)
        self.output_processor = OutputProcessor(
            tokenizer,
            log_stats=self.log_stats,
            stream_interval=config.scheduler_config.stream_interval,
            on_finished=make_tracer(config),
        )
        with close_on_error(self.output_processor.close, self.renderer.shutdown):
            self.engine_core: AsyncCoreClient = EngineCoreClient.make_client(
                multiprocess_mode=multiprocess_mode,
                asyncio_mode=True,
                config=config,
                executor_class=executor_class,
                log_stats=self.log_stats,
            )
        self._finalizer = weakref.finalize(
            self, close_engine, self.engine_core, self.output_processor
        )
        self.config = apply_ready(config, self.engine_core.ready)
        self.model_config = self.config.model_config
        self.input_processor.update_config(self.config, self.engine_core.ready)
        self.logger_manager: StatLoggerManager | None = None
        if self.log_stats:
            try:
                self.logger_manager = StatLoggerManager(
                    self.config,
                    custom_stat_loggers=custom_loggers,
                    enable_default_loggers=log_stats,
                )
                self.logger_manager.log_engine_initialized()
            except BaseException:  # a logger of the user's
                self._finalizer()
                raise
        self._handler = OutputHandler(
            self.engine_core,
            self.output_processor,
            self.renderer,
            self.logger_manager,
            chunk_size=config.settings.output_chunk_size,
        )
        self._supported_tasks = tuple(self.engine_core.ready.supported_tasks)
        self._is_paused = False
        self._sleep_level = 0
        self._is_closed = False

    @classmethod
    def from_engine_config(
        cls,
        config: EngineConfig,
        stat_loggers: Sequence[StatLoggerFactory] | None = None,
        disable_log_stats: bool = False,
        multiprocess_mode: bool = True,
    ) -> AsyncLLM:
        return cls(
            config,
            log_stats=not disable_log_stats,
            stat_loggers=stat_loggers,
            multiprocess_mode=multiprocess_mode,
        )

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs,
        stat_loggers: Sequence[StatLoggerFactory] | None = None,
        multiprocess_mode: bool = True,
    ) -> AsyncLLM:
        return cls(
            create_engine_config(engine_args),
            log_stats=not engine_args.disable_log_stats,
            stat_loggers=stat_loggers,
            multiprocess_mode=multiprocess_mode,
        )

    # ------------------------------------------------------------------ requests

    async def add_request(
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
        data_parallel_rank: int | None = None,
        reasoning_ended: bool | None = None,
        tap: OutputTap | None = None,
    ) -> tuple[str, RequestOutputCollector]:
        """Queue a request.

        Args:
            reasoning_ended: with ``reasoning_config``: whether the prompt has ended the thoughts,
                so that a grammar binds at once. Default: decided by the ids of the marks.
            tap: offered each output at once, in the handler's task, while none waits for the
                consumer; what it takes (True) the consumer does not get. It must not wait. What it
                raises is raised by the consumer's stream.

        Returns:
            Its internal id and the collector of its outputs.

        Raises:
            RequestError: the request cannot be served. Nothing was queued.
            EngineOverloadedError: the admission queue is full.
            EngineDeadError, EngineClosedError: there is no engine any more.
        """
        if isinstance(params, SamplingParams) and params.structured_outputs is not None:
            await self._check_constraint(params.structured_outputs)
        self._check_alive()
        self._check_capacity(params.n if isinstance(params, SamplingParams) else 1)
        pools = isinstance(params, PoolingParams)
        rendered = await self.input_processor.render_async(prompt, tokenization_kwargs, pools)
        request = self.input_processor.process_inputs(
            request_id,
            rendered,
            params,
            self._supported_tasks,
            arrival_time=arrival_time,
            lora_request=lora_request,
            trace_headers=trace_headers,
            priority=priority,
            data_parallel_rank=data_parallel_rank,
            reasoning_ended=reasoning_ended,
        )
        if self.output_processor.has_external_request(request_id):
            raise DuplicateRequestError(
                f"request id {request_id!r} is in use by a live request; wait for it to finish, "
                "abort it, or choose another id"
            )
        self.input_processor.assign_request_id(request)
        internal_id = request.request_id
        collector = RequestOutputCollector(request.params.output_kind, tap)
        self._handler.start()
        await self._send(
            request, rendered.get("prompt"), collector, rendered.get("num_truncated_tokens", 0)
        )
        return internal_id, collector

    async def _check_constraint(self, constraint: StructuredOutputsParams) -> None:
        """Judge a grammar in a thread: a large one must not hold up the streams of others.

        The verdict is kept: the admission gate, which asks again, has it at once.
        """
        from tellin.grammar_validation import validate_structured_outputs

        self._check_alive()
        if not self.config.model_config.skip_tokenizer_init:
            config = self.config.structured_outputs_config
            await asyncio.to_thread(
                validate_structured_outputs,
                constraint,
                disable_any_whitespace=config.disable_any_whitespace,
            )

    async def _send(
        self,
        request: EngineCoreRequest,
        prompt_text: str | None,
        collector: RequestOutputCollector,
        truncated: int,
    ) -> None:
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
                    child,
                    prompt_text,
                    parent,
                    index,
                    collector,
                    num_truncated_prompt_tokens=truncated,
                )
                await self.engine_core.add_request_async(child)
        except BaseException:
            self.output_processor.remove_requests(added, parent)
            await self.engine_core.abort_requests_async(added)
            raise

    def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams,
        request_id: str | None = None,
        *,
        timeout_s: float | None = None,
        **kwargs: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Stream the outputs of one request.

        Cancelling the consumer, or closing the generator, aborts the request within one step.

        Args:
            request_id: the caller's id; default: a random one.
            timeout_s: deadline in seconds from now; at most a year.
            **kwargs: as in `add_request`.

        Raises:
            RequestTimeoutError: the deadline passed; the request was aborted.
            RequestError and others: as `add_request`.
        """
        return self._stream(prompt, sampling_params, request_id, timeout_s, kwargs, RequestOutput)

    def encode(
        self,
        prompt: Any,
        pooling_params: PoolingParams,
        request_id: str | None = None,
        *,
        timeout_s: float | None = None,
        **kwargs: Any,
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        """Pool one prompt; same protocol as `generate`."""
        return self._stream(
            prompt, pooling_params, request_id, timeout_s, kwargs, PoolingRequestOutput
        )

    async def _stream(
        self,
        prompt: Any,
        params: SamplingParams | PoolingParams,
        request_id: str | None,
        timeout_s: float | None,
        kwargs: dict[str, Any],
        output_type: type[AnyOutput],
    ) -> AsyncGenerator[AnyOutput, None]:
        request_id = request_id if request_id is not None else uuid.uuid4().hex
        if timeout_s is not None:
            timeout_s = check_float("timeout_s", timeout_s, 0, MAX_TIMEOUT_S)
        internal_id, collector = await self.add_request(request_id, prompt, params, **kwargs)
        # One timer per request: one per output would cost more than handing the output over.
        timer = None if timeout_s is None else collector.fail_after(timeout_s)
        finished = False
        try:
            while not finished:
                output = collector.get_nowait() or await collector.get()
                finished = is_finished(output)
                if isinstance(output, output_type):
                    yield output
        except (EngineDeadError, EngineClosedError):
            finished = True  # nothing is left to abort
            raise
        finally:
            if timer is not None:
                timer.cancel()
            if not finished:
                await self.abort(internal_id, internal=True)

    async def abort(self, request_ids: str | Iterable[str], internal: bool = False) -> None:
        """End requests; their consumers get a final output with finish reason abort."""
        ids = check_request_ids(request_ids)
        stats = IterationStats(time.time()) if self.log_stats else None
        resolved, _ = self.output_processor.abort_requests(ids, internal, stats)
        await self.engine_core.abort_requests_async(resolved)
        if stats is not None and resolved and self.logger_manager is not None:
            self.logger_manager.record(None, stats)

    def _check_alive(self) -> None:
        if self._is_closed:
            raise EngineClosedError("the engine has been shut down; create a new one")
        self.engine_core.check_alive()
        self._handler.check_alive()

    def _check_capacity(self, num_sequences: int) -> None:
        scheduler = self.config.scheduler_config
        if scheduler.max_num_queued_reqs is None:
            return
        limit = scheduler.max_num_seqs + scheduler.max_num_queued_reqs
        live = self.output_processor.get_num_unfinished_requests()
        if live + num_sequences > limit:
            raise EngineOverloadedError(
                f"the engine has {live} live sequences of at most {limit} (max_num_seqs + "
                "max_num_queued_reqs); try again later"
            )

    # ------------------------------------------------------------------ facts, health

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return self._supported_tasks

    @property
    def tokenizer(self) -> ChatTokenizer | None:
        return self.renderer.tokenizer

    def get_tokenizer(self) -> ChatTokenizer:
        return self.renderer.get_tokenizer()

    @property
    def is_running(self) -> bool:
        return not self._is_closed and self._handler.error is None

    @property
    def errored(self) -> bool:
        """Whether no request will ever complete again."""
        return self.engine_core.engine_dead or not self.is_running

    @property
    def is_stopped(self) -> bool:
        """As `errored`."""
        return self.errored

    @property
    def dead_error(self) -> EngineDeadError:
        """Why requests cannot complete, for whoever asks after `errored`."""
        return EngineDeadError(str(self._handler.error or ""))

    async def check_health(self, max_idle_s: float = 60.0) -> None:
        """Whether the engine makes progress.

        Args:
            max_idle_s: longest time without a sign of the core while requests are live.

        Raises:
            EngineDeadError: the core died, or has shown no progress for that long.
        """
        self._check_alive()
        if self._is_paused or not self.output_processor.has_unfinished_requests():
            return
        idle_s = time.monotonic() - self._handler.last_progress
        if idle_s > max_idle_s:
            live = self.output_processor.get_num_unfinished_requests()
            raise EngineDeadError(f"no step for {idle_s:.1f} s although {live} sequences are live")

    async def wait_for_requests_to_drain(self, timeout: float = 300.0) -> None:
        """Wait until no request is live. Raises TimeoutError after ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        while self.output_processor.has_unfinished_requests():
            if time.monotonic() > deadline:
                live = self.output_processor.get_num_unfinished_requests()
                raise TimeoutError(f"{live} sequences are still live after {timeout:g} s")
            await asyncio.sleep(0.02)

    # ------------------------------------------------------------------ end

    def shutdown(self, timeout: float | None = None) -> None:
        """End the core; consumers get `EngineClosedError`. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self.renderer.shutdown()
        self.engine_core.shutdown(timeout)
        if not self._handler.ends_by_itself():
            self.output_processor.propagate_error(
                EngineClosedError("the engine has been shut down")
            )
            self._handler.stop()
        self._finalizer()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await asyncio.to_thread(self.engine_core.shutdown)
        self.shutdown()
