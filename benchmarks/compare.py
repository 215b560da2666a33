"""``python -m benchmarks compare``: tellin beside its peers, in one run, in turns.

For each model every engine is started and loaded; for each case every engine first warms up and
chooses its best settings, then they take turns (A B A B ...) for all rounds. Medians count. A peer
that is missing or fails is named and left out; it never ends the run. The result file is written
anew after every model, so an interrupted run keeps what it has.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks import ceilings, extras, machine, report
from benchmarks.cases import FULL, QUICK, Case
from benchmarks.engines import (
    DRIVERS,
    Engine,
    EngineFailedError,
    EngineSpec,
    first_token,
    path_for,
    resolve,
)
from benchmarks.models import FULL_MODELS, QUICK_MODELS, BenchModel, open_bench_model

DEFAULT_RESULTS = machine.ROOT / "benchmarks" / "results" / "local"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="smollm2 alone, fewer cases, 3 rounds")
    parser.add_argument("--models", nargs="+", help=f"default: {' '.join(FULL_MODELS)}")
    parser.add_argument("--engines", nargs="+", choices=list(DRIVERS), default=list(DRIVERS))
    for engine in DRIVERS:
        flag = f"--{engine.removesuffix('.cpp')}-python"
        parser.add_argument(flag, type=Path, help=f"the Python that runs {engine}", metavar="PATH")
    parser.add_argument("--cases", nargs="+", help="only cases whose name holds one of these texts")
    parser.add_argument("--rounds", type=int, help="turns of each engine per case (default 5)")
    parser.add_argument("--threads", type=int, help="threads of every engine (default: cores)")
    parser.add_argument(
        "--vllm-dtype",
        choices=("bfloat16", "float32"),
        help="default: bfloat16 where the processor multiplies it, else float32",
    )
    parser.add_argument("--cache", type=Path, help="synthetic models (default: TELLIN_HOME/bench)")
    parser.add_argument("--output", type=Path, help=f"result file (default: {DEFAULT_RESULTS}/...)")
    parser.add_argument("--no-start", action="store_true", help="skip load and first-token times")
    parser.add_argument(
        "--no-extras", action="store_true", help="skip overhead, scheduler, fidelity"
    )


def run(args: argparse.Namespace) -> int:
    rounds = args.rounds or (3 if args.quick else 5)
    cases = [case for case in (QUICK if args.quick else FULL) if _wanted(case, args.cases)]
    pythons = {name: getattr(args, f"{name.removesuffix('.cpp')}_python") for name in DRIVERS}
    specs, missing = resolve(pythons, args.engines)
    for line in missing:
        print(line)
    if not specs:
        print("no engine to measure", file=sys.stderr)
        return 1
    cache = args.cache or default_cache()
    print("measuring the machine's ceilings")
    result: dict[str, Any] = {
        "machine": machine.describe(),
        "command": sys.argv[1:],
        "rounds": rounds,
        "ceilings": ceilings.measure(cache, args.threads),
        "models": {},
    }
    output = args.output or DEFAULT_RESULTS / f"{datetime.now():%Y%m%d-%H%M%S}.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    print(_head(result))
    names = args.models or (QUICK_MODELS if args.quick else FULL_MODELS)
    for name in names:
        model = open_bench_model(name, cache)
        measured = measure_model(model, specs, cases, rounds, args, result["ceilings"], cache)
        result["models"][model.name] = measured
        output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        title = f"\n{model.name} ({model.quant_type}, {model.file_bytes / 1e6:.0f} MB)"
        print(report.rate_table(title, measured["cases"], list(measured["engines"])))
        if measured["start"]:
            print(report.start_table(measured["start"], model.file_bytes))
        for line in measured["notes"]:
            print(f"note: {line}")
    by_name = {spec.name: spec for spec in specs}
    if report.OURS in by_name and not args.no_extras:
        found = extras.run(by_name[report.OURS], by_name.get("llama.cpp"), names[0], args.quick)
        result["extras"] = found
        output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        for name, text in found.items():
            print(f"\n{name} ({names[0]})\n{text}")
    print(f"\n~ others used more than {report.NOISY:.0%} of the machine meanwhile")
    print(f"written: {output}")
    return 0


def default_cache() -> Path:
    """Folder of synthetic models and of the compiled ceilings program."""
    from tellin.settings import Settings

    return Settings.from_environ().home / "bench"


def measure_model(
    model: BenchModel,
    specs: list[EngineSpec],
    cases: list[Case],
    rounds: int,
    args: argparse.Namespace,
    limits: dict[str, Any],
    cache: Path,
) -> dict[str, Any]:
    """All cases and the start of every engine on one model."""
    notes: list[str] = []
    paths = _paths(model, specs, cache, notes)
    engines = list(_loaded(model, paths, cases, args, notes))
    measured: dict[str, Any] = {
        "file_bytes": model.file_bytes,
        "quant_type": model.quant_type,
        "engines": {engine.name: engine.call("info") for engine in engines},
        "cases": {},
        "start": {},
        "notes": notes,
    }
    try:
        for case in cases:
            if case.context + case.steps >= model.context_length:
                notes.append(f"{case.name}: longer than the model's {model.context_length} tokens")
                continue
            _progress(f"{model.name}: {case.name}")
            row = measure_case(case, engines, rounds, notes)
            if report.OURS in row["engines"] and "median" in row["engines"][report.OURS]:
                rate = row["engines"][report.OURS]["median"]
                row["ceiling"] = report.ceiling_fraction(case.to_json(), rate, model, limits)
            measured["cases"][case.name] = row
    finally:
        for engine in engines:
            engine.close()
    if not args.no_start:
        alive = {engine.spec: paths[engine.spec] for engine in engines}
        measured["start"] = measure_start(model, alive, rounds)
        notes += [row["error"] for row in measured["start"].values() if "error" in row]
    _progress("")
    return measured


def _paths(
    model: BenchModel, specs: list[EngineSpec], cache: Path, notes: list[str]
) -> dict[EngineSpec, Path]:
    """What each engine opens; an engine that cannot open this model is noted and left out."""
    paths = {}
    for spec in specs:
        try:
            paths[spec] = path_for(spec, model.path, specs, cache)
        except EngineFailedError as error:
            notes.append(str(error))
    return paths


def _loaded(
    model: BenchModel,
    paths: dict[EngineSpec, Path],
    cases: list[Case],
    args: argparse.Namespace,
    notes: list[str],
) -> Iterator[Engine]:
    """Start and load the engines; one that fails is noted and closed."""
    longest = max((max(c.num_tokens, c.context + c.steps + 1) for c in cases), default=2048)
    options = {
        "num_threads": args.threads or machine.num_cores(),
        "max_model_len": min(longest + 16, model.context_length),
        "max_num_seqs": max((case.streams for case in cases), default=1),
        "vocab_size": model.vocab_size,
        "dtype": args.vllm_dtype or ("bfloat16" if machine.has_bfloat16() else "float32"),
    }
    for spec, path in paths.items():
        _progress(f"{model.name}: loading into {spec.name}")
        engine = Engine(spec)
        try:
            engine.call("load", model=str(path), options=options)
        except EngineFailedError as error:
            notes.append(str(error))
            engine.close()
            continue
        yield engine


def measure_case(
    case: Case, engines: list[Engine], rounds: int, notes: list[str]
) -> dict[str, Any]:
    """Prepare every engine, then let them take turns; the row of the table."""
    rows: dict[str, dict[str, Any]] = {}
    samples: dict[str, list[dict[str, Any]]] = {}
    settings: dict[str, dict[str, Any]] = {}
    for engine in engines:
        try:
            settings[engine.name] = engine.call("prepare", case=case.to_json())
            samples[engine.name] = []
        except EngineFailedError as error:
            rows[engine.name] = {"error": str(error)}
    for seed in range(1, rounds + 1):
        for engine in engines:
            if engine.name not in samples:
                continue
            try:
                with busy_neighbour(case.neighbour):
                    samples[engine.name].append(engine.measure(case.to_json(), seed))
            except EngineFailedError as error:
                rows[engine.name] = {"error": str(error)}
                del samples[engine.name]
    for name, taken in samples.items():
        rows[name] = report.summarise(taken) | {"settings": settings[name]}
    notes.extend(f"{case.name}: {row['error']}" for row in rows.values() if "error" in row)
    good = {name: row for name, row in rows.items() if "median" in row}
    return {"case": case.to_json(), "engines": rows, "ratios": report.ratios(good)}


@contextmanager
def busy_neighbour(wanted: bool) -> Iterator[None]:
    """A process that never rests, held to the last of our cores."""
    if not wanted:
        yield
        return
    core = max(os.sched_getaffinity(0)) if hasattr(os, "sched_setaffinity") else None
    pin = "" if core is None else f"import os; os.sched_setaffinity(0, [{core}])\n"
    process = subprocess.Popen([sys.executable, "-c", f"{pin}while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def measure_start(
    model: BenchModel, paths: dict[EngineSpec, Path], rounds: int
) -> dict[str, dict[str, Any]]:
    """Process start to first token, in turns; medians, and the greatest peak memory."""
    samples: dict[str, list[dict[str, float]]] = {spec.name: [] for spec in paths}
    rows: dict[str, dict[str, Any]] = {}
    for _ in range(rounds):
        for spec, path in paths.items():
            if spec.name in rows:
                continue
            _progress(f"{model.name}: first token of {spec.name}")
            try:
                samples[spec.name].append(first_token(spec, str(path)))
            except EngineFailedError as error:
                rows[spec.name] = {"error": str(error)}
    for name, taken in samples.items():
        if name not in rows and taken:
            rows[name] = {
                "load_s": statistics.median(sample["load_s"] for sample in taken),
                "first_token_s": statistics.median(sample["first_token_s"] for sample in taken),
                "peak_rss_bytes": max(sample["peak_rss_bytes"] for sample in taken),
                "samples": taken,
            }
    return rows


def _wanted(case: Case, texts: list[str] | None) -> bool:
    return texts is None or any(text in case.name for text in texts)


def _head(result: dict[str, Any]) -> str:
    about, limits = result["machine"], result["ceilings"]
    return (
        f"{about['cpu']}, {about['cores']} cores, {about['memory_gib']} GiB, {about['system']}\n"
        f"read {limits['read_bytes_per_s'] / 1e9:.1f} GB/s, "
        f"int8 {limits['int8_mac_per_s'] / 1e9:.0f} GMAC/s ({limits['int8_instruction']}), "
        f"float32 {limits['float32_mac_per_s'] / 1e9:.0f} GMAC/s"
    )


def _progress(text: str) -> None:
    """One line that overwrites itself, on a terminal only."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
