"""The cheap path of unchanged batches gives what the general path gives, and knows when to stop."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tellin.config import SpeculativeConfig
from tellin.sampling_params import SamplingParams
from tellin.step_protocol import GrammarOutput
from tellin.worker.model_runner import ModelRunner
from tests.worker.fakes import Driver, FakeBackend, make_config

V = 64

PARAMS = [
    SamplingParams(temperature=0),
    SamplingParams(seed=3, top_p=0.9),
    SamplingParams(seed=3, temperature=0.6, repetition_penalty=1.3, frequency_penalty=0.2),
    SamplingParams(min_tokens=30, max_tokens=99, stop_token_ids=[1, 2, 3]),
]


def driver(steady: bool = True, num_blocks: int = 4096) -> Driver:
    runner = ModelRunner(make_config(V), FakeBackend(V, num_blocks=num_blocks))
    if not steady:
        runner._start_steady = lambda *args: None  # type: ignore[method-assign]
    return Driver(runner)


def both(scenario: Any) -> tuple[Driver, Driver]:
    """Play a scenario on a runner with the cheap path and on one without."""
    one, two = driver(), driver(steady=False)
    scenario(one)
    scenario(two)
    assert one.outputs == two.outputs
    a, b = one.runner.batch, two.runner.batch
    for req_id, state in a.states.items():
        n = int(a.num_tokens[state.slot])
        other = b.states[req_id].slot
        assert n == b.num_tokens[other]
        assert a.token_ids[state.slot, :n].tolist() == b.token_ids[other, :n].tolist()
    return one, two


def add_all(d: Driver) -> None:
    for i, params in enumerate(PARAMS):
        d.add(f"r{i}", [(i * 5 + j) % V for j in range(3 + 6 * i)], params, rng_key=i)


def test_it_is_used_and_equal() -> None:
    def scenario(d: Driver) -> None:
        add_all(d)
        d.run(40)

    one, two = both(scenario)
    assert one.runner._steady is not None
    assert two.runner._steady is None


def test_through_many_blocks_and_past_every_capacity() -> None:
    """3,000 ids: spare block columns and token columns run out several times."""

    def scenario(d: Driver) -> None:
        d.add("a", [1, 2, 3], PARAMS[1], rng_key=5)
        d.add("b", list(range(40)), PARAMS[0])
        d.run(3000)

    both(scenario)


def test_requests_come_and_go() -> None:
    """Arrivals, ends in the middle (rows are permuted then), preemption, skipped steps."""

    def scenario(d: Driver) -> None:
        add_all(d)
        for step in range(60):
            if step == 12:
                d.finish("r1")
            if step == 20:
                d.add("late", [9, 8, 7], PARAMS[2], rng_key=8)
            if step == 33:
                d.preempt("r2")
            if step in (40, 41):
                d.step({r: len(d.known[r]) - d.computed[r] for r in ("r0", "r3", "late")})
            else:
                d.step()

    one, _ = both(scenario)
    assert one.runner._steady is not None


def test_a_failing_row_ends_it_alone() -> None:
    poisoned: set[int] = set()

    def scenario(d: Driver) -> None:
        d.runner.backend.patch = lambda state, row: row * np.nan if state in poisoned else row
        add_all(d)
        for _ in range(5):
            d.step()
        state = 0
        for token in d.known["r1"]:
            state = (state * 6364136223846793005 + token + 1) % 2**64
        poisoned.add(state)
        output = d.step()
        assert set(output.errors) == {"r1"}
        assert sum(map(len, output.sampled_token_ids)) == 3
        d.finish("r1")
        for _ in range(5):
            assert d.step().errors == {}

    both(scenario)


def test_a_grammar_in_between() -> None:
    words = np.array([[0xF0, 0]], np.uint32).view(np.int32)

    def scenario(d: Driver) -> None:
        add_all(d)
        for step in range(12):
            d.step(grammar=GrammarOutput(["r0"], [1], words) if 4 <= step < 7 else None)
        assert set(d.outputs["r0"][4:7]) <= {4, 5, 6, 7}

    both(scenario)


def test_with_a_drafter() -> None:
    """Steps without drafts are steady although a drafter watches; it is asked in both cases."""
    spec = SpeculativeConfig("ngram", 3, prompt_lookup_min=1, prompt_lookup_max=2)

    def play(steady: bool) -> tuple[dict[str, list[int]], list[dict[str, list[int]]], bool]:
        runner = ModelRunner(make_config(V, speculative=spec), FakeBackend(V))
        if not steady:
            runner._start_steady = lambda *args: None  # type: ignore[method-assign]
        d = Driver(runner)
        add_all(d)
        proposals, used = [], False
        for step in range(40):
            scheduled = d.schedule()
            scheduled.num_spec_tokens_to_schedule = 3 if step % 8 > 2 else 0
            runner.execute_model(scheduled)
            used = used or runner._steady is not None
            output = runner.sample_tokens(None)
            d.apply(scheduled, output)
            proposals.append(output.draft_token_ids)
            d.drafts = dict(output.draft_token_ids) if step % 8 > 5 else {}
        return d.outputs, proposals, used

    with_it, without = play(True), play(False)
    assert with_it[:2] == without[:2]
    assert with_it[2]
    assert any(with_it[1])


@pytest.mark.parametrize("count", [1, 3])
def test_first_id_and_every_later_one(count: int) -> None:
    def scenario(d: Driver) -> None:
        for i in range(count):
            d.add(f"r{i}", [i], PARAMS[i], rng_key=i)
        d.run(20)

    both(scenario)
