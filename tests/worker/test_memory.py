"""What memory a worker believes it may use: machine, control groups, configuration (P62)."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tellin.worker.memory as memory
import tellin.worker.worker as worker_module
from tellin.config import CacheConfig
from tellin.exceptions import OutOfMemoryError
from tellin.worker.worker import Worker
from tests.worker.fakes import FakeBackend, make_config

GIB = 1 << 30


def files(root: Path, contents: dict[str, str]) -> None:
    for name, text in contents.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of 64 GiB, 40 of them available."""
    monkeypatch.setattr(
        memory.psutil,
        "virtual_memory",
        lambda: SimpleNamespace(total=64 * GIB, available=40 * GIB),
    )


def test_no_groups(machine: None, tmp_path: Path) -> None:
    assert memory.process_memory(tmp_path) == memory.Memory(64 * GIB, 40 * GIB)


def test_version_2_takes_the_tightest_ancestor(machine: None, tmp_path: Path) -> None:
    """Dropped file pages count as free; ``max`` is no limit."""
    files(
        tmp_path,
        {
            "proc/self/cgroup": "0::/pod/box\n",
            "sys/fs/cgroup/pod/box/memory.max": "max\n",
            "sys/fs/cgroup/pod/box/memory.current": f"{GIB}\n",
            "sys/fs/cgroup/pod/memory.max": f"{8 * GIB}\n",
            "sys/fs/cgroup/pod/memory.current": f"{3 * GIB}\n",
            "sys/fs/cgroup/pod/memory.stat": f"anon 5\ninactive_file {GIB}\n",
        },
    )
    assert memory.process_memory(tmp_path) == memory.Memory(8 * GIB, 6 * GIB)


def test_version_2_inside_a_container(machine: None, tmp_path: Path) -> None:
    """The path names a group of the host; only the mount itself is there."""
    files(
        tmp_path,
        {
            "proc/self/cgroup": "0::/docker/abc\n",
            "sys/fs/cgroup/memory.max": f"{2 * GIB}\n",
            "sys/fs/cgroup/memory.current": f"{GIB}\n",
        },
    )
    assert memory.process_memory(tmp_path) == memory.Memory(2 * GIB, GIB)


def test_version_1(machine: None, tmp_path: Path) -> None:
    """Huge numbers mean unlimited; other controllers are not read."""
    files(
        tmp_path,
        {
            "proc/self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/job\n",
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{4 * GIB}\n",
            "sys/fs/cgroup/memory/job/memory.usage_in_bytes": f"{3 * GIB}\n",
            "sys/fs/cgroup/memory/job/memory.stat": f"total_inactive_file {2 * GIB}\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        },
    )
    assert memory.process_memory(tmp_path) == memory.Memory(4 * GIB, 3 * GIB)


def test_a_full_group_has_nothing_left(machine: None, tmp_path: Path) -> None:
    files(
        tmp_path,
        {
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/memory.max": f"{GIB}\n",
            "sys/fs/cgroup/memory.current": f"{2 * GIB}\n",
        },
    )
    assert memory.process_memory(tmp_path).available == 0


def test_this_machine_can_be_read() -> None:
    found = memory.process_memory()
    assert 0 < found.available <= found.total
    assert memory.resident_bytes() > 1 << 20


# ---------------------------------------------------------------------- the pool's share


def worker(monkeypatch: pytest.MonkeyPatch, total: int, available: int, **cache: Any) -> Worker:
    monkeypatch.setattr(worker_module, "process_memory", lambda: memory.Memory(total, available))
    monkeypatch.setattr(worker_module, "resident_bytes", lambda: GIB)
    config = dataclasses.replace(make_config(), cache_config=CacheConfig(**cache))
    return Worker(config, FakeBackend(64))


def test_p62_default_is_half_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    assert worker(monkeypatch, 64 * GIB, 10 * GIB).determine_available_memory() == 5 * GIB
    assert worker(monkeypatch, 2 * GIB, GIB).determine_available_memory() == GIB // 2


def test_p62_explicit_size(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = worker(monkeypatch, 64 * GIB, 10 * GIB, kv_cache_memory_bytes=3 * GIB)
    assert exact.determine_available_memory() == 3 * GIB
    with pytest.raises(OutOfMemoryError, match="kv_cache_memory_bytes"):
        worker(
            monkeypatch, 64 * GIB, 2 * GIB, kv_cache_memory_bytes=3 * GIB
        ).determine_available_memory()


def test_p62_utilization_counts_what_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """A share of the total, less what this process already holds, at most what is available."""
    half = worker(monkeypatch, 8 * GIB, 6 * GIB, memory_utilization=0.5)
    assert half.determine_available_memory() == 3 * GIB
    tight = worker(monkeypatch, 64 * GIB, 6 * GIB, memory_utilization=0.5)
    assert tight.determine_available_memory() == 6 * GIB
    with pytest.raises(OutOfMemoryError, match="memory_utilization"):
        worker(monkeypatch, 8 * GIB, 6 * GIB, memory_utilization=0.1).determine_available_memory()
