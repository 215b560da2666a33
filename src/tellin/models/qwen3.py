"""Qwen3 (dense): Llama's layer with an RMSNorm on every head of q and k before the rotation.

Source: Yang et al. 2025 (Qwen3 technical report), section 2.
"""

from __future__ import annotations

from tellin.models.parts import add_deepstack, embed_tokens, gated_mlp, lm_head
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
        x = b.add(x, gated_mlp(b, h, f"layers.{i}.mlp"))
        x = add_deepstack(b, x, i)
    return lm_head(b, x)


def attention(b: PlanBuilder, x: Buffer, name: str, rope: RotaryTable) -> Buffer:
    head_dim = b.hparams.head_dim
    bias = True if b.hparams.attention_bias else None
    q = b.rms_norm(b.linear(x, f"{name}.q_proj", bias=bias), f"{name}.q_norm", group=head_dim)
    k = b.rms_norm(b.linear(x, f"{name}.k_proj", bias=bias), f"{name}.k_norm", group=head_dim)
    v = b.linear(x, f"{name}.v_proj", bias=bias)
    out = b.attention(
        b.rope(q, rope), b.rope(k, rope), v, name=name, sliding_window=b.hparams.sliding_window
    )
    return b.linear(out, f"{name}.o_proj", bias=bias)
