"""Real models on both backends, against values that `transformers` computed in float32."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tellin.kernels.native import NativeBackend
from tellin.kernels.reference import ReferenceBackend
from tellin.loading import open_model
from tellin.models import build_plan
from tests.models.stepping import Stepper, logits_of

DATA = Path(__file__).parents[1] / "data"
REFERENCE_TOLERANCE = 1e-3
NATIVE_TOLERANCE = 2e-3
Golden = dict[str, np.ndarray]


def load_golden(name: str) -> Golden:
    with np.load(DATA / f"{name}.npz") as stored:
        return dict(stored)


def make_backend(kind: type, path: Path, **options: Any) -> Any:
    with open_model(path) as source:
        return kind(build_plan(source), **options)


@pytest.fixture(scope="module")
def golden() -> Golden:
    return load_golden("smollm2")


@pytest.fixture(scope="module")
def reference(smollm2_path: Path) -> Iterator[ReferenceBackend]:
    """SmolLM2 on the reference backend."""
    backend = make_backend(ReferenceBackend, smollm2_path, batched=True)
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def native(smollm2_path: Path) -> Iterator[NativeBackend]:
    """SmolLM2 on the native backend, with float32 activations and cache."""
    backend = make_backend(
        NativeBackend, smollm2_path, activation_precision="float32", kv_cache_dtype="float32"
    )
    yield backend
    backend.close()


def assert_top_logits(logits: np.ndarray, golden: Golden, prefix: str, tolerance: float) -> None:
    """The largest stored logits, their place at the top, and the normaliser."""
    ids, top = golden[f"{prefix}top_ids"], golden[f"{prefix}top_logits"]
    np.testing.assert_allclose(np.take_along_axis(logits, ids, axis=1), top, rtol=0, atol=tolerance)
    np.testing.assert_allclose(logits.max(axis=1), top[:, 0], rtol=0, atol=tolerance)
    logsumexp = np.log(np.exp(logits.astype(np.float64)).sum(axis=1))
    np.testing.assert_allclose(logsumexp, golden[f"{prefix}logsumexp"], rtol=0, atol=tolerance)


def assert_near_and_far(
    backend: Any, golden: Golden, tolerance: float, num_tokens: int | None = None
) -> None:
    """The text in chunks of 250 tokens: its beginning, and positions far into it."""
    ids = golden["text_ids"].tolist()[:num_tokens]
    stepper = Stepper(backend, num_blocks=len(ids) // 16 + 2)
    logits = []
    for start in range(0, len(ids), 250):
        rows = stepper.step([("text", ids[start : start + 250])])[0]
        if start == 0:
            assert_top_logits(rows[: len(golden["top_ids"])], golden, "", tolerance)
        positions = golden["far_positions"] - start
        logits += list(rows[positions[(positions >= 0) & (positions < len(rows))]])
    far = {key: values[: len(logits)] for key, values in golden.items() if "far" in key}
    assert_top_logits(np.array(logits), far, "far_", tolerance)


def greedy(backend: Any, prompt_ids: list[int], num_tokens: int) -> list[int]:
    stepper = Stepper(backend)
    output: list[int] = []
    next_ids = prompt_ids
    for _ in range(num_tokens):
        logits = stepper.step([("prompt", next_ids)])[0]
        next_ids = [int(logits[-1].argmax())]
        output += next_ids
    return output


# ---- SmolLM2 -----------------------------------------------------------------------------------


def test_reference_logits_of_smollm2(reference: ReferenceBackend, golden: Golden) -> None:
    logits = logits_of(reference, golden["text_ids"][: len(golden["top_ids"])])
    assert_top_logits(logits, golden, "", REFERENCE_TOLERANCE)


def test_native_logits_of_smollm2(native: NativeBackend, golden: Golden) -> None:
    assert_near_and_far(native, golden, NATIVE_TOLERANCE, num_tokens=600)


def test_the_capital_of_france(native: NativeBackend, golden: Golden) -> None:
    """Greedy: "The capital of France is Paris." and the end."""
    expected = golden["output_ids"].tolist()
    assert greedy(native, golden["prompt_ids"].tolist(), len(expected)) == expected


def test_the_capital_of_france_in_default_precision(smollm2_path: Path, golden: Golden) -> None:
    expected = golden["output_ids"].tolist()
    backend = make_backend(NativeBackend, smollm2_path)
    assert greedy(backend, golden["prompt_ids"].tolist(), len(expected)) == expected


@pytest.mark.slow
def test_the_capital_of_france_by_the_reference(
    reference: ReferenceBackend, golden: Golden
) -> None:
    expected = golden["output_ids"].tolist()
    assert greedy(reference, golden["prompt_ids"].tolist(), len(expected)) == expected


@pytest.mark.slow
def test_logits_far_into_a_text(
    reference: ReferenceBackend, native: NativeBackend, golden: Golden
) -> None:
    assert_near_and_far(reference, golden, REFERENCE_TOLERANCE)
    assert_near_and_far(native, golden, NATIVE_TOLERANCE)


@pytest.mark.slow
def test_promise_1_of_the_reference(smollm2_path: Path, golden: Golden) -> None:
    backend = make_backend(ReferenceBackend, smollm2_path)
    ids = golden["text_ids"][:40].tolist()
    whole = logits_of(backend, ids)
    stepper = Stepper(backend)
    first = stepper.step([("b", ids[3:9]), ("a", ids[:17])])[1]
    rest = [stepper.step([("a", ids[i : i + 1]), ("b", ids[i : i + 2])])[0] for i in range(17, 40)]
    np.testing.assert_array_equal(np.concatenate([first, *rest]), whole)


@pytest.mark.slow
def test_all_logits_equal_transformers(
    smollm2_path: Path, reference: ReferenceBackend, native: NativeBackend, golden: Golden
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        smollm2_path.parent,
        gguf_file=smollm2_path.name,
        dtype=torch.float32,
        attn_implementation="eager",
    )
    ids = golden["text_ids"][:100]
    with torch.no_grad():
        expected = model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0].numpy()
    np.testing.assert_allclose(
        logits_of(reference, ids), expected, rtol=0, atol=REFERENCE_TOLERANCE
    )
    np.testing.assert_allclose(logits_of(native, ids), expected, rtol=0, atol=NATIVE_TOLERANCE)


@pytest.mark.slow
def test_distance_from_float32(
    smollm2_path: Path, reference: ReferenceBackend, golden: Golden
) -> None:
    """Mean KL divergence from float32 over 2,000 tokens; llama.cpp's is 0.0025 on this text."""
    from benchmarks.fidelity import backend_logits, measure

    ids = golden["text_ids"].tolist()
    engines = {
        precision: backend_logits(
            make_backend(NativeBackend, smollm2_path, activation_precision=precision), ids, 250
        )
        for precision in ("default", "high")
    }
    results = measure(backend_logits(reference, ids, 250), engines)
    assert results["default"].mean_kl <= 0.00168  # two thirds of llama.cpp's
    assert results["high"].mean_kl <= 1e-5


# ---- Gemma 3 and MiniLM ------------------------------------------------------------------------


@pytest.mark.slow
def test_gemma3(gemma3_path: Path) -> None:
    """Q4_K_M: local and global layers, beyond the window of 512 tokens."""
    golden = load_golden("gemma3")
    reference = make_backend(ReferenceBackend, gemma3_path, batched=True)
    assert_near_and_far(reference, golden, REFERENCE_TOLERANCE)
    reference.close()
    native = make_backend(
        NativeBackend, gemma3_path, activation_precision="float32", kv_cache_dtype="float32"
    )
    assert_near_and_far(native, golden, NATIVE_TOLERANCE)
    prompt, expected = golden["prompt_ids"].tolist(), golden["output_ids"].tolist()
    assert greedy(native, prompt, len(expected)) == expected


@pytest.mark.slow
@pytest.mark.parametrize("kind", [ReferenceBackend, NativeBackend])
def test_minilm(kind: type, minilm_path: Path) -> None:
    golden = load_golden("minilm")
    backend = make_backend(kind, minilm_path)
    requests = [(f"{i}", golden[f"ids_{i}"].tolist()) for i in range(3)]
    for i, hidden in enumerate(Stepper(backend).step(requests)):
        np.testing.assert_allclose(hidden.mean(axis=0), golden[f"mean_{i}"], rtol=0, atol=1e-4)
        if i == 0:
            np.testing.assert_allclose(hidden, golden["hidden_0"], rtol=0, atol=1e-4)
