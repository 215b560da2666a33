"""3.9: thinking budgets, a pure function of a request's ids."""

from __future__ import annotations

import dataclasses
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from tellin.config import ReasoningConfig
from tellin.sampling_params import SamplingParams
from tellin.worker.model_runner import ModelRunner
from tellin.worker.thinking import ThinkingState
from tests.worker.fakes import Driver, FakeBackend, make_config

V = 40
START, END = (30,), (31, 32)


def generate(
    wishes: list[int], budget: int, prompt: tuple[int, ...] = (), end: tuple[int, ...] = END
) -> list[int]:
    """What comes out when a model wants to write ``wishes``."""
    state = ThinkingState(START, end, budget)
    state.feed_prompt(prompt)
    out = []
    for wish in wishes:
        out.append(wish if state.forced_id < 0 else state.forced_id)
        state.feed(out[-1])
    return out


@pytest.mark.parametrize(
    ("prompt", "wishes", "budget", "expected"),
    [
        # never reached; reached; natural end within it
        ((), [30, 1, 2, 31, 32, 5], 9, [30, 1, 2, 31, 32, 5]),
        ((), [30, 1, 2, 3, 4, 5, 6], 2, [30, 1, 2, 31, 32, 5, 6]),
        ((), [1, 2, 3, 4], 0, [1, 2, 3, 4]),
        # a block that the prompt has opened; budget 0 closes it with the first token
        ((30, 7, 7, 7), [1, 2, 3, 4], 0, [31, 32, 3, 4]),
        ((30, 7, 7, 7), [1, 2, 3, 4], 1, [1, 31, 32, 4]),
        ((30, 7, 31, 32), [1, 2, 3], 0, [1, 2, 3]),
        # a marker that has begun is completed, not begun again
        ((), [30, 1, 31, 9, 9], 2, [30, 1, 31, 32, 9]),
        # opened again after a forced end: closed at once; after a natural end: a fresh budget
        ((), [30, 1, 2, 2, 30, 5, 5, 5], 1, [30, 1, 31, 32, 30, 31, 32, 5]),
        ((), [30, 1, 31, 32, 30, 5, 5, 5, 5], 3, [30, 1, 31, 32, 30, 5, 5, 5, 31]),
    ],
)
def test_vectors(
    prompt: tuple[int, ...], wishes: list[int], budget: int, expected: list[int]
) -> None:
    assert generate(wishes, budget, prompt) == expected


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from([1, 30, 31, 32]), max_size=40),
    st.integers(0, 5),
    st.sampled_from([(31,), (31, 32), (31, 31, 32), (32, 31, 32)]),
)
def test_no_block_is_longer_than_its_budget(
    wishes: list[int], budget: int, end: tuple[int, ...]
) -> None:
    """Whatever a model wants: thoughts and the part of the marker in them stay within it."""
    out = generate(wishes, budget, (), end)
    inside, length = False, 0
    tail: list[int] = []
    for token in out:
        tail.append(token)
        if not inside:
            inside, length = token == START[0], 0
            tail = [] if inside else tail
        else:
            length += 1
            assert length <= budget + len(end)
            if tuple(tail[-len(end) :]) == end:
                inside, tail = False, []
    first = wishes.index(START[0]) if START[0] in wishes else len(wishes)
    assert out[:first] == wishes[:first]


# ---------------------------------------------------------------------- in the runner


class Thinker(FakeBackend):
    """Opens a block, then never wants to close it."""

    def logits(self, state: int) -> np.ndarray:
        row = super().logits(state)
        row[[30, 31, 32]] = -5.0
        return row


def make_runner(mode: str = "raw_logprobs") -> ModelRunner:
    config = make_config(V, logprobs_mode=mode)
    reasoning = ReasoningConfig(think_start_token_ids=START, think_end_token_ids=END)
    return ModelRunner(dataclasses.replace(config, reasoning_config=reasoning), Thinker(V))


def outputs(drafts: bool, mode: str = "raw_logprobs", **params: Any) -> tuple[list[int], list]:
    d = Driver(make_runner(mode))
    d.add("a", [5, 30, 6], SamplingParams(thinking_token_budget=4, logprobs=2, **params))
    d.add("b", [5, 30, 6], SamplingParams(temperature=0.0))
    free = Driver(make_runner())
    free.add("b", [5, 30, 6], SamplingParams(temperature=0.0))
    logprobs: list = []
    while len(d.outputs["a"]) < 12:
        if drafts and d.outputs["a"]:
            right = [*d.outputs["a"][:4], 31, 32][len(d.outputs["a"]) :]
            d.drafts = {"a": [*right, 9, 9][:3]}
        output = d.step()
        assert not output.errors
        i = output.req_ids.index("a")
        assert output.logprobs is not None
        rows = output.logprobs[i]
        assert rows is not None
        logprobs += zip(
            output.sampled_token_ids[i], rows.logprob_token_ids, rows.logprobs,
            rows.sampled_token_ranks, strict=True,
        )  # fmt: skip
    while len(free.outputs["b"]) < len(d.outputs["b"]):
        free.step()
    assert free.outputs["b"] == d.outputs["b"], "its neighbour is left alone"
    return d.outputs["a"][:12], logprobs[:12]


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"seed": 1},
        {"seed": 1, "allowed_token_ids": [1, 2, 3]},
        {"seed": 2, "logit_bias": {31: -100.0}, "top_k": 1},
        {"seed": 2, "logits_processors": [lambda out, row: row]},
    ],
)
def test_a_forced_end_overrules_everything_and_drafts_change_nothing(
    params: dict[str, Any],
) -> None:
    """3.6.8, E2: after four thoughts the two ids of the marker, then free again."""
    ids, logprobs = outputs(False, **params)
    assert ids[4:6] == [31, 32]
    assert not {31, 32} & {*ids[:4], *ids[6:]}
    assert outputs(True, **params) == (ids, logprobs)


@pytest.mark.parametrize(
    "mode", ["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"]
)
def test_logprobs_of_forced_ids(mode: str) -> None:
    """Raw values are the model's; processed ones those of a distribution without another id."""
    ids, logprobs = outputs(False, mode, temperature=0.0)
    for token, columns, values, rank in logprobs[4:6]:
        assert columns[0] == token
        assert len(columns) == 3
        if mode.startswith("processed"):
            assert (values[0], rank) == (0.0, 1)
        else:
            assert rank > 1
            assert values[0] < values[1]
            assert values[1] >= values[2]
    free_mode_values = [values[0] for _, _, values, _ in logprobs[:4]]
    assert all(np.isfinite(free_mode_values))
    assert ids[4:6] == [31, 32]


def test_logprob_token_ids_of_forced_ids() -> None:
    """The ids that were asked for, also where the sampled one was forced."""
    d = Driver(make_runner())
    params = SamplingParams(temperature=0.0, thinking_token_budget=0, logprob_token_ids=[8, 3])
    d.add("a", [5, 30, 6], params)
    for forced in (31, 32):
        output = d.step()
        assert output.logprobs is not None
        rows = output.logprobs[0]
        assert rows is not None
        assert rows.logprob_token_ids == [[forced, 8, 3]]


def test_without_markers_a_budget_is_an_error() -> None:
    d = Driver(ModelRunner(make_config(V), FakeBackend(V)))
    d.add("a", [1], SamplingParams(thinking_token_budget=1))
    d.add("b", [1])
    output = d.step()
    assert "reasoning_config" in output.errors["a"]
    assert set(output.errors) == {"a"}
