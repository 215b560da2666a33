"""Command R and Command R7B (Cohere 2): attention and MLP side by side after one LayerNorm.

The norms have no bias, pairs of neighbours are rotated, the logits have a constant factor. In
Cohere 2 every n-th layer sees the whole context and does not rotate; the others have a window.

Source: Cohere 2024 and 2025, their models' published configurations.
"""

from __future__ import annotations

from tellin.models.parts import embed_tokens, gated_mlp, logits_of
from tellin.models.plan.builder import PlanBuilder
from tellin.models.plan.ir import Buffer, Plan, RotaryTable
from tellin.models.rotary import rotary_table


def record(b: PlanBuilder) -> Plan:
    hp = b.hparams
    rope = rotary_table(hp, b.max_model_len)
    pattern = hp.sliding_window_pattern
    x = embed_tokens(b)
    for i in range(hp.num_hidden_layers):
        is_global = pattern is not None and (i + 1) % pattern == 0
        turns = None if is_global else rope
        window = None if is_global else hp.sliding_window
        h = b.layer_norm(x, f"layers.{i}.input_layernorm")
        x = b.add(x, attention(b, h, f"layers.{i}.self_attn", turns, window))
        x = b.add(x, gated_mlp(b, h, f"layers.{i}.mlp"))
    return logits_of(b, b.layer_norm(b.gather_rows(x), "norm"))


def attention(
    b: PlanBuilder, x: Buffer, name: str, rope: RotaryTable | None, window: int | None
) -> Buffer:
    bias = True if b.hparams.attention_bias else None
    q = b.linear(x, f"{name}.q_proj", bias=bias)
    k = b.linear(x, f"{name}.k_proj", bias=bias)
    v = b.linear(x, f"{name}.v_proj", bias=bias)
    if rope is not None:
        q, k = b.rope(q, rope), b.rope(k, rope)
    out = b.attention(q, k, v, name=name, sliding_window=window)
    return b.linear(out, f"{name}.o_proj", bias=bias)
