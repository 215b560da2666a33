"""Draws a run as a PNG file. Needs the extra ``plot`` (matplotlib)."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tellin.exceptions import InvalidParameterError, UnsupportedFeatureError

MAX_PANELS_IN_A_ROW = 2
TITLES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency",
    "e2e": "end to end",
    "latency": "time of a batch",
}


def check_plot(path: Path | None) -> None:
    """Tell before a long run that its plot could not be drawn.

    Raises:
        UnsupportedFeatureError: matplotlib is not installed.
        InvalidParameterError: this is no place for a PNG file.
    """
    if path is None:
        return
    if importlib.util.find_spec("matplotlib") is None:
        raise UnsupportedFeatureError(
            "--plot needs matplotlib, which is not installed; run: pip install 'tellin[plot]'"
        )
    if path.suffix.lower() != ".png" or not path.expanduser().absolute().parent.is_dir():
        raise InvalidParameterError(
            f"--plot needs a path that ends with .png in an existing folder, got {path}",
            parameter="--plot",
            value=str(path),
        )


def draw(
    path: Path,
    title: str,
    latencies_s: Mapping[str, Sequence[float]],
    tokens: Sequence[tuple[float, int]] = (),
) -> None:
    """Cumulative distributions of latencies, and tokens per second over time; at least one of them.

    Args:
        latencies_s: values in seconds by name; a name without values gets no panel.
        tokens: (seconds since the start, number of tokens) of what arrived.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = [(name, sorted(values)) for name, values in latencies_s.items() if values]
    num_panels = len(panels) + bool(tokens)
    rows = -(-num_panels // MAX_PANELS_IN_A_ROW)
    figure = Figure(figsize=(11, 3.2 * rows + 0.6), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    columns = min(num_panels, MAX_PANELS_IN_A_ROW)
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axis, (name, ordered) in zip(axes, panels, strict=False):
        _draw_distribution(axis, TITLES.get(name, name), ordered)
    rest = axes[len(panels) :]
    if tokens:
        _draw_rate(rest.pop(0), tokens)
    for axis in rest:
        axis.set_axis_off()
    figure.savefig(path.expanduser(), dpi=110)


def _draw_distribution(axis: Any, title: str, ordered: Sequence[float]) -> None:
    values = [1000 * value for value in ordered]
    axis.step(values, [100 * (i + 1) / len(values) for i in range(len(values))], where="post")
    axis.set(title=title, xlabel="ms", ylabel="% of values", ylim=(0, 101))
    axis.set_xlim(left=0)
    axis.grid(alpha=0.3)


def _draw_rate(axis: Any, tokens: Sequence[tuple[float, int]]) -> None:
    end = max(second for second, _ in tokens)
    width = max(end / 60, 0.05)
    counts = [0] * (int(end / width) + 1)
    for second, count in tokens:
        counts[int(second / width)] += count
    axis.step([i * width for i in range(len(counts))], [c / width for c in counts], where="post")
    axis.set(title="throughput", xlabel="s", ylabel="output tokens/s")
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
