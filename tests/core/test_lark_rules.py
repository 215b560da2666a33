"""Grammars of no finite text are told from others; what cannot be read is left alone."""

from __future__ import annotations

import time

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from tellin.exceptions import InvalidParameterError
from tellin.grammar_validation import validate_structured_outputs
from tellin.lark_rules import endless_start
from tellin.sampling_params import StructuredOutputsParams

ENDLESS = [
    'start: "a" start',
    'start: x\nx: "a" y | "b" x\ny: x "c"',
    'start: ("a" start)+',
    'start: "a" start~2..3',
    'start: "a"\n  | "b" start\n  | start "c"\n'.replace('"a"\n  | ', "", 1),
    '// comment\n%ignore /\\s+/\n?start: x -> alias\n!x.2: "\\"|" x /a|b\\/c/i',
    'start[capture]: "a" (x\n  | y)\nx: x "x"\ny: "y" start',
    "start: <|im_start|> start",
    'start: "a".."z" start',
    'start: %json {"type": "object", "properties": {"a": {}}} start',
]
ENDING = [
    'start: "a"',
    'start: "a" start | "b"',
    'start: "a" start?',
    'start: ("a" start)*',
    'start: ["a" start] "b"',
    'start: "a" start~0..3',
    'start: x\nx: "a" x\n | "b"\n',
    'start: A start | /b+/\nA: "a" | "c"',
    "start: UNKNOWN",
    'start: (\n  "a"\n  | start "b"\n)',
    'start: %json {"type": "object", "x": "a: b | c"}',
    "other: other",
    "",
]
UNREADABLE = [
    'start: sep{"a", start}',
    'start: %lark { start: "a" }',
    "start: §",
    'start: "a" start\nstart: "b"',
    'start "a"',
    'start: ("a"',
    'start: %json {"type": start',
    'start: "a"{2,3} start',
    "start: " + "(" * 5000 + '"a" start' + ")" * 5000,
]


@pytest.mark.parametrize("grammar", ENDLESS)
def test_endless_grammars_are_found(grammar: str) -> None:
    assert endless_start(grammar)


@pytest.mark.parametrize("grammar", ENDING + UNREADABLE)
def test_others_are_not(grammar: str) -> None:
    assert not endless_start(grammar)


@pytest.mark.parametrize("grammar", ['start: "a" start', 'root ::= "a" root', ENDLESS[1]])
def test_p37_they_are_refused_at_admission(grammar: str) -> None:
    with pytest.raises(InvalidParameterError, match="no finite text satisfies it"):
        validate_structured_outputs(StructuredOutputsParams(grammar=grammar))


def test_work_is_bounded() -> None:
    """Chains in any order take one look each; a grammar made to be looked at for ever is let be."""
    chain = [f'r{i}: "x" r{i + 1}' for i in range(3999)] + ['r3999: "y"']
    for lines in (chain, chain[::-1]):
        assert not endless_start("\n".join(["start: r0", *lines]))
        assert endless_start("\n".join(["start: r0 start", *lines]))
    started = time.process_time()
    body = "r3999 " * 50_000 + " ".join(f"r{i}" for i in range(3999, -1, -1))
    assert not endless_start("\n".join([f"start: {body} start", *chain]))
    assert time.process_time() - started < 10.0


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet='abst:|()[]?*+~"/\\ \n%{}<>0.', max_size=60))
def test_no_text_breaks_the_reader(text: str) -> None:
    assert endless_start(text) in (True, False)
    assert endless_start(f"start: {text}") in (True, False)


RULES = ["start", "x", "y", "z"]
BODIES = st.lists(st.lists(st.sampled_from([*RULES, '"t"']), min_size=1, max_size=3), min_size=1)


@settings(max_examples=200, deadline=None)
@given(st.lists(BODIES, min_size=4, max_size=4))
def test_equals_the_definition(bodies: list[list[list[str]]]) -> None:
    """A rule ends if one of its alternatives has a derivation of bounded height."""
    rules = dict(zip(RULES, bodies, strict=True))

    def derives(name: str, height: int) -> bool:
        if name == '"t"':
            return True
        return height > 0 and any(
            all(derives(part, height - 1) for part in alternative) for alternative in rules[name]
        )

    lines = [f"{n}: " + " | ".join(" ".join(a) for a in alts) for n, alts in rules.items()]
    assert endless_start("\n".join(lines)) == (not derives("start", len(RULES)))
