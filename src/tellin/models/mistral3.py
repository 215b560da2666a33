"""Ministral 3 and later text models of Mistral's: Llama's layer, queries sharpened far out.

Beyond the context of training, which YaRN extends, queries grow with the logarithm of their
position, so that attention stays as sharp among more positions.

Source: Mistral AI 2025 (Ministral 3), its published configurations.
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
        x = b.add(x, gated_mlp(b, h, f"layers.{i}.mlp"))
    return lm_head(b, x)


def attention(b: PlanBuilder, x: Buffer, name: str, rope: RotaryTable) -> Buffer:
    hp = b.hparams
    bias = True if hp.attention_bias else None
    q = b.rope(b.linear(x, f"{name}.q_proj", bias=bias), rope)
    k = b.rope(b.linear(x, f"{name}.k_proj", bias=bias), rope)
    v = b.linear(x, f"{name}.v_proj", bias=bias)
    if hp.query_temperature is not None:
        q = b.scale_by_position(q, *hp.query_temperature)
    out = b.attention(q, k, v, name=name, sliding_window=hp.sliding_window)
    return b.linear(out, f"{name}.o_proj", bias=bias)
