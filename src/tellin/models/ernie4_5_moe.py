"""ERNIE 4.5 with experts: Llama's attention over neighbouring pairs; experts, and shared ones.

The first layers are dense. A bias per expert takes part in the choice, not in the sum.

Source: Baidu 2025 (ERNIE 4.5 technical report), section 2.
"""

from __future__ import annotations

from tellin.models.parts import embed_tokens, experts_mlp, gated_mlp, lm_head
from tellin.models.plan.builder import PlanBuilder
from tellin.models.plan.ir import Buffer, Plan, RotaryTable
from tellin.models.rotary import rotary_table


def record(b: PlanBuilder) -> Plan:
    rope = rotary_table(b.hparams, b.max_model_len)
    x = embed_tokens(b)
    for i in range(b.hparams.num_hidden_layers):
        x = layer(b, x, f"layers.{i}", rope)
    return lm_head(b, x)


def layer(b: PlanBuilder, x: Buffer, name: str, rope: RotaryTable) -> Buffer:
    h = b.rms_norm(x, f"{name}.input_layernorm")
    x = b.add(x, attention(b, h, f"{name}.self_attn", rope))
    h = b.rms_norm(x, f"{name}.post_attention_layernorm")
    return b.add(x, mlp(b, h, f"{name}.mlp"))


def attention(b: PlanBuilder, x: Buffer, name: str, rope: RotaryTable) -> Buffer:
    q = b.rope(b.linear(x, f"{name}.q_proj"), rope)
    k = b.rope(b.linear(x, f"{name}.k_proj"), rope)
    v = b.linear(x, f"{name}.v_proj")
    return b.linear(b.attention(q, k, v, name=name), f"{name}.o_proj")


def mlp(b: PlanBuilder, x: Buffer, name: str) -> Buffer:
    if b.has(f"{name}.gate_proj.weight"):
        return gated_mlp(b, x, name)
    out = experts_mlp(b, x, name)
    if not b.has(f"{name}.shared_expert.gate_proj.weight"):
        return out
    return b.add(out, gated_mlp(b, x, f"{name}.shared_expert"))
