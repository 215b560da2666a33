"""How each format writes tool calls: for a grammar in which the model may call or answer.

The grammars are structural formats (`tellin.structural_formats`). What they allow, the parser of
the same name reads as calls, whatever the arguments are; and no JSON text begins like a call, so
that an answer is never taken for one. Where that cannot be had, building the grammar is an error.
"""

from __future__ import annotations

import json
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
    NemotronParser,
)
from tellin.entrypoints.openai.parsers.pythonic import Lfm2Parser, PythonicParser
from tellin.entrypoints.openai.parsers.qwen_xml import TEXT_ONLY, QwenXmlParser, kinds_of
from tellin.entrypoints.openai.schema_tools import (
    DEFINITIONS,
    call_schema,
    may_have_property,
    referenced,
    without_annotations,
)

Format = dict[str, Any]
Definitions = dict[str, Format]
"""Parts that are used more than once, by name; writers of formats fill it."""


@dataclass(frozen=True)
class CallableTool:
    """A tool: its name and the schema of its arguments, always of an object, to be enforced."""

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
        if not isinstance(schema, Mapping) or "$ref" not in json.dumps(schema):
            return schema
        shared = {k: self.parameters[k] for k in DEFINITIONS if k in self.parameters}
        return {**shared, **schema}


Writer = Callable[[Sequence[CallableTool], bool, Definitions], Format]
"""Writes the calls of these tools, at most one if so told."""


def answer_or_calls(
    parser: type[ToolParser],
    tools: Sequence[CallableTool],
    answer_schema: dict[str, Any],
    *,
    is_single: bool,
) -> Format:
    """A structural tag for either JSON of this schema, or calls as ``parser`` reads them.

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
    bare = [CallableTool(tool.name, without_annotations(tool.parameters)) for tool in tools]
    definitions: Definitions = {}
    calls = _WRITERS[parser](bare, is_single, definitions)
    answer = _schema(without_annotations(answer_schema))
    return {"format": one_of(answer, calls), "definitions": definitions}


def call_starts(parser: type[ToolParser], names: Sequence[str]) -> tuple[str, ...]:
    """How calls begin, white space left out: no answer begins like this."""
    if parser is Llama3JsonParser:
        return (*parser.markers, '{"name"')
    if issubclass(parser, PythonicParser):
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


def _shared(definitions: Definitions, element: Format, name: str | None = None) -> Format:
    """A reference to the part, which is kept under the name, or under a short one of its own."""
    name = name or f"p{len(definitions)}"
    definitions[name] = element
    return {"type": "ref", "name": name}


# ---------------------------------------------------------------------- formats of JSON


def _hermes(tools: Sequence[CallableTool], is_single: bool, definitions: Definitions) -> Format:
    calls = one_of(*(_schema(call_schema(tool.name, tool.parameters)) for tool in tools))
    return _list([_tag("<tool_call>\n", calls, "\n</tool_call>")], "\n", is_single=is_single)


def _llama3(tools: Sequence[CallableTool], is_single: bool, definitions: Definitions) -> Format:
    calls = [
        _tag("", _schema(call_schema(tool.name, tool.parameters, "parameters"))) for tool in tools
    ]
    bare = _shared(definitions, _list(calls, "; ", is_single=is_single))
    return one_of(bare, _sequence(_text("<|python_tag|>"), bare))


def _mistral(tools: Sequence[CallableTool], is_single: bool, definitions: Definitions) -> Format:
    """The older way, an array; and the newer one, the name before its arguments."""
    arguments = [_shared(definitions, _schema(tool.parameters)) for tool in tools]
    array = _tag("[TOOL_CALLS]", _array(tools, arguments, is_single))
    named = [
        _tag(f"[TOOL_CALLS]{tool.name}{end}", schema)
        for tool, schema in zip(tools, arguments, strict=True)
        for end in ("[ARGS]", "")
    ]
    return one_of(array, _list(named, "", is_single=is_single))


def _nemotron(tools: Sequence[CallableTool], is_single: bool, definitions: Definitions) -> Format:
    arguments = [_shared(definitions, _schema(tool.parameters)) for tool in tools]
    return _tag("<TOOLCALL>", _array(tools, arguments, is_single), "</TOOLCALL>")


def _array(tools: Sequence[CallableTool], arguments: Sequence[Format], is_single: bool) -> Format:
    """Calls as objects; ``arguments`` are the tools' own."""
    calls = [
        _tag(f'{{"name": "{tool.name}", "arguments": ', schema, "}")
        for tool, schema in zip(tools, arguments, strict=True)
    ]
    return _sequence(_text("["), _list(calls, ", ", is_single=is_single), _text("]"))


# ---------------------------------------------------------------------- Python


def _pythonic(tools: Sequence[CallableTool], is_single: bool, definitions: Definitions) -> Format:
    calls = [_tag(f"{_python_name(tool)}(", _keywords(tool, definitions), ")") for tool in tools]
    array = _sequence(_text("["), _list(calls, ", ", is_single=is_single), _text("]"))
    return _shared(definitions, array)


def _between(parser: type[PythonicParser]) -> Writer:
    """A list of calls alone, or between the parser's marks."""

    def write(tools: Sequence[CallableTool], is_single: bool, definitions: Definitions) -> Format:
        bare = _pythonic(tools, is_single, definitions)
        return one_of(bare, _tag(parser.markers[0], bare, parser.closing))

    return write


def _python_name(tool: CallableTool) -> str:
    if not all(part.isidentifier() for part in tool.name.split(".")):
        raise ValueError(f"the tool's name {tool.name!r} cannot be written in Python's syntax")
    return tool.name


def _keywords(tool: CallableTool, definitions: Definitions) -> Format:
    """Arguments by name; their values in JSON."""
    written = {}
    for name in tool.properties:
        if not name.isidentifier() or keyword.iskeyword(name):
            raise ValueError(
                f"the argument {name!r} of {tool.name!r} cannot be written in Python's syntax"
            )
        written[name] = _tag(f"{name}=", _schema(tool.property_schema(name)))
    return _arguments(tool, written, ", ", definitions)


def _arguments(
    tool: CallableTool, written: Mapping[str, Format], separator: str, definitions: Definitions
) -> Format:
    """All required arguments in their order, then any of the others in theirs, each once."""
    required: list[Format] = []
    for name in tool.required:
        required += [_text(separator), written[name]] if required else [written[name]]
    rest = _text("")
    as_first = [_text("")]
    for name in reversed([name for name in written if name not in tool.required]):
        item = _shared(definitions, written[name])
        as_first.append(_sequence(item, rest))
        longer = one_of(_sequence(_text(separator), item, rest), rest)
        rest = _shared(definitions, longer)
    return _sequence(*required, rest) if required else one_of(*as_first)


# ---------------------------------------------------------------------- Qwen's tags


def _qwen_xml(tools: Sequence[CallableTool], is_single: bool, definitions: Definitions) -> Format:
    """Texts are free, but for allowed values; so are those that may be something else too."""
    calls = []
    for tool in tools:
        _require_tag_name(tool, tool.name)
        written = {}
        for name in tool.properties:
            _require_tag_name(tool, name)
            lines = _tag_lines(tool, name)
            written[name] = _tag(f"<parameter={name}>\n", lines, "</parameter>\n")
        arguments = _arguments(tool, written, "", definitions)
        begin, end = f"<tool_call>\n<function={tool.name}>\n", "</function>\n</tool_call>"
        calls.append(_tag(begin, arguments, end))
    return _list(calls, "\n", is_single=is_single)


def _tag_lines(tool: CallableTool, name: str) -> Format:
    """A value and the end of its line."""
    schema = tool.property_schema(name)
    kinds = kinds_of(schema, tool.parameters)
    if kinds is not None and "string" not in kinds:
        return _sequence(_schema(schema), _text("\n"))
    choices = schema.get("enum") if isinstance(schema, Mapping) else None
    if kinds == TEXT_ONLY and isinstance(choices, list):
        if any("</parameter>" in choice for choice in choices):
            raise ValueError(
                f"an allowed value of the argument {name!r} of {tool.name!r} contains "
                "'</parameter>', which ends values in this model's format"
            )
        return one_of(*(_text(f"{choice}\n") for choice in choices))
    return _optional(_regex("[^<]*\n"))


def _require_tag_name(tool: CallableTool, name: str) -> None:
    if not name or name != name.strip() or any(char in "<>\n" for char in name):
        raise ValueError(f"the name {name!r} in {tool.name!r} cannot be written as a tag")


# ---------------------------------------------------------------------- Gemma

_GEMMA_BARE = '[^\\s\\x1c-\\x1f:,<>"{}\\[\\]]+'
"""What a key may be made of. U+001C to U+001F are white space to Python, not to `\\s` here."""
_GEMMA_STYLES = (
    ("<start_function_call>", "<end_function_call>", "<escape>"),
    ("<|tool_call>", "<tool_call|>", '<|"|>'),
)


_NUMBER_LIMITS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_KINDS: dict[str, type | tuple[type, ...]] = {
    "string": str, "boolean": bool, "null": type(None), "array": list, "object": dict,
    "integer": int, "number": (int, float),
}  # fmt: skip


def _gemma(tools: Sequence[CallableTool], is_single: bool, definitions: Definitions) -> Format:
    styles = []
    for begin, end, quote in _GEMMA_STYLES:
        values = _gemma_values(quote, definitions)
        calls = [
            _tag(
                f"{begin}call:{tool.name}{{",
                _GemmaWriter(tool, quote, values, definitions).arguments(tool),
                f"}}{end}",
            )
            for tool in tools
        ]
        styles.append(_list(calls, "", is_single=is_single))
    return one_of(*styles)


class _GemmaWriter:
    """Writes one tool's schemas in one style of Gemma's notation.

    Enforced are types, allowed values, limits of numbers, and what arrays and objects hold. Texts
    are free: their patterns and lengths are not.
    """

    def __init__(
        self,
        tool: CallableTool,
        quote: str,
        values: Mapping[str, Format],
        definitions: Definitions,
    ) -> None:
        self._tool = tool
        self._quote = quote
        self._values = values
        self._definitions = definitions
        self._referenced: dict[str, Format] = {}

    def arguments(self, part: CallableTool) -> Format:
        """The properties of an object; of those that its schema names no others."""
        written = {}
        for name, schema in part.properties.items():
            written[name] = _tag(f"{self._key(name)}:", self._value(name, schema))
        return _arguments(part, written, ",", self._definitions)

    def _value(self, name: str, schema: Any) -> Format:
        """A value of the schema, which belongs to the argument ``name``."""
        if not isinstance(schema, Mapping):
            return self._values["any"]
        if isinstance(schema.get("$ref"), str):
            return self._reference(name, schema["$ref"])
        for key in ("anyOf", "oneOf", "allOf"):
            branches = schema.get(key)
            if isinstance(branches, list) and branches and (key != "allOf" or len(branches) == 1):
                return one_of(*(self._value(name, part) for part in branches))
        kinds = schema.get("type", "any")
        kinds = kinds if isinstance(kinds, list) else [kinds]
        choices = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(choices, list):
            fitting = [c for c in choices if any(_is_of_kind(c, kind) for kind in kinds)]
            if not fitting:
                raise ValueError(
                    f"the argument {name!r} of {self._tool.name!r} has no allowed value"
                )
            return one_of(*(_text(self._literal(name, choice)) for choice in fitting))
        return one_of(*(self._of_kind(name, kind, schema) for kind in kinds))

    def _reference(self, name: str, reference: str) -> Format:
        """What is referred to, written once: it may refer to itself."""
        if reference not in self._referenced:
            shared = f"{self._tool.name}{reference}{self._quote}"
            self._referenced[reference] = {"type": "ref", "name": shared}
            target = referenced(self._tool.parameters, reference)
            self._definitions[shared] = self._value(name, target)
        return self._referenced[reference]

    def _of_kind(self, name: str, kind: Any, schema: Mapping[str, Any]) -> Format:
        if kind in ("integer", "number"):
            limits = {key: schema[key] for key in _NUMBER_LIMITS if key in schema}
            return _schema({"type": kind, **limits}) if limits else self._values[kind]
        if kind == "array" and isinstance(schema.get("items"), Mapping):
            item = self._value(name, schema["items"])
            items = _list([_tag("", item)], ",")
            needs_one = schema.get("minItems", 0) != 0
            inner = items if needs_one else _optional(items)
            return _shared(self._definitions, _sequence(_text("["), inner, _text("]")))
        if kind == "object" and schema.get("properties"):
            inner = self.arguments(CallableTool(self._tool.name, dict(schema)))
            return _shared(self._definitions, _sequence(_text("{"), inner, _text("}")))
        return self._values.get(kind if isinstance(kind, str) else "any", self._values["any"])

    def _literal(self, name: str, value: Any) -> str:
        if isinstance(value, str):
            for mark in (mark for style in _GEMMA_STYLES for mark in style[1:]):
                if mark in value:
                    raise ValueError(
                        f"an allowed value of the argument {name!r} of {self._tool.name!r} "
                        f"contains {mark!r}, which ends texts in this model's format"
                    )
            return f"{self._quote}{value}{self._quote}"
        if isinstance(value, list):
            return f"[{','.join(self._literal(name, item) for item in value)}]"
        if isinstance(value, Mapping):
            pairs = (f"{self._key(key)}:{self._literal(name, item)}" for key, item in value.items())
            return f"{{{','.join(pairs)}}}"
        return json.dumps(value)

    def _key(self, name: str) -> str:
        if not name or any(char.isspace() or char in ':,<>"{}[]' for char in name):
            raise ValueError(
                f"the argument {name!r} of {self._tool.name!r} cannot be written in this model's "
                "format"
            )
        return name


def _is_of_kind(value: Any, kind: Any) -> bool:
    """Whether a JSON value is of a schema's type; any is of an unknown type."""
    if isinstance(value, bool) and kind in ("integer", "number"):
        return False
    return not isinstance(kind, str) or kind not in _KINDS or isinstance(value, _KINDS[kind])


def _gemma_values(quote: str, definitions: Definitions) -> dict[str, Format]:
    """Values by type alone; what is inside lists and objects is free."""
    name = f"any{quote}"
    anything: Format = {"type": "ref", "name": name}
    pair = _tag("", _sequence(_regex(_GEMMA_BARE), _text(":"), anything))
    values = {
        kind: _shared(definitions, _schema({"type": kind}))
        for kind in ("integer", "number", "boolean", "null")
    }
    values["string"] = _shared(definitions, _tag(quote, _optional(_regex("[^<]+")), quote))
    values["array"] = _shared(definitions, _in_brackets("[", _list([_tag("", anything)], ","), "]"))
    values["object"] = _shared(definitions, _in_brackets("{", _list([pair], ","), "}"))
    kinds = ("string", "number", "boolean", "null", "array", "object")
    values["any"] = _shared(definitions, one_of(*(values[kind] for kind in kinds)), name)
    return values


def _in_brackets(opening: str, content: Format, closing: str) -> Format:
    return _sequence(_text(opening), _optional(content), _text(closing))


_WRITERS: dict[type[ToolParser], Writer] = {
    HermesParser: _hermes,
    Llama3JsonParser: _llama3,
    MistralParser: _mistral,
    NemotronParser: _nemotron,
    Lfm2Parser: _between(Lfm2Parser),
    PythonicParser: _between(PythonicParser),
    GemmaParser: _gemma,
    QwenXmlParser: _qwen_xml,
}
