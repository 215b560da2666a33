"""Native sampler against the NumPy oracle, row by row and whatever else is in the batch."""

from __future__ import annotations

import math
from itertools import product

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from tellin.kernels import _C
from tellin.kernels.sampler import RowStatus, Sampler, SampleResult, SampleRows, random_words
from tellin.sampling_params import SamplingParams
from tests.worker import reference_sampler as oracle
from tests.worker.sampler_runs import available_isas, block_maxima, run

F = np.float32
MODES = ["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"]


@pytest.mark.parametrize("top_k", [5, 6, 2**31, 2**63 - 1])
def test_a_huge_top_k_means_all(top_k: int) -> None:
    """Every value that parameters accept is one that the native sampler takes."""
    logits = np.array([[1, 2, 3, 2, 1]] * 40, F)
    keys = list(range(40))
    everything = run(logits, [SamplingParams(top_k=0)] * 40, keys=keys)
    huge = run(logits, [SamplingParams(top_k=top_k)] * 40, keys=keys)
    assert huge.tokens.tolist() == everything.tokens.tolist()
    assert len(set(huge.tokens.tolist())) > 2


@st.composite
def cases(draw: st.DrawFn) -> tuple:
    """A row of logits with its parameters, history, key and mask."""
    n = draw(st.sampled_from([1, 2, 5, 63, 64, 65, 200, 700]))
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    kind = draw(st.sampled_from(["normal", "flat", "ties", "peaked", "holes"]))
    logits = (
        rng.normal(size=n) * {"normal": 4, "flat": 0.01, "ties": 2, "peaked": 20, "holes": 3}[kind]
    )
    if kind == "ties":
        logits = np.round(logits)
    logits = logits.astype(F)
    if kind == "holes" and n > 1:
        logits[rng.integers(0, n, n // 2)] = -np.inf
        logits[rng.integers(0, n)] = 0
    ids = st.integers(0, n - 1)
    prompt = draw(st.lists(ids, max_size=6))
    output = draw(st.lists(ids, max_size=6))
    temperature = draw(st.sampled_from([0.0, 0.01, 0.3, 0.7, 1.0, 2.0]))
    off = draw(st.booleans())
    params = SamplingParams(
        temperature=temperature,
        top_k=draw(st.sampled_from([0, 1, 2, 3, 10, 100, 10_000])),
        top_p=draw(st.sampled_from([1.0, 0.999999, 0.9, 0.5, 0.1, 1e-6])),
        min_p=draw(st.sampled_from([0.0, 1e-6, 0.01, 0.3, 1.0])),
        repetition_penalty=1.0 if off else draw(st.sampled_from([0.5, 1.0, 1.3, 2.0])),
        frequency_penalty=0.0 if off else draw(st.sampled_from([-2.0, 0.0, 0.5])),
        presence_penalty=0.0 if off else draw(st.sampled_from([-1.0, 0.0, 1.5])),
        min_tokens=draw(st.sampled_from([0, 0, 3, 8])),
        max_tokens=16,
        stop_token_ids=draw(st.lists(ids, max_size=2)),
        logit_bias=draw(st.none() | st.dictionaries(ids, st.floats(-100, 100), max_size=3)),
        allowed_token_ids=draw(st.none() | st.none() | st.lists(ids, min_size=1, max_size=8)),
        logprobs=draw(st.none() | st.sampled_from([0, 1, 5, -1])),
    )
    params.bad_words_token_ids = draw(st.lists(st.lists(ids, min_size=1, max_size=3), max_size=2))
    if params.logprobs is None and draw(st.booleans()):
        params.logprob_token_ids = draw(st.lists(ids, min_size=1, max_size=4))
    mask = draw(st.none() | st.just([bool(b) for b in rng.integers(0, 2, n)]))
    return logits, params, prompt, output, draw(st.integers(0, 2**64 - 1)), mask


def check(result: SampleResult, i: int, expected: oracle.Expected) -> None:
    assert result.status[i] == expected.status
    if expected.token is None:
        return
    assert result.tokens[i] == expected.token
    if expected.ids is None:
        return
    count = len(expected.ids)
    assert result.logprob_ids is not None
    assert result.logprobs is not None
    assert result.ranks is not None
    assert result.logprob_ids[i, :count].tolist() == expected.ids
    assert result.ranks[i] == expected.rank
    np.testing.assert_allclose(result.logprobs[i, :count], expected.logprobs, rtol=2e-6, atol=2e-6)


@settings(max_examples=600, deadline=None)
@given(cases(), st.sampled_from(MODES))
def test_equals_oracle(case: tuple, mode: str) -> None:
    """3.6, 3.7.2: ids equal to the oracle's, log-probabilities within float32 rounding."""
    logits, params, prompt, output, key, mask = case
    expected = oracle.sample(logits, params, prompt, output, key, mode, mask)
    for with_maxima in (False, True):
        result = run(
            logits[None],
            [params],
            [(prompt, output)],
            [key],
            mode,
            masks=[mask],
            with_maxima=with_maxima,
        )
        check(result, 0, expected)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(MODES))
def test_row_does_not_depend_on_batch(seed: int, mode: str) -> None:
    """Promise 1, T7, T8: a row alone and among others, bit for bit, log-probabilities too."""
    rng = np.random.default_rng(seed)
    n = 300
    logits = (rng.normal(size=(8, n)) * 3).astype(F)
    some = [
        SamplingParams(temperature=0, logprobs=3),
        SamplingParams(seed=4, top_p=0.8, logprobs=0),
        SamplingParams(seed=4, top_k=7),
        SamplingParams(temperature=0.5, min_p=0.1, logprob_token_ids=[5, 9]),
        SamplingParams(repetition_penalty=1.5, frequency_penalty=0.3, logprobs=-1),
        SamplingParams(allowed_token_ids=[3, 4, 5], temperature=2.0),
        SamplingParams(logit_bias={7: 5.0}, logprobs=2),
        SamplingParams(top_p=0.2, top_k=50, logprobs=1),
    ]
    histories = [([1, 2, 3], rng.integers(0, n, i).tolist()) for i in range(8)]
    keys = rng.integers(0, 2**63, 8).tolist()
    together = run(logits, some, histories, keys, mode)
    for i in range(8):
        alone = run(logits[i : i + 1], [some[i]], [histories[i]], [keys[i]], mode)
        assert alone.tokens[0] == together.tokens[i]
        if some[i].num_logprobs is None:
            continue
        width = n + 1 if some[i].logprobs == -1 else some[i].num_logprobs + 1
        assert alone.logprob_ids is not None
        assert together.logprob_ids is not None
        assert alone.logprob_ids[0, :width].tolist() == together.logprob_ids[i, :width].tolist()
        assert alone.logprobs[0, :width].tobytes() == together.logprobs[i, :width].tobytes()
        assert alone.ranks[0] == together.ranks[i]


@pytest.mark.parametrize("isa", available_isas())
def test_all_variants_give_the_same_bits(isa: str) -> None:
    """Every instruction set variant draws the same ids and reports the same values."""
    rng = np.random.default_rng(3)
    n = 5003
    logits = (rng.normal(size=(40, n)) * np.geomspace(0.01, 20, 40)[:, None]).astype(F)
    params = [
        SamplingParams(
            temperature=[0.0, 0.4, 1.0, 1.7][i % 4],
            top_p=[1.0, 0.95, 0.3][i % 3],
            top_k=[0, 40][i % 2],
            min_p=[0.0, 0.05][i // 7 % 2],
            logprobs=5,
        )
        for i in range(40)
    ]
    one = run(logits, params, keys=list(range(40)), isa=isa)
    best = run(logits, params, keys=list(range(40)))
    assert one.tokens.tolist() == best.tokens.tolist()
    assert one.logprob_ids.tolist() == best.logprob_ids.tolist()
    assert one.logprobs.tobytes() == best.logprobs.tobytes()


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("num_ids", [5003, 4992, 4990, 70])
def test_known_maxima_do_not_change_bits(isa: str, num_ids: int) -> None:
    """Ids, values and ranks are those of maxima found anew, whatever changes entries before."""
    rng = np.random.default_rng(num_ids)
    count = 60
    logits = (rng.normal(size=(count, 5003)) * np.geomspace(0.01, 20, count)[:, None]).astype(F)
    logits[::7, rng.integers(0, 5003, 900)] = -np.inf
    logits[:, num_ids:] = np.nan  # ids that do not exist
    params = [
        SamplingParams(
            temperature=[0.0, 0.7, 1.0][i % 3],
            top_p=[1.0, 0.95][i % 2],
            top_k=[0, 0, 40][i // 3 % 3],
            repetition_penalty=[1.0, 1.4][i // 2 % 2],
            presence_penalty=[0.0, 0.0, -2.0][i % 3],
            min_tokens=[0, 9][i // 5 % 2],
            max_tokens=16,
            stop_token_ids=[int(logits[i, :num_ids].argmax())],
            logit_bias=[None, {int(rng.integers(num_ids)): 30.0, num_ids + 7: 99.0}][i // 4 % 2],
            allowed_token_ids=[None, None, None, [3, 64, 69]][i % 4],
            logprobs=4,
        )
        for i in range(count)
    ]
    for p in params[::6]:
        p.bad_words_token_ids = [[int(logits[0, :num_ids].argmax())], [1, 2]]
    histories = [
        (rng.integers(0, 5003, 3 * i).tolist(), rng.integers(0, 5003, i % 8).tolist())
        for i in range(count)
    ]
    masks = [rng.integers(0, 2, 5003).tolist() if i % 5 == 0 else None for i in range(count)]
    for mode in MODES:
        one, two = (
            run(logits, params, histories, None, mode, num_ids, masks, isa, with_maxima)
            for with_maxima in (False, True)
        )
        assert one.status.tolist() == two.status.tolist()
        kept = one.status == RowStatus.OK
        assert kept.sum() > 40
        for name in ("tokens", "logprob_ids", "logprobs", "ranks"):
            assert getattr(one, name)[kept].tobytes() == getattr(two, name)[kept].tobytes(), name


@pytest.mark.parametrize("num_threads", [2, 5])
def test_threads_do_not_change_rows(num_threads: int) -> None:
    """Promise 1: a team of any size gives the bits that one thread gives."""
    rng = np.random.default_rng(8)
    logits = (rng.normal(size=(300, 8000)) * 3).astype(F)
    sampler = Sampler(8000)
    for i, params in enumerate([SamplingParams(top_p=0.9, logprobs=2), SamplingParams()]):
        sampler.set_slot(i, params, 17)
    rows = SampleRows(
        np.arange(300, dtype=np.int32) % 2,
        np.arange(300, dtype=np.int32),
        np.arange(300, dtype=np.int32),
        np.zeros(300, np.int32),
        np.zeros((2, 300), np.int32),
    )
    alone = sampler.sample(logits.copy(), rows, num_logprob_columns=3)
    prompt = sampler.prompt_logprobs(logits, np.zeros(300, np.int32), 3)
    sampler.team = _C.ThreadTeam(num_threads)
    shared = sampler.sample(logits.copy(), rows, num_logprob_columns=3)
    assert shared.tokens.tolist() == alone.tokens.tolist()
    assert shared.logprobs[::2].tobytes() == alone.logprobs[::2].tobytes()
    again = sampler.prompt_logprobs(logits, np.zeros(300, np.int32), 3)
    assert again.logprobs.tobytes() == prompt.logprobs.tobytes()


@pytest.mark.parametrize("scale", [0.0, 0.05, 1.0, 2.0, 4.0])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(top_p=0.9),
        SamplingParams(top_p=0.3, temperature=2.0),
        SamplingParams(top_p=0.9999),
        SamplingParams(top_k=20_000),
        SamplingParams(top_k=5),
        SamplingParams(top_k=600, top_p=0.7),
        SamplingParams(min_p=0.02),
        SamplingParams(),
    ],
    ids=lambda p: f"k{p.top_k}-p{p.top_p}-m{p.min_p}-t{p.temperature}",
)
def test_large_vocabulary(params: SamplingParams, scale: float) -> None:
    """Bins, block-maxima and gathering paths on 30,011 ids; scale 0 makes all entries tie."""
    rng = np.random.default_rng(int(scale * 100))
    logits = (rng.normal(size=30_011) * scale).astype(F)
    if scale == 4.0:
        logits = np.round(logits * 8) / 8  # many ties at the cut
    kept, weights = oracle.survivors(logits, params)
    for key in range(12):
        expected = oracle.draw(logits, params, kept, weights, key, 0)
        assert run(logits[None], [params], keys=[key]).tokens[0] == expected


@pytest.mark.parametrize("isa", available_isas())
def test_estimates_bound_the_mass(isa: str) -> None:
    """What a draw relies on: the integer mass of a row lies between the bounds, and near them."""
    rng = np.random.default_rng(1)
    for n, scale, temperature in product(
        (1, 64, 70, 5003, 20_000), (0.01, 1, 4, 30), (0.05, 0.8, 2)
    ):
        row = (rng.normal(size=n) * scale + 40 * rng.normal()).astype(F)
        row[rng.integers(0, n, n // 10)] = -np.inf
        row[rng.integers(n)] = 50
        for nats, listed in product((4, 12, 26), (0, 3, 9)):
            least, exact, most = _C.mass_range(row, temperature, nats, isa, listed)
            assert least <= exact <= most, (n, scale, temperature, nats, listed)
            assert exact >= 2**44
            if nats == 26:
                assert most - least < 1e-4 * exact
        assert exact == _C.mass_range(row, temperature, 4, "portable", 0)[1]


def test_draws_from_the_tail() -> None:
    """Half of the mass lies 10 nats below the maximum, spread over 20,000 ids."""
    logits = np.zeros(20_100, F)
    logits[[5, 9000]] = 10, 9.5
    params = SamplingParams()
    kept, weights = oracle.survivors(logits, params)
    tokens = [run(logits[None], [params], keys=[key]).tokens[0] for key in range(60)]
    assert tokens == [oracle.draw(logits, params, kept, weights, key, 0) for key in range(60)]
    assert 10 < sum(token not in (5, 9000) for token in tokens) < 50


def test_min_p_near_zero() -> None:
    """The lowest kept value is near 0, where floats are finer than the differences that count."""
    logits = np.full(300, -50, F)
    logits[0] = 4.0
    logits[1:101] = np.linspace(-1e-6, 1e-6, 100)
    params = SamplingParams(min_p=math.exp(-4), logprobs=-1)
    expected = oracle.sample(logits, params, [], [], 1, "processed_logits")
    check(run(logits[None], [params], keys=[1], mode="processed_logits"), 0, expected)


def test_philox_known_answers() -> None:
    """Vectors of the generator's authors (Random123, kat_vectors) and equality with the oracle."""
    assert oracle.philox4x32(0, (0, 0, 0, 0)) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = 0xFFFFFFFF
    assert oracle.philox4x32(2**64 - 1, (ones, ones, ones, ones)) == [
        0x408F276D,
        0x41C83B0E,
        0xA20BC7C6,
        0x6D5451FD,
    ]
    for key, index, purpose in [(0, 0, 0), (2**64 - 1, 2**32 - 1, 3), (123456789, 42, 1)]:
        words = oracle.philox4x32(key, (index, purpose, 0, 0))
        assert random_words(key, index, purpose) == words


def test_distribution_is_softmax() -> None:
    """E2: 1e5 draws over 10 ids, one per output index; chi-square below the 1e-4 quantile."""
    n, draws = 10, 100_000
    logits = np.linspace(-2, 2, n).astype(F)
    sampler = Sampler(n)
    sampler.set_slot(0, SamplingParams(temperature=0.8), 99)
    history = np.zeros((1, draws), np.int32)
    rows = SampleRows(
        np.zeros(draws, np.int32),
        np.arange(draws, dtype=np.int32),
        np.arange(draws, dtype=np.int32),
        np.zeros(draws, np.int32),
        history,
    )
    tokens = sampler.sample(np.tile(logits, (draws, 1)), rows).tokens
    p = np.exp(logits.astype(np.float64) / 0.8)
    expected = p / p.sum() * draws
    chi2 = ((np.bincount(tokens, minlength=n) - expected) ** 2 / expected).sum()
    assert chi2 < 33.7  # 9 degrees of freedom


# ---------------------------------------------------------------------- vectors of the spec


def test_3_6_13_top_p_vector() -> None:
    """probs .1 .2 .3 .4, top_p .6 keeps .3 and .4."""
    logits = np.log(np.array([[0.1, 0.2, 0.3, 0.4]], F))
    params = SamplingParams(top_p=0.6, logprobs=-1)
    result = run(logits, [params], mode="processed_logprobs")
    by_id = dict(
        zip(result.logprob_ids[0, 1:].tolist(), result.logprobs[0, 1:].tolist(), strict=True)
    )
    assert math.isclose(math.exp(by_id[3]), 4 / 7, rel_tol=1e-6)
    assert math.isclose(math.exp(by_id[2]), 3 / 7, rel_tol=1e-6)
    assert by_id[0] == by_id[1] == -math.inf


def test_3_6_7_penalty_vector() -> None:
    """r=2, f=.5, p=.5: logit 2 only in the prompt -> 1.0; logit -1 twice in the output -> -3.5."""
    params = SamplingParams(
        temperature=0,
        repetition_penalty=2,
        frequency_penalty=0.5,
        presence_penalty=0.5,
        logprobs=-1,
    )
    logits = np.array([[2.0, -1.0, 0.5]], F)
    result = run(logits, [params], [([0], [1, 1])], mode="processed_logits")
    values = dict(
        zip(result.logprob_ids[0, 1:].tolist(), result.logprobs[0, 1:].tolist(), strict=True)
    )
    assert values == {0: 1.0, 1: -3.5, 2: 0.5}


def test_3_6_9_greedy_takes_lowest_id_on_ties() -> None:
    logits = np.zeros((2, 200), F)
    logits[0, [150, 70, 199]] = 3
    greedy = SamplingParams(temperature=0)
    assert run(logits, [greedy, greedy]).tokens.tolist() == [70, 0]


def test_p52_top_k_1_is_greedy() -> None:
    """P52: top_k=1 is greedy even among ties; -1 and 0 mean off."""
    logits = np.zeros((1, 200), F)
    logits[0, [150, 70]] = 3
    for key in range(20):
        assert run(logits, [SamplingParams(top_k=1)], keys=[key]).tokens[0] == 70
        off = [run(logits, [SamplingParams(top_k=k)], keys=[key]).tokens[0] for k in (-1, 0, 500)]
        assert off[0] == off[1] == off[2]


def test_top_p_does_not_bring_back_ties_that_top_k_dropped() -> None:
    """Both limits are the same value; of the entries that equal it top-k keeps the first two."""
    logits = np.array([[2.0, 1.0, 1.0, 1.0]], F)
    params = SamplingParams(top_k=3, top_p=0.999999, logprobs=0)
    found = set()
    for key in range(60):
        result = run(logits, [params], keys=[key], mode="processed_logits")
        assert result.ranks is not None
        found.add((int(result.tokens[0]), int(result.ranks[0])))
    assert found == {(0, 1), (1, 3), (2, 3)}


def test_3_6_5_bad_words_need_their_prefix() -> None:
    logits = np.array([[0, 1, 2, 3]], F)
    params = SamplingParams(temperature=0)
    params.bad_words_token_ids = [[1, 3]]
    assert run(logits, [params], [([0], [1])]).tokens[0] == 2
    assert run(logits, [params], [([0], [2])]).tokens[0] == 3
    assert run(logits, [params], [([1], [])]).tokens[0] == 3, "the prompt is no output"
    params.bad_words_token_ids = [[3]]
    assert run(logits, [params], [([0], [])]).tokens[0] == 2


def test_p53_min_tokens_masks_all_ends() -> None:
    """P53: the eos id, further stop ids of the model and the user's are all forbidden."""
    params = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=[3])
    params.eos_token_id, params.all_stop_token_ids = 1, {2, 3}
    logits = np.array([[0, 5, 6, 7]], F)
    assert run(logits, [params], [([0], [0])]).tokens[0] == 0
    assert run(logits, [params], [([0], [0, 0])]).tokens[0] == 3
    params.ignore_eos = True
    params.all_stop_token_ids = {3}
    assert run(logits, [params], [([0], [0])]).tokens[0] == 2, (
        "ignore_eos: eos is an id like others"
    )


# ---------------------------------------------------------------------- failures of a row


def test_p30_contradicting_masks_are_an_error() -> None:
    """P30: never an id outside the masks; the neighbour is unharmed."""
    logits = np.zeros((3, 50), F)
    bad = SamplingParams(temperature=0, allowed_token_ids=[7])
    bad.bad_words_token_ids = [[7]]
    only_eos = SamplingParams(allowed_token_ids=[1], min_tokens=1)
    only_eos.eos_token_id = 1
    good = SamplingParams(temperature=0, allowed_token_ids=[7])
    result = run(logits, [bad, only_eos, good])
    assert result.status.tolist() == [RowStatus.NOTHING_LEFT, RowStatus.NOTHING_LEFT, RowStatus.OK]
    assert result.tokens[2] == 7


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("where", [0, 63, 64, 129])
def test_nan_and_infinity_end_the_row_alone(value: float, where: int) -> None:
    logits = np.zeros((2, 130), F)
    logits[0, where] = value
    for params, isa in product((SamplingParams(temperature=0), SamplingParams()), available_isas()):
        result = run(logits, [params, params], isa=isa)
        assert result.status.tolist() == [RowStatus.NOT_FINITE, RowStatus.OK]
        result = run(logits, [params, params], isa=isa, with_maxima=True)
        assert result.status.tolist() == [RowStatus.NOT_FINITE, RowStatus.OK]


def test_p46_ids_beyond_the_tokenizer_do_not_exist() -> None:
    """P46: 64 extra rows with large logits are neither sampled nor shown nor counted."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(1, 164)).astype(F)
    logits[0, 100:] = 50
    narrow = logits[:, :100]
    for params in (SamplingParams(logprobs=-1), SamplingParams(temperature=0, logprobs=5)):
        wide = run(logits, [params], num_ids=100)
        exact = run(narrow, [params])
        assert wide.tokens[0] == exact.tokens[0] < 100
        assert wide.logprob_ids.max() < 100
        assert wide.logprobs.tobytes() == exact.logprobs.tobytes()
    logits[0, 100] = np.nan
    assert run(logits, [SamplingParams()], num_ids=100).status[0] == RowStatus.OK


# ---------------------------------------------------------------------- log-probabilities


def test_p07_raw_logprobs_do_not_depend_on_parameters() -> None:
    """P07: temperature, top-k, top-p, penalties and masks leave raw values alone, bit for bit."""
    rng = np.random.default_rng(1)
    row = (rng.normal(size=500) * 3).astype(F)
    mask = [bool(b) for b in rng.integers(0, 2, 500)]
    params = [
        SamplingParams(temperature=0, logprobs=5),
        SamplingParams(temperature=0.5, top_k=1, logprobs=5),
        SamplingParams(temperature=2, top_p=0.1, logprobs=5),
        SamplingParams(repetition_penalty=2, logit_bias={4: 50.0}, logprobs=5),
        SamplingParams(allowed_token_ids=[1, 2], logprobs=5),
        SamplingParams(logprobs=5),
    ]
    result = run(np.tile(row, (6, 1)), params, [([1, 2], [3, 3])] * 6, masks=[None] * 5 + [mask])
    expected = oracle.log_softmax(row)
    for i in range(6):
        assert result.logprob_ids[i, 1:].tolist() == result.logprob_ids[0, 1:].tolist()
        assert result.logprobs[i, 1:].tobytes() == result.logprobs[0, 1:].tobytes()
        token = result.tokens[i]
        assert result.logprob_ids[i, 0] == token, "the sampled id is always there"
        assert math.isclose(result.logprobs[i, 0], expected[token], abs_tol=1e-5)
        assert result.ranks[i] == 1 + (row > row[token]).sum()


def test_ranks_count_ties() -> None:
    """3.6.16: rank = number of entries >= the sampled one's."""
    logits = np.array([[1, 3, 3, 2]], F)
    result = run(logits, [SamplingParams(temperature=0, logprobs=1)])
    assert result.tokens[0] == 1
    assert result.ranks[0] == 2


def test_prompt_logprobs_match_oracle() -> None:
    rng = np.random.default_rng(5)
    logits = (rng.normal(size=(9, 333)) * 4).astype(F)
    ids = rng.integers(0, 300, 9).astype(np.int32)
    result = Sampler(300).prompt_logprobs(logits, ids, 4)
    again = Sampler(300).prompt_logprobs(logits, ids, 4, block_maxima(logits))
    assert again.logprobs.tobytes() == result.logprobs.tobytes()
    assert again.logprob_ids.tobytes() == result.logprob_ids.tobytes()
    assert again.ranks.tolist() == result.ranks.tolist()
    for i in range(9):
        row = logits[i, :300]
        expected = oracle.log_softmax(row)
        best = oracle.order(row)[:4]
        assert result.logprob_ids[i].tolist() == [ids[i], *best]
        np.testing.assert_allclose(result.logprobs[i], expected[[ids[i], *best]], atol=2e-6)
        assert result.ranks[i] == (row >= row[ids[i]]).sum()
    assert result.logprob_ids.max() < 300


def test_bad_arrays_are_refused() -> None:
    """Indices outside the arrays raise before anything is read."""
    sampler = Sampler(10)
    sampler.set_slot(0, SamplingParams(), 1)
    good = SampleRows(*(np.zeros(1, np.int32) for _ in range(4)), np.zeros((1, 4), np.int32))
    logits = np.zeros((1, 10), F)
    sampler.sample(logits, good)
    for name, value in [("slots", 5), ("logits_rows", 1), ("history_lens", 6), ("prompt_lens", 2)]:
        rows = SampleRows(**{**vars(good), name: np.array([value], np.int32)})
        with pytest.raises(ValueError):
            sampler.sample(logits, rows)
    for shape in [(2, 1), (0, 1), (1, 0)]:
        with pytest.raises(ValueError, match="maxima"):
            sampler.sample(logits, SampleRows(**{**vars(good), "maxima": np.zeros(shape, F)}))
    with pytest.raises(ValueError):
        sampler.sample(np.zeros((1, 9), F), good)
