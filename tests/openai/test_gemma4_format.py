"""Gemma 4's chat format: thoughts on a channel, calls in its notation, marks that are tokens."""

from __future__ import annotations

import json

import pytest

from tellin.entrypoints.openai.chat_format import ChatFormat, Constraint
from tellin.entrypoints.openai.parsers.registry import thought_marks
from tellin.entrypoints.openai.server_config import ServerConfig

TEMPLATE = (
    "{% for tool in tools %}<|tool>{{ tool }}<tool|>{% endfor %}"
    "<|turn>model\n{% if not enable_thinking %}<|channel>thought\n<channel|>{% endif %}"
    "<|tool_call>call:f{}<tool_call|>"
)
PROMPT = "<|turn>user\nHi<turn|>\n<|turn>model\n"
CALL = '<|tool_call>call:find{place:<|"|>Rome "1"<|"|>,days:2,deep:{a:[true]}}<tool_call|>'


class Tokens:
    """A tokenizer whose marks are special tokens."""

    all_special_ids = frozenset(range(3))

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [("<|channel>", "<channel|>", "<|tool_call>")[i] for i in ids]


def chat_format() -> ChatFormat:
    return ChatFormat(ServerConfig(), TEMPLATE, Tokens())  # type: ignore[arg-type]


@pytest.mark.parametrize("pieces", [1, 3, 1000])
@pytest.mark.parametrize(
    ("end", "answer", "reasoning", "content"),
    [
        ("", "<|channel>thought\nhm\n<channel|>Yes.", "hm", "Yes."),
        ("<|channel>thought\n<channel|>", "Yes.", "", "Yes."),
        ("<|channel>thought\n", "hm<channel|>Yes.", "hm", "Yes."),
        ("", "<|channel>thought\n<channel|>Yes." + CALL, "", "Yes."),
    ],
)
def test_thoughts_calls_and_content(
    pieces: int, end: str, answer: str, reasoning: str, content: str
) -> None:
    form = chat_format()
    assert form.tool_parser_name == "gemma"
    calls = form.tool_parser(["find"])
    parser = form.make_parser(PROMPT + end, Constraint.NONE, calls, names=["find"])
    deltas = [parser.feed(answer[i : i + pieces]) for i in range(0, len(answer), pieces)]
    deltas.append(parser.finish())
    assert "".join(delta.reasoning for delta in deltas) == reasoning
    assert "".join(delta.content for delta in deltas) == content
    arguments = "".join(call.arguments for delta in deltas for call in delta.calls)
    if CALL in answer:
        assert json.loads(arguments) == {"place": 'Rome "1"', "days": 2, "deep": {"a": [True]}}


def test_marks_are_shown_and_stop_strings_spare_thoughts() -> None:
    form = chat_format()
    assert form.has_thinking_switch
    assert form.needs_special_tokens(has_tools=False)
    assert form.thought_marks(PROMPT, Constraint.NONE) == ("<|channel>thought", "<channel|>")
    assert thought_marks("{{ messages }}") is None
    assert thought_marks("<think>") == ("<think>", "</think>")
