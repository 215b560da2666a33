"""Structural tags written as one format: a tree of texts, schemas, sequences and alternatives.

A leaf beside `tellin.grammar_validation`, which checks the schemas in it and compiles the result.
It turns the tree into rules of a Lark grammar, and knows no vocabulary: literals are
written by a function that may put special tokens in their place. Whatever it does not know is an
error that says where.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

MAX_RULES = 4000
"""Most parts that are more than a text: compiling takes time of order n squared."""
MAX_DEPTH = 64


class FormatWriter:
    """Writes the grammar of one format.

    Args:
        write_text: a text as symbols of Lark; never empty for a text that is not.
        write_schema: a JSON schema as a symbol of Lark; raises ValueError for one that is wrong.
    """

    def __init__(
        self, write_text: Callable[[str], str], write_schema: Callable[[Any], str]
    ) -> None:
        self._write_text = write_text
        self._write_schema = write_schema
        self._rules: list[str] = []
        self._definitions: dict[str, str] = {}

    def grammar(self, root: Any, definitions: Any = None) -> str:
        """The whole grammar.

        Args:
            definitions: formats by name, which nodes of type ``ref`` stand for; they may refer to
                each other and to themselves.

        Raises:
            ValueError: the format is malformed, or its schemas are; the message says where.
        """
        if not isinstance(definitions, Mapping | None):
            raise ValueError("definitions must be an object of formats")
        self._definitions = {name: f"d{i}" for i, name in enumerate(definitions or {})}
        for name, node in (definitions or {}).items():
            body = self._node(node, f"definitions[{name!r}]", 0)
            self._rules.append(f"{self._definitions[name]}: {body}")
        start = self._node(root, "format", 0)
        return "\n".join(["%llguidance {}", f"start: {start}", *self._rules, ""])

    def _node(self, node: Any, path: str, depth: int) -> str:
        """Write the rules of a node and of all below it; returns the symbol for it."""
        if depth > MAX_DEPTH:
            raise ValueError("it is nested too deeply")
        kind = node.get("type") if isinstance(node, Mapping) else None
        if not isinstance(kind, str) or kind not in FORMAT_TYPES:
            raise ValueError(
                f"{path} must be an object whose type is one of {', '.join(FORMAT_TYPES)}"
            )
        body = FORMAT_TYPES[kind](self, node, path, depth)
        if kind in ("const_string", "ref"):
            return body
        if len(self._rules) >= MAX_RULES:
            raise ValueError(f"it has more than {MAX_RULES} parts")
        name = f"n{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name

    # ------------------------------------------------------------------ one method per type

    def _const_string(self, node: Mapping[str, Any], path: str, depth: int) -> str:
        return self._literal(_get(node, "value", str, path))

    def _json_schema(self, node: Mapping[str, Any], path: str, depth: int) -> str:
        return self._write_schema(_get(node, "json_schema", dict | bool, path))

    def _regex(self, node: Mapping[str, Any], path: str, depth: int) -> str:
        return f"/{_escaped(_get(node, 'pattern', str, path))}/"

    def _sequence(self, node: Mapping[str, Any], path: str, depth: int) -> str:
        return " ".join(self._elements(node, path, depth))

    def _any_of(self, node: Mapping[str, Any], path: str, depth: int) -> str:
        return " | ".join(self._elements(node, path, depth))

    def _tag(self, node: Mapping[str, Any], path: str, depth: int) -> str:
        begin = self._literal(_get(node, "begin", str, path))
        end = self._literal(_get(node, "end", str, path))
        content = self._node(node.get("content"), f"{path}.content", depth + 1)
        return f"{begin} {content} {end}"

    def _ref(self, node: Mapping[str, Any], path: str, depth: int) -> str:
        name = _get(node, "name", str, path)
        if name not in self._definitions:
            raise ValueError(f"{path}.name {name!r:.80} is not among the definitions")
        return self._definitions[name]

    def _tags_with_separator(self, node: Mapping[str, Any], path: str, depth: int) -> str:
        tags = _get(node, "tags", list, path)
        names = []
        for index, tag in enumerate(tags):
            where = f"{path}.tags[{index}]"
            if not isinstance(tag, Mapping) or tag.get("type") != "tag":
                raise ValueError(f"{where} must be an object whose type is tag")
            names.append(self._node(tag, where, depth + 1))
        if not names:
            raise ValueError(f"{path}.tags must not be empty")
        any_tag = f"({' | '.join(names)})"
        body = any_tag
        if not _flag(node, "stop_after_first", path):
            separator = self._literal(_get(node, "separator", str, path))
            body = f"{any_tag} ({separator} {any_tag})*"
        return body if _flag(node, "at_least_one", path) else f"({body})?"

    # ------------------------------------------------------------------ parts

    def _elements(self, node: Mapping[str, Any], path: str, depth: int) -> list[str]:
        elements = _get(node, "elements", list, path)
        if not elements:
            raise ValueError(f"{path}.elements must not be empty")
        return [
            self._node(element, f"{path}.elements[{index}]", depth + 1)
            for index, element in enumerate(elements)
        ]

    def _literal(self, text: str) -> str:
        return self._write_text(text) if text else '""'


FORMAT_TYPES: dict[Any, Callable[[FormatWriter, Mapping[str, Any], str, int], str]] = {
    "const_string": FormatWriter._const_string,
    "json_schema": FormatWriter._json_schema,
    "regex": FormatWriter._regex,
    "sequence": FormatWriter._sequence,
    "or": FormatWriter._any_of,
    "tag": FormatWriter._tag,
    "tags_with_separator": FormatWriter._tags_with_separator,
    "ref": FormatWriter._ref,
}
"""What a node's ``type`` may be, and what writes its rule."""


def _get(node: Mapping[str, Any], name: str, types: Any, path: str) -> Any:
    value = node.get(name)
    if not isinstance(value, types):
        raise ValueError(f"{path}.{name} is missing or of a wrong type")
    return value


def _flag(node: Mapping[str, Any], name: str, path: str) -> bool:
    value = node.get(name, False)
    if not isinstance(value, bool):
        raise ValueError(f"{path}.{name} must be true or false")
    return value


def _escaped(pattern: str) -> str:
    """A pattern between slashes: those within are escaped, and so are line breaks."""

    def escape(match: re.Match[str]) -> str:
        text = match[0]
        if text[0] == "\\" and text[1:] != "\n":
            return text
        return text.replace("\\\n", r"\n").replace("\n", r"\n").replace("/", r"\/")

    return re.sub(r"\\.|/|\n", escape, pattern, flags=re.DOTALL)
