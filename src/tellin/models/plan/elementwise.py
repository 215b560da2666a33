"""Operations on single values that one family has: queries that grow with their position, xIELU.

They treat each row by itself, as the operations of `tellin.models.plan.ir` do.
"""

from __future__ import annotations

from tellin.loading.tensors import TensorRef
from tellin.models.plan.ir import Buffer, Op


class ScaleByPosition(Op, frozen=True):
    """``x *= 1 + beta * ln(1 + position // length)`` in place, by its token's position.

    Source: Ministral 3 model file (Mistral AI, 2025), after Llama 4's.
    """

    x: Buffer
    beta: float
    length: int


class Xielu(Op, frozen=True):
    """``out = p x^2 + beta x`` of positive x, else ``n (expm1(min(x, eps)) - x) + beta x``.

    With ``p = softplus(alpha_p)`` and ``n = beta + softplus(alpha_n)``; the four are ``(1,)``.
    ``out`` may be ``x``. Source: Huang & Schlag 2024 (xIELU).
    """

    x: Buffer
    out: Buffer
    alpha_p: TensorRef
    alpha_n: TensorRef
    beta: TensorRef
    eps: TensorRef
