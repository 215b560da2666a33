"""Other people's clients, unchanged: npm's ``openai``, LangChain, curl, schemathesis.

Each runs in a process of its own. Python clients live in a virtual environment that is made once
(extra ``clients`` of this project), npm's package in a folder beside it: in pytest's cache, or in
TELLIN_TEST_CLIENTS. Node.js, npm and curl are taken from the system.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.openai.conftest import ROOT, Serve, Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SCRIPTS = Path(__file__).parent / "clients"
SCHEMATHESIS_PHASES = os.environ.get("TELLIN_SCHEMATHESIS_PHASES", "examples,fuzzing,stateful")
"""``coverage`` takes many minutes more: it tries all values of all fields systematically."""
NPM_PACKAGE = "openai@6"


def run(*command: str | Path, cwd: Path | None = None, limit_s: float = 600) -> str:
    """Standard output of a command that must succeed."""
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, capture_output=True, text=True, timeout=limit_s
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-6000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="session")
def clients_dir(pytestconfig: pytest.Config) -> Path:
    given = os.environ.get("TELLIN_TEST_CLIENTS")
    if given:
        Path(given).mkdir(parents=True, exist_ok=True)
        return Path(given)
    cache = pytestconfig.cache
    assert cache is not None
    return Path(cache.mkdir("tellin-clients"))


@pytest.fixture(scope="session")
def python(clients_dir: Path) -> Path:
    """An interpreter that has the Python clients."""
    venv = clients_dir / "venv"
    marker = venv / "installed"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = project["project"]["optional-dependencies"]["clients"]
    if not marker.exists() or marker.read_text() != "\n".join(wanted):
        run(sys.executable, "-m", "venv", "--clear", venv)
        run(venv / "bin/python", "-m", "pip", "install", "--quiet", *wanted)
        marker.write_text("\n".join(wanted))
    return venv / "bin/python"


@pytest.fixture(scope="session")
def npm_dir(clients_dir: Path) -> Path:
    """A folder whose scripts can import npm's package."""
    folder = clients_dir / "npm"
    if not (folder / "node_modules/openai").exists():
        folder.mkdir(exist_ok=True)
        (folder / "package.json").write_text('{"private": true}')
        run("npm", "install", "--no-audit", "--no-fund", NPM_PACKAGE, cwd=folder)
    return folder


def test_npm_package(server: Server, npm_dir: Path) -> None:
    script = shutil.copy(SCRIPTS / "openai_client.mjs", npm_dir)
    assert "all good" in run("node", script, server.url, cwd=npm_dir)


def test_langchain(server: Server, python: Path) -> None:
    assert "all good" in run(python, SCRIPTS / "langchain_client.py", server.url)


def test_schemathesis_finds_no_server_error(serve: Serve, python: Path) -> None:
    """Requests made from the OpenAPI document: valid ones, broken ones, sequences of them."""
    keys = ["--enable-admin", "--admin-key", "boss", "--max-model-len", "256"]
    with serve(*keys) as server:
        options = ["--checks", "not_a_server_error", "--phases", SCHEMATHESIS_PHASES]
        limits = ["--request-timeout", "60", "--max-failures", "5", "--seed", "1"]
        limits += ["--max-examples", "10", "--max-time", "80"]
        # Asleep or ending, the server rightly answers 503.
        without = ["--exclude-path-regex", "^/(sleep|ready|start_profile)$"]
        header = ["--header", "Authorization: Bearer boss"]
        command = [python.parent / "schemathesis", "run", f"{server.url}/openapi.json"]
        run(*command, *options, *limits, *without, *header, cwd=python.parent)
        assert server.http.get("/health").status_code == 200
        assert not [line for line in server.log if "Traceback" in line]


def curl(server: Server, path: str, *arguments: str, body: object = None) -> str:
    data = [] if body is None else ["--json", json.dumps(body)]
    return run("curl", "--silent", "--show-error", *data, *arguments, server.url + path)


def test_curl(server: Server) -> None:
    messages = [{"role": "user", "content": "Hello!"}]
    body = {"messages": messages, "max_tokens": 5, "temperature": 0}
    whole = json.loads(curl(server, "/v1/chat/completions", body=body))
    text = whole["choices"][0]["message"]["content"]
    lines = curl(server, "/v1/chat/completions", "-N", body=body | {"stream": True}).split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == text
    for version in ("--http1.0", "--http1.1"):
        assert json.loads(curl(server, "/v1/models", version))["data"][0]["id"] == "tiny"
    status = ["-o", os.devnull, "-w", "%{http_code}"]
    assert curl(server, "/v1/nonsense", *status) == "404"
    assert curl(server, "/v1/completions", *status, body={"prompt": "x", "n": 0}) == "400"
    # curl waits for "100 Continue" before it sends a large body.
    large = {"prompt": "x" * 1_500_000, "max_tokens": 1}
    done = subprocess.run(
        ["curl", "-s", "-H", "Content-Type: application/json", "-H", "Expect: 100-continue",
         "--data-binary", "@-", f"{server.url}/v1/completions"],
        input=json.dumps(large), capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert json.loads(done.stdout)["error"]["code"] == "context_length_exceeded"
