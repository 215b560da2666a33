"""A model is in memory once while it is loaded: what was packed leaves the file's pages."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from benchmarks.synthetic import ModelShape, write_llama
from tellin.kernels.native import NativeBackend
from tellin.loading import open_model
from tellin.models import build_plan

DENSE = ModelShape(512, 6144, 4, 8, 4, 512)
EXPERTS = ModelShape(512, 192, 4, 8, 4, 512, num_experts=32, num_experts_per_tok=4)


@pytest.mark.skipif(not psutil.LINUX, reason="counts resident pages of files")
@pytest.mark.parametrize("shape", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_packed_weights_leave_no_pages_of_the_file_behind(
    shape: ModelShape, tmp_path: Path
) -> None:
    """A mixture has thousands of small matrices, whose neighbours' pages come back."""
    path = write_llama(tmp_path / "model.gguf", shape, "q4_0")
    process = psutil.Process()
    with open_model(path) as source:
        plan = build_plan(source)
        before = process.memory_info().shared
        backend = NativeBackend(plan, num_threads=1)
        mapped = process.memory_info().shared - before
        backend.close()
    assert mapped < 0.1 * path.stat().st_size
