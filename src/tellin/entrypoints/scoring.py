"""How similar two texts are, from what a pooling model made of them. Knows no engine."""

from __future__ import annotations

import math
from collections.abc import Sequence

SCORING_TASK = "embed"
"""The pooling task whose results are compared."""


def cosine(a: Sequence[float], b: Sequence[float]) -> float:
    """Cosine of two vectors, 0 if one of them is 0. Summed exactly, and never beyond 1."""
    norms = math.sqrt(math.fsum(x * x for x in a)) * math.sqrt(math.fsum(y * y for y in b))
    if not norms:
        return 0.0
    return max(-1.0, min(1.0, math.fsum(x * y for x, y in zip(a, b, strict=True)) / norms))
