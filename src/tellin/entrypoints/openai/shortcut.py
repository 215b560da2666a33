"""The short way of an event: from an output of the engine to the connection, in one call.

Waking a stream's task for every token costs more than the token's event. While that task waits and
nothing of the stream is unsent, outputs are therefore encoded and written where they are handed
out. Everything else goes the long way, through the task: the first and the last output, errors, and
all outputs while the client is slow, which then wait merged. The order of events is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from tellin.outputs import RequestOutput

EXTENSION = "tellin.write"
"""Key in the extensions of an ASGI scope of a server that offers a `Connection`."""


class Connection(Protocol):
    """A connection whose answer is being streamed."""

    def can_write(self) -> bool:
        """Whether `write` would send at once, as far as is known."""

    def write(self, data: bytes) -> None:
        """Send a part of the body."""


class Shortcut:
    """The short way of one stream."""

    def __init__(self, encode: Callable[[Any, RequestOutput], bytes]) -> None:
        """``encode``: events of a job's output; empty if it has nothing to show."""
        self._encode = encode
        self._connection: Connection | None = None
        self.is_open = False
        """Whether the stream's task waits for an output, and all that it had is sent."""

    def connect(self, extensions: Any) -> None:
        """Use what the server offers, if it does."""
        self._connection = (extensions or {}).get(EXTENSION)

    def take(self, job: Any, output: RequestOutput) -> bool:
        """Send an output; False where it has to go the long way."""
        if not self.is_open or output.finished or output.error is not None:
            return False
        for completion in output.outputs:
            if completion.finish_reason is not None:
                return False
        connection = self._connection
        if connection is None or not connection.can_write():
            return False
        data = self._encode(job, output)
        if data:
            connection.write(data)
        return True
