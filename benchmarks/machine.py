"""What the machine is, and how much of it others are using while something is measured.

Reads /proc and /sys where they exist (Linux); elsewhere the same keys hold what can be known.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SIMD_FLAGS = (
    *("sse4_2", "avx", "avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512vl"),
    *("avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_int8", "amx_bf16"),
    *("asimd", "asimddp", "i8mm", "bf16", "sve"),
)


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip()


def _cpu_model() -> tuple[str, set[str]]:
    model, flags = platform.processor() or platform.machine(), set[str]()
    for line in _read("/proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            model = value.strip()
        elif key.strip() in {"flags", "Features"}:
            flags = set(value.split())
    return model, flags


def describe() -> dict[str, Any]:
    """Machine, system and source revision, for the head of a result file."""
    model, flags = _cpu_model()
    compiler = shutil.which("c++") or shutil.which("g++") or ""
    caches = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind = _read(f"{index}/level").strip(), _read(f"{index}/type").strip()
        caches[f"L{level} {kind}"] = _read(f"{index}/size").strip()
    memory_kib = 0
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemTotal:"):
            memory_kib = int(line.split()[1])
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": model,
        "simd": [flag for flag in SIMD_FLAGS if flag in flags],
        "cores": num_cores(),
        "caches": caches,
        "memory_gib": round(memory_kib / 2**20, 1),
        "transparent_hugepage": _read("/sys/kernel/mm/transparent_hugepage/enabled").strip(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "compiler": _output(compiler, "--version").partition("\n")[0] if compiler else "",
        "commit": _output("git", "rev-parse", "--short=12", "HEAD"),
        "modified": bool(_output("git", "status", "--porcelain", "--untracked-files=no")),
        "load_average": list(os.getloadavg()),
    }


def has_bfloat16() -> bool:
    """Whether PyTorch's engines are faster in bfloat16 than in float32 here."""
    return bool({"avx512_bf16", "amx_bf16", "bf16"} & _cpu_model()[1])


def num_cores() -> int:
    """Cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Quietness:
    """Share of the machine that processes other than the measured one used meanwhile.

    Cores of a virtual machine that its host took away (steal) count as used by others too.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._before = self._sample()

    def _sample(self) -> tuple[float, float, float]:
        """Jiffies: all that passed, busy ones, those of the measured process and its children."""
        fields = _read("/proc/stat").partition("\n")[0].split()[1:9]
        if len(fields) < 8:
            return 0.0, 0.0, 0.0
        user, nice, system, idle, iowait, irq, softirq, steal = map(float, fields)
        busy = user + nice + system + irq + softirq + steal
        return busy + idle + iowait, busy, _tree_jiffies(self._pid)

    def others(self) -> float:
        """0 = quiet, 1 = all cores were busy with something else."""
        total, busy, own = (
            after - before for after, before in zip(self._sample(), self._before, strict=True)
        )
        return max(0.0, (busy - own) / total) if total else 0.0


def _tree_jiffies(pid: int) -> float:
    """User and system time of a process, its threads and its living children."""
    stat = _read(f"/proc/{pid}/stat")
    if not stat:
        return 0.0
    fields = stat.rpartition(")")[2].split()
    own = float(fields[11]) + float(fields[12])
    children = _read(f"/proc/{pid}/task/{pid}/children").split()
    return own + sum(_tree_jiffies(int(child)) for child in children)
