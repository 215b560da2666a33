"""Connections that do not speak: they get a deadline for the head of a request.

Uvicorn waits for ever for the first byte of a connection and for the rest of half a head. A few
hundred silent sockets would then use up the process's file descriptors.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol


def http_protocol(header_timeout_s: float) -> type[asyncio.Protocol]:
    """Uvicorn's HTTP protocol that closes a connection whose request head takes too long.

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
