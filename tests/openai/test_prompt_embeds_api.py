"""Prompts as embeddings over HTTP, as vLLM's clients send them, in files that are no pickles."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from tellin.loading import open_model
from tellin.loading.dequantize import dequantize
from tests.openai.conftest import run_server


def b64(rows: Any) -> str:
    stream = io.BytesIO()
    np.save(stream, rows)
    return base64.b64encode(stream.getvalue()).decode()


def test_embeddings_as_prompts(tiny_model: Path) -> None:
    with open_model(tiny_model) as source:
        table = dequantize(source.tensors["embed_tokens.weight"])
    with run_server(
        tiny_model, "--served-model-name", "tiny", "--set", "enable_prompt_embeds=true"
    ) as server:
        client = server.client()
        ids = server.http.post("/tokenize", json={"prompt": "Hello"}).json()["tokens"]

        def complete(prompt: Any, *embeds: Any, **options: Any) -> Any:
            extra = {"prompt_embeds": embeds[0] if len(embeds) == 1 else list(embeds)}
            settings = {"temperature": 0, "max_tokens": 6, "logprobs": 2, "model": "tiny"}
            return client.completions.create(
                prompt=prompt, **settings | options, extra_body=extra if embeds else {}
            )

        whole = b64(table[ids])
        expected = complete("Hello").choices[0]
        answer = complete("", whole)
        assert answer.choices[0].text == expected.text
        assert answer.choices[0].logprobs == expected.logprobs
        assert answer.usage.prompt_tokens == len(ids)
        several = complete("Hello", whole, b64(table[ids[:3]].astype(np.float16)))
        assert [choice.index for choice in several.choices] == [0, 1, 2]
        assert [several.choices[i].text for i in (0, 2)] == [expected.text] * 2
        streamed = complete("", whole, stream=True)
        assert "".join(chunk.choices[0].text for chunk in streamed) == expected.text
        assert len(complete("", whole, n=2, temperature=1.0).choices) == 2
        for embeds, options, match in (
            ([b64(table[:2, :4])], {}, "hidden size"),
            ([whole, b64(table[:2] * np.nan)], {}, r"prompt_embeds\[1\]: .*NaN"),
            ([base64.b64encode(b"PK\x03\x04").decode()], {}, "torch.save"),
            (["?"], {}, "base64"),
            ([whole], {"echo": True}, "echo"),
        ):
            with pytest.raises(openai.BadRequestError, match=match):
                complete("", *embeds, **options)
        body = {"prompt_embeds": whole, "max_tokens": 2, "prompt_logprobs": 1}
        assert "prompt_logprobs" in server.http.post("/v1/completions", json=body).text
        assert server.http.post("/v1/completions", json={"max_tokens": 2}).status_code == 400


def test_off_unless_switched_on(client: openai.OpenAI) -> None:
    extra = {"prompt_embeds": b64(np.zeros((1, 4), np.float32))}
    with pytest.raises(openai.BadRequestError, match="enable_prompt_embeds=True"):
        client.completions.create(model="tiny", prompt="", extra_body=extra)
    messages: Any = [{"role": "user", "content": "x"}]
    with pytest.raises(openai.BadRequestError, match="/v1/completions only"):
        client.chat.completions.create(model="tiny", messages=messages, extra_body=extra)
