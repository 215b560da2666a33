"""Structured-output constraints as grammars, and the check whether they are sound.

A leaf that the shell (admission) and the core (compilation) share, so that both judge alike. Knows
no vocabulary. `llguidance` is imported when the first constraint comes. Nothing is ever dropped
from a constraint: what cannot be enforced is an error that names it.
"""

from __future__ import annotations

import functools
import json
import re
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

import msgspec

from tellin.exceptions import InvalidParameterError
from tellin.json_schema import (
    close_objects,
    endless_references,
    innermost_failing_subschema,
)
from tellin.lark_rules import endless_start
from tellin.sampling_params import StructuredOutputsParams
from tellin.structural_formats import FormatWriter

WHITESPACE_PATTERN = r"[ ]|\n[ \t]{0,20}"
"""Optional between JSON tokens: one space, or a line break with indentation. Small models drift
into endless whitespace where the grammar lets them."""

NO_SPECIAL_TOKENS: Mapping[str, int] = {}

MAX_GRAMMAR_BYTES = 256 * 1024
"""Longest schema, grammar or structural tag, in its JSON form."""
MAX_RULES = 4000
"""Most rules of a grammar: compiling a chain of n takes time of order n squared."""
MAX_EBNF_RULES = 1000
"""The same in EBNF, which has to be translated: about a second."""
MAX_REFERENCES = 2000
"""Most ``$ref`` of a schema, for the same reason."""
COMPILER_STACK_BYTES = 256 << 20
"""The compiler recurses once per rule that leads to another, 2 to 6 KiB each, and a full stack ends
the process. What `MAX_GRAMMAR_BYTES` can describe fits into this. Only what is used is memory."""

CHECK_TIMEOUT_S = 5.0
"""Longest check at admission. What takes longer is refused."""
MAX_CHECKS = 4
"""Checks at a time. One that was given up counts until its thread ends."""

_checks = threading.BoundedSemaphore(MAX_CHECKS)
_stack_size_lock = threading.Lock()
_R = TypeVar("_R")


def grammar_key(params: StructuredOutputsParams) -> str:
    """Equal for constraints that compile to the same grammar.

    Raises:
        InvalidParameterError: the constraint cannot be written as JSON.
    """
    try:
        return msgspec.json.encode(params).decode()
    except RecursionError:
        raise _invalid(params.kind, "it is nested too deeply") from None
    except (TypeError, ValueError, OverflowError) as error:
        raise _invalid(params.kind, f"it is not JSON: {error}") from None


def validate_structured_outputs(
    params: StructuredOutputsParams, *, disable_any_whitespace: bool = False
) -> None:
    """Refuse a constraint that could not be compiled or never be satisfied.

    Raises:
        InvalidParameterError: with the compiler's reason and, for schemas, the path of the part.
    """
    _validate(grammar_key(params), disable_any_whitespace)


@functools.lru_cache(maxsize=128)
def _validate(key: str, disable_any_whitespace: bool) -> None:
    params = msgspec.json.decode(key, type=StructuredOutputsParams)
    if params.kind in ("json", "grammar", "structural_tag") and len(key) > MAX_GRAMMAR_BYTES:
        raise _invalid(
            params.kind, f"it takes {len(key)} bytes as JSON, more than {MAX_GRAMMAR_BYTES}"
        )

    def check() -> None:
        grammar = build_grammar(params, disable_any_whitespace=disable_any_whitespace)
        error = grammar_error(grammar)
        if error:
            raise _invalid(params.kind, error)

    if not _checks.acquire(timeout=CHECK_TIMEOUT_S):
        raise _invalid(params.kind, "too many others are being checked; try again later")
    try:
        on_deep_stack(check, CHECK_TIMEOUT_S, _checks.release)
    except TimeoutError:
        raise _invalid(
            params.kind, f"to check it takes longer than {CHECK_TIMEOUT_S:g} s; simplify it"
        ) from None


def on_deep_stack(
    function: Callable[[], _R],
    timeout_s: float | None = None,
    when_done: Callable[[], None] | None = None,
) -> _R:
    """Call in a thread whose stack holds the compiler's recursion, whatever thread this is.

    Raises:
        TimeoutError: it has not returned within ``timeout_s``. The thread goes on to its end, and
            calls ``when_done`` only then.
    """
    outcome: Future[_R] = Future()

    def run() -> None:
        try:
            outcome.set_result(function())
        except BaseException as error:
            outcome.set_exception(error)
        finally:
            if when_done is not None:
                when_done()

    thread = threading.Thread(target=run, name="tellin-grammar-compiler", daemon=True)
    with _stack_size_lock:
        usual = threading.stack_size(COMPILER_STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(usual)
    return outcome.result(timeout_s)


def build_grammar(
    params: StructuredOutputsParams,
    *,
    disable_any_whitespace: bool = False,
    special_tokens: Mapping[str, int] = NO_SPECIAL_TOKENS,
) -> str:
    """The constraint in `llguidance`'s own format.

    ``special_tokens`` maps texts that a tokenizer encodes as one special id: in structural tags
    they stand for that id.

    Raises:
        InvalidParameterError: the constraint is malformed or cannot be enforced.
    """
    from llguidance import LLMatcher

    options = _json_options(params, disable_any_whitespace)
    if params.json is not None:
        return _from_schema(params.json, params, options, "json")
    if params.json_object is not None:
        return _from_schema({"type": "object"}, params, options, "json_object")
    if params.regex is not None:
        return str(LLMatcher.grammar_from_regex(params.regex))
    if params.choice is not None:
        # One terminal, not one alternative each: the parser's rows have a limit, the lexer has not.
        return "start: CHOICE\nCHOICE: " + " | ".join(_literal(c) for c in params.choice)
    if params.grammar is not None:
        return _from_grammar(params.grammar)
    assert params.structural_tag is not None
    return _from_structural_tag(params.structural_tag, params, options, special_tokens)


def parser_limits() -> Any:
    """Bounds on the work of compilation and of each step."""
    from llguidance import LLParserLimits

    return LLParserLimits(verbose_errors=False)


def grammar_error(grammar: str, tokenizer: Any = None) -> str:
    """Why a grammar cannot be used, or empty. Call it `on_deep_stack`.

    A grammar that compiles but allows no first token can never be satisfied.
    """
    matcher = make_matcher(grammar, tokenizer or _byte_tokenizer())
    return matcher if isinstance(matcher, str) else ""


def make_matcher(grammar: str, tokenizer: Any) -> Any:
    """A matcher whose first mask has been computed (its copies share that work), or an error."""
    from llguidance import LLMatcher

    is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=parser_limits())
    if is_error:
        return one_line(messages[0])
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=parser_limits())
    if not matcher.is_error():
        matcher.compute_bitmask()
    return matcher_error(matcher) if matcher.is_error() else matcher


def matcher_error(matcher: Any) -> str:
    """Error of a matcher in one line."""
    text = one_line(matcher.get_error())
    if text.startswith("NoExtension"):
        return "no text can satisfy it"
    return text


def one_line(text: str) -> str:
    """A compiler's message without carets, source excerpts and line breaks."""
    lines = [line.strip() for line in text.splitlines()]
    kept = [
        line
        for line in lines
        if line.strip("^~ ") and line != "<non-verbose/>" and not re.match(r"\d+ \| |\|", line)
    ]
    return " ".join(kept)


class _Bytes:
    """A vocabulary of single bytes, good enough to try a grammar without a model."""

    def __init__(self) -> None:
        self.tokens = [bytes([value]) for value in range(256)] + [b"<eos>"]
        self.eos_token_id = 256
        self.bos_token_id = None
        self.special_token_ids = [256]

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


@functools.cache
def _byte_tokenizer() -> Any:
    from llguidance import LLTokenizer, TokenizerWrapper

    return LLTokenizer(TokenizerWrapper(_Bytes()))


def _invalid(kind: str, reason: str) -> InvalidParameterError:
    parameter = f"structured_outputs.{kind}"
    return InvalidParameterError(f"{parameter} cannot be used: {reason}", parameter=parameter)


# ---------------------------------------------------------------------- JSON


def _json_options(params: StructuredOutputsParams, disable_any_whitespace: bool) -> dict[str, Any]:
    """``lenient`` would ignore unknown keywords; a schema must not be able to turn it on."""
    if disable_any_whitespace or params.disable_any_whitespace:
        return {"lenient": False, "whitespace_flexible": False}
    return {
        "lenient": False,
        "whitespace_flexible": True,
        "whitespace_pattern": params.whitespace_pattern or WHITESPACE_PATTERN,
    }


def _from_schema(
    schema: str | dict[str, Any],
    params: StructuredOutputsParams,
    options: dict[str, Any],
    kind: str,
) -> str:
    return _compile_schema(_checked_schema(schema, params, options, kind), options)


def _compile_schema(schema: Any, options: dict[str, Any]) -> str:
    from llguidance import LLMatcher

    overrides: Any = options
    return str(LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=overrides))


def _checked_schema(
    schema: str | dict[str, Any],
    params: StructuredOutputsParams,
    options: dict[str, Any],
    kind: str,
) -> Any:
    """The schema as an object, after all checks that can name the offending part."""
    try:
        parsed = json.loads(schema) if isinstance(schema, str) else schema
        if not isinstance(parsed, dict | bool):
            raise _invalid(kind, f"a schema must be an object, got {type(parsed).__name__}")
        if parsed is False:
            raise _invalid(kind, "the schema false allows nothing")
        if parsed is True:
            parsed = {}
        if params.disable_additional_properties:
            parsed = close_objects(parsed)
        num_references = _count_references(parsed)
        if num_references > MAX_REFERENCES:
            raise _invalid(kind, f"it has {num_references} '$ref', more than {MAX_REFERENCES}")
        reason = _schema_error(parsed, options)
        if reason:
            part = innermost_failing_subschema(parsed, lambda s: bool(_schema_error(s, options)))
            raise _invalid(kind, f"{_schema_error(part.schema, options)} (at {part.path})")
        endless = endless_references(parsed)
    except RecursionError:
        raise _invalid(kind, "it is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise _invalid(kind, f"it is not valid JSON: {error}") from None
    except (TypeError, ValueError) as error:
        if isinstance(error, InvalidParameterError):
            raise
        raise _invalid(kind, str(error)) from None
    if endless:
        raise _invalid(kind, f"no finite value satisfies it: {endless} refers to itself for ever")
    return parsed


def _count_references(schema: Any) -> int:
    if isinstance(schema, dict):
        return ("$ref" in schema) + sum(map(_count_references, schema.values()))
    if isinstance(schema, list):
        return sum(map(_count_references, schema))
    return 0


def _schema_error(schema: Any, options: dict[str, Any]) -> str:
    from llguidance import LLMatcher

    if not isinstance(schema, dict):
        return "" if isinstance(schema, bool) else "a schema must be an object or a boolean"
    is_error, messages = LLMatcher.validate_grammar_with_warnings(_compile_schema(schema, options))
    return one_line(messages[0]) if is_error else ""


# ---------------------------------------------------------------------- Lark and EBNF


_RULE_HEADS = re.compile(r"^[ \t]*[?!]?[A-Za-z_][\w-]*[^:\n]*:", re.MULTILINE)


def _from_grammar(text: str) -> str:
    """Lark as it is; EBNF (rules with ``::=``, first symbol ``root``) is translated."""
    limit = MAX_EBNF_RULES if "::=" in text else MAX_RULES
    num_rules = len(_RULE_HEADS.findall(text))
    if num_rules > limit:
        raise _invalid("grammar", f"it has {num_rules} rules, more than {limit}")
    if "::=" in text:
        from llguidance.gbnf_to_lark import any_to_lark

        try:
            text = str(any_to_lark(text))
        except Exception as error:  # the translator raises its own and bare exceptions
            raise _invalid("grammar", one_line(str(error)) or repr(error)) from None
    if endless_start(text):
        raise _invalid("grammar", "no finite text satisfies it: its first rule never ends")
    return text


def _literal(text: str) -> str:
    """A string in Lark syntax, which shares JSON's escapes."""
    return json.dumps(text, ensure_ascii=False)


# ---------------------------------------------------------------------- structural tags


def _from_structural_tag(
    spec: str,
    params: StructuredOutputsParams,
    options: dict[str, Any],
    special_tokens: Mapping[str, int],
) -> str:
    """Free text in which each trigger must go on as one of its structures.

    ``{"triggers": [...], "structures": [{"begin": ..., "schema": ..., "end": ...}]}``, where every
    ``begin`` starts with a trigger. Or ``{"format": ...}``, see `tellin.structural_formats`.
    """
    tag = _parse_json_object(spec)
    split = _splitter(special_tokens)
    if "format" in tag:
        return _from_format(tag, params, options, split)
    triggers, structures = _parse_structural_tag(tag)
    rules: list[str] = []
    used: dict[str, list[str]] = {}
    for index, structure in enumerate(structures):
        trigger = next((t for t in triggers if structure["begin"].startswith(t)), None)
        if trigger is None:
            raise _invalid(
                "structural_tag",
                f"structures[{index}].begin {structure['begin']!r} starts with no trigger",
            )
        schema = _checked_schema(structure["schema"], params, options, "structural_tag")
        body = json.dumps({**schema, "x-guidance": options})
        rest = split(structure["begin"][len(trigger) :])
        rules.append(f"body_{index}: {rest} %json {body} {split(structure['end'])}")
        used.setdefault(trigger, []).append(f"body_{index}")
    for number, (trigger, bodies) in enumerate(used.items()):
        head, *tail = split.parts(trigger)
        if head.startswith("<"):
            rules.append(f"trigger_{number}: TEXT {head}")
        else:
            rules.append(f"trigger_{number}[lazy]: TEXT {head}")
        rules.append(f"tag_{number}: trigger_{number} {' '.join(tail)} ({' | '.join(bodies)})")
    tags = " | ".join(f"tag_{number}" for number in range(len(used)))
    return "\n".join(
        ["%llguidance {}", f"start: ({tags})* tail", "tail: TEXT", r"TEXT: /(.|\n)*/", *rules, ""]
    )


def _from_format(
    tag: dict[str, Any],
    params: StructuredOutputsParams,
    options: dict[str, Any],
    split: _Splitter,
) -> str:
    def write_schema(schema: Any) -> str:
        checked = _checked_schema(schema, params, options, "structural_tag")
        return f"%json {json.dumps({**checked, 'x-guidance': options})}"

    try:
        return FormatWriter(split, write_schema).grammar(tag["format"], tag.get("definitions"))
    except InvalidParameterError:
        raise
    except ValueError as error:
        raise _invalid("structural_tag", str(error)) from None


def _parse_json_object(spec: str) -> dict[str, Any]:
    try:
        tag = json.loads(spec)
    except (json.JSONDecodeError, RecursionError) as error:
        raise _invalid("structural_tag", f"it is not valid JSON: {error}") from None
    if not isinstance(tag, dict):
        raise _invalid("structural_tag", "it must be an object")
    return tag


def _parse_structural_tag(tag: dict[str, Any]) -> tuple[list[str], list[dict[str, Any]]]:
    kind = "structural_tag"
    if not {"triggers", "structures"} <= tag.keys():
        raise _invalid(kind, "it must have 'format', or 'triggers' and 'structures'")
    triggers, structures = tag["triggers"], tag["structures"]
    if not _is_list_of(triggers, str) or not all(triggers):
        raise _invalid(kind, "'triggers' must be a list of at least one non-empty string")
    if not _is_list_of(structures, dict):
        raise _invalid(kind, "'structures' must be a list of at least one object")
    for index, structure in enumerate(structures):
        for name, types in (("begin", str), ("end", str), ("schema", dict | bool)):
            if not isinstance(structure.get(name), types):
                raise _invalid(kind, f"structures[{index}].{name} is missing or of a wrong type")
    return triggers, structures


def _is_list_of(value: Any, item_type: type) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(v, item_type) for v in value)


class _Splitter:
    """Text as a sequence of Lark literals and special ids."""

    def __init__(self, special_tokens: Mapping[str, int]) -> None:
        self._special_tokens = special_tokens
        longest_first = sorted(special_tokens, key=len, reverse=True)
        pattern = "|".join(map(re.escape, longest_first))
        self._split: Callable[[str], list[str]] | None = (
            re.compile(f"({pattern})").split if pattern else None
        )

    def parts(self, text: str) -> list[str]:
        pieces = self._split(text) if self._split is not None else [text]
        ids = self._special_tokens
        return [f"<[{ids[p]}]>" if p in ids else _literal(p) for p in pieces if p]

    def __call__(self, text: str) -> str:
        return " ".join(self.parts(text))


def _splitter(special_tokens: Mapping[str, int]) -> _Splitter:
    return _Splitter(special_tokens)
