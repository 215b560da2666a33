"""Images on their way to a core in another process: the same pixels travel once, then only a name.

The sender decides what the receiver keeps, and tells it with each request what to drop; both change
in the order of messages. A message that gets lost costs a second transfer, never a wrong image: the
sender forgets before it sends, and remembers after.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import msgspec

from tellin.config import MultiModalConfig
from tellin.exceptions import EngineError
from tellin.protocol import EngineCoreRequest, MultiModalFeature

RESETTING_UTILITIES = frozenset({"pause_scheduler", "reset_mm_cache", "sleep"})
"""Calls with which both sides begin anew: memory is to be given back."""


class MultiModalSender:
    """Knows which data the receiver has, by hash. Guarded by its owner's lock."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._sizes: OrderedDict[str, int] = OrderedDict()
        self._num_bytes = 0
        self._drops: dict[str, None] = {}

    def prepare(self, request: EngineCoreRequest) -> EngineCoreRequest:
        """The request as it travels: without data that the receiver has.

        `sent` must follow with the same request once it is sent.
        """
        items = request.mm_features
        if not items:
            return request
        known: set[str | None] = set()
        for item in items:
            if item.mm_hash is not None and item.mm_hash in self._sizes:
                self._sizes.move_to_end(item.mm_hash)
                known.add(item.mm_hash)
        room = self._max_bytes - sum(_new_sizes(items, known).values())
        if room < 0:  # they would push each other out: none of the new ones is kept
            self._drops |= dict.fromkeys(_new_sizes(items, known))
        while 0 <= room < self._num_bytes:
            old, size = self._sizes.popitem(last=False)
            self._num_bytes -= size
            self._drops[old] = None
        travelling: list[MultiModalFeature] = []
        for item in items:
            if item.mm_hash is None or item.mm_hash not in known:
                travelling.append(item)
                known.add(item.mm_hash)
            else:
                travelling.append(msgspec.structs.replace(item, data=None))
        return msgspec.structs.replace(
            request, mm_features=travelling, mm_hashes_to_drop=list(self._drops) or None
        )

    def sent(self, request: EngineCoreRequest) -> None:
        """What `prepare` returned is on its way."""
        if not request.mm_features:
            return
        drops = set(request.mm_hashes_to_drop or ())
        self._drops = {h: None for h in self._drops if h not in drops}
        for name, size in _new_sizes(request.mm_features, set()).items():
            if name not in drops and name not in self._sizes:
                self._sizes[name] = size
                self._num_bytes += size

    def clear(self) -> None:
        """The receiver is about to be told to forget everything."""
        self._sizes.clear()
        self._drops.clear()
        self._num_bytes = 0


def _new_sizes(items: list[MultiModalFeature], known: set[str | None]) -> dict[str, int]:
    """Bytes of the data that must travel, by hash."""
    return {
        item.mm_hash: int(getattr(item.data, "nbytes", 0))
        for item in items
        if item.mm_hash is not None and item.mm_hash not in known and item.data is not None
    }


class MultiModalReceiver:
    """Data that one sender has sent and not told to drop."""

    def __init__(self) -> None:
        self._data: dict[str, Any] = {}

    def resolve(self, request: EngineCoreRequest) -> None:
        """Give every item of a request its data.

        Raises:
            EngineError: one is not here any more.
        """
        items = request.mm_features or []
        for item in items:
            if item.data is not None and item.mm_hash is not None:
                # Of its own memory: it would keep the rest of its message alive.
                self._data[item.mm_hash] = item.data.copy() if len(items) > 1 else item.data
        try:
            for item in items:
                if item.data is None:
                    item.data = self._find(item)
        finally:
            for name in request.mm_hashes_to_drop or ():
                self._data.pop(name, None)
            request.mm_hashes_to_drop = None

    def _find(self, item: MultiModalFeature) -> Any:
        found = None if item.mm_hash is None else self._data.get(item.mm_hash)
        if found is None:
            raise EngineError("the image's data is not in the engine core any more; send it again")
        return found

    def clear(self) -> None:
        self._data.clear()


def make_sender(config: MultiModalConfig | None) -> MultiModalSender | None:
    """None where requests are text only."""
    if config is None:
        return None
    return MultiModalSender(int(config.processor_cache_gb * (1 << 30)))
