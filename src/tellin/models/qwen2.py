"""Qwen2 and Qwen2.5: Llama's layer with biases on q, k and v and none on the output projection.

Seed-OSS has the same layer.

Source: Yang et al. 2024 (Qwen2 technical report), section 2.2; ByteDance Seed 2025 (Seed-OSS), its
published configuration.
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
        x = layer(b, x, f"layers.{i}", rope)
    return lm_head(b, x)


def layer(b: PlanBuilder, x: Buffer, name: str, rope: RotaryTable) -> Buffer:
    h = b.rms_norm(x, f"{name}.input_layernorm")
    x = b.add(x, attention(b, h, f"{name}.self_attn", rope))
    h = b.rms_norm(x, f"{name}.post_attention_layernorm")
    return b.add(x, gated_mlp(b, h, f"{name}.mlp"))


def attention(b: PlanBuilder, x: Buffer, name: str, rope: RotaryTable) -> Buffer:
    q = b.rope(b.linear(x, f"{name}.q_proj", bias=True), rope)
    k = b.rope(b.linear(x, f"{name}.k_proj", bias=True), rope)
    v = b.linear(x, f"{name}.v_proj", bias=True)
    out = b.attention(q, k, v, name=name, sliding_window=b.hparams.sliding_window)
    return b.linear(out, f"{name}.o_proj", bias=False)
