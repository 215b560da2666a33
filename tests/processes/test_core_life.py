"""How a core in a process of its own begins and ends, seen from its client (3.5, 3.7, 4.12)."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

import tellin
from tellin.core.core_proc import engine_identity
from tellin.engine.async_llm import AsyncLLM
from tellin.engine.llm_engine import LLMEngine
from tellin.engine.mp_client import SyncMPClient
from tellin.exceptions import EngineDeadError, EngineStartError, InvalidTypeError
from tellin.sampling_params import RequestOutputKind, SamplingParams
from tests.processes.conftest import PATIENCE_S, MakeArgs, wait_until
from tests.processes.test_clients import core_processes


def test_cli_10_identity_is_the_index() -> None:
    """CLI-10: two bytes, little endian."""
    assert [engine_identity(index) for index in (0, 1, 258)] == [b"\0\0", b"\1\0", b"\2\1"]


def test_cli_20_a_core_of_another_version_is_refused(
    make_args: MakeArgs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CLI-20: what it would send could mean something else."""
    before = core_processes()
    version = tellin.__version__
    monkeypatch.setattr(tellin, "__version__", "0.0.7")
    with pytest.raises(EngineStartError, match=rf"runs tellin {version} but .* 0\.0\.7"):
        LLMEngine.from_engine_args(make_args(), enable_multiprocessing=True)
    assert core_processes() == before


def test_a_core_that_is_not_ready_in_time_is_given_up(
    make_args: MakeArgs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """3.4 step 5: the message names the variable to raise; the child is ended."""
    before = core_processes()
    monkeypatch.setenv("TELLIN_ENGINE_READY_TIMEOUT_S", "0")
    with pytest.raises(EngineStartError, match="TELLIN_ENGINE_READY_TIMEOUT_S"):
        LLMEngine.from_engine_args(make_args(), enable_multiprocessing=True)
    assert core_processes() == before


def test_cor_90_sigterm_aborts_what_runs_and_the_end_is_told(make_args: MakeArgs) -> None:
    """COR-90, COR-91, CLI-40, CLI-41: last outputs arrive; an exit with code 0 is an end too."""
    args = make_args(max_model_len=20_000, num_kv_blocks=1300)
    params = SamplingParams(
        temperature=0, max_tokens=16_000, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )
    with LLMEngine.from_engine_args(args, enable_multiprocessing=True) as engine:
        client = engine.engine_core
        assert isinstance(client, SyncMPClient)
        engine.add_request("r", "hello", params)
        assert engine.step(PATIENCE_S)
        os.kill(client.core_pid, signal.SIGTERM)
        reason = None
        while engine.has_unfinished_requests():
            for output in engine.step(PATIENCE_S):
                reason = output.outputs[0].finish_reason  # type: ignore[union-attr]
        assert reason == "abort"
        wait_until(lambda: client.engine_dead)
        with pytest.raises(EngineDeadError, match="exit code 0"):
            engine.add_request("late", "hello", params)
        with pytest.raises(EngineDeadError, match="exit code 0"):
            engine.step(PATIENCE_S)
        engine.abort_request("r")  # CLI-32: nothing to tell a core that is gone


def test_eng_84_callables_travel_only_when_that_was_allowed(make_args: MakeArgs) -> None:
    """ENG-84, WIRE-10: the error says how to allow it; the engine goes on."""
    with LLMEngine.from_engine_args(make_args(), enable_multiprocessing=True) as engine:
        for call in (engine.apply_model, engine.collective_rpc):
            with pytest.raises(InvalidTypeError, match="TELLIN_ALLOW_INSECURE_SERIALIZATION=1"):
                call(repr)
        assert engine.is_sleeping() is False


def test_eng_60_levels_of_an_async_engine(
    make_args: MakeArgs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of `LLMEngine`: after levels 2 and 1 the weights are still away, and loggers hear so."""
    levels: list[int] = []

    async def naps() -> None:
        async with AsyncLLM.from_engine_args(make_args(disable_log_stats=False)) as engine:
            assert engine.logger_manager is not None
            monkeypatch.setattr(
                engine.logger_manager, "record_sleep_state", lambda _, level: levels.append(level)
            )
            for level in (1, 2, 1):
                await engine.sleep(level)
            await engine.wake_up(["weights"])
            await engine.wake_up()
            await engine.sleep(1)
            await engine.wake_up()

    asyncio.run(naps())
    assert levels == [1, 2, 2, 0, 1, 0]
