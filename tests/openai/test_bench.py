"""``tellin bench``: load on a server, ours or another one; throughput and latency in process."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import random
import socket
import socketserver
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tellin.entrypoints import cli
from tellin.entrypoints.bench import load, plot
from tellin.entrypoints.bench.dataset import BenchRequest, load_requests, random_requests
from tellin.entrypoints.bench.http_client import HttpClient
from tellin.entrypoints.bench.load import LoadOptions, RequestResult, run_load
from tellin.entrypoints.bench.summary import PERCENTILES, distribution, summarize, table
from tellin.exceptions import InvalidParameterError
from tests.openai.conftest import Server

# ---------------------------------------------------------------------- a server, ours


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_serve_prints_writes_and_draws(
    server: Server, endpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, picture = tmp_path / "result.json", tmp_path / "result.png"
    arguments = ["--endpoint", endpoint, "--num-prompts", "12", "--max-concurrency", "3"]
    sizes = ["--input-len", "5", "--output-len", "6", "--ignore-eos", "--set", "temperature=0"]
    outputs = ["--json", str(target), "--plot", str(picture), "--base-url", server.url]
    assert cli.main(["bench", "serve", *arguments, *sizes, *outputs]) == 0
    text = capsys.readouterr().out
    assert "12 of 12 done" in text
    assert "at most 3 at a time" in text
    result = json.loads(target.read_text())
    assert result["settings"]["model"] == "tiny"
    assert result["settings"]["max_concurrency"] == 3
    assert result["output_tokens"] == 12 * 6
    assert result["num_failed"] == 0
    assert set(result["latencies_ms"]) == {"ttft", "tpot", "itl", "e2e"}
    assert [request["output_tokens"] for request in result["requests"]] == [6] * 12
    seconds, rate = result["duration_s"], result["output_tokens_per_s"]
    assert rate == pytest.approx(72 / seconds)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_open_loop_and_a_dataset(server: Server, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "one", "max_tokens": 2}\n{"prompt": "two", "max_tokens": 3}\n')
    target = tmp_path / "result.json"
    arguments = ["--dataset", str(data), "--num-prompts", "10", "--request-rate", "200"]
    command = ["bench", "serve", "--base-url", server.url, *arguments, "--json", str(target)]
    assert cli.main([*command, "--ignore-eos", "--endpoint", "completions"]) == 0
    assert json.loads(target.read_text())["output_tokens"] == 5 * 2 + 5 * 3


def test_refused_requests_are_failures_with_a_reason(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["bench", "serve", "--base-url", server.url, "--num-prompts", "2"]
    assert cli.main([*command, "--warmups", "0", "--set", "frobnicate=1"]) == 1
    out = capsys.readouterr().out
    assert "0 of 2 done" in out
    assert "2 x HTTP 400" in out
    assert "frobnicate" in out
    assert cli.main([*command, "--set", "frobnicate=1"]) == 1  # now the warm-up finds it
    assert "the first request failed" in capsys.readouterr().err
    assert cli.main([*command, "--model", "no-such"]) == 1


def test_no_server_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "serve", "--base-url", "http://127.0.0.1:9"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("tellin bench: error: http://127.0.0.1:9: ConnectionRefusedError")


# ---------------------------------------------------------------------- a server of another make


class _Other(socketserver.StreamRequestHandler):
    """Carriage returns, comments, no usage, no length: legal, and unlike ours."""

    def handle(self) -> None:
        request = self.rfile.readline()
        length = 0
        while (line := self.rfile.readline()).strip():
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                length = int(value)
        self.rfile.read(length)
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
        if b"/v1/models" in request:
            self.wfile.write(head + b'{"data": [{"id": "strange"}]}')
            return
        self.wfile.write(head + b": a comment\r\n\r\n")
        for text in ("", "a", "b", "c"):
            chunk = {"choices": [{"index": 0, "delta": {"content": text}}], "extra": None}
            self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\r\n\r\n")
            self.wfile.flush()
        self.wfile.write(b"data: [DONE]\r\n\r\n")


@contextlib.contextmanager
def other_server() -> Iterator[str]:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Other) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{running.server_address[1]}"
        finally:
            running.shutdown()
            thread.join()


def test_a_server_of_another_make(tmp_path: Path) -> None:
    target = tmp_path / "result.json"
    with other_server() as url:
        command = ["bench", "serve", "--base-url", url, "--num-prompts", "3", "--json", str(target)]
        assert cli.main(command) == 0
    result = json.loads(target.read_text())
    assert result["settings"]["model"] == "strange"
    assert result["output_tokens"] == 9  # pieces of text, for want of a usage


# ---------------------------------------------------------------------- load


def test_arrivals_are_a_poisson_process_whatever_the_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Gaps are exponential: mean 1/rate, and a standard deviation equal to the mean."""
    due: list[float] = []
    clock = 0.0

    async def fake_send(*_: Any) -> RequestResult:
        return RequestResult(0.0)

    async def fake_sleep(seconds: float) -> None:
        nonlocal clock
        clock += max(seconds, 0.0)
        due.append(clock)

    monkeypatch.setattr(load, "send", fake_send)
    monkeypatch.setattr(load.asyncio, "sleep", fake_sleep)
    monkeypatch.setattr(load.time, "monotonic", lambda: clock)
    options = LoadOptions("m", False, 1, request_rate=50.0)
    requests = random_requests(4000, 1)
    asyncio.run(run_load(HttpClient("http://x"), requests, options))
    gaps = np.diff(due)
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.06)
    assert gaps.std() == pytest.approx(1 / 50, rel=0.1)


def test_a_timeout_is_a_failure() -> None:
    async def main(port: int) -> RequestResult:
        client = HttpClient(f"http://127.0.0.1:{port}")
        options = LoadOptions("m", True, 1, timeout_s=0.1)
        result = await load.send(client, BenchRequest(prompt="x"), options)
        await client.aclose()
        return result

    with socket.create_server(("127.0.0.1", 0)) as silent:
        result = asyncio.run(main(silent.getsockname()[1]))
    assert result.error == "no end within 0.1 s"


# ---------------------------------------------------------------------- figures


def test_percentiles_are_those_of_numpy() -> None:
    values = [random.Random(1).expovariate(3) for _ in range(501)]
    found = distribution(values)
    for percent in PERCENTILES:
        expected = np.percentile(values, percent) * 1000
        assert found.percentiles[f"p{percent}"] == pytest.approx(expected)
    assert found.mean == pytest.approx(statistics.fmean(values) * 1000)


def test_summary_of_known_times() -> None:
    good = RequestResult(10.0, None, [10.5, 10.7, 11.1], 11.2, prompt_tokens=7, output_tokens=4)
    other = RequestResult(10.1, None, [10.2], 12.0, prompt_tokens=3, output_tokens=1)
    bad = RequestResult(11.5, "broken", [], 11.6)
    summary = summarize([good, other, bad])
    assert summary.duration_s == pytest.approx(2.0)
    assert (summary.num_requests, summary.num_failed, summary.peak_concurrency) == (3, 1, 2)
    assert summary.output_tokens_per_s == pytest.approx(2.5)
    assert summary.total_tokens_per_s == pytest.approx(7.5)
    ms = summary.latencies_ms
    assert (ms["ttft"].minimum, ms["ttft"].maximum) == pytest.approx((100, 500))
    assert ms["tpot"].mean == pytest.approx(200)  # of the first alone
    assert (ms["itl"].minimum, ms["itl"].maximum) == pytest.approx((200, 400))
    assert ms["e2e"].mean == pytest.approx(1550)
    assert "1 x broken" in table(summary)


def test_all_failed() -> None:
    summary = summarize([RequestResult(0.0, "broken", [], 1.0)])
    assert summary.latencies_ms == {}
    assert "0 of 1 done" in table(summary)


# ---------------------------------------------------------------------- data


def test_datasets(tmp_path: Path) -> None:
    turns = [
        {"from": "system", "value": "S"}, {"from": "human", "value": "Q"},
        {"from": "gpt", "value": "A"},
    ]  # fmt: skip
    entries: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3},
        {"conversations": turns},
        {"conversations": [{"from": "gpt", "value": "A"}]},  # asks nothing
        {"prompt": "text", "output_len": 9},
    ]
    as_lines, as_array = tmp_path / "a.jsonl", tmp_path / "b.json"
    as_lines.write_text("\n".join(json.dumps(entry) for entry in entries) + "\n\n")
    as_array.write_text(json.dumps(entries))
    loaded = load_requests(as_lines, 3)
    assert loaded == load_requests(as_array, 3)
    assert sorted(request.as_text() for request in loaded) == ["S\nQ", "hi", "text"]
    by_text = {request.as_text(): request for request in loaded}
    assert by_text["hi"].output_len == 3
    assert by_text["text"].output_len == 9
    assert [m["role"] for m in by_text["S\nQ"].as_messages()] == ["system", "user"]
    assert by_text["text"].as_messages() == [{"role": "user", "content": "text"}]
    assert len(load_requests(as_lines, 7)) == 7
    orders = {
        tuple(r.as_text() for r in load_requests(as_lines, 3, seed=seed)) for seed in range(9)
    }
    assert len(orders) > 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no request"),
        ("nonsense", "neither JSON lines nor"),
        ("5\n", "entry 1: it is no object"),
        ('{"prompt": "x", "max_tokens": 0}', "max_tokens"),
        ('{"messages": ["x"]}', "messages must be objects"),
        ('{"question": "x"}', "holds no request"),
    ],
)
def test_faults_of_datasets(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(text)
    with pytest.raises(InvalidParameterError, match=message):
        load_requests(path, 1)


def test_random_prompts_share_the_prefix() -> None:
    first, second = (r.as_text().split() for r in random_requests(2, 20, prefix_len=8, seed=3))
    assert len(first) == len(second) == 20
    assert first[:8] == second[:8]
    assert first[8:] != second[8:]
    assert random_requests(2, 20, seed=3) == random_requests(2, 20, seed=3)


# ---------------------------------------------------------------------- wrong usage


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num-prompts", "0"], "--num-prompts must be"),
        (["--request-rate", "nan"], "--request-rate must be"),
        (["--base-url", "ftp://x"], "must look like"),
        (["--base-url", "http://x:99999999"], "must look like"),
        (["--json", "/no/such/folder/x.json"], "there is no folder"),
        (["--plot", "picture.jpg"], "ends with .png"),
        (["--dataset", "no-such-file"], "cannot read the dataset"),
        (["--set", "x"], "NAME=VALUE"),
    ],
)
def test_wrong_usage(
    arguments: list[str], message: str, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    where = [] if "--base-url" in arguments else ["--base-url", server.url]
    assert cli.main(["bench", "serve", *where, *arguments]) == cli.EXIT_USAGE
    assert message in capsys.readouterr().err


def test_without_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench"]) == cli.EXIT_USAGE
    assert "COMMAND" in capsys.readouterr().err
    assert cli.main(["bench", "serve", "--help"]) == 0
    assert "--request-rate" in capsys.readouterr().out


def test_a_plot_without_matplotlib_is_told_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plot.importlib.util, "find_spec", lambda name: None)
    assert importlib.util.find_spec("json") is None
    start = time.monotonic()
    assert cli.main(["bench", "serve", "--plot", "x.png"]) == cli.EXIT_ERROR
    assert "pip install 'tellin[plot]'" in capsys.readouterr().err
    assert time.monotonic() - start < 30


# ---------------------------------------------------------------------- in this process


def model_arguments(model: Path) -> list[str]:
    return ["-m", str(model), "--threads", "1", "--max-model-len", "512",
            "--set", "num_kv_blocks=512"]  # fmt: skip


def test_throughput(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, picture = tmp_path / "result.json", tmp_path / "result.png"
    sizes = ["--num-prompts", "5", "--input-len", "9", "--output-len", "4", "--prefix-len", "3"]
    command = ["bench", "throughput", *model_arguments(tiny_model), *sizes]
    assert cli.main([*command, "--json", str(target), "--plot", str(picture)]) == 0
    assert "45 read, 20 generated" in capsys.readouterr().out
    result = json.loads(target.read_text())
    assert result["output_tokens_per_s"] == pytest.approx(20 / result["duration_s"])
    assert set(result["latencies_ms"]) == {"ttft", "e2e"}
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_throughput_of_a_dataset(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data.jsonl"
    conversation = '{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}'
    data.write_text('{"prompt": "12345", "max_tokens": 1}\n' + conversation)
    command = ["bench", "throughput", *model_arguments(tiny_model), "--dataset", str(data)]
    assert cli.main([*command, "--num-prompts", "2"]) == 0
    prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    num_read = 5 + len(prompt) - len("<|im_start|>") * 2 - len("<|im_end|>") + 3
    assert f"{num_read} read, 2 generated" in capsys.readouterr().out


def test_latency(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, picture = tmp_path / "result.json", tmp_path / "result.png"
    sizes = ["--batch-size", "2", "--input-len", "8", "--output-len", "3", "--iterations", "4"]
    command = ["bench", "latency", *model_arguments(tiny_model), *sizes, "--warmups", "1"]
    assert cli.main([*command, "--json", str(target), "--plot", str(picture)]) == 0
    assert "2 x (8 read, 3 generated)" in capsys.readouterr().out
    result = json.loads(target.read_text())
    assert len(result["seconds"]) == 4
    median = result["latencies_ms"]["latency"]["percentiles"]["p50"]
    assert median == pytest.approx(1000 * statistics.median(result["seconds"]))
    assert result["output_tokens_per_s"] == pytest.approx(6000 / median)
    assert picture.read_bytes().startswith(b"\x89PNG")
