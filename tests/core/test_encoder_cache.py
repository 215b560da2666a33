"""Images in the core: what a step encodes, what stays cached, and that nobody gets other rows.

The fake executor keeps encoder outputs as the workers do: it fails when a position is computed
whose image is not encoded, when one is encoded twice, and when more rows are kept than fit.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tellin.config import MultiModalConfig
from tellin.core.encoder_cache_manager import EncoderCacheManager
from tellin.core.encoder_inputs import EncoderInputs
from tellin.core.request import Request
from tellin.core.step_plan import StepPlan
from tellin.exceptions import ContextLengthError, InvalidParameterError, UnsupportedFeatureError
from tellin.protocol import FinishReason, MultiModalFeature
from tellin.sampling_params import SamplingParams
from tests.core.driver import Driver

PLACEHOLDER = 7


def request(request_id: str) -> Request:
    return Request(request_id, [1], SamplingParams(max_tokens=1), None, max_model_len=8)


def image(identifier: str, offset: int, length: int, **fields: Any) -> MultiModalFeature:
    return MultiModalFeature("image", identifier, offset, length, b"pixels", identifier, **fields)


def prompt_of(*parts: Any) -> tuple[list[int], list[MultiModalFeature]]:
    """Ids and features of a prompt: a number is so many tokens of text, ``(name, n)`` an image."""
    ids: list[int] = []
    features = []
    for part in parts:
        if isinstance(part, int):
            ids += [100 + len(ids) % 50 for _ in range(part)]
        else:
            name, length = part
            features.append(image(name, len(ids), length))
            ids += [PLACEHOLDER] * length
    return ids, features


def driver(cache: int = 16, item: int = 8, rows: int | None = None, **config: Any) -> Driver:
    multimodal = MultiModalConfig({"image": 9}, item, cache, max_rows_per_step=rows)
    return Driver(multimodal_config=multimodal, **config)


def add(made: Driver, request_id: str, *parts: Any, **kwargs: Any) -> None:
    ids, features = prompt_of(*parts)
    made.add(request_id, ids, mm_features=features, **kwargs)


# ---------------------------------------------------------------------- rows of a feature


def test_8_1_1_rows_of_a_range() -> None:
    """Mask [0,1,0,1,1] at offset 10."""
    item = image("a", 10, 5, embed_runs=[(1, 1), (3, 2)])
    assert item.num_embeds == 3
    assert item.embeds_in(0, 99) == [(11, 0, 1), (13, 1, 2)]
    assert item.embeds_in(13, 15) == [(13, 1, 2)]
    assert item.embeds_in(14, 15) == [(14, 2, 1)]
    assert item.embeds_in(10, 11) == []
    assert image("a", 3, 4).embeds_in(5, 6) == [(5, 2, 1)]


# ---------------------------------------------------------------------- the cache manager


def test_8_5_an_unused_entry_makes_room() -> None:
    manager = EncoderCacheManager(10)
    one, two = request("r1"), request("r2")
    assert manager.make_room(6)
    manager.allocate(one, "a", 6)
    assert not manager.make_room(6)
    manager.release_all(one)
    assert (manager.num_free_slots, manager.num_freeable_slots) == (4, 10)
    assert manager.make_room(6)
    assert manager.take_freed() == ["a"]
    manager.allocate(two, "b", 6)
    assert "a" not in manager
    manager.check({"r2"})


def test_8_5_an_entry_of_two_stays_referenced() -> None:
    manager = EncoderCacheManager(10)
    one, two = request("r1"), request("r2")
    manager.allocate(one, "a", 6)
    assert manager.use(two, "a")
    manager.release_all(one)
    assert not manager.make_room(6)
    assert manager.other_user("a", one) is two
    manager.release(two, "a")
    manager.release(two, "a")
    assert manager.num_freeable_slots == 10
    assert manager.use(one, "a"), "it is kept for others to come"


def test_a_second_entry_of_the_same_name_is_refused() -> None:
    manager = EncoderCacheManager(10)
    manager.allocate(request("r"), "a", 6)
    with pytest.raises(ValueError, match="cannot be added"):
        manager.allocate(request("r"), "a", 1)
    with pytest.raises(ValueError, match="cannot be added"):
        manager.allocate(request("r"), "b", 5)


# ---------------------------------------------------------------------- work of a step


def planned(request_id: str, inputs: EncoderInputs, plan: StepPlan) -> Request:
    """A request whose image ``x``, of 6 rows, is part of the step."""
    params = SamplingParams(max_tokens=1)
    ids, features = prompt_of(1, ("x", 6), 1)
    made = Request(request_id, ids, params, None, max_model_len=64, mm_features=features)
    assert inputs.fit(made, 0, 8, plan) == 8
    inputs.commit(made, 0, 8, plan)
    return made


def test_t4_who_loses_its_share_leaves_the_image_to_another_or_to_nobody() -> None:
    inputs = EncoderInputs(MultiModalConfig({"image": 1}, 8, 16))
    plan = StepPlan(32, 1)
    inputs.begin_step(plan)
    victim, heir = (planned(name, inputs, plan) for name in ("victim", "heir"))
    assert plan.encoder_inputs == {"victim": [0]}
    assert plan.encoder_budget == 2
    inputs.take_out(victim, plan)
    inputs.cache.release_all(victim)
    assert plan.encoder_inputs == {"heir": [0]}
    assert plan.encoder_budget == 2
    inputs.take_out(heir, plan)
    inputs.cache.release_all(heir)
    assert not plan.encoder_inputs
    assert plan.encoder_budget == 8
    assert "x" not in inputs.cache, "nobody will encode it"
    inputs.cache.check(set())


def test_rows_that_fit_no_step_are_refused_at_once() -> None:
    """They see each other: nobody could compute them, and all behind would wait (promise 5)."""
    config = MultiModalConfig({"image": 1}, 8, 16, rows_see_each_other=True)
    ids, features = prompt_of(1, ("x", 6), 1)
    made = Request(
        "r", ids, SamplingParams(max_tokens=1), None, max_model_len=64, mm_features=features
    )
    EncoderInputs(config, max_step_tokens=6).check_admissible(made)
    with pytest.raises(ContextLengthError, match=r"6 tokens that see each other, .* at most 5"):
        EncoderInputs(config, max_step_tokens=5).check_admissible(made)


# ---------------------------------------------------------------------- requests


def test_an_image_is_encoded_once_and_serves_chunks() -> None:
    """8.6.2: a chunk that ends within an image leaves its other rows for the next."""
    made = driver(max_num_batched_tokens=8)
    add(made, "a", 3, ("x", 8), 5)
    made.run()
    made.check_lone("a", 4)
    assert made.executor.num_encoded == 1
    made.check_idle()


def test_8_5_two_requests_share_an_encoded_image() -> None:
    made = driver(enable_prefix_caching=False)
    add(made, "a", 2, ("x", 6), 2)
    add(made, "b", 5, ("x", 6), 1)
    made.run()
    made.check_lone("a", 4)
    made.check_lone("b", 4)
    assert made.executor.num_encoded == 1


def test_a_prefix_hit_over_an_image_needs_no_encoding() -> None:
    made = driver()
    add(made, "a", 2, ("x", 8), 8)
    made.run()
    made.core.reset_encoder_cache()
    add(made, "b", 2, ("x", 8), 8)
    made.run()
    made.check_lone("b", 4)
    assert made.executor.num_encoded == 1
    add(made, "c", 2, ("y", 8), 8)
    made.run()
    made.check_lone("c", 4)
    assert made.executor.num_encoded == 2, "another image under the same ids is another prompt"


def test_1_7_4_what_does_not_fit_is_cut_before_the_item() -> None:
    made = driver(cache=8, item=8)
    add(made, "a", 4, ("x", 8), 4, ("y", 8), 2)
    steps = made.run()
    assert steps[0] == {"a": 16}, "up to the second image, which this step cannot encode"
    made.check_lone("a", 4)
    assert made.executor.num_encoded == 2


def test_a_step_encodes_no_more_than_the_largest_item_has() -> None:
    """Decodes wait for the encoder, so its share of a step is bounded."""
    made = driver(cache=32, item=8)
    add(made, "a", 1, ("x", 5), ("y", 5), 1)
    add(made, "b", 1, ("z", 3), 1)
    assert made.step() == {"a": 6, "b": 5}
    made.run()
    made.check_lone("a", 4)
    made.check_lone("b", 4)


def test_a_step_computes_few_parts_of_images() -> None:
    """An image of four parts takes four steps, and a decode gets its token in each of them."""
    made = driver(cache=32, item=16, rows=4)
    add(made, "decodes", 3, max_tokens=20)
    made.step()
    runs = [(0, 4), (5, 4), (10, 4), (15, 4)]
    ids = [100, *[PLACEHOLDER] * 19, 101, 102]
    made.add("a", ids, mm_features=[image("x", 1, 19, embed_runs=runs)])
    steps = [made.step() for _ in range(5)]
    assert [step.get("a") for step in steps] == [6, 5, 5, 6, 1]
    assert all(step["decodes"] == 1 for step in steps)
    made.run()
    made.check_lone("a", 4)
    made.check_lone("decodes", 20)
    assert made.executor.num_encoded == 1


def test_parts_that_are_encoded_already_cost_no_rows() -> None:
    """Of a step's rows, that is: the same image in another prompt is read at once."""
    made = driver(cache=32, item=16, rows=4, enable_prefix_caching=False)
    runs = [(0, 4), (5, 4), (10, 4), (15, 4)]
    for name, text in (("a", [100]), ("b", [101, 102])):
        ids = [*text, *[PLACEHOLDER] * 19, 103]
        feature = image("x", len(text), 19, embed_runs=runs)
        made.add(name, ids, mm_features=[feature], max_tokens=2)
        steps = made.run()
        assert steps[0] == {name: 6 if name == "a" else 22}
        made.check_lone(name, 2)
    assert made.executor.num_encoded == 1


def test_parts_of_several_requests_share_the_rows_of_a_step() -> None:
    made = driver(cache=32, item=16, rows=4)
    add(made, "a", 1, ("x", 3), 1)
    add(made, "b", 2, ("y", 3), 1)
    assert made.step() == {"a": 5, "b": 2}
    made.run()
    made.check_lone("a", 4)
    made.check_lone("b", 4)


def test_a_request_that_cannot_be_encoded_now_waits_for_its_turn() -> None:
    made = driver(cache=8, item=8, enable_prefix_caching=False)
    for name in "abc":
        add(made, name, ("x" + name, 8), 3)
    made.run()
    for name in "abc":
        made.check_lone(name, 4)
    made.check_idle()


def test_cor_8_an_image_larger_than_the_cache_is_refused_at_once() -> None:
    made = driver(cache=6, item=8)
    with pytest.raises(ContextLengthError, match=r"takes 8 embeddings.*holds 6"):
        add(made, "a", 1, ("x", 8), 1)


def test_without_chunked_prefill_a_prompt_must_fit_as_a_whole() -> None:
    made = driver(cache=12, item=8, enable_chunked_prefill=False)
    with pytest.raises(ContextLengthError, match=r"take 16 embeddings.*at most 12"):
        add(made, "a", ("x", 8), ("y", 8), 1)
    add(made, "b", ("x", 5), 1, ("x", 5), ("y", 5), 1)
    add(made, "c", ("z", 5), 1)
    assert made.step() == {"b": 17}
    made.run()
    made.check_lone("b", 4)
    made.check_lone("c", 4)


def test_preemption_gives_the_rows_back_and_recomputes() -> None:
    """T4: a preempted request leaves neither references nor encoder work behind."""
    made = driver(num_kv_blocks=9, max_model_len=32, enable_prefix_caching=False)
    for name in "ab":
        add(made, name, 3, ("x" + name, 6), 3, max_tokens=16)
    made.run()
    assert made.scheduler.num_preemptions > 0
    made.check_lone("a", 16)
    made.check_lone("b", 16)
    made.check_idle()


def test_an_image_that_cannot_be_encoded_fails_its_request_alone() -> None:
    made = driver(enable_prefix_caching=False)
    made.executor.encoder_errors = {"bad"}
    add(made, "a", 2, ("bad", 6), 2)
    add(made, "b", 2, ("good", 2), 2)
    made.run()
    assert made.finish["a"] is FinishReason.ERROR
    made.check_lone("b", 4)
    made.executor.encoder_errors = set()
    made.executor.request_errors = {}
    add(made, "c", 2, ("bad", 6), 2)
    made.run()
    made.check_lone("c", 4)


def test_a_failed_step_leaves_no_image_that_was_never_encoded() -> None:
    made = driver()
    made.executor.fail_on_step = lambda step: RuntimeError("no memory")
    add(made, "a", 2, ("x", 6), 2)
    made.step()
    made.executor.fail_on_step = None
    add(made, "b", 2, ("x", 6), 2)
    made.run()
    assert made.finish["a"] is FinishReason.ERROR
    made.check_lone("b", 4)
    made.check_idle()


def test_a_reset_in_the_middle_of_an_image_encodes_it_again() -> None:
    made = driver(max_num_batched_tokens=8)
    add(made, "a", 3, ("x", 8), 5)
    made.step()
    made.core.reset_encoder_cache()
    made.run()
    made.check_lone("a", 4)
    assert made.executor.num_encoded == 2


def test_sleep_empties_the_encoder_cache() -> None:
    made = driver(enable_prefix_caching=False)
    add(made, "a", 2, ("x", 6), 2)
    made.run()
    made.core.sleep(1)
    made.core.wake_up()
    assert "x" not in made.scheduler.encoder_inputs.cache
    add(made, "b", 2, ("x", 6), 2)
    made.run()
    made.check_lone("b", 4)


def test_a_prompt_that_ends_with_an_image() -> None:
    """Its last position alone is no decode: it needs the encoder's rows."""
    made = driver(max_num_batched_tokens=9, max_num_seqs=4)
    add(made, "a", 1, ("x", 8))
    made.run()
    made.core.reset_encoder_cache()
    add(made, "b", 1, ("x", 8))
    made.run()
    add(made, "c", 2, ("y", 8))
    assert made.step() == {"c": 9}, "the last one lies in a block that it has"
    made.core.reset_encoder_cache()
    made.run()
    for name in "abc":
        made.check_lone(name, 4)


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ([image("x", 0, 9)], "ends at 9, but the prompt has 4"),
        ([image("x", 0, 2), image("y", 1, 2)], "overlaps"),
        ([image("x", -1, 2)], "overlaps"),
        ([image("x", 0, 3, embed_runs=[(2, 2)])], "its own end"),
        ([image("x", 0, 3, embed_runs=[(1, 1), (0, 1)])], "not in order"),
        ([MultiModalFeature("image", "x", 0, 2)], "has no data"),
    ],
)
def test_cor_25_features_that_make_no_sense_are_refused(
    features: list[MultiModalFeature], message: str
) -> None:
    with pytest.raises(InvalidParameterError, match=message):
        driver().add("a", [1, 2, 3, 4], mm_features=features)


def test_a_text_model_takes_no_images() -> None:
    with pytest.raises(UnsupportedFeatureError, match="text only"):
        Driver().add("a", [1, 2], mm_features=[image("x", 0, 1)])


PART = st.one_of(
    st.integers(1, 9),
    st.tuples(st.sampled_from("uvwxyz"), st.just(0)).map(
        lambda p: (p[0], 1 + (ord(p[0]) * 5) % 8)  # a name always has the same size
    ),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_promise_1_whatever_else_happens_every_request_reads_its_own_images(
    data: st.DataObject,
) -> None:
    """Random prompts, budgets, pools, aborts and resets; invariants are checked in every step."""
    made = driver(
        cache=data.draw(st.integers(8, 24), "cache"),
        rows=data.draw(st.sampled_from([None, 1, 4, 8]), "rows of a step"),
        max_num_batched_tokens=data.draw(st.integers(8, 32), "budget"),
        num_kv_blocks=data.draw(st.integers(18, 40), "blocks"),
        max_num_seqs=data.draw(st.integers(1, 5), "seqs"),
        enable_prefix_caching=data.draw(st.booleans(), "prefix caching"),
        policy=data.draw(st.sampled_from(["fcfs", "priority"]), "policy"),
        long_prefill_token_threshold=data.draw(st.sampled_from([0, 0, 7]), "threshold"),
        max_num_partial_prefills=data.draw(st.sampled_from([0, 0, 1, 2]), "partial"),
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
