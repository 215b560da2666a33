"""Claims S1..S75 that need real engines: finalizers, control calls, data-parallel ranks."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest

from tellin.engine.llm_engine import LLMEngine
from tellin.exceptions import InvalidParameterError
from tellin.protocol import LoRARequest
from tellin.sampling_params import SamplingParams
from tests.processes.conftest import MakeArgs

ROOT = Path(__file__).resolve().parents[2]


def start_rank(
    model: Path, rank: int, endpoint: str, num_requests: int, multiprocess: bool
) -> subprocess.Popen[str]:
    arguments = [str(model), str(rank), endpoint, str(num_requests), str(int(multiprocess))]
    return subprocess.Popen(
        [sys.executable, "-m", "tests.processes.dp_rank", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    ("multiprocess", "requests"),
    [(False, (3, 0)), (True, (0, 2))],
    ids=["in process, rank 1 idle", "multi-process, rank 0 idle"],
)
def test_s65_s66_s67_two_ranks_one_of_them_idle(
    multiprocess: bool, requests: tuple[int, int], tiny_model: Path, tmp_path: Path
) -> None:
    """Both loops end; the idle rank runs one dummy batch for each step of the other."""
    endpoint = f"ipc://{tmp_path / 'dp'}"
    ranks = [
        start_rank(tiny_model, rank, endpoint, count, multiprocess)
        for rank, count in enumerate(requests)
    ]
    try:
        results = []
        for process in ranks:
            out, err = process.communicate(timeout=60)
            assert (process.returncode, err) == (0, "")
            results.append(json.loads(out))
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
    busy, idle = sorted(results, key=lambda result: -len(result["lengths"]))
    count = max(requests)
    assert busy["lengths"] == {str(i): 20 + i for i in range(count)}
    assert busy["dummies"] == 0
    assert idle["lengths"] == {}
    assert idle["dummies"] >= 19 + count


def test_s33_s34_s47_the_real_model_dies_with_its_engine(make_args: MakeArgs) -> None:
    """ENG-101/102: the chain of hops leads to the model; collecting the engine cleans it up."""
    cleaned: list[object] = []
    engine = LLMEngine.from_engine_args(make_args())
    model = engine.model_executor.driver_worker.model_runner.model  # type: ignore[union-attr]
    assert model is not None
    model.release_cached_artefacts = lambda: cleaned.append(1)
    finalizer = engine._model_finalizer
    assert finalizer is not None
    assert finalizer.alive
    reference = weakref.ref(model)
    engine_reference = weakref.ref(engine)
    del model, engine
    gc.collect()
    assert engine_reference() is None
    assert not finalizer.alive
    assert cleaned == [1]
    del finalizer
    gc.collect()
    assert reference() is None


def test_s34_shutdown_cleans_up_at_once(make_args: MakeArgs) -> None:
    with LLMEngine.from_engine_args(make_args()) as engine:
        reference = weakref.ref(engine.model_executor.driver_worker.model_runner.model)  # type: ignore[union-attr]
        finalizer = engine._model_finalizer
    assert finalizer is not None
    assert not finalizer.alive
    assert engine.model_executor is None
    gc.collect()
    assert reference() is None, "a closed engine that is kept pins no weights"


@pytest.mark.parametrize("multiprocess", [False, True])
def test_s05_s13_s15_s68_s69_control_calls_in_both_modes(
    multiprocess: bool, make_args: MakeArgs
) -> None:
    """TOP-2, COR-70: same types and same errors wherever the core is."""
    args = make_args(disable_log_stats=False)
    with LLMEngine.from_engine_args(args, enable_multiprocessing=multiprocess) as engine:
        assert (engine.model_executor is None) is multiprocess
        assert (engine._model_finalizer is None) is multiprocess
        assert engine.get_supported_tasks() == ("generate",)
        assert engine.list_loras() == set()
        assert engine.remove_lora(1) is False
        with pytest.raises(Exception, match="LoRA"):
            engine.add_lora(LoRARequest("cats", 1, "/nowhere"))
        with pytest.raises(InvalidParameterError, match="level must be 0, 1 or 2"):
            engine.sleep(3)
        with pytest.raises(InvalidParameterError, match="nonsense"):
            engine.wake_up(["nonsense"])
        assert engine.is_sleeping() is False
        engine.sleep(0, "keep")
        assert engine.is_sleeping() is True
        engine.wake_up(["scheduling"])
        assert engine.is_sleeping() is False
        assert engine.reset_prefix_cache() is True
        engine.reset_mm_cache()
        engine.reset_encoder_cache()
        (info,) = engine.collective_rpc("get_info")
        assert info["num_threads"] == 1
        if not multiprocess:
            assert engine.apply_model(lambda model: model.plan.architecture) == ["llama"]
            assert engine.collective_rpc(lambda worker, x: x + 1, args=(2,)) == [3]
            with pytest.raises(InvalidParameterError, match="wait"):
                engine.sleep(1, "wait")


@pytest.mark.parametrize("multiprocess", [False, True])
def test_s08_s13_s19_s48_the_loop_ends_with_one_final_output_each(
    multiprocess: bool, make_args: MakeArgs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TOP-1, ENV-1: n > 1, aborts, stop strings; whatever the environment says later."""
    with LLMEngine.from_engine_args(make_args(), enable_multiprocessing=multiprocess) as engine:
        monkeypatch.setenv("TELLIN_ENABLE_MULTIPROCESSING", str(int(not multiprocess)))
        for i in range(6):
            params = SamplingParams(
                n=1 + i % 3, seed=i, temperature=1.0, max_tokens=10 + i, ignore_eos=True
            )
            engine.add_request(str(i), f"prompt {i}", params)
        outputs: list[Any] = engine.step(timeout=20)
        outputs += engine.abort_request(["2", "nobody"])
        while engine.has_unfinished_requests():
            outputs += engine.step(timeout=20)
        final = [output.request_id for output in outputs if output.finished]
        assert sorted(final) == [str(i) for i in range(6)]
        assert engine.get_num_unfinished_requests() == 0
