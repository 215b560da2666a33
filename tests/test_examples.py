"""Every example runs as a user would run it: as a script, with the model of the store."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).resolve().parent.parent / "examples").glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(example: Path, smollm2_path: Path, tmp_path: Path) -> None:
    """P34: no ``__main__`` guard is needed, from any working directory."""
    command = [sys.executable, "-W", "error", str(example), str(smollm2_path)]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert "Traceback" not in done.stderr
