"""``/v1/messages`` with the real ``anthropic`` package."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from tests.openai.conftest import Serve, Server
from tests.openai.test_thoughts import THINKING_TEMPLATE

NOW: dict[str, Any] = {
    "name": "now",
    "description": "The time.",
    "input_schema": {"type": "object", "properties": {"zone": {"type": "string"}}},
}
CALL = 'Wait. <tool_call>{"name": "now", "arguments": {"zone": "UTC"}}</tool_call>'
USER = {"role": "user", "content": "x"}
IMAGE = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(b"x").decode()}


def say(text: str, max_tokens: int = 300) -> dict[str, Any]:
    return {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": max_tokens,
        "extra_body": {"structured_outputs": {"choice": [text]}},
    }


@pytest.fixture
def claude(server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as running:
        yield running


def test_text_equals_that_of_chat(claude: anthropic.Anthropic, client: openai.OpenAI) -> None:
    message = claude.messages.create(
        model="tiny",
        system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        messages=[{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
        max_tokens=9,
        extra_body={"temperature": 0, "metadata": {"user_id": "x"}},
    )
    messages: Any = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
    ]
    chat = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=9, temperature=0
    )
    [block] = message.content
    assert block.type == "text"
    assert block.text == chat.choices[0].message.content
    assert (message.role, message.model, message.stop_reason) == ("assistant", "tiny", "max_tokens")
    assert chat.usage is not None
    usage = message.usage
    cached = usage.cache_read_input_tokens or 0
    assert usage.input_tokens + cached == chat.usage.prompt_tokens
    assert usage.output_tokens == 9


def test_stream_with_the_packages_helper(claude: anthropic.Anthropic) -> None:
    with claude.messages.stream(**say("Hello there")) as stream:
        kinds = [event.type for event in stream if event.type != "text"]
        final = stream.get_final_message()
    assert final.content[0].type == "text"
    assert final.content[0].text == "Hello there"
    assert final.stop_reason == "end_turn"
    assert final.usage.input_tokens > 0
    assert final.usage.output_tokens > 1
    assert kinds[:3] == ["message_start", "content_block_start", "content_block_delta"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


@pytest.mark.parametrize("stream", [True, False])
def test_tools(claude: anthropic.Anthropic, stream: bool) -> None:
    options: Any = {**say(CALL), "tools": [NOW]}
    if stream:
        with claude.messages.stream(**options) as events:
            message: Any = events.get_final_message()
    else:
        message = claude.messages.create(**options)
    text, call = message.content
    assert text.text.strip() == "Wait."
    assert (call.type, call.name, call.input) == ("tool_use", "now", {"zone": "UTC"})
    assert message.stop_reason == "tool_use"
    # The call and its result go back as they came.
    options["messages"] += [
        {"role": "assistant", "content": message.to_dict()["content"]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": call.id,
             "content": [{"type": "text", "text": "noon"}]},
            {"type": "text", "text": "Well?"},
        ]},
    ]  # fmt: skip
    again = claude.messages.create(**options | {"max_tokens": 1})
    assert again.usage.output_tokens == 1
    assert again.stop_reason == "max_tokens"


def test_a_call_that_was_cut_off_is_none(claude: anthropic.Anthropic) -> None:
    options: Any = {**say(CALL, max_tokens=len(CALL) - 20), "tools": [NOW]}
    message = claude.messages.create(**options)
    assert [block.type for block in message.content] == ["text"]
    assert message.stop_reason == "max_tokens"


@pytest.mark.parametrize(
    ("choice", "kinds"),
    [
        ({"type": "any"}, ["tool_use"]),
        ({"type": "tool", "name": "now", "disable_parallel_tool_use": True}, ["tool_use"]),
        ({"type": "none"}, ["text"]),
    ],
)
def test_tool_choice(claude: anthropic.Anthropic, choice: dict[str, Any], kinds: list[str]) -> None:
    options: Any = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
    message = claude.messages.create(
        **options, max_tokens=300, tools=[NOW], tool_choice=choice, extra_body={"temperature": 0}
    )
    assert sorted({block.type for block in message.content}) == kinds


def test_stop_sequences_and_prefill(claude: anthropic.Anthropic) -> None:
    message = claude.messages.create(**say("one, two, three"), stop_sequences=["two", "never"])
    assert message.content[0].type == "text"
    assert message.content[0].text.strip() == "one,"
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "two")
    prefilled = say(" three") | {
        "messages": [
            {"role": "user", "content": "Count"},
            {"role": "assistant", "content": "one, two,"},
        ]
    }
    goes_on = claude.messages.create(**prefilled)
    assert goes_on.stop_reason == "end_turn"
    assert goes_on.content[0].type == "text"
    assert goes_on.content[0].text == " three"


@pytest.fixture(scope="module")
def thinker(serve: Serve) -> Iterator[Server]:
    with serve("--chat-template", THINKING_TEMPLATE) as running:
        yield running


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("thinking", "says", "thoughts"),
    [
        ({"type": "enabled", "budget_tokens": 1024}, "It is dark.</think>Night.", ["It is dark."]),
        ({"type": "adaptive", "display": "omitted"}, "It is dark.</think>Night.", []),
        ({"type": "disabled"}, "<think>It is dark.</think>Night.", []),
    ],
)
def test_thoughts(
    thinker: Server, stream: bool, thinking: dict[str, Any], says: str, thoughts: list[str]
) -> None:
    body = {
        "max_tokens": 200,
        "messages": [{"role": "user", "content": "Hi"}],
        "thinking": thinking,
        "structured_outputs": {"choice": [says]},
        "stream": stream,
    }
    response = thinker.http.post("/v1/messages", json=body)
    assert response.status_code == 200, response.text
    if stream:
        lines = response.text.splitlines()
        events = [json.loads(line[6:]) for line in lines if line.startswith("data:")]
        blocks = [e["content_block"] for e in events if e["type"] == "content_block_start"]
        for index, block in enumerate(blocks):
            kind = block["type"]
            ours = [e["delta"] for e in events if "delta" in e and e.get("index") == index]
            block[kind] = "".join(delta[kind] for delta in ours)
    else:
        blocks = response.json()["content"]
    assert [block["thinking"] for block in blocks if block["type"] == "thinking"] == thoughts
    assert [block["text"] for block in blocks if block["type"] == "text"] == ["Night."]
    # What was thought goes back; the template may show it.
    body["messages"] = [*body["messages"], {"role": "assistant", "content": blocks}, USER]  # type: ignore[misc]
    assert thinker.http.post("/v1/messages", json=body | {"stream": False}).status_code == 200


def test_structured_output(claude: anthropic.Anthropic) -> None:
    schema = {
        "type": "object",
        "properties": {"is_dark": {"type": "boolean"}},
        "required": ["is_dark"],
        "additionalProperties": False,
    }
    options = say("") | {
        "extra_body": {"output_config": {"format": {"type": "json_schema", "schema": schema}}}
    }
    message = claude.messages.create(**options)
    assert message.content[0].type == "text"
    assert set(json.loads(message.content[0].text)) == {"is_dark"}


def test_count_equals_usage(claude: anthropic.Anthropic) -> None:
    options: Any = {
        "model": "tiny",
        "system": "Be brief.",
        "messages": [{"role": "user", "content": "Hi"}],
        "tools": [NOW],
    }
    count = claude.messages.count_tokens(**options)
    usage = claude.messages.create(**options, max_tokens=1).usage
    assert count.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "role"),
        ({"messages": [{"role": "user", "content": []}]}, "empty list"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": IMAGE}]}]},
         "image"),
        ({"messages": [{"role": "user", "content": [{"type": "sound"}]}]}, "'sound'"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 7}]}]}, "got 7"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id"),
        ({"messages": [USER, {"role": "assistant", "content": [
            {"type": "tool_use", "id": "a", "name": "b", "input": "c"}]}, USER]}, "input"),
        ({"messages": [{"role": "user", "content": [
            {"type": "document", "source": {"type": "url", "url": "x"}}]}]}, "document"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
        ({"tools": [{"name": "now"}]}, "input_schema"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"temperature": 5}, "temperature"),
        ({"frequency_penalty": 1}, "frequency_penalty"),
    ],
)  # fmt: skip
def test_refusals(server: Server, change: dict[str, Any], says: str) -> None:
    body = {"messages": [USER], "max_tokens": 1} | change
    response = server.http.post("/v1/messages", json=body)
    assert response.status_code == 400, response.text
    error = response.json()
    assert error["type"] == "error"
    assert error["error"]["type"] == "invalid_request_error"
    assert says in error["error"]["message"]


def test_errors_are_the_packages_own(claude: anthropic.Anthropic, server: Server) -> None:
    with pytest.raises(anthropic.NotFoundError, match="other-model"):
        claude.messages.create(**say("x") | {"model": "other-model"})
    with pytest.raises(anthropic.BadRequestError, match="context"):
        claude.messages.create(
            **say("x") | {"messages": [{"role": "user", "content": "x " * 9000}]}
        )
    assert server.http.post("/v1/messages/batches", json={}).json()["type"] == "error"


def test_keys(serve: Serve) -> None:
    with serve("--api-key", "right") as server:
        body = {"messages": [USER], "max_tokens": 1}
        for headers, status in (
            ({"x-api-key": "right"}, 200),
            ({"Authorization": "Bearer right"}, 200),
            ({"x-api-key": "wrong"}, 401),
            ({}, 401),
        ):
            response = server.http.post("/v1/messages", json=body, headers=headers)
            assert response.status_code == status
        assert response.json()["error"]["type"] == "authentication_error"
