"""Prefixes that are being computed right now.

A request whose next missing block is already in the hands of a running request can wait for that
block instead of computing it too: so n samples of one prompt, or a burst of requests with one
system prompt, compute it once. Waiting is never slower than computing: the owner is ahead already.
"""

from __future__ import annotations

from tellin.core.request import Request

MIN_SHARED_TOKENS = 32
"""Sharing less than this is not worth waiting a step for."""

MAX_DEFERRALS = 8
"""A request whose owners keep vanishing computes its prefix itself after so many waits."""


class InFlightPrefixes:
    """Hashes of full blocks which running requests have still to publish, and who computes them."""

    def __init__(self, block_size: int, min_shared_tokens: int = MIN_SHARED_TOKENS) -> None:
        self.min_shared_tokens = min_shared_tokens
        self._block_size = block_size
        self._owner: dict[bytes, Request] = {}

    def register(self, request: Request, first: int, last: int) -> None:
        """``request`` is about to compute its blocks ``[first, last)``."""
        owner = self._owner
        for block_hash in request.block_hashes[first:last]:
            owner.setdefault(block_hash, request)
        request.in_flight_range = (first, last)

    def unregister(self, request: Request) -> None:
        """They are published, or will never be."""
        if request.in_flight_range is None:
            return
        first, last = request.in_flight_range
        request.in_flight_range = None
        owner = self._owner
        for block_hash in request.block_hashes[first:last]:
            if owner.get(block_hash) is request:
                del owner[block_hash]

    def find_owner(self, request: Request, num_hit_blocks: int) -> tuple[Request, int] | None:
        """Who computes the blocks after the first ``num_hit_blocks``, and up to which token."""
        hashes, owners = request.block_hashes, self._owner
        if request.num_deferrals >= MAX_DEFERRALS or num_hit_blocks >= len(hashes):
            return None
        owner = owners.get(hashes[num_hit_blocks])
        if owner is None:
            return None
        end = num_hit_blocks + 1
        while end < len(hashes) and owners.get(hashes[end]) is owner:
            end += 1
        if (end - num_hit_blocks) * self._block_size < self.min_shared_tokens:
            return None
        return owner, end * self._block_size

    def clear(self) -> None:
        self._owner.clear()

    def owners(self) -> set[Request]:
        return set(self._owner.values())

    def __len__(self) -> int:
        return len(self._owner)
