"""How each format writes tool calls: for a grammar in which the model may call or answer.

The grammars are structural formats (`tellin.structural_formats`). What they allow, the parser of
the same name reads as calls, whatever the arguments are; and no JSON text begins like a call, so
that an answer is never taken for one. Where that cannot be had, building the grammar is an error.
"""

from __future__ import annotations

import json
import keyword
from collections.abc import Mapping, Sequence
from typing import Any

from tellin.entrypoints.openai.parsers.apertus import ApertusParser
from tellin.entrypoints.openai.parsers.base import ToolParser
from tellin.entrypoints.openai.parsers.call_tags import minimax_calls, qwen_calls, seed_calls
from tellin.entrypoints.openai.parsers.format_parts import (
    CallableTool,
    Definitions,
    Format,
    Writer,
    arguments_of,
    const_text,
    json_value,
    list_of,
    one_of,
    optional,
    regex_text,
    sequence,
    shared,
    tagged,
)
from tellin.entrypoints.openai.parsers.gemma import GemmaParser
from tellin.entrypoints.openai.parsers.json_calls import (
    CohereParser,
    HermesParser,
    HunyuanParser,
    Llama3JsonParser,
    MistralParser,
    NemotronParser,
)
from tellin.entrypoints.openai.parsers.pythonic import Lfm2Parser, PythonicParser
from tellin.entrypoints.openai.parsers.qwen_xml import (
    MiniMaxParser,
    QwenXmlParser,
    SeedParser,
)
from tellin.entrypoints.openai.schema_tools import (
    call_schema,
    may_have_property,
    referenced,
    without_annotations,
)


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
    answer = json_value(without_annotations(answer_schema))
    return {"format": one_of(answer, calls), "definitions": definitions}


def call_starts(parser: type[ToolParser], names: Sequence[str]) -> tuple[str, ...]:
    """How calls begin, white space left out: no answer begins like this."""
    if parser is Llama3JsonParser:
        return (*parser.markers, '{"name"')
    if issubclass(parser, PythonicParser):
        return (*parser.markers, *(f"[{name}(" for name in names))
    return parser.markers


# ---------------------------------------------------------------------- formats of JSON


def _hermes(tools: Sequence[CallableTool], is_single: bool, definitions: Definitions) -> Format:
    calls = one_of(*(json_value(call_schema(tool.name, tool.parameters)) for tool in tools))
    return list_of([tagged("<tool_call>\n", calls, "\n</tool_call>")], "\n", is_single=is_single)


def _llama3(tools: Sequence[CallableTool], is_single: bool, definitions: Definitions) -> Format:
    calls = [
        tagged("", json_value(call_schema(tool.name, tool.parameters, "parameters")))
        for tool in tools
    ]
    bare = shared(definitions, list_of(calls, "; ", is_single=is_single))
    return one_of(bare, sequence(const_text("<|python_tag|>"), bare))


def _mistral(tools: Sequence[CallableTool], is_single: bool, definitions: Definitions) -> Format:
    """The older way, an array; and the newer one, the name before its arguments."""
    arguments = [shared(definitions, json_value(tool.parameters)) for tool in tools]
    array = tagged("[TOOL_CALLS]", _array(tools, arguments, is_single))
    named = [
        tagged(f"[TOOL_CALLS]{tool.name}{end}", schema)
        for tool, schema in zip(tools, arguments, strict=True)
        for end in ("[ARGS]", "")
    ]
    return one_of(array, list_of(named, "", is_single=is_single))


def _marked_array(parser: type[NemotronParser], *keys: str) -> Writer:
    """An array between the parser's marks; ``keys`` are those of names and of arguments."""

    def write(tools: Sequence[CallableTool], is_single: bool, definitions: Definitions) -> Format:
        arguments = [shared(definitions, json_value(tool.parameters)) for tool in tools]
        return tagged(parser.markers[0], _array(tools, arguments, is_single, *keys), parser.closing)

    return write


def _apertus(tools: Sequence[CallableTool], is_single: bool, definitions: Definitions) -> Format:
    calls = [tagged(f'{{"{tool.name}": ', json_value(tool.parameters), "}") for tool in tools]
    array = list_of(calls, ", ", is_single=is_single)
    return tagged("<|tools_prefix|>[", array, "]<|tools_suffix|>")


def _array(
    tools: Sequence[CallableTool],
    arguments: Sequence[Format],
    is_single: bool,
    name_key: str = "name",
    arguments_key: str = "arguments",
) -> Format:
    """Calls as objects; ``arguments`` are the tools' own."""
    calls = [
        tagged(f'{{"{name_key}": "{tool.name}", "{arguments_key}": ', schema, "}")
        for tool, schema in zip(tools, arguments, strict=True)
    ]
    return sequence(const_text("["), list_of(calls, ", ", is_single=is_single), const_text("]"))


# ---------------------------------------------------------------------- Python


def _pythonic(tools: Sequence[CallableTool], is_single: bool, definitions: Definitions) -> Format:
    calls = [tagged(f"{_python_name(tool)}(", _keywords(tool, definitions), ")") for tool in tools]
    array = sequence(const_text("["), list_of(calls, ", ", is_single=is_single), const_text("]"))
    return shared(definitions, array)


def _between(parser: type[PythonicParser]) -> Writer:
    """A list of calls alone, or between the parser's marks."""

    def write(tools: Sequence[CallableTool], is_single: bool, definitions: Definitions) -> Format:
        bare = _pythonic(tools, is_single, definitions)
        return one_of(bare, tagged(parser.markers[0], bare, parser.closing))

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
        written[name] = tagged(f"{name}=", json_value(tool.property_schema(name)))
    return arguments_of(tool, written, ", ", definitions)


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
            tagged(
                f"{begin}call:{tool.name}{{",
                _GemmaWriter(tool, quote, values, definitions).arguments(tool),
                f"}}{end}",
            )
            for tool in tools
        ]
        styles.append(list_of(calls, "", is_single=is_single))
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
            written[name] = tagged(f"{self._key(name)}:", self._value(name, schema))
        return arguments_of(part, written, ",", self._definitions)

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
            return one_of(*(const_text(self._literal(name, choice)) for choice in fitting))
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
            return json_value({"type": kind, **limits}) if limits else self._values[kind]
        if kind == "array" and isinstance(schema.get("items"), Mapping):
            item = self._value(name, schema["items"])
            items = list_of([tagged("", item)], ",")
            needs_one = schema.get("minItems", 0) != 0
            inner = items if needs_one else optional(items)
            return shared(self._definitions, sequence(const_text("["), inner, const_text("]")))
        if kind == "object" and schema.get("properties"):
            inner = self.arguments(CallableTool(self._tool.name, dict(schema)))
            return shared(self._definitions, sequence(const_text("{"), inner, const_text("}")))
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
    pair = tagged("", sequence(regex_text(_GEMMA_BARE), const_text(":"), anything))
    values = {
        kind: shared(definitions, json_value({"type": kind}))
        for kind in ("integer", "number", "boolean", "null")
    }
    values["string"] = shared(definitions, tagged(quote, optional(regex_text("[^<]+")), quote))
    values["array"] = shared(
        definitions, _in_brackets("[", list_of([tagged("", anything)], ","), "]")
    )
    values["object"] = shared(definitions, _in_brackets("{", list_of([pair], ","), "}"))
    kinds = ("string", "number", "boolean", "null", "array", "object")
    values["any"] = shared(definitions, one_of(*(values[kind] for kind in kinds)), name)
    return values


def _in_brackets(opening: str, content: Format, closing: str) -> Format:
    return sequence(const_text(opening), optional(content), const_text(closing))


_WRITERS: dict[type[ToolParser], Writer] = {
    HermesParser: _hermes,
    Llama3JsonParser: _llama3,
    MistralParser: _mistral,
    NemotronParser: _marked_array(NemotronParser),
    HunyuanParser: _marked_array(HunyuanParser),
    ApertusParser: _apertus,
    CohereParser: _marked_array(CohereParser, "tool_name", "parameters"),
    Lfm2Parser: _between(Lfm2Parser),
    PythonicParser: _between(PythonicParser),
    GemmaParser: _gemma,
    QwenXmlParser: qwen_calls,
    SeedParser: seed_calls,
    MiniMaxParser: minimax_calls,
}
