"""The benchmark command, run on engines of known speed."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import (
    ceilings,
    compare,
    diff,
    engines,
    overhead,
    report,
    scheduler_cost,
    speculation,
)
from benchmarks.cases import Case
from benchmarks.engines import Engine, EngineFailedError, EngineSpec
from benchmarks.machine import ROOT
from benchmarks.models import BenchModel

PREFILL = Case("prefill", num_tokens=100)
DECODE = Case("decode", context=10, steps=20)
BATCHED = Case("batched", streams=4, steps=5)
LIMITS = {
    "read_bytes_per_s": 1e6,
    "int8_mac_per_s": 1e7,
    "float32_mac_per_s": 1e6,
    "int8_instruction": "none",
}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    """tellin makes 400 tokens/s, a peer 100, a third cannot load, a fourth dies."""
    module = "tests.benchmarks.fake_driver"
    monkeypatch.setattr(engines, "IDLE_SECONDS", 0.01)
    monkeypatch.setattr(
        engines,
        "DRIVERS",
        {
            "tellin": ("json", [module, "400"]),
            "slow": ("json", [module, "100"]),
            "broken": ("json", [module, "100", "load"]),
            "mortal": ("json", [module, "100", "die"]),
            "partial": ("json", [module, "100", "prefill"]),
            "absent": ("no_such_package_here", [module, "1"]),
        },
    )


@pytest.fixture
def model(tmp_path: Path) -> BenchModel:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"x" * 1000)
    return BenchModel("m", path, 1000, "Q4_0", 1000, 500, 1000, 5000)


def spec(name: str) -> EngineSpec:
    return EngineSpec(name, sys.executable)


def process_state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "gone"


@pytest.mark.usefixtures("fake")
def test_engine_is_stopped_between_its_turns() -> None:
    engine = Engine(spec("slow"))
    try:
        pid = engine.call("info")["pid"]
        deadline = time.monotonic() + 5
        while process_state(pid) != "T" and time.monotonic() < deadline:
            time.sleep(0.001)  # a signal arrives when the process is next looked at
        assert process_state(pid) == "T"
        assert engine.call("info")["pid"] == pid
    finally:
        engine.close()


@pytest.mark.usefixtures("fake")
def test_engine_is_awake_before_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it does in the background is done, as in a process that nobody stops."""
    engine = Engine(spec("slow"))
    pid = engine.call("info")["pid"]
    states = []

    def sleep(seconds: float) -> None:
        real_sleep(0.05)
        states.append((seconds, process_state(pid)))

    real_sleep = time.sleep
    monkeypatch.setattr(engines, "IDLE_SECONDS", 0.5)
    monkeypatch.setattr(time, "sleep", sleep)
    try:
        engine.measure(DECODE.to_json(), 1)
    finally:
        monkeypatch.undo()
        engine.close()
    assert states == [(0.5, "S")]


@pytest.mark.usefixtures("fake")
def test_errors_of_an_engine_carry_its_words() -> None:
    engine = Engine(spec("broken"))
    try:
        with pytest.raises(EngineFailedError, match=r"broken failed in load.*cannot open /x"):
            engine.call("load", model="/x", options={})
        assert engine.call("info")["version"] == "1.0"  # it lives on
    finally:
        engine.close()


@pytest.mark.usefixtures("fake")
def test_a_dead_engine_is_an_error_and_no_hang() -> None:
    engine = Engine(spec("mortal"))
    try:
        with pytest.raises(EngineFailedError, match="mortal"):
            engine.measure(PREFILL.to_json(), 1)
    finally:
        engine.close()


def test_engines_end_with_a_killed_parent() -> None:
    """A stopped engine cannot see that its pipe has closed."""
    code = (
        "import sys; from benchmarks import engines as e; "
        "e.DRIVERS['x'] = ('json', ['tests.benchmarks.fake_driver', '1']); "
        "print(e.Engine(e.EngineSpec('x', sys.executable)).call('info')['pid'], flush=True); "
        "sys.stdin.read()"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=pipe, stdout=pipe, cwd=ROOT
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
    deadline = time.monotonic() + 5
    while process_state(pid) not in {"gone", "Z"}:
        assert time.monotonic() < deadline, "the engine lives on"
        time.sleep(0.01)


@pytest.mark.usefixtures("fake")
def test_resolve_names_what_is_missing() -> None:
    specs, missing = engines.resolve({}, ["tellin", "absent"])
    assert [found.name for found in specs] == ["tellin"]
    assert len(missing) == 1
    assert "no_such_package_here" in missing[0]


@pytest.mark.usefixtures("fake")
def test_case_takes_medians_and_ratios() -> None:
    pair = [Engine(spec("tellin")), Engine(spec("slow"))]
    try:
        row = compare.measure_case(DECODE, pair, rounds=3, notes=[])
    finally:
        for engine in pair:
            engine.close()
    assert row["engines"]["tellin"]["median"] == pytest.approx(400)
    assert row["engines"]["tellin"]["max"] == pytest.approx(800)
    assert row["engines"]["tellin"]["min"] == pytest.approx(400 / 1.5)
    assert row["engines"]["slow"]["settings"] == {"chosen": "decode"}
    assert row["ratios"] == {"slow": pytest.approx(4)}


@pytest.mark.usefixtures("fake")
def test_failing_peers_are_left_out(model: BenchModel, tmp_path: Path) -> None:
    args = argparse.Namespace(threads=2, vllm_dtype=None, no_start=False)
    cases = [PREFILL, BATCHED, Case("decode", context=490, steps=20)]
    names = ("tellin", "slow", "broken", "mortal", "partial")
    measured = compare.measure_model(
        model, [spec(n) for n in names], cases, 3, args, LIMITS, tmp_path
    )
    assert set(measured["engines"]) == {"tellin", "slow", "mortal", "partial"}
    rows = measured["cases"]
    assert list(rows) == ["prefill 100", "decode 4 streams"]  # 490 + 20 tokens do not fit
    assert "error" in rows["prefill 100"]["engines"]["partial"]
    assert rows["decode 4 streams"]["engines"]["partial"]["median"] == pytest.approx(100)
    assert rows["prefill 100"]["ratios"] == {"slow": pytest.approx(4)}
    # 400 tokens/s of 5000 multiply-accumulates each, of 1e7 a second.
    assert rows["prefill 100"]["ceiling"] == pytest.approx(0.2)
    assert measured["start"]["tellin"]["first_token_s"] >= measured["start"]["tellin"]["load_s"] > 0
    notes = "\n".join(measured["notes"])
    for text in ("broken", "mortal", "no prefill today", "longer than the model's 500 tokens"):
        assert text in notes
    table = report.rate_table("m", rows, list(measured["engines"]))
    assert "failed" in table
    assert "4.00" in table


def test_vllm_without_a_converter_is_left_out(model: BenchModel, tmp_path: Path) -> None:
    with pytest.raises(EngineFailedError, match="reads no GGUF"):
        engines.path_for(spec("vllm"), model.path, [spec("tellin")], tmp_path)
    assert engines.path_for(spec("vllm"), tmp_path, [], tmp_path) == tmp_path  # a folder as it is


@pytest.mark.usefixtures("fake")
def test_command_writes_file_and_diff_reads_it(
    model: BenchModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(compare, "DRIVERS", engines.DRIVERS)
    monkeypatch.setattr(compare, "open_bench_model", lambda name, cache: model)
    monkeypatch.setattr(ceilings, "measure", lambda cache, threads: LIMITS)
    parser = argparse.ArgumentParser()
    compare.add_arguments(parser)
    output = tmp_path / "out.json"
    arguments = ["--quick", "--engines", "tellin", "slow", "--cases", "prefill", "--no-start"]
    arguments.append("--no-extras")
    args = parser.parse_args([*arguments, "--models", "m", "--output", str(output)])
    assert compare.run(args) == 0
    assert "prefill 128" in capsys.readouterr().out
    result = json.loads(output.read_text())
    assert result["rounds"] == 3
    assert result["machine"]["cores"] >= 1
    assert result["models"]["m"]["cases"]["prefill 128"]["ratios"]["slow"] == pytest.approx(4)
    assert "+0.0%" in diff.table(output, output)


def test_ceilings_count_weights_of_one_stream_only(model: BenchModel) -> None:
    share = report.ceiling_fraction(DECODE.to_json(), 500, model, LIMITS)
    assert share == pytest.approx(500 * 1000 / 1e6)
    assert report.ceiling_fraction(BATCHED.to_json(), 500, model, LIMITS) is None
    assert report.ceiling_fraction(DECODE.to_json(), 500, model, {}) is None


def test_noise_of_others_is_marked() -> None:
    samples = [{"seconds": 1.0, "tokens": 10, "others": others} for others in (0.0, 0.2, 0.3)]
    rows = {"x": {"engines": {"tellin": report.summarise(samples)}, "ratios": {}}}
    assert "10.0~" in report.rate_table("t", rows, ["tellin"])


@pytest.mark.slow
def test_ceilings_of_this_machine(tmp_path: Path) -> None:
    limits = ceilings.measure(tmp_path, num_threads=1)
    assert limits["read_bytes_per_s"] > 1e9
    assert limits["int8_mac_per_s"] >= limits["float32_mac_per_s"] > 1e9


def test_scheduler_cost_is_measured_while_all_running_requests_decode() -> None:
    schedule_s, update_s = scheduler_cost.measure(4, 20, num_steps=5)
    assert 0 < schedule_s < 1
    assert 0 < update_s < 1


@pytest.mark.slow
def test_overhead_splits_a_step(smollm2_path: Path) -> None:
    row = overhead.measure(str(smollm2_path), num_streams=2)
    parts = row["forward_s"] + row["sample_s"] + row["rest_s"]
    assert parts == pytest.approx(row["step_s"], rel=0.5)
    assert row["forward_s"] > row["sample_s"] > 0


@pytest.mark.slow
def test_speculation_compares_engines_that_take_turns(smollm2_path: Path, tmp_path: Path) -> None:
    """Same ids with and without drafts; a copied passage has right ones."""
    (row,) = speculation.measure("ngram", ["copy"], tmp_path, num_drafts=4, max_tokens=24, rounds=1)
    assert row["equal"]
    assert len(row["ratios"]) == 1
    assert row["num_draft_tokens"] >= row["num_drafts"] > 0
    assert 0.0 < row["acceptance_rate"] <= 1.0
    assert row["mean_acceptance_length"] > 1.0
