"""Marks around thoughts and answers, and formats of calls, as chat templates show them."""

from __future__ import annotations

import pytest

from tellin.entrypoints.openai.chat_format import ChatFormat, Constraint
from tellin.entrypoints.openai.parsers.events import join
from tellin.entrypoints.openai.parsers.registry import answer_marks, guess_tool_parser
from tellin.entrypoints.openai.server_config import ServerConfig
from tellin.exceptions import InvalidParameterError

TEMPLATES = {
    "mistral": "{{ tools }}[TOOL_CALLS] [THINK]{{ message }}[/THINK]",
    "seed_oss": "{{ tools }}<seed:tool_call><function=f> <seed:think>{{ message }}</seed:think>",
    "minimax_m2": "{{ tools }}<minimax:tool_call> <response> <think>\\n{{ message }}</think>",
    "hunyuan_a13b": "{{ tools }}<tool_calls> <think>{{ m }}</think><answer>{{ m }}</answer>",
    "apertus": "{{ tools }}<|tools_prefix|><|inner_prefix|>{{ m }}<|inner_suffix|>",
    "cohere": "{{ tools }}<|START_ACTION|> <|START_THINKING|>{{ m }}<|END_THINKING|>"
    "<|START_RESPONSE|>{{ m }}<|END_RESPONSE|>",
}


class Tokens:
    """A tokenizer whose marks are special tokens."""

    all_special_ids = frozenset(range(2))

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [("[THINK]", "<|START_RESPONSE|>")[i] for i in ids]


def chat_format(name: str) -> ChatFormat:
    return ChatFormat(ServerConfig(), TEMPLATES[name], Tokens())  # type: ignore[arg-type]


CASES = [
    ("mistral", "", "[THINK]hm\n[/THINK]Yes.", "hm", "Yes.", 0),
    ("mistral", "", 'Yes.[TOOL_CALLS]f[ARGS]{"a": 1}', "", "Yes.", 1),
    ("seed_oss", "", "\n<seed:think>hm</seed:think>\nYes.", "hm", "Yes.", 0),
    (
        "seed_oss",
        "",
        "<seed:think>hm</seed:think><seed:tool_call>\n<function=f>\n</function>\n</seed:tool_call>",
        "hm",
        "",
        1,
    ),
    ("apertus", "", "<|inner_prefix|>hm<|inner_suffix|>Yes.", "hm", "Yes.", 0),
    ("minimax_m2", "<think>\n", "hm</think>\n\nYes.", "hm", "Yes.", 0),
    ("hunyuan_a13b", "", "<think>\nhm\n</think>\n<answer>\nYes.\n</answer>", "hm", "Yes.", 0),
    ("hunyuan_a13b", "<think>\n\n</think>\n", "<answer>\nYes.\n</answer>", "", "Yes.", 0),
    ("hunyuan_a13b", "", "An <answer> it is.", "", "An <answer> it is.", 0),
    (
        "hunyuan_a13b",
        "",
        '<think>hm</think><tool_calls>[{"name": "f", "arguments": {}}]</tool_calls>',
        "hm",
        "",
        1,
    ),
    (
        "cohere",
        "<|START_THINKING|><|END_THINKING|>",
        "<|START_RESPONSE|>Yes.<|END_RESPONSE|>",
        "",
        "Yes.",
        0,
    ),
    (
        "cohere",
        "",
        "<|START_THINKING|>hm<|END_THINKING|><|START_ACTION|>[\n"
        '{"tool_call_id": "0", "tool_name": "f", "parameters": {}}\n]<|END_ACTION|>',
        "hm",
        "",
        1,
    ),
]


@pytest.mark.parametrize("pieces", [1, 3, 1000])
@pytest.mark.parametrize(("name", "end", "answer", "reasoning", "content", "num_calls"), CASES)
def test_thoughts_calls_and_content(
    pieces: int, name: str, end: str, answer: str, reasoning: str, content: str, num_calls: int
) -> None:
    """P41: however the text is cut, with and without tools."""
    form = chat_format(name)
    assert form.tool_parser_name == name
    for calls in (form.tool_parser(["f"]), None):
        if calls is None and num_calls:
            continue
        parser = form.make_parser(f"Hi{end}", Constraint.NONE, calls, names=["f"])
        deltas = [parser.feed(answer[i : i + pieces]) for i in range(0, len(answer), pieces)]
        deltas.append(parser.finish())
        assert "".join(delta.reasoning for delta in deltas) == reasoning
        assert "".join(delta.content for delta in deltas) == content
        assert parser.num_calls == (num_calls if calls else 0)


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("think", "<think>hm</think>Yes."),
        ("ernie45", "<think>\nhm\n</think>\n\n<response>\nYes.\n</response>\n"),
        ("hunyuan_a13b", "<think>hm</think><answer>Yes.</answer>"),
        ("mistral", "[THINK]hm[/THINK]Yes."),
        ("seed_oss", "<seed:think>hm</seed:think>Yes."),
        ("cohere", "<|START_THINKING|>hm<|END_THINKING|><|START_RESPONSE|>Yes.<|END_RESPONSE|>"),
        ("minimax_m2", "<think>hm</think>Yes."),
        ("apertus", "<|inner_prefix|>hm<|inner_suffix|>Yes."),
    ],
)
def test_a_named_parser_counts_whatever_the_template_shows(name: str, answer: str) -> None:
    for template in ("{{ messages }}", TEMPLATES["mistral"]):
        if name == "think" and template != "{{ messages }}":
            continue
        form = ChatFormat(ServerConfig(reasoning_parser=name), template, None)
        parser = form.make_parser("Hi", Constraint.NONE, None)
        delta = join([parser.feed(answer), parser.finish()])
        assert (delta.reasoning, delta.content) == ("hm", "Yes.")


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidParameterError, match=r"reasoning_parser.*hunyuan_a13b"):
        ServerConfig(reasoning_parser="qwen9")


def test_what_a_grammar_forces_has_no_marks_around_it() -> None:
    parser = chat_format("hunyuan_a13b").make_parser("Hi", Constraint.ANSWER, None)
    assert parser.is_plain
    assert not chat_format("hunyuan_a13b").make_parser("Hi", Constraint.NONE, None).is_plain


def test_marks_that_are_tokens_are_shown() -> None:
    assert chat_format("mistral").needs_special_tokens(has_tools=False)
    assert not chat_format("minimax_m2").needs_special_tokens(has_tools=True)


def test_signs_in_templates() -> None:
    assert {name: guess_tool_parser(text) for name, text in TEMPLATES.items()} == {
        name: name for name in TEMPLATES
    }
    assert answer_marks("<response></response><answer>") is None
