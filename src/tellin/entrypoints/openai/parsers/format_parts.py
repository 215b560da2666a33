"""Parts of structural formats (`tellin.structural_formats`), of which formats of calls are made.

Knows no format of calls; a tool is its name and the schema of its arguments.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tellin.entrypoints.openai.schema_tools import DEFINITIONS

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


def const_text(value: str) -> Format:
    return {"type": "const_string", "value": value}


def json_value(schema: Any) -> Format:
    return {"type": "json_schema", "json_schema": schema}


def regex_text(pattern: str) -> Format:
    return {"type": "regex", "pattern": pattern}


def sequence(*elements: Format) -> Format:
    return {"type": "sequence", "elements": list(elements)}


def one_of(*elements: Format) -> Format:
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": list(elements)}


def tagged(begin: str, content: Format, end: str = "") -> Format:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def list_of(tags: Sequence[Format], separator: str, *, is_single: bool = False) -> Format:
    """At least one of these, in any order."""
    return {
        "type": "tags_with_separator",
        "tags": list(tags),
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": is_single,
    }


def optional(element: Format) -> Format:
    return one_of(const_text(""), element)


def shared(definitions: Definitions, element: Format, name: str | None = None) -> Format:
    """A reference to the part, which is kept under the name, or under a short one of its own."""
    name = name or f"p{len(definitions)}"
    definitions[name] = element
    return {"type": "ref", "name": name}


def arguments_of(
    tool: CallableTool, written: Mapping[str, Format], separator: str, definitions: Definitions
) -> Format:
    """All required arguments in their order, then any of the others in theirs, each once."""
    required: list[Format] = []
    for name in tool.required:
        required += [const_text(separator), written[name]] if required else [written[name]]
    rest = const_text("")
    as_first = [const_text("")]
    for name in reversed([name for name in written if name not in tool.required]):
        item = shared(definitions, written[name])
        as_first.append(sequence(item, rest))
        longer = one_of(sequence(const_text(separator), item, rest), rest)
        rest = shared(definitions, longer)
    return sequence(*required, rest) if required else one_of(*as_first)
