"""What all services share: the engine, names and limits, and running a request's sequences.

A request becomes jobs (one per prompt; one per choice where equal choices are wanted); their
outputs come back as one stream. Whatever ends the stream early aborts what is left of them.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
from msgspec import UNSET

from tellin.engine.async_llm import AsyncLLM
from tellin.engine.output_collector import OutputTap
from tellin.engine.prompts import RenderedPrompt
from tellin.entrypoints.openai.adapters import Adapters
from tellin.entrypoints.openai.chat_format import ChatFormat
from tellin.entrypoints.openai.errors import (
    ApiError,
    about,
    bad_request,
    not_ready,
    shown,
    to_api_error,
)
from tellin.entrypoints.openai.http_metrics import HttpMetrics
from tellin.entrypoints.openai.replies import FinishReason, PromptTokensDetails, Usage
from tellin.entrypoints.openai.server_config import ServerConfig
from tellin.exceptions import RequestError
from tellin.outputs import CompletionOutput, RequestOutput
from tellin.protocol import LoRARequest
from tellin.sampling_params import SamplingParams

DONE = b"data: [DONE]\n\n"


class ServingContext:
    """One engine behind one server."""

    def __init__(self, engine: AsyncLLM, config: ServerConfig) -> None:
        model = engine.model_config
        self.engine = engine
        self.config = config
        self.model_names = config.served_model_names or (model.served_model_name or model.model,)
        self.created = int(time.time())
        gate = engine.config.reasoning_config
        if engine.config.structured_outputs_config.enable_in_reasoning:
            gate = None
        self.chat_format = ChatFormat(config, model.chat_template, engine.tokenizer, gate)
        self.http_metrics = HttpMetrics(engine.config.observability_config.metrics_prefix)
        self.adapters = Adapters(engine, self.model_names, dict(config.lora_modules))
        self.is_draining = False

    @property
    def model_name(self) -> str:
        return self.model_names[0]

    @property
    def defaults(self) -> dict[str, Any]:
        """Sampling defaults that the model ships with."""
        return self.engine.model_config.generation_defaults

    def check_model(self, name: str | None) -> None:
        """Raise 404 for a model that is not served."""
        served = (*self.model_names, *self.adapters.names)
        if name is not None and name not in served:
            raise ApiError(
                404,
                f"the model {shown(name)} does not exist here; served: {', '.join(served)}",
                "model",
                "model_not_found",
            )

    def shown_name(self, name: str | None) -> str:
        """The model that an answer names: an adapter that was asked for, or the base model."""
        return name if name is not None and name in self.adapters.names else self.model_name

    async def check_generates(self) -> None:
        """Raise 400 where the model only pools."""
        tasks = await self.engine.get_supported_tasks()
        if "generate" not in tasks:
            raise bad_request(
                f"the model {self.model_name!r} does not generate text; it supports: "
                f"{', '.join(tasks)}",
                "model",
                "unsupported_model",
            )

    def check_accepts(self) -> None:
        """Raise 503 while the server is ending."""
        if self.is_draining:
            raise not_ready("the server is shutting down; send the request elsewhere")

    async def check_constraint(self, params: SamplingParams) -> None:
        """Judge a grammar in a thread: a large one must not hold up the streams of others.

        The verdict is kept, so that the admission gate, which asks again, has it at once.

        Raises:
            InvalidParameterError: it is malformed or cannot be satisfied.
        """
        if params.structured_outputs is None:
            return
        from tellin.grammar_validation import validate_structured_outputs

        config = self.engine.config.structured_outputs_config
        await asyncio.to_thread(
            validate_structured_outputs,
            params.structured_outputs,
            disable_any_whitespace=config.disable_any_whitespace,
        )

    def check_num_sequences(self, wanted: int) -> None:
        """Raise 400 for more sequences than could ever be admitted."""
        scheduler = self.engine.config.scheduler_config
        limit = self.engine.config.settings.max_n_sequences
        if scheduler.max_num_queued_reqs is not None:
            limit = min(limit, scheduler.max_num_seqs + scheduler.max_num_queued_reqs)
        if wanted > limit:
            raise bad_request(
                f"the request asks for {wanted} completions (prompts times n); this server takes "
                f"at most {limit} at once",
                "n",
            )


@dataclass
class Job:
    """One prompt on the engine."""

    prompt: RenderedPrompt
    params: SamplingParams
    first_index: int
    """Index of its first choice in the answer."""
    counts_prompt: bool = True
    """Whether the prompt is new: equal choices of one prompt count it once."""
    lora_request: LoRARequest | None = None
    reasoning_ended: bool | None = None
    """Whether the prompt has ended the thoughts that a grammar waits for; None: not known here."""
    name: str | None = None
    """What the request calls the prompt, if it has several: errors say it."""


def names_of(parameter: str, given: object, count: int) -> list[str]:
    """Names of the texts of a parameter: its own if it is a single one, else with their places."""
    return [f"{parameter}[{i}]" for i in range(count)] if isinstance(given, list) else [parameter]


def make_jobs(
    prompts: Sequence[RenderedPrompt],
    params: SamplingParams,
    n: int,
    lora_request: LoRARequest | None = None,
    *,
    reasoning_ended: bool | None = None,
    names: Sequence[str] | None = None,
) -> list[Job]:
    """Jobs for ``n`` choices per prompt. ``params.n`` is 1 where choices are equal (greedy)."""
    return [
        Job(
            prompt,
            params,
            first_index=position * n + copy * params.n,
            counts_prompt=copy == 0,
            lora_request=lora_request,
            reasoning_ended=reasoning_ended,
            name=None if names is None else names[position],
        )
        for position, prompt in enumerate(prompts)
        for copy in range(n // params.n)
    ]


JobTap = Callable[[Job, RequestOutput], bool]


async def run_jobs(
    context: ServingContext, jobs: Sequence[Job], *, priority: int = 0, tap: JobTap | None = None
) -> AsyncGenerator[tuple[Job, RequestOutput], None]:
    """Outputs of all jobs as they come.

    Args:
        tap: of a single job: takes outputs before they come here (see `AsyncLLM.add_request`).

    Raises:
        TellinError, ApiError: one job failed or was refused; the others are aborted.
    """
    if len(jobs) == 1:
        output_tap = None if tap is None else partial(tap, jobs[0])
        async with aclosing(_run_job(context, jobs[0], priority, output_tap)) as stream:
            async for output in stream:
                yield jobs[0], output
        return
    streams = [_run_job(context, job, priority) for job in jobs]
    waiting = {asyncio.ensure_future(anext(stream)): i for i, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for future in done:
                position = waiting.pop(future)
                try:
                    output = future.result()
                except StopAsyncIteration:
                    continue
                yield jobs[position], output
                waiting[asyncio.ensure_future(anext(streams[position]))] = position
    finally:
        for future in waiting:
            future.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for stream in streams:
            await stream.aclose()


async def _run_job(
    context: ServingContext, job: Job, priority: int, tap: OutputTap | None = None
) -> AsyncGenerator[RequestOutput, None]:
    stream = context.engine.generate(
        job.prompt,
        job.params,
        uuid.uuid4().hex,
        timeout_s=context.config.request_timeout_s,
        priority=priority,
        lora_request=job.lora_request,
        reasoning_ended=job.reasoning_ended,
        tap=tap,
    )
    try:
        async with aclosing(stream):
            async for output in stream:
                if output.error is not None:
                    raise output.error
                if any(completion.finish_reason == "abort" for completion in output.outputs):
                    ending = ", which is shutting down" if context.is_draining else ""
                    raise not_ready(f"the request was aborted by the server{ending}")
                yield output
    except RequestError as error:
        if job.name is None:
            raise
        raise about(error, job.name) from error


@dataclass
class UsageCounter:
    """Tokens of one request; every generated id counts once, streamed or not."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    truncated_tokens: int = 0
    _seen: set[int] = field(default_factory=set)

    def add(self, job: Job, output: RequestOutput) -> None:
        if job.first_index not in self._seen:
            self._seen.add(job.first_index)
            if job.counts_prompt:
                self.prompt_tokens += len(output.prompt_token_ids or ())
                self.cached_tokens += output.num_cached_tokens or 0
                self.truncated_tokens += output.num_truncated_prompt_tokens
        for completion in output.outputs:
            self.completion_tokens += len(completion.token_ids)

    def usage(self) -> Usage:
        return Usage(
            self.prompt_tokens,
            self.completion_tokens,
            self.prompt_tokens + self.completion_tokens,
            PromptTokensDetails(self.cached_tokens, self.truncated_tokens or UNSET),
        )


def finish_reason(completion: CompletionOutput, has_calls: bool = False) -> FinishReason | None:
    """OpenAI's word for why a completion ended; None while it goes on."""
    if completion.finish_reason is None:
        return None
    if completion.finish_reason == "length":
        return "length"
    return "tool_calls" if has_calls else "stop"


def stop_reason(completion: CompletionOutput) -> int | str | None:
    """vLLM's extension: what exactly ended it."""
    if completion.finish_reason == "repetition":
        return "repetition"
    return completion.stop_reason


def new_id(prefix: str, wanted: str | None = None) -> str:
    return f"{prefix}-{wanted or uuid.uuid4().hex}"


def event(data: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


class TextSplice:
    """Events that differ in one text only: encoded once, then the text is put in."""

    def __init__(self, example: Any, name: str) -> None:
        """``example``: an event's data, in which the first field ``name`` is an empty string."""
        mark = b'"%b":""' % name.encode()
        head, mark, tail = event(example).partition(mark)
        if not mark:
            raise ValueError(f"no empty {name} in {head!r}")
        self._head = head + mark[:-2]
        self._tail = tail

    def event(self, text: str) -> bytes:
        """The event with this text."""
        return self._head + _encode_text(text) + self._tail


_encode_text = msgspec.json.Encoder().encode


async def stream_events(
    outputs: AsyncGenerator[tuple[Job, RequestOutput], None],
    encode: Callable[[Job, RequestOutput], bytes],
    last_event: Callable[[], bytes] | None = None,
) -> AsyncGenerator[bytes, None]:
    """An answer as it grows, as server-sent events, ``[DONE]`` behind them.

    An error before the first event is raised, a later one is an event.

    Args:
        outputs: of all jobs; closed when the events are.
        encode: events of an output, joined; empty if it has nothing to show.
        last_event: made when all outputs have come.
    """
    has_begun = False
    try:
        async with aclosing(outputs):
            async for job, output in outputs:
                if data := encode(job, output):
                    has_begun = True
                    yield data
        if last_event is not None:
            yield last_event()
    except Exception as error:
        if not has_begun:
            raise
        yield error_event(error)
    yield DONE


def error_event(error: BaseException) -> bytes:
    return event(to_api_error(error).body())
