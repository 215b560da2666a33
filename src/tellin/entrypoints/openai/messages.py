"""``/v1/messages``: a chat answer in the shape of Anthropic's API, whole or as events.

Made from the chunks of `PreparedChat`, so all APIs give the same text for the same request.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

import msgspec
from msgspec import UNSET

from tellin.entrypoints.openai.chat import ChatService, PreparedChat
from tellin.entrypoints.openai.errors import MESSAGES_PATH, to_api_error
from tellin.entrypoints.openai.messages_request import (
    CountTokensRequest,
    MessagesRequest,
    PromptOfMessages,
    to_chat_request,
)
from tellin.entrypoints.openai.replies import ChatChunkChoice, ToolCallDelta, Usage
from tellin.entrypoints.openai.requests import ChatCompletionRequest
from tellin.entrypoints.openai.serving import ServingContext, new_id

Event = dict[str, Any]


class PreparedMessage:
    """A request that is ready to run."""

    def __init__(self, request: MessagesRequest, chat: PreparedChat) -> None:
        self._request = request
        self._chat = chat
        self._id = new_id("msg")
        self._blocks = BlockWriter()
        self._last: ChatChunkChoice | None = None

    async def complete(self) -> Event:
        """The message, when it has ended."""
        async for _ in self._events():
            pass
        message = self._message(self._blocks.finished(), self._chat.usage.usage())
        return {**message, **self._stop()}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The message as server-sent events. An error before the first token is raised."""
        has_begun = False
        try:
            async with aclosing(self._events()) as stream:
                async for event in stream:
                    if not has_begun:
                        usage = self._chat.usage.usage()
                        yield _encode(
                            {"type": "message_start", "message": self._message([], usage)}
                        )
                        has_begun = True
                    if event:
                        yield _encode(event)
            usage = self._chat.usage.usage()
            yield _encode({"type": "message_delta", "delta": self._stop(), "usage": _usage(usage)})
            yield _encode({"type": "message_stop"})
        except Exception as error:
            if not has_begun:
                raise
            yield _encode(to_api_error(error).body(MESSAGES_PATH))

    @property
    def shortcut(self) -> None:
        """None: an event belongs to a block, which others begin and end."""

    async def _events(self) -> AsyncGenerator[Event, None]:
        """Events of the blocks; an empty one for a chunk that changes none."""
        async with aclosing(self._chat.chunks()) as stream:
            async for chunk in stream:
                for choice in chunk.choices:
                    self._last = choice
                    yield {}
                    for event in self._blocks.take(choice):
                        yield event
        for event in self._blocks.close():
            yield event

    def _message(self, content: list[Event], usage: Usage) -> Event:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._chat.model_name,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(usage),
        }

    def _stop(self) -> Event:
        """Why it ended, in Anthropic's words."""
        last = self._last
        matched = None if last is None else last.stop_reason
        if isinstance(matched, str) and matched in (self._request.stop_sequences or ()):
            return {"stop_reason": "stop_sequence", "stop_sequence": matched}
        finish_reason = None if last is None else last.finish_reason
        reason = {"length": "max_tokens", "tool_calls": "tool_use"}.get(
            finish_reason or "", "end_turn"
        )
        num_tokens = self._chat.usage.completion_tokens
        if reason == "max_tokens" and num_tokens < self._request.max_tokens:
            reason = "model_context_window_exceeded"
        return {"stop_reason": reason, "stop_sequence": None}


class BlockWriter:
    """Collects content blocks from chat deltas; one is open at a time."""

    def __init__(self) -> None:
        self._blocks: list[Event] = []
        self._arguments: dict[int, str] = {}
        """Of each call, by its block's index."""
        self._open: str | None = None

    def finished(self) -> list[Event]:
        """All blocks. A call whose arguments were cut off is left out: it is none to be made."""
        blocks = []
        for index, block in enumerate(self._blocks):
            if block["type"] == "tool_use":
                try:
                    block["input"] = json.loads(self._arguments[index] or "{}")
                except ValueError:
                    continue
            blocks.append(block)
        return blocks

    def take(self, choice: ChatChunkChoice) -> Iterator[Event]:
        """Events for what a chunk adds."""
        delta = choice.delta
        if delta.reasoning_content is not UNSET:
            yield from self._text("thinking", delta.reasoning_content)
        if delta.content is not UNSET and delta.content:
            yield from self._text("text", delta.content)
        if delta.tool_calls is not UNSET:
            for call in delta.tool_calls:
                yield from self._call(call)

    def close(self) -> Iterator[Event]:
        """The event that ends the open block, if there is one."""
        if self._open is not None:
            self._open = None
            yield {"type": "content_block_stop", "index": len(self._blocks) - 1}

    def _begin(self, block: Event) -> Iterator[Event]:
        yield from self.close()
        self._blocks.append(block)
        self._open = block["type"]
        index = len(self._blocks) - 1
        yield {"type": "content_block_start", "index": index, "content_block": dict(block)}

    def _text(self, kind: str, text: str) -> Iterator[Event]:
        if self._open != kind:
            signature = {"signature": ""} if kind == "thinking" else {}
            yield from self._begin({"type": kind, kind: "", **signature})
        self._blocks[-1][kind] += text
        yield self._delta({"type": f"{kind}_delta", kind: text})

    def _call(self, call: ToolCallDelta) -> Iterator[Event]:
        if call.function.name is not UNSET:
            block: Event = {
                "type": "tool_use",
                "id": call.id,
                "name": call.function.name,
                "input": {},
            }
            yield from self._begin(block)
            self._arguments[len(self._blocks) - 1] = ""
        if call.function.arguments:
            self._arguments[len(self._blocks) - 1] += call.function.arguments
            yield self._delta({"type": "input_json_delta", "partial_json": call.function.arguments})

    def _delta(self, delta: Event) -> Event:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}


class MessagesService:
    def __init__(self, context: ServingContext) -> None:
        self._context = context
        self._chat = ChatService(context)

    async def prepare(self, request: MessagesRequest) -> PreparedMessage:
        """Check and render a request; nothing runs yet.

        Raises:
            ApiError, ValidationError, TellinError: the request cannot be served.
        """
        chat_request = self._chat_request(request)
        chat_request.stream = True  # both kinds of answers are made from deltas
        return PreparedMessage(request, await self._chat.prepare(chat_request))

    async def count_tokens(self, request: CountTokensRequest) -> Event:
        """Tokens of the prompt that the messages make. Raises: as `prepare`."""
        prompt = await self._chat.render(self._chat_request(request))
        return {"input_tokens": len(prompt["prompt_token_ids"])}

    def _chat_request(self, request: PromptOfMessages) -> ChatCompletionRequest:
        chat_request = to_chat_request(request)
        chat_format = self._context.chat_format
        thinking = request.thinking
        if thinking is not None:
            is_on = thinking.type != "disabled"
            chat_request.include_reasoning = is_on and thinking.display != "omitted"
            if chat_format.has_thinking_switch:
                chat_request.chat_template_kwargs = {"enable_thinking": is_on}
            if is_on and self._context.engine.config.reasoning_config is not None:
                chat_request.thinking_token_budget = thinking.budget_tokens
        effort = None if request.output_config is None else request.output_config.effort
        if effort is not None and chat_format.has_effort:
            chat_request.reasoning_effort = "xhigh" if effort == "max" else effort
        return chat_request


def _usage(usage: Usage) -> Event:
    """Cached tokens are no part of ``input_tokens`` here."""
    details = usage.prompt_tokens_details
    cached = 0 if details is None else details.cached_tokens
    return {
        "input_tokens": usage.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.completion_tokens,
    }


def _encode(event: Event) -> bytes:
    data: bytes = msgspec.json.encode(event)
    kind: str = event["type"]
    return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"
