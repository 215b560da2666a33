"""Sends requests to an OpenAI-compatible server and notes when what came.

Open loop: requests start at random times, independent of answers (Poisson, or burstier). Closed
loop: a fixed number is open at any time. Both can be combined. Times are monotonic seconds.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tellin.entrypoints.bench.dataset import BenchRequest
from tellin.entrypoints.bench.http_client import HttpClient, HttpError

CHAT_PATH = "/v1/chat/completions"
TEXT_PATH = "/v1/completions"


@dataclass(frozen=True)
class LoadOptions:
    """How the load looks."""

    model: str
    use_chat: bool
    output_len: int
    request_rate: float | None = None
    """Requests per second on average; None = as fast as ``max_concurrency`` allows."""
    burstiness: float = 1.0
    """1 = Poisson; less = bursts, more = more even (shape of a gamma distribution)."""
    max_concurrency: int | None = None
    timeout_s: float = 600.0
    extra_body: dict[str, Any] = field(default_factory=dict)
    seed: int = 0


@dataclass
class RequestResult:
    """One request as the client saw it."""

    start: float
    error: str | None = None
    token_times: list[float] = field(default_factory=list)
    """When each piece of text arrived; the first one is the end of the wait."""
    end: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    text: str = ""


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Chunk(msgspec.Struct):
    """What is read of an event; servers send more."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_DECODER = msgspec.json.Decoder(_Chunk)


async def served_model(client: HttpClient) -> str:
    """The first model of the server's list.

    Raises:
        HttpError: it has none, or does not answer as an OpenAI-compatible server does.
    """
    async with client.request("GET", "/v1/models") as response:
        body = await response.read()
    try:
        if response.status != 200:
            raise ValueError
        return str(msgspec.json.decode(body)["data"][0]["id"])
    except (ValueError, KeyError, IndexError, TypeError):
        raise HttpError(
            f"/v1/models answers {response.status} {body[:200]!r}; name the model with --model"
        ) from None


async def run_load(
    client: HttpClient,
    requests: Sequence[BenchRequest],
    options: LoadOptions,
    on_done: Callable[[RequestResult], None] = lambda result: None,
) -> list[RequestResult]:
    """Send all requests; results in their order. A failed request is a result with an error."""
    slots = asyncio.Semaphore(options.max_concurrency or len(requests))

    async def one(request: BenchRequest) -> RequestResult:
        async with slots:
            result = await send(client, request, options)
        on_done(result)
        return result

    generator = random.Random(options.seed)
    tasks = []
    due = time.monotonic()
    for request in requests:
        tasks.append(asyncio.create_task(one(request)))
        if options.request_rate is not None:
            shape = options.burstiness
            # From the plan, not from now: a late start must not thin out the load.
            due += generator.gammavariate(shape, 1 / (options.request_rate * shape))
            await asyncio.sleep(due - time.monotonic())
    return list(await asyncio.gather(*tasks))


async def send(client: HttpClient, request: BenchRequest, options: LoadOptions) -> RequestResult:
    """One request, streamed."""
    path = CHAT_PATH if options.use_chat else TEXT_PATH
    body = msgspec.json.encode(request_body(request, options))
    result = RequestResult(time.monotonic())
    try:
        async with (
            asyncio.timeout(options.timeout_s),
            client.request("POST", path, body) as response,
        ):
            if response.status != 200:
                content = await response.read()
                result.error = f"HTTP {response.status}: {content[:300].decode(errors='replace')}"
            else:
                async for data in response.events():
                    _note(result, data)
    except TimeoutError:
        result.error = f"no end within {options.timeout_s:g} s"
    except (HttpError, msgspec.DecodeError) as error:
        result.error = str(error)
    result.end = time.monotonic()
    if result.error is None and not result.token_times:
        result.error = "the answer was empty"
    if not result.output_tokens:  # a server that sends no usage
        result.output_tokens = len(result.token_times)
    return result


def request_body(request: BenchRequest, options: LoadOptions) -> dict[str, Any]:
    """The body of one request."""
    body: dict[str, Any] = {
        "model": options.model,
        "max_tokens": request.output_len or options.output_len,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if options.use_chat:
        body["messages"] = request.as_messages()
    else:
        body["prompt"] = request.as_text()
    return body | options.extra_body


def _note(result: RequestResult, data: bytes) -> None:
    if data == b"[DONE]":
        return
    now = time.monotonic()
    chunk = _DECODER.decode(data)
    if chunk.error is not None:
        result.error = f"error in the stream: {chunk.error}"[:300]
    if chunk.usage is not None:
        result.prompt_tokens = chunk.usage.prompt_tokens
        result.output_tokens = chunk.usage.completion_tokens
    for choice in chunk.choices:
        delta = choice.delta or _Delta()
        text = choice.text or delta.content or delta.reasoning_content or ""
        if text or delta.tool_calls:
            result.token_times.append(now)
            result.text += text
