"""The synchronous engine with a real model, in this process and with its core in another.

One suite for both (TOP-2, S12, S13): the same outputs, the same behaviour, a clean end.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tellin import EngineArgs, LLMEngine, RequestOutputKind, SamplingParams
from tellin.entrypoints.llm import LLM
from tellin.exceptions import EngineDeadError, EngineError
from tests.engine.fakes import run

PROMPTS = ["The capital of France is", "One, two, three,", "The sea"]
GREEDY = SamplingParams(temperature=0, max_tokens=8, output_kind=RequestOutputKind.FINAL_ONLY)


def build(path: Path, multiprocess: bool, **options: Any) -> LLMEngine:
    args = EngineArgs(model=path, max_model_len=256, num_kv_blocks=65, **options)
    return LLMEngine.from_engine_args(args, enable_multiprocessing=multiprocess)


def children() -> set[int]:
    """Ids of this process's children: other tests may have some too, such as a server."""
    return {child.pid for child in psutil.Process().children()}


@pytest.fixture(scope="module", params=[False, True], ids=["in process", "multi-process"])
def engine(request: pytest.FixtureRequest, smollm2_path: Path) -> Iterator[LLMEngine]:
    before = children()
    with build(smollm2_path, request.param) as made:
        assert len(children() - before) == int(request.param), "S12: one child or none"
        yield made
    assert children() <= before


@pytest.fixture(scope="module")
def expected(smollm2_path: Path) -> dict[str, list[int]]:
    """Greedy ids of the prompts, each run alone."""
    with build(smollm2_path, False) as alone:
        result = {}
        for prompt in PROMPTS:
            alone.add_request(prompt, prompt, GREEDY)
            result[prompt] = run(alone)[0].outputs[0].token_ids
        return result


def test_s12_s13_same_outputs(engine: LLMEngine, expected: dict[str, list[int]]) -> None:
    for prompt in PROMPTS:
        engine.add_request(prompt, prompt, GREEDY)
    outputs = run(engine)
    assert {o.request_id: o.outputs[0].token_ids for o in outputs} == expected
    assert all(o.metrics is not None and o.metrics.first_token_latency > 0 for o in outputs)


def test_stop_strings_and_aborts(engine: LLMEngine) -> None:
    stopping = SamplingParams(temperature=0, max_tokens=20, stop=["five"])
    engine.add_request("stops", "One, two, three,", stopping)
    engine.add_request("aborted", "The sea", SamplingParams(max_tokens=200, ignore_eos=True))
    outputs = engine.step()
    (final,) = engine.abort_request("aborted")
    assert final.finished
    outputs += run(engine)
    last = [output for output in outputs if output.request_id == "stops"][-1]
    assert last.text == " four, "  # type: ignore[union-attr]
    assert last.outputs[0].stop_reason == "five"  # type: ignore[union-attr]


def test_n_and_seeds(engine: LLMEngine) -> None:
    texts = []
    for _ in range(2):
        engine.add_request("n", "The sea", SamplingParams(n=3, seed=4, max_tokens=5))
        outputs = run(engine)
        texts.append({c.index: c.text for output in outputs for c in output.outputs})
    assert texts[0] == texts[1]
    assert len(texts[0]) == 3


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_ends_live_requests_and_wakes_equal(
    engine: LLMEngine, expected: dict[str, list[int]], level: int
) -> None:
    """The loop ends for requests that a pause ended (wart of 1.9); then ids are as before."""
    engine.add_request("live", "The sea", SamplingParams(max_tokens=200, ignore_eos=True))
    engine.step()
    engine.sleep(level)
    assert engine.is_sleeping()
    outputs = run(engine)
    assert outputs[-1].finished
    assert outputs[-1].outputs[0].finish_reason == "abort"
    engine.wake_up()
    assert not engine.is_sleeping()
    engine.add_request("again", PROMPTS[0], GREEDY)
    assert run(engine)[0].outputs[0].token_ids == expected[PROMPTS[0]]


def test_pausing_holds_requests_back(engine: LLMEngine, expected: dict[str, list[int]]) -> None:
    engine.sleep(0)
    engine.add_request("held", PROMPTS[1], GREEDY)
    assert engine.step(timeout=0.05) == []
    engine.wake_up(["scheduling"])
    assert run(engine)[0].outputs[0].token_ids == expected[PROMPTS[1]]


def test_control_calls(engine: LLMEngine) -> None:
    assert engine.reset_prefix_cache() is True
    assert engine.list_loras() == set()
    assert engine.get_supported_tasks() == ("generate",)
    assert engine.collective_rpc("check_health") == [None]
    metrics = engine.get_metrics()
    assert any(metric.name == "tellin:generation_tokens" for metric in metrics)


def test_llm_over_either(engine: LLMEngine, expected: dict[str, list[int]]) -> None:
    llm = LLM.from_engine(engine)
    assert [o.outputs[0].token_ids for o in llm.generate(PROMPTS, GREEDY)] == list(
        expected.values()
    )
    stream = llm.stream("The sea", SamplingParams(max_tokens=200, ignore_eos=True))
    next(stream)
    stream.close()
    assert not engine.has_unfinished_requests()
    with pytest.raises(ValueError, match="empty"):
        llm.generate(["fine", ""])
    assert [o.outputs[0].token_ids for o in llm.generate(PROMPTS, GREEDY)] == list(
        expected.values()
    )
    llm.sleep(1)
    with pytest.raises(EngineError, match="wake_up"):
        llm.generate("x")
    llm.wake_up()
    assert llm.generate(PROMPTS[0], GREEDY)[0].outputs[0].token_ids == expected[PROMPTS[0]]


def test_llm_on_a_killed_core_raises(smollm2_path: Path) -> None:
    with build(smollm2_path, True) as engine:
        llm = LLM.from_engine(engine)
        stream = llm.stream("The sea", SamplingParams(max_tokens=200, ignore_eos=True))
        next(stream)
        os.kill(engine.engine_core.core_pid, signal.SIGKILL)  # type: ignore[attr-defined]
        with pytest.raises(EngineDeadError):
            list(stream)
        with pytest.raises(EngineDeadError):
            llm.generate("x")


@pytest.mark.parametrize("level", [1, 2])
def test_5_9_sleep_gives_memory_back(smollm2_path: Path, level: int) -> None:
    """RSS is measured; level 1 frees the pool, level 2 the weights too."""
    with build(smollm2_path, False) as engine:
        for number in range(8):
            engine.add_request(str(number), [100 + number] * 120, SamplingParams(max_tokens=2))
        run(engine)
        gc.collect()
        before = psutil.Process().memory_info().rss
        engine.sleep(level)
        freed = before - psutil.Process().memory_info().rss
        # 60 blocks of 16 tokens, 30 layers, 3 heads of 64 float16 keys and values
        pool = 60 * 16 * 30 * 3 * 64 * 2 * 2
        assert freed > 0.7 * pool + (60e6 if level == 2 else 0)
        engine.wake_up()


# ---------------------------------------------------------------------- as a program


def start_program(code: str, path: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_p34_no_main_guard_is_needed(smollm2_path: Path) -> None:
    code = (
        "import sys\nfrom tellin import EngineArgs, LLMEngine\n"
        "engine = LLMEngine.from_engine_args(EngineArgs(model=sys.argv[1], max_model_len=64), "
        "enable_multiprocessing=True)\nprint('ready')\nengine.shutdown()\n"
    )
    program = start_program(code, smollm2_path)
    out, err = program.communicate(timeout=60)
    assert (program.returncode, out, err) == (0, "ready\n", "")


def test_p32_ctrl_c_ends_the_command_line_with_130(smollm2_path: Path) -> None:
    command = [sys.executable, "-m", "tellin.entrypoints.cli", "generate", "--raw", "-m"]
    program = subprocess.Popen(
        [*command, str(smollm2_path), "--set", "max_model_len=2048", "Once upon a time"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert program.stdout is not None
    program.stdout.read(1)  # the answer has begun
    os.kill(program.pid, signal.SIGINT)
    out, err = program.communicate(timeout=30)
    assert program.returncode == 130
    assert "Traceback" not in err
    assert len(out) < 4000
