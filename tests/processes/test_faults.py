"""A core that dies, stops or hangs: nobody waits for ever (COR-83, CLI-33, CLI-41, P29)."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from tellin.config import EngineArgs
from tellin.engine.async_llm import AsyncLLM
from tellin.engine.core_process import CoreProcess
from tellin.engine.llm_engine import LLMEngine
from tellin.engine.mp_client import AsyncMPClient, SyncMPClient
from tellin.exceptions import (
    DuplicateRequestError,
    EngineDeadError,
    EngineOverloadedError,
    EngineStartError,
    InvalidParameterError,
    RequestError,
    RequestTimeoutError,
)
from tellin.sampling_params import RequestOutputKind, SamplingParams
from tests.processes.conftest import PATIENCE_S, MakeArgs, wait_until, wait_until_async
from tests.processes.test_accounting import value

LONG = SamplingParams(
    temperature=0, max_tokens=16_000, ignore_eos=True, output_kind=RequestOutputKind.DELTA
)
"""Nobody sees its end."""
SHORT = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
LIMIT_S = 2.0
"""How soon everybody must know of a dead core; asserted where the machine is ours alone."""


@pytest.fixture
def args(make_args: MakeArgs) -> EngineArgs:
    return make_args(max_model_len=20_000, num_kv_blocks=1300)


class Killer:
    """Kills a core some time from now, and knows when."""

    def __init__(self, engine: LLMEngine | AsyncLLM, delay_s: float) -> None:
        client = engine.engine_core
        assert isinstance(client, SyncMPClient | AsyncMPClient)
        self._pid = client.core_pid
        self._killed_at = float("inf")
        threading.Timer(delay_s, self._kill).start()

    def _kill(self) -> None:
        os.kill(self._pid, signal.SIGKILL)
        self._killed_at = time.monotonic()

    def seconds_since(self) -> float:
        wait_until(lambda: self._killed_at < float("inf"))
        return time.monotonic() - self._killed_at


def kill_sync(args: EngineArgs, delay_s: float) -> float:
    """Kill the core of an engine at work; all its calls must fail. Seconds until the first did."""
    with LLMEngine.from_engine_args(args, enable_multiprocessing=True) as engine:
        killer = Killer(engine, delay_s)
        with pytest.raises(EngineDeadError, match="create a new engine"):
            work_for_ever(engine)
        seconds = killer.seconds_since()
        with pytest.raises(EngineDeadError):
            step_until_it_fails(engine)
        for call in (engine.step, engine.is_sleeping, lambda: engine.add_request("n", "x", SHORT)):
            with pytest.raises(EngineDeadError):
                call()
        engine.abort_request("0")  # silently ignored
        return seconds


def work_for_ever(engine: LLMEngine) -> None:
    for number in itertools.count():
        engine.add_request(str(number), "hello", SHORT if number % 5 else LONG)
        engine.step()
        engine.is_sleeping()
        engine.step()


def step_until_it_fails(engine: LLMEngine) -> None:
    for _ in range(10_000):  # what came before the end is still handed out
        engine.step()


async def kill_async(args: EngineArgs, delay_s: float) -> float:
    """The same with eight streams and a caller of control calls: seconds until the last knew."""
    async with AsyncLLM.from_engine_args(args) as engine:

        async def read(number: int) -> None:
            while True:
                async for _ in engine.generate(f"hello {number}", LONG if number % 2 else SHORT):
                    pass

        async def call() -> None:
            while True:
                await engine.is_sleeping()

        killer = Killer(engine, delay_s)
        tasks = [asyncio.create_task(read(number)) for number in range(8)]
        results = await asyncio.gather(*tasks, call(), return_exceptions=True)
        seconds = killer.seconds_since()
        assert [type(result) for result in results] == [EngineDeadError] * 9, results
        assert engine.errored
        assert str(engine.dead_error).count("the engine core died") == 1
        with pytest.raises(EngineDeadError):
            await engine.check_health()
        with pytest.raises(EngineDeadError):
            await anext(engine.generate("x", SHORT))
        return seconds


def kill(args: EngineArgs, moment: int, longest_s: float) -> float:
    delay_s = random.Random(moment).uniform(0, longest_s)
    return asyncio.run(kill_async(args, delay_s)) if moment % 2 else kill_sync(args, delay_s)


@pytest.mark.parametrize("moment", range(4))
def test_a_killed_core_fails_every_call(moment: int, args: EngineArgs) -> None:
    """ENG-22, ENG-35, CLI-30, CLI-32, CLI-46."""
    assert kill(args, moment, 0.3) < PATIENCE_S


@pytest.mark.slow
def test_fault_injection_kills_at_fifty_moments(
    args: EngineArgs, record_property: Callable[[str, object], None]
) -> None:
    """Blocked `get_output`, control calls and streams: all know within two seconds."""
    seconds = [kill(args, 1000 + moment, 0.6) for moment in range(50)]
    record_property("seconds", [round(s, 4) for s in seconds])
    print(f"50 kills: median {statistics.median(seconds):.4f} s, slowest {max(seconds):.4f} s")
    assert max(seconds) < LIMIT_S


def test_a_blocked_get_output_wakes_up(args: EngineArgs) -> None:
    """CLI-33: idle core, caller blocked without a timeout."""
    with LLMEngine.from_engine_args(args, enable_multiprocessing=True) as engine:
        killer = Killer(engine, 0.2)
        with pytest.raises(EngineDeadError):
            engine.step()
        assert killer.seconds_since() < PATIENCE_S


def test_killed_core_ends_streams_and_pending_calls(args: EngineArgs) -> None:
    async def main() -> None:
        async with AsyncLLM.from_engine_args(args) as engine:
            assert isinstance(engine.engine_core, AsyncMPClient)
            begun = asyncio.Event()

            async def consume(i: int) -> str:
                try:
                    async for _ in engine.generate(f"hello {i}", LONG):
                        begun.set()
                except EngineDeadError:
                    return "dead"
                return "done"

            streams = [asyncio.create_task(consume(i)) for i in range(8)]
            await begun.wait()
            os.kill(engine.engine_core.core_pid, signal.SIGSTOP)  # so that the call stays pending
            call = asyncio.create_task(engine.is_sleeping())
            await asyncio.sleep(0.05)
            assert not call.done()
            os.kill(engine.engine_core.core_pid, signal.SIGKILL)
            async with asyncio.timeout(PATIENCE_S):
                assert await asyncio.gather(*streams) == ["dead"] * 8
                with pytest.raises(EngineDeadError):
                    await call

    asyncio.run(main())


def leave(worker: object) -> None:
    sys.exit(3)


def test_a_core_whose_thread_is_left_fails_every_call(args: EngineArgs) -> None:
    """CLI-31, CLI-40: a callable that exits ends the core's thread, and nobody waits."""

    async def main() -> None:
        engine = AsyncLLM.from_engine_args(args, multiprocess_mode=False)
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(EngineDeadError, match=r"SystemExit\(3\)"):
                await engine.collective_rpc(leave)
            with pytest.raises(EngineDeadError):
                await engine.is_sleeping()
        assert engine.errored
        engine.shutdown()

    asyncio.run(main())


def test_a_core_killed_while_it_loads_fails_the_start(
    args: EngineArgs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CLI-21: the reason is told, and nothing is waited for."""
    start = CoreProcess.__init__

    def start_and_kill(self: CoreProcess, *given: Any) -> None:
        start(self, *given)
        os.kill(self.pid, signal.SIGKILL)

    monkeypatch.setattr(CoreProcess, "__init__", start_and_kill)
    with pytest.raises(EngineStartError, match="ended while starting, exit code -9"):
        LLMEngine.from_engine_args(args, enable_multiprocessing=True)


def test_p29_health_means_progress(args: EngineArgs) -> None:
    """A stopped core answers nothing: unhealthy after the limit, healthy when it goes on."""

    async def main() -> None:
        async with AsyncLLM.from_engine_args(args) as engine:
            assert isinstance(engine.engine_core, AsyncMPClient)
            process = engine.engine_core._resources.process
            assert process is not None
            await engine.check_health(max_idle_s=0.0)  # idle is healthy
            stream = engine.generate("hello", LONG)
            await anext(stream)
            os.kill(process.pid, signal.SIGSTOP)

            async def is_healthy() -> bool:
                try:
                    await engine.check_health(max_idle_s=0.5)
                except EngineDeadError as error:
                    if "no step for" not in str(error):
                        raise
                    return False
                return True

            deadline = time.monotonic() + PATIENCE_S
            while await is_healthy():
                assert time.monotonic() < deadline
                await asyncio.sleep(0.05)
            os.kill(process.pid, signal.SIGCONT)
            while not await is_healthy():
                assert time.monotonic() < deadline
                await asyncio.sleep(0.05)
            await stream.aclose()
        # its last outputs were received, so it did not wait for anybody to take them
        assert process.exit_code == 0, "it ended in good order, without being killed"

    asyncio.run(main())


@pytest.mark.parametrize("multiprocess", [True, False])
def test_asy_21_cancelling_a_consumer_frees_the_request(
    multiprocess: bool, args: EngineArgs
) -> None:
    async def main() -> None:
        async with AsyncLLM.from_engine_args(args, multiprocess_mode=multiprocess) as engine:
            begun = asyncio.Event()

            async def consume() -> None:
                async for _ in engine.generate("hello", LONG):
                    begun.set()

            tasks = [asyncio.create_task(consume()) for _ in range(5)]
            await begun.wait()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            assert all(task.cancelled() for task in tasks)
            assert engine.output_processor.get_num_unfinished_requests() == 0
            assert await engine.reset_prefix_cache()  # succeeds only if no block is in use
            assert [o async for o in engine.generate("hi", SHORT)][-1].finished

    asyncio.run(main())


@pytest.mark.parametrize("multiprocess", [True, False])
def test_deadline_overload_and_bad_requests_hurt_nobody(
    multiprocess: bool, make_args: MakeArgs
) -> None:
    async def main() -> None:
        args = make_args(
            max_num_seqs=2, max_num_queued_reqs=1, max_model_len=20_000, num_kv_blocks=1300
        )
        async with AsyncLLM.from_engine_args(args, multiprocess_mode=multiprocess) as engine:
            first = engine.generate("hello", LONG, "first")
            await anext(first)
            with pytest.raises(DuplicateRequestError, match="'first'"):
                await anext(engine.generate("hello", SHORT, "first"))
            with pytest.raises(RequestTimeoutError, match=r"deadline of 0\.05 s"):
                async for _ in engine.generate("slow", LONG, timeout_s=0.05):
                    pass
            await engine.pause_generation(mode="keep")  # now nothing can end by itself
            others = [engine.generate(f"other {i}", LONG) for i in range(2)]
            tasks = [asyncio.create_task(anext(o)) for o in others]
            await wait_until_async(
                lambda: engine.output_processor.get_num_unfinished_requests() == 3
            )
            with pytest.raises(EngineOverloadedError, match="3 live sequences of at most 3"):
                await anext(engine.generate("one too many", SHORT))
            await engine.resume_generation()
            await first.aclose()
            with pytest.raises(RequestError):
                await anext(engine.generate("", SHORT))
            await asyncio.gather(*tasks)
            for other in others:
                await other.aclose()
            assert [o async for o in engine.generate("hi", SHORT)][-1].finished

    asyncio.run(main())


@pytest.mark.parametrize("timeout_s", ["1", float("nan"), float("inf"), -1.0, True])
def test_a_deadline_that_is_none_is_refused_before_anything_is_queued(
    timeout_s: Any, args: EngineArgs
) -> None:
    async def main() -> None:
        async with AsyncLLM.from_engine_args(args, multiprocess_mode=False) as engine:
            with pytest.raises(InvalidParameterError, match="timeout_s must be"):
                await anext(engine.generate("hello", LONG, "x", timeout_s=timeout_s))
            assert engine.output_processor.get_num_unfinished_requests() == 0
            assert [o async for o in engine.generate("hello", SHORT, "x")][-1].finished

    asyncio.run(main())


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_pause_and_resume(mode: str, args: EngineArgs) -> None:
    """TYP-25, COR-46: what becomes of a running request when the engine is paused."""

    async def main() -> None:
        async with AsyncLLM.from_engine_args(args, multiprocess_mode=False) as engine:
            params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
            reference = [o async for o in engine.generate("hello", params)][-1]
            stream = engine.generate("hello", LONG if mode == "abort" else params)
            await anext(stream)
            await engine.pause_generation(mode=mode, clear_cache=mode != "keep")
            assert await engine.is_paused()
            late = asyncio.create_task(anext(engine.generate("late", SHORT)))
            await asyncio.sleep(0.05)
            assert not late.done()  # queued
            await engine.resume_generation()
            last = [o async for o in stream][-1]
            assert (await late).request_id
            if mode == "abort":
                assert last.outputs[0].finish_reason == "abort"
            else:
                assert last.outputs[0].finish_reason == "length"
                assert last.outputs[0].token_ids == reference.outputs[0].token_ids

    asyncio.run(main())


def test_a_slow_reader_does_not_slow_the_others(make_args: MakeArgs) -> None:
    """OUT-26: unread deltas are merged; nothing is lost, nobody waits."""

    async def main() -> None:
        async with AsyncLLM.from_engine_args(make_args(), multiprocess_mode=False) as engine:
            params = SamplingParams(
                temperature=0, max_tokens=200, ignore_eos=True, output_kind=RequestOutputKind.DELTA
            )
            slow = engine.generate("same prompt", params)
            pieces = [await anext(slow)]
            fast = [o async for o in engine.generate("same prompt", params)]
            # the slow one began earlier, so its last delta is there too, merged with all before
            pieces += [o async for o in slow]
            assert len(pieces) <= 2
            ids = [[t for o in outs for t in o.outputs[0].token_ids] for outs in (pieces, fast)]
            assert ids[0] == ids[1]
            assert len(ids[0]) == 200
            assert "".join(o.text for o in pieces) == "".join(o.text for o in fast)

    asyncio.run(main())


def test_a_thousand_concurrent_streams(make_args: MakeArgs) -> None:
    """All get what they ask for; afterwards the gauges are at zero and every stream was counted."""

    async def main() -> None:
        args = make_args(disable_log_stats=False)
        async with AsyncLLM.from_engine_args(args, multiprocess_mode=False) as engine:

            async def one(i: int) -> list[int]:
                outputs = [o async for o in engine.generate(f"hello {i % 10}", SHORT)]
                return outputs[-1].outputs[0].token_ids

            results = await asyncio.gather(*(one(i) for i in range(1000)))
            assert all(r == results[i % 10] for i, r in enumerate(results))
            assert engine.output_processor.get_num_unfinished_requests() == 0
            for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
                await wait_until_async(lambda name=gauge: value(engine.get_metrics(), name) == 0)
            metrics = engine.get_metrics()
            assert value(metrics, "request_success", finished_reason="length") == 1000
            assert value(metrics, "generation_tokens") == 5000

    asyncio.run(main())
