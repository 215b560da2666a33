"""The operations that look at other rows of a request: attention and the recurrences.

Part of `tellin.models.plan.ir`, which explains the plan and is where other modules take them from.
What they keep of earlier rows lies in a layer of the KV cache or in a state, so that a row's result
cannot depend on how a request's rows were spread over steps.
"""

from __future__ import annotations

from tellin.loading.tensors import TensorRef
from tellin.models.plan.operands import Buffer, Op


class Attention(Op, frozen=True):
    """Write k and v of this step into the paged cache of ``layer``, then attend causally.

    Without k and v it writes nothing: an operation before has filled the same ``layer``; q and out
    may then have a row per row of logits.

    ``q``, ``out`` ``[num_tokens, num_heads * head_dim]``; ``k``, ``v``
    ``[num_tokens, num_kv_heads * head_dim]``; with ``value_dim``, at most head_dim, heads of ``v``
    and ``out`` have that many values. A query at position p sees positions
    ``(p - sliding_window, p]`` of its own request (all up to p without a window), and behind p as
    far as `StepBatch.seen_ends` says. Query head h uses kv head
    ``h // (num_heads / num_kv_heads)``. Scores are q.k * scale; with ``softcap`` c they become
    c * tanh(score / c). ``causal=False``: every query sees the whole request, or with a window the
    positions ``(p - sliding_window, p + sliding_window)`` of it; the request must be scheduled in
    one step, the cache is neither written nor read, and ``layer`` is -1. ``sinks``
    ``(num_heads,)``: one more score per head in the softmax's denominator, that of a position
    without a value. Source of sinks: OpenAI 2025 (gpt-oss model card), section 2. ``windowed``, if
    not causal: a query sees its part of the request, which `StepBatch.window_starts` cuts.
    """

    q: Buffer
    k: Buffer | None
    v: Buffer | None
    out: Buffer
    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int | None = None
    softcap: float | None = None
    causal: bool = True
    sinks: TensorRef | None = None
    value_dim: int | None = None
    windowed: bool = False


class ShortConv(Op, frozen=True):
    """Causal convolution of each column with the request's own rows before.

    ``out[t, c] = act(sum_j weight[c, j] * x[t - (kernel - 1) + j, c] + bias[c])``; rows before
    position 0 are zeros. weight ``(width, kernel)`` or ``(width, 1, kernel)``, bias ``(width,)``;
    act as in `Activation`, or None. State ``[kernel - 1, width]``: the last rows of x.
    Source: Gulati et al. 2020 (Conformer), section 2.2; Gu & Dao 2023 (Mamba), section 3.4.
    """

    x: Buffer
    weight: TensorRef
    bias: TensorRef | None
    out: Buffer
    state: int
    act: str | None = None

    @property
    def kernel(self) -> int:
        """Rows that a result is made of."""
        return self.weight.shape[-1]


class GatedDelta(Op, frozen=True):
    """The gated delta rule, for each value head a matrix S ``[head_k_dim, head_v_dim]`` as state.

    With q' and k' a head of ``q`` and ``k`` over their length, each ``x / sqrt(|x|^2 + 1e-6)``:
    ``S <- exp(A softplus(a + dt_bias)) S``, then ``S <- S + sigmoid(b) k' (v - S^T k')^T`` and
    ``out = S^T q' / sqrt(head_k_dim)``. ``q``, ``k`` ``[num_tokens, num_k_heads * head_k_dim]``,
    ``v``, ``out`` ``[num_tokens, num_v_heads * head_v_dim]``; ``a`` and ``b`` have a value for each
    value head. Value head h uses key head ``h // (num_v_heads / num_k_heads)``, with ``tiled`` head
    ``h % num_k_heads``. ``decay`` and ``dt_bias`` hold num_v_heads values; A is ``-exp(decay)`` or,
    unless ``log_decay``, decay itself. Source: Yang et al. 2024 (Gated Delta Networks), eq. 10.
    """

    q: Buffer
    k: Buffer
    v: Buffer
    a: Buffer
    b: Buffer
    decay: TensorRef
    dt_bias: TensorRef
    out: Buffer
    state: int
    num_k_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int
    log_decay: bool = True
    tiled: bool = False


class SelectiveScan(Op, frozen=True):
    """Mamba 2's recurrence, for each head a matrix h ``[head_dim, state_dim]`` as state.

    With d the row's dt + dt_bias of the head, ``d <- min(max(softplus(d), dt_min), dt_max)``:
    ``h <- exp(A d) h + d x b^T`` and ``out = h c + D x``. ``x``, ``out``
    ``[num_tokens, num_heads * head_dim]``; ``b``, ``c`` ``[num_tokens, num_groups * state_dim]``,
    of which head h uses group ``h // (num_heads / num_groups)``; ``dt`` has a value for each head,
    as ``decay``, ``skip`` (D) and ``dt_bias`` have; A is ``-exp(decay)`` or, unless ``log_decay``,
    decay itself. Source: Dao & Gu 2024 (Mamba-2), eq. 16 and section 7.
    """

    x: Buffer
    b: Buffer
    c: Buffer
    dt: Buffer
    decay: TensorRef
    skip: TensorRef
    dt_bias: TensorRef
    out: Buffer
    state: int
    num_heads: int
    head_dim: int
    state_dim: int
    num_groups: int
    log_decay: bool = True
    dt_min: float = 0.0
    dt_max: float = float("inf")
