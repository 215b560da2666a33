"""What scheduling costs, and that nothing grows: step cost, and a soak run of 20,000 requests.

Run as a script it prints the table: ``python -m tests.core.test_cost``.
"""

from __future__ import annotations

import dataclasses
import gc
import random
import resource
import time
from pathlib import Path

import pytest

from tellin.core.request import Request
from tellin.core.scheduler import Scheduler
from tellin.step_protocol import ModelRunnerOutput
from tests.core.driver import Driver
from tests.core.fakes import SETTINGS, make_config, make_request

QUIET = dataclasses.replace(SETTINGS, check_invariants=False)


def step_cost(num_running: int, num_waiting: int, num_steps: int = 96) -> tuple[float, float]:
    """Median and mean CPU seconds of `schedule` plus `update_from_output`, all decoding."""
    num_blocks = num_running * 64 + 2
    config = make_config(
        block_size=16,
        num_kv_blocks=num_blocks,
        max_model_len=1024,
        max_num_batched_tokens=8192,
        max_num_seqs=num_running,
        settings=QUIET,
    )
    scheduler = Scheduler(config, num_blocks)
    for i in range(num_running + num_waiting):
        # Lengths differ, so that requests fill their blocks in different steps.
        wire = make_request(f"r{i}", [i % 500, i // 500, *range(30 + i % 16)], 900)
        scheduler.add_request(Request.from_engine_core_request(wire, max_model_len=1024))
    times = []
    for number in range(num_steps + 8):
        start = time.thread_time()
        step = scheduler.schedule()
        middle = time.thread_time()
        ids = list(step.num_scheduled_tokens)
        requests = map(scheduler.requests.__getitem__, ids)
        sampled = [[5] if r.num_computed_tokens == r.num_tokens else [] for r in requests]
        output = ModelRunnerOutput(ids, sampled)
        resumed = time.thread_time()
        scheduler.update_from_output(step, output)
        if number >= 8:
            times.append(time.thread_time() - resumed + middle - start)
    assert len(scheduler.running) == num_running
    times.sort()
    return times[len(times) // 2], sum(times) / len(times)


def test_cost_per_running_request() -> None:
    """Far below a token's time; the bound leaves room for slow and busy machines."""
    best = min(step_cost(256, 10)[0] for _ in range(3))
    assert best / 256 < 6e-6


def test_waiting_requests_cost_a_step_nothing() -> None:
    """10,000 waiting requests do not slow a step."""
    few = min(step_cost(16, 10)[0] for _ in range(3))
    many = min(step_cost(16, 10_000)[0] for _ in range(3))
    assert many < 2 * few + 20e-6


def resident_mib() -> float:
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * resource.getpagesize() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def soak(num_requests: int) -> tuple[list[float], list[int]]:
    """Short requests with random aborts; RSS and object counts at every tenth of the way."""
    rng = random.Random(1)
    driver = Driver(
        num_kv_blocks=200, max_num_seqs=32, max_num_batched_tokens=256, settings=QUIET,
        log_stats=True, cache={"enable_kv_cache_events": True},
    )  # fmt: skip
    sizes, objects = [], []
    live: list[str] = []
    for number in range(num_requests):
        request_id = f"r{number}"
        length = rng.randrange(2, 20)
        shared = [7] * 8 if rng.random() < 0.3 else []
        prompt = [*shared, *(rng.randrange(900) for _ in range(length))]
        driver.add(request_id, prompt, rng.randrange(1, 8))
        live.append(request_id)
        if rng.random() < 0.2:
            driver.core.abort_requests([rng.choice(live[-20:])])
        while len(driver.scheduler.requests) > 40:
            driver.step()
        if number % 500 == 499:
            forget(driver)
        if number % (num_requests // 10) == num_requests // 10 - 1:
            driver.run()
            forget(driver)
            gc.collect()
            sizes.append(resident_mib())
            objects.append(len(gc.get_objects()))
    driver.run()
    driver.check_idle()
    return sizes, objects


def forget(driver: Driver) -> None:
    """Drop what the driver itself keeps."""
    for log in (
        driver.tokens, driver.finish, driver.last, driver.outputs, driver.prompts, driver.features,
    ):  # fmt: skip
        log.clear()  # type: ignore[attr-defined]
    driver.tokens = {i: [] for i in driver.scheduler.requests}
    driver.outputs = {i: [] for i in driver.scheduler.requests}
    driver.stats.clear()
    driver.core.take_kv_events()
    driver.executor.outputs.clear()
    driver.executor.kv = dict(driver.executor.kv)


@pytest.mark.slow
def test_memory_stays_flat() -> None:
    """P35: 20,000 requests with random aborts; RSS and object counts level off."""
    sizes, objects = soak(20_000)
    assert max(sizes[3:]) < 1.02 * sizes[2] + 1.0
    assert max(objects[3:]) < 1.02 * objects[2] + 500


def test_memory_stays_flat_for_a_while() -> None:
    """The same over 2,000 requests: objects only."""
    _, objects = soak(2_000)
    assert max(objects[5:]) < 1.03 * objects[4] + 500


if __name__ == "__main__":
    print("running  waiting   median us   mean us   us per running request")
    for num_running in (1, 16, 64, 256, 512):
        for num_waiting in (10, 10_000):
            median, mean = step_cost(num_running, num_waiting)
            print(
                f"{num_running:7d} {num_waiting:8d} {median * 1e6:11.1f} {mean * 1e6:9.1f}"
                f" {mean * 1e6 / num_running:10.2f}"
            )
