"""Bodies of answers, as `msgspec` structs that encode in a microsecond or two.

A field that OpenAI's documents have is always there, null if need be; extensions are left out
unless asked for (`UNSET`).
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

FinishReason = Literal["stop", "length", "tool_calls"]


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int
    truncated_tokens: int | UnsetType = UNSET
    """Tokens cut off because ``truncate_prompt_tokens`` asked for it."""


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None


class FunctionCall(msgspec.Struct):
    name: str
    arguments: str


class ToolCall(msgspec.Struct):
    id: str
    function: FunctionCall
    type: str = "function"


class FunctionCallDelta(msgspec.Struct):
    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDelta(msgspec.Struct):
    index: int
    function: FunctionCallDelta
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class TokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprobs(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[TokenLogprobs]
    refusal: None = None


class ChatMessage(msgspec.Struct):
    content: str | None
    role: str = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    """The same; vLLM's newer name."""
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    index: int
    message: ChatMessage
    finish_reason: FinishReason
    logprobs: ChatLogprobs | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: str = "chat.completion"
    system_fingerprint: str | None = None
    prompt_logprobs: list[Any] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class ChatDelta(msgspec.Struct):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET

    def is_empty(self) -> bool:
        fields = (self.role, self.content, self.reasoning_content, self.tool_calls)
        return all(field is UNSET for field in fields)


class ChatChunkChoice(msgspec.Struct):
    index: int
    delta: ChatDelta
    finish_reason: FinishReason | None = None
    logprobs: ChatLogprobs | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    object: str = "chat.completion.chunk"
    system_fingerprint: str | None = None
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionLogprobs(msgspec.Struct):
    tokens: list[str] = msgspec.field(default_factory=list)
    token_logprobs: list[float | None] = msgspec.field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = msgspec.field(default_factory=list)
    text_offset: list[int] = msgspec.field(default_factory=list)


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    finish_reason: FinishReason | None = None
    logprobs: CompletionLogprobs | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    prompt_logprobs: list[Any] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class Completion(msgspec.Struct):
    """An answer, or a chunk of a streamed one: OpenAI gives both the same name."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    object: str = "text_completion"
    system_fingerprint: str | None = None
    usage: Usage | UnsetType | None = UNSET


class Embedding(msgspec.Struct):
    index: int
    embedding: list[float] | str
    object: str = "embedding"


class EmbeddingList(msgspec.Struct):
    model: str
    data: list[Embedding]
    usage: Usage
    object: str = "list"


class Classification(msgspec.Struct):
    index: int
    label: str
    """The likeliest one's name."""
    probs: list[float]
    num_classes: int


class ClassificationList(msgspec.Struct):
    id: str
    created: int
    model: str
    data: list[Classification]
    usage: Usage
    object: str = "list"


class Score(msgspec.Struct):
    index: int
    score: float
    object: str = "score"


class ScoreList(msgspec.Struct):
    id: str
    created: int
    model: str
    data: list[Score]
    usage: Usage
    object: str = "list"


class RankedDocument(msgspec.Struct):
    text: str


class RerankedDocument(msgspec.Struct):
    index: int
    """Place among the request's documents."""
    relevance_score: float
    document: RankedDocument | UnsetType = UNSET


class RankUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int


class Ranking(msgspec.Struct):
    id: str
    model: str
    usage: RankUsage
    results: list[RerankedDocument]
    """Best first."""


class ModelCard(msgspec.Struct):
    id: str
    created: int
    max_model_len: int
    object: str = "model"
    owned_by: str = "tellin"
    root: str | UnsetType = UNSET
    """Of a LoRA adapter: its path."""
    parent: str | UnsetType = UNSET
    """Of a LoRA adapter: the base model."""


class ModelList(msgspec.Struct):
    data: list[ModelCard]
    object: str = "list"


class Tokenization(msgspec.Struct):
    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | UnsetType = UNSET


class Detokenization(msgspec.Struct):
    prompt: str
