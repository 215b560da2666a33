"""ModelRunner on a fake backend: steps, prompts, failures, grammar masks, logits processors."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from tellin.config import SpeculativeConfig
from tellin.exceptions import InvalidParameterError, UnsupportedFeatureError
from tellin.logits_processor import BatchUpdate, LogitsProcessor, check_by_processors
from tellin.sampling_params import SamplingParams
from tellin.step_protocol import GrammarOutput, LogprobsLists
from tellin.worker.model_runner import ModelRunner
from tests.worker.fakes import Driver, FakeBackend, make_config

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
    d.runner._max_prompt_logits = limit
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


# ---------------------------------------------------------------------- logits processors


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


class Forcing(LogitsProcessor):
    """Forces ``extra_args["force"]`` for requests that ask for it; watches the diffs."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.rows: dict[int, tuple[int, list[int], list[int]]] = {}
        self.seen: list[tuple[list[int], list[int]]] = []

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        if (sampling_params.extra_args or {}).get("force", 0) < 0:
            raise ValueError("force must not be negative")

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        for index in batch_update.removed:
            self.rows.pop(index, None)
        for index, params, prompt, output in batch_update.added:
            self.rows.pop(index, None)
            force = (params.extra_args or {}).get("force")
            if force is not None:
                assert prompt is not None
                self.rows[index] = (force, prompt, output)
        for source, target, _ in batch_update.moved:
            self.rows.pop(target, None)
            if source in self.rows:
                self.rows[target] = self.rows.pop(source)

    def apply(self, logits: np.ndarray) -> np.ndarray:
        for index, (force, prompt, output) in self.rows.items():
            logits[index] = -np.inf
            logits[index, (force + len(output)) % V] = 0
            self.seen.append((prompt, list(output)))
        return logits


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
    d = driver(logits_processors=("tests.worker.test_model_runner:Forcing",))
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
    check_by_processors(SamplingParams(), (Forcing, "tests.worker.test_model_runner:Flat"))
    with pytest.raises(InvalidParameterError, match=r"Forcing.*must not be negative"):
        check_by_processors(SamplingParams(extra_args={"force": -1}), (Forcing,))


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
