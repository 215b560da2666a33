"""The collective that keeps data-parallel ranks in step (S65, S66, S67)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tellin.engine.dp_group import ZmqDataParallelGroup
from tellin.exceptions import EngineError


def run_ranks(
    size: int, address: str, body: Callable[[ZmqDataParallelGroup], object]
) -> list[object]:
    """Run ``body`` once per rank, each in a thread with a group of its own."""
    results: list[object] = [None] * size

    def run(rank: int) -> None:
        group = ZmqDataParallelGroup(rank, size, address, timeout_s=20)
        try:
            results[rank] = body(group)
        finally:
            group.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_rank_learns_the_maximum_of_every_round(size: int, tmp_path: Path) -> None:
    rounds = 50

    def body(group: ZmqDataParallelGroup) -> list[int]:
        return [group.all_reduce_max((group.rank + i) % size) for i in range(rounds)]

    results = run_ranks(size, f"ipc://{tmp_path / 'dp'}", body)
    assert results == [[size - 1] * rounds] * size


def test_a_rank_that_is_missing_is_reported(tmp_path: Path) -> None:
    group = ZmqDataParallelGroup(0, 2, f"ipc://{tmp_path / 'dp'}", timeout_s=0.05)
    with pytest.raises(EngineError, match=r"rank 0 waited 0\.05 s .* 1 of 2 ranks arrived"):
        group.all_reduce_max(1)
    group.close()
    group.close()


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_outside_the_group_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match=r"must be in \[0, 2\)"):
        ZmqDataParallelGroup(rank, 2, "ipc:///nowhere")
