"""Formulas of the reference backend: routing, attention of one token, activations; float32.

Each treats a row alone, so that its value does not depend on what else is in the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from tellin.models.plan import ir

Floats = npt.NDArray[np.float32]


def route(
    logits: Floats, op: ir.Experts, bias: Floats | None
) -> tuple[npt.NDArray[np.intp], Floats]:
    """Experts of one row, ascending, and their shares; NaN where the scores have no value."""
    with np.errstate(invalid="ignore", over="ignore"):
        if op.scoring == "sigmoid":
            scores = np.float32(1) / (1 + np.exp(-logits))
            scores = np.full_like(scores, np.nan) if np.isnan(logits).any() else scores
        else:
            exps = np.exp(logits - logits.max())
            scores = exps / exps.sum()
    # What experts are chosen by.
    keys = scores + bias if bias is not None else scores if op.scoring == "sigmoid" else logits
    if op.top_groups < op.groups:
        parts = np.sort(keys.reshape(op.groups, -1), axis=1)
        best = parts[:, -2:].sum(axis=1) if op.scoring == "sigmoid" else parts[:, -1]
        hidden = np.argsort(np.negative(best), kind="stable")[op.top_groups :]
        keys = keys.copy()
        keys.reshape(op.groups, -1)[hidden] = -np.inf
    # A stable sort leaves equal ones in the order of their ids.
    chosen = np.sort(np.argsort(-keys, kind="stable")[: op.top_k])
    shares = scores[chosen]
    if op.normalize:
        shares = shares / np.maximum(shares.sum(), np.float32(1e-20))
    return chosen, (shares * op.scale).astype(np.float32)


def attend(
    q: Floats, keys: Floats, values: Floats, op: ir.Attention, sinks: Floats | None
) -> Floats:
    """Attention of one token's query heads that share a kv head.

    q ``[group, head_dim]``, keys and values ``[num_keys, head_dim]``, sinks ``[group]`` ->
    ``[group, head_dim]``.
    """
    scores = (q @ keys.T) * np.float32(op.scale)
    if op.softcap is not None:
        scores = softcap(scores, op.softcap)
    top = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total += np.exp(sinks[:, None] - top)
    weights /= total
    return np.asarray(weights @ values)


def by_head(x: Floats) -> Floats:
    """``[n, heads, head_dim]`` to a contiguous ``[heads, n, head_dim]``."""
    return np.ascontiguousarray(x.swapaxes(0, 1))


def softcap(x: Floats, cap: float) -> Floats:
    return np.asarray(np.float32(cap) * np.tanh(x / np.float32(cap)))


def match_magnitude(x: Floats, target: Floats) -> Floats:
    """See `streams.MatchMagnitude`."""
    wanted = np.mean(np.square(target), axis=-1, keepdims=True)
    found = np.maximum(np.mean(np.square(x), axis=-1, keepdims=True), np.float32(1e-5))
    return np.asarray(x * np.sqrt(wanted) / np.sqrt(found))


def keep_largest(x: Floats, deviations: float) -> Floats:
    """See `streams.KeepLargest`."""
    mean, deviation = (f(x, axis=-1, keepdims=True) for f in (np.mean, np.std))
    cut = mean + deviation * np.float32(deviations)
    return np.asarray(np.maximum(x - cut, np.float32(0)))


def position_factor(positions: npt.NDArray[np.int32], beta: float, length: int) -> Floats:
    """See `elementwise.ScaleByPosition`."""
    periods = (positions // length).astype(np.float64)
    return (1 + beta * np.log(1 + periods)).astype(np.float32)


def xielu(x: Floats, alpha_p: float, alpha_n: float, beta: float, eps: float) -> Floats:
    """See `elementwise.Xielu`."""
    positive = np.float32(np.logaddexp(0, alpha_p))
    negative = np.float32(beta + np.logaddexp(0, alpha_n))
    with np.errstate(over="ignore"):  # of the branch that is not taken
        curved = negative * (np.expm1(np.minimum(x, np.float32(eps))) - x)
        return np.asarray(np.where(x > 0, positive * x * x, curved) + np.float32(beta) * x)


def _silu(x: Floats) -> Floats:
    return np.asarray(x / (1 + np.exp(-x)))


_erf = np.frompyfunc(math.erf, 1, 1)


def _gelu(x: Floats) -> Floats:
    """``x * Phi(x)``. Source: Hendrycks & Gimpel 2016, eq. 1."""
    erf = np.asarray(_erf(x.astype(np.float64) / math.sqrt(2)), dtype=np.float64)
    return (x * (0.5 * (1 + erf))).astype(np.float32)


def _gelu_tanh(x: Floats) -> Floats:
    """Tanh approximation of GELU. Source: Hendrycks & Gimpel 2016, section 2."""
    inner = np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x * x * x)
    return np.asarray(np.float32(0.5) * x * (1 + np.tanh(inner)))


def _quick_gelu(x: Floats) -> Floats:
    """Sigmoid approximation of GELU. Source: Hendrycks & Gimpel 2016, section 2."""
    return np.asarray(x / (1 + np.exp(np.float32(-1.702) * x)))


def _relu(x: Floats) -> Floats:
    return np.maximum(x, np.float32(0))


def _sigmoid(x: Floats) -> Floats:
    return np.asarray(np.float32(1) / (1 + np.exp(-x)))


def _identity(x: Floats) -> Floats:
    return x


def gated(act: str, gate: Floats, up: Floats) -> Floats:
    """``act(gate) * up``, see `ir.ActMul`."""
    if act != "swiglu_oai":
        return np.asarray(ACTIVATIONS[act](gate) * up)
    limit = np.float32(7)
    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    return np.asarray(gate / (1 + np.exp(np.float32(-1.702) * gate)) * (up + 1))


ACTIVATIONS: dict[str, Callable[[Floats], Floats]] = {
    "silu": _silu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "quick_gelu": _quick_gelu,
    "relu": _relu,
    "sigmoid": _sigmoid,
    "identity": _identity,
}
