"""The worker's mirror of requests and the arrays of a step: vectors and properties of the spec."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
from hypothesis import given, settings

from tellin.kernels.batch import StepBatch
from tellin.logits_processor import MoveDirectionality
from tellin.sampling_params import SamplingParams
from tellin.step_protocol import CachedRequestData, NewRequestData, SchedulerOutput
from tellin.worker.input_batch import InputBatch
from tellin.worker.step_inputs import StepInputs, build_inputs


def new(req_id: str, ids: list[int], blocks: list[int], computed: int = 0) -> NewRequestData:
    return NewRequestData(req_id, ids, len(ids), SamplingParams(), None, blocks, computed, 1)


def cached(
    req_id: str, computed: int, outputs: int = 0, blocks: list[int] | None = None
) -> CachedRequestData:
    return CachedRequestData(req_id, blocks or [], computed, outputs)


def step(
    new_reqs: list[NewRequestData] | None = None,
    cached_reqs: list[CachedRequestData] | None = None,
    counts: dict[str, int] | None = None,
    finished: set[str] | None = None,
    drafts: dict[str, list[int]] | None = None,
) -> SchedulerOutput:
    new_reqs, cached_reqs = new_reqs or [], cached_reqs or []
    counts = counts or {r.req_id: 1 for r in [*cached_reqs, *new_reqs]}
    return SchedulerOutput(
        new_reqs, cached_reqs, counts, sum(counts.values()), drafts or {}, finished or set(), set()
    )


def four() -> InputBatch:
    batch = InputBatch()
    batch.apply(step([new(r, [1, 2], [i + 1]) for i, r in enumerate("ABCD")]))
    assert batch.req_ids == list("ABCD")
    return batch


def test_3_3_4_removing_two_moves_the_last_row_once() -> None:
    """A,B,C,D without A and C: D,B with the one move 3 -> 0."""
    batch = four()
    update, _ = batch.apply(step(cached_reqs=[cached("B", 1), cached("D", 1)], finished={"A", "C"}))
    assert batch.req_ids == ["D", "B"]
    assert update is not None
    assert update.moved == [(3, 0, MoveDirectionality.UNIDIRECTIONAL)]
    assert update.removed == [0, 2]
    assert update.batch_size == 2


def test_3_3_4_adding_fills_the_lowest_hole_first() -> None:
    """A,B,C,D without A and C, with E: E,B,D and the move 3 -> 2; a filled hole is not listed."""
    batch = four()
    update, states = batch.apply(
        step([new("E", [9], [9])], [cached("B", 1), cached("D", 1)], finished={"A", "C"})
    )
    assert batch.req_ids == ["E", "B", "D"]
    assert update is not None
    assert update.moved == [(3, 2, MoveDirectionality.UNIDIRECTIONAL)]
    assert update.removed == [2]
    assert [row for row, *_ in update.added] == [0]
    assert [state.req_id for state in states] == ["E"]


def test_unscheduled_requests_leave_the_rows_but_not_the_cache() -> None:
    """3.2.1: an id that is not scheduled is out of the batch, and comes back with its ids."""
    batch = four()
    batch.apply(step(cached_reqs=[cached("A", 1), cached("D", 1)]))
    assert batch.req_ids == ["A", "D"]
    batch.apply(step(cached_reqs=[cached(r, 1) for r in "ABCD"]))
    assert sorted(batch.req_ids) == list("ABCD")
    slot = batch.states["B"].slot
    assert batch.token_ids[slot, :2].tolist() == [1, 2]
    assert batch.block_table[slot, 0] == 2


def test_an_id_may_finish_and_be_new_in_one_step() -> None:
    """1.8.5: the old state goes first."""
    batch = four()
    batch.apply(
        step(
            [new("A", [7, 8, 9], [50])],
            [cached(r, 1) for r in "BCD"],
            finished={"A"},
        )
    )
    slot = batch.states["A"].slot
    assert batch.num_tokens[slot] == 3
    assert batch.token_ids[slot, :3].tolist() == [7, 8, 9]
    assert batch.block_table[slot, 0] == 50


def test_fewer_reported_outputs_truncate() -> None:
    """3.2.3: the scheduler kept fewer ids than the worker sampled."""
    batch = four()
    slots = batch.row_slots[:1]
    for token in (5, 6, 7):
        batch.append_sampled(slots, np.array([token], np.int32))
    batch.apply(step(cached_reqs=[cached("A", 3, outputs=2), *(cached(r, 1) for r in "BCD")]))
    assert batch.num_tokens[slots[0]] == 4
    assert batch.num_tokens[batch.states["B"].slot] == 2


def test_resumed_replaces_blocks_and_ids() -> None:
    """3.2.3: a preempted request returns with fresh blocks and all its ids."""
    batch = four()
    batch.apply(step(cached_reqs=[cached(r, 1) for r in "BCD"]))
    resumed = CachedRequestData("A", [70, 71], 0, 3, True, [1, 2, 30, 31, 32])
    batch.apply(step(cached_reqs=[*(cached(r, 1) for r in "BCD"), resumed]))
    state = batch.states["A"]
    assert state.num_blocks == 2
    assert batch.block_table[state.slot, :2].tolist() == [70, 71]
    assert batch.token_ids[state.slot, :5].tolist() == [1, 2, 30, 31, 32]
    assert batch.num_tokens[state.slot] == 5


def test_arrays_grow_without_losing_anything() -> None:
    batch = InputBatch()
    requests = [
        new(f"r{i}", [(i * 7 + j) % 1000 for j in range(30 * i + 1)], list(range(i + 1)))
        for i in range(80)
    ]
    for request in requests:
        rows = [cached(r, 0) for r in batch.states]
        batch.apply(step([request], rows))
    for request in requests:
        state = batch.states[request.req_id]
        n = len(request.token_ids)
        assert batch.token_ids[state.slot, :n].tolist() == request.token_ids
        assert batch.block_table[state.slot, : state.num_blocks].tolist() == request.block_ids
    assert batch.token_ids.shape[1] >= 2371


def inputs_of(batch: InputBatch, counts: list[int], block_size: int = 16) -> StepInputs:
    computed = batch.num_computed_tokens[batch.row_slots]
    return build_inputs(batch, computed, np.array(counts, np.int32), [], block_size, [])


def test_3_4_2_slots_follow_the_block_table() -> None:
    """Table [7, 2], block size 4, positions 3, 4, 5 -> cache slots 31, 8, 9."""
    batch = InputBatch()
    batch.apply(step([new("A", [1, 2, 3, 4, 5, 6], [7, 2], computed=3)], counts={"A": 3}))
    inputs = inputs_of(batch, [3], block_size=4).step
    assert inputs.positions.tolist() == [3, 4, 5]
    blocks = inputs.block_table[0, inputs.positions // 4]
    assert (blocks * 4 + inputs.positions % 4).tolist() == [31, 8, 9]
    assert inputs.token_ids.tolist() == [4, 5, 6]


def test_3_4_5_logits_rows_of_drafts() -> None:
    """q=[4,1,3] with drafts [3,0,2]: 8 logits rows; request i owns [0..3], [4], [5..7]."""
    batch = InputBatch()
    batch.apply(
        step(
            [new("A", [1], [1]), new("B", [2], [2]), new("C", [3], [3])],
            counts={"A": 4, "B": 1, "C": 3},
            drafts={"A": [11, 12, 13], "C": [31, 32]},
        )
    )
    inputs = inputs_of(batch, [4, 1, 3])
    assert inputs.num_sample_logits == 8
    assert inputs.sample_start.tolist() == [0, 4, 5, 8]
    assert inputs.step.logits_indices.tolist() == list(range(8))
    assert inputs.step.token_ids.tolist() == [1, 11, 12, 13, 2, 3, 31, 32]
    target = [j for i in range(3) for j in range(*inputs.sample_start[i : i + 2].tolist())][:]
    bonus = (inputs.sample_start[1:] - 1).tolist()
    assert [j for j in target if j not in bonus] == [0, 1, 2, 5, 6]
    assert bonus == [3, 4, 7]


def test_3_4_4_partial_prefill_is_not_sampled() -> None:
    """seq_len below the known ids: no logits, so no draw, for that row."""
    batch = InputBatch()
    batch.apply(
        step([new("A", list(range(10)), [1]), new("B", [1, 2], [2])], counts={"A": 6, "B": 2})
    )
    inputs = inputs_of(batch, [6, 2])
    assert inputs.sample_rows.tolist() == [1]
    assert inputs.step.logits_indices.tolist() == [7]
    assert inputs.step.seq_lens.tolist() == [6, 2]
    assert inputs.step.query_start_loc.tolist() == [0, 6, 8]


def by_hand(
    tokens: list[list[int]], tables: list[list[int]], computed: list[int], counts: list[int]
) -> StepBatch:
    """The arrays of 3.4.1 in plain loops."""
    ids, positions, start, lens = [], [], [0], []
    for row, count in enumerate(counts):
        for offset in range(count):
            positions.append(computed[row] + offset)
            ids.append(tokens[row][computed[row] + offset])
        start.append(len(ids))
        lens.append(computed[row] + count)
    width = -(-max(lens) // 4)
    table = [t[:width] + [0] * (width - len(t)) for t in tables]
    return StepBatch(*(np.array(x, np.int32) for x in (ids, positions, start, lens, table, [])))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 40), st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=9
    )
)
def test_arrays_equal_plain_loops(rows: list[tuple[int, float, float]]) -> None:
    batch = InputBatch()
    tokens = [[100 * r + i for i in range(n)] for r, (n, _, _) in enumerate(rows)]
    tables = [[1000 * r + i + 1 for i in range(-(-n // 4))] for r, (n, _, _) in enumerate(rows)]
    computed = [int(f * (n - 1)) for n, f, _ in rows]
    counts = [1 + int(g * (n - c - 1)) for (n, _, g), c in zip(rows, computed, strict=True)]
    requests = [new(f"r{r}", tokens[r], tables[r], computed[r]) for r in range(len(rows))]
    batch.apply(step(requests, counts={f"r{r}": c for r, c in enumerate(counts)}))
    got, want = inputs_of(batch, counts, 4).step, by_hand(tokens, tables, computed, counts)
    for name in ("token_ids", "positions", "query_start_loc", "seq_lens"):
        assert getattr(got, name).tolist() == getattr(want, name).tolist()
        assert getattr(got, name).dtype == np.int32
    for r, n in enumerate(want.seq_lens.tolist()):
        used = -(-n // 4)
        assert got.block_table[r, :used].tolist() == want.block_table[r, :used].tolist()
