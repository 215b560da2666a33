"""`PlanBuilder`: what it records, and what it refuses while recording."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from msgspec import structs

from tellin.exceptions import ModelLoadError, UnsupportedModelError
from tellin.loading.dequantize import dequantize
from tellin.loading.tensors import QuantType, TensorRef
from tellin.models.plan import ir
from tellin.models.plan.builder import PlanBuilder
from tellin.models.plan.ir import Rows
from tests.models.tiny import BASE, MemorySource, memory_source


def make_builder(**changes: object) -> PlanBuilder:
    hp = replace(BASE, **changes)  # type: ignore[arg-type]
    arrays = {
        "embed.weight": np.ones((hp.vocab_size, 64)),
        "positions.weight": np.ones((100, 64)),
        "square.weight": np.ones((64, 64)),
        "square.bias": np.ones(64),
        "narrow.weight": np.ones((24, 64)),
        "short.weight": np.ones((64, 64)),
        "short.bias": np.ones(63),
        "norm.weight": np.ones(64),
        "head_norm.weight": np.ones(16),
        "vector.weight": np.ones(64 * 64),
    }
    return PlanBuilder(memory_source(hp, arrays))


def test_operations_are_recorded_in_order_with_one_buffer_per_value() -> None:
    b = make_builder()
    x = b.embed("embed", scale=2.0)
    h = b.rms_norm(x, "head_norm", group=16)
    y = b.linear(h, "square")
    plan = b.finish(b.gather_rows(b.add(x, y)), ignore=("",))
    assert [type(op) for op in plan.ops] == [
        ir.Embed, ir.RmsNorm, ir.Linear, ir.Add, ir.GatherRows,
    ]  # fmt: skip
    assert [x.id for x in plan.buffers] == [0, 1, 2, 3, 4]
    assert plan.output.rows is Rows.LOGITS
    embed, norm, linear = plan.ops[:3]
    assert isinstance(embed, ir.Embed)
    assert embed.scale == 2.0
    assert isinstance(norm, ir.RmsNorm)
    assert (norm.group, norm.eps) == (16, BASE.norm_eps)
    assert isinstance(linear, ir.Linear)
    assert linear.bias is not None
    assert linear.weights == (linear.weight, linear.bias)
    assert (linear.reads, linear.writes) == ((h,), (y,))


def test_in_place_operations_read_and_write_their_buffer() -> None:
    b = make_builder()
    x = b.embed("embed")
    assert b.scale(x, 2.0) is x
    plan = b.finish(x, ignore=("",))
    assert plan.ops[1].reads == plan.ops[1].writes == (x,)


def test_bias_may_be_forbidden_or_required() -> None:
    b = make_builder()
    x = b.embed("embed")
    b.linear(x, "square", bias=False)
    with pytest.raises(ModelLoadError, match=r"narrow\.bias' is missing"):
        b.linear(x, "narrow", bias=True)
    plan = b.finish(x, ignore=("",))
    assert len(plan.ops[1].weights) == 1


@pytest.mark.parametrize("quant_type", [QuantType.F32, QuantType.Q4_1, QuantType.Q8_0])
def test_row_ranges_are_views_of_the_same_bytes(quant_type: QuantType) -> None:
    row_bytes = 2 * quant_type.block_bytes
    data = np.random.RandomState(0).randint(0, 60, 6 * row_bytes).astype(np.uint8)
    whole = TensorRef("w", (6, 2 * quant_type.block_size), quant_type, data)
    part = PlanBuilder(MemorySource(BASE, {"w": whole})).weight("w", rows=(2, 5))
    assert (part.name, part.shape) == ("w[2:5]", (3, whole.shape[1]))
    assert np.shares_memory(part.data, data)
    np.testing.assert_array_equal(dequantize(part), dequantize(whole)[2:5])


def test_row_ranges_outside_are_refused() -> None:
    with pytest.raises(ModelLoadError, match=r"'narrow\.weight' has 24 rows; rows 20 to 25"):
        make_builder().weight("narrow.weight", rows=(20, 25))


def test_shapes_that_do_not_fit_are_refused() -> None:
    b = make_builder()
    x = b.embed("embed")
    narrow = b.linear(x, "narrow")
    with pytest.raises(ModelLoadError, match=r"'square\.weight' has shape \(64, 64\).*\(n, 24\)"):
        b.linear(narrow, "square")
    with pytest.raises(ModelLoadError, match=r"'short\.bias' has shape \(63,\).*\(64,\)"):
        b.linear(x, "short")
    with pytest.raises(ModelLoadError, match=r"'vector\.weight' has shape \(4096,\)"):
        b.linear(x, "vector")
    with pytest.raises(ModelLoadError, match=r"'norm\.weight' has shape \(64,\); expected \(24,\)"):
        b.rms_norm(narrow, "norm")
    with pytest.raises(ModelLoadError, match="width 24, not a multiple of group 16"):
        b.rms_norm(narrow, "head_norm", group=16)
    with pytest.raises(ModelLoadError, match=r"embed \[tokens, 64\] and narrow \[tokens, 24\]"):
        b.add(x, narrow)
    with pytest.raises(ModelLoadError, match="cannot rotate 4 dimensions of heads of 16 in narrow"):
        b.rope(narrow, ir.RotaryTable((1.0, 0.5)))
    with pytest.raises(ModelLoadError, match="cannot rotate 18 dimensions of heads of 16"):
        b.rope(x, ir.RotaryTable((1.0,) * 9))
    with pytest.raises(ModelLoadError, match=r"'square\.bias' has shape \(64,\); expected \(24,\)"):
        b.add_bias(narrow, b.weight("square.bias"))
    with pytest.raises(ModelLoadError, match=r"100 rows; max_position_embeddings is 128"):
        b.add_position_embedding(x, "positions")


def test_operations_that_need_positions_refuse_logit_rows() -> None:
    b = make_builder(max_position_embeddings=100)
    x = b.gather_rows(b.embed("embed"))
    for record in (
        lambda: b.rope(x, ir.RotaryTable((1.0,))),
        lambda: b.attention(x, x, x, name="attention"),
        lambda: b.add_position_embedding(x, "positions"),
        lambda: b.gather_rows(x),
    ):
        with pytest.raises(ModelLoadError, match=r"one row per token; embed\.gathered has"):
            record()
    with pytest.raises(ModelLoadError, match="must have the same shape"):
        b.add(b.embed("embed"), x)


def test_kv_heads_must_divide_heads() -> None:
    b = make_builder(num_attention_heads=4, num_key_value_heads=3)
    x = b.embed("embed")
    k = structs.replace(x, width=48)
    with pytest.raises(ModelLoadError, match="4 is not a multiple of num_key_value_heads 3"):
        b.attention(x, k, k, name="attention")


def test_a_softcap_must_be_positive() -> None:
    b = make_builder()
    with pytest.raises(ModelLoadError, match="softcap is 0"):
        b.softcap(b.embed("embed"), 0.0)


def test_left_over_tensors_are_counted_and_named() -> None:
    b = make_builder()
    x = b.embed("embed")
    with pytest.raises(UnsupportedModelError, match=r"head_norm\.weight, .* and 2 more"):
        b.finish(x, ignore=("square.", "short."))
