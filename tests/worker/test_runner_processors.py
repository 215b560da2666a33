"""Users' logits processors in the runner: callables of one request, and engine-wide classes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tellin.config import SpeculativeConfig
from tellin.exceptions import InvalidParameterError, UnsupportedFeatureError
from tellin.logits_processor import LogitsProcessor, check_by_processors
from tellin.sampling_params import SamplingParams
from tests.worker.fakes import Forcing
from tests.worker.test_model_runner import PARAMS, V, driver, prompt_of, solo


def test_callable_in_place_and_returned() -> None:
    def in_place(output_ids: list[int], row: np.ndarray) -> None:
        row[:] = -np.inf
        row[len(output_ids) + 10] = 0

    def returned(prompt_ids: list[int], output_ids: list[int], row: np.ndarray) -> np.ndarray:
        out = np.full_like(row, -5)
        out[prompt_ids[0] + len(output_ids)] = 5
        return out

    d = driver()
    d.add("a", [1, 2], SamplingParams(logits_processors=[in_place]))
    d.add("b", [30, 2], SamplingParams(temperature=0, logits_processors=[returned]))
    d.add("c", [1, 2], PARAMS[1], rng_key=7)
    d.run(4)
    assert d.outputs["a"] == [10, 11, 12, 13]
    assert d.outputs["b"] == [30, 31, 32, 33]
    alone = driver()
    alone.add("c", [1, 2], PARAMS[1], rng_key=7)
    assert alone.run(4)["c"] == d.outputs["c"], "a neighbour's callable changes nothing"


def test_identity_callable_changes_no_bit() -> None:
    """A processor that does nothing: ids and log-probabilities as without."""
    params = SamplingParams(seed=1, top_p=0.8, repetition_penalty=1.2, logprobs=3)
    with_it = SamplingParams(
        seed=1,
        top_p=0.8,
        repetition_penalty=1.2,
        logprobs=3,
        logits_processors=[lambda output_ids, row: row],
    )
    d, e = driver(), driver()
    d.add("a", [1, 2, 3], params)
    e.add("a", [1, 2, 3], with_it)
    for _ in range(6):
        one, two = d.step(), e.step()
        assert one.sampled_token_ids == two.sampled_token_ids
        assert one.logprobs == two.logprobs


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (lambda output_ids, row: row[10_000], "IndexError"),
        (lambda output_ids, row: np.zeros(3), "ValueError"),
        (lambda output_ids, row: "nonsense", "ValueError"),
        (lambda output_ids, row: row * np.nan, "NaN"),
        (lambda one: one, "must take"),
    ],
)
def test_broken_callable_ends_its_request_alone(broken: Any, message: str) -> None:
    """An exception, a wrong shape or NaN from a callable reaches nobody else."""
    d = driver()
    d.add("bad", [1, 2], SamplingParams(logits_processors=[broken]))
    d.add("good", [3, 4], PARAMS[1], rng_key=7)
    output = d.step()
    assert set(output.errors) == {"bad"}
    assert message in output.errors["bad"]
    alone = driver()
    alone.add("good", [3, 4], PARAMS[1], rng_key=7)
    assert alone.step().sampled_token_ids[0] == d.outputs["good"]


def test_callable_cannot_keep_a_row() -> None:
    """What a callable stores and changes later is a copy."""
    stored: list[np.ndarray] = []

    def keep(output_ids: list[int], row: np.ndarray) -> None:
        for old in stored:
            old[:] = 1e9
        stored.append(row)

    d = driver()
    d.add("bad", [1, 2], SamplingParams(logits_processors=[keep]))
    d.add("good", [3, 4], SamplingParams(temperature=0, logprobs=1))
    d.run(5)
    alone = driver()
    alone.add("good", [3, 4], SamplingParams(temperature=0, logprobs=1))
    assert alone.run(5)["good"] == d.outputs["good"]


class Flat(LogitsProcessor):
    """Argmax-invariant: makes every distribution uniform among ids above the median."""

    def is_argmax_invariant(self) -> bool:
        return True

    def apply(self, logits: np.ndarray) -> np.ndarray:
        best = logits.argmax(axis=1)
        logits[:] = np.where(logits >= np.median(logits, axis=1, keepdims=True), 0, -np.inf)
        logits[np.arange(len(logits)), best] = 1e-3
        return logits.copy()


class Raising(Forcing):
    def apply(self, logits: np.ndarray) -> np.ndarray:
        if self.rows:
            raise ZeroDivisionError("boom")
        return logits


def test_engine_wide_processor_follows_rows() -> None:
    """3.11: state moves with the rows; live output lists; untouched rows equal a plain engine's."""
    d = driver(logits_processors=("tests.worker.test_runner_processors:Forcing",))
    plain = driver()
    for i in range(6):
        force = {"force": 10 * i} if i % 2 else None
        for x in (d, plain):
            x.add(f"r{i}", prompt_of(i), dataclasses_params(PARAMS[i], force), rng_key=100 + i)
    rng = np.random.default_rng(1)
    finished = set()
    for step in range(14):
        counts = {
            r: min(8, len(ids) - d.computed[r]) for r, ids in d.known.items() if rng.random() < 0.8
        }
        d.step(dict(counts))
        if step == 6:
            for req_id in ("r0", "r3"):
                d.finish(req_id)
                finished.add(req_id)
            d.add("late", [1, 2], dataclasses_params(PARAMS[0], {"force": 7}))
    for i in range(6):
        outputs = d.outputs[f"r{i}"]
        if i % 2:
            assert outputs == [(10 * i + j) % V for j in range(len(outputs))]
        else:
            assert outputs == solo(i, max(len(outputs), 1))[: len(outputs)]
    assert d.outputs["late"] == [(7 + j) % V for j in range(len(d.outputs["late"]))]


def dataclasses_params(params: SamplingParams, extra: dict[str, int] | None) -> SamplingParams:
    clone = params.clone()
    clone.extra_args = extra
    return clone


def test_argmax_invariant_processor_leaves_greedy_alone() -> None:
    """3.6.11: it acts after the temperature, on random rows; greedy rows choose before it."""
    d = driver(logits_processors=(Flat,))
    plain = driver()
    for x in (d, plain):
        x.add("greedy", [1, 2], SamplingParams(temperature=0, logprobs=2))
        x.add("random", [3, 4], SamplingParams(temperature=0.01), rng_key=5)
    one, two = d.step(), plain.step()
    assert one.sampled_token_ids[0] == two.sampled_token_ids[0]
    assert one.logprobs[0] == two.logprobs[0]
    d.run(30)
    plain.run(30)
    assert len(set(d.outputs["random"])) > 5


def test_engine_wide_exception_ends_the_step_only() -> None:
    d = driver(logits_processors=(Raising,))
    d.add("a", [1, 2])
    assert d.step().errors == {}
    d.add("bad", [1], SamplingParams(extra_args={"force": 1}))
    output = d.step()
    assert set(output.errors) == {"a", "bad"}
    assert "boom" in output.errors["a"]
    for req_id in ("a", "bad"):
        d.finish(req_id)
    d.add("later", [1, 2])
    assert d.step().errors == {}


def test_processors_that_cannot_be_loaded() -> None:
    for spec in ("nowhere:Class", "tests.worker.fakes:Driver", "no_colon", 3):
        with pytest.raises(InvalidParameterError):
            driver(logits_processors=(spec,))
    with pytest.raises(UnsupportedFeatureError):
        driver(logits_processors=(Flat,), speculative=SpeculativeConfig("ngram", 2))


def test_3_11_1_processors_check_parameters() -> None:
    """`validate_params` runs at admission and refuses with the processor's name."""
    check_by_processors(SamplingParams(), (Forcing, "tests.worker.test_runner_processors:Flat"))
    with pytest.raises(InvalidParameterError, match=r"Forcing.*must not be negative"):
        check_by_processors(SamplingParams(extra_args={"force": -1}), (Forcing,))
