"""The numbers behind `LLM.score`, ``/score`` and ``/rerank``."""

from __future__ import annotations

import random

import pytest

from tellin.entrypoints.scoring import cosine


def test_a_cosine_stays_between_minus_one_and_one() -> None:
    """Rounding must not lead beyond: users take the arc cosine."""
    numbers = random.Random(1)
    for _ in range(200):
        vector = [numbers.gauss(0, 1) for _ in range(50)]
        opposite = [-3 * value for value in vector]
        assert 1 - 1e-12 < cosine(vector, vector) <= 1
        assert -1 <= cosine(vector, opposite) < -1 + 1e-12


def test_the_cosine_of_nothing_is_zero() -> None:
    assert cosine([0.0, 0.0], [1.0, 2.0]) == 0
    assert cosine([3.0, 4.0], [4.0, 3.0]) == pytest.approx(24 / 25)
