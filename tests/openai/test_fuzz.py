"""Whatever a body holds, the answer is no 5xx and has OpenAI's shape."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from tellin.entrypoints.openai import requests as bodies
from tellin.entrypoints.openai.responses_request import ResponsesRequest
from tests.openai.conftest import Server

MESSAGES = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{"}}
VALUES = st.sampled_from(
    [
        None, True, False, 0, 1, 2, -1, 0.5, 10**30, -(10**30), "", "auto", "x", [], [1], ["x"], {},
        {"type": "text"}, {"type": "json_object"}, {"5": 1}, {"regex": "a"},
        {"json": {"$ref": "#/x"}},
        [TOOL], [TOOL, TOOL], "required", {"type": "function", "function": {"name": "g"}},
        [{"role": "assistant", "tool_calls": [CALL]}], [{"role": "tool", "content": [1]}],
        [{"role": "assistant", "tool_calls": "x"}], [{}], [None], [[1, 2]], [[]],
        {"include_usage": 1},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": {"items": 5}}},
        {"tools": 1}, {"x": [1]}, "\ud7ff\ue000", "a" * 5000, [0] * 300,
        {"format": {"type": "x"}},
    ]
)  # fmt: skip
TARGETS: list[tuple[str, type[BaseModel], dict[str, Any]]] = [
    ("/v1/chat/completions", bodies.ChatCompletionRequest, {"messages": MESSAGES, "max_tokens": 2}),
    ("/v1/completions", bodies.CompletionRequest, {"prompt": "hi", "max_tokens": 2}),
    ("/v1/responses", ResponsesRequest, {"input": "hi", "max_output_tokens": 2}),
    ("/v1/embeddings", bodies.EmbeddingRequest, {"input": "hi"}),
    ("/score", bodies.ScoreRequest, {"text_1": "hi", "text_2": "ho"}),
    ("/rerank", bodies.RerankRequest, {"query": "hi", "documents": ["ho"]}),
    ("/tokenize", bodies.TokenizeRequest, {"prompt": "hi"}),
    ("/detokenize", bodies.DetokenizeRequest, {"tokens": [5]}),
]
LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")


@pytest.mark.parametrize(("path", "model", "base"), TARGETS)
@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_no_5xx(
    server: Server, path: str, model: type[BaseModel], base: dict[str, Any], data: st.DataObject
) -> None:
    names = [field.alias or name for name, field in model.model_fields.items()]
    chosen = data.draw(st.lists(st.sampled_from([*names, "unknown"]), max_size=3))
    change = {name: data.draw(VALUES) for name in chosen}
    for name in LENGTHS:  # an answer without a limit takes its time
        if change.get(name, 1) is None:
            del change[name]
    response = server.http.post(path, json=base | change)
    assert response.status_code in (200, 400, 404), (base | change, response.text)
    if response.status_code != 200:
        error = json.loads(response.text)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]


@settings(max_examples=60, deadline=None)
@given(body=st.binary(max_size=60))
def test_bytes_that_are_no_json(server: Server, body: bytes) -> None:
    headers = {"content-type": "application/json"}
    assert server.http.post("/v1/completions", content=body, headers=headers).status_code == 400
