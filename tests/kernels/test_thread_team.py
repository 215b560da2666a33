"""The kernel threads as guests: how many, where, and what they leave behind (P60, P61)."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from tellin.kernels.cpu import cgroup_quota, choose_num_threads, default_num_threads
from tellin.kernels.native import NativeBackend
from tests.kernels.runtime_plans import Cache, llama_plan, random_ids

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's proc and cgroups")


# ---- how many (P60) --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cpus", "cores", "quota", "expected"),
    [
        (range(8), {}, None, 8),
        (range(8), {}, 4.0, 4),
        (range(8), {}, 3.2, 4),
        (range(8), {}, 0.5, 1),
        (range(8), {}, 100.0, 8),
        ([3, 5], {}, None, 2),
        (range(8), {cpu: cpu // 2 for cpu in range(8)}, None, 4),  # two threads per core
        ([0, 1], {0: "a", 1: "a"}, None, 1),
        ([0, 2, 4], {cpu: cpu // 2 for cpu in range(8)}, 2.0, 2),
        ([], {}, None, 1),
    ],
)
def test_threads_are_the_least_of_all_limits(
    cpus: list[int], cores: dict[int, object], quota: float | None, expected: int
) -> None:
    choice = choose_num_threads(cpus, cores, quota)
    assert choice.num_threads == expected
    assert ("quota" in choice.reason) == (quota is not None and quota <= 4)


def test_p60_the_number_of_threads_and_its_reason_are_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plan = llama_plan()
    with caplog.at_level(logging.INFO, "tellin.kernels"):
        given = NativeBackend(plan, num_threads=2)
        chosen = NativeBackend(plan)
    choice = default_num_threads()
    assert caplog.messages == [
        f"2 kernel threads: as num_threads says; {given.info['isa']}",
        f"{choice.num_threads} kernel threads: {choice.reason}; {chosen.info['isa']}",
    ]


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "max 100000\n"}, None),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "250000 100000"}, 2.5),
        # The ancestor is stricter.
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/b/cpu.max": "800000 100000",
                "sys/fs/cgroup/a/cpu.max": "150000 100000",
            },
            1.5,
        ),
        # A container sees its own group as the root.
        ({"proc/self/cgroup": "0::/host/path\n", "sys/fs/cgroup/cpu.max": "400000 100000"}, 4.0),
        (
            {
                "proc/self/cgroup": "5:cpu,cpuacct:/docker/x\n",
                "sys/fs/cgroup/cpu,cpuacct/docker/x/cpu.cfs_quota_us": "50000",
                "sys/fs/cgroup/cpu,cpuacct/docker/x/cpu.cfs_period_us": "100000",
            },
            0.5,
        ),
        (
            {
                "proc/self/cgroup": "5:cpu:/x\n",
                "sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu/x/cpu.cfs_period_us": "100000",
            },
            None,
        ),
        ({"proc/self/cgroup": "0::/\nnonsense", "sys/fs/cgroup/cpu.max": "x y"}, None),
    ],
)
def test_cgroup_quota(tmp_path: Path, files: dict[str, str], expected: float | None) -> None:
    assert cgroup_quota(write(tmp_path, files)) == expected


def test_siblings_of_a_core_count_once(tmp_path: Path) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    siblings = {
        f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": "0-1" for cpu in cpus
    }
    assert default_num_threads(write(tmp_path, siblings)).num_threads == 1


def test_affinity_limits_the_team_and_is_kept() -> None:
    """P61: in a process bound to one CPU the team has one thread and nobody leaves the mask."""
    cpu = min(os.sched_getaffinity(0))
    script = f"""
import logging
import os
os.sched_setaffinity(0, {{{cpu}}})
from tellin.kernels.native import NativeBackend
from tests.kernels.runtime_plans import Cache, llama_plan
one = NativeBackend(llama_plan(num_layers=1))
assert one.info["num_threads"] == 1, one.info
three = NativeBackend(llama_plan(num_layers=1), num_threads=3)
Cache(three).step(("a", list(range(40))))
tasks = [int(t) for t in os.listdir("/proc/self/task")]
assert len(tasks) >= 3
assert all(os.sched_getaffinity(t) == {{{cpu}}} for t in tasks)
"""
    run_script(script)


def run_script(script: str) -> None:
    path = os.pathsep.join(p for p in sys.path if p)
    # ThreadSanitizer forbids by default what one of the scripts is about: threads after a fork.
    tsan_options = os.environ.get("TSAN_OPTIONS", "") + ":die_after_fork=0"
    environment = {**os.environ, "PYTHONPATH": path, "TSAN_OPTIONS": tsan_options}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


# ---- a good guest ----------------------------------------------------------------------------


def kernel_threads() -> list[int]:
    return [
        int(task.name)
        for task in Path("/proc/self/task").iterdir()
        if (task / "comm").read_text().startswith("tellin-")
    ]


def wait_for_kernel_threads(count: int) -> None:
    """A new thread takes a moment to have its name."""
    deadline = time.monotonic() + 5
    while len(kernel_threads()) != count and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(kernel_threads()) == count


def test_threads_start_with_the_first_work_and_end_with_the_backend() -> None:
    before = len(kernel_threads())
    backend = NativeBackend(llama_plan(num_layers=1), num_threads=3)
    wait_for_kernel_threads(before + 2)  # packing was work
    backend.close()
    wait_for_kernel_threads(before)


def test_idle_threads_sleep() -> None:
    backend = NativeBackend(llama_plan(num_layers=1), num_threads=2)
    Cache(backend).step(("a", [1, 2, 3]))
    time.sleep(0.05)

    def cpu_ticks() -> int:
        total = 0
        for task in kernel_threads():
            fields = Path(f"/proc/self/task/{task}/stat").read_text().rsplit(")", 1)[1].split()
            total += int(fields[11]) + int(fields[12])
        return total

    start = cpu_ticks()
    time.sleep(0.3)
    assert cpu_ticks() - start <= 1


def test_threads_leave_signals_to_the_program() -> None:
    """A signal to the process is handled by Python's main thread even while kernels run."""
    backend = NativeBackend(llama_plan(), num_threads=3)
    cache = Cache(backend)
    for task in kernel_threads():
        status = Path(f"/proc/self/task/{task}/status").read_text()
        blocked = int(status.split("SigBlk:")[1].split()[0], 16)
        for number in (signal.SIGINT, signal.SIGTERM):
            assert blocked & (1 << (number - 1))
    seen: list[int] = []
    previous = signal.signal(signal.SIGUSR1, lambda number, _: seen.append(number))
    try:
        os.kill(os.getpid(), signal.SIGUSR1)
        cache.step(("a", random_ids(50)))
    finally:
        signal.signal(signal.SIGUSR1, previous)
    assert seen == [signal.SIGUSR1]


def test_denormals_stay_as_the_program_wants_them() -> None:
    """Flushing them to zero is a mode of the kernel threads; the caller's thread keeps its own."""
    backend = NativeBackend(llama_plan(num_layers=1), num_threads=2)
    Cache(backend).step(("a", [1, 2, 3]))
    tiny = np.float32(1e-40)
    assert tiny * np.float32(0.5) > 0
    assert np.array([1e-40], dtype=np.float32)[0] / 2 > 0


@pytest.mark.parametrize("num_threads", [8, 33])
def test_more_threads_than_cores(num_threads: int) -> None:
    """Oversubscription is normal in containers: slow is fine, wrong or stuck is not."""
    plan = llama_plan()
    ids = random_ids(60)
    expected = Cache(NativeBackend(plan, num_threads=1)).feed("r", ids, 60)
    out = Cache(NativeBackend(plan, num_threads=num_threads)).feed("r", ids, 20)
    np.testing.assert_array_equal(out, expected)


def test_a_forked_child_has_threads_of_its_own() -> None:
    script = """
import logging
import os
import numpy as np
from tellin.kernels.native import NativeBackend
from tests.kernels.runtime_plans import Cache, llama_plan, random_ids
backend = NativeBackend(llama_plan(), num_threads=3)
ids = random_ids(50)
expected = Cache(backend).feed("r", ids, 50)
child = os.fork()
if child == 0:
    ok = np.array_equal(Cache(backend).feed("r", ids, 50), expected)
    ok = ok and len(os.listdir("/proc/self/task")) >= 3
    backend.close()
    os._exit(0 if ok else 1)
assert os.waitpid(child, 0)[1] == 0
assert np.array_equal(Cache(backend).feed("r", ids, 50), expected)
"""
    run_script(script)


def test_other_python_threads_run_during_a_step() -> None:
    """The GIL is released for the whole step."""
    backend = NativeBackend(llama_plan(num_layers=4), num_threads=1)
    cache = Cache(backend)
    batch = cache.batch([("a", random_ids(512)), ("b", random_ids(512))])
    ticks: list[float] = []
    done = threading.Event()

    def tick() -> None:
        while not done.wait(0.001):
            ticks.append(time.perf_counter())

    thread = threading.Thread(target=tick)
    thread.start()
    while not ticks:
        time.sleep(0.001)
    start = time.perf_counter()
    for _ in range(5):
        backend.forward(batch)
    end = time.perf_counter()
    done.set()
    thread.join()
    assert sum(start < t < end for t in ticks) >= 3
