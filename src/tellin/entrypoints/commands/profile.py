"""``tellin profile``: where the time of a model goes, operation by operation."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from tellin.entrypoints.commands.common import download_progress, enable_logging, parse_assignment
from tellin.exceptions import InvalidParameterError

if TYPE_CHECKING:
    from tellin.engine.llm_engine import LLMEngine
    from tellin.worker.profiler import OperationProfile

DESCRIPTION = """\
Run a model on prompts of arbitrary ids and print the most expensive operations of its plan, with
the memory bandwidth and the arithmetic they achieve: for reading prompts (prefill) and for
generating (decode). Equal operations of different layers are added up."""

EXAMPLES = """\
examples:
  tellin profile smollm2
  tellin profile smollm2 --streams 64 --max-tokens 16
  tellin profile ./model.gguf --trace run   # also writes run-....json for https://ui.perfetto.dev
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("model", help="a .gguf file, a model folder, or a name")
    parser.add_argument("--prompt-len", type=int, default=256, metavar="N", help="ids per prompt")
    parser.add_argument("--max-tokens", type=int, default=32, metavar="N", help="ids to generate")
    parser.add_argument("--streams", type=int, default=1, metavar="N", help="requests at a time")
    parser.add_argument("--top", type=int, default=10, metavar="N", help="operations to print")
    parser.add_argument("--by-layer", action="store_true", help="do not add layers up")
    parser.add_argument("--threads", type=int, metavar="N", help="threads (default: all cores)")
    parser.add_argument("--trace", metavar="PREFIX", help="keep the traces under this path")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="any other engine argument, such as kv_cache_dtype=int8 (repeatable)",
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="log to standard error")


def run(args: argparse.Namespace) -> int:
    """Profile prefill, then decode, and print a table of each."""
    for name, least in (("prompt_len", 1), ("max_tokens", 2), ("streams", 1), ("top", 1)):
        if getattr(args, name) < least:
            raise InvalidParameterError(
                f"--{name.replace('_', '-')} must be at least {least}, got {getattr(args, name)}",
                parameter=name,
                value=getattr(args, name),
            )
    with _open_engine(args) as engine:
        for phase in ("prefill", "decode"):
            print(_profile(engine, args, phase))
    return 0


def _open_engine(args: argparse.Namespace) -> LLMEngine:
    from tellin.config import EngineArgs
    from tellin.engine.llm_engine import LLMEngine
    from tellin.loading import resolve_model
    from tellin.settings import Settings

    if args.verbose:
        enable_logging()
    path = resolve_model(
        args.model, Settings.from_environ(), download=True, progress=download_progress()
    )
    fields = {
        "model": path,
        "num_threads": args.threads,
        "max_num_seqs": args.streams,
        "enable_prefix_caching": False,
        **dict(parse_assignment(text) for text in args.set),
    }
    return LLMEngine.from_engine_args(EngineArgs.from_dict(fields))


def _profile(engine: LLMEngine, args: argparse.Namespace, phase: str) -> str:
    """One table. Both phases run both parts, but only theirs is measured."""
    import contextlib
    import tempfile
    import time

    from tellin.sampling_params import SamplingParams

    vocab_size = engine.model_config.vocab_size
    params = SamplingParams(temperature=0, max_tokens=args.max_tokens, ignore_eos=True)
    engine.reset_prefix_cache()
    for i in range(args.streams):
        ids = [(31 * i + 7 * j) % min(vocab_size, 1000) for j in range(args.prompt_len)]
        engine.add_request(f"{phase}-{i}", {"prompt_token_ids": ids}, params)
    with contextlib.ExitStack() as stack:
        prefix = f"{args.trace}-{phase}" if args.trace else None
        if prefix is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="tellin-"))
            prefix = f"{folder}/{phase}"
        started: set[str] = set()
        if phase == "prefill":
            engine.start_profile(prefix)
        begin = time.perf_counter()
        while len(started) < args.streams:
            started.update(output.request_id for output in engine.step())
        if phase == "decode":
            engine.start_profile(prefix)
            begin = time.perf_counter()
            while engine.has_unfinished_requests():
                engine.step()
        seconds = time.perf_counter() - begin
        path = engine.stop_profile()
        engine.abort_request([f"{phase}-{i}" for i in range(args.streams)])
        lines = _table(_operations(engine, args.by_layer), seconds, args.top)
    num_tokens = args.streams * (args.prompt_len if phase == "prefill" else args.max_tokens - 1)
    head = (
        f"{phase}: {args.streams} x {num_tokens // args.streams} tokens in {seconds:.3f} s, "
        f"{num_tokens / seconds:.1f} tokens/s"
    )
    foot = [f"trace      {path}"] if args.trace else []
    return "\n".join([head, *lines, *foot, ""])


def _operations(engine: LLMEngine, by_layer: bool) -> list[tuple[OperationProfile, int]]:
    from tellin.worker.profiler import OperationProfile, merge_layers

    rows = engine.collective_rpc("operation_profile")[0]
    operations = [OperationProfile(**row) for row in rows]
    return [(op, 1) for op in operations] if by_layer else merge_layers(operations)


def _table(operations: list[tuple[OperationProfile, int]], seconds: float, top: int) -> list[str]:
    """The ``top`` most expensive operations, and what is left."""
    operations = sorted(operations, key=lambda item: -item[0].seconds)
    lines = [f"{'share':>7} {'ms':>9} {'GB/s':>7} {'GMAC/s':>7} {'stages':>6}  operation"]
    for op, count in operations[:top]:
        lines.append(
            f"{_share(op.seconds, seconds)} {op.seconds * 1e3:9.2f} "
            f"{_rate(op.num_bytes, op.seconds)} {_rate(op.macs, op.seconds)} {count:6}  {op.name}"
        )
    rest = sum(op.seconds for op, _ in operations[top:])
    outside = seconds - sum(op.seconds for op, _ in operations)
    if rest:
        lines.append(
            f"{_share(rest, seconds)} {rest * 1e3:9.2f} {'':15} "
            f"{sum(count for _, count in operations[top:]):6}  other operations"
        )
    lines.append(
        f"{_share(outside, seconds)} {outside * 1e3:9.2f} {'':22}  "
        "outside the plan: scheduling, sampling, text"
    )
    return lines


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:6.1f}%"


def _rate(amount: float, seconds: float) -> str:
    return f"{amount / seconds / 1e9:7.1f}" if amount and seconds else f"{'-':>7}"
