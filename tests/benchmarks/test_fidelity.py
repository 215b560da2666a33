"""The fidelity benchmark's measure, on distributions whose divergence is known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.fidelity import TEXT, Divergence, backend_logits, log_softmax, measure, table
from benchmarks.rounding import RoundedBackend, asymmetric, grid, symmetric, two_planes
from tellin.kernels.reference import ReferenceBackend
from tellin.models import build_plan
from tests.kernels.linear_cases import quantized_activations
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


@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_roundings_stay_within_half_a_step(block_size: int) -> None:
    x = np.random.RandomState(1).randn(5, 128).astype(np.float32)
    x[0] = 0
    x[1, :64] = 3.0
    blocks = x.reshape(5, -1, block_size)
    largest = np.abs(blocks).max(axis=-1, keepdims=True)
    spread = blocks.max(axis=-1, keepdims=True) - blocks.min(axis=-1, keepdims=True)
    for rounding, step in (
        (symmetric(block_size), largest / 127),
        (asymmetric(block_size), spread / 255),
        (two_planes(block_size), largest / 127**2),
    ):
        error = np.abs(rounding(x) - x).reshape(blocks.shape)
        assert (error <= step / 2 + 1e-6).all()


def test_grid_is_what_the_kernels_do() -> None:
    rng = np.random.default_rng(2)
    x = rng.standard_normal((40, 576)) * np.exp2(rng.uniform(-60, 60, (40, 1)))
    x[20:] += np.abs(x[20:]).max(axis=1, keepdims=True) * rng.uniform(-2, 2, (20, 1))
    x[0], x[1] = 0, 3
    x32 = x.astype(np.float32)
    np.testing.assert_array_equal(grid(32)(x32), quantized_activations(x32, "int8"))


def test_rounded_backend_rounds_only_the_chosen_matrices() -> None:
    plan = build_plan(tiny_source("llama"))
    ids = tiny_token_ids().tolist()
    backend = RoundedBackend(plan)
    exact = np.concatenate(list(backend_logits(ReferenceBackend(plan), ids, 8)))
    backend.rounding, backend.matrices = symmetric(32), ("absent",)
    np.testing.assert_array_equal(np.concatenate(list(backend_logits(backend, ids, 8))), exact)
    backend.matrices = ("down_proj",)
    rounded = np.concatenate(list(backend_logits(backend, ids, 8)))
    assert 0 < np.abs(rounded - exact).max() < 0.2
