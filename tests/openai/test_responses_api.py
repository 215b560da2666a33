"""``/v1/responses`` with the real ``openai`` package."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.openai.conftest import Server

NOW: Any = {"type": "function", "name": "now", "parameters": {"type": "object", "properties": {}}}
CALL = 'Wait. <tool_call>{"name": "now", "arguments": {"zone": "UTC"}}</tool_call>'


def say(text: str) -> dict[str, Any]:
    return {"extra_body": {"structured_outputs": {"choice": [text]}}, "max_output_tokens": 300}


class Answer(BaseModel):
    is_dark: bool


def test_text_equals_that_of_chat(client: openai.OpenAI) -> None:
    options: Any = {"model": "tiny", "temperature": 0}
    response = client.responses.create(input="Hi", instructions="Be brief.", max_output_tokens=9,
                                       **options)  # fmt: skip
    messages: Any = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
    ]
    chat = client.chat.completions.create(messages=messages, max_tokens=9, **options)
    assert response.output_text == chat.choices[0].message.content
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.usage is not None
    assert chat.usage is not None
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    assert response.usage.output_tokens == 9


def test_stream_with_the_packages_helper(client: openai.OpenAI) -> None:
    with client.responses.stream(
        model="tiny", input="Hi", **say("Hello there"), tools=[NOW]
    ) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert final.output_text == "Hello there"
    assert final.status == "completed"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]


@pytest.mark.parametrize("stream", [True, False])
def test_function_calls(client: openai.OpenAI, stream: bool) -> None:
    options: Any = {"model": "tiny", "input": "Hi", "tools": [NOW], **say(CALL)}
    if stream:
        with client.responses.stream(**options) as events:
            response: Any = events.get_final_response()
    else:
        response = client.responses.create(**options)
    message, call = response.output
    assert message.content[0].text == "Wait."
    assert (call.type, call.name, json.loads(call.arguments)) == (
        "function_call",
        "now",
        {"zone": "UTC"},
    )
    # The result goes back with the call before it.
    items = [
        {"role": "user", "content": "Hi"},
        {"type": "message", "role": "assistant",
         "content": [{"type": "output_text", "text": "Wait."}]},
        {"type": "function_call", "call_id": call.call_id, "name": "now", "arguments": "{}"},
        {"type": "function_call_output", "call_id": call.call_id, "output": "noon"},
    ]  # fmt: skip
    client.responses.create(model="tiny", input=items, max_output_tokens=1)  # type: ignore[arg-type]


def test_forced_call_and_parsed_output(client: openai.OpenAI) -> None:
    choice: Any = {"type": "function", "name": "now"}
    options: Any = {"model": "tiny", "input": "Hi", "max_output_tokens": 200}
    response = client.responses.create(tools=[NOW], tool_choice=choice, **options)
    assert [item.type for item in response.output] == ["function_call"]
    parsed = client.responses.parse(text_format=Answer, **options)
    assert isinstance(parsed.output_parsed, Answer)


@pytest.mark.parametrize(
    "change",
    [
        {"previous_response_id": "resp_1"},
        {"background": True},
        {"truncation": "auto"},
        {"tools": [{"type": "web_search"}]},
        {"input": [{"type": "item_reference", "id": "x"}]},
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        {"input": []},
        {"text": {"format": {"type": "json_schema", "name": "x"}}},
        {"temperature": 5},
    ],
)
def test_refusals(server: Server, change: dict[str, Any]) -> None:
    body = {"input": "x", "max_output_tokens": 1} | change
    response = server.http.post("/v1/responses", json=body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["message"]
