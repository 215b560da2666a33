"""Hybrids from files: logits of `transformers`, and promise 1 however a prompt is cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tellin.exceptions import LoadError
from tellin.kernels.native import NativeBackend
from tellin.kernels.reference import ReferenceBackend
from tellin.loading import open_model
from tellin.models import build_plan
from tellin.models.plan.ir import Plan
from tests.models.stepping import Stepper, logits_of
from tests.models.tiny_hybrids import (
    HYBRIDS,
    hybrid_token_ids,
    write_tiny_hybrid,
)
from tests.models.tiny_hybrids_gguf import write_tiny_hybrid_gguf

NOT_IN_GGUF = ("bamba", "falcon-h1_norm", "granitehybrid_dense")
"""They rotate in a way that their converter's files do not tell, or have a norm of their own."""
IN_GGUF = [name for name in HYBRIDS if name not in NOT_IN_GGUF]


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    with np.load(Path(__file__).parents[1] / "data" / "hybrids.npz") as stored:
        return dict(stored)


def plan_of(path: Path, **options: Any) -> Plan:
    with open_model(path) as source:
        return build_plan(source, **options)


def backend_of(path: Path, **options: Any) -> ReferenceBackend:
    return ReferenceBackend(plan_of(path, **options))


@pytest.mark.parametrize("name", HYBRIDS)
def test_checkpoints_give_the_logits_of_transformers(
    name: str, golden: dict[str, np.ndarray], tmp_path: Path
) -> None:
    logits = logits_of(backend_of(write_tiny_hybrid(tmp_path, name)), hybrid_token_ids())
    assert golden[name].std() > 1
    np.testing.assert_allclose(logits, golden[name], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", IN_GGUF)
def test_gguf_files_give_the_logits_of_transformers(
    name: str, golden: dict[str, np.ndarray], tmp_path: Path
) -> None:
    """Reshaped vectors, stacked experts, permuted rows, layers told apart by their heads."""
    path = write_tiny_hybrid_gguf(tmp_path / "tiny.gguf", name)
    logits = logits_of(backend_of(path), hybrid_token_ids())
    np.testing.assert_allclose(logits, golden[name], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", HYBRIDS)
def test_promise_1_chunks_and_neighbours_change_no_bit(name: str, tmp_path: Path) -> None:
    """In one step, in chunks, token by token among others; fused and as recorded."""
    backend = backend_of(write_tiny_hybrid(tmp_path, name))
    ids = hybrid_token_ids().tolist()
    other = ids[::-1]
    whole = Stepper(backend).step([("a", ids)])[0]
    np.testing.assert_array_equal(logits_of(backend_of(tmp_path, fuse=False), ids), whole)
    crowd = Stepper(backend)
    crowd.step([("b", other), ("a", ids[:3]), ("c", other[:5])])
    rest = [crowd.step([("c", [7]), ("a", ids[i : i + 2])])[1] for i in range(3, 19, 2)]
    np.testing.assert_array_equal(np.concatenate(rest), whole[3:19])


@pytest.mark.parametrize("name", HYBRIDS)
def test_promise_1_with_native_kernels(name: str, golden: Any, tmp_path: Path) -> None:
    """Logits of `transformers` in float32; in the default precision equal bits in any chunks."""
    plan = plan_of(write_tiny_hybrid(tmp_path, name))
    exact = NativeBackend(plan, activation_precision="float32", kv_cache_dtype="float32")
    logits = logits_of(exact, hybrid_token_ids())
    np.testing.assert_allclose(logits, golden[name], rtol=0, atol=2e-4)
    ids = hybrid_token_ids().tolist()
    whole = logits_of(NativeBackend(plan, num_threads=1), ids)
    crowd = Stepper(NativeBackend(plan, num_threads=2))
    crowd.step([("b", ids[::-1]), ("a", ids[:3]), ("c", ids[:5])])
    rest = [crowd.step([("c", [7]), ("a", ids[i : i + 2])])[1] for i in range(3, 19, 2)]
    np.testing.assert_array_equal(np.concatenate(rest), whole[3:19])


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("lfm2", {"conv_bias": True}, "'conv_bias' is True"),
        ("lfm2", {"layer_types": ["conv"] * 3}, "layer_types has 3 entries for 4 layers"),
        ("lfm2", {"layer_types": ["mamba"] * 4}, "'mamba' are not supported for 'lfm2'"),
        ("lfm2", {"conv_L_cache": 1}, "kernel is 1, allowed are 2"),
        ("lfm2", {"block_multiple_of": 0}, "block_multiple_of is 0"),
        ("granitehybrid", {"mamba_proj_bias": True}, "'mamba_proj_bias' is True"),
        ("granitehybrid", {"mamba_n_heads": 7}, "7 mamba heads of 16 are 112 values.* 128"),
        ("granitehybrid", {"mamba_n_groups": 3}, "8 mamba heads cannot share 3 groups"),
        ("granitehybrid", {"position_embedding_type": "alibi"}, "'alibi' positions"),
        ("granitehybrid", {"time_step_limit": [0.0]}, r"time_step_limit.*\[0.0\]"),
    ],
)
def test_what_is_not_supported_is_refused_with_its_name_and_value(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = write_tiny_hybrid(tmp_path, name) / "config.json"
    path.write_text(json.dumps(HYBRIDS[name] | changes))
    with pytest.raises(LoadError, match=message):
        backend_of(tmp_path)


def test_a_time_step_limit_is_read_in_either_spelling(tmp_path: Path) -> None:
    path = write_tiny_hybrid(tmp_path, "granitehybrid") / "config.json"
    limits: list[list[Any]] = [[0.1, 2.5], [0.0, {"__float__": "Infinity"}]]
    for limit in limits:
        path.write_text(json.dumps(HYBRIDS["granitehybrid"] | {"time_step_limit": limit}))
        with open_model(tmp_path) as source:
            assert source.hparams.mamba is not None
            found = source.hparams.mamba.time_step_limit
        assert found == (limit[0], 2.5 if limit[0] else float("inf"))
