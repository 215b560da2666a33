"""From samples to medians, ratios and tables. Knows nothing of how samples are taken."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.models import BenchModel

NOISY = 0.05
"""A median is marked when others used more than this share of the machine in half of its rounds."""
OURS = "tellin"


def summarise(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Median, least and greatest rate (tokens/s) of the rounds of one engine on one case."""
    rates = [sample["tokens"] / sample["seconds"] for sample in samples]
    return {
        "median": statistics.median(rates),
        "min": min(rates),
        "max": max(rates),
        "rates": [round(rate, 3) for rate in rates],
        "others": round(statistics.median(sample["others"] for sample in samples), 4),
    }


def ratios(engines: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Our median over each peer's."""
    if OURS not in engines:
        return {}
    ours = engines[OURS]["median"]
    return {name: ours / row["median"] for name, row in engines.items() if name != OURS}


def ceiling_fraction(
    case: dict[str, Any], rate: float, model: BenchModel, ceilings: dict[str, Any]
) -> float | None:
    """Share of the machine's ceiling that ``rate`` (tokens/s) reaches.

    A single stream is held against the read bandwidth (weights alone), a prompt against the rate of
    multiply-accumulates (int8 for quantised weights, else float32). Attention is not counted, so at
    long contexts the true share is higher.
    """
    if not ceilings:
        return None
    if case["kind"] == "prefill":
        kind = "int8" if model.is_quantised else "float32"
        return rate * model.macs_per_prefill_token / float(ceilings[f"{kind}_mac_per_s"])
    if case["streams"] == 1:
        return rate * model.weight_bytes_per_token / float(ceilings["read_bytes_per_s"])
    return None


def rate_table(title: str, rows: dict[str, dict[str, Any]], engines: list[str]) -> str:
    """Tokens/s per case and engine, ratios to each peer, and the share of the ceiling.

    ``rows`` maps a case's name to ``engines`` (name to summary or ``error``), ``ratios`` and
    ``ceiling``.
    """
    peers = [name for name in engines if name != OURS]
    header = ["tokens/s", *engines]
    header += [f"{OURS} / {name}" for name in peers if OURS in engines]
    header += ["of ceiling"] if OURS in engines else []
    lines = [header]
    for name, row in rows.items():
        cells = [name, *(_rate_cell(row["engines"].get(engine)) for engine in engines)]
        if OURS in engines:
            cells += [f"{row['ratios'][p]:.2f}" if p in row["ratios"] else "-" for p in peers]
            cells.append(f"{row['ceiling']:.0%}" if row.get("ceiling") else "")
        lines.append(cells)
    return f"{title}\n{aligned(lines)}"


def start_table(rows: dict[str, dict[str, Any]], file_bytes: int) -> str:
    """Load time, time to first token (both from process start) and peak memory."""
    header = ["from process start", "loaded s", "first token s", "peak RSS MiB", "RSS / file"]
    lines = [header]
    for name, row in rows.items():
        if "error" in row:
            lines.append([name, "failed", "", "", ""])
            continue
        rss = row["peak_rss_bytes"]
        cells = [f"{row['load_s']:.2f}", f"{row['first_token_s']:.2f}", f"{rss / 2**20:.0f}"]
        lines.append([name, *cells, f"{rss / file_bytes:.2f}"])
    return aligned(lines)


def _rate_cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return "-"
    if "error" in row:
        return "failed"
    return f"{row['median']:.1f}" + ("~" if row["others"] > NOISY else "")


def aligned(lines: list[list[str]]) -> str:
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
