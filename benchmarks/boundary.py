"""``python -m benchmarks boundary``: what a core in a process of its own costs.

Runs the same greedy streams through `LLMEngine` in process, through `LLMEngine` with its core in a
child, and through `AsyncLLM` with its core in a child. All are loaded at once and take turns, so
that a noisy machine hurts them alike; a round compares neighbours in time, and medians over rounds
are reported. The target is at most 5 % less throughput than in process at 64 streams.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import psutil

from benchmarks.cases import PROMPT_LEN
from benchmarks.drivers.base import random_tokens
from benchmarks.report import aligned

CPU_TICK_S = 0.01
"""Resolution of the processor time that the system reports."""
MODES = ("in process", "multi-process", "async multi-process")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", default="smollm2", help="store name or path of a model")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    result = measure(args.model, args.streams, args.max_tokens, args.rounds)
    if args.json:
        print(json.dumps(result))
        return 0
    lines = [["mode", "tokens/s", "overhead", "CPU ms/token", "extra CPU"]]
    for mode in MODES:
        row = result["modes"][mode]
        lines.append(
            [
                mode,
                f"{row['tokens_per_s']:.1f}",
                f"{row['overhead']:.1%}",
                f"{row['cpu_s_per_token'] * 1e3:.3f}",
                f"{row['extra_cpu']:.1%}",
            ]
        )
    print(aligned(lines))
    return 0


def measure(model: str, num_streams: int, max_tokens: int, num_rounds: int) -> dict[str, Any]:
    """Medians over rounds.

    Returns:
        By mode: ``tokens_per_s``, ``cpu_s_per_token`` of all processes, and relative to the same
        round in process ``overhead`` (of time) and ``extra_cpu``.
    """
    samples: dict[str, list[tuple[float, float]]] = {mode: [] for mode in MODES}
    with ExitStack() as stack:
        runners = _open(stack, model, num_streams, max_tokens)
        for number in range(num_rounds + 1):
            turn = number % len(MODES)
            for mode in (*MODES[turn:], *MODES[:turn]):
                cpu, start = _cpu_s(), time.perf_counter()
                num_tokens = runners[mode]()
                seconds = time.perf_counter() - start
                cpu = max(_cpu_s() - cpu, CPU_TICK_S)
                assert num_tokens == num_streams * max_tokens, "every stream must end by length"
                if number:  # the first round warms up
                    samples[mode].append((seconds / num_tokens, cpu / num_tokens))
    base = samples[MODES[0]]
    modes = {}
    for mode, rounds in samples.items():
        pairs = list(zip(rounds, base, strict=True))
        modes[mode] = {
            "tokens_per_s": 1 / statistics.median(seconds for seconds, _ in rounds),
            "overhead": statistics.median(own[0] / other[0] for own, other in pairs) - 1,
            "cpu_s_per_token": statistics.median(cpu for _, cpu in rounds),
            "extra_cpu": statistics.median(own[1] / other[1] for own, other in pairs) - 1,
        }
    return {"model": model, "streams": num_streams, "max_tokens": max_tokens, "modes": modes}


def _cpu_s() -> float:
    """Processor seconds of this process and its children, dead ones not counted."""
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def _open(
    stack: ExitStack, model: str, num_streams: int, max_tokens: int
) -> dict[str, Callable[[], int]]:
    """By mode, a function that runs a round and returns the number of generated ids."""
    from tellin import EngineArgs, LLMEngine, RequestOutputKind, SamplingParams
    from tellin.engine.async_llm import AsyncLLM

    args = EngineArgs.from_dict(
        {
            "model": model,
            "download": True,
            "max_num_seqs": num_streams,
            "max_model_len": 512,
            "enable_prefix_caching": False,
        }
    )
    params = SamplingParams(
        temperature=0,
        max_tokens=max_tokens,
        ignore_eos=True,
        output_kind=RequestOutputKind.DELTA,
    )
    engines = [
        stack.enter_context(LLMEngine.from_engine_args(args, enable_multiprocessing=multiprocess))
        for multiprocess in (False, True)
    ]
    loop = asyncio.new_event_loop()
    stack.callback(loop.close)
    stack.callback(lambda: loop.run_until_complete(asyncio.sleep(0)))  # tasks see their end
    asynchronous = AsyncLLM.from_engine_args(args)
    stack.callback(asynchronous.shutdown)
    size = engines[0].model_config.tokenizer_size
    prompts = [
        {"prompt_token_ids": random_tokens(PROMPT_LEN, size, seed=i)} for i in range(num_streams)
    ]

    def run_sync(engine: LLMEngine) -> int:
        for i, prompt in enumerate(prompts):
            engine.add_request(str(i), prompt, params)
        num_tokens = 0
        while engine.has_unfinished_requests():
            num_tokens += sum(len(o.outputs[0].token_ids) for o in engine.step())  # type: ignore[union-attr]
        return num_tokens

    async def stream(prompt: Any) -> int:
        num_tokens = 0
        async for output in asynchronous.generate(prompt, params):
            num_tokens += len(output.outputs[0].token_ids)
        return num_tokens

    async def run_async() -> int:
        return sum(await asyncio.gather(*(stream(prompt) for prompt in prompts)))

    return {
        MODES[0]: lambda: run_sync(engines[0]),
        MODES[1]: lambda: run_sync(engines[1]),
        MODES[2]: lambda: loop.run_until_complete(run_async()),
    }
