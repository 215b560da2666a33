"""Build the extension with sanitizers and run the kernel tests on it.

``python scripts/sanitize.py --sanitizers address,undefined`` (or ``thread``). The build lies in
build/sanitize-*/ with a copy of the Python package, so the normal installation stays as it is; a
finding ends the run with a non-zero exit code and the sanitizer's own report. Of a test with many
cases a sample is run, spread evenly over them (``--cases 0`` runs all).
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_TESTS = ["tests/kernels"]
UNSUITABLE = {
    "test_free_kv_cache_gives_memory_back",  # measures a memory that the sanitizer shares
    "test_other_python_threads_run_during_a_step",  # about time, and minutes of it
    "test_steps_run_where_no_thread_can_be_had",  # limits memory, also the sanitizer's own
}
UNSUITABLE_FOR_THREAD = {
    "test_affinity_limits_the_team_and_is_kept",  # counts threads: the sanitizer has one
    "test_a_forked_child_has_threads_of_its_own",  # the sanitizer loses count of threads in a fork
    "test_a_forked_child_has_no_such_thread_and_may_start_its_own",  # the same
}
RUNTIMES = {"address": "libasan.so", "undefined": "libubsan.so", "thread": "libtsan.so"}


def build(sanitizers: str, jobs: int) -> Path:
    """Compile, and lay a copy of the package beside the result; returns the folder to import."""
    folder = ROOT / "build" / f"sanitize-{sanitizers.replace(',', '-')}"
    overlay = folder / "python"
    configure: list[str | Path] = [
        "cmake",
        "-S",
        ROOT,
        "-B",
        folder,
        "-G",
        "Ninja",
        "-DCMAKE_BUILD_TYPE=Release",
    ]
    configure += [f"-DTELLIN_SANITIZE={sanitizers}", f"-DPython_EXECUTABLE={sys.executable}"]
    subprocess.run(configure, check=True, stdout=subprocess.DEVNULL)
    compile_command: list[str | Path] = ["cmake", "--build", folder, "--parallel", str(jobs)]
    built = subprocess.run(compile_command, capture_output=True, text=True, check=False)
    if built.returncode:
        print(built.stdout, built.stderr, sep="\n", file=sys.stderr)
        raise SystemExit(built.returncode)
    shutil.rmtree(overlay, ignore_errors=True)
    shutil.copytree(ROOT / "src", overlay, ignore=shutil.ignore_patterns("__pycache__"))
    install: list[str | Path] = ["cmake", "--install", folder, "--prefix", overlay]
    subprocess.run(install, check=True, stdout=subprocess.DEVNULL)
    return overlay


def environment(sanitizers: str) -> dict[str, str]:
    """The sanitizers' runtimes must be in the process before Python loads the extension."""
    compiler = os.environ.get("CXX", "c++")
    runtimes = []
    for name in sanitizers.split(","):
        command = [compiler, f"-print-file-name={RUNTIMES[name]}"]
        runtimes.append(subprocess.check_output(command, text=True).strip())
    return {
        **os.environ,
        "LD_PRELOAD": " ".join(runtimes),
        # Python itself never frees some of its memory: leaks of the process say nothing.
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
        "TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1",
        "PYTHONMALLOC": "malloc",
        "OPENBLAS_NUM_THREADS": "1",  # NumPy's threads, whose ways of waiting are not seen
    }


class Sample:
    """Pytest plugin: keeps at most ``limit`` cases of each test (0 = all), evenly spread."""

    def __init__(self, limit: int, unsuitable: set[str]) -> None:
        self.limit = limit
        self.unsuitable = unsuitable

    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        functions: dict[str, list[Any]] = {}
        for item in items:
            if item.name not in self.unsuitable:
                functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
        chosen: set[str] = set()
        for cases in functions.values():
            count = min(self.limit or len(cases), len(cases))
            chosen |= {cases[i * len(cases) // count].nodeid for i in range(count)}
        config.hook.pytest_deselected(items=[i for i in items if i.nodeid not in chosen])
        items[:] = [item for item in items if item.nodeid in chosen]


def run_tests(overlay: Path, tests: list[str], cases: int, sanitizers: str) -> int:
    """Runs in the child: tests import the package of ``overlay``, not the installed one."""
    sys.meta_path = [f for f in sys.meta_path if "skbc_tellin" not in type(f).__module__]
    sys.path.insert(0, str(overlay))
    import pytest

    from tellin.kernels import _C

    if overlay not in Path(str(_C.__file__)).parents:
        raise SystemExit(f"tests would use {_C.__file__}, not {overlay}")
    unsuitable = UNSUITABLE | (UNSUITABLE_FOR_THREAD if "thread" in sanitizers else set())
    options = ["-q", "--durations=10", "--timeout=900", "--capture=sys", "-p", "no:cacheprovider"]
    return int(pytest.main([*options, *tests], plugins=[Sample(cases, unsuitable)]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sanitizers", default="address,undefined")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--cases", type=int, default=6, help="most cases of one test; 0 = all")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("tests", nargs="*", help="pytest arguments (default: tests/kernels)")
    args = parser.parse_args()
    unknown = [name for name in args.sanitizers.split(",") if name not in RUNTIMES]
    if unknown:
        parser.error(f"unknown sanitizer {unknown[0]!r}; known: {', '.join(RUNTIMES)}")
    if args.child:
        return run_tests(args.child, args.tests, args.cases, args.sanitizers)
    overlay = build(args.sanitizers, args.jobs)
    command = [sys.executable, __file__, "--child", str(overlay), f"--cases={args.cases}"]
    command += [f"--sanitizers={args.sanitizers}", "--"]
    command += args.tests or DEFAULT_TESTS
    return subprocess.run(
        command, cwd=ROOT, env=environment(args.sanitizers), check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
