"""How much memory this process may still use: the machine's and every control group's word on it.

Knows Linux control groups of both versions and falls back to what the system reports elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil

_UNLIMITED = 1 << 62
"""Limits at or above this mean "none" (version 1 writes a huge number instead of ``max``)."""


@dataclass(frozen=True)
class Memory:
    """Bytes: what there is in all, and what is free or can be freed without swapping."""

    total: int
    available: int


def process_memory(root: Path = Path("/")) -> Memory:
    """Memory of this machine, lowered by the limits of the control groups this process is in."""
    machine = psutil.virtual_memory()
    total, available = int(machine.total), int(machine.available)
    for limit, used in _group_limits(root):
        total = min(total, limit)
        available = min(available, max(limit - used, 0))
    return Memory(total, available)


def resident_bytes() -> int:
    """Resident set size of this process."""
    return int(psutil.Process().memory_info().rss)


def _group_limits(root: Path) -> list[tuple[int, int]]:
    """(limit, used) of every control group on the path to this process that has a limit."""
    limits = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        hierarchy, controllers, path = ([*line.split(":", 2), "", ""])[:3]
        if hierarchy == "0" and not controllers:
            base, names = (
                root / "sys/fs/cgroup",
                ("memory.max", "memory.current", "inactive_file"),
            )
        elif "memory" in controllers.split(","):
            base, names = (
                root / "sys/fs/cgroup/memory",
                ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
            )
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        # A container often sees its own group mounted at the base: missing folders are skipped.
        for depth in range(len(parts), -1, -1):
            group = base.joinpath(*parts[:depth])
            limit = _read_int(group / names[0])
            if limit is not None and limit < _UNLIMITED:
                used = _read_int(group / names[1]) or 0
                limits.append((limit, max(used - _stat(group / "memory.stat", names[2]), 0)))
    return limits


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _read_int(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdigit() else None


def _stat(path: Path, name: str) -> int:
    """A line ``name value`` of a stat file: file pages that can be dropped count as free."""
    for line in _read(path).splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.strip().isdigit():
            return int(value)
    return 0
