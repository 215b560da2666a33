"""KV pages committed ahead of their use: when, how far, and that nobody else notices.

The thread works while a processor is idle, which no test can promise: a folder with a /proc of its
own tells it so.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest

from tellin.kernels import _C
from tellin.kernels.native import NativeBackend
from tests.kernels.runtime_plans import Cache, llama_plan, random_ids
from tests.kernels.test_thread_team import run_script, write

MIB = 1 << 20


def has_kernel(major: int, minor: int) -> bool:
    release = os.uname().release.split(".")
    return sys.platform == "linux" and (int(release[0]), int(release[1])) >= (major, minor)


pytestmark = pytest.mark.skipif(
    not has_kernel(6, 4), reason="before Linux 6.4 a page fault locks the whole address space"
)

IDLE = {"proc/loadavg": "0.00 0.00 0.00 1/99 7\n", "proc/meminfo": "MemAvailable: 8000000 kB\n"}


@pytest.fixture
def idle(tmp_path: Path) -> str:
    return str(write(tmp_path, IDLE))


def make_backend() -> NativeBackend:
    """256 KiB per block: 1200 blocks are 300 MiB, of which a quarter may be committed ahead."""
    plan = llama_plan(num_layers=8, num_kv_heads=8, head_dim=64)
    backend = NativeBackend(plan, num_threads=2)
    assert backend.kv_bytes_per_block() == 256 << 10
    return backend


def start(backend: NativeBackend, root: str, num_blocks: int = 1200) -> Cache:
    cache = Cache(backend, num_blocks=num_blocks)
    program(backend).init_kv_cache(num_blocks, root)
    return cache


def program(backend: NativeBackend) -> _C.Program:
    assert backend._program is not None
    return backend._program


def committed(backend: NativeBackend) -> int:
    return program(backend).kv_committed_bytes


def num_threads() -> int:
    count = 0
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended meanwhile
            count += (task / "comm").read_text().startswith("kv-ahead")
    return count


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


# ---- how far ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("used", "size", "available", "expected"),
    [
        (0, 4096, 8192, 32),  # so much always
        (100, 4096, 8192, 100),  # as much again
        (101.5, 4096, 8192, 100),  # in huge pages
        (1000, 4096, 8192, 256),  # and no more
        (1000, 400, 8192, 100),  # a quarter of the pool
        (1000, 4096, 80, 10),  # an eighth of the free memory
        (0, 7, 8192, 0),
        (0, 4096, 0, 0),
    ],
)
def test_how_far_ahead(used: float, size: int, available: int, expected: int) -> None:
    assert _C.commit_ahead(int(used * MIB), size * MIB, available * MIB) == expected * MIB


@pytest.mark.parametrize(
    ("files", "expected_mib"),
    [
        ({}, 7812),
        ({"proc/self/cgroup": "0::/a/b\n"}, 7812),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/memory.max": "max\n"}, 7812),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/b/memory.max": f"{900 * MIB}\n",
                "sys/fs/cgroup/a/b/memory.current": f"{100 * MIB}\n",
                "sys/fs/cgroup/a/memory.max": f"{800 * MIB}\n",  # the group above has less
                "sys/fs/cgroup/a/memory.current": f"{300 * MIB}\n",
            },
            500,
        ),
        # A container sees its own group as the root, and may be over its limit.
        (
            {
                "proc/self/cgroup": "0::/host/path\n",
                "sys/fs/cgroup/memory.max": f"{100 * MIB}\n",
                "sys/fs/cgroup/memory.current": f"{101 * MIB}\n",
            },
            0,
        ),
        (
            {
                "proc/self/cgroup": "3:cpu:/x\n5:memory,hugetlb:/x\nnonsense",
                "sys/fs/cgroup/memory/x/memory.limit_in_bytes": f"{300 * MIB}\n",
                "sys/fs/cgroup/memory/x/memory.usage_in_bytes": f"{100 * MIB}\n",
            },
            200,
        ),
    ],
)
def test_available_memory(tmp_path: Path, files: dict[str, str], expected_mib: int) -> None:
    assert _C.available_memory(str(write(tmp_path, IDLE | files))) // MIB == expected_mib


def test_unknown_memory_is_no_limit(tmp_path: Path) -> None:
    assert _C.available_memory(str(tmp_path)) == 2**64 - 1


# ---- when ------------------------------------------------------------------------------------


def test_pages_are_committed_before_they_are_used(idle: str) -> None:
    backend = make_backend()
    cache = start(backend, idle)
    time.sleep(0.05)
    assert committed(backend) == 0, "nothing before the first step"
    before = psutil.Process().memory_info().rss
    cache.step(("a", random_ids(40)))  # blocks 0 to 3: 1 MiB, and 32 ahead
    wait_for(lambda: committed(backend) == 34 * MIB)
    assert psutil.Process().memory_info().rss - before > 30 * MIB
    wait_for(lambda: num_threads() == 0)  # until there is something to do again
    # 10.25 MiB more leave less than three quarters of what is wanted.
    cache.step(("b", random_ids(640)))
    time.sleep(0.11)  # a thread that ends is not started again at once
    cache.step(("b", [1]))
    wait_for(lambda: committed(backend) == 44 * MIB)
    backend.free_kv_cache()
    assert committed(backend) == 0


def test_half_used_stock_is_left_alone(idle: str) -> None:
    backend = make_backend()
    cache = start(backend, idle)
    cache.step(("a", random_ids(40)))
    wait_for(lambda: committed(backend) == 34 * MIB)
    time.sleep(0.11)
    for i in range(10):
        cache.step(("b", random_ids(20, seed=i)))
    time.sleep(0.05)
    assert committed(backend) == 34 * MIB
    wait_for(lambda: num_threads() == 0)


@pytest.mark.parametrize(
    "files",
    [
        {"proc/loadavg": "9.00 9.00 9.00 5000/9999 7\n"},
        {"proc/meminfo": "MemAvailable: 15000 kB\n"},
    ],
    ids=["busy", "little memory"],
)
def test_no_time_or_no_memory_to_spare(tmp_path: Path, files: dict[str, str]) -> None:
    backend = make_backend()
    cache = start(backend, str(write(tmp_path, IDLE | files)))
    cache.step(("a", random_ids(40)))
    time.sleep(0.2)
    wait_for(lambda: num_threads() == 0)
    assert committed(backend) == 0


def test_small_pools_are_left_alone(idle: str) -> None:
    backend = make_backend()
    cache = start(backend, idle, num_blocks=31)
    cache.step(("a", random_ids(40)))
    assert num_threads() == 0
    assert committed(backend) == 0


# ---- nobody notices --------------------------------------------------------------------------


def test_results_are_the_same_bits_while_pages_are_committed(tmp_path: Path) -> None:
    """Rows are written into pages that the thread commits at the same time."""
    busy = write(tmp_path / "busy", IDLE | {"proc/loadavg": "9 9 9 5000/9999 7\n"})
    idle = write(tmp_path / "idle", IDLE)
    backend = make_backend()
    results = []
    for root in (busy, idle):
        cache = start(backend, str(root))
        rows = [cache.step(("a", random_ids(40)))[0]]
        rows += [cache.step((f"r{i}", random_ids(200, seed=i)))[0] for i in range(12)]
        rows += [cache.step((f"r{i}", [5]))[0] for i in range(12)]
        results.append(np.concatenate(rows))
    assert committed(backend) > 0
    np.testing.assert_array_equal(*results)


def test_the_cache_is_freed_and_made_anew_at_any_moment(idle: str) -> None:
    """Sleep, wake and close while the thread is at work."""
    backend = make_backend()
    moments = random.Random(1)
    cache = start(backend, idle)
    expected = cache.step(("a", random_ids(40)))[0]
    before = psutil.Process().memory_info().rss
    grown = 0
    for _ in range(30):
        cache = start(backend, idle)
        np.testing.assert_array_equal(cache.step(("a", random_ids(40)))[0], expected)
        time.sleep(moments.random() * 0.03)
        grown += committed(backend) > 0
        if moments.random() < 0.5:
            backend.free_kv_cache()
            assert committed(backend) == 0
    assert grown > 0
    start(backend, idle).step(("a", random_ids(40)))
    backend.close()
    wait_for(lambda: num_threads() == 0)  # it touches nothing any more, but has to end
    assert psutil.Process().memory_info().rss - before < 40 * MIB


def test_a_forked_child_has_no_such_thread_and_may_start_its_own(idle: str) -> None:
    run_script(f"""
import os, time
import numpy as np
from tests.kernels.test_commit_ahead import *
backend = make_backend()
cache = start(backend, {idle!r})
expected = cache.step(("a", random_ids(40)))[0]
children = []
for moment in range(5):
    children.append(os.fork())
    if children[-1] == 0:
        assert num_threads() == 0
        cache = start(backend, {idle!r})
        assert np.array_equal(cache.step(("a", random_ids(40)))[0], expected)
        wait_for(lambda: committed(backend) == 34 * MIB)
        backend.close()
        os._exit(0)
    time.sleep(0.002)
assert all(os.waitpid(child, 0)[1] == 0 for child in children)
wait_for(lambda: committed(backend) == 34 * MIB)
""")


def test_steps_run_where_no_thread_can_be_had(idle: str) -> None:
    run_script(f"""
import resource
import numpy as np
from tests.kernels.test_commit_ahead import *
backend = make_backend()
expected = start(backend, {idle!r}, num_blocks=31).step(("a", random_ids(40)))[0]
backend.free_kv_cache()
cache = start(backend, {idle!r})
used = psutil.Process().memory_info().vms
resource.setrlimit(resource.RLIMIT_AS, (used, used))
assert np.array_equal(cache.step(("a", random_ids(40)))[0], expected)
time.sleep(0.1)
assert committed(backend) == 0 and num_threads() == 0
""")
