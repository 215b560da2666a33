"""ModelRunner on a fake backend: steps, prompts, failures, grammar masks, logits processors."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from tellin.config import SpeculativeConfig
from tellin.kernels.batch import StepBatch
from tellin.sampling_params import SamplingParams
from tellin.step_protocol import GrammarOutput, LogprobsLists
from tellin.worker.model_runner import ModelRunner
from tests.worker.fakes import Driver, FakeBackend, Forcing, make_config

V = 64


def driver(**config: Any) -> Driver:
    return Driver(ModelRunner(make_config(V, **config), FakeBackend(V)))


PARAMS = [
    SamplingParams(temperature=0, logprobs=2),
    SamplingParams(seed=3, top_p=0.9),
    SamplingParams(seed=3, temperature=0.6, repetition_penalty=1.3, logprobs=0),
    SamplingParams(top_k=5, min_p=0.01),
    SamplingParams(min_tokens=4, stop_token_ids=[1, 2, 3], presence_penalty=1),
    SamplingParams(logit_bias={4: 3.0, 5: -2.0}, frequency_penalty=0.5),
]


def prompt_of(i: int) -> list[int]:
    return [(i * 13 + j * 7) % V for j in range(5 + 9 * i)]


def solo(i: int, count: int) -> list[int]:
    d = driver()
    d.add("x", prompt_of(i), PARAMS[i], rng_key=100 + i)
    return d.run(count)["x"][:count]


class MaximaBackend(FakeBackend):
    """Also finds the block maxima of each pass, as the native backend does."""

    calls = 0

    def forward(self, batch: StepBatch) -> np.ndarray:
        logits = super().forward(batch)
        starts = np.arange(0, self.vocab_size, 64)
        self.maxima = np.maximum.reduceat(logits, starts, axis=1)
        return logits

    def block_maxima(self) -> np.ndarray:
        self.calls += 1
        return self.maxima


@pytest.mark.parametrize("case", ["steady", "logprobs", "processors"])
def test_block_maxima_are_used_and_change_nothing(case: str) -> None:
    """In steady steps and others, for prompts, beside processors that change logits in between."""
    outputs, prompts, calls = [], [], []
    for kind in (FakeBackend, MaximaBackend):
        backend = kind(300)
        d = Driver(ModelRunner(make_config(300), backend))
        for i, params in enumerate(PARAMS):
            if case != "steady" or params.logprobs is None:
                d.add(f"r{i}", prompt_of(i), params, rng_key=i)
        d.add("prompt", prompt_of(2), SamplingParams(prompt_logprobs=3, top_p=0.7), rng_key=9)
        if case == "processors":
            forced = SamplingParams(logits_processors=[lambda ids, row: row[::-1] - 7], top_p=0.5)
            d.add("processed", prompt_of(1), forced, rng_key=5)
        first = d.step()
        prompts.append(first.prompt_logprobs)
        d.run(20)
        outputs.append(d.outputs)
        calls.append(getattr(backend, "calls", 0))
        assert (d.runner._steady is not None) == (case == "steady")
    assert outputs[0] == outputs[1]
    assert prompts[0] == prompts[1]
    assert calls[0] == 0
    assert calls[1] >= 20


def test_promise_1_batch_chunks_and_preemption() -> None:
    """E1, T7: each request's ids equal its lone run's, whatever it is stepped with."""
    expected = [solo(i, 12) for i in range(6)]
    rng = np.random.default_rng(0)
    for chunk in (1, 3, 16, 100):
        d = driver()
        for i in range(6):
            d.add(f"r{i}", prompt_of(i), PARAMS[i], rng_key=100 + i)
        while any(len(d.outputs[r]) < 12 for r in d.known):
            counts = {}
            for req_id, ids in d.known.items():
                if rng.random() < 0.01 * min(chunk, 10) and d.computed[req_id] > 0:
                    d.preempt(req_id)
                if rng.random() < 0.8:
                    counts[req_id] = min(chunk, len(ids) - d.computed[req_id])
            d.step(counts)
        for i in range(6):
            assert d.outputs[f"r{i}"][:12] == expected[i]


def test_slots_are_reused_without_traces() -> None:
    """A request in a slot that another one left samples as if it were alone."""
    d = driver()
    for i in range(6):
        d.add(f"old{i}", prompt_of(5 - i), PARAMS[5 - i], rng_key=i)
    d.run(3)
    for i in range(6):
        d.finish(f"old{i}")
    for i in range(6):
        d.add(f"new{i}", prompt_of(i), PARAMS[i], rng_key=100 + i)
    d.run(8)
    for i in range(6):
        assert d.outputs[f"new{i}"][:8] == solo(i, 8)
    assert len(d.runner.batch.states) == 6


def test_two_call_protocol() -> None:
    """3.4.7: a step is executed once, then sampled once."""
    d = driver()
    d.add("a", [1, 2])
    scheduled = d.schedule()
    with pytest.raises(RuntimeError, match="without execute_model"):
        d.runner.sample_tokens(None)
    d.runner.execute_model(scheduled)
    with pytest.raises(RuntimeError, match="twice"):
        d.runner.execute_model(scheduled)
    assert d.runner.sample_tokens(None).req_ids == ["a"]


def test_block_copies_come_before_the_pass() -> None:
    """A request that starts on a copied block goes on as the one it was copied from."""
    d = driver()
    prompt = list(range(20))
    d.add("a", prompt)
    d.step()
    d.add("b", prompt)
    d.new["b"].num_computed_tokens = d.computed["b"] = 19
    d.blocks["b"] = [d.blocks["a"][0], 900]
    step = d.schedule({"b": 1})
    step.kv_block_copies = [(d.blocks["a"][1], 900)]
    d.runner.execute_model(step)
    assert d.runner.sample_tokens(None).sampled_token_ids == [d.outputs["a"]]


@pytest.mark.parametrize(
    "place", ["_finish", "_add", "append_blocks", "_update_cached", "_place", "_reserve"]
)
@pytest.mark.parametrize("at", [0, 1])
def test_interrupt_while_a_step_is_applied(
    place: str, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C anywhere in `apply`: the step's requests end, the others go on as if alone."""
    d = driver(logits_processors=(Forcing,))
    for i in range(4):
        d.add(f"r{i}", prompt_of(i), PARAMS[i], rng_key=100 + i)
    d.step()
    d.step({"r0": 1, "r1": 1, "r2": 1})
    batch = d.runner.batch
    original, calls = getattr(batch, place), []

    def interrupted(*args: Any) -> Any:
        calls.append(1)
        if len(calls) > at:
            raise KeyboardInterrupt
        return original(*args)

    monkeypatch.setattr(batch, place, interrupted)
    d.finish("r0")
    d.add("new", [1, 2, 3] * 20, SamplingParams(extra_args={"force": 3}))
    computed = dict(d.computed)
    try:
        d.runner.execute_model(d.schedule({"r1": 1, "new": 60}))
        d.runner.sample_tokens(None)
    except KeyboardInterrupt:
        pass
    monkeypatch.undo()
    for req_id in ("r1", "new"):
        d.finish(req_id)
    d.finished.add("r0")
    d.computed = {r: c for r, c in computed.items() if r in ("r2", "r3")}
    d.add("later", prompt_of(5), PARAMS[5], rng_key=105)
    d.run(6)
    assert set(batch.states) == {"r2", "r3", "later"}
    for req_id, i in (("r2", 2), ("r3", 3), ("later", 5)):
        assert d.outputs[req_id][:6] == solo(i, 6)
    slots = [state.slot for state in batch.states.values()]
    assert len({*slots, *batch._free_slots}) == batch._num_slots


def test_empty_step_only_forgets() -> None:
    d = driver()
    d.add("a", [1, 2])
    d.step()
    d.finish("a")
    assert d.step().req_ids == []
    assert d.runner.batch.states == {}


# ---------------------------------------------------------------------- prompt log-probabilities


def reference_prompt_logprobs(prompt: list[int], k: int) -> LogprobsLists:
    backend, ids, values, ranks = FakeBackend(V), [], [], []
    state = 0
    for i, token in enumerate(prompt[:-1]):
        state = (state * 6364136223846793005 + token + 1) % 2**64
        row = backend.logits(state).astype(np.float64)
        logprobs = row - row.max() - np.log(np.exp(row - row.max()).sum())
        best = sorted(range(V), key=lambda j: (-row[j], j))[:k]
        columns = [prompt[i + 1], *best]
        ids.append(columns)
        values.append(logprobs[columns].tolist())
        ranks.append(int((row >= row[prompt[i + 1]]).sum()))
    return LogprobsLists(ids, values, ranks)


@pytest.mark.parametrize("chunk", [1, 7, 64, 300])
@pytest.mark.parametrize("limit", [1000, 10])
def test_p08_p09_prompt_logprobs(chunk: int, limit: int) -> None:
    """P08, P09, 3.10: complete, once, with the first token; equal for all chunk and pass sizes."""
    prompt = [(7 * i * i + i) % V for i in range(300)]
    d = driver()
    d.runner.prompts.max_logits = limit
    d.add("long", prompt, SamplingParams(prompt_logprobs=3, seed=1))
    for i in range(2):
        d.add(f"short{i}", [i, 5], SamplingParams(temperature=0))
    given: list[LogprobsLists] = []
    while d.computed["long"] < 300:
        counts = {r: min(chunk, len(d.known[r]) - d.computed[r]) for r in d.known}
        output = d.step(counts)
        given += output.prompt_logprobs.values()
        assert bool(given) == bool(d.outputs["long"])
    for _ in range(3):
        assert d.step().prompt_logprobs == {}
    (table,) = given
    expected = reference_prompt_logprobs(prompt, 3)
    assert len(table) == 299
    assert table.logprob_token_ids == expected.logprob_token_ids
    assert table.sampled_token_ranks == expected.sampled_token_ranks
    np.testing.assert_allclose(table.logprobs, expected.logprobs, atol=2e-6)
    whole = driver()
    whole.add("long", prompt, SamplingParams(prompt_logprobs=3, seed=1))
    assert whole.step().prompt_logprobs["long"] == table
    assert whole.outputs["long"] == d.outputs["long"][:1]


def test_3_10_3_preemption_in_the_prompt() -> None:
    """A preempted prompt starts again and gives the same table."""
    prompt = list(range(40))
    d = driver()
    d.add("a", prompt, SamplingParams(prompt_logprobs=1))
    d.step({"a": 25})
    d.preempt("a")
    d.step({"a": 10})
    table = d.step({"a": 30}).prompt_logprobs["a"]
    assert table.logprob_token_ids == reference_prompt_logprobs(prompt, 1).logprob_token_ids


def test_prompt_of_one_token_has_an_empty_table() -> None:
    d = driver()
    d.add("a", [3], SamplingParams(prompt_logprobs=1))
    assert d.step().prompt_logprobs["a"] == LogprobsLists([], [], [])


def test_skipped_prompt_positions_are_an_error() -> None:
    """A prefix that was not computed has no log-probabilities: said, not invented."""
    d = driver()
    d.add("a", list(range(40)), SamplingParams(prompt_logprobs=1))
    d.new["a"].num_computed_tokens = d.computed["a"] = 16
    d.blocks["a"] = [500]
    d.runner.backend.cache[500 * 16 : 501 * 16] = 1
    output = d.step()
    assert "prompt_logprobs" in output.errors["a"]
    assert output.prompt_logprobs == {}


# ---------------------------------------------------------------------- failures of one request


def test_nan_ends_that_request_alone() -> None:
    d = driver()
    d.add("bad", [1, 2, 3])
    d.add("good", [4, 5])
    d.step()
    bad_next = (FakeBackend(V), d.known["bad"])[1]
    state = 0
    for token in bad_next:
        state = (state * 6364136223846793005 + token + 1) % 2**64

    def poison(at: int, row: np.ndarray) -> np.ndarray:
        return np.full_like(row, np.nan) if at == state else row

    d.runner.backend.patch = poison
    output = d.step()
    assert set(output.errors) == {"bad"}
    assert output.num_nans_in_logits == {"bad": 1}
    assert "bad" not in output.client_errors
    assert dict(zip(output.req_ids, map(len, output.sampled_token_ids), strict=True)) == {
        "bad": 0,
        "good": 1,
    }


@pytest.mark.parametrize("place", ["sampler.set_slot", "processors.add_request"])
def test_a_request_that_cannot_be_set_up_fails_alone(
    monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """3.7: an exception of any kind on the way in; the others' ids stay what they are."""
    d = driver()
    for i in range(3):
        d.add(f"r{i}", prompt_of(i), PARAMS[i], rng_key=100 + i)
    d.step()
    owner, _, name = place.partition(".")
    target = getattr(d.runner, owner)
    monkeypatch.setattr(target, name, _raise)
    d.add("bad", [1, 2], PARAMS[0])
    output = d.step()
    assert output.errors == {"bad": "its parameters could not be set up: no such slot"}
    assert "bad" not in output.client_errors
    assert d.outputs["bad"] == []
    monkeypatch.undo()
    d.finish("bad")
    d.add("r3", prompt_of(3), PARAMS[3], rng_key=103)  # in the slot of the failed one
    outputs = d.run(8)
    for i in range(4):
        assert outputs[f"r{i}"][:8] == solo(i, 8)
    assert d.last is not None
    assert d.last.errors == {}


def _raise(*_: Any) -> None:
    raise RuntimeError("no such slot")


def test_p30_nothing_left_is_the_clients_error() -> None:
    d = driver()
    params = SamplingParams(allowed_token_ids=[7])
    params.bad_words_token_ids = [[7]]
    d.add("bad", [1], params)
    d.add("good", [1], SamplingParams(allowed_token_ids=[7]))
    output = d.step()
    assert set(output.errors) == output.client_errors == {"bad"}
    assert d.outputs["good"] == [7]


def test_pooling_request_is_refused_and_alone() -> None:
    d = driver()
    d.add("pool", [1, 2])
    d.new["pool"].sampling_params = None
    d.add("good", [4, 5])
    output = d.step()
    assert "pool" in output.errors["pool"]
    assert len(d.outputs["good"]) == 1


def test_thinking_budget_is_refused_not_ignored() -> None:
    d = driver()
    d.add("a", [1, 2], SamplingParams(thinking_token_budget=5))
    assert "thinking_token_budget" in d.step().errors["a"]


# ---------------------------------------------------------------------- grammar masks


def mask_row(allowed: list[int]) -> np.ndarray:
    words = np.zeros(-(-V // 32), np.uint32)
    for token in allowed:
        words[token // 32] |= np.uint32(1 << token % 32)
    return words.view(np.int32)


def test_6_5_1_bit_order() -> None:
    """V=100, allowed {0, 33, 99}: words [1, 2, 0, 8]."""
    config = make_config(100)
    d = Driver(ModelRunner(config, FakeBackend(100)))
    words = np.array([[1, 2, 0, 8]], np.int32)
    d.add("a", [5], SamplingParams(temperature=0, logprobs=-1))
    seen = set()
    for _ in range(30):
        d.step(grammar=GrammarOutput(["a"], [1], words))
        seen.add(d.outputs["a"][-1])
    assert seen <= {0, 33, 99}
    assert len(seen) > 1


def test_6_5_5_masks_follow_requests() -> None:
    """P39: two grammar requests with 2 and 0 drafts, a plain one with 1 draft between them."""
    d = driver(speculative=SpeculativeConfig("ngram", 3))
    for req_id, token in (("g1", 1), ("plain", 2), ("g2", 3)):
        d.add(req_id, [token, token])
    free = driver()
    for req_id, token in (("g1", 1), ("plain", 2), ("g2", 3)):
        free.add(req_id, [token, token])
    d.step(), free.step()
    plain = free.step()
    plain_next = free.outputs["plain"][-1]
    d.drafts = {"g1": [11, 12], "plain": [plain_next]}
    masks = np.stack([mask_row([11]), mask_row([12]), mask_row([13]), mask_row([40])])
    # Mask rows come in scheduling order, which need not be the order of rows.
    grammar = GrammarOutput(["g1", "g2"], [3, 1], masks)
    output = d.step(grammar=grammar)
    assert plain.errors == {}
    assert d.outputs["g1"][1:] == [11, 12, 13]
    assert d.outputs["g2"][1:] == [40]
    free.step()
    assert d.outputs["plain"] == free.outputs["plain"][:3]
    assert output.errors == {}


def test_raw_logprobs_are_taken_before_the_mask() -> None:
    """3.6.2: a constrained request reports the model's own probabilities."""
    d, free = driver(), driver()
    for x in (d, free):
        x.add("a", [5, 6], SamplingParams(temperature=0, logprobs=3))
    masked = d.step(grammar=GrammarOutput(["a"], [1], mask_row([9])[None]))
    plain = free.step()
    assert masked.sampled_token_ids == [[9]]
    assert masked.logprobs[0].logprobs[0][1:] == plain.logprobs[0].logprobs[0][1:]
    assert masked.logprobs[0].logprob_token_ids[0][0] == 9


# ---------------------------------------------------------------------- configuration


def test_logprobs_modes_reach_the_sampler() -> None:
    values = {}
    for mode in ("raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"):
        d = driver(logprobs_mode=mode)
        d.add("a", [1, 2], SamplingParams(temperature=0.5, seed=1, logprobs=1))
        values[mode] = d.step().logprobs[0].logprobs[0][0]
    assert len(set(values.values())) == 4
    assert values["processed_logits"] == pytest.approx(2 * values["raw_logits"])


def test_p46_tokenizer_smaller_than_the_vocabulary() -> None:
    config = make_config(V, tokenizer_size=40)
    backend = FakeBackend(V)
    backend.patch = lambda state, row: np.where(np.arange(V) >= 40, F32_MAX, row)
    d = Driver(ModelRunner(config, backend))
    d.add("a", [1, 2], SamplingParams(logprobs=5, prompt_logprobs=5))
    d.add("b", [1, 2], SamplingParams(temperature=0))
    for _ in range(5):
        output = d.step()
        for lists in [*output.prompt_logprobs.values(), output.logprobs[0]]:
            assert max(max(ids) for ids in lists.logprob_token_ids) < 40
    assert max(max(ids) for ids in d.outputs.values()) < 40


F32_MAX = np.float32(1e30)


def test_config_is_frozen_and_shared() -> None:
    """The runner reads the configuration and never changes it (P12: nor any global state)."""
    config = make_config(V)
    before = dataclasses.asdict(config)
    state = np.random.get_state()[1].copy()
    d = Driver(ModelRunner(config, FakeBackend(V)))
    d.add("a", [1], SamplingParams(seed=1))
    d.run(3)
    assert dataclasses.asdict(config) == before
    assert (np.random.get_state()[1] == state).all()
