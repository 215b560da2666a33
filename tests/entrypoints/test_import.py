"""A good guest: fast to import, silent, and nothing heavy loaded unasked. P57, P59, promise 4."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

import tellin


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True
    )


def cpu_seconds(command: list[str]) -> float:
    """Processor time of a command, best of several: what it takes on an idle machine."""
    times = []
    for _ in range(4):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(times)


def test_p59_import_is_fast() -> None:
    assert cpu_seconds([sys.executable, "-c", "import tellin"]) < 0.3


def test_p59_version_is_fast() -> None:
    assert cpu_seconds([str(Path(sys.executable).parent / "tellin"), "--version"]) < 0.2


def test_import_loads_nothing_heavy() -> None:
    code = (
        "import sys, tellin; "
        "print([m for m in ('numpy', 'msgspec', 'tokenizers', 'jinja2', 'zmq', 'fastapi', 'tqdm', "
        "'torch', 'asyncio', 'llguidance', 'prometheus_client') if m in sys.modules])"
    )
    assert run_python(code).stdout.strip() == "[]"


def test_p57_import_is_silent_and_logs_nowhere() -> None:
    code = (
        "import logging, tellin; from tellin import SamplingParams; "
        "SamplingParams(temperature=1e-6); "
        "assert logging.getLogger().handlers == []; "
        "assert logging.getLogger('tellin').level == logging.NOTSET"
    )
    done = run_python(code)
    assert (done.stdout, done.stderr) == ("", "")


@pytest.mark.parametrize("name", tellin.__all__)
def test_every_public_name_exists(name: str) -> None:
    assert getattr(tellin, name) is not None
    assert name in dir(tellin)


def test_names_that_vllm_has_for_the_same_things() -> None:
    assert tellin.AsyncLLMEngine is tellin.AsyncLLM
    assert tellin.AsyncEngineArgs is tellin.EngineArgs
    assert tellin.TokensPrompt(prompt_token_ids=[1]) == {"prompt_token_ids": [1]}


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="nonsense"):
        tellin.nonsense  # noqa: B018
