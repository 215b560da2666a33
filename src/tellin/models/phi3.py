"""Phi-3 and Phi-4: Llama's layer whose files fuse q/k/v and gate/up into one matrix each.

The fused matrices are read as row ranges: q, k, v in this order, and gate before up. Files that
hold them apart are read as such. Rotary scaling is longrope; Phi-4-mini rotates part of a head.

Source: Abdin et al. 2024 (Phi-3 technical report), section 2.
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
        x = b.add(x, attention(b, h, f"layers.{i}.self_attn", rope))
        h = b.rms_norm(x, f"layers.{i}.post_attention_layernorm")
        x = b.add(x, mlp(b, h, f"layers.{i}.mlp"))
    return lm_head(b, x)


def attention(b: PlanBuilder, x: Buffer, name: str, rope: RotaryTable) -> Buffer:
    q, k, v = qkv(b, x, name)
    out = b.attention(
        b.rope(q, rope), b.rope(k, rope), v, name=name, sliding_window=b.hparams.sliding_window
    )
    return b.linear(out, f"{name}.o_proj")


def qkv(b: PlanBuilder, x: Buffer, name: str) -> tuple[Buffer, Buffer, Buffer]:
    fused = f"{name}.qkv_proj"
    if not b.has(f"{fused}.weight"):
        return (
            b.linear(x, f"{name}.q_proj"),
            b.linear(x, f"{name}.k_proj"),
            b.linear(x, f"{name}.v_proj"),
        )
    hp = b.hparams
    q_end = hp.num_attention_heads * hp.head_dim
    k_end = q_end + hp.num_key_value_heads * hp.head_dim
    v_end = k_end + hp.num_key_value_heads * hp.head_dim
    return (
        b.linear(x, fused, rows=(0, q_end)),
        b.linear(x, fused, rows=(q_end, k_end)),
        b.linear(x, fused, rows=(k_end, v_end)),
    )


def mlp(b: PlanBuilder, x: Buffer, name: str) -> Buffer:
    fused = f"{name}.gate_up_proj"
    if not b.has(f"{fused}.weight"):
        return gated_mlp(b, x, name)
    size = b.hparams.intermediate_size
    gate = b.linear(x, fused, rows=(0, size))
    up = b.linear(x, fused, rows=(size, 2 * size))
    return b.linear(b.act_mul(gate, up), f"{name}.down_proj")
