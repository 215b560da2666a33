"""SmolLM3: Llama's layer; every n-th one (``no_rope_interval``) leaves q and k unrotated.

Source: Bakouch et al. 2025 (SmolLM3), "Architecture"; Yang et al. 2025 (RoPE to NoPE), section 3.
"""

from __future__ import annotations

from tellin.models.parts import embed_tokens, gated_mlp, lm_head
from tellin.models.plan.builder import PlanBuilder
from tellin.models.plan.ir import Buffer, Plan, RotaryTable
from tellin.models.rotary import rotary_table


def record(b: PlanBuilder) -> Plan:
    hp = b.hparams
    rope = rotary_table(hp, b.max_model_len)
    x = embed_tokens(b)
    for i in range(hp.num_hidden_layers):
        rotates = hp.no_rope_interval is None or (i + 1) % hp.no_rope_interval != 0
        h = b.rms_norm(x, f"layers.{i}.input_layernorm")
        x = b.add(x, attention(b, h, f"layers.{i}.self_attn", rope if rotates else None))
        h = b.rms_norm(x, f"layers.{i}.post_attention_layernorm")
        x = b.add(x, gated_mlp(b, h, f"layers.{i}.mlp"))
    return lm_head(b, x)


def attention(b: PlanBuilder, x: Buffer, name: str, rope: RotaryTable | None) -> Buffer:
    bias = True if b.hparams.attention_bias else None
    q = b.linear(x, f"{name}.q_proj", bias=bias)
    k = b.linear(x, f"{name}.k_proj", bias=bias)
    v = b.linear(x, f"{name}.v_proj", bias=bias)
    if rope is not None:
        q, k = b.rope(q, rope), b.rope(k, rope)
    return b.linear(b.attention(q, k, v, name=name), f"{name}.o_proj", bias=bias)
