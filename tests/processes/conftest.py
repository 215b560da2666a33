"""A model that starts in a moment, for tests of processes, threads and life cycles."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.synthetic import SIZES, write_llama
from tellin.config import EngineArgs

MakeArgs = Callable[..., EngineArgs]

PATIENCE_S = 60.0
"""What may take a moment is waited for that long, for the sake of loaded machines."""


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it never became true"
        time.sleep(0.01)


async def wait_until_async(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it never became true"
        await asyncio.sleep(0.01)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random-weight Llama of a few hundred kilobytes with a byte-level tokenizer.

    Its context is long, so that a request can outlast whatever a loaded machine does meanwhile.
    """
    shape = dataclasses.replace(SIZES["tiny"], max_position_embeddings=1 << 16)
    return write_llama(tmp_path_factory.mktemp("models") / "tiny.gguf", shape, "q8_0")


@pytest.fixture(scope="session")
def make_args(tiny_model: Path) -> MakeArgs:
    """Engine arguments for the tiny model; keyword arguments override."""

    def make(**changes: object) -> EngineArgs:
        fields: dict[str, object] = {
            "model": str(tiny_model),
            "max_model_len": 2048,
            "num_kv_blocks": 1024,
            "num_threads": 1,
        }
        return EngineArgs(**(fields | changes))  # type: ignore[arg-type]

    return make
