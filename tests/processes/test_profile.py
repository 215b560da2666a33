"""Profiles: traces of phases, plan operations and threads, and what operations cost (ENG-80)."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tellin.engine.async_llm import AsyncLLM
from tellin.engine.llm_engine import LLMEngine
from tellin.entrypoints.cli import main
from tellin.exceptions import EngineError
from tellin.models.plan import ir
from tellin.sampling_params import SamplingParams
from tellin.worker.profiler import OperationProfile, merge_layers
from tests.processes.conftest import MakeArgs

PARAMS = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
CORE_PHASES = {"schedule", "execute_model", "forward", "sample_tokens", "update_from_output"}
SHELL_PHASES = {
    f"llm_engine step: {phase}"
    for phase in ("get_output", "process_outputs", "abort_requests", "record_stats")
}


def run(engine: LLMEngine, request_id: str, prompt: Any = "hello", n: int = 5) -> list[int]:
    params = SamplingParams(temperature=0, max_tokens=n, ignore_eos=True)
    engine.add_request(request_id, prompt, params)
    outputs: list[Any] = []
    while engine.has_unfinished_requests():
        outputs += engine.step(timeout=20)
    return list(outputs[-1].outputs[0].token_ids)


def spans_of(path: str | None) -> dict[str, list[dict[str, Any]]]:
    """Spans of a trace by name of their process; checks what a viewer relies on."""
    assert path is not None
    events = json.loads(Path(path).read_text())["traceEvents"]
    named = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    threads = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    spans: dict[str, list[dict[str, Any]]] = {name: [] for name in named.values()}
    for event in events:
        if event["ph"] == "X":
            assert (event["pid"], event["tid"]) in threads
            assert event["dur"] >= 0
            spans[named[event["pid"]]].append(event)
    return spans


def names(spans: list[dict[str, Any]]) -> set[str]:
    return {span["name"] for span in spans}


@pytest.mark.parametrize("multiprocess", [False, True])
def test_a_trace_has_phases_operations_and_threads(
    multiprocess: bool, make_args: MakeArgs, tmp_path: Path
) -> None:
    args = make_args(num_threads=2)
    with LLMEngine.from_engine_args(args, enable_multiprocessing=multiprocess) as engine:
        expected = run(engine, "before")
        with pytest.raises(EngineError, match="not running"):
            engine.stop_profile()
        engine.start_profile(str(tmp_path / "folder" / "run"))
        with pytest.raises(EngineError, match="already running"):
            engine.start_profile()
        assert run(engine, "during") == expected, "measuring changes nothing"
        path = engine.stop_profile()
        assert path is not None
        assert Path(path).parent == tmp_path / "folder"
        assert Path(path).name.startswith("run-")
        spans = spans_of(path)
        assert set(spans) == {"engine core", "shell"}
        assert names(spans["engine core"]) >= CORE_PHASES
        assert names(spans["shell"]) == SHELL_PHASES
        operations = names(spans["engine core"]) - CORE_PHASES
        assert "gated_linear layers.0.mlp.gate_proj/up_proj" in operations
        assert any(name.startswith("attention layers.1") for name in operations)
        forwards = [s for s in spans["engine core"] if s["name"] == "forward"]
        assert len(forwards) == 5
        tid = forwards[0]["tid"]
        for span in spans["engine core"]:  # operations lie within a forward pass, on one clock
            if span["name"] in operations and span["tid"] == tid:
                assert any(
                    f["ts"] - 50 <= span["ts"]
                    and span["ts"] + span["dur"] <= f["ts"] + f["dur"] + 50
                    for f in forwards
                )
        assert run(engine, "after") == expected
        assert engine.start_profile(str(tmp_path / "second")) is None
        second = spans_of(engine.stop_profile())
        assert names(second["engine core"]) == set(), "the first profile is not in the second"


@pytest.mark.parametrize("multiprocess", [False, True])
def test_async_profile(multiprocess: bool, make_args: MakeArgs, tmp_path: Path) -> None:
    async def profile() -> str | None:
        async with AsyncLLM.from_engine_args(make_args(), multiprocess_mode=multiprocess) as engine:
            await engine.start_profile(str(tmp_path / "run"))
            async for _ in engine.generate("hello", PARAMS):
                pass
            return await engine.stop_profile()

    spans = spans_of(asyncio.run(profile()))
    assert names(spans["engine core"]) >= CORE_PHASES
    assert "process_outputs" in names(spans["shell"])


def operations(engine: LLMEngine) -> list[OperationProfile]:
    return [OperationProfile(**row) for row in engine.collective_rpc("operation_profile")[0]]


def test_operations_have_exact_costs(make_args: MakeArgs, tmp_path: Path) -> None:
    """Multiplications and bytes follow from the plan and the steps; times add up to the steps."""
    with LLMEngine.from_engine_args(make_args(enable_prefix_caching=False)) as engine:
        backend = engine.engine_core.engine_core.executor.worker.runner.backend  # type: ignore[attr-defined]
        engine.start_profile(str(tmp_path / "run"))
        num_prompt, num_out = 600, 4
        run(engine, "x", {"prompt_token_ids": [5 + i % 90 for i in range(num_prompt)]}, num_out)
        spans = spans_of(engine.stop_profile())["engine core"]
        ops = {op.name: op for op in operations(engine)}
        plan: ir.Plan = backend.plan
        down = next(
            op
            for op in plan.ops
            if isinstance(op, ir.Linear) and op.weight.name == "layers.0.mlp.down_proj.weight"
        )
        rows = num_prompt + num_out - 1
        measured = ops["linear layers.0.mlp.down_proj"]
        assert measured.macs == rows * down.weight.num_elements
        # the prompt is read in two passes of at most 512 rows, then one per id
        assert measured.num_bytes == (2 + num_out - 1) * len(down.weight.data)
        attention = next(op for op in plan.ops if isinstance(op, ir.Attention))
        pairs = rows * (rows + 1) // 2
        measured = ops["attention layers.0"]
        assert measured.macs == 2 * pairs * attention.num_heads * attention.head_dim
        keys = num_prompt + sum(range(num_prompt + 1, rows + 1))
        size = 2 * keys * attention.num_kv_heads * attention.head_dim * 2  # float16
        assert measured.num_bytes == size
        forward_s = sum(s["dur"] for s in spans if s["name"] == "forward") / 1e6
        assert 0 < sum(op.seconds for op in ops.values()) <= forward_s
        merged = {op.name: count for op, count in merge_layers(list(ops.values()))}
        assert merged["linear layers.*.mlp.down_proj"] == len(plan.kv_layers)


def test_the_command_prints_the_most_expensive_operations(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["profile", str(tiny_model), "--prompt-len", "40", "--max-tokens", "4"]
    options = ["--streams", "2", "--top", "3", "--trace", str(tmp_path / "t")]
    assert main([*arguments, *options, "--set", "max_model_len=64"]) == 0
    prefill, decode, end = capsys.readouterr().out.split("\n\n")
    assert end == ""
    assert prefill.startswith("prefill: 2 x 40 tokens in ")
    assert decode.startswith("decode: 2 x 3 tokens in ")
    for table in (prefill, decode):
        lines = table.splitlines()
        assert "GB/s  GMAC/s" in lines[1]
        assert len(lines) == 8  # head, columns, three operations, the rest, outside, trace
        assert spans_of(lines[-1].split()[1])["engine core"]
        shares = [float(line.split("%")[0]) for line in lines[2:7]]
        assert shares[0] >= shares[1] >= shares[2]
        assert abs(sum(shares) - 100) < 1
    assert main(["profile", str(tiny_model), "--max-tokens", "1"]) == 2
    assert "--max-tokens must be at least 2, got 1" in capsys.readouterr().err


def test_profile_and_sleep(make_args: MakeArgs, tmp_path: Path) -> None:
    """Level 1 is fine while a profile runs; level 2 would lose it and is refused."""
    with LLMEngine.from_engine_args(make_args()) as engine:
        engine.start_profile(str(tmp_path / "run"))
        engine.sleep(1)
        engine.wake_up()
        with pytest.raises(EngineError, match="stop it before"):
            engine.sleep(2)
        engine.wake_up()
        first = run(engine, "a")
        assert names(spans_of(engine.stop_profile())["engine core"]) >= CORE_PHASES
        engine.sleep(2)
        engine.wake_up()
        assert run(engine, "b") == first
