"""LFM2, dense and with experts: most layers are short convolutions between two gates.

Source: Liquid AI 2025 (LFM2 technical report), section 2: of the in-projection's three parts one
gates what the convolution sees, one what it gives.
"""

from __future__ import annotations

from tellin.models.parts import embed_tokens, experts_mlp, gated_mlp, lm_head
from tellin.models.plan.builder import PlanBuilder
from tellin.models.plan.ir import Buffer, Plan, RotaryTable
from tellin.models.rotary import rotary_table


def record(b: PlanBuilder) -> Plan:
    rope = rotary_table(b.hparams, b.max_model_len)
    x = embed_tokens(b)
    for i, kind in enumerate(b.hparams.layer_types):
        h = b.rms_norm(x, f"layers.{i}.input_layernorm")
        if kind == "conv":
            x = b.add(x, gated_conv(b, h, f"layers.{i}.conv"))
        else:
            x = b.add(x, attention(b, h, f"layers.{i}.self_attn", rope))
        h = b.rms_norm(x, f"layers.{i}.post_attention_layernorm")
        x = b.add(x, mlp(b, h, f"layers.{i}.mlp"))
    return lm_head(b, x)


def gated_conv(b: PlanBuilder, x: Buffer, name: str) -> Buffer:
    gate, values = (b.linear(x, f"{name}.{part}_proj", bias=False) for part in "bx")
    mixed = b.short_conv(b.mul(gate, values), f"{name}.conv", kernel=b.hparams.conv_kernel)
    # Here, not before: in the last layer it is computed for the rows alone that are wanted.
    gate = b.linear(x, f"{name}.c_proj", bias=False)
    return b.linear(b.mul(gate, mixed), f"{name}.out_proj", bias=False)


def attention(b: PlanBuilder, x: Buffer, name: str, rope: RotaryTable) -> Buffer:
    head_dim = b.hparams.head_dim
    q, k, v = (b.linear(x, f"{name}.{part}_proj", bias=False) for part in "qkv")
    q = b.rope(b.rms_norm(q, f"{name}.q_norm", group=head_dim), rope)
    k = b.rope(b.rms_norm(k, f"{name}.k_norm", group=head_dim), rope)
    return b.linear(b.attention(q, k, v, name=name), f"{name}.o_proj", bias=False)


def mlp(b: PlanBuilder, x: Buffer, name: str) -> Buffer:
    """The first layers of a mixture are dense."""
    if b.has(f"{name}.gate.weight"):
        return experts_mlp(b, x, name)
    return gated_mlp(b, x, name)
