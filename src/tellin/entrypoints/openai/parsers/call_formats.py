"""How each format writes tool calls: for a grammar in which the model may call or answer.

The grammars are structural formats (`tellin.structural_formats`). What they allow, the parser of
the same name reads as calls, whatever the arguments are; and no JSON text begins like a call, so
that an answer is never taken for one. Where that cannot be had, building the grammar is an error.
"""

from __future__ import annotations

import keyword
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tellin.entrypoints.openai.parsers.base import ToolParser
from tellin.entrypoints.openai.parsers.gemma import GemmaParser
from tellin.entrypoints.openai.parsers.json_calls import (
    HermesParser,
    Llama3JsonParser,
    MistralParser,
)
from tellin.entrypoints.openai.parsers.pythonic import PythonicParser
from tellin.entrypoints.openai.schema_tools import call_schema, may_have_property

Format = dict[str, Any]


@dataclass(frozen=True)
class CallableTool:
    """A tool: its name and the schema of its arguments, always of an object."""

    name: str
    parameters: dict[str, Any]

    @property
    def properties(self) -> dict[str, Any]:
        found = self.parameters.get("properties")
        return found if isinstance(found, dict) else {}

    @property
    def required(self) -> list[str]:
        found = self.parameters.get("required")
        return [name for name in self.properties if isinstance(found, list) and name in found]

    def property_schema(self, name: str) -> Any:
        """Schema of one argument, with the definitions that it may refer to."""
        schema = self.properties[name]
        shared = {k: self.parameters[k] for k in ("$defs", "definitions") if k in self.parameters}
        return {**shared, **schema} if isinstance(schema, Mapping) else schema


def answer_or_calls(
    parser: type[ToolParser],
    tools: Sequence[CallableTool],
    answer_schema: dict[str, Any],
    *,
    is_single: bool,
) -> Format:
    """A format for either JSON of this schema, or calls as ``parser`` reads them.

    Args:
        is_single: at most one call.

    Raises:
        ValueError: this format cannot tell the two apart, or cannot write a tool's arguments.
    """
    if parser is Llama3JsonParser and may_have_property(answer_schema, "name"):
        raise ValueError(
            "in this model's format a tool call is a JSON object that has a 'name'; an answer that "
            "may have one too cannot be told from it (its schema must not have 'name', and must "
            "say additionalProperties: false)"
        )
    return one_of(_schema(answer_schema), _WRITERS[parser](tools, is_single))


def call_starts(parser: type[ToolParser], names: Sequence[str]) -> tuple[str, ...]:
    """How calls begin, white space left out: no answer begins like this."""
    if parser is Llama3JsonParser:
        return (*parser.markers, '{"name"')
    if parser is PythonicParser:
        return (*parser.markers, *(f"[{name}(" for name in names))
    return parser.markers


# ---------------------------------------------------------------------- parts of formats


def _text(value: str) -> Format:
    return {"type": "const_string", "value": value}


def _schema(schema: Any) -> Format:
    return {"type": "json_schema", "json_schema": schema}


def _regex(pattern: str) -> Format:
    return {"type": "regex", "pattern": pattern}


def _sequence(*elements: Format) -> Format:
    return {"type": "sequence", "elements": list(elements)}


def one_of(*elements: Format) -> Format:
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": list(elements)}


def _tag(begin: str, content: Format, end: str = "") -> Format:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _list(tags: Sequence[Format], separator: str, *, is_single: bool = False) -> Format:
    """At least one of these, in any order."""
    return {
        "type": "tags_with_separator",
        "tags": list(tags),
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": is_single,
    }


def _optional(element: Format) -> Format:
    return one_of(_text(""), element)


# ---------------------------------------------------------------------- formats of JSON


def _hermes(tools: Sequence[CallableTool], is_single: bool) -> Format:
    calls = one_of(*(_schema(call_schema(tool.name, tool.parameters)) for tool in tools))
    return _list([_tag("<tool_call>\n", calls, "\n</tool_call>")], "\n", is_single=is_single)


def _llama3(tools: Sequence[CallableTool], is_single: bool) -> Format:
    calls = [
        _tag("", _schema(call_schema(tool.name, tool.parameters, "parameters"))) for tool in tools
    ]
    bare = _list(calls, "; ", is_single=is_single)
    return one_of(bare, _sequence(_text("<|python_tag|>"), bare))


def _mistral(tools: Sequence[CallableTool], is_single: bool) -> Format:
    """The older way, an array; and the newer one, the name before its arguments."""
    calls = one_of(*(_schema(call_schema(tool.name, tool.parameters)) for tool in tools))
    array = _sequence(_text("["), _list([_tag("", calls)], ", ", is_single=is_single), _text("]"))
    named = [
        _tag(f"[TOOL_CALLS]{tool.name}{marker}", _schema(tool.parameters))
        for tool in tools
        for marker in ("[ARGS]", "")
    ]
    return one_of(_sequence(_text("[TOOL_CALLS]"), array), _list(named, "", is_single=is_single))


# ---------------------------------------------------------------------- Python


def _pythonic(tools: Sequence[CallableTool], is_single: bool) -> Format:
    calls = [_tag(f"{_python_name(tool)}(", _keywords(tool), ")") for tool in tools]
    bare = _sequence(_text("["), _list(calls, ", ", is_single=is_single), _text("]"))
    return one_of(bare, _tag("<|python_start|>", bare, "<|python_end|>"))


def _python_name(tool: CallableTool) -> str:
    if not all(part.isidentifier() for part in tool.name.split(".")):
        raise ValueError(f"the tool's name {tool.name!r} cannot be written in Python's syntax")
    return tool.name


def _keywords(tool: CallableTool) -> Format:
    """The required arguments in their order, then any of the others in theirs; JSON values."""
    written = {}
    for name in tool.properties:
        if not name.isidentifier() or keyword.iskeyword(name):
            raise ValueError(
                f"the argument {name!r} of {tool.name!r} cannot be written in Python's syntax"
            )
        written[name] = _tag(f"{name}=", _schema(tool.property_schema(name)))
    return _arguments(tool, written, ", ")


def _arguments(tool: CallableTool, written: Mapping[str, Format], separator: str) -> Format:
    """All required arguments, then optional ones; each at most once."""
    optional = [written[name] for name in written if name not in tool.required]
    parts: list[Format] = []
    for name in (name for name in written if name in tool.required):
        parts += [_text(separator), written[name]] if parts else [written[name]]
    if parts:
        parts += [_optional(_sequence(_text(separator), item)) for item in optional]
        return _sequence(*parts)
    choices: list[Format] = [_text("")]
    for position, item in enumerate(optional):
        rest = (_optional(_sequence(_text(separator), later)) for later in optional[position + 1 :])
        choices.append(_sequence(item, *rest))
    return one_of(*choices)


# ---------------------------------------------------------------------- Gemma

_GEMMA_BARE = '[^\\s:,<>"{}\\[\\]]+'
"""What a key may be made of."""
_GEMMA_DEPTH = 3


def _gemma(tools: Sequence[CallableTool], is_single: bool) -> Format:
    styles = (
        ("<start_function_call>", "<end_function_call>", "<escape>"),
        ("<|tool_call>", "<tool_call|>", '<|"|>'),
    )
    return one_of(
        *(
            _list(
                [
                    _tag(f"{begin}call:{tool.name}{{", _gemma_arguments(tool, quote), f"}}{end}")
                    for tool in tools
                ],
                "",
                is_single=is_single,
            )
            for begin, end, quote in styles
        )
    )


def _gemma_arguments(tool: CallableTool, quote: str) -> Format:
    written = {}
    for name, schema in tool.properties.items():
        if not name or any(char.isspace() or char in ':,<>"{}[]' for char in name):
            raise ValueError(
                f"the argument {name!r} of {tool.name!r} cannot be written in this model's format"
            )
        kind = schema.get("type") if isinstance(schema, Mapping) else None
        written[name] = _tag(f"{name}:", _gemma_value(kind, schema, quote))
    return _arguments(tool, written, ",")


def _gemma_value(kind: Any, schema: Any, quote: str) -> Format:
    """A value of this type; what is inside lists and objects is free."""
    if kind == "string":
        choices = schema.get("enum")
        if isinstance(choices, list) and all(isinstance(c, str) for c in choices) and choices:
            return one_of(*(_text(f"{quote}{choice}{quote}") for choice in choices))
        return _gemma_string(quote)
    if kind in ("integer", "number", "boolean", "null"):
        return _schema({"type": kind})
    if kind in ("array", "object"):
        return _gemma_nested(kind, quote, _GEMMA_DEPTH)
    return _gemma_any(quote, _GEMMA_DEPTH)


def _gemma_string(quote: str) -> Format:
    return _tag(quote, _optional(_regex("[^<]+")), quote)


def _gemma_any(quote: str, depth: int) -> Format:
    scalar = _schema({"type": ["number", "boolean", "null"]})
    nested = [_gemma_nested(kind, quote, depth) for kind in ("array", "object")] if depth else []
    return one_of(_gemma_string(quote), scalar, *nested)


def _gemma_nested(kind: str, quote: str, depth: int) -> Format:
    value = _gemma_any(quote, depth - 1)
    if kind == "array":
        return _sequence(_text("["), _optional(_list([_tag("", value)], ",")), _text("]"))
    pair = _tag("", _sequence(_regex(_GEMMA_BARE), _text(":"), value))
    return _sequence(_text("{"), _optional(_list([pair], ",")), _text("}"))


_WRITERS: dict[type[ToolParser], Callable[[Sequence[CallableTool], bool], Format]] = {
    HermesParser: _hermes,
    Llama3JsonParser: _llama3,
    MistralParser: _mistral,
    PythonicParser: _pythonic,
    GemmaParser: _gemma,
}
