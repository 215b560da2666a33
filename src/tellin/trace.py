"""Named spans of time, and the trace files they are written to.

Owns `ScopeRecorder`, which times phases where they happen, and the file format: Chrome's trace
events, which https://ui.perfetto.dev and chrome://tracing open. All times are of the system's
monotonic clock, so spans of several processes of a machine line up. Off by default: then a scope
costs one attribute look-up.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

MAX_EVENTS = 100_000
MAIN_THREAD = "main"
_NO_SCOPE: AbstractContextManager[None] = contextlib.nullcontext()


class Span(NamedTuple):
    """What a thread did from ``start_ns`` on for ``duration_ns`` (monotonic nanoseconds)."""

    name: str
    thread: str
    start_ns: int
    duration_ns: int


class ScopeRecorder:
    """Keeps the most recent scopes as ``(name, start_ns, duration_ns)``."""

    def __init__(self, enabled: bool = False) -> None:
        """``enabled``: record all the time, not only between `start` and `finish`."""
        self.enabled = enabled
        self.events: deque[tuple[str, int, int]] = deque(maxlen=MAX_EVENTS)
        self._always = enabled

    def scope(self, name: str) -> AbstractContextManager[None]:
        """A context whose duration is recorded, if scopes are enabled."""
        return self._record(name) if self.enabled else _NO_SCOPE

    @contextlib.contextmanager
    def _record(self, name: str) -> Iterator[None]:
        start = time.monotonic_ns()
        try:
            yield
        finally:
            self.events.append((name, start, time.monotonic_ns() - start))

    def start(self) -> None:
        """Record from now on."""
        self.events.clear()
        self.enabled = True

    def finish(self) -> list[Span]:
        """Stop, and hand out what was recorded since `start`."""
        self.enabled = self._always
        spans = [Span(name, MAIN_THREAD, start, duration) for name, start, duration in self.events]
        self.events.clear()
        return spans

    def add_to(self, path: str | None, process: str) -> str | None:
        """`finish`, and add the spans to the trace at ``path``, if there is one; returns it."""
        spans = self.finish()
        if path is not None:
            add_to_trace(Path(path), process, spans)
        return path


def trace_path(prefix: str | None) -> Path:
    """A new file's absolute path: ``<prefix>-<date>-<time>-<process>.json``."""
    stamp = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    return Path(f"{prefix or 'tellin-trace'}-{stamp}.json").absolute()


def write_trace(path: Path, process: str, spans: Sequence[Span]) -> None:
    """Write a trace of this process.

    Args:
        path: of the file; its folder is made if need be.
        process: what the process is called in the trace.
        spans: in any order.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _dump(path, _events(os.getpid(), process, spans))


def add_to_trace(path: Path, process: str, spans: Sequence[Span]) -> None:
    """Add spans of another part, or another process, to a trace."""
    events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    pids = {event["pid"] for event in events}
    pid = next(number for number in range(os.getpid(), 1 << 62) if number not in pids)
    _dump(path, events + _events(pid, process, spans))


def _dump(path: Path, events: list[dict[str, Any]]) -> None:
    path.write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": events}))


def _events(pid: int, process: str, spans: Sequence[Span]) -> list[dict[str, Any]]:
    threads = {name: i for i, name in enumerate(dict.fromkeys(span.thread for span in spans), 1)}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": process}}
    ]
    events += [
        {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}
        for name, tid in threads.items()
    ]
    # The format counts microseconds; fractions are allowed.
    events += [
        {
            "ph": "X",
            "name": span.name,
            "pid": pid,
            "tid": threads[span.thread],
            "ts": span.start_ns / 1000,
            "dur": span.duration_ns / 1000,
        }
        for span in sorted(spans, key=lambda span: span.start_ns)
    ]
    return events
