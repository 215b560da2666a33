"""Ceilings of the machine, measured in the same run as the engines by a small program.

``ceilings.cpp`` is compiled with the system's compiler for the very CPU it runs on, so its figures
are what the best possible kernel could reach: bytes read per second, multiply-accumulates per
second in int8 and float32, all allowed cores together.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.machine import num_cores

SOURCE = Path(__file__).with_name("ceilings.cpp")


def measure(cache: Path, num_threads: int | None = None) -> dict[str, Any]:
    """Compile (once per change) into ``cache`` and run.

    Returns:
        ``read_bytes_per_s``, ``int8_mac_per_s``, ``float32_mac_per_s`` and how they were got.

    Raises:
        RuntimeError: there is no C++ compiler, or the program failed.
    """
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        raise RuntimeError("ceilings need a C++ compiler: install one or set CXX")
    program = cache / "ceilings"
    if not program.exists() or program.stat().st_mtime < SOURCE.stat().st_mtime:
        cache.mkdir(parents=True, exist_ok=True)
        command = [compiler, "-O3", "-std=c++17", "-march=native", "-pthread"]
        _run([*command, str(SOURCE), "-o", str(program)])
    result: dict[str, Any] = json.loads(_run([str(program), str(num_threads or num_cores())]))
    return result


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed ({done.returncode}): {done.stderr.strip()}")
    return done.stdout
