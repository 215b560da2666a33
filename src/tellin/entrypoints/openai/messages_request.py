"""Bodies of ``/v1/messages``, Anthropic's API, and what they are as a chat request.

What Anthropic's clients send for Anthropic's own service (caching marks, metadata) is accepted
without effect; tools and documents that only that service has are refused by name.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field

from tellin.entrypoints.openai.errors import bad_request, shown
from tellin.entrypoints.openai.requests import (
    MAX_STOP_STRINGS,
    Body,
    ChatCompletionRequest,
    StructuredOutputs,
)

Block = dict[str, Any]
Message = dict[str, Any]
_IMAGE_TYPES = ("image/jpeg", "image/png", "image/gif", "image/webp")


class MessageParam(Body):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class SystemBlock(Body):
    type: Literal["text"]
    text: str
    cache_control: dict[str, Any] | None = None
    citations: list[Any] | None = None


class MessagesTool(Body):
    """A function that the client calls; ``type`` names those that Anthropic's service brings."""

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: dict[str, Any] | None = None
    input_examples: list[dict[str, Any]] | None = None
    eager_input_streaming: bool | None = None
    defer_loading: Literal[False] | None = None
    allowed_callers: list[Literal["direct"]] | None = None


class MessagesToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(Body):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = None
    """A limit if the engine knows where thoughts end (``reasoning_config``); else of no effect."""
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    """Of effect with templates that have such a word."""
    format: OutputFormat | None = None


class ServiceOptions(Body):
    """What only steers Anthropic's service."""

    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    inference_geo: str | None = None
    speed: str | None = None
    diagnostics: dict[str, Any] | None = None
    user_profile_id: str | None = None
    workspace_id: str | None = None
    cache_control: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None
    """Nothing is cleared from a conversation here: one that does not fit is a 400."""
    mcp_servers: Annotated[list[Any], Field(max_length=0)] | None = None
    container: None = None


class PromptOfMessages(ServiceOptions):
    """What ``/v1/messages`` and its ``count_tokens`` share."""

    messages: Annotated[list[MessageParam], Field(min_length=1)]
    model: str | None = None
    system: str | list[SystemBlock] | None = None
    tools: list[MessagesTool] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    """The older place of ``output_config.format``."""


class CountTokensRequest(PromptOfMessages):
    pass


class MessagesRequest(PromptOfMessages):
    max_tokens: int
    stream: bool = False
    stop_sequences: Annotated[list[str], Field(max_length=MAX_STOP_STRINGS)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None

    seed: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    structured_outputs: StructuredOutputs | None = None
    priority: int = 0
    cache_salt: str | None = None


_SAME_NAMES = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "min_p",
    "repetition_penalty",
    "structured_outputs",
    "priority",
    "cache_salt",
)


def to_chat_request(request: PromptOfMessages) -> ChatCompletionRequest:
    """The chat request that means the same; thoughts and efforts are the caller's, who knows the
    model.

    Raises:
        ApiError, ValidationError: a block or a tool is not supported, or malformed.
    """
    values: dict[str, Any] = {"model": request.model, "messages": to_messages(request)}
    if isinstance(request, MessagesRequest):
        values |= {name: getattr(request, name) for name in _SAME_NAMES}
        values["stop"] = request.stop_sequences
    if values["messages"][-1]["role"] == "assistant":  # the answer goes on from there
        values |= {"add_generation_prompt": False, "continue_final_message": True}
    if request.tools:
        values["tools"] = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(request.tools)]
    choice = request.tool_choice
    if choice is not None:
        values["tool_choice"] = _tool_choice(choice)
        values["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    wanted = request.output_format
    if request.output_config is not None and request.output_config.format is not None:
        wanted = request.output_config.format
    if wanted is not None:
        schema = {"name": "answer", "schema": wanted.schema_}
        values["response_format"] = {"type": "json_schema", "json_schema": schema}
    return ChatCompletionRequest.model_validate(values)


def _tool(tool: MessagesTool, where: str) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        raise bad_request(
            f"{where} is of the type {shown(str(tool.type))}, which this server does not bring; "
            "give a tool of your own, with input_schema",
            where,
        )
    if tool.input_schema is None:
        raise bad_request(f"{where} ({shown(tool.name)}) has no input_schema", where)
    function = {"name": tool.name, "parameters": tool.input_schema, "strict": tool.strict}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": function}


def _tool_choice(choice: MessagesToolChoice) -> Any:
    if (choice.type == "tool") != (choice.name is not None):
        raise bad_request(
            "tool_choice.name is needed by type 'tool' and by no other", "tool_choice.name"
        )
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return {"auto": "auto", "any": "required", "none": "none"}[choice.type]


# ---------------------------------------------------------------------- messages


def to_messages(request: PromptOfMessages) -> list[Message]:
    """System prompt and messages as those of a chat."""
    messages: list[Message] = []
    if isinstance(request.system, str):
        messages.append({"role": "system", "content": request.system})
    elif request.system:
        parts = [{"type": "text", "text": block.text} for block in request.system]
        messages.append({"role": "system", "content": parts})
    for position, message in enumerate(request.messages):
        where = f"messages[{position}]"
        if isinstance(message.content, str):
            messages.append({"role": message.role, "content": message.content})
        elif not message.content:
            raise bad_request(f"{where}.content must not be an empty list", where)
        elif message.role == "user":
            messages += _user_messages(message.content, where)
        elif message.role == "assistant":
            messages.append(_assistant_message(message.content, where))
        else:
            blocks = enumerate(message.content)
            parts = [_part(block, f"{where}.content[{i}]") for i, block in blocks]
            messages.append({"role": "system", "content": parts})
    return messages


def _user_messages(blocks: list[Block], where: str) -> list[Message]:
    """Results of tools, each a message of its own, then one of all that the user said.

    Pictures in a result come in the user's message: templates show none in those of tools.
    """
    results: list[Message] = []
    parts: list[Block] = []
    for i, block in enumerate(blocks):
        place = f"{where}.content[{i}]"
        if block.get("type") != "tool_result":
            parts.append(_part(block, place))
            continue
        content = block.get("content") or ""
        inner = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(inner, list):
            raise bad_request(f"{place}.content must be a text or a list of blocks", place)
        made = [_part(one, f"{place}.content[{j}]") for j, one in enumerate(inner)]
        text = "\n".join(part["text"] for part in made if part["type"] == "text")
        call_id = _text(block, "tool_use_id", place)
        results.append({"role": "tool", "tool_call_id": call_id, "content": text})
        parts += [part for part in made if part["type"] != "text"]
    return [*results, {"role": "user", "content": parts}] if parts else results


def _assistant_message(blocks: list[Block], where: str) -> Message:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for i, block in enumerate(blocks):
        place = f"{where}.content[{i}]"
        kind = block.get("type")
        if kind == "thinking":  # whether earlier thoughts are shown is the template's to say
            thoughts.append(_text(block, "thinking", place))
        elif kind == "tool_use":
            arguments = block.get("input")
            if not isinstance(arguments, dict):
                raise bad_request(f"{place}.input must be an object", place)
            function = {
                "name": _text(block, "name", place),
                "arguments": msgspec.json.encode(arguments).decode(),
            }
            call_id = _text(block, "id", place)
            calls.append({"id": call_id, "type": "function", "function": function})
        elif kind == "text":
            texts.append(_text(block, "text", place))
        elif kind != "redacted_thinking":
            raise _unknown(kind, place)
    message: Message = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _part(block: Any, where: str) -> Block:
    """A part of a chat message: a text or an image."""
    kind = block.get("type") if isinstance(block, dict) else None
    if kind == "text":
        return {"type": "text", "text": _text(block, "text", where)}
    if kind == "image":
        return {"type": "image_url", "image_url": {"url": _image_url(block, where)}}
    if kind == "document":
        source = block.get("source")
        if isinstance(source, dict) and source.get("type") == "text":
            title = [block["title"]] if isinstance(block.get("title"), str) else []
            text = _text(source, "data", f"{where}.source")
            return {"type": "text", "text": "\n".join([*title, text])}
        raise bad_request(f"{where} is a document that is no plain text: not supported", where)
    raise _unknown(kind, where)


def _image_url(block: Block, where: str) -> str:
    source = block.get("source")
    kind = source.get("type") if isinstance(source, dict) else None
    if kind == "url":
        return _text(source, "url", f"{where}.source")
    if kind != "base64":
        raise bad_request(f"{where}.source must be of the type base64 or url, got {kind!r}", where)
    media_type = _text(source, "media_type", f"{where}.source")
    if media_type not in _IMAGE_TYPES:
        raise bad_request(
            f"{where}.source.media_type must be one of {', '.join(_IMAGE_TYPES)}, "
            f"got {shown(media_type)}",
            where,
        )
    return f"data:{media_type};base64,{_text(source, 'data', f'{where}.source')}"


def _text(block: Any, name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise bad_request(f"{where}.{name} must be a text, got {value!r:.60}", f"{where}.{name}")
    return value


def _unknown(kind: Any, where: str) -> Exception:
    return bad_request(f"{where} is a block of the type {kind!r:.60}: not supported here", where)
