"""Prefix caching and sharing through the whole scheduler: E3, P18, P19, n > 1."""

from __future__ import annotations

import pytest

from tellin.config import LoRAConfig
from tellin.core.prefix_sharing import MAX_DEFERRALS, MIN_SHARED_TOKENS
from tellin.protocol import FinishReason, LoRARequest
from tests.core.driver import Driver
from tests.core.test_scheduler import unlike


@pytest.mark.parametrize("extra", [-1, 0, 1])
@pytest.mark.parametrize("caching", [True, False])
def test_the_same_request_three_times(extra: int, caching: bool) -> None:
    """P18: prompts of k blocks and one more or less; every answer is the lone one."""
    driver = Driver(enable_prefix_caching=caching)
    prompt = unlike(1, 16 + extra)
    computed = []
    for i in range(3):
        before = driver.executor.num_computed
        driver.add(f"r{i}", prompt, 8)
        driver.run()
        driver.check_lone(f"r{i}", 8)
        computed.append(driver.executor.num_computed - before)
    if caching:
        assert computed[1] == computed[2] == 7 + 1  # 7 decode steps, and the prompt's last token
    else:
        assert computed[0] == computed[1] == computed[2]


def test_a_full_hit_computes_one_token_in_a_copy() -> None:
    """The shared block is never written: it is copied (`kv_block_copies`)."""
    driver = Driver()
    driver.add("a", unlike(1, 16), 8)
    driver.step()
    driver.add("b", unlike(1, 16), 8)
    assert driver.step() == {"a": 1, "b": 1}
    step = driver.executor.outputs[-1]
    a, b = driver.scheduler.requests["a"], driver.scheduler.requests["b"]
    assert a.block_ids[:3] == b.block_ids[:3]
    assert step.kv_block_copies == [(a.block_ids[3], b.block_ids[3])]
    driver.run()
    driver.check_lone("a", 8)
    driver.check_lone("b", 8)


def test_n_samples_compute_their_prompt_once() -> None:
    """Children submitted together wait one step for the first and share its blocks."""
    driver = Driver(max_num_batched_tokens=128, num_kv_blocks=128, max_num_seqs=16)
    prompt = unlike(1, 40)
    for i in range(8):
        driver.add(f"{i}_p", prompt, 4)
    assert driver.step() == {"0_p": 40}
    scheduled = driver.step()
    assert scheduled == {"0_p": 1, **{f"{i}_p": 1 for i in range(1, 8)}}
    driver.run()
    assert driver.executor.num_computed == 40 + 7 + 8 * 3
    for i in range(8):
        driver.check_lone(f"{i}_p", 4)
    driver.check_idle()


def test_n_samples_compute_even_the_end_of_their_prompt_once() -> None:
    """A prompt that does not fill its last block: children copy that block."""
    driver = Driver(max_num_batched_tokens=128, num_kv_blocks=128, max_num_seqs=16)
    prompt = unlike(1, 43)
    for i in range(5):
        driver.add(f"{i}_p", prompt, 6)
    assert driver.step() == {"0_p": 43}
    assert driver.step() == {f"{i}_p": 1 for i in range(5)}
    assert len(driver.executor.outputs[-1].kv_block_copies) == 4
    driver.run()
    for i in range(5):
        driver.check_lone(f"{i}_p", 6)
    assert driver.executor.num_computed == 43 + 4 + 5 * 5
    driver.check_idle()


def test_a_tail_is_forgotten_with_its_block() -> None:
    """The block is reused for something else: the prompt is computed again, and rightly."""
    driver = Driver(num_kv_blocks=17, max_model_len=64)
    driver.add("a", unlike(1, 11), 1)
    driver.run()
    assert driver.scheduler.kv_cache_manager.pool._tails
    driver.add("b", unlike(2, 60), 4)
    driver.run()
    before = driver.executor.num_computed
    driver.add("c", unlike(1, 11), 1)
    driver.run()
    assert driver.executor.num_computed - before == 11
    driver.check_lone("c", 1)


def test_tails_of_longer_and_shorter_prompts_are_not_mixed_up() -> None:
    driver = Driver()
    for i, length in enumerate([9, 10, 11, 10, 9, 11, 12]):
        driver.add(f"r{i}", unlike(1, length), 3)
        driver.run()
        driver.check_lone(f"r{i}", 3)


def test_a_burst_with_one_system_prompt_computes_it_once() -> None:
    driver = Driver(max_num_batched_tokens=512, num_kv_blocks=256, max_num_seqs=16)
    system = unlike(1, 40)
    for i in range(10):
        driver.add(f"r{i}", [*system, 500 + i, 1, 2], 2)
    assert driver.step() == {"r0": 43}
    assert driver.step() == {"r0": 1, **{f"r{i}": 3 for i in range(1, 10)}}
    driver.run()
    for i in range(10):
        driver.check_lone(f"r{i}", 2)


def test_short_prefixes_are_not_waited_for() -> None:
    driver = Driver(max_num_batched_tokens=512)
    prompt = unlike(1, MIN_SHARED_TOKENS - 1)
    driver.add("a", prompt, 2)
    driver.add("b", prompt, 2)
    assert driver.step() == {"a": len(prompt), "b": len(prompt)}


def test_waiters_of_a_chunked_prompt_start_when_it_is_done() -> None:
    """Bounded: they start with the step after the owner's last shared block."""
    driver = Driver(max_num_batched_tokens=16, max_model_len=128, num_kv_blocks=128)
    prompt = unlike(1, 64)
    driver.add("a", prompt, 9)
    driver.add("b", prompt, 3)
    driver.add("other", unlike(2, 4), 2)
    assert driver.step() == {"a": 16}
    assert driver.scheduler.room.blocked == {}  # nobody was looked at: no budget was left
    assert driver.step() == {"a": 12, "other": 4}
    assert driver.scheduler.room.blocked.keys() == {"b"}
    assert driver.step() == {"other": 1, "a": 15}
    assert driver.step() == {"a": 16}
    assert driver.step() == {"a": 5}
    assert driver.step() == {"a": 1, "b": 1}
    driver.run()
    for request_id, n in (("a", 9), ("b", 3), ("other", 2)):
        driver.check_lone(request_id, n)


def test_waiters_survive_the_end_of_their_owner() -> None:
    """Abort: they look again at once, and compute what is still missing."""
    driver = Driver(max_num_batched_tokens=24, num_kv_blocks=128)
    prompt = unlike(1, 48)
    driver.add("a", prompt, 9)
    driver.add("b", [*prompt, 7], 3)
    driver.step()
    driver.step()
    assert driver.scheduler.room.blocked.keys() <= {"b"}
    driver.core.abort_requests(["a"])
    assert not driver.scheduler.room.blocked
    assert driver.step()["b"] > 0
    driver.run()
    driver.check_lone("b", 3)
    driver.check_idle()


def test_deferrals_are_bounded() -> None:
    """Owners that keep vanishing cannot hold a request for ever."""
    driver = Driver(max_num_batched_tokens=24, num_kv_blocks=400, max_num_seqs=32)
    prompt = unlike(1, 48)
    driver.add("owner", prompt, 2)
    driver.step()
    for i in range(MAX_DEFERRALS + 5):
        driver.add(f"r{i}", prompt, 2)
    last = f"r{MAX_DEFERRALS + 4}"
    request = driver.scheduler.requests[last]
    request.num_deferrals = MAX_DEFERRALS
    assert driver.scheduler.in_flight_prefixes.find_owner(request, 0) is None


def test_deferred_requests_keep_their_seats() -> None:
    """Those who overtake a waiting child cannot take its place."""
    driver = Driver(max_num_batched_tokens=128, num_kv_blocks=200, max_num_seqs=3)
    prompt = unlike(1, 40)
    for i in range(3):
        driver.add(f"{i}_p", prompt, 6)
    driver.add("late", unlike(2, 4), 6)
    assert list(driver.step()) == ["0_p"]
    assert list(driver.step()) == ["0_p", "1_p", "2_p"]
    driver.run()
    assert list(driver.finish)[-1] == "late"


def test_prompt_logprobs_are_never_deferred() -> None:
    driver = Driver(max_num_batched_tokens=128)
    prompt = unlike(1, 40)
    driver.add("a", prompt, 2)
    driver.add("b", prompt, 2, prompt_logprobs=1)
    assert driver.step() == {"a": 40, "b": 40}


def test_salts_and_adapters_share_nothing() -> None:
    """2.4 through the engine, P19."""
    driver = Driver(lora_config=LoRAConfig(max_loras=4))
    prompt = unlike(1, 17)
    lora = LoRARequest("a", 1, "/a")
    variants = [{}, {"cache_salt": "x"}, {"cache_salt": "y"}, {"lora_request": lora}]
    for i, kwargs in enumerate(variants):
        before = driver.executor.num_computed
        driver.add(f"r{i}", prompt, 1, **kwargs)
        driver.run()
        assert driver.executor.num_computed - before == 17
    driver.core.add_lora(lora)  # loaded anew: a new generation
    before = driver.executor.num_computed
    driver.add("again", prompt, 1, lora_request=lora)
    driver.run()
    assert driver.executor.num_computed - before == 17
    before = driver.executor.num_computed
    driver.add("and again", prompt, 1, lora_request=lora)
    driver.run()
    assert driver.executor.num_computed - before == 1


def test_reset_while_running() -> None:
    """1.15.3: False and untouched without the flag; with it everything is computed again."""
    driver = Driver()
    for i in range(3):
        driver.add(f"r{i}", unlike(i, 9), 12)
    driver.step()
    driver.step()
    assert not driver.core.reset_prefix_cache()
    assert len(driver.scheduler.running) == 3
    assert driver.core.reset_prefix_cache(reset_running_requests=True)
    assert driver.scheduler.kv_cache_manager.pool.num_cached_blocks() == 0
    assert list(driver.step()) == ["r0", "r1", "r2"]  # FCFS order is restored
    driver.run()
    for i in range(3):
        driver.check_lone(f"r{i}", 12)
    assert driver.core.reset_prefix_cache()


def test_stats_count_each_admission_once() -> None:
    """2.5.3: also when a request was looked at many times before."""
    driver = Driver(log_stats=True, max_num_seqs=2, num_kv_blocks=18, max_model_len=64)
    for i in range(5):
        driver.add(f"r{i}", unlike(0, 30), 8)
    driver.run()
    stats = [s.prefix_cache_stats for s in driver.stats]
    assert sum(s.requests for s in stats) == 5
    assert sum(s.queries for s in stats) == 150
    assert sum(s.hits for s in stats) > 80
    assert all(reason is FinishReason.LENGTH for reason in driver.finish.values())
