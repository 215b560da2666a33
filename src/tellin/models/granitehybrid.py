"""Granite 4 hybrids: Mamba2 in most layers, attention without positions in some; Granite's factors.

With experts a shared MLP stands beside them, without it is the layer's only one.

Source: IBM 2025 (Granite 4.0), "Architecture"; names as in Hugging Face configurations.
"""

from __future__ import annotations

from tellin.models.parts import embed_tokens, experts_mlp, gated_mlp, lm_head, mamba2
from tellin.models.plan.builder import PlanBuilder
from tellin.models.plan.ir import Buffer, Plan, RotaryTable
from tellin.models.rotary import rotary_table


def record(b: PlanBuilder) -> Plan:
    hp = b.hparams
    rope = None if hp.no_rope_interval == 1 else rotary_table(hp, b.max_model_len)
    x = embed_tokens(b)
    for i, kind in enumerate(hp.layer_types):
        h = b.rms_norm(x, f"layers.{i}.input_layernorm")
        if kind == "mamba":
            h = mamba2(b, h, f"layers.{i}.mamba")
        else:
            h = attention(b, h, f"layers.{i}.self_attn", rope)
        x = b.add(x, b.scale(h, hp.residual_scale))
        h = b.rms_norm(x, f"layers.{i}.post_attention_layernorm")
        x = b.add(x, b.scale(mlp(b, h, f"layers.{i}.mlp"), hp.residual_scale))
    return lm_head(b, x)


def attention(b: PlanBuilder, x: Buffer, name: str, rope: RotaryTable | None) -> Buffer:
    bias = True if b.hparams.attention_bias else None
    q, k, v = (b.linear(x, f"{name}.{part}_proj", bias=bias) for part in "qkv")
    if rope is not None:
        q, k = b.rope(q, rope), b.rope(k, rope)
    return b.linear(b.attention(q, k, v, name=name), f"{name}.o_proj", bias=bias)


def mlp(b: PlanBuilder, x: Buffer, name: str) -> Buffer:
    shared = f"{name}.shared_expert"
    if b.hparams.num_experts:
        return b.add(experts_mlp(b, x, name), gated_mlp(b, x, shared))
    return gated_mlp(b, x, name if b.has(f"{name}.gate_proj.weight") else shared)
