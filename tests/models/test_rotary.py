"""Rotary scalings: formulas at their known points, and refusals."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tellin.exceptions import ModelLoadError, UnsupportedModelError
from tellin.loading.tensors import RopeScaling
from tellin.models.rotary import base_frequencies, local_rotary_table, rotary_table
from tests.models.tiny import BASE, LONG_FACTORS, SHORT_FACTORS


def frequencies(scaling: RopeScaling, max_model_len: int | None = None) -> np.ndarray:
    hp = replace(BASE, rope_scaling=scaling)
    return np.array(rotary_table(hp, max_model_len).inv_freq)


UNSCALED = base_frequencies(16, 10000.0)


def test_base_frequencies_are_powers_of_theta() -> None:
    np.testing.assert_allclose(base_frequencies(4, 100.0), [1.0, 0.1])


def test_linear_divides_all() -> None:
    np.testing.assert_allclose(frequencies(RopeScaling("linear", factor=4.0)), UNSCALED / 4)


def test_given_factors_divide_each() -> None:
    scaling = RopeScaling("none", factors=SHORT_FACTORS)
    np.testing.assert_allclose(frequencies(scaling), UNSCALED / SHORT_FACTORS)


@given(
    factor=st.floats(1, 64),
    context=st.integers(2, 100_000),
    low=st.floats(0.1, 4),
    gap=st.floats(0.1, 8),
)
def test_llama3_keeps_short_waves_and_stretches_long_ones(
    factor: float, context: int, low: float, gap: float
) -> None:
    high = low + gap
    scaled = frequencies(
        RopeScaling(
            "llama3",
            factor=factor,
            original_max_position_embeddings=context,
            low_freq_factor=low,
            high_freq_factor=high,
        )
    )
    rotations = context * UNSCALED / (2 * math.pi)
    np.testing.assert_array_equal(scaled[rotations > high], UNSCALED[rotations > high])
    np.testing.assert_allclose(scaled[rotations < low], UNSCALED[rotations < low] / factor)
    assert (scaled <= UNSCALED * (1 + 1e-12)).all()
    assert (scaled >= UNSCALED / factor * (1 - 1e-12)).all()


@given(factor=st.floats(1, 64), context=st.integers(2, 100_000))
def test_yarn_keeps_the_fastest_and_stretches_the_slowest(factor: float, context: int) -> None:
    scaling = RopeScaling("yarn", factor=factor, original_max_position_embeddings=context)
    hp = replace(BASE, rope_scaling=scaling)
    table = rotary_table(hp)
    scaled = np.array(table.inv_freq)
    rotations = context * UNSCALED / (2 * math.pi)
    slow = rotations < 1 / 4  # a whole dimension past beta_slow
    np.testing.assert_allclose(scaled[slow], UNSCALED[slow] / factor)
    assert (np.diff(scaled) < 0).all()
    assert table.attention_factor == pytest.approx(1 + 0.1 * math.log(factor))


def test_yarn_takes_a_given_attention_factor() -> None:
    scaling = RopeScaling(
        "yarn", factor=4.0, original_max_position_embeddings=32, attention_factor=0.5
    )
    assert rotary_table(replace(BASE, rope_scaling=scaling)).attention_factor == 0.5


def test_longrope_chooses_by_the_longest_context_not_by_the_request() -> None:
    """Promise 1: a position turns the same way in every step."""
    scaling = RopeScaling(
        "longrope",
        original_max_position_embeddings=64,
        factors=SHORT_FACTORS,
        long_factors=LONG_FACTORS,
    )
    np.testing.assert_allclose(frequencies(scaling, 64), UNSCALED / SHORT_FACTORS)
    np.testing.assert_allclose(frequencies(scaling, 65), UNSCALED / LONG_FACTORS)
    np.testing.assert_allclose(frequencies(scaling), UNSCALED / LONG_FACTORS)


def test_local_layers_have_their_own_base_and_no_scaling() -> None:
    hp = replace(
        BASE,
        rope_theta=1e6,
        rope_local_theta=10000.0,
        rope_scaling=RopeScaling("linear", factor=8.0),
    )
    np.testing.assert_allclose(local_rotary_table(hp).inv_freq, UNSCALED)
    assert local_rotary_table(replace(hp, rope_local_theta=None)) == rotary_table(hp)


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        (RopeScaling("linear", factor=0.0), "rope factor is 0"),
        (RopeScaling("llama3", factor=8.0), "original_max_position_embeddings; got 0"),
        (
            RopeScaling(
                "llama3",
                factor=8.0,
                original_max_position_embeddings=32,
                low_freq_factor=4.0,
                high_freq_factor=4.0,
            ),
            "high_freq_factor 4.0 must exceed",
        ),
        (RopeScaling("none", factors=(1.0, 2.0)), "2 rope factors.*8 positive ones"),
        (RopeScaling("none", factors=(0.0,) * 8), "smallest 0.0"),
        (
            RopeScaling(
                "longrope", original_max_position_embeddings=64, factors=SHORT_FACTORS
            ),
            "no long rope factors",
        ),
        (
            RopeScaling("yarn", factor=math.nan, original_max_position_embeddings=64),
            "factor is nan",
        ),
        (
            RopeScaling(
                "yarn", factor=4.0, original_max_position_embeddings=64, beta_slow=1e-320
            ),
            "rope beta is 1e-320",
        ),
    ],
)  # fmt: skip
def test_impossible_scalings_are_refused(scaling: RopeScaling, message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        frequencies(scaling)


def test_yarn_needs_a_base_above_one() -> None:
    """Its formula divides by the base's logarithm."""
    scaling = RopeScaling("yarn", factor=4.0, original_max_position_embeddings=64)
    with pytest.raises(ModelLoadError, match=r"rope_theta is 1\.0"):
        rotary_table(replace(BASE, rope_scaling=scaling, rope_theta=1.0))


def test_an_unknown_scaling_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UnsupportedModelError, match=r"'ntk'.*linear, llama3, yarn, longrope"):
        frequencies(RopeScaling("ntk"))


@pytest.mark.parametrize("rope_dim", [0, 7, 18])
def test_impossible_dimensions_are_refused(rope_dim: int) -> None:
    with pytest.raises(ModelLoadError, match=f"rope_dim is {rope_dim}"):
        rotary_table(replace(BASE, rope_dim=rope_dim))
