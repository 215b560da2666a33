"""Gemma 4 (text): two kinds of attention layers, shared caches, and inputs to every layer.

Layers with a window and global ones differ in head width, key/value heads and rotation; keys and
values are normed, queries are not scaled. The last layers of small models read what an earlier
layer of their kind has cached; those models also give every layer a vector of its own per token,
half of it looked up, half projected from the embedding. Mixtures add their experts to a dense MLP.

Source: Gemma 4 model card and configuration (Google, 2026); formulas checked against transformers.
"""

from __future__ import annotations

from dataclasses import replace

from tellin.loading.tensors import AttentionLayer
from tellin.models.parts import embed_tokens, gated_mlp, lm_head
from tellin.models.plan.builder import PlanBuilder
from tellin.models.plan.ir import Buffer, Plan, RotaryTable
from tellin.models.rotary import local_rotary_table, rotary_table


def record(b: PlanBuilder) -> Plan:
    hp = b.hparams
    tables: dict[tuple[bool, int], RotaryTable] = {}
    caches: dict[int, int] = {}  # of the layers that have one
    x = embed_tokens(b)
    inputs = layer_inputs(b, x) if hp.per_layer_input_size else None
    for i, layer in enumerate(hp.attention_layers):
        name = f"layers.{i}"
        rope = tables.setdefault((layer.is_sliding, layer.head_dim), rotary(b, layer))
        if layer.kv_layer == i:
            caches[i] = len(caches)
        h = b.rms_norm(x, f"{name}.input_layernorm")
        h = attention(b, h, i, rope, caches)
        x = b.add(x, b.rms_norm(h, f"{name}.post_attention_layernorm"))
        h = feed_forward(b, x, name)
        x = b.add(x, b.rms_norm(h, f"{name}.post_feedforward_layernorm"))
        if inputs is not None:
            x = b.add(x, layer_input(b, x, inputs, i))
        if b.has(f"{name}.layer_scalar.weight"):
            b.scale_by_weight(x, f"{name}.layer_scalar")
    return lm_head(b, x)


def rotary(b: PlanBuilder, layer: AttentionLayer) -> RotaryTable:
    """Rotation of a layer's heads."""
    if layer.is_sliding:
        return local_rotary_table(replace(b.hparams, head_dim=layer.head_dim))
    hp = replace(b.hparams, head_dim=layer.head_dim, rope_dim=None)
    return rotary_table(hp, b.max_model_len)


def attention(
    b: PlanBuilder, x: Buffer, index: int, rope: RotaryTable, caches: dict[int, int]
) -> Buffer:
    name, layer = f"layers.{index}.self_attn", b.hparams.attention_layers[index]
    dim = layer.head_dim
    q = b.rms_norm(b.linear(x, f"{name}.q_proj"), f"{name}.q_norm", group=dim)
    q = b.rope(q, rope, dim)
    k = v = kv_layer = None
    if layer.kv_layer == index:
        keys = b.linear(x, f"{name}.k_proj")
        values = b.linear(x, f"{name}.v_proj") if layer.has_values else keys
        k = b.rope(b.rms_norm(keys, f"{name}.k_norm", group=dim), rope, dim)
        v = b.rms_norm(values, f"{name}.v_norm", group=dim, has_weight=False)
    else:
        kv_layer = caches[layer.kv_layer]
        # Checkpoints may have them, of no use.
        b.leave_out(*(f"{name}.{part}.weight" for part in ("k_proj", "v_proj", "k_norm")))
    out = b.attention(
        q,
        k,
        v,
        name=name,
        sliding_window=b.hparams.sliding_window if layer.is_sliding else None,
        head_dim=dim,
        num_kv_heads=layer.num_key_value_heads,
        kv_layer=kv_layer,
    )
    return b.linear(out, f"{name}.o_proj")


def feed_forward(b: PlanBuilder, x: Buffer, name: str) -> Buffer:
    """The dense MLP, and in mixtures the experts beside it; before the norm that follows."""
    h = gated_mlp(b, b.rms_norm(x, f"{name}.pre_feedforward_layernorm"), f"{name}.mlp")
    hp = b.hparams
    if not hp.num_experts:
        return h
    h = b.rms_norm(h, f"{name}.post_feedforward_layernorm_1")
    router = b.rms_norm(x, f"{name}.mlp.router_norm")
    b.scale(router, hp.hidden_size**-0.5)
    chosen = b.experts(
        b.rms_norm(x, f"{name}.pre_feedforward_layernorm_2"),
        b.linear(router, f"{name}.mlp.gate", bias=False),
        f"{name}.mlp",
        top_k=hp.num_experts_per_tok,
        normalize=hp.norm_topk_prob,
        scales=f"{name}.mlp.expert_scales.weight",
    )
    return b.add(h, b.rms_norm(chosen, f"{name}.post_feedforward_layernorm_2"))


def layer_inputs(b: PlanBuilder, x: Buffer) -> Buffer:
    """What every layer gets besides the residual stream: ``num_layers`` vectors side by side."""
    hp = b.hparams
    size = hp.per_layer_input_size
    width = hp.num_hidden_layers * size
    looked_up = b.embed("embed_tokens_per_layer", scale=size**0.5, width=width, rest_is_first=True)
    projected = b.scale(b.linear(x, "per_layer_model_projection"), hp.hidden_size**-0.5)
    projected = b.rms_norm(projected, "per_layer_projection_norm", group=size)
    return b.scale(b.add(projected, looked_up), 2**-0.5)


def layer_input(b: PlanBuilder, x: Buffer, inputs: Buffer, index: int) -> Buffer:
    name, size = f"layers.{index}", b.hparams.per_layer_input_size
    gate = b.linear(x, f"{name}.per_layer_input_gate", bias=False)
    h = b.act_mul(gate, inputs, up_start=index * size)
    h = b.linear(h, f"{name}.per_layer_projection", bias=False)
    return b.rms_norm(h, f"{name}.post_per_layer_input_norm")
