"""What lies in ``deploy/`` speaks of metrics and options that exist."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from tellin.entrypoints import cli
from tests.openai.conftest import Server

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
SUFFIXES = ("_bucket", "_count", "_sum")


@pytest.mark.parametrize("name", ["grafana-dashboard.json", "prometheus-alerts.yml"])
def test_metrics_that_are_named_exist(server: Server, name: str) -> None:
    server.http.get("/health")
    known = set(re.findall(r"^# TYPE (\S+)", server.http.get("/metrics").text, re.MULTILINE))
    text = (DEPLOY / name).read_text()
    named = set(re.findall(r"tellin:[a-z0-9_]+", text))
    assert len(named) > 5
    for metric in named:
        base = next((metric.removesuffix(s) for s in SUFFIXES if metric.endswith(s)), metric)
        assert base in known or metric in known, metric


def test_dashboard_is_whole() -> None:
    dashboard = json.loads((DEPLOY / "grafana-dashboard.json").read_text())
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids)) > 10


@pytest.mark.parametrize("name", ["tellin.service", "Dockerfile"])
def test_options_that_are_used_exist(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = (DEPLOY / name).read_text().replace("\\\n#", "")
    cli.main(["serve", "--help"])
    known = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
    lines = [line for line in text.splitlines() if "serve smollm2" in line or '"serve"' in line]
    assert lines
    for line in lines:
        words = shlex.split(re.sub(r"[#,\[\]]", " ", line))
        options = {w for w in words[words.index("serve") :] if w.startswith("--")}
        assert options <= known
