"""A grammar that takes long to check holds up its own request and no other (P36)."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from benchmarks.synthetic import SIZES, write_llama
from tellin import SamplingParams, grammar_validation
from tellin.config import EngineArgs
from tellin.engine.async_llm import AsyncLLM
from tellin.exceptions import InvalidParameterError
from tellin.sampling_params import StructuredOutputsParams


def constrained(regex: str) -> SamplingParams:
    return SamplingParams(max_tokens=4, structured_outputs=StructuredOutputsParams(regex=regex))


async def answer(engine: AsyncLLM, request_id: str, params: SamplingParams) -> str:
    text = ""
    async for output in engine.generate({"prompt_token_ids": [5, 6]}, params, request_id):
        text = output.outputs[0].text
    return text


def test_one_core_does_not_play_several(tmp_path: Path) -> None:
    """A size that nobody divides the requests by would be a parameter without effect."""
    model = write_llama(tmp_path / "tiny.gguf", SIZES["tiny"], "q8_0")
    args = EngineArgs(model=model, max_model_len=128, data_parallel_size=2)
    for multiprocess_mode in (False, True):
        with pytest.raises(InvalidParameterError, match="data_parallel_size=2"):
            AsyncLLM.from_engine_args(args, multiprocess_mode=multiprocess_mode)


def test_the_event_loop_goes_on_while_a_grammar_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_llama(tmp_path / "tiny.gguf", SIZES["tiny"], "q8_0")
    started, release = threading.Event(), threading.Event()
    check = grammar_validation.grammar_error

    def slow(grammar: str) -> str:
        started.set()
        assert release.wait(60)
        return check(grammar)

    async def run() -> None:
        async with AsyncLLM.from_engine_args(EngineArgs(model=model, max_model_len=128)) as engine:
            monkeypatch.setattr(grammar_validation, "grammar_error", slow)
            slow_one = asyncio.create_task(answer(engine, "slow", constrained("[xy]{2,3}")))
            while not started.is_set():
                await asyncio.sleep(0.01)
            # In the same loop, while that check hangs:
            assert await answer(engine, "free", SamplingParams(max_tokens=4, temperature=0.0)) != ""
            assert not slow_one.done()
            release.set()
            assert set(await slow_one) <= {"x", "y"}
            with pytest.raises(InvalidParameterError, match="unclosed group"):
                await answer(engine, "bad", constrained("("))

    asyncio.run(run())
