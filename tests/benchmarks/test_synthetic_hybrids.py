"""Random hybrids of the benchmarks are models that run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.synthetic_hybrids import SIZES, write_hybrid
from tellin.kernels.native import NativeBackend
from tellin.loading import open_model
from tellin.models import build_plan
from tests.models.stepping import logits_of


@pytest.mark.parametrize("size", ["tiny-lfm2", "tiny-granite"])
def test_random_hybrids_give_sane_logits(size: str, tmp_path: Path) -> None:
    with open_model(write_hybrid(tmp_path / "model.gguf", SIZES[size])) as source:
        backend = NativeBackend(build_plan(source))
    logits = logits_of(backend, [300 + i for i in range(40)])
    assert np.isfinite(logits).all()
    assert logits.std() > 0.5
