"""Which parser suits which model."""

from __future__ import annotations

from tellin.entrypoints.openai.parsers.apertus import ApertusParser
from tellin.entrypoints.openai.parsers.base import ToolParser
from tellin.entrypoints.openai.parsers.gemma import GemmaParser
from tellin.entrypoints.openai.parsers.json_calls import (
    CohereParser,
    HermesParser,
    HunyuanParser,
    Llama3JsonParser,
    MistralParser,
    NemotronParser,
)
from tellin.entrypoints.openai.parsers.pythonic import Lfm2Parser, PythonicParser
from tellin.entrypoints.openai.parsers.qwen_xml import MiniMaxParser, QwenXmlParser, SeedParser
from tellin.entrypoints.openai.parsers.reasoning import (
    ANSWER_MARKS,
    CLOSING,
    OPENING,
    THOUGHT_MARKS,
)

TOOL_PARSERS: dict[str, type[ToolParser]] = {
    "hermes": HermesParser,
    "llama3_json": Llama3JsonParser,
    "mistral": MistralParser,
    "pythonic": PythonicParser,
    "gemma": GemmaParser,
    "lfm2": Lfm2Parser,
    "nemotron_json": NemotronParser,
    "qwen3_coder": QwenXmlParser,
    "qwen3_xml": QwenXmlParser,
    "apertus": ApertusParser,
    "cohere": CohereParser,
    "ernie45": HermesParser,
    "hunyuan_a13b": HunyuanParser,
    "minimax_m2": MiniMaxParser,
    "seed_oss": SeedParser,
}

_SIGNS = (
    ("<seed:tool_call>", "seed_oss"),
    ("<minimax:tool_call>", "minimax_m2"),
    ("<tool_calls>", "hunyuan_a13b"),
    ("<|START_ACTION|>", "cohere"),
    ("<|tools_prefix|>", "apertus"),
    ("<function=", "qwen3_coder"),
    ("<tool_call>", "hermes"),
    ("[TOOL_CALLS]", "mistral"),
    ("<TOOLCALL>", "nemotron_json"),
    ("<start_function_call>", "gemma"),
    ("<|tool_call>", "gemma"),
    ("<|tool_call_start|>", "lfm2"),
    ("<|tool_list_start|>", "lfm2"),
    ("<|python_start|>", "pythonic"),
    ("[func_name1(", "pythonic"),
    ("<|python_tag|>", "llama3_json"),
    ('"parameters"', "llama3_json"),
)
"""Texts in a chat template that tell the format; the first that is found counts."""


def guess_tool_parser(chat_template: str) -> str:
    """Name of the parser for the format that a template asks for; Hermes where none is told."""
    return next((name for sign, name in _SIGNS if sign in chat_template), "hermes")


def template_has_tools(chat_template: str) -> bool:
    """Whether a template shows the model the tools of a request."""
    return "tools" in chat_template


def thought_marks(chat_template: str) -> tuple[str, str] | None:
    """What a template's model writes around its thoughts; None if it writes none down."""
    if OPENING in chat_template or CLOSING in chat_template:
        return OPENING, CLOSING
    return _both_in(chat_template, THOUGHT_MARKS)


def answer_marks(chat_template: str) -> tuple[str, str] | None:
    """What a template's model writes around its answer; None if it writes nothing so."""
    return _both_in(chat_template, ANSWER_MARKS)


def _both_in(chat_template: str, pairs: tuple[tuple[str, str], ...]) -> tuple[str, str] | None:
    return next((pair for pair in pairs if all(mark in chat_template for mark in pair)), None)


def template_is_harmony(chat_template: str) -> bool:
    """Whether a template writes messages on channels, as gpt-oss does."""
    return "<|channel|>" in chat_template and "<|message|>" in chat_template
