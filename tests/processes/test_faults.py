"""A core that dies, stops or hangs: nobody waits for ever (COR-83, CLI-33, CLI-41, P29)."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import threading
import time

import pytest

from tellin.engine.async_llm import AsyncLLM
from tellin.engine.llm_engine import LLMEngine
from tellin.engine.mp_client import AsyncMPClient, SyncMPClient
from tellin.exceptions import (
    DuplicateRequestError,
    EngineDeadError,
    EngineOverloadedError,
    RequestError,
    RequestTimeoutError,
)
from tellin.sampling_params import RequestOutputKind, SamplingParams
from tests.processes.conftest import MakeArgs

LONG = SamplingParams(
    temperature=0, max_tokens=1500, ignore_eos=True, output_kind=RequestOutputKind.DELTA
)
SHORT = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
LIMIT_S = 2.0


def kill_at(engine: LLMEngine, delay_s: float) -> None:
    """Kill the core ``delay_s`` from now while this thread works with it; all calls must fail."""
    assert isinstance(engine.engine_core, SyncMPClient)
    pid = engine.engine_core.core_pid
    killed_at = [0.0]

    def kill() -> None:
        os.kill(pid, signal.SIGKILL)
        killed_at[0] = time.monotonic()

    timer = threading.Timer(delay_s, kill)
    timer.start()
    with pytest.raises(EngineDeadError, match="create a new engine"):
        work_for_ever(engine)
    timer.join()
    assert time.monotonic() - killed_at[0] < LIMIT_S
    with pytest.raises(EngineDeadError):
        step_until_it_fails(engine)
    for call in (engine.step, engine.is_sleeping, lambda: engine.add_request("n", "x", SHORT)):
        with pytest.raises(EngineDeadError):
            call()
    engine.abort_request("0")  # silently ignored


def work_for_ever(engine: LLMEngine) -> None:
    for number in itertools.count():
        engine.add_request(str(number), "hello", LONG)
        engine.step()
        engine.is_sleeping()
        engine.step()


def step_until_it_fails(engine: LLMEngine) -> None:
    for _ in range(10_000):  # what came before the end is still handed out
        engine.step()


@pytest.mark.parametrize("moment", range(4))
def test_a_killed_core_fails_every_call_within_two_seconds(
    moment: int, make_args: MakeArgs
) -> None:
    with LLMEngine.from_engine_args(make_args(), enable_multiprocessing=True) as engine:
        kill_at(engine, random.Random(moment).uniform(0, 0.3))


@pytest.mark.slow
@pytest.mark.parametrize("moment", range(50))
def test_fault_injection_kills_at_fifty_moments(moment: int, make_args: MakeArgs) -> None:
    with LLMEngine.from_engine_args(make_args(), enable_multiprocessing=True) as engine:
        kill_at(engine, random.Random(1000 + moment).uniform(0, 0.5))


def test_a_blocked_get_output_wakes_up(make_args: MakeArgs) -> None:
    """CLI-33: idle core, caller blocked without a timeout."""
    with LLMEngine.from_engine_args(make_args(), enable_multiprocessing=True) as engine:
        assert isinstance(engine.engine_core, SyncMPClient)
        threading.Timer(0.2, os.kill, (engine.engine_core.core_pid, signal.SIGKILL)).start()
        started = time.monotonic()
        with pytest.raises(EngineDeadError):
            engine.step()
        assert time.monotonic() - started < 0.2 + LIMIT_S


def test_killed_core_ends_streams_and_pending_calls(make_args: MakeArgs) -> None:
    async def main() -> None:
        async with AsyncLLM.from_engine_args(make_args()) as engine:
            assert isinstance(engine.engine_core, AsyncMPClient)

            async def consume(i: int) -> str:
                try:
                    async for _ in engine.generate(f"hello {i}", LONG):
                        pass
                except EngineDeadError:
                    return "dead"
                return "done"

            streams = [asyncio.create_task(consume(i)) for i in range(8)]
            await asyncio.sleep(0.2)
            os.kill(engine.engine_core.core_pid, signal.SIGSTOP)  # so that the call stays pending
            call = asyncio.create_task(engine.is_sleeping())
            await asyncio.sleep(0.05)
            os.kill(engine.engine_core.core_pid, signal.SIGKILL)
            async with asyncio.timeout(LIMIT_S):
                assert await asyncio.gather(*streams) == ["dead"] * 8
                with pytest.raises(EngineDeadError):
                    await call
            assert engine.errored
            with pytest.raises(EngineDeadError):
                await engine.check_health()
            with pytest.raises(EngineDeadError):
                await anext(engine.generate("x", SHORT))

    asyncio.run(main())


def test_p29_health_means_progress(make_args: MakeArgs) -> None:
    """A stopped core answers nothing: unhealthy after the limit, healthy when it goes on."""

    async def main() -> None:
        async with AsyncLLM.from_engine_args(make_args()) as engine:
            assert isinstance(engine.engine_core, AsyncMPClient)
            await engine.check_health(max_idle_s=0.0)  # idle is healthy
            stream = engine.generate("hello", LONG)
            await anext(stream)
            os.kill(engine.engine_core.core_pid, signal.SIGSTOP)
            await asyncio.sleep(0.6)
            with pytest.raises(EngineDeadError, match="no step for"):
                await engine.check_health(max_idle_s=0.5)
            os.kill(engine.engine_core.core_pid, signal.SIGCONT)
            await asyncio.sleep(0.3)
            await engine.check_health(max_idle_s=0.5)
            await stream.aclose()
            started = time.monotonic()
        # its last outputs were received, so the core did not wait for anybody to take them
        assert time.monotonic() - started < 3

    asyncio.run(main())


@pytest.mark.parametrize("multiprocess", [True, False])
def test_asy_21_cancelling_a_consumer_frees_the_request(
    multiprocess: bool, make_args: MakeArgs
) -> None:
    async def main() -> None:
        args = make_args(disable_log_stats=False)
        async with AsyncLLM.from_engine_args(args, multiprocess_mode=multiprocess) as engine:

            async def consume() -> None:
                async for _ in engine.generate("hello", LONG):
                    pass

            tasks = [asyncio.create_task(consume()) for _ in range(5)]
            await asyncio.sleep(0.1)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            assert engine.output_processor.get_num_unfinished_requests() == 0
            assert await engine.reset_prefix_cache()  # succeeds only if no block is in use
            assert [o async for o in engine.generate("hi", SHORT)][-1].finished

    asyncio.run(main())


@pytest.mark.parametrize("multiprocess", [True, False])
def test_deadline_overload_and_bad_requests_hurt_nobody(
    multiprocess: bool, make_args: MakeArgs
) -> None:
    async def main() -> None:
        args = make_args(max_num_seqs=2, max_num_queued_reqs=1)
        async with AsyncLLM.from_engine_args(args, multiprocess_mode=multiprocess) as engine:
            first = engine.generate("hello", LONG, "first")
            await anext(first)
            with pytest.raises(DuplicateRequestError, match="'first'"):
                await anext(engine.generate("hello", SHORT, "first"))
            with pytest.raises(RequestTimeoutError, match=r"deadline of 0\.05 s"):
                async for _ in engine.generate("slow", LONG, timeout_s=0.05):
                    pass
            others = [engine.generate(f"other {i}", LONG) for i in range(2)]
            tasks = [asyncio.create_task(anext(o)) for o in others]
            await asyncio.sleep(0.05)
            with pytest.raises(EngineOverloadedError, match="3 live sequences of at most 3"):
                await anext(engine.generate("one too many", SHORT))
            await first.aclose()
            with pytest.raises(RequestError):
                await anext(engine.generate("", SHORT))
            await asyncio.gather(*tasks)
            for other in others:
                await other.aclose()
            assert [o async for o in engine.generate("hi", SHORT)][-1].finished

    asyncio.run(main())


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_pause_and_resume(mode: str, make_args: MakeArgs) -> None:
    """TYP-25, COR-46: what becomes of a running request when the engine is paused."""

    async def main() -> None:
        async with AsyncLLM.from_engine_args(make_args(), multiprocess_mode=False) as engine:
            params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
            reference = [o async for o in engine.generate("hello", params)][-1]
            stream = engine.generate("hello", params)
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
            await asyncio.sleep(0.2)
            pieces += [o async for o in slow]
            assert len(pieces) < len(fast)
            ids = [[t for o in outs for t in o.outputs[0].token_ids] for outs in (pieces, fast)]
            assert ids[0] == ids[1]
            assert len(ids[0]) == 200
            assert "".join(o.text for o in pieces) == "".join(o.text for o in fast)

    asyncio.run(main())


def test_a_thousand_concurrent_streams(make_args: MakeArgs) -> None:
    async def main() -> None:
        async with AsyncLLM.from_engine_args(make_args(), multiprocess_mode=False) as engine:

            async def one(i: int) -> list[int]:
                outputs = [o async for o in engine.generate(f"hello {i % 10}", SHORT)]
                return outputs[-1].outputs[0].token_ids

            results = await asyncio.gather(*(one(i) for i in range(1000)))
            assert all(r == results[i % 10] for i, r in enumerate(results))
            assert engine.output_processor.get_num_unfinished_requests() == 0

    asyncio.run(main())
