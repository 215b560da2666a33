"""StarCoder2 and Nemotron: Llama's layer with LayerNorm and an MLP without a gate.

Nemotron's MLP squares ReLU, it rotates half of each head, and one is added to the weights of its
norms, which the loader does.

Source: Lozhkov et al. 2024 (StarCoder 2), section 6.1; Parmar et al. 2024 (Nemotron-4 15B),
section 2.
"""

from __future__ import annotations

from tellin.models.parts import embed_tokens, logits_of, plain_mlp, squared_relu_mlp
from tellin.models.plan.builder import PlanBuilder
from tellin.models.plan.ir import Buffer, Plan, RotaryTable
from tellin.models.rotary import rotary_table


def record(b: PlanBuilder) -> Plan:
    hp = b.hparams
    mlp = squared_relu_mlp if hp.architecture == "nemotron" else plain_mlp
    rope = rotary_table(hp, b.max_model_len)
    x = embed_tokens(b)
    for i in range(hp.num_hidden_layers):
        h = b.layer_norm(x, f"layers.{i}.input_layernorm")
        x = b.add(x, attention(b, h, f"layers.{i}.self_attn", rope))
        h = b.layer_norm(x, f"layers.{i}.post_attention_layernorm")
        x = b.add(x, mlp(b, h, f"layers.{i}.mlp"))
    return logits_of(b, b.layer_norm(b.gather_rows(x), "norm"))


def attention(b: PlanBuilder, x: Buffer, name: str, rope: RotaryTable) -> Buffer:
    bias = True if b.hparams.attention_bias else None
    q, k, v = (b.linear(x, f"{name}.{part}_proj", bias=bias) for part in "qkv")
    window = b.hparams.sliding_window
    out = b.attention(b.rope(q, rope), b.rope(k, rope), v, name=name, sliding_window=window)
    return b.linear(out, f"{name}.o_proj", bias=bias)
