"""ModernBERT: pre-norm layers with rotary positions; most see a window on both sides of a token.

The output is the hidden state of every token; pooling, and the head of a classifier, are the
caller's. Layers 0, n, 2n ... (``sliding_window_pattern`` n) see the whole text and have a rotary
base of their own. The first layer has no norm of its own: the embedding's comes right before it.

Source: Warner et al. 2024 (ModernBERT), section 2.
"""

from __future__ import annotations

from tellin.models.parts import gated_mlp
from tellin.models.plan.builder import PlanBuilder
from tellin.models.plan.ir import Buffer, Plan, RotaryTable
from tellin.models.rotary import local_rotary_table, rotary_table

UNUSED = ("classifier.", "decoder.", "lm_head.")
"""Heads: of the training task, and a classifier's."""


def record(b: PlanBuilder) -> Plan:
    hp = b.hparams
    global_rope = rotary_table(hp, b.max_model_len)
    local_rope = global_rope if hp.sliding_window is None else local_rotary_table(hp)
    every = hp.sliding_window_pattern or 1
    x = b.layer_norm(b.embed("embed_tokens"), "embed_layernorm")
    for i in range(hp.num_hidden_layers):
        is_global = i % every == 0 or hp.sliding_window is None
        rope, window = (global_rope, None) if is_global else (local_rope, hp.sliding_window)
        norm = f"layers.{i}.input_layernorm"
        h = x if i == 0 and not b.has(f"{norm}.weight") else b.layer_norm(x, norm)
        x = b.add(x, attention(b, h, f"layers.{i}.self_attn", rope, window))
        h = b.layer_norm(x, f"layers.{i}.post_attention_layernorm")
        x = b.add(x, gated_mlp(b, h, f"layers.{i}.mlp"))
    x = b.layer_norm(x, "norm")
    return b.finish(x, hidden=x, ignore=UNUSED)


def attention(
    b: PlanBuilder, x: Buffer, name: str, rope: RotaryTable, window: int | None
) -> Buffer:
    q, k, v = (b.linear(x, f"{name}.{part}_proj") for part in "qkv")
    out = b.attention(
        b.rope(q, rope), b.rope(k, rope), v, name=name, sliding_window=window, causal=False
    )
    return b.linear(out, f"{name}.o_proj")
