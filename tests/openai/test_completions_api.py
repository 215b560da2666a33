"""``/v1/completions`` with the real ``openai`` package."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai.types import Completion

from tests.openai.conftest import Server


def complete(client: openai.OpenAI, **options: Any) -> Completion:
    return client.completions.create(**({"model": "tiny", "prompt": "Hello"} | options))


def test_several_prompts_in_order(client: openai.OpenAI) -> None:
    answer = complete(client, prompt=["a", "b", "c"], n=2, max_tokens=4, seed=1)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3, 4, 5]
    for position, prompt in enumerate("abc"):
        alone = complete(client, prompt=prompt, n=2, max_tokens=4, seed=1)
        mine = answer.choices[2 * position : 2 * position + 2]
        assert [c.text for c in mine] == [c.text for c in alone.choices]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 3
    assert answer.usage.completion_tokens == 24


def test_token_ids_as_prompt(server: Server, client: openai.OpenAI) -> None:
    ids = server.http.post("/tokenize", json={"prompt": "Hello"}).json()["tokens"]
    text = complete(client, temperature=0, max_tokens=5).choices[0].text
    assert complete(client, prompt=ids, temperature=0, max_tokens=5).choices[0].text == text
    both = complete(client, prompt=[ids, ids], temperature=0, max_tokens=5, echo=True)
    assert [c.text for c in both.choices] == ["Hello" + text] * 2


def test_p28_scoring_a_prompt(client: openai.OpenAI) -> None:
    answer = complete(client, echo=True, logprobs=1, max_tokens=0)
    choice = answer.choices[0]
    assert choice.text == "Hello"
    assert choice.finish_reason == "length"
    logprobs: Any = choice.logprobs
    assert logprobs.tokens == list("Hello")
    assert logprobs.text_offset == [0, 1, 2, 3, 4]
    assert logprobs.token_logprobs[0] is None
    assert logprobs.top_logprobs[0] is None
    assert all(value <= 0 for value in logprobs.token_logprobs[1:])
    assert all(t in top for t, top in zip("ello", logprobs.top_logprobs[1:], strict=True))
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0
    assert complete(client, echo=True, max_tokens=0).choices[0].text == "Hello"
    with pytest.raises(openai.BadRequestError, match="only with echo"):
        complete(client, max_tokens=0)


def test_echo_with_logprobs_of_both_parts(client: openai.OpenAI) -> None:
    choice = complete(client, echo=True, logprobs=0, max_tokens=3, temperature=0).choices[0]
    logprobs: Any = choice.logprobs
    assert len(logprobs.tokens) == 8
    assert "".join(logprobs.tokens) == choice.text
    assert logprobs.text_offset == list(range(8))
    assert all(len(top) == 1 for top in logprobs.top_logprobs[1:])


@pytest.mark.parametrize(
    "options",
    [{}, {"n": 2, "seed": 3}, {"prompt": ["a", "b"]}, {"echo": True}, {"logprobs": 2}],
)
def test_p54_p55_streams_equal_answers(
    server: Server, client: openai.OpenAI, options: dict[str, Any]
) -> None:
    body = {"prompt": "Hello", "max_tokens": 9, "temperature": 0, **options}
    if "seed" in options:
        body["temperature"] = 1
    whole = Completion.model_validate(server.http.post("/v1/completions", json=body).json())
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    text = server.http.post("/v1/completions", json=body).text
    events = [event.removeprefix("data: ") for event in text.split("\n\n") if event]
    assert events.pop() == "[DONE]"
    chunks = [json.loads(event) for event in events]
    last = chunks.pop()
    assert last["choices"] == []
    assert whole.usage is not None
    assert last["usage"]["completion_tokens"] == whole.usage.completion_tokens
    for choice in whole.choices:
        mine = [c for k in chunks for c in k["choices"] if c["index"] == choice.index]
        assert "".join(c["text"] for c in mine) == choice.text
        assert [c["finish_reason"] for c in mine][-1] == choice.finish_reason
        assert {c["finish_reason"] for c in mine[:-1]} <= {None}
        if choice.logprobs is not None:
            for name in ("tokens", "token_logprobs", "text_offset"):
                joined = [item for c in mine for item in c["logprobs"][name]]
                assert joined == getattr(choice.logprobs, name)


def test_p11_best_of(client: openai.OpenAI) -> None:
    assert complete(client, best_of=1, max_tokens=1).choices
    assert complete(client, best_of=2, n=2, max_tokens=1).choices
    with pytest.raises(openai.BadRequestError, match="best_of=3"):
        complete(client, best_of=3, n=1)


def test_logit_bias_and_structured_regex(client: openai.OpenAI, server: Server) -> None:
    [token_id] = server.http.post("/tokenize", json={"prompt": "Q"}).json()["tokens"]
    biased = complete(client, logit_bias={str(token_id): 100}, max_tokens=3, temperature=0,
                      extra_body={"allowed_token_ids": [token_id]})  # fmt: skip
    assert biased.choices[0].text == "QQQ"
    body = {"structured_outputs": {"regex": "[ab]{4}"}}
    text = complete(client, extra_body=body, max_tokens=9).choices[0].text
    assert len(text) == 4
    assert set(text) <= set("ab")


def test_p16_truncation_only_on_request_and_visible(client: openai.OpenAI) -> None:
    long = "x" * 3000
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, prompt=long)
    assert caught.value.code == "context_length_exceeded"
    answer = complete(client, prompt=long, extra_body={"truncate_prompt_tokens": 10}, max_tokens=1)
    usage: Any = answer.usage
    assert usage.prompt_tokens == 10
    assert usage.prompt_tokens_details.truncated_tokens == 2990


def test_errors_say_which_of_several_prompts(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=r"prompt\[1\]: ") as caught:
        complete(client, prompt=["a", "x" * 3000], n=2)
    assert caught.value.param == "prompt[1]"
    with pytest.raises(openai.BadRequestError, match=r"prompt\[2\]: ") as caught:
        complete(client, prompt=[[5], [6], [1 << 30]])
    assert caught.value.param == "prompt[2]"
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, prompt="x" * 3000)
    assert "prompt[" not in str(caught.value)


def test_p47_control_tokens_written_out_stay_text_if_wanted(server: Server) -> None:
    def tokenize(**body: Any) -> list[int]:
        reply = server.http.post("/tokenize", json={"prompt": "a<|im_end|>", **body}).json()
        ids: list[int] = reply["tokens"]
        assert server.http.post("/detokenize", json={"tokens": ids}).json()["prompt"] == (
            "a<|im_end|>"
        )
        return ids

    assert len(tokenize()) == 2
    assert len(tokenize(parse_special=False)) == len("a<|im_end|>")
