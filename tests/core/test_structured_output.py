"""6.4-6.5, P36-P39: the compile flow and the masks of a step, through `EngineCore`."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from tellin.config import SpeculativeConfig, StructuredOutputsConfig
from tellin.core.structured_output import StructuredOutputManager, StructuredOutputRequest
from tellin.core.structured_output_guidance import GuidanceBackend
from tellin.exceptions import InvalidParameterError
from tellin.protocol import FinishReason
from tellin.sampling_params import StructuredOutputsParams
from tests.core.driver import Driver
from tests.core.fakes import next_id
from tests.core.test_scheduler import unlike
from tests.core.vocabulary import EOS_ID, SIZE, ByteTokenizer


class CountingGrammar:
    """Allows the ids ``10, 11, 12, ...`` in this order, then only ``end``."""

    def __init__(self, length: int) -> None:
        self.length, self.position, self.reason = length, 0, ""

    def accept_tokens(self, token_ids: Sequence[int]) -> bool:
        for token_id in token_ids:
            if token_id != self._next():
                return False
            self.position += 1
        return True

    def _next(self) -> int:
        return 10 + self.position if self.position < self.length else EOS_ID

    def validate_tokens(self, token_ids: Sequence[int]) -> list[int]:
        kept: list[int] = []
        for token_id in token_ids:
            if self.position + len(kept) >= self.length or token_id != self._next() + len(kept):
                break
            kept.append(token_id)
        return kept

    def rollback(self, num_tokens: int) -> None:
        self.position -= num_tokens

    def fill_bitmask(self, bitmask: Any, row: int) -> None:
        token_id = self._next()
        bitmask[row, token_id // 32] = np.uint32(1 << token_id % 32).astype(np.int32)

    def is_terminated(self) -> bool:
        return self.position >= self.length

    def error(self) -> str:
        return self.reason

    def is_beyond_limits(self) -> bool:
        return "limit" in self.reason


class FakeBackend:
    """Compiles ``regex="<length>"``; waits for ``gate`` first."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.stuck = threading.Event()
        self.num_compiled = 0
        self.grammars: list[CountingGrammar] = []

    def compile(self, params: StructuredOutputsParams) -> Callable[[], CountingGrammar]:
        assert self.gate.wait(120)
        if params.regex == "stuck":
            self.stuck.wait(120)
        self.num_compiled += 1
        if params.regex == "bad":
            raise InvalidParameterError("unclosed group")
        if params.regex == "bug":
            raise ZeroDivisionError("oops")
        length = int(params.regex or 0)

        def make() -> CountingGrammar:
            self.grammars.append(CountingGrammar(length))
            return self.grammars[-1]

        return make

    def allocate_bitmask(self, num_rows: int) -> Any:
        return np.zeros((num_rows, 32), np.int32)

    def fill_bitmasks(self, grammars: Any, bitmask: Any) -> None:
        for grammar, row in grammars:
            grammar.fill_bitmask(bitmask, row)

    def fill_thoughts(self, bitmask: Any, row: int) -> None:
        bitmask[row] = -1
        bitmask[row, EOS_ID // 32] &= ~(1 << EOS_ID % 32)


def obedient(driver: Driver) -> Callable[[str, list[int]], int]:
    """A model that samples the lowest id its mask allows; free requests get `next_id`."""

    def choose(request_id: str, ids: list[int]) -> int:
        grammar = driver.executor.grammar_output
        if grammar is None or request_id not in grammar.req_ids:
            return next_id(ids)
        index = grammar.req_ids.index(request_id)
        row = sum(grammar.num_rows[:index]) + driver.executor.row_in_request
        words = np.asarray(grammar.bitmask)[row].view(np.uint32)
        return next(32 * i + j for i, w in enumerate(words) for j in range(32) if w >> j & 1)

    return choose


def make_driver(timeout_s: float = 5.0, **config: Any) -> tuple[Driver, FakeBackend]:
    structured = StructuredOutputsConfig(compile_timeout_s=timeout_s)
    driver = Driver(structured_outputs_config=structured, **config)
    backend = FakeBackend()
    manager = StructuredOutputManager(driver.config, lambda: None, lambda *_: backend)
    driver.core.structured_output_manager = manager
    driver.scheduler.structured_output_manager = manager
    driver.executor.sampled = obedient(driver)
    return driver, backend


def constrain(driver: Driver, request_id: str, regex: str, max_tokens: int = 30, **kw: Any) -> None:
    params = StructuredOutputsParams(regex=regex)
    driver.add(
        request_id, unlike(len(driver.tokens), 5), max_tokens, structured_outputs=params, **kw
    )


def run(driver: Driver) -> None:
    driver.run(max_steps=3000)
    driver.check_idle()


def stop_at_eos(driver: Driver, *request_ids: str) -> None:
    """What the input processor does for the model's end-of-sequence id."""
    for request_id in request_ids:
        request = driver.scheduler.requests[request_id]
        assert request.sampling_params is not None
        request.sampling_params.eos_token_id = EOS_ID
        request.stop_ids = frozenset({EOS_ID})


def test_free_and_constrained_requests_do_not_meet() -> None:
    """P39: masks follow the request, not the row; each equals its lone run."""
    driver, _ = make_driver(num_kv_blocks=18, max_num_batched_tokens=16)
    for i, length in enumerate([3, 0, 7, 0, 12]):
        if length:
            constrain(driver, f"r{i}", str(length))
            stop_at_eos(driver, f"r{i}")
        else:
            driver.add(f"r{i}", unlike(i + 50, 6), 10)
    run(driver)
    for i, length in enumerate([3, 0, 7, 0, 12]):
        if length:
            assert driver.tokens[f"r{i}"] == [*range(10, 10 + length), EOS_ID]
            assert driver.finish[f"r{i}"] is FinishReason.STOP
        else:
            driver.check_lone(f"r{i}", 10)


def test_preempted_requests_keep_their_grammar() -> None:
    """6.5.7, P39."""
    driver, _ = make_driver(num_kv_blocks=9, max_model_len=32, enable_prefix_caching=False)
    for i in range(3):
        constrain(driver, f"r{i}", "14")
        stop_at_eos(driver, f"r{i}")
    run(driver)
    assert driver.scheduler.num_preemptions > 0
    for i in range(3):
        assert driver.tokens[f"r{i}"] == [*range(10, 24), EOS_ID]


def test_rows_of_a_step() -> None:
    """COR-63, 6.5.2: in scheduling order, none of requests in their prompt; 1 + drafts each."""
    config = SpeculativeConfig("ngram", 2, adaptive=False)
    driver, _ = make_driver(speculative_config=config, max_num_batched_tokens=64)
    driver.executor.draft = lambda r, ids, k: [ids[-1] + 1, ids[-1] + 2] if r == "a" else []
    constrain(driver, "a", "9")
    driver.add("free", unlike(90, 4), 20)
    constrain(driver, "b", "9")
    driver.step()
    while len(driver.tokens["b"]) < 2:
        driver.step()
    output = driver.executor.grammar_output
    assert output is not None
    assert output.req_ids == ["a", "b"]
    assert output.num_rows == [3, 1]
    assert output.bitmask.shape[0] == 4
    driver.step()
    driver.add("long", unlike(91, 60), 1)
    run(driver)
    assert driver.tokens["a"] == list(range(10, 19))


def test_drafts_are_trimmed_to_the_grammar_and_verified() -> None:
    """6.5.3, 6.5.6: wrong drafts never reach the model; the state is as without drafts."""
    config = SpeculativeConfig("ngram", 3, adaptive=False)
    for drafts in ([1, 1, 1], None):
        driver, _ = make_driver(speculative_config=config)
        driver.executor.draft = lambda r, ids, k, d=drafts: d or [ids[-1] + i + 1 for i in range(k)]
        constrain(driver, "r", "20")
        steps = len(driver.run())
        assert driver.tokens["r"] == list(range(10, 30))
        assert driver.finish["r"] is FinishReason.STOP
        assert (steps < 10) == (drafts is None)
        driver.check_idle()


def test_ignore_eos_finishes_when_the_grammar_does() -> None:
    """6.5.8 Wart: stop, not error."""
    driver, _ = make_driver()
    constrain(driver, "r", "4", ignore_eos=True)
    run(driver)
    assert driver.tokens["r"] == [10, 11, 12, 13]
    assert driver.finish["r"] is FinishReason.STOP


def test_an_id_that_is_not_allowed_ends_its_request() -> None:
    """COR-65."""
    driver, _ = make_driver()
    constrain(driver, "r", "9")
    driver.add("free", unlike(90, 5), 6)
    driver.step()
    while not driver.tokens["r"]:
        driver.step()
    driver.executor.sampled = lambda request_id, ids: 3 if request_id == "r" else next_id(ids)
    run(driver)
    assert driver.finish["r"] is FinishReason.ERROR
    assert "not match its grammar" in str(driver.last["r"].error)
    driver.check_lone("free", 6)


def test_a_grammar_that_breaks_down_ends_its_request() -> None:
    """Never fails open: an error inside the matcher is not an unconstrained row."""
    driver, backend = make_driver()
    constrain(driver, "r", "9")
    driver.add("free", unlike(90, 5), 6)
    while not driver.tokens["r"]:
        driver.step()
    kept = list(driver.tokens["r"])
    backend.grammars[-1].reason = "too complex"
    driver.step()
    output = driver.executor.grammar_output
    assert output is not None
    assert (output.bitmask == -1).all()  # the worker finds an id; it is dropped
    run(driver)
    assert driver.finish["r"] is FinishReason.ERROR
    assert "too complex" in str(driver.last["r"].error)
    assert driver.tokens["r"] == kept
    driver.check_lone("free", 6)


# ---------------------------------------------------------------------- compilation


def test_compilation_is_off_the_path() -> None:
    """COR-61, 6.4.1: the others run meanwhile; it joins when it is done, at its old place."""
    driver, backend = make_driver(max_num_seqs=2)
    backend.gate.clear()
    constrain(driver, "slow", "3")
    driver.add("a", unlike(90, 4), 3)
    driver.add("b", unlike(91, 4), 3)
    driver.add("c", unlike(92, 4), 3)
    assert list(driver.step()) == ["a", "b"]
    assert driver.scheduler.room.blocked.keys() == {"slow"}
    backend.gate.set()
    wait_until(lambda: backend.num_compiled == 1)
    time.sleep(0.02)
    driver.step()
    driver.step()
    assert list(driver.step()) == ["slow", "c"]
    run(driver)


def wait_until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.mark.parametrize(
    ("regex", "client_fault", "reason"), [("bad", True, "unclosed"), ("bug", False, "oops")]
)
def test_a_grammar_that_does_not_compile_ends_its_request(
    regex: str, client_fault: bool, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """6.4 Wart, P36, COR-62: that request, flagged; others unaffected."""
    driver, _ = make_driver()
    constrain(driver, "r", regex)
    driver.add("good", unlike(90, 4), 3)
    run(driver)
    assert driver.finish["r"] is FinishReason.ERROR
    assert reason in str(driver.last["r"].error)
    assert driver.last["r"].error_is_client_fault == client_fault
    driver.check_lone("good", 3)


def test_compilation_has_a_time_limit() -> None:
    """And the threads that hang do not block the next grammar."""
    driver, backend = make_driver(timeout_s=0.05)
    manager = driver.core.structured_output_manager
    assert manager is not None
    manager._max_threads = 1
    constrain(driver, "r", "stuck")
    constrain(driver, "queued", "3", ignore_eos=True)
    run(driver)
    assert driver.finish["r"] is FinishReason.ERROR
    assert "compile_timeout_s=0.05" in str(driver.last["r"].error)
    assert driver.last["r"].error_is_client_fault
    assert driver.tokens["queued"] == [10, 11, 12]
    constrain(driver, "next", "2", ignore_eos=True)
    run(driver)
    assert driver.tokens["next"] == [10, 11]
    backend.stuck.set()
    wait_until(lambda: backend.num_compiled == 3)


def test_equal_constraints_compile_once() -> None:
    """6.4.4: at the same time and later."""
    driver, backend = make_driver()
    for i in range(5):
        constrain(driver, f"r{i}", "3", ignore_eos=True)
    run(driver)
    constrain(driver, "later", "3", ignore_eos=True)
    assert driver.scheduler.requests["later"].structured_output_request is not None
    run(driver)
    assert backend.num_compiled == 1
    assert all(tokens == [10, 11, 12] for tokens in driver.tokens.values())


def test_the_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """P35."""
    monkeypatch.setattr("tellin.core.structured_output.MAX_CACHED_GRAMMARS", 3)
    driver, _ = make_driver()
    for i in range(8):
        constrain(driver, f"r{i}", str(i + 1), ignore_eos=True)
        run(driver)
    manager = driver.core.structured_output_manager
    assert manager is not None
    assert len(manager._cache) == 3
    assert not manager._jobs


def test_abort_while_compiling() -> None:
    """6.4.3."""
    driver, backend = make_driver()
    backend.gate.clear()
    constrain(driver, "r", "3")
    driver.step()
    driver.core.abort_requests(["r"])
    driver.run()
    driver.check_idle()
    backend.gate.set()
    wait_until(lambda: backend.num_compiled == 1)
    driver.run()
    assert driver.finish == {}


def test_waiting_for_a_grammar_does_not_spin() -> None:
    """1.18.2: a step with nothing to do waits a moment."""
    driver, backend = make_driver()
    backend.gate.clear()
    constrain(driver, "r", "3")
    start, cpu = time.monotonic(), time.process_time()
    steps = 0
    while time.monotonic() - start < 0.2:
        driver.step()
        steps += 1
    assert steps < 250
    assert time.process_time() - cpu < 0.15
    backend.gate.set()
    driver.core.abort_requests(["r"])


def test_shutdown_ends_the_threads() -> None:
    """P31."""
    before = threading.active_count()
    driver, _ = make_driver()
    constrain(driver, "r", "3", ignore_eos=True)
    run(driver)
    driver.core.shutdown()
    wait_until(lambda: threading.active_count() == before)


def test_when_done_calls_exactly_once() -> None:
    for resolve_first in (True, False):
        calls: list[int] = []
        request = StructuredOutputRequest(StructuredOutputsParams(regex="a"))
        if resolve_first:
            request.resolve(None, "no", False)
        request.when_done(lambda c=calls: c.append(1))
        if not resolve_first:
            request.resolve(None, "no", False)
        request.resolve(None, "again", False)
        assert calls == [1]
        assert request.error == "no"


# ---------------------------------------------------------------------- with the real backend


class Engine:
    """A driver with `GuidanceBackend` on the byte vocabulary and an obedient model."""

    def __init__(self, **config: Any) -> None:
        self.driver = driver = Driver(max_model_len=256, num_kv_blocks=400, **config)
        model = dataclasses.replace(
            driver.config.model_config, vocab_size=SIZE, eos_token_ids=(EOS_ID,)
        )
        real = dataclasses.replace(driver.config, model_config=model)
        manager = StructuredOutputManager(real, ByteTokenizer)
        driver.core.structured_output_manager = manager
        driver.scheduler.structured_output_manager = manager
        driver.executor.sampled = obedient(driver)

    def add(self, request_id: str, **structured: Any) -> None:
        params = StructuredOutputsParams(**structured)
        prompt = unlike(len(self.driver.tokens), 5)
        self.driver.add(request_id, prompt, 200, structured_outputs=params)
        if request_id in self.driver.scheduler.requests:
            stop_at_eos(self.driver, request_id)

    def text(self, request_id: str) -> str:
        ids = self.driver.tokens[request_id]
        assert ids[-1] == EOS_ID
        return ByteTokenizer().decode(ids[:-1])


def test_outputs_that_end_by_stop_validate() -> None:
    """E7, P38: several constraints and free requests in one batch."""
    engine = Engine()
    engine.add("json", json={"type": "object", "properties": {"n": {"type": "integer"}},
                             "required": ["n"], "additionalProperties": False})  # fmt: skip
    engine.add("choice", choice=["yes", "no"])
    engine.add("regex", regex=r"[0-9]{3}-x")
    engine.add("grammar", grammar='root ::= "a" "b" "c"')
    engine.driver.add("free", unlike(99, 5), 9)
    run(engine.driver)
    assert json.loads(engine.text("json")).keys() == {"n"}
    assert engine.text("choice") in ("yes", "no")
    assert engine.text("regex") == "000-x"
    assert engine.text("grammar") == "abc"
    engine.driver.check_lone("free", 9)


def test_real_errors_reach_their_request() -> None:
    engine = Engine()
    engine.add("bad", regex="(")
    engine.add("endless", json={"$ref": "#"})
    engine.add("huge", regex="(a|aa|aaa){3000}")
    engine.add("good", choice=["ab"])
    run(engine.driver)
    reasons = {
        "bad": "unclosed group",
        "endless": "refers to itself",
        "huge": "the grammar could not be followed: lexer error: too many expressions",
    }
    for request_id, reason in reasons.items():
        assert reason in str(engine.driver.last[request_id].error)
        assert engine.driver.last[request_id].error_is_client_fault
    assert engine.text("good") == "ab"


def test_ignore_eos_with_a_grammar_that_may_end_early() -> None:
    """6.5.8: an end of sequence that the grammar allows completes the output, drafts or not."""
    for config in (None, SpeculativeConfig("ngram", 4, adaptive=False)):
        engine = Engine(speculative_config=config)
        driver = engine.driver
        if config is not None:
            driver.executor.draft = lambda r, ids, k: [ord("a")] * k
        driver.executor.sampled = lambda _, ids: ord("a") if len(ids) < 9 else EOS_ID
        params = StructuredOutputsParams(regex="a*")
        driver.add("r", unlike(1, 5), 50, structured_outputs=params, ignore_eos=True)
        run(driver)
        assert driver.tokens["r"] == [ord("a")] * 4 + [EOS_ID]
        assert driver.finish["r"] is FinishReason.STOP


def test_speculation_with_real_masks() -> None:
    """E2 with a grammar: good, bad and mixed drafts, the same text."""
    texts = set()
    schema = {"type": "array", "items": {"enum": ["abc", 12]}, "minItems": 4, "maxItems": 6}
    for seed in range(4):
        config = SpeculativeConfig("ngram", 4, adaptive=False) if seed else None
        engine = Engine(speculative_config=config)
        if config is not None:
            engine.driver.executor.draft = lambda r, ids, k, s=seed: [
                ord('["a,1'[(len(ids) + i * s) % 5]) for i in range(k)
            ]
        engine.add("r", json=schema, disable_any_whitespace=True)
        run(engine.driver)
        texts.add(engine.text("r"))
    assert len(texts) == 1
    assert len(json.loads(texts.pop())) >= 4


def test_backend_is_built_once_and_late() -> None:
    """COR-60, 6.4.2: with the first constrained request, not before."""
    calls: list[int] = []
    driver = Driver()

    def tokenizer() -> ByteTokenizer:
        calls.append(1)
        return ByteTokenizer()

    config = dataclasses.replace(
        driver.config,
        model_config=dataclasses.replace(
            driver.config.model_config, vocab_size=SIZE, eos_token_ids=(EOS_ID,)
        ),
    )
    manager = StructuredOutputManager(config, tokenizer)
    assert calls == []
    assert isinstance(manager._get_backend(), GuidanceBackend)
    assert manager._get_backend() is manager._get_backend()
    assert calls == [1]
