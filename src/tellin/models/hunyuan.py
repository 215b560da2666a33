"""Hunyuan, dense and with experts: Llama's layer; heads of q and k are normalised once turned.

With experts, every layer has a shared one beside those of which a token chooses.

Source: Tencent 2025 (Hunyuan), its published configurations.
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
        h = b.rms_norm(x, f"layers.{i}.input_layernorm")
        x = b.add(x, attention(b, h, f"layers.{i}.self_attn", rope))
        h = b.rms_norm(x, f"layers.{i}.post_attention_layernorm")
        x = b.add(x, mlp(b, h, f"layers.{i}.mlp"))
    return lm_head(b, x)


def attention(b: PlanBuilder, x: Buffer, name: str, rope: RotaryTable) -> Buffer:
    head_dim = b.hparams.head_dim
    bias = True if b.hparams.attention_bias else None
    q = b.rope(b.linear(x, f"{name}.q_proj", bias=bias), rope)
    k = b.rope(b.linear(x, f"{name}.k_proj", bias=bias), rope)
    v = b.linear(x, f"{name}.v_proj", bias=bias)
    q = b.rms_norm(q, f"{name}.q_norm", group=head_dim)
    k = b.rms_norm(k, f"{name}.k_norm", group=head_dim)
    return b.linear(b.attention(q, k, v, name=name), f"{name}.o_proj", bias=bias)


def mlp(b: PlanBuilder, x: Buffer, name: str) -> Buffer:
    if not b.hparams.num_experts:
        return gated_mlp(b, x, name)
    return b.add(experts_mlp(b, x, name), gated_mlp(b, x, f"{name}.shared_expert"))
