"""Operations of models with several residual streams: alternating updates (Gemma 3n).

They treat each row by itself, as the operations of `tellin.models.plan.ir` do.
"""

from __future__ import annotations

from tellin.models.plan.ir import Buffer, Op


class AddScaled(Op, frozen=True):
    """``out = x + factor * (coefs[:, column] + offset) * y``. ``out`` may be ``x``.

    Source: Baykal et al. 2023 (alternating updates), section 3: streams are mixed row by row.
    """

    x: Buffer
    y: Buffer
    coefs: Buffer
    out: Buffer
    column: int
    offset: float = 0.0
    factor: float = 1.0


class MatchMagnitude(Op, frozen=True):
    """``x *= rms(target) / max(rms(x), sqrt(1e-5))`` in place, row by row."""

    x: Buffer
    target: Buffer


class KeepLargest(Op, frozen=True):
    """``x = max(0, x - (mean + deviations * std))`` in place, of each row.

    Of normally distributed values a known part remains. Source: Gemma 3n model file (Google, 2025).
    """

    x: Buffer
    deviations: float
