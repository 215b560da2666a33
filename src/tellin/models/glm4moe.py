"""GLM-4.5 and GLM-4.5-Air: half of each head rotated; experts scored by sigmoids, and a shared one.

The first layers are dense. A bias per expert takes part in the choice, not in the sum.

dots.llm1 is like GLM-4.5, with all of each head rotated.

Source: GLM-4.5 team 2025 (GLM-4.5), section 2.1; rednote-hilab 2025 (dots.llm1), its published
configuration.
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
        x = layer(b, x, f"layers.{i}", rope)
    return lm_head(b, x)


def layer(b: PlanBuilder, x: Buffer, name: str, rope: RotaryTable) -> Buffer:
    h = b.rms_norm(x, f"{name}.input_layernorm")
    x = b.add(x, attention(b, h, f"{name}.self_attn", rope))
    h = b.rms_norm(x, f"{name}.post_attention_layernorm")
    return b.add(x, mlp(b, h, f"{name}.mlp"))


def attention(b: PlanBuilder, x: Buffer, name: str, rope: RotaryTable) -> Buffer:
    head_dim = b.hparams.head_dim
    q, k, v = (b.linear(x, f"{name}.{part}_proj") for part in "qkv")
    if b.has(f"{name}.q_norm.weight"):  # GLM-4.5, not Air
        q = b.rms_norm(q, f"{name}.q_norm", group=head_dim)
        k = b.rms_norm(k, f"{name}.k_norm", group=head_dim)
    out = b.attention(b.rope(q, rope), b.rope(k, rope), v, name=name)
    return b.linear(out, f"{name}.o_proj", bias=False)


def mlp(b: PlanBuilder, x: Buffer, name: str) -> Buffer:
    if b.has(f"{name}.gate_proj.weight"):
        return gated_mlp(b, x, name)
    return b.add(experts_mlp(b, x, name), gated_mlp(b, x, f"{name}.shared_expert"))
