"""E1, E4, E5, G1-G10: random sequences of everything a client can do, with a tiny pool.

In every step and after it the scheduler's invariants are recomputed and the fake
executor checks that each position reads the KV of the right token. At the end every request must
have ended once, with what a lone run gives, and nothing may be left.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tellin.config import SpeculativeConfig
from tellin.protocol import FinishReason
from tests.core.driver import Driver
from tests.core.fakes import FakeExecutor, StatefulExecutor, lone_run
from tests.core.test_fuzz import good_and_bad_drafts

MAX_MODEL_LEN = 40
PROMPT_IDS = st.integers(0, 3)
SHARED = [5] * 12


class EngineMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.driver: Any = None
        self.wanted: dict[str, int] = {}
        self.aborted: set[str] = set()
        self.num_added = 0
        self.is_paused = False

    @initialize(
        policy=st.sampled_from(["fcfs", "priority"]),
        num_kv_blocks=st.sampled_from([12, 14, 24]),
        budget=st.sampled_from([5, 8, 13, 64]),
        block_size=st.sampled_from([4, 8]),
        caching=st.booleans(),
        threshold=st.sampled_from([0, 0, 3]),
        full_isl=st.booleans(),
        watermark=st.sampled_from([0.0, 0.1]),
        max_partial=st.sampled_from([0, 0, 1]),
        drafting=st.sampled_from([None, None, "ngram", "draft_model"]),
        stateful=st.booleans(),
    )
    def start(
        self,
        policy: str,
        num_kv_blocks: int,
        budget: int,
        block_size: int,
        caching: bool,
        threshold: int,
        full_isl: bool,
        watermark: float,
        max_partial: int,
        drafting: str | None,
        stateful: bool,
    ) -> None:
        speculative = None
        if drafting is not None and budget > 5:  # a draft model takes a token of each seat
            speculative = SpeculativeConfig(drafting, 3, model="m", adaptive=caching)
        self.driver = Driver(
            executor_class=StatefulExecutor if stateful else FakeExecutor,
            speculative_config=speculative,
            log_stats=True,
            policy=policy,
            num_kv_blocks=num_kv_blocks,
            max_model_len=MAX_MODEL_LEN,
            max_num_batched_tokens=budget,
            max_num_seqs=5,
            block_size=block_size,
            enable_prefix_caching=caching,
            long_prefill_token_threshold=threshold,
            scheduler_reserve_full_isl=full_isl,
            watermark=watermark,
            max_num_partial_prefills=max_partial,
        )
        self.driver.scheduler.in_flight_prefixes.min_shared_tokens = 4
        states = self.driver.scheduler.kv_cache_manager.states
        if states is not None:
            states.min_saved_tokens = states.checkpoint_tokens = states.decode_tokens = block_size
        if speculative is not None:
            self.driver.executor.draft = good_and_bad_drafts
            self.driver.executor.model_time_s = 0.01

    @rule(
        prompt=st.lists(PROMPT_IDS, min_size=1, max_size=10),
        shared=st.booleans(),
        max_tokens=st.integers(1, 14),
        priority=st.integers(0, 2),
        n=st.sampled_from([1, 1, 3]),
        logprobs=st.sampled_from([None, None, 1]),
    )
    def add(
        self,
        prompt: list[int],
        shared: bool,
        max_tokens: int,
        priority: int,
        n: int,
        logprobs: int | None,
    ) -> None:
        for _ in range(n):
            request_id = f"r{self.num_added}"
            self.num_added += 1
            ids = SHARED + prompt if shared else prompt
            self.driver.add(
                request_id, ids, max_tokens, priority=priority, logprobs=logprobs, arrival_time=1.0
            )
            self.wanted[request_id] = max_tokens

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.driver.step()

    @precondition(lambda self: self.wanted)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.wanted)))
        if request_id not in self.driver.finish:
            self.aborted.add(request_id)
        self.driver.core.abort_requests([request_id, "unknown"])

    @precondition(lambda self: self.wanted)
    @rule(data=st.data())
    def abort_in_the_middle_of_a_step(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.wanted)))
        executor, core = self.driver.executor, self.driver.core

        def abort(_: object) -> None:
            executor.fail_on_step = None
            if request_id not in self.driver.finish:
                self.aborted.add(request_id)
            core.abort_during_step([request_id])

        executor.fail_on_step = abort
        self.driver.step()
        executor.fail_on_step = None

    @rule(force=st.booleans())
    def reset(self, force: bool) -> None:
        is_free = not self.driver.scheduler.running
        assert self.driver.core.reset_prefix_cache(force) == (force or is_free)

    @rule()
    def preempt_the_last(self) -> None:
        scheduler = self.driver.scheduler
        if scheduler.running:
            victim = scheduler.running[-1]
            scheduler.preempt(victim)
            scheduler.reset_preempted_req_ids.add(victim.request_id)

    @rule(mode=st.sampled_from(["keep", "wait"]))
    def pause(self, mode: str) -> None:
        self.driver.core.pause_scheduler(mode, clear_cache=False)
        for _ in range(3):
            self.driver.step()
        self.driver.core.resume_scheduler()

    @rule(level=st.sampled_from([0, 1]))
    def sleep(self, level: int) -> None:
        core = self.driver.core
        core.sleep(level, "keep")
        assert core.is_sleeping()
        self.driver.step()
        core.wake_up()
        assert not core.is_sleeping()

    @precondition(lambda self: self.driver is not None)
    @rule()
    def fail_a_step(self) -> None:
        """A step that raises ends what was in it, and nothing else (10.1)."""
        failed: list[str] = []

        def fail(step: Any) -> Exception | None:
            if not step.num_scheduled_tokens:
                return None
            failed.extend(step.num_scheduled_tokens)
            return RuntimeError("the model is ill")

        self.driver.executor.fail_on_step = fail
        self.driver.step()
        self.driver.executor.fail_on_step = None
        for request_id in failed:
            assert self.driver.finish[request_id] is FinishReason.ERROR
            del self.wanted[request_id]

    def teardown(self) -> None:
        if self.driver is None:
            return
        driver = self.driver
        driver.core.resume_scheduler()
        driver.run(max_steps=4000)
        driver.check_idle()
        for request_id, max_tokens in self.wanted.items():
            room = MAX_MODEL_LEN - len(driver.prompts[request_id])
            expected = lone_run(driver.prompts[request_id], min(max_tokens, room))
            if request_id in self.aborted:
                got = driver.tokens[request_id]
                assert got == expected[: len(got)]
                assert request_id not in driver.finish
            else:
                assert driver.tokens[request_id] == expected
                assert driver.finish[request_id] is FinishReason.LENGTH
        driver.core.shutdown()


SETTINGS = settings(
    max_examples=100,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
EngineMachine.TestCase.settings = SETTINGS
TestEngine = EngineMachine.TestCase


@pytest.mark.slow
def test_engine_for_long() -> None:
    """The same machine, 1,000 runs of up to 60 steps."""
    run_state_machine_as_test(
        EngineMachine, settings=settings(SETTINGS, max_examples=1000, stateful_step_count=60)
    )
