"""ASY-1: loggers of installed packages, and a logger that fails."""

from __future__ import annotations

import asyncio
import importlib.metadata
from typing import Any, ClassVar

import psutil
import pytest

from tellin.engine import stat_loggers
from tellin.engine.async_llm import AsyncLLM
from tellin.engine.stat_loggers import StatLoggerBase
from tellin.exceptions import InvalidTypeError
from tellin.sampling_params import SamplingParams
from tests.processes.conftest import MakeArgs


class Plugin(StatLoggerBase):
    made: ClassVar[list[Plugin]] = []

    def __init__(self, config: Any, engine_index: int = 0) -> None:
        self.num_tokens = 0
        Plugin.made.append(self)

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        if iteration_stats is not None:
            self.num_tokens += iteration_stats.num_generation_tokens

    def log_engine_initialized(self) -> None: ...


class Broken(Plugin):
    def log_engine_initialized(self) -> None:
        raise RuntimeError("broken logger")


def install(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Pretend that a package offers something of this module as a logger."""
    entry = importlib.metadata.EntryPoint("it", f"{__name__}:{name}", stat_loggers.PLUGIN_GROUP)
    original = importlib.metadata.entry_points
    monkeypatch.setattr(
        importlib.metadata,
        "entry_points",
        lambda **kwargs: [entry] if kwargs["group"] == entry.group else original(**kwargs),
    )


def test_asy_1_a_plugin_switches_statistics_on(
    monkeypatch: pytest.MonkeyPatch, make_args: MakeArgs
) -> None:
    install(monkeypatch, "Plugin")
    Plugin.made.clear()

    async def main() -> None:
        args = make_args(disable_log_stats=True)
        async with AsyncLLM.from_engine_args(args, multiprocess_mode=False) as engine:
            params = SamplingParams(max_tokens=4, ignore_eos=True)
            outputs = [o async for o in engine.generate("hello", params)]
            assert outputs[-1].metrics is not None
            assert engine.is_running
            assert not engine.is_stopped
            assert not await engine.is_tracing_enabled()
        assert engine.is_stopped

    asyncio.run(main())
    (plugin,) = Plugin.made
    assert plugin.num_tokens == 4


def test_asy_1_what_is_no_logger_is_refused(
    monkeypatch: pytest.MonkeyPatch, make_args: MakeArgs
) -> None:
    install(monkeypatch, "SamplingParams")
    with pytest.raises(InvalidTypeError, match="must be a subclass of"):
        AsyncLLM.from_engine_args(make_args(), multiprocess_mode=False)


def test_a_broken_logger_leaves_no_child(make_args: MakeArgs) -> None:
    before = psutil.Process().children()
    with pytest.raises(RuntimeError, match="broken logger"):
        AsyncLLM.from_engine_args(make_args(), stat_loggers=[Broken])
    assert psutil.Process().children() == before
