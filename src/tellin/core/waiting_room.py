"""Requests that are not running: in line for admission, or blocked until something happens.

`waiting` holds new requests and `preempted` those that ran before; the next one is whichever comes
first by the policy. A blocked request sits in neither: it is kept in a map together with the event
that will unblock it, costs nothing meanwhile, and then returns to its old place in line.
"""

from __future__ import annotations

import queue
from collections.abc import Iterable

from tellin.core.request import Request, RequestStatus
from tellin.core.request_queue import POLICY_KEYS, RequestQueue


class WaitingRoom:
    """Every live request that holds no KV blocks."""

    def __init__(self, policy: str) -> None:
        self.waiting = RequestQueue(policy)
        self.preempted = RequestQueue(policy)
        self.blocked: dict[str, Request] = {}
        self.key = POLICY_KEYS[policy]
        self.dirty = False
        """Whether a request may have become admissible since the last look at the line."""
        self._next_rank = 0
        self._compiled: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self._adapter_waiters: list[Request] = []
        self._deferred: dict[str, int] = {}

    # ------------------------------------------------------------------ the line

    def add(self, request: Request) -> None:
        """Put a request in line, at the place it has always had."""
        if request.arrival_rank < 0:
            request.arrival_rank = self._next_rank
            self._next_rank += 1
        preempted = request.status is RequestStatus.PREEMPTED
        (self.preempted if preempted else self.waiting).add_request(request)
        self.dirty = True

    def pop(self, preempted_only: bool = False) -> Request | None:
        """Take out the first in line, or None."""
        waiting, preempted = self.waiting, self.preempted
        if preempted_only or not waiting:
            return preempted.pop_request() if preempted else None
        if preempted:
            key = self.key
            if key(preempted.peek_request()) < key(waiting.peek_request()):
                return preempted.pop_request()
        return waiting.pop_request()

    def put_back(self, requests: Iterable[Request]) -> None:
        """Return requests that were taken out but did not start; nothing has changed."""
        dirty = self.dirty
        for request in requests:
            self.add(request)
        self.dirty = dirty

    def has_candidates(self, preempted_only: bool = False) -> bool:
        return bool(self.preempted) or (not preempted_only and bool(self.waiting))

    def remove(self, requests: Iterable[Request]) -> None:
        """Forget requests wherever they are."""
        requests = list(requests)
        self.waiting.remove_requests(requests)
        self.preempted.remove_requests(requests)
        for request in requests:
            if self.blocked.get(request.request_id) is request:
                del self.blocked[request.request_id]
                if self._deferred.pop(request.request_id, None) is not None:
                    self.dirty = True

    def __len__(self) -> int:
        return len(self.waiting) + len(self.preempted) + len(self.blocked)

    # ------------------------------------------------------------------ blocked requests

    def _block(self, request: Request) -> None:
        if request.arrival_rank < 0:
            request.arrival_rank = self._next_rank
            self._next_rank += 1
        self.blocked[request.request_id] = request

    def unblock(self, request: Request) -> None:
        """Back into line; nothing if it is not blocked (any more)."""
        if self.blocked.get(request.request_id) is not request:
            return
        del self.blocked[request.request_id]
        self._deferred.pop(request.request_id, None)
        self.add(request)

    def block_on_grammar(self, request: Request) -> None:
        """Until `grammar_compiled` is called for it."""
        self._block(request)

    def grammar_compiled(self, request: Request) -> None:
        """Compilation ended, well or badly. May be called from any thread."""
        self._compiled.put(request)

    def take_compiled(self, timeout_s: float | None = None) -> list[Request]:
        """Blocked requests whose compilation has ended since the last call."""
        ready = []
        try:
            if timeout_s is not None:
                ready.append(self._compiled.get(timeout=timeout_s))
            while True:
                ready.append(self._compiled.get_nowait())
        except queue.Empty:
            pass
        return [r for r in ready if self.blocked.get(r.request_id) is r]

    def block_on_adapter(self, request: Request) -> None:
        """Until a slot for another adapter is free."""
        self._block(request)
        self._adapter_waiters.append(request)

    def adapter_freed(self) -> None:
        waiters, self._adapter_waiters = self._adapter_waiters, []
        for request in waiters:
            self.unblock(request)

    def block_on_prefix(
        self, request: Request, owner: Request, num_tokens: int, num_reserved_blocks: int
    ) -> None:
        """Until ``owner`` has published its first ``num_tokens`` positions.

        Meanwhile the request keeps a seat and ``num_reserved_blocks`` blocks, so that those who
        overtake it cannot take its place.
        """
        self._block(request)
        self._deferred[request.request_id] = num_reserved_blocks
        owner.prefix_waiters.append((num_tokens, request))

    def release_prefix_waiters(self, owner: Request, num_published_tokens: int | None) -> None:
        """Wake those who have what they waited for; all of them for None (the owner is gone)."""
        keep = []
        for entry in owner.prefix_waiters:
            if num_published_tokens is None or entry[0] <= num_published_tokens:
                self.unblock(entry[1])
            else:
                keep.append(entry)
        owner.prefix_waiters = keep

    @property
    def num_reserved_seats(self) -> int:
        return len(self._deferred)

    @property
    def num_reserved_blocks(self) -> int:
        return sum(self._deferred.values()) if self._deferred else 0
