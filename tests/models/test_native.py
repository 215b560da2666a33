"""The native backend against the reference: every architecture, weight type and kernel variant."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import gguf
import numpy as np
import pytest

from tellin.kernels import _C
from tellin.kernels.batch import StepBatch
from tellin.kernels.native import NativeBackend
from tellin.kernels.reference import ReferenceBackend
from tellin.loading.tensors import QuantType, TensorRef
from tellin.models import build_plan
from tellin.models.plan.ir import Plan
from tests.models.stepping import Stepper, logits_of
from tests.models.tiny import (
    ALL_CASES,
    MAX_MODEL_LEN,
    MemorySource,
    tiny_source,
    tiny_token_ids,
)

DECODERS = [name for name, hp in ALL_CASES.items() if hp.architecture != "bert"]


def tiny_plan(name: str) -> Plan:
    return build_plan(tiny_source(name), max_model_len=MAX_MODEL_LEN.get(name))


def packed(values: np.ndarray, quant_type: QuantType) -> np.ndarray:
    if quant_type is not QuantType.IQ4_NL:  # the `gguf` package reads it only
        return gguf.quants.quantize(values, gguf.GGMLQuantizationType(int(quant_type)))
    blocks = values.reshape(-1, 32)
    scale = (np.abs(blocks).max(axis=1, keepdims=True) / 113).astype(np.float16)
    steps = blocks / scale.astype(np.float32)
    codes = np.abs(steps[..., None] - gguf.quants.IQ4_NL.kvalues).argmin(axis=-1).astype(np.uint8)
    nibbles = codes[:, :16] | codes[:, 16:] << 4
    return np.concatenate([scale.view(np.uint8), nibbles], axis=1)


def quantised_source(name: str, quant_type: QuantType) -> MemorySource:
    """A tiny model whose matrices are stored as ``quant_type``."""
    source = tiny_source(name)
    tensors = {}
    for key, tensor in source.tensors.items():
        if len(tensor.shape) == 2:
            values = tensor.data.view(np.float32).reshape(tensor.shape)
            data = np.ascontiguousarray(packed(values, quant_type)).reshape(-1).view(np.uint8)
            tensors[key] = TensorRef(key, tensor.shape, quant_type, data)
        else:
            tensors[key] = tensor
    return replace(source, tensors=tensors)


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("name", ALL_CASES)
def test_float32_weights_give_the_reference_logits(name: str, fuse: bool) -> None:
    plan = build_plan(tiny_source(name), max_model_len=MAX_MODEL_LEN.get(name), fuse=fuse)
    token_ids = tiny_token_ids()
    expected = logits_of(ReferenceBackend(plan), token_ids)
    with_native = logits_of(NativeBackend(plan, kv_cache_dtype="float32"), token_ids)
    np.testing.assert_allclose(with_native, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "kv_cache_dtype"),
    [
        (name, kind)
        for name in DECODERS
        for kind in ("float16", "int16", "int8")
        if kind != "int8"
        or not ALL_CASES[name].num_experts  # near routes: another expert may be chosen
    ],
)
def test_small_caches_stay_close(name: str, kv_cache_dtype: str) -> None:
    bound = 0.2 if kv_cache_dtype == "int8" else 0.02
    plan = tiny_plan(name)
    expected = logits_of(ReferenceBackend(plan), tiny_token_ids())
    logits = logits_of(NativeBackend(plan, kv_cache_dtype=kv_cache_dtype), tiny_token_ids())
    assert np.abs(logits - expected).max() < bound * max(1.0, expected.std())


@pytest.mark.parametrize(
    "quant_type",
    [t for t in QuantType if t.block_size <= 32],
    ids=lambda t: t.name,
)
def test_quantised_weights(quant_type: QuantType) -> None:
    """Float32 and 15-bit inputs of matrices give the dequantised float32 model; 8 bits round."""
    plan = build_plan(quantised_source("llama_tied", quant_type))
    token_ids = tiny_token_ids()
    expected = logits_of(ReferenceBackend(plan), token_ids)

    def relative_error(precision: str) -> float:
        backend = NativeBackend(plan, activation_precision=precision, kv_cache_dtype="float32")
        error = logits_of(backend, token_ids) - expected
        return float(np.sqrt(np.mean(error**2)) / expected.std())

    assert relative_error("float32") < 1e-5
    assert relative_error("int16") < 5e-4
    assert relative_error("int8") < 0.03


def mixed_steps(backend: Any) -> list[np.ndarray]:
    """One request's 20 logits rows: alone, in chunks, and in a crowd, token by token."""
    ids = tiny_token_ids().tolist()
    other = ids[::-1]
    whole = Stepper(backend).step([("a", ids)])[0]
    chunked = Stepper(backend)
    parts = [chunked.step([("a", ids[i : i + 7])])[0] for i in range(0, len(ids), 7)]
    crowd = Stepper(backend)
    rows = [crowd.step([("b", other), ("a", ids[:3]), ("c", other[:5])])[1]]
    rows += [
        crowd.step([("c", other[i : i + 1]), ("b", [i]), ("a", ids[i : i + 1])])[2]
        for i in range(3, len(ids))
    ]
    return [whole, np.concatenate(parts), np.concatenate(rows)]


@pytest.mark.parametrize("kv_cache_dtype", ["float32", "float16", "int16", "int8"])
@pytest.mark.parametrize(
    "name", ["llama", "gemma2", "gemma3", "qwen3", "mistral", "qwen2moe", "granitemoe"]
)
def test_promise_1_on_every_variant(name: str, kv_cache_dtype: str) -> None:
    """Chunks, batches and thread counts change no bit; each instruction set for itself."""
    plan = tiny_plan(name)
    for isa in _C.linear_variants():
        results = [
            logits
            for num_threads in (1, 3)
            for logits in mixed_steps(
                NativeBackend(plan, isa=isa, num_threads=num_threads, kv_cache_dtype=kv_cache_dtype)
            )
        ]
        for other in results[1:]:
            np.testing.assert_array_equal(other, results[0], err_msg=isa)


@pytest.mark.parametrize(
    "quant_type",
    [QuantType.Q4_1, QuantType.Q8_0, QuantType.IQ4_NL, QuantType.MXFP4],
    ids=lambda t: t.name,
)
@pytest.mark.parametrize("precision", ["int8", "int16", "float32"])
def test_promise_1_with_quantised_weights(quant_type: QuantType, precision: str) -> None:
    plan = build_plan(quantised_source("llama", quant_type))
    for isa in _C.linear_variants():
        backend = NativeBackend(plan, isa=isa, num_threads=2, activation_precision=precision)
        first, *others = mixed_steps(backend)
        for other in others:
            np.testing.assert_array_equal(other, first, err_msg=isa)


@pytest.mark.parametrize("name", ["llama", "gemma3", "bert"])
def test_hidden_states(name: str) -> None:
    plan = tiny_plan(name)
    reference, native = ReferenceBackend(plan), NativeBackend(plan, kv_cache_dtype="float32")
    for backend in (reference, native):
        logits_of(backend, tiny_token_ids())
    np.testing.assert_allclose(native.hidden(), reference.hidden(), rtol=0, atol=1e-4)


def test_token_types() -> None:
    """A row per token of the table of types, without them the first; other types are refused."""
    plan = tiny_plan("bert")
    ids = np.arange(4, dtype=np.int32)
    zero = np.zeros(4, np.int32)
    batch = StepBatch(ids, ids, np.array([0, 4], np.int32), np.array([4], np.int32),
                      np.zeros((1, 1), np.int32), ids)  # fmt: skip
    native = NativeBackend(plan)
    found = {}
    for name, types in (("none", None), ("zero", zero), ("pair", np.array([0, 0, 1, 1], np.int32))):
        step = replace(batch, token_types=types)
        found[name] = native.forward(step).copy()
        expected = ReferenceBackend(plan).forward(step)
        np.testing.assert_allclose(found[name], expected, rtol=0, atol=1e-4)
    np.testing.assert_array_equal(found["none"], found["zero"])
    assert (found["pair"] != found["zero"]).any(axis=1).all()
    for types in (zero + 2, zero - 1):
        with pytest.raises(ValueError, match=r"token_types\[0\].*2 types"):
            native.forward(replace(batch, token_types=types))
    with pytest.raises(ValueError, match="as many entries"):
        native.forward(replace(batch, token_types=zero[:3]))
    with pytest.raises(ValueError, match="0 types"):
        NativeBackend(tiny_plan("llama")).forward(replace(batch, token_types=zero))
