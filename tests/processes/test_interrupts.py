"""Ctrl-C at any moment, and going on afterwards, as in a notebook: nothing is lost, stuck or wrong.

The interrupts are an alarm's, at random moments, hundreds of them; each raises `KeyboardInterrupt`
in the main thread, as Ctrl-C does. What follows must be as if nothing had happened.
"""

from __future__ import annotations

import itertools
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import pytest

from tellin.engine.llm_engine import LLMEngine
from tellin.entrypoints.llm import LLM
from tellin.sampling_params import SamplingParams
from tests.processes.conftest import MakeArgs

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


class Interrupter:
    """Raises `KeyboardInterrupt` after a random time, and knows how often it did."""

    def __init__(self, longest_s: float) -> None:
        self.num_fired = 0
        self._random = random.Random(7)
        self._longest_s = longest_s

    def run(self, function: Callable[[], object]) -> bool:
        """Call ``function``; whether it was interrupted."""
        delay = self._random.random() * self._longest_s
        try:
            try:
                signal.setitimer(signal.ITIMER_REAL, max(delay, 1e-5))
                function()
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            return True
        return False

    def fire(self, number: int, frame: object) -> None:
        self.num_fired += 1
        raise KeyboardInterrupt


@contextmanager
def interrupter(longest_s: float, monkeypatch: pytest.MonkeyPatch) -> Iterator[Interrupter]:
    """An alarm that is also counted where Python would swallow it."""
    result = Interrupter(longest_s)
    swallowed: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", swallowed.append)
    previous = signal.signal(signal.SIGALRM, result.fire)
    try:
        yield result
    finally:
        signal.signal(signal.SIGALRM, previous)
    # in a destructor nobody can raise; it happens to users as well, but must be rare
    assert len(swallowed) <= 1 + result.num_fired // 100, swallowed


def duration(function: Callable[[], object]) -> float:
    """Seconds that a call takes, if nothing disturbs it."""
    results = []
    for _ in range(5):
        started = time.perf_counter()
        function()
        results.append(time.perf_counter() - started)
    return min(results)


@pytest.mark.parametrize("multiprocess", [False, True], ids=["in process", "multi-process"])
def test_p32_generate_works_after_any_interrupt(
    multiprocess: bool, make_args: MakeArgs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal outputs, no request and no KV block left behind, with and without cached prefixes."""
    rng = random.Random(3)
    prefix = [rng.randrange(3, 400) for _ in range(100)]
    prompts = [
        {"prompt_token_ids": prefix[: 9 * i + 20] + [rng.randrange(3, 400) for _ in range(9)]}
        for i in range(6)
    ]
    args = make_args(max_model_len=512, num_kv_blocks=64, max_num_batched_tokens=64, max_num_seqs=4)
    engine = LLMEngine.from_engine_args(args, enable_multiprocessing=multiprocess)
    with LLM.from_engine(engine) as llm:
        expected = [o.outputs[0].token_ids for o in llm.generate(prompts, GREEDY)]
        longest_s = 1.3 * duration(lambda: llm.generate(prompts, GREEDY))
        with interrupter(longest_s, monkeypatch) as alarm:
            for number in range(150):
                if number % 2:
                    assert llm.reset_prefix_cache(), "no block is in use"
                alarm.run(lambda: llm.generate(prompts, GREEDY))
                outputs = llm.generate(prompts, GREEDY)
                assert [o.outputs[0].token_ids for o in outputs] == expected
                assert engine.get_num_unfinished_requests() == 0
                assert engine.output_processor.external_req_ids == {}
            assert alarm.num_fired > 30
        assert llm.reset_prefix_cache(), "no block is in use"


def test_p32_an_interrupted_add_leaves_nothing(
    make_args: MakeArgs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The window of adding alone: parents with children, half-sent messages, utility calls."""
    with LLMEngine.from_engine_args(make_args(), enable_multiprocessing=True) as engine:
        params = SamplingParams(max_tokens=2, ignore_eos=True, n=3, seed=1)
        numbers = itertools.count()

        def add_and_ask() -> None:
            engine.add_request(f"a{next(numbers)}", "hello", params)
            engine.is_sleeping()

        with interrupter(1.3 * duration(add_and_ask), monkeypatch) as alarm:
            for _ in range(300):
                if alarm.run(add_and_ask):
                    engine.abort_request(list(engine.output_processor.external_req_ids))
                while engine.has_unfinished_requests():
                    engine.step(timeout=60)
                assert engine.output_processor.parent_requests == {}
                assert engine.output_processor.external_req_ids == {}
            assert alarm.num_fired > 30
        assert engine.reset_prefix_cache(), "no block is in use"


def test_p32_generate_interrupted_at_any_call(make_args: MakeArgs) -> None:
    """Where Python looks for Ctrl-C: at the beginning of each function of the package, in turn."""
    prompts = [{"prompt_token_ids": [5, 6, 7]}, {"prompt_token_ids": [8, 9]}]
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    engine = LLMEngine.from_engine_args(make_args(), enable_multiprocessing=False)
    with LLM.from_engine(engine) as llm:
        expected = [o.outputs[0].token_ids for o in llm.generate(prompts, params)]
        is_interrupted, position = True, 0
        while is_interrupted:
            position += 1
            is_interrupted = interrupted_at_call(position, lambda: llm.generate(prompts, params))
            assert engine.get_num_unfinished_requests() == 0, f"call {position}"
            outputs = llm.generate(prompts, params)
            assert [o.outputs[0].token_ids for o in outputs] == expected, f"call {position}"
        assert position > 50
        assert llm.reset_prefix_cache(), "no block is in use"


def interrupted_at_call(position: int, function: Callable[[], object]) -> bool:
    """Run ``function`` with an interrupt at the beginning of a call; False if there are fewer."""
    calls = itertools.count(1)

    def trace(frame: FrameType, event: str, argument: object) -> None:
        name = frame.f_code.co_filename
        is_shell = "/tellin/entrypoints/" in name or "/tellin/engine/" in name
        if is_shell and next(calls) == position:
            raise KeyboardInterrupt

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(previous)
    return False
