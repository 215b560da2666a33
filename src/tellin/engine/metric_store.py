"""Counters, gauges and histograms, without any dependency.

A `MetricStore` belongs to one engine: two engines in a process never see each other's. It can be
read as typed records (`snapshot`), as the Prometheus text format (`exposition`), or by a
``prometheus_client`` registry (`prometheus_collector`). Thread-safe through ``lock``.
"""

from __future__ import annotations

import bisect
import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from tellin.metrics import Counter, Gauge, Histogram, Metric

LabelValues = tuple[str, ...]


class HistogramState:
    """Counts per bucket of one series."""

    __slots__ = ("counts", "sum")

    def __init__(self, num_bounds: int) -> None:
        self.counts = [0] * (num_bounds + 1)
        self.sum = 0.0


class Family:
    """All series of one metric: same name, different labels. Update it under the store's lock."""

    def __init__(
        self,
        kind: str,
        name: str,
        documentation: str,
        label_names: Sequence[str],
        bounds: Sequence[float] = (),
    ) -> None:
        self.kind = kind
        self.name = name
        self.documentation = documentation
        self.label_names = tuple(label_names)
        self.bounds = list(bounds)
        self.values: dict[LabelValues, float] = {}
        self.histograms: dict[LabelValues, HistogramState] = {}

    def inc(self, labels: LabelValues, amount: float = 1) -> None:
        """Add to a counter."""
        self.values[labels] = self.values.get(labels, 0) + amount

    def set(self, labels: LabelValues, value: float) -> None:
        """Set a gauge."""
        self.values[labels] = value

    def observe(self, labels: LabelValues, values: Iterable[float]) -> None:
        """Add values to a histogram."""
        state = self.histograms.get(labels)
        if state is None:
            state = self.histograms[labels] = HistogramState(len(self.bounds))
        for value in values:
            state.counts[bisect.bisect_left(self.bounds, value)] += 1
            state.sum += value

    def labels_of(self, values: LabelValues) -> dict[str, str]:
        return dict(zip(self.label_names, values, strict=True))

    def cumulative_buckets(self, state: HistogramState) -> dict[str, int]:
        """Upper bound as text → values at or below it."""
        buckets: dict[str, int] = {}
        total = 0
        for bound, count in zip([*self.bounds, math.inf], state.counts, strict=True):
            total += count
            buckets[format_number(bound)] = total
        return buckets


class MetricStore:
    """The metrics of one engine."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.lock = threading.Lock()
        self.families: list[Family] = []

    def counter(self, name: str, documentation: str, label_names: Sequence[str]) -> Family:
        return self._add("counter", name, documentation, label_names)

    def gauge(self, name: str, documentation: str, label_names: Sequence[str]) -> Family:
        return self._add("gauge", name, documentation, label_names)

    def histogram(
        self, name: str, documentation: str, label_names: Sequence[str], bounds: Sequence[float]
    ) -> Family:
        return self._add("histogram", name, documentation, label_names, bounds)

    def _add(
        self,
        kind: str,
        name: str,
        documentation: str,
        label_names: Sequence[str],
        bounds: Sequence[float] = (),
    ) -> Family:
        family = Family(kind, self.prefix + name, documentation, label_names, bounds)
        self.families.append(family)
        return family

    def snapshot(self) -> list[Metric]:
        """All series, as records."""
        metrics: list[Metric] = []
        with self.lock:
            for family in self.families:
                for labels, value in family.values.items():
                    named = family.labels_of(labels)
                    if family.kind == "counter":
                        metrics.append(Counter(family.name, named, int(value)))
                    else:
                        metrics.append(Gauge(family.name, named, float(value)))
                for labels, state in family.histograms.items():
                    buckets = family.cumulative_buckets(state)
                    metrics.append(
                        Histogram(
                            family.name,
                            family.labels_of(labels),
                            count=buckets["+Inf"],
                            sum=state.sum,
                            buckets=buckets,
                        )
                    )
        return metrics

    def exposition(self) -> str:
        """The metrics in Prometheus' text format, version 0.0.4."""
        lines: list[str] = []
        with self.lock:
            for family in self.families:
                name = _exposed_name(family)
                lines.append(f"# HELP {name} {_escape(family.documentation)}")
                lines.append(f"# TYPE {name} {family.kind}")
                lines.extend(_series(family, name))
        return "\n".join(lines) + "\n"

    def prometheus_collector(self) -> Any:
        """An object for ``prometheus_client.CollectorRegistry.register``.

        Raises:
            ModuleNotFoundError: the package ``prometheus-client`` is not installed.
        """
        from prometheus_client import core

        store = self

        class Collector:
            def collect(self) -> Iterator[Any]:
                families = {
                    "counter": core.CounterMetricFamily,
                    "gauge": core.GaugeMetricFamily,
                }
                with store.lock:
                    for family in store.families:
                        if family.kind == "histogram":
                            result: Any = core.HistogramMetricFamily(
                                family.name, family.documentation, labels=family.label_names
                            )
                            for labels, state in family.histograms.items():
                                buckets = list(family.cumulative_buckets(state).items())
                                result.add_metric(labels, buckets, state.sum)
                        else:
                            result = families[family.kind](
                                family.name, family.documentation, labels=family.label_names
                            )
                            for labels, value in family.values.items():
                                result.add_metric(labels, value)
                        yield result

        return Collector()


def _exposed_name(family: Family) -> str:
    if family.kind == "counter" and not family.name.endswith("_total"):
        return family.name + "_total"
    return family.name


def _series(family: Family, name: str) -> Iterator[str]:
    for values, value in family.values.items():
        yield f"{name}{_label_text(family, values)} {format_number(value)}"
    for values, state in family.histograms.items():
        for bound, count in family.cumulative_buckets(state).items():
            yield f"{name}_bucket{_label_text(family, values, bound)} {count}"
        labels = _label_text(family, values)
        yield f"{name}_sum{labels} {format_number(state.sum)}"
        yield f"{name}_count{labels} {sum(state.counts)}"


def _label_text(family: Family, values: LabelValues, bound: str | None = None) -> str:
    pairs = [
        f'{key}="{_escape_label(value)}"'
        for key, value in zip(family.label_names, values, strict=True)
    ]
    if bound is not None:
        pairs.append(f'le="{bound}"')
    return "{" + ",".join(pairs) + "}" if pairs else ""


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")


def _escape_label(text: str) -> str:
    return _escape(text).replace('"', '\\"')


def format_number(value: float) -> str:
    """A number as the text format wants it."""
    if value == math.inf:
        return "+Inf"
    if value == -math.inf:
        return "-Inf"
    return repr(float(value))
