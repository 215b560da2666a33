"""One choice of a chat answer: parses its text and writes its message or its deltas."""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

from tellin.entrypoints.openai.logprobs import LogprobWriter
from tellin.entrypoints.openai.parsers.events import CallDelta, ParsedDelta, join
from tellin.entrypoints.openai.parsers.message import AnswerParser
from tellin.entrypoints.openai.replies import (
    ChatChoice,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    FinishReason,
    FunctionCall,
    FunctionCallDelta,
    ToolCall,
    ToolCallDelta,
)
from tellin.entrypoints.openai.serving import finish_reason, stop_reason
from tellin.outputs import CompletionOutput, LogprobsOnePosition

_ALPHABET = string.ascii_letters + string.digits


@dataclass(frozen=True)
class ChoiceOptions:
    """What the request wants of every choice."""

    logprobs: LogprobWriter | None
    return_token_ids: bool
    include_reasoning: bool
    id_length: int
    """Characters of a tool call's id. Mistral's templates insist on nine."""


class ChatChoiceWriter:
    """State of one choice."""

    def __init__(self, index: int, parser: AnswerParser, options: ChoiceOptions) -> None:
        self._index = index
        self._parser = parser
        self._options = options
        self._has_begun = False
        self._arguments: dict[int, str] = {}  # of each call so far, where they are streamed

    # ------------------------------------------------------------------ whole

    def whole(self, completion: CompletionOutput) -> ChatChoice:
        """The choice of a finished completion."""
        parsed = join([self._parser.feed(completion.text), self._parser.finish()])
        calls = [
            ToolCall(self._call_id(), FunctionCall(name, arguments))
            for name, arguments in parsed.calls
        ]
        message = ChatMessage(parsed.content if parsed.content or not calls else None)
        if parsed.reasoning and self._options.include_reasoning:
            message.reasoning_content = message.reasoning = parsed.reasoning
        if calls:
            message.tool_calls = calls
        choice = ChatChoice(
            self._index,
            message,
            self._finish_reason(completion, [arguments for _, arguments in parsed.calls]) or "stop",
            self._logprobs(completion),
            stop_reason(completion),
        )
        if self._options.return_token_ids:
            choice.token_ids = completion.token_ids
        return choice

    # ------------------------------------------------------------------ streamed

    @property
    def shows_text_only(self) -> bool:
        """Whether a delta between the first and the last is just what came, as content."""
        options = self._options
        return self._parser.is_plain and options.logprobs is None and not options.return_token_ids

    def delta(self, completion: CompletionOutput) -> list[ChatChunkChoice]:
        """Chunks for what is new. The first chunk of a choice holds the role."""
        parsed = self._parser.feed(completion.text)
        if completion.finished():
            rest = self._parser.finish()
            parsed.content += rest.content
            parsed.reasoning += rest.reasoning
            parsed.calls += rest.calls
        chunks = []
        if not self._has_begun:
            self._has_begun = True
            chunks.append(ChatChunkChoice(self._index, ChatDelta(role="assistant", content="")))
        for call in parsed.calls:
            before = self._arguments.get(call.index, "")
            self._arguments[call.index] = before + call.arguments
        delta = self._chat_delta(parsed)
        choice = ChatChunkChoice(
            self._index,
            delta,
            self._finish_reason(completion, list(self._arguments.values())),
            self._logprobs(completion),
        )
        if completion.finished():
            choice.stop_reason = stop_reason(completion)
        if self._options.return_token_ids:
            choice.token_ids = completion.token_ids
        carries = choice.logprobs is not None or self._options.return_token_ids
        if carries or completion.finished() or not delta.is_empty():
            chunks.append(choice)
        return chunks

    def _chat_delta(self, parsed: ParsedDelta) -> ChatDelta:
        delta = ChatDelta()
        if parsed.content:
            delta.content = parsed.content
        if parsed.reasoning and self._options.include_reasoning:
            delta.reasoning_content = delta.reasoning = parsed.reasoning
        if parsed.calls:
            delta.tool_calls = [self._call_delta(call) for call in parsed.calls]
        return delta

    def _call_delta(self, call: CallDelta) -> ToolCallDelta:
        if call.name is None:
            return ToolCallDelta(call.index, FunctionCallDelta(call.arguments))
        return ToolCallDelta(
            call.index,
            FunctionCallDelta(call.arguments, call.name),
            id=self._call_id(),
            type="function",
        )

    # ------------------------------------------------------------------ parts

    @staticmethod
    def _finish_reason(
        completion: CompletionOutput, arguments: Sequence[str]
    ) -> FinishReason | None:
        """``arguments``: of all calls. A call that a stop string has cut off is none to be made."""
        is_cut = isinstance(stop_reason(completion), str) and not _is_json(arguments[-1:])
        return finish_reason(completion, bool(arguments) and not is_cut)

    def _logprobs(self, completion: CompletionOutput) -> ChatLogprobs | None:
        writer = self._options.logprobs
        if writer is None or completion.logprobs is None:
            return None
        positions = cast("Iterable[LogprobsOnePosition]", completion.logprobs)
        return writer.chat(completion.token_ids, positions)

    def _call_id(self) -> str:
        length = self._options.id_length
        random = "".join(secrets.choice(_ALPHABET) for _ in range(length))
        return random if length < 12 else f"call_{random}"


def _is_json(texts: Iterable[str]) -> bool:
    try:
        for text in texts:
            json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
