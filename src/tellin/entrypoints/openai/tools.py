"""The tools of one request: what the template shows, what the grammar forces, who parses.

With ``tool_choice`` auto the model writes calls in its own format. With required, or a function's
name, a grammar forces JSON, so that a small model cannot get it wrong.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

from tellin.entrypoints.openai.chat_format import ChatFormat
from tellin.entrypoints.openai.errors import bad_request
from tellin.entrypoints.openai.parsers.base import ToolParser
from tellin.entrypoints.openai.parsers.json_calls import ArrayParser, NamedCallParser
from tellin.entrypoints.openai.requests import (
    AllowedToolChoice,
    ChatCompletionRequest,
    NamedToolChoice,
    Tool,
)
from tellin.sampling_params import StructuredOutputsParams


@dataclass(frozen=True)
class ToolPlan:
    """How one request deals with tools."""

    tools: list[dict[str, Any]] | None = None
    """Definitions for the template."""
    names: tuple[str, ...] = ()
    forced_name: str | None = None
    is_forced: bool = False
    max_calls: int | None = None
    parser: type[ToolParser] | None = None
    """For calls in the model's own format."""
    constraint: StructuredOutputsParams | None = field(default=None)

    @property
    def is_active(self) -> bool:
        return bool(self.names)

    @property
    def id_length(self) -> int:
        return ToolParser.id_length if self.parser is None else self.parser.id_length

    def make_parser(self) -> ToolParser | None:
        """A parser for one choice; None without tools."""
        if not self.is_active:
            return None
        if self.forced_name is not None:
            return NamedCallParser(self.forced_name)
        if self.is_forced:
            return ArrayParser(self.names)
        return None if self.parser is None else self.parser(self.names)


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
    if request.response_format is not None and request.response_format.type != "text":
        raise bad_request(
            "response_format forces JSON content and so excludes tool calls; set tool_choice "
            "to 'none' or leave one of them out",
            "response_format",
        )
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
    return ToolPlan(
        tools=shown,
        names=names,
        forced_name=forced_name,
        is_forced=forced,
        max_calls=max_calls,
        parser=chat_format.tool_parser,
        constraint=constraint,
    )


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
        prefix = f"t{position}_"
        parameters = copy.deepcopy(_parameters(tool))
        for key in ("$defs", "definitions"):
            for name, definition in (parameters.pop(key, None) or {}).items():
                definitions[prefix + name] = _rebase(definition, prefix)
        branches.append(
            {
                "type": "object",
                "properties": {
                    "name": {"const": tool.function.name},
                    "arguments": _rebase(parameters, prefix),
                },
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
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


def _rebase(schema: Any, prefix: str) -> Any:
    """The schema with its references pointed to where its definitions have moved."""
    if isinstance(schema, list):
        return [_rebase(item, prefix) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result = {key: _rebase(value, prefix) for key, value in schema.items()}
    target = result.get("$ref")
    if isinstance(target, str):
        for start in ("#/$defs/", "#/definitions/"):
            if target.startswith(start):
                result["$ref"] = f"#/$defs/{prefix}{target.removeprefix(start)}"
    return result
