"""Our HTTP protocol: uvicorn's, with a deadline for heads and a short way for streamed answers.

Uvicorn waits for ever for the first byte of a connection and for the rest of half a head. A few
hundred silent sockets would then use up the process's file descriptors. And it takes parts of a
body only from a task, which has to be woken for each of them.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from tellin.entrypoints.openai.shortcut import EXTENSION


class ChunkWriter:
    """Writes chunks of an answer; a `tellin.entrypoints.openai.shortcut.Connection`."""

    __slots__ = ("_cycle",)

    def __init__(self, cycle: Any) -> None:
        """``cycle``: uvicorn's state of a request and its answer, of the httptools protocol."""
        self._cycle = cycle

    def can_write(self) -> bool:
        """Whether the answer has begun, is chunked, and nothing holds it up."""
        cycle = self._cycle
        return not (
            cycle.flow.write_paused
            or not cycle.chunked_encoding
            or cycle.response_complete
            or cycle.disconnected
            or cycle.transport.is_closing()  # known a turn of the loop earlier
        )

    def write(self, data: bytes) -> None:
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))


def http_protocol(header_timeout_s: float) -> type[asyncio.Protocol]:
    """Uvicorn's HTTP protocol that closes a connection whose request head takes too long.

    With httptools, scopes have a `ChunkWriter` among their extensions.

    The clock starts when the connection is made, and at the first byte after an answer; it stops
    when a head is complete. Idle connections between requests have uvicorn's own limit
    (``timeout_keep_alive``), bodies that of the application.

    Args:
        header_timeout_s: seconds.
    """

    class Protocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
        _deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._start_clock()

        def on_headers_complete(self) -> None:  # called by httptools' parser; h11 has none
            super().on_headers_complete()
            extensions = self.scope.setdefault("extensions", {})
            extensions[EXTENSION] = ChunkWriter(self.cycle)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if not self._waits_for_head():
                self._stop_clock()
            elif self._deadline is None:
                self._start_clock()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_clock()
            super().connection_lost(exc)

        def _waits_for_head(self) -> bool:
            return self.cycle is None or self.cycle.response_complete

        def _start_clock(self) -> None:
            self._deadline = self.loop.call_later(header_timeout_s, self._time_is_up)

        def _stop_clock(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

        def _time_is_up(self) -> None:
            self._deadline = None
            if self._waits_for_head() and not self.transport.is_closing():
                self.transport.close()

    return Protocol
