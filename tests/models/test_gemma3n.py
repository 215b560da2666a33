"""Gemma 3n: logits against golden ones, promise 1, ids behind the table of inputs, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tellin.exceptions import ModelLoadError, UnsupportedModelError
from tellin.kernels import _C
from tellin.kernels.native import NativeBackend
from tellin.kernels.reference import ReferenceBackend
from tellin.loading import open_model
from tellin.models import build_plan
from tellin.models.plan import ir
from tests.models.gemma3n import CACHE_OF, KNOWN, VOCAB, write_folder, write_gguf_file
from tests.models.gemma4 import token_ids
from tests.models.stepping import Stepper, logits_of


@pytest.fixture(scope="module")
def golden() -> np.ndarray:
    with np.load(Path(__file__).parents[1] / "data" / "gemma3n_logits.npz") as stored:
        return np.array(stored["logits"])


def plan_of(path: Path, **options: Any) -> ir.Plan:
    with open_model(path) as source:
        return build_plan(source, **options)


def test_logits_equal_those_of_an_outside_implementation(
    golden: np.ndarray, tmp_path: Path
) -> None:
    """From a checkpoint and a GGUF file; one id is behind the table of the layers' inputs."""
    assert golden.std() > 1
    assert (token_ids() >= KNOWN).any()
    for path in (write_folder(tmp_path / "folder"), write_gguf_file(tmp_path / "tiny.gguf")):
        plan = plan_of(path)
        logits = logits_of(ReferenceBackend(plan), token_ids())
        np.testing.assert_allclose(logits, golden, rtol=0, atol=5e-5, err_msg=str(path))
        native = NativeBackend(plan, activation_precision="float32", kv_cache_dtype="float32")
        np.testing.assert_allclose(logits_of(native, token_ids()), golden, rtol=0, atol=1e-4)


def test_shared_caches_and_sparse_layers(tmp_path: Path) -> None:
    plan = plan_of(write_folder(tmp_path))
    attentions = [op for op in plan.ops if isinstance(op, ir.Attention)]
    assert [op.layer for op in attentions] == CACHE_OF
    assert [op.out.rows for op in attentions if op.k is None] == [ir.Rows.LOGITS] * 3
    kinds = [type(op).__name__ for op in plan.ops]
    assert kinds.count("KeepLargest") == 3
    assert kinds.count("AddScaled") == len(CACHE_OF) * (4 * 4 + 2 * 5)


def test_promise_1_passes_chunks_and_batches_change_no_bit(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    ids, other = token_ids().tolist(), list(range(VOCAB))
    recorded = logits_of(ReferenceBackend(plan_of(folder, fuse=False)), ids)
    plan = plan_of(folder)
    np.testing.assert_array_equal(logits_of(ReferenceBackend(plan), ids), recorded)
    for isa in _C.linear_variants():
        backend = NativeBackend(plan, isa=isa, num_threads=2)
        whole = logits_of(backend, ids)
        chunked = Stepper(backend)
        parts = [chunked.step([("a", ids[i : i + 7])])[0] for i in range(0, len(ids), 7)]
        np.testing.assert_array_equal(np.concatenate(parts), whole, err_msg=isa)
        crowd = Stepper(backend)
        crowd.step([("b", other), ("a", ids[:3])])
        rows = [crowd.step([("b", [i]), ("a", ids[i : i + 1])])[1] for i in range(3, 15)]
        np.testing.assert_array_equal(np.concatenate(rows), whole[3:15], err_msg=isa)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"altup_active_idx": 1}, "'altup_active_idx' is 1"),
        ({"altup_correct_scale": False}, "'altup_correct_scale' is False"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "'rope_scaling'"),
        ({"activation_sparsity_pattern": [0.5]}, "there are 1"),
        ({"activation_sparsity_pattern": [1.0] * 7}, r"has 1\.0"),
        ({"altup_num_inputs": 3}, "altup"),
        ({"altup_num_inputs": 0}, "altup_num_inputs is 0"),
        ({"num_kv_shared_layers": 6}, "there is none"),
        ({"intermediate_size": ["x"]}, "'intermediate_size' is an array"),
    ],
)
def test_what_does_not_run_is_refused(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises((UnsupportedModelError, ModelLoadError), match=message):
        plan_of(write_folder(tmp_path, **keys))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (np.full(6, np.nan, np.float32), "float32s, not integers"),
        (np.array([], np.int32), "0 entries, expected 1 or more"),
    ],
)
def test_sizes_of_gguf_files_are_integers(sizes: np.ndarray, message: str, tmp_path: Path) -> None:
    path = write_gguf_file(tmp_path / "tiny.gguf", feed_forward_length=sizes)
    with pytest.raises(ModelLoadError, match=message):
        plan_of(path)


@pytest.mark.slow
def test_checkpoints_of_transformers(golden: np.ndarray, tmp_path: Path) -> None:
    from tests.data.make.make_gemma3n_logits import make_model

    make_model().save_pretrained(tmp_path)
    logits = logits_of(ReferenceBackend(plan_of(tmp_path)), token_ids())
    np.testing.assert_allclose(logits, golden, rtol=0, atol=5e-5)
