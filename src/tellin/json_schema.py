"""Walks over JSON schemas: where the parts are, which of them fails, whether a value can end.

Pure functions on plain objects. They know the shape of schemas, not their full meaning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

SCHEMA_KEYWORDS = ("items", "additionalProperties", "not", "if", "then", "else", "contains")
LIST_KEYWORDS = ("anyOf", "oneOf", "allOf", "prefixItems")
DEFINITION_KEYWORDS = ("$defs", "definitions")
MAP_KEYWORDS = (*DEFINITION_KEYWORDS, "properties", "patternProperties")
DEFINITION_PATHS = tuple(f"#/{key}/" for key in DEFINITION_KEYWORDS)

MAX_PARTS_TRIED = 500
"""Parts that are compiled one by one in search of the one that fails."""


@dataclass(frozen=True)
class SubSchema:
    """A part of a schema and its JSON pointer, ``#`` being the whole."""

    path: str
    schema: Any


def subschemas(schema: Any, path: str = "#") -> Iterator[SubSchema]:
    """Direct parts of a schema, definitions first: other parts refer to them."""
    if not isinstance(schema, dict):
        return
    for key in MAP_KEYWORDS:
        if isinstance(schema.get(key), dict):
            for name, item in schema[key].items():
                yield SubSchema(f"{path}/{key}/{_escape(name)}", item)
    for key in SCHEMA_KEYWORDS:
        if key in schema:
            yield SubSchema(f"{path}/{key}", schema[key])
    for key in LIST_KEYWORDS:
        if isinstance(schema.get(key), list):
            for index, item in enumerate(schema[key]):
                yield SubSchema(f"{path}/{key}/{index}", item)


def innermost_failing_subschema(schema: Any, fails: Callable[[Any], bool]) -> SubSchema:
    """Smallest part that fails by itself, given that the whole does.

    Definitions go along with every part, so that its references resolve: the returned schema is the
    part together with them.
    """
    definitions = {
        key: schema[key]
        for key in DEFINITION_KEYWORDS
        if isinstance(schema, dict) and isinstance(schema.get(key), dict)
    }
    num_tried = 0
    found = SubSchema("#", schema)
    found_alone = schema
    while True:
        for part in subschemas(found.schema, found.path):
            num_tried += 1
            if num_tried > MAX_PARTS_TRIED:
                return SubSchema(found.path, found_alone)
            alone = part.schema
            if isinstance(alone, dict) and not part.path.startswith(DEFINITION_PATHS):
                alone = {**definitions, **alone}
            if fails(alone):
                found, found_alone = part, alone
                break
        else:
            return SubSchema(found.path, found_alone)


def close_objects(schema: Any) -> Any:
    """A copy in which objects that do not say otherwise allow no additional properties."""
    if not isinstance(schema, dict):
        return schema
    copy = dict(schema)
    for key in SCHEMA_KEYWORDS:
        if key in copy:
            copy[key] = close_objects(copy[key])
    for key in LIST_KEYWORDS:
        if isinstance(copy.get(key), list):
            copy[key] = [close_objects(item) for item in copy[key]]
    for key in MAP_KEYWORDS:
        if isinstance(copy.get(key), dict):
            copy[key] = {name: close_objects(item) for name, item in copy[key].items()}
    describes_object = copy.get("type") == "object" or "properties" in copy
    if describes_object and "additionalProperties" not in copy:
        copy["additionalProperties"] = False
    return copy


def endless_references(schema: Any) -> str | None:
    """A reference without which the schema has no finite value; None if it has one.

    Least fixed point: a reference can end if what it names can end by means of references that can.
    """
    finite: set[str] = set()
    references = _references(schema)
    targets = {ref: _resolve(schema, ref) for ref in references}
    finite.update(ref for ref, target in targets.items() if target is None)  # not local
    changed = True
    while changed:
        changed = False
        for ref in references - finite:
            if _can_end(targets[ref], finite):
                finite.add(ref)
                changed = True
    if _can_end(schema, finite):
        return None
    return min(references - finite, default="#")


def _references(schema: Any) -> set[str]:
    found: set[str] = set()
    stack = [schema]
    while stack:
        part = stack.pop()
        if isinstance(part, dict):
            if isinstance(part.get("$ref"), str):
                found.add(part["$ref"])
            stack.extend(sub.schema for sub in subschemas(part))
    return found


def _resolve(schema: Any, ref: str) -> Any:
    """What a local reference names, or None."""
    if ref == "#":
        return schema
    if not ref.startswith("#/"):
        return None
    part = schema
    for step in ref[2:].split("/"):
        name = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(part, dict) and name in part:
            part = part[name]
        elif isinstance(part, list) and name.isdigit() and int(name) < len(part):
            part = part[int(name)]
        else:
            return None
    return part


def _can_end(schema: Any, finite: set[str]) -> bool:
    if not isinstance(schema, dict):
        return schema is not False
    ref = schema.get("$ref")
    if isinstance(ref, str) and ref not in finite:
        return False
    if "const" in schema or "enum" in schema:
        return True
    for key in ("anyOf", "oneOf"):
        if schema.get(key) and not any(_can_end(item, finite) for item in schema[key]):
            return False
    if not all(_can_end(item, finite) for item in schema.get("allOf") or ()):
        return False
    types = schema.get("type")
    if types not in ("object", "array") and not isinstance(types, list):
        return True
    names = types if isinstance(types, list) else [types]
    return any(_type_can_end(name, schema, finite) for name in names)


def _type_can_end(name: str, schema: dict[str, Any], finite: set[str]) -> bool:
    if name == "object":
        properties = schema.get("properties") or {}
        others = schema.get("additionalProperties", True)
        required = schema.get("required") or ()
        return all(_can_end(properties.get(key, others), finite) for key in required)
    if name == "array":
        prefix = list(schema.get("prefixItems") or ())
        num_items = schema.get("minItems") or 0
        needed = prefix[:num_items]
        if num_items > len(prefix):
            needed.append(schema.get("items", True))
        return all(_can_end(item, finite) for item in needed)
    return True


def _escape(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
