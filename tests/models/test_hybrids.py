"""Hybrids from files: logits of `transformers`, and promise 1 however a prompt is cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tellin.exceptions import LoadError
from tellin.kernels.native import NativeBackend
from tellin.kernels.reference import ReferenceBackend
from tellin.loading import open_model
from tellin.loading.lora import load_adapter
from tellin.models import build_plan
from tellin.models.plan import ir
from tests.models.adapters import write_adapter
from tests.models.stepping import Stepper, logits_of
from tests.models.tiny_hybrids import (
    HYBRIDS,
    hybrid_arrays,
    hybrid_token_ids,
    write_tiny_hybrid,
)
from tests.models.tiny_hybrids_gguf import write_tiny_hybrid_gguf

NOT_IN_GGUF = ("bamba", "falcon-h1_norm", "granitehybrid_dense")
"""They rotate in a way that their converter's files do not tell, or have a norm of their own."""
FLOAT32: dict[str, Any] = {"activation_precision": "float32", "kv_cache_dtype": "float32"}
IN_GGUF = [name for name in HYBRIDS if name not in NOT_IN_GGUF]


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    with np.load(Path(__file__).parents[1] / "data" / "hybrids.npz") as stored:
        return dict(stored)


def plan_of(path: Path, **options: Any) -> ir.Plan:
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


def test_the_text_model_of_lfm2_vl(golden: dict[str, np.ndarray], tmp_path: Path) -> None:
    write_tiny_hybrid(tmp_path, "lfm2")
    config = {"model_type": "lfm2_vl", "text_config": HYBRIDS["lfm2"], "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    arrays = {
        name.replace("model.", "model.language_model.", 1): values
        for name, values in hybrid_arrays("lfm2").items()
    }
    arrays["model.vision_tower.embeddings.weight"] = np.zeros((2, 2), np.float32)
    save_file(arrays, tmp_path / "model.safetensors")
    logits = logits_of(backend_of(tmp_path), hybrid_token_ids())
    np.testing.assert_allclose(logits, golden["lfm2"], rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "missing", "message"),
    [
        ("bamba", "model.layers.0.mamba.norm.weight", r"mamba\.norm\.weight' is missing"),
        ("bamba", "lm_head.weight", r"lm_head.weight has 200 rows for a vocabulary of 258"),
    ],
)
def test_what_a_checkpoint_lacks_is_missed(
    name: str, missing: str, message: str, tmp_path: Path
) -> None:
    write_tiny_hybrid(tmp_path, name)
    arrays = hybrid_arrays(name)
    rest = arrays.pop(missing)[:200]
    if rest.ndim > 1:
        arrays[missing] = rest
    save_file(arrays, tmp_path / "model.safetensors")
    with pytest.raises(LoadError, match=message):
        backend_of(tmp_path)


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
    exact = NativeBackend(plan, **FLOAT32)
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
        ("lfm2", {"architectures": ["Lfm2BidirectionalModel"]}, "both directions .*Bidirectional"),
        ("nemotron_h", {"mlp_hidden_act": "silu"}, "'mlp_hidden_act' is 'silu'"),
        ("falcon-h1", {"ssm_multipliers": [1.0]}, r"'ssm_multipliers' is \(1.0,\), not 5"),
        ("lfm2", {"num_hidden_layers": 1 << 31}, "num_hidden_layers is 2147483648, allowed are 1"),
        ("lfm2", {"conv_bias": True}, "'conv_bias' is True"),
        ("lfm2", {"layer_types": ["conv"] * 3}, "layer_types has 3 entries for 4 layers"),
        ("lfm2", {"layer_types": ["mamba"] * 4}, "'mamba' are not supported for 'lfm2'"),
        ("lfm2", {"conv_L_cache": 1}, "conv_L_cache is 1, allowed are 2"),
        ("lfm2", {"conv_L_cache": 4}, r"conv\.weight.*\(64, 1, 3\).*kernels of 4 rows"),
        ("bamba", {"mamba_d_conv": 3}, r"conv1d\.weight.*kernels of 3 rows"),
        ("bamba", {"mamba_d_head": []}, "'mamba_d_head' is an array, expected an integer"),
        ("falcon-h1", {"ssm_in_multiplier": 1e300}, r"factor of mamba\.z_proj is 7.5e\+299"),
        ("granitehybrid", {"embedding_multiplier": 1e300}, "embedding_multiplier is 1e.300.*up to"),
        ("nemotron_h", {"num_hidden_layers": 9}, "num_hidden_layers is 9, but hybrid_override"),
        ("nemotron_h_moe", {"n_routed_experts": 8}, "router has rows for .*num_experts is 8"),
        ("lfm2", {"block_multiple_of": 0}, "block_multiple_of is 0"),
        ("granitehybrid", {"mamba_proj_bias": True}, "'mamba_proj_bias' is True"),
        ("granitehybrid", {"mamba_n_heads": 7}, "mamba_n_heads is 7 .* 112 values.* 128"),
        ("granitehybrid", {"mamba_n_groups": 3}, "mamba_n_groups is 3; 8 heads .* cannot share"),
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
    infinity = float("inf")  # written as `Infinity`, as Python does
    limits: list[list[Any]] = [[0.1, 2.5], [0.0, infinity], [0.0, {"__float__": "Infinity"}]]
    for limit in limits:
        path.write_text(json.dumps(HYBRIDS["granitehybrid"] | {"time_step_limit": limit}))
        with open_model(tmp_path) as source:
            assert source.hparams.mamba is not None
            found = source.hparams.mamba.time_step_limit
        assert found == (limit[0], 2.5 if limit[0] else infinity)


def test_a_granite_of_attention_alone_has_no_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The smallest ones of Granite 4: what they say of Mamba2 means nothing."""
    config = HYBRIDS["granitehybrid_dense"] | {"layer_types": ["attention"] * 4}
    monkeypatch.setitem(HYBRIDS, "alone", config | {"mamba_n_heads": 7})
    write_tiny_hybrid(tmp_path, "alone")
    plan = plan_of(tmp_path)
    assert (len(plan.kv_layers), plan.state_layers) == (4, ())


def test_logit_rows_are_gathered_before_they_are_used(tmp_path: Path) -> None:
    """So long steps run in passes; as for the other architectures, which `test_lora` has."""
    for name in HYBRIDS:
        ops = plan_of(write_tiny_hybrid(tmp_path / name, name), max_lora_rank=2).ops
        gathers = [i for i, op in enumerate(ops) if isinstance(op, ir.GatherRows)]
        logit = [
            i
            for i, op in enumerate(ops)
            if not isinstance(op, ir.GatherRows) and op.writes[0].rows is ir.Rows.LOGITS
        ]
        assert max(gathers) < min(logit), name


@pytest.mark.parametrize("name", ["lfm2", "granitehybrid"])
def test_adapters_change_recurrent_layers(name: str, tmp_path: Path) -> None:
    """7.3: an adapter of a fused in-projection gives what merged weights give."""
    modules = {
        "lfm2": ("conv.in_proj", "conv.out_proj", "feed_forward.w1"),
        "granitehybrid": ("mamba.in_proj", "mamba.out_proj", "shared_mlp.input_linear"),
    }[name]
    arrays = hybrid_arrays(name)
    random = np.random.RandomState(3)
    pairs = {}
    for module in modules:
        layer = f"model.layers.0.{module}"
        num_out, num_in = arrays[f"{layer}.weight"].shape
        a = (0.1 * random.standard_normal((2, num_in))).astype(np.float32)
        b = random.standard_normal((num_out, 2)).astype(np.float32)
        pairs[f"layers.0.{module}"] = (a, b)
        arrays[f"{layer}.weight"] += b @ a
    write_adapter(tmp_path / "adapter", pairs, lora_alpha=2)
    merged = write_tiny_hybrid(tmp_path / "merged", name)
    save_file(arrays, merged / "model.safetensors")
    expected = logits_of(backend_of(merged), hybrid_token_ids())
    with open_model(write_tiny_hybrid(tmp_path / "base", name)) as source:
        plan = build_plan(source, max_lora_rank=2)
        adapter = load_adapter(tmp_path / "adapter", source.hparams, plan.lora_sites, 2)
    for backend in (ReferenceBackend(plan), NativeBackend(plan, **FLOAT32)):
        backend.set_adapter(0, adapter.weights)
        logits = Stepper(backend, adapters={"a": 0}).step([("a", hybrid_token_ids().tolist())])[0]
        np.testing.assert_allclose(logits, expected, rtol=0, atol=2e-4)
