"""``/v1/embeddings`` with the real ``openai`` package: P51, 9.6."""

from __future__ import annotations

import base64
from collections.abc import Iterator

import numpy as np
import openai
import pytest

from tests.openai.conftest import Serve, Server

INPUTS = [f"text {i} " * (1 + i % 5) for i in range(20)]


@pytest.fixture(scope="module")
def embedder(serve: Serve) -> Iterator[Server]:
    """The tiny model with a random last hidden state as its embedding."""
    options = ("--served-model-name", "tiny", "--set", "runner=pooling", "--max-model-len", "128")
    cut = ("--set", 'pooler_config={"is_matryoshka": true, "matryoshka_dimensions": [16, 32]}')
    with serve(*options, *cut) as running:
        yield running


@pytest.fixture(scope="module")
def client(embedder: Server) -> Iterator[openai.OpenAI]:
    with embedder.client() as running:
        yield running


def test_one_and_many_inputs_in_order(client: openai.OpenAI) -> None:
    answer = client.embeddings.create(model="tiny", input=INPUTS)
    assert answer.object == "list"
    assert answer.model == "tiny"
    assert [item.index for item in answer.data] == list(range(20))
    alone = [client.embeddings.create(model="tiny", input=text).data[0] for text in INPUTS]
    assert [item.embedding for item in answer.data] == [item.embedding for item in alone]
    assert all(abs(np.linalg.norm(item.embedding) - 1) < 1e-5 for item in answer.data)


def test_9_6_1_float_and_base64_are_the_same_numbers(embedder: Server) -> None:
    """The package asks for base64 by itself; plain clients get numbers."""
    body = {"model": "tiny", "input": "hello"}
    plain = embedder.http.post("/v1/embeddings", json=body).json()["data"][0]
    coded = embedder.http.post("/v1/embeddings", json=body | {"encoding_format": "base64"}).json()
    assert plain["object"] == "embedding"
    raw = base64.b64decode(coded["data"][0]["embedding"])
    assert np.frombuffer(raw, "<f4").tolist() == plain["embedding"]
    with embedder.client() as client:
        answer = client.embeddings.create(model="tiny", input="hello")
    np.testing.assert_array_equal(answer.data[0].embedding, plain["embedding"])


def test_token_ids_and_usage(embedder: Server, client: openai.OpenAI) -> None:
    ids = embedder.http.post("/tokenize", json={"prompt": "hello"}).json()["tokens"]
    answer = client.embeddings.create(model="tiny", input="hello")
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (len(ids), len(ids))
    both = client.embeddings.create(model="tiny", input=[ids, ids])
    assert [item.embedding for item in both.data] == [answer.data[0].embedding] * 2
    assert both.usage.prompt_tokens == 2 * len(ids)
    assert client.embeddings.create(model="tiny", input=ids).data == answer.data


def test_dimensions(client: openai.OpenAI) -> None:
    full = client.embeddings.create(model="tiny", input="hello").data[0].embedding
    short = client.embeddings.create(model="tiny", input="hello", dimensions=16).data[0].embedding
    cut = np.array(full[:16])
    np.testing.assert_allclose(short, cut / np.linalg.norm(cut), atol=1e-6)
    with pytest.raises(openai.BadRequestError, match="16, 32") as caught:
        client.embeddings.create(model="tiny", input="hello", dimensions=17)
    assert caught.value.param == "dimensions"


def test_9_6_2_too_long_is_a_400_unless_cut(client: openai.OpenAI) -> None:
    """One failing input fails the call; nothing of it is left in the engine."""
    with pytest.raises(openai.BadRequestError, match="128"):
        client.embeddings.create(model="tiny", input=["short", "x" * 1000])
    cut = client.embeddings.create(
        model="tiny", input="x" * 1000, extra_body={"truncate_prompt_tokens": -1}
    )
    assert cut.usage.prompt_tokens == 128


@pytest.mark.parametrize("bad", [[], "", [""], [[]], [[1], [-1]], [[10**6]], {"a": 1}, None, 3])
def test_bad_inputs_are_400(embedder: Server, bad: object) -> None:
    response = embedder.http.post("/v1/embeddings", json={"model": "tiny", "input": bad})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_an_embedder_does_not_generate(embedder: Server, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="embed"):
        client.completions.create(model="tiny", prompt="x")
    with pytest.raises(openai.BadRequestError, match="embed"):
        client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "x"}], max_tokens=1
        )
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="gpt-4", input="x")
    assert embedder.metric("tellin:num_requests_running") == 0
