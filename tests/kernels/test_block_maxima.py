"""Maxima of blocks of logits, found while a step writes them, are those of what it wrote."""

from __future__ import annotations

import numpy as np
import pytest

from tellin.kernels import _C
from tellin.kernels.native import NativeBackend
from tellin.loading.tensors import QuantType
from tellin.models import build_plan
from tellin.models.plan import ir
from tests.kernels.runtime_plans import (
    LOGITS,
    TOKENS,
    Cache,
    float_tensor,
    llama_plan,
    random_ids,
)
from tests.models.stepping import logits_of
from tests.models.tiny import CASES, MAX_MODEL_LEN, tiny_source, tiny_token_ids

VARIANTS = _C.linear_variants()


def check(backend: NativeBackend, logits: np.ndarray) -> None:
    maxima = backend.block_maxima()
    assert maxima is not None
    starts = np.arange(0, logits.shape[1], 64)
    np.testing.assert_array_equal(maxima, np.maximum.reduceat(logits, starts, axis=1))


@pytest.mark.parametrize("isa", VARIANTS)
@pytest.mark.parametrize("name", CASES)
def test_of_every_architecture(isa: str, name: str) -> None:
    """Plain heads, and those whose logits are scaled or capped afterwards; encoders have none."""
    plan = build_plan(tiny_source(name), max_model_len=MAX_MODEL_LEN.get(name))
    backend = NativeBackend(plan, num_threads=2, isa=isa)
    logits = logits_of(backend, tiny_token_ids())
    if plan.output.rows is TOKENS:
        assert backend.block_maxima() is None
    else:
        check(backend, logits)


@pytest.mark.parametrize("isa", VARIANTS)
@pytest.mark.parametrize("quant_type", [QuantType.F32, QuantType.Q4_0, QuantType.Q8_0])
@pytest.mark.parametrize("vocab_size", [40, 512, 1000, 3100])
def test_of_any_rows(isa: str, quant_type: QuantType, vocab_size: int) -> None:
    """Steps of few rows and of many are cut into tasks in two ways; blocks into neither."""
    plan = llama_plan(quant_type, num_layers=1, vocab_size=vocab_size)
    backend = NativeBackend(plan, num_threads=3, isa=isa)
    cache = Cache(backend)
    for request, count in enumerate((1, 5, 16, 33, 64, 65, 200, 2)):
        ids = random_ids(count, seed=request, vocab_size=vocab_size)
        check(backend, cache.step((f"r{request}", ids))[0])


@pytest.mark.parametrize("isa", VARIANTS)
@pytest.mark.parametrize("num_rows", [1, 20, 70])
def test_blocks_with_nan_or_infinity_are_infinite(isa: str, num_rows: int) -> None:
    """Head weights that overflow in some rows: -infinity is a value like any other."""
    table = np.zeros((3, 64), np.float32)
    table[1, 0] = 1e30
    table[2, :2] = 1e30
    head = np.zeros((200, 64), np.float32)
    head[:] = np.random.default_rng(0).normal(size=head.shape)
    head[5] = head[130] = -1e30  # -infinity
    head[70, :2] = 1e30  # +infinity
    head[150, :2] = 1e30, -1e30  # +infinity, or NaN
    x, last = ir.Buffer(0, 64, TOKENS, "x"), ir.Buffer(1, 64, LOGITS, "last")
    out = ir.Buffer(2, 200, LOGITS, "out")
    plan = ir.Plan(
        architecture="bare",
        ops=(
            ir.Embed(float_tensor("embed", table), x),
            ir.GatherRows(x, last),
            ir.Linear(last, float_tensor("head", head), None, out),
        ),
        buffers=(x, last, out),
        kv_layers=(),
        output=out,
        vocab_size=200,
        hidden_size=64,
    )
    backend = NativeBackend(plan, num_threads=2, isa=isa)
    ids = np.arange(num_rows) % 3
    logits = Cache(backend).step(("r", ids.tolist()))[0]
    assert np.isneginf(logits[ids > 0][:, 5]).all()
    maxima = backend.block_maxima()
    expected = np.maximum.reduceat(np.where(np.isnan(logits), np.inf, logits), [0, 64, 128, 192], 1)
    np.testing.assert_array_equal(maxima, expected)
    assert np.isposinf(expected[ids > 0]).any(axis=0).tolist() == (
        [False, True, True, False] if num_rows > 1 else [False] * 4
    )
