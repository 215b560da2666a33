"""``python -m benchmarks speculation``: what drafting gains, and costs where it cannot gain.

One stream at a time on a real model (``--streams``: more). For each method an engine without and an
engine with it are loaded side by side and take turns (off, on, off, on, ...) on the same prompts,
so that a noisy machine hurts both alike; a ratio compares neighbours in time, and medians over
rounds are reported.
Ids are compared too: drafting may change nothing but the time. Workloads: ``free`` samples stories
(temperature 0.8: little repeats), ``chat`` answers questions greedily, ``quote`` summarises a
passage and may quote it (the model often does not), ``copy`` repeats it.

Methods: ngram and suffix draft without a model. ``quantised draft`` speeds up the model dequantised
to F16 with itself as stored, a good draft; ``poor draft`` uses the model's first third of layers,
whose guesses are nearly all wrong. Both files are written into the cache. ``mtp`` drafts with the
layer of a random model (`benchmarks.synthetic_predictor`) on workloads of its own: in ``90 %`` so
many of its drafts are right. Its least ratio is what it costs where nothing is gained.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.report import aligned
from benchmarks.synthetic_predictor import CHANCES, circle_prompt, write_predictor

METHODS = ("ngram", "suffix", "quantised draft", "poor draft", "mtp")
WORKLOADS = ("free", "chat", "quote", "copy")
TARGETS = {"free": 0.95, "chat": 0.95, "quote": 0.95, "copy": 1.7}
"""Least ratio that each workload should reach; with a poor draft model 0.95 everywhere."""
MTP_TARGETS = {f"{chance:.0%}": 0.9 if chance < 0.5 else 1.1 for chance in CHANCES}
TEXT = Path(__file__).parent / "data" / "fidelity.txt"
STORIES = (
    "a lighthouse keeper who finds a letter",
    "two sisters who repair an old radio",
    "a fox that learns to read maps",
    "a baker on the last day of winter",
    "a ship that comes back after forty years",
    "a village without clocks",
    "a boy who collects sounds",
    "a bridge that nobody remembers building",
)
QUESTIONS = (
    "Why is the sky blue?",
    "How does a bicycle stay upright?",
    "What is the difference between weather and climate?",
    "How do I keep bread fresh for a week?",
    "Explain what a prime number is to a child.",
    "Why do cats purr?",
    "How are tides made?",
    "What should I pack for a hike in the rain?",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    parser.add_argument("--workloads", nargs="+", default=WORKLOADS, choices=WORKLOADS)
    parser.add_argument("--drafts", type=int, help="num_speculative_tokens (default: 8; mtp: 3)")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--streams", type=int, default=1, help="requests at a time")
    parser.add_argument("--fixed", action="store_true", help="drafts of fixed length")
    parser.add_argument("--cache", type=Path, help="where to write (default: TELLIN_HOME/bench)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    from benchmarks.compare import default_cache

    cache = args.cache or default_cache()
    results = []
    for method in args.methods:
        results += measure(
            method,
            tuple(MTP_TARGETS) if method == "mtp" else args.workloads,
            cache,
            num_drafts=args.drafts or (3 if method == "mtp" else 8),
            max_tokens=args.max_tokens,
            rounds=args.rounds,
            adaptive=not args.fixed,
            streams=args.streams,
        )
    if args.json:
        print(json.dumps(results))
        return 0
    lines = [["method", "workload", "off tok/s", "on tok/s", "ratio", "min", "max", "target"]]
    lines[0] += ["accepted", "tokens/draft", "equal"]
    lines += map(_cells, results)
    print(aligned(lines))
    return 0 if all(row["equal"] for row in results) else 1


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        row["method"],
        row["workload"],
        f"{row['off_tokens_per_s']:.1f}",
        f"{row['on_tokens_per_s']:.1f}",
        f"{row['ratio']:.2f}",
        f"{min(row['ratios']):.2f}",
        f"{max(row['ratios']):.2f}",
        f">= {row['target']}",
        f"{row['acceptance_rate']:.0%}",
        f"{row['mean_acceptance_length']:.2f}",
        "yes" if row["equal"] else "NO",
    ]


def measure(
    method: str,
    workloads: tuple[str, ...] | list[str],
    cache: Path,
    *,
    num_drafts: int,
    max_tokens: int,
    rounds: int,
    adaptive: bool = True,
    streams: int = 1,
) -> list[dict[str, Any]]:
    """A row per workload: rates of decoding (tokens/s), the ratio on / off, and acceptance."""
    from tellin import LLM

    target, draft = _models(method, cache)
    config: dict[str, Any] = {
        "method": method if draft is None else "draft_model",
        "num_speculative_tokens": num_drafts,
        "adaptive": adaptive,
    }
    if method == "ngram":
        config |= {"prompt_lookup_min": 2, "prompt_lookup_max": 5}
    if draft is not None:
        config["model"] = str(draft)
    with ExitStack() as stack:
        engines = {}
        for name, spec in (("off", None), ("on", config)):
            llm = LLM(
                str(target),
                max_num_seqs=max(4, streams),
                max_model_len=1024,
                speculative_config=spec,
                skip_tokenizer_init=method == "mtp",
                disable_log_stats=False,
            )
            engines[name] = stack.enter_context(llm).llm_engine
        return [
            _compare(engines, method, workload, max_tokens, rounds, streams)
            for workload in workloads
        ]


def _compare(
    engines: dict[str, Any],
    method: str,
    workload: str,
    max_tokens: int,
    rounds: int,
    streams: int,
) -> dict[str, Any]:
    requests = _requests(engines["off"], workload, (rounds + 1) * streams, max_tokens)
    rates: dict[str, list[float]] = {"off": [], "on": []}
    equal, before = True, (0, 0, 0)
    for index in range(rounds + 1):
        batch = requests[index * streams : (index + 1) * streams]
        # The first round warms both up, and lets the drafter learn what a row costs here.
        if index == 1:
            before = _counters(engines["on"])
        outputs = {}
        for name in ("off", "on") if index % 2 else ("on", "off"):
            outputs[name], rate = _decode(engines[name], f"{workload}-{index}", batch)
            if index:
                rates[name].append(rate)
        equal = equal and outputs["off"] == outputs["on"]
    drafts, drafted, accepted = (
        after - first for after, first in zip(_counters(engines["on"]), before, strict=True)
    )
    ratios = [on / off for on, off in zip(rates["on"], rates["off"], strict=True)]
    return {
        "method": method,
        "workload": workload,
        "off_tokens_per_s": statistics.median(rates["off"]),
        "on_tokens_per_s": statistics.median(rates["on"]),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "target": 0.95 if method == "poor draft" else (TARGETS | MTP_TARGETS)[workload],
        "num_drafts": drafts,
        "num_draft_tokens": drafted,
        "acceptance_rate": accepted / drafted if drafted else 0.0,
        "mean_acceptance_length": 1.0 + accepted / drafts if drafts else 1.0,
        "equal": equal,
    }


def _decode(
    engine: Any, name: str, batch: list[tuple[list[int], Any]]
) -> tuple[dict[str, list[int]], float]:
    """Output ids, and ids per second from when the last of the requests has its first one."""
    for number, (ids, params) in enumerate(batch):
        engine.add_request(f"{name}-{number}", {"prompt_token_ids": ids}, params)
    outputs: dict[str, list[int]] = {}
    first_at, num_first = 0.0, 0
    while engine.has_unfinished_requests():
        for result in engine.step():
            outputs[result.request_id] = list(result.outputs[0].token_ids)
        if not num_first and len(outputs) == len(batch):
            first_at, num_first = time.perf_counter(), sum(map(len, outputs.values()))
    num_tokens = sum(map(len, outputs.values()))
    return outputs, (num_tokens - num_first) / (time.perf_counter() - first_at)


def _counters(engine: Any) -> tuple[int, int, int]:
    """(drafts, draft tokens, accepted tokens) so far."""
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    values = dict.fromkeys(names, 0)
    for metric in engine.get_metrics():
        name = metric.name.rpartition("spec_decode_")[2].removesuffix("_total")
        if name in values:
            values[name] = int(metric.value)
    return values[names[0]], values[names[1]], values[names[2]]


def _requests(
    engine: Any, workload: str, count: int, max_tokens: int
) -> list[tuple[list[int], Any]]:
    """Prompt ids and parameters; no prompt comes twice while there are enough."""
    from tellin import SamplingParams

    if workload in MTP_TARGETS:
        chance = CHANCES[list(MTP_TARGETS).index(workload)]
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        return [(circle_prompt(chance, index), params) for index in range(count)]
    passages = [p for p in TEXT.read_text().split("\n\n") if len(p) > 120 and "```" not in p]
    texts = {
        "free": [f"Write a short story about {subject}." for subject in STORIES],
        "chat": list(QUESTIONS),
        "quote": [
            "Summarise this text. Begin by quoting it in full.\n\n" + passage
            for passage in passages
        ],
        "copy": ["Copy the following text word for word:\n\n" + passage for passage in passages],
    }[workload]
    tokenizer = engine.get_tokenizer()
    requests = []
    for index in range(count):
        message = {"role": "user", "content": texts[index % len(texts)]}
        prompt = tokenizer.apply_chat_template([message], add_generation_prompt=True)
        params = SamplingParams(
            temperature=0.8 if workload == "free" else 0.0,
            seed=index,
            max_tokens=max_tokens,
            ignore_eos=workload in ("free", "chat"),
        )
        requests.append((tokenizer.encode(prompt, add_special_tokens=False), params))
    return requests


# ------------------------------------------------------------------ models


def _models(method: str, cache: Path) -> tuple[Path, Path | None]:
    """Target and draft model of a method."""
    from tellin.loading import resolve_model
    from tellin.settings import Settings

    if method == "mtp":
        folder = cache / "synthetic-predictor"
        return folder if (folder / "config.json").exists() else write_predictor(folder), None
    path = resolve_model("smollm2", Settings.from_environ(), download=True)
    if method == "quantised draft":
        return _derived(path, cache / "smollm2-f16.gguf", num_layers=None), path
    if method == "poor draft":
        return path, _derived(path, cache / "smollm2-third.gguf", num_layers=10)
    return path, None


def _derived(source: Path, path: Path, num_layers: int | None) -> Path:
    """Copy of a GGUF model: its first layers only, or all of it with matrices in F16."""
    import gguf
    import numpy as np

    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(partial, architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        value, kinds = field.contents(), field.types
        if name.endswith(".block_count") and num_layers is not None:
            value = num_layers
        element = kinds[-1] if kinds[0] is gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, value, kinds[0], element)
    for tensor in reader.tensors:
        parts = tensor.name.split(".")
        if num_layers is not None:
            if parts[0] != "blk" or int(parts[1]) < num_layers:
                writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
            continue
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        is_matrix = values.ndim == 2
        writer.add_tensor(tensor.name, values.astype(np.float16 if is_matrix else np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(path)
    return path
