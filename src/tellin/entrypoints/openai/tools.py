"""The tools of one request: what the template shows, what the grammar forces, who parses.

With ``tool_choice`` auto the model writes calls in its own format; if it also has a
``response_format``, a grammar allows either such calls or the JSON that is wanted. With required,
or a function's name, a grammar forces the call as JSON: a small model cannot get it wrong.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tellin.entrypoints.openai.chat_format import ChatFormat
from tellin.entrypoints.openai.errors import bad_request
from tellin.entrypoints.openai.parsers.base import ToolParser
from tellin.entrypoints.openai.parsers.call_formats import answer_or_calls, call_starts
from tellin.entrypoints.openai.parsers.format_parts import CallableTool
from tellin.entrypoints.openai.parsers.json_calls import ArrayParser, NamedCallParser
from tellin.entrypoints.openai.parsers.message import AnswerOrCalls, CallReader
from tellin.entrypoints.openai.requests import (
    AllowedToolChoice,
    ChatCompletionRequest,
    NamedToolChoice,
    Tool,
)
from tellin.entrypoints.openai.schema_tools import call_branch
from tellin.sampling_params import StructuredOutputsParams


@dataclass(frozen=True)
class ToolPlan:
    """How one request deals with tools."""

    tools: list[dict[str, Any]] | None = None
    """Definitions for the template."""
    names: tuple[str, ...] = ()
    schemas: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Of each tool's arguments."""
    forced_name: str | None = None
    is_forced: bool = False
    max_calls: int | None = None
    parser: type[ToolParser] | None = None
    """For calls in the model's own format."""
    is_either: bool = False
    """A grammar allows calls in that format or an answer in JSON, but not both."""
    constraint: StructuredOutputsParams | None = field(default=None)

    @property
    def is_active(self) -> bool:
        return bool(self.names)

    @property
    def id_length(self) -> int:
        return ToolParser.id_length if self.parser is None else self.parser.id_length

    def make_parser(self) -> CallReader | None:
        """A parser for one choice; None without tools."""
        if not self.is_active:
            return None
        if self.forced_name is not None:
            return NamedCallParser(self.forced_name)
        if self.is_forced:
            return ArrayParser(self.names)
        if self.parser is None:
            return None
        calls = self.parser(self.names)
        calls.schemas = self.schemas
        if self.is_either:
            return AnswerOrCalls(calls, call_starts(self.parser, self.names))
        return calls


def plan_tools(request: ChatCompletionRequest, chat_format: ChatFormat) -> ToolPlan:
    """What the request's tools and tool_choice mean.

    Raises:
        ApiError: they contradict each other or something else of the request.
    """
    tools = request.tools
    if not tools or request.tool_choice == "none":
        return ToolPlan()
    names = tuple(tool.function.name for tool in tools)
    if len(set(names)) < len(names):
        raise bad_request("tools have names that are not unique", "tools")
    tools, choice = _allowed(tools, request.tool_choice)
    names = tuple(tool.function.name for tool in tools)
    max_calls = 1 if request.parallel_tool_calls is False else None
    forced = isinstance(choice, NamedToolChoice) or choice == "required"
    if forced and request.structured_outputs is not None:
        raise bad_request("structured_outputs and a forced tool call exclude each other",
                          "structured_outputs")  # fmt: skip
    shown = [tool.model_dump(exclude_none=True) for tool in tools]
    forced_name = None
    constraint = None
    if isinstance(choice, NamedToolChoice):
        forced_name = choice.function.name
        chosen = next((tool for tool in tools if tool.function.name == forced_name), None)
        if chosen is None:
            raise bad_request(f"tool_choice names {forced_name!r}, which is not among the tools",
                              "tool_choice")  # fmt: skip
        constraint = StructuredOutputsParams(json=_parameters(chosen))
    elif choice == "required":
        constraint = StructuredOutputsParams(json=calls_schema(tools, max_calls))
    is_either = not forced and wants_json(request)
    if is_either:
        constraint = _either(request, tools, chat_format, is_single=max_calls == 1)
    return ToolPlan(
        tools=shown,
        names=names,
        schemas={tool.function.name: _parameters(tool) for tool in tools},
        forced_name=forced_name,
        is_forced=forced,
        max_calls=max_calls,
        parser=chat_format.tool_parser,
        is_either=is_either,
        constraint=constraint,
    )


def wants_json(request: ChatCompletionRequest) -> bool:
    """Whether the request's response_format forces JSON."""
    return request.response_format is not None and request.response_format.type != "text"


def _either(
    request: ChatCompletionRequest,
    tools: Sequence[Tool],
    chat_format: ChatFormat,
    *,
    is_single: bool,
) -> StructuredOutputsParams:
    """The constraint that allows an answer in the wanted JSON, or calls."""
    wanted = request.response_format
    schema: dict[str, Any] = {"type": "object"}
    if wanted is not None and wanted.json_schema is not None:
        schema = wanted.json_schema.schema_
    callables = [CallableTool(tool.function.name, _parameters(tool)) for tool in tools]
    try:
        either = answer_or_calls(chat_format.tool_parser, callables, schema, is_single=is_single)
    except ValueError as error:
        raise bad_request(
            f"response_format and free tool calls exclude each other here: {error}; or set "
            "tool_choice to 'none', 'required' or a function",
            "response_format",
        ) from None
    return StructuredOutputsParams(structural_tag=json.dumps(either, separators=(",", ":")))


def _allowed(tools: list[Tool], choice: Any) -> tuple[list[Tool], Any]:
    """The tools that the choice leaves, and what is left of the choice."""
    if not isinstance(choice, AllowedToolChoice):
        return tools, choice
    wanted = {tool.function.name for tool in choice.allowed_tools.tools}
    unknown = sorted(wanted - {tool.function.name for tool in tools})
    if unknown:
        raise bad_request(f"tool_choice names {unknown[0]!r}, which is not among the tools",
                          "tool_choice")  # fmt: skip
    return [tool for tool in tools if tool.function.name in wanted], choice.allowed_tools.mode


def calls_schema(tools: list[Tool], max_calls: int | None) -> dict[str, Any]:
    """The JSON schema of a non-empty array of calls of these tools."""
    definitions: dict[str, Any] = {}
    branches = []
    for position, tool in enumerate(tools):
        branch, own = call_branch(tool.function.name, _parameters(tool), f"t{position}_")
        branches.append(branch)
        definitions |= own
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": branches}}
    if max_calls is not None:
        schema["maxItems"] = max_calls
    if definitions:
        schema["$defs"] = definitions
    return schema


def _parameters(tool: Tool) -> dict[str, Any]:
    parameters = tool.function.parameters
    if not parameters:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {"type": "object", **parameters}
