"""Fixtures of the entry points' tests."""

from __future__ import annotations

from typing import Any

import pytest

from tellin.entrypoints.llm import LLM
from tellin.protocol import EngineCoreRequest, FinishReason
from tests.engine.fakes import EngineMaker, text_ids

LONG = "x" * 100


@pytest.fixture
def make_engine(monkeypatch: pytest.MonkeyPatch) -> EngineMaker:
    """Builds engines around a scripted core."""
    return EngineMaker(monkeypatch)


def echo(request: EngineCoreRequest) -> list[list[int]]:
    """Says the prompt again, one token per step: longer prompts end later."""
    return [[token_id] for token_id in request.prompt_token_ids or ()]


@pytest.fixture
def llm(make_engine: EngineMaker) -> LLM:
    return LLM.from_engine(make_engine(echo))


def is_idle(llm: LLM) -> bool:
    engine = llm.llm_engine
    return (
        not engine.has_unfinished_requests()
        and engine.output_processor.external_req_ids == {}
        and engine.engine_core.live == {}  # type: ignore[attr-defined]
        and llm._runner.driver._inboxes == {}
    )


def failing(request: EngineCoreRequest) -> list[Any]:
    if request.prompt_token_ids == text_ids("bad"):
        return [{"new_token_ids": [], "finish_reason": FinishReason.ERROR, "error": "NaN"}]
    return echo(request)
