"""`LLM.extract_reasoning`: thoughts and content of a finished answer, as the server parts them."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import AddedToken

from tellin.entrypoints.llm import LLM
from tellin.exceptions import InvalidParameterError
from tellin.loading.tokenizer import Tokenizer
from tellin.protocol import EngineCoreRequest, FinishReason
from tellin.sampling_params import SamplingParams
from tests.engine.fakes import EngineMaker
from tests.engine.tokenizers_for_tests import TEMPLATE, byte_level

CHANNELS = "{# <|channel|> <|message|> #}"
MARKS = ("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|return|>", "<think>", "</think>")


def special_tokenizer() -> Tokenizer:
    """One to which all marks are special tokens, so that texts do not show them."""
    base = byte_level()
    base.backend.add_special_tokens([AddedToken(text, special=True) for text in MARKS])
    return Tokenizer(
        base.backend,
        bos_token_id=base.bos_token_id,
        eos_token_id=base.eos_token_id,
        chat_templates={"default": TEMPLATE},
        source=Path("test-tokenizer"),
    )


HARMONY = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>"


@pytest.mark.parametrize(
    ("extra", "said", "reasoning", "content"),
    [
        (CHANNELS, HARMONY + "yes", "hm", "yes"),
        (CHANNELS, "<|channel|>final<|message|>yes", None, "yes"),
        (CHANNELS, "<|channel|>analysis<|message|>hm", "hm", ""),
        ("{# <think> #}", "<think>hm</think>\n\nyes", "hm", "yes"),
        ("{# <think> #}", "yes", None, "yes"),
        ("<think>", "hm</think>yes", "hm", "yes"),
        ("", "yes", None, "yes"),
    ],
)
@pytest.mark.parametrize("are_special", [True, False])
def test_formats(
    make_engine: EngineMaker,
    are_special: bool,
    extra: str,
    said: str,
    reasoning: str | None,
    content: str,
) -> None:
    tokenizer = special_tokenizer() if are_special else byte_level()
    end = tokenizer.eos_token_id
    assert end is not None

    def script(request: EngineCoreRequest) -> list[object]:
        ids = tokenizer.encode(said, add_special_tokens=False)
        last = {"new_token_ids": [end], "finish_reason": FinishReason.STOP}
        return [*([one] for one in ids), last]

    template = TEMPLATE + extra
    llm = LLM.from_engine(make_engine(script, tokenizer=tokenizer, chat_template=template))
    params = SamplingParams(max_tokens=60)
    [output] = llm.chat([{"role": "user", "content": "x"}], params)
    assert llm.extract_reasoning(output) == (reasoning, content)
    for wrong in (1, -1):
        with pytest.raises(InvalidParameterError, match="extract_reasoning"):
            llm.extract_reasoning(output, wrong)


def test_what_a_stop_string_cut_off_does_not_come_back(make_engine: EngineMaker) -> None:
    tokenizer = special_tokenizer()
    said = tokenizer.encode(HARMONY + "yes, and no", add_special_tokens=False)
    engine = make_engine(
        [[one] for one in said], tokenizer=tokenizer, chat_template=TEMPLATE + CHANNELS
    )
    llm = LLM.from_engine(engine)
    [output] = llm.chat([{"role": "user", "content": "x"}], SamplingParams(stop=[", a"]))
    assert output.outputs[0].stop_reason == ", a"
    assert llm.extract_reasoning(output) == ("hm", "yes")
