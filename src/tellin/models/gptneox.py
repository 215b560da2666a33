"""GPT-NeoX and Pythia, GPT-J, Phi 1 to 2, Falcon: attention and MLP side by side, part of each head
rotated.

Both read a norm of the layer's input, GPT-J, Phi and the small Falcon the same one, and their
outputs are added to it. Layers of GPT-NeoX and Falcon may also be one after the other.

Source: Wang & Komatsuzaki 2021 (GPT-J); Black et al. 2022 (GPT-NeoX-20B), section 2.1; Almazrouei
et al. 2023 (Falcon), section 4; Gunasekar et al. 2023 (phi-1), section 2.3.
"""

from __future__ import annotations

from tellin.models.parts import embed_tokens, logits_of, plain_mlp
from tellin.models.plan.builder import PlanBuilder
from tellin.models.plan.ir import Buffer, Plan, RotaryTable
from tellin.models.rotary import rotary_table


def record(b: PlanBuilder) -> Plan:
    hp = b.hparams
    rope = rotary_table(hp, b.max_model_len)
    x = embed_tokens(b)
    for i in range(hp.num_hidden_layers):
        mlp, second_norm = f"layers.{i}.mlp", f"layers.{i}.post_attention_layernorm"
        h = b.layer_norm(x, f"layers.{i}.input_layernorm")
        attended = b.add(x, attention(b, h, f"layers.{i}.self_attn", rope))
        if not hp.parallel_residual:
            h = b.layer_norm(attended, second_norm)
        elif b.has(f"{second_norm}.weight"):
            h = b.layer_norm(x, second_norm)
        x = b.add(attended, plain_mlp(b, h, mlp))
    return logits_of(b, b.layer_norm(b.gather_rows(x), "norm"))


def attention(b: PlanBuilder, x: Buffer, name: str, rope: RotaryTable) -> Buffer:
    bias = True if b.hparams.attention_bias else None
    q, k, v = (b.linear(x, f"{name}.{part}_proj", bias=bias) for part in "qkv")
    out = b.attention(b.rope(q, rope), b.rope(k, rope), v, name=name)
    return b.linear(out, f"{name}.o_proj", bias=bias)
