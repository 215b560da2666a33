"""P36-P38, 6.1-6.2: what is refused, why, and where; the same check offline and online."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from tellin import grammar_validation
from tellin.exceptions import InvalidParameterError
from tellin.grammar_validation import grammar_key, validate_structured_outputs
from tellin.json_schema import endless_references
from tellin.sampling_params import StructuredOutputsParams


def check(**params: Any) -> None:
    validate_structured_outputs(StructuredOutputsParams(**params))


TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "integer"},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
            },
            "required": ["value", "children"],
        }
    },
    "$ref": "#/$defs/node",
}


@pytest.mark.parametrize(
    "params",
    [
        {"json": {}},
        {"json": "{}"},
        {"json": {"type": "object", "properties": {"a": {"type": "string"}}}},
        {"json": TREE},
        {"json": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
        {"json": {"type": "array", "items": {"$ref": "#"}}},
        {"json": {"type": "string", "maxLength": 10**9}},
        {"json": {"type": "string", "format": "date-time"}},
        {"json_object": True},
        {"regex": "a+"},
        {"regex": ""},
        {"choice": ["a", "b"]},
        {"grammar": 'start: "x"+'},
        {"grammar": 'root ::= "x"+'},
    ],
)
def test_sound_constraints_pass(params: dict[str, Any]) -> None:
    check(**params)


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "not-a-type"}, "not-a-type"),
        ({"$ref": "#"}, "# refers to itself"),
        ({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, "#/$defs/a refers"),
        ({"type": "object", "properties": {"a": "string"}}, "(at #/properties/a)"),
        ({"properties": {"x": {"items": {"pattern": "("}}}}, "(at #/properties/x/items)"),
        ({"type": "array", "uniqueItems": True}, 'Unimplemented keys: ["uniqueItems"] (at #)'),
        ({"anyOf": [{}, {"not": {}}]}, "(at #/anyOf/1)"),
        ({"$defs": {"q/r": {"contains": {}}}, "$ref": "#/$defs/q~1r"}, "(at #/$defs/q~1r)"),
        ({"type": "string", "format": "zip"}, "zip"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "Unsatisfiable"),
        ({"enum": []}, "Unsatisfiable"),
        ({"x-guidance": {"lenient": True}, "uniqueItems": True}, "uniqueItems"),
        ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "oneOf"),
        ({"$ref": "http://example.com/x"}, "http://example.com/x"),
        ("{", "not valid JSON"),
        ("[1]", "must be an object"),
        ("false", "allows nothing"),
    ],
)
def test_unsound_schemas_are_refused(schema: Any, reason: str) -> None:
    """P36, P37: with the compiler's reason and the path of the part."""
    with pytest.raises(InvalidParameterError) as caught:
        check(json=schema)
    assert reason in str(caught.value)
    assert str(caught.value).startswith("structured_outputs.json")
    assert "\n" not in str(caught.value)
    assert caught.value.parameter == "structured_outputs.json"


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({"regex": "("}, "unclosed group"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"regex": r"(a)\1"}, "backreferences"),
        ({"regex": r"[^\s\S]"}, "no text can satisfy it"),
        ({"grammar": "start: foo"}, 'unknown name: "foo"'),
        ({"grammar": "start: ("}, "Expected"),
        ({"grammar": 'start: "a" start'}, "no finite text satisfies it"),
        ({"grammar": 'start: %json {"$ref": "#"}'}, "no text can satisfy it"),
        ({"grammar": "start: start"}, "no finite text satisfies it"),
        ({"grammar": "root ::= ("}, "Expected ')'"),
        ({"grammar": "hello"}, "Expected"),
        ({"structural_tag": "x"}, "not valid JSON"),
        ({"structural_tag": "[]"}, "it must be an object"),
        ({"structural_tag": '{"tags": {}}'}, "'triggers' and 'structures'"),
        ({"structural_tag": '{"format": {}}'}, "format must be an object whose type is one of"),
        ({"structural_tag": '{"triggers": [""], "structures": [{}]}'}, "'triggers'"),
        ({"structural_tag": '{"triggers": ["a"], "structures": []}'}, "'structures'"),
        ({"structural_tag": '{"triggers": ["a"], "structures": [{"begin": "a"}]}'}, ".end"),
    ],
)
def test_unsound_grammars_are_refused(params: dict[str, Any], reason: str) -> None:
    """P36, P38: nothing is passed through unconstrained."""
    with pytest.raises(InvalidParameterError) as caught:
        check(**params)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_begin_must_start_with_a_trigger() -> None:
    structure = {"begin": "<g>", "schema": {}, "end": ""}
    with pytest.raises(InvalidParameterError, match="starts with no trigger"):
        check(structural_tag=json.dumps({"triggers": ["<f"], "structures": [structure]}))


def test_schemas_in_tags_are_checked() -> None:
    structure = {"begin": "<f>", "schema": {"uniqueItems": True}, "end": ""}
    with pytest.raises(InvalidParameterError, match="uniqueItems"):
        check(structural_tag=json.dumps({"triggers": ["<f"], "structures": [structure]}))


def test_deep_nesting_is_an_error_not_a_crash() -> None:
    schema: dict[str, Any] = {}
    for _ in range(5000):
        schema = {"type": "array", "items": schema}
    for deep in (schema, "[" * 100_000, '{"items":' * 20_000):
        with pytest.raises(InvalidParameterError, match="too deeply"):
            check(json=deep)


@pytest.mark.parametrize(
    ("schema", "endless"),
    [
        (True, False),
        (False, True),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}}, False),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, True),
        ({"properties": {"a": {"$ref": "#"}}, "required": ["a"]}, False),
        ({"type": ["object", "null"], "required": ["a"], "properties": {"a": False}}, False),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, True),
        ({"type": "array", "items": {"$ref": "#"}}, False),
        ({"type": "array", "prefixItems": [{"$ref": "#"}], "minItems": 1}, True),
        ({"type": "array", "prefixItems": [{"$ref": "#"}]}, False),
        ({"allOf": [{"type": "string"}, {"$ref": "#"}]}, True),
        ({"anyOf": [{"$ref": "#"}]}, True),
        ({"type": "object", "required": ["z"], "additionalProperties": {"$ref": "#"}}, True),
        ({"$ref": "https://elsewhere"}, False),
        ({"$ref": "#/nowhere"}, False),
        ({"const": 3, "type": "object", "required": ["a"], "properties": {"a": False}}, False),
        (TREE, False),
    ],
)
def test_endless_references(schema: Any, endless: bool) -> None:
    """P37: recursion that cannot end is refused, recursion that can is not."""
    assert (endless_references(schema) is not None) == endless


def test_keys_tell_constraints_apart() -> None:
    """6.4.4: equal keys share one compilation."""
    params = [
        StructuredOutputsParams(json={"type": "object"}),
        StructuredOutputsParams(json={"type": "object"}, disable_any_whitespace=True),
        StructuredOutputsParams(json_object=True),
        StructuredOutputsParams(regex="a"),
        StructuredOutputsParams(choice=["a"]),
    ]
    assert len({grammar_key(p) for p in params}) == len(params)
    assert grammar_key(params[0]) == grammar_key(StructuredOutputsParams(json={"type": "object"}))


CHAIN_OF_DEFINITIONS = {
    "$ref": "#/$defs/d0",
    "$defs": {
        **{
            f"d{i}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}}
            for i in range(600)
        },
        "d600": {"type": "integer"},
    },
}


def chain_of_rules(length: int, define: str = ":") -> str:
    root = "root" if define == "::=" else "start"
    rules = [f'r{i}{define} "x" r{i + 1}' for i in range(length)]
    return "\n".join([f"{root}{define} r0", *rules, f'r{length}{define} "a"'])


DEEP = """
import sys, threading
from tellin.grammar_validation import validate_structured_outputs
from tellin.sampling_params import StructuredOutputsParams
from tests.core.test_grammar_validation import CHAIN_OF_DEFINITIONS, chain_of_rules
from tests.core.test_guidance import grammar_of, make_backend

def work():
    for params in ({"json": CHAIN_OF_DEFINITIONS}, {"grammar": chain_of_rules(1200)}):
        validate_structured_outputs(StructuredOutputsParams(**params))
        grammar = grammar_of(make_backend(), **params)
        print(grammar.accept_tokens([ord("{") if "json" in params else ord("x")]))

threading.stack_size(1 << 20)  # as small as some systems give to every thread
thread = threading.Thread(target=work)
thread.start()
thread.join()
"""


def test_long_chains_of_rules_do_not_overflow_the_stack() -> None:
    """P38: the compiler recurses along references; an overflow would end the whole process."""
    result = subprocess.run(
        [sys.executable, "-c", DEEP], capture_output=True, text=True, check=False, timeout=120
    )
    assert (result.returncode, result.stdout.split()) == (0, ["True", "True"]), result.stderr


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({"grammar": chain_of_rules(5000)}, "5002 rules, more than 4000"),
        ({"grammar": chain_of_rules(1500, "::=")}, "1502 rules, more than 1000"),
        ({"grammar": "start: " + '"a" ' * 70_000}, "more than 262144"),
        ({"json": {"const": "x" * 300_000}}, "more than 262144"),
        ({"json": {"anyOf": [{"$ref": "#/$defs/a"}] * 2001, "$defs": {"a": {}}}}, "2001 '$ref'"),
    ],
)
def test_endless_work_is_refused_at_once(params: dict[str, Any], reason: str) -> None:
    started = time.process_time()
    with pytest.raises(InvalidParameterError, match=re.escape(reason)):
        check(**params)
    assert time.process_time() - started < 1.0


def test_threads_made_later_have_the_usual_stack() -> None:
    usual = threading.stack_size()
    check(regex="ab{2}")
    assert threading.stack_size() == usual


@pytest.mark.parametrize("timeout", [0.05])
def test_a_check_has_a_time_limit(timeout: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the compiler meets, admission is not held up; nor do threads pile up."""
    monkeypatch.setattr(grammar_validation, "CHECK_TIMEOUT_S", timeout)
    monkeypatch.setattr(grammar_validation, "_checks", threading.BoundedSemaphore(2))
    release = threading.Event()
    started: list[str] = []

    def hang(grammar: str) -> str:
        started.append(grammar)
        assert release.wait(60)
        return ""

    monkeypatch.setattr(grammar_validation, "grammar_error", hang)
    for number in range(2):
        with pytest.raises(InvalidParameterError, match=r"takes longer than 0\.05 s"):
            check(regex=f"never{number}")
    with pytest.raises(InvalidParameterError, match="too many others"):
        check(regex="never2")
    assert len(started) == 2
    release.set()
    monkeypatch.setattr(grammar_validation, "CHECK_TIMEOUT_S", 60.0)
    check(regex="never3")


@pytest.mark.parametrize(
    "params",
    [
        {"regex": ""},
        {"regex": "(a+)+b"},
        {"regex": "a{1000000}"},
        {"regex": "(a|aa){1,5000}"},
        {"regex": "((((a{100}){100}){100}){10})"},
        {"json": {"type": "string", "maxLength": 10**9}},
        {"json": {"type": "string", "minLength": 10**6}},
        {"json": {"type": "array", "items": {"type": "integer"}, "minItems": 10**6}},
        {"json": {"type": "string", "pattern": "^(a|b|ab){1,3000}$"}},
        {"json": {}},
        {"grammar": 'start: %json {"type": "string", "minLength": 1000000}'},
    ],
)
def test_catastrophic_constraints_are_bounded(params: dict[str, Any]) -> None:
    """Each passes or is refused with a reason, in bounded time."""
    started = time.process_time()
    with contextlib.suppress(InvalidParameterError):
        check(**params)
    assert time.process_time() - started < 10.0


# ---------------------------------------------------------------------- structural formats

TEXT = {"type": "const_string", "value": "x"}
TAG = {"type": "tag", "begin": "<", "content": TEXT, "end": ">"}


@pytest.mark.parametrize(
    ("node", "reason"),
    [
        ({"type": "const_string"}, "format.value is missing or of a wrong type"),
        ({"type": ["or"]}, "format must be an object"),
        ({"type": "any_text"}, "whose type is one of const_string, json_schema"),
        ({"type": "or", "elements": []}, "format.elements must not be empty"),
        ({"type": "sequence", "elements": [TEXT, 5]}, r"format.elements[1] must be an object"),
        ({"type": "json_schema", "json_schema": {"type": "text"}}, "(at #)"),
        ({"type": "regex", "pattern": "("}, "regex parse error"),
        ({**TAG, "content": {"type": "tag"}}, "format.content.begin is missing"),
        ({"type": "tags_with_separator", "tags": [TEXT]}, "format.tags[0] must be an object whose"),
        ({"type": "tags_with_separator", "tags": []}, "format.tags must not be empty"),
        ({"type": "tags_with_separator", "tags": [TAG]}, "format.separator is missing"),
        ({"type": "tags_with_separator", "tags": [TAG], "separator": "", "at_least_one": 1},
         "format.at_least_one must be true or false"),
        ({"type": "or", "elements": [{"type": "regex", "pattern": "x"}] * 4001}, "more than 4000"),
        ({"type": "ref", "name": "x"}, "format.name 'x' is not among the definitions"),
    ],
)  # fmt: skip
def test_unsound_formats_are_refused(node: Any, reason: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        check(structural_tag=json.dumps({"format": node}))
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("definitions", "reason"),
    [
        ({"x": {"type": "ref", "name": "x"}}, "no text can satisfy it"),
        ({"x": {"type": "or", "elements": []}}, "definitions['x'].elements must not be empty"),
        ([TEXT], "definitions must be an object"),
        ({"y": TEXT}, "format.name 'x' is not among the definitions"),
    ],
)
def test_unsound_definitions_are_refused(definitions: Any, reason: str) -> None:
    node = {"type": "ref", "name": "x"}
    with pytest.raises(InvalidParameterError) as caught:
        check(structural_tag=json.dumps({"format": node, "definitions": definitions}))
    assert reason in str(caught.value)


def test_a_format_nested_without_end_is_refused() -> None:
    node: dict[str, Any] = TEXT
    for _ in range(80):
        node = {"type": "sequence", "elements": [node]}
    with pytest.raises(InvalidParameterError, match="nested too deeply"):
        check(structural_tag=json.dumps({"format": node}))
