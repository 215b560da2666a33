"""`ProcessorCache`: pictures that were processed before, by the hash of their content.

The same picture in a later prompt, or in the next turn of a conversation, is neither scaled nor cut
again. Bounded by bytes, the longest unused leave first. Threads may use it at once.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

from tellin.protocol import CacheStats

if TYPE_CHECKING:
    from tellin.loading.images import ProcessedImage

MAX_FILES = 4096
"""Files and names whose content hash is remembered: they need not be decoded to be known."""


class ProcessorCache:
    """At most ``max_bytes`` of processed pictures; 0 keeps none."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._items: OrderedDict[str, ProcessedImage] = OrderedDict()
        self._files: OrderedDict[bytes, str] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()
        self._stats = CacheStats()

    def get(self, key: str) -> ProcessedImage | None:
        """A picture that is kept. Counts as a query."""
        with self._lock:
            self._stats.queries += 1
            item = self._items.get(key)
            if item is not None:
                self._stats.hits += 1
                self._items.move_to_end(key)
            return item

    def put(self, key: str, item: ProcessedImage) -> None:
        """Keep a picture, unless it alone is larger than the cache."""
        size = item.values.nbytes
        with self._lock:
            if size > self.max_bytes or key in self._items:
                return
            self._items[key] = item
            self._num_bytes += size
            while self._num_bytes > self.max_bytes:
                _, old = self._items.popitem(last=False)
                self._num_bytes -= old.values.nbytes

    def hash_of_file(self, digest: bytes) -> str | None:
        """Content hash of what was processed before, by the digest of a file or of its name."""
        with self._lock:
            return self._files.get(digest)

    def note_file(self, digest: bytes, key: str) -> None:
        with self._lock:
            self._files[digest] = key
            self._files.move_to_end(digest)
            if len(self._files) > MAX_FILES:
                self._files.popitem(last=False)

    def clear(self) -> None:
        with self._lock:
            self._items.clear()
            self._files.clear()
            self._num_bytes = 0
            self._stats.reset = True

    def take_stats(self) -> CacheStats:
        """Queries and hits since the last call, in pictures."""
        with self._lock:
            stats, self._stats = self._stats, CacheStats()
            stats.requests = stats.queries
            return stats
