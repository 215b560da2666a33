"""The fidelity benchmark's measure, on distributions whose divergence is known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.fidelity import TEXT, Divergence, backend_logits, log_softmax, measure, table
from tellin.kernels.reference import ReferenceBackend
from tellin.models import build_plan
from tests.models.tiny import tiny_source, tiny_token_ids


def rows(*probabilities: list[float]) -> np.ndarray:
    return np.log(np.array(probabilities)).astype(np.float32)


def test_divergence_of_two_coins() -> None:
    result = Divergence("coin")
    result.add(rows([0.5, 0.5], [0.5, 0.5]), rows([0.25, 0.75], [0.5, 0.5]))
    expected = 0.5 * math.log(2) + 0.5 * math.log(2 / 3)
    assert result.kl == pytest.approx([expected, 0.0], abs=1e-6)
    assert result.mean_kl == pytest.approx(expected / 2, abs=1e-6)
    assert result.same_top == [False, True]


def test_a_constant_added_to_logits_changes_nothing() -> None:
    logits = np.random.RandomState(0).randn(60, 7).astype(np.float32)
    result = Divergence("shifted")
    result.add(logits, logits + 3)
    assert result.mean_kl == pytest.approx(0, abs=1e-6)
    np.testing.assert_allclose(np.exp(log_softmax(logits)).sum(axis=1), 1)


def test_a_backend_is_as_far_from_itself_in_other_chunks_as_from_itself() -> None:
    backend = ReferenceBackend(build_plan(tiny_source("llama")))
    other = ReferenceBackend(build_plan(tiny_source("llama_tied")))
    ids = tiny_token_ids().tolist()
    results = measure(
        backend_logits(backend, ids, 8),
        {
            "same": backend_logits(ReferenceBackend(backend.plan), ids, 8),
            "other": backend_logits(other, ids, 8),
        },
    )
    assert results["same"].kl == [0.0] * len(ids)
    assert results["other"].mean_kl > 1
    text = table("tiny", len(ids), results)
    assert "tiny: KL divergence from float32 in nats, over 20 tokens" in text
    assert "100.0%" in text


def test_the_text_is_long_enough_and_has_prose_and_code() -> None:
    text = TEXT.read_text(encoding="utf-8")
    assert len(text.split()) > 1600
    assert "def predict" in text
    assert "static double" in text
