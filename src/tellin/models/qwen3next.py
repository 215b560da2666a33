"""Qwen3-Next and Qwen3.5: layers of linear attention, and among them some of gated attention.

Linear attention keeps a state of fixed size instead of keys and values (the gated delta rule).
Attention rotates a part of each head, and multiplies its output by the sigmoid of a gate. Behind
both comes a gated MLP, or experts with one that every token goes through.

Source: Yang et al. 2024 (Gated Delta Networks), section 3.4; Qwen team 2025 (Qwen3-Next).
"""

from __future__ import annotations

from tellin.exceptions import ModelLoadError
from tellin.models.parts import embed_tokens, experts_mlp, gated_mlp, lm_head
from tellin.models.plan.builder import PlanBuilder
from tellin.models.plan.ir import Buffer, Plan, RotaryTable
from tellin.models.rotary import rotary_table


def record(b: PlanBuilder) -> Plan:
    rope = rotary_table(b.hparams, b.max_model_len)
    x = embed_tokens(b)
    for i, kind in enumerate(b.hparams.layer_types):
        x = layer(b, x, f"layers.{i}", rope, kind)
    return lm_head(b, x)


def layer(
    b: PlanBuilder, x: Buffer, name: str, rope: RotaryTable, kind: str = "full_attention"
) -> Buffer:
    h = b.rms_norm(x, f"{name}.input_layernorm")
    if kind == "full_attention":
        x = b.add(x, attention(b, h, f"{name}.self_attn", rope))
    else:
        x = b.add(x, linear_attention(b, h, f"{name}.linear_attn"))
    h = b.rms_norm(x, f"{name}.post_attention_layernorm")
    return b.add(x, mlp(b, h, f"{name}.mlp"))


def attention(b: PlanBuilder, x: Buffer, name: str, rope: RotaryTable) -> Buffer:
    head_dim = b.hparams.head_dim
    bias = True if b.hparams.attention_bias else None
    q = b.rms_norm(b.linear(x, f"{name}.q_proj", bias=bias), f"{name}.q_norm", group=head_dim)
    k = b.rms_norm(b.linear(x, f"{name}.k_proj", bias=bias), f"{name}.k_norm", group=head_dim)
    v = b.linear(x, f"{name}.v_proj", bias=bias)
    gate = b.linear(x, f"{name}.gate_proj", bias=bias)
    out = b.attention(b.rope(q, rope), b.rope(k, rope), v, name=name)
    return b.linear(b.act_mul(gate, out, "sigmoid"), f"{name}.o_proj", bias=bias)


def linear_attention(b: PlanBuilder, x: Buffer, name: str) -> Buffer:
    linear = b.hparams.linear_attention
    if linear is None:
        raise ModelLoadError(f"{b.source.path}: the dimensions of linear attention are missing")
    q, k, v, z, decay, beta = (b.linear(x, f"{name}.in_proj_{part}") for part in "qkvzab")
    mixed = []
    start = 0
    for part in (q, k, v):
        rows = (start, start + part.width)
        mixed.append(
            b.short_conv(
                part,
                f"{name}.conv1d",
                kernel=linear.conv_kernel,
                act=b.hparams.hidden_act,
                rows=rows,
            )
        )
        start += part.width
    q, k, v = mixed
    out = b.gated_delta(
        q, k, v, decay, beta, name,
        num_k_heads=linear.num_key_heads, num_v_heads=linear.num_value_heads,
        tiled=linear.is_tiled,
    )  # fmt: skip
    normed = b.rms_norm(out, f"{name}.norm", group=linear.value_head_dim, weight_offset=0.0)
    return b.linear(b.act_mul(z, normed, "silu"), f"{name}.out_proj")


def mlp(b: PlanBuilder, x: Buffer, name: str) -> Buffer:
    if b.has(f"{name}.gate_proj.weight"):
        return gated_mlp(b, x, name)
    gate = b.linear(x, f"{name}.shared_expert_gate", bias=False)
    shared = b.gate_rows(gated_mlp(b, x, f"{name}.shared_expert"), gate)
    return b.add(experts_mlp(b, x, name), shared)
