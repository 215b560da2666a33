"""Chat templates: Jinja programs that come with models, run in a sandbox.

A template is a stranger's program. It runs in Jinja's immutable sandbox, sees the conversation and
nothing else, and its failures are the request's: they become request errors that carry its words.
What it may use of time and memory is bounded (`tellin.loading.template_sandbox`).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from tellin.exceptions import InvalidParameterError, RequestError
from tellin.loading.template_sandbox import TemplateRefusalError, budget, make_environment

_MAX_OUTPUT_CHARS = 64 << 20
"""More than any context holds; a template that loops over itself stops here."""
_MARK = "\ue000end-of-final-message\ue001"
_MARK_SPACE = "\u2003"
"""White space behind the mark that no template writes itself: it is gone if content was trimmed."""


class ChatTemplate:
    """A compiled template.

    Raises:
        InvalidParameterError: the text is not a valid template.
    """

    def __init__(self, text: str) -> None:
        budget.start()
        try:
            self._template = make_environment().from_string(text)
        except (jinja2.TemplateError, RecursionError, TemplateRefusalError) as error:
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
        budget.start()
        try:
            for part in self._template.generate(context):
                num_chars += len(part)
                if num_chars > _MAX_OUTPUT_CHARS:
                    raise TemplateRefusalError(
                        f"more than {_MAX_OUTPUT_CHARS} characters of output"
                    )
                parts.append(part)
        except TemplateRefusalError as error:
            raise RequestError(f"the chat template refused the conversation: {error}") from None
        except Exception as error:
            # Template code can raise anything that Python can (a missing key, a sum of text and
            # number); all of it means that this conversation does not suit this template.
            raise RequestError(
                f"the chat template failed on this conversation: {type(error).__name__}: {error}"
            ) from None
        finally:
            budget.end()
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
