"""A server on a loopback port, with a model that starts in a moment."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import openai
import psutil
import pytest

from benchmarks.synthetic import SIZES, write_llama

START_LIMIT_S = 120
ROOT = Path(__file__).parents[2]
ENDLESS_TOKENS = 30_000
"""Tokens of a request that no test waits for: minutes on a slow server, at any speed."""
SLOW = (
    "--set", 'logits_processors=["tests.openai.slow_steps:SlowSteps"]',
    "--max-model-len", str(ENDLESS_TOKENS + 1000), "--set", "num_kv_blocks=2048",
)  # fmt: skip
"""Arguments of a server whose steps take at least 5 ms, with room for an endless request."""


@dataclass
class Server:
    """A running ``tellin serve``."""

    process: subprocess.Popen[str]
    url: str
    log: list[str] = field(default_factory=list)

    @functools.cached_property
    def http(self) -> httpx.Client:
        """A client of its own, closed with the server."""
        return httpx.Client(base_url=self.url, timeout=60)

    def client(self, **options: object) -> openai.OpenAI:
        settings = {"api_key": "none", "max_retries": 0} | options
        return openai.OpenAI(base_url=f"{self.url}/v1", **settings)  # type: ignore[arg-type]

    def metric(self, name: str) -> float:
        """Sum of a metric's values over its labels."""
        lines = self.http.get("/metrics").text.splitlines()
        values = [float(line.rpartition(" ")[2]) for line in lines if line.startswith(name)]
        assert values, f"no metric {name}"
        return sum(values)

    def core_process(self) -> psutil.Process:
        children = psutil.Process(self.process.pid).children(recursive=True)
        return next(c for c in children if any("core_proc" in word for word in c.cmdline()))


Serve = Callable[..., AbstractContextManager[Server]]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random-weight Llama of a few hundred kilobytes with a byte-level tokenizer."""
    shape = dataclasses.replace(SIZES["tiny"], max_position_embeddings=1 << 15)
    return write_llama(tmp_path_factory.mktemp("models") / "tiny.gguf", shape, "q8_0")


@contextlib.contextmanager
def run_server(model: Path, *arguments: str) -> Iterator[Server]:
    """Start ``tellin serve``; ends it at the end, if it still runs."""
    command = [sys.executable, "-m", "tellin.entrypoints.cli", "serve", str(model), "--port", "0"]
    defaults = ["--threads", "1", "--max-model-len", "2048", "--set", "num_kv_blocks=1024"]
    process = subprocess.Popen(
        [*command, *defaults, *arguments],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    server = Server(process, "")
    started = threading.Event()

    def read_log() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            server.log.append(line)
            if " at http" in line:
                server.url = line.split(" at ")[1].split("/v1")[0]
            if line.startswith("  memory"):
                started.set()
        started.set()

    reader = threading.Thread(target=read_log)
    reader.start()
    try:
        assert started.wait(START_LIMIT_S), "the server did not start in time"
        assert server.url, "".join(server.log)
        yield server
    finally:
        if "http" in vars(server):
            server.http.close()
        if process.poll() is None:
            process.terminate()
        try:
            process.wait(60)
        finally:
            process.kill()
            reader.join()
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    stream.close()


@pytest.fixture(scope="package")
def serve(tiny_model: Path) -> Serve:
    """Start a server of one's own: ``with serve("--api-key", "x") as server``."""
    return lambda *arguments: run_server(tiny_model, *arguments)


@pytest.fixture(scope="package")
def server(serve: Serve) -> Iterator[Server]:
    """A server that these tests share; they leave it as they found it, and it ends with them."""
    with serve("--served-model-name", "tiny", "--served-model-name", "other") as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with server.client() as running:
        yield running
