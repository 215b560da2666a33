"""Nemotron-H: each layer is one of Mamba2, attention without positions, and a plain MLP.

Source: NVIDIA 2025 (Nemotron-H), section 2.1: the MLP's activation is the square of ReLU.
"""

from __future__ import annotations

from tellin.models.parts import embed_tokens, lm_head, mamba2
from tellin.models.plan.builder import PlanBuilder
from tellin.models.plan.ir import Buffer, Plan


def record(b: PlanBuilder) -> Plan:
    layers = {"full_attention": attention, "mamba": mamba, "mlp": mlp}
    x = embed_tokens(b)
    for i, kind in enumerate(b.hparams.layer_types):
        h = b.rms_norm(x, f"layers.{i}.input_layernorm")
        x = b.add(x, layers[kind](b, h, f"layers.{i}"))
    return lm_head(b, x)


def attention(b: PlanBuilder, x: Buffer, layer: str) -> Buffer:
    name = f"{layer}.self_attn"
    q, k, v = (b.linear(x, f"{name}.{part}_proj", bias=False) for part in "qkv")
    return b.linear(b.attention(q, k, v, name=name), f"{name}.o_proj", bias=False)


def mamba(b: PlanBuilder, x: Buffer, layer: str) -> Buffer:
    return mamba2(b, x, f"{layer}.mamba")


def mlp(b: PlanBuilder, x: Buffer, layer: str) -> Buffer:
    up = b.linear(x, f"{layer}.mlp.up_proj", bias=False)
    return b.linear(b.act_mul(up, up, act="relu"), f"{layer}.mlp.down_proj", bias=False)
