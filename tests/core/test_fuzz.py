"""E1, E4, E5: long random runs under memory pressure; every output equals a lone run.

Unlike the state machine, which looks for short counterexamples, these runs keep the pool full, so
that preemption, rollback of planned requests, deferral and copies happen hundreds of times.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from tellin.config import SpeculativeConfig
from tellin.protocol import FinishReason
from tests.core.driver import Driver
from tests.core.fakes import FakeExecutor, StatefulExecutor, lone_run, next_id

MAX_MODEL_LEN = 44


def good_and_bad_drafts(request_id: str, ids: list[int], k: int) -> list[int]:
    """Drafts of which some prefix is right."""
    rng = random.Random(f"{request_id}{len(ids)}")
    num_right = rng.randrange(k + 1)
    drafts: list[int] = []
    for position in range(rng.randrange(k + 1)):
        drafts.append(next_id(ids + drafts) if position < num_right else 901)
    return drafts


def make_driver(rng: random.Random, seed: int, stateful: bool) -> Driver:
    speculative = None
    if seed % 3 == 0:
        speculative = SpeculativeConfig(
            rng.choice(["ngram", "draft_model"]), 3, adaptive=rng.random() < 0.5
        )
    block_size = rng.choice([2, 4, 8])
    needed = -(-MAX_MODEL_LEN // block_size) + 1
    executor_class: type[FakeExecutor] = FakeExecutor
    if stateful:  # from one seat to seats with snapshots for all
        num_slots = rng.randrange(2, 17) + (3 if speculative is not None else 0)
        executor_class = type("Small", (StatefulExecutor,), {"max_slots": num_slots})
    driver = Driver(
        log_stats=rng.random() < 0.5,
        executor_class=executor_class,
        policy=rng.choice(["fcfs", "priority"]),
        num_kv_blocks=needed + rng.randrange(needed),
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=rng.choice([16, 20, 48]),
        max_num_seqs=rng.choice([4, 8]),
        block_size=block_size,
        enable_prefix_caching=rng.random() < 0.7,
        long_prefill_token_threshold=rng.choice([0, 0, 5]),
        scheduler_reserve_full_isl=rng.random() < 0.5,
        watermark=rng.choice([0.0, 0.1]),
        max_num_partial_prefills=rng.choice([0, 0, 2]),
        speculative_config=speculative,
    )
    driver.scheduler.in_flight_prefixes.min_shared_tokens = 4
    states = driver.scheduler.kv_cache_manager.states
    assert (states is not None) == stateful
    if states is not None:
        states.min_saved_tokens = rng.choice([1, 4, 8])
        states.checkpoint_tokens = rng.choice([4, 8, 100])
        states.decode_tokens = block_size * rng.choice([1, 2])
    if speculative is not None:
        driver.executor.draft = good_and_bad_drafts
    return driver


def run_one(seed: int, stateful: bool = False) -> Counter[str]:
    """One run; returns how often the interesting things happened."""
    rng = random.Random(seed)
    driver = make_driver(rng, seed, stateful)
    wanted: dict[str, int] = {}
    aborted: set[str] = set()
    counts: Counter[str] = Counter()
    watch(driver, counts)
    for number in range(60):
        for _ in range(rng.choice([0, 1, 1, 2, 3])):
            request_id = f"r{len(wanted)}"
            length = rng.choice([rng.randrange(1, 33), 8, 16, 24])
            prompt = [3] * (length - 1) + [rng.choice([3, 3, 1, 2])]
            wanted[request_id] = rng.randrange(1, 18)
            driver.add(
                request_id,
                prompt,
                wanted[request_id],
                priority=rng.randrange(3),
                arrival_time=float(number // 3),
            )
        for _ in range(rng.randrange(4)):
            driver.step()
        chance = rng.random()
        if chance < 0.15 and wanted:
            request_id = rng.choice(sorted(wanted))
            if request_id not in driver.finish:
                aborted.add(request_id)
            driver.core.abort_requests([request_id])
        elif chance < 0.2:
            driver.core.reset_prefix_cache(reset_running_requests=True)
    driver.run()
    driver.check_idle()
    for request_id, max_tokens in wanted.items():
        prompt = driver.prompts[request_id]
        expected = lone_run(prompt, min(max_tokens, MAX_MODEL_LEN - len(prompt)))
        got = driver.tokens[request_id]
        if request_id in aborted:
            assert got == expected[: len(got)]
        else:
            assert got == expected
            assert driver.finish[request_id] is FinishReason.LENGTH
    return counts


def watch(driver: Driver, counts: Counter[str]) -> None:
    """Count preemptions, rollbacks, deferrals, copies, drafts."""
    scheduler: Any = driver.scheduler
    preempt, defer = scheduler.preempt, scheduler.admission._defer
    execute = driver.executor.execute_model

    def counted_preempt(request: Any) -> None:
        counts["preempted"] += 1
        counts["preempted with waiters"] += bool(request.prefix_waiters)
        preempt(request)

    def counted_defer(*args: Any) -> bool:
        deferred = bool(defer(*args))
        counts["deferred"] += deferred
        return deferred

    def counted_execute(step: Any, non_block: bool = False) -> Any:
        counts["copied"] += len(step.kv_block_copies)
        counts["restored"] += len(step.state_copies)
        counts["saved"] += len(step.state_saves)
        counts["drafts"] += len(step.scheduled_spec_decode_tokens)
        counts["preempting steps"] += bool(step.preempted_req_ids)
        return execute(step, non_block)

    scheduler.preempt = counted_preempt
    scheduler.admission._defer = counted_defer
    driver.executor.execute_model = counted_execute  # type: ignore[method-assign]


@pytest.mark.parametrize("chunk", range(4))
def test_random_runs_equal_lone_runs(chunk: int) -> None:
    counts: Counter[str] = Counter()
    for seed in range(chunk * 12, chunk * 12 + 12):
        counts += run_one(seed)
    for event in ("preempted", "deferred", "copied", "drafts"):
        assert counts[event] >= 10, f"the runs hardly ever {event}: {counts}"


@pytest.mark.parametrize("chunk", range(2))
def test_random_runs_of_recurrent_models_equal_lone_runs(chunk: int) -> None:
    """2.7.4: every request goes on from the state of exactly its own ids."""
    counts: Counter[str] = Counter()
    for seed in range(chunk * 12, chunk * 12 + 12):
        counts += run_one(seed, stateful=True)
    for event in ("preempted", "deferred", "restored", "saved", "drafts"):
        assert counts[event] >= 10, f"the runs hardly ever {event}: {counts}"
