"""The parent's side of the protocol: engine processes that take turns.

Each engine is a process of its own, in the Python environment the user named for it. Between its
turns it is stopped (SIGSTOP), so that no idle engine's threads can disturb another's measurement.
Before each turn it is awake for a moment, idle, as a process is that nobody stops.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from benchmarks.machine import ROOT, Quietness

DRIVERS = {
    "tellin": ("tellin", ["benchmarks.drivers.vllm_api", "tellin"]),
    "llama.cpp": ("llama_cpp", ["benchmarks.drivers.llama_cpp"]),
    "vllm": ("vllm", ["benchmarks.drivers.vllm_api", "vllm"]),
    "transformers": ("transformers", ["benchmarks.drivers.hugging_face"]),
}
"""Engine name: the package that must be importable, and the driver's command line."""


IDLE_SECONDS = 0.5
"""Awake and idle before each turn: for what an engine does while it has nothing to do."""


class EngineFailedError(Exception):
    """An engine could not do what it was asked; the message is its own."""


@dataclass(frozen=True)
class EngineSpec:
    """An engine and the interpreter that runs it."""

    name: str
    python: str

    def is_importable(self) -> bool:
        """Whether the engine's package exists in its environment (it is not imported)."""
        probe = (
            f"import importlib.util, sys; sys.exit(not importlib.util.find_spec({self.package!r}))"
        )
        try:
            done = subprocess.run([self.python, "-c", probe], cwd="/", check=False)
        except OSError as error:
            raise EngineFailedError(f"{self.name}: cannot run {self.python}: {error}") from error
        return done.returncode == 0

    @property
    def package(self) -> str:
        return DRIVERS[self.name][0]

    def command(self) -> list[str]:
        return [self.python, "-m", *DRIVERS[self.name][1]]

    def environment(self) -> dict[str, str]:
        # The drivers import `benchmarks` from the working directory and nothing else from here.
        ours = {"PYTHONPATH", "VIRTUAL_ENV"}
        return {name: value for name, value in os.environ.items() if name not in ours}


class Engine:
    """A running engine process. Methods raise `EngineFailedError`."""

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self.name = spec.name
        self._log = tempfile.TemporaryFile(prefix="bench-")  # noqa: SIM115 (closed in close)
        self._process = subprocess.Popen(
            spec.command(),
            cwd=ROOT,
            env=spec.environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,
        )

    def call(self, method: str, timeout: float = 3600.0, **args: Any) -> dict[str, Any]:
        """Wake the engine, have it do one thing, and stop it again."""
        self._signal(signal.SIGCONT)
        try:
            _pipe(self._process.stdin).write(json.dumps({"call": method, "args": args}) + "\n")
            _pipe(self._process.stdin).flush()
            answer = json.loads(self._read_line(timeout))
        except (BrokenPipeError, json.JSONDecodeError) as error:
            raise EngineFailedError(f"{self.name} ended in {method}: {self._log_tail()}") from error
        finally:
            self._signal(signal.SIGSTOP)
        if not answer["ok"]:
            raise EngineFailedError(f"{self.name} failed in {method}: {answer['error']}")
        result: dict[str, Any] = answer["result"]
        return result

    def measure(self, case: dict[str, Any], seed: int) -> dict[str, Any]:
        """One sample; ``others`` is the share of the machine that others used meanwhile."""
        self._signal(signal.SIGCONT)
        time.sleep(IDLE_SECONDS)
        quietness = Quietness(self._process.pid)
        result = self.call("measure", case=case, seed=seed)
        return result | {"others": quietness.others()}

    def close(self) -> None:
        """End the process and all it started."""
        self._signal(signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):
            _pipe(self._process.stdin).close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self._process.wait()
        _pipe(self._process.stdout).close()
        self._log.close()

    def _signal(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)

    def _read_line(self, timeout: float) -> str:
        # One answer per call: nothing can be left in the text layer's buffer between two calls.
        readable, _, _ = select.select([self._process.stdout], [], [], timeout)
        if not readable:
            self._signal(signal.SIGKILL)
            raise EngineFailedError(f"{self.name} gave no answer within {timeout:.0f} s")
        return _pipe(self._process.stdout).readline()

    def _log_tail(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return " | ".join(lines[-3:]) or "no output"


def _pipe(stream: IO[str] | None) -> IO[str]:
    if stream is None:
        raise EngineFailedError("the engine process has no pipe")
    return stream


def first_token(spec: EngineSpec, model: str, timeout: float = 600.0) -> dict[str, float]:
    """Start an engine from nothing and have it answer a chat prompt.

    Returns:
        ``load_s`` and ``first_token_s`` (seconds from process start) and ``peak_rss_bytes``.
    """
    started = time.time()
    with tempfile.TemporaryFile(prefix="bench-") as log:
        process = subprocess.Popen(
            [*spec.command(), "--first-token", model],
            cwd=ROOT,
            env=spec.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        events: dict[str, float] = {}
        for line in _pipe(process.stdout):
            message = json.loads(line)
            events[message["event"]] = message["time"] - started
            if time.time() - started > timeout:
                process.kill()
        _pipe(process.stdout).close()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode or "first_token" not in events:
            log.seek(0)
            tail = log.read().decode(errors="replace").strip().splitlines()[-3:]
            raise EngineFailedError(f"{spec.name} did not answer: {' | '.join(tail)}")
    unit = 1 if sys.platform == "darwin" else 1024
    return {
        "load_s": events["loaded"],
        "first_token_s": events["first_token"],
        "peak_rss_bytes": float(usage.ru_maxrss * unit),
    }


def path_for(spec: EngineSpec, model: Path, specs: list[EngineSpec], cache: Path) -> Path:
    """The file or folder that ``spec`` opens for ``model``.

    vLLM reads no GGUF on a CPU: it gets the same weights as a safetensors folder, which
    Transformers writes into the cache once. Raises `EngineFailedError` where that cannot be had.
    """
    if spec.name != "vllm" or model.is_dir():
        return model
    folder = cache / f"{model.stem}-safetensors"
    if folder.is_dir():
        return folder
    exporter = next((other for other in specs if other.name == "transformers"), None)
    if exporter is None:
        raise EngineFailedError("vllm: reads no GGUF, and transformers is not here to convert it")
    partial = folder.with_suffix(".partial")
    done = subprocess.run(
        [*exporter.command(), "--export", str(model), str(partial)],
        cwd=ROOT,
        env=exporter.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:]
        raise EngineFailedError(f"vllm: cannot convert {model.name}: {' '.join(last)}")
    partial.rename(folder)
    return folder


def resolve(
    pythons: dict[str, Path | None], names: list[str]
) -> tuple[list[EngineSpec], list[str]]:
    """Engines that can run, and one line for each that cannot.

    ``pythons`` maps an engine to the interpreter that the user named for it; without one, the
    current interpreter is tried.
    """
    specs, missing = [], []
    for name in names:
        spec = EngineSpec(name, str(pythons.get(name) or sys.executable))
        if spec.is_importable():
            specs.append(spec)
        else:
            missing.append(f"{name}: no package {spec.package} in {spec.python}; left out")
    return specs, missing
