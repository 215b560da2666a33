"""``/v1/completions``: text from text, with echo and scoring of prompts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from tellin.config import ModelConfig
from tellin.engine.prompt_embeds import prompt_rows, read_base64
from tellin.engine.prompts import RenderedPrompt, TokenizeParams, is_token_ids
from tellin.entrypoints.openai.errors import about, bad_request
from tellin.entrypoints.openai.logprobs import LogprobWriter, prompt_logprobs
from tellin.entrypoints.openai.replies import Completion, CompletionChoice, CompletionLogprobs
from tellin.entrypoints.openai.requests import CompletionRequest
from tellin.entrypoints.openai.sampling import check_best_of, make_sampling_params, split_n
from tellin.entrypoints.openai.serving import (
    Job,
    ServingContext,
    TextSplice,
    UsageCounter,
    event,
    finish_reason,
    make_jobs,
    names_of,
    new_id,
    run_jobs,
    stop_reason,
    stream_events,
)
from tellin.entrypoints.openai.shortcut import Shortcut
from tellin.exceptions import RequestError
from tellin.outputs import CompletionOutput, RequestOutput
from tellin.sampling_params import SamplingParams


class PreparedCompletion:
    """A request that is ready to run."""

    def __init__(
        self, context: ServingContext, request: CompletionRequest, jobs: list[Job], n: int
    ) -> None:
        self.context = context
        self.request = request
        self.jobs = jobs
        self.model_name = context.shown_name(request.model)
        self.id = new_id("cmpl", request.request_id)
        self.created = int(time.time())
        self.usage = UsageCounter()
        self._is_scoring = request.max_tokens == 0
        self._begun: set[int] = set()
        self._offsets: dict[int, int] = {}
        self._logprobs = None
        self._table = context.engine.output_processor.token_table
        if request.logprobs is not None:
            as_ids = bool(request.return_tokens_as_token_ids)
            self._logprobs = LogprobWriter(request.logprobs, self._table, as_ids=as_ids)
        self.shortcut = Shortcut(self.encode)
        options = request.stream_options
        self._wants_usage = options is not None and bool(options.include_usage)
        self._continuous = options is not None and bool(options.continuous_usage_stats)
        self._always = self._logprobs is not None or bool(request.return_token_ids)
        """Whether chunks without text are sent too."""
        self._splices: dict[int, TextSplice] = {}
        """Chunks of the choices that have begun and show nothing but text."""

    def _outputs(self) -> AsyncGenerator[tuple[Job, RequestOutput], None]:
        return run_jobs(
            self.context, self.jobs, priority=self.request.priority, tap=self.shortcut.take
        )

    def _note(self, job: Job, output: RequestOutput) -> None:
        """Count an output; called once for each."""
        if self._is_scoring:
            _drop_generated(output)
        self.usage.add(job, output)

    async def complete(self) -> Completion:
        """The answer, when all choices have ended."""
        choices: list[CompletionChoice] = []
        async with aclosing(self._outputs()) as stream:
            async for job, output in stream:
                self._note(job, output)
                choices.extend(self._choice(job, output, item) for item in output.outputs)
        choices.sort(key=lambda choice: choice.index)
        return self._reply(choices, self.usage.usage())

    def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as it grows, as server-sent events; see `stream_events`.

        A last event without choices holds the usage, if wanted.
        """
        last_event = self._usage_event if self._wants_usage else None
        return stream_events(self._outputs(), self.encode, last_event)

    def encode(self, job: Job, output: RequestOutput) -> bytes:
        """Events of an output, joined; empty if there is nothing to show."""
        self._note(job, output)
        if len(output.outputs) == 1:
            return self._event(job, output, output.outputs[0])
        return b"".join([self._event(job, output, completion) for completion in output.outputs])

    def _event(self, job: Job, output: RequestOutput, completion: CompletionOutput) -> bytes:
        index = job.first_index + completion.index
        splice = self._splices.get(index)
        if splice is not None and completion.finish_reason is None:
            return splice.event(completion.text) if completion.text else b""
        choice = self._choice(job, output, completion)
        if not (choice.text or choice.finish_reason or self._always):
            return b""
        reply = self._reply([choice])
        if self._continuous:
            reply.usage = self.usage.usage()
        elif self._wants_usage:
            reply.usage = None
        if not self._continuous and not self._always:
            self._splices[index] = self._splice(index, reply)
        return event(reply)

    def _usage_event(self) -> bytes:
        return event(self._reply([], self.usage.usage()))

    def _splice(self, index: int, reply: Completion) -> TextSplice:
        example = self._reply([CompletionChoice(index, "")])
        example.usage = reply.usage
        return TextSplice(example, "text")

    # ------------------------------------------------------------------ parts

    def _reply(self, choices: list[CompletionChoice], usage: Any = None) -> Completion:
        reply = Completion(self.id, self.created, self.model_name, choices)
        if usage is not None:
            reply.usage = usage
        return reply

    def _choice(
        self, job: Job, output: RequestOutput, completion: CompletionOutput
    ) -> CompletionChoice:
        """What is new of a choice: all of it, or a delta. The first one has the echo."""
        request = self.request
        index = job.first_index + completion.index
        is_first = index not in self._begun
        self._begun.add(index)
        echo = self._echo(job, output) if is_first and request.echo else ""
        choice = CompletionChoice(index, echo + completion.text, finish_reason(completion))
        if completion.finished():
            choice.stop_reason = stop_reason(completion)
        if self._logprobs is not None:
            choice.logprobs = self._choice_logprobs(index, output, completion, is_first)
        if is_first and request.prompt_logprobs is not None:
            choice.prompt_logprobs = prompt_logprobs(output.prompt_logprobs) or []
        if request.return_token_ids:
            choice.token_ids = completion.token_ids
            if is_first:
                choice.prompt_token_ids = output.prompt_token_ids or []
        return choice

    def _echo(self, job: Job, output: RequestOutput) -> str:
        text = job.prompt.get("prompt")
        if text is None or output.num_truncated_prompt_tokens:
            tokenizer = self.context.engine.get_tokenizer()
            text = tokenizer.decode(output.prompt_token_ids or [], skip_special_tokens=False)
        return text

    def _choice_logprobs(
        self, index: int, output: RequestOutput, completion: CompletionOutput, is_first: bool
    ) -> CompletionLogprobs:
        writer = self._logprobs
        assert writer is not None
        ids = list(completion.token_ids)
        positions: list[Any] = list(completion.logprobs or ())
        if is_first and self.request.echo:
            ids = [*(output.prompt_token_ids or ()), *ids]
            positions = [*(output.prompt_logprobs or ()), *positions]
        offset = self._offsets.get(index, 0)
        logprobs, self._offsets[index] = writer.completion(ids, positions, offset)
        return logprobs


class CompletionService:
    """Prepares requests."""

    def __init__(self, context: ServingContext) -> None:
        self.context = context

    async def prepare(self, request: CompletionRequest) -> PreparedCompletion:
        """Check and render a request; nothing runs yet.

        Raises:
            ApiError, TellinError: the request cannot be served.
        """
        context = self.context
        context.check_model(request.model)
        context.check_accepts()
        _check(request)
        n, params_n = split_n(request, context.defaults)
        params = self._params(request, params_n)
        await context.check_constraint(params)
        given = await self._given(request)
        prompts = [prompt for prompt, _ in given]
        context.check_num_sequences(n * len(prompts))
        tok_params = TokenizeParams(request.add_special_tokens).with_options(
            {"truncate_prompt_tokens": request.truncate_prompt_tokens}
        )
        extras = None if request.cache_salt is None else {"cache_salt": request.cache_salt}
        rendered: list[RenderedPrompt] = await context.engine.renderer.render_cmpl_async(
            prompts, tok_params, extras
        )
        names = [name for _, name in given] if len(prompts) > 1 else None
        lora_request = context.adapters.get(request.model)
        jobs = make_jobs(rendered, params, n, lora_request, names=names)
        return PreparedCompletion(context, request, jobs, n)

    async def _given(self, request: CompletionRequest) -> list[tuple[Any, str]]:
        """The prompts of a request, embeddings first, each with what the request calls it."""
        given: list[tuple[Any, str]] = []
        if request.prompt_embeds is not None:
            embeds = request.prompt_embeds
            texts = [embeds] if isinstance(embeds, str) else embeds
            self.context.check_num_sequences(len(texts))
            names = names_of("prompt_embeds", embeds, len(texts))
            model = self.context.engine.model_config
            arrays = await asyncio.to_thread(_read_embeds, texts, names, model)
            given += zip(({"prompt_embeds": rows} for rows in arrays), names, strict=True)
            if not request.prompt:  # a client that has to send one sends an empty one
                return given
        prompts = prompts_of(request.prompt)
        names = names_of("prompt", prompts, len(prompts))
        return [*given, *zip(prompts, names, strict=True)]

    def _params(self, request: CompletionRequest, params_n: int) -> SamplingParams:
        overrides: dict[str, Any] = {"n": params_n}
        if request.echo and request.logprobs is not None:
            overrides["prompt_logprobs"] = request.logprobs
        max_tokens = request.max_tokens
        if max_tokens == 0:
            # Scoring: the engine computes one position more, which is dropped.
            max_tokens, overrides["min_tokens"] = 1, 0
        return make_sampling_params(
            request,
            self.context.defaults,
            max_tokens=max_tokens,
            logprobs=request.logprobs,
            **overrides,
        )


def _read_embeds(texts: list[str], names: list[str], model: ModelConfig) -> list[Any]:
    """The rows in each file; an error says which of the prompts it is about."""
    rows = []
    for text, name in zip(texts, names, strict=True):
        try:
            if model.enable_prompt_embeds:
                rows.append(prompt_rows(read_base64(text), model))
            else:
                prompt_rows(None, model)  # says that they are off
        except RequestError as error:
            raise about(error, name) from error
    return rows


def prompts_of(given: Any) -> list[Any]:
    """The prompts of a request: one text, texts, one list of ids, or lists of ids."""
    return [given] if isinstance(given, str) or is_token_ids(given) else list(given)


def _check(request: CompletionRequest) -> None:
    if request.suffix is not None:
        raise bad_request("suffix is not supported: this server continues texts only", "suffix")
    check_best_of(request)
    if request.max_tokens == 0 and not request.echo:
        raise bad_request(
            "max_tokens=0 makes sense only with echo=true, to score a prompt", "max_tokens"
        )
    if request.stream and request.echo and request.logprobs is not None:
        raise bad_request("echo with logprobs cannot be streamed; set stream=false", "stream")


def _drop_generated(output: RequestOutput) -> None:
    for completion in output.outputs:
        completion.text = ""
        completion.token_ids = []
        completion.logprobs = None if completion.logprobs is None else []
        completion.stop_reason = None
        if completion.finished():
            completion.finish_reason = "length"
