"""``python -m benchmarks overhead``: what the engine itself costs beside the native calls.

Decodes many streams and splits the time of each step of `LLMEngine` into the model's forward pass,
sampling (both native) and everything else: scheduling, the worker's arrays, output processing. The
targets are 5 % of a step for everything else, and 3 % for sampling.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.cases import PROMPT_LEN
from benchmarks.drivers.base import random_tokens
from benchmarks.report import aligned

NUM_STEPS = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", default="smollm2", help="store name or path of a model")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--sampled", action="store_true", help="temperature 0.8, top-p 0.95")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    results = [measure(args.model, streams, sampled=args.sampled) for streams in args.streams]
    if args.json:
        print(json.dumps({"model": args.model, "sampled": args.sampled, "results": results}))
        return 0
    lines = [["streams", "step ms", "forward ms", "sample ms", "rest ms", "sample", "rest"]]
    for row in results:
        times = [row[f"{part}_s"] for part in ("step", "forward", "sample", "rest")]
        shares = [row["sample_s"] / row["step_s"], row["rest_s"] / row["step_s"]]
        cells = [f"{seconds * 1e3:.3f}" for seconds in times] + [f"{s:.1%}" for s in shares]
        lines.append([str(row["streams"]), *cells])
    print(aligned(lines))
    return 0


def measure(model: str, num_streams: int, *, sampled: bool = False) -> dict[str, Any]:
    """Median seconds per step in which all streams decode: whole, forward, sample, and the rest."""
    from tellin import LLM, RequestOutput, SamplingParams

    params = SamplingParams(
        max_tokens=NUM_STEPS + 1,
        ignore_eos=True,
        temperature=0.8 if sampled else 0.0,
        top_p=0.95 if sampled else 1.0,
        seed=1,
    )
    parts = {"forward": 0.0, "sample": 0.0}
    samples: dict[str, list[float]] = {name: [] for name in ("step", *parts, "rest")}
    with (
        _timed_native_calls(parts),
        LLM(model, download=True, max_num_seqs=num_streams, max_model_len=512) as llm,
    ):
        engine = llm.llm_engine
        size = engine.model_config.tokenizer_size
        for i in range(num_streams):
            prompt = random_tokens(PROMPT_LEN, size, seed=i)
            engine.add_request(str(i), {"prompt_token_ids": prompt}, params)
        while engine.has_unfinished_requests():
            parts.update(forward=0.0, sample=0.0)
            started = time.perf_counter()
            outputs = [out for out in engine.step() if isinstance(out, RequestOutput)]
            step_s = time.perf_counter() - started
            decoding = len(outputs) == num_streams and len(outputs[0].outputs[0].token_ids) > 1
            if decoding and not outputs[0].finished:
                for name, seconds in parts.items():
                    samples[name].append(seconds)
                samples["step"].append(step_s)
                samples["rest"].append(step_s - sum(parts.values()))
    medians = {f"{name}_s": statistics.median(values) for name, values in samples.items()}
    return {"streams": num_streams, **medians}


@contextmanager
def _timed_native_calls(parts: dict[str, float]) -> Iterator[None]:
    """Add the time of the backend's forward pass and of the sampler to ``parts``."""
    from tellin.kernels.native import NativeBackend
    from tellin.kernels.sampler import Sampler

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                parts[name] += time.perf_counter() - started

        return call

    methods: list[tuple[type, str, str]] = [(NativeBackend, "forward", "forward")]
    methods += [(Sampler, name, "sample") for name in ("sample", "sample_into")]
    originals = [getattr(owner, name) for owner, name, _ in methods]
    for (owner, name, part), original in zip(methods, originals, strict=True):
        setattr(owner, name, timed(part, original))
    try:
        yield
    finally:
        for (owner, name, _), original in zip(methods, originals, strict=True):
            setattr(owner, name, original)
