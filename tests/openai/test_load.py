"""Load on loopback: hundreds of streams, with clients that vanish and clients that mean harm.

TELLIN_LOAD_SECONDS says how long (default 20), TELLIN_LOAD_STREAMS how many good streams there are
at any time (default 256).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest

from tellin.entrypoints.bench.dataset import random_requests
from tellin.entrypoints.bench.http_client import HttpClient
from tellin.entrypoints.bench.load import LoadOptions, send
from tests.openai.conftest import SLOW, Serve, Server
from tests.openai.test_hard_to_hurt import ENDLESS, TEXT, aborted, live, raw_request, wait_until

SECONDS = float(os.environ.get("TELLIN_LOAD_SECONDS", "20"))
NUM_STREAMS = int(os.environ.get("TELLIN_LOAD_STREAMS", "256"))
NUM_VANISHING = NUM_STREAMS // 8
NUM_HOSTILE = max(NUM_STREAMS // 16, 1)
MAX_GROWTH_BYTES = 24 << 20
"""How much a process may grow from the second third of the run to its end."""
HOSTILE: list[tuple[str, bytes]] = [
    (TEXT, b"{"),
    (TEXT, b'{"prompt": "x", "temperature": NaN}'),
    (TEXT, b'{"prompt": "x", "logit_bias": {"99999999": 1}}'),
    (TEXT, b'{"prompt": "x", "structured_outputs": {"regex": "("}}'),
    (TEXT, b'{"prompt": [-1]}'),
    (TEXT, b'{"prompt": "' + b"x" * 100_000 + b'"}'),
    (TEXT, b'{"prompt": "x", "n": 100000}'),
    ("/v1/chat/completions", b'{"messages": [{"role": "tool", "content": [1]}]}'),
    ("/v1/chat/completions", b'{"messages": [], "stream": true}'),
    ("/tokenize", b"[" * 20_000),
    ("/detokenize", b'{"tokens": [4294967295]}'),
    ("/nonsense", b"\x00\xff"),
]
NO_HTTP = [b"\x16\x03\x01\x00", b"GET / HTTP/9.9\r\n\r\n", b"POST /v1/completions HTTP/1.1\r\n"]


class Load:
    """The clients. Everything that is not as it should be ends in ``faults``."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.port = int(server.url.rpartition(":")[2])
        self.client = HttpClient(server.url)
        self.options = LoadOptions(
            "tiny", False, 24, extra_body={"temperature": 0, "ignore_eos": True}, timeout_s=240
        )
        self.prompts = random_requests(32, 12, prefix_len=5, seed=3)
        self.expected: list[str] = []
        self.done: Counter[str] = Counter()
        self.faults: list[str] = []
        self.deadline = 0.0

    async def calibrate(self) -> None:
        """What each prompt yields when nothing else runs."""
        for prompt in self.prompts:
            result = await send(self.client, prompt, self.options)
            assert result.error is None, result.error
            self.expected.append(result.text)

    async def good(self, seed: int) -> None:
        generator = random.Random(seed)
        while time.monotonic() < self.deadline:
            index = generator.randrange(len(self.prompts))
            result = await send(self.client, self.prompts[index], self.options)
            if result.error is not None:
                self.faults.append(result.error)
            elif result.text != self.expected[index]:
                self.faults.append(f"{result.text!r} instead of {self.expected[index]!r}")
            self.done["good"] += 1

    async def vanish(self, seed: int) -> None:
        """Ask, read for a while, go."""
        generator = random.Random(seed)
        while time.monotonic() < self.deadline:
            body = {"prompt": "y" * generator.randint(1, 900), "max_tokens": 1000,
                    "ignore_eos": True, "stream": generator.random() < 0.7}  # fmt: skip
            await self._talk(_post(TEXT, json.dumps(body).encode()), generator.uniform(0, 1.5))
            self.done["vanished"] += 1

    async def harm(self, seed: int) -> None:
        """Requests that must be refused, and bytes that are no requests."""
        generator = random.Random(seed)
        while time.monotonic() < self.deadline:
            if generator.random() < 0.2:
                await self._talk(generator.choice(NO_HTTP), generator.uniform(0, 0.5))
            else:
                path, body = generator.choice(HOSTILE)
                async with self.client.request("POST", path, body) as response:
                    await response.read()
                    if not 400 <= response.status < 500:
                        self.faults.append(f"{path} {body[:80]!r}: {response.status}")
            self.done["hostile"] += 1
            await asyncio.sleep(generator.uniform(0, 0.1))

    async def _talk(self, content: bytes, seconds: float) -> None:
        """Send, read for so long, break off."""
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            try:
                writer.write(content)
                async with asyncio.timeout(seconds):
                    while await reader.read(1 << 12):
                        pass
            except TimeoutError:
                pass
            finally:
                writer.transport.abort()

    async def watch(self, processes: list[psutil.Process]) -> list[list[int]]:
        """Memory of the processes, some times a second."""
        samples = []
        while time.monotonic() < self.deadline:
            samples.append([process.memory_info().rss for process in processes])
            await asyncio.sleep(0.5)
        return samples

    async def run(self, processes: list[psutil.Process]) -> list[list[int]]:
        await self.calibrate()
        self.deadline = time.monotonic() + SECONDS
        watching = asyncio.create_task(self.watch(processes))
        await asyncio.gather(
            *(self.good(i) for i in range(NUM_STREAMS)),
            *(self.vanish(i) for i in range(NUM_VANISHING)),
            *(self.harm(i) for i in range(NUM_HOSTILE)),
        )
        await self.client.aclose()
        return await watching


def _post(path: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 600)
def test_load(serve: Serve) -> None:
    arguments = ["--set", f"max_num_seqs={NUM_STREAMS}", "--max-queue", str(2 * NUM_STREAMS)]
    with serve(*arguments, "--served-model-name", "tiny", "-q") as server:
        processes = [psutil.Process(server.process.pid), server.core_process()]
        load = Load(server)
        samples = asyncio.run(load.run(processes))
        tokens = server.metric("tellin:generation_tokens_total")
        wait_until(lambda: live(server) == 0)
        wait_until(lambda: server.metric("tellin:kv_cache_usage_perc") == 0)
        middle = samples[len(samples) // 3]
        growth = [after - before for before, after in zip(middle, samples[-1], strict=True)]
        print(f"\n{SECONDS:g} s, {NUM_STREAMS} streams: {dict(load.done)}, {tokens:.0f} tokens, "
              f"{aborted(server):.0f} aborted, {len(load.faults)} faults; memory at the end "
              f"{[value >> 20 for value in samples[-1]]} MiB (server, core), growth "
              f"{[value / 2**20 for value in growth]} MiB")  # fmt: skip
        assert load.faults == []
        assert min(load.done[kind] for kind in ("good", "vanished", "hostile")) > 10
        assert max(growth) < MAX_GROWTH_BYTES
        before = [process.cpu_times() for process in processes]
        time.sleep(1)
        for process, times in zip(processes, before, strict=True):
            now = process.cpu_times()
            assert now.user + now.system - times.user - times.system < 0.2
        assert not [line for line in server.log if "Traceback" in line]


@pytest.mark.slow
def test_p24_disconnect_during_a_long_prefill(smollm2_path: Path) -> None:
    """The real model reads a long prompt in many steps; the core is idle one step later."""
    from tests.openai.conftest import run_server

    arguments = ["--max-model-len", "8192", "--set", "max_num_batched_tokens=128"]
    with run_server(smollm2_path, *arguments) as server:
        body = {"prompt": "word " * 8000, "max_tokens": 10}
        core = server.core_process()
        sock = raw_request(server, body)
        wait_until(lambda: server.metric("tellin:kv_cache_usage_perc") > 0)
        steps = server.metric("tellin:iteration_tokens_total_count")
        sock.close()
        wait_until(lambda: live(server) == 0)
        wait_until(lambda: aborted(server) == 1)
        after = server.metric("tellin:iteration_tokens_total_count")
        assert after - steps < 40  # of the 63 that the prompt needs
        assert server.metric("tellin:kv_cache_usage_perc") == 0
        before = core.cpu_times().user
        time.sleep(1)
        assert core.cpu_times().user - before < 0.2


def test_p24_disconnect_during_prefill(serve: Serve) -> None:
    arguments = [*SLOW, "--set", "max_num_batched_tokens=16", "--set", "max_num_seqs=16"]
    with serve(*arguments) as server:
        body: dict[str, Any] = ENDLESS | {"prompt": "x" * 28_000, "max_tokens": 1000}
        sock = raw_request(server, body)
        wait_until(lambda: server.metric("tellin:kv_cache_usage_perc") > 0)
        sock.close()
        wait_until(lambda: live(server) == 0)
        wait_until(lambda: aborted(server) == 1)
        assert server.metric("tellin:kv_cache_usage_perc") == 0
        before = server.core_process().cpu_times().user
        time.sleep(0.3)
        assert server.core_process().cpu_times().user - before < 0.1
