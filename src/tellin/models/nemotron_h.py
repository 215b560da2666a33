"""Nemotron-H and Nemotron 3: each layer is Mamba2, attention without positions, an MLP or experts.

Mamba2 models are those of Mamba2 alone.

Source: NVIDIA 2025 (Nemotron-H), section 2.1: the MLP's activation is the square of ReLU; NVIDIA
2025 (Nemotron 3), section 2: experts beside a shared one, larger models' behind a narrow matrix.
"""

from __future__ import annotations

from tellin.models.parts import embed_tokens, lm_head, mamba2, squared_relu_mlp
from tellin.models.plan.builder import PlanBuilder
from tellin.models.plan.ir import Buffer, Plan


def record(b: PlanBuilder) -> Plan:
    layers = {"full_attention": attention, "mamba": mamba, "mlp": mlp, "moe": moe}
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
    return squared_relu_mlp(b, x, f"{layer}.mlp")


def moe(b: PlanBuilder, x: Buffer, layer: str) -> Buffer:
    hp, name = b.hparams, f"{layer}.mlp"
    router = b.linear(x, f"{name}.gate", bias=False)
    has_latent = b.has(f"{name}.latent_in.weight")
    out = b.experts(
        b.linear(x, f"{name}.latent_in", bias=False) if has_latent else x,
        router,
        name,
        top_k=hp.num_experts_per_tok,
        normalize=hp.norm_topk_prob,
        scoring=hp.expert_scoring,
        selection_bias=f"{name}.selection.bias",
        scale=hp.expert_scale,
        act="relu",
        gated=False,
    )
    if has_latent:
        out = b.linear(out, f"{name}.latent_out", bias=False)
    return b.add(out, squared_relu_mlp(b, x, f"{name}.shared_expert"))
