"""6.6: a thinking model's thoughts are free, its answer is the grammar's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from tellin.config import (
    EngineArgs,
    ReasoningConfig,
    SpeculativeConfig,
    StructuredOutputsConfig,
)
from tellin.core.reasoning import ReasoningGate
from tellin.core.structured_output import StructuredOutputManager
from tellin.core.structured_output_guidance import GuidanceBackend
from tellin.engine.arg_utils import create_engine_config
from tellin.exceptions import InvalidParameterError
from tellin.protocol import FinishReason
from tests.core.driver import Driver
from tests.core.fakes import make_config
from tests.core.test_structured_output import FakeBackend, constrain, stop_at_eos
from tests.core.vocabulary import EOS_ID, SIZE, ByteTokenizer

START, END = 60, 61
CONFIG = ReasoningConfig(think_start_token_ids=(START,), think_end_token_ids=(END,))
THOUGHTS = [START, 70, 71, 72, 73, 74, END]


# ---------------------------------------------------------------------- the gate


@pytest.mark.parametrize(
    ("prompt", "ended"),
    [
        ([1, 2], False),
        ([START, 1], False),
        ([START, 1, END, 2], True),
        ([START, 1, END, START], False),
        ([END], True),
        ([START, 1, END, 5, START, 6, END], True),
    ],
)
def test_6_6_1_the_prompt_says_whether_thoughts_are_over(prompt: list[int], ended: bool) -> None:
    assert ReasoningGate.from_prompt(CONFIG, prompt, None).ended == ended


def test_6_6_1_the_caller_may_know_better() -> None:
    assert ReasoningGate.from_prompt(CONFIG, [1], True).ended
    assert not ReasoningGate.from_prompt(CONFIG, [START, END], False).ended


def test_the_marker_is_a_thought_and_what_follows_is_not() -> None:
    gate = ReasoningGate((7, 8), False)
    assert gate.num_thoughts([1, 7, 8, 2, 3]) == 3
    assert gate.advance([1, 7]) == 2
    assert not gate.ended
    assert gate.closes_within([8])
    assert gate.num_thoughts([8, 5]) == 1
    assert gate.advance([9, 7]) == 2
    assert not gate.ended
    assert gate.advance([8, 5, 6]) == 1
    assert gate.ended
    assert gate.num_thoughts([7, 8]) == 0


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(1, 3), max_size=30),
    st.lists(st.integers(1, 3), min_size=1, max_size=4),
    st.lists(st.integers(1, 5), min_size=1, max_size=30),
)
def test_however_the_ids_come(ids: list[int], marker: list[int], cuts: list[int]) -> None:
    """The same ids are thoughts, in steps of any length."""
    whole = ReasoningGate(marker, False)
    expected = whole.advance(ids)
    gate, thoughts, rest = ReasoningGate(marker, False), 0, list(ids)
    for cut in cuts:
        part, rest = rest[:cut], rest[cut:]
        assert gate.closes_within(part) == (gate.ended or gate.num_thoughts(part) < len(part)
                                            or _closes(gate, part))  # fmt: skip
        thoughts += gate.advance(part)
    thoughts += gate.advance(rest)
    assert (thoughts, gate.ended) == (expected, whole.ended)


def _closes(gate: ReasoningGate, part: list[int]) -> bool:
    copied = ReasoningGate(gate._end, gate.ended)
    copied._recent = gate._recent
    copied.advance(part)
    return copied.ended


# ---------------------------------------------------------------------- through the core


def thinking_driver(**config: Any) -> tuple[Driver, FakeBackend]:
    driver = Driver(reasoning_config=CONFIG, **config)
    backend = FakeBackend()
    manager = StructuredOutputManager(driver.config, lambda: None, lambda *_: backend)
    driver.core.structured_output_manager = manager
    driver.scheduler.structured_output_manager = manager
    driver.executor.sampled = thinker(driver)
    return driver, backend


def thinker(driver: Driver) -> Callable[[str, list[int]], int]:
    """Would think, then end at once; where a mask forbids that, the lowest id it allows."""

    def choose(request_id: str, ids: list[int]) -> int:
        wanted = [*THOUGHTS, EOS_ID]
        number = len(ids) - 5
        favourite = wanted[number] if number < len(wanted) else EOS_ID
        grammar = driver.executor.grammar_output
        if grammar is None or request_id not in grammar.req_ids:
            return favourite
        index = grammar.req_ids.index(request_id)
        row = sum(grammar.num_rows[:index]) + driver.executor.row_in_request
        words = np.asarray(grammar.bitmask)[row].view(np.uint32)
        if words[favourite // 32] >> favourite % 32 & 1:
            return favourite
        return next(32 * i + j for i, w in enumerate(words) for j in range(32) if w >> j & 1)

    return choose


def run(driver: Driver) -> list[int]:
    constrain(driver, "r", "4")
    stop_at_eos(driver, "r")
    driver.run(max_steps=500)
    driver.check_idle()
    assert driver.finish["r"] is FinishReason.STOP
    return driver.tokens["r"]


def test_thoughts_are_free_and_the_answer_is_not() -> None:
    """COR-64, 6.6 Check: unmasked up to and including the end marker, then the grammar's start."""
    driver, backend = thinking_driver()
    assert run(driver) == [*THOUGHTS, 10, 11, 12, 13, EOS_ID]
    assert backend.grammars[-1].position == 5


def test_thoughts_are_constrained_if_that_is_wanted() -> None:
    config = StructuredOutputsConfig(enable_in_reasoning=True)
    driver, _ = thinking_driver(structured_outputs_config=config)
    assert run(driver) == [10, 11, 12, 13, EOS_ID]


def test_a_text_cannot_end_in_its_thoughts() -> None:
    """P38: what ended by stop has an answer."""
    driver, _ = thinking_driver()
    driver.executor.sampled = lambda r, ids, think=driver.executor.sampled: (
        think(r, [0] * 12) if len(ids) < 8 else think(r, ids)
    )
    tokens = run(driver)
    assert EOS_ID not in tokens[:-1]
    assert tokens[-5:] == [10, 11, 12, 13, EOS_ID]


@pytest.mark.parametrize("lead", [0, 1, 2, 3])
@pytest.mark.parametrize("k", [1, 3, 8])
def test_drafts_across_the_end_of_thoughts(k: int, lead: int) -> None:
    """6.6.3 and the Wart of 6.6: ids after the marker within one step obey the grammar too."""
    config = SpeculativeConfig("ngram", k, adaptive=False)
    driver, _ = thinking_driver(speculative_config=config)
    script = [*THOUGHTS, 10, 11, 12, 13]

    def draft(request_id: str, ids: list[int], num: int) -> list[int]:
        done = len(ids) - 5
        right = script[done : done + num]
        return right[:lead] + [777] * (num - lead) if lead else right

    driver.executor.draft = draft
    assert run(driver) == [*script, EOS_ID]


def test_the_frontend_may_say_that_thinking_is_off() -> None:
    """6.6.1: a template with thinking disabled."""
    driver, _ = thinking_driver()
    wire = driver.core.preprocess_add_request

    def without_thoughts(request: Any) -> Any:
        request.reasoning_ended = True
        return wire(request)

    driver.core.preprocess_add_request = without_thoughts  # type: ignore[method-assign]
    assert run(driver) == [10, 11, 12, 13, EOS_ID]


def test_the_real_mask_of_thoughts() -> None:
    """All ids of the vocabulary but the end."""
    config = make_config(reasoning_config=CONFIG, model={"eos_token_ids": (EOS_ID,)})
    backend = GuidanceBackend(config, ByteTokenizer())
    bitmask = backend.allocate_bitmask(2)
    backend.fill_thoughts(bitmask, 1)
    bits = np.unpackbits(bitmask[1].view(np.uint8), bitorder="little")
    size = config.model_config.vocab_size
    assert not bitmask[0].any()
    assert bits[:size].sum() == size - 1
    assert not bits[EOS_ID]
    assert not bits[size:].any()
    assert size >= SIZE


def test_markers_of_thoughts_become_ids(smollm2_path: Path) -> None:
    """3.9, 6.6: texts are tokenised, given ids are taken as they are, nonsense is refused."""
    config = create_engine_config(EngineArgs(model=smollm2_path, reasoning_config={}))
    found = config.reasoning_config
    assert found is not None
    assert found.think_start_token_ids
    assert found.think_end_token_ids
    assert found.think_start_token_ids != found.think_end_token_ids
    given = {"think_start_token_ids": (1, 2), "think_end_token_ids": (3,)}
    args = EngineArgs(model=smollm2_path, reasoning_config=given, skip_tokenizer_init=True)
    found = create_engine_config(args).reasoning_config
    assert found is not None
    assert (found.think_start_token_ids, found.think_end_token_ids) == ((1, 2), (3,))
    for bad in ({"think_end_str": ""}, {"think_start_token_ids": (10**6,)}):
        with pytest.raises(InvalidParameterError, match="reasoning_config"):
            create_engine_config(EngineArgs(model=smollm2_path, reasoning_config=bad))
    assert create_engine_config(EngineArgs(model=smollm2_path)).reasoning_config is None
