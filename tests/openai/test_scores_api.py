"""``/score`` and ``/rerank``: vLLM's shapes, and the numbers of `/v1/embeddings`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.openai.conftest import Serve, Server

TEXTS = [f"text {i} " * (1 + i % 5) for i in range(9)]


@pytest.fixture(scope="module")
def embedder(serve: Serve) -> Iterator[Server]:
    """The tiny model with a random last hidden state as its embedding."""
    options = ("--served-model-name", "tiny", "--set", "runner=pooling", "--max-model-len", "128")
    with serve(*options) as running:
        yield running


def post(server: Server, path: str, **body: Any) -> dict[str, Any]:
    response = server.http.post(path, json=body)
    assert response.status_code == 200, response.text
    reply: dict[str, Any] = response.json()
    return reply


def vectors(server: Server, texts: list[str]) -> np.ndarray:
    data = post(server, "/v1/embeddings", input=texts)["data"]
    return np.array([item["embedding"] for item in data])


def test_9_5_2_one_with_many(embedder: Server) -> None:
    reply = post(embedder, "/score", model="tiny", text_1=TEXTS[0], text_2=TEXTS)
    assert (reply["object"], reply["model"]) == ("list", "tiny")
    assert reply["id"].startswith("score-")
    assert [item["index"] for item in reply["data"]] == list(range(9))
    assert {item["object"] for item in reply["data"]} == {"score"}
    found = [item["score"] for item in reply["data"]]
    own = vectors(embedder, TEXTS)
    np.testing.assert_allclose(found, own @ own[0], atol=1e-6)
    assert found[0] == pytest.approx(1)
    tokens = post(embedder, "/v1/embeddings", input=TEXTS)["usage"]["prompt_tokens"]
    alone = post(embedder, "/v1/embeddings", input=TEXTS[0])["usage"]["prompt_tokens"]
    assert reply["usage"]["total_tokens"] == tokens + alone  # the first text is read once


def test_pairs_and_other_names(embedder: Server) -> None:
    pairs = post(embedder, "/v1/score", text_1=TEXTS[:3], text_2=TEXTS[3:6])["data"]
    singles = [
        post(embedder, "/score", text_1=one, text_2=other)["data"][0]["score"]
        for one, other in zip(TEXTS[:3], TEXTS[3:6], strict=True)
    ]
    assert [item["score"] for item in pairs] == singles
    named = post(embedder, "/score", queries=TEXTS[:3], documents=TEXTS[3:6])["data"]
    assert named == pairs


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_rerank(embedder: Server, path: str) -> None:
    documents = [TEXTS[1], {"text": TEXTS[2]}, TEXTS[0], TEXTS[2]]
    reply = post(embedder, path, query=TEXTS[0], documents=documents)
    scores = post(embedder, "/score", text_1=TEXTS[0], text_2=[TEXTS[i] for i in (1, 2, 0, 2)])
    expected = [item["score"] for item in scores["data"]]
    order = [item["index"] for item in reply["results"]]
    assert order == sorted(range(4), key=lambda i: -expected[i])  # equal ones in their order
    assert order[0] == 2
    assert [item["relevance_score"] for item in reply["results"]] == [expected[i] for i in order]
    assert reply["results"][0]["document"] == {"text": TEXTS[0]}
    assert reply["usage"]["total_tokens"] == scores["usage"]["total_tokens"]
    short = post(embedder, path, query=TEXTS[0], documents=documents, top_n=2,
                 return_documents=False)  # fmt: skip
    assert [set(item) for item in short["results"]] == [{"index", "relevance_score"}] * 2
    assert [item["index"] for item in short["results"]] == order[:2]
    assert len(post(embedder, path, query="x", documents=documents, top_n=0)["results"]) == 4


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "got 2 and 1"),
        ("/score", {"text_1": "a", "text_2": []}, "text_2"),
        ("/score", {"text_1": "a"}, "text_2"),
        ("/score", {"text_1": "a", "text_2": 5}, "text_2"),
        ("/score", {"text_1": "a", "text_2": ["b"] * 2049}, "at most 2048"),
        ("/score", {"text_1": "a", "text_2": "b", "softmax": True}, "softmax"),
        ("/rerank", {"query": "a", "documents": []}, "documents"),
        ("/rerank", {"query": ["a"], "documents": ["b"]}, "query"),
        ("/rerank", {"query": "a", "documents": [{"title": "b"}]}, "documents"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ("/rerank", {"query": "a", "documents": ["b" * 1000]}, "128"),
    ],
)
def test_bad_bodies_are_400(
    embedder: Server, path: str, body: dict[str, Any], message: str
) -> None:
    response = embedder.http.post(path, json=body)
    assert response.status_code == 400, response.text
    assert message in str(response.json()["error"])


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("/rerank", {"query": "a", "documents": ["b", {"text": "c" * 999}, "d"]}, "documents[1]"),
        ("/rerank", {"query": "", "documents": ["b"]}, "query"),
        ("/score", {"text_1": "a", "text_2": ["b"] * 70 + ["b" * 999]}, "text_2[70]"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["", "b"]}, "text_2[0]"),
        ("/score", {"text_1": "a" * 999, "text_2": "b"}, "text_1"),
        ("/v1/embeddings", {"input": ["a", "b" * 999]}, "input[1]"),
        ("/v1/embeddings", {"input": "b" * 999}, "input"),
        ("/v1/embeddings", {"input": [[5], [5, 99999]]}, "input[1]"),
        ("/v1/embeddings", {"input": [99999]}, "input"),
    ],
)
def test_errors_say_which_text(
    embedder: Server, path: str, body: dict[str, Any], name: str
) -> None:
    response = embedder.http.post(path, json=body | {"add_special_tokens": False})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, name)
    assert error["message"].startswith(f"{name}: ")


def test_errors_of_nested_bodies_name_no_class(embedder: Server) -> None:
    body = {"query": "a", "documents": ["b", {"text": "c", "e": 1}]}
    error = embedder.http.post("/rerank", json=body).json()["error"]
    assert (error["param"], error["code"]) == ("documents.1.e", "unknown_parameter")
    body["documents"] = ["b", 5]
    error = embedder.http.post("/rerank", json=body).json()["error"]
    assert error["message"].endswith("string, got 5; or Input should be an object, got 5")


def test_a_model_that_embeds_does_not_chat(embedder: Server) -> None:
    body = {"messages": [{"role": "user", "content": "a"}]}
    error = embedder.http.post("/v1/chat/completions", json=body).json()["error"]
    assert (error["param"], error["code"]) == ("model", "unsupported_model")
    assert "does not generate text; it supports: embed, token_embed" in error["message"]


def test_long_texts_can_be_cut(embedder: Server) -> None:
    body = {"query": "a", "documents": ["b" * 1000], "truncate_prompt_tokens": -1}
    assert len(post(embedder, "/rerank", **body)["results"]) == 1
    assert embedder.http.post("/rerank", json=body | {"model": "other"}).status_code == 404


def test_a_model_that_generates_has_no_scores(server: Server) -> None:
    response = server.http.post("/score", json={"text_1": "a", "text_2": "b"})
    assert response.status_code == 400
    assert "does not embed" in response.json()["error"]["message"]
