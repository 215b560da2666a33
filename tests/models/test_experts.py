"""Mixtures of experts: what is recorded and refused, the listing, and the formula."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tellin.exceptions import ModelLoadError, UnsupportedModelError
from tellin.kernels.reference import ReferenceBackend
from tellin.loading.tensors import QuantType, TensorRef
from tellin.models import build_plan
from tellin.models.plan import ir, passes
from tellin.models.plan.builder import PlanBuilder
from tellin.models.plan.ir import Plan, Rows
from tellin.models.plan.listing import format_plan, op_macs, op_weight_bytes
from tests.models.stepping import logits_of
from tests.models.tiny import ALL_CASES, BASE, memory_source, tiny_arrays, tiny_token_ids

WIDTH, INNER, EXPERTS = BASE.hidden_size, 48, 6


def arrays_of_experts(num_experts: int = EXPERTS) -> dict[str, np.ndarray]:
    random = np.random.RandomState(5)
    arrays = {
        "embed.weight": random.randn(BASE.vocab_size, WIDTH),
        "mlp.gate.weight": random.randn(num_experts, WIDTH) / 8,
        "mlp.shared_expert_gate.weight": random.randn(1, WIDTH) / 8,
    }
    for e in range(num_experts):
        arrays[f"mlp.experts.{e}.gate_proj.weight"] = random.randn(INNER, WIDTH) / 8
        arrays[f"mlp.experts.{e}.up_proj.weight"] = random.randn(INNER, WIDTH) / 8
        arrays[f"mlp.experts.{e}.down_proj.weight"] = random.randn(WIDTH, INNER) / 8
    return {name: values.astype(np.float32) for name, values in arrays.items()}


def record(arrays: dict[str, np.ndarray], top_k: int = 2, normalize: bool = True) -> Plan:
    b = PlanBuilder(memory_source(BASE, arrays))
    x = b.embed("embed")
    out = b.experts(x, b.linear(x, "mlp.gate"), "mlp", top_k=top_k, normalize=normalize)
    return b.finish(b.gather_rows(out), ignore=("mlp.shared",))


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("top_k", [1, 2, EXPERTS])
def test_the_chosen_experts_are_summed_by_their_shares(top_k: int, normalize: bool) -> None:
    arrays = arrays_of_experts()
    ids = tiny_token_ids(9)
    x = arrays["embed.weight"][ids].astype(np.float64)
    logits = x @ arrays["mlp.gate.weight"].T
    shares = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    expected = np.zeros((9, WIDTH))
    for row in range(9):
        chosen = sorted(range(EXPERTS), key=lambda e: (-shares[row, e], e))[:top_k]
        total = sum(shares[row, e] for e in chosen) if normalize else 1.0
        for e in chosen:
            gate, up, down = (
                arrays[f"mlp.experts.{e}.{part}_proj.weight"] for part in ("gate", "up", "down")
            )
            hidden = silu(gate @ x[row]) * (up @ x[row])
            expected[row] += shares[row, e] / total * (down @ hidden)
    out = logits_of(ReferenceBackend(record(arrays, top_k, normalize)), ids.tolist())
    np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-5)


def test_of_equal_logits_the_lowest_ids_are_chosen() -> None:
    arrays = arrays_of_experts()
    arrays["mlp.gate.weight"][:] = 0
    first_two = arrays | {"mlp.gate.weight": arrays["mlp.gate.weight"][:2]}
    for e in range(2, EXPERTS):
        for part in ("gate", "up", "down"):
            del first_two[f"mlp.experts.{e}.{part}_proj.weight"]
    ids = tiny_token_ids(5).tolist()
    np.testing.assert_array_equal(
        logits_of(ReferenceBackend(record(arrays)), ids),
        logits_of(ReferenceBackend(record(first_two)), ids),
    )


def test_rows_are_gated_by_a_sigmoid() -> None:
    arrays = arrays_of_experts()
    b = PlanBuilder(memory_source(BASE, arrays))
    x = b.embed("embed")
    out = b.gate_rows(x, b.linear(x, "mlp.shared_expert_gate"))
    plan = passes.optimize(b.finish(b.gather_rows(out), ignore=("mlp.",)))
    ids = tiny_token_ids(4)
    values = arrays["embed.weight"][ids].astype(np.float64)
    gate = values @ arrays["mlp.shared_expert_gate.weight"].T
    out_rows = logits_of(ReferenceBackend(plan), ids.tolist())
    np.testing.assert_allclose(out_rows, values / (1 + np.exp(-gate)), rtol=1e-5)
    with pytest.raises(ModelLoadError, match="one value for each row"):
        b.gate_rows(x, x)


def test_passes_move_experts_to_the_rows_that_are_wanted() -> None:
    plan = record(arrays_of_experts())
    fused = passes.optimize(plan)
    assert [type(op) for op in fused.ops] == [ir.Embed, ir.GatherRows, ir.Linear, ir.Experts]
    assert fused.ops[-1].writes[0].rows is Rows.LOGITS
    ids = tiny_token_ids(5).tolist()
    np.testing.assert_array_equal(
        logits_of(ReferenceBackend(plan), ids), logits_of(ReferenceBackend(fused), ids)
    )


def test_listing_names_the_experts_once() -> None:
    plan = record(arrays_of_experts())
    line = next(line for line in format_plan(plan).splitlines() if " experts " in line)
    assert " ".join(line.split()) == (
        "2 experts b2 = 2 of 6 experts by normalized softmax(b1): W3 (silu(W1 b0) * (W2 b0)) "
        "18.4 k 73.7 kB 6 x mlp.experts.*.gate_proj:F32[48x64] mlp.experts.*.up_proj:F32[48x64] "
        "mlp.experts.*.down_proj:F32[64x48]"
    )
    experts = plan.ops[2]
    assert op_macs(experts) == 2 * 3 * INNER * WIDTH
    assert op_weight_bytes(experts) == 4 * op_macs(experts)


def test_what_does_not_fit_is_refused() -> None:
    arrays = arrays_of_experts()
    for top_k in (0, EXPERTS + 1, 33):
        with pytest.raises(UnsupportedModelError, match=f"{top_k} of 6 experts per token in mlp"):
            record(arrays, top_k)
    with pytest.raises(ModelLoadError, match=r"'mlp\.experts\.5\.up_proj\.weight' is missing"):
        record({k: v for k, v in arrays.items() if k != "mlp.experts.5.up_proj.weight"})
    bent = arrays | {"mlp.experts.3.gate_proj.weight": np.ones((INNER + 1, WIDTH))}
    with pytest.raises(ModelLoadError, match=r"experts\.3\.gate_proj.*\(49, 64\).*\(48, 64\)"):
        record(bent)
    bent = {k: np.ones((INNER + 1, WIDTH)) if ".up_" in k else v for k, v in arrays.items()}
    with pytest.raises(ModelLoadError, match=r"experts\.0\.up_proj.*\(49, 64\).*\(48, 64\)"):
        record(bent)


def test_experts_of_unlike_types_are_refused() -> None:
    source = memory_source(BASE, arrays_of_experts())
    name = "mlp.experts.2.down_proj.weight"
    half = np.ones((WIDTH, INNER), dtype=np.float16).reshape(-1).view(np.uint8)
    tensors = source.tensors | {name: TensorRef(name, (WIDTH, INNER), QuantType.F16, half)}
    b = PlanBuilder(replace(source, tensors=tensors))
    x = b.embed("embed")
    with pytest.raises(ModelLoadError, match=r"experts\.2\.down_proj\.weight' is F16 and"):
        b.experts(x, b.linear(x, "mlp.gate"), "mlp", top_k=2, normalize=True)


def test_the_biases_of_gpt_oss_must_be_there() -> None:
    arrays = tiny_arrays("gpt_oss")
    part = {k: v for k, v in arrays.items() if ".experts." not in k or k.endswith("weight")}
    assert len(part) < len(arrays)
    with pytest.raises(ModelLoadError, match=r"experts\.0\.gate_proj\.bias' is missing"):
        build_plan(memory_source(ALL_CASES["gpt_oss"], part))


def test_more_than_1024_experts_are_refused() -> None:
    arrays = {"embed.weight": np.ones((BASE.vocab_size, WIDTH)), "r.weight": np.ones((1025, WIDTH))}
    b = PlanBuilder(memory_source(BASE, arrays))
    x = b.embed("embed")
    with pytest.raises(UnsupportedModelError, match="up to 1024 experts"):
        b.experts(x, b.linear(x, "r"), "mlp", top_k=2, normalize=True)
