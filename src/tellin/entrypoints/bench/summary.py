"""From results to figures: throughput and percentiles, as a table and as JSON.

TTFT: from sending a request to its first piece of text. TPOT: the time per token after the first,
one value per request. ITL: gaps between two pieces of text, all requests together. E2E: from
sending to the end. All in milliseconds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from tellin.entrypoints.bench.load import RequestResult
from tellin.exceptions import InvalidParameterError

PERCENTILES = (50, 90, 95, 99)


class Distribution(msgspec.Struct):
    """Of one quantity, in milliseconds; percentiles by name (``p50``)."""

    mean: float
    minimum: float
    maximum: float
    percentiles: dict[str, float]


class ServeSummary(msgspec.Struct):
    """What `summarize` finds. Requests that failed count as failed and nowhere else."""

    duration_s: float
    num_requests: int
    num_failed: int
    prompt_tokens: int
    output_tokens: int
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    peak_concurrency: int
    latencies_ms: dict[str, Distribution]
    """By name: ttft, tpot, itl, e2e; one without values is missing."""
    errors: dict[str, int]
    """How often each message came."""


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Of sorted values, linear between neighbours."""
    position = (len(ordered) - 1) * percent / 100
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def distribution(values_s: Sequence[float]) -> Distribution:
    """Of values in seconds; at least one."""
    ordered = sorted(1000 * value for value in values_s)
    return Distribution(
        sum(ordered) / len(ordered),
        ordered[0],
        ordered[-1],
        {f"p{percent}": percentile(ordered, percent) for percent in PERCENTILES},
    )


def summarize(results: Sequence[RequestResult]) -> ServeSummary:
    """Figures of a run. The duration is from the first start to the last end."""
    good = [result for result in results if result.error is None]
    duration = max(
        max(result.end for result in results) - min(result.start for result in results), 1e-9
    )
    prompt_tokens = sum(result.prompt_tokens for result in good)
    output_tokens = sum(result.output_tokens for result in good)
    errors: dict[str, int] = {}
    for result in results:
        if result.error is not None:
            errors[result.error] = errors.get(result.error, 0) + 1
    return ServeSummary(
        duration,
        len(results),
        len(results) - len(good),
        prompt_tokens,
        output_tokens,
        len(good) / duration,
        output_tokens / duration,
        (prompt_tokens + output_tokens) / duration,
        _peak_concurrency(results),
        {name: distribution(values) for name, values in latencies(good).items() if values},
        errors,
    )


def latencies(good: Sequence[RequestResult]) -> dict[str, list[float]]:
    """All values in seconds by name: ttft, tpot, itl, e2e."""
    values: dict[str, list[float]] = {"ttft": [], "tpot": [], "itl": [], "e2e": []}
    for result in good:
        times = result.token_times
        values["ttft"].append(times[0] - result.start)
        values["e2e"].append(result.end - result.start)
        values["itl"] += [after - before for before, after in itertools.pairwise(times)]
        if result.output_tokens > 1:
            values["tpot"].append((times[-1] - times[0]) / (result.output_tokens - 1))
    return values


def _peak_concurrency(results: Sequence[RequestResult]) -> int:
    edges = sorted([(r.end, -1) for r in results] + [(r.start, 1) for r in results])
    live = peak = 0
    for _, change in edges:
        live += change
        peak = max(peak, live)
    return peak


def table(summary: ServeSummary) -> str:
    """For a terminal."""
    lines = [
        f"requests      {summary.num_requests - summary.num_failed} of {summary.num_requests} done"
        f" in {summary.duration_s:.2f} s, at most {summary.peak_concurrency} at a time",
        f"tokens        {summary.prompt_tokens} read, {summary.output_tokens} generated",
        f"throughput    {summary.requests_per_s:.2f} requests/s, "
        f"{summary.output_tokens_per_s:.1f} output tokens/s, "
        f"{summary.total_tokens_per_s:.1f} total tokens/s",
        "",
        *latency_table(summary.latencies_ms),
    ]
    lines += [f"failed        {count} x {error}" for error, count in summary.errors.items()]
    return "\n".join(lines)


def latency_table(latencies_ms: dict[str, Distribution]) -> list[str]:
    """One line per quantity."""
    names = [f"p{percent}" for percent in PERCENTILES]
    columns = ["mean", *names, "max"]
    lines = [f"{'ms':<8}" + "".join(f"{column:>11}" for column in columns)]
    for name, found in latencies_ms.items():
        values = [found.mean, *(found.percentiles[p] for p in names), found.maximum]
        lines.append(f"{name:<8}" + "".join(f"{value:11.2f}" for value in values))
    return lines


def write_json(path: Path, summary: Any, settings: dict[str, Any], **details: Any) -> None:
    """The figures with what they are figures of.

    Raises:
        InvalidParameterError: the file cannot be written.
    """
    content = msgspec.to_builtins(summary)
    document = {"settings": settings, **content, **details}
    try:
        path.expanduser().write_bytes(
            msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"
        )
    except OSError as error:
        raise InvalidParameterError(
            f"cannot write {path}: {error.strerror or error}", parameter="--json", value=str(path)
        ) from None
