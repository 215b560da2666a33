"""How similar two texts are, from what a pooling model made of them. Knows no engine."""

from __future__ import annotations

import math
from collections.abc import Sequence

SCORING_TASK = "embed"
"""The pooling task whose results are compared."""
PAIR_TASK = "score"
"""The pooling task of cross-encoders, which read both texts at once."""


def why_no_scores(tasks: Sequence[str], how_to_start: str) -> str:
    """What a model without `SCORING_TASK` and `PAIR_TASK` is told.

    Args:
        how_to_start: an engine that generates as one that embeds as well.
    """
    if "classify" in tasks:
        return (
            "it is a classifier of several labels, and scores are made of embeddings or by a "
            f"classifier of one label; it supports: {', '.join(tasks)}"
        )
    hint = f" ({how_to_start})" if "generate" in tasks else ""
    return f"it does not embed, which scores are made of; it supports: {', '.join(tasks)}{hint}"


def cosine(a: Sequence[float], b: Sequence[float]) -> float:
    """Cosine of two vectors, 0 if one of them is 0. Summed exactly, and never beyond 1."""
    norms = math.sqrt(math.fsum(x * x for x in a)) * math.sqrt(math.fsum(y * y for y in b))
    if not norms:
        return 0.0
    return max(-1.0, min(1.0, math.fsum(x * y for x, y in zip(a, b, strict=True)) / norms))
