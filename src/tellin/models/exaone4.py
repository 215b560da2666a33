"""EXAONE 4: norms after attention and MLP instead of before, and of every head of q and k.

The large model has a window in all layers but every fourth, which sees the whole context and does
not rotate; in the small one all layers see it all, and rotate.

Source: LG AI Research 2025 (EXAONE 4.0), its published configuration.
"""

from __future__ import annotations

from tellin.models.parts import embed_tokens, gated_mlp, lm_head
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
        h = attention(b, x, f"layers.{i}.self_attn", turns, window)
        x = b.add(x, b.rms_norm(h, f"layers.{i}.post_attention_layernorm"))
        h = gated_mlp(b, x, f"layers.{i}.mlp")
        x = b.add(x, b.rms_norm(h, f"layers.{i}.post_feedforward_layernorm"))
    return lm_head(b, x)


def attention(
    b: PlanBuilder, x: Buffer, name: str, rope: RotaryTable | None, window: int | None
) -> Buffer:
    head_dim = b.hparams.head_dim
    q = b.rms_norm(b.linear(x, f"{name}.q_proj"), f"{name}.q_norm", group=head_dim)
    k = b.rms_norm(b.linear(x, f"{name}.k_proj"), f"{name}.k_norm", group=head_dim)
    v = b.linear(x, f"{name}.v_proj")
    if rope is not None:
        q, k = b.rope(q, rope), b.rope(k, rope)
    out = b.attention(q, k, v, name=name, sliding_window=window)
    return b.linear(out, f"{name}.o_proj")
