"""Parts a finished answer into thoughts and content: `LLM.extract_reasoning`.

Uses the server's parsers, and works from ids where marks are special tokens, which an answer's text
does not show. Which marks there are, the chat template tells.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tellin.entrypoints.openai.parsers.events import join
from tellin.entrypoints.openai.parsers.harmony import HarmonyParser
from tellin.entrypoints.openai.parsers.message import AnswerParser, MessageParser
from tellin.entrypoints.openai.parsers.reasoning import ThinkParser
from tellin.entrypoints.openai.parsers.registry import (
    answer_marks,
    template_is_harmony,
    thought_marks,
)
from tellin.exceptions import InvalidParameterError
from tellin.outputs import CompletionOutput, RequestOutput

if TYPE_CHECKING:
    from tellin.entrypoints.llm import LLM


def extract_reasoning(llm: LLM, output: RequestOutput, index: int) -> tuple[str | None, str]:
    """See `LLM.extract_reasoning`."""
    if not isinstance(output, RequestOutput) or not 0 <= index < len(output.outputs):
        raise InvalidParameterError(
            "extract_reasoning needs an output of chat() or generate(), and the index of one of "
            f"its completions; got {type(output).__name__} and {index!r}",
            parameter="index",
            value=index,
        )
    completion = output.outputs[index]
    template = llm.model_config.chat_template or ""
    parser: AnswerParser
    if template_is_harmony(template):
        parser, has_special_marks = HarmonyParser(), True
    else:
        marks = thought_marks(template)
        if marks is None:
            return None, completion.text
        opening, closing = marks
        prompt = output.prompt or ""
        think = ThinkParser(prompt.rstrip().endswith(opening), opening=opening, closing=closing)
        parser = MessageParser(think, None, answer_marks=answer_marks(template))
        tokenizer = llm.get_tokenizer()
        special = tokenizer.convert_ids_to_tokens(sorted(tokenizer.all_special_ids))
        has_special_marks = any(mark.startswith(text) for mark in marks for text in special if text)
    text = _whole_text(llm, completion) if has_special_marks else completion.text
    message = join([parser.feed(text), parser.finish()])
    return message.reasoning or None, message.content


def _whole_text(llm: LLM, completion: CompletionOutput) -> str:
    """An answer's text with its special tokens, up to what ended it."""
    ids = list(completion.token_ids)
    ended_by_id = completion.finish_reason == "stop" and not isinstance(completion.stop_reason, str)
    if ended_by_id and ids:
        ids.pop()
    text = llm.get_tokenizer().decode(ids, skip_special_tokens=False)
    if isinstance(completion.stop_reason, str):
        text = text[: max(text.rfind(completion.stop_reason), 0)] or text
    return text
