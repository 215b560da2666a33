"""OLMo 2 and 3: norms after attention and MLP instead of before, and of q and k over all heads.

OLMo 3 has a sliding window in all layers but every fourth; those with a window turn without the
scaling that extends the context.
Source: OLMo Team 2025 (2 OLMo 2 Furious), section 2.1; OLMo Team 2025 (Olmo 3), section 3.
"""

from __future__ import annotations

from tellin.models.parts import embed_tokens, gated_mlp, lm_head
from tellin.models.plan.builder import PlanBuilder
from tellin.models.plan.ir import Buffer, Plan, RotaryTable
from tellin.models.rotary import local_rotary_table, rotary_table


def record(b: PlanBuilder) -> Plan:
    hp = b.hparams
    ropes = {True: rotary_table(hp, b.max_model_len), False: local_rotary_table(hp)}
    pattern = hp.sliding_window_pattern
    x = embed_tokens(b)
    for i in range(hp.num_hidden_layers):
        is_global = hp.sliding_window is None or (pattern is not None and (i + 1) % pattern == 0)
        window = None if is_global else hp.sliding_window
        h = attention(b, x, f"layers.{i}.self_attn", ropes[is_global], window)
        x = b.add(x, b.rms_norm(h, f"layers.{i}.post_attention_layernorm"))
        h = gated_mlp(b, x, f"layers.{i}.mlp")
        x = b.add(x, b.rms_norm(h, f"layers.{i}.post_feedforward_layernorm"))
    return lm_head(b, x)


def attention(
    b: PlanBuilder, x: Buffer, name: str, rope: RotaryTable, window: int | None
) -> Buffer:
    bias = True if b.hparams.attention_bias else None
    q = b.rms_norm(b.linear(x, f"{name}.q_proj", bias=bias), f"{name}.q_norm")
    k = b.rms_norm(b.linear(x, f"{name}.k_proj", bias=bias), f"{name}.k_norm")
    v = b.linear(x, f"{name}.v_proj", bias=bias)
    out = b.attention(b.rope(q, rope), b.rope(k, rope), v, name=name, sliding_window=window)
    return b.linear(out, f"{name}.o_proj", bias=bias)
