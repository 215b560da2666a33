"""Image encoders of Qwen's models in GGUF files: the same as the folders they come from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from tellin import LLM, SamplingParams
from tellin.exceptions import ModelLoadError, UnsupportedModelError
from tellin.kernels.native import NativeBackend
from tellin.loading import load_image_processor, open_vision
from tests.loading.gguf_writer import RawTensor, write_gguf
from tests.models import gated_delta, qwen_images, qwen_vl, vision
from tests.models.qwen_vl import CASES, FLOATS, PAD, PICTURES, Prompt, write_qwen_vl
from tests.models.qwen_vl_gguf import tower_metadata, tower_tensors, vocabulary, write_pair


@pytest.mark.parametrize("case", CASES)
def test_the_same_as_the_folder(tmp_path: Path, case: str) -> None:
    """Pixels, rows and logits, bit for bit."""
    model = write_pair(tmp_path / "gguf", case)
    ours, theirs = Prompt(model), Prompt(write_qwen_vl(tmp_path / "hf", case))
    assert ours.ids == theirs.ids
    for found, expected in zip(ours.images, theirs.images, strict=True):
        np.testing.assert_array_equal(found.pixels, expected.pixels)
    rows = ours.rows(NativeBackend)
    np.testing.assert_array_equal(rows, theirs.rows(NativeBackend))
    logits = theirs.logits(NativeBackend, rows)
    np.testing.assert_array_equal(ours.logits(NativeBackend, rows), logits)


def test_qwen35(tmp_path: Path) -> None:
    """Its encoder is Qwen3-VL's without rows of layers in between."""
    folder = qwen_images.write_qwen(tmp_path / "hf")
    keys = vocabulary() | {"qwen35.vocab_size": vision.VOCAB}
    (tmp_path / "gguf").mkdir()
    model = gated_delta.write_tiny_gguf(
        tmp_path / "gguf" / "model.gguf", "qwen35", vocab=vision.VOCAB, keys=keys
    )
    tensors: dict[str, np.ndarray] = {}
    for name, values in qwen_images.tower_arrays().items():
        tensors |= tower_tensors("qwen3_vl", name, values)
    metadata = tower_metadata("qwen3_vl") | {
        "clip.vision.block_count": qwen_images.DEPTH,
        "clip.vision.image_size": qwen_images.SIDE * qwen_images.PATCH,
        "clip.vision.is_deepstack_layers": np.array([False] * qwen_images.DEPTH),
        "clip.vision.image_mean": np.array([0.5] * 3, np.float32),
        "clip.vision.image_std": np.array([0.5] * 3, np.float32),
    }
    write_gguf(tmp_path / "gguf" / "mmproj-model.gguf", metadata, tensors)
    ours, theirs = Prompt(model), Prompt(folder)
    assert ours.ids == theirs.ids
    np.testing.assert_array_equal(ours.rows(NativeBackend), theirs.rows(NativeBackend))
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    prompt = {"prompt": f"{PAD} and {PAD}?", "multi_modal_data": {"image": list(PICTURES)}}
    texts = []
    for path in (model, folder):
        with LLM(str(path), num_threads=1, num_kv_blocks=32, max_model_len=128, **FLOATS) as llm:
            texts.append(llm.generate([prompt], params)[0].outputs[0].token_ids)
    assert texts[0] == texts[1]


def test_quantised_encoders(tmp_path: Path) -> None:
    """The fused matrix of queries, keys and values is taken apart as it is."""
    write_pair(tmp_path, "qwen3_vl")
    prompt = Prompt(tmp_path / "model.gguf")
    floats = prompt.rows(NativeBackend)
    tensors: dict[str, np.ndarray | RawTensor] = {}
    for name, values in qwen_vl.arrays("qwen3_vl").items():
        if "visual." in name:
            tensors |= tower_tensors("qwen3_vl", name.removeprefix("model.visual."), values)
    kind = gguf.GGMLQuantizationType.Q8_0
    for name, values in tensors.items():
        if not isinstance(values, np.ndarray) or values.ndim != 2 or "position" in name:
            continue
        if values.shape[1] % 32 == 0:
            packed = np.ascontiguousarray(gguf.quants.quantize(values, kind))
            tensors[name] = RawTensor(values.shape, int(kind), packed.tobytes())
    write_gguf(tmp_path / "mmproj-model.gguf", tower_metadata("qwen3_vl"), tensors)
    source = open_vision(tmp_path / "model.gguf")
    assert source is not None
    assert source.tower.tensors["layers.1.self_attn.k_proj.weight"].format_name == "Q8_0"
    difference = prompt.rows(NativeBackend) - floats
    assert 0 < np.abs(difference).max() < 0.1


def test_sizes_of_pictures(tmp_path: Path) -> None:
    """8 to 4096 rows of 8 x 8 pixels, or as the file says."""
    model = write_pair(tmp_path, "qwen3_vl")
    processor = load_image_processor(model)
    assert processor is not None
    assert processor.max_tokens_per_image == 4096
    limits = {"clip.vision.image_min_pixels": 640, "clip.vision.image_max_pixels": 20480}
    write_pair(tmp_path, "qwen3_vl", **limits)
    processor = load_image_processor(model)
    assert processor is not None
    assert processor.max_tokens_per_image == 320


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("qwen2_vl", {"clip.projector_type": "qwen3vl_merger"}, "does not go with a text model"),
        ("qwen3_vl", {"clip.projector_type": "qwen2vl_merger"}, "does not go with a text model"),
        ("qwen2_5_vl", {"clip.use_silu": False}, "clip.use_silu is False"),
        ("qwen2_vl", {"clip.use_gelu": True}, "clip.use_gelu is True"),
        ("qwen2_5_vl", {"clip.vision.n_wa_pattern": 0}, "n_wa_pattern is 0"),
        ("qwen2_5_vl", {"clip.vision.window_size": 7}, "a window of 7 pixels"),
        ("qwen2_vl", {"clip.vision.attention.head_count": 3}, "does not divide into fours"),
        ("qwen2_vl", {"clip.vision.patch_size": 0}, "patch_size 0"),
        ("qwen3_vl", {"clip.vision.image_size": 3}, "0 patches"),
        (
            "qwen3_vl",
            {"clip.vision.is_deepstack_layers": np.array([True, False, False, False])},
            "names 1 layers, but the text model takes rows of 2",
        ),
        ("qwen3_vl", {"clip.vision.is_deepstack_layers": np.array([True, True])}, "has 2 entries"),
    ],
)
def test_files_that_do_not_fit(
    tmp_path: Path, case: str, changes: dict[str, Any], message: str
) -> None:
    model = write_pair(tmp_path, case, **changes)
    with pytest.raises((ModelLoadError, UnsupportedModelError), match=message):
        load_image_processor(model, tmp_path / "mmproj-model.gguf")
