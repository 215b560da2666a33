"""Mixtures of experts in native code: the formula, promise 1, and rows that choose nothing sane.

Rows and their router logits are looked up in embedding tables, so that a test knows and chooses
both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from tellin.exceptions import ModelLoadError, UnsupportedModelError
from tellin.kernels import _C
from tellin.kernels.batch import StepBatch
from tellin.kernels.native import NativeBackend
from tellin.kernels.reference import ReferenceBackend
from tellin.loading.tensors import QuantType, TensorRef
from tellin.models.plan import ir
from tellin.models.plan.listing import op_macs, op_weight_bytes
from tellin.worker.profiler import ProfiledBackend
from tests.kernels import linear_cases
from tests.kernels.runtime_plans import LOGITS, TOKENS, _scaled, float_tensor

VARIANTS = _C.linear_variants()
VOCAB_SIZE = 256
TYPES = (
    QuantType.F32, QuantType.F16, QuantType.BF16,
    QuantType.Q4_0, QuantType.Q8_0, QuantType.Q4_K, QuantType.Q6_K,
    QuantType.IQ4_XS, QuantType.MXFP4,
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A mixture of experts over rows that are looked up."""

    quant_type: QuantType = QuantType.F32
    num_experts: int = 8
    top_k: int = 2
    width: int = 256
    inner: int = 256
    out_width: int = 256
    normalize: bool = True
    act: str = "silu"
    down_type: QuantType | None = None
    logit_rows: bool = False

    def x(self) -> np.ndarray:
        return np.random.default_rng(1).standard_normal((VOCAB_SIZE, self.width), dtype=np.float32)

    def router(self) -> np.ndarray:
        random = np.random.default_rng(2)
        return random.standard_normal((VOCAB_SIZE, self.num_experts), dtype=np.float32)

    def plan(self, *, x: np.ndarray | None = None, router: np.ndarray | None = None) -> ir.Plan:
        rows = LOGITS if self.logit_rows else TOKENS
        tokens = [
            ir.Buffer(0, self.width, TOKENS, "x"),
            ir.Buffer(1, self.num_experts, TOKENS, "router"),
        ]
        out = ir.Buffer(2, self.out_width, rows, "out")
        spare = [ir.Buffer(b.id + 3, b.width, TOKENS, "spare") for b in tokens]
        ops = [
            *looked_up(self.x() if x is None else x, tokens[0], spare[0]),
            *looked_up(self.router() if router is None else router, tokens[1], spare[1]),
        ]
        buffers = [*tokens, out, *spare]
        operands = tokens
        if self.logit_rows:
            operands = [ir.Buffer(b.id + 5, b.width, LOGITS, b.name) for b in tokens]
            ops += [ir.GatherRows(a, b) for a, b in zip(tokens, operands, strict=True)]
            buffers += operands
        shape = (self.num_experts, self.inner, self.width)
        gate = matrices(self.quant_type, "gate", *shape)
        up = matrices(self.quant_type, "up", *shape)
        down_type = self.down_type or self.quant_type
        down = matrices(down_type, "down", self.num_experts, self.out_width, self.inner)
        ops.append(
            ir.Experts(
                operands[0], operands[1], gate, up, down, out, self.act, self.top_k, self.normalize
            )
        )
        return ir.Plan(
            "experts", tuple(ops), tuple(buffers), (), out, self.out_width, self.out_width, out
        )


def looked_up(values: np.ndarray, out: ir.Buffer, spare: ir.Buffer) -> list[ir.Op]:
    """Operations that make ``out[t] = values[token_ids[t]]``, NaN and infinities included.

    Tables hold finite numbers, so infinities come of their scale, and NaN of +inf - inf.
    """
    if np.isfinite(values).all():
        return [ir.Embed(float_tensor("table", values), out)]
    huge = np.float32(2.0**100)
    infinite = np.where(np.isnan(values), huge, np.sign(values) * huge)
    with np.errstate(invalid="ignore"):
        first = np.where(np.isfinite(values), values / huge, infinite)
    second = np.where(np.isnan(values), -huge, np.float32(0))
    return [
        ir.Embed(float_tensor("table", first), out, scale=float(huge)),
        ir.Embed(float_tensor("more", second), spare, scale=float(huge)),
        ir.Add(out, spare, out),
    ]


@cache
def matrices(
    quant_type: QuantType, name: str, count: int, rows: int, columns: int
) -> tuple[TensorRef, ...]:
    tensors = []
    for e in range(count):
        seed = 1000 * ("gate", "up", "down").index(name) + e
        tensor = linear_cases.random_tensor(quant_type, rows, columns, seed)
        data = tensor.data
        if quant_type is not QuantType.BF16:
            data = _scaled(tensor, columns**-0.5 / float(tensor.values.std()))
        tensors.append(TensorRef(f"experts.{e}.{name}", (rows, columns), quant_type, data))
    return tuple(tensors)


def step(ids: Sequence[int]) -> StepBatch:
    count = len(ids)
    return StepBatch(
        token_ids=np.array(ids, dtype=np.int32),
        positions=np.arange(count, dtype=np.int32),
        query_start_loc=np.array([0, count], dtype=np.int32),
        seq_lens=np.array([count], dtype=np.int32),
        block_table=np.zeros((1, 1), dtype=np.int32),
        logits_indices=np.arange(count, dtype=np.int32),
    )


def run(backend: Any, ids: Sequence[int]) -> np.ndarray:
    return np.array(backend.forward(step(ids)))


def native(plan: ir.Plan, **kwargs: Any) -> NativeBackend:
    return NativeBackend(plan, **{"num_threads": 2, **kwargs})


def ids_of(count: int, seed: int = 3) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(0, VOCAB_SIZE, count).tolist()
    return ids


SHAPES = {
    "one of one": Case(num_experts=1, top_k=1),
    "all": Case(num_experts=5, top_k=5, normalize=False),
    "odd sizes": Case(width=96, inner=40, out_width=72, num_experts=7, top_k=3, act="gelu_tanh"),
    "many": Case(width=64, inner=32, out_width=48, num_experts=128, top_k=8),
    "most": Case(width=32, inner=32, out_width=32, num_experts=1024, top_k=32, normalize=False),
    "logit rows": Case(logit_rows=True),
}


@pytest.mark.parametrize("isa", VARIANTS)
@pytest.mark.parametrize("name", SHAPES)
def test_shapes_match_the_reference_backend(isa: str, name: str) -> None:
    plan = SHAPES[name].plan()
    ids = ids_of(70)
    expected = run(ReferenceBackend(plan), ids)
    out = run(native(plan, isa=isa), ids)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize("isa", VARIANTS)
@pytest.mark.parametrize("quant_type", TYPES, ids=lambda t: t.name)
def test_types_and_precisions_match_the_reference_backend(isa: str, quant_type: QuantType) -> None:
    """Tolerances are those of other layers: see test_runtime."""
    plan = Case(quant_type).plan()
    ids = ids_of(40)
    expected = run(ReferenceBackend(plan), ids)
    for precision, tolerance in (("float32", 2e-5), ("int16", 2e-4), ("int8", 0.02)):
        error = run(native(plan, isa=isa, activation_precision=precision), ids) - expected
        assert error.std() < tolerance * expected.std(), precision


@pytest.mark.parametrize(
    ("types", "precision"),
    [
        ((QuantType.Q4_K, QuantType.Q6_K), "int8"),
        ((QuantType.F16, QuantType.Q8_0), "int16"),
        ((QuantType.Q8_0, QuantType.F16), "int8"),
    ],
)
def test_matrices_may_be_of_different_types(
    types: tuple[QuantType, QuantType], precision: str
) -> None:
    plan = Case(types[0], down_type=types[1]).plan()
    ids = ids_of(40)
    expected = run(ReferenceBackend(plan), ids)
    error = run(native(plan, activation_precision=precision), ids) - expected
    assert error.std() < 0.02 * expected.std()


@pytest.mark.parametrize("isa", VARIANTS)
@pytest.mark.parametrize(
    ("quant_type", "precision"),
    [
        (QuantType.F32, "float32"),
        (QuantType.BF16, "float32"),
        (QuantType.Q4_0, "int8"),
        (QuantType.Q4_K, "int16"),
        (QuantType.Q6_K, "int8"),
        (QuantType.Q8_0, "float32"),
        (QuantType.MXFP4, "int8"),
    ],
)
def test_rows_do_not_depend_on_the_step(isa: str, quant_type: QuantType, precision: str) -> None:
    """Promise 1: alone, in ragged batches, in several passes, on 1, 2, 3 or 9 threads."""
    case = Case(quant_type, num_experts=8, top_k=3, width=256, inner=256, out_width=320)
    ids = ids_of(200 if isa == "portable" else 600)
    rows = None
    for threads in (2, 1, 3, 9):
        backend = native(case.plan(), isa=isa, activation_precision=precision, num_threads=threads)
        out = run(backend, ids)
        rows = out if rows is None else rows
        np.testing.assert_array_equal(out, rows)
        begin = 0
        for size in (1, 2, 7, 8, 9, 33, 1, 64, 66):
            part = run(backend, ids[begin : begin + size])
            np.testing.assert_array_equal(part, rows[begin : begin + size])
            begin += size


def test_rows_that_all_choose_one_expert() -> None:
    """All rows choose the same expert: it is cut into tiles. Results are those of single rows."""
    case = Case(QuantType.Q4_0, top_k=1)
    router = np.zeros((VOCAB_SIZE, case.num_experts), dtype=np.float32)
    router[:, 5] = 1
    router[7, 2] = 3
    backend = native(case.plan(router=router), num_threads=3)
    single = {i: run(backend, [i])[0] for i in range(20)}
    for count in (1, 3, 200, 500):
        ids = [i % 20 for i in range(count)]
        for i, row in zip(ids, run(backend, ids), strict=True):
            np.testing.assert_array_equal(row, single[i])


def test_variants_with_vectors_give_the_same_bits() -> None:
    plan = Case(QuantType.Q4_0, top_k=3).plan()
    ids = ids_of(90)
    outs = [run(native(plan, isa=isa), ids) for isa in VARIANTS if isa != "portable"]
    for out in outs[1:]:
        np.testing.assert_array_equal(out, outs[0])


@pytest.mark.parametrize("normalize", [False, True])
def test_equal_logits_choose_the_lowest_ids(normalize: bool) -> None:
    case = Case(num_experts=6, top_k=2, normalize=normalize)
    router = np.zeros((VOCAB_SIZE, 6), dtype=np.float32)
    router[:, 4] = 1  # then 0, the first of the others
    plan = case.plan(router=router)
    ids = ids_of(12)
    expected = run(ReferenceBackend(plan), ids)
    np.testing.assert_allclose(
        run(native(plan), ids), expected, rtol=1e-5, atol=2e-5 * np.abs(expected).max()
    )


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of the reference backend
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("count", [6, 60])
def test_rows_without_sane_logits_are_nan(normalize: bool, count: int) -> None:
    """NaN or +inf among the logits, or nothing but -inf: that row is NaN, others are untouched."""
    case = Case(num_experts=8, top_k=2, normalize=normalize)
    router = case.router()
    router[0, 3] = np.nan
    router[1, 7] = np.inf
    router[2] = -np.inf
    router[3, [1, 2, 4, 5, 6, 7]] = -np.inf  # two are left: this row has a softmax
    router[4] = np.nan
    plan = case.plan(router=router)
    ids = [i % 12 for i in range(count)]
    out = run(native(plan), ids)
    expected = run(ReferenceBackend(plan), ids)
    for i, row, reference in zip(ids, out, expected, strict=True):
        assert np.isnan(row).all() == np.isnan(reference).all() == (i in (0, 1, 2, 4))
        if i not in (0, 1, 2, 4):
            np.testing.assert_allclose(
                row, reference, rtol=1e-5, atol=2e-5 * np.abs(reference).max()
            )


@pytest.mark.parametrize("quant_type", [QuantType.F32, QuantType.Q4_0], ids=lambda t: t.name)
def test_a_row_that_is_not_finite_stays_alone(quant_type: QuantType) -> None:
    case = Case(quant_type)
    x = case.x()
    x[5, 17] = np.inf
    ids = list(range(16))
    clean = run(native(case.plan()), ids)
    out = run(native(case.plan(x=x)), ids)
    assert not np.isfinite(out[5]).any()
    np.testing.assert_array_equal(np.delete(out, 5, 0), np.delete(clean, 5, 0))


@pytest.mark.parametrize("isa", VARIANTS)
def test_rows_are_gated_by_a_sigmoid(isa: str) -> None:
    case = Case(width=40)
    gates = np.linspace(-100, 100, VOCAB_SIZE, dtype=np.float32)[:, None]
    x, gate, out = (ir.Buffer(i, w, TOKENS, "b") for i, w in enumerate((40, 1, 40)))
    plan = ir.Plan(
        "gate",
        (
            ir.Embed(float_tensor("x", case.x()), x),
            ir.Embed(float_tensor("gate", gates), gate),
            ir.GateRows(x, gate, out),
        ),
        (x, gate, out), (), out, 40, 40, out,
    )  # fmt: skip
    ids = list(range(VOCAB_SIZE))
    np.testing.assert_allclose(
        run(native(plan, isa=isa), ids), run(ReferenceBackend(plan), ids), rtol=1e-6, atol=1e-37
    )


def test_a_profile_gives_an_operation_the_time_of_all_its_stages() -> None:
    plan = Case(QuantType.Q8_0).plan()
    profiled = ProfiledBackend(native(plan))
    ids = ids_of(20)
    run(profiled, ids)
    seconds = profiled.wrapped.stage_seconds()
    operations = profiled.finish()[1]
    names = profiled.wrapped.listing()
    assert names[-3:] == ["route", "experts(gate)", "experts(down)"]
    assert len(operations) == len(names) - 2
    experts = operations[-1]
    assert experts.name.startswith("experts ")
    assert experts.seconds == pytest.approx(sum(seconds[-3:]))
    assert experts.macs == 20 * op_macs(plan.ops[-1])
    # nearly all of 8 experts, of which a row reads 2
    assert 3.9 < experts.num_bytes / op_weight_bytes(plan.ops[-1]) < 4


# ---- what is refused -------------------------------------------------------------------------


def with_experts(plan: ir.Plan, **changes: Any) -> ir.Plan:
    assert isinstance(plan.ops[-1], ir.Experts)
    return structs.replace(plan, ops=(*plan.ops[:-1], structs.replace(plan.ops[-1], **changes)))


def test_plans_that_do_not_fit_are_refused() -> None:
    plan = Case().plan()
    experts = plan.ops[-1]
    assert isinstance(experts, ir.Experts)
    for top_k in (0, 9, 33):
        with pytest.raises(UnsupportedModelError, match="between 1 and 32"):
            native(with_experts(plan, top_k=top_k))
    with pytest.raises(UnsupportedModelError, match="three matrices and a logit"):
        native(with_experts(plan, up=experts.up[1:]))
    with pytest.raises(UnsupportedModelError, match="three matrices and a logit"):
        native(with_experts(plan, **{p: getattr(experts, p)[:4] for p in ("gate", "up", "down")}))
    other = Case(QuantType.F16).plan().ops[-1]
    assert isinstance(other, ir.Experts)
    unlike = with_experts(plan, up=(*experts.up[1:], other.up[0]))
    with pytest.raises(UnsupportedModelError, match="one storage type"):
        native(unlike)
    with pytest.raises(UnsupportedModelError, match="a buffer of its own"):
        native(with_experts(plan, out=experts.x))


def test_an_expert_that_is_not_finite_is_refused_by_name() -> None:
    plan = Case().plan()
    experts = plan.ops[-1]
    assert isinstance(experts, ir.Experts)
    bad = np.ones((256, 256), dtype=np.float32)
    bad[200, 3] = np.nan
    up = list(experts.up)
    up[6] = float_tensor("experts.6.up", bad)
    with pytest.raises(ModelLoadError, match=r"'experts\.6\.up' holds NaN"):
        native(with_experts(plan, up=tuple(up)))
