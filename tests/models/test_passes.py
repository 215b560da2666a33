"""Fusion passes: what each one does to a small plan, and what it must leave alone."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from msgspec import structs

from tellin.kernels.reference import ReferenceBackend
from tellin.models import build_plan
from tellin.models.plan import ir, passes
from tellin.models.plan.builder import PlanBuilder
from tellin.models.plan.ir import Buffer, Plan, Rows
from tests.models.stepping import logits_of
from tests.models.tiny import ALL_CASES, BASE, CASES, memory_source, tiny_source, tiny_token_ids

WIDTH = BASE.hidden_size


def small_builder() -> PlanBuilder:
    """Matrices a to d and a norm over a width of 64."""
    random = np.random.RandomState(3)
    arrays = {f"{name}.weight": random.randn(WIDTH, WIDTH) / 8 for name in "abcd"}
    arrays |= {"embed.weight": random.randn(BASE.vocab_size, WIDTH), "norm.weight": np.ones(WIDTH)}
    arrays |= {"a.bias": random.randn(WIDTH)}
    return PlanBuilder(memory_source(BASE, arrays))


def finish(b: PlanBuilder, output: Buffer) -> Plan:
    return b.finish(output, ignore=("a.", "b.", "c.", "d.", "norm.", "embed."))


def kinds(plan: Plan) -> list[str]:
    return [type(op).__name__ for op in plan.ops]


def assert_same_values(before: Plan, after: Plan) -> None:
    """Equal outputs, bit for bit."""
    token_ids = tiny_token_ids(5)
    np.testing.assert_array_equal(
        logits_of(ReferenceBackend(before), token_ids),
        logits_of(ReferenceBackend(after), token_ids),
    )


def test_gate_and_up_become_a_gated_linear() -> None:
    b = small_builder()
    x = b.embed("embed")
    plan = finish(b, b.linear(b.act_mul(b.linear(x, "a"), b.linear(x, "b")), "c"))
    fused = passes.fuse_gated_linears(plan)
    assert kinds(fused) == ["Embed", "GatedLinear", "Linear"]
    gated = fused.ops[1]
    assert isinstance(gated, ir.GatedLinear)
    assert (gated.gate.name, gated.up.name, gated.act) == ("a.weight", "b.weight", "silu")
    assert gated.gate_bias is not None
    assert gated.up_bias is None
    assert_same_values(plan, fused)


def test_gate_and_up_of_different_inputs_stay_apart() -> None:
    b = small_builder()
    x = b.embed("embed")
    plan = finish(b, b.act_mul(b.linear(x, "a"), b.linear(b.rms_norm(x, "norm"), "b")))
    assert passes.fuse_gated_linears(plan).ops == plan.ops


def test_a_gate_that_somebody_else_reads_stays() -> None:
    b = small_builder()
    x = b.embed("embed")
    gate = b.linear(x, "a")
    plan = finish(b, b.add(gate, b.act_mul(gate, b.linear(x, "b"))))
    assert passes.fuse_gated_linears(plan).ops == plan.ops


def test_a_gate_used_as_its_own_up_stays() -> None:
    b = small_builder()
    gate = b.linear(b.embed("embed"), "a")
    plan = finish(b, b.act_mul(gate, gate))
    assert passes.fuse_gated_linears(plan).ops == plan.ops


def test_an_input_changed_in_between_prevents_fusion() -> None:
    """In-place operations after a linear read its input: moving it past them would change it."""
    b = small_builder()
    x = b.embed("embed")
    gate, up = b.linear(x, "a"), b.linear(x, "b")
    b.scale(x, 2.0)
    plan = finish(b, b.add(x, b.act_mul(gate, up)))
    for run_pass in (passes.fuse_gated_linears, passes.fuse_multi_linears):
        assert run_pass(plan).ops == plan.ops


@pytest.mark.parametrize("linear_first", [True, False])
def test_an_add_becomes_the_residual_of_its_linear(linear_first: bool) -> None:
    b = small_builder()
    x = b.embed("embed")
    y = b.linear(b.rms_norm(x, "norm"), "a")
    plan = finish(b, b.add(y, x) if linear_first else b.add(x, y))
    fused = passes.fuse_residuals(plan)
    assert kinds(fused) == ["Embed", "RmsNorm", "Linear"]
    linear = fused.ops[2]
    assert isinstance(linear, ir.Linear)
    assert linear.residual is not None
    assert linear.residual.name == "embed"
    assert_same_values(plan, fused)


def test_a_linear_that_is_also_the_output_keeps_its_add() -> None:
    b = small_builder()
    x = b.embed("embed")
    y = b.linear(x, "a")
    b.add(x, y)
    plan = finish(b, y)
    assert passes.fuse_residuals(plan).ops == plan.ops


def test_a_sum_with_itself_is_left_alone() -> None:
    b = small_builder()
    y = b.linear(b.embed("embed"), "a")
    plan = finish(b, b.add(y, y))
    assert passes.fuse_residuals(plan).ops == plan.ops


def test_linears_of_one_input_become_one_operation() -> None:
    b = small_builder()
    x = b.embed("embed")
    q, k = b.linear(x, "a"), b.linear(x, "b")
    plan = finish(b, b.add(b.linear(q, "d"), b.add(k, b.linear(x, "c"))))
    fused = passes.fuse_multi_linears(plan)
    assert kinds(fused) == ["Embed", "MultiLinear", "Linear", "Add", "Add"]
    multi = fused.ops[1]
    assert isinstance(multi, ir.MultiLinear)
    assert [weight.name for weight, _, _ in multi.parts] == ["a.weight", "b.weight", "c.weight"]
    assert [bias is None for _, bias, _ in multi.parts] == [False, True, True]
    assert_same_values(plan, fused)


def test_gather_moves_above_rowwise_work() -> None:
    """Everything after the last attention runs on logit rows; keys and values do not."""
    plan = build_plan(tiny_source("llama"), fuse=False)
    moved = passes.gather_early(plan)
    last_attention = max(i for i, op in enumerate(moved.ops) if isinstance(op, ir.Attention))
    for i, op in enumerate(moved.ops):
        expected = Rows.LOGITS if i > last_attention else Rows.TOKENS
        assert {x.rows for x in op.writes} == {expected}
    assert kinds(moved).count("GatherRows") == 2
    assert_same_values(plan, moved)


def test_gather_of_an_encoder_does_not_exist() -> None:
    plan = build_plan(tiny_source("bert"), fuse=False)
    assert passes.gather_early(plan) is plan


def test_gather_stays_where_tokens_are_needed_later() -> None:
    b = small_builder()
    x = b.linear(b.embed("embed"), "a")
    b.finish(x, ignore=("",))
    plan = structs.replace(finish(b, b.linear(b.gather_rows(x), "b")), hidden=x)
    assert kinds(passes.gather_early(plan)) == kinds(plan)
    assert passes.gather_early(plan).ops[1].writes[0].rows is Rows.TOKENS


def test_gather_takes_in_place_work_along() -> None:
    b = small_builder()
    x = b.scale(b.linear(b.embed("embed"), "a"), 3.0)
    plan = finish(b, b.linear(b.gather_rows(b.add(x, b.rms_norm(x, "norm"))), "b"))
    moved = passes.gather_early(plan)
    assert kinds(moved) == ["Embed", "GatherRows", "Linear", "Scale", "RmsNorm", "Add", "Linear"]
    assert_same_values(plan, moved)


def test_gathered_inputs_are_gathered_again_after_a_change() -> None:
    """A value read by narrowed work before and after an in-place change by other work."""
    b = small_builder()
    x = b.embed("embed")
    early = b.linear(x, "a")
    b.add_token_type_embedding(x, "embed")
    plan = finish(b, b.linear(b.gather_rows(b.add(early, b.linear(x, "c"))), "d"))
    moved = passes.gather_early(plan)
    assert kinds(moved).count("GatherRows") == 2
    assert_same_values(plan, moved)


@pytest.mark.parametrize("name", CASES)
def test_few_buffers_remain(name: str) -> None:
    """Per token: residual, normed, q, k, v, the MLP's inner one, and attention's if it is wider."""
    plan = build_plan(tiny_source(name))
    hp = CASES[name]
    extra = hp.num_attention_heads * hp.head_dim != hp.hidden_size
    assert len([x for x in plan.buffers if x.rows is Rows.TOKENS]) == 6 + extra
    assert len([x for x in plan.buffers if x.rows is Rows.LOGITS]) <= 4
    assert [x.id for x in plan.buffers] == list(range(len(plan.buffers)))


@pytest.mark.parametrize("name", ALL_CASES)
def test_operations_share_buffers_only_where_they_may(name: str) -> None:
    allowed = {
        ir.RmsNorm: {"x"},
        ir.LayerNorm: {"x"},
        ir.Linear: {"residual"},
        ir.ActMul: {"gate", "up"},
        ir.GateRows: {"x"},
        ir.Activation: {"x"},
        ir.Add: {"x", "y"},
    }
    for op in build_plan(tiny_source(name)).ops:
        outs = [x.id for x in op.writes]
        assert len(set(outs)) == len(outs)
        if not hasattr(op, "out") and not isinstance(op, ir.MultiLinear):
            continue
        shared = {field for field, value in op.operands() if field != "out" and value.id in outs}
        assert shared <= allowed.get(type(op), set())


def test_a_residual_that_is_also_the_input_is_not_overwritten() -> None:
    b = small_builder()
    x = b.embed("embed")
    plan = finish(b, b.add(x, b.linear(x, "a")))
    fused = passes.optimize(plan)
    linear = fused.ops[1]
    assert isinstance(linear, ir.Linear)
    assert linear.residual == linear.x != linear.out
    assert_same_values(plan, fused)


def test_the_residual_stream_stays_in_one_buffer() -> None:
    plan = build_plan(tiny_source("llama"))
    stream = plan.ops[0].writes[0]
    adds = [op for op in plan.ops if isinstance(op, ir.Linear) and op.residual is not None]
    assert len(adds) == 6
    assert all(op.out == op.residual for op in adds)
    assert all(op.out == stream for op in adds if op.out.rows is Rows.TOKENS)


@pytest.mark.parametrize("run_pass", passes.PASSES, ids=lambda p: p.__name__)
@pytest.mark.parametrize("name", ["llama_biases", "gemma2", "bert", "qwen2moe", "granitemoe"])
def test_each_pass_alone_changes_no_bit(name: str, run_pass: Callable[[Plan], Plan]) -> None:
    plan = build_plan(tiny_source(name), fuse=False)
    assert_same_values(plan, run_pass(plan))


def test_passes_are_pure() -> None:
    plan = build_plan(tiny_source("llama"), fuse=False)
    before = (plan.ops, plan.buffers)
    assert passes.optimize(plan) == passes.optimize(plan)
    assert (plan.ops, plan.buffers) == before
