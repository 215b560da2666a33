"""5.2, 5.6: accounting of drafts, their length, their metrics."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tellin.config import SpeculativeConfig
from tellin.core.request import Request
from tellin.core.spec_decode import RETRY_INTERVAL, SpecDecodeController, StepTimeModel
from tellin.engine.nested_configs import speculative_config
from tellin.exceptions import TellinError
from tellin.protocol import FinishReason
from tellin.sampling_params import SamplingParams
from tests.core.driver import Driver
from tests.core.fakes import EOS, next_id
from tests.core.test_scheduler import unlike

NGRAM = SpeculativeConfig("ngram", 3, adaptive=False)


def perfect(request_id: str, ids: list[int], k: int) -> list[int]:
    drafts: list[int] = []
    while len(drafts) < k:
        drafts.append(next_id(ids + drafts))
    return drafts


def half_right(request_id: str, ids: list[int], k: int) -> list[int]:
    """The first draft is right, the others are wrong."""
    return [next_id(ids), 901, 902][:k]


def spec_driver(draft: Any, config: SpeculativeConfig = NGRAM, **kwargs: Any) -> Driver:
    driver = Driver(speculative_config=config, log_stats=True, **kwargs)
    driver.executor.draft = draft
    return driver


def test_accounting() -> None:
    """5.2 Check: K=3; the target agrees with the first draft only: 2 ids, C = T - 1 again."""
    driver = spec_driver(half_right)
    driver.add("r", unlike(1, 9), 20)
    driver.step()
    request = driver.scheduler.requests["r"]
    assert (request.num_tokens, request.num_computed_tokens) == (10, 9)
    assert len(request.spec_token_ids) == 3
    assert driver.step() == {"r": 4}
    assert (request.num_tokens, request.num_computed_tokens) == (12, 11)
    step = driver.executor.outputs[-1]
    assert len(step.scheduled_spec_decode_tokens["r"]) == 3
    driver.run()
    driver.check_lone("r", 20)


@pytest.mark.parametrize("draft", [perfect, half_right, lambda r, i, k: [903] * k])
@pytest.mark.parametrize("method", ["ngram", "draft_model", "mtp"])
def test_drafts_change_nothing_but_the_number_of_steps(draft: Any, method: str) -> None:
    """E2: the same ids with good, mixed and useless drafts."""
    driver = spec_driver(draft, SpeculativeConfig(method, 3, adaptive=False))
    for i in range(4):
        driver.add(f"r{i}", unlike(i, 5 + i), 21)
    steps = len(driver.run())
    for i in range(4):
        driver.check_lone(f"r{i}", 21)
        assert driver.finish[f"r{i}"] is FinishReason.LENGTH
    driver.check_idle()
    if draft is perfect:
        assert steps <= 9


def test_prompt_chunks_never_draft() -> None:
    """5.2.2: proposals for a row that was a chunk of its prompt are dropped."""
    driver = spec_driver(lambda r, i, k: [1] * k, max_num_batched_tokens=8)
    driver.add("r", unlike(1, 20), 9)
    driver.executor.draft = None
    for _ in range(2):
        driver.step()
        output = driver.scheduler.results
        output._accept_drafts(
            type("Output", (), {"draft_token_ids": {"r": [1, 2, 3]}})()  # type: ignore[arg-type]
        )
        assert driver.scheduler.requests["r"].spec_token_ids == []


def test_budget_cuts_drafts_and_no_decode() -> None:
    """5.2.6: every request is served its last token first."""
    driver = spec_driver(perfect, max_num_batched_tokens=10, max_num_seqs=4)
    for i in range(4):
        driver.add(f"r{i}", unlike(i, 2), 16)
    driver.step()
    assert driver.step() == {"r0": 4, "r1": 4, "r2": 1, "r3": 1}
    driver.run()
    for i in range(4):
        driver.check_lone(f"r{i}", 16)


def test_drafts_never_exceed_what_may_be_output() -> None:
    """5.2.7: near max_tokens and near max_model_len."""
    for kwargs in ({"max_tokens": 6}, {"max_tokens": 99}):
        driver = spec_driver(perfect, max_model_len=14, num_kv_blocks=20)
        driver.add("r", unlike(1, 6), **kwargs)
        driver.run()
        allowed = min(kwargs["max_tokens"], 8)
        driver.check_lone("r", allowed)
        for step in driver.executor.outputs:
            for cached in step.scheduled_cached_reqs:
                drafts = step.scheduled_spec_decode_tokens.get("r", [])
                assert cached.num_output_tokens + len(drafts) < allowed


def test_drafts_cost_nobody_a_block() -> None:
    """While blocks are short, drafts use only slots that are there anyway."""
    driver = spec_driver(perfect, num_kv_blocks=9, max_model_len=32, enable_prefix_caching=False)
    driver.add("a", unlike(1, 15), 17)
    driver.add("b", unlike(2, 12), 2)
    driver.step()
    assert driver.scheduler.kv_cache_manager.pool.get_num_free_blocks() == 1
    assert driver.step() == {"a": 1, "b": 1}
    driver.run()
    assert driver.scheduler.num_preemptions == 0
    driver.check_lone("a", 17)
    driver.check_lone("b", 2)


def test_a_stop_inside_accepted_drafts_cuts_them() -> None:
    """1.11, 5.6 Wart: what a stop cut off does not count as accepted."""
    driver = spec_driver(perfect)
    ids = unlike(1, 9)
    stop = next_id([*ids, next_id(ids)])
    driver.add("r", ids, 20, stop_token_ids=[stop], logprobs=1)
    driver.run()
    assert driver.last["r"].new_logprobs is not None
    assert driver.last["r"].new_logprobs.logprob_token_ids == [[stop]]
    assert driver.tokens["r"] == [next_id(ids), stop]
    assert driver.last["r"].stop_reason == stop
    stats = [s.spec_decoding_stats for s in driver.stats if s.spec_decoding_stats]
    assert (stats[0].num_draft_tokens, stats[0].num_accepted_tokens) == (3, 1)
    driver.check_idle()


def test_metrics() -> None:
    """5.6.1: one observation per request with drafts, per-position counters."""
    driver = spec_driver(half_right)
    driver.add("r", unlike(1, 9), 21)
    driver.run()
    stats = [s.spec_decoding_stats for s in driver.stats if s.spec_decoding_stats]
    assert all(s.num_spec_tokens == 3 for s in stats)
    assert sum(s.num_drafts for s in stats) == 10
    assert sum(s.num_accepted_tokens for s in stats) == 10
    per_position = [
        sum(c) for c in zip(*(s.num_accepted_tokens_per_pos for s in stats), strict=True)
    ]
    assert per_position == [10, 0, 0]
    drafted = [sum(c) for c in zip(*(s.num_draft_tokens_per_pos for s in stats), strict=True)]
    assert sum(drafted) == sum(s.num_draft_tokens for s in stats)
    assert drafted[0] == 10


def test_only_final_blocks_are_published() -> None:
    """G8, 5.2.5: blocks that hold rejected drafts are in no cache."""
    driver = spec_driver(half_right)
    driver.add("r", unlike(1, 9), 21)
    driver.run()
    everything = unlike(1, 9) + driver.tokens["r"]
    driver.add("s", everything, 5)
    driver.run()
    driver.check_lone("s", 5)


def test_logprobs_match_accepted_ids() -> None:
    driver = spec_driver(half_right)
    driver.add("r", unlike(1, 9), 9, logprobs=1)
    driver.run()
    for output in driver.outputs["r"]:
        assert output.new_logprobs is not None
        assert [ids[0] for ids in output.new_logprobs.logprob_token_ids] == output.new_token_ids


# ---------------------------------------------------------------------- adaptive length


def a_request() -> Request:
    params = SamplingParams(max_tokens=999)
    return Request("r", [1], params, None, max_model_len=2000)


def test_times_are_fitted() -> None:
    model = StepTimeModel()
    rng = random.Random(1)
    for _ in range(200):
        rows = rng.randrange(1, 9)
        model.observe(rows, 0.010 + 0.002 * rows)
    assert model.relative_row_cost(1) == pytest.approx(1 / 6, rel=0.01)
    assert model.relative_row_cost(4) == pytest.approx(4 * 0.002 / 0.018, rel=0.01)


def test_times_without_variety_are_guessed() -> None:
    model = StepTimeModel()
    for _ in range(50):
        model.observe(1, 0.01)
    assert 0.0 < model.relative_row_cost(1) < 1.0
    assert model.relative_row_cost(1) < model.relative_row_cost(16) < 1.0
    assert 0.0 < model.relative_row_cost(0) < 1.0


SHORT, LONG = [1, 2], [1, 2, 3, 4, 5, 6, 7, 8]


def controller(row_cost: float, num_requests: int = 1) -> SpecDecodeController:
    """One that knows what a row costs, relative to a step's base of 1."""
    spec = SpecDecodeController(SpeculativeConfig("ngram", 8))
    rng = random.Random(2)
    for _ in range(100):
        rows = num_requests * rng.randrange(1, 6)
        spec.observe_step(num_requests, rows, 1.0 + row_cost * rows)
    return spec


def test_good_drafts_get_longer_and_bad_ones_stop() -> None:
    spec = controller(0.3)
    good, bad = a_request(), a_request()
    for _ in range(10):
        spec.observe(good, 8, 8)
        spec.observe(bad, 1, 0)
    assert spec.accept(good, SHORT) == SHORT
    assert spec.accept(bad, SHORT) == []


def test_long_drafts_are_judged_by_themselves() -> None:
    """Chance matches that were wrong say nothing of a passage that is copied."""
    spec = controller(0.3)
    request = a_request()
    for _ in range(10):
        assert spec.accept(request, SHORT)[:1] in ([], [1])
        spec.observe(request, 1, 0)
    assert spec.accept(request, SHORT) == []
    assert len(spec.accept(request, LONG)) >= 1
    for _ in range(3):
        spec.observe(request, 8, 8)
    assert spec.accept(request, LONG) == LONG
    assert spec.accept(request, SHORT) == []


def test_bad_drafts_are_tried_again_now_and_then() -> None:
    spec = controller(0.3)
    request = a_request()
    for _ in range(10):
        spec.observe(request, 1, 0)
    limits = []
    for _ in range(4 * RETRY_INTERVAL):
        spec.limits([request])
        limits.append(len(spec.accept(request, SHORT)))
        if limits[-1]:
            spec.observe(request, 1, 0)
    assert sum(limits) == 4


def test_a_busy_engine_drafts_less() -> None:
    """With many requests a row costs a whole token's share of the step."""
    request = a_request()
    lone, crowd = controller(0.05), controller(0.05, num_requests=16)
    for spec in (lone, crowd):
        request.num_drafts_right, request.num_drafts_wrong = [0.0, 9.0], [0.0, 1.0]
        assert spec.num_spec_tokens == 8
    assert len(lone.accept(request, LONG)) > len(crowd.accept(request, LONG)) >= 1


@pytest.mark.parametrize(("chance", "row_cost"), [(0.0, 0.4), (0.1, 0.8), (0.9, 0.1), (0.7, 0.3)])
def test_never_much_slower_than_without(chance: float, row_cost: float) -> None:
    """At least 0.95 x the speed of no speculation; and much faster where drafts are good."""
    rng = random.Random(3)
    spec = SpecDecodeController(SpeculativeConfig("ngram", 5))
    request = a_request()
    seconds = 0.0
    while request.num_tokens < 1500:
        spec.limits([request])
        num_drafts = len(spec.accept(request, LONG[:5]))
        num_right = 0
        while num_right < num_drafts and rng.random() < chance:
            num_right += 1
        step = 1.0 + row_cost * (1 + num_drafts)
        seconds += step
        spec.observe_step(1, 1 + num_drafts, step)
        request.append_output_token_ids([1] * (1 + num_right))
        if num_drafts:
            spec.observe(request, num_drafts, num_right)
    without = request.num_tokens * (1.0 + row_cost)
    assert seconds < without / 0.95
    if chance == 0.9:
        assert seconds < without / 2


def test_without_adaptation_the_length_is_fixed() -> None:
    spec = SpecDecodeController(NGRAM)
    request = a_request()
    for _ in range(20):
        spec.observe(request, 3, 0)
    assert spec.accept(request, LONG) == LONG[:3]
    assert spec.limits([]) == (3, {})
    assert SpecDecodeController(None).limits([request]) == (0, {})


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_drafts_that_do_not_pay_are_not_verified(method: str) -> None:
    """Nor are they asked for, if it takes a draft model's time to make them."""
    config = SpeculativeConfig(method, 3, model="m")
    driver = spec_driver(lambda r, i, k: [901] * k, config, max_model_len=200, num_kv_blocks=99)
    driver.executor.model_time_s = driver.executor.draft_time_s = 0.01
    driver.add("r", unlike(1, 4), 120)
    driver.run()
    outputs = driver.executor.outputs
    asked = [s.num_spec_tokens_to_schedule for s in outputs]
    assert asked[0] > 0
    assert sum(bool(s.scheduled_spec_decode_tokens) for s in outputs) < 16
    if method == "draft_model":
        assert asked.count(0) > 110
    driver.check_lone("r", 120)


def test_a_layer_of_the_model_is_tried_again() -> None:
    """Other than a draft model it has missed nothing: drafts that become right are used again."""
    config = SpeculativeConfig("mtp", 3)
    is_right = False

    def draft(request_id: str, ids: list[int], k: int) -> list[int]:
        return perfect(request_id, ids, k) if is_right else [901] * k

    driver = spec_driver(draft, config, max_model_len=600, num_kv_blocks=160)
    driver.executor.model_time_s, driver.executor.draft_time_s = 0.01, 0.002
    driver.add("r", unlike(1, 4), 500)
    for _ in range(90):
        driver.step()
    drafted = [bool(s.scheduled_spec_decode_tokens) for s in driver.executor.outputs]
    assert sum(drafted[-50:]) < 5
    is_right = True
    driver.run()
    drafted = [bool(s.scheduled_spec_decode_tokens) for s in driver.executor.outputs]
    assert sum(drafted[90:]) > 50
    driver.check_lone("r", 500)


def test_each_request_has_a_length_of_its_own() -> None:
    """The worker drafts for all; those whose drafts do not pay get none."""
    config = SpeculativeConfig("ngram", 3)

    def draft(request_id: str, ids: list[int], k: int) -> list[int]:
        return perfect(request_id, ids, k) if request_id == "good" else [901] * k

    driver = spec_driver(draft, config, max_model_len=300, num_kv_blocks=200)
    driver.add("bad", unlike(1, 4), 200)
    driver.add("good", unlike(2, 4), 200)
    while "good" not in driver.finish:
        driver.step()
    drafts = [s.scheduled_spec_decode_tokens for s in driver.executor.outputs]
    assert sum("bad" in d for d in drafts) < 15
    assert sum("good" in d for d in drafts) > 40
    driver.run()
    driver.check_lone("good", 200)
    driver.check_lone("bad", 200)


def test_eos_is_never_drafted_past() -> None:
    driver = spec_driver(lambda r, i, k: [EOS] * k)
    driver.add("r", unlike(1, 4), 12)
    driver.run()
    driver.check_lone("r", 12)


def test_a_stall_is_not_taken_for_dear_rows() -> None:
    """One step of a machine that stood still for a second changes little."""
    model = StepTimeModel()
    for rows in [1, 2, 1, 4] * 10:
        model.observe(rows, 0.010 + 0.002 * rows)
    for stall in (4, 1):
        before = model.relative_row_cost(1)
        model.observe(stall, 1.0)
        assert model.relative_row_cost(1) == pytest.approx(before, abs=0.1)
        for rows in [1, 2, 1, 4] * 50:
            model.observe(rows, 0.010 + 0.002 * rows)
        assert model.relative_row_cost(1) == pytest.approx(1 / 6, rel=0.05)


def drafted_seconds(
    chance: float, draft_cost: float, num_requests: int, num_tokens: int
) -> tuple[float, float]:
    """(with a draft model, without it): time that requests take one after the other.

    A row costs 0.1 of a step, a draft ``draft_cost``; to read an id that the draft model has missed
    costs it a tenth of that.
    """
    rng = random.Random(4)
    spec = SpecDecodeController(SpeculativeConfig("draft_model", 8, model="m"))
    seconds = 0.0
    for i in range(num_requests):
        params = SamplingParams(max_tokens=9999)
        request = Request(f"r{i}", [1] * 20, params, None, max_model_len=9999)
        drafts: list[int] = []
        num_read = 0
        while request.num_tokens < 20 + num_tokens:
            num_drafts, num_right = len(drafts), 0
            while num_right < num_drafts and rng.random() < chance:
                num_right += 1
            step = 0.9 + 0.1 * (1 + num_drafts)
            request.append_output_token_ids([1] * (1 + num_right))
            if num_drafts:
                spec.observe(request, num_drafts, num_right)
            most, limits = spec.limits([request])
            limit = limits.get("r", most)
            drafting = 0.0
            if limit:
                missing = request.num_tokens - num_read
                drafting = draft_cost * (limit + 0.1 * missing)
                num_read = request.num_tokens
            spec.observe_step(1, 1 + num_drafts, step, drafting, limit)
            drafts = spec.accept(request, [7] * limit)
            seconds += step + drafting
    return seconds, float(num_requests * num_tokens)


@pytest.mark.parametrize(("chance", "draft_cost"), [(0.05, 0.5), (0.3, 0.4), (0.5, 1.0)])
def test_a_draft_model_that_does_not_pay_is_given_up(chance: float, draft_cost: float) -> None:
    """At least 0.95 x the speed without it, what it has to read included."""
    with_drafts, without = drafted_seconds(chance, draft_cost, 40, 128)
    assert with_drafts < without / 0.95


@pytest.mark.parametrize(("chance", "draft_cost", "gain"), [(0.95, 0.2, 1.9), (0.8, 0.3, 1.15)])
def test_a_good_draft_model_is_used(chance: float, draft_cost: float, gain: float) -> None:
    with_drafts, without = drafted_seconds(chance, draft_cost, 40, 128)
    assert with_drafts < without / gain


@pytest.mark.parametrize("number", [0, 129, 2.5])
def test_3_8_7_at_most_128_drafts(number: Any) -> None:
    args = {"method": "ngram", "num_speculative_tokens": number}
    with pytest.raises(TellinError, match="num_speculative_tokens"):
        speculative_config(args)
    args["num_speculative_tokens"] = 128
    config = speculative_config(args)
    assert config is not None
    assert config.num_speculative_tokens == 128


def layer_seconds(
    chance: float, reading: float, draft_cost: float, num_tokens: int, stall: int, seed: int
) -> float:
    """Time of a request, a row of which costs 0.1 of a step, with a layer that reads in each.

    Args:
        stall: a step in which the machine stands still while the layer reads; the time for that is
            not part of the result.
    """
    rng = random.Random(seed)
    spec = SpecDecodeController(SpeculativeConfig("mtp", 4))
    request = Request("r", [1] * 20, SamplingParams(max_tokens=9999), None, max_model_len=9999)
    seconds, drafts, num_steps = 0.0, list[int](), 0
    while request.num_tokens < 20 + num_tokens:
        num_drafts, num_right = len(drafts), 0
        while num_right < num_drafts and rng.random() < chance:
            num_right += 1
        request.append_output_token_ids([1] * (1 + num_right))
        if num_drafts:
            spec.observe(request, num_drafts, num_right)
        most, limits = spec.limits([request])
        limit = limits.get("r", most)
        step, drafting = 0.9 + 0.1 * (1 + num_drafts), reading + draft_cost * limit
        num_steps += 1
        spec.observe_step(1, 1 + num_drafts, step, drafting + 9 * (num_steps == stall), limit)
        drafts = spec.accept(request, [7] * limit)
        seconds += step + drafting
    return seconds


@pytest.mark.parametrize("stall", [-1, 2, 4, 5, 6])
@pytest.mark.parametrize("chance", [0.4, 0.9])
def test_what_is_read_in_any_case_is_no_cost_of_a_draft(chance: float, stall: int) -> None:
    """A layer that reads half as long as a step takes: its drafts themselves are cheap."""
    gain = {0.4: 1.15, 0.9: 2.2}[chance]
    seconds = sum(layer_seconds(chance, 0.5, 0.05, 400, stall, seed) for seed in range(5))
    assert seconds < 5 * 400 * 1.5 / gain


@pytest.mark.parametrize("stall", [-1, 2, 3, 4])
@pytest.mark.parametrize(("reading", "draft_cost"), [(0.02, 0.5), (0.3, 0.3), (0.0, 0.04)])
def test_a_layer_that_guesses_badly_costs_little(
    reading: float, draft_cost: float, stall: int
) -> None:
    """Beside what it reads in any case: at least 0.95 x the speed."""
    seconds = layer_seconds(0.05, reading, draft_cost, 1000, stall, 1)
    assert seconds < 1000 * (1.0 + reading) / 0.95
