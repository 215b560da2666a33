"""The environment that chat templates run in: Jinja's immutable sandbox, with bounds.

A template is a stranger's program. Jinja keeps it from files and objects; here are bounds of the
processor's time, which loops, macros, calls and filters look at, and of memory: every value that an
operator, a filter or a literal makes is measured first. A small list that holds one list twice, and
so on, counts as what it would be as text. Values are measured in characters, widths count as such.
The functions and white space are those that templates are written for: ``apply_chat_template``'s.
"""

from __future__ import annotations

import datetime
import functools
import inspect
import json
import re
import string
import threading
import time
from collections.abc import Callable, Iterable, Mapping, MappingView
from typing import Any, cast

import jinja2
import jinja2.ext
import jinja2.filters
import jinja2.nodes
import jinja2.sandbox
import jinja2.utils
import jinja2.visitor

_MAX_SECONDS = 5.0
"""Processor time of one rendering: real templates take milliseconds for long conversations."""
_MAX_SIZE = 64 << 20
"""Of one value: more than any context holds."""
_MAX_MADE = 1 << 30
"""Of all values that one rendering makes, one after the other."""
_MAX_COUNT = 1 << 20
"""Of lists that one filter makes, and characters times characters where a search is that slow."""
_MAX_INTEGER_BITS = 1 << 16
_WEIGHT = 32
"""Of a value that is no text, in characters: about its share of memory."""
_MAX_WIDTH_DIGITS = 6
_PERCENT = re.compile(r"%[-+ #.*\d]*")
_NAMED_PERCENT = re.compile(r"%[-+ #.*\d]*|\)[-+ #.\d]*")
"""Flags and widths of a text for ``%``; a name's end is where its closing parenthesis may be."""
_LINE_BREAKS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
_CONTAINERS = (list, tuple, set, frozenset, Mapping, MappingView)
_SLOW_SEARCHES = ("lstrip", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "strip", "trim")
_METHODS: dict[str, tuple[str, ...]] = {
    "replace": ("old", "new", "count"),
    "translate": ("table",),
    "expandtabs": ("tabsize",),
    "to_bytes": ("length",),
    **dict.fromkeys(("center", "ljust", "rjust", "zfill"), ("width",)),
    **dict.fromkeys(("join", *_SLOW_SEARCHES), ("text",)),
}
"""Methods of texts and integers that are measured, and their parameters by position."""
_FILTERS = frozenset(
    ("batch", "center", "indent", "join", "replace", "round", "slice", "sum", "trim", "wordwrap")
)
"""Filters whose arguments decide how much they make."""


class TemplateRefusalError(Exception):
    """A template refuses the conversation, or is refused itself."""


# ---- what a rendering may use --------------------------------------------------------------------


class _Budget(threading.local):
    """Processor time and memory of the rendering that runs in a thread."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        self._end = time.thread_time() + _MAX_SECONDS
        self._made = 0
        self._sizes: dict[int, tuple[Any, int]] = {}  # by identity; values stay alive

    def end(self) -> None:
        """Let go of what the rendering made."""
        self._sizes = {}

    def spend(self, size: int = 0) -> None:
        """A round of a loop, a macro or a filter begins, and writes ``size`` characters."""
        if time.thread_time() > self._end:
            raise TemplateRefusalError(f"it takes more than {_MAX_SECONDS:g} s")
        self._made += size
        if self._made > _MAX_MADE:
            raise TemplateRefusalError(f"it makes values of more than {_MAX_MADE} characters")

    def make(self, size: int) -> None:
        """A value of this size is made."""
        check_size(size)
        self.spend(size)

    def add(self, value: Any, size: int) -> None:
        """``value`` was just made of others, whose sizes are known."""
        if isinstance(value, _CONTAINERS):
            self._sizes[id(value)] = (value, size)
            self.spend(_WEIGHT * len(value))
        elif isinstance(value, str | bytes):
            self.spend(len(value))

    def measure(self, value: Any) -> Any:
        """``value``, which was just made of others."""
        if isinstance(value, _CONTAINERS):
            self.size_of(value)
            self.spend(_WEIGHT * len(value))
        return value

    def size_of(self, value: Any) -> int:
        """Characters that a value has, or would have as text; refuses more than allowed.

        No value changes while a template runs, so each is walked through once.
        """
        if isinstance(value, str | bytes):
            return len(value)
        size, queue, root = 0, [value], value
        while queue:
            value = queue.pop()
            known = self._sizes.get(id(value))
            if known is not None:
                size += known[1]
            elif isinstance(value, str | bytes):
                size += len(value)
            elif isinstance(value, _CONTAINERS):
                size += _WEIGHT
                queue.extend(cast("Iterable[Any]", value))
                if isinstance(value, Mapping):
                    queue.extend(value.values())
            elif isinstance(value, jinja2.utils.Namespace):
                raise TemplateRefusalError("a namespace is no text")
            else:
                is_large = isinstance(value, int) and value.bit_length() > 64
                size += value.bit_length() if is_large else _WEIGHT
            check_size(size)
        if isinstance(root, _CONTAINERS):
            self._sizes[id(root)] = (root, size)
        return size


budget = _Budget()


def check_size(size: int, limit: int = _MAX_SIZE) -> None:
    if size > limit:
        raise TemplateRefusalError(f"a value of size {size} is too large")


# ---- operators and literals ----------------------------------------------------------------------


class _Bounds(jinja2.visitor.NodeTransformer):
    """Puts the budget into loops, macros and literals, and a limit onto ``~``."""

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.Node:  # noqa: N802
        return self._watch(node)

    def visit_Macro(self, node: jinja2.nodes.Macro) -> jinja2.nodes.Node:  # noqa: N802
        return self._watch(node)

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _call_of("concatenate", node.nodes, node.lineno)

    def visit_List(self, node: jinja2.nodes.List) -> jinja2.nodes.Node:  # noqa: N802
        return self._measured(node)

    def visit_Dict(self, node: jinja2.nodes.Dict) -> jinja2.nodes.Node:  # noqa: N802
        return self._measured(node)

    def visit_Tuple(self, node: jinja2.nodes.Tuple) -> jinja2.nodes.Node:  # noqa: N802
        return self._measured(node) if node.ctx == "load" else node

    def _measured(self, node: jinja2.nodes.Expr) -> jinja2.nodes.Node:
        self.generic_visit(node)
        return _call_of("measure", [node], node.lineno)

    def _watch(self, node: jinja2.nodes.For | jinja2.nodes.Macro) -> jinja2.nodes.Node:
        self.generic_visit(node)
        size = sum(len(text.data) for text in node.find_all(jinja2.nodes.TemplateData))
        written = jinja2.nodes.Const(size, lineno=node.lineno)
        look = jinja2.nodes.ExprStmt(_call_of("spend", [written], node.lineno), lineno=node.lineno)
        node.body.insert(0, look)
        return node


def _call_of(method: str, arguments: list[Any], lineno: int) -> jinja2.nodes.Call:
    """A call of one of the environment's own methods."""
    function = jinja2.nodes.EnvironmentAttribute(method, lineno=lineno)
    return jinja2.nodes.Call(function, arguments, [], None, None, lineno=lineno)


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox, which also bounds time and refuses to make huge values."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "**", "%"})

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        tree = _Bounds().visit(super()._parse(source, name, filename))
        tree.set_environment(self)
        return cast("jinja2.nodes.Template", tree)

    def spend(self, size: int) -> None:
        """Part of every loop and macro."""
        budget.spend(size)

    def measure(self, value: Any) -> Any:
        """Part of every literal that holds values."""
        return budget.measure(value)

    def concatenate(self, *values: Any) -> str:
        """The operator ``~``."""
        budget.make(sum(map(budget.size_of, values)))
        return "".join(map(str, values))

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        size = 0
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else 0
            bits = bits or left.bit_length() + right.bit_length()
            check_size(bits, _MAX_INTEGER_BITS)
        elif operator == "*":
            for one, other in ((left, right), (right, left)):
                if isinstance(one, str | bytes | list | tuple) and isinstance(other, int):
                    size = budget.size_of(one) * max(other, 0)
        elif operator == "+" and isinstance(left, str | bytes | list | tuple):
            size = budget.size_of(left) + budget.size_of(right)
        elif operator == "%" and isinstance(left, str | bytes):
            _check_percent(left, (right,))
        check_size(size)
        result = super().call_binop(context, operator, left, right)
        budget.add(result, size)
        return result

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def guarded(*args: Any, **kwargs: Any) -> str:
            _check_braces(value.__self__, (*args, *kwargs.values()))
            return wrapped(*args, **kwargs)

        return guarded

    def call(self, context: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(function, "__self__", None)
        if isinstance(owner, str | bytes | int):
            name = function.__name__
            if name == "join":
                args = tuple(map(_as_list, args))
            _check_sizes(args, kwargs)
            if name in _METHODS:
                given = dict(zip(_METHODS[name], args, strict=False)) | kwargs
                _check_work(name, owner, given)
        budget.spend()
        return super().call(context, function, *args, **kwargs)


# ---- filters and methods of texts ----------------------------------------------------------------


def _check_percent(text: str | bytes, args: tuple[Any, ...]) -> None:
    """Refuse what ``%`` would make too large."""
    shown = text.decode("latin-1") if isinstance(text, bytes) else text
    pattern = _NAMED_PERCENT if "%(" in shown else _PERCENT
    _check_format(text, (found.group() for found in pattern.finditer(shown)), "*", args)


def _check_braces(text: str, args: tuple[Any, ...]) -> None:
    """Refuse what ``format`` would make too large."""
    fields = string.Formatter().parse(text)
    _check_format(text, (spec or "" for _, _, spec, _ in fields), "{", args)


def _check_format(
    text: str | bytes, specs: Iterable[str], elsewhere: str, args: tuple[Any, ...]
) -> None:
    """``elsewhere`` is the sign of a width that an argument gives: always refused."""
    num_fields = width = 0
    for spec in specs:
        budget.spend()
        numbers = re.findall(r"\d+", spec)
        if elsewhere in spec or any(len(number) > _MAX_WIDTH_DIGITS for number in numbers):
            raise TemplateRefusalError(f"the width in {text!r:.80} is too large")
        num_fields += 1
        width += sum(map(int, numbers))
    budget.make(len(text) + width + num_fields * sum(map(budget.size_of, args)))


def _check_sizes(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    for value in (*args, *kwargs.values()):
        if _is_sized(value):
            check_size(budget.size_of(value))


def _check_work(name: str, value: Any, given: Mapping[str, Any]) -> None:
    """Refuse a filter or a method whose result, or whose work, would be huge.

    ``given``: its arguments by the names of the parameters.
    """
    size = budget.size_of(value) if _is_sized(value) else 0
    if name == "replace":
        _check_replace(value, given)
    elif name == "join":
        _check_join(value, given)
    elif name in ("indent", "expandtabs") and isinstance(value, str | bytes):
        width = given.get("width", 4) if name == "indent" else given.get("tabsize", 8)
        marks = _LINE_BREAKS if name == "indent" else "\t"
        shown = value.decode("latin-1") if isinstance(value, bytes) else value
        count = sum(map(shown.count, marks)) + 1
        budget.make(size + count * (width if isinstance(width, int) else _len(width)))
    elif name in ("center", "ljust", "rjust", "zfill", "to_bytes"):
        width = given.get("length" if name == "to_bytes" else "width")
        check_size(width if isinstance(width, int) else 0)
    elif name == "wordwrap":
        budget.make(size * (1 + _len(given.get("wrapstring"))))
    elif name == "translate":
        table = given.get("table")
        values = table.values() if isinstance(table, Mapping) else table
        longest = max(map(_len, values), default=0) if isinstance(values, Iterable) else 0
        budget.make(size * (1 + longest))
    elif name in _SLOW_SEARCHES:
        longest = max(map(_len, given.values()), default=0)
        check_size(size * longest, _MAX_COUNT * _WEIGHT * _WEIGHT)
    elif name in ("batch", "slice"):
        length = given.get("linecount" if name == "batch" else "slices")
        check_size(length if isinstance(length, int) else 0, _MAX_COUNT)
    elif name == "round":
        digits = given.get("precision")
        check_size(abs(digits) if isinstance(digits, int) else 0, _MAX_INTEGER_BITS // 64)
    elif name == "sum" and _is_sized(given.get("start")):
        check_size(_len(value) ** 2, _MAX_COUNT * _WEIGHT)


def _check_replace(value: Any, given: Mapping[str, Any]) -> None:
    """The filter takes anything as text; the method of bytes takes bytes."""
    old, new = given.get("old"), given.get("new")
    for one in (value, old, new):
        budget.size_of(one)
    if isinstance(value, bytes):
        count = value.count(old) if isinstance(old, bytes) else 0
    else:
        value, new = str(value), str(new)
        count = value.count(str(old))
    most = given.get("count")
    if isinstance(most, int) and most >= 0:
        count = min(count, most)
    budget.make(len(value) + count * _len(new))


def _check_join(value: Any, given: Mapping[str, Any]) -> None:
    """The filter's value holds the parts, the method's is what comes between them."""
    parts, between = (given["text"], value) if "text" in given else (value, given.get("d", ""))
    size = budget.size_of(parts) if _is_sized(parts) else 0
    budget.make(size + budget.size_of(between) * _len(parts))


def _as_list(value: Any) -> Any:
    """``value``, so that measuring it does not use it up."""
    if _is_sized(value) or not isinstance(value, Iterable):
        return value
    return budget.measure(list(value))


def _is_sized(value: Any) -> bool:
    return isinstance(value, (str, bytes, *_CONTAINERS))


def _len(value: Any) -> int:
    return len(value) if _is_sized(value) else 0


_READ_TWICE = ("join", "sum")
"""Filters whose input is measured before they take it, so that it must not be used up by that."""


def _guard(name: str, filter_: Callable[..., Any]) -> Callable[..., Any]:
    """The filter, measured before and after. Some get the environment, or so, as first argument."""

    signature = _signature_of(filter_) if name in _FILTERS else None

    @functools.wraps(filter_)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        index = int(hasattr(filter_, "jinja_pass_arg"))
        head, value, rest = args[:index], args[index], args[index + 1 :]
        if name in _READ_TWICE:
            value = _as_list(value)
        _check_sizes((value, *rest), kwargs)
        if name == "format":
            _check_percent(str(value), (*rest, *kwargs.values()))
        elif signature is not None:
            _, *given = signature.bind(value, *rest, **kwargs).arguments.items()
            _check_work(name, value, dict(given))
        result = filter_(*head, value, *rest, **kwargs)
        budget.spend(len(result) if isinstance(result, str) else _WEIGHT * _len(result))
        return result

    return guarded


def _signature_of(filter_: Callable[..., Any]) -> inspect.Signature:
    """Of a filter as templates call it: without the environment, or so."""
    original = inspect.unwrap(filter_)
    parameters = list(inspect.signature(original).parameters.values())
    return inspect.Signature(parameters[int(hasattr(original, "jinja_pass_arg")) :])


def _finalize(value: Any) -> Any:
    """What is written out, into the prompt or into a variable."""
    if not isinstance(value, jinja2.Undefined):
        budget.make(budget.size_of(value))
    return value


def make_environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """An environment for templates; those of one environment may run in several threads."""
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_finalize,
        extensions=[jinja2.ext.loopcontrols, _GenerationTag],
    )
    environment.filters["tojson"] = _to_json
    for name in ("urlize", "xmlattr"):  # of web pages, with searches that no size bounds
        del environment.filters[name]
    for name, filter_ in environment.filters.items():
        environment.filters[name] = _guard(name, filter_)
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
    if isinstance(indent, int | str):
        check_size(indent if isinstance(indent, int) else len(indent), _WEIGHT)
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise TemplateRefusalError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)
