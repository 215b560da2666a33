"""The benchmark of the process boundary runs, and the boundary adds no second of its own."""

from __future__ import annotations

from pathlib import Path

from benchmarks import boundary


def test_every_mode_generates_all_tokens(tiny_model: Path) -> None:
    result = boundary.measure(str(tiny_model), num_streams=8, max_tokens=16, num_rounds=3)
    assert set(result["modes"]) == set(boundary.MODES)
    assert result["modes"]["in process"]["overhead"] == 0
    for row in result["modes"].values():
        assert row["tokens_per_s"] > 0
        assert row["overhead"] < 20  # a step of this model takes less than a millisecond
