"""Bodies of ``/v1/responses``, and what they are as a chat request.

The Responses API says the same things in other words. Nothing is stored here, so what refers to
stored responses is refused. ``store`` is accepted: nobody can tell the difference later.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from tellin.entrypoints.openai.errors import bad_request
from tellin.entrypoints.openai.requests import (
    Body,
    ChatCompletionRequest,
    Ignored,
    StreamOptions,
    StructuredOutputs,
)


class ResponsesTool(Body):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponsesToolChoice(Body):
    type: Literal["function"]
    name: str


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(Body):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningOptions(Body):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: Literal["auto"] | None = None
    """Thoughts are given whole, never as a summary."""


class ResponsesStreamOptions(Body):
    include_obfuscation: bool = False


class ResponsesRequest(Ignored):
    input: str | Annotated[list[dict[str, Any]], Field(min_length=1)]
    model: str | None = None
    instructions: str | None = None
    stream: bool | None = False
    stream_options: ResponsesStreamOptions | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: list[ResponsesTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponsesToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    include: list[Literal["reasoning.encrypted_content"]] | None = None
    """Thoughts come in plain text; there is nothing encrypted to include."""

    seed: int | None = None
    stop: str | list[str] | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    structured_outputs: StructuredOutputs | None = None
    priority: int = 0
    cache_salt: str | None = None


SAME_NAMES = (
    "model",
    "stream",
    "temperature",
    "top_p",
    "parallel_tool_calls",
    "seed",
    "stop",
    "top_k",
    "min_p",
    "repetition_penalty",
    "priority",
    "cache_salt",
)


def to_chat_request(request: ResponsesRequest) -> ChatCompletionRequest:
    """The chat request that means the same.

    Raises:
        ApiError, ValidationError: an item of the input is not supported or malformed.
    """
    values: dict[str, Any] = {name: getattr(request, name) for name in SAME_NAMES}
    values["messages"] = to_messages(request)
    values["max_completion_tokens"] = request.max_output_tokens
    values["structured_outputs"] = request.structured_outputs
    if request.stream:
        values["stream_options"] = StreamOptions()
    if request.tools:
        values["tools"] = [
            {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}
            for tool in request.tools
        ]
    choice = request.tool_choice
    if isinstance(choice, ResponsesToolChoice):
        values["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    else:
        values["tool_choice"] = choice
    if request.reasoning is not None:
        values["reasoning_effort"] = request.reasoning.effort
    text_format = None if request.text is None else request.text.format
    if text_format is not None:
        values["response_format"] = _response_format(text_format)
    return ChatCompletionRequest.model_validate(values)


def _response_format(given: TextFormat) -> dict[str, Any]:
    if given.type != "json_schema":
        return {"type": given.type}
    if given.schema_ is None:
        raise bad_request("text.format of type json_schema needs a schema", "text.format.schema")
    schema = {"name": given.name or "response", "schema": given.schema_}
    return {"type": "json_schema", "json_schema": schema}


def to_messages(request: ResponsesRequest) -> list[dict[str, Any]]:
    """Instructions and input items as messages."""
    messages: list[dict[str, Any]] = []
    if request.instructions:
        messages.append({"role": "system", "content": request.instructions})
    if isinstance(request.input, str):
        return [*messages, {"role": "user", "content": request.input}]
    for position, item in enumerate(request.input):
        _add_item(messages, item, f"input[{position}]")
    return messages


def _add_item(messages: list[dict[str, Any]], item: dict[str, Any], where: str) -> None:
    kind = item.get("type", "message")
    if kind == "message":
        role = item.get("role")
        messages.append({"role": role, "content": _content(item.get("content"), where)})
    elif kind == "function_call":
        call = {
            "id": item.get("call_id"),
            "type": "function",
            "function": {"name": item.get("name"), "arguments": item.get("arguments")},
        }
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        messages[-1].setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        content = _content(item.get("output"), where)
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
    elif kind != "reasoning":  # earlier thoughts are not shown to the model again
        raise bad_request(f"{where} has the type {kind!r}, which is not supported", "input")


def _content(content: Any, where: str) -> Any:
    """Text as it is; parts with the names that the renderer knows."""
    if not isinstance(content, list):
        return content
    parts = []
    for part in content:
        if not isinstance(part, dict):
            raise bad_request(f"{where} has a part that is no object", "input")
        is_text = part.get("type") in ("input_text", "output_text")
        parts.append({"type": "text", "text": part.get("text")} if is_text else part)
    return parts
