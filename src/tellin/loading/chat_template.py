"""Chat templates: Jinja programs that come with models, run in a sandbox.

A template is a stranger's program. It runs in Jinja's immutable sandbox, sees the conversation and
nothing else, and its failures are the request's: they become request errors that carry its words.
The sandbox protects files and objects. Processor time is bounded, and so is the size of output and
of values that operators make, but filters can still take memory: take templates from models, not
from whoever can send a request.
The environment (functions, filters, white space) is the one that templates are written for: that of
the transformers library's ``apply_chat_template``.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import jinja2
import jinja2.ext
import jinja2.filters
import jinja2.nodes
import jinja2.sandbox
import jinja2.visitor

from tellin.exceptions import InvalidParameterError, RequestError

_MAX_OUTPUT_CHARS = 64 << 20
"""More than any context holds; a template that loops over itself stops here."""
_MAX_SECONDS = 5.0
"""Processor time of one rendering: real templates take milliseconds for long conversations."""
_MAX_INTEGER_BITS = 1 << 16
_MAX_JSON_VALUES = 1 << 20
"""In what is turned into JSON: lists that hold one list twice are small, and their JSON huge."""
_HUGE_WIDTH = re.compile(r"%[-+ #0.]*(\d{7}|\*)|:[^{}]*\d{7}")
"""In a text to be formatted: a width of seven digits, or one that is given elsewhere."""
_MARK = "\ue000end-of-final-message\ue001"
_MARK_SPACE = "\u2003"
"""White space behind the mark that no template writes itself: it is gone if content was trimmed."""


class ChatTemplate:
    """A compiled template.

    Raises:
        InvalidParameterError: the text is not a valid template.
    """

    def __init__(self, text: str) -> None:
        try:
            self._template = _environment().from_string(text)
        except (jinja2.TemplateError, RecursionError) as error:
            raise InvalidParameterError(
                f"the chat template is not valid Jinja: {error}{_line_of(error)}",
                parameter="chat_template",
            ) from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt of a conversation.

        Raises:
            InvalidParameterError: a wrong combination of arguments.
            RequestError: the template refused, or failed on, the conversation.
        """
        if continue_final_message:
            if add_generation_prompt:
                raise InvalidParameterError(
                    "continue_final_message and add_generation_prompt exclude each other; "
                    "set one of them",
                    parameter="continue_final_message",
                    value=True,
                )
            return self._render_open(messages, tools, variables or {})
        return self._run(messages, add_generation_prompt, tools, variables or {})

    def _run(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
    ) -> str:
        context = {
            "documents": None,
            **variables,
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        parts: list[str] = []
        num_chars = 0
        _budget.start()
        try:
            for part in self._template.generate(context):
                num_chars += len(part)
                if num_chars > _MAX_OUTPUT_CHARS:
                    raise _TemplateRefusalError(
                        f"more than {_MAX_OUTPUT_CHARS} characters of output"
                    )
                parts.append(part)
        except _TemplateRefusalError as error:
            raise RequestError(f"the chat template refused the conversation: {error}") from None
        except Exception as error:
            # Template code can raise anything that Python can (a missing key, a sum of text and
            # number); all of it means that this conversation does not suit this template.
            raise RequestError(
                f"the chat template failed on this conversation: {type(error).__name__}: {error}"
            ) from None
        return "".join(parts)

    def _render_open(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
    ) -> str:
        """Render with a mark at the end of the last message, and cut there."""
        if not messages:
            raise InvalidParameterError(
                "continue_final_message needs at least one message",
                parameter="messages",
                value=messages,
            )
        final = _mark_final_message(messages[-1])
        rendered = self._run([*messages[:-1], final], False, tools, variables)
        position = rendered.rfind(_MARK)
        if position < 0:
            raise RequestError(
                "continue_final_message: the chat template does not show the last message's content"
            )
        prompt = rendered[:position]
        is_trimmed = not rendered.startswith(_MARK + _MARK_SPACE, position)
        return prompt.rstrip() if is_trimmed else prompt


@functools.lru_cache(maxsize=16)
def compile_template(text: str, source: Path | None = None) -> ChatTemplate:
    """`ChatTemplate`, kept for the templates used last: compiling takes a millisecond or more.

    ``source``: the model that it came with, for the error's message.
    """
    try:
        return ChatTemplate(text)
    except InvalidParameterError as error:
        if source is None:
            raise
        raise InvalidParameterError(f"{source}: {error}", parameter="chat_template") from None


def _line_of(error: Exception) -> str:
    line = getattr(error, "lineno", None)
    return "" if line is None else f" (line {line})"


class _TemplateRefusalError(Exception):
    """Raised by ``raise_exception`` in a template."""


def choose_template(
    source: Path, templates: Mapping[str, str], wanted: str | None, has_tools: bool
) -> str:
    """The text of the template to use.

    Args:
        source: the model, for messages.
        templates: the model's templates by name.
        wanted: a name among them, or Jinja text; None = the model's.
        has_tools: whether the conversation comes with tools.

    Raises:
        InvalidParameterError: the model has no template and none was given.
    """
    if wanted is not None:
        if wanted not in templates and "{" not in wanted:
            names = ", ".join(sorted(templates)) or "none"
            raise InvalidParameterError(
                f"chat_template={wanted!r:.200} is no Jinja text, and not the name of one of the "
                f"model's templates ({names})",
                parameter="chat_template",
                value=wanted,
            )
        return templates.get(wanted, wanted)
    if has_tools and "tool_use" in templates:
        return templates["tool_use"]
    if "default" in templates:
        return templates["default"]
    names = f"; it has templates named {', '.join(sorted(templates))}" if templates else ""
    raise InvalidParameterError(
        f"{source.name}: the model has no chat template, so there is no telling how to write a "
        f"conversation for it; pass chat_template=..., or use plain prompts{names}",
        parameter="chat_template",
    )


def _mark_final_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a message with the mark after its text."""
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": content + _MARK + _MARK_SPACE}
    if isinstance(content, Sequence) and content:
        parts = [dict(part) if isinstance(part, Mapping) else part for part in content]
        for part in reversed(parts):
            if isinstance(part, dict) and isinstance(part.get("text"), str):
                part["text"] += _MARK + _MARK_SPACE
                return {**message, "content": parts}
    raise InvalidParameterError(
        "continue_final_message needs a last message with text",
        parameter="messages",
        value=message.get("role"),
    )


class _Budget(threading.local):
    """Processor time of the rendering that runs in a thread."""

    def __init__(self) -> None:
        self._end = 0.0

    def start(self) -> None:
        self._end = time.thread_time() + _MAX_SECONDS

    def spend(self) -> None:
        """A round of a loop begins, or a macro."""
        if time.thread_time() > self._end:
            raise _TemplateRefusalError(f"it takes more than {_MAX_SECONDS:g} s")


_budget = _Budget()


class _Bounds(jinja2.visitor.NodeTransformer):
    """Puts the budget's clock into loops and macros, and a limit onto ``~``."""

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.Node:  # noqa: N802
        return self._watch(node)

    def visit_Macro(self, node: jinja2.nodes.Macro) -> jinja2.nodes.Node:  # noqa: N802
        return self._watch(node)

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _call_of("concatenate", node.nodes, node.lineno)

    def _watch(self, node: jinja2.nodes.For | jinja2.nodes.Macro) -> jinja2.nodes.Node:
        self.generic_visit(node)
        look = jinja2.nodes.ExprStmt(_call_of("spend", [], node.lineno), lineno=node.lineno)
        node.body.insert(0, look)
        return node


def _call_of(method: str, arguments: list[Any], lineno: int) -> jinja2.nodes.Call:
    """A call of one of the environment's own methods."""
    function = jinja2.nodes.EnvironmentAttribute(method, lineno=lineno)
    return jinja2.nodes.Call(function, arguments, [], None, None, lineno=lineno)


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox, which also bounds time and refuses to make huge values."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        tree = _Bounds().visit(super()._parse(source, name, filename))
        tree.set_environment(self)
        return cast("jinja2.nodes.Template", tree)

    def spend(self) -> None:
        """Part of every loop and macro."""
        _budget.spend()

    def concatenate(self, *values: Any) -> str:
        """The operator ``~``."""
        texts = [str(value) for value in values]
        _check_size(sum(map(len, texts)))
        return "".join(texts)

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        if operator == "*":
            if isinstance(left, int) and isinstance(right, int):
                _check_size(left.bit_length() + right.bit_length(), _MAX_INTEGER_BITS)
            for one, other in ((left, right), (right, left)):
                if isinstance(one, str | bytes | list | tuple) and isinstance(other, int):
                    _check_size(len(one) * other)
        elif operator == "+":
            if isinstance(left, str | bytes | list | tuple) and hasattr(right, "__len__"):
                _check_size(len(left) + len(right))
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_size(left.bit_length() * right, _MAX_INTEGER_BITS)
        elif operator == "%":
            _check_format(left)
        return super().call_binop(context, operator, left, right)

    def getattr(self, obj: Any, attribute: str) -> Any:
        if attribute in ("format", "format_map"):
            _check_format(obj)
        return super().getattr(obj, attribute)

    def call(self, context: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(getattr(function, "__self__", None), str | bytes):
            _check_widths(args, kwargs)
        return super().call(context, function, *args, **kwargs)


def _check_size(size: int, limit: int = _MAX_OUTPUT_CHARS) -> None:
    if size > limit:
        raise _TemplateRefusalError(f"a value of size {size} is too large")


def _check_widths(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Refuse to pad to a huge width."""
    for value in (*args, *kwargs.values()):
        _check_size(value if isinstance(value, int) else 0)


def _check_format(text: Any) -> None:
    if isinstance(text, str) and _HUGE_WIDTH.search(text):
        raise _TemplateRefusalError(f"the width in {text!r:.80} is too large")


def _format(text: Any, *args: Any, **kwargs: Any) -> str:
    _check_format(text)
    return jinja2.filters.do_format(text, *args, **kwargs)


def _guard(filter_: Callable[..., Any]) -> Callable[..., Any]:
    def guarded(value: Any, *args: Any, **kwargs: Any) -> Any:
        _check_widths(args, kwargs)
        return filter_(value, *args, **kwargs)

    return guarded


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[jinja2.ext.loopcontrols, _GenerationTag],
    )
    for name in ("batch", "center", "indent", "slice"):
        environment.filters[name] = _guard(environment.filters[name])
    environment.filters["format"] = _format
    environment.filters["tojson"] = _to_json
    del environment.globals["lipsum"]  # no template needs filler text, of any length
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}`` marks the assistant's text for training; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models were trained on it: Jinja's own filter would escape for HTML."""
    _check_size(_count_values([value]), _MAX_JSON_VALUES)
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _count_values(queue: list[Any]) -> int:
    """How many values JSON of ``queue`` has; stops soon after the limit."""
    count = 0
    while queue and count <= _MAX_JSON_VALUES:
        value = queue.pop()
        count += 1
        if isinstance(value, Mapping):
            queue.extend(value.values())
        elif isinstance(value, list | tuple):
            queue.extend(value)
    return count


def _raise_exception(message: str) -> None:
    raise _TemplateRefusalError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)
