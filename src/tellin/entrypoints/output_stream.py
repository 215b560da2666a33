"""A request whose outputs are read with a plain ``for`` loop."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from tellin.engine.request_handle import RequestHandle
from tellin.entrypoints.engine_driver import EngineDriver, Inbox, lost_error
from tellin.outputs import RequestOutput

_Self = TypeVar("_Self", bound="OutputStream")


class OutputStream(Iterator[RequestOutput]):
    """Deltas of one request. Dropping or closing it aborts what is left."""

    def __init__(self, driver: EngineDriver, handle: RequestHandle, inbox: Inbox) -> None:
        self._driver = driver
        self._handle = handle
        self._inbox = inbox
        self._is_done = False

    @property
    def request_id(self) -> str:
        return self._handle.external_id

    def __iter__(self: _Self) -> _Self:
        return self

    def __next__(self) -> RequestOutput:
        """Next delta; runs the engine until there is one.

        Raises:
            StopIteration: the last output was read, or the stream was closed.
            RequestFailedError: the engine could not complete the request.
            EngineError: the engine is asleep, closed or dead.
        """
        if self._is_done:
            raise StopIteration
        try:
            self._driver.wait(self._inbox)
        except BaseException:
            self.close()
            raise
        if not self._inbox.outputs:
            self._is_done = True
            raise lost_error(self.request_id)
        output = self._inbox.outputs.popleft()
        assert isinstance(output, RequestOutput)
        if output.finished:
            self._is_done = True
            if output.error is not None:
                raise output.error
        return output

    def interrupt(self, error: BaseException) -> None:
        """Make the reader raise ``error`` after the running step. For signal handlers."""
        self._inbox.error = error

    def close(self) -> None:
        """Abort the request if it has not finished. Idempotent."""
        if not self._is_done:
            self._is_done = True
            self._driver.abort_soon([self._handle])

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_is_done", True):
            self.close()
