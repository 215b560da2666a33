"""Gemma 3 (text) and EmbeddingGemma: Gemma 2's layer with q/k norms, and two rotary bases.

Source: Gemma Team 2025 (Gemma 3), section 2. Five layers with a sliding window and a base of
10,000 are followed by a global one with a larger base (``sliding_window_pattern`` 6). The tokens of
EmbeddingGemma see both sides, and its output is the hidden state of every token: what follows the
pooling of those is the caller's.
"""

from __future__ import annotations

from tellin.models.parts import UNUSED, embed_tokens, gated_mlp, lm_head
from tellin.models.plan.builder import PlanBuilder
from tellin.models.plan.ir import Buffer, Plan, RotaryTable
from tellin.models.rotary import local_rotary_table, rotary_table


def record(b: PlanBuilder) -> Plan:
    hp = b.hparams
    global_rope = rotary_table(hp, b.max_model_len)
    local_rope = local_rotary_table(hp)
    pattern = hp.sliding_window_pattern or 6
    is_causal = hp.architecture != "gemma-embedding"
    x = embed_tokens(b)
    for i in range(hp.num_hidden_layers):
        is_global = (i + 1) % pattern == 0
        rope, window = (global_rope, None) if is_global else (local_rope, hp.sliding_window)
        h = b.rms_norm(x, f"layers.{i}.input_layernorm")
        h = attention(b, h, f"layers.{i}.self_attn", rope, window, is_causal)
        x = b.add(x, b.rms_norm(h, f"layers.{i}.post_attention_layernorm"))
        h = b.rms_norm(x, f"layers.{i}.pre_feedforward_layernorm")
        h = gated_mlp(b, h, f"layers.{i}.mlp")
        x = b.add(x, b.rms_norm(h, f"layers.{i}.post_feedforward_layernorm"))
    if not is_causal:
        x = b.rms_norm(x, "norm")
        return b.finish(x, hidden=x, ignore=(*UNUSED, "dense_"))
    return lm_head(b, x)


def attention(
    b: PlanBuilder, x: Buffer, name: str, rope: RotaryTable, window: int | None, causal: bool
) -> Buffer:
    head_dim = b.hparams.head_dim
    q = b.rms_norm(b.linear(x, f"{name}.q_proj"), f"{name}.q_norm", group=head_dim)
    k = b.rms_norm(b.linear(x, f"{name}.k_proj"), f"{name}.k_norm", group=head_dim)
    v = b.linear(x, f"{name}.v_proj")
    out = b.attention(
        b.rope(q, rope), b.rope(k, rope), v, name=name, sliding_window=window, causal=causal
    )
    return b.linear(out, f"{name}.o_proj")
