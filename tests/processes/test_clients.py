"""The four clients of `make_client`'s table: same calls, same results (S7, S12, S13)."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tellin.config import EngineArgs
from tellin.engine.arg_utils import create_engine_config
from tellin.engine.async_llm import AsyncLLM
from tellin.engine.core_client import EngineCoreClient, InprocClient
from tellin.engine.llm_engine import LLMEngine
from tellin.engine.mp_client import AsyncMPClient, SyncMPClient
from tellin.engine.remote_errors import error_from_name
from tellin.engine.thread_client import AsyncThreadClient
from tellin.entrypoints.llm import LLM
from tellin.exceptions import (
    EngineClosedError,
    EngineDeadError,
    EngineStartError,
    InvalidTypeError,
)
from tellin.outputs import RequestOutput
from tellin.sampling_params import SamplingParams
from tests.processes.conftest import PATIENCE_S, MakeArgs

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=2)
PROMPTS = [f"prompt number {i}" for i in range(6)]


def run_sync(
    engine: LLMEngine, prompts: list[str], params: SamplingParams = GREEDY
) -> list[RequestOutput]:
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, params)
    finished: dict[int, RequestOutput] = {}
    while engine.has_unfinished_requests():
        for output in engine.step(timeout=20):
            if output.finished:
                assert isinstance(output, RequestOutput)
                finished[int(output.request_id)] = output
    return [finished[i] for i in range(len(prompts))]


def results(outputs: list[RequestOutput]) -> list[object]:
    return [(o.outputs[0].text, o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs]


@pytest.fixture(scope="module")
def inproc_results(make_args: MakeArgs) -> list[object]:
    with LLMEngine.from_engine_args(make_args()) as engine:
        return results(run_sync(engine, PROMPTS))


def core_processes() -> set[int]:
    """Ids of this process's children that run a core, by the title of the process (COR-85)."""
    return {
        child.pid
        for child in psutil.Process().children(recursive=True)
        if any(word.startswith("EngineCore_") for word in child.cmdline())
    }


def test_s07_make_client_picks_by_the_two_flags(make_args: MakeArgs) -> None:
    config = create_engine_config(make_args())
    for multiprocess, asyncio_mode, expected in (
        (False, False, InprocClient),
        (True, False, SyncMPClient),
        (True, True, AsyncMPClient),
        (False, True, AsyncThreadClient),
    ):
        client = EngineCoreClient.make_client(multiprocess, asyncio_mode, config, None, False)
        try:
            assert type(client) is expected
            assert client.ready.max_model_len == 2048
        finally:
            client.shutdown()


def test_s12_one_child_runs_the_core_and_is_gone_after_shutdown(make_args: MakeArgs) -> None:
    before = core_processes()
    with LLMEngine.from_engine_args(make_args(), enable_multiprocessing=True) as engine:
        assert len(core_processes() - before) == 1
        assert engine.model_executor is None  # S68, S69: out of reach
    assert core_processes() == before
    engine.shutdown()  # idempotent
    with pytest.raises(EngineClosedError):
        engine.step()


def test_s13_multi_process_results_equal_in_process_ones(
    make_args: MakeArgs, inproc_results: list[object]
) -> None:
    with LLMEngine.from_engine_args(make_args(), enable_multiprocessing=True) as engine:
        assert results(run_sync(engine, PROMPTS)) == inproc_results
        # ENG-81, S15: results of control calls have their declared types
        assert engine.get_supported_tasks() == ("generate",)
        assert engine.list_loras() == set()
        assert engine.reset_prefix_cache() is True
        assert engine.is_sleeping() is False
        with pytest.raises(NotImplementedError, match="no method 'nonsense'"):  # ENG-82
            engine.collective_rpc("nonsense")
        with pytest.raises(TypeError, match="TELLIN_ALLOW_INSECURE_SERIALIZATION"):
            engine.apply_model(lambda model: 1)
        assert results(run_sync(engine, PROMPTS)) == inproc_results


def test_a_request_that_cannot_be_sent_fails_alone(make_args: MakeArgs) -> None:
    """P14: with per-prompt errors, the others are completed."""
    engine = LLMEngine.from_engine_args(make_args(), enable_multiprocessing=True)
    with LLM.from_engine(engine) as llm:
        params = SamplingParams(max_tokens=2, temperature=0)
        unsendable = SamplingParams(max_tokens=2, extra_args={"a": object()})
        outputs = llm.generate(["a", "b", "c"], [params, unsendable, params], on_error="return")
        assert [output.error is None for output in outputs] == [True, False, True]
        assert isinstance(outputs[1].error, InvalidTypeError)
        assert [len(output.outputs[0].token_ids) for output in outputs] == [2, 0, 2]
        assert engine.get_num_unfinished_requests() == 0


def test_the_message_of_a_dead_core_is_told_once_however_it_travels() -> None:
    error = EngineDeadError("it was shut down")
    assert str(error_from_name("EngineDeadError", str(error))) == str(error)
    assert str(error).count("the engine core died") == 1


def huge_number(model: object) -> int:
    return 1 << 70


def half_a_character(model: object) -> str:
    return "\ud800"


def local_function(model: object) -> object:
    return lambda: model


def test_results_that_cannot_travel_fail_their_call_only(
    make_args: MakeArgs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """WIRE-9."""
    monkeypatch.setenv("TELLIN_ALLOW_INSECURE_SERIALIZATION", "1")
    with LLMEngine.from_engine_args(make_args(), enable_multiprocessing=True) as engine:
        with pytest.raises(RuntimeError, match="OverflowError: can't serialize ints"):
            engine.apply_model(huge_number)
        with pytest.raises(RuntimeError, match=r"UnicodeEncodeError: .*surrogates not allowed"):
            engine.apply_model(half_a_character)
        with pytest.raises(InvalidTypeError, match="pickle local object"):
            engine.apply_model(local_function)
        assert engine.is_sleeping() is False


@pytest.mark.parametrize("multiprocess", [True, False])
def test_asynchronous_results_equal_in_process_ones(
    multiprocess: bool, make_args: MakeArgs, inproc_results: list[object]
) -> None:
    async def main() -> list[RequestOutput]:
        async with AsyncLLM.from_engine_args(make_args(), multiprocess_mode=multiprocess) as engine:

            async def one(prompt: str) -> RequestOutput:
                last = None
                async for output in engine.generate(prompt, GREEDY):
                    last = output
                assert last is not None
                assert last.finished
                return last

            return list(await asyncio.gather(*(one(p) for p in PROMPTS)))

    assert results(asyncio.run(main())) == inproc_results


def test_s11_in_process_mode_has_no_child_no_socket_no_transport(tiny_model: Path) -> None:
    """TOP-3, P63, S16: no event loop either."""
    script = f"""
    import sys, threading
    sys.addaudithook(lambda name, args: sys.exit(f"{{name}} {{args}}") if name in
        ("socket.__new__", "subprocess.Popen", "os.fork", "os.posix_spawn") else None)
    from tellin import LLM, SamplingParams
    with LLM({str(tiny_model)!r}, max_model_len=512, num_kv_blocks=64) as llm:
        assert llm.generate("hello", SamplingParams(max_tokens=3), use_tqdm=False)[0].outputs
        assert not [t for t in threading.enumerate() if t is not threading.main_thread()]
    assert "zmq" not in sys.modules, "the transport was imported"
    print("ok")
    """
    done = run_script(script)
    assert done.stdout == "ok\n"
    assert done.stderr == ""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks on Windows")
def test_a_fork_does_not_wait_for_an_engine_that_is_not_its_own(tiny_model: Path) -> None:
    """It has no thread that would bring a result; the original goes on undisturbed."""
    script = f"""
    import os, signal, sys, time, warnings
    from tellin import SamplingParams
    from tellin.config import EngineArgs
    from tellin.engine.llm_engine import LLMEngine
    from tellin.exceptions import EngineClosedError
    args = EngineArgs(model={str(tiny_model)!r}, max_model_len=512, num_kv_blocks=64)
    with LLMEngine.from_engine_args(args, enable_multiprocessing=True) as engine:
        engine.add_request("a", "hello", SamplingParams(max_tokens=3))
        while engine.engine_core._outputs.empty():  # what has come is the original's
            time.sleep(0.001)
        warnings.simplefilter("ignore", DeprecationWarning)  # forks of threads
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            for call in (engine.step, engine.reset_prefix_cache):
                try:
                    call()
                except EngineClosedError as error:
                    assert f"belongs to process {{os.getppid()}}" in str(error)
                else:
                    os._exit(1)
            sys.exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        while engine.has_unfinished_requests():
            outputs = engine.step()
        print(len(outputs[0].outputs[0].token_ids))
    """
    done = run_script(script)
    assert (done.stdout, done.stderr) == ("3\n", "")


def test_a_fork_does_not_wait_for_a_core_that_is_a_thread(tiny_model: Path) -> None:
    script = f"""
    import asyncio, os, signal, warnings
    from tellin import SamplingParams
    from tellin.config import EngineArgs
    from tellin.engine.async_llm import AsyncLLM
    from tellin.exceptions import EngineClosedError
    args = EngineArgs(model={str(tiny_model)!r}, max_model_len=512, num_kv_blocks=64)

    async def count(engine):
        stream = engine.generate("hello", SamplingParams(max_tokens=3))
        return [len(output.outputs[0].token_ids) async for output in stream][-1]

    async def main():
        async with AsyncLLM.from_engine_args(args, multiprocess_mode=False) as engine:
            warnings.simplefilter("ignore", DeprecationWarning)  # forks of threads
            child = os.fork()
            if child == 0:
                signal.alarm(20)
                try:
                    await count(engine)
                except EngineClosedError as error:
                    os._exit(7 if f"belongs to process {{os.getppid()}}" in str(error) else 2)
                os._exit(1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
            print(await count(engine))

    asyncio.run(main())
    """
    done = run_script(script)
    assert (done.stdout, done.stderr) == ("3\n", "")


def test_thousands_of_requests_wait_in_the_sockets_of_a_busy_core(make_args: MakeArgs) -> None:
    """CLI-11, CLI-13: a transport with a limit would drop what exceeds it, and say nothing."""
    num_requests = 2500  # more than two sockets hold by default
    args = make_args(num_kv_blocks=2560)
    with LLMEngine.from_engine_args(args, enable_multiprocessing=True) as engine:
        engine.get_supported_tasks()
        assert isinstance(engine.engine_core, SyncMPClient)
        os.kill(engine.engine_core.core_pid, signal.SIGSTOP)
        prompts = [{"type": "token", "prompt_token_ids": [5] * 20}] * num_requests
        for i, prompt in enumerate(prompts):
            engine.add_request(str(i), prompt, SamplingParams(max_tokens=1))
        os.kill(engine.engine_core.core_pid, signal.SIGCONT)
        num_finished, started = 0, time.monotonic()
        while num_finished < num_requests:
            assert time.monotonic() - started < PATIENCE_S, "requests were lost"
            num_finished += sum(output.finished for output in engine.step(timeout=1))


def test_p34_a_script_without_main_guard_just_works(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(
        textwrap.dedent(f"""
        print("start")
        from tellin import LLM, SamplingParams
        llm = LLM({str(tiny_model)!r}, max_model_len=512, num_kv_blocks=64)
        print(len(llm.generate("hello", SamplingParams(max_tokens=3, ignore_eos=True),
                               use_tqdm=False)[0].outputs[0].token_ids))
        """)
    )
    done = subprocess.run(
        [sys.executable, str(path)],
        env=os.environ | {"TELLIN_ENABLE_MULTIPROCESSING": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == "start\n3\n"  # the script ran once
    assert done.stderr == ""


def test_s73_s74_the_environment_only_switches_multiprocessing_on(
    make_args: MakeArgs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ENG-5, ENG-6."""
    for value, argument, expected in (("0", True, SyncMPClient), ("1", False, SyncMPClient)):
        monkeypatch.setenv("TELLIN_ENABLE_MULTIPROCESSING", value)
        engine = LLMEngine.from_engine_args(make_args(), enable_multiprocessing=argument)
        try:
            monkeypatch.setenv("TELLIN_ENABLE_MULTIPROCESSING", "0")  # S19: changes nothing now
            assert type(engine.engine_core) is expected
            assert len(run_sync(engine, PROMPTS[:1])) == 1
        finally:
            engine.shutdown()


def test_eng_2_a_failed_start_raises_the_reason_and_leaves_nothing(make_args: MakeArgs) -> None:
    args: EngineArgs = make_args(kv_cache_memory_bytes=1 << 50, num_kv_blocks=None)
    before = core_processes()
    with pytest.raises(EngineStartError, match="could not start: OutOfMemoryError"):
        LLMEngine.from_engine_args(args, enable_multiprocessing=True)
    assert core_processes() == before


@pytest.mark.parametrize("asynchronous", [False, True])
def test_eng_2_weights_that_cannot_be_read_fail_the_start_with_the_reason(
    asynchronous: bool, make_args: MakeArgs, tiny_model: Path, tmp_path: Path
) -> None:
    """The shell has opened the file's header; the core finds out about the rest."""
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(tiny_model.read_bytes())
    before = core_processes()
    config = create_engine_config(make_args(model=str(broken)))
    broken.write_bytes(tiny_model.read_bytes()[: tiny_model.stat().st_size // 2])
    start: Any = AsyncLLM if asynchronous else LLMEngine
    with pytest.raises(EngineStartError, match=r"could not start: .*broken\.gguf"):
        start(config, multiprocess_mode=True)
    assert core_processes() == before


@pytest.mark.parametrize("folder", ["/nonexistent/folder", "/tmp/" + "long" * 30])
def test_cli_12_a_folder_that_cannot_hold_sockets_is_named(
    folder: str, make_args: MakeArgs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CLI-12, ENG-2: no bare error of the transport, and no child is left."""
    monkeypatch.setenv("TELLIN_RPC_BASE_PATH", folder)
    before = core_processes()
    with pytest.raises(EngineStartError, match=f"{folder}.*TELLIN_RPC_BASE_PATH"):
        LLMEngine.from_engine_args(make_args(), enable_multiprocessing=True)
    assert core_processes() <= before


def test_eng_32_step_with_a_timeout_returns_nothing_when_nothing_happens(
    make_args: MakeArgs,
) -> None:
    with LLMEngine.from_engine_args(make_args(), enable_multiprocessing=True) as engine:
        started = time.monotonic()
        assert engine.step(timeout=0.2) == []
        assert time.monotonic() - started > 0.15


CTRL_C_SCRIPT = """
import os, sys, threading, time
from tellin.config import EngineArgs
from tellin.engine.llm_engine import LLMEngine
from tellin.engine.core_process import CoreProcess
from tellin import SamplingParams

def say(process):
    print(process.pid, flush=True)

if {when!r} == "while loading":
    start = CoreProcess.__init__
    def init(self, *args):
        start(self, *args)
        say(self)
    CoreProcess.__init__ = init
try:
    engine = LLMEngine.from_engine_args(
        EngineArgs(model={model!r}, max_model_len=2048, num_kv_blocks=256),
        enable_multiprocessing=True)
    if {when!r} == "while loading":
        time.sleep(100)
    if {when!r} == "idle":
        threading.Timer(0.2, print, (engine.engine_core.core_pid,), dict(flush=True)).start()
        engine.step()
    print(engine.engine_core.core_pid, flush=True)
    while True:
        engine.add_request("x", "hello", SamplingParams(max_tokens=2000, ignore_eos=True))
        while engine.has_unfinished_requests():
            engine.step()
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.mark.parametrize("when", ["while loading", "idle", "busy"])
def test_p32_one_ctrl_c_ends_parent_and_child(when: str, tiny_model: Path) -> None:
    """Exit code 130, no child left, nothing printed by the child."""
    process = start_script(CTRL_C_SCRIPT.format(when=when, model=str(tiny_model)))
    assert process.stdout is not None
    core_pid = int(process.stdout.readline())
    os.killpg(process.pid, signal.SIGINT)  # the terminal sends it to the whole group
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert stderr == ""
    assert_gone(core_pid, 60)


@pytest.mark.parametrize("when", ["while loading", "idle", "busy"])
def test_a_parent_that_is_killed_leaves_no_child(when: str, tiny_model: Path) -> None:
    process = start_script(CTRL_C_SCRIPT.format(when=when, model=str(tiny_model)))
    assert process.stdout is not None
    core_pid = int(process.stdout.readline())
    process.kill()
    _, stderr = process.communicate(timeout=60)
    assert stderr == "", "the child says nothing either"
    assert_gone(core_pid, 60)


ASYNC_SCRIPT = """
import asyncio, sys
from tellin.config import EngineArgs
from tellin.engine.async_llm import AsyncLLM
from tellin import SamplingParams

async def main():
    args = EngineArgs(model={model!r}, max_model_len=2048, num_kv_blocks=256)
    async with AsyncLLM.from_engine_args(args) as engine:
        print(engine.engine_core.core_pid, flush=True)
        while True:
            params = SamplingParams(max_tokens=2000, ignore_eos=True)
            async for _ in engine.generate("hello", params):
                pass

try:
    asyncio.run(main())
except KeyboardInterrupt:
    sys.exit(130)
"""


def test_p32_one_ctrl_c_ends_an_event_loop_and_child(tiny_model: Path) -> None:
    process = start_script(ASYNC_SCRIPT.format(model=str(tiny_model)))
    assert process.stdout is not None
    core_pid = int(process.stdout.readline())
    os.killpg(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert stderr == ""
    assert_gone(core_pid, 60)


def test_a_killed_process_leaves_no_sockets(tiny_model: Path, tmp_path: Path) -> None:
    """Its child, which notices the end, removes them and their folder."""
    script = ASYNC_SCRIPT.format(model=str(tiny_model))
    process = start_script(f"import tempfile\ntempfile.tempdir = {str(tmp_path)!r}\n{script}")
    assert process.stdout is not None
    core_pid = int(process.stdout.readline())
    assert [len(list(folder.iterdir())) for folder in tmp_path.glob("tellin-*")] == [2]
    process.kill()
    process.communicate(timeout=60)
    assert_gone(core_pid, 60)
    assert list(tmp_path.iterdir()) == []


def run_script(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def start_script(script: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def assert_gone(pid: int, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.02)
