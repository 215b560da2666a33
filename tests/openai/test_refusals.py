"""What the client did wrong is a 4xx in OpenAI's shape that names the parameter; never a 500."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from tellin.entrypoints.openai.errors import to_api_error
from tellin.entrypoints.openai.requests import EmbeddingRequest
from tests.openai.conftest import Server

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f"}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "not-a-type"}}}

KINDS = "a text, a list of texts, a list of token ids, or a list of such lists"
SCHEMA_AND_REGEX = {"response_format": SCHEMA, "structured_outputs": {"regex": "a"}}


def schema(value: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema",
                                "json_schema": {"name": "x", "schema": value}}}  # fmt: skip


def refused(server: Server, path: str, body: Any, status: int = 400) -> dict[str, Any]:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": "application/json"}
    response = server.http.post(path, content=content, headers=headers)
    assert response.status_code == status, response.text
    error: dict[str, Any] = json.loads(response.text, parse_constant=pytest.fail)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["a", 5], "input: must hold items of one kind; item 0 is a text, item 1 a token id: 5"),
        ([[1], "a"], "input: must hold items of one kind; item 0 is a list, item 1 a text: 'a'"),
        ([[1], ["x"]], "input: item 1 must be a list of token ids, got ['x']"),
        ([[]], "input: item 0 must be a list of token ids, got []"),
        ([], "input: must not be an empty list"),
        ([True], f"input: must be {KINDS}; item 0 is True"),
        ({"a": 1}, f"input: must be {KINDS}, got {{'a': 1}}"),
    ],
)
def test_mixed_prompts_get_one_sentence(given: Any, message: str) -> None:
    with pytest.raises(ValidationError) as error:
        EmbeddingRequest.model_validate({"input": given})
    answer = to_api_error(error.value)
    assert (answer.message, answer.param) == (message, "input")


CHAT_REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"frobnicate": 1}, "frobnicate"),
    ({"temperature": "0.5"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1e308}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 1.5}, "min_p"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"n": 0}, "n"),
    ({"n": 1000}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
    ({"logprobs": True, "top_logprobs": 21}, "logprobs"),
    ({"logit_bias": {"99999": 1}}, "logit_bias"),  # P27
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"abc": 1}}, "logit_bias"),
    ({"stop": [1]}, "stop"),
    ({"seed": "x"}, "seed"),
    ({"messages": []}, "messages"),  # P26
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"content": "no role"}]}, "messages"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "image_url"),
    ({"messages": [{"role": "tool", "content": [1]}]}, "messages"),
    ({"messages": [{"role": "tool", "content": [{"type": "image_url"}]}]}, "messages"),
    ({"messages": [{"role": "tool", "content": 5}]}, "messages"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),  # P36
    (schema({"type": "not-a-type"}), "structured_outputs"),  # P37
    (schema({"$ref": "#"}), "structured_outputs"),
    (schema({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}), "structured_outputs"),
    (schema({"type": "object", "properties": {"a": "text"}}), "structured_outputs"),
    (schema({"type": "string", "pattern": "("}), "structured_outputs"),  # P38
    ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
    ({"chat_template": "{{ 1 }}"}, "chat_template"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"tokenize": {}, "self": 1}}, "chat_template_kwargs"),
    ({"reasoning_effort": "low"}, "reasoning_effort"),
    ({"continue_final_message": True, "messages": [{"role": "user", "content": ""}]}, None),
    ({"cache_salt": ""}, "cache_salt"),
    ({"priority": 1.5}, "priority"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"audio": {}}, "audio is not supported: this server makes text only"),
    ({"functions": []}, "functions is not supported: it is deprecated; use tools"),
    ({"guided_json": {}}, "guided_json is not supported: use response_format"),
    ({"use_beam_search": True}, "use_beam_search is not supported"),
    ({"repetition_detection": {"max_pattern_size": 1, "min_pattern_size": 2}},
     "repetition_detection"),
    ({"thinking_token_budget": 5}, "thinking_token_budget"),
    ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": {
        "mode": "auto", "tools": [{"type": "function", "function": {"name": "g"}}]}}},
     "tool_choice names 'g'"),
    ({"tools": [TOOL], "tool_choice": {"type": "custom"}}, "tool_choice"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "parameter"), CHAT_REFUSALS)
@pytest.mark.parametrize("stream", [False, True])
def test_chat_refusals_name_the_parameter(
    server: Server, change: dict[str, Any], parameter: str | None, stream: bool
) -> None:
    body = {"messages": MESSAGES, "stream": stream, "max_tokens": 1} | change
    if parameter is None:  # acceptable, whatever it means
        response = server.http.post(CHAT, json=body)
        assert response.status_code in (200, 400)
        return
    if stream and "stream_options" in change:
        return
    error = refused(server, CHAT, body)
    assert parameter in f"{error['param']} {error['message']}"


@pytest.mark.parametrize(
    ("change", "parameter"),
    [
        ({"top_logprobs": 2}, "top_logprobs"),  # P05
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (SCHEMA_AND_REGEX, "structured_outputs"),
    ],
)
def test_fields_that_do_not_go_together_are_named_too(
    server: Server, change: dict[str, Any], parameter: str
) -> None:
    assert refused(server, CHAT, {"messages": MESSAGES} | change)["param"] == parameter


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "frequency_penalty"])
@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e400"])
def test_p52_no_number_is_no_number(server: Server, name: str, value: str) -> None:
    body = f'{{"messages": [{{"role": "user", "content": "x"}}], "{name}": {value}}}'
    assert name in refused(server, CHAT, body.encode())["message"]


def test_p52_bias_nan(server: Server) -> None:
    refused(server, TEXT, b'{"prompt": "x", "logit_bias": {"5": NaN}}')


@pytest.mark.parametrize("prompt", ["", [], [""], [[]], [1, "a"], {"a": 1}, None, [-1], [10**6]])
def test_p26_empty_and_odd_prompts(server: Server, prompt: Any) -> None:
    refused(server, TEXT, {"prompt": prompt})


@pytest.mark.parametrize(
    "body",
    [b"", b"nope", b"[]", b"1", b"[" * 5000, b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}'],
)
def test_bodies_that_are_no_requests(server: Server, body: bytes) -> None:
    refused(server, TEXT, body)


def test_odd_paths_methods_and_types(server: Server) -> None:
    assert refused(server, "/v1/nonsense", {}, 404)["code"] == "not_found"
    response = server.http.get(CHAT)
    assert response.status_code == 405
    assert response.json()["error"]["code"] == "method_not_allowed"
    form = server.http.post(TEXT, data={"prompt": "x"})
    assert form.status_code == 400
    assert "Content-Type" in form.json()["error"]["message"]
    unknown = refused(server, TEXT, {"prompt": "x", "model": "gpt-4"}, 404)
    assert unknown["code"] == "model_not_found"
    assert refused(server, "/v1/embeddings", {"input": "x"})["code"] == "unsupported_model"
    assert refused(server, "/detokenize", {"tokens": [-1]})["param"] == "tokens.0"
    assert "512" in refused(server, "/detokenize", {"tokens": [3, 512]})["message"]
    assert server.http.post("/sleep").status_code == 404  # off unless asked for


def test_long_names_are_not_repeated_whole(server: Server) -> None:
    for body in (
        {"model": "m" * 15_000},
        {"n" * 15_000: 1},
        {"response_format": {"x" * 15_000: 1}},
    ):
        status = 404 if "model" in body else 400
        error = refused(server, CHAT, {"messages": MESSAGES} | body, status)
        assert len(error["message"]) + len(error["param"]) < 500
        assert "mmm'..." in error["message"] or status == 400


def test_names_that_are_types_are_repeated(server: Server) -> None:
    for name in ("str", "Document"):
        error = refused(server, CHAT, {"messages": MESSAGES, name: 1})
        assert (error["param"], error["code"]) == (name, "unknown_parameter")


def test_p11_best_of_in_chats(server: Server) -> None:
    body = {"messages": MESSAGES, "max_tokens": 1}
    for change in ({"best_of": 1}, {"best_of": 2, "n": 2}, {"best_of": None}):
        assert server.http.post(CHAT, json=body | change).status_code == 200
    assert refused(server, CHAT, body | {"best_of": 3})["param"] == "best_of"


def test_p45_the_template_may_refuse(server: Server) -> None:
    for roles in (["system", "user", "assistant", "system", "user"], ["user", "user"], ["odd"]):
        messages = [{"role": role, "content": "x"} for role in roles]
        response = server.http.post(CHAT, json={"messages": messages, "max_tokens": 1})
        assert response.status_code == 200
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    for content in (None, parts):
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
        assert server.http.post(CHAT, json=body).status_code == 200


def test_p44_one_beginning_and_the_same_ids_as_offline(server: Server) -> None:
    reply = server.http.post("/tokenize", json={"messages": MESSAGES}).json()
    text = server.http.post("/detokenize", json={"tokens": reply["tokens"]}).json()["prompt"]
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    body = {"messages": MESSAGES, "max_tokens": 1, "return_token_ids": True}
    assert server.http.post(CHAT, json=body).json()["prompt_token_ids"] == reply["tokens"]


def test_the_server_is_unharmed(server: Server) -> None:
    """Runs last in this file: after all of the above, a good request works."""
    response = server.http.post(TEXT, json={"prompt": "x", "max_tokens": 2})
    assert response.status_code == 200
    assert server.http.get("/health").status_code == 200
    assert not [line for line in server.log if "Traceback" in line]
