"""P21, P23: neither large nor small requests starve."""

from __future__ import annotations

import itertools

from tellin.core.admission import MAX_OVERTAKEN
from tellin.core.request import Request
from tellin.core.scheduler import Scheduler
from tellin.step_protocol import ModelRunnerOutput
from tests.core.driver import Driver
from tests.core.fakes import make_config, make_request
from tests.core.test_scheduler import unlike


def first_token_steps(driver: Driver, max_steps: int = 5000) -> dict[str, int]:
    """Run; returns in which step each request got its first token."""
    found: dict[str, int] = {}
    number = 0
    while driver.core.has_work():
        number += 1
        assert number < max_steps
        driver.step()
        for request_id, tokens in driver.tokens.items():
            if tokens and request_id not in found:
                found[request_id] = number
    return found


def test_small_prompts_behind_a_huge_one_wait_for_one_chunk() -> None:
    """P23: a 3,000-token prompt, five tiny ones right behind; and the huge one still completes."""
    driver = Driver(
        max_num_batched_tokens=64, max_model_len=4000, num_kv_blocks=1200, max_num_seqs=16
    )
    driver.add("huge", unlike(0, 3000), 2)
    for i in range(5):
        driver.add(f"tiny{i}", unlike(i + 1, 8), 2)
    found = first_token_steps(driver)
    assert max(found[f"tiny{i}"] for i in range(5)) <= 3
    assert found["huge"] <= 3000 / 64 + 5
    for request_id in driver.tokens:
        driver.check_lone(request_id, 2)


def test_a_long_prompt_keeps_half_of_the_budget() -> None:
    """P23, no reverse starvation: a stream of small prompts halves its speed, no more."""
    driver = Driver(
        max_num_batched_tokens=64, max_model_len=4000, num_kv_blocks=1200, max_num_seqs=64
    )
    driver.add("huge", unlike(0, 1500), 2)
    for number in range(60):
        if "huge" in driver.finish:
            break
        for i in range(8):
            driver.add(f"s{number}_{i}", [900, number, i, *range(16)], 1)
        driver.step()
    assert "huge" in driver.finish
    assert number <= 1500 / 32 + 3


def test_the_budget_is_never_wasted() -> None:
    """What the others do not use goes back to the long prompt."""
    driver = Driver(max_num_batched_tokens=64, max_model_len=900, num_kv_blocks=400)
    driver.add("huge", unlike(0, 600), 2)
    driver.add("tiny", unlike(1, 4), 9)
    for _ in range(9):
        assert sum(driver.step().values()) == 64


def test_several_long_prompts_progress_together() -> None:
    """The first gets the most; none waits for the others to end."""
    driver = Driver(max_num_batched_tokens=64, max_model_len=900, num_kv_blocks=800)
    for i in range(3):
        driver.add(f"r{i}", unlike(i, 500), 2)
    for _ in range(4):
        scheduled = driver.step()
    assert scheduled["r0"] >= 32
    assert scheduled["r1"] >= 16
    assert sum(scheduled.values()) == 64


def test_small_requests_pass_one_that_does_not_fit() -> None:
    """P23: KV head-of-line blocking; bounded in both directions."""
    driver = Driver(
        num_kv_blocks=33,
        max_model_len=128,
        block_size=4,
        max_num_seqs=4,
        max_num_batched_tokens=256,
    )
    driver.add("running", unlike(0, 60), 60)
    driver.step()
    driver.add("big", unlike(1, 100), 4)
    for i in range(200):
        driver.add(f"small{i}", [800, i, 5], 4)
    found = first_token_steps(driver)
    passed = [i for i in range(200) if found[f"small{i}"] < found["big"]]
    assert found["small0"] == 1
    assert 3 <= len(passed) <= MAX_OVERTAKEN + 4
    for request_id in driver.tokens:
        assert request_id in driver.finish


def test_the_line_waits_for_one_that_was_overtaken_too_often() -> None:
    """P23, no reverse starvation: an endless stream of small ones cannot keep a big one out."""
    driver = Driver(
        num_kv_blocks=33,
        max_model_len=128,
        block_size=4,
        max_num_seqs=8,
        max_num_batched_tokens=256,
    )
    for i in range(3):
        driver.add(f"warm{i}", [700, i], 30)
    driver.step()
    driver.add("big", unlike(1, 120), 4)
    for number in range(300):
        if driver.tokens["big"]:
            break
        driver.add(f"s{number}", [800, number % 900, number // 900], 30)
        driver.step()
    assert driver.tokens["big"], "the big request was starved"
    assert number < 150


def test_never_idle_with_work_waiting() -> None:
    """P21: no state with waiting > 0 and nothing running."""
    driver = Driver(num_kv_blocks=18, max_model_len=64, block_size=4, max_num_seqs=3)
    for i in range(12):
        driver.add(f"r{i}", unlike(i, 10 + 4 * (i % 9)), 6)
    while driver.core.has_work():
        scheduled = driver.step()
        assert scheduled or not driver.scheduler.requests
    driver.check_idle()


def test_a_prompt_of_30_000_tokens_stalls_nobody() -> None:
    """Running decodes get a token in every step, beside one chunk; small ones start at once."""
    config = make_config(
        block_size=16,
        num_kv_blocks=2200,
        max_model_len=32_768,
        max_num_batched_tokens=512,
        max_num_seqs=16,
    )
    scheduler = Scheduler(config, 2200)
    seeds = itertools.count()

    def add(request_id: str, length: int, max_tokens: int) -> None:
        seed = next(seeds)  # no two prompts share a prefix
        wire = make_request(request_id, unlike(seed, length), max_tokens)
        scheduler.add_request(Request.from_engine_core_request(wire, max_model_len=32_768))

    def step() -> dict[str, int]:
        output = scheduler.schedule()
        ids = list(output.num_scheduled_tokens)
        requests = [scheduler.requests[i] for i in ids]
        sampled = [[5] if r.num_computed_tokens == r.num_tokens else [] for r in requests]
        scheduler.update_from_output(output, ModelRunnerOutput(ids, sampled))
        return output.num_scheduled_tokens

    for i in range(3):
        add(f"decode{i}", 8, 900)
    step()
    add("huge", 30_000, 4)
    steps = 0
    while "huge" in scheduler.requests:
        if steps % 20 == 10:
            add(f"small{steps}", 10, 3)
        shares = step()
        assert all(shares[f"decode{i}"] == 1 for i in range(3))
        if steps % 20 == 10:
            assert shares[f"small{steps}"] == 10
        steps += 1
    assert steps <= 30_000 / 500 + 8
