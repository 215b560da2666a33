"""Granite 3, dense and with experts: Llama's layer with four constant factors.

The factors: of the embedding, of q·k (``attention_scale``), of what each block adds to the residual
stream, and of the logits.

Source: IBM 2024 (Granite 3.0 language models), section 2; names as in Hugging Face configurations.
"""

from __future__ import annotations

from tellin.models.parts import embed_tokens, experts_mlp, gated_mlp, lm_head
from tellin.models.plan.builder import PlanBuilder
from tellin.models.plan.ir import Buffer, Plan, RotaryTable
from tellin.models.rotary import rotary_table


def record(b: PlanBuilder) -> Plan:
    hp = b.hparams
    rope = rotary_table(hp, b.max_model_len)
    mlp = experts_mlp if hp.num_experts else gated_mlp
    x = embed_tokens(b)
    for i in range(hp.num_hidden_layers):
        h = b.rms_norm(x, f"layers.{i}.input_layernorm")
        h = attention(b, h, f"layers.{i}.self_attn", rope)
        x = b.add(x, b.scale(h, hp.residual_scale))
        h = b.rms_norm(x, f"layers.{i}.post_attention_layernorm")
        x = b.add(x, b.scale(mlp(b, h, f"layers.{i}.mlp"), hp.residual_scale))
    return lm_head(b, x)


def attention(b: PlanBuilder, x: Buffer, name: str, rope: RotaryTable) -> Buffer:
    bias = True if b.hparams.attention_bias else None
    q = b.rope(b.linear(x, f"{name}.q_proj", bias=bias), rope)
    k = b.rope(b.linear(x, f"{name}.k_proj", bias=bias), rope)
    v = b.linear(x, f"{name}.v_proj", bias=bias)
    return b.linear(b.attention(q, k, v, name=name), f"{name}.o_proj", bias=bias)
