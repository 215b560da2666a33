"""``tellin embed`` with a real model."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from tellin.entrypoints import cli

TEXTS = ["A kitten lay on a rug.", "Interest rates rose.", "Ein Satz über Brot."]


def embed(*arguments: str, model: Path) -> int:
    return cli.main(["embed", "-m", str(model), *arguments])


def test_one_line_of_json_per_text(minilm_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert embed(*TEXTS, model=minilm_path) == 0
    captured = capsys.readouterr()
    lines = [json.loads(line) for line in captured.out.splitlines()]
    assert [line["text"] for line in lines] == TEXTS
    assert all(len(line["embedding"]) == 384 for line in lines)
    assert captured.err == ""


def test_ranks_lines_of_standard_input(
    minilm_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join([*TEXTS[::-1], "", " "])))
    assert embed("--query", "A cat sat on the mat.", model=minilm_path) == 0
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == 3
    assert lines[0][1] == TEXTS[0]
    scores = [float(score) for score, _ in lines]
    assert scores == sorted(scores, reverse=True)


def test_long_texts(minilm_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert embed("word " * 400, model=minilm_path) == cli.EXIT_ERROR
    assert "256" in capsys.readouterr().err
    assert embed("--truncate", "-1", "word " * 400, model=minilm_path) == 0
    assert embed("--truncate", "999", "word", model=minilm_path) == cli.EXIT_USAGE
    assert embed("-", "-", model=minilm_path) == cli.EXIT_USAGE
