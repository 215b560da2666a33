"""Measurements of ours alone that `compare` adds at the end: overhead, scheduler, fidelity.

Each is a command of this package, run in a process of its own under tellin's interpreter, so that
its memory and threads are gone before the next begins. What one prints is kept as it is.
"""

from __future__ import annotations

import subprocess

from benchmarks.engines import EngineSpec
from benchmarks.machine import ROOT


def run(tellin: EngineSpec, llama: EngineSpec | None, model: str, quick: bool) -> dict[str, str]:
    """Output of each command by its name; a command that fails says so and stops nothing."""
    commands = {
        "overhead": [model],
        "overhead, sampled": [model, "--sampled"],
        "scheduler": [],
        "fidelity": [model] + (["--llama-python", llama.python] if llama else []),
    }
    if quick:
        del commands["overhead, sampled"], commands["fidelity"]
    texts = {}
    for name, arguments in commands.items():
        command = [tellin.python, "-m", "benchmarks", name.partition(",")[0], *arguments]
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=tellin.environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        last = done.stderr.strip().splitlines()[-1:]
        texts[name] = done.stdout.strip() if not done.returncode else f"failed: {' '.join(last)}"
    return texts
