"""Life cycles in every mode: memory, threads, children, files, signals, threads of the user's."""

from __future__ import annotations

import asyncio
import gc
import signal
import threading
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from tellin.engine.async_llm import AsyncLLM
from tellin.engine.llm_engine import LLMEngine
from tellin.sampling_params import RequestOutputKind, SamplingParams
from tests.processes.conftest import MakeArgs

PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def use_sync(args: Any, multiprocess: bool, shut_down: bool) -> list[int]:
    engine = LLMEngine.from_engine_args(args, enable_multiprocessing=multiprocess)
    engine.add_request("x", "hello", PARAMS)
    outputs: list[Any] = []
    while engine.has_unfinished_requests():
        outputs += engine.step(timeout=20)
    if shut_down:
        engine.shutdown()
    return list(outputs[-1].outputs[0].token_ids)


async def use_async(args: Any, multiprocess: bool, shut_down: bool) -> list[int]:
    engine = AsyncLLM.from_engine_args(args, multiprocess_mode=multiprocess)
    outputs = [output async for output in engine.generate("hello", PARAMS)]
    if shut_down:
        await asyncio.to_thread(engine.shutdown)
    return list(outputs[-1].outputs[0].token_ids)


USES: dict[str, Callable[[Any, bool], list[int]]] = {
    "in process": lambda args, end: use_sync(args, False, end),
    "multi-process": lambda args, end: use_sync(args, True, end),
    "async thread": lambda args, end: asyncio.run(use_async(args, False, end)),
    "async multi-process": lambda args, end: asyncio.run(use_async(args, True, end)),
}


@pytest.mark.parametrize("mode", USES)
def test_p31_five_rounds_leave_nothing(mode: str, make_args: MakeArgs) -> None:
    """CLI-42..45: closed or dropped: memory, threads, children and files are as after the first."""
    process = psutil.Process()
    args = make_args(num_threads=2)
    sizes, threads, files = [], [], []
    children = set(process.children(recursive=True))  # of other tests: a server that they share
    for number in range(5):
        USES[mode](args, number % 2 == 0)
        gc.collect()
        assert set(process.children(recursive=True)) <= children
        sizes.append(process.memory_info().rss)
        threads.append(process.num_threads())
        files.append(process.num_fds())
    assert sizes[-1] - sizes[0] < 8e6, sizes
    assert max(threads) == min(threads), threads
    assert max(files) == min(files), files


@pytest.mark.parametrize("mode", USES)
def test_p33_in_a_thread_without_signal_handlers(mode: str, make_args: MakeArgs) -> None:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    expected = USES["in process"](make_args(), True)
    results: list[list[int]] = []
    thread = threading.Thread(target=lambda: results.append(USES[mode](make_args(), True)))
    thread.start()
    thread.join(120)
    assert results == [expected]
    assert {number: signal.getsignal(number) for number in handlers} == handlers


def test_p33_inside_a_running_loop(make_args: MakeArgs) -> None:
    """A notebook: synchronous engines within a coroutine, asynchronous ones beside them."""

    async def cell() -> None:
        expected = use_sync(make_args(), False, True)
        assert use_sync(make_args(), True, True) == expected
        pair = (use_async(make_args(), mode, True) for mode in (False, True))
        assert await asyncio.gather(*pair) == [expected, expected]

    asyncio.run(cell())


@pytest.mark.parametrize("multiprocess", [True, False])
@pytest.mark.parametrize(
    ("grace_s", "max_tokens", "reason"),
    [(0.0, 16_000, "abort"), (60.0, 300, "length"), (0.3, 16_000, "abort")],
    ids=["at once", "drained", "out of time"],
)
def test_cor_91_93_shutdown_aborts_or_drains(
    multiprocess: bool, grace_s: float, max_tokens: int, reason: str, make_args: MakeArgs
) -> None:
    """A live request has a last output, whatever time it is given; the core is not killed."""

    async def main() -> None:
        args = make_args(shutdown_timeout_s=grace_s, max_model_len=20_000, num_kv_blocks=1300)
        engine = AsyncLLM.from_engine_args(args, multiprocess_mode=multiprocess)
        begun = asyncio.Event()

        async def read() -> Any:
            params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
            last = None
            async for last in engine.generate("hello", params):  # noqa: B007
                begun.set()
            return last

        reader = asyncio.create_task(read())
        await begun.wait()
        await asyncio.to_thread(engine.shutdown)
        output = await reader
        assert output.finished
        assert output.outputs[0].finish_reason == reason
        assert output.outputs[0].token_ids
        if multiprocess:
            process = engine.engine_core._resources.process  # type: ignore[attr-defined]
            assert process.exit_code == 0

    asyncio.run(main())


def test_5_6_thousands_of_unread_streams_take_bounded_memory(make_args: MakeArgs) -> None:
    """Nobody reads while the engine generates: each stream holds one merged output, all of it."""
    num_streams, num_tokens = 2000, 12
    params = SamplingParams(
        temperature=0,
        max_tokens=num_tokens,
        ignore_eos=True,
        output_kind=RequestOutputKind.DELTA,
    )

    async def main() -> None:
        args = make_args(max_num_seqs=256, disable_log_stats=False)
        async with AsyncLLM.from_engine_args(args) as engine:
            process = psutil.Process()
            before = process.memory_info().rss
            collectors = [
                (await engine.add_request(str(i), f"hello {i % 10}", params))[1]
                for i in range(num_streams)
            ]
            sizes = []
            while engine.output_processor.has_unfinished_requests():
                await engine.check_health()
                await asyncio.sleep(0.05)
                sizes.append(process.memory_info().rss)
            per_stream = (max(sizes) - before) / num_streams
            assert per_stream < 40e3, f"{per_stream} bytes for each stream"
            by_prompt: dict[int, list[int]] = {}
            for i, collector in enumerate(collectors):
                output = collector.get_nowait()
                assert output is not None
                assert output.finished
                assert collector.get_nowait() is None, "one slot, merged"
                ids = output.outputs[0].token_ids  # type: ignore[union-attr]
                assert len(ids) == num_tokens
                assert by_prompt.setdefault(i % 10, ids) == ids

    asyncio.run(main())


@pytest.mark.slow
def test_5_6_two_thousand_readers_and_a_slow_one(make_args: MakeArgs) -> None:
    """All read at the same time through the process boundary; one takes its time for each delta."""
    num_streams, num_tokens = 2000, 40
    params = SamplingParams(
        temperature=0, max_tokens=num_tokens, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )

    async def main() -> None:
        args = make_args(max_num_seqs=256, num_kv_blocks=2048, disable_log_stats=False)
        async with AsyncLLM.from_engine_args(args) as engine:
            process = psutil.Process()
            before = process.memory_info().rss
            largest = 0
            ended: list[int] = []

            async def read(i: int) -> list[int]:
                nonlocal largest
                ids: list[int] = []
                async for output in engine.generate(f"hello {i % 10}", params):
                    ids += output.outputs[0].token_ids
                    if i == 0:
                        largest = max(largest, process.memory_info().rss)
                        await asyncio.sleep(0.5)
                ended.append(i)
                return ids

            results = await asyncio.gather(*(read(i) for i in range(num_streams)))
            per_stream = (largest - before) / num_streams
            print(f"{per_stream / 1e3:.1f} kB for each of {num_streams} streams")
            assert per_stream < 60e3
            assert all(len(ids) == num_tokens for ids in results)
            assert all(ids == results[i % 10] for i, ids in enumerate(results))
            assert ended.index(0) > 0, "others ended before the slow one"

    asyncio.run(main())


def test_p35_steady_traffic_does_not_grow(make_args: MakeArgs) -> None:
    """Unique prompts with the prefix cache on, through the process boundary."""
    with LLMEngine.from_engine_args(make_args(), enable_multiprocessing=True) as engine:
        core = psutil.Process(engine.engine_core.core_pid)  # type: ignore[attr-defined]
        params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)

        def traffic(count: int, salt: int) -> tuple[int, int]:
            for start in range(0, count, 64):
                for i in range(start, start + 64):
                    prompt = [3 + (salt * 1009 + i * k) % 400 for k in range(1, 40)]
                    engine.add_request(f"{salt}-{i}", {"prompt_token_ids": prompt}, params)
                while engine.has_unfinished_requests():
                    engine.step(timeout=20)
            gc.collect()
            return psutil.Process().memory_info().rss, core.memory_info().rss

        traffic(1024, 0)
        here, there = traffic(512, 1)
        here_after, there_after = traffic(1024, 2)
        assert here_after - here < 4e6
        assert there_after - there < 8e6
        assert engine.output_processor.request_states == {}
        assert engine.output_processor.external_req_ids == {}
