"""BERT encoders (all-MiniLM and others): post-norm layers, learned positions, full attention.

The output is the hidden state of every token; pooling is the caller's. Token types are those of a
single segment: row 0 of the token type table is added to every token.

Source: Devlin et al. 2019 (BERT), section 3; Vaswani et al. 2017, section 3.1.
"""

from __future__ import annotations

from tellin.models.plan.builder import PlanBuilder
from tellin.models.plan.ir import Buffer, Plan

UNUSED = ("pooler.", "cls.", "embeddings.position_ids")
"""Heads of BERT's own training tasks."""


def record(b: PlanBuilder) -> Plan:
    x = embeddings(b)
    for i in range(b.hparams.num_hidden_layers):
        h = attention(b, x, f"layers.{i}.self_attn")
        x = b.layer_norm(b.add(x, h), f"layers.{i}.post_attention_layernorm")
        h = mlp(b, x, f"layers.{i}.mlp")
        x = b.layer_norm(b.add(x, h), f"layers.{i}.post_feedforward_layernorm")
    return b.finish(x, hidden=x, ignore=UNUSED)


def embeddings(b: PlanBuilder) -> Buffer:
    x = b.embed("embed_tokens")
    x = b.add_position_embedding(x, "embed_positions")
    if b.has("embed_token_types.weight"):
        x = b.add_bias(x, b.weight("embed_token_types.weight", rows=(0, 1)))
    return b.layer_norm(x, "embed_layernorm")


def attention(b: PlanBuilder, x: Buffer, name: str) -> Buffer:
    q = b.linear(x, f"{name}.q_proj")
    k = b.linear(x, f"{name}.k_proj")
    v = b.linear(x, f"{name}.v_proj")
    return b.linear(b.attention(q, k, v, name=name, causal=False), f"{name}.o_proj")


def mlp(b: PlanBuilder, x: Buffer, name: str) -> Buffer:
    return b.linear(b.activation(b.linear(x, f"{name}.up_proj")), f"{name}.down_proj")
