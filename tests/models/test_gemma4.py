"""Gemma 4: logits against golden ones, caches that layers share, promise 1, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tellin.exceptions import ModelLoadError, UnsupportedModelError
from tellin.kernels import _C
from tellin.kernels.batch import StepBatch
from tellin.kernels.native import NativeBackend
from tellin.kernels.reference import ReferenceBackend
from tellin.loading import open_model
from tellin.models import build_plan
from tellin.models.plan import ir
from tests.models import gemma4
from tests.models.gemma4 import CACHE_OF, CASES, token_ids, write_folder, write_gguf_file
from tests.models.stepping import Stepper, logits_of


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    with np.load(Path(__file__).parents[1] / "data" / "gemma4_logits.npz") as stored:
        return dict(stored)


def plan_of(path: Path, **options: Any) -> ir.Plan:
    with open_model(path) as source:
        return build_plan(source, **options)


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_those_of_an_outside_implementation(
    name: str, golden: dict[str, np.ndarray], tmp_path: Path
) -> None:
    """From checkpoints and GGUF files, alone and inside of a model with images and sound."""
    assert golden[name].std() > 1
    unified = [gemma4.write_composite(tmp_path / "12b", name, "gemma4_unified")]
    paths = (
        write_folder(tmp_path / "text", name),
        *(unified if name == "large" else ()),
        gemma4.write_composite(tmp_path / "whole", name),
        write_gguf_file(tmp_path / "tiny.gguf", name),
    )
    for path in paths:
        logits = logits_of(ReferenceBackend(plan_of(path)), token_ids())
        np.testing.assert_allclose(logits, golden[name], rtol=0, atol=5e-5, err_msg=str(path))
    native = NativeBackend(
        plan_of(paths[0]), activation_precision="float32", kv_cache_dtype="float32"
    )
    logits = logits_of(native, token_ids())
    np.testing.assert_allclose(logits, golden[name], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_layers_that_share_a_cache_have_none(name: str, tmp_path: Path) -> None:
    plan = plan_of(write_folder(tmp_path, name))
    attentions = [op for op in plan.ops if isinstance(op, ir.Attention)]
    assert [op.layer for op in attentions] == CACHE_OF[name]
    written = [op.layer for op in attentions if op.k is not None]
    assert written == sorted(set(CACHE_OF[name])) == list(range(len(plan.kv_layers)))
    values = sum(2 * layer.num_kv_heads * layer.head_dim for layer in plan.kv_layers)
    backend = NativeBackend(plan, kv_cache_dtype="float32")
    assert backend.kv_bytes_per_block() == 16 * 4 * values
    for op in attentions:
        assert (op.num_kv_heads, op.head_dim, op.sliding_window) == (
            plan.kv_layers[op.layer].num_kv_heads,
            plan.kv_layers[op.layer].head_dim,
            plan.kv_layers[op.layer].sliding_window,
        )


@pytest.mark.parametrize("name", CASES)
def test_promise_1_passes_chunks_and_batches_change_no_bit(name: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path, name)
    ids, other = token_ids().tolist(), token_ids()[::-1].tolist()
    recorded = logits_of(ReferenceBackend(plan_of(folder, fuse=False)), ids)
    plan = plan_of(folder)
    np.testing.assert_array_equal(logits_of(ReferenceBackend(plan), ids), recorded)
    for isa in _C.linear_variants():
        for kv_cache_dtype in ("float16", "int8"):
            backend = NativeBackend(plan, isa=isa, num_threads=2, kv_cache_dtype=kv_cache_dtype)
            whole = logits_of(backend, ids)
            chunked = Stepper(backend)
            parts = [chunked.step([("a", ids[i : i + 7])])[0] for i in range(0, len(ids), 7)]
            np.testing.assert_array_equal(np.concatenate(parts), whole, err_msg=isa)
            crowd = Stepper(backend)
            crowd.step([("b", other), ("a", ids[:3])])
            rows = [crowd.step([("b", [i]), ("a", ids[i : i + 1])])[1] for i in range(3, 15)]
            np.testing.assert_array_equal(np.concatenate(rows), whole[3:15], err_msg=isa)


def test_layers_after_the_last_cache_run_for_wanted_rows_only(tmp_path: Path) -> None:
    """Whichever rows' logits are wanted, and in which order, their bits are the same."""
    plan = plan_of(write_folder(tmp_path, "small"))
    readers = [op for op in plan.ops if isinstance(op, ir.Attention) and op.k is None]
    assert [op.out.rows for op in readers] == [ir.Rows.LOGITS] * 3
    lengths = (700, 5, 40)
    ids = np.arange(sum(lengths), dtype=np.int32) * 7 % gemma4.VOCAB
    positions = np.concatenate([np.arange(n, dtype=np.int32) for n in lengths])
    starts = np.cumsum([0, *lengths], dtype=np.int32)
    table = np.zeros((3, 44), np.int32)
    for r, first in enumerate((1, 45, 46)):
        table[r] = np.minimum(first + np.arange(44), 63)
    wanted = [*range(744, 698, -1), 3, 4, 5, 699, 700, 701]
    for backend in (
        NativeBackend(plan, num_threads=2, kv_cache_dtype="int16"),
        ReferenceBackend(plan),
    ):
        backend.init_kv_cache(64)

        def logits(rows: list[int], backend: Any = backend) -> np.ndarray:
            seq_lens, indices = np.array(lengths, np.int32), np.array(rows, np.int32)
            batch = StepBatch(ids, positions, starts, seq_lens, table, indices)
            return np.array(backend.forward(batch))

        everything = logits(list(range(len(ids))))
        np.testing.assert_array_equal(logits(wanted), everything[wanted])
        np.testing.assert_array_equal(logits([699, 704, 744]), everything[[699, 704, 744]])
        assert logits([]).shape == (0, gemma4.VOCAB)


def test_a_long_prompt_runs_in_several_passes(tmp_path: Path) -> None:
    """Rows of a later pass see, in shared layers too, what earlier passes have cached."""
    plan = plan_of(write_folder(tmp_path, "small"))
    ids = (np.arange(1200) * 7 % gemma4.VOCAB).tolist()
    backend = NativeBackend(plan, num_threads=2)
    whole = Stepper(backend, num_blocks=128).step([("a", ids)])[0]
    stepper = Stepper(backend, num_blocks=128)
    parts = [stepper.step([("a", ids[i : i + 300])])[0] for i in range(0, len(ids), 300)]
    np.testing.assert_array_equal(np.concatenate(parts), whole)


# ---- what is read, and what is refused ---------------------------------------------------------


def test_configurations_may_name_layers_one_by_one(
    golden: dict[str, np.ndarray], tmp_path: Path
) -> None:
    """As newer versions of `transformers` write what differs from layer to layer."""
    full = {"head_dim": gemma4.GLOBAL_DIM, "num_key_value_heads": 1}
    keys = {"global_head_dim": None, "num_global_key_value_heads": None}
    keys |= {"hidden_size_per_layer_input": None}
    folder = write_folder(tmp_path, "large", **keys, per_layer_config={"2": full})
    logits = logits_of(ReferenceBackend(plan_of(folder)), token_ids())
    np.testing.assert_allclose(logits, golden["large"], rtol=0, atol=5e-5)


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("large", {"use_bidirectional_attention": "all"}, "'all', which is not supported"),
        ("large", {"hidden_activation": "silu"}, "activation 'silu'"),
        ("large", {"layer_types": ["full_attention"] * 2}, "2 entries for 3 layers"),
        ("large", {"layer_types": ["chunked_attention"] * 3}, "'chunked_attention'"),
        ("large", {"per_layer_config": {"0": {"sliding_window": 4}}}, "'sliding_window'"),
        ("small", {"num_kv_shared_layers": 6}, "layer 1 shares .* but there is none"),
        ("small", {"num_kv_shared_layers": 8}, "8 of 7 layers"),
        ("large", {"global_head_dim": 1 << 40}, "global_head_dim is 1099511627776"),
        ("large", {"num_hidden_layers": 1 << 40}, "num_hidden_layers is 1099511627776"),
        ("small", {"final_logit_softcapping": 1e300}, "final_logit_softcapping is 1e.300.*up to"),
        ("small", {"num_attention_heads": 3}, "3 attention heads"),
        (
            "small",
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "yarn"},
                    "sliding_attention": {"rope_type": "default"},
                }
            },
            "'yarn' are not supported",
        ),
        ("mixture", {"enable_moe_block": False}, "gate_up_proj"),
    ],
)
def test_what_does_not_run_is_refused(
    name: str, keys: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = write_folder(tmp_path, name, **keys)
    with pytest.raises((UnsupportedModelError, ModelLoadError), match=message):
        plan_of(folder)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"gemma4.attention.value_length_swa": 8}, "only equal ones"),
        ({"gemma4.rope.scaling.type": "yarn"}, "rope scaling 'yarn'"),
        ({"gemma4.attention.shared_kv_layers": 7}, "but there is none"),
        (
            {"gemma4.feed_forward_length": np.array([48], np.int32)},
            "has 1 entries, expected 7 or more",
        ),
        (
            {"gemma4.feed_forward_length": np.full(7, np.nan, np.float32)},
            "is an array of float32s, not integers",
        ),
    ],
)
def test_gguf_variants_are_refused(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = write_gguf_file(tmp_path / "tiny.gguf", "small", **keys)
    with pytest.raises((UnsupportedModelError, ModelLoadError), match=message):
        plan_of(path)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_checkpoints_of_transformers(
    name: str, golden: dict[str, np.ndarray], tmp_path: Path
) -> None:
    from tests.data.make.make_gemma4_logits import make_model

    make_model(name).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "gemma4_text"
    logits = logits_of(ReferenceBackend(plan_of(tmp_path)), token_ids())
    np.testing.assert_allclose(logits, golden[name], rtol=0, atol=5e-5)
