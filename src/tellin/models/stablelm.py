"""StableLM: Llama's layer with LayerNorm and a quarter of each head rotated.

Of the larger models attention and MLP read the same norm, and are side by side.

Source: Bellagente et al. 2024 (Stable LM 2 1.6B), section 2.1.
"""

from __future__ import annotations

from tellin.models.parts import embed_tokens, gated_mlp, logits_of
from tellin.models.plan.builder import PlanBuilder
from tellin.models.plan.ir import Buffer, Plan, RotaryTable
from tellin.models.rotary import rotary_table


def record(b: PlanBuilder) -> Plan:
    hp = b.hparams
    rope = rotary_table(hp, b.max_model_len)
    x = embed_tokens(b)
    for i in range(hp.num_hidden_layers):
        h = b.layer_norm(x, f"layers.{i}.input_layernorm")
        x = b.add(x, attention(b, h, f"layers.{i}.self_attn", rope))
        if not hp.parallel_residual:
            h = b.layer_norm(x, f"layers.{i}.post_attention_layernorm")
        x = b.add(x, gated_mlp(b, h, f"layers.{i}.mlp"))
    return logits_of(b, b.layer_norm(b.gather_rows(x), "norm"))


def attention(b: PlanBuilder, x: Buffer, name: str, rope: RotaryTable) -> Buffer:
    bias = True if b.hparams.attention_bias else None
    q, k, v = (b.linear(x, f"{name}.{part}_proj", bias=bias) for part in "qkv")
    out = b.attention(b.rope(q, rope), b.rope(k, rope), v, name=name)
    return b.linear(out, f"{name}.o_proj")
