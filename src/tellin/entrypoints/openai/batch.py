"""Batch files in OpenAI's format: requests in a file, one per line, answers in another.

An answer is written, whole, when its request has ended; so a run that was killed goes on where it
stopped, and no line is lost or answered twice. Requests take the same way as over HTTP.
"""

from __future__ import annotations

import asyncio
import codecs
import os
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from tellin.entrypoints.openai.chat import ChatService
from tellin.entrypoints.openai.classification import ClassificationService
from tellin.entrypoints.openai.completions import CompletionService
from tellin.entrypoints.openai.embeddings import EmbeddingService
from tellin.entrypoints.openai.errors import ApiError, bad_request, to_api_error
from tellin.entrypoints.openai.requests import (
    ChatCompletionRequest,
    ClassificationRequest,
    CompletionRequest,
    EmbeddingRequest,
    RerankRequest,
    ScoreRequest,
)
from tellin.entrypoints.openai.responses import ResponsesService
from tellin.entrypoints.openai.responses_request import ResponsesRequest
from tellin.entrypoints.openai.scores import ScoreService
from tellin.entrypoints.openai.serving import ServingContext
from tellin.exceptions import EngineError, InvalidParameterError

WINDOW_PER_SEQUENCE = 2
"""Requests in flight per sequence that the engine computes at once: enough to keep it busy."""


class BatchLine(msgspec.Struct, forbid_unknown_fields=True):
    """One request."""

    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


class BatchResponse(msgspec.Struct):
    status_code: int
    request_id: str
    body: Any


class BatchResult(msgspec.Struct):
    """One answer. A refused request has the error in its body, as over HTTP."""

    id: str
    custom_id: str
    response: BatchResponse
    error: None = None


@dataclass
class BatchFiles:
    """The two files of a run."""

    input: Path
    output: Path
    done: set[str] = field(default_factory=set)
    """Ids whose answers are in the output already."""
    num_lines: int = 0

    def open(self) -> BinaryIO:
        """Check the input, take up what an earlier run wrote, and open the output to append.

        Raises:
            InvalidParameterError: a line of the input is no request, or an id occurs twice.
        """
        seen: set[str] = set()
        for number, line in self.lines():
            if line.custom_id in seen:
                raise InvalidParameterError(
                    f"{self.input}:{number}: custom_id {line.custom_id!r} occurs twice",
                    parameter="input",
                )
            seen.add(line.custom_id)
        self.num_lines = len(seen)
        file = self.output.open("a+b")
        try:
            self._take_up(file)
        except BaseException:
            file.close()
            raise
        return file

    def lines(self) -> Iterator[tuple[int, BatchLine]]:
        """Line numbers and requests."""
        with self.input.open("rb") as file:
            for number, text in enumerate(file, 1):
                if number == 1:
                    text = text.removeprefix(codecs.BOM_UTF8)
                if not text.strip():
                    continue
                try:
                    yield number, msgspec.json.decode(text, type=BatchLine)
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                    raise InvalidParameterError(
                        f"{self.input}:{number} is no request of a batch: {error}",
                        parameter="input",
                    ) from None

    def _take_up(self, file: BinaryIO) -> None:
        """Collect ids of whole lines and cut off a line that was being written."""
        file.seek(0)
        end = 0
        for number, text in enumerate(file, 1):
            if not text.endswith(b"\n"):
                break
            try:
                self.done.add(msgspec.json.decode(text)["custom_id"])
            except (msgspec.DecodeError, ValueError, RecursionError, KeyError, TypeError):
                raise InvalidParameterError(
                    f"{self.output}:{number} is no answer of a batch; name another output file",
                    parameter="output",
                ) from None
            end += len(text)
        file.truncate(end)
        file.seek(0, os.SEEK_END)


class BatchRunner:
    """Runs the lines of a batch on one engine."""

    def __init__(self, context: ServingContext) -> None:
        self._context = context
        self._chat = ChatService(context)
        self._completions = CompletionService(context)
        self._responses = ResponsesService(context)
        self._embeddings = EmbeddingService(context)
        self._classification = ClassificationService(context)
        self._scores = ScoreService(context)

    async def run(self, files: BatchFiles, on_done: Callable[[bool], None]) -> None:
        """Answer every line that has no answer yet.

        Args:
            on_done: called after each line; whether it succeeded.

        Raises:
            EngineError: the engine died or was closed. What was written stays.
        """
        max_num_seqs = self._context.engine.config.scheduler_config.max_num_seqs
        with files.open() as output:
            async for result in self._results(files, WINDOW_PER_SEQUENCE * max_num_seqs):
                output.write(msgspec.json.encode(result) + b"\n")
                output.flush()
                on_done(result.response.status_code == 200)
            os.fsync(output.fileno())

    async def _results(self, files: BatchFiles, window: int) -> AsyncIterator[BatchResult]:
        open_lines = (line for _, line in files.lines() if line.custom_id not in files.done)
        tasks: set[asyncio.Task[BatchResult]] = set()
        try:
            while True:
                while len(tasks) < window and (line := next(open_lines, None)) is not None:
                    tasks.add(asyncio.create_task(self._answer(line)))
                if not tasks:
                    return
                done, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    yield task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _answer(self, line: BatchLine) -> BatchResult:
        request_id = uuid.uuid4().hex
        status, body = 200, None
        try:
            body = await self._call(line)
        except EngineError:
            raise  # not the line's fault: it is answered by the next run
        except Exception as error:
            answer = to_api_error(error)
            if answer.status in (500, 503) and not isinstance(error, ApiError):
                raise
            status, body = answer.status, answer.body()
        response = BatchResponse(status, request_id, body)
        return BatchResult(f"batch_req_{request_id}", line.custom_id, response)

    async def _call(self, line: BatchLine) -> Any:
        if line.method != "POST":
            raise bad_request(f"method must be POST, got {line.method!r}", "method")
        body = bytes(line.body)
        if line.url == "/v1/chat/completions":
            chat = _whole(ChatCompletionRequest.model_validate_json(body))
            return await (await self._chat.prepare(chat)).complete()
        if line.url == "/v1/completions":
            completion = _whole(CompletionRequest.model_validate_json(body))
            return await (await self._completions.prepare(completion)).complete()
        if line.url == "/v1/responses":
            response = _whole(ResponsesRequest.model_validate_json(body))
            return await (await self._responses.prepare(response)).complete()
        if line.url == "/v1/embeddings":
            return await self._embeddings.embed(EmbeddingRequest.model_validate_json(body))
        if line.url in ("/v1/classify", "/classify"):
            classification = ClassificationRequest.model_validate_json(body)
            return await self._classification.classify(classification)
        if line.url in ("/v1/score", "/score"):
            return await self._scores.score(ScoreRequest.model_validate_json(body))
        if line.url in ("/v1/rerank", "/rerank", "/v2/rerank"):
            return await self._scores.rerank(RerankRequest.model_validate_json(body))
        raise ApiError(404, f"a batch cannot call {line.url!r}", "url", "not_found")


def _whole(request: Any) -> Any:
    if request.stream:
        raise bad_request("a batch cannot stream; leave stream out", "stream")
    return request
