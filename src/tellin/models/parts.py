"""The few parts that decoder architectures share word for word: gated MLP, embedding, head.

Everything that differs between families (attention, norms, the order of a layer) is written out in
each family's own file, so that a reader never jumps.
"""

from __future__ import annotations

from tellin.exceptions import ModelLoadError
from tellin.loading.hparams import GEMMA_FAMILY
from tellin.models.plan.builder import PlanBuilder
from tellin.models.plan.ir import Buffer, Plan

UNUSED = ("lm_head.",)
"""Copies that some files carry although the head is tied to the embedding, or not wanted."""
UNUSED_WHEN_POOLING = (*UNUSED, "classifier.")
"""A classifier's head works on pooled states, after the plan."""
DRAFTS_BEFORE_NORM = ("qwen2",)
"""Whose layers that predict a further token go on from states before the last norm (MiMo)."""


def embed_tokens(b: PlanBuilder) -> Buffer:
    """Embedding of the step's token ids, with the model's scale.

    In transformers the input embeddings of Gemma's models multiply by themselves, so that their
    rows are ready; in all other families the model multiplies whatever rows it gets.
    """
    scale = b.hparams.embedding_scale
    are_ready = b.hparams.architecture in GEMMA_FAMILY
    return b.embed("embed_tokens", scale=scale, given_scale=1.0 if are_ready else scale)


def gated_mlp(b: PlanBuilder, x: Buffer, name: str) -> Buffer:
    """``down(act(gate(x)) * up(x))``. Source: Shazeer 2020 (GLU variants), eq. 6."""
    bias = True if b.hparams.mlp_bias else None
    gate = b.linear(x, f"{name}.gate_proj", bias=bias)
    up = b.linear(x, f"{name}.up_proj", bias=bias)
    return b.linear(b.act_mul(gate, up), f"{name}.down_proj", bias=bias)


def plain_mlp(b: PlanBuilder, x: Buffer, name: str) -> Buffer:
    """``down(act(up(x)))``. Source: Vaswani et al. 2017, section 3.3."""
    bias = True if b.hparams.mlp_bias else None
    up = b.linear(x, f"{name}.up_proj", bias=bias)
    return b.linear(b.activation(up), f"{name}.down_proj", bias=bias)


def squared_relu_mlp(b: PlanBuilder, x: Buffer, name: str) -> Buffer:
    """``down(relu(up(x))^2)``. Source: So et al. 2021 (Primer), section 4."""
    bias = True if b.hparams.mlp_bias else None
    up = b.linear(x, f"{name}.up_proj", bias=bias)
    return b.linear(b.act_mul(up, up, act="relu"), f"{name}.down_proj", bias=bias)


def add_deepstack(b: PlanBuilder, x: Buffer, layer: int) -> Buffer:
    """What a layer makes, at pictures' positions with the row that is meant for this layer.

    Source: Meng et al. 2024 (DeepStack), section 3.
    """
    return b.add_given(x, layer + 1) if layer < b.hparams.deepstack_layers else x


def experts_mlp(b: PlanBuilder, x: Buffer, name: str) -> Buffer:
    """Mixture of gated MLPs: each row goes through those that its router scores highest.

    A model that has a bias to choose by has it in ``{name}.selection.bias``.
    Source: Shazeer et al. 2017 (sparsely-gated mixtures), section 2.
    """
    hp = b.hparams
    router = b.linear(x, f"{name}.gate", bias=False)
    selection_bias = f"{name}.selection.bias"
    return b.experts(
        x,
        router,
        name,
        top_k=hp.num_experts_per_tok,
        normalize=hp.norm_topk_prob,
        scoring=hp.expert_scoring,
        selection_bias=selection_bias if b.has(selection_bias) else None,
        scale=hp.expert_scale,
    )


def mamba2(b: PlanBuilder, x: Buffer, name: str) -> Buffer:
    """Mamba2's layer: convolved parts go through the recurrence, then under a gate.

    Most models have a norm of what the gate gives, or of what it gets; of Falcon-H1 some.

    Source: Dao & Gu 2024 (Mamba-2), section 7.
    """
    hp = b.hparams
    mamba = hp.mamba
    if mamba is None:
        raise ValueError(f"{name}: the hyperparameters have no dimensions of Mamba2 layers")
    parts = ("z", "x", "b", "c", "dt")
    linears = [b.linear(x, f"{name}.{part}_proj") for part in parts]
    gate, values, key, query, dt = linears
    for part, out in zip(parts[1:], linears[1:], strict=True):
        scaled(b, out, f"mamba.{part}_proj")
    start = 0
    mixed = []
    for operand in (values, key, query):
        rows = (start, start + operand.width)
        mixed.append(
            b.short_conv(
                operand,
                f"{name}.conv1d",
                kernel=mamba.conv_kernel,
                act=hp.hidden_act,
                rows=rows,
            )
        )
        start += operand.width
    values, key, query = mixed
    out = b.selective_scan(
        values, key, query, dt, name,
        num_heads=mamba.num_heads, num_groups=mamba.num_groups, dt_limits=mamba.time_step_limit,
    )  # fmt: skip
    has_norm = hp.architecture != "falcon-h1" or b.has(f"{name}.norm.weight")
    group = out.width // mamba.num_groups
    if has_norm and mamba.norm_before_gate:
        out = b.rms_norm(out, f"{name}.norm", group=group, shared=False)
    out = b.act_mul(scaled(b, gate, "mamba.z_proj"), out)
    if has_norm and not mamba.norm_before_gate:
        out = b.rms_norm(out, f"{name}.norm", group=group, shared=False)
    return scaled(b, b.linear(out, f"{name}.out_proj"), "mamba.out_proj")


def scaled(b: PlanBuilder, x: Buffer, part: str) -> Buffer:
    """``x``, the output of a layer's linear ``part``, times the model's factor for it, if any."""
    factor = (b.hparams.output_scales or {}).get(part, 1.0)
    return x if factor == 1 else b.scale(x, factor)


def lm_head(b: PlanBuilder, x: Buffer) -> Plan:
    """Final norm and output matrix, for the rows whose logits are wanted; ends the plan.

    Where hidden states are wanted and no logits, it ends with the norm.
    """
    if not b.all_hidden:
        return logits_of(b, b.rms_norm(b.gather_rows(x), "norm"))
    if b.hparams.architecture in DRAFTS_BEFORE_NORM:
        return logits_of(b, b.rms_norm(b.gather_rows(x), "norm"), x)
    hidden = b.rms_norm(x, "norm")
    return logits_of(b, b.gather_rows(hidden), hidden)


def logits_of(b: PlanBuilder, last: Buffer, hidden: Buffer | None = None) -> Plan:
    """Output matrix, for rows ``last`` whose norm is made; ends the plan as `lm_head` does.

    ``hidden``: the hidden states that the plan gives, if others than ``last``.
    """
    hp = b.hparams
    hidden = hidden or last
    if b.pooling:
        return b.finish(hidden, hidden, ignore=UNUSED_WHEN_POOLING)
    logits = vocab_linear(b, last, "embed_tokens" if hp.tie_word_embeddings else "lm_head")
    if hp.logit_scale != 1:
        b.scale(logits, hp.logit_scale)
    if hp.final_logit_softcapping is not None:
        b.softcap(logits, hp.final_logit_softcapping)
    return b.finish(logits, hidden, ignore=UNUSED if hp.tie_word_embeddings else ())


def vocab_linear(b: PlanBuilder, x: Buffer, name: str) -> Buffer:
    """Logits of the whole vocabulary."""
    logits = b.linear(x, name)
    if logits.width < b.hparams.vocab_size:
        raise ModelLoadError(
            f"{b.source.path}: {name}.weight has {logits.width} rows for a vocabulary of "
            f"{b.hparams.vocab_size} tokens"
        )
    return logits
