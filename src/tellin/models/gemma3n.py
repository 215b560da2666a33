"""Gemma 3n (text): four residual streams, a learned residual beside attention, sparse MLPs.

Layers work on the first stream: each predicts all streams from what they are, computes with the
first, and corrects all by what came out. Caches are shared and layers get inputs as in Gemma 4.

Source: Gemma 3n model card (Google, 2025); Baykal et al. 2023 (alternating updates), section 3.
"""

from __future__ import annotations

import math
from functools import reduce

from tellin.models.gemma4 import attention, layer_inputs, rotary
from tellin.models.parts import embed_tokens, lm_head
from tellin.models.plan.builder import PlanBuilder
from tellin.models.plan.ir import Buffer, Plan, RotaryTable


def record(b: PlanBuilder) -> Plan:
    hp = b.hparams
    ropes: dict[bool, RotaryTable] = {}
    caches: dict[int, int] = {}
    x = embed_tokens(b)
    inputs = layer_inputs(b, x)
    names = [f"altup_projections.{i}" for i in range(hp.num_streams - 1)]
    streams = [x, *(b.match_magnitude(b.linear(x, name), x) for name in names)]
    for i, layer in enumerate(hp.attention_layers):
        rope = ropes.setdefault(layer.is_sliding, rotary(b, layer))
        if layer.kv_layer == i:
            caches[i] = len(caches)
        name = f"layers.{i}"
        predicted = predict(b, streams, name)
        h = b.rms_norm(predicted[0], f"{name}.input_layernorm")
        learned = b.linear(b.linear(h, f"{name}.laurel.linear_left"), f"{name}.laurel.linear_right")
        learned = b.add(h, b.rms_norm(learned, f"{name}.laurel.post_laurel_norm"))
        h = b.rms_norm(attention(b, h, i, rope, caches), f"{name}.post_attention_layernorm")
        x = b.scale(b.add(b.add(predicted[0], h), learned), 2**-0.5)
        h = b.rms_norm(x, f"{name}.pre_feedforward_layernorm")
        h = b.rms_norm(mlp(b, h, i), f"{name}.post_feedforward_layernorm")
        streams = correct(b, predicted, b.add(x, h), inputs, i)
    first = streams[0]
    outs = [
        b.match_magnitude(b.linear(x, f"altup_unembed_projections.{i}"), first)
        for i, x in enumerate(streams[1:])
    ]
    return lm_head(b, b.scale(reduce(b.add, outs, first), 1 / hp.num_streams))


def mixing_coefs(b: PlanBuilder, x: Buffer, name: str, what: str) -> Buffer:
    """Coefficients of a row: a linear map of what a small router says of it."""
    router = b.scale(b.rms_norm(x, f"{name}.altup.router_norm"), 1 / b.hparams.hidden_size)
    said = b.softcap(b.linear(router, f"{name}.altup.modality_router", bias=False), 1.0)  # tanh
    return b.linear(said, f"{name}.altup.{what}", bias=False)


def predict(b: PlanBuilder, streams: list[Buffer], name: str) -> list[Buffer]:
    """Every stream plus a mixture of all."""
    coefs = mixing_coefs(b, streams[0], name, "prediction_coefs")
    predicted = []
    for k, x in enumerate(streams):
        for j, y in enumerate(streams):
            x = b.add_scaled(x, y, coefs, k * len(streams) + j)
        predicted.append(x)
    return predicted


def correct(
    b: PlanBuilder, predicted: list[Buffer], x: Buffer, inputs: Buffer, index: int
) -> list[Buffer]:
    """Every stream plus its share of what the layer changed; all but the first get its input."""
    name, size = f"layers.{index}", b.hparams.per_layer_input_size
    coefs = mixing_coefs(b, x, name, "correction_coefs")

    def corrected(k: int) -> Buffer:
        h = b.add_scaled(predicted[k], x, coefs, k, offset=1.0)
        return b.add_scaled(h, predicted[0], coefs, k, offset=1.0, factor=-1.0)

    gate = b.scale_by_weight(corrected(0), f"{name}.altup.correct_output_scale")
    gate = b.linear(gate, f"{name}.per_layer_input_gate", bias=False)
    h = b.act_mul(gate, inputs, up_start=index * size)
    h = b.linear(h, f"{name}.per_layer_projection", bias=False)
    h = b.rms_norm(h, f"{name}.post_per_layer_input_norm")
    return [corrected(0), *(b.add(corrected(k), h) for k in range(1, len(predicted)))]


def mlp(b: PlanBuilder, x: Buffer, index: int) -> Buffer:
    """Gated; in sparse layers the gate keeps the largest values of each row."""
    name, deviations = f"layers.{index}.mlp", b.hparams.kept_deviations[index]
    gate, up = b.linear(x, f"{name}.gate_proj"), b.linear(x, f"{name}.up_proj")
    if deviations > -math.inf:
        b.keep_largest(gate, deviations)
    return b.linear(b.act_mul(gate, up), f"{name}.down_proj")
