"""How the served model's chat template shows tools and thoughts: found out once, at start.

A template that knows no tools is helped: definitions go into the system message, calls and their
results in the history become text in Hermes' format, and so a request never loses a part silently.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping, Sequence
from typing import Any

from tellin.config import ReasoningConfig
from tellin.engine.renderer import ChatTokenizer
from tellin.entrypoints.openai.errors import bad_request
from tellin.entrypoints.openai.parsers.base import ToolParser
from tellin.entrypoints.openai.parsers.harmony import FINAL, HarmonyParser
from tellin.entrypoints.openai.parsers.message import AnswerParser, CallReader, MessageParser
from tellin.entrypoints.openai.parsers.pythonic import Lfm2Parser, written_calls
from tellin.entrypoints.openai.parsers.reasoning import (
    CLOSING,
    OPENING,
    REASONING_PARSERS,
    ThinkParser,
)
from tellin.entrypoints.openai.parsers.registry import (
    TOOL_PARSERS,
    answer_marks,
    guess_tool_parser,
    template_has_tools,
    template_is_harmony,
    thought_marks,
)
from tellin.entrypoints.openai.server_config import ServerConfig

_TOOLS_TEXT = """\
You may call these functions. Each line is the JSON definition of one:
{definitions}
To call one, answer with its name and its arguments as a JSON object, like this:
<tool_call>
{{"name": "function_name", "arguments": {{"argument": "value"}}}}
</tool_call>
Write one such block per call, and nothing else when you call."""


class Constraint(enum.Enum):
    """What a grammar says of an answer."""

    NONE = enum.auto()
    """There is none."""
    TEXT = enum.auto()
    """It describes a text, in which there may be thoughts."""
    ANSWER = enum.auto()
    """It describes the answer alone: where grammars do not wait for thoughts there are none."""


class ChatFormat:
    """Facts about one model's chat format."""

    def __init__(
        self,
        config: ServerConfig,
        chat_template: str | None,
        tokenizer: ChatTokenizer | None,
        gate: ReasoningConfig | None = None,
    ) -> None:
        """``gate``: what the engine's grammars wait for, if they leave thoughts free."""
        template = chat_template or ""
        self.has_tools = template_has_tools(template)
        self.has_effort = "reasoning_effort" in template
        self.has_thinking_switch = "enable_thinking" in template
        name = config.tool_call_parser
        if name == "auto":
            name = guess_tool_parser(template) if self.has_tools else "hermes"
        self.tool_parser_name = name
        self.tool_parser: type[ToolParser] = TOOL_PARSERS[name]
        self._writes_calls = self.tool_parser is Lfm2Parser and "tool_calls" not in template
        marks, around_answer = thought_marks(template), answer_marks(template)
        if config.reasoning_parser in REASONING_PARSERS:
            named, around = REASONING_PARSERS[config.reasoning_parser]
            # "think" is for templates that do not show what their models write.
            marks = marks or named if config.reasoning_parser == "think" else named
            around_answer = around or around_answer
        self.thinks = config.reasoning_parser != "none" and marks is not None
        self._marks = marks or (OPENING, CLOSING)
        self._answer_marks = around_answer if self.thinks else None
        self.is_harmony = config.reasoning_parser == "auto" and template_is_harmony(template)
        self._gate = None if config.reasoning_parser == "none" else gate
        special = _special_texts(tokenizer)
        self._special_tool_markers = any(text in special for text in self.tool_parser.markers)
        self._special_think_markers = any(
            mark.startswith(text) for mark in self._marks for text in special if text
        )
        self._special_gate = gate is not None and gate.think_end_str in special

    def needs_special_tokens(self, has_tools: bool) -> bool:
        """Whether the parsers must see special tokens in the text."""
        return (
            self.is_harmony
            or (has_tools and self._special_tool_markers)
            or (self.thinks and self._special_think_markers)
            or (self._gate is not None and self._special_gate)
        )

    def reasoning_ended(self, prompt: str, constraint: Constraint) -> bool | None:
        """Whether ``prompt`` has ended the thoughts that a grammar waits for; None if none waits.

        The last mark in the text counts. The engine is told: from ids it could decide otherwise,
        where the marks are no tokens of their own.
        """
        gate = self._gate
        if constraint is Constraint.NONE or gate is None:
            return None
        return prompt.rfind(gate.think_end_str) > prompt.rfind(gate.think_start_str)

    def make_parser(
        self,
        prompt: str,
        constraint: Constraint,
        calls: CallReader | None,
        *,
        names: Sequence[str] = (),
        max_calls: int | None = None,
    ) -> AnswerParser:
        """The parser for one answer to ``prompt``.

        Args:
            calls: reads calls where the format does not mix them with thoughts; None: no tools.
            names: the tools of the request.
            max_calls: later calls are dropped.
        """
        if self.is_harmony and constraint is Constraint.NONE:
            return HarmonyParser(names, max_calls=max_calls)
        think = self.make_think_parser(prompt, constraint)
        marks = self._answer_marks if constraint is Constraint.NONE else None
        return MessageParser(think, calls, max_calls=max_calls, answer_marks=marks)

    def make_think_parser(self, prompt: str, constraint: Constraint) -> ThinkParser | None:
        """The parser of thoughts for an answer to ``prompt``; None if there are none."""
        gate = self._gate
        if constraint is not Constraint.NONE and gate is not None:
            if self.reasoning_ended(prompt, constraint):
                return None
            starts_inside = prompt.rstrip().endswith(gate.think_start_str)
            return ThinkParser(
                starts_inside,
                is_certain=True,
                opening=gate.think_start_str,
                closing=gate.think_end_str,
            )
        if constraint is Constraint.ANSWER or not self.thinks:
            return None
        opening, closing = self._marks
        starts_inside = prompt.rstrip().endswith(opening)
        return ThinkParser(starts_inside, opening=opening, closing=closing)

    def thought_marks(self, prompt: str, constraint: Constraint) -> tuple[str, str] | None:
        """Texts around the thoughts of an answer to ``prompt``; an empty first one: from the start.

        None if there are none, or if they are not parted from the answer.
        """
        gate = self._gate
        if constraint is not Constraint.NONE and gate is not None:
            ended = self.reasoning_ended(prompt, constraint)
            return None if ended else ("", gate.think_end_str)
        if self.is_harmony and constraint is Constraint.NONE:
            # Thoughts come first; what follows them has headers, in which no stop string counts.
            return "", FINAL
        if constraint is Constraint.ANSWER or not self.thinks:
            return None
        opening, closing = self._marks
        return ("" if prompt.rstrip().endswith(opening) else opening), closing

    def prepare(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[dict[str, Any]] | None
    ) -> tuple[list[dict[str, Any]], Sequence[dict[str, Any]] | None]:
        """Messages and tools as the template gets them.

        Raises:
            ApiError: a tool call or a tool's result in the history is malformed.
        """
        prepared = [_with_objects(message, i) for i, message in enumerate(messages)]
        if self.has_tools:
            if self._writes_calls:
                prepared = [_with_written_calls(message, i) for i, message in enumerate(prepared)]
            return prepared, tools
        prepared = [_as_text(message, i) for i, message in enumerate(prepared)]
        if tools:
            _add_to_system(prepared, _tools_text(tools))
        return prepared, None


def _special_texts(tokenizer: ChatTokenizer | None) -> set[str]:
    if tokenizer is None:
        return set()
    return set(tokenizer.convert_ids_to_tokens(sorted(tokenizer.all_special_ids)))


def _with_objects(message: Mapping[str, Any], position: int) -> dict[str, Any]:
    """A copy whose tool calls have their arguments as objects, which templates expect."""
    copy = dict(message)
    if copy.get("role") == "developer":  # OpenAI's newer name
        copy["role"] = "system"
    calls = copy.get("tool_calls")
    if calls is None:
        copy.pop("tool_calls", None)
        return copy
    where = f"messages[{position}].tool_calls"
    if not isinstance(calls, list):
        raise bad_request(f"{where} must be a list", "messages")
    if not calls:
        del copy["tool_calls"]
    else:
        copy["tool_calls"] = [_call_with_object(call, where) for call in calls]
    return copy


def _call_with_object(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise bad_request(f"{where}: each call needs a function with a name", "messages")
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            raise bad_request(f"{where}: arguments are not JSON: {error}", "messages") from None
    if not isinstance(arguments, dict):
        raise bad_request(f"{where}: arguments must be a JSON object", "messages")
    return {**call, "function": {**function, "arguments": arguments}}


def _with_written_calls(message: dict[str, Any], position: int) -> dict[str, Any]:
    """LFM2's template leaves it to the content to hold the calls that the model made."""
    calls = message.pop("tool_calls", None)
    if calls:
        functions = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
        content = _text_of(message.get("content"), position)
        message["content"] = written_calls(functions) + content
    return message


def _as_text(message: dict[str, Any], position: int) -> dict[str, Any]:
    """Tool calls and results written out, for a template that would drop them."""
    if message.get("role") == "tool":
        content = _text_of(message.get("content"), position)
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    calls = message.pop("tool_calls", None)
    if calls:
        blocks = [_text_of(message.get("content"), position)]
        for call in calls:
            function = call["function"]
            written = {"name": function["name"], "arguments": function["arguments"]}
            text = json.dumps(written, ensure_ascii=False)
            blocks.append(f"<tool_call>\n{text}\n</tool_call>")
        message["content"] = "\n".join(block for block in blocks if block)
    return message


def _text_of(content: Any, position: int) -> str:
    """A content's text, all parts of it; raises 400 for what is no text."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in content if isinstance(content, list) else [None]:
        text = part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str):
            raise bad_request(
                f"messages[{position}].content must be a string, null, or a list of text parts",
                "messages",
            )
        texts.append(text)
    return "\n".join(texts)


def _tools_text(tools: Sequence[dict[str, Any]]) -> str:
    lines = [json.dumps(tool["function"], ensure_ascii=False) for tool in tools]
    return _TOOLS_TEXT.format(definitions="\n".join(lines))


def _add_to_system(messages: list[dict[str, Any]], text: str) -> None:
    if messages[0].get("role") == "system":
        before = _text_of(messages[0].get("content"), 0)
        messages[0] = {**messages[0], "content": f"{before}\n\n{text}" if before else text}
    else:
        messages.insert(0, {"role": "system", "content": text})
