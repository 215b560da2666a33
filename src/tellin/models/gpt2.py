"""GPT-2 and GPT-BigCode (StarCoder): learned positions, LayerNorm, an MLP without a gate.

In most of GPT-BigCode's models all query heads share one head of keys and values. The loader parts
the matrix that makes the three, and turns GPT-2's, which are stored transposed.

Source: Radford et al. 2019 (GPT-2), section 2.3; Li et al. 2023 (StarCoder), section 5.2.
"""

from __future__ import annotations

from tellin.models.parts import embed_tokens, logits_of, plain_mlp
from tellin.models.plan.builder import PlanBuilder
from tellin.models.plan.ir import Buffer, Plan


def record(b: PlanBuilder) -> Plan:
    x = b.add_position_embedding(embed_tokens(b), "embed_positions")
    for i in range(b.hparams.num_hidden_layers):
        h = b.layer_norm(x, f"layers.{i}.input_layernorm")
        x = b.add(x, attention(b, h, f"layers.{i}.self_attn"))
        h = b.layer_norm(x, f"layers.{i}.post_attention_layernorm")
        x = b.add(x, plain_mlp(b, h, f"layers.{i}.mlp"))
    return logits_of(b, b.layer_norm(b.gather_rows(x), "norm"))


def attention(b: PlanBuilder, x: Buffer, name: str) -> Buffer:
    q, k, v = (b.linear(x, f"{name}.{part}_proj", bias=True) for part in "qkv")
    return b.linear(b.attention(q, k, v, name=name), f"{name}.o_proj", bias=True)
