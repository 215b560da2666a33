"""Tool calls written as JSON: Hermes and Qwen, Llama 3, Mistral, Cohere, and a bare array."""

from __future__ import annotations

from collections.abc import Collection

from tellin.entrypoints.openai.parsers.base import ToolParser
from tellin.entrypoints.openai.parsers.json_scanner import NAME_KEYS, CallScanner, ValueScanner


class JsonCallParser(ToolParser):
    """Base: call objects one after another, with something between them."""

    only_known_names = False
    """Whether an object is a call only if it names a tool of the request."""
    name_keys = NAME_KEYS
    """Under which of these keys an object names its function."""

    def __init__(self, tool_names: Collection[str]) -> None:
        super().__init__(tool_names)
        self._object: CallScanner | None = None
        self._is_announced = False

    def _begin_object(self) -> None:
        self._object, self._is_announced = CallScanner(self.name_keys), False
        self._state = self._in_object

    def _in_object(self, char: str) -> None:
        scanner = self._object
        assert scanner is not None
        arguments = scanner.push(char)
        if scanner.name is not None and not self._is_announced:
            if self.only_known_names and scanner.name not in self.tool_names:
                self._object = None
                self._back_to_content(self._raw_prefix() + scanner.raw)
                return
            self._is_announced = True
            self._begin_call(scanner.name)
        self._add_arguments(arguments)
        if scanner.done:
            self._object = None
            self._after_object()
        elif scanner.failed:
            self._object = None
            # A call that was announced cannot be taken back; the rest of it is dropped.
            self._back_to_content("" if self._is_announced else self._raw_prefix() + scanner.raw)

    def _after_object(self) -> None:
        raise NotImplementedError

    def _raw_prefix(self) -> str:
        """What was read before the object and belongs to it, should it be no call."""
        return ""

    def _end(self) -> None:
        if self._object is not None and not self._is_announced:
            self._emit_content(self._raw_prefix() + self._object.raw)


class HermesParser(JsonCallParser):
    """``<tool_call>{"name": ..., "arguments": ...}</tool_call>``, any number of times."""

    markers = ("<tool_call>",)
    closing = "</tool_call>"

    def _begin(self, marker: str) -> None:
        self._before = marker
        self._state = self._before_object

    def _before_object(self, char: str) -> None:
        self._before += char
        if char == "{":
            self._begin_object()
        elif not char.isspace():
            self._back_to_content(self._before)

    def _raw_prefix(self) -> str:
        return self._before[:-1]

    def _after_object(self) -> None:
        self._before = "{"
        self._expect_closing()

    def _before_closing(self, char: str) -> None:
        if not self._tail and char == "{":  # a second object without markers of its own
            self._begin_object()
        else:
            super()._before_closing(char)

    def _end(self) -> None:
        if self._state == self._before_object:
            self._emit_content(self._before)
        super()._end()


class Llama3JsonParser(JsonCallParser):
    """The whole answer is ``{"name": ..., "parameters": ...}``, several of them parted by ``;``."""

    markers = ("<|python_tag|>",)
    only_known_names = True

    def __init__(self, tool_names: Collection[str]) -> None:
        super().__init__(tool_names)
        self._before = ""
        self._state = self._at_start

    def _at_start(self, char: str) -> None:
        if char == "{":
            self._begin_object()
        elif char.isspace():
            self._before += char
        else:
            before, self._before = self._before, ""
            self._state = self._in_content
            for again in before + char:
                self._in_content(again)

    def _begin(self, marker: str) -> None:
        self._before = ""
        self._state = self._at_start

    def _raw_prefix(self) -> str:
        return self._before

    def _after_object(self) -> None:
        self._before = ""
        self._state = self._between

    def _between(self, char: str) -> None:
        self._before += char
        if char == "{":
            self._before = self._before[:-1]
            self._begin_object()
        elif not char.isspace() and char != ";":
            before, self._before = self._before, ""
            self._back_to_content()
            for again in before.lstrip():
                self._in_content(again)

    def _end(self) -> None:
        if self._state == self._at_start:
            self._emit_content(self._before)
        super()._end()


class ArrayParser(JsonCallParser):
    """``[{"name": ..., "arguments": ...}, ...]`` and nothing else: what a grammar has forced."""

    def __init__(self, tool_names: Collection[str]) -> None:
        super().__init__(tool_names)
        self._state = self._between

    def _between(self, char: str) -> None:
        if char == "{":
            self._begin_object()
        elif not char.isspace() and char not in "[,]":
            self._back_to_content(char)

    def _after_object(self) -> None:
        self._state = self._between


class MistralParser(JsonCallParser):
    """``[TOOL_CALLS][{...}, ...]``, or ``[TOOL_CALLS]name{...}`` (with ``[ARGS]`` between)."""

    markers = ("[TOOL_CALLS]",)
    id_length = 9

    def _begin(self, marker: str) -> None:
        self._before = marker
        self._name = ""
        self._state = self._after_marker

    def _raw_prefix(self) -> str:
        return self._before[:-1] if self._before else ""

    def _after_marker(self, char: str) -> None:
        self._before += char
        if char == "[":
            self._state = self._in_array
        elif char == "{":
            self._begin_object()
        elif not char.isspace():
            self._name = char
            self._state = self._in_name

    def _in_array(self, char: str) -> None:
        self._before += char
        if char == "{":
            self._begin_object()
        elif char == "]":
            self._end_array()
        elif not char.isspace() and char != ",":
            self._back_to_content(self._before)

    def _end_array(self) -> None:
        self._back_to_content()

    def _after_object(self) -> None:
        self._before = ""
        self._state = self._in_array

    def _in_name(self, char: str) -> None:
        self._before += char
        if char == "{":
            name = self._name.strip().removesuffix("[ARGS]").split("[CALL_ID]")[0].strip()
            self._begin_call(name, char)
            self._value = ValueScanner(char)
            self._state = self._in_arguments
        else:
            self._name += char
            if len(self._name) > 256 or char == "\n":
                self._back_to_content(self._before)

    def _in_arguments(self, char: str) -> None:
        self._add_arguments(char)
        if self._value.push(char)[1]:
            self._back_to_content()

    def _end(self) -> None:
        super()._end()
        if self._state in (self._after_marker, self._in_name):
            self._emit_content(self._before)


class NemotronParser(MistralParser):
    """``<TOOLCALL>[{"name": ..., "arguments": ...}, ...]</TOOLCALL>``."""

    markers = ("<TOOLCALL>",)
    closing = "</TOOLCALL>"
    id_length = ToolParser.id_length

    def _after_marker(self, char: str) -> None:
        self._before += char
        if char == "[":
            self._state = self._in_array
        elif not char.isspace():
            self._back_to_content(self._before)

    def _end_array(self) -> None:
        self._expect_closing()


class HunyuanParser(NemotronParser):
    """``<tool_calls>[{"name": ..., "arguments": ...}, ...]</tool_calls>``."""

    markers = ("<tool_calls>",)
    closing = "</tool_calls>"


class CohereParser(NemotronParser):
    """``<|START_ACTION|>[{"tool_name": ..., "parameters": ...}, ...]<|END_ACTION|>``.

    Objects have a number besides, as ``tool_call_id``.
    """

    markers = ("<|START_ACTION|>",)
    closing = "<|END_ACTION|>"
    name_keys = ("tool_name",)


class NamedCallParser(ToolParser):
    """Everything is the arguments of one function, which the request named."""

    def __init__(self, name: str) -> None:
        super().__init__([name])
        self._name = name
        self._state = self._first

    def _first(self, char: str) -> None:
        if not char.isspace():
            self._begin_call(self._name, char)
            self._state = self._add_arguments
