"""LangChain's `ChatOpenAI` against a server: python langchain_client.py URL."""

from __future__ import annotations

import asyncio
import sys
from typing import Any, Literal

from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

URL = sys.argv[1]
CALL = '<tool_call>{"name": "now", "arguments": {"zone": "UTC"}}</tool_call>'


class Answer(BaseModel):
    is_dark: bool


@tool
def now(zone: Literal["UTC"]) -> str:
    """Time in a zone."""
    return f"noon in {zone}"


def make(**options: Any) -> ChatOpenAI:
    settings: dict[str, Any] = {"model": "tiny", "api_key": "none", "max_retries": 0}
    settings |= {"base_url": f"{URL}/v1", "temperature": 0, "max_tokens": 12} | options
    return ChatOpenAI(**settings)


def say(text: str) -> dict[str, Any]:
    return {"extra_body": {"structured_outputs": {"choice": [text]}}, "max_tokens": 400}


def main() -> None:
    chat = make(stream_usage=True)
    whole = chat.invoke("Hello!")
    assert whole.usage_metadata["output_tokens"] == 12
    assert whole.response_metadata["finish_reason"] == "length"
    chunks = list(chat.stream("Hello!"))
    assert "".join(chunk.text for chunk in chunks) == whole.text
    joined = chunks[0]
    for chunk in chunks[1:]:
        joined += chunk
    assert joined.usage_metadata["output_tokens"] == 12
    assert asyncio.run(chat.ainvoke("Hello!")).text == whole.text
    answers = chat.batch(["Hello!"] * 5)
    assert [answer.text for answer in answers] == [whole.text] * 5

    caller = make(**say(CALL)).bind_tools([now])
    for message in (caller.invoke("Hi"), sum_of(caller.stream("Hi"))):
        [call] = message.tool_calls
        assert (call["name"], call["args"]) == ("now", {"zone": "UTC"})
    forced = make(max_tokens=300).bind_tools([now], tool_choice="now", strict=True).invoke("Hi")
    assert forced.tool_calls[0]["name"] == "now"
    assert forced.tool_calls[0]["args"] == {"zone": "UTC"}
    history = [
        HumanMessage("Hi"),
        AIMessage("", tool_calls=[{"name": "now", "args": {"zone": "UTC"}, "id": "call_1"}]),
        ToolMessage("noon", tool_call_id="call_1"),
    ]
    assert make().bind_tools([now]).invoke(history).usage_metadata["input_tokens"] > 20

    for method in ("json_schema", "function_calling"):
        structured = make(max_tokens=300).with_structured_output(Answer, method=method, strict=True)
        assert isinstance(structured.invoke("Is it dark?"), Answer)
    scored = make(logprobs=True, top_logprobs=2).invoke("Hello!")
    assert len(scored.response_metadata["logprobs"]["content"]) == 12
    by_responses = make(use_responses_api=True).invoke("Hello!")
    assert by_responses.text == whole.text
    print("all good")


def sum_of(chunks: Any) -> Any:
    joined = None
    for chunk in chunks:
        joined = chunk if joined is None else joined + chunk
    return joined


main()
