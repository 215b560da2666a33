"""What HTTP costs: the server against `AsyncLLM` itself, and against two servers of llama.cpp.

These are llama.cpp's own `llama-server`, which batches continuously, and the one of
llama-cpp-python, which answers one request at a time. All are loaded first, then take turns with
the same work: N streams at once, each with its own prompt, greedy. The client runs on the same
machine, as do the servers, and says what it takes of it (`benchmarks.stream_client`); a server that
waits for its turn is stopped. Run from the repository's root:

    python -m benchmarks.server --model smollm2 --streams 64 \\
        --llama-server /path/to/llama-server --peer-python /path/to/python
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import shlex
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import psutil

from benchmarks.stream_client import PAUSE_S, stream_all
from tellin.config import EngineArgs
from tellin.engine.async_llm import AsyncLLM
from tellin.entrypoints.bench.dataset import BenchRequest, random_requests
from tellin.entrypoints.bench.http_client import HttpClient, HttpError
from tellin.entrypoints.bench.load import (
    CHAT_PATH,
    TEXT_PATH,
    LoadOptions,
    request_body,
    served_model,
)
from tellin.loading import resolve_model
from tellin.sampling_params import RequestOutputKind, SamplingParams
from tellin.settings import Settings

START_LIMIT_S = 60
ROUND_LIMIT_S = 600
TOKENS_PER_WORD = 8
"""More than a random word takes: for a context that is large enough."""
CHAT_TOKENS = 64
"""More than a chat template adds."""


@dataclass
class Work:
    """What everybody does in a round."""

    requests: list[BenchRequest]
    output_len: int


@dataclass
class Done:
    """A round's work is done."""

    count_tokens: Callable[[], int]
    """Number of generated tokens; called when the clock has stopped."""
    client_s: float = 0.0
    """CPU time of a client of a server."""


@dataclass
class Contestant:
    """One way to get the work done."""

    name: str
    run: Callable[[Work], Awaitable[Done]]
    """Does the work once."""
    processes: list[psutil.Process]
    """Whose CPU time is counted, beside this one's."""
    rates: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    client_us: list[float] = field(default_factory=list)
    """CPU time of the client per token; it is in ``cpu_s`` too."""
    rounds: int | None = None
    """Fewer rounds than the others; None = all."""
    stopped: list[psutil.Process] = field(default_factory=list)
    """What is stopped between its turns, so that no idle thread disturbs the others."""

    def stop(self) -> None:
        for process in self.stopped:
            process.suspend()

    def go_on(self) -> None:
        for process in self.stopped:
            process.resume()

    async def measure(self, work: Work) -> None:
        self.go_on()
        try:
            await self._measure(work)
        finally:
            self.stop()

    async def _measure(self, work: Work) -> None:
        processes = [psutil.Process(), *self.processes]
        cpu_before = sum(_cpu(process) for process in processes)
        start = time.perf_counter()
        done = await self.run(work)
        wall_s = time.perf_counter() - start
        self.cpu_s.append(sum(_cpu(process) for process in processes) - cpu_before)
        num_tokens = done.count_tokens()
        self.rates.append(num_tokens / wall_s)
        self.client_us.append(done.client_s / num_tokens * 1e6)
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


async def ask_engine(engine: AsyncLLM, use_chat: bool, work: Work) -> Done:
    """All requests on `AsyncLLM`, streamed."""

    async def one(request: BenchRequest) -> int:
        params = SamplingParams(temperature=0, max_tokens=work.output_len, ignore_eos=True,
                                output_kind=RequestOutputKind.DELTA)  # fmt: skip
        count = 0
        async for output in engine.generate(engine_prompt(engine, request, use_chat), params):
            count += len(output.outputs[0].token_ids)
        return count

    num_tokens = sum(await asyncio.gather(*(one(request) for request in work.requests)))
    return Done(lambda: num_tokens)


def ask_server(
    url: str,
    model: str,
    use_chat: bool,
    extra: dict[str, Any],
    work: Work,
    pause_s: float = PAUSE_S,
) -> Done:
    """All requests on a server, streamed. Nothing else runs meanwhile."""
    options = LoadOptions(model, use_chat, work.output_len, extra_body={"temperature": 0, **extra})
    bodies = [msgspec.json.encode(request_body(request, options)) for request in work.requests]
    path = CHAT_PATH if use_chat else TEXT_PATH
    answers = stream_all(url, path, bodies, ROUND_LIMIT_S, pause_s)
    return Done(answers.num_tokens, answers.cpu_s)


@dataclass(frozen=True)
class ServerCommand:
    """How to start a server, and how to ask it."""

    name: str
    command: list[str]
    """Without its port: ``--port N`` is added."""
    extra_body: dict[str, Any] = field(default_factory=dict)
    ready_path: str = "/v1/models"
    """Answers 200 as soon as the model is loaded."""
    rounds: int | None = None
    """None = all."""


def server_commands(args: argparse.Namespace, path: Path) -> list[ServerCommand]:
    """Our server first, then the peers that the options name."""
    threads = str(args.threads)
    tellin = [sys.executable, "-m", "tellin.entrypoints.cli", "serve", str(path), "-q"]
    tellin += ["--threads", threads, "--set", f"max_num_seqs={args.streams}"]
    servers = [ServerCommand("tellin serve", tellin, {"ignore_eos": True})]
    if args.llama_server:
        context = args.streams * (TOKENS_PER_WORD * args.input_len + args.output_len + CHAT_TOKENS)
        llama = [args.llama_server, "-m", str(path), "--host", "127.0.0.1", "-t", threads]
        llama += ["-tb", threads, "-np", str(args.streams), "-c", str(context), "--cont-batching"]
        llama += shlex.split(args.llama_server_args)
        servers.append(ServerCommand("llama-server", llama, {"ignore_eos": True}, "/health"))
    if args.peer_python:
        peer = [args.peer_python, "-m", "llama_cpp.server", "--model", str(path)]
        peer += ["--n_threads", threads, "--n_ctx", "2048"]
        # One request at a time is all that it can; a new one must not end the running one.
        peer += ["--interrupt_requests", "false"]
        servers.append(ServerCommand("llama-cpp-python", peer, rounds=args.peer_rounds))
    return servers


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
            with contextlib.suppress(psutil.NoSuchProcess):
                for member in _tree(process.pid):
                    member.resume()
            process.terminate()


async def wait_for(
    client: HttpClient, process: subprocess.Popen[bytes], server: ServerCommand
) -> str:
    """The served model's name, as soon as the model is loaded."""
    deadline = time.monotonic() + START_LIMIT_S
    while True:
        try:
            async with client.request("GET", server.ready_path) as response:
                await response.read()
            if response.status == 200:
                return await served_model(client)
            error = f"{server.ready_path} answers {response.status}"
        except HttpError as problem:
            error = str(problem)
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"{server.name} did not start: {error}")
        await asyncio.sleep(0.1)


async def compare(args: argparse.Namespace) -> dict[str, Contestant]:
    """Take turns, ``args.rounds`` times."""
    path = resolve_model(args.model, Settings.from_environ(), download=True)
    engine_args = EngineArgs.from_dict(
        {"model": path, "num_threads": args.threads, "max_num_seqs": args.streams}
    )
    warm_up = Work(random_requests(min(args.streams, 4), args.input_len, seed=1), 4)
    contestants = []
    async with contextlib.AsyncExitStack() as stack:
        engine = await stack.enter_async_context(AsyncLLM.from_engine_args(engine_args))
        children = [psutil.Process(child.pid) for child in psutil.Process().children()]
        contestants.append(
            Contestant("AsyncLLM", lambda work: ask_engine(engine, args.chat, work), children)
        )
        servers = server_commands(args, path)
        contestants += [await _started(server, stack, args) for server in servers]
        for contestant in contestants:
            await contestant.run(warm_up)
            contestant.stop()
        for round_number in range(args.rounds):
            for contestant in contestants:
                if contestant.rounds is None or round_number < contestant.rounds:
                    fresh = random_requests(args.streams, args.input_len, seed=2 + round_number)
                    await contestant.measure(Work(fresh, args.output_len))
        for contestant in contestants:
            contestant.go_on()
    return {contestant.name: contestant for contestant in contestants}


async def _started(
    server: ServerCommand, stack: contextlib.AsyncExitStack, args: argparse.Namespace
) -> Contestant:
    """The server, loaded; the stack ends it."""
    url, process = stack.enter_context(running(server.command))
    async with contextlib.aclosing(HttpClient(url)) as client:
        model = await wait_for(client, process, server)

    async def run(work: Work) -> Done:
        pause_s = args.client_pause_ms / 1000
        return ask_server(url, model, args.chat, server.extra_body, work, pause_s)

    tree = _tree(process.pid)
    return Contestant(server.name, run, tree, rounds=server.rounds, stopped=tree)


def summarize(found: dict[str, Contestant]) -> dict[str, Any]:
    """Medians, and how our server relates to each of the others."""
    medians = {name: statistics.median(contestant.rates) for name, contestant in found.items()}
    own = medians["tellin serve"]
    return {
        "tokens_per_s": {name: contestant.rates for name, contestant in found.items()},
        "cpu_s": {name: contestant.cpu_s for name, contestant in found.items()},
        "client_us_per_token": {name: contestant.client_us for name, contestant in found.items()},
        "median_tokens_per_s": medians,
        "ratio_to": {name: own / m for name, m in medians.items() if name != "tellin serve"},
    }


def print_table(result: dict[str, Any]) -> None:
    print(f"\n{'':<18}{'tokens/s':>10}{'tellin serve is':>18}{'client, us/token':>20}")
    for name, median in result["median_tokens_per_s"].items():
        ratio = result["ratio_to"].get(name)
        cells = f"{'':>18}" if ratio is None else f"{ratio:>16.2f} x"
        client_us = statistics.median(result["client_us_per_token"][name])
        print(f"{name:<18}{median:>10.1f}{cells}{client_us:>20.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--input-len", type=int, default=16, help="words of a prompt")
    parser.add_argument("--output-len", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer-rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=psutil.cpu_count(logical=False) or 1)
    parser.add_argument("--chat", action="store_true", help="ask chats instead of completions")
    parser.add_argument("--client-pause-ms", type=float, default=PAUSE_S * 1000,
                        help="between two looks for tokens; 0 = woken by each")  # fmt: skip
    parser.add_argument("--peer-python", help="interpreter that has llama-cpp-python[server]")
    parser.add_argument("--llama-server", help="llama.cpp's own server, the program's path")
    parser.add_argument("--llama-server-args", default="", help="more options for it")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    result = summarize(asyncio.run(compare(args)))
    print_table(result)
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
