"""Speculation: drafters' vectors, and that no draft changes any id or log-probability."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from tellin.config import SpeculativeConfig
from tellin.exceptions import InvalidParameterError
from tellin.kernels.drafting import SuffixDrafter, propose_ngram
from tellin.sampling_params import SamplingParams
from tellin.step_protocol import GrammarOutput
from tellin.worker.draft_model import DraftModelDrafter
from tellin.worker.model_runner import ModelRunner
from tests.worker.fakes import Driver, FakeBackend, make_config

V = 40


def ngram(ids: list[int], min_n: int, max_n: int, k: int, most_recent: bool = False) -> list[int]:
    (draft,) = propose_ngram(
        np.array([ids], np.int32),
        np.zeros(1, np.int32),
        np.array([len(ids)], np.int32),
        np.array([k], np.int32),
        min_n=min_n,
        max_n=max_n,
        most_recent=most_recent,
    )
    return draft


@pytest.mark.parametrize(
    ("ids", "min_n", "max_n", "k", "draft"),
    [
        ([1, 2, 3, 4, 1, 2, 3], 2, 3, 2, [4, 1]),
        ([1, 2, 9, 1, 2, 8, 1, 2], 2, 2, 2, [9, 1]),
        ([5, 5, 5, 5], 1, 2, 2, [5, 5]),
        ([1, 2, 3], 2, 5, 3, []),
        ([1], 1, 1, 3, []),
        ([7, 7], 1, 1, 3, [7]),
    ],
)
def test_5_3_ngram_vectors(
    ids: list[int], min_n: int, max_n: int, k: int, draft: list[int]
) -> None:
    assert ngram(ids, min_n, max_n, k) == draft


def test_ngram_most_recent() -> None:
    """The opt-in policy takes the last occurrence of the longest match."""
    assert ngram([1, 2, 9, 1, 2, 8, 1, 2], 2, 2, 2, most_recent=True) == [8, 1]
    assert ngram([3, 1, 2, 9, 1, 2, 8, 3, 1, 2], 2, 5, 2, most_recent=True) == [9, 1]


def ngram_by_definition(ids: list[int], lo: int, hi: int, k: int, recent: bool) -> list[int]:
    for n in range(hi, lo - 1, -1):
        places = [i for i in range(len(ids) - n) if ids[i : i + n] == ids[-n:]]
        if places:
            at = (places[-1] if recent else places[0]) + n
            return ids[at : at + k]
    return []


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=80),
    st.integers(1, 3),
    st.sampled_from([0, 1, 4, 60]),
    st.integers(0, 6),
    st.booleans(),
)
def test_ngram_equals_its_definition(
    ids: list[int], lo: int, more: int, k: int, recent: bool
) -> None:
    """5.3.1, both the plain search and, for long matches, the linear-time one."""
    assert ngram(ids, lo, lo + more, k, recent) == ngram_by_definition(
        ids, lo, lo + more, k, recent
    )


def suffix(drafter: SuffixDrafter, ids: list[int], k: int) -> list[int]:
    (draft,) = drafter.propose(
        np.array([ids], np.int32),
        np.zeros(1, np.int32),
        np.array([len(ids)], np.int32),
        np.array([k], np.int32),
    )
    return draft


def test_5_4_suffix_takes_the_frequent_branch() -> None:
    """Draft length <= match length; at a fork the more frequent id; rare paths end the draft."""
    drafter = SuffixDrafter()
    ids = [9, 1, 2, 3, 4, 9, 1, 2, 3, 4, 9, 1, 2, 3, 5, 9, 1, 2, 3]
    assert suffix(drafter, ids, 8) == [4, 9, 1, 2]
    assert suffix(drafter, ids, 2) == [4, 9]
    picky = SuffixDrafter(min_token_prob=0.9)
    assert suffix(picky, [9, 1, 4, 9, 1, 5, 9, 1], 4) == []
    assert suffix(SuffixDrafter(max_spec_factor=0.5), ids, 8) == [4, 9]
    assert suffix(drafter, [1, 2, 3], 4) == []


def test_5_4_suffix_learns_from_finished_requests() -> None:
    """The outputs of finished requests are a second source; the oldest are forgotten."""
    drafter = SuffixDrafter(max_cached_requests=2)
    assert suffix(drafter, [50, 7, 8], 3) == []
    drafter.add_finished(np.array([6, 7, 8, 11, 12, 13], np.int32))
    assert suffix(drafter, [50, 7, 8], 3) == [11, 12]
    assert suffix(drafter, [50, 6, 7, 8], 9) == [11, 12, 13]
    for i in range(2):
        drafter.add_finished(np.array([100 + i, 101 + i, 102 + i], np.int32))
    assert drafter.num_cached_requests == 2
    assert suffix(drafter, [50, 7, 8], 3) == []
    assert suffix(drafter, [101, 102], 3) == [103]
    drafter.add_finished(np.array([101, 102, 77], np.int32))
    assert suffix(drafter, [101, 102], 3) == [77], "of equally frequent ids the one seen last"


def test_5_4_suffix_cache_stays_small() -> None:
    """Ten thousand outputs through a cache of ten: what is forgotten is never proposed."""
    drafter = SuffixDrafter(max_cached_requests=10)
    for i in range(10_000):
        drafter.add_finished(np.array([i, i + 1, i + 2, 5], np.int32))
    assert drafter.num_cached_requests == 10
    assert suffix(drafter, [9_999, 10_000], 4) == [10_001, 5]
    assert suffix(drafter, [20, 21], 4) == []


# ---------------------------------------------------------------------- equality


PARAMS = [
    SamplingParams(temperature=0, logprobs=2),
    SamplingParams(seed=3, temperature=0.3, logprobs=1),
    SamplingParams(seed=5, temperature=0.5, top_p=0.9, repetition_penalty=1.1),
    SamplingParams(seed=9, top_k=4, min_tokens=6, stop_token_ids=[1, 2]),
    SamplingParams(seed=1, min_p=0.1, logit_bias={3: 2.0}, presence_penalty=0.5),
    SamplingParams(seed=2, logits_processors=[lambda out, row: np.roll(row, len(out) % 2)]),
]


class Cyclic(FakeBackend):
    """Prefers to go on as the text did 5 ids ago: drafts are often right and sometimes wrong."""

    def __init__(self, strength: float = 6.0, seed: int = 0) -> None:
        super().__init__(V)
        self.strength = strength
        self.seed = seed

    def logits(self, state: int) -> np.ndarray:
        row = np.random.default_rng(state % 7 + self.seed).normal(size=V).astype(np.float32)
        row[(state // 7) % 5 + 10] += self.strength
        return row


def collect(
    method: str | None, k: int = 4, backend: type[FakeBackend] = Cyclic, num: int = 24
) -> tuple[dict[str, list[int]], dict[str, list], int]:
    """Outputs and log-probabilities of six requests, and how many steps it took."""
    spec = None
    if method in ("ngram", "suffix"):
        spec = SpeculativeConfig(method, k, prompt_lookup_min=1, prompt_lookup_max=3)
    runner = ModelRunner(make_config(V, speculative=spec), backend())
    if method == "draft_model":
        runner.drafter = DraftModelDrafter(runner.batch, 4096, lambda: Cyclic(9.0, 1), V, 16, 64)
    d = Driver(runner)
    for i, params in enumerate(PARAMS):
        d.add(f"r{i}", [(i + j) % 5 + 10 for j in range(8 + i)], params, rng_key=i)
    logprobs: dict[str, list] = {r: [] for r in d.known}
    steps = 0
    while any(len(d.outputs[r]) < num for r in d.known):
        scheduled = d.schedule()
        scheduled.num_spec_tokens_to_schedule = k if spec or method == "draft_model" else 0
        d.runner.execute_model(scheduled)
        output = d.runner.sample_tokens(None)
        assert output.errors == {}
        d.apply(scheduled, output)
        d.drafts = dict(output.draft_token_ids)
        for i, req_id in enumerate(output.req_ids):
            if output.logprobs is not None and output.logprobs[i] is not None:
                assert len(output.logprobs[i]) == len(output.sampled_token_ids[i])
                logprobs[req_id] += list(
                    zip(
                        output.logprobs[i].logprob_token_ids,
                        output.logprobs[i].logprobs,
                        output.logprobs[i].sampled_token_ranks,
                        strict=True,
                    )
                )
        steps += 1
    return {r: ids[:num] for r, ids in d.outputs.items()}, logprobs, steps


@pytest.mark.parametrize("method", ["ngram", "suffix", "draft_model"])
@pytest.mark.parametrize("k", [1, 4, 9])
def test_e2_drafts_change_no_id(method: str, k: int) -> None:
    """E2, 3.8: greedy, seeded and processed requests: ids and log-probabilities bit for bit."""
    plain, plain_logprobs, plain_steps = collect(None)
    drafted, logprobs, steps = collect(method, k)
    assert drafted == plain
    for req_id, expected in plain_logprobs.items():
        assert logprobs[req_id][: len(expected)] == expected[: len(logprobs[req_id])]
    assert steps < plain_steps, "some drafts were right"


class Half(FakeBackend):
    """The same two-id distribution everywhere: probabilities 0.7 and 0.3."""

    def __init__(self) -> None:
        super().__init__(V)

    def logits(self, state: int) -> np.ndarray:
        row = np.full(V, -np.inf, np.float32)
        row[[3, 4]] = np.log([0.7, 0.3]).astype(np.float32)
        return row


def test_e2_distribution_is_kept() -> None:
    """The share of each id does not move when drafts favour one of them."""
    runner = ModelRunner(make_config(V, speculative=SpeculativeConfig("ngram", 4)), Half())
    d = Driver(runner)
    for i in range(100):
        d.add(f"r{i}", [1], SamplingParams(), rng_key=i)
    while min(len(ids) for ids in d.outputs.values()) < 40:
        d.drafts = {r: [3, 4, 3, 3] for r in d.known if d.computed[r] > 0}
        d.step()
    ids = np.concatenate([ids[:40] for ids in d.outputs.values()])
    share = (ids == 3).mean()
    assert abs(share - 0.7) < 4 * np.sqrt(0.21 / len(ids))


def test_3_8_3_wrong_draft_is_replaced_and_ends_the_run() -> None:
    """5.2.1: K=3, the target agrees with the first draft only -> two ids are emitted."""
    free = Driver(ModelRunner(make_config(V), FakeBackend(V)))
    free.add("a", [1, 2, 3])
    right = free.run(4)["a"]
    d = Driver(ModelRunner(make_config(V), FakeBackend(V)))
    d.add("a", [1, 2, 3])
    d.step()
    d.drafts = {"a": [right[1], (right[2] + 1) % V, right[3]]}
    assert d.step().sampled_token_ids == [right[1:3]]
    assert d.computed["a"] == len(d.known["a"]) - 1
    assert d.step().sampled_token_ids == [right[3:4]]


def test_failures_behind_a_run_do_not_count() -> None:
    """NaN after a rejected draft was never needed; at a needed position it ends the request."""
    free = Driver(ModelRunner(make_config(V), FakeBackend(V)))
    free.add("a", [1, 2, 3])
    right = free.run(3)["a"]

    def hash_of(ids: list[int]) -> int:
        state = 0
        for token in ids:
            state = (state * 6364136223846793005 + token + 1) % 2**64
        return state

    wrong = (right[1] + 1) % V
    for drafts, poisoned, fails in [
        ([wrong, 5], [1, 2, 3, right[0], wrong], False),
        ([right[1], 5], [1, 2, 3, right[0], right[1]], True),
    ]:
        backend = FakeBackend(V)
        at = hash_of(poisoned)
        backend.patch = lambda state, row, at=at: row * np.nan if state == at else row
        d = Driver(ModelRunner(make_config(V), backend))
        d.add("a", [1, 2, 3])
        d.step()
        d.drafts = {"a": drafts}
        output = d.step()
        assert bool(output.errors) == fails
        assert output.sampled_token_ids == [right[1:2]]


def test_grammar_and_drafts() -> None:
    """6.5.3: each draft position obeys its own mask row."""
    d = Driver(ModelRunner(make_config(V), FakeBackend(V)))
    d.add("a", [1, 2])
    d.step()
    masks = np.zeros((3, 2), np.uint32)
    for row, token in enumerate((7, 8, 9)):
        masks[row, 0] = 1 << token
    d.drafts = {"a": [7, 8]}
    output = d.step(grammar=GrammarOutput(["a"], [3], masks.view(np.int32)))
    assert output.sampled_token_ids == [[7, 8, 9]]


def test_drafts_stop_at_the_length_limit() -> None:
    """T9, 5.2.7: a request near the limit gets fewer drafts, the others all of them."""
    runner = ModelRunner(
        make_config(V, speculative=SpeculativeConfig("ngram", 4, None, 1, 3)), Cyclic()
    )
    runner.drafter.max_model_len = 22
    d = Driver(runner)
    d.add("near", [10, 11, 12, 13, 14] * 4)
    d.add("far", [10, 11, 12, 13, 14] * 2)
    scheduled = d.schedule()
    scheduled.num_spec_tokens_to_schedule = 4
    runner.execute_model(scheduled)
    output = runner.sample_tokens(None)
    assert len(output.draft_token_ids.get("near", [])) <= 1
    assert len(output.draft_token_ids["far"]) == 4


def test_draft_model_catches_up_in_small_passes() -> None:
    """A long prompt is fed to the draft model in passes of at most max_tokens ids."""
    runner = ModelRunner(make_config(V), Cyclic())
    draft = Cyclic()
    runner.drafter = DraftModelDrafter(runner.batch, 4096, lambda: draft, V, 16, 32)
    d = Driver(runner)
    for i in range(3):
        d.add(f"r{i}", [10 + (i + j) % 5 for j in range(50 + i)])
    scheduled = d.schedule()
    scheduled.num_spec_tokens_to_schedule = 3
    runner.execute_model(scheduled)
    output = runner.sample_tokens(None)
    assert max(len(step.token_ids) for step in draft.steps) <= 32
    d.apply(scheduled, output)
    assert {len(ids) for ids in output.draft_token_ids.values()} == {3}
    d.drafts = dict(output.draft_token_ids)
    assert [len(ids) for ids in d.step().sampled_token_ids] == [4, 4, 4], "it is the same model"


def test_bad_configuration() -> None:
    for spec in (
        SpeculativeConfig("magic", 3),
        SpeculativeConfig("ngram", 3, prompt_lookup_min=4, prompt_lookup_max=2),
        SpeculativeConfig("ngram", 3, prompt_lookup_min=0, prompt_lookup_max=2),
    ):
        with pytest.raises(InvalidParameterError):
            ModelRunner(make_config(V, speculative=spec), FakeBackend(V))
