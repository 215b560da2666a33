"""The plan executor: whole decoders against the NumPy backend, promise 1, and hostile arguments."""

from __future__ import annotations

import gc
import threading
import time
from dataclasses import replace
from typing import Any

import numpy as np
import psutil
import pytest
from msgspec import structs

from tellin.exceptions import (
    EngineError,
    InvalidParameterError,
    ModelLoadError,
    UnsupportedModelError,
)
from tellin.kernels import _C
from tellin.kernels.batch import StepBatch
from tellin.kernels.native import NativeBackend, resolve_activation_precision
from tellin.kernels.reference import ReferenceBackend
from tellin.loading.finite import is_finite
from tellin.loading.tensors import QuantType, TensorRef
from tellin.models import build_plan
from tellin.models.plan import ir
from tests.kernels.linear_cases import SCALE_OFFSETS
from tests.kernels.runtime_plans import Cache, float_tensor, llama_plan, random_ids
from tests.models.stepping import logits_of
from tests.models.tiny import ALL_CASES, MAX_MODEL_LEN, tiny_source, tiny_token_ids

VARIANTS = _C.linear_variants()
QUANT_TYPES = (QuantType.F32, QuantType.F16, QuantType.Q4_0, QuantType.Q4_K, QuantType.Q8_0)


def make_backend(plan: ir.Plan, **kwargs: Any) -> NativeBackend:
    return NativeBackend(plan, **{"num_threads": 2, **kwargs})


@pytest.mark.parametrize("isa", VARIANTS)
@pytest.mark.parametrize("name", ALL_CASES)
def test_every_architecture_matches_the_reference_backend(isa: str, name: str) -> None:
    plan = build_plan(tiny_source(name), max_model_len=MAX_MODEL_LEN.get(name))
    expected = logits_of(ReferenceBackend(plan), tiny_token_ids())
    out = logits_of(make_backend(plan, isa=isa, kv_cache_dtype="float32"), tiny_token_ids())
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("isa", VARIANTS)
@pytest.mark.parametrize("name", ALL_CASES)
def test_fusion_does_not_change_bits(isa: str, name: str) -> None:
    """The passes join operations; the native stages compute the same roundings either way."""
    outs = []
    for fuse in (False, True):
        plan = build_plan(tiny_source(name), max_model_len=MAX_MODEL_LEN.get(name), fuse=fuse)
        outs.append(logits_of(make_backend(plan, isa=isa), tiny_token_ids()))
    np.testing.assert_array_equal(outs[0], outs[1])


@pytest.mark.parametrize("quant_type", QUANT_TYPES, ids=lambda t: t.name)
def test_float32_activations_match_the_reference_backend(quant_type: QuantType) -> None:
    """Float32 activations everywhere: only the order of additions differs."""
    plan = llama_plan(quant_type)
    ids = random_ids(40)
    expected = logits_of(ReferenceBackend(plan), ids)
    backend = make_backend(plan, activation_precision="float32", kv_cache_dtype="float32")
    np.testing.assert_allclose(
        logits_of(backend, ids), expected, rtol=0, atol=5e-5 * expected.std()
    )


@pytest.mark.parametrize("quant_type", QUANT_TYPES, ids=lambda t: t.name)
def test_int8_activations_are_close(quant_type: QuantType) -> None:
    """Eight bits per activation: each layer adds an error of about 2^-8 of its values."""
    plan = llama_plan(quant_type)
    ids = random_ids(40)
    expected = logits_of(ReferenceBackend(plan), ids)
    error = logits_of(make_backend(plan, activation_precision="int8"), ids) - expected
    assert error.std() < 0.02 * expected.std()
    if quant_type in (QuantType.F32, QuantType.F16):  # float weights keep float activations
        assert error.std() < 1e-3 * expected.std()


@pytest.mark.parametrize("quant_type", QUANT_TYPES, ids=lambda t: t.name)
def test_int16_activations_are_a_hundred_times_closer(quant_type: QuantType) -> None:
    """15 bits: 2^-15 of a layer's values; float32 caches, so that nothing else is rounded."""
    plan = llama_plan(quant_type)
    ids = random_ids(40)
    expected = logits_of(ReferenceBackend(plan), ids)
    backend = make_backend(plan, activation_precision="int16", kv_cache_dtype="float32")
    error = logits_of(backend, ids) - expected
    assert error.std() < 2e-4 * expected.std()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("default", "int8"),
        ("high", "int16"),
        ("mixed", "mixed"),
        ("float32", "float32"),
    ],
)
def test_resolve_activation_precision(name: str, expected: str) -> None:
    assert resolve_activation_precision(name) == expected


def test_mixed_precision_is_closer_than_int8() -> None:
    """Values and output layer in 15 bits: part of the error of int8 is gone."""
    plan = llama_plan(QuantType.Q4_0)
    ids = random_ids(60)
    expected = logits_of(ReferenceBackend(plan), ids)
    error = {
        precision: (
            logits_of(make_backend(plan, activation_precision=precision), ids) - expected
        ).std()
        for precision in ("int8", "mixed", "int16")
    }
    assert error["int16"] < 0.05 * error["mixed"]
    assert error["mixed"] < 0.95 * error["int8"]


@pytest.mark.parametrize("isa", VARIANTS)
@pytest.mark.parametrize(
    ("quant_type", "precision"),
    [
        (QuantType.F16, "float32"),
        (QuantType.Q4_0, "int8"),
        (QuantType.Q4_0, "int16"),
        (QuantType.Q4_K, "mixed"),
        (QuantType.Q4_K, "int16"),
        (QuantType.Q8_0, "float32"),
    ],
)
def test_rows_do_not_depend_on_the_step(isa: str, quant_type: QuantType, precision: str) -> None:
    """Promise 1: whole, in chunks, one by one, with neighbours, on 1, 2 or 3 threads."""
    plan = llama_plan(quant_type)
    ids = random_ids(70)

    def fresh(threads: int = 2) -> Cache:
        return Cache(
            make_backend(plan, isa=isa, num_threads=threads, activation_precision=precision)
        )

    whole = fresh().feed("r", ids, len(ids))
    for threads in (1, 3):
        np.testing.assert_array_equal(fresh(threads).feed("r", ids, len(ids)), whole)
    for chunk in (1, 17, 48):
        np.testing.assert_array_equal(fresh().feed("r", ids, chunk), whole)
    cache = fresh()
    cache.step(("r", ids[:33]), ("other", random_ids(20, seed=9)))
    rows = cache.step(("other", [3]), ("r", ids[33:]), ("third", random_ids(130, seed=8)))
    np.testing.assert_array_equal(rows[1], whole[33:])


def test_long_steps_run_in_passes_of_equal_bits() -> None:
    """More rows than a pass holds: several requests, cut inside and at request borders."""
    plan = llama_plan(QuantType.Q4_0)
    work = {
        name: random_ids(n, seed=n) for name, n in (("a", 512), ("b", 700), ("c", 3), ("d", 40))
    }
    rows = Cache(make_backend(plan)).step(*work.items())
    for (name, ids), out in zip(work.items(), rows, strict=True):
        np.testing.assert_array_equal(out, Cache(make_backend(plan)).feed(name, ids, 100), name)


def test_logits_of_any_rows_in_any_order() -> None:
    plan = llama_plan(QuantType.F32)
    backend = make_backend(plan)
    cache = Cache(backend)
    batch = cache.batch([("a", random_ids(600)), ("b", random_ids(30, seed=1))])
    every = np.array(backend.forward(batch))
    rows = np.array([629, 0, 511, 512, 599, 0, 600], dtype=np.int32)
    np.testing.assert_array_equal(backend.forward(replace(batch, logits_indices=rows)), every[rows])
    assert backend.hidden().shape == (7, plan.hidden_size)
    none = np.zeros(0, dtype=np.int32)
    assert backend.forward(replace(batch, logits_indices=none)).shape == (0, plan.vocab_size)


def test_an_empty_step_is_a_step() -> None:
    backend = make_backend(llama_plan())
    cache = Cache(backend)
    assert backend.forward(cache.batch([("a", [1, 2]), ("b", [])])).shape == (2, 512)
    empty = StepBatch(
        *(np.zeros(n, dtype=np.int32) for n in (0, 0, 1, 0)),
        block_table=np.zeros((0, 0), dtype=np.int32),
        logits_indices=np.zeros(0, dtype=np.int32),
    )
    assert backend.forward(empty).shape == (0, 512)


def test_results_stay_readable_after_later_steps_and_close() -> None:
    """A result is a view; growing or closing never pulls its memory away."""
    backend = make_backend(llama_plan())
    cache = Cache(backend)
    first = backend.forward(cache.batch([("a", [1])]))
    assert not first.flags.owndata
    copy = first.copy()
    cache.step(("b", random_ids(400)))  # grows the buffer: the old one stays with the view
    np.testing.assert_array_equal(first, copy)
    backend.close()
    np.testing.assert_array_equal(first, copy)
    with pytest.raises(EngineError, match="closed"):
        backend.forward(cache.batch([("a", [1])]))


def test_free_kv_cache_gives_memory_back() -> None:
    """Sleep mode: resident memory falls by what the cache had committed."""
    backend = make_backend(llama_plan(num_layers=8, num_kv_heads=8, head_dim=64))
    num_blocks = 400
    cache = Cache(backend, num_blocks=num_blocks)
    process = psutil.Process()
    lazily = process.memory_info().rss
    for i in range(6):
        cache.step((f"r{i}", random_ids(1000)))
    used = process.memory_info().rss
    committed = 6 * 63 * backend.kv_bytes_per_block()
    assert used - lazily > 0.9 * committed
    backend.free_kv_cache()
    assert used - process.memory_info().rss > 0.9 * committed
    with pytest.raises(ValueError, match="init_kv_cache"):
        backend.forward(cache.batch([("r0", [1])]))


def test_tied_weights_are_packed_once() -> None:
    table = float_tensor("embed", np.random.default_rng(0).standard_normal((64, 32)))
    x = ir.Buffer(0, 32, ir.Rows.TOKENS, "x")
    last = ir.Buffer(1, 32, ir.Rows.LOGITS, "last")
    logits = ir.Buffer(2, 64, ir.Rows.LOGITS, "logits")
    two = ir.Buffer(3, 64, ir.Rows.LOGITS, "two")
    again = replace(table)
    ops = (
        ir.Embed(table, x),
        ir.GatherRows(x, last),
        ir.Linear(last, table, None, two),
        ir.Linear(last, again, None, logits, residual=two),
    )
    plan = ir.Plan("tied", ops, (x, last, logits, two), (), logits, 64, 32)
    backend = make_backend(plan)
    assert backend.info["weight_bytes"] == 64 * 32 * 4
    batch = StepBatch(
        *(np.array(v, dtype=np.int32) for v in ([3, 9], [0, 1], [0, 2], [2])),
        block_table=np.zeros((1, 0), dtype=np.int32),
        logits_indices=np.array([1], dtype=np.int32),
    )
    values = table.data.view(np.float32).reshape(64, 32).astype(np.float64)
    np.testing.assert_allclose(backend.forward(batch), 2 * values[9:10] @ values.T, atol=1e-4)


def test_profile_names_every_kind_of_stage() -> None:
    backend = make_backend(llama_plan())
    cache = Cache(backend)
    backend.set_profile(True)
    cache.step(("a", random_ids(50)))
    profile = backend.profile()
    assert {"attention", "gated_linear", "linear", "multi_linear", "linear(head)"} <= set(profile)
    assert 0 < sum(profile.values()) <= backend.last_forward_s
    assert set(profile) == set(backend.listing())
    backend.set_profile(False)
    cache.step(("a", [1]))
    assert backend.profile() == profile


def test_a_caller_that_is_held_up_does_not_shift_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = make_backend(llama_plan())
    cache = Cache(backend)
    clock = time.monotonic_ns

    def held_up() -> int:
        time.sleep(0.05)
        return clock()

    backend.set_profile(True)
    begin = clock()
    cache.step(("a", random_ids(50)))
    end = clock()
    monkeypatch.setattr(time, "monotonic_ns", held_up)
    spans = backend.take_spans()
    assert len(spans) > 0
    assert begin <= spans[:, 2].min() <= spans[:, 3].max() <= end


def test_python_threads_take_turns() -> None:
    """Concurrent calls neither crash nor mix; each sees its own program's results."""
    plan = llama_plan(QuantType.Q4_0)
    ids = random_ids(30)
    expected = Cache(make_backend(plan)).feed("r", ids, 30)
    shared = make_backend(plan)
    Cache(shared)
    failures: list[str] = []

    def work(block: int) -> None:
        backend = make_backend(plan)
        for _ in range(5):
            if not np.array_equal(Cache(backend).feed("r", ids, 7), expected):
                failures.append("own program")
            batch = Cache.__new__(Cache)
            batch.backend, batch.lengths, batch.tables = shared, {}, {}
            batch.free = [2 * block + 1, 2 * block + 2]
            shared.forward(batch.batch([("r", ids)]))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


# ---- hostile arguments: an error, never a crash, and the next step works ---------------------


def good_batch() -> StepBatch:
    return StepBatch(
        token_ids=np.array([1, 2, 3], dtype=np.int32),
        positions=np.array([0, 1, 0], dtype=np.int32),
        query_start_loc=np.array([0, 2, 3], dtype=np.int32),
        seq_lens=np.array([2, 1], dtype=np.int32),
        block_table=np.array([[1], [2]], dtype=np.int32),
        logits_indices=np.array([1, 2], dtype=np.int32),
    )


def i32(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


HOSTILE: dict[str, dict[str, Any]] = {
    "token id -1": {"token_ids": i32(1, -1, 3)},
    "token id = vocab": {"token_ids": i32(1, 512, 3)},
    "token ids int64": {"token_ids": np.array([1, 2, 3])},
    "token ids float": {"token_ids": np.array([1, 2, 3], dtype=np.float32)},
    "token ids 2-d": {"token_ids": np.zeros((3, 1), dtype=np.int32)},
    "token ids strided": {"token_ids": np.zeros(6, dtype=np.int32)[::2]},
    "too few token ids": {"token_ids": i32(1, 2)},
    "position -1": {"positions": i32(-1, 0, 0)},
    "position gap": {"positions": i32(0, 5, 0)},
    "positions not last": {"seq_lens": i32(9, 1)},
    "huge position": {"positions": i32(0, 2**31 - 1, 0)},
    "seq_len too small": {"seq_lens": i32(1, 1)},
    "seq_len negative": {"seq_lens": i32(-2, 1)},
    "start not 0": {"query_start_loc": i32(1, 2, 3)},
    "start decreases": {"query_start_loc": i32(0, 4, 3)},
    "start too long": {"query_start_loc": i32(0, 2, 9)},
    "starts one short": {"query_start_loc": i32(0, 3)},
    "block -1": {"block_table": i32(-1, 2).reshape(2, 1)},
    "block = num_blocks": {"block_table": i32(1, 8).reshape(2, 1)},
    "no block columns": {"block_table": np.zeros((2, 0), dtype=np.int32)},
    "block table 1-d": {"block_table": i32(1, 2)},
    "block table rows": {"block_table": i32(1, 2, 3).reshape(3, 1)},
    "block table fortran": {"block_table": np.zeros((2, 3), dtype=np.int32, order="F")},
    "logits index -1": {"logits_indices": i32(-1)},
    "logits index = T": {"logits_indices": i32(3)},
    "None": {"positions": None},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_arguments_raise(name: str) -> None:
    backend = make_backend(llama_plan(num_layers=1, hidden=64, inner=64, head_dim=16))
    backend.init_kv_cache(8)
    expected = backend.forward(good_batch()).copy()
    with pytest.raises((ValueError, TypeError)):
        backend.forward(replace(good_batch(), **HOSTILE[name]))
    np.testing.assert_array_equal(backend.forward(good_batch()), expected)


@pytest.mark.parametrize(
    ("arguments", "parameter"),
    [
        (
            {"isa": "sse9"},
            "isa is .sse9.; choose one of portable, avx2, avxvnni, avx512, amx, amx-bf16, neon",
        ),
        ({"num_threads": 0}, "num_threads"),
        ({"num_threads": 5000}, "num_threads"),
        ({"block_size": 24}, "block_size"),
        ({"block_size": 0}, "block_size"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype"),
        ({"activation_precision": "low"}, "activation_precision"),
    ],
)
def test_bad_options_are_named(arguments: dict[str, Any], parameter: str) -> None:
    with pytest.raises(InvalidParameterError, match=parameter):
        make_backend(llama_plan(num_layers=1, hidden=64, inner=64), **arguments)


def test_a_plan_that_cannot_run_is_refused_with_its_tensor() -> None:
    plan = llama_plan(num_layers=1)
    ops = [
        structs.replace(op, weight=float_tensor("odd", np.zeros((256, 63))))
        if isinstance(op, ir.Linear)
        else op
        for op in plan.ops
    ]
    with pytest.raises(UnsupportedModelError, match=r"Linear\(odd\).*63 columns"):
        make_backend(structs.replace(plan, ops=tuple(ops)))


@pytest.mark.parametrize("quant_type", list(QuantType))
def test_not_finite_scales_are_found(quant_type: QuantType) -> None:
    """P49: the same bytes matter as in loading's check, wherever they are in a block."""
    rng = np.random.default_rng(quant_type.value)
    size, rows = quant_type.block_size, 33
    low = 0xFF if quant_type is QuantType.MXFP4 else 0x80
    good = rng.integers(0, 60, rows * quant_type.block_bytes, dtype=np.uint8)
    assert _C.is_finite(int(quant_type), good, rows, size)
    found = 0
    for row in (0, rows - 1):
        for offset in range(quant_type.block_bytes - 1):
            bad = good.copy()
            bad[row * quant_type.block_bytes + offset :][:2] = (low, 0xFF)
            finite = _C.is_finite(int(quant_type), bad, rows, size)
            assert finite == is_finite(TensorRef("x", (rows, size), quant_type, bad)), offset
            found += not finite
    assert found >= 2


@pytest.mark.parametrize("name", ["matrix", "norm", "table"])
def test_weights_that_are_not_finite_are_refused_by_name(name: str) -> None:
    """P49: a NaN in a matrix, a norm or an embedding table that no matrix is tied to."""
    plan = llama_plan(num_layers=1)
    kinds = {"matrix": ir.Linear, "norm": ir.RmsNorm, "table": ir.Embed}
    at, op = next((i, op) for i, op in enumerate(plan.ops) if isinstance(op, kinds[name]))
    shape = op.weight.shape  # type: ignore[union-attr]
    values = np.full(shape, 0.5)
    values.flat[-1] = np.nan
    bad = structs.replace(op, weight=float_tensor(f"the {name}", values))
    with pytest.raises(ModelLoadError, match=rf"'the {name}' holds NaN"):
        make_backend(structs.replace(plan, ops=(*plan.ops[:at], bad, *plan.ops[at + 1 :])))


@pytest.mark.parametrize(
    "quant_type", [QuantType.Q4_0, QuantType.Q4_K, QuantType.Q6_K, QuantType.IQ4_XS]
)
def test_quantised_weights_without_finite_scales_are_refused_by_name(quant_type: QuantType) -> None:
    """P49: kernels rely on it."""
    plan = llama_plan(quant_type, num_layers=1)
    at, op = next((i, op) for i, op in enumerate(plan.ops) if isinstance(op, ir.Linear))
    data = op.weight.data.copy()
    offset = data.size - quant_type.block_bytes + SCALE_OFFSETS[quant_type][0]
    data.reshape(-1)[offset : offset + 2] = (0x00, 0xFC)  # -infinity
    bad = structs.replace(op, weight=replace(op.weight, name="the matrix", data=data))
    with pytest.raises(ModelLoadError, match=r"'the matrix' holds NaN or infinity"):
        make_backend(structs.replace(plan, ops=(*plan.ops[:at], bad, *plan.ops[at + 1 :])))


def test_copy_and_size_of_cache_are_checked() -> None:
    backend = make_backend(llama_plan(num_layers=1))
    backend.init_kv_cache(4)
    for pair in ((0, 4), (-1, 0)):
        with pytest.raises(ValueError, match="block"):
            backend.copy_kv_blocks([pair])
    with pytest.raises((ValueError, MemoryError)):
        backend.init_kv_cache(2**50)
    gc.collect()
