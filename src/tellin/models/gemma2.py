"""Gemma 2: norms before and after each block, soft-capped scores and logits, local/global layers.

Source: Gemma Team 2024 (Gemma 2), section 2. Layers alternate between a sliding window and the
whole context (``sliding_window_pattern`` 2: every second layer is global).
"""

from __future__ import annotations

from tellin.models.parts import embed_tokens, gated_mlp, lm_head
from tellin.models.plan.builder import PlanBuilder
from tellin.models.plan.ir import Buffer, Plan, RotaryTable
from tellin.models.rotary import rotary_table


def record(b: PlanBuilder) -> Plan:
    hp = b.hparams
    rope = rotary_table(hp, b.max_model_len)
    pattern = hp.sliding_window_pattern or 2
    x = embed_tokens(b)
    for i in range(hp.num_hidden_layers):
        is_global = (i + 1) % pattern == 0
        window = None if is_global else hp.sliding_window
        h = b.rms_norm(x, f"layers.{i}.input_layernorm")
        h = attention(b, h, f"layers.{i}.self_attn", rope, window)
        x = b.add(x, b.rms_norm(h, f"layers.{i}.post_attention_layernorm"))
        h = b.rms_norm(x, f"layers.{i}.pre_feedforward_layernorm")
        h = gated_mlp(b, h, f"layers.{i}.mlp")
        x = b.add(x, b.rms_norm(h, f"layers.{i}.post_feedforward_layernorm"))
    return lm_head(b, x)


def attention(
    b: PlanBuilder, x: Buffer, name: str, rope: RotaryTable, window: int | None
) -> Buffer:
    q = b.rope(b.linear(x, f"{name}.q_proj"), rope)
    k = b.rope(b.linear(x, f"{name}.k_proj"), rope)
    v = b.linear(x, f"{name}.v_proj")
    return b.linear(b.attention(q, k, v, name=name, sliding_window=window), f"{name}.o_proj")
