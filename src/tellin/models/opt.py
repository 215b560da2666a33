"""OPT: learned positions from the table's third row on, ReLU, embeddings that may be narrower.

The model of 350 million parameters has its norms after attention and MLP, of the sums, and none at
the end; its embedding is half as wide as its layers, with a matrix from it and one back.

Source: Zhang et al. 2022 (OPT), section 2.1.
"""

from __future__ import annotations

from tellin.models.parts import logits_of, plain_mlp
from tellin.models.plan.builder import PlanBuilder
from tellin.models.plan.ir import Buffer, Plan


def record(b: PlanBuilder) -> Plan:
    hp = b.hparams
    layer = layer_with_norms_after if hp.has_norms_after else layer_with_norms_before
    is_narrow = hp.embedding_size not in (None, hp.hidden_size)
    x = b.embed("embed_tokens", width=hp.embedding_size)
    if is_narrow:
        x = b.linear(x, "project_in", bias=False)
    x = b.add_position_embedding(x, "embed_positions")
    for i in range(hp.num_hidden_layers):
        x = layer(b, x, f"layers.{i}")
    x = b.gather_rows(x)
    if not hp.has_norms_after:
        x = b.layer_norm(x, "norm")
    return logits_of(b, b.linear(x, "project_out", bias=False) if is_narrow else x)


def layer_with_norms_before(b: PlanBuilder, x: Buffer, name: str) -> Buffer:
    h = b.layer_norm(x, f"{name}.input_layernorm")
    x = b.add(x, attention(b, h, f"{name}.self_attn"))
    h = b.layer_norm(x, f"{name}.post_attention_layernorm")
    return b.add(x, plain_mlp(b, h, f"{name}.mlp"))


def layer_with_norms_after(b: PlanBuilder, x: Buffer, name: str) -> Buffer:
    h = b.add(x, attention(b, x, f"{name}.self_attn"))
    x = b.layer_norm(h, f"{name}.input_layernorm")
    h = b.add(x, plain_mlp(b, x, f"{name}.mlp"))
    return b.layer_norm(h, f"{name}.post_attention_layernorm")


def attention(b: PlanBuilder, x: Buffer, name: str) -> Buffer:
    bias = True if b.hparams.attention_bias else None
    q, k, v = (b.linear(x, f"{name}.{part}_proj", bias=bias) for part in "qkv")
    return b.linear(b.attention(q, k, v, name=name), f"{name}.o_proj", bias=bias)
