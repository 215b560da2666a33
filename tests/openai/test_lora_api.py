"""LoRA adapters over HTTP: rules 7.5.1 to 7.5.4, P50."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from benchmarks.synthetic import SIZES
from tellin.loading import open_metadata
from tests.models.adapters import adapter_pairs, write_adapter
from tests.openai.conftest import SLOW, Serve, Server

ADMIN = ("--enable-admin", "--admin-key", "boss")


@pytest.fixture(scope="module")
def adapters(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapters cats and dogs of the tiny model, and one of another shape."""
    root = tmp_path_factory.mktemp("adapters")
    hparams = open_metadata(tiny_model).hparams
    assert hparams.hidden_size == SIZES["tiny"].hidden_size
    write_adapter(root / "cats", adapter_pairs(8, 1, hparams=hparams))
    write_adapter(root / "dogs", adapter_pairs(4, 2, ("q_proj", "v_proj"), hparams, 2.0))
    write_adapter(root / "other", adapter_pairs(4, 3))
    return root


@pytest.fixture(scope="module")
def server(serve: Serve, adapters: Path) -> Iterator[Server]:
    names = ("--served-model-name", "tiny", "--lora", f"cats={adapters / 'cats'}")
    with serve(*names, *ADMIN, "--set", "max_loras=2") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with server.client() as running:
        yield running


def admin(server: Server, what: str, **body: Any) -> httpx.Response:
    headers = {"Authorization": "Bearer boss"}
    return server.http.post(f"/v1/{what}_lora_adapter", json=body, headers=headers)


def complete(client: openai.OpenAI, model: str, **options: Any) -> str:
    options = {"prompt": "Hello there", "temperature": 0, "max_tokens": 12} | options
    answer = client.completions.create(model=model, **options)
    assert answer.model == model
    return answer.choices[0].text


def test_7_5_1_the_model_name_chooses_the_adapter(client: openai.OpenAI) -> None:
    assert complete(client, "cats") != complete(client, "tiny")
    messages: Any = [{"role": "user", "content": "Hello"}]
    texts = []
    for model in ("tiny", "cats"):
        options = {"model": model, "messages": messages, "temperature": 0, "max_tokens": 8}
        answer: Any = client.chat.completions.create(**options)
        assert answer.model == model
        chunks = list(client.chat.completions.create(**options, stream=True))
        streamed = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert streamed == answer.choices[0].message.content
        assert {chunk.model for chunk in chunks} == {model}
        response = client.responses.create(
            model=model, input="Hello", temperature=0, max_output_tokens=8
        )
        assert response.model == model
        assert response.output_text == streamed
        texts.append(streamed)
    assert texts[0] != texts[1]


def test_7_5_4_adapters_are_listed(client: openai.OpenAI, adapters: Path) -> None:
    cards = {card.id: card.model_dump() for card in client.models.list()}
    assert list(cards) == ["tiny", "cats"]
    assert cards["cats"]["root"] == str(adapters / "cats")
    assert cards["cats"]["parent"] == "tiny"
    assert "parent" not in cards["tiny"]
    assert client.models.retrieve("cats").id == "cats"


def test_7_5_2_load_and_unload(server: Server, client: openai.OpenAI, adapters: Path) -> None:
    path = str(adapters / "dogs")
    base = complete(client, "tiny")
    with pytest.raises(openai.NotFoundError):
        complete(client, "dogs")
    loaded = admin(server, "load", lora_name="dogs", lora_path=path)
    assert loaded.status_code == 200, loaded.text
    assert loaded.json()["lora_name"] == "dogs"
    dogs = complete(client, "dogs")
    assert dogs not in (base, complete(client, "cats"))
    assert complete(client, "tiny") == base
    again = admin(server, "load", lora_name="dogs", lora_path=path)
    assert again.status_code == 400
    assert again.json()["error"]["code"] == "adapter_exists"
    in_place = {"lora_name": "dogs", "lora_path": str(adapters / "cats"), "load_inplace": True}
    assert admin(server, "load", **in_place).status_code == 200
    assert complete(client, "dogs") == complete(client, "cats") != dogs
    assert admin(server, "unload", lora_name="dogs", lora_int_id=99).status_code == 400
    assert admin(server, "unload", lora_name="dogs").status_code == 200
    with pytest.raises(openai.NotFoundError):
        complete(client, "dogs")
    assert admin(server, "unload", lora_name="dogs").status_code == 404
    # P50: the name again, with the weights of its own path.
    assert admin(server, "load", lora_name="dogs", lora_path=path).status_code == 200
    assert complete(client, "dogs") == dogs
    assert admin(server, "unload", lora_name="dogs").status_code == 200


def test_p50_bad_loads(server: Server, client: openai.OpenAI, adapters: Path) -> None:
    """400 or 404 that says why; the engine goes on."""
    missing = admin(server, "load", lora_name="x", lora_path="/nowhere")
    assert missing.status_code == 404
    assert "no such folder" in missing.json()["error"]["message"]
    misfit = admin(server, "load", lora_name="x", lora_path=str(adapters / "other"))
    assert misfit.status_code == 400
    assert "the model needs (r, 256)" in misfit.json()["error"]["message"]
    for body in (
        {"lora_name": "x"},
        {"lora_path": "/a"},
        {"lora_name": "", "lora_path": "/a"},
        {"lora_name": "x", "lora_path": " "},
        {"lora_name": "tiny", "lora_path": "/a"},
        {"lora_name": 3, "lora_path": "/a"},
        {"lora_name": "x", "lora_path": "/a", "rank": 3},
    ):
        response = admin(server, "load", **body)
        assert response.status_code == 400, response.text
    assert admin(server, "unload").status_code == 400
    assert [card.id for card in client.models.list()] == ["tiny", "cats"]
    assert complete(client, "cats")


def test_the_admin_key_is_needed(server: Server) -> None:
    body = {"lora_name": "x", "lora_path": "/a"}
    assert server.http.post("/v1/load_lora_adapter", json=body).status_code == 401


def test_neighbours_of_all_kinds(client: openai.OpenAI) -> None:
    """Promise 1: the same text alone and among requests with other weights."""
    expected = {model: complete(client, model, max_tokens=40) for model in ("tiny", "cats")}
    results: list[tuple[str, str]] = []

    def work(model: str) -> None:
        results.append((model, complete(client, model, max_tokens=40)))

    threads = [threading.Thread(target=work, args=(m,)) for m in ("tiny", "cats") * 4]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8
    assert all(text == expected[model] for model, text in results)


def test_p50_unload_lets_requests_in_progress_end(serve: Serve, adapters: Path) -> None:
    args = ("--lora", f"cats={adapters / 'cats'}", *ADMIN, *SLOW)
    with serve("--served-model-name", "tiny", *args) as server, server.client() as client:
        expected = complete(client, "cats", max_tokens=60)
        stream = client.completions.create(
            model="cats", prompt="Hello there", temperature=0, max_tokens=60, stream=True
        )
        text = next(iter(stream)).choices[0].text
        assert admin(server, "unload", lora_name="cats").status_code == 200
        with pytest.raises(openai.NotFoundError):
            complete(client, "cats")
        text += "".join(chunk.choices[0].text for chunk in stream if chunk.choices)
        assert text == expected


def test_without_lora(serve: Serve) -> None:
    with serve("--served-model-name", "tiny", *ADMIN) as server:
        response = admin(server, "load", lora_name="x", lora_path="/a")
        assert response.status_code == 400
        assert "--enable-lora" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "arguments", [("--lora", "x=/nowhere"), ("--lora", "x"), ("--lora", "a=/a", "--lora", "a=/b")]
)
def test_7_5_1_a_bad_static_adapter_fails_the_start(serve: Serve, arguments: Any) -> None:
    failure = pytest.raises(
        AssertionError, match=r"error: .*(no such folder|NAME=PATH|given twice)"
    )
    with failure as caught, serve(*arguments):
        pass
    assert "Traceback" not in str(caught.value)
