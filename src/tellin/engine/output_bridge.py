"""Hands output batches from a thread to an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections import deque

from tellin.protocol import EngineCoreOutputs


class OutputBridge:
    """Hands batches from a thread to one event loop, in order, without losing any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._items: deque[EngineCoreOutputs] = deque()
        self._waiter: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None
        self._failure: Exception | None = None

    def put(self, item: EngineCoreOutputs | Exception) -> None:
        """Called from any thread."""
        with self._lock:
            if isinstance(item, Exception):
                self._failure = item
            else:
                self._items.append(item)
            waiter = self._waiter
        if waiter is not None:
            loop, event = waiter
            try:
                loop.call_soon_threadsafe(event.set)
            except RuntimeError:  # that loop is closed: nobody waits any more
                pass

    async def get(self) -> EngineCoreOutputs:
        """Oldest batch; after the last one the failure, again and again."""
        event = asyncio.Event()
        with self._lock:
            self._waiter = (asyncio.get_running_loop(), event)
        while True:
            with self._lock:
                if self._items:
                    return self._items.popleft()
                if self._failure is not None:
                    raise self._failure
                event.clear()
            await event.wait()
