"""Llama and its relatives: pre-norm decoder, grouped-query attention, rotary positions, gated MLP.

Covers Llama 1-3, SmolLM2, Mistral (sliding window), Phi-3 (longrope; the loader reads its fused
matrices as row ranges), Gemma 1 (scaled embedding, GeGLU) and dense ERNIE 4.5 (neighbouring pairs):
what differs is in the hyperparameters. Biases are used where the model has them.

Source: Touvron et al. 2023 (LLaMA), section 2.2; Jiang et al. 2023 (Mistral 7B), section 2.
"""

from __future__ import annotations

from tellin.models.parts import embed_tokens, gated_mlp, lm_head
from tellin.models.plan.builder import PlanBuilder
from tellin.models.plan.ir import Buffer, Plan, RotaryTable
from tellin.models.rotary import rotary_table


def record(b: PlanBuilder) -> Plan:
    rope = rotary_table(b.hparams, b.max_model_len)
    x = embed_tokens(b)
    for i in range(b.hparams.num_hidden_layers):
        h = b.rms_norm(x, f"layers.{i}.input_layernorm")
        x = b.add(x, attention(b, h, f"layers.{i}.self_attn", rope))
        h = b.rms_norm(x, f"layers.{i}.post_attention_layernorm")
        x = b.add(x, gated_mlp(b, h, f"layers.{i}.mlp"))
    return lm_head(b, x)


def attention(b: PlanBuilder, x: Buffer, name: str, rope: RotaryTable) -> Buffer:
    bias = True if b.hparams.attention_bias else None
    q = b.rope(b.linear(x, f"{name}.q_proj", bias=bias), rope)
    k = b.rope(b.linear(x, f"{name}.k_proj", bias=bias), rope)
    v = b.linear(x, f"{name}.v_proj", bias=bias)
    out = b.attention(q, k, v, name=name, sliding_window=b.hparams.sliding_window)
    return b.linear(out, f"{name}.o_proj", bias=bias)
