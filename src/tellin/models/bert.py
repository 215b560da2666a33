"""BERT and RoBERTa encoders: post-norm layers, learned positions, full attention.

The output is the hidden state of every token; pooling, and the head of a classifier, are the
caller's. Where the model knows texts of a pair apart, each token's type is an input of the step.

Source: Devlin et al. 2019 (BERT), section 3; Vaswani et al. 2017, section 3.1.
"""

from __future__ import annotations

from tellin.models.plan.builder import PlanBuilder
from tellin.models.plan.ir import Buffer, Plan

UNUSED = ("pooler.", "cls.", "lm_head.", "classifier.", "embeddings.position_ids")
"""Heads: of the training tasks, and a classifier's."""


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
    return b.layer_norm(token_types(b, x), "embed_layernorm")


def token_types(b: PlanBuilder, x: Buffer) -> Buffer:
    """With the rows of the tokens' types added, if the model has any."""
    name = "embed_token_types"
    if not b.has(f"{name}.weight"):
        return x
    types = b.weight(f"{name}.weight")
    many = types.shape[0] > 1
    return b.add_token_type_embedding(x, name) if many else b.add_bias(x, types)


def attention(b: PlanBuilder, x: Buffer, name: str) -> Buffer:
    q = b.linear(x, f"{name}.q_proj")
    k = b.linear(x, f"{name}.k_proj")
    v = b.linear(x, f"{name}.v_proj")
    return b.linear(b.attention(q, k, v, name=name, causal=False), f"{name}.o_proj")


def mlp(b: PlanBuilder, x: Buffer, name: str) -> Buffer:
    return b.linear(b.activation(b.linear(x, f"{name}.up_proj")), f"{name}.down_proj")
