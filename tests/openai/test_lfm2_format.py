"""LFM2's chat format: its template shows no calls, so that the content must hold them."""

from __future__ import annotations

import json

from tellin.entrypoints.openai.chat_format import ChatFormat
from tellin.entrypoints.openai.parsers.pythonic import Lfm2Parser
from tellin.entrypoints.openai.server_config import ServerConfig

TEMPLATE = (
    "{% if tools %}List of tools: <|tool_list_start|>{{ tools | tojson }}<|tool_list_end|>"
    "{% endif %}{% for message in messages %}{{ message.content }}{% endfor %}"
)
ARGUMENTS = {"a": 'x"y', "on": True, "none": None, "n": 1.5, "deep": {"k": ["é", False]}}


def test_calls_of_the_history_are_written_as_the_model_writes_them() -> None:
    """They read back as they were; what else the message said follows them."""
    function = {"name": "f", "arguments": json.dumps(ARGUMENTS)}
    message = {
        "role": "assistant",
        "content": "One moment.",
        "tool_calls": [{"id": "1", "type": "function", "function": function}],
    }
    tools = [{"type": "function", "function": {"name": "f"}}]
    chat_format = ChatFormat(ServerConfig(), TEMPLATE, None)
    prepared, given = chat_format.prepare([message, {"role": "tool", "content": "42"}], tools)
    content = prepared[0]["content"]
    assert content.startswith('<|tool_call_start|>[f(a="x\\"y", on=True, none=None, n=1.5, deep={')
    assert content.endswith(")]<|tool_call_end|>One moment.")
    assert "tool_calls" not in prepared[0]
    assert (prepared[1]["content"], given) == ("42", tools)
    parser = Lfm2Parser(["f"])
    deltas = [parser.feed(content), parser.finish()]
    calls = [call for delta in deltas for call in delta.calls]
    assert json.loads("".join(call.arguments for call in calls)) == ARGUMENTS
    assert "".join(delta.content for delta in deltas) == "One moment."


def test_a_template_that_shows_calls_gets_them() -> None:
    template = TEMPLATE + "{{ messages[0].tool_calls }}"
    call = {"id": "1", "function": {"name": "f", "arguments": "{}"}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    prepared, _ = ChatFormat(ServerConfig(), template, None).prepare([message], None)
    assert prepared[0]["tool_calls"][0]["function"] == {"name": "f", "arguments": {}}
