"""``/v1/responses``: a chat answer, written as output items and, streamed, as events.

Made from the chunks of `PreparedChat`, so both APIs give the same text for the same request.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

import msgspec
from msgspec import UNSET

from tellin.entrypoints.openai.chat import ChatService, PreparedChat
from tellin.entrypoints.openai.errors import to_api_error
from tellin.entrypoints.openai.replies import ChatChunkChoice, ToolCallDelta, Usage
from tellin.entrypoints.openai.responses_request import ResponsesRequest, to_chat_request
from tellin.entrypoints.openai.serving import ServingContext, new_id

Event = dict[str, Any]


class PreparedResponse:
    """A request that is ready to run."""

    def __init__(
        self, context: ServingContext, request: ResponsesRequest, chat: PreparedChat
    ) -> None:
        self._context = context
        self._request = request
        self._chat = chat
        self._id = new_id("resp")
        self._created = int(time.time())
        self._items = ItemWriter()
        self._finish_reason: str | None = None

    async def complete(self) -> Event:
        """The response, when it has ended."""
        async for _ in self._events():
            pass
        return self._response(self._status(), self._chat.usage.usage())

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The response as server-sent events. An error before the first token is raised."""
        number = 0
        has_begun = False
        head = [
            {"type": "response.created", "response": self._response("in_progress")},
            {"type": "response.in_progress", "response": self._response("in_progress")},
        ]
        try:
            async with aclosing(self._events()) as stream:
                async for event in stream:
                    for one in (event,) if has_begun else (*head, event):
                        yield _encode(one, number)
                        number += 1
                    has_begun = True
            status = self._status()
            response = self._response(status, self._chat.usage.usage())
            yield _encode({"type": f"response.{status}", "response": response}, number)
        except Exception as error:
            if not has_begun:
                raise
            response = self._response("failed")
            response["error"] = {"code": "server_error", "message": to_api_error(error).message}
            yield _encode({"type": "response.failed", "response": response}, number)

    @property
    def shortcut(self) -> None:
        """None: an event's number tells how many came before it, whichever way they came."""

    async def _events(self) -> AsyncGenerator[Event, None]:
        async with aclosing(self._chat.chunks()) as stream:
            async for chunk in stream:
                for choice in chunk.choices:
                    self._finish_reason = choice.finish_reason
                    for event in self._items.take(choice):
                        yield event
        self._items.is_cut_off = self._finish_reason == "length"
        for event in self._items.close():
            yield event

    def _status(self) -> str:
        return "incomplete" if self._finish_reason == "length" else "completed"

    def _response(self, status: str, usage: Usage | None = None) -> Event:
        request = self._request
        params = self._chat.jobs[0].params
        dump = request.model_dump(by_alias=True)
        text = dump["text"] or {"format": {"type": "text"}}
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"}
            if status == "incomplete"
            else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "model": self._chat.model_name,
            "output": list(self._items.items),
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": params.temperature,
            "text": text,
            "tool_choice": dump["tool_choice"] or "auto",
            "tools": dump["tools"] or [],
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None if usage is None else _usage(usage),
            "user": request.user,
        }


class ItemWriter:
    """Collects output items from chat deltas; one is open at a time."""

    def __init__(self) -> None:
        self.items: list[Event] = []
        self.is_cut_off = False
        self._open: Event | None = None

    def take(self, choice: ChatChunkChoice) -> Iterator[Event]:
        """Events for what a chunk adds."""
        delta = choice.delta
        if delta.reasoning_content is not UNSET:
            yield from self._text("reasoning", delta.reasoning_content)
        if delta.content is not UNSET and delta.content:
            yield from self._text("message", delta.content)
        if delta.tool_calls is not UNSET:
            for call in delta.tool_calls:
                yield from self._call(call)

    def close(self) -> Iterator[Event]:
        """Events that end the open item."""
        item, self._open = self._open, None
        if item is None:
            return
        item["status"] = "incomplete" if self.is_cut_off else "completed"
        place = {"item_id": item["id"], "output_index": len(self.items) - 1}
        if item["type"] == "function_call":
            yield {
                "type": "response.function_call_arguments.done",
                "name": item["name"],
                "arguments": item["arguments"],
                **place,
            }
        else:
            part = item["content"][0]
            place["content_index"] = 0
            yield {**_text_event(item, "done"), "text": part["text"], **place}
            if item["type"] == "message":
                yield {"type": "response.content_part.done", "part": part, **place}
            place.pop("content_index")
        yield {
            "type": "response.output_item.done",
            "output_index": place["output_index"],
            "item": item,
        }

    def _begin(self, item: Event) -> Iterator[Event]:
        yield from self.close()
        self.items.append(item)
        self._open = item
        yield {
            "type": "response.output_item.added",
            "output_index": len(self.items) - 1,
            "item": {**item, **({"content": []} if "content" in item else {})},
        }

    def _text(self, kind: str, text: str) -> Iterator[Event]:
        if self._open is None or self._open["type"] != kind:
            yield from self._begin(_new_text_item(kind))
            if kind == "message":
                yield {
                    "type": "response.content_part.added",
                    "item_id": self.items[-1]["id"],
                    "output_index": len(self.items) - 1,
                    "content_index": 0,
                    "part": dict(self.items[-1]["content"][0]),
                }
        item = self.items[-1]
        item["content"][0]["text"] += text
        yield {
            **_text_event(item, "delta"),
            "item_id": item["id"],
            "output_index": len(self.items) - 1,
            "content_index": 0,
            "delta": text,
        }

    def _call(self, call: ToolCallDelta) -> Iterator[Event]:
        if call.function.name is not UNSET:
            yield from self._begin(
                {
                    "type": "function_call",
                    "id": new_id("fc"),
                    "call_id": call.id,
                    "name": call.function.name,
                    "arguments": "",
                    "status": "in_progress",
                }
            )
        if call.function.arguments:
            item = self.items[-1]
            item["arguments"] += call.function.arguments
            yield {
                "type": "response.function_call_arguments.delta",
                "item_id": item["id"],
                "output_index": len(self.items) - 1,
                "delta": call.function.arguments,
            }


class ResponsesService:
    def __init__(self, context: ServingContext) -> None:
        self._context = context
        self._chat = ChatService(context)

    async def prepare(self, request: ResponsesRequest) -> PreparedResponse:
        """Check and render a request; nothing runs yet.

        Raises:
            ApiError, ValidationError, TellinError: the request cannot be served.
        """
        chat_request = to_chat_request(request)
        # Both kinds of answers are made from deltas.
        chat_request.stream = True
        chat = await self._chat.prepare(chat_request)
        return PreparedResponse(self._context, request, chat)


def _new_text_item(kind: str) -> Event:
    if kind == "reasoning":
        part: Event = {"type": "reasoning_text", "text": ""}
        return {"type": kind, "id": new_id("rs"), "summary": [], "content": [part],
                "status": "in_progress"}  # fmt: skip
    part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    return {"type": kind, "id": new_id("msg"), "role": "assistant", "content": [part],
            "status": "in_progress"}  # fmt: skip


def _text_event(item: Event, what: str) -> Event:
    if item["type"] == "reasoning":
        return {"type": f"response.reasoning_text.{what}"}
    return {"type": f"response.output_text.{what}", "logprobs": []}


def _usage(usage: Usage) -> Event:
    details = usage.prompt_tokens_details
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0 if details is None else details.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.total_tokens,
    }


def _encode(event: Event, number: int) -> bytes:
    data: bytes = msgspec.json.encode({**event, "sequence_number": number})
    kind: str = event["type"]
    return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"
