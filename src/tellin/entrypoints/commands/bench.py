"""``tellin bench``: load for an OpenAI-compatible server; throughput and latency of an engine."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tellin.checks import check_float, check_int
from tellin.entrypoints.commands.common import add_model_arguments, open_llm, parse_assignment
from tellin.exceptions import InvalidParameterError, TellinError

if TYPE_CHECKING:
    from tellin.entrypoints.bench.dataset import BenchRequest
    from tellin.entrypoints.bench.load import LoadOptions, RequestResult

DESCRIPTION = """\
Measure. 'serve' puts load on a server with OpenAI's API, this one or any other, and measures as its
clients see it. 'throughput' and 'latency' measure an engine in this process, without a server."""

EXAMPLES = """\
examples:
  tellin bench serve --num-prompts 200 --max-concurrency 64
  tellin bench serve --base-url http://10.0.0.5:8080 --request-rate 4 --dataset chats.jsonl
  tellin bench throughput -m smollm2 --num-prompts 64 --json result.json --plot result.png
  tellin bench latency -m smollm2 --batch-size 8 --input-len 128 --output-len 32
  tellin bench serve --help
"""

SERVE = """\
Send streamed requests and measure throughput, time to first token (TTFT), time per output token
(TPOT), inter-token latency (ITL) and end-to-end latency. Without --request-rate a fixed number of
requests is open at any time (closed loop); with it, requests start at random times (Poisson)."""
THROUGHPUT = "Run many prompts as one job in this process and measure tokens per second."
LATENCY = "Run single batches one after the other in this process and measure how long they take."
MAX_COUNT = 10_000_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the commands below this one, and their arguments."""
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, text, add, action in (
        ("serve", SERVE, _add_serve_arguments, _serve),
        ("throughput", THROUGHPUT, _add_throughput_arguments, _throughput),
        ("latency", LATENCY, _add_latency_arguments, _latency),
    ):
        command = commands.add_parser(
            name, help=text.partition(".")[0].lower(), description=text, allow_abbrev=False
        )
        add(command)
        _add_output_arguments(command)
        command.set_defaults(action=action)


def _add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument(
        "--base-url",
        default="http://127.0.0.1:8000",
        metavar="URL",
        help="address without /v1 (default: %(default)s)",
    )
    group.add_argument(
        "--model", metavar="NAME", help="model to ask (default: the first one that is served)"
    )
    group.add_argument(
        "--api-key", metavar="KEY", help="key of the server (default: OPENAI_API_KEY, if set)"
    )
    group.add_argument(
        "--endpoint",
        choices=("chat", "completions"),
        default="chat",
        help="what is asked (default: %(default)s)",
    )
    group.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="any other field of the request, such as temperature=0 (repeatable)",
    )
    load = parser.add_argument_group("load")
    load.add_argument(
        "--request-rate",
        type=float,
        metavar="R",
        help="requests per second on average (default: as fast as --max-concurrency allows)",
    )
    load.add_argument(
        "--burstiness",
        type=float,
        default=1.0,
        metavar="B",
        help="1 = Poisson, less = bursts, more = even (default: %(default)g)",
    )
    load.add_argument(
        "--max-concurrency",
        type=int,
        metavar="N",
        help="most open requests (default: 64, or no limit with --request-rate)",
    )
    load.add_argument(
        "--warmups", type=int, default=1, metavar="N", help="requests before (default: %(default)s)"
    )
    load.add_argument(
        "--timeout", type=float, default=600.0, metavar="S", help="of a request (default: 600)"
    )
    load.add_argument(
        "--ignore-eos",
        action="store_true",
        help="generate --output-len tokens whatever the model says; not every server can",
    )
    _add_data_arguments(parser, num_prompts=100)


def _add_throughput_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    _add_data_arguments(parser, num_prompts=64)


def _add_latency_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    group = parser.add_argument_group("work")
    group.add_argument("--batch-size", type=int, default=1, metavar="N", help="prompts at a time")
    group.add_argument("--input-len", type=int, default=128, metavar="N", help="ids per prompt")
    group.add_argument("--output-len", type=int, default=64, metavar="N", help="ids to generate")
    group.add_argument("--iterations", type=int, default=10, metavar="N", help="measured batches")
    group.add_argument("--warmups", type=int, default=2, metavar="N", help="batches before")


def _add_data_arguments(parser: argparse.ArgumentParser, num_prompts: int) -> None:
    group = parser.add_argument_group("data")
    group.add_argument(
        "--dataset",
        type=Path,
        metavar="FILE",
        help="JSON lines or a JSON array; entries with messages, prompt or conversations "
        "(default: random words or ids)",
    )
    group.add_argument(
        "--num-prompts", type=int, default=num_prompts, metavar="N", help="(default: %(default)s)"
    )
    group.add_argument(
        "--input-len",
        type=int,
        default=128,
        metavar="N",
        help="words or ids of a random prompt (default: %(default)s)",
    )
    group.add_argument(
        "--prefix-len",
        type=int,
        default=0,
        metavar="N",
        help="how many of them all random prompts share (default: %(default)s)",
    )
    group.add_argument(
        "--output-len",
        type=int,
        default=64,
        metavar="N",
        help="most tokens to generate, unless the dataset says (default: %(default)s)",
    )
    group.add_argument("--seed", type=int, default=0, metavar="S", help="(default: %(default)s)")


def _add_output_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON")
    group.add_argument("--plot", type=Path, metavar="FILE", help="draw a PNG; needs matplotlib")


COUNTS = ("num_prompts", "input_len", "output_len", "max_concurrency", "batch_size", "iterations")


def run(args: argparse.Namespace) -> int:
    """Measure, print, write."""
    from tellin.entrypoints.bench.plot import check_plot

    for name in COUNTS:
        if getattr(args, name, None) is not None:
            check_int(f"--{name.replace('_', '-')}", getattr(args, name), 1, MAX_COUNT)
    for name in ("warmups", "prefix_len"):
        check_int(f"--{name.replace('_', '-')}", getattr(args, name, 0), 0, MAX_COUNT)
    for path, name in ((args.json, "--json"), (args.plot, "--plot")):
        if path is not None and not path.expanduser().absolute().parent.is_dir():
            raise InvalidParameterError(f"there is no folder for {path}", parameter=name)
    check_plot(args.plot)
    action: Callable[[argparse.Namespace], int] = args.action
    return action(args)


# ---------------------------------------------------------------------- serve


def _serve(args: argparse.Namespace) -> int:
    from tellin.entrypoints.bench.http_client import HttpError
    from tellin.entrypoints.bench.summary import latencies, summarize, table, write_json

    requests = _requests(args)
    try:
        results, options = asyncio.run(_run_load(args, requests))
    except HttpError as error:
        raise TellinError(f"{args.base_url}: {error}") from None
    summary = summarize(results)
    settings = _settings(args) | {"model": options.model}
    settings["max_concurrency"] = options.max_concurrency
    print(f"model         {options.model} at {args.base_url}\n{table(summary)}")
    if args.json is not None:
        write_json(args.json, summary, settings, requests=[_details(r, results) for r in results])
    good = [result for result in results if result.error is None]
    if args.plot is not None and good:
        from tellin.entrypoints.bench.plot import draw

        begin = min(result.start for result in results)
        tokens = [token for result in good for token in _arrivals(result, begin)]
        draw(args.plot, f"{options.model}: {len(good)} requests", latencies(good), tokens)
    return 1 if summary.num_failed else 0


def _requests(args: argparse.Namespace) -> list[BenchRequest]:
    from tellin.entrypoints.bench.dataset import load_requests, random_requests

    if args.dataset is not None:
        return load_requests(args.dataset, args.num_prompts, args.seed)
    return random_requests(args.num_prompts, args.input_len, args.prefix_len, args.seed)


async def _run_load(
    args: argparse.Namespace, requests: list[BenchRequest]
) -> tuple[list[RequestResult], LoadOptions]:
    from tqdm import tqdm

    from tellin.entrypoints.bench.dataset import random_requests
    from tellin.entrypoints.bench.http_client import HttpClient
    from tellin.entrypoints.bench.load import run_load, send, served_model

    key = args.api_key or os.environ.get("OPENAI_API_KEY")
    client = HttpClient(args.base_url, {"Authorization": f"Bearer {key}"} if key else None)
    try:
        options = _load_options(args, args.model or await served_model(client))
        for request in random_requests(args.warmups, args.input_len, seed=args.seed + 1):
            warmup = await send(client, request, options)
            if warmup.error is not None:
                raise TellinError(f"the first request failed: {warmup.error}")
        with tqdm(total=len(requests), unit="request", disable=not sys.stderr.isatty()) as bar:
            return await run_load(client, requests, options, lambda _: bar.update()), options
    finally:
        await client.aclose()


def _load_options(args: argparse.Namespace, model: str) -> LoadOptions:
    from tellin.entrypoints.bench.load import LoadOptions

    if args.request_rate is not None:
        check_float("--request-rate", args.request_rate, 0, 1e6, open_low=True)
    check_float("--burstiness", args.burstiness, 0, 1e6, open_low=True)
    check_float("--timeout", args.timeout, 0, 1e7, open_low=True)
    max_concurrency = args.max_concurrency
    if max_concurrency is None and args.request_rate is None:
        max_concurrency = 64
    extra = dict(parse_assignment(text) for text in args.set)
    if args.ignore_eos:
        extra["ignore_eos"] = True
    return LoadOptions(
        model=model,
        use_chat=args.endpoint == "chat",
        output_len=args.output_len,
        request_rate=args.request_rate,
        burstiness=args.burstiness,
        max_concurrency=max_concurrency,
        timeout_s=args.timeout,
        extra_body=extra,
        seed=args.seed,
    )


def _arrivals(result: RequestResult, begin: float) -> list[tuple[float, int]]:
    """When how many tokens came: those of a piece that holds several are counted with it."""
    times = result.token_times
    left = result.output_tokens - len(times)
    return [(times[0] - begin, 1 + max(left, 0)), *((time - begin, 1) for time in times[1:])]


def _details(result: RequestResult, results: list[RequestResult]) -> dict[str, Any]:
    begin = results[0].start
    return {
        "start_s": result.start - begin,
        "ttft_s": result.token_times[0] - result.start if result.token_times else None,
        "e2e_s": result.end - result.start,
        "prompt_tokens": result.prompt_tokens,
        "output_tokens": result.output_tokens,
        "error": result.error,
    }


# ---------------------------------------------------------------------- in this process


def _throughput(args: argparse.Namespace) -> int:
    from tellin.entrypoints.bench.offline import dataset_prompts, measure_throughput, random_prompts
    from tellin.entrypoints.bench.summary import write_json
    from tellin.sampling_params import SamplingParams

    requests = _requests(args) if args.dataset is not None else []
    args.set.append("disable_log_stats=false")  # time stamps
    with open_llm(args) as llm:
        if requests:
            prompts = dataset_prompts(llm, requests)
            lengths = [request.output_len or args.output_len for request in requests]
        else:
            prompts = random_prompts(llm, args.num_prompts, args.input_len, args.seed)
            for prompt in prompts[1:]:
                prompt["prompt_token_ids"][: args.prefix_len] = prompts[0]["prompt_token_ids"][
                    : args.prefix_len
                ]
            lengths = [args.output_len] * len(prompts)
        params = [
            SamplingParams(temperature=0, max_tokens=length, ignore_eos=not requests)
            for length in lengths
        ]
        summary, latencies = measure_throughput(llm, prompts, params)
    print(summary.table())
    if args.json is not None:
        write_json(args.json, summary, _settings(args))
    if args.plot is not None:
        from tellin.entrypoints.bench.plot import draw

        draw(args.plot, f"{args.model}: {summary.num_requests} requests at once", latencies)
    return 0


def _latency(args: argparse.Namespace) -> int:
    from tellin.entrypoints.bench.offline import measure_latency
    from tellin.entrypoints.bench.summary import write_json

    with open_llm(args) as llm:
        summary, seconds = measure_latency(
            llm, args.batch_size, args.input_len, args.output_len, args.iterations, args.warmups
        )
    print(summary.table())
    if args.json is not None:
        write_json(args.json, summary, _settings(args), seconds=seconds)
    if args.plot is not None:
        from tellin.entrypoints.bench.plot import draw

        draw(args.plot, f"{args.model}: {args.batch_size} prompts", {"latency": seconds})
    return 0


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments as plain data, without keys and callables."""
    hidden = {"action", "api_key", "json", "plot"}
    return {
        name: str(value) if isinstance(value, Path) else value
        for name, value in vars(args).items()
        if name not in hidden
    }
