"""What somebody who watches the engine is told: a snapshot of the core, and the steps since.

A step is noted only while somebody watches; otherwise it costs a few additions. However many watch,
the core is asked once per interval. Nothing here holds text of prompts or answers.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import deque
from collections.abc import AsyncGenerator

import msgspec

from tellin.config import EngineConfig
from tellin.engine.stat_loggers import StatLoggerBase
from tellin.entrypoints.openai.serving import ServingContext, error_event, event
from tellin.exceptions import EngineError
from tellin.metrics import IterationStats
from tellin.protocol import BlockState, CacheStats, EngineCoreSnapshot, SchedulerStats

MAX_STEPS = 4096
"""Most steps that are kept for a watcher who comes back for them."""
WATCHED_S = 5.0
"""How long after the last look steps are noted."""
PATIENCE_S = 1.0
"""How long an event waits for the core, which answers between two steps."""
STATE_LETTERS = b"fcus"
"""Free, cached, used, shared: by `BlockState`."""

_RUN = re.compile(rb"(.)\1*", re.DOTALL)


class Step(msgspec.Struct, array_like=True, gc=False):
    """One step of the engine; on the wire an array in this order."""

    number: int
    ended_at: float
    """Monotonic seconds, as ``time`` of the event."""
    duration_s: float
    model_s: float
    """Of it, inside the model."""
    num_prefill_tokens: int
    num_decode_tokens: int
    num_running: int
    num_generated: int
    """Tokens that were handed out."""


class Totals(msgspec.Struct):
    """Counted since the server started."""

    num_prompt_tokens: int = 0
    """Computed ones: what the prefix cache held is not among them."""
    num_generation_tokens: int = 0
    num_finished: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0


class Request(msgspec.Struct):
    """A live request."""

    id: str
    state: str
    age_s: float
    num_prompt_tokens: int
    num_computed_tokens: int
    num_output_tokens: int
    max_tokens: int
    num_blocks: int
    num_preemptions: int
    priority: int


class Blocks(msgspec.Struct):
    """The KV cache."""

    block_size: int
    num_free: int
    num_cached: int
    num_used: int
    num_shared: int
    states: str
    """All blocks by id, as runs: ``12u3c`` = twelve used ones, then three cached ones. f is free, s
    is shared by several requests."""


class Core(msgspec.Struct):
    """The core between two steps."""

    step: int
    num_running: int
    num_waiting: int
    num_blocked: int
    num_preemptions: int
    is_paused: bool
    blocks: Blocks
    requests: list[Request]


class About(msgspec.Struct):
    """What does not change while the server runs."""

    model: str
    architecture: str
    max_model_len: int
    dtype: str
    isa: str
    num_threads: int
    version: str
    takes_images: bool


class EngineEvent(msgspec.Struct):
    """One look at the engine."""

    time: float
    """Monotonic seconds."""
    core: Core | None
    """None: the core is in a long step and has not answered."""
    has_statistics: bool
    totals: Totals
    steps: list[Step]
    """Those since the last event, oldest first."""
    first_token_s: list[float]
    """Times to the first token since the last event, in seconds."""
    about: About


class StepMonitor(StatLoggerBase):
    """Takes statistics from the engine's shell, step by step."""

    def __init__(self, config: EngineConfig | None = None, engine_index: int = 0) -> None:
        self.totals = Totals()
        self._steps: deque[tuple[int, Step]] = deque(maxlen=MAX_STEPS)
        self._first_tokens: deque[tuple[int, float]] = deque(maxlen=MAX_STEPS)
        self._watched_until = 0.0
        self._num_noted = 0

    def log_engine_initialized(self) -> None:
        """Nothing to do."""

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: CacheStats | None = None,
        engine_idx: int = 0,
    ) -> None:
        """Count a step; note it if somebody watches."""
        totals = self.totals
        if iteration_stats is not None:
            totals.num_prompt_tokens += iteration_stats.prompt_token_stats.computed
            totals.num_generation_tokens += iteration_stats.num_generation_tokens
            totals.num_finished += len(iteration_stats.finished_requests)
        if scheduler_stats is None:
            return
        cache = scheduler_stats.prefix_cache_stats
        if cache is not None:
            totals.prefix_cache_queries += cache.queries
            totals.prefix_cache_hits += cache.hits
        now = time.monotonic()
        if now > self._watched_until or scheduler_stats.num_scheduled_tokens == 0:
            return
        self._num_noted += 1
        self._steps.append((self._num_noted, _step(scheduler_stats, iteration_stats, now)))
        if iteration_stats is not None:
            for seconds in iteration_stats.time_to_first_tokens_iter:
                self._first_tokens.append((self._num_noted, seconds))

    def watch(self) -> None:
        """Somebody is looking: note steps for a while."""
        self._watched_until = time.monotonic() + WATCHED_S

    def since(self, position: int) -> tuple[int, list[Step], list[float]]:
        """Steps and times to first tokens noted after ``position``, and the position behind."""
        steps: list[Step] = []
        for number, step in reversed(self._steps):
            if number <= position:
                break
            steps.append(step)
        steps.reverse()
        first = [seconds for number, seconds in self._first_tokens if number > position]
        return self._num_noted, steps, first


def _step(stats: SchedulerStats, iteration: IterationStats | None, now: float) -> Step:
    return Step(
        stats.step_counter,
        now,
        stats.step_time_s,
        stats.model_time_s,
        stats.num_prefill_tokens,
        stats.num_scheduled_tokens - stats.num_prefill_tokens,
        stats.num_running_reqs,
        iteration.num_generation_tokens if iteration is not None else 0,
    )


class EngineView:
    """Looks at the engine behind one server."""

    def __init__(self, context: ServingContext) -> None:
        self._context = context
        self._monitor = StepMonitor()
        manager = context.engine.logger_manager
        self._has_statistics = manager is not None
        if manager is not None:
            manager.add(self._monitor)
        self._about = _about(context)
        self._asked: asyncio.Task[Core] | None = None
        self._asked_at = 0.0

    async def look(self, position: int = 0, max_age_s: float = 0.0) -> tuple[int, EngineEvent]:
        """The present state, with the steps after ``position``.

        Raises:
            EngineDeadError, EngineClosedError: there is no engine any more.
        """
        self._monitor.watch()
        core = await self._ask(max_age_s)
        position, steps, first = self._monitor.since(position)
        return position, EngineEvent(
            time.monotonic(),
            core,
            self._has_statistics,
            self._monitor.totals,
            steps,
            first,
            self._about,
        )

    async def _ask(self, max_age_s: float) -> Core | None:
        """All who ask within ``max_age_s`` get the same answer."""
        task, now = self._asked, time.monotonic()
        if task is None or (task.done() and now - self._asked_at >= max_age_s):
            task = asyncio.ensure_future(self._look_at_core())
            self._asked, self._asked_at = task, now
        await asyncio.wait((task,), timeout=PATIENCE_S)
        return task.result() if task.done() else None

    async def _look_at_core(self) -> Core:
        return _core(await self._context.engine.get_snapshot())

    async def events(self, interval_s: float) -> AsyncGenerator[bytes, None]:
        """Server-sent events until the client goes, the server ends, or the engine dies."""
        position = 0
        while not self._context.is_draining:
            start = time.monotonic()
            try:
                position, seen = await self.look(position, interval_s / 2)
            except EngineError as error:
                yield error_event(error)
                return
            yield event(seen)
            await asyncio.sleep(max(0.0, start + interval_s - time.monotonic()))


def _about(context: ServingContext) -> About:
    ready, model = context.engine.engine_core.ready, context.engine.model_config
    return About(
        context.model_name,
        model.architecture,
        model.max_model_len,
        ready.dtype,
        ready.isa,
        ready.num_threads,
        ready.tellin_version,
        context.engine.config.multimodal_config is not None,
    )


def _core(snapshot: EngineCoreSnapshot) -> Core:
    states = snapshot.block_states
    blocks = Blocks(
        snapshot.block_size,
        states.count(BlockState.FREE),
        states.count(BlockState.CACHED),
        states.count(BlockState.USED),
        states.count(BlockState.SHARED),
        encode_runs(states),
    )
    return Core(
        snapshot.step_counter,
        snapshot.num_running_reqs,
        snapshot.num_waiting_reqs,
        snapshot.num_blocked_reqs,
        snapshot.num_preemptions,
        snapshot.is_paused,
        blocks,
        [Request(*msgspec.structs.astuple(request)) for request in snapshot.requests],
    )


def encode_runs(states: bytes) -> str:
    """Block states as runs: ``b"\\0\\0\\2"`` becomes ``2f1u``."""
    runs = (match.group() for match in _RUN.finditer(states))
    return "".join(f"{len(run)}{STATE_LETTERS[run[0]]:c}" for run in runs)
