"""gpt-oss: biased attention with sinks, every other layer with a window, and experts with biases.

Source: OpenAI 2025 (gpt-oss-120b & gpt-oss-20b model card), section 2. Layers alternate between a
sliding window and the whole context, beginning with the window.
"""

from __future__ import annotations

from tellin.models.parts import embed_tokens, lm_head
from tellin.models.plan.builder import PlanBuilder
from tellin.models.plan.ir import Buffer, Plan, RotaryTable
from tellin.models.rotary import rotary_table


def record(b: PlanBuilder) -> Plan:
    hp = b.hparams
    rope = rotary_table(hp, b.max_model_len)
    pattern = hp.sliding_window_pattern or 2
    x = embed_tokens(b)
    for i in range(hp.num_hidden_layers):
        is_global = (i + 1) % pattern == 0
        window = None if is_global else hp.sliding_window
        h = b.rms_norm(x, f"layers.{i}.input_layernorm")
        x = b.add(x, attention(b, h, f"layers.{i}.self_attn", rope, window))
        h = b.rms_norm(x, f"layers.{i}.post_attention_layernorm")
        x = b.add(x, mlp(b, h, f"layers.{i}.mlp"))
    return lm_head(b, x)


def attention(
    b: PlanBuilder, x: Buffer, name: str, rope: RotaryTable, window: int | None
) -> Buffer:
    q = b.rope(b.linear(x, f"{name}.q_proj", bias=True), rope)
    k = b.rope(b.linear(x, f"{name}.k_proj", bias=True), rope)
    v = b.linear(x, f"{name}.v_proj", bias=True)
    out = b.attention(q, k, v, name=name, sliding_window=window, has_sinks=True)
    return b.linear(out, f"{name}.o_proj", bias=True)


def mlp(b: PlanBuilder, x: Buffer, name: str) -> Buffer:
    """Softmax over the chosen experts' logits: what normalised shares of all come to."""
    router = b.linear(x, f"{name}.gate", bias=True)
    top_k = b.hparams.num_experts_per_tok
    return b.experts(x, router, name, top_k=top_k, normalize=True, needs_biases=True)
