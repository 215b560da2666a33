"""What HTTP costs: the server against `AsyncLLM` itself, and against llama-cpp-python's server.

All of them are loaded first, then take turns with the same work: N streams at once, each with its
own prompt. The client runs on the same machine, as do the servers. Run from the repository's root:

    python -m benchmarks.server --model smollm2 --streams 64 --peer-python /path/to/python
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tellin.config import EngineArgs
from tellin.engine.async_llm import AsyncLLM
from tellin.entrypoints.bench.dataset import BenchRequest, random_requests
from tellin.entrypoints.bench.http_client import HttpClient, HttpError
from tellin.entrypoints.bench.load import LoadOptions, run_load, served_model
from tellin.loading import resolve_model
from tellin.sampling_params import RequestOutputKind, SamplingParams
from tellin.settings import Settings

START_LIMIT_S = 60


@dataclass
class Work:
    """What everybody does in a round."""

    requests: list[BenchRequest]
    output_len: int


@dataclass
class Contestant:
    """One way to get the work done."""

    name: str
    run: Callable[[Work], Awaitable[int]]
    """Does the work once; returns the number of generated tokens."""
    processes: list[psutil.Process]
    """Whose CPU time is counted, beside this one's."""
    rates: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    async def measure(self, work: Work) -> None:
        processes = [psutil.Process(), *self.processes]
        cpu_before = sum(_cpu(process) for process in processes)
        start = time.perf_counter()
        num_tokens = await self.run(work)
        self.rates.append(num_tokens / (time.perf_counter() - start))
        self.cpu_s.append(sum(_cpu(process) for process in processes) - cpu_before)
        print(f"{self.name:<16} {self.rates[-1]:8.1f} tokens/s {self.cpu_s[-1]:7.2f} s of CPU",
              flush=True)  # fmt: skip


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _tree(pid: int) -> list[psutil.Process]:
    parent = psutil.Process(pid)
    return [parent, *parent.children(recursive=True)]


def engine_prompt(engine: AsyncLLM, request: BenchRequest, use_chat: bool) -> Any:
    """What a server makes of the request: the same prompt, to the token."""
    if not use_chat:
        return request.as_text()
    tokenizer = engine.get_tokenizer()
    text = tokenizer.apply_chat_template(request.as_messages(), add_generation_prompt=True)
    return {"prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)}


async def ask_engine(engine: AsyncLLM, use_chat: bool, work: Work) -> int:
    """All requests on `AsyncLLM`, streamed."""

    async def one(request: BenchRequest) -> int:
        params = SamplingParams(temperature=0, max_tokens=work.output_len, ignore_eos=True,
                                output_kind=RequestOutputKind.DELTA)  # fmt: skip
        count = 0
        async for output in engine.generate(engine_prompt(engine, request, use_chat), params):
            count += len(output.outputs[0].token_ids)
        return count

    return sum(await asyncio.gather(*(one(request) for request in work.requests)))


async def ask_server(
    client: HttpClient, model: str, use_chat: bool, extra: dict[str, Any], work: Work
) -> int:
    """All requests on a server, streamed."""
    options = LoadOptions(model, use_chat, work.output_len, extra_body={"temperature": 0, **extra})
    results = await run_load(client, work.requests, options)
    failed = [result.error for result in results if result.error is not None]
    if failed:
        raise SystemExit(f"{len(failed)} requests failed: {failed[0]}")
    return sum(result.output_tokens for result in results)


@contextlib.contextmanager
def running(command: list[str]) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A server that takes ``--port``; its address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with subprocess.Popen(
        [*command, "--port", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            yield f"http://127.0.0.1:{port}", process
        finally:
            process.terminate()


async def wait_for(client: HttpClient, process: subprocess.Popen[bytes]) -> str:
    """The served model's name, as soon as there is one."""
    deadline = time.monotonic() + START_LIMIT_S
    while True:
        try:
            return await served_model(client)
        except HttpError as error:
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"a server did not start: {error}") from None
        await asyncio.sleep(0.1)


async def compare(args: argparse.Namespace) -> dict[str, Contestant]:
    """Take turns, ``args.rounds`` times."""
    path = resolve_model(args.model, Settings.from_environ(), download=True)
    engine_args = EngineArgs.from_dict(
        {"model": path, "num_threads": args.threads, "max_num_seqs": args.streams}
    )
    work = Work(random_requests(args.streams, args.input_len, seed=1), args.output_len)
    contestants = []
    async with contextlib.AsyncExitStack() as stack:
        serve = [sys.executable, "-m", "tellin.entrypoints.cli", "serve", str(path), "-q"]
        serve += ["--threads", str(args.threads), "--set", f"max_num_seqs={args.streams}"]
        peer = [args.peer_python, "-m", "llama_cpp.server", "--model", str(path)]
        peer += ["--n_threads", str(args.threads), "--n_ctx", "2048"]
        # One request at a time is all that it can; a new one must not end the running one.
        peer += ["--interrupt_requests", "false"]
        servers: list[tuple[str, list[str], dict[str, Any]]] = [
            ("tellin serve", serve, {"ignore_eos": True})
        ]
        if args.peer_python:
            servers.append(("llama-cpp-python", peer, {}))
        engine = await stack.enter_async_context(AsyncLLM.from_engine_args(engine_args))
        children = [psutil.Process(child.pid) for child in psutil.Process().children()]
        contestants.append(
            Contestant("AsyncLLM", lambda work: ask_engine(engine, args.chat, work), children)
        )
        for name, command, extra in servers:
            url, process = stack.enter_context(running(command))
            client = HttpClient(url)
            stack.push_async_callback(client.aclose)
            model = await wait_for(client, process)
            contestants.append(_server(name, client, model, args.chat, extra, process.pid))
        warm_up = Work(work.requests[:2], 4)
        for contestant in contestants:
            await contestant.run(warm_up)
        for round_number in range(args.rounds):
            for contestant in contestants:
                if contestant.name != "llama-cpp-python" or round_number < args.peer_rounds:
                    fresh = random_requests(args.streams, args.input_len, seed=2 + round_number)
                    await contestant.measure(Work(fresh, args.output_len))
    return {contestant.name: contestant for contestant in contestants}


def _server(
    name: str, client: HttpClient, model: str, use_chat: bool, extra: dict[str, Any], pid: int
) -> Contestant:
    def run(work: Work) -> Awaitable[int]:
        return ask_server(client, model, use_chat, extra, work)

    return Contestant(name, run, _tree(pid))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--input-len", type=int, default=16, help="words of a prompt")
    parser.add_argument("--output-len", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--peer-rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=psutil.cpu_count(logical=False) or 1)
    parser.add_argument("--chat", action="store_true", help="ask chats instead of completions")
    parser.add_argument("--peer-python", help="interpreter that has llama-cpp-python[server]")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = asyncio.run(compare(args))
    best = {name: statistics.median(contestant.rates) for name, contestant in found.items()}
    result: dict[str, Any] = {"tokens_per_s": {n: c.rates for n, c in found.items()}}
    result["ratio_to_async_llm"] = best["tellin serve"] / best["AsyncLLM"]
    if "llama-cpp-python" in best:
        result["ratio_to_peer"] = best["tellin serve"] / best["llama-cpp-python"]
    for name in ("ratio_to_async_llm", "ratio_to_peer"):
        if name in result:
            print(f"{name:<20} {result[name]:.3f}")
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
