"""nomic-bert and GTE: BERT's post-norm layers with rotary positions and gated MLPs.

The output is the hidden state of every token; pooling, and the head of a classifier, are the
caller's. Where the model knows texts of a pair apart, each token's type is an input of the step.

Source: Nussbaum et al. 2024 (nomic-embed), section 3; Zhang et al. 2024 (mGTE), section 2.
"""

from __future__ import annotations

from tellin.models.bert import UNUSED, token_types
from tellin.models.parts import gated_mlp
from tellin.models.plan.builder import PlanBuilder
from tellin.models.plan.ir import Buffer, Plan, RotaryTable
from tellin.models.rotary import rotary_table


def record(b: PlanBuilder) -> Plan:
    rope = rotary_table(b.hparams, b.max_model_len)
    x = b.layer_norm(token_types(b, b.embed("embed_tokens")), "embed_layernorm")
    for i in range(b.hparams.num_hidden_layers):
        h = attention(b, x, f"layers.{i}.self_attn", rope)
        x = b.layer_norm(b.add(x, h), f"layers.{i}.post_attention_layernorm")
        h = gated_mlp(b, x, f"layers.{i}.mlp")
        x = b.layer_norm(b.add(x, h), f"layers.{i}.post_feedforward_layernorm")
    return b.finish(x, hidden=x, ignore=UNUSED)


def attention(b: PlanBuilder, x: Buffer, name: str, rope: RotaryTable) -> Buffer:
    q, k, v = (b.linear(x, f"{name}.{part}_proj") for part in "qkv")
    out = b.attention(b.rope(q, rope), b.rope(k, rope), v, name=name, causal=False)
    return b.linear(out, f"{name}.o_proj")
