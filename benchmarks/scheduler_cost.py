"""``python -m benchmarks scheduler``: what a step of the scheduler costs, without any model.

Runs the real scheduler against a worker that answers every request with one token at once, first
as running requests go from 1 to 512, then with 10 and with 10,000 requests waiting beside 1, 64 and
512 running ones. Times are of one thread and exclude everything but `schedule` and
`update_from_output`.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

from benchmarks.report import aligned

RUNNING = (1, 4, 16, 64, 128, 256, 512)
WAITING = (10, 10_000)
RUNNING_BESIDE_WAITING = (1, 64, 512)
PROMPT_LEN = 32
NUM_STEPS = 200


def run() -> str:
    """Both tables: microseconds per step, and per request of the step."""
    lines = [["requests", "step µs", "schedule µs", "update µs", "µs / running request"]]
    lines += [[f"{running} running", *_cells(running, 0)] for running in RUNNING]
    for running in RUNNING_BESIDE_WAITING:
        for waiting in WAITING:
            name = f"{running} running, {waiting} waiting"
            lines.append([name, *_cells(running, waiting)])
    return aligned(lines)


def _cells(num_running: int, num_waiting: int) -> list[str]:
    schedule_s, update_s = measure(num_running, num_waiting)
    total_s = schedule_s + update_s
    times = (total_s, schedule_s, update_s, total_s / num_running)
    return [f"{seconds * 1e6:.1f}" for seconds in times]


def measure(num_running: int, num_waiting: int, num_steps: int = NUM_STEPS) -> tuple[float, float]:
    """Median seconds of `schedule` and of `update_from_output` while all running requests decode.

    The waiting ones cannot start: ``max_num_seqs`` is reached.
    """
    from tellin.core.request import Request
    from tellin.core.scheduler import Scheduler
    from tellin.sampling_params import SamplingParams
    from tellin.step_protocol import ModelRunnerOutput

    max_len = PROMPT_LEN + num_steps + 64
    blocks = num_running * (max_len // 16 + 2) + 16
    scheduler = Scheduler(_config(num_running, max_len), blocks)
    params = SamplingParams(temperature=0.0, max_tokens=max_len, ignore_eos=True)
    for i in range(num_running + num_waiting):
        prompt = [(i * 7919 + position) % 32_000 for position in range(PROMPT_LEN)]
        request = Request(str(i), prompt, params, None, max_model_len=max_len, arrival_time=i)
        scheduler.add_request(request)

    schedule_s, update_s = [], []
    while len(schedule_s) < num_steps:
        started = time.perf_counter()
        output = scheduler.schedule()
        scheduled = time.perf_counter()
        ids = list(output.num_scheduled_tokens)
        answer = ModelRunnerOutput(req_ids=ids, sampled_token_ids=[[5] for _ in ids])
        answered = time.perf_counter()
        scheduler.update_from_output(output, answer)
        ended = time.perf_counter()
        if output.total_num_scheduled_tokens == num_running:  # the prompts are done
            schedule_s.append(scheduled - started)
            update_s.append(ended - answered)
    return statistics.median(schedule_s), statistics.median(update_s)


def _config(max_num_seqs: int, max_model_len: int) -> object:
    from tellin.config import (
        CacheConfig,
        EngineConfig,
        ModelConfig,
        ParallelConfig,
        SchedulerConfig,
    )
    from tellin.settings import Settings

    return EngineConfig(
        model_config=ModelConfig(
            model="none",
            path=Path("none"),
            architecture="llama",
            max_model_len=max_model_len,
            vocab_size=32_000,
            tokenizer_size=32_000,
            hidden_size=1,
            num_hidden_layers=1,
        ),
        cache_config=CacheConfig(),
        scheduler_config=SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max(2048, PROMPT_LEN * max_num_seqs),
            max_model_len=max_model_len,
        ),
        parallel_config=ParallelConfig(),
        settings=Settings.from_environ({}),
    )
