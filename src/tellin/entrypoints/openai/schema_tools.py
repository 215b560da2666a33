"""JSON schemas of tool calls, and a question about schemas. Knows no requests."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

DEFINITIONS = ("$defs", "definitions")
_NAMED = (*DEFINITIONS, "properties", "patternProperties", "dependentSchemas")
"""Keywords whose value has names as keys."""
_VALUES = ("const", "enum")
_ANNOTATIONS = ("description", "title", "examples", "default", "$comment")


def call_schema(
    name: str, parameters: Mapping[str, Any], arguments_key: str = "arguments"
) -> dict[str, Any]:
    """The schema of one call: ``{"name": NAME, "arguments": {...}}``."""
    schema, definitions = call_branch(name, parameters, "", arguments_key)
    return {**schema, "$defs": definitions} if definitions else schema


def call_branch(
    name: str, parameters: Mapping[str, Any], prefix: str, arguments_key: str = "arguments"
) -> tuple[dict[str, Any], dict[str, Any]]:
    """`call_schema` and, apart from it, the definitions it needs, whose names get a prefix."""
    own = copy.deepcopy(dict(parameters))
    definitions = {
        prefix + name: _rebase(definition, prefix)
        for key in DEFINITIONS
        if isinstance(own.get(key), dict)
        for name, definition in own.pop(key).items()
    }
    schema = {
        "type": "object",
        "properties": {"name": {"const": name}, arguments_key: _rebase(own, prefix)},
        "required": ["name", arguments_key],
        "additionalProperties": False,
    }
    return schema, definitions


def _rebase(schema: Any, prefix: str) -> Any:
    """The schema with its references pointed to where its definitions have moved."""
    if isinstance(schema, list):
        return [_rebase(item, prefix) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result = {key: _rebase(value, prefix) for key, value in schema.items()}
    target = result.get("$ref")
    if isinstance(target, str):
        for start in (f"#/{key}/" for key in DEFINITIONS):
            if target.startswith(start):
                result["$ref"] = f"#/$defs/{prefix}{target.removeprefix(start)}"
    return result


def without_annotations(schema: Any) -> Any:
    """A copy without descriptions, titles and the like, which allow and forbid nothing."""
    if isinstance(schema, list):
        return [without_annotations(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    result: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _ANNOTATIONS:
            continue
        if key in _VALUES:
            result[key] = value
        elif key in _NAMED and isinstance(value, Mapping):
            result[key] = {name: without_annotations(part) for name, part in value.items()}
        else:
            result[key] = without_annotations(value)
    return result


def may_have_property(schema: Any, name: str) -> bool:
    """Whether a value of the schema may be an object with this property. Says yes in doubt."""
    return _may_have(schema, name, schema, frozenset())


def _may_have(schema: Any, name: str, root: Any, followed: frozenset[str]) -> bool:
    if not isinstance(schema, Mapping):
        return schema is not False
    for values in ([schema["const"]] if "const" in schema else None, schema.get("enum")):
        if isinstance(values, list) and not any(isinstance(v, Mapping) and name in v
                                                for v in values):  # fmt: skip
            return False
    kinds = schema.get("type", "object")
    if kinds != "object" and not (isinstance(kinds, list) and "object" in kinds):
        return False
    is_closed = schema.get("additionalProperties") is False and "patternProperties" not in schema
    properties = schema.get("properties")
    if is_closed and not (isinstance(properties, Mapping) and name in properties):
        return False
    for key in ("anyOf", "oneOf"):
        branches = schema.get(key)
        if isinstance(branches, list) and not any(
            _may_have(branch, name, root, followed) for branch in branches
        ):
            return False
    branches = schema.get("allOf")
    if isinstance(branches, list) and not all(
        _may_have(branch, name, root, followed) for branch in branches
    ):
        return False
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference not in followed:
        return _may_have(referenced(root, reference), name, root, followed | {reference})
    return True


def referenced(root: Any, reference: str) -> Any:
    """What a reference within the schema points to; True (anything) if that is not found."""
    if not reference.startswith("#"):
        return True
    found = root
    for part in reference[1:].split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, Mapping) or key not in found:
            return True
        found = found[key]
    return found
