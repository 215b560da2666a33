"""gpt-oss's answers: however the text is cut, the parsed parts are the same (P41-P43)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tellin.entrypoints.openai.chat_format import ChatFormat, Constraint
from tellin.entrypoints.openai.parsers.events import ParsedMessage, join
from tellin.entrypoints.openai.parsers.harmony import FINAL, HarmonyParser
from tellin.entrypoints.openai.server_config import ServerConfig

TEMPLATE = "<|start|>{{ messages[0].content }}<|channel|>final<|message|>{{ tools }}<|end|>"
THOUGHT = "<|channel|>analysis<|message|>Hm, 1 < 2.\n<|end|>"
CALL = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>"
ANSWER = ParsedMessage("It is 7.", "Hm, 1 < 2.\n")

CASES = [
    (f"{THOUGHT}<|start|>assistant<|channel|>final<|message|>It is 7.", ANSWER),
    (f"{THOUGHT}<|start|>assistant<|channel|>final<|message|>It is 7.<|return|>", ANSWER),
    (
        "<|channel|>analysis<|message|>Hm<|start|>assistant<|channel|>final<|message|>Yes",
        ParsedMessage("Yes", "Hm"),
    ),
    (f'{CALL}{{"a": "<|"}}<|call|>', ParsedMessage(calls=[("now", '{"a": "<|"}')])),
    (
        f"{THOUGHT}<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        f"<|start|>assistant{CALL}{{}}<|call|>",
        ParsedMessage("I look.", "Hm, 1 < 2.\n", [("now", "{}")]),
    ),
    (
        " to=functions.f<|channel|>commentary<|message|>{}<|end|><|start|>assistant"
        f"{CALL}[]<|call|>",
        ParsedMessage(calls=[("f", "{}"), ("now", "[]")]),
    ),
    # Tools that the request does not have, and the model's own, are thoughts.
    (
        "<|channel|>analysis to=python code<|message|>1 + 1<|call|>"
        "<|start|>assistant<|channel|>commentary to=functions.other<|message|>{}<|call|>",
        ParsedMessage(reasoning="1 + 1{}"),
    ),
    ('{"a": 1}', ParsedMessage('{"a": 1}')),  # what a grammar forces has no marks
    ("to be or not", ParsedMessage("to be or not")),
    ("to=do, or not to=do", ParsedMessage("to=do, or not to=do")),
    # A message without a text: what follows is none of its channel, nor to its recipient.
    (
        "<|channel|>analysis<|end|><|start|>assistant<|channel|>final<|message|>7",
        ParsedMessage("7"),
    ),
    (
        f"<|channel|>analysis to=functions.f<|start|>assistant{CALL}{{}}<|call|>",
        ParsedMessage(calls=[("now", "{}")]),
    ),
    (f"{THOUGHT}<|start|>assistant", ParsedMessage("", "Hm, 1 < 2.\n")),
    (f"{THOUGHT}<|start|>", ParsedMessage("", "Hm, 1 < 2.\n")),
    (f"{THOUGHT}junk", ParsedMessage("", "Hm, 1 < 2.\n")),
    (f"{CALL}{{}}<|call|>\n", ParsedMessage(calls=[("now", "{}")])),
    ("<|chan", ParsedMessage("<|chan")),
    ("<|channel|>final", ParsedMessage()),  # cut within a header
    ("<|channel|>final<|message|>a <|en", ParsedMessage("a <|en")),
    ("", ParsedMessage()),
]


def parse(pieces: Sequence[str], **options: int) -> ParsedMessage:
    parser = HarmonyParser(("f", "now"), **options)
    deltas = [parser.feed(piece) for piece in pieces]
    return join([*deltas, parser.finish()])


@pytest.mark.parametrize(("text", "expected"), CASES)
def test_whole_and_by_characters(text: str, expected: ParsedMessage) -> None:
    assert parse([text]) == expected
    assert parse(list(text)) == expected


@given(st.sampled_from(CASES), st.lists(st.integers(0, 200), max_size=8))
def test_however_it_is_cut(case: tuple[str, ParsedMessage], cuts: list[int]) -> None:
    text, expected = case
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    assert parse([text[a:b] for a, b in pairwise(places)]) == expected


def test_text_is_passed_on_as_soon_as_it_is_certain() -> None:
    parser = HarmonyParser()
    assert parser.feed("<|channel|>final<|message|>Yes").content == "Yes"
    assert parser.feed(" <").content == " "
    assert parser.feed("b").content == "<b"


def test_calls_beyond_the_limit_are_dropped() -> None:
    text = f"{CALL}{{}}<|end|><|start|>assistant{CALL}[]<|call|>"
    assert parse([text], max_calls=1).calls == [("now", "{}")]


def test_the_template_tells_the_format() -> None:
    chat_format = ChatFormat(ServerConfig(), TEMPLATE, None)
    assert chat_format.needs_special_tokens(has_tools=False)
    assert isinstance(chat_format.make_parser("", Constraint.NONE, None), HarmonyParser)
    assert chat_format.thought_marks("", Constraint.NONE) == ("", FINAL)
    # A grammar leaves no room for channels.
    assert not isinstance(chat_format.make_parser("", Constraint.ANSWER, None), HarmonyParser)
    assert chat_format.thought_marks("", Constraint.ANSWER) is None
    plain = ChatFormat(ServerConfig(reasoning_parser="none"), TEMPLATE, None)
    assert not plain.needs_special_tokens(has_tools=False)
