"""DeepSeek-V2 and V3, Kimi K2, GLM-4.7-Flash: latent attention, and experts beside a shared one.

Keys and values of all heads come from one latent per token, which is all that the cache holds. The
matrix that would make keys of it goes into the queries, the one for values behind the attention:
prompts and answers are computed in this one form, so chunks of any size give the same bits. The
first layers are dense.

Source: DeepSeek-AI 2024 (DeepSeek-V2), sections 2.1 and 2.2; DeepSeek-V3, section 2.1.
"""

from __future__ import annotations

from tellin.exceptions import ModelLoadError
from tellin.models.parts import embed_tokens, experts_mlp, gated_mlp, lm_head
from tellin.models.plan.builder import PlanBuilder
from tellin.models.plan.ir import Buffer, Plan, RotaryTable
from tellin.models.rotary import rotary_table

LATENT_EPS = 1e-6
"""Of the norms of latents, whatever that of other norms is."""


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
    latent = b.hparams.latent
    if latent is None:
        raise ModelLoadError(f"{b.source.path}: the dimensions of latent attention are missing")
    rank, rope_dim = latent.rank, latent.rope_dim
    q = b.rope(queries(b, x, name), rope, offset=latent.nope_dim)
    q = b.head_linear(q, f"{name}.k_b_proj", rank)
    kv_a = f"{name}.kv_a_proj_with_mqa"
    c = b.linear_rows(x, kv_a, (0, rank))
    c = b.rms_norm(c, f"{name}.kv_a_layernorm", eps=LATENT_EPS)
    rotated = b.rope(b.linear_rows(x, kv_a, (rank, rank + rope_dim)), rope, head_dim=rope_dim)
    k = b.concat(c, rotated)
    out = b.attention(q, k, c, name=name, num_kv_heads=1, head_dim=rank + rope_dim, value_dim=rank)
    out = b.head_linear(out, f"{name}.v_b_proj", latent.value_dim)
    return b.linear(out, f"{name}.o_proj", bias=False)


def queries(b: PlanBuilder, x: Buffer, name: str) -> Buffer:
    """Queries of all heads, in large models by a latent of their own."""
    if b.has(f"{name}.q_proj.weight"):
        return b.linear(x, f"{name}.q_proj", bias=False)
    c = b.linear(x, f"{name}.q_a_proj", bias=False)
    c = b.rms_norm(c, f"{name}.q_a_layernorm", eps=LATENT_EPS)
    return b.linear(c, f"{name}.q_b_proj", bias=False)


def mlp(b: PlanBuilder, x: Buffer, name: str) -> Buffer:
    if b.has(f"{name}.gate_proj.weight"):
        return gated_mlp(b, x, name)
    out = experts_mlp(b, x, name)
    if not b.has(f"{name}.shared_expert.gate_proj.weight"):
        return out
    return b.add(out, gated_mlp(b, x, f"{name}.shared_expert"))
