"""Outputs that are read as quantised rows only stay in scratch: whoever else reads one finds it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from tellin.kernels import _C
from tellin.kernels.native import NativeBackend
from tellin.kernels.reference import ReferenceBackend
from tellin.loading.tensors import QuantType
from tellin.models.plan import ir
from tests.kernels.runtime_plans import Cache, float_tensor, llama_plan, random_ids

VARIANTS = _C.linear_variants()
WIDTH = 256


def buffer_of(plan: ir.Plan, name: str) -> ir.Buffer:
    return next(buffer for buffer in plan.buffers if buffer.name == name)


def reader_of(kind: str, source: ir.Buffer, x: ir.Buffer) -> ir.Op:
    """An operation that adds to ``x`` what it makes of the source's values."""
    matrix = np.random.default_rng(3).standard_normal((WIDTH, WIDTH)) / WIDTH
    if kind == "add":
        return ir.Add(x, source, x)
    if kind == "linear":
        return ir.Linear(source, float_tensor("extra", matrix), None, x, residual=x)
    return ir.Lora(source, (("extra", x),), 16)


def with_reader(plan: ir.Plan, kind: str, name: str) -> ir.Plan:
    """The plan with another reader of the buffer, after the quantised layer that reads it."""
    source, x = buffer_of(plan, name), buffer_of(plan, "x")
    at = next(i for i, op in enumerate(plan.ops) if isinstance(op, ir.Linear) and op.x == source)
    ops = (*plan.ops[: at + 1], reader_of(kind, source, x), *plan.ops[at + 1 :])
    return structs.replace(plan, ops=ops)


def logits(backend: Any, slots: bool) -> np.ndarray:
    batch = Cache(backend, num_blocks=16).batch([("a", random_ids(70))])
    if slots:
        batch = replace(batch, adapter_slots=np.zeros(1, np.int32))
    return np.array(backend.forward(batch))


@pytest.mark.parametrize("isa", VARIANTS)
@pytest.mark.parametrize("kind", ["add", "linear", "lora"])
@pytest.mark.parametrize("name", ["attended", "gated"])
def test_other_readers_find_the_values(name: str, kind: str, isa: str) -> None:
    plan = with_reader(llama_plan(QuantType.Q8_0, num_layers=1, inner=WIDTH), kind, name)
    native = NativeBackend(
        plan, num_threads=2, isa=isa, activation_precision="int16", kv_cache_dtype="float32"
    )
    reference = ReferenceBackend(plan)
    if kind == "lora":
        random = np.random.default_rng(4)
        a, b = (
            (random.standard_normal(shape) / 8).astype(np.float32)
            for shape in ((16, WIDTH), (WIDTH, 16))
        )
        native.set_adapter(0, {"extra": (a, b)})
        reference.set_adapter(0, {"extra": (a, b)})
    expected = logits(reference, kind == "lora")
    error = logits(native, kind == "lora") - expected
    assert error.std() < 1e-3 * expected.std()


@pytest.mark.parametrize("isa", VARIANTS)
@pytest.mark.parametrize("name", ["attended", "gated"])
def test_what_the_caller_sees_is_written(name: str, isa: str) -> None:
    """And whether it is changes no bit of the logits."""
    plan = llama_plan(QuantType.Q8_0, num_layers=1, inner=WIDTH)
    shown = structs.replace(plan, hidden=buffer_of(plan, name), hidden_size=WIDTH)
    backends = [
        NativeBackend(p, num_threads=2, isa=isa, activation_precision="int16")
        for p in (plan, shown)
    ]
    first, second = (logits(backend, False) for backend in backends)
    np.testing.assert_array_equal(first, second)
    reference = ReferenceBackend(shown)
    logits(reference, False)
    expected = np.array(reference.hidden())
    error = np.array(backends[1].hidden()) - expected
    assert error.std() < 0.01 * expected.std()
