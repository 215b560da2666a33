"""Pooling of hidden states: rules 9.4.1 to 9.4.3 and 9.4.7, P51."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tellin.config import PoolerConfig
from tellin.sampling_params import PoolingParams, SamplingParams
from tellin.step_protocol import ModelRunnerOutput
from tellin.worker.input_batch import RequestState
from tellin.worker.model_runner import ModelRunner
from tellin.worker.pooler import Pooler
from tests.worker.fakes import Driver, FakeBackend, make_config

STATES = np.array([[1, 0, 3], [0, 1, 4], [2, 2, 2]], np.float32)


def state(**params: Any) -> RequestState:
    return RequestState("r", 0, None, PoolingParams(**({"task": "embed"} | params)), 0)


def whole(pooler: Pooler, request: RequestState, hidden: np.ndarray) -> np.ndarray | None:
    """Pool a prompt that is computed in one step, as rows 5.. of it."""
    rows = pooler.rows(request, 5, 0, len(hidden), len(hidden))
    assert rows is not None, request.error
    assert (rows.token_rows >= 5).all()
    return pooler.pool(rows, hidden[rows.token_rows - 5])


@pytest.mark.parametrize(
    ("kind", "expected"), [("LAST", [2, 2, 2]), ("CLS", [1, 0, 3]), ("MEAN", [1, 1, 3])]
)
def test_9_4_1_last_cls_and_mean(kind: str, expected: list[float]) -> None:
    result = whole(Pooler(PoolerConfig(kind)), state(use_activation=False), STATES)
    assert result is not None
    assert result.dtype == np.float32
    assert result.tolist() == expected


def test_9_4_3_cut_first_then_normalised() -> None:
    """The spec's check: MEAN of two unit vectors; one dimension of it is 1."""
    pooler = Pooler(PoolerConfig("MEAN"))
    pair = STATES[:2, :2]
    np.testing.assert_allclose(whole(pooler, state(), pair), [0.5**0.5, 0.5**0.5], atol=1e-7)
    assert whole(pooler, state(dimensions=1), pair).tolist() == [1.0]  # type: ignore[union-attr]
    zero = whole(pooler, state(), np.zeros((2, 3), np.float32))
    assert zero is not None
    assert zero.tolist() == [0, 0, 0]


def test_p51_normalised_unless_switched_off() -> None:
    """By default as the model says; a request decides for itself."""
    for in_config, asked, norm in ((True, None, 1), (False, None, 3.46), (False, True, 1)):
        pooler = Pooler(PoolerConfig("LAST", use_activation=in_config))
        result = whole(pooler, state(use_activation=asked), STATES)
        assert np.linalg.norm(result) == pytest.approx(norm, abs=0.01)  # type: ignore[arg-type]


def test_9_4_2_chunks_are_kept_until_the_prompt_is_complete() -> None:
    pooler = Pooler(PoolerConfig("LAST"))
    request = state(task="token_embed", use_activation=False)
    first = pooler.rows(request, 0, 0, 2, 3)
    assert first is not None
    hidden = STATES[:2].copy()
    assert pooler.pool(first, hidden) is None
    hidden[:] = 99  # the backend's memory is overwritten by the next step
    last = pooler.rows(request, 0, 2, 1, 3)
    assert last is not None
    result = pooler.pool(last, STATES[2:])
    assert result is not None
    assert result.tolist() == STATES.tolist()
    pooler.pool(first, STATES[:2])
    pooler.forget("r")
    assert not pooler._earlier


def test_a_preempted_prompt_begins_anew() -> None:
    pooler = Pooler(PoolerConfig("LAST"))
    request = state(task="token_embed", use_activation=False)
    first = pooler.rows(request, 0, 0, 2, 3)
    assert first is not None
    pooler.pool(first, STATES[:2])
    again = pooler.rows(request, 0, 0, 3, 3)
    assert again is not None
    result = pooler.pool(again, STATES)
    assert result is not None
    assert result.tolist() == STATES.tolist()


def test_rows_that_a_cache_has_swallowed_are_an_error() -> None:
    pooler = Pooler(PoolerConfig("LAST"))
    request = state(task="token_embed")
    rows = pooler.rows(request, 0, 16, 3, 19)
    assert rows is not None
    assert pooler.pool(rows, STATES) is None
    assert request.error is not None
    assert "16 came from the prefix cache" in request.error


def test_last_needs_nothing_of_a_chunk_before_the_last() -> None:
    pooler = Pooler(PoolerConfig("LAST"))
    assert pooler.rows(state(), 0, 0, 2, 3) is None
    rows = pooler.rows(state(), 7, 2, 1, 3)
    assert rows is not None
    assert rows.token_rows.tolist() == [7]


@pytest.mark.parametrize(("computed", "count"), [(0, 2), (1, 2)])
def test_mean_of_half_a_prompt_is_an_error_of_that_request(computed: int, count: int) -> None:
    request = state()
    assert Pooler(PoolerConfig("MEAN")).rows(request, 0, computed, count, 3) is None
    assert request.error is not None
    assert "whole prompt" in request.error


def test_9_4_7_not_a_number_is_an_error_of_that_request() -> None:
    request = state()
    assert whole(Pooler(PoolerConfig("LAST")), request, np.full((1, 3), np.nan, np.float32)) is None
    assert request.error is not None
    assert "NaN" in request.error


class HiddenBackend(FakeBackend):
    """Hidden states ``[position, token id, 1]`` of the rows that are asked for."""

    plan = SimpleNamespace(hidden=SimpleNamespace(rows="logits"), ops=())

    def forward(self, batch: Any) -> Any:
        self.last = batch
        return super().forward(batch)

    def hidden(self) -> np.ndarray:
        rows = self.last.logits_indices
        values = [self.last.positions[rows], self.last.token_ids[rows], np.ones(len(rows))]
        return np.stack(values, axis=1).astype(np.float32)


def test_9_3_2_pooling_rows_beside_generating_ones() -> None:
    """Rows are told apart; each result comes once, with the step that ends its prompt."""
    config = make_config(runner_type="pooling", pooler_config=PoolerConfig("LAST", False))
    runner = ModelRunner(config, HiddenBackend(64))  # type: ignore[arg-type]
    d = Driver(runner)
    d.add("gen", [1, 2, 3], SamplingParams(temperature=0))
    for name, ids in (("one", [4, 5, 6, 7]), ("two", [8, 9])):
        d.add(name, ids)
        d.new[name].sampling_params = None
        d.new[name].pooling_params = PoolingParams(task="embed")
    first: ModelRunnerOutput = d.step({"gen": 3, "one": 2, "two": 2})
    assert [len(ids) for ids in first.sampled_token_ids] == [1, 0, 0]
    assert {k: v.tolist() for k, v in first.pooler_output.items()} == {"two": [1, 9, 1]}
    d.finish("two")
    second = d.step({"gen": 1, "one": 2})
    assert {k: v.tolist() for k, v in second.pooler_output.items()} == {"one": [3, 7, 1]}
    d.finish("one")
    assert d.step({"gen": 1}).pooler_output == {}


def test_an_unknown_task_fails_its_request() -> None:
    request = state(task="classify")
    assert Pooler(PoolerConfig()).rows(request, 0, 0, 1, 1) is None
    assert request.error is not None
    assert "classify" in request.error
