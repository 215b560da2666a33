"""OLMoE: a mixture of experts in every layer, an RMSNorm over all of q and over all of k.

MiniMax-M2 is like it: half of each head is rotated, experts are scored by sigmoids and chosen with
a bias.

Source: Muennighoff et al. 2024 (OLMoE), section 2 and table 10; MiniMax 2025 (MiniMax-M2), its
published configuration.
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
    bias = True if b.hparams.attention_bias else None
    q = b.rms_norm(b.linear(x, f"{name}.q_proj", bias=bias), f"{name}.q_norm")
    k = b.rms_norm(b.linear(x, f"{name}.k_proj", bias=bias), f"{name}.k_norm")
    v = b.linear(x, f"{name}.v_proj", bias=bias)
    out = b.attention(b.rope(q, rope), b.rope(k, rope), v, name=name)
    return b.linear(out, f"{name}.o_proj", bias=bias)
