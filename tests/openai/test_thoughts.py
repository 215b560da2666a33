"""Thoughts: parted from the answer, and what the chat template has a say in."""

from __future__ import annotations

from typing import Any

import pytest

from tests.openai.conftest import Server
from tests.openai.test_chat_api import MESSAGES, NOW, strict_chunks

THINKING_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('system comes first') }}"
    "{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
    "[assistant]{% if enable_thinking %}<think>{% endif %}"
)


@pytest.fixture(scope="module")
def thinker(serve: Any) -> Any:
    with serve("--served-model-name", "tiny", "--chat-template", THINKING_TEMPLATE) as running:
        yield running


@pytest.mark.parametrize("stream", [False, True])
def test_thoughts_are_parted_from_the_answer(thinker: Server, stream: bool) -> None:
    def run(text: str, **body: Any) -> tuple[str, str]:
        body = {"messages": MESSAGES, "structured_outputs": {"choice": [text]}} | body
        if not stream:
            reply = thinker.http.post("/v1/chat/completions", json=body).json()
            message = reply["choices"][0]["message"]
            return message.get("reasoning_content", ""), message["content"]
        deltas = [c["choices"][0]["delta"] for c in strict_chunks(thinker, **body)]
        assert all(d.get("reasoning") == d.get("reasoning_content") for d in deltas)
        thoughts = "".join(d.get("reasoning_content", "") for d in deltas)
        return thoughts, "".join(d.get("content", "") for d in deltas)

    assert run("<think>\nhm, so\n</think>\n\nYes.") == ("hm, so", "Yes.")
    assert run("hm</think>Yes.", reasoning_effort="high") == ("hm", "Yes.")  # opened by the prompt
    assert run("Yes.", chat_template_kwargs={"enable_thinking": False}) == ("", "Yes.")
    assert run("<think>hm</think>Yes.", include_reasoning=False) == ("", "Yes.")
    thought_call = '<think>hm</think><tool_call>{"name": "now", "arguments": {}}</tool_call>'
    assert run(thought_call)[0] == "hm"


def test_forced_json_is_never_taken_for_a_thought(thinker: Server) -> None:
    body = {
        "messages": MESSAGES,
        "reasoning_effort": "high",
        "response_format": {"type": "json_schema", "json_schema": {
            "name": "x", "schema": {"enum": ["a"]}}},
    }  # fmt: skip
    message = thinker.http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
    assert message["content"] == '"a"'
    assert "reasoning_content" not in message


def test_p45_what_the_template_refuses_is_a_400_with_its_words(thinker: Server) -> None:
    roles = ["system", "user", "assistant", "system", "user"]
    body = {"messages": [{"role": role, "content": "x"} for role in roles]}
    for stream in (False, True):
        response = thinker.http.post("/v1/chat/completions", json=body | {"stream": stream})
        assert response.status_code == 400
        assert "system comes first" in response.json()["error"]["message"]


def test_a_template_that_knows_tools_gets_them(thinker: Server) -> None:
    tokens = thinker.http.post("/tokenize", json={"messages": MESSAGES, "tools": [NOW]}).json()
    prompt = thinker.http.post("/detokenize", json={"tokens": tokens["tokens"]}).json()["prompt"]
    assert prompt.startswith("[user]Hello!<tools>[")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("opened_by_prompt", [False, True])
def test_p03_stop_strings_count_in_the_answer_only(
    thinker: Server, stream: bool, opened_by_prompt: bool
) -> None:
    text = "a STOP b\n\nc</think>\n\nanswer STOP rest"
    body: dict[str, Any] = {"stop": ["STOP", "\n\n"], "messages": MESSAGES, "max_tokens": 300}
    if opened_by_prompt:
        body["chat_template_kwargs"] = {"enable_thinking": True}
    else:
        text = "<think>" + text
    body["structured_outputs"] = {"choice": [text]}
    if stream:
        chunks = strict_chunks(thinker, **body)
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        thoughts = "".join(delta.get("reasoning_content", "") for delta in deltas)
        content = "".join(delta.get("content", "") for delta in deltas)
        last = chunks[-1]["choices"][0]
    else:
        last = thinker.http.post("/v1/chat/completions", json=body).json()["choices"][0]
        thoughts, content = last["message"]["reasoning_content"], last["message"]["content"]
    assert (thoughts.rstrip(), content) == ("a STOP b\n\nc", "answer ")
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", "STOP")


def test_p03_without_thoughts_stop_strings_count_everywhere(server: Server) -> None:
    body = {"messages": MESSAGES, "stop": ["STOP"], "max_tokens": 300,
            "structured_outputs": {"choice": ["<think>a STOP b</think>answer"]}}  # fmt: skip
    reply = server.http.post("/v1/chat/completions", json=body).json()
    assert reply["choices"][0]["message"]["content"] == "<think>a "


# ---------------------------------------------------------------------- grammars that wait


@pytest.fixture(scope="module")
def patient(serve: Any) -> Any:
    """Its grammars constrain the answer only; thoughts are free."""
    options = ("--served-model-name", "tiny", "--chat-template", THINKING_TEMPLATE)
    with serve(*options, "--set", "reasoning_config={}") as running:
        yield running


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("opened_by_prompt", [False, True])
@pytest.mark.parametrize("kind", ["format", "call", "either"])
def test_p42_thoughts_before_a_grammar_are_no_part_of_the_answer(
    patient: Server, stream: bool, opened_by_prompt: bool, kind: str
) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["a"]}}}
    body: dict[str, Any] = {
        "messages": MESSAGES,
        "max_tokens": 300,
        "thinking_token_budget": 5,
        "temperature": 0,
        "chat_template_kwargs": {"enable_thinking": opened_by_prompt},
    }
    if not opened_by_prompt:
        body["messages"] = [{"role": "user", "content": "<think>"}]
    if kind != "call":
        body["response_format"] = wanted
    if kind == "call":
        body |= {"tools": [NOW], "tool_choice": "required", "parallel_tool_calls": False}
    if kind == "either":
        body |= {"tools": [NOW], "logit_bias": quote_first(patient)}
    if stream:
        deltas = [chunk["choices"][0]["delta"] for chunk in strict_chunks(patient, **body)]
        content = "".join(delta.get("content", "") for delta in deltas)
        thoughts = "".join(delta.get("reasoning_content", "") for delta in deltas)
        names = [
            call["function"]["name"]
            for delta in deltas
            for call in delta.get("tool_calls", [])
            if "id" in call
        ]
    else:
        message = patient.http.post("/v1/chat/completions", json=body).json()["choices"][0][
            "message"
        ]
        content, thoughts = message["content"] or "", message.get("reasoning_content", "")
        names = [call["function"]["name"] for call in message.get("tool_calls", [])]
    assert thoughts
    assert "think>" not in thoughts
    assert (content, names) == (("", ["now"]) if kind == "call" else ('"a"', []))


def quote_first(server: Server) -> dict[str, int]:
    body = {"prompt": '"', "add_special_tokens": False}
    (token,) = server.http.post("/tokenize", json=body).json()["tokens"]
    return {str(token): 20}


def test_thoughts_that_the_prompt_has_ended_are_not_waited_for(patient: Server) -> None:
    body = {
        "messages": [{"role": "user", "content": "<think></think>"}],
        "response_format": {"type": "json_schema", "json_schema": {
            "name": "x", "schema": {"enum": ["a"]}}},
    }  # fmt: skip
    message = patient.http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
    assert message["content"] == '"a"'
    assert "reasoning_content" not in message


@pytest.mark.parametrize("kind", ["format", "call"])
def test_server_and_engine_agree_whether_the_prompt_has_ended_the_thoughts(
    serve: Any, kind: str
) -> None:
    """The text decides: beside other characters the marks may be other ids than alone."""
    ids = '{"think_start_token_ids": [257], "think_end_token_ids": [258]}'
    options = ("--served-model-name", "tiny", "--chat-template", THINKING_TEMPLATE)
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": 'Repeat: </think>{"a": 1}: </think>'}],
        "max_tokens": 300,
        "n": 2,
        "seed": 1,
    }
    if kind == "call":
        body |= {"tools": [NOW], "tool_choice": "required", "parallel_tool_calls": False}
    else:
        schema = {"name": "x", "schema": {"enum": ["a"]}}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    with serve(*options, "--set", f"reasoning_config={ids}") as running:
        reply = running.http.post("/v1/chat/completions", json=body).json()
    for choice in reply["choices"]:
        message = choice["message"]
        assert "reasoning_content" not in message
        if kind == "call":
            assert [call["function"]["name"] for call in message["tool_calls"]] == ["now"]
        else:
            assert message["content"] == '"a"'
