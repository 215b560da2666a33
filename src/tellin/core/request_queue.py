"""Requests that wait to be admitted, in the order of the scheduling policy.

Both policies are one heap with a different key, so a request that comes back (preempted, or no
longer blocked) takes its old place without any special case: its key never changes. Removal marks
the entry dead; dead entries are skipped on the way out and swept before they outnumber the live.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tellin.core.request import Request

Key = tuple[Any, ...]


def fcfs_key(request: Request) -> Key:
    """First come, first served: the rank given when the request was added."""
    return (request.arrival_rank,)


def priority_key(request: Request) -> Key:
    """Lower priority number first, then earlier arrival; the rank makes the order total."""
    return (request.priority, request.arrival_time, request.arrival_rank)


POLICY_KEYS: dict[str, Callable[[Request], Key]] = {"fcfs": fcfs_key, "priority": priority_key}


class RequestQueue:
    """A priority queue of requests with removal; `pop_request` takes O(log n)."""

    def __init__(self, policy: str = "fcfs") -> None:
        if policy not in POLICY_KEYS:
            raise ValueError(f"policy must be one of {sorted(POLICY_KEYS)}, got {policy!r}")
        self._key = POLICY_KEYS[policy]
        self._heap: list[tuple[Key, Request]] = []
        self._entries: dict[str, tuple[Key, Request]] = {}

    def add_request(self, request: Request) -> None:
        """Queue at the request's own place; also for one that was queued before."""
        entry = (self._key(request), request)
        self._entries[request.request_id] = entry
        heapq.heappush(self._heap, entry)

    def peek_request(self) -> Request:
        """The next request. Raises IndexError when empty."""
        self._drop_dead()
        return self._heap[0][1]

    def pop_request(self) -> Request:
        """Take the next request out. Raises IndexError when empty."""
        self._drop_dead()
        request = heapq.heappop(self._heap)[1]
        del self._entries[request.request_id]
        return request

    def remove_request(self, request: Request) -> None:
        """Raises ValueError if it is not queued."""
        if request not in self:
            raise ValueError(f"request {request.request_id} is not in the queue")
        del self._entries[request.request_id]
        self._sweep()

    def remove_requests(self, requests: Iterable[Request]) -> None:
        """Remove those that are queued; others are ignored."""
        for request in requests:
            if request in self:
                del self._entries[request.request_id]
        self._sweep()

    def _drop_dead(self) -> None:
        heap, entries = self._heap, self._entries
        while heap and entries.get(heap[0][1].request_id) is not heap[0]:
            heapq.heappop(heap)

    def _sweep(self) -> None:
        if len(self._heap) > 2 * len(self._entries) + 16:
            self._heap = list(self._entries.values())
            heapq.heapify(self._heap)

    def __contains__(self, request: Request) -> bool:
        entry = self._entries.get(request.request_id)
        return entry is not None and entry[1] is request

    def __len__(self) -> int:
        return len(self._entries)

    def __bool__(self) -> bool:
        return bool(self._entries)

    def __iter__(self) -> Iterator[Request]:
        """In scheduling order, without changing the queue."""
        return iter([request for _, request in sorted(self._entries.values())])
