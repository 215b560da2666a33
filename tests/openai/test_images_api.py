"""Images over HTTP, with the real ``openai`` package and a tiny model that sees them."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from PIL import Image

from tests.models.qwen_vl import write_qwen_vl
from tests.models.vision import write_smolvlm
from tests.openai.conftest import Server, run_server


def url_of(seed: int, kind: str = "PNG") -> str:
    pixels = np.random.RandomState(seed).randint(0, 256, (40, 60, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind)
    data = base64.b64encode(buffer.getvalue()).decode()
    return f"data:image/{kind.lower()};base64,{data}"


def message(*parts: str) -> Any:
    """A user's message: URLs become images, other parts text."""
    content: list[dict[str, Any]] = []
    for part in parts:
        if ":" in part:
            content.append({"type": "image_url", "image_url": {"url": part, "detail": "auto"}})
        else:
            content.append({"type": "text", "text": part})
    return {"role": "user", "content": content}


OPTIONS: Any = {"model": "tiny", "max_tokens": 6, "temperature": 0,
                "extra_body": {"ignore_eos": True}}  # fmt: skip


@pytest.fixture(scope="module")
def images_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = write_smolvlm(tmp_path_factory.mktemp("models") / "smolvlm")
    arguments = ("--served-model-name", "tiny", "--max-model-len", "512", "--set",
                 "num_kv_blocks=256", "--set", 'limit_mm_per_prompt={"image": 2}')  # fmt: skip
    with run_server(model, *arguments) as running:
        yield running


@pytest.fixture
def eyes(images_server: Server) -> Iterator[openai.OpenAI]:
    with images_server.client() as running:
        yield running


def answer(client: openai.OpenAI, *parts: str) -> tuple[str | None, int]:
    reply = client.chat.completions.create(messages=[message(*parts)], **OPTIONS)
    assert reply.usage is not None
    return reply.choices[0].message.content, reply.usage.prompt_tokens


def test_chat(eyes: openai.OpenAI, images_server: Server) -> None:
    text, num_tokens = answer(eyes, url_of(1), "what is this?")
    assert num_tokens > 64
    assert answer(eyes, url_of(1), "what is this?") == (text, num_tokens)
    assert answer(eyes, url_of(2), "what is this?") != (text, num_tokens)
    assert answer(eyes, url_of(1), "and", url_of(2), "?")[1] > num_tokens + 64
    assert images_server.metric("tellin:mm_cache_hits") >= 2
    chunks = eyes.chat.completions.create(
        messages=[message(url_of(1), "what is this?")], stream=True, **OPTIONS
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text


def test_responses(eyes: openai.OpenAI) -> None:
    content: Any = [
        {"type": "input_image", "image_url": url_of(1), "detail": "auto"},
        {"type": "input_text", "text": "what is this?"},
    ]
    reply = eyes.responses.create(
        model="tiny", input=[{"role": "user", "content": content}], max_output_tokens=6,
        temperature=0,
    )  # fmt: skip
    assert reply.usage is not None
    assert reply.usage.input_tokens == answer(eyes, url_of(1), "what is this?")[1]


def test_tokenize_counts_what_an_image_takes(images_server: Server) -> None:
    body = {"messages": [message(url_of(1), "what is this?")]}
    reply = images_server.http.post("/tokenize", json=body).json()
    with images_server.client() as client:
        assert reply["count"] == answer(client, url_of(1), "what is this?")[1]


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        (["https://example.com/cat.png"], "nothing is fetched from a network"),
        (["file:///etc/passwd"], "allowed_local_media_path"),
        (["data:image/png;base64,####"], "not valid base64"),
        (["data:image/png;base64,AAAA"], "no picture that can be read"),
        ([url_of(1)] * 3, "at most 2 are allowed"),
        ([url_of(1), "<image>"], "2 placeholders"),
    ],
)
def test_refusals_are_the_clients_fault(
    images_server: Server, parts: list[str], words: str
) -> None:
    body = {"model": "tiny", "messages": [message(*parts, "x")], "max_tokens": 1}
    reply = images_server.http.post("/v1/chat/completions", json=body)
    assert reply.status_code == 400, reply.text
    assert words in reply.json()["error"]["message"]


def test_a_text_model_refuses_images(server: Server) -> None:
    body = {"model": "tiny", "messages": [message(url_of(1), "x")], "max_tokens": 1}
    reply = server.http.post("/v1/chat/completions", json=body)
    assert reply.status_code == 400
    assert "no image encoder" in reply.json()["error"]["message"]


@pytest.mark.slow
def test_a_model_of_any_shapes(tmp_path: Path) -> None:
    """Pictures of Qwen3-VL in a conversation; films are the client's fault."""
    model = write_qwen_vl(tmp_path / "qwen", "qwen3_vl")
    arguments = ("--served-model-name", "tiny", "--max-model-len", "256")
    with run_server(model, *arguments) as running, running.client() as client:
        first = answer(client, url_of(1), "and", url_of(2), "?")
        assert answer(client, url_of(1), "and", url_of(2), "?") == first
        assert answer(client, url_of(2), "and", url_of(1), "?")[0] != first[0]
        film = {"type": "video_url", "video_url": {"url": url_of(1)}}
        body = {"model": "tiny", "messages": [{"role": "user", "content": [film]}]}
        reply = running.http.post("/v1/chat/completions", json=body)
        assert reply.status_code == 400
        assert "video" in reply.json()["error"]["message"]
