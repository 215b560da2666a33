"""The NEON kernels, run under an emulator: those of linear layers give AVX2's results, bit for bit.

Needs the compilers ``g++`` and ``aarch64-linux-gnu-g++`` and ``qemu-aarch64`` (Debian:
g++-aarch64-linux-gnu, qemu-user) and an x86-64 processor with AVX2.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tellin.kernels import _C

ROOT = Path(__file__).resolve().parents[2]
FLAGS = ["-std=c++17", "-O2", "-ffp-contract=off", "-fno-math-errno", "-Icsrc/include"]
SHARED = [
    "tests/kernels/cross/linear_digest.cpp",
    *(f"csrc/core/{name}.cpp" for name in ("pack", "dequantize", "dispatch", "cpuid")),
    "csrc/kernels/portable/linear_portable.cpp",
]
AVX2 = ["-mavx2", "-mfma", "-mf16c", "-mbmi2"]
NEON = ["-march=armv8.2-a+dotprod"]


def digest(
    compiler: str, name: str, isa_flags: list[str], emulator: list[str], tmp_path: Path
) -> str:
    """What `linear_digest` prints for a variant; only the variant's own unit gets its flags."""
    base = [compiler, *FLAGS, "-Icsrc/kernels"]
    unit, binary = tmp_path / f"{name}.o", tmp_path / name
    source = f"csrc/kernels/{name}/linear_{name}.cpp"
    define = f"-DTELLIN_HAVE_{name.upper()}=1"
    for command in (
        [*base, *isa_flags, "-c", source, "-o", str(unit)],
        [*base, define, "-static", *SHARED, str(unit), "-o", str(binary)],
    ):
        subprocess.run(command, cwd=ROOT, check=True)
    run = subprocess.run([*emulator, str(binary), name], check=True, capture_output=True, text=True)
    return run.stdout


@pytest.mark.slow
def test_neon_rounds_as_avx2_does(tmp_path: Path) -> None:
    """Every storage type and precision, and no dependence on the rectangle (promise 1)."""
    tools = ("g++", "aarch64-linux-gnu-g++", "qemu-aarch64")
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if missing or "avx2" not in _C.linear_variants():
        pytest.skip(f"needs {', '.join(missing) or 'AVX2'}")
    expected = digest("g++", "avx2", AVX2, [], tmp_path)
    actual = digest("aarch64-linux-gnu-g++", "neon", NEON, ["qemu-aarch64"], tmp_path)
    assert expected.count("\n") == 42
    assert "DIFFERS" not in expected
    assert actual.splitlines() == expected.splitlines()


@pytest.mark.slow
def test_neon_rows_attention_and_recurrences(tmp_path: Path) -> None:
    """Double precision agrees, and no bit depends on how rows are grouped (promise 1)."""
    tools = ("aarch64-linux-gnu-g++", "qemu-aarch64")
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    core = ("vector_dispatch", "mapped_memory", "kv_pool", "cpuid", "commit_ahead")
    sources = [
        *(
            f"csrc/kernels/{isa}/{name}.cpp"
            for isa in ("portable", "neon")
            for name in ("vec", "attention", "recurrent")
        ),
        *(f"csrc/core/{name}.cpp" for name in (*core, "available_memory")),
        "tests/kernels/cross/vector_check.cpp",
    ]
    binary = str(tmp_path / "vector_check")
    compiler = [tools[0], *FLAGS, "-Icsrc/kernels", *NEON, "-DTELLIN_HAVE_NEON=1", "-static"]
    subprocess.run([*compiler, *sources, "-o", binary], cwd=ROOT, check=True)
    run = subprocess.run([tools[1], binary, "neon"], check=False, capture_output=True, text=True)
    assert run.stdout == "ok neon\n"
