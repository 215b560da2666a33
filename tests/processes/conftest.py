"""A model that starts in a moment, for tests of processes, threads and life cycles."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.synthetic import SIZES, write_llama
from tellin.config import EngineArgs

MakeArgs = Callable[..., EngineArgs]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random-weight Llama of a few hundred kilobytes with a byte-level tokenizer."""
    return write_llama(tmp_path_factory.mktemp("models") / "tiny.gguf", SIZES["tiny"], "q8_0")


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
