"""Counts HTTP answers by path and status, also those that the engine never heard of."""

from __future__ import annotations

from collections.abc import Iterable

from tellin.engine.metric_store import MetricStore

OTHER_PATH = "other"
"""Stands for every path that is none of ours: strangers must not make up label values."""


class HttpMetrics:
    def __init__(self, prefix: str) -> None:
        self._store = MetricStore(prefix)
        self._answers = self._store.counter(
            "http_requests",
            "HTTP requests by path and status; 499 = the client went away.",
            ("path", "status"),
        )
        self._paths: frozenset[str] = frozenset()

    def set_paths(self, paths: Iterable[str]) -> None:
        """The paths that are counted under their own names."""
        self._paths = frozenset(paths)

    def count(self, path: str, status: int) -> None:
        with self._store.lock:
            self._answers.inc((path if path in self._paths else OTHER_PATH, str(status)))

    def exposition(self) -> str:
        """In Prometheus' text format."""
        return self._store.exposition()
