"""``python -m benchmarks diff A.json B.json``: how our own rates changed between two runs."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.report import OURS, aligned


def table(before: Path, after: Path) -> str:
    """Rates of both files for every case they share, and the change in per cent."""
    old = json.loads(before.read_text(encoding="utf-8"))["models"]
    new = json.loads(after.read_text(encoding="utf-8"))["models"]
    lines = [[f"{OURS}, tokens/s", "before", "after", "change"]]
    for model in old:
        cases = new.get(model, {}).get("cases", {})
        for name, row in old[model]["cases"].items():
            pair = [r.get("engines", {}).get(OURS, {}) for r in (row, cases.get(name, {}))]
            if all("median" in summary for summary in pair):
                a, b = (summary["median"] for summary in pair)
                lines.append([f"{model}: {name}", f"{a:.1f}", f"{b:.1f}", f"{b / a - 1:+.1%}"])
    return aligned(lines)
