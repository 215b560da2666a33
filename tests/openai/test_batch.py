"""``tellin run-batch``: OpenAI's batch format, resumable."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tellin.entrypoints import cli
from tests.openai.conftest import ROOT


def chat(i: int, **body: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"number {i}"}]
    return {
        "custom_id": f"id-{i}",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"messages": messages, "max_tokens": 5, "temperature": 0} | body,
    }


def write(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def command(model: Path, source: Path, target: Path) -> list[str]:
    settings = ["--max-model-len", "512", "--threads", "1", "--set", "num_kv_blocks=256"]
    return ["run-batch", "-i", str(source), "-o", str(target), "-m", str(model), *settings]


def read(path: Path) -> dict[str, Any]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({line["custom_id"] for line in lines}) == len(lines)
    return {line["custom_id"]: line for line in lines}


def test_answers_refusals_and_resuming(tiny_model: Path, tmp_path: Path) -> None:
    completion = {"custom_id": "c", "url": "/v1/completions", "body": {"prompt": "x", "n": 2}}
    lines = [
        chat(1),
        chat(2, frobnicate=1),
        chat(3, stream=True),
        completion,
        {**chat(4), "url": "/v1/nonsense"},
        {**chat(5), "method": "GET"},
        {"custom_id": "e", "url": "/v1/embeddings", "body": {"input": "x"}},
        {"custom_id": "r", "url": "/v1/responses", "body": {"input": "x", "max_output_tokens": 3}},
    ]
    source, target = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    assert cli.main(command(tiny_model, source, target)) == 1  # some were refused
    answers = read(target)
    statuses = {name: answer["response"]["status_code"] for name, answer in answers.items()}
    assert statuses == {
        "id-1": 200, "id-2": 400, "id-3": 400, "c": 200, "id-4": 404, "id-5": 400, "e": 400,
        "r": 200,
    }  # fmt: skip
    body = answers["id-1"]["response"]["body"]
    assert body["object"] == "chat.completion"
    assert body["usage"]["completion_tokens"] == 5
    assert answers["r"]["response"]["body"]["object"] == "response"
    assert "frobnicate" in answers["id-2"]["response"]["body"]["error"]["message"]

    # A line that was being written when the run was killed is asked again; others are not.
    whole = target.read_bytes()
    first_end = whole.index(b"\n") + 1
    target.write_bytes(whole[: first_end + 30])
    kept = whole[:first_end]
    cli.main(command(tiny_model, source, target))
    assert target.read_bytes().startswith(kept)
    assert read(target).keys() == answers.keys()
    assert cli.main(command(tiny_model, source, target)) == 0  # nothing is left to do


def test_scores_and_rankings(tiny_model: Path, tmp_path: Path) -> None:
    lines = [
        {"custom_id": "s", "url": "/v1/score", "body": {"text_1": "x", "text_2": ["x", "y"]}},
        {"custom_id": "r", "url": "/v1/rerank", "body": {"query": "x", "documents": ["y", "x"]}},
    ]
    source, target = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    options = ["--set", "runner=pooling"]
    assert cli.main([*command(tiny_model, source, target), *options]) == 0
    bodies = {name: answer["response"]["body"] for name, answer in read(target).items()}
    assert [item["index"] for item in bodies["s"]["data"]] == [0, 1]
    assert [item["index"] for item in bodies["r"]["results"]] == [1, 0]


def test_a_killed_run_goes_on(tiny_model: Path, tmp_path: Path) -> None:
    lines = [chat(i, max_tokens=50, ignore_eos=True) for i in range(60)]
    source, target = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    arguments = [*command(tiny_model, source, target), "--set", "max_num_seqs=2"]
    slow = ["--set", 'logits_processors=["tests.openai.slow_steps:SlowSteps"]']
    run = [sys.executable, "-m", "tellin.entrypoints.cli", *arguments, *slow]
    with subprocess.Popen(run, env=os.environ | {"PYTHONPATH": str(ROOT)}) as process:
        deadline = time.monotonic() + 60
        while not (target.exists() and target.read_bytes().count(b"\n") >= 3):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
    before = target.read_bytes()
    assert before.count(b"\n") < 60
    assert cli.main(arguments) == 0
    assert target.read_bytes().startswith(before[: before.rindex(b"\n") + 1])
    assert len(read(target)) == 60


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nonsense\n", "in.jsonl:1 is no request"),
        ('{"custom_id": "a", "url": "/v1/completions", "body": {}}\n' * 2, "occurs twice"),
        ('{"custom_id": "a"}\n', "url"),
        ("\n" + "[" * 100_000 + "\n", "in.jsonl:2 is no request"),
        ("\ufeff" + '{"custom_id": "a"}\n', "url"),  # the mark that Windows puts in front of UTF-8
    ],
)
def test_faults_of_the_input_are_told_first(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(text)
    arguments = ["run-batch", "-i", str(source), "-o", str(tmp_path / "out.jsonl")]
    assert cli.main([*arguments, "-m", "smollm2"]) == cli.EXIT_USAGE
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("target", ["/dev/zero", "."])
def test_an_output_that_cannot_be_read_again_is_refused(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """/dev/zero would be read for ever."""
    source = write(tmp_path / "in.jsonl", [chat(1)])
    assert cli.main(["run-batch", "-i", str(source), "-o", target]) == cli.EXIT_USAGE
    assert f"{target} is no regular file" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["not mine\n", "[" * 100_000 + "\n"])
def test_an_output_that_is_something_else_is_left_alone(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path / "in.jsonl", [chat(1)])
    target = tmp_path / "precious.txt"
    target.write_text(text)
    assert cli.main(["run-batch", "-i", str(source), "-o", str(target)]) == cli.EXIT_USAGE
    assert target.read_text() == text
    assert "name another output" in capsys.readouterr().err
