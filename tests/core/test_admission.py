"""1.6.5, 2.6.2-2.6.3: who may start, and what is promised to whom."""

from __future__ import annotations

from tests.core.driver import Driver
from tests.core.test_scheduler import unlike


def test_nothing_is_admitted_in_a_step_that_preempts() -> None:
    """1.6.5: what a victim gave back is not handed to a newcomer at once."""
    driver = Driver(num_kv_blocks=9, max_model_len=32, enable_prefix_caching=False)
    for i in range(3):
        driver.add(f"r{i}", unlike(i, 7), 12)
    driver.step()
    driver.step()
    driver.add("new", unlike(9, 4), 2)  # one block; the victim is going to free two
    assert driver.step() == {"r0": 1, "r1": 1}
    assert driver.executor.outputs[-1].preempted_req_ids == {"r2"}
    assert driver.step() == {"r0": 1, "r1": 1, "new": 4}


def test_watermark() -> None:
    """2.6.2: kept free from newcomers, unless nothing runs."""
    for watermark, admitted in ((0.0, True), (0.25, False)):
        driver = Driver(num_kv_blocks=17, max_model_len=64, watermark=watermark)
        driver.add("a", unlike(1, 44), 9)
        assert driver.step() == {"a": 32}
        driver.step()
        driver.add("b", unlike(2, 12), 2)
        assert ("b" in driver.step()) == admitted
        driver.run()
        driver.check_lone("b", 2)
    alone = Driver(num_kv_blocks=17, max_model_len=64, watermark=0.9)
    alone.add("a", unlike(1, 30), 2)
    assert alone.step() == {"a": 30}


def test_the_rest_of_a_prompt_in_progress_is_promised() -> None:
    """A newcomer that would take the blocks of a half-computed prompt waits."""
    driver = Driver(num_kv_blocks=18, max_model_len=64, max_num_batched_tokens=16)
    driver.add("long", unlike(1, 56), 4)
    driver.add("b", unlike(2, 14), 4)  # 4 blocks; free are 13, of which "long" still needs 10
    driver.add("c", unlike(3, 4), 4)
    assert driver.step() == {"long": 16}
    assert driver.step() == {"long": 12, "c": 4}
    driver.run()
    assert driver.scheduler.num_preemptions == 0
    for request_id in ("long", "b", "c"):
        driver.check_lone(request_id, 4)


def test_the_rest_of_a_prompt_admitted_in_this_step_is_promised() -> None:
    driver = Driver(
        num_kv_blocks=18, max_model_len=64, max_num_batched_tokens=64,
        long_prefill_token_threshold=16,
    )  # fmt: skip
    driver.add("long", unlike(1, 56), 4)
    driver.add("b", unlike(2, 14), 4)
    driver.add("c", unlike(3, 8), 4)
    assert driver.step() == {"long": 16, "c": 8}


def test_what_a_waiting_sibling_needs_is_promised() -> None:
    """A request that waits for a prefix keeps the blocks it will need besides."""
    driver = Driver(num_kv_blocks=18, max_model_len=64, max_num_batched_tokens=64)
    prompt = unlike(1, 40)
    driver.add("owner", prompt, 2)
    driver.add("sibling", [*prompt, *range(10)], 2)  # 10 shared blocks, 3 of its own
    driver.add("late", unlike(2, 24), 2)  # 6 blocks: one more than are left
    assert driver.step() == {"owner": 40}
    assert list(driver.step()) == ["owner", "sibling"]
    driver.run()
    for request_id in ("owner", "sibling", "late"):
        driver.check_lone(request_id, 2)


def test_each_wait_for_a_prefix_counts() -> None:
    driver = Driver(max_num_batched_tokens=64)
    prompt = unlike(1, 40)
    driver.add("owner", prompt, 2)
    driver.add("sibling", prompt, 2)
    driver.step()
    assert driver.scheduler.requests["sibling"].num_deferrals == 1


def test_a_request_that_grew_is_readmitted_with_all_its_tokens() -> None:
    """1.6.5e: T, not P."""
    driver = Driver(num_kv_blocks=9, max_model_len=32, enable_prefix_caching=False)
    for i in range(3):
        driver.add(f"r{i}", unlike(i, 7), 12)
    driver.run()
    resumed = [
        (step.num_scheduled_tokens[r.req_id], len(r.all_token_ids or ()))
        for step in driver.executor.outputs
        for r in step.scheduled_cached_reqs
        if r.resumed
    ]
    assert resumed
    assert all(scheduled == known > 7 for scheduled, known in resumed)
