"""A layer that predicts one token more than the model: multi-token prediction.

Row t is given the model's hidden state of position t and the id of position t + 1; its logits are
those of position t + 2. Both come under a norm, one row is made of them, and a layer of the model's
kind follows, with a cache of its own. Embedding and output matrix are the model's: some files hold
copies of them for the layer. To predict another token it is given its own hidden state after the
norm, which is the plan's ``hidden``. What differs by family: whose that norm is, and which of the
two halves comes first.

Source: DeepSeek-AI 2024 (DeepSeek-V3), section 2.2; Xiaomi 2025 (MiMo), section 2.2.
"""

from __future__ import annotations

from collections.abc import Callable

from tellin.exceptions import UnsupportedModelError
from tellin.models import deepseek2, ernie4_5_moe, glm4moe, qwen2, qwen3next
from tellin.models.parts import UNUSED, embed_tokens, vocab_linear
from tellin.models.plan.builder import PlanBuilder
from tellin.models.plan.ir import Buffer, Plan, RotaryTable
from tellin.models.rotary import rotary_table

_LAYERS: dict[str, Callable[[PlanBuilder, Buffer, str, RotaryTable], Buffer]] = {
    "deepseek2": deepseek2.layer,
    "ernie4_5-moe": ernie4_5_moe.layer,
    "glm4moe": glm4moe.layer,
    "qwen2": qwen2.layer,
    "qwen35": qwen3next.layer,
    "qwen35moe": qwen3next.layer,
    "qwen3next": qwen3next.layer,
}
_HIDDEN_FIRST = ("qwen2",)
_NORM_OF_MODEL = ("ernie4_5-moe",)


def record(b: PlanBuilder) -> Plan:
    hp = b.hparams
    if hp.architecture not in _LAYERS:
        raise UnsupportedModelError(
            f"{b.source.path}: layers of architecture {hp.architecture!r} that predict further "
            f"tokens are not supported; supported are those of {', '.join(sorted(_LAYERS))}"
        )
    name = f"layers.{hp.num_hidden_layers}"
    given = b.input(hp.hidden_size)  # before the table: given rows belong to it
    halves = [
        b.rms_norm(embed_tokens(b), f"{name}.enorm"),
        b.rms_norm(given, f"{name}.hnorm"),
    ]
    if hp.architecture in _HIDDEN_FIRST:
        halves.reverse()
    x = b.linear(b.concat(*halves), f"{name}.eh_proj", bias=False)
    x = _LAYERS[hp.architecture](b, x, name, rotary_table(hp, b.max_model_len))
    is_shared = hp.architecture in _NORM_OF_MODEL
    normed = b.rms_norm(b.gather_rows(x), "norm" if is_shared else f"{name}.shared_head.norm")
    logits = vocab_linear(b, normed, "embed_tokens" if hp.tie_word_embeddings else "lm_head")
    copies = (f"{name}.embed_tokens.", f"{name}.shared_head.head.")
    return b.finish(logits, normed, ignore=("norm.", *UNUSED, *copies))
