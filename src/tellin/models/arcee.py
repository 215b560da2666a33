"""Arcee (AFM): Llama's attention, and an MLP without a gate whose activation is relu squared.

Source: Arcee AI 2025 (AFM-4.5B), its published configuration.
"""

from __future__ import annotations

from tellin.models.parts import embed_tokens, lm_head, squared_relu_mlp
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
        x = b.add(x, squared_relu_mlp(b, h, f"layers.{i}.mlp"))
    return lm_head(b, x)


def attention(b: PlanBuilder, x: Buffer, name: str, rope: RotaryTable) -> Buffer:
    bias = True if b.hparams.attention_bias else None
    q = b.rope(b.linear(x, f"{name}.q_proj", bias=bias), rope)
    k = b.rope(b.linear(x, f"{name}.k_proj", bias=bias), rope)
    v = b.linear(x, f"{name}.v_proj", bias=bias)
    return b.linear(b.attention(q, k, v, name=name), f"{name}.o_proj", bias=bias)
