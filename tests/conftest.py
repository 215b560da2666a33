"""Fixtures shared by all areas: real models from the model store, and homes that are thrown away.

A test that needs a real model asks for `smollm2_path`, `gemma3_path` or `minilm_path`: the model is
pulled into TELLIN_HOME the first time and found there ever after, so no test skips for want of a
file. The scheduler's invariants are checked after every step of every engine that a test builds.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

os.environ.setdefault("TELLIN_CHECK_INVARIANTS", "1")


def pulled(name: str) -> Path:
    """Path of a model of the store; downloads it if TELLIN_HOME does not hold it yet."""
    from tellin.loading import resolve_model
    from tellin.settings import Settings

    return resolve_model(name, Settings.from_environ(), download=True)


def pytest_configure() -> None:
    """A shell's background job ignores Ctrl-C, and so would the programs that tests send it to."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct, one GGUF file in Q4_1 (90 MB)."""
    return pulled("smollm2")


@pytest.fixture(scope="session")
def gemma3_path() -> Path:
    """Gemma 3 270M, one GGUF file in Q4_K_M (250 MB): for slow tests."""
    return pulled("gemma3-270m")


@pytest.fixture(scope="session")
def minilm_path() -> Path:
    """all-MiniLM-L6-v2, a safetensors folder (90 MB): for slow tests."""
    return pulled("minilm")


@pytest.fixture
def tellin_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty TELLIN_HOME of this test's own."""
    home = tmp_path / "tellin-home"
    monkeypatch.setenv("TELLIN_HOME", str(home))
    return home
