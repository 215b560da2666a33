"""1.5-1.12: what a step contains, and what its results do."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import pytest

from tellin.config import LoRAConfig
from tellin.core.request import Request, RequestStatus
from tellin.core.scheduler import Scheduler
from tellin.exceptions import ContextLengthError, DuplicateRequestError
from tellin.protocol import EngineCoreEventType, FinishReason, LoRARequest
from tellin.step_protocol import ModelRunnerOutput
from tests.core.driver import Driver
from tests.core.fakes import EOS, SETTINGS, make_config, make_request, next_id


def unlike(number: int, length: int) -> list[int]:
    """A prompt that shares no block with others."""
    return [100 + number, *range(length - 1)]


# ---------------------------------------------------------------------- forming steps


def test_chunked_prefill_fills_the_budget() -> None:
    """1.6 Check: B=8, prompts 10 and 5: {r1: 8}, then {r1: 2, r2: 5}; tokens only in step 2."""
    driver = Driver(max_num_batched_tokens=8)
    driver.add("r1", unlike(1, 10))
    driver.add("r2", unlike(2, 5))
    assert driver.step() == {"r1": 8}
    assert driver.tokens == {"r1": [], "r2": []}
    assert driver.step() == {"r1": 2, "r2": 5}
    assert [len(t) for t in driver.tokens.values()] == [1, 1]


def test_decodes_are_never_starved_by_a_long_prompt() -> None:
    """1.6 Check: with 3 running decodes and B=8 a 100-token prompt gets 5 tokens."""
    driver = Driver(max_num_batched_tokens=8, max_model_len=200, num_kv_blocks=200, max_num_seqs=8)
    for i in range(3):
        driver.add(f"d{i}", unlike(i, 2), 50)
    driver.step()
    driver.add("long", unlike(9, 100))
    for _ in range(10):
        assert driver.step() == {"d0": 1, "d1": 1, "d2": 1, "long": 5}


def test_decodes_come_before_a_prompt_that_was_admitted_earlier() -> None:
    """A prompt in progress ahead of them in the running set does not take their tokens."""
    driver = Driver(max_num_batched_tokens=8, max_model_len=200, num_kv_blocks=200)
    driver.add("long", unlike(9, 100))
    driver.step()
    driver.add("small", unlike(1, 2), 20)
    driver.step()
    for _ in range(5):
        scheduled = driver.step()
        assert scheduled["small"] == 1
        assert sum(scheduled.values()) == 8


def test_long_prefill_threshold_limits_chunks() -> None:
    """1.6.2c, P20."""
    driver = Driver(max_num_batched_tokens=32, long_prefill_token_threshold=6)
    driver.add("a", unlike(1, 15))
    driver.add("b", unlike(2, 3))
    assert driver.step() == {"a": 6, "b": 3}
    assert driver.step() == {"b": 1, "a": 6}
    assert driver.step() == {"b": 1, "a": 3}


def test_without_chunked_prefill_prompts_are_whole() -> None:
    """1.6.5e."""
    driver = Driver(max_num_batched_tokens=64, enable_chunked_prefill=False, num_kv_blocks=99)
    driver.add("a", unlike(1, 40))
    driver.add("b", unlike(2, 40))
    driver.add("c", unlike(3, 4))
    assert driver.step() == {"a": 40}
    assert driver.step() == {"a": 1, "b": 40, "c": 4}


def test_seats_are_limited() -> None:
    """1.6.5a, G3."""
    driver = Driver(max_num_seqs=2)
    for i in range(5):
        driver.add(f"r{i}", unlike(i, 3), 3)
    assert all(len(step) <= 2 for step in driver.run())
    assert list(driver.finish) == [f"r{i}" for i in range(5)]


def test_one_seat_and_many_seats() -> None:
    """max_num_seqs 1 and 512 both work."""
    for seats in (1, 512):
        driver = Driver(max_num_seqs=seats, max_num_batched_tokens=600, num_kv_blocks=2000)
        for i in range(20):
            driver.add(f"r{i}", unlike(i, 3), 3)
        steps = driver.run()
        assert max(map(len, steps)) == min(seats, 20)
        for i in range(20):
            driver.check_lone(f"r{i}", 3)


def test_partial_prefill_limits() -> None:
    """Both limits hold in the waiting loop; smaller prompts still pass."""
    driver = Driver(
        max_num_batched_tokens=30, long_prefill_token_threshold=5, max_num_partial_prefills=1
    )
    driver.add("a", unlike(1, 14))
    driver.add("b", unlike(2, 14))
    driver.add("c", unlike(3, 4))
    assert driver.step() == {"a": 5, "c": 4}
    assert driver.step() == {"c": 1, "a": 5}
    assert driver.step() == {"c": 1, "a": 4, "b": 5}
    driver = Driver(
        max_num_batched_tokens=30,
        long_prefill_token_threshold=5,
        max_num_partial_prefills=3,
        max_long_partial_prefills=1,
    )
    driver.add("a", unlike(1, 14))
    driver.add("b", unlike(2, 14))
    assert driver.step() == {"a": 5}
    assert driver.step() == {"a": 5}
    assert driver.step() == {"a": 4, "b": 5}


def test_records_describe_new_and_known_requests() -> None:
    """1.8.2-1.8.3, G10."""
    driver = Driver(max_num_batched_tokens=8)
    driver.add("r", unlike(1, 10), 4, seed=7)
    driver.step()
    driver.step()
    driver.step()
    first, second, third = driver.executor.outputs
    (new,) = first.scheduled_new_reqs
    assert (new.req_id, new.token_ids, new.num_prompt_tokens) == ("r", unlike(1, 10), 10)
    assert (new.block_ids, new.num_computed_tokens, new.rng_key) == ([1, 2], 0, 7)
    (cached,) = second.scheduled_cached_reqs
    assert (cached.new_block_ids, cached.num_computed_tokens) == ([3], 8)
    assert (cached.num_output_tokens, cached.resumed) == (0, False)
    (cached,) = third.scheduled_cached_reqs
    assert (cached.new_block_ids, cached.num_computed_tokens) == ([], 10)
    assert cached.num_output_tokens == 1
    assert [o.step_counter for o in driver.executor.outputs] == [1, 2, 3]
    assert "101" not in repr(new)


def test_finished_ids_are_announced_once() -> None:
    """1.9.2, COR-34."""
    driver = Driver()
    driver.add("r", [1, 2], 1)
    driver.step()
    assert driver.core.has_work()
    driver.step()
    assert not driver.core.has_work()
    assert [o.finished_req_ids for o in driver.executor.outputs] == [set(), {"r"}]
    driver.add("s", [1, 2], 1)
    driver.step()
    assert driver.executor.outputs[-1].finished_req_ids == set()


def test_an_id_may_be_used_again_at_once() -> None:
    """1.8.5, P25: after a finish, and after an abort, also in the same step."""
    driver = Driver()
    driver.add("r", [1, 2], 1)
    driver.run()
    driver.add("r", [3, 4], 5)
    driver.step()
    driver.core.abort_requests(["r"])
    driver.add("r", [5, 6], 3)
    driver.run()
    assert driver.tokens["r"] == [
        next_id([5, 6]),
        next_id([5, 6, next_id([5, 6])]),
        driver.tokens["r"][2],
    ]
    driver.check_lone("r", 3)


# ---------------------------------------------------------------------- results


def test_stop_cuts_ids_and_logprobs() -> None:
    """1.10.2d, g."""
    driver = Driver()
    driver.add("r", [1, 2], 9, logprobs=1)
    driver.executor.sampled = lambda _, ids: EOS if len(ids) == 4 else 7
    request = driver.scheduler.requests["r"]
    request.stop_ids = frozenset({EOS})
    driver.run()
    assert driver.tokens["r"] == [7, 7, EOS]
    assert driver.last["r"].stop_reason == EOS
    for output in driver.outputs["r"]:
        assert output.new_logprobs is not None
        assert [ids[0] for ids in output.new_logprobs.logprob_token_ids] == output.new_token_ids


def test_chunks_emit_nothing() -> None:
    """1.10.2h, TYP-15."""
    driver = Driver(max_num_batched_tokens=4)
    driver.add("r", unlike(1, 10), 2)
    batches, executed = driver.core.step()
    assert executed
    assert batches == {}


def test_prefill_stats_do_not_come_again_after_a_preemption() -> None:
    """1.2.6: they tell of the first admission; what is computed once more is not a prompt's."""
    driver = Driver()
    driver.add("a", unlike(0, 9), 6)
    driver.step()
    driver.step()
    assert driver.core.reset_prefix_cache(reset_running_requests=True)
    driver.run()
    assert driver.scheduler.num_preemptions == 1
    first, *later = [output.prefill_stats for output in driver.outputs["a"]]
    assert first is not None
    assert later == [None] * 5


def test_prefill_stats_come_once() -> None:
    """1.2.6, TYP-18."""
    driver = Driver(log_stats=True)
    driver.add("a", unlike(1, 9), 3)
    driver.run()
    driver.add("b", unlike(1, 9), 3)
    driver.run()
    stats = [[o.prefill_stats for o in driver.outputs[i]] for i in "ab"]
    assert stats[0][1:] == [None, None]
    assert (stats[0][0].num_prompt_tokens, stats[0][0].num_computed_tokens) == (9, 9)
    assert (stats[1][0].num_cached_tokens, stats[1][0].num_local_cached_tokens) == (8, 8)
    assert stats[1][0].num_computed_tokens == 1
    assert stats[1][1:] == [None, None]


def test_events_only_with_stats() -> None:
    """1.2.8, TYP-17."""
    for log_stats in (True, False):
        driver = Driver(log_stats=log_stats)
        driver.add("r", [1, 2], 2)
        driver.run()
        events = [o.events for o in driver.outputs["r"]]
        if log_stats:
            kinds = [e.type for e in events[0]]
            assert kinds == [EngineCoreEventType.QUEUED, EngineCoreEventType.SCHEDULED]
            assert events[0][0].timestamp <= events[0][1].timestamp <= time.monotonic()
            assert events[1] is None
        else:
            assert events == [None, None]


def test_outputs_go_to_their_clients_and_stats_to_one() -> None:
    """1.10.4, COR-33, TYP-22."""
    driver = Driver(log_stats=True)
    for i, client in enumerate([1, 0, 1, 2]):
        driver.add(f"r{i}", unlike(i, 3), 2, client_index=client)
    batches, _ = driver.core.step()
    found = {c: [o.request_id for o in b.outputs] for c, b in batches.items()}
    assert found == {1: ["r0", "r2"], 0: ["r1"], 2: ["r3"]}
    assert sum(b.scheduler_stats is not None for b in batches.values()) == 1
    assert batches[1].scheduler_stats is not None
    assert batches[1].scheduler_stats.num_running_reqs == 4


def test_stats_without_outputs_go_to_client_0() -> None:
    driver = Driver(log_stats=True, max_num_batched_tokens=8)
    driver.add("r", unlike(1, 20), 2, client_index=3)
    batches, _ = driver.core.step()
    assert list(batches) == [0]
    stats = batches[0].scheduler_stats
    assert stats is not None
    assert (stats.num_running_reqs, stats.num_waiting_reqs, stats.num_scheduled_tokens) == (1, 0, 8)
    assert stats.kv_cache_usage == pytest.approx(2 / 63)
    assert stats.step_time_s > 0


def test_worker_errors_end_one_request() -> None:
    """10.1: NaN logits, impossible masks: that request, with the reason."""
    driver = Driver()
    for i in range(3):
        driver.add(f"r{i}", unlike(i, 3), 4)
    driver.executor.request_errors = {"r1": "no token is allowed"}
    driver.run()
    assert driver.finish["r1"] is FinishReason.ERROR
    assert driver.last["r1"].error == "no token is allowed"
    assert not driver.last["r1"].error_is_client_fault
    assert driver.tokens["r1"] == []
    for request_id in ("r0", "r2"):
        driver.check_lone(request_id, 4)
    driver.check_idle()


def test_max_tokens_zero_scores_the_prompt() -> None:
    """P28: one output, no ids, finish reason length."""
    driver = Driver(max_num_batched_tokens=4)
    request = make_request("r", unlike(1, 10), 1)
    assert request.sampling_params is not None
    request.sampling_params.max_tokens = 0
    driver.core.add_request(driver.core.preprocess_add_request(request))
    driver.tokens["r"], driver.outputs["r"] = [], []
    driver.run()
    assert driver.tokens["r"] == []
    assert driver.finish["r"] is FinishReason.LENGTH
    assert driver.executor.num_computed == 10


def test_results_in_another_order_find_their_requests() -> None:
    """1.10.2a: rows are matched by id, not by place; a missing row means nothing was sampled."""
    config = make_config()
    scheduler = Scheduler(config, 64)
    for i in range(3):
        wire = make_request(f"r{i}", unlike(i, 3), 9)
        scheduler.add_request(Request.from_engine_core_request(wire, max_model_len=64))
    step = scheduler.schedule()
    output = ModelRunnerOutput(["r2", "r0"], [[22], [20]])
    scheduler._checker = None
    (batch,) = scheduler.update_from_output(step, output).values()
    assert [(o.request_id, o.new_token_ids) for o in batch.outputs] == [("r0", [20]), ("r2", [22])]


def test_results_must_belong_to_the_step_in_flight() -> None:
    scheduler = Scheduler(make_config(), 64)
    step = scheduler.schedule()
    with pytest.raises(RuntimeError, match="in flight"):
        scheduler.schedule()
    scheduler.update_from_output(step, None)
    with pytest.raises(RuntimeError, match="not in flight"):
        scheduler.update_from_output(step, None)


# ---------------------------------------------------------------------- admission


def test_duplicate_ids_are_refused() -> None:
    """1.12.1, COR-27, P25: the first is unharmed."""
    driver = Driver()
    driver.add("r", [1, 2], 3)
    with pytest.raises(DuplicateRequestError, match="'r'"):
        driver.core.add_request(driver.core.preprocess_add_request(make_request("r", [1], 1)))
    driver.run()
    driver.check_lone("r", 3)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "match"),
    [
        ([], 1, "empty"),
        ([1] * 64, 1, "max_model_len=64"),
        ([1] * 70, 1, "70 tokens"),
    ],
)
def test_impossible_prompts_are_refused(prompt: list[int], max_tokens: int, match: str) -> None:
    """1.1.6, E6."""
    driver = Driver()
    with pytest.raises(ContextLengthError, match=match):
        driver.add("r", prompt, max_tokens)
    assert not driver.core.has_work()


def test_a_request_larger_than_the_pool_is_refused() -> None:
    """P21, T1: 49 usable blocks of 16, one prompt of 1000 tokens, then a short one."""
    config = make_config(block_size=16, max_model_len=2000, num_kv_blocks=50)
    scheduler = Scheduler(config, 50)

    def make(request_id: str, length: int, max_tokens: int) -> Request:
        wire = make_request(request_id, [1] * length, max_tokens)
        return Request.from_engine_core_request(wire, max_model_len=2000)

    with pytest.raises(ContextLengthError, match="49 blocks = 784 tokens"):
        scheduler.add_request(make("big", 1000, 1))
    with pytest.raises(ContextLengthError, match="785 tokens = 50 KV blocks"):
        scheduler.add_request(make("grows", 700, 85))
    scheduler.add_request(make("fits", 700, 84))
    scheduler.add_request(make("small", 8, 1))
    assert list(scheduler.schedule().num_scheduled_tokens) == ["fits"]


def test_the_pool_of_exactly_one_request_serves_it() -> None:
    """T1: blocks(L) + 1, the null block being one of them."""
    driver = Driver(num_kv_blocks=17, max_model_len=64)
    driver.add("r", unlike(1, 20), 99)
    driver.run()
    driver.check_lone("r", 44)
    assert driver.scheduler.num_preemptions == 0


def test_adapter_slots() -> None:
    """1.6.4, 1.6.5c: at most max_loras adapters at once; those without one pass."""
    driver = Driver(lora_config=LoRAConfig(max_loras=1), max_num_seqs=8)
    a, b = LoRARequest("a", 1, "/a"), LoRARequest("b", 2, "/b")
    driver.add("a1", unlike(1, 3), 3, lora_request=a)
    driver.add("b1", unlike(2, 3), 3, lora_request=b)
    driver.add("a2", unlike(3, 3), 3, lora_request=a)
    driver.add("plain", unlike(4, 3), 6)
    assert list(driver.step()) == ["a1", "a2", "plain"]
    assert driver.scheduler.room.blocked.keys() == {"b1"}
    driver.step()
    driver.step()
    assert list(driver.step()) == ["plain", "b1"]
    driver.run()
    driver.check_idle()


def test_blocked_and_waiting_requests_cost_nothing() -> None:
    """1.5.3 Wart: a step costs the same with 10 and with 10,000 waiting.

    Counted in looks at the line, not in seconds.
    """
    settings = dataclasses.replace(SETTINGS, check_invariants=False)
    driver = Driver(max_num_seqs=2, settings=settings)
    for i in range(10_000):
        driver.add(f"r{i}", [i % 900, i // 900, 3], 30)
    driver.step()
    looks = 0
    pop = driver.scheduler.room.pop

    def counted_pop(preempted_only: bool = False) -> Any:
        nonlocal looks
        looks += 1
        return pop(preempted_only)

    driver.scheduler.room.pop = counted_pop  # type: ignore[method-assign]
    for _ in range(20):
        driver.step()
    assert looks == 0


def test_counts() -> None:
    """1.12.5."""
    driver = Driver(max_num_seqs=1)
    driver.add("a", [1, 2], 3)
    driver.add("b", [1, 3], 3)
    driver.step()
    assert driver.scheduler.get_request_counts() == (1, 1)
    assert driver.scheduler.get_num_unfinished_requests() == 2


def test_finish_requests_is_idempotent() -> None:
    """1.12.2: only what really ended is returned."""
    driver = Driver()
    driver.add("a", [1, 2], 3, client_index=4)
    driver.add("b", [1, 3], 3)
    driver.step()
    finish = driver.scheduler.finish_requests
    assert finish(["a", "zzz", "a"], RequestStatus.FINISHED_ABORTED) == [("a", 4)]
    assert finish(["a"], RequestStatus.FINISHED_ABORTED) == []
    assert finish(None, RequestStatus.FINISHED_ABORTED) == [("b", 0)]
    driver.run()
    driver.check_idle()
