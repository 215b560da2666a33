"""``python -m benchmarks fidelity``: how far each engine is from the float32 model.

Every engine reads one text with the same weights. The measure is the Kullback-Leibler divergence of
its next-token distribution from that of the float32 reference, which has the same weights
dequantised: what is left is the engine's own rounding (int8 activations, half-precision caches).
The reference is tellin's NumPy backend; nothing but arithmetic distinguishes the engines, so the
figures do not depend on the machine's speed or load.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.engines import EngineSpec
from benchmarks.machine import ROOT

Floats = npt.NDArray[np.float32]

TEXT = ROOT / "benchmarks" / "data" / "fidelity.txt"
NUM_TOKENS = 2000
CHUNK = 250
SETTINGS = (
    ("default", "int16"),
    ("default", "float16"),
    ("default", "int8"),
    ("mixed", "int16"),
    ("high", "float16"),
    ("high", "float32"),
)
"""Activation precision and cache type of tellin's rows of the table."""
ROWS_AT_A_TIME = 25
"""Distributions compared at a time: float64 copies of a large vocabulary stay below 100 MB."""


@dataclass
class Divergence:
    """Distance of one engine's distributions from the reference's, one value per position."""

    name: str
    kl: list[float] = field(default_factory=list)
    same_top: list[bool] = field(default_factory=list)

    def add(self, reference: Floats, logits: Floats) -> None:
        """Compare rows of logits ``[num_rows, vocab_size]``."""
        for start in range(0, len(reference), ROWS_AT_A_TIME):
            rows = slice(start, start + ROWS_AT_A_TIME)
            expected, actual = log_softmax(reference[rows]), log_softmax(logits[rows])
            self.kl += (np.exp(expected) * (expected - actual)).sum(axis=1).tolist()
            self.same_top += (expected.argmax(axis=1) == actual.argmax(axis=1)).tolist()

    @property
    def mean_kl(self) -> float:
        """Mean divergence in nats."""
        return float(np.mean(self.kl))


def log_softmax(logits: Floats) -> npt.NDArray[np.float64]:
    """Natural logarithms of the probabilities, ``[num_rows, vocab_size]``."""
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))


# ---- engines -----------------------------------------------------------------------------------


def backend_logits(backend: Any, token_ids: list[int], chunk: int) -> Iterator[Floats]:
    """Logits of one of tellin's backends, ``[chunk, vocab_size]`` at a time."""
    from tellin.kernels.batch import StepBatch

    num_blocks = -(-len(token_ids) // backend.block_size)
    backend.init_kv_cache(num_blocks)
    for start in range(0, len(token_ids), chunk):
        ids = token_ids[start : start + chunk]
        stop = start + len(ids)
        yield backend.forward(
            StepBatch(
                token_ids=np.array(ids, dtype=np.int32),
                positions=np.arange(start, stop, dtype=np.int32),
                query_start_loc=np.array([0, len(ids)], dtype=np.int32),
                seq_lens=np.array([stop], dtype=np.int32),
                block_table=np.arange(num_blocks, dtype=np.int32)[None],
                logits_indices=np.arange(len(ids), dtype=np.int32),
            )
        )
    backend.free_kv_cache()


def llama_cpp_logits(
    spec: EngineSpec,
    model: Path,
    vocab_size: int,
    token_ids: list[int],
    chunk: int,
    num_threads: int,
) -> Iterator[Floats]:
    """Logits of llama.cpp, run in the environment that has it."""
    job = {
        "model": str(model),
        "token_ids": token_ids,
        "chunk": chunk,
        "num_threads": num_threads,
    }
    process = subprocess.Popen(
        [spec.python, "-m", "benchmarks.drivers.llama_logits"],
        cwd=ROOT,
        env=spec.environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    if process.stdin is None or process.stdout is None:
        raise RuntimeError("the llama.cpp process has no pipes")
    with process:
        process.stdin.write(json.dumps(job).encode())
        process.stdin.close()
        for start in range(0, len(token_ids), chunk):
            num_rows = min(chunk, len(token_ids) - start)
            data = process.stdout.read(num_rows * vocab_size * 4)
            if len(data) != num_rows * vocab_size * 4:
                raise RuntimeError(f"llama.cpp ended at token {start}; see its message above")
            yield np.frombuffer(data, dtype=np.float32).reshape(num_rows, vocab_size)


# ---- the measurement ---------------------------------------------------------------------------


def measure(
    reference: Iterable[Floats], engines: dict[str, Iterable[Floats]]
) -> dict[str, Divergence]:
    """Compare the engines with the reference, chunk by chunk."""
    results = {name: Divergence(name) for name in engines}
    iterators = {name: iter(logits) for name, logits in engines.items()}
    for expected in reference:
        for name, iterator in iterators.items():
            results[name].add(expected, next(iterator))
    return results


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", default="smollm2", help="store name or path of a model")
    parser.add_argument("--tokens", type=int, default=NUM_TOKENS, help=f"default {NUM_TOKENS}")
    parser.add_argument("--text", type=Path, default=TEXT, help="default: prose with some code")
    parser.add_argument("--llama-python", metavar="PATH", help="the Python that runs llama.cpp")
    parser.add_argument("--threads", type=int, help="threads of every engine (default: cores)")


def run(args: argparse.Namespace) -> int:
    from tellin.kernels.native import NativeBackend
    from tellin.kernels.reference import ReferenceBackend
    from tellin.loading import open_model, resolve_model
    from tellin.models import build_plan
    from tellin.settings import Settings

    path = Path(args.model)
    if not path.exists():
        path = resolve_model(args.model, Settings.from_environ(), download=True)
    num_threads = args.threads or len(os.sched_getaffinity(0))
    with open_model(path) as source:
        token_ids = source.load_tokenizer().encode(args.text.read_text(encoding="utf-8"))
        token_ids = token_ids[: args.tokens]
        plan = build_plan(source)
        engines: dict[str, Iterable[Floats]] = {}
        for precision, kv_cache_dtype in SETTINGS:
            backend = NativeBackend(
                plan,
                num_threads=num_threads,
                activation_precision=precision,
                kv_cache_dtype=kv_cache_dtype,
            )
            name = f"tellin {precision}, {kv_cache_dtype} cache"
            engines[name] = backend_logits(backend, token_ids, CHUNK)
        spec = EngineSpec("llama.cpp", args.llama_python or sys.executable)
        if path.suffix == ".gguf" and spec.is_importable():
            engines["llama.cpp"] = llama_cpp_logits(
                spec, path, plan.vocab_size, token_ids, CHUNK, num_threads
            )
        else:
            print("llama.cpp: not installed in this Python, or not a GGUF file; left out")
        reference = backend_logits(ReferenceBackend(plan, batched=True), token_ids, CHUNK)
        print(table(path.name, len(token_ids), measure(reference, engines)))
    return 0


def table(model: str, num_tokens: int, results: dict[str, Divergence]) -> str:
    """The figures as text."""
    lines = [
        f"{model}: KL divergence from float32 in nats, over {num_tokens} tokens",
        f"{'engine':30} {'mean':>9} {'median':>9} {'99 %':>9} {'largest':>9}  same first choice",
    ]
    for result in results.values():
        median, high = np.percentile(result.kl, [50, 99])
        lines.append(
            f"{result.name:30} {result.mean_kl:9.5f} {median:9.5f} {high:9.5f} "
            f"{max(result.kl):9.5f}  {np.mean(result.same_top):.1%}"
        )
    return "\n".join(lines)
