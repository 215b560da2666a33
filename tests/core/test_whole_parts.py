"""Images whose rows see each other: a step computes all of a part, or none of it.

The fake executor fails when a part is cut. Parts are an image's runs of rows.
"""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tellin.config import MultiModalConfig
from tests.core.driver import Driver
from tests.core.test_encoder_cache import PLACEHOLDER, add, image


def driver(rows: int | None = None, cache: int = 16, **config: Any) -> Driver:
    multimodal = MultiModalConfig(
        {"image": 9}, 8, cache, max_rows_per_step=rows, rows_see_each_other=True
    )
    return Driver(multimodal_config=multimodal, **config)


def test_a_chunk_ends_before_an_image_or_behind_it() -> None:
    made = driver(max_num_batched_tokens=10, max_num_seqs=2)
    add(made, "a", 4, ("x", 8), 3)
    assert [step.get("a") for step in made.run()][:2] == [4, 10]
    made.check_lone("a", 4)


def test_an_image_of_two_parts() -> None:
    """Rows with a mark between them; the end of the first part is a place to stop."""
    made = driver(max_num_batched_tokens=8, max_num_seqs=2)
    two = image("x", 1, 9, embed_runs=[(0, 4), (5, 4)])
    made.add("a", [100, *[PLACEHOLDER] * 4, 101, *[PLACEHOLDER] * 4, 102], mm_features=[two])
    assert [step.get("a") for step in made.run()][:2] == [6, 5]


def test_a_threshold_does_not_cut_an_image() -> None:
    """It is computed as a whole where a chunk begins with it."""
    made = driver(max_num_batched_tokens=24, long_prefill_token_threshold=3, max_num_seqs=2)
    add(made, "a", 5, ("x", 8), 4)
    assert [step.get("a") for step in made.run()][:4] == [3, 2, 8, 3]


def test_an_image_does_not_wait_for_ever() -> None:
    """Half of a budget is too little for it, but others behind it take the rest of a step only."""
    made = driver(max_num_batched_tokens=12, max_num_seqs=4)
    add(made, "a", 2, ("x", 8), 2)
    for index in range(40):
        add(made, f"r{index}", 9, max_tokens=2)
    steps = [made.step() for _ in range(4)]
    assert sum(step.get("a", 0) for step in steps) >= 10


def test_a_prefix_that_ends_in_an_image() -> None:
    """Of twelve positions that are known (three blocks), those before the image are used."""
    made = driver(cache=32, max_num_batched_tokens=64)
    add(made, "a", 6, ("x", 8), 5)
    made.run()
    add(made, "b", 6, ("x", 8), ("y", 8))
    assert made.step()["b"] == 22 - 4
    made.run()
    add(made, "c", 6, ("x", 8), 5)
    assert made.step()["c"] == 1, "all of an image may come from the cache"
    made.run()
    for name in "abc":
        made.check_lone(name, 4)


PART = st.one_of(
    st.integers(1, 9),
    st.tuples(st.sampled_from("uvwxyz"), st.just(0)).map(lambda p: (p[0], 1 + (ord(p[0]) * 5) % 8)),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_promise_1_whatever_else_happens_no_image_is_cut(data: st.DataObject) -> None:
    """Random prompts, budgets, pools, aborts and resets; invariants are checked in every step."""
    num_seqs = data.draw(st.integers(1, 5), "seqs")
    made = driver(
        cache=data.draw(st.integers(8, 24), "cache"),
        rows=data.draw(st.sampled_from([None, 8]), "rows of a step"),
        max_num_batched_tokens=7 + num_seqs + data.draw(st.integers(0, 20), "budget"),
        num_kv_blocks=data.draw(st.integers(18, 40), "blocks"),
        max_num_seqs=num_seqs,
        enable_prefix_caching=data.draw(st.booleans(), "prefix caching"),
        policy=data.draw(st.sampled_from(["fcfs", "priority"]), "policy"),
        long_prefill_token_threshold=data.draw(st.sampled_from([0, 0, 5]), "threshold"),
        max_num_partial_prefills=data.draw(st.sampled_from([0, 0, 1, 2]), "partial"),
        scheduler_reserve_full_isl=data.draw(st.booleans(), "reserve"),
    )
    names = []
    for index in range(data.draw(st.integers(1, 7), "requests")):
        parts = data.draw(st.lists(PART, min_size=1, max_size=6), "prompt")
        add(made, f"r{index}", *parts, max_tokens=3 + index, priority=index % 3)
        names.append((f"r{index}", 3 + index))
        for _ in range(data.draw(st.integers(0, 3), "steps")):
            made.step()
        what = data.draw(st.sampled_from(["", "", "", "abort", "reset", "prefix"]), "event")
        if what == "abort":
            made.core.abort_requests([names.pop()[0]])
        elif what == "reset":
            made.core.reset_encoder_cache()
        elif what == "prefix":
            made.core.reset_prefix_cache(reset_running_requests=True)
    made.run(1000)
    for name, max_tokens in names:
        made.check_lone(name, max_tokens)
    made.check_idle()
