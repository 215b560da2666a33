"""Grammars of tool calls that are written as tags: Qwen3-Coder and Qwen3.5, Seed-OSS, MiniMax-M2.

What they allow, `tellin.entrypoints.openai.parsers.qwen_xml` reads as calls. Texts are free, but
for allowed values; so are those that may be something else too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tellin.entrypoints.openai.parsers.format_parts import (
    CallableTool,
    Definitions,
    Format,
    arguments_of,
    const_text,
    json_value,
    list_of,
    one_of,
    optional,
    regex_text,
    sequence,
    tagged,
)
from tellin.entrypoints.openai.parsers.qwen_xml import (
    END_PARAMETER,
    TEXT_ONLY,
    MiniMaxParser,
    QwenXmlParser,
    SeedParser,
    kinds_of,
)


def qwen_calls(tools: Sequence[CallableTool], is_single: bool, definitions: Definitions) -> Format:
    functions = _functions(QwenXmlParser, tools, definitions, in_lines=True)
    calls = [tagged("<tool_call>\n", function, "\n</tool_call>") for function in functions]
    return list_of(calls, "\n", is_single=is_single)


def seed_calls(tools: Sequence[CallableTool], is_single: bool, definitions: Definitions) -> Format:
    functions = _functions(SeedParser, tools, definitions)
    calls = [
        tagged("<seed:tool_call>\n", function, "\n</seed:tool_call>") for function in functions
    ]
    return list_of(calls, "\n", is_single=is_single)


def minimax_calls(
    tools: Sequence[CallableTool], is_single: bool, definitions: Definitions
) -> Format:
    calls = [tagged("", call, "\n") for call in _functions(MiniMaxParser, tools, definitions)]
    inside = list_of(calls, "", is_single=is_single)
    return tagged("<minimax:tool_call>\n", inside, "</minimax:tool_call>")


def _functions(
    parser: type[QwenXmlParser],
    tools: Sequence[CallableTool],
    definitions: Definitions,
    *,
    in_lines: bool = False,
) -> list[Format]:
    """Each tool's call; ``in_lines``: values stand on lines of their own."""
    quote = '"' if parser.parameter.endswith("name=") else ""
    calls = []
    for tool in tools:
        _require_tag_name(tool, tool.name, quote)
        written = {}
        for name in tool.properties:
            _require_tag_name(tool, name, quote)
            begin = f"{parser.parameter}{quote}{name}{quote}>" + "\n" * in_lines
            value = _tag_value(tool, name, in_lines)
            written[name] = tagged(begin, value, f"{END_PARAMETER}\n")
        arguments = arguments_of(tool, written, "", definitions)
        begin = f"{parser.markers[1]}{quote}{tool.name}{quote}>\n"
        calls.append(tagged(begin, arguments, parser.end_function))
    return calls


def _tag_value(tool: CallableTool, name: str, in_lines: bool) -> Format:
    """A value, and the end of its line if it has lines of its own; else it begins with none."""
    schema = tool.property_schema(name)
    kinds = kinds_of(schema, tool.parameters)
    end = "\n" if in_lines else ""
    if kinds is not None and "string" not in kinds:
        return sequence(json_value(schema), const_text(end)) if end else json_value(schema)
    choices = schema.get("enum") if isinstance(schema, Mapping) else None
    if kinds == TEXT_ONLY and isinstance(choices, list):
        for choice in choices:
            if END_PARAMETER in choice or (not in_lines and choice.startswith("\n")):
                raise ValueError(
                    f"an allowed value of the argument {name!r} of {tool.name!r} is {choice!r}, "
                    f"which this model's format cannot write: {END_PARAMETER!r} ends values, and "
                    "a line break before them belongs to their tag"
                )
        return one_of(*(const_text(f"{choice}{end}") for choice in choices))
    return optional(regex_text("[^<]*\n" if in_lines else "[^<\n][^<]*"))


def _require_tag_name(tool: CallableTool, name: str, quote: str) -> None:
    forbidden = "<>\n" + quote
    if not name or name != name.strip() or any(char in forbidden for char in name):
        raise ValueError(f"the name {name!r} in {tool.name!r} cannot be written as a tag")
