"""The listing that `tellin plan` prints, and the costs it names."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from tellin.kernels.reference import ReferenceBackend
from tellin.models import build_plan
from tellin.models.plan.listing import format_plan, plan_cost
from tests.models.stepping import logits_of
from tests.models.tiny import (
    ALL_CASES,
    CASES,
    DENSE_LAYERS,
    memory_source,
    tensor_shapes,
    tiny_source,
    tiny_token_ids,
)


def test_listing_of_a_small_llama() -> None:
    text = format_plan(build_plan(tiny_source("llama_tied")))
    lines = [line.rstrip() for line in text.splitlines()]
    assert lines[0] == (
        "llama (generator): 96.7 k parameters, hidden size 64, vocabulary 64, "
        "32 operations, 9 buffers"
    )
    columns = [" ".join(line.split()) for line in lines]
    assert columns[3:16] == [
        "input",
        "0 embed b0 = W[token_ids] 256 B embed_tokens:F32[64x64]",
        "layer 0",
        "1 rms_norm b1 = norm(b0), eps 1e-05 256 B input_layernorm:F32[64]",
        "2 multi_linear b2, b3, b4 = W1 b1, W2 b1, W3 b1 8.2 k 32.8 kB "
        "self_attn.q_proj:F32[64x64] self_attn.k_proj:F32[32x64] self_attn.v_proj:F32[32x64]",
        "3 rope b2 = rotate(b2) 4 heads x 16",
        "4 rope b3 = rotate(b3) 2 heads x 16",
        "5 attention b1 = attend(b2, b3, b4) 4/2 heads, kv layer 0",
        "6 linear b0 = W b1 + b0 4.1 k 16.4 kB self_attn.o_proj:F32[64x64]",
        "7 rms_norm b1 = norm(b0), eps 1e-05 256 B post_attention_layernorm:F32[64]",
        "8 gated_linear b5 = silu(W1 b1) * (W2 b1) 12.3 k 49.2 kB "
        "mlp.gate_proj:F32[96x64] mlp.up_proj:F32[96x64]",
        "9 linear b0 = W b5 + b0 6.1 k 24.6 kB mlp.down_proj:F32[64x96]",
        "layer 1 is like layer 0",
    ]
    assert columns[-4].startswith("weights 386.8 kB: F32 386.8 kB")
    assert columns[-3] == ("per token 69.6 k multiply-accumulates, and 26.6 k per row of logits")
    assert columns[-1] == (
        "KV cache 192 values per token in 3 layers: 384 bytes as float16, 768 as float32"
    )


def test_layers_are_folded_by_kind() -> None:
    """Gemma 3's local layers are like each other, its global ones are not like them."""
    hp = replace(CASES["gemma3"], num_hidden_layers=9)
    arrays = {name: np.ones(shape) for name, shape in tensor_shapes(hp).items()}
    plan = build_plan(memory_source(hp, arrays))
    lines = [line for line in format_plan(plan).splitlines() if line.startswith("  layer")]
    assert lines == [
        "  layer 0",
        "  layer 1 is like layer 0",
        "  layer 2",
        "  layers 3-4 are like layer 0",
        "  layer 5 is like layer 2",
        "  layers 6-7 are like layer 0",
        "  layer 8",
    ]
    full = [x for x in format_plan(plan, full=True).splitlines() if x.startswith("  layer")]
    assert full == [f"  layer {i}" for i in range(9)]


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("name", ALL_CASES)
def test_every_architecture_has_a_listing(name: str, fuse: bool) -> None:
    plan = build_plan(tiny_source(name), fuse=fuse)
    lines = format_plan(plan, full=True).splitlines()
    numbers = [int(line.split()[0]) for line in lines if line[:5].strip().isdigit()]
    assert numbers == list(range(len(plan.ops)))
    assert ("whole request" in "".join(lines)) == (name == "bert")


@pytest.mark.parametrize("name", ALL_CASES)
def test_costs_count_what_is_there(name: str) -> None:
    hp = ALL_CASES[name]
    shapes = tensor_shapes(hp, DENSE_LAYERS.get(name, ()))
    sizes = {key: int(np.prod(shape)) for key, shape in shapes.items()}
    cost = plan_cost(build_plan(tiny_source(name)))
    assert cost.num_parameters == sum(sizes.values())
    assert cost.weight_bytes == 4 * cost.num_parameters
    used = Fraction(hp.num_experts_per_tok, hp.num_experts or 1)
    matrices = [
        used * v if ".experts." in k else v
        for k, v in sizes.items()
        if len(shapes[k]) == 2 and "embed" not in k
    ]
    head = sizes["embed_tokens.weight"] if hp.tie_word_embeddings else 0
    assert cost.token_macs + cost.logit_macs == sum(matrices) + head
    unfused = plan_cost(build_plan(tiny_source(name), fuse=False))
    assert unfused.token_macs + unfused.logit_macs == cost.token_macs + cost.logit_macs
    layers = 0 if name == "bert" else hp.num_hidden_layers
    values = 2 * hp.num_key_value_heads * hp.head_dim
    if hp.latent is not None:
        values = 2 * hp.latent.rank + hp.latent.rope_dim
    assert cost.kv_values_per_token == layers * values


def test_a_listing_reads_no_weights_and_changes_nothing() -> None:
    plan = build_plan(tiny_source("qwen3"))
    before = logits_of(ReferenceBackend(plan), tiny_token_ids())
    format_plan(plan)
    np.testing.assert_array_equal(logits_of(ReferenceBackend(plan), tiny_token_ids()), before)
