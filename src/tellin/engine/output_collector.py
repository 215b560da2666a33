"""Hands the outputs of one request to one awaiting consumer.

One slot: while the consumer is slow its outputs are merged, so that a slow reader costs a bounded
amount of memory and delays nobody. No delta is ever lost or repeated.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tellin.engine.output_processor import Output
from tellin.exceptions import RequestTimeoutError
from tellin.outputs import PoolingRequestOutput, RequestOutput
from tellin.sampling_params import RequestOutputKind

OutputTap = Callable[[RequestOutput], bool]
"""Offered an output while none waits; True = it has been dealt with."""


class RequestOutputCollector:
    """A single-slot queue between the output handler and a consumer, both on one event loop."""

    def __init__(self, output_kind: RequestOutputKind, tap: OutputTap | None = None) -> None:
        """``tap``: takes outputs before the consumer, which never sees those that it takes."""
        self._aggregate = output_kind == RequestOutputKind.DELTA
        self._slot: Output | Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._tap = tap

    def put(self, output: Output | Exception) -> None:
        """Store or merge. An exception replaces what waits; nothing replaces an exception."""
        waiting = self._slot
        if waiting is None:
            if self._tap is not None and isinstance(output, RequestOutput):
                try:
                    if self._tap(output):
                        return
                except Exception as error:  # the consumer's own: it gets it, and nobody else
                    output = error
                    self._tap = None  # nothing may follow what is missing now
            self._slot = output
        elif isinstance(waiting, Exception):
            return
        elif isinstance(waiting, RequestOutput) and isinstance(output, RequestOutput):
            waiting.add(output, aggregate=self._aggregate)
        else:
            self._slot = output
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def fail_after(self, timeout_s: float) -> asyncio.TimerHandle:
        """Store `RequestTimeoutError` ``timeout_s`` seconds from now, unless cancelled before."""
        error = RequestTimeoutError(
            f"the request was not done within its deadline of {timeout_s:g} s and was aborted"
        )
        return asyncio.get_running_loop().call_later(timeout_s, self.put, error)

    async def get(self) -> Output:
        """Next output; waits for one, for one caller. A stored exception is raised, once."""
        while (output := self.get_nowait()) is None:
            # Less than an `asyncio.Event`, which several could wait for.
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return output

    def get_nowait(self) -> Output | None:
        """What waits, or None. A stored exception is raised, once."""
        output, self._slot = self._slot, None
        if isinstance(output, Exception):
            raise output
        return output


def is_finished(output: Output) -> bool:
    """Whether this is a request's last output."""
    return output.finished or isinstance(output, PoolingRequestOutput)
