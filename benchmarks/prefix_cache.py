"""``python -m benchmarks prefix``: time to the first token with and without a cached prefix.

Each round takes a prefix that no round before had, and three prompts: one that begins with it and
finds nothing cached, one that shares it and ends differently, and that last one again, of which
everything is cached. Rounds compare neighbours in time; medians over rounds are reported.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

from benchmarks.drivers.base import random_tokens
from benchmarks.report import aligned

CASES = ("cold", "shared prefix", "same prompt")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", default="smollm2", help="store name or path of a model")
    parser.add_argument("--prefix", type=int, default=1000, help="tokens that are shared")
    parser.add_argument("--suffix", type=int, default=24, help="tokens behind them that are not")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    result = measure(args.model, args.prefix, args.suffix, args.rounds)
    if args.json:
        print(json.dumps(result))
        return 0
    lines = [["prompt", "computed tokens", "first token ms", "speed-up"]]
    for case in CASES:
        row = result[case]
        lines.append(
            [
                case,
                str(row["num_computed_tokens"]),
                f"{row['seconds'] * 1e3:.2f}",
                f"{row['speed_up']:.1f}",
            ]
        )
    print(aligned(lines))
    return 0


def measure(model: str, num_prefix: int, num_suffix: int, rounds: int) -> dict[str, Any]:
    """Median seconds to the first token of each case, and its ratio to the cold one."""
    from tellin import LLM, SamplingParams

    length = num_prefix + num_suffix
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    seconds: dict[str, list[float]] = {case: [] for case in CASES}
    computed = dict.fromkeys(CASES, 0)
    with LLM(model, download=True, max_num_seqs=1, max_model_len=length + 16) as llm:
        engine = llm.llm_engine
        size = engine.model_config.tokenizer_size
        for number in range(rounds + 1):
            prefix = random_tokens(num_prefix, size, seed=3 * number)
            one = prefix + random_tokens(num_suffix, size, seed=3 * number + 1)
            two = prefix + random_tokens(num_suffix, size, seed=3 * number + 2)
            for case, ids in zip(CASES, (one, two, two), strict=True):
                engine.add_request(f"{case}-{number}", {"prompt_token_ids": ids}, params)
                started = time.perf_counter()
                while engine.has_unfinished_requests():
                    for output in engine.step():
                        computed[case] = length - (output.num_cached_tokens or 0)
                if number:  # the first round warms up
                    seconds[case].append(time.perf_counter() - started)
    cold = seconds[CASES[0]]
    return {
        case: {
            "num_computed_tokens": computed[case],
            "seconds": statistics.median(values),
            "speed_up": statistics.median(c / v for c, v in zip(cold, values, strict=True)),
        }
        for case, values in seconds.items()
    }
