"""Between ASGI and services: reading bodies, answering, noticing that a client has gone.

A request's work runs as a task that is cancelled when its client disconnects, whether the answer is
streamed, still queued, or not streamed at all; cancelling aborts it in the engine.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tellin.entrypoints.openai.errors import ApiError, bad_request
from tellin.entrypoints.openai.shortcut import Shortcut

logger = logging.getLogger("tellin.server")

Model = TypeVar("Model", bound=BaseModel)
Result = TypeVar("Result")
CLIENT_CLOSED_REQUEST = 499
"""Status in the log of a request whose client went away; nobody receives it."""


def json_reply(data: Any, status: int = 200) -> Response:
    """Any struct or plain data as JSON."""
    return Response(msgspec.json.encode(data), status, media_type="application/json")


def error_reply(error: ApiError, path: str) -> Response:
    """The answer to a request for ``path`` that failed."""
    return Response(
        error.encode(path), error.status, headers=error.headers, media_type="application/json"
    )


def body_reader(model: type[Model], timeout_s: float) -> Callable[[Request], Awaitable[Model]]:
    """A dependency that reads and checks a body.

    Only ``application/json`` is read: a web page can send other types to a server on this machine
    without the browser asking first.
    """

    async def read(request: Request) -> Model:
        media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media_type != "application/json":
            raise bad_request(
                f"Content-Type must be application/json, got {media_type or 'none'!r}",
                code="invalid_content_type",
            )
        try:
            async with asyncio.timeout(timeout_s):
                body = await request.body()
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive within {timeout_s:g} s") from None
        except ClientDisconnect:
            raise ApiError(CLIENT_CLOSED_REQUEST, "the client went while it sent") from None
        return model.model_validate_json(body)

    return read


async def until_disconnect(
    request: Request, work: Coroutine[Any, Any, Result]
) -> Result | Response:
    """Run ``work``, cancelled if the client goes away. The body has been read."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_wait_for_disconnect(request.receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    finally:
        watcher.cancel()
        if not task.done():
            task.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events. A slow reader holds up its own stream only: outputs wait merged.

    What fails before the first event is raised, and nothing has been sent: it gets its own status.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[bytes, None], shortcut: Shortcut | None = None
    ) -> None:
        """``shortcut``: takes outputs, while it is open, that would else come as ``events``."""
        super().__init__(
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
            media_type=self.media_type,
        )
        del self.headers["content-length"]
        self._events = events
        self._shortcut = shortcut

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._shortcut is not None:
            self._shortcut.connect(scope.get("extensions"))
        sender = asyncio.ensure_future(self._send(send, self._shortcut))
        watcher = asyncio.ensure_future(_wait_for_disconnect(receive))
        try:
            await asyncio.wait((sender, watcher), return_when=asyncio.FIRST_COMPLETED)
            if sender.done():
                sender.result()
        finally:
            for task in (sender, watcher):
                task.cancel()
            await asyncio.gather(sender, watcher, return_exceptions=True)
            await self._events.aclose()

    async def _send(self, send: Send, shortcut: Shortcut | None) -> None:
        has_begun = False
        async for event in self._events:
            # Open exactly while this task waits for an output: `send` may wait for a slow client.
            if shortcut is not None:
                shortcut.is_open = False
            if not has_begun:
                has_begun = True
                head = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
                await send(head)
            await send({"type": "http.response.body", "body": event, "more_body": True})
            if shortcut is not None:
                shortcut.is_open = True
        if shortcut is not None:
            shortcut.is_open = False
        await send({"type": "http.response.body", "body": b"", "more_body": False})
