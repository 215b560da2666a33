"""How a choice of a chat answer says why it ended."""

from __future__ import annotations

import pytest

from tellin.entrypoints.openai.chat_choice import ChatChoiceWriter, ChoiceOptions
from tellin.entrypoints.openai.parsers.json_calls import NamedCallParser
from tellin.entrypoints.openai.parsers.message import MessageParser
from tellin.outputs import CompletionOutput


def writer() -> ChatChoiceWriter:
    options = ChoiceOptions(
        logprobs=None, return_token_ids=False, include_reasoning=True, id_length=24
    )
    return ChatChoiceWriter(0, MessageParser(None, NamedCallParser("f")), options)


@pytest.mark.parametrize(
    ("text", "ending", "cause", "expected"),
    [
        ('{"a": 1}', "stop", None, "tool_calls"),
        ('{"a": 1', "stop", "}", "stop"),
        ('{"a": 1}', "stop", "!", "tool_calls"),
        ('{"a": 1', "length", None, "length"),
        ('{"a": [1, 1, 1', "repetition", None, "stop"),
    ],
)
def test_a_call_that_was_cut_off_is_none_to_be_made(
    text: str, ending: str, cause: str | None, expected: str
) -> None:
    """A client that sees ``tool_calls`` may read the arguments as JSON, streamed or not."""
    whole = writer().whole(CompletionOutput(0, text, [1], finish_reason=ending, stop_reason=cause))
    assert whole.finish_reason == expected
    streamed = writer()
    chunks = []
    for position, char in enumerate(text):
        is_last = position == len(text) - 1
        output = CompletionOutput(0, char, [1])
        if is_last:
            output.finish_reason, output.stop_reason = ending, cause
        chunks += streamed.delta(output)
    assert chunks[-1].finish_reason == expected
    calls = [call for chunk in chunks for call in chunk.delta.tool_calls or ()]
    assert "".join(call.function.arguments for call in calls) == text
