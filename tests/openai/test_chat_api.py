"""``/v1/chat/completions`` with the real ``openai`` package."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

from tests.openai.conftest import Server

MESSAGES: Any = [{"role": "user", "content": "Hello!"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"unit": {"$ref": "#/$defs/Unit"}, "day": {"type": "boolean"}},
            "required": ["unit", "day"],
            "additionalProperties": False,
            "$defs": {"Unit": {"enum": ["celsius", "kelvin"]}},
        },
    },
}
NOW: Any = {"type": "function", "function": {"name": "now"}}
CALL = '{"name": "get_weather", "arguments": {"unit": "kelvin", "s": "a\\"}b"}}'
ARGUMENTS = '{"unit": "kelvin", "s": "a\\"}b"}'


def ask(client: openai.OpenAI, **options: Any) -> ChatCompletion:
    return client.chat.completions.create(**({"model": "tiny", "messages": MESSAGES} | options))


def ask_stream(client: openai.OpenAI, **options: Any) -> list[ChatCompletionChunk]:
    options = {"model": "tiny", "messages": MESSAGES, "stream": True} | options
    return list(client.chat.completions.create(**options))


def say(text: str) -> dict[str, Any]:
    """Options that force the answer."""
    return {"extra_body": {"structured_outputs": {"choice": [text]}}, "max_tokens": 400}


def strict_chunks(server: Server, **options: Any) -> list[dict[str, Any]]:
    """Events of a stream, checked against the package's types, strictly (P55)."""
    body = {"messages": MESSAGES, "stream": True} | options
    response = server.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    events = [event.removeprefix("data: ") for event in response.text.split("\n\n") if event]
    assert events[-1] == "[DONE]"
    for event in events[:-1]:
        ChatCompletionChunk.model_validate_json(event, strict=True)
    return [json.loads(event) for event in events[:-1]]


def check_stream_laws(chunks: list[dict[str, Any]], n: int = 1) -> None:
    """P55: one final reason per choice, null before it, nothing after it; one role each."""
    assert len({(c["id"], c["created"], c["model"]) for c in chunks}) == 1
    for index in range(n):
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        reasons = [choice["finish_reason"] for choice in mine]
        assert reasons[-1] in ("stop", "length", "tool_calls")
        assert set(reasons[:-1]) <= {None}
        assert mine[0]["delta"]["role"] == "assistant"
        assert all("role" not in choice["delta"] for choice in mine[1:])


# ---------------------------------------------------------------------- answers


def test_answer_streamed_and_not_and_async(server: Server, client: openai.OpenAI) -> None:
    whole = ask(client, max_tokens=20, temperature=0)
    assert whole.object == "chat.completion"
    assert whole.model == "tiny"
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 20
    chunks = ask_stream(client, max_tokens=20, temperature=0)
    text = "".join(c.choices[0].delta.content or "" for c in chunks)
    assert text == whole.choices[0].message.content

    async def main() -> str | None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x") as asynchronous:
            answer = await asynchronous.chat.completions.create(
                model="other", messages=MESSAGES, max_tokens=20, temperature=0
            )
            return answer.choices[0].message.content

    assert asyncio.run(main()) == text


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": 1},
        {"max_tokens": 12},
        {"n": 3, "max_tokens": 7, "seed": 5},
        {"n": 2, "max_tokens": 5, "temperature": 0},
        {"stop": ["lo"], "structured_outputs": {"choice": ["Hello world"]}},
        {"structured_outputs": {"choice": ["short"]}},
        {"structured_outputs": {"choice": [f"<tool_call>{CALL}</tool_call>"]}, "tools": [NOW]},
    ],
)
def test_p54_usage_is_the_same_everywhere(server: Server, options: dict[str, Any]) -> None:
    body = {"messages": MESSAGES, "max_tokens": 200} | options
    whole = server.http.post("/v1/chat/completions", json=body).json()
    ChatCompletion.model_validate_json(json.dumps(whole), strict=True)
    stream_options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = strict_chunks(server, **body, stream_options=stream_options)
    last = chunks.pop()
    assert last["choices"] == []
    check_stream_laws(chunks, body.get("n", 1))
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert last["usage"][name] == whole["usage"][name]
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == last["usage"]["completion_tokens"]
    for choice in whole["choices"]:
        mine = [c for k in chunks for c in k["choices"] if c["index"] == choice["index"]]
        text = "".join(c["delta"].get("content", "") for c in mine)
        if "seed" in options or options.get("temperature") == 0:
            assert text == choice["message"]["content"]
        assert mine[-1]["finish_reason"] == choice["finish_reason"]


def test_usage_is_null_until_the_last_chunk(server: Server) -> None:
    chunks = strict_chunks(server, max_tokens=3, stream_options={"include_usage": True})
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["usage"]["completion_tokens"] == 3
    assert all("usage" not in chunk for chunk in strict_chunks(server, max_tokens=3))


def test_stop_string_ends_with_stop(client: openai.OpenAI) -> None:
    answer = ask(client, stop=["wor"], **say("Hello world"))
    assert answer.choices[0].message.content == "Hello "
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].stop_reason == "wor"  # type: ignore[attr-defined]


def test_greedy_n_gives_equal_choices_and_counts_the_prompt_once(client: openai.OpenAI) -> None:
    one = ask(client, temperature=0, max_tokens=5)
    two = ask(client, temperature=0, max_tokens=5, n=2)
    assert [c.index for c in two.choices] == [0, 1]
    assert {c.message.content for c in two.choices} == {one.choices[0].message.content}
    assert one.usage is not None
    assert two.usage is not None
    assert two.usage.prompt_tokens == one.usage.prompt_tokens
    assert two.usage.completion_tokens == 10


# ---------------------------------------------------------------------- logprobs


@pytest.mark.parametrize("top", [None, 0, 3])
def test_p05_logprobs(server: Server, client: openai.OpenAI, top: int | None) -> None:
    options: dict[str, Any] = {"logprobs": True, "max_tokens": 6, "temperature": 0}
    if top is not None:
        options["top_logprobs"] = top
    logprobs = ask(client, **options).choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 6
    for entry in logprobs.content:
        assert len(entry.top_logprobs) == (top or 0)
        assert entry.logprob <= 0
        assert entry.bytes is not None
        if top:
            assert entry.top_logprobs[0].token == entry.token  # greedy
    chunks = strict_chunks(server, **options)
    streamed = [
        entry
        for chunk in chunks
        for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert streamed == [entry.model_dump() for entry in logprobs.content]


def test_p05_top_logprobs_alone_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="top_logprobs needs logprobs"):
        ask(client, top_logprobs=2)


def test_extensions_return_ids_and_prompt_logprobs(client: openai.OpenAI) -> None:
    body = {"return_token_ids": True, "prompt_logprobs": 1, "top_k": 5, "min_p": 0.1}
    answer: Any = ask(client, max_tokens=4, extra_body=body)
    assert len(answer.choices[0].token_ids) == 4
    assert len(answer.prompt_token_ids) == answer.usage.prompt_tokens
    assert len(answer.prompt_logprobs) == answer.usage.prompt_tokens
    assert answer.prompt_logprobs[0] is None


# ---------------------------------------------------------------------- structured outputs


class Answer(BaseModel):
    colour: Literal["red", "green"]
    is_dark: bool


def test_parsed_structured_output(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="tiny", messages=MESSAGES, response_format=Answer, max_tokens=200
    )
    assert isinstance(answer.choices[0].message.parsed, Answer)
    assert answer.choices[0].finish_reason == "stop"


def test_json_object(client: openai.OpenAI) -> None:
    """P38: a 200 that stopped is valid JSON."""
    answer = ask(client, response_format={"type": "json_object"}, max_tokens=300)
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(answer.choices[0].message.content or ""), dict)


# ---------------------------------------------------------------------- tools


def calls_of(choice: Any) -> list[tuple[str, str]]:
    return [(c.function.name, c.function.arguments) for c in choice.message.tool_calls or []]


def test_tool_call_in_the_models_format(client: openai.OpenAI) -> None:
    text = f"Wait.\n<tool_call>\n{CALL}\n</tool_call>"
    choice = ask(client, tools=[WEATHER, NOW], **say(text)).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Wait."
    assert calls_of(choice) == [("get_weather", ARGUMENTS)]
    alone = ask(client, tools=[NOW], **say(f"<tool_call>{CALL}</tool_call>")).choices[0]
    assert alone.message.content is None


def test_tool_choice_none_leaves_text_alone(client: openai.OpenAI) -> None:
    text = f"<tool_call>{CALL}</tool_call>"
    choice = ask(client, tools=[NOW], tool_choice="none", **say(text)).choices[0]
    assert choice.message.content == text
    assert choice.message.tool_calls is None
    assert choice.finish_reason == "stop"


def test_p43_streamed_parallel_calls_with_the_packages_helper(client: openai.OpenAI) -> None:
    text = f'<tool_call>{CALL}</tool_call>\n<tool_call>{{"name": "now"}}</tool_call>'
    with client.chat.completions.stream(
        model="tiny", messages=MESSAGES, tools=[WEATHER, NOW], **say(text)
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert calls_of(final.choices[0]) == [("get_weather", ARGUMENTS), ("now", "{}")]
    assert final.choices[0].finish_reason == "tool_calls"
    assert kinds.count("tool_calls.function.arguments.done") == 2


def test_p43_deltas_have_index_id_and_type_once(server: Server) -> None:
    text = f'<tool_call>{CALL}</tool_call>\n<tool_call>{{"name": "now"}}</tool_call>'
    options = {"structured_outputs": {"choice": [text]}, "tools": [WEATHER, NOW]}
    chunks = strict_chunks(server, **options)
    check_stream_laws(chunks)
    deltas = [d for c in chunks for k in c["choices"] for d in k["delta"].get("tool_calls", [])]
    for index in (0, 1):
        mine = [d for d in deltas if d["index"] == index]
        assert mine[0]["id"].startswith("call_")
        assert mine[0]["type"] == "function"
        assert all("id" not in d and "name" not in d["function"] for d in mine[1:])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("parallel", [True, False])
def test_required_tool_call(client: openai.OpenAI, stream: bool, parallel: bool) -> None:
    options: Any = {
        "tools": [WEATHER, NOW],
        "tool_choice": "required",
        "parallel_tool_calls": parallel,
        "max_tokens": 300,
        "temperature": 0,
    }
    if stream:
        with client.chat.completions.stream(model="tiny", messages=MESSAGES, **options) as events:
            try:
                choice: Any = events.get_final_completion().choices[0]
            except openai.LengthFinishReasonError as error:  # a random model calls for ever
                choice = error.completion.choices[0]
    else:
        choice = ask(client, **options).choices[0]
    assert calls_of(choice)
    if choice.finish_reason == "tool_calls":
        for name, arguments in calls_of(choice):
            assert name in ("get_weather", "now")
            assert isinstance(json.loads(arguments), dict)
    if not parallel:
        assert len(calls_of(choice)) == 1
        assert choice.finish_reason == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
def test_named_tool_call(client: openai.OpenAI, stream: bool) -> None:
    options: Any = {
        "tools": [WEATHER, NOW],
        "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
        "max_tokens": 300,
    }
    if stream:
        with client.chat.completions.stream(model="tiny", messages=MESSAGES, **options) as events:
            choice: Any = events.get_final_completion().choices[0]
    else:
        choice = ask(client, **options).choices[0]
    [(name, arguments)] = calls_of(choice)
    assert name == "get_weather"
    value = json.loads(arguments)
    assert value["unit"] in ("celsius", "kelvin")
    assert isinstance(value["day"], bool)
    assert choice.finish_reason == "tool_calls"


def test_conversation_with_calls_and_results(server: Server, client: openai.OpenAI) -> None:
    """Nothing of a history gets lost, even if the template knows no tools."""
    call = {"id": "call_1", "type": "function",
            "function": {"name": "now", "arguments": '{"zone": "UTC"}'}}  # fmt: skip
    messages: Any = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": "time?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
    ]
    tokens = server.http.post("/tokenize", json={"messages": messages, "tools": [NOW]}).json()
    prompt = server.http.post("/detokenize", json={"tokens": tokens["tokens"]}).json()["prompt"]
    for part in ("Be kind.", '"zone": "UTC"', "noon", '"name": "now"'):
        assert part in prompt
    answer = ask(client, messages=messages, tools=[NOW], max_tokens=3)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == tokens["count"]


# ---------------------------------------------------------------------- other clients' habits


def test_parameters_that_openai_ignores_are_ignored(client: openai.OpenAI) -> None:
    answer = ask(
        client,
        max_completion_tokens=2,
        user="me",
        metadata={"a": "b"},
        store=False,
        service_tier="auto",
        seed=1,
        modalities=["text"],
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 2


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny", "other"]
    assert client.models.retrieve("other").id == "other"
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.models.retrieve("gpt-4")


# ---------------------------------------------------------------------- helpers of the package


class GetTime(BaseModel):
    zone: Literal["UTC", "CET"]


def test_parsed_arguments_of_a_tool(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="tiny", messages=MESSAGES, tools=[openai.pydantic_function_tool(GetTime)],
        tool_choice="required", parallel_tool_calls=False, max_tokens=300,
    )  # fmt: skip
    [call] = answer.choices[0].message.tool_calls or ()
    assert isinstance(call.function.parsed_arguments, GetTime)
    assert answer.choices[0].finish_reason == "tool_calls"


def test_streamed_structured_output_is_parsed(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model="tiny", messages=MESSAGES, response_format=GetTime, max_tokens=300, temperature=0
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, GetTime)
    assert kinds[-1] == "content.done"
    assert "content.delta" in kinds


def test_asynchronous_helper_raw_responses_and_retries(server: Server) -> None:
    async def main() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x") as client:
            options: Any = {"model": "tiny", "messages": MESSAGES, "max_tokens": 6}
            async with client.chat.completions.stream(**options, temperature=0) as stream:
                text = "".join([e.delta async for e in stream if e.type == "content.delta"])
            raw = await client.chat.completions.with_raw_response.create(**options, temperature=0)
            assert raw.headers["x-request-id"]
            assert raw.parse().choices[0].message.content == text
            answers = await asyncio.gather(
                *(client.chat.completions.create(**options, temperature=0) for _ in range(20))
            )
            assert {answer.choices[0].message.content for answer in answers} == {text}

    asyncio.run(main())


# ---------------------------------------------------------------------- more parameters


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools_are_the_only_ones(client: openai.OpenAI, mode: str) -> None:
    allowed = {"mode": mode, "tools": [{"type": "function", "function": {"name": "now"}}]}
    choice: Any = {"type": "allowed_tools", "allowed_tools": allowed}
    options: dict[str, Any] = {"tools": [WEATHER, NOW], "tool_choice": choice}
    if mode == "required":
        answer = ask(client, **options, max_tokens=300, parallel_tool_calls=False)
        assert [c.function.name for c in answer.choices[0].message.tool_calls or ()] == ["now"]
    else:  # the prompt shows no others
        answer = ask(client, **options, max_tokens=1)
        alone = ask(client, tools=[NOW], max_tokens=1)
        assert answer.usage is not None
        assert alone.usage is not None
        assert answer.usage.prompt_tokens == alone.usage.prompt_tokens


def test_repetition_detection_ends_with_its_reason(server: Server) -> None:
    body = {
        "messages": MESSAGES, "allowed_token_ids": [70], "max_tokens": 100,
        "repetition_detection": {"max_pattern_size": 3, "min_pattern_size": 1, "min_count": 5},
    }  # fmt: skip
    reply = server.http.post("/v1/chat/completions", json=body).json()
    assert reply["choices"][0]["stop_reason"] == "repetition"
    assert reply["usage"]["completion_tokens"] < 100


def test_documents_reach_the_template(serve: Any) -> None:
    template = "{% for d in documents %}[{{ d.text }}]{% endfor %}{{ messages[0].content }}"
    with serve("--chat-template", template) as running:
        body = {"messages": [{"role": "user", "content": "Q"}], "max_tokens": 1,
                "documents": [{"text": "A"}, {"text": "B"}], "return_token_ids": True}  # fmt: skip
        ids = running.http.post("/v1/chat/completions", json=body).json()["prompt_token_ids"]
        assert running.http.post("/detokenize", json={"tokens": ids}).json()["prompt"] == "[A][B]Q"
