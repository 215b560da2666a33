"""How many kernel threads this process should use.

Owns the reading of affinity, cgroup quota and core topology. The default is what a guest may take:
one thread per physical core that the affinity mask and the cgroup allow. Nothing here binds a
thread.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ThreadChoice:
    """A number of threads and the limit that decided it."""

    num_threads: int
    reason: str


def choose_num_threads(
    allowed_cpus: Iterable[int], core_of_cpu: dict[int, object], quota_cpus: float | None
) -> ThreadChoice:
    """Least of: allowed CPUs, their distinct physical cores, the quota rounded up.

    Args:
        allowed_cpus: the affinity mask.
        core_of_cpu: CPU number to any key of its physical core; a missing CPU is its own core.
        quota_cpus: CPUs' worth of time the cgroup grants; None = unlimited.
    """
    cpus = set(allowed_cpus)
    cores = len({core_of_cpu.get(cpu, ("cpu", cpu)) for cpu in cpus})
    choice = ThreadChoice(max(1, cores), f"{cores} physical cores among {len(cpus)} allowed CPUs")
    if quota_cpus is not None and math.ceil(quota_cpus) < choice.num_threads:
        return ThreadChoice(max(1, math.ceil(quota_cpus)), f"cgroup quota of {quota_cpus:g} CPUs")
    return choice


def default_num_threads(root: Path = Path("/")) -> ThreadChoice:
    """The choice for this process. ``root`` holds ``proc`` and ``sys`` (tests pass a fake one)."""
    if hasattr(os, "sched_getaffinity"):
        cpus: Iterable[int] = os.sched_getaffinity(0)
    else:
        cpus = range(os.cpu_count() or 1)
    cpus = set(cpus)
    return choose_num_threads(cpus, _core_map(root, cpus), cgroup_quota(root))


def _core_map(root: Path, cpus: Iterable[int]) -> dict[int, object]:
    cores: dict[int, object] = {}
    for cpu in cpus:
        siblings = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        text = _read(siblings)
        if text is not None:
            cores[cpu] = text
    return cores


def cgroup_quota(root: Path = Path("/")) -> float | None:
    """CPUs' worth of time this process's cgroup and its ancestors allow, the least of them.

    Source: Linux documentation, ``admin-guide/cgroup-v2.rst`` (cpu.max) and
    ``scheduler/sched-bwc.rst``.
    """
    limits: list[float] = []
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            base, read = root / "sys/fs/cgroup", _quota_v2
        elif "cpu" in controllers.split(","):
            base, read = root / f"sys/fs/cgroup/{controllers}", _quota_v1
            if not base.is_dir():
                base = root / "sys/fs/cgroup/cpu"
        else:
            continue
        # Inside a container the path may be the host's: then only the mount's root exists.
        folder = base / path.strip("/")
        while True:
            quota = read(folder)
            if quota is not None:
                limits.append(quota)
            if folder == base or base not in folder.parents:
                break
            folder = folder.parent
    return min(limits, default=None)


def _quota_v2(folder: Path) -> float | None:
    fields = (_read(folder / "cpu.max") or "").split()
    if len(fields) != 2 or fields[0] == "max":
        return None
    return _ratio(fields[0], fields[1])


def _quota_v1(folder: Path) -> float | None:
    quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
    if quota is None or period is None or quota.startswith("-"):
        return None
    return _ratio(quota, period)


def _ratio(quota: str, period: str) -> float | None:
    try:
        value = int(quota) / int(period)
    except (ValueError, ZeroDivisionError):
        return None
    return value if value > 0 else None


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
