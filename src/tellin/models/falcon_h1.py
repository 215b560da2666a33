"""Falcon-H1: each layer has attention and Mamba2 side by side; constant factors everywhere.

Source: Falcon LLM team 2025 (Falcon-H1), section 2; the factors are those of its section 3.2.3, and
GGUF files have them in the weights.
"""

from __future__ import annotations

from tellin.models.parts import embed_tokens, lm_head, mamba2, scaled
from tellin.models.plan.builder import PlanBuilder
from tellin.models.plan.ir import Buffer, Plan, RotaryTable
from tellin.models.rotary import rotary_table


def record(b: PlanBuilder) -> Plan:
    rope = rotary_table(b.hparams, b.max_model_len)
    x = embed_tokens(b)
    for i in range(b.hparams.num_hidden_layers):
        h = b.rms_norm(x, f"layers.{i}.input_layernorm")
        name = f"layers.{i}.self_attn"
        attended = attention(b, h, name, rope)
        mixed = mamba2(b, h, f"layers.{i}.mamba")
        out = scaled(b, b.linear(attended, f"{name}.o_proj", bias=False), "self_attn.o_proj")
        x = b.add(x, b.add(mixed, out))
        h = b.rms_norm(x, f"layers.{i}.post_attention_layernorm")
        x = b.add(x, mlp(b, h, f"layers.{i}.mlp"))
    return lm_head(b, x)


def attention(b: PlanBuilder, x: Buffer, name: str, rope: RotaryTable) -> Buffer:
    q, k, v = (
        scaled(b, b.linear(x, f"{name}.{part}_proj", bias=False), f"self_attn.{part}_proj")
        for part in "qkv"
    )
    return b.attention(b.rope(q, rope), b.rope(k, rope), v, name=name)


def mlp(b: PlanBuilder, x: Buffer, name: str) -> Buffer:
    gate, up = (b.linear(x, f"{name}.{part}_proj", bias=False) for part in ("gate", "up"))
    inner = b.act_mul(scaled(b, gate, "mlp.gate_proj"), up)
    return scaled(b, b.linear(inner, f"{name}.down_proj", bias=False), "mlp.down_proj")
