"""Grammars of constrained requests: compiled off the step's path, masked and advanced within it.

`StructuredOutputManager` compiles in a few threads, with a cache and a time limit; each request
gets a matcher of its own. It never fails open: what does not compile ends its request with ERROR.
The backend behind it (see `structured_output_guidance`) is loaded with the first such request.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tellin.config import EngineConfig
from tellin.core.reasoning import ReasoningGate
from tellin.core.request import Request
from tellin.exceptions import RequestError, UnsupportedFeatureError
from tellin.grammar_validation import grammar_key
from tellin.sampling_params import StructuredOutputsParams
from tellin.step_protocol import GrammarOutput, SchedulerOutput

logger = logging.getLogger("tellin.core")

MAX_CACHED_GRAMMARS = 256


class Grammar(Protocol):
    """State of one request in its grammar. After a refusal the state is undefined."""

    def accept_tokens(self, token_ids: Sequence[int]) -> bool:
        """Advance; False when an id is refused."""

    def validate_tokens(self, token_ids: Sequence[int]) -> list[int]:
        """Longest acceptable prefix; does not advance."""

    def rollback(self, num_tokens: int) -> None:
        """Undo the last ``num_tokens`` accepted ids."""

    def fill_bitmask(self, bitmask: Any, row: int) -> None:
        """Write the mask of the next id into ``bitmask[row]``."""

    def is_terminated(self) -> bool:
        """Whether nothing but the end of the sequence may follow."""

    def error(self) -> str:
        """Why an id was refused, or empty."""

    def is_beyond_limits(self) -> bool:
        """Whether it took more time or memory than a constraint may: the client's fault."""


class StructuredOutputBackend(Protocol):
    """Compiles grammars for one vocabulary."""

    def compile(self, params: StructuredOutputsParams) -> Callable[[], Grammar]:
        """A factory of matchers. Raises RequestError for what it cannot compile."""

    def allocate_bitmask(self, num_rows: int) -> Any:
        """int32 ``[num_rows, ceil(vocab_size / 32)]``, allowing nothing."""

    def fill_bitmasks(self, grammars: Sequence[tuple[Grammar, int]], bitmask: Any) -> None:
        """Fill a row for each of several grammars."""

    def fill_thoughts(self, bitmask: Any, row: int) -> None:
        """Write a row that allows everything but the end of the text."""


BackendFactory = Callable[[EngineConfig, Any], StructuredOutputBackend]


class StructuredOutputRequest:
    """A request's grammar: pending, then compiled or failed; thereafter its matcher."""

    def __init__(
        self, params: StructuredOutputsParams, reasoning: ReasoningGate | None = None
    ) -> None:
        self.params = params
        self.grammar: Grammar | None = None
        self.reasoning = reasoning
        self.error: str | None = None
        self.error_is_client_fault = False
        self._lock = threading.Lock()
        self._done = False
        self._callback: Callable[[], None] | None = None

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call once compilation has ended, well or badly; at once if it has."""
        with self._lock:
            if not self._done:
                self._callback = callback
                return
        callback()

    def cancel(self) -> None:
        """The request is gone; a result that still comes is dropped."""
        with self._lock:
            self._done = True
            self._callback = None
        self.grammar = None

    def resolve(self, grammar: Grammar | None, error: str | None, client_fault: bool) -> None:
        """Set the outcome. The first call counts, later ones are ignored."""
        with self._lock:
            if self._done:
                return
            self._done = True
            self.grammar, self.error, self.error_is_client_fault = grammar, error, client_fault
            callback, self._callback = self._callback, None
        if callback is not None:
            callback()

    @property
    def is_done(self) -> bool:
        return self._done

    # ------------------------------------------------------------------ once compiled

    def accept_tokens(self, token_ids: Sequence[int]) -> bool:
        """Advance by ids that were delivered, thoughts left out; False ends the request."""
        assert self.grammar is not None
        if self.is_thinking:
            assert self.reasoning is not None
            token_ids = token_ids[self.reasoning.advance(token_ids) :]
        if not token_ids or self.grammar.accept_tokens(token_ids):
            return True
        self.error = self.grammar.error() or f"one of the ids {list(token_ids)} is not allowed"
        self.error_is_client_fault = self.grammar.is_beyond_limits()
        return False

    def accept_until_complete(self, token_ids: list[int]) -> tuple[list[int], bool]:
        """Advance up to where nothing may follow; returns what was accepted, and if that is it."""
        for count, token_id in enumerate(token_ids):
            if not self.accept_tokens([token_id]):
                return token_ids[:count], False
            if self.is_complete:
                return token_ids[: count + 1], True
        return token_ids, False

    def validate_tokens(self, token_ids: Sequence[int]) -> list[int]:
        """Longest acceptable prefix; does not advance."""
        assert self.grammar is not None
        if not self.is_thinking:
            return self.grammar.validate_tokens(token_ids)
        count = self.num_thoughts(token_ids)
        return [*token_ids[:count], *self.grammar.validate_tokens(token_ids[count:])]

    def num_thoughts(self, token_ids: Sequence[int]) -> int:
        """How many of the ids that come next are thoughts, which no grammar constrains."""
        return self.reasoning.num_thoughts(token_ids) if self.reasoning is not None else 0

    @property
    def is_thinking(self) -> bool:
        """Whether the grammar does not apply yet."""
        return self.reasoning is not None and not self.reasoning.ended

    @property
    def is_complete(self) -> bool:
        """Whether nothing but the end of the sequence may follow."""
        return self.grammar is not None and not self.is_thinking and self.grammar.is_terminated()

    def failure(self) -> str:
        """Why the grammar broke down while its mask was computed; empty while all is well."""
        return self.grammar.error() if self.grammar is not None else ""


class _Job:
    """A compilation and the requests that wait for it."""

    def __init__(self, params: StructuredOutputsParams) -> None:
        self.params = params
        self.requests: list[StructuredOutputRequest] = []
        self.started_at: float | None = None


class StructuredOutputManager:
    """Compiles, caches and applies grammars for one engine."""

    def __init__(
        self,
        config: EngineConfig,
        tokenizer_info_factory: Callable[[], Any] | None,
        backend_factory: BackendFactory | None = None,
    ) -> None:
        self._config = config
        self._timeout_s = config.structured_outputs_config.compile_timeout_s
        self._tokenizer_info_factory = tokenizer_info_factory
        self._backend_factory = backend_factory or _guidance_backend
        self._backend: StructuredOutputBackend | None = None
        self._backend_lock = threading.Lock()
        self._cache: OrderedDict[str, Callable[[], Grammar]] = OrderedDict()
        self._jobs: dict[str, _Job] = {}
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[tuple[str, _Job] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._max_threads = max(1, ((os.cpu_count() or 1) + 1) // 2)
        self._num_idle = 0
        self._closed = False

    # ------------------------------------------------------------------ compilation

    def start(
        self,
        request: Request,
        params: StructuredOutputsParams,
        reasoning_ended: bool | None = None,
    ) -> None:
        """Begin to compile a request's grammar; safe on any thread.

        Args:
            request: gets its ``structured_output_request``.
            params: the constraint.
            reasoning_ended: whether the model's thoughts are over; None = see the prompt.

        Raises:
            UnsupportedFeatureError: this engine has no tokenizer.
        """
        if self._tokenizer_info_factory is None:
            raise UnsupportedFeatureError(
                "structured outputs need a tokenizer, but this engine was built without one"
            )
        reasoning = None
        config = self._config.reasoning_config
        if config is not None and not self._config.structured_outputs_config.enable_in_reasoning:
            reasoning = ReasoningGate.from_prompt(config, request.all_token_ids, reasoning_ended)
        structured = StructuredOutputRequest(params, reasoning)
        request.structured_output_request = structured
        key = grammar_key(params)
        with self._lock:
            make_grammar = self._cache.get(key)
            if make_grammar is not None:
                self._cache.move_to_end(key)
            else:
                job = self._jobs.get(key)
                if job is None:
                    job = self._jobs[key] = _Job(params)
                    self._queue.put((key, job))
                    self._start_thread()
                job.requests.append(structured)
        if make_grammar is not None:
            _resolve(structured, make_grammar)

    def _start_thread(self) -> None:
        """Another thread, if there is more work than idle threads. The lock is held."""
        if self._num_idle > self._queue.qsize() - 1 or len(self._threads) >= self._max_threads:
            return
        thread = threading.Thread(target=self._work, name="tellin-grammar", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _work(self) -> None:
        while True:
            with self._lock:
                self._num_idle += 1
            item = self._queue.get()
            with self._lock:
                self._num_idle -= 1
            if item is None:
                return
            key, job = item
            try:
                backend = self._get_backend()
                job.started_at = time.monotonic()
                make_grammar = backend.compile(job.params)
                make_grammar()  # a grammar that cannot start is an error now, not in a step
            except RequestError as error:
                self._finish(key, job, None, str(error), client_fault=True)
            except Exception as error:
                logger.exception("compiling a grammar failed")
                self._finish(key, job, None, f"compiling the grammar failed: {error}")
            else:
                self._finish(key, job, make_grammar, None)

    def _get_backend(self) -> StructuredOutputBackend:
        with self._backend_lock:
            if self._backend is None:
                assert self._tokenizer_info_factory is not None
                self._backend = self._backend_factory(self._config, self._tokenizer_info_factory())
            return self._backend

    def _finish(
        self,
        key: str,
        job: _Job,
        make_grammar: Callable[[], Grammar] | None,
        error: str | None,
        client_fault: bool = False,
    ) -> None:
        with self._lock:
            if self._jobs.get(key) is job:
                del self._jobs[key]
            requests, job.requests = job.requests, []
            if make_grammar is not None:
                self._cache[key] = make_grammar
                while len(self._cache) > MAX_CACHED_GRAMMARS:
                    self._cache.popitem(last=False)
        for structured in requests:
            if make_grammar is not None:
                _resolve(structured, make_grammar)
            else:
                structured.resolve(None, error, client_fault)

    def expire(self) -> None:
        """Give up compilations that have run longer than the time limit.

        The thread cannot be stopped and is left to end by itself; another takes its place.
        """
        if self._timeout_s <= 0 or not self._jobs:
            return
        now = time.monotonic()
        with self._lock:
            late = [
                (key, job)
                for key, job in self._jobs.items()
                if job.started_at is not None and now - job.started_at > self._timeout_s
            ]
            self._max_threads += len(late)
            if late:
                self._start_thread()  # for what has queued behind them
        for key, job in late:
            message = (
                f"the grammar was not compiled within compile_timeout_s={self._timeout_s:g} "
                "seconds; simplify it or raise the limit"
            )
            self._finish(key, job, None, message, client_fault=True)

    # ------------------------------------------------------------------ within a step

    def grammar_output(
        self, scheduler_output: SchedulerOutput, requests: dict[str, Request]
    ) -> GrammarOutput | None:
        """Masks for the constrained requests of a step; None when there are none.

        A request with d drafts gets 1 + d rows: row i holds what may follow its first i drafts.
        Rows within thoughts allow all but the end of the text.
        """
        request_ids = scheduler_output.structured_output_req_ids
        if not request_ids:
            return None
        backend = self._get_backend()
        drafts_of = scheduler_output.scheduled_spec_decode_tokens
        num_rows = [1 + len(drafts_of.get(request_id, ())) for request_id in request_ids]
        bitmask = backend.allocate_bitmask(sum(num_rows))
        # Of each grammar that applies: its first row, the drafts from there on, its last row.
        active: list[tuple[Grammar, int, Sequence[int], int]] = []
        row = 0
        for request_id, count in zip(request_ids, num_rows, strict=True):
            structured = requests[request_id].structured_output_request
            assert structured is not None
            assert structured.grammar is not None
            drafts = drafts_of.get(request_id, [])
            num_thoughts = 0
            if structured.is_thinking:
                assert structured.reasoning is not None
                num_thoughts = structured.num_thoughts(drafts)
                if not structured.reasoning.closes_within(drafts):
                    num_thoughts += 1  # what follows the last draft is a thought as well
                for thought in range(row, row + num_thoughts):
                    backend.fill_thoughts(bitmask, thought)
            if num_thoughts < count:
                first = row + num_thoughts
                active.append((structured.grammar, first, drafts[num_thoughts:], row + count))
            row += count
        backend.fill_bitmasks([(grammar, first) for grammar, first, _, _ in active], bitmask)
        for grammar, first, constrained, end in active:
            if constrained:
                _fill_draft_rows(grammar, bitmask, first + 1, constrained)
            if grammar.error():
                bitmask[first:end] = -1  # the id is going to be dropped
        return GrammarOutput(list(request_ids), num_rows, bitmask)

    def shutdown(self) -> None:
        """End the idle threads; idempotent. Running compilations end by themselves."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            num_threads = len(self._threads)
            self._cache.clear()
        for _ in range(num_threads):
            self._queue.put(None)
        self._backend = None


def _fill_draft_rows(grammar: Grammar, bitmask: Any, row: int, drafts: Sequence[int]) -> None:
    """Masks of what follows each draft, from ``row`` on. Leaves the state as it was."""
    num_accepted = 0
    for draft in drafts:
        if not grammar.accept_tokens([draft]):
            raise RuntimeError(f"draft {draft} was scheduled although its grammar refuses it")
        num_accepted += 1
        grammar.fill_bitmask(bitmask, row)
        row += 1
    grammar.rollback(num_accepted)


def _resolve(structured: StructuredOutputRequest, make_grammar: Callable[[], Grammar]) -> None:
    try:
        structured.resolve(make_grammar(), None, False)
    except RequestError as error:
        structured.resolve(None, str(error), True)


def _guidance_backend(config: EngineConfig, tokenizer_info: Any) -> StructuredOutputBackend:
    from tellin.core.structured_output_guidance import GuidanceBackend

    return GuidanceBackend(config, tokenizer_info)
