"""GLM-4 (0414): norms before and after each block, half of each head rotated in neighbouring pairs.

Source: GLM-4-0414 model release (Zhipu AI, 2025), its configuration.
"""

from __future__ import annotations

from tellin.models.parts import embed_tokens, gated_mlp, lm_head
from tellin.models.plan.builder import PlanBuilder
from tellin.models.plan.ir import Buffer, Plan, RotaryTable
from tellin.models.rotary import rotary_table


def record(b: PlanBuilder) -> Plan:
    rope = rotary_table(b.hparams, b.max_model_len)
    x = embed_tokens(b)
    for i in range(b.hparams.num_hidden_layers):
        h = b.rms_norm(x, f"layers.{i}.input_layernorm")
        h = attention(b, h, f"layers.{i}.self_attn", rope)
        x = b.add(x, b.rms_norm(h, f"layers.{i}.post_attention_layernorm"))
        h = b.rms_norm(x, f"layers.{i}.pre_feedforward_layernorm")
        h = gated_mlp(b, h, f"layers.{i}.mlp")
        x = b.add(x, b.rms_norm(h, f"layers.{i}.post_feedforward_layernorm"))
    return lm_head(b, x)


def attention(b: PlanBuilder, x: Buffer, name: str, rope: RotaryTable) -> Buffer:
    q = b.rope(b.linear(x, f"{name}.q_proj"), rope)
    k = b.rope(b.linear(x, f"{name}.k_proj"), rope)
    v = b.linear(x, f"{name}.v_proj")
    return b.linear(b.attention(q, k, v, name=name), f"{name}.o_proj", bias=False)
