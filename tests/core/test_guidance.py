"""6.2-6.5 with the real backend: masks, advancing, drafts; closed in every failure."""

from __future__ import annotations

import dataclasses
import json
import random
import re
from typing import Any

import pytest

from tellin.core import structured_output_guidance
from tellin.core.structured_output_guidance import GuidanceBackend, GuidanceGrammar
from tellin.sampling_params import StructuredOutputsParams
from tests.core.fakes import make_config
from tests.core.vocabulary import (
    END_TOOL_ID,
    EOS_ID,
    SIZE,
    TOOL_ID,
    ByteTokenizer,
    tokenize_somehow,
)

VOCAB_SIZE = SIZE + 30
"""The model's output is wider than the tokenizer, as is usual."""


def make_backend(tokenizer: Any = None, **options: Any) -> GuidanceBackend:
    config = make_config()
    model = dataclasses.replace(config.model_config, vocab_size=VOCAB_SIZE, eos_token_ids=(EOS_ID,))
    structured = dataclasses.replace(config.structured_outputs_config, **options)
    config = dataclasses.replace(config, model_config=model, structured_outputs_config=structured)
    return GuidanceBackend(config, tokenizer or ByteTokenizer())


@pytest.fixture(scope="module")
def backend() -> GuidanceBackend:
    return make_backend()


def grammar_of(backend: GuidanceBackend, **params: Any) -> GuidanceGrammar:
    grammar = backend.compile(StructuredOutputsParams(**params))()
    assert isinstance(grammar, GuidanceGrammar)
    return grammar


def allowed(backend: GuidanceBackend, grammar: GuidanceGrammar) -> set[int]:
    bitmask = backend.allocate_bitmask(1)
    grammar.fill_bitmask(bitmask, 0)
    words = [int(w) & 0xFFFFFFFF for w in bitmask[0]]
    return {32 * i + j for i, word in enumerate(words) for j in range(32) if word >> j & 1}


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "n": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["ab", "é😀", True, None]}},
    },
    "required": ["name", "n"],
    "additionalProperties": False,
}
EXAMPLES = [
    ({"json": SCHEMA}, '{"name": "abc", "n": 1200, "tags": ["ab", "é😀", true, null]}'),
    ({"json": json.dumps(SCHEMA)}, '{"name":"","n":-1}'),
    ({"json": SCHEMA}, '{\n  "name": "x\\n",\n  "n": 0,\n  "tags": []\n}'),
    ({"json_object": True}, '{"a": {"b": [1, 2.5e3, "x"]}}'),
    ({"json": {}}, "[true, false]"),
    ({"regex": r"\d{2}-[a-c]+(x|yz)?"}, "12-abcyz"),
    ({"choice": ["yes", 'no "quoted"\n', "😀", "\\d"]}, 'no "quoted"\n'),
    ({"choice": ["yes", "no", "😀", "\\d"]}, "😀"),
    ({"choice": ["yes", "\\d"]}, "\\d"),
    ({"grammar": 'start: "a" (","  "b")*'}, "a,b,b"),
    ({"grammar": 'root ::= item ("," item)*\nitem ::= [0-9]+ | "x"'}, "12,x,00"),
]


@pytest.mark.parametrize(("params", "text"), EXAMPLES)
def test_every_text_of_the_language_can_be_written(
    backend: GuidanceBackend, params: dict[str, Any], text: str
) -> None:
    """6.3.3 Check: some next id is always in the mask; EOS exactly where the text may end.

    Where only one text is possible the mask may insist on the tokenizer's own way to write it.
    """
    pieces = ByteTokenizer().token_bytes()
    for seed in range(5):
        rng = random.Random(seed)
        grammar, rest = grammar_of(backend, **params), text.encode()
        while rest:
            mask = allowed(backend, grammar)
            assert max(mask) < SIZE
            assert (EOS_ID in mask) == grammar.matcher.is_accepting()
            fitting = [i for i in mask if i < EOS_ID and rest.startswith(pieces[i] or b"?")]
            assert fitting, rest
            token_id = rng.choice(fitting)
            assert grammar.accept_tokens([token_id])
            rest = rest[len(pieces[token_id] or b"") :]
        assert EOS_ID in allowed(backend, grammar)
        assert grammar.accept_tokens([EOS_ID])
        assert grammar.is_terminated()
        assert not grammar.error()


@pytest.mark.parametrize(("params", "text"), EXAMPLES)
def test_every_tokenization_is_accepted(
    backend: GuidanceBackend, params: dict[str, Any], text: str
) -> None:
    for seed in range(5):
        grammar = grammar_of(backend, **params)
        assert grammar.accept_tokens([*tokenize_somehow(text, random.Random(seed)), EOS_ID])


def test_tokenizers_that_change_text_force_nothing_wrong() -> None:
    """A space that a tokenizer puts in front must not become a forced token."""

    class Spacy(ByteTokenizer):
        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            return list(b" " + text.encode())

    backend = make_backend(tokenizer=Spacy())
    grammar = grammar_of(backend, choice=["abcname"])
    assert not allowed(backend, grammar) - {ord("a"), 256 + 14, 256 + 15}
    assert grammar.accept_tokens([256 + 15])
    assert allowed(backend, grammar)


VALIDATORS: list[tuple[dict[str, Any], Any]] = [
    ({"json": SCHEMA}, lambda t: {"name", "n"} <= json.loads(t).keys() <= {"name", "n", "tags"}),
    ({"json_object": True}, lambda t: isinstance(json.loads(t), dict)),
    ({"regex": r"(ab|c)*\d"}, lambda t: re.fullmatch(r"(ab|c)*\d", t)),
    ({"choice": ["abc", "ab", "true"]}, lambda t: t in ("abc", "ab", "true")),
]


@pytest.mark.parametrize(("params", "is_valid"), VALIDATORS)
def test_whatever_the_mask_allows_is_valid(
    backend: GuidanceBackend, params: dict[str, Any], is_valid: Any
) -> None:
    """P38, E7: an output that ended by EOS always validates (random model)."""
    num_ended = 0
    for seed in range(30):
        rng = random.Random(seed)
        grammar, ids = grammar_of(backend, **params), []
        for _ in range(150):
            mask = sorted(allowed(backend, grammar))
            assert mask
            token_id = EOS_ID if EOS_ID in mask and rng.random() < 0.5 else rng.choice(mask)
            assert grammar.accept_tokens([token_id])
            if token_id == EOS_ID:
                num_ended += 1
                assert is_valid(ByteTokenizer().decode(ids))
                break
            ids.append(token_id)
    assert num_ended >= 5


def test_refused_ids_are_named(backend: GuidanceBackend) -> None:
    grammar = grammar_of(backend, regex="ab+")
    assert not grammar.accept_tokens([ord("a"), ord("c")])
    assert str(ord("c")) in grammar.error()
    grammar = grammar_of(backend, regex="ab+")
    assert not grammar.accept_tokens([EOS_ID])
    assert str(EOS_ID) in grammar.error()


def test_nothing_follows_the_end(backend: GuidanceBackend) -> None:
    grammar = grammar_of(backend, regex="a*")
    assert grammar.accept_tokens([ord("a"), EOS_ID])
    assert not grammar.accept_tokens([ord("a")])


def test_validate_and_rollback_leave_no_trace(backend: GuidanceBackend) -> None:
    """6.3.2-6.3.3: validate does not advance; accept and rollback restore the mask."""
    grammar = grammar_of(backend, json=SCHEMA)
    ids = list(b'{"name": "x')
    assert grammar.accept_tokens(ids[:4])
    before = allowed(backend, grammar)
    assert grammar.validate_tokens([*ids[4:8], 0, 1]) == ids[4:8]
    assert allowed(backend, grammar) == before
    assert grammar.accept_tokens(ids[4:8])
    assert allowed(backend, grammar) != before
    grammar.rollback(4)
    grammar.rollback(0)
    assert allowed(backend, grammar) == before


def test_drafts_end_before_the_end_of_sequence(backend: GuidanceBackend) -> None:
    grammar = grammar_of(backend, regex="a*")
    assert grammar.validate_tokens([ord("a"), EOS_ID, ord("a")]) == [ord("a")]


def test_a_complete_text_terminates(backend: GuidanceBackend) -> None:
    grammar = grammar_of(backend, choice=["ab"])
    assert not grammar.is_terminated()
    assert grammar.accept_tokens([ord("a"), ord("b")])
    assert grammar.is_terminated()
    assert allowed(backend, grammar) == {EOS_ID}


def test_requests_have_states_of_their_own(backend: GuidanceBackend) -> None:
    """6.4.4."""
    make = backend.compile(StructuredOutputsParams(regex="abc"))
    first, second = make(), make()
    assert first.accept_tokens([ord("a")])
    assert second.accept_tokens([ord("a"), ord("b")])
    assert not first.is_terminated()
    assert first.accept_tokens([ord("b"), ord("c")])


def test_whitespace_is_bounded(backend: GuidanceBackend) -> None:
    """P40: a model that loves line breaks still finishes, and the result validates."""
    schema = {**SCHEMA, "properties": {"name": {"type": "string"}, "n": {"type": "integer"}}}
    grammar, ids = grammar_of(backend, json=schema), []
    newline = (256 + 11, 256 + 12, ord("\n"), ord("\t"))
    for _ in range(600):
        mask = allowed(backend, grammar)
        token_id = next((i for i in newline if i in mask), None)
        if token_id is None:
            token_id = EOS_ID if EOS_ID in mask else min(mask, key=lambda i: (i != ord('"'), i))
        assert grammar.accept_tokens([token_id])
        if token_id == EOS_ID:
            break
        ids.append(token_id)
    assert json.loads(ByteTokenizer().decode(ids)).keys() >= {"name", "n"}


def test_whitespace_options() -> None:
    text = list(b'{"a": 1')
    backend = make_backend(disable_any_whitespace=True)
    assert not grammar_of(backend, json={"type": "object"}).accept_tokens(text)
    backend = make_backend()
    tight = {"json": {"type": "object"}, "disable_any_whitespace": True}
    assert not grammar_of(backend, **tight).accept_tokens(text)
    wide = {"json": {"type": "object"}, "whitespace_pattern": "[ ]{0,3}"}
    assert grammar_of(backend, **wide).accept_tokens(list(b'{   "a":   1'))
    assert not grammar_of(backend, **wide).accept_tokens(list(b'{    "a"'))


def test_additional_properties_can_be_closed(backend: GuidanceBackend) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "object", "properties": {}}}}
    assert grammar_of(backend, json=schema).accept_tokens(list(b'{"a": {"b'))
    closed = grammar_of(backend, json=schema, disable_additional_properties=True)
    assert not closed.accept_tokens(list(b'{"a": {"b'))


def tag(*structures: dict[str, Any], triggers: list[str]) -> dict[str, str]:
    spec = {"type": "structural_tag", "structures": list(structures), "triggers": triggers}
    return {"structural_tag": json.dumps(spec)}


def test_structural_tags(backend: GuidanceBackend) -> None:
    """6.1: free text, but after a trigger only what the structure allows."""
    integer = {"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"}
    string = {"begin": "<f=b>", "schema": {"type": "string"}, "end": "</f>"}
    params = tag(integer, string, triggers=["<f="])
    grammar = grammar_of(backend, **params)
    assert grammar.accept_tokens(list(b"so < this <f=a>12</f> and <f=b>"))
    assert ord('"') in allowed(backend, grammar)
    assert EOS_ID not in allowed(backend, grammar)
    assert grammar.accept_tokens(list(b'"x"</f>.'))
    assert EOS_ID in allowed(backend, grammar)
    assert not grammar_of(backend, **params).accept_tokens(list(b"<f=c"))
    assert not grammar_of(backend, **params).accept_tokens(list(b"<f=a>x"))


def test_structural_tags_of_special_tokens(backend: GuidanceBackend) -> None:
    """A trigger that is one token of the vocabulary is meant as that token."""
    call = {"begin": "<tool>{", "schema": {"type": "integer"}, "end": "}</tool>"}
    grammar = grammar_of(backend, **tag(call, triggers=["<tool>"]))
    assert grammar.accept_tokens([*b"hello", TOOL_ID])
    assert allowed(backend, grammar) == {ord("{")}
    assert grammar.accept_tokens([*b"{12}"])
    assert allowed(backend, grammar) == {END_TOOL_ID}
    assert grammar.accept_tokens([END_TOOL_ID, *b"bye", EOS_ID])


def format_of(node: dict[str, Any]) -> dict[str, str]:
    return {"structural_tag": json.dumps({"type": "structural_tag", "format": node})}


def test_structural_formats(backend: GuidanceBackend) -> None:
    """6.1: alternatives, sequences, repetition, and texts between which a schema stands."""
    number = {"type": "json_schema", "json_schema": {"type": "integer"}}
    path = {"type": "regex", "pattern": r"/[a-z]+\n|\\/"}
    tags = [
        {"type": "tag", "begin": "<a>", "content": number, "end": "</a>"},
        {"type": "tag", "begin": "<b>", "content": path, "end": ""},
    ]
    many = {"type": "tags_with_separator", "tags": tags, "separator": ", "}
    node = {"type": "or", "elements": [
        {"type": "sequence", "elements": [{"type": "const_string", "value": "n="}, number]},
        {"type": "sequence", "elements": [{"type": "const_string", "value": "["}, many,
                                          {"type": "const_string", "value": "]"}]},
    ]}  # fmt: skip

    def ends(node: dict[str, Any], text: bytes) -> bool:
        return grammar_of(backend, **format_of(node)).accept_tokens([*text, EOS_ID])

    for text in (b"n=12", b"[<a>1</a>, <b>/x\n, <b>\\/]", b"[]"):
        assert ends(node, text)
    for text in (b"n=x", b"", b"n=", b"[<a>1</a> <b>/x\n]", b"[<b>/x]", b"n=1[]"):
        assert not ends(node, text)
    one = {**many, "at_least_one": True, "stop_after_first": True}
    assert ends(one, b"<a>1</a>")
    assert not ends(one, b"")
    assert not ends(one, b"<a>1</a>, <a>1</a>")


def test_structural_formats_may_refer_to_themselves(backend: GuidanceBackend) -> None:
    def text(value: str) -> dict[str, Any]:
        return {"type": "const_string", "value": value}

    inner = {"type": "ref", "name": "brackets"}
    pair = {"type": "sequence", "elements": [text("("), inner, text(")"), inner]}
    tree = {"brackets": {"type": "or", "elements": [text(""), pair]}}
    spec = json.dumps({"format": inner, "definitions": tree})
    for given, is_good in ((b"", True), (b"(()())()", True), (b"(()", False), (b")", False)):
        grammar = grammar_of(backend, structural_tag=spec)
        assert grammar.accept_tokens([*given, EOS_ID]) is is_good


def test_structural_formats_of_special_tokens(backend: GuidanceBackend) -> None:
    """A text that is one token of the vocabulary is meant as that token."""
    string = {"type": "json_schema", "json_schema": {"type": "string"}}
    call = {"type": "tag", "begin": "<tool>", "content": string, "end": "</tool>"}
    grammar = grammar_of(backend, **format_of({"type": "or", "elements": [string, call]}))
    assert {TOOL_ID, ord('"')} <= allowed(backend, grammar)
    assert ord("<") not in allowed(backend, grammar)
    assert grammar.accept_tokens([TOOL_ID, *b'"<"', END_TOOL_ID, EOS_ID])


@pytest.mark.parametrize(
    "params",
    [
        {"json": {"type": "string", "maxLength": 10**9}},
        {"json": {"type": "array", "minItems": 10**6, "items": {"type": "integer"}}},
        {"regex": "(a+)+$"},
        {"regex": "(x+x+)+y"},
        {"regex": "(.*a.{1,30}){1,30}"},
        {"regex": "(a{1,1000}){1,1000}"},
        {"regex": ""},
        {"json": {}},
    ],
)
def test_huge_and_catastrophic_constraints_are_bounded(
    backend: GuidanceBackend, params: dict[str, Any]
) -> None:
    """Each is an error of its request or a bounded, valid result; never a hang."""
    grammar = grammar_of(backend, **params)
    for _ in range(60):
        mask = allowed(backend, grammar)
        if grammar.error():
            return  # its request ends with this error
        assert mask
        token_id = min(mask - {EOS_ID}, default=EOS_ID)
        assert grammar.accept_tokens([token_id])
        if token_id == EOS_ID:
            return


def test_a_grammar_that_is_too_slow_is_broken_off(
    backend: GuidanceBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parsing it takes longer with each id; the requests beside it must not wait for it."""
    monkeypatch.setattr(structured_output_guidance, "MAX_SECONDS", 0.02)
    monkeypatch.setattr(structured_output_guidance, "MAX_SECONDS_PER_TOKEN", 0.0002)
    slow = grammar_of(backend, grammar='start: s\ns: s s s | s s | "a"')
    quick = grammar_of(backend, grammar='start: "a"+')
    for _ in range(100):
        for grammar in (slow, quick):
            if not grammar.error():
                assert ord("a") in allowed(backend, grammar)
                grammar.accept_tokens([ord("a")])
    assert "takes too long" in slow.error()
    assert quick.error() == ""


def test_masks_in_parallel_are_the_same(backend: GuidanceBackend) -> None:
    """6.5.4."""
    grammars = [grammar_of(backend, regex=f"[a-{chr(98 + i)}]+") for i in range(20)]
    backend._num_threads = 2
    parallel = backend.allocate_bitmask(20)
    backend.fill_bitmasks([(g, i) for i, g in enumerate(grammars)], parallel)
    serial = backend.allocate_bitmask(20)
    for row, grammar in enumerate(grammars):
        grammar.fill_bitmask(serial, row)
    assert (parallel == serial).all()


def test_rows_start_closed(backend: GuidanceBackend) -> None:
    bitmask = backend.allocate_bitmask(3)
    assert bitmask.shape == (3, -(-VOCAB_SIZE // 32))
    assert not bitmask.any()


def test_texts_of_special_tokens_are_spelt_out(backend: GuidanceBackend) -> None:
    """A constraint that contains such a text is met with text; the special id is not allowed."""
    text = ByteTokenizer().convert_ids_to_tokens([TOOL_ID])[0]

    class Parsing(ByteTokenizer):
        """Recognises special tokens in text, as real tokenizers do."""

        def encode(self, text_: str, add_special_tokens: bool = True) -> list[int]:
            head, found, tail = text_.partition(text)
            middle = [TOOL_ID] if found else []
            return [*head.encode(), *middle, *tail.encode()]

    grammar = grammar_of(make_backend(tokenizer=Parsing()), choice=[f"a{text}b"])
    pieces = ByteTokenizer().token_bytes()
    written = b""
    while True:
        mask = allowed(backend, grammar)
        assert TOOL_ID not in mask
        token_id = min(mask)
        assert grammar.accept_tokens([token_id])
        if token_id == EOS_ID or grammar.is_terminated():
            break
        written += pieces[token_id] or b""
    assert written.decode() in (f"a{text}b", f"a{text}")


def test_very_many_choices(backend: GuidanceBackend) -> None:
    """6.3: as many as the lexer holds, not as the parser has items in a row."""
    grammar = grammar_of(backend, choice=[f"item {i}" for i in range(5000)])
    assert grammar.accept_tokens(b"item 4999")
    assert grammar.accept_tokens([EOS_ID])
