"""Engines that step together: an idle rank joins with dummy batches. Claims S65..S67."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

RANK_PROGRAM = """
import json, sys
from _pytest.monkeypatch import MonkeyPatch
from tellin import SamplingParams
from tellin.engine.dp_group import ZmqDataParallelGroup
from tests.engine.fakes import EngineMaker, text_ids

rank, address, num_steps = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
maker = EngineMaker(MonkeyPatch())
engine = maker([text_ids("a")] * max(1, num_steps))
engine.dp_group = ZmqDataParallelGroup(rank, 2, address, timeout_s=20)
if num_steps:
    engine.add_request("x", "abc", SamplingParams())
num_outputs = 0
while engine.has_unfinished_requests():
    num_outputs += len(engine.step())
names = maker.client.names()
print(json.dumps([num_outputs, names.count("execute_dummy_batch"), names.count("get_output")]))
"""


@pytest.mark.parametrize(
    ("work", "expected"), [((5, 0), (5, 5)), ((2, 6), (6, 6)), ((0, 0), (0, 0))]
)
def test_s65_s66_s67_two_ranks_end_together(
    work: tuple[int, int], expected: tuple[int, int], tmp_path: Path
) -> None:
    """ENG-52, ENG-53: one has more work: nobody waits for ever, both step equally often."""
    root = Path(__file__).resolve().parents[2]
    address = f"ipc://{tmp_path / 'group'}"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK_PROGRAM, str(rank), address, str(work[rank])],
            cwd=root,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    results = [json.loads(rank.communicate(timeout=60)[0]) for rank in ranks]
    for rank, (num_outputs, num_dummies, num_steps) in enumerate(results):
        assert num_outputs == work[rank]
        assert num_dummies + num_steps == expected[rank]
        assert num_steps == work[rank]
