"""Parsers of tool calls and thoughts: however the text is cut, the result is the same (P41-P43)."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tellin.entrypoints.openai.parsers.base import ToolParser
from tellin.entrypoints.openai.parsers.events import ParsedMessage, join
from tellin.entrypoints.openai.parsers.json_calls import ArrayParser, NamedCallParser
from tellin.entrypoints.openai.parsers.json_text import value_end
from tellin.entrypoints.openai.parsers.message import MessageParser
from tellin.entrypoints.openai.parsers.reasoning import ThinkParser
from tellin.entrypoints.openai.parsers.registry import TOOL_PARSERS

NAMES = ["f", "get_weather", "now"]
ARGS = r'{"wd":23,"s":"ZS\"J,B}39","z":{"a":[{}]}}'
MakeParser = Callable[[], MessageParser]


def maker(name: str, think: bool | None = None) -> MakeParser:
    def make() -> MessageParser:
        tools: ToolParser
        if name == "array":
            tools = ArrayParser(NAMES)
        elif name == "named":
            tools = NamedCallParser("f")
        else:
            tools = TOOL_PARSERS[name](NAMES)
        return MessageParser(None if think is None else ThinkParser(think), tools)

    return make


def parse(make: MakeParser, pieces: list[str]) -> ParsedMessage:
    parser = make()
    deltas = [parser.feed(piece) for piece in pieces]
    return join([*deltas, parser.finish()])


def call_text(name: str, arguments: str) -> str:
    return f'{{"name": "{name}", "arguments": {arguments}}}'


CASES = [
    ("hermes", f"<tool_call>{call_text('f', ARGS)}</tool_call>", "", [("f", ARGS)]),
    (
        "hermes",
        f"Let me see.\n\n<tool_call>\n{call_text('f', ARGS)}\n</tool_call>\n<tool_call>"
        f"{call_text('now', '{}')}</tool_call>\n",
        "Let me see.",
        [("f", ARGS), ("now", "{}")],
    ),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}', "", [("f", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>', "", [("now", "{}")]),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        "",
        [("f", '{"a": 1}')],
    ),
    # Closing markers are left out: what follows is read anew, calls and content alike.
    ("hermes", f"<tool_call>{call_text('f', ARGS)}<tool_call>{call_text('now', '{}')}</tool_call>",
     "", [("f", ARGS), ("now", "{}")]),
    ("hermes", f"<tool_call>{call_text('f', ARGS)}{call_text('now', '{}')}</tool", "",
     [("f", ARGS), ("now", "{}")]),
    ("nemotron_json", f"<TOOLCALL>[{call_text('f', ARGS)}]<TOOLCALL>[{call_text('now', '{}')}] Hm",
     "Hm", [("f", ARGS), ("now", "{}")]),
    ("pythonic", "[now()]<|python_start|>[now()]", "", [("now", "{}"), ("now", "{}")]),
    ("hermes", "a < b <tool_cal <<tool_call>oops", "a < b <tool_cal <<tool_call>oops", []),
    ("hermes", "  plain text \n", "  plain text \n", []),
    ("hermes", '<tool_call>{"name": "f", "argu', '<tool_call>{"name": "f", "argu', None),
    ("llama3_json", '{"name": "f", "parameters": {"x": 1}}', "", [("f", '{"x": 1}')]),
    (
        "llama3_json",
        '<|python_tag|>{"name": "f", "parameters": {"x": 1}}; {"name": "now", "parameters": {}}',
        "",
        [("f", '{"x": 1}'), ("now", "{}")],
    ),
    ("llama3_json", '{"name": "Ada", "age": 3}', '{"name": "Ada", "age": 3}', []),
    ("llama3_json", ' {"answer": [1]} ', ' {"answer": [1]} ', []),
    ("llama3_json", "Hello {", "Hello {", []),
    ("mistral", f"[TOOL_CALLS][{call_text('f', ARGS)}, {call_text('now', '{}')}]", "",
     [("f", ARGS), ("now", "{}")]),
    ("mistral", f"Well [TOOL_CALLS]f{ARGS}[TOOL_CALLS]now[ARGS]{{}}", "Well",
     [("f", ARGS), ("now", "{}")]),
    ("mistral", "[1, 2] and [TOOL", "[1, 2] and [TOOL", []),
    (
        "pythonic",
        "[get_weather(city='a)]\\'b', n=[1, {'k': True}]), now()]",
        "",
        [("get_weather", '{"city": "a)]\'b", "n": [1, {"k": true}]}'), ("now", "{}")],
    ),
    ("pythonic", r'[f(a="\ud83d\ude00")]', "", [("f", r'{"a": "\ud83d\ude00"}')]),
    ("pythonic", r"[f(a='\ud83d')]", r"[f(a='\ud83d')]", []),
    ("pythonic", "<|python_start|>[now()]<|python_end|>", "", [("now", "{}")]),
    (
        "nemotron_json",
        f"Well <TOOLCALL>[{call_text('f', ARGS)}, {call_text('now', '{}')}]</TOOLCALL>",
        "Well",
        [("f", ARGS), ("now", "{}")],
    ),
    ("nemotron_json", "<TOOLCALL>no", "<TOOLCALL>no", []),
    (
        "lfm2",
        '<|tool_call_start|>[f(a="x"), now()]<|tool_call_end|>Just a moment.',
        "Just a moment.",
        [("f", '{"a": "x"}'), ("now", "{}")],
    ),
    ("pythonic", "[1, 2, 3] are numbers", "[1, 2, 3] are numbers", []),
    ("pythonic", "[other(a=1)]", "[other(a=1)]", []),
    ("pythonic", "[f(a=open('x'))]", "[f(a=open('x'))]", []),
    (
        "gemma",
        "<start_function_call>call:f{city:<escape>a, {b}<escape>,n:[1,2.5],o:{k:true}}"
        "<end_function_call>",
        "",
        [("f", '{"city": "a, {b}", "n": [1, 2.5], "o": {"k": true}}')],
    ),
    ("gemma", 'Hm <|tool_call>call:now{}<tool_call|>', "Hm", [("now", "{}")]),
    ("gemma", "<start_function_call>nonsense<end_function_call>",
     "<start_function_call>nonsense<end_function_call>", []),
    (
        "qwen3_coder",
        "Let me.\n\n<tool_call>\n<function=f>\n<parameter=s>\na < b\n  1\n\n</parameter>\n"
        "<parameter=n>\n1.5\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=now>\n</function>\n</tool_call>",
        "Let me.",
        [("f", '{"s": "a < b\\n  1\\n", "n": 1.5}'), ("now", "{}")],
    ),
    ("qwen3_coder", "<function=f><parameter=a>True</parameter></function> Done", "Done",
     [("f", '{"a": true}')]),
    ("qwen3_coder", '<tool_call><function=f><parameter=a>\n["</parameter>"]\n</parameter>'
     "</function><function=now></tool_call>", "",
     [("f", '{"a": ["</parameter>"]}'), ("now", "{}")]),
    ("qwen3_xml", "<tool_call>\n<function=now> and so on", "and so on", [("now", "{}")]),
    ("qwen3_xml", "a <functional<tool_call>f()", "a <functional<tool_call>f()", []),
    ("qwen3_xml", "<tool_call>\n<function=f>\n<parameter=a>\n1", "", None),
    ("ernie45", f"<tool_call>\n{call_text('f', ARGS)}\n</tool_call>\n", "", [("f", ARGS)]),
    ("hunyuan_a13b", f"Well <tool_calls>[{call_text('f', ARGS)}, {call_text('now', '{}')}]"
     "</tool_calls>", "Well", [("f", ARGS), ("now", "{}")]),
    ("hunyuan_a13b", "<tool_call>[]</tool_call>", "<tool_call>[]</tool_call>", []),
    (
        "cohere",
        'I see. <|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "f", "parameters": '
        f'{ARGS}}},\n    {{"tool_call_id": "1", "tool_name": "now", "parameters": {{}}}}\n]'
        "<|END_ACTION|>",
        "I see.",
        [("f", ARGS), ("now", "{}")],
    ),
    ("cohere", '<|START_ACTION|>[{"name": "f"}]', '<|START_ACTION|>[{"name": "f"}]', []),
    (
        "seed_oss",
        "Let me.\n<seed:tool_call>\n<function=f>\n<parameter=s>a < b\n  1</parameter>\n"
        "<parameter=n>1.5</parameter>\n</function>\n</seed:tool_call>"
        "<seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>",
        "Let me.",
        [("f", '{"s": "a < b\\n  1", "n": 1.5}'), ("now", "{}")],
    ),
    ("seed_oss", "<seed:tool_call>f()</seed:tool_call>", "<seed:tool_call>f()</seed:tool_call>",
     []),
    (
        "minimax_m2",
        'Let me.\n<minimax:tool_call>\n<invoke name="f">\n<parameter name="s">a "b" > c'
        '</parameter>\n<parameter name="n">[1, {"a": null}]</parameter>\n</invoke>\n'
        '<invoke name="now">\n</invoke>\n</minimax:tool_call>',
        "Let me.",
        [("f", '{"s": "a \\"b\\" > c", "n": [1, {"a": null}]}'), ("now", "{}")],
    ),
    ("minimax_m2", "a <invoke names<minimax:tool_call>no", "a <invoke names<minimax:tool_call>no",
     []),
    ("apertus", f'Hm <|tools_prefix|>[{{"f": {ARGS}}}, {{"now": {{}}}}]<|tools_suffix|>', "Hm",
     [("f", ARGS), ("now", "{}")]),
    ("apertus", '<|tools_prefix|>[{"f": {}}]<|tools_prefix|>[{"now": {}}] Yes', "Yes",
     [("f", "{}"), ("now", "{}")]),
    ("apertus", '<|tools_prefix|>[{"f": 1}]', '<|tools_prefix|>[{"f": 1}]', []),
    ("apertus", '<|tools_prefix|>[{"a\\q": {}}]', '<|tools_prefix|>[{"a\\q": {}}]', []),
    ("apertus", '<|tools_prefix|>[{"f"', '<|tools_prefix|>[{"f"', []),
    ("array", f"[{call_text('f', ARGS)},\n {call_text('now', '{}')}]", "",
     [("f", ARGS), ("now", "{}")]),
    ("named", " " + ARGS, "", [("f", ARGS)]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
def test_what_each_format_means(
    name: str, text: str, content: str, calls: list[tuple[str, str]] | None
) -> None:
    message = parse(maker(name), [text])
    if calls is None:  # cut off after the name: a call whose arguments never came
        assert message.calls == [("f", "")]
        return
    assert message.calls == calls
    assert message.content == content
    for _, arguments in message.calls:
        assert isinstance(json.loads(arguments), dict)


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "12", '"12"'),
        ({"type": "string"}, "null", '"null"'),
        ({"type": "integer"}, "12", "12"),
        ({"type": "integer"}, "many", '"many"'),
        ({"type": ["string", "null"]}, "null", "null"),
        ({"type": ["string", "null"]}, "12", '"12"'),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "12", "12"),
        ({"anyOf": [{"$ref": "#/$defs/a"}]}, "12", '"12"'),
        ({"$ref": "#/$defs/loop"}, "12", "12"),
        ({"enum": ["1", "2"]}, "1", '"1"'),
        ({"const": 1}, "1", "1"),
        ({"type": "array"}, ' [1, "a"] ', '[1, "a"]'),
        ({"type": "boolean"}, "False", "false"),
        ({"allOf": [{"type": "string"}]}, '"a"', '"\\"a\\""'),
        ({}, '{"a": 1e999}', '{"a": 1e999}'),
        (True, "text", '"text"'),
        ({"type": 5}, "1", "1"),
    ],
)
def test_the_schema_tells_texts_from_other_values(schema: object, text: str, value: str) -> None:
    parser = TOOL_PARSERS["qwen3_coder"](["f"])
    definitions = {"a": {"type": "string"}, "loop": {"$ref": "#/$defs/loop"}}
    parser.schemas = {"f": {"properties": {"x": schema}, "$defs": definitions}}
    call = f"<tool_call>\n<function=f>\n<parameter=x>\n{text}\n</parameter>\n</function>"
    assert join([parser.feed(call)]).calls == [("f", f'{{"x": {value}}}')]


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("\nRome\n", "Rome"),
        ("Rome", "Rome"),
        ("\n", ""),
        ("", ""),
        ("\n\n", ""),
        ("\n\n\n", "\n"),
        ("\n\n a\n\n", "\n a\n"),
        ('\nif a < b:\n    say("hi")\n\n</p\n', 'if a < b:\n    say("hi")\n\n</p'),
        ("\na</parameter>b\n", "a</parameter>b"),
        ("a\n", "a\n"),
    ],
)
def test_texts_come_while_they_are_written(written: str, value: str) -> None:
    """The same with and without a schema; with it a long text is not held back."""
    call = f"<tool_call>\n<function=f>\n<parameter=x>{written}</parameter>\n</function>"
    for schemas in ({}, {"f": {"properties": {"x": {"type": "string"}}}}):
        parser = TOOL_PARSERS["qwen3_coder"](["f"])
        parser.schemas = schemas
        message = join([*map(parser.feed, call), parser.finish()])
        assert [(name, json.loads(text)) for name, text in message.calls] == [("f", {"x": value})]
    parser = TOOL_PARSERS["qwen3_coder"](["f"])
    parser.schemas = schemas
    assert join([parser.feed("<function=f><parameter=x>\nOnce\nupon")]).calls == [
        ("f", '{"x": "Once\\nupon')
    ]


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
def test_p41_every_split_in_two_and_single_characters(
    name: str, text: str, content: str, calls: object
) -> None:
    whole = parse(maker(name), [text])
    for cut in range(len(text) + 1):
        assert parse(maker(name), [text[:cut], text[cut:]]) == whole
    assert parse(maker(name), list(text)) == whole


FRAGMENTS = st.sampled_from(
    [
        "<tool_call>", "</tool_call>", '{"name": "f"', ', "arguments": ', ARGS, "}", "{", "[", "]",
        '"', "\\", "[TOOL_CALLS]", "[ARGS]", "f", "now", "(", ")", "a=1", ", ", ";", " ", "\n",
        "<|python_tag|>", "<start_function_call>", "call:f{", "<escape>", "<end_function_call>",
        "<function=f>", "<parameter=a>", "</parameter>", "</function>",
        "<|tools_prefix|>", '{"f": ', "<|tools_suffix|>",
        "<tool_calls>", "<|START_ACTION|>", '{"tool_name": "f", ', "<seed:tool_call>",
        "</seed:tool_call>", "<minimax:tool_call>", '<invoke name="f">', '<parameter name="a">',
        "</invoke>", "<think>", "</think>", "text", "<", "</", '"name"', ":", "'",
        '{"name": "f", "arguments": {}}',
    ]
)  # fmt: skip
TEXTS = st.lists(FRAGMENTS | st.text(max_size=4), max_size=14).map("".join)


@pytest.mark.parametrize("name", [*TOOL_PARSERS, "array", "named"])
@pytest.mark.parametrize("think", [None, False, True])
@settings(max_examples=60, deadline=None)
@given(text=TEXTS, data=st.data())
def test_p41_p42_any_text_in_any_pieces(
    name: str, think: bool | None, text: str, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = parse(maker(name, think), [text])
    assert parse(maker(name, think), pieces) == whole
    assert parse(maker(name, think), list(text)) == whole


@settings(max_examples=60, deadline=None)
@given(
    arguments=st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=6),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
        ),
        max_leaves=8,
    ).map(lambda value: {"value": value}),
    indent=st.sampled_from([None, 1]),
)
def test_p41_arguments_survive_verbatim(arguments: object, indent: int | None) -> None:
    raw = json.dumps(arguments, indent=indent, ensure_ascii=False)
    text = f"<tool_call>{call_text('f', raw)}</tool_call>"
    assert parse(maker("hermes"), list(text)).calls == [("f", raw)]


AS_WRITTEN = [
    "1e999", "-1E+999", "1.50", "-0", "9" * 5000,
    r'"\ud800"', r'"a)\u0000\"]"', '{"a":1,"a":[2 , 3]}',
    "[" * 3000 + "]" * 3000,
]  # fmt: skip


@pytest.mark.parametrize("value", AS_WRITTEN)
def test_json_in_python_calls_stays_as_it_is_written(value: str) -> None:
    """No conversion, so no limit of Python's numbers, texts and stack: grammars know none."""
    text = f"[f(a={value}), f(b = {value} , c=true)]"
    calls = [("f", f'{{"a": {value}}}'), ("f", f'{{"b": {value}, "c": true}}')]
    message = parse(maker("pythonic"), list(text))
    assert (message.calls, message.content) == (calls, "")


def test_python_beside_json_values() -> None:
    text = "[f(a=1e999, b='x', c=None, d=[True, 1.5], e=-1)]"
    expected = '{"a": 1e999, "b": "x", "c": null, "d": [true, 1.5], "e": -1}'
    assert parse(maker("pythonic"), [text]).calls == [("f", expected)]
    for bad in ("[1e999, 'x']", "NaN", "{1: 2}[1]", "01", "1 2", "g()", '"a" if 1 else 2'):
        assert parse(maker("pythonic"), [f"[f(a={bad})]"]).content == f"[f(a={bad})]"


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("{e:1e999}", '{"e": 1e999}'),
        ("{e:" + "9" * 5000 + ",f:-0.10}", '{"e": ' + "9" * 5000 + ', "f": -0.10}'),
        ("{a:" + "[" * 3000 + "]" * 3000 + "}", '{"a": ' + "[" * 3000 + "]" * 3000 + "}"),
        ("{a:[{b:null},{},<escape>{<escape>],c:two words}",
         '{"a": [{"b": null}, {}, "{"], "c": "two words"}'),
        ('{ "a b" : [1, 2,], c :NaN }', '{"a b": [1, 2], "c": "NaN"}'),
    ],
)  # fmt: skip
def test_gemmas_notation_becomes_json_of_any_size(written: str, expected: str) -> None:
    text = f"<start_function_call>call:f{written}<end_function_call>"
    message = parse(maker("gemma"), [text])
    assert (message.calls, message.content) == ([("f", expected)], "")


@pytest.mark.parametrize(
    "written", ["{a}", "{:1}", "{a:}", "{a:1]", "{a:1}}", "{a:1} {b:2}", "{a:<escape>x}", "{a:[1}"]
)
def test_what_is_not_gemmas_notation_is_content(written: str) -> None:
    text = f"<start_function_call>call:f{written}<end_function_call>"
    assert parse(maker("gemma"), [text]).content == text


@settings(max_examples=300, deadline=None)
@given(text=st.text('{}[],:" 01.eE+-tru\\n\n', max_size=12) | st.text(max_size=6))
def test_the_end_of_a_json_value_is_where_json_says(text: str) -> None:
    decoder = json.JSONDecoder(parse_constant=lambda _: pytest.fail("no JSON"))
    start = len(text) - len(text.lstrip(" \t\n\r"))
    if text[start:].startswith(("NaN", "Infinity", "-Infinity")):
        assert value_end(text) is None
        return
    try:
        expected = decoder.raw_decode(text, start)[1]
    except ValueError:
        expected = None
    assert value_end(text) == expected


THOUGHTS = [
    (False, "<think>\nhm, 1 < 2\n</think>\n\nHello", "hm, 1 < 2", "Hello"),
    (True, "hm</think>Hello <think>", "hm", "Hello <think>"),
    (False, "  no thoughts </think>", "", "  no thoughts </think>"),
    (False, "<think>never ends ", "never ends ", ""),
    (False, "<thi", "", "<thi"),
    (True, "</think>\n", "", ""),
]


@pytest.mark.parametrize(("starts_inside", "text", "reasoning", "content"), THOUGHTS)
def test_thoughts(starts_inside: bool, text: str, reasoning: str, content: str) -> None:
    def make() -> MessageParser:
        return MessageParser(ThinkParser(starts_inside), None)

    for pieces in ([text], list(text)):
        message = parse(make, pieces)
        assert (message.reasoning, message.content) == (reasoning, content)


CERTAIN = [
    ("hm</think>Yes.", "hm", "Yes."),
    (" <think>\nhm</think>\n\nYes.", "hm", "Yes."),
    ("<thi", "<thi", ""),
    ("  <b>hm", "<b>hm", ""),
    ("</think>Yes.", "", "Yes."),
    ("", "", ""),
]


@pytest.mark.parametrize(("text", "reasoning", "content"), CERTAIN)
def test_thoughts_that_are_certain_need_no_opening_tag(
    text: str, reasoning: str, content: str
) -> None:
    def make() -> MessageParser:
        return MessageParser(ThinkParser(False, is_certain=True), None)

    for pieces in ([text], list(text)):
        message = parse(make, pieces)
        assert (message.reasoning, message.content) == (reasoning, content)


@settings(max_examples=60, deadline=None)
@given(text=TEXTS, data=st.data())
def test_p42_certain_thoughts_in_any_pieces(text: str, data: st.DataObject) -> None:
    def make() -> MessageParser:
        think = ThinkParser(False, is_certain=True, opening="<tool_call>", closing="</think>")
        return MessageParser(think, None)

    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parse(make, pieces) == parse(make, [text])


def test_parallel_tool_calls_off_keeps_the_first_call() -> None:
    def make() -> MessageParser:
        return MessageParser(None, TOOL_PARSERS["hermes"](NAMES), max_calls=1)

    text = f"<tool_call>{call_text('f', '{}')}</tool_call>" * 2
    assert parse(make, list(text)).calls == [("f", "{}")]
    assert parse(make, [text]).calls == [("f", "{}")]


@pytest.mark.parametrize("sign", ["<|tool_list_start|>[", "<|tool_call_start|>"])
def test_a_template_of_lfm2_asks_for_its_format(sign: str) -> None:
    from tellin.entrypoints.openai.parsers.registry import guess_tool_parser

    assert guess_tool_parser(f"{{{{ 'List of tools: {sign}' }}}}") == "lfm2"
