"""Mixtral: Mistral's layer with a mixture of experts for the MLP.

Source: Jiang et al. 2024 (Mixtral of Experts), section 2.1: softmax over the chosen experts' router
logits, which is what the softmax over all, divided by its sum over the chosen, comes to.
"""

from __future__ import annotations

from tellin.models.parts import embed_tokens, experts_mlp, lm_head
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
        x = b.add(x, experts_mlp(b, h, f"layers.{i}.mlp"))
    return lm_head(b, x)


def attention(b: PlanBuilder, x: Buffer, name: str, rope: RotaryTable) -> Buffer:
    q = b.rope(b.linear(x, f"{name}.q_proj", bias=False), rope)
    k = b.rope(b.linear(x, f"{name}.k_proj", bias=False), rope)
    v = b.linear(x, f"{name}.v_proj", bias=False)
    out = b.attention(q, k, v, name=name, sliding_window=b.hparams.sliding_window)
    return b.linear(out, f"{name}.o_proj", bias=False)
