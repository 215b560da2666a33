"""``/v1/chat/completions``: from a conversation to an answer, whole or streamed."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from tellin.engine.prompts import RenderedPrompt, TokenizeParams
from tellin.engine.renderer import ChatParams
from tellin.entrypoints.openai.chat_choice import ChatChoiceWriter, ChoiceOptions
from tellin.entrypoints.openai.chat_format import Constraint
from tellin.entrypoints.openai.errors import bad_request
from tellin.entrypoints.openai.logprobs import LogprobWriter, prompt_logprobs
from tellin.entrypoints.openai.replies import (
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
)
from tellin.entrypoints.openai.requests import ChatCompletionRequest
from tellin.entrypoints.openai.sampling import check_best_of, make_sampling_params, split_n
from tellin.entrypoints.openai.serving import (
    Job,
    ServingContext,
    TextSplice,
    UsageCounter,
    event,
    make_jobs,
    new_id,
    run_jobs,
    stream_events,
)
from tellin.entrypoints.openai.shortcut import Shortcut
from tellin.entrypoints.openai.tools import ToolPlan, plan_tools, wants_json
from tellin.outputs import CompletionOutput, RequestOutput
from tellin.sampling_params import SamplingParams

RESERVED_TEMPLATE_NAMES = frozenset(
    {
        "messages",
        "tools",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "bos_token",
        "eos_token",
        "self",
    }
)


class PreparedChat:
    """A conversation that is ready to run."""

    def __init__(
        self,
        context: ServingContext,
        request: ChatCompletionRequest,
        prompt: RenderedPrompt,
        jobs: list[Job],
        plan: ToolPlan,
        n: int,
    ) -> None:
        self.context = context
        self.request = request
        self.jobs = jobs
        self.model_name = context.shown_name(request.model)
        self.id = new_id("chatcmpl", request.request_id)
        self.created = int(time.time())
        self.usage = UsageCounter()
        logprobs = None
        if request.logprobs:
            table = context.engine.output_processor.token_table
            as_ids = bool(request.return_tokens_as_token_ids)
            logprobs = LogprobWriter(request.top_logprobs or 0, table, as_ids=as_ids)
        options = ChoiceOptions(
            logprobs=logprobs,
            return_token_ids=bool(request.return_token_ids),
            include_reasoning=request.include_reasoning,
            id_length=plan.id_length,
        )
        constraint = _constraint(request, plan)
        self.choices = []
        for index in range(n):
            parser = context.chat_format.make_parser(
                prompt.get("prompt") or "",
                constraint,
                plan.make_parser(),
                names=plan.names,
                max_calls=plan.max_calls,
            )
            self.choices.append(ChatChoiceWriter(index, parser, options))
        self.shortcut = Shortcut(self.encode)
        stream_options = request.stream_options
        self._wants_usage = stream_options is not None and bool(stream_options.include_usage)
        self._continuous = stream_options is not None and bool(
            stream_options.continuous_usage_stats
        )
        self._wants_prompt_ids = bool(request.return_token_ids)
        self._splices: dict[int, TextSplice] = {}
        """Chunks of the choices that have begun and show nothing but text."""

    def _outputs(self) -> AsyncGenerator[tuple[Job, RequestOutput], None]:
        return run_jobs(
            self.context, self.jobs, priority=self.request.priority, tap=self.shortcut.take
        )

    # ------------------------------------------------------------------ whole

    async def complete(self) -> ChatCompletion:
        """The answer, when all choices have ended."""
        choices = []
        first: RequestOutput | None = None
        async with aclosing(self._outputs()) as stream:
            async for job, output in stream:
                self.usage.add(job, output)
                first = first or output
                for completion in output.outputs:
                    writer = self.choices[job.first_index + completion.index]
                    choices.append(writer.whole(completion))
        choices.sort(key=lambda choice: choice.index)
        reply = ChatCompletion(self.id, self.created, self.model_name, choices, self.usage.usage())
        if first is not None and self.request.prompt_logprobs is not None:
            reply.prompt_logprobs = prompt_logprobs(first.prompt_logprobs) or []
        if first is not None and self.request.return_token_ids:
            reply.prompt_token_ids = first.prompt_token_ids or []
        return reply

    # ------------------------------------------------------------------ streamed

    async def chunks(self) -> AsyncGenerator[ChatChunk, None]:
        """The answer as it grows; a last chunk without choices holds the usage, if wanted."""
        async with aclosing(self._outputs()) as stream:
            async for job, output in stream:
                self.usage.add(job, output)
                for completion in output.outputs:
                    for chunk in self._chunks_of(job, output, completion):
                        yield chunk
        if self._wants_usage:
            yield self._usage_chunk()

    def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as it grows, as server-sent events; see `stream_events`."""
        last_event = self._usage_event if self._wants_usage else None
        return stream_events(self._outputs(), self.encode, last_event)

    def encode(self, job: Job, output: RequestOutput) -> bytes:
        """Events of an output, joined; empty if there is nothing to show."""
        self.usage.add(job, output)
        if len(output.outputs) == 1:
            return self._events_of(job, output, output.outputs[0])
        return b"".join([self._events_of(job, output, item) for item in output.outputs])

    def _events_of(self, job: Job, output: RequestOutput, completion: CompletionOutput) -> bytes:
        index = job.first_index + completion.index
        splice = self._splices.get(index)
        if splice is not None and completion.finish_reason is None:
            return splice.event(completion.text) if completion.text else b""
        chunks = self._chunks_of(job, output, completion)
        if chunks and not self._continuous and self.choices[index].shows_text_only:
            example = self._chunk(ChatChunkChoice(index, ChatDelta(content="")))
            self._splices[index] = TextSplice(example, "content")
        return b"".join([event(chunk) for chunk in chunks])

    def _chunks_of(
        self, job: Job, output: RequestOutput, completion: CompletionOutput
    ) -> list[ChatChunk]:
        writer = self.choices[job.first_index + completion.index]
        chunks = [self._chunk(choice) for choice in writer.delta(completion)]
        if chunks and self._wants_prompt_ids:
            self._wants_prompt_ids = False
            chunks[0].prompt_token_ids = output.prompt_token_ids or []
        return chunks

    def _chunk(self, choice: ChatChunkChoice) -> ChatChunk:
        chunk = ChatChunk(self.id, self.created, self.model_name, [choice])
        if self._continuous:
            chunk.usage = self.usage.usage()
        elif self._wants_usage:
            chunk.usage = None
        return chunk

    def _usage_event(self) -> bytes:
        return event(self._usage_chunk())

    def _usage_chunk(self) -> ChatChunk:
        return ChatChunk(self.id, self.created, self.model_name, [], usage=self.usage.usage())


class ChatService:
    """Prepares conversations."""

    def __init__(self, context: ServingContext) -> None:
        self.context = context

    async def prepare(self, request: ChatCompletionRequest) -> PreparedChat:
        """Check and render a request; nothing runs yet.

        Raises:
            ApiError, TellinError: the request cannot be served.
        """
        context = self.context
        context.check_model(request.model)
        context.check_accepts()
        await context.check_generates()
        check_best_of(request)
        plan = plan_tools(request, context.chat_format)
        params, n = self._params(request, plan)
        context.check_num_sequences(n)
        await context.check_constraint(params)
        prompt = await self._render(request, plan)
        # Stop strings count in what is visible, not in thoughts (where those are parted).
        text, constraint = prompt.get("prompt") or "", _constraint(request, plan)
        params.stop_outside = context.chat_format.thought_marks(text, constraint)
        jobs = make_jobs(
            [prompt],
            params,
            n,
            context.adapters.get(request.model),
            reasoning_ended=context.chat_format.reasoning_ended(text, constraint),
        )
        return PreparedChat(context, request, prompt, jobs, plan, n)

    def _params(self, request: ChatCompletionRequest, plan: ToolPlan) -> tuple[SamplingParams, int]:
        n, params_n = split_n(request, self.context.defaults)
        overrides: dict[str, Any] = {"n": params_n}
        needs_special = self.context.chat_format.needs_special_tokens(plan.is_active)
        if needs_special and request.skip_special_tokens is None:
            overrides["skip_special_tokens"] = False
        max_tokens = request.max_completion_tokens
        params = make_sampling_params(
            request,
            self.context.defaults,
            max_tokens=request.max_tokens if max_tokens is None else max_tokens,
            logprobs=(request.top_logprobs or 0) if request.logprobs else None,
            constraint=plan.constraint,
            **overrides,
        )
        return params, n

    async def render(self, request: ChatCompletionRequest) -> RenderedPrompt:
        """The prompt of a request that is not to run. Raises: as `prepare`."""
        self.context.check_model(request.model)
        return await self._render(request, plan_tools(request, self.context.chat_format))

    async def _render(self, request: ChatCompletionRequest, plan: ToolPlan) -> RenderedPrompt:
        tok_params = TokenizeParams(request.add_special_tokens).with_options(
            {"truncate_prompt_tokens": request.truncate_prompt_tokens}
        )
        if (
            request.chat_template is not None
            and not self.context.config.trust_request_chat_template
        ):
            raise bad_request(
                "chat_template in requests is off: a template is a program; start the server "
                "with --trust-request-chat-template to allow it",
                "chat_template",
            )
        return await render_chat(
            self.context,
            request.messages,
            plan.tools,
            ChatParams(
                chat_template=request.chat_template,
                add_generation_prompt=request.add_generation_prompt
                and not request.continue_final_message,
                continue_final_message=request.continue_final_message,
                chat_template_kwargs=self._template_kwargs(request),
            ),
            tok_params,
            request.cache_salt,
        )

    def _template_kwargs(self, request: ChatCompletionRequest) -> dict[str, Any]:
        kwargs = check_template_kwargs(request.chat_template_kwargs)
        if request.documents is not None:
            kwargs = {"documents": request.documents, **kwargs}
        effort = request.reasoning_effort
        if effort is None:
            return kwargs
        chat_format = self.context.chat_format
        if chat_format.has_effort:
            return {"reasoning_effort": effort, **kwargs}
        if chat_format.has_thinking_switch:
            return {"enable_thinking": effort != "none", **kwargs}
        raise bad_request(
            "reasoning_effort is not supported by this model: its chat template does not use it",
            "reasoning_effort",
            "unsupported_parameter",
        )


def _constraint(request: ChatCompletionRequest, plan: ToolPlan) -> Constraint:
    """What the request's grammar, if it has one, describes."""
    if plan.is_forced or wants_json(request):
        return Constraint.ANSWER
    return Constraint.NONE if request.structured_outputs is None else Constraint.TEXT


def check_template_kwargs(kwargs: dict[str, Any] | None) -> dict[str, Any]:
    """A copy; raises 400 for names that the server sets itself."""
    taken = sorted(RESERVED_TEMPLATE_NAMES & set(kwargs or ()))
    if taken:
        raise bad_request(
            f"chat_template_kwargs must not set {taken[0]!r}, which has its own parameter",
            "chat_template_kwargs",
        )
    return dict(kwargs or {})


async def render_chat(
    context: ServingContext,
    messages: Sequence[dict[str, Any]],
    tools: Sequence[dict[str, Any]] | None,
    params: ChatParams,
    tok_params: TokenizeParams,
    cache_salt: str | None = None,
) -> RenderedPrompt:
    """The prompt of a conversation, as the model's template wants it."""
    prepared, shown = context.chat_format.prepare(messages, tools)
    chat = ChatParams(
        chat_template=params.chat_template,
        add_generation_prompt=params.add_generation_prompt,
        continue_final_message=params.continue_final_message,
        tools=shown,
        chat_template_kwargs=params.chat_template_kwargs,
    )
    extras = None if cache_salt is None else {"cache_salt": cache_salt}
    _, rendered = await context.engine.renderer.render_chat_async(
        [prepared], chat, tok_params, extras
    )
    return rendered[0]
