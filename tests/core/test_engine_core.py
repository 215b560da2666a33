"""4.1-4.10, 10.1: construction, requests, failures, the end."""

from __future__ import annotations

import dataclasses
import gc
import threading
from typing import Any

import pytest

from tellin.config import LoRAConfig
from tellin.core.engine_core import EngineCore
from tellin.core.kv_sizing import plan_kv_cache
from tellin.exceptions import (
    ContextLengthError,
    EngineDeadError,
    InvalidParameterError,
    OutOfMemoryError,
    UnsupportedFeatureError,
)
from tellin.protocol import FinishReason, LoRARequest, MultiModalFeature
from tellin.sampling_params import PoolingParams, SamplingParams, StructuredOutputsParams
from tests.core.driver import Driver
from tests.core.fakes import FakeExecutor, make_config, make_request
from tests.core.test_scheduler import unlike

# ---------------------------------------------------------------------- sizing


class Memory:
    def __init__(
        self, available: int, bytes_per_block: int = 1024, bytes_per_slot: int = 0
    ) -> None:
        self.available, self.bytes_per_block = available, bytes_per_block
        self.bytes_per_slot = bytes_per_slot

    def kv_bytes_per_block(self) -> int:
        return self.bytes_per_block

    def state_bytes_per_slot(self) -> int:
        return self.bytes_per_slot

    def determine_available_memory(self) -> int:
        return self.available


def test_exact_number_of_blocks() -> None:
    sizes = plan_kv_cache(make_config(num_kv_blocks=20, max_model_len=64), Memory(0))
    assert (sizes.num_blocks, sizes.num_tokens, sizes.max_concurrency) == (20, 76, 19 / 16)


def test_no_more_than_can_be_used() -> None:
    """2.10 Wart: by default at most what max_num_seqs requests of full length need."""
    config = make_config(num_kv_blocks=None, max_num_seqs=8, max_model_len=64)
    assert plan_kv_cache(config, Memory(1 << 40)).num_blocks == 8 * 16 + 1
    assert plan_kv_cache(config, Memory(100 * 1024)).num_blocks == 100


@pytest.mark.parametrize("cache", [{"kv_cache_memory_bytes": 1 << 30}, {"memory_utilization": 0.9}])
def test_explicit_sizes_are_used_whole(cache: dict[str, Any]) -> None:
    config = make_config(num_kv_blocks=None, cache=cache)
    assert plan_kv_cache(config, Memory(1 << 30)).num_blocks == 1 << 20


def test_one_full_request_must_fit() -> None:
    """2.10.3, P21: needed, available and the largest length, in the message."""
    config = make_config(num_kv_blocks=16, max_model_len=64)
    with pytest.raises(OutOfMemoryError, match=r"needs 16 KV blocks .* has 15 .* that fits is 60"):
        plan_kv_cache(config, Memory(0))
    assert plan_kv_cache(make_config(num_kv_blocks=17), Memory(0)).num_blocks == 17  # T1


def test_auto_max_model_len_shrinks() -> None:
    """COR-17."""
    config = make_config(num_kv_blocks=10, max_model_len=64, model={"auto_max_model_len": True})
    assert plan_kv_cache(config, Memory(0)).max_model_len == 36
    core = EngineCore(config, FakeExecutor)  # type: ignore[arg-type]
    assert core.ready.max_model_len == 36
    assert core.config.scheduler_config.max_model_len == 36
    with pytest.raises(ContextLengthError, match="max_model_len=36"):
        core.preprocess_add_request(make_request("r", [1] * 36))
    with pytest.raises(OutOfMemoryError, match="largest max_model_len that fits is 0"):
        plan_kv_cache(
            make_config(num_kv_blocks=None, model={"auto_max_model_len": True}), Memory(0)
        )


def test_nonsense_numbers_are_refused() -> None:
    for blocks in (-1, 0, 1):
        with pytest.raises(InvalidParameterError, match="num_kv_blocks"):
            plan_kv_cache(make_config(num_kv_blocks=blocks), Memory(0))


def test_a_model_without_kv() -> None:
    assert plan_kv_cache(make_config(num_kv_blocks=None), Memory(0, 0)).num_blocks > 1


# ---------------------------------------------------------------------- construction and end


def test_ready_message() -> None:
    """COR-20."""
    core = Driver().core
    ready = core.ready
    assert (ready.num_kv_blocks, ready.block_size, ready.max_model_len) == (64, 4, 64)
    assert (ready.isa, ready.num_threads) == ("fake", 1)
    assert ready.kv_cache_size_tokens == 252
    assert core.get_supported_tasks() == ("generate",)


def test_construction_that_fails_leaves_nothing() -> None:
    """COR-71 Wart: each part is guarded."""
    executors: list[FakeExecutor] = []

    class Failing(FakeExecutor):
        def __post_init__(self) -> None:
            super().__post_init__()
            executors.append(self)

        def initialize_kv_cache(self, num_blocks: int) -> None:
            raise OutOfMemoryError("no")

    with pytest.raises(OutOfMemoryError):
        EngineCore(make_config(), Failing)  # type: ignore[arg-type]
    assert executors[0].was_shut_down == 1

    class Broken:
        def __init__(self, config: Any) -> None:
            raise RuntimeError("never built")

    with pytest.raises(RuntimeError, match="never built"):
        EngineCore(make_config(), Broken)  # type: ignore[arg-type]


def test_shutdown_twice() -> None:
    """P31."""
    driver = Driver()
    driver.add("r", [1, 2], 4)
    driver.step()
    driver.core.shutdown()
    driver.core.shutdown()
    assert driver.executor.was_shut_down == 1
    assert not driver.core.has_work()
    with pytest.raises(EngineDeadError):
        driver.core.step()
    for call in (lambda: driver.core.collective_rpc("x"), driver.core.wake_up):
        with pytest.raises(EngineDeadError, match="shut down"):
            call()


def test_no_side_effects_on_the_process() -> None:
    """P31: no frozen garbage-collector generations, no threads, nothing kept alive."""
    import weakref

    frozen = gc.get_freeze_count()
    threads = threading.active_count()
    driver = Driver()
    driver.add("r", [1, 2], 4)
    driver.run()
    assert gc.get_freeze_count() == frozen
    assert threading.active_count() == threads
    core = weakref.ref(driver.core)
    driver.core.shutdown()
    del driver
    gc.collect()
    assert core() is None


def test_the_failure_callback_reaches_the_executor() -> None:
    calls: list[int] = []
    core = EngineCore(
        make_config(),
        FakeExecutor,  # type: ignore[arg-type]
        failure_callback=lambda: calls.append(1),
    )
    assert isinstance(core.executor, FakeExecutor)
    core.executor.failure_callback()
    assert calls == [1]


# ---------------------------------------------------------------------- requests


def wire(**changes: Any) -> Any:
    request = make_request("r", [1, 2, 3])
    for name, value in changes.items():
        setattr(request, name, value)
    return request


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"request_id": 7}, TypeError, "string"),
        ({"prompt_embeds": [[0.0]]}, UnsupportedFeatureError, "prompt_embeds"),
        (
            {"mm_features": [MultiModalFeature("image", "x", 0, 1)]},
            UnsupportedFeatureError,
            "multimodal",
        ),
        ({"resumable": True}, UnsupportedFeatureError, "resumable"),
        ({"lora_request": LoRARequest("a", 1, "/a")}, UnsupportedFeatureError, "enable_lora"),
        ({"prompt_token_ids": None}, ValueError, "prompt_token_ids"),
        ({"sampling_params": None}, ValueError, "exactly one"),
        ({"pooling_params": PoolingParams(task="embed")}, UnsupportedFeatureError, "embed"),
        ({"sampling_params": SamplingParams(max_tokens=None)}, ValueError, "max_tokens"),
    ],
)
def test_bad_requests_fail_alone(changes: dict[str, Any], error: Any, match: str) -> None:
    """TYP-7, 1.1.7, COR-26 Wart: an exception for that request; the engine goes on."""
    driver = Driver()
    driver.add("good", unlike(1, 5), 4)
    with pytest.raises(error, match=match):
        driver.core.preprocess_add_request(wire(**changes))
    driver.run()
    driver.check_lone("good", 4)
    driver.check_idle()


def test_structured_output_needs_a_tokenizer() -> None:
    """6.1.3."""
    config = make_config(model={"skip_tokenizer_init": True})
    core = EngineCore(config, FakeExecutor)  # type: ignore[arg-type]
    params = SamplingParams(max_tokens=3, structured_outputs=StructuredOutputsParams(regex="a+"))
    with pytest.raises(UnsupportedFeatureError, match="tokenizer"):
        core.preprocess_add_request(wire(sampling_params=params))


def test_random_keys() -> None:
    """A seed is the key; without one it comes from the engine's seed and the admission order."""
    keys = []
    for _ in range(2):
        core = EngineCore(make_config(), FakeExecutor)  # type: ignore[arg-type]
        requests = [core.preprocess_add_request(make_request(f"r{i}", [1])) for i in range(3)]
        keys.append([r.rng_key for r in requests])
        seeded = core.preprocess_add_request(make_request("s", [1], seed=5))
        assert seeded.rng_key == 5
    assert keys[0] == keys[1]
    assert len(set(keys[0])) == 3
    config = make_config(model={"seed": 1})
    other = EngineCore(config, FakeExecutor)  # type: ignore[arg-type]
    assert other.preprocess_add_request(make_request("r", [1])).rng_key not in keys[0]


def test_pooling_requests() -> None:
    """1.10.2d: any pooler output ends the request."""

    class Pooling(FakeExecutor):
        def __post_init__(self) -> None:
            super().__post_init__()
            self.supported_tasks = ("embed",)  # type: ignore[assignment]

        def sample_tokens(self, grammar_output: Any) -> Any:
            output = super().sample_tokens(grammar_output)
            output.pooler_output = {
                i: [1.0] for i, t in zip(output.req_ids, output.sampled_token_ids, strict=True) if t
            }
            output.sampled_token_ids = [[] for _ in output.req_ids]
            return output

    core = EngineCore(make_config(max_num_batched_tokens=8), Pooling)  # type: ignore[arg-type]
    request = wire(sampling_params=None, pooling_params=PoolingParams(task="embed"))
    request.prompt_token_ids = unlike(1, 12)
    core.add_request(core.preprocess_add_request(request))
    assert core.step() == ({}, True)
    batches, _ = core.step()
    (output,) = batches[0].outputs
    assert (output.pooling_output, output.finish_reason) == ([1.0], FinishReason.STOP)
    with pytest.raises(UnsupportedFeatureError, match="does not generate"):
        core.preprocess_add_request(make_request("g", [1]))


def test_adapters_are_loaded_at_admission() -> None:
    """10.1: once, before the request is queued; a missing one fails its request only; T11."""
    driver = Driver(lora_config=LoRAConfig(max_loras=2))
    lora = LoRARequest("a", 1, "/a")
    for i in range(3):
        driver.add(f"r{i}", unlike(1, 9), 2, lora_request=lora)
    assert driver.executor.rpcs.count(("add_lora", ("a",))) == 1
    with pytest.raises(ValueError, match="no adapter"):
        driver.add("bad", [1], 2, lora_request=LoRARequest("b", 2, "missing"))
    driver.run()
    assert set(driver.finish) == {"r0", "r1", "r2"}
    driver.core.remove_lora(1)
    before = driver.executor.num_computed
    driver.add("again", unlike(1, 9), 1, lora_request=lora)
    driver.run()
    assert driver.executor.rpcs.count(("add_lora", ("a",))) == 2
    assert driver.executor.num_computed - before == 9  # nothing of the former load is served
    driver.check_idle()


# ---------------------------------------------------------------------- aborts


def test_abort_gives_everything_back() -> None:
    """E4, COR-28: in every state; no output follows."""
    driver = Driver(max_num_batched_tokens=8, max_num_seqs=2)
    driver.add("decoding", unlike(1, 3), 9)
    driver.step()
    driver.add("prefilling", unlike(2, 20), 9)
    driver.step()
    driver.add("waiting", unlike(3, 3), 9)
    driver.core.abort_requests(["decoding", "prefilling", "waiting", "unknown"])
    driver.core.abort_requests(["decoding"])
    driver.run()
    assert driver.finish == {}
    driver.check_idle()


def test_abort_during_a_step_applies_before_results() -> None:
    """1.12.6, COR-29, P24: from another thread, within the step."""
    driver = Driver()
    driver.add("a", unlike(1, 3), 9)
    driver.add("b", unlike(2, 3), 9)

    def abort(_: Any) -> None:
        thread = threading.Thread(target=driver.core.abort_during_step, args=(["a"],))
        thread.start()
        thread.join()

    driver.executor.fail_on_step = abort
    assert driver.step() == {"a": 3, "b": 3}
    driver.executor.fail_on_step = None
    assert driver.tokens["a"] == []
    driver.run()
    driver.check_lone("b", 9)
    assert "a" not in driver.finish
    driver.check_idle()


def test_a_late_abort_does_not_hit_the_next_request_of_that_name() -> None:
    """COR-80, P25: an abort travels twice; the copy for the running step is used up with it."""
    driver = Driver()
    driver.add("a", unlike(1, 3), 9)
    driver.step()
    driver.core.abort_during_step(["a"])
    driver.core.abort_requests(["a"])
    driver.add("a", unlike(2, 3), 9)
    driver.run()
    driver.check_lone("a", 9)


def test_abort_from_a_callback_of_the_step() -> None:
    """On the stepping thread itself, while the step is in flight."""
    driver = Driver()
    driver.add("a", unlike(1, 3), 9)
    driver.add("b", unlike(2, 3), 9)
    driver.executor.fail_on_step = lambda step: driver.core.abort_requests(["a"])
    driver.step()
    driver.executor.fail_on_step = None
    driver.run()
    driver.check_lone("b", 9)
    assert driver.tokens["a"] == []


def test_abort_during_a_step_of_an_idle_engine() -> None:
    driver = Driver()
    driver.core.abort_during_step(["nobody"])
    assert driver.core.step() == ({}, False)


def test_abort_all_returns_last_outputs() -> None:
    """1.18.4."""
    driver = Driver()
    driver.add("a", unlike(1, 3), 9, client_index=1)
    driver.add("b", unlike(2, 3), 9)
    driver.step()
    batches = driver.core.abort_all()
    assert {c: [o.request_id for o in b.outputs] for c, b in batches.items()} == {
        1: ["a"],
        0: ["b"],
    }
    driver.run()
    driver.check_idle()


# ---------------------------------------------------------------------- failing steps


def test_a_failing_step_ends_what_was_in_it(caplog: pytest.LogCaptureFixture) -> None:
    """10.1, DESIGN: those requests ERROR; waiting ones and the engine go on; lengths in the log."""
    driver = Driver(max_num_seqs=2)
    for i in range(3):
        driver.add(f"r{i}", unlike(i, 5), 4)
    driver.executor.fail_on_step = lambda step: ValueError("bad weights")
    driver.step()
    driver.executor.fail_on_step = None
    assert driver.finish == {"r0": FinishReason.ERROR, "r1": FinishReason.ERROR}
    assert driver.last["r0"].error == "the step failed: ValueError: bad weights"
    assert "num_tokens=5" in caplog.text
    assert "100" not in caplog.text.split("new:")[1].split("\n")[0]
    driver.run()
    driver.check_lone("r2", 4)
    driver.check_idle()


def test_a_failing_step_loses_no_news_for_the_worker() -> None:
    """What the worker should have learned from the failed step comes with the next."""
    driver = Driver()
    driver.add("old", unlike(1, 5), 1)
    driver.step()
    driver.add("bad", unlike(2, 5), 4)
    driver.executor.fail_on_step = lambda step: ValueError("no")
    driver.step()
    driver.executor.fail_on_step = None
    driver.add("old", unlike(3, 5), 2)
    driver.run()
    assert driver.executor.outputs[-1].finished_req_ids == {"old"}
    driver.check_lone("old", 2)


def test_preemptions_of_a_failed_step_are_announced_later() -> None:
    driver = Driver(num_kv_blocks=9, max_model_len=32, enable_prefix_caching=False)
    for i in range(3):
        driver.add(f"r{i}", unlike(i, 7), 12)

    def fail(step: Any) -> Exception | None:
        return ValueError("no") if step.preempted_req_ids else None

    driver.executor.fail_on_step = fail
    while not driver.finish:
        driver.step()
    driver.executor.fail_on_step = None
    assert set(driver.finish.values()) == {FinishReason.ERROR}
    driver.step()
    assert driver.executor.outputs[-1].preempted_req_ids == {"r2"}
    driver.run()
    driver.check_lone("r2", 12)


def test_a_broken_executor_kills_the_engine() -> None:
    """COR-30: when check_health fails, the caller learns it at once."""
    driver = Driver()
    driver.add("r", unlike(1, 5), 4)
    driver.executor.healthy = False
    driver.executor.fail_on_step = lambda step: ValueError("gone")
    with pytest.raises(EngineDeadError, match="gone"):
        driver.core.step()


def test_a_dead_engine_stays_dead() -> None:
    """10.1.2: every later call gets the same error at once."""
    driver = Driver()
    driver.add("r", unlike(1, 5), 4)
    driver.executor.healthy = False
    driver.executor.fail_on_step = lambda step: ValueError("gone")
    with pytest.raises(EngineDeadError):
        driver.core.step()
    for call in (driver.core.step, lambda: driver.add("s", [1], 1)):
        with pytest.raises(EngineDeadError, match="gone"):
            call()


def test_ctrl_c_in_the_model_ends_the_step_only() -> None:
    """A KeyboardInterrupt passes through; what was in the step ends, the engine goes on."""
    driver = Driver(max_num_seqs=1)
    driver.add("a", unlike(1, 5), 4)
    driver.add("b", unlike(2, 5), 4)
    driver.executor.fail_on_step = lambda step: KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        driver.step()
    driver.executor.fail_on_step = None
    driver.run()
    assert driver.finish["a"] is FinishReason.ERROR
    driver.check_lone("b", 4)
    driver.check_idle()


def test_a_sampler_that_raises_leaves_nothing_pending() -> None:
    driver = Driver(max_num_seqs=1)
    driver.add("a", unlike(1, 5), 4)
    driver.add("b", unlike(2, 5), 4)

    def broken(request_id: str, ids: list[int]) -> int:
        driver.executor.sampled = None
        raise ValueError("sampler")

    driver.executor.sampled = broken
    driver.run()
    assert driver.finish["a"] is FinishReason.ERROR
    driver.check_lone("b", 4)


@pytest.mark.parametrize("place", ["schedule_decodes", "_build_output", "apply", "admit", "pop"])
@pytest.mark.parametrize("after", [True, False])
def test_ctrl_c_in_the_scheduler_is_survived(place: str, after: bool) -> None:
    """Wherever the interrupt hits, the next step finds a consistent engine."""
    driver = Driver(max_num_seqs=3, max_num_batched_tokens=16)
    for i in range(6):
        driver.add(f"r{i}", unlike(i, 9), 6)
    driver.step()
    driver.step()
    scheduler = driver.scheduler
    owner: Any = {
        "schedule_decodes": scheduler.work,
        "apply": scheduler.results,
        "admit": scheduler.kv_cache_manager,
        "pop": scheduler.room,
    }.get(place, scheduler)
    original = getattr(owner, place)

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        setattr(owner, place, original)
        if after:
            original(*args, **kwargs)
        raise KeyboardInterrupt

    setattr(owner, place, interrupted)
    with pytest.raises(KeyboardInterrupt):
        driver.run()
    driver.core.abort_requests(["unknown"])
    driver.run()
    driver.check_idle()
    assert len(driver.finish) == 6
    done = [i for i, reason in driver.finish.items() if reason is FinishReason.LENGTH]
    assert len(done) >= 2
    for request_id in done:
        driver.check_lone(request_id, 6)


def test_utility_calls() -> None:
    driver = Driver()
    driver.core.collective_rpc("f", args=(1,))
    assert driver.executor.rpcs[-1] == ("f", (1,))
    driver.core.reset_mm_cache()
    driver.core.reset_encoder_cache()
    assert not driver.core.is_sleeping()


def test_draft_model_budget() -> None:
    """5.2.3: one token per seat is the drafter's; nothing left is an error at start."""
    from tellin.config import SpeculativeConfig

    spec = SpeculativeConfig("draft_model", 3)
    driver = Driver(speculative_config=spec, max_num_batched_tokens=32, max_num_seqs=8)
    assert driver.scheduler.max_num_scheduled_tokens == 24
    assert driver.scheduler.num_lookahead_tokens == 3
    with pytest.raises(ValueError, match="max_num_batched_tokens=8"):
        Driver(speculative_config=spec, max_num_batched_tokens=8, max_num_seqs=8)
    ngram = dataclasses.replace(spec, method="ngram")
    driver = Driver(speculative_config=ngram, max_num_batched_tokens=32)
    assert driver.scheduler.max_num_scheduled_tokens == 32
    assert driver.scheduler.num_lookahead_tokens == 0
