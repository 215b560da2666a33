"""The reference backend on SmolLM2, against values that `transformers` computed in float32."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tellin.kernels.reference import ReferenceBackend
from tellin.loading import open_model
from tellin.models import build_plan
from tests.models.stepping import Stepper, logits_of

TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    with np.load(Path(__file__).parents[1] / "data" / "smollm2.npz") as stored:
        return dict(stored)


@pytest.fixture(scope="module")
def backend(smollm2_path: Path) -> Iterator[ReferenceBackend]:
    with open_model(smollm2_path) as source:
        backend = ReferenceBackend(build_plan(source), batched=True)
    yield backend
    backend.close()


def assert_top_logits(
    logits: np.ndarray, ids: np.ndarray, top: np.ndarray, lse: np.ndarray
) -> None:
    """The largest stored logits, their place at the top, and the normaliser."""
    np.testing.assert_allclose(np.take_along_axis(logits, ids, axis=1), top, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(logits.max(axis=1), top[:, 0], rtol=0, atol=TOLERANCE)
    exact = np.log(np.exp(logits.astype(np.float64)).sum(axis=1))
    np.testing.assert_allclose(exact, lse, rtol=0, atol=TOLERANCE)


def test_logits_equal_those_of_an_outside_implementation(
    backend: ReferenceBackend, golden: dict[str, np.ndarray]
) -> None:
    logits = logits_of(backend, golden["text_ids"][: len(golden["top_ids"])])
    assert_top_logits(logits, golden["top_ids"], golden["top_logits"], golden["logsumexp"])


def test_the_capital_of_france(backend: ReferenceBackend, golden: dict[str, np.ndarray]) -> None:
    """Greedy, one token per step: "The capital of France is Paris." and the end."""
    stepper = Stepper(backend)
    next_ids = golden["chat_prompt_ids"].tolist()
    output = []
    for _ in golden["chat_output_ids"]:
        logits = stepper.step([("chat", next_ids)])[0]
        next_ids = [int(logits[-1].argmax())]
        output += next_ids
    assert output == golden["chat_output_ids"].tolist()


@pytest.mark.slow
def test_logits_far_into_a_text(backend: ReferenceBackend, golden: dict[str, np.ndarray]) -> None:
    stepper = Stepper(backend, num_blocks=128)
    ids = golden["text_ids"].tolist()
    logits = np.concatenate(
        [stepper.step([("text", ids[i : i + 250])])[0] for i in range(0, len(ids), 250)]
    )
    assert_top_logits(
        logits[golden["far_positions"]],
        golden["far_top_ids"],
        golden["far_top_logits"],
        golden["far_logsumexp"],
    )


@pytest.mark.slow
def test_promise_1_on_a_real_model(smollm2_path: Path, golden: dict[str, np.ndarray]) -> None:
    with open_model(smollm2_path) as source:
        backend = ReferenceBackend(build_plan(source))
    ids = golden["text_ids"][:40].tolist()
    whole = logits_of(backend, ids)
    stepper = Stepper(backend)
    first = stepper.step([("b", ids[3:9]), ("a", ids[:17])])[1]
    rest = [stepper.step([("a", ids[i : i + 1]), ("b", ids[i : i + 2])])[0] for i in range(17, 40)]
    np.testing.assert_array_equal(np.concatenate([first, *rest]), whole)


@pytest.mark.slow
def test_all_logits_equal_transformers(
    smollm2_path: Path, backend: ReferenceBackend, golden: dict[str, np.ndarray]
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
    logits = logits_of(backend, ids)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=TOLERANCE)
