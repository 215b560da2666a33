"""How similar two texts are, from what a pooling model made of them. Knows no engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

Similarity = Callable[[Any, Any], float]
SCORING_TASKS = ("embed", "token_embed")
"""Pooling tasks whose results can be compared; the first that a model supports is used."""


def scoring_task(supported: Collection[str]) -> str | None:
    """The task to score with; None if the model does not embed."""
    return next((task for task in SCORING_TASKS if task in supported), None)


def similarity_of(task: str) -> Similarity:
    """What compares two results of a task."""
    return cosine if task == "embed" else max_similarity


def cosine(a: Sequence[float], b: Sequence[float]) -> float:
    """Cosine of two vectors, 0 if one of them is 0. Summed exactly, and never beyond 1."""
    norms = math.sqrt(math.fsum(x * x for x in a)) * math.sqrt(math.fsum(y * y for y in b))
    if not norms:
        return 0.0
    return max(-1.0, min(1.0, math.fsum(x * y for x, y in zip(a, b, strict=True)) / norms))


def max_similarity(query: Sequence[Sequence[float]], document: Sequence[Sequence[float]]) -> float:
    """Each query token's best cosine with a document token, added up."""
    return math.fsum(max(cosine(q, d) for d in document) for q in query)
