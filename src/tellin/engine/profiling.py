"""Named scopes around the phases of a step.

Off by default: then a scope costs one attribute look-up. ``TELLIN_PROFILING_SCOPES`` switches
them on.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager

MAX_EVENTS = 100_000
_NO_SCOPE: AbstractContextManager[None] = contextlib.nullcontext()


class ScopeRecorder:
    """Keeps the most recent scopes as ``(name, start_ns, duration_ns)``, monotonic clock."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self.events: deque[tuple[str, int, int]] = deque(maxlen=MAX_EVENTS)

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
