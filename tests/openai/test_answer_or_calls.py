"""response_format beside free tool calls: JSON of the schema, or calls, and never anything else."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from tellin.entrypoints.openai.errors import ApiError
from tellin.entrypoints.openai.parsers.events import ParsedMessage, join
from tellin.entrypoints.openai.parsers.message import MessageParser
from tellin.entrypoints.openai.parsers.registry import TOOL_PARSERS
from tellin.entrypoints.openai.requests import ChatCompletionRequest
from tellin.entrypoints.openai.schema_tools import may_have_property, without_annotations
from tellin.entrypoints.openai.tools import ToolPlan, plan_tools
from tellin.grammar_validation import (
    _byte_tokenizer,
    build_grammar,
    make_matcher,
    on_deep_stack,
    validate_structured_outputs,
)
from tests.openai.conftest import Server
from tests.openai.test_chat_api import MESSAGES, strict_chunks

EOS = 256
ANSWER = {
    "type": "object",
    "properties": {"text": {"type": "string"}, "n": {"type": "integer"}},
    "required": ["text"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "$defs": {"unit": {"enum": ["C", "F"]}},
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "unit": {"$ref": "#/$defs/unit"},
                "tags": {"type": "array", "items": {"type": "string"}},
            },
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}


def make_plan(parser: str, schema: Any = ANSWER, **body: Any) -> ToolPlan:
    request = ChatCompletionRequest.model_validate(
        {
            "messages": [{"role": "user", "content": "?"}],
            "tools": [WEATHER, NOW],
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "answer", "schema": schema},
            },
            **body,
        }
    )
    chat_format: Any = SimpleNamespace(tool_parser=TOOL_PARSERS[parser])
    return plan_tools(request, chat_format)


def matcher_of(plan: ToolPlan) -> Any:
    assert plan.constraint is not None
    grammar = build_grammar(plan.constraint)
    matcher = on_deep_stack(lambda: make_matcher(grammar, _byte_tokenizer()))
    assert not isinstance(matcher, str), matcher
    return matcher


def accepts(plan: ToolPlan, text: str) -> bool:
    matcher = matcher_of(plan)
    data = list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and bool(matcher.is_accepting())


def parse(plan: ToolPlan, *pieces: str) -> ParsedMessage:
    parser = MessageParser(None, plan.make_parser(), max_calls=plan.max_calls)
    return join([*map(parser.feed, pieces), parser.finish()])


CALLS = [
    (
        "hermes",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    ),
    (
        "llama3_json",
        '{"name": "get_weather", "parameters": {"city": "Rome"}}; '
        '{"name": "now", "parameters": {}}',
    ),
    ("llama3_json", '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Rome"}}'),
    (
        "mistral",
        '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Rome"}}, '
        '{"name": "now", "arguments": {}}]',
    ),
    ("mistral", '[TOOL_CALLS]get_weather[ARGS]{"city": "Rome"}[TOOL_CALLS]now{}'),
    ("pythonic", '[get_weather(city="Rome"), now()]'),
    (
        "nemotron_json",
        '<TOOLCALL>[{"name": "get_weather", "arguments": {"city": "Rome"}}]</TOOLCALL>',
    ),
    ("lfm2", '<|tool_call_start|>[get_weather(city="Rome")]<|tool_call_end|>'),
    ("pythonic", '<|python_start|>[get_weather(city="Rome")]<|python_end|>'),
    (
        "gemma",
        "<start_function_call>call:get_weather{city:<escape>Rome<escape>}<end_function_call>"
        "<start_function_call>call:now{}<end_function_call>",
    ),
    ("gemma", '<|tool_call>call:get_weather{city:<|"|>Rome<|"|>}<tool_call|>'),
    (
        "qwen3_coder",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n"
        "</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
    ),
    (
        "apertus",
        '<|tools_prefix|>[{"get_weather": {"city": "Rome"}}, {"now": {}}]<|tools_suffix|>',
    ),
    (
        "hunyuan_a13b",
        '<tool_calls>[{"name": "get_weather", "arguments": {"city": "Rome"}}, '
        '{"name": "now", "arguments": {}}]</tool_calls>',
    ),
    (
        "cohere",
        '<|START_ACTION|>[{"tool_name": "get_weather", "parameters": {"city": "Rome"}}, '
        '{"tool_name": "now", "parameters": {}}]<|END_ACTION|>',
    ),
    (
        "seed_oss",
        "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Rome</parameter>\n</function>\n"
        "</seed:tool_call>\n<seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>",
    ),
    (
        "minimax_m2",
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Rome'
        '</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
    ),
]


@pytest.mark.parametrize(("parser", "text"), CALLS)
def test_calls_in_the_models_format_are_allowed_and_read(parser: str, text: str) -> None:
    plan = make_plan(parser)
    if parser == "gemma":  # free strings end where a special token stands, which bytes have not
        assert matcher_of(plan).try_consume_tokens(list(text.partition("Rome")[0].encode())) > 20
    else:
        assert accepts(plan, text)
    expected = [("get_weather", {"city": "Rome"}), ("now", {})][: 2 if "now" in text else 1]
    message = parse(plan, text)
    assert [(name, json.loads(arguments)) for name, arguments in message.calls] == expected
    assert message.content == ""
    assert parse(plan, *text) == message  # P41


@pytest.mark.parametrize("parser", TOOL_PARSERS)
def test_an_answer_is_content_even_if_a_string_in_it_looks_like_a_call(parser: str) -> None:
    plan = make_plan(parser)
    for start in [text for name, text in CALLS if name == parser]:
        answer = json.dumps({"text": start, "n": 1})
        assert accepts(plan, answer)
        assert parse(plan, answer) == ParsedMessage(content=answer)
        assert parse(plan, *answer) == ParsedMessage(content=answer)


@pytest.mark.parametrize("parser", TOOL_PARSERS)
@pytest.mark.parametrize("text", ["Hello", '{"text": 1}', '{"n": 1}', " ", "{}"])
def test_anything_else_is_not_allowed(parser: str, text: str) -> None:
    assert not accepts(make_plan(parser), text)


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("hermes", '<tool_call>\n{"name": "get_weather", "arguments": {}}\n</tool_call>'),
        ("hermes", '<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>'),
        ("llama3_json", '{"name": "get_weather", "parameters": {"days": 1}}'),
        ("mistral", '[TOOL_CALLS][{"name": "now", "arguments": {"a": 1}}]'),
        ("pythonic", "[get_weather()]"),
        ("pythonic", '[get_weather(city="Rome", city="Rome")]'),
        ("gemma", "<start_function_call>call:get_weather{}<end_function_call>"),
        ("qwen3_xml", "<tool_call>\n<function=get_weather>\n</function>\n</tool_call>"),
        (
            "seed_oss",
            "<seed:tool_call>\n<function=get_weather>\n<parameter=city>\nRome</parameter>\n"
            "</function>\n</seed:tool_call>",
        ),
        ("minimax_m2", '<minimax:tool_call>\n<invoke name="f">\n</invoke>\n</minimax:tool_call>'),
    ],
)
def test_arguments_follow_the_tools_definition(parser: str, text: str) -> None:
    assert not accepts(make_plan(parser), text)


def test_parallel_tool_calls_off_allows_one_call() -> None:
    one = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    assert accepts(make_plan("hermes"), f"{one}\n{one}")
    plan = make_plan("hermes", parallel_tool_calls=False)
    assert accepts(plan, one)
    assert not accepts(plan, f"{one}\n{one}")


@pytest.mark.parametrize("parser", TOOL_PARSERS)
@pytest.mark.parametrize("seed", range(6))
def test_whatever_the_grammar_allows_is_an_answer_or_calls(parser: str, seed: int) -> None:
    """Random texts of the grammar: the parser reads each as exactly one of the two."""
    plan = make_plan(parser)
    text = _random_text(matcher_of(plan), random.Random(seed))
    message = parse(plan, text)
    if message.calls:
        assert message.content == ""
        for name, arguments in message.calls:
            assert name in plan.names
            assert isinstance(json.loads(arguments), dict)
            assert set(json.loads(arguments)) <= {"city", "days", "unit", "tags"}
    else:
        assert message.content == text
        assert isinstance(json.loads(text)["text"], str)


def _random_text(matcher: Any, rng: random.Random) -> str:
    """Random at first, and ending soon after a while."""
    data: list[int] = []
    while not matcher.is_stopped():
        mask = matcher.compute_bitmask()
        allowed = [i for i in range(EOS + 1) if mask[i // 8] >> (i % 8) & 1]
        if EOS in allowed and (len(allowed) == 1 or rng.random() < 0.5):
            break
        printable = [i for i in allowed if 32 <= i < 127 or i == 10]
        endings = [i for i in printable if chr(i) in '"}])<\n']
        choice = rng.choice(endings if endings and rng.random() < 0.4 else printable)
        data.append(choice)
        assert matcher.try_consume_tokens([choice]) == 1
        assert len(data) < 5000
    return bytes(data).decode()


@pytest.mark.parametrize("parser", TOOL_PARSERS)
def test_many_tools_fit(parser: str) -> None:
    """Descriptions cost nothing, and no part is written twice."""

    def tool(index: int) -> dict[str, Any]:
        schema = {"type": "string", "description": "what it means " * 20, "title": "A title"}
        parameters = {
            "type": "object",
            "properties": {"description": schema, **{f"argument{i}": schema for i in range(9)}},
            "required": ["argument0"],
        }
        return {"type": "function", "function": {"name": f"f{index}", "parameters": parameters}}

    plan = make_plan(parser, tools=[tool(i) for i in range(32)])
    assert plan.constraint is not None
    validate_structured_outputs(plan.constraint)
    assert accepts(plan, json.dumps({"text": "x"}))


def test_annotations_are_left_out_but_names_and_values_are_not() -> None:
    schema = {
        "title": "T", "description": "d", "properties": {
            "title": {"type": "string", "description": "d"}, "default": {"const": {"title": 1}},
        },
        "$defs": {"description": {"enum": [{"default": 2}], "default": 3}},
        "anyOf": [{"description": "x"}, True],
    }  # fmt: skip
    assert without_annotations(schema) == {
        "properties": {"title": {"type": "string"}, "default": {"const": {"title": 1}}},
        "$defs": {"description": {"enum": [{"default": 2}]}},
        "anyOf": [{}, True],
    }


# ---------------------------------------------------------------------- what cannot be had


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (ANSWER, False),
        ({"type": "object"}, True),
        ({"type": "object", "properties": {"name": {}}, "additionalProperties": False}, True),
        ({"type": "array", "items": {"type": "object"}}, False),
        ({"type": ["string", "object"]}, True),
        ({"anyOf": [ANSWER, {"type": "string"}]}, False),
        ({"anyOf": [ANSWER, {"type": "object"}]}, True),
        ({"allOf": [{"type": "object"}, ANSWER]}, False),
        ({"$ref": "#/$defs/a", "$defs": {"a": ANSWER}}, False),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "object"}}}, True),
        ({"$ref": "#"}, True),
        ({"$ref": "#/$defs/missing"}, True),
        ({"enum": ["a", 1, {"x": 1}]}, False),
        ({"const": {"name": 1}}, True),
        ({"type": "object", "properties": 5, "allOf": 5, "additionalProperties": False}, False),
    ],
)
def test_whether_a_schema_may_have_a_property(schema: Any, expected: bool) -> None:
    assert may_have_property(schema, "name") is expected


def test_llama3_answers_that_could_be_calls_are_refused() -> None:
    named = {"type": "object", "properties": {"name": {"type": "string"}}}
    with pytest.raises(ApiError, match=r"JSON object that has a 'name'.*tool_choice") as raised:
        make_plan("llama3_json", named)
    assert raised.value.status == 400
    assert raised.value.body()["error"]["param"] == "response_format"
    assert accepts(make_plan("hermes", named), '{"name": "now"}')


def test_names_that_a_format_cannot_write_are_refused() -> None:
    def tool(name: str, argument: str) -> dict[str, Any]:
        parameters = {"type": "object", "properties": {argument: {}}}
        return {"type": "function", "function": {"name": name, "parameters": parameters}}

    with pytest.raises(ApiError, match=r"'a-b' cannot be written in Python's syntax"):
        make_plan("pythonic", tools=[tool("a-b", "x")])
    with pytest.raises(ApiError, match=r"argument 'if' of 'f'"):
        make_plan("pythonic", tools=[tool("f", "if")])
    with pytest.raises(ApiError, match=r"argument 'a:b' of 'f'"):
        make_plan("gemma", tools=[tool("f", "a:b")])
    with pytest.raises(ApiError, match=r"name 'a>b' in 'f' cannot be written as a tag"):
        make_plan("qwen3_coder", tools=[tool("f", "a>b")])
    assert make_plan("hermes", tools=[tool("a-b", "a:b")]).is_either
    choices = tool("f", "a")
    choices["function"]["parameters"]["properties"]["a"] = {"type": "string", "enum": ["<escape>"]}
    with pytest.raises(ApiError, match=r"value of the argument 'a' of 'f' contains '<escape>'"):
        make_plan("gemma", tools=[choices])


def gemma_takes(schema: Any, value: str, **more: Any) -> bool:
    """Whether Gemma's grammar takes the value for an argument of this schema."""
    parameters = {"type": "object", "properties": {"a": schema}, "required": ["a"], **more}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    plan = make_plan("gemma", tools=[tool])
    text = f"<|tool_call>call:f{{a:{value}}}<tool_call|>"
    is_taken = accepts(plan, text)
    if is_taken:
        assert [name for name, _ in parse(plan, text).calls] == ["f"]
    return is_taken


Q = '<|"|>'
POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}


@pytest.mark.parametrize(
    ("schema", "taken", "refused"),
    [
        ({"enum": ["a", "b c", 1, None, [True, "x"], {"k": 2}]},
         [f"{Q}a{Q}", f"{Q}b c{Q}", "1", "null", f"[true,{Q}x{Q}]", "{k:2}"],
         ["true", "2", f"{Q}x{Q}", "[true]", "{}"]),
        ({"type": "integer", "enum": [1, 2, True, "a"]}, ["1", "2"], ["3", "true", f"{Q}a{Q}"]),
        ({"type": "string", "enum": ["a", None]}, [f"{Q}a{Q}"], ["null", f"{Q}b{Q}"]),
        ({"const": "a"}, [f"{Q}a{Q}"], [f"{Q}b{Q}", "1"]),
        ({"type": "integer", "minimum": 3, "maximum": 12}, ["3", "12"], ["2", "13", "3.5"]),
        ({"type": ["integer", "null"]}, ["1", "null"], ["true", "{}"]),
        ({"anyOf": [{"type": "boolean"}, {"enum": ["a"]}]}, ["true", f"{Q}a{Q}"],
         ["1", f"{Q}b{Q}"]),
        ({"allOf": [{"const": 1}]}, ["1"], ["2"]),
        ({"$ref": "#/$defs/unit"}, [f"{Q}C{Q}"], [f"{Q}K{Q}", "1"]),
        ({"type": "array", "items": {"$ref": "#/$defs/unit"}},
         ["[]", f"[{Q}C{Q},{Q}F{Q}]"], ["[1]", f"[{Q}K{Q}]", "1"]),
        ({"type": "array", "items": {"type": "null"}, "minItems": 1}, ["[null]"], ["[]", "[1]"]),
        (POINT, ["{x:1}"], ["{}", "{x:true}", "{y:1}", "1"]),
        ({"$ref": "#/$defs/tree"}, ["{v:1}", "{v:1,next:{v:2,next:{v:3}}}"],
         ["{v:true}", "{next:{v:1}}", "{v:1,next:{v:2,next:{v:true}}}"]),
        ({}, ["1", "{x:[]}", "null"], []),
        (True, ["1"], []),
    ],
)  # fmt: skip
def test_gemmas_arguments_follow_their_schema(
    schema: Any, taken: list[str], refused: list[str]
) -> None:
    definitions = {
        "unit": {"enum": ["C", "F"]},
        "tree": {
            "type": "object",
            "properties": {"v": {"type": "integer"}, "next": {"$ref": "#/$defs/tree"}},
            "required": ["v"],
        },
    }
    for value in (*taken, *refused):
        assert gemma_takes(schema, value, **{"$defs": definitions}) is (value in taken), value


def test_gemmas_grammar_grows_with_the_schema_only() -> None:
    """Each definition twice in the one before it: a million branches, if they were written out."""
    definitions: dict[str, Any] = {
        f"d{i}": {
            "type": "object",
            "properties": {k: {"$ref": f"#/$defs/d{i + 1}"} for k in ("a", "b")},
        }
        for i in range(20)
    }
    definitions["d20"] = {"type": "integer"}
    more = {"$defs": definitions}
    assert gemma_takes({"$ref": "#/$defs/d17"}, "{a:{b:{a:1}},b:{}}", **more)
    assert gemma_takes({"$ref": "#/$defs/d0"}, "{a:{b:{a:{}}}}", **more)
    assert not gemma_takes({"$ref": "#/$defs/d0"}, "{a:1}", **more)


def test_gemmas_grammar_nests_as_deeply_as_the_schema() -> None:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(40):
        schema = {"type": "object", "properties": {"k": {"type": "array", "items": schema}}}
    assert gemma_takes(schema, "{k:[" * 40 + "1" + "]}" * 40)
    assert not gemma_takes(schema, "{k:[" * 40 + "null" + "]}" * 40)


@pytest.mark.parametrize("target", [{"$ref": "#/$defs/a"}, {"anyOf": [{"$ref": "#/$defs/a"}]}])
def test_gemmas_grammar_of_a_reference_to_itself_allows_nothing(target: Any) -> None:
    assert not gemma_takes({"$ref": "#/$defs/a"}, "1", **{"$defs": {"a": target}})


def test_gemmas_argument_without_an_allowed_value_is_refused() -> None:
    with pytest.raises(ApiError, match="'a' of 'f' has no allowed value"):
        gemma_takes({"type": "string", "enum": [1]}, "1")


FREE = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {"type": "object", "properties": {"a": {}, "n": {"type": "number"}}},
    },
}


@pytest.mark.parametrize(
    ("parser", "text", "arguments"),
    [
        ("pythonic", "[f(a=1e999)]", '{"a": 1e999}'),
        ("pythonic", f"[f(n={'9' * 5000})]", f'{{"n": {"9" * 5000}}}'),
        ("pythonic", f"[f(a={'[' * 300}{']' * 300})]", f'{{"a": {"[" * 300}{"]" * 300}}}'),
        ("gemma", "<|tool_call>call:f{a:1e999}<tool_call|>", '{"a": 1e999}'),
        ("gemma", f"<|tool_call>call:f{{n:{'9' * 5000}}}<tool_call|>", f'{{"n": {"9" * 5000}}}'),
        ("gemma", "<|tool_call>call:f{a:{k\x85\x1b:1}}<tool_call|>", None),
        ("gemma", "<|tool_call>call:f{a:{k\x1b:1}}<tool_call|>", '{"a": {"k\\u001b": 1}}'),
        ("gemma", "<|tool_call>call:f{a:{k\x1c:1}}<tool_call|>", None),
        ("gemma", "<|tool_call>call:f{a:{\x1f:1}}<tool_call|>", None),
        ("gemma", f"<|tool_call>call:f{{a:{'[' * 300}{']' * 300}}}<tool_call|>",
         f'{{"a": {"[" * 300}{"]" * 300}}}'),
    ],
)  # fmt: skip
def test_extremes_are_read_or_not_allowed(parser: str, text: str, arguments: str | None) -> None:
    """Numbers beyond a double, deep nesting, what only Python calls white space."""
    plan = make_plan(parser, tools=[FREE])
    assert accepts(plan, text) is (arguments is not None)
    if arguments is not None:
        message = parse(plan, text)
        assert (message.calls, message.content) == ([("f", arguments)], "")


def test_a_forced_call_needs_no_answer() -> None:
    """As at OpenAI: the answer is the call, which the format does not concern."""
    plan = make_plan("hermes", tool_choice="required")
    assert accepts(plan, '[{"name": "now", "arguments": {}}]')
    assert not plan.is_either


# ---------------------------------------------------------------------- in the server


@pytest.mark.parametrize("stream", [False, True])
def test_the_model_decides(server: Server, stream: bool) -> None:
    def run(first: str) -> tuple[str | None, list[dict[str, Any]], str]:
        body = {
            "messages": MESSAGES,
            "tools": [NOW],
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"enum": [{"text": "<tool_call>"}]}},
            },
            "logit_bias": first_token(server, first),
            "max_tokens": 300,
            "parallel_tool_calls": False,
        }
        if not stream:
            reply = server.http.post("/v1/chat/completions", json=body).json()
            choice = reply["choices"][0]
            message = choice["message"]
            return message["content"], message.get("tool_calls", []), choice["finish_reason"]
        choices = [c["choices"][0] for c in strict_chunks(server, **body)]
        calls: list[dict[str, Any]] = []
        for choice in choices:
            for piece in choice["delta"].get("tool_calls", []):
                if "id" in piece:
                    calls.append(piece)
                else:
                    calls[-1]["function"]["arguments"] += piece["function"]["arguments"]
        content = "".join(choice["delta"].get("content", "") for choice in choices)
        return content or None, calls, choices[-1]["finish_reason"]

    content, calls, reason = run("<")
    assert (content, reason) == (None, "tool_calls")
    assert [call["function"]["name"] for call in calls] == ["now"]
    assert json.loads(calls[0]["function"]["arguments"]) == {}
    content, calls, reason = run("{")
    assert (calls, reason) == ([], "stop")
    assert json.loads(content or "") == {"text": "<tool_call>"}


class Answer(BaseModel):
    colour: Literal["red", "green"]


class GetTime(BaseModel):
    zone: Literal["UTC", "CET"]


def first_token(server: Server, char: str) -> dict[str, int]:
    """A bias that makes the answer begin with this character."""
    body = {"prompt": char, "add_special_tokens": False}
    (token,) = server.http.post("/tokenize", json=body).json()["tokens"]
    return {str(token): 100}


def test_the_openai_package_parses_both(server: Server) -> None:
    with server.client() as client:
        for char in "{<":
            completion = client.chat.completions.parse(
                model="tiny",
                messages=MESSAGES,
                response_format=Answer,
                tools=[openai.pydantic_function_tool(GetTime)],
                logit_bias=first_token(server, char),
                parallel_tool_calls=False,
                max_tokens=300,
            )
            message = completion.choices[0].message
            if char == "{":
                assert isinstance(message.parsed, Answer)
                assert not message.tool_calls
            else:
                assert message.parsed is None
                (call,) = message.tool_calls or []
                assert isinstance(call.function.parsed_arguments, GetTime)


def test_responses_take_both(server: Server) -> None:
    tool = {"type": "function", "name": "now", "parameters": {"type": "object", "properties": {}}}
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
    body = {
        "input": "hi",
        "tools": [tool],
        "text": {"format": {"type": "json_schema", "name": "x", "schema": schema}},
        "max_output_tokens": 300,
    }
    response = server.http.post("/v1/responses", json=body)
    assert response.status_code == 200, response.text
    for item in response.json()["output"]:
        if item["type"] == "function_call":
            assert item["name"] == "now"
        else:
            assert json.loads(item["content"][0]["text"]) == {"a": 1}
