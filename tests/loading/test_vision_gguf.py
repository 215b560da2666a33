"""Image encoders in GGUF files: the same as the folder they come from, and what is refused."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tellin.exceptions import ModelLoadError, ModelNotFoundError, UnsupportedModelError
from tellin.kernels.native import NativeBackend
from tellin.loading import load_image_processor, open_model, open_vision
from tellin.loading.dequantize import dequantize
from tellin.models.vision import build_vision_plans
from tellin.worker.image_encoder import ImageEncoder
from tests.loading.gguf_writer import write_gguf
from tests.loading.models import gguf_metadata, gguf_tensors
from tests.loading.test_images import picture, processor_of
from tests.loading.vocabularies import byte_level
from tests.models.vision import write_smolvlm

NAMES = (
    (r"patch_embed\.", "v.patch_embd."),
    (r"embed_positions\.", "v.position_embd."),
    (r"norm\.", "v.post_ln."),
    (r"projector_1\.", "mm.model.fc."),
    (r"layers\.(\d+)\.input_layernorm\.", r"v.blk.\1.ln1."),
    (r"layers\.(\d+)\.post_attention_layernorm\.", r"v.blk.\1.ln2."),
    (r"layers\.(\d+)\.self_attn\.o_proj\.", r"v.blk.\1.attn_out."),
    (r"layers\.(\d+)\.self_attn\.([qkv])_proj\.", r"v.blk.\1.attn_\2."),
    (r"layers\.(\d+)\.mlp\.(up|down)_proj\.", r"v.blk.\1.ffn_\2."),
)


def metadata(**changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "general.architecture": "clip",
        "clip.projector_type": "idefics3",
        "clip.use_gelu": True,
        "clip.vision.image_size": 16,
        "clip.vision.patch_size": 4,
        "clip.vision.embedding_length": 48,
        "clip.vision.feed_forward_length": 80,
        "clip.vision.block_count": 3,
        "clip.vision.attention.head_count": 3,
        "clip.vision.attention.layer_norm_epsilon": 1e-6,
        "clip.vision.projector.scale_factor": 2,
        "clip.vision.preproc_image_size": 64,
        "clip.vision.image_mean": np.array([0.5, 0.5, 0.5], np.float32),
        "clip.vision.image_std": np.array([0.5, 0.5, 0.5], np.float32),
    }
    return values | changes


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    source = open_vision(folder)
    assert source is not None
    arrays = {}
    for name, tensor in {**source.tower.tensors, **source.projector.tensors}.items():
        values = dequantize(tensor)
        if name == "patch_embed.weight":
            values = values.reshape(-1, 3, 4, 4)
        for pattern, replacement in NAMES:
            name, count = re.subn(f"^{pattern}", replacement, name)
            if count:
                break
        arrays[name] = values
    return arrays


def write_pair(folder: Path, specials: tuple[str, ...] = ("<|bos|>", "<|eos|>", "<image>")) -> Path:
    """A text model, and the encoder of the tiny SmolVLM beside it, cut to rows of 32 values."""
    tokens = byte_level(specials=specials)
    model = write_gguf(
        folder / "model.gguf", gguf_metadata("llama", context_length=4096) | tokens, gguf_tensors()
    )
    tensors = tensors_of(write_smolvlm(folder / "hf"))
    tensors["mm.model.fc.weight"] = tensors["mm.model.fc.weight"][:32].copy()
    write_gguf(folder / "mmproj-model.gguf", metadata(), tensors)
    return model


def test_the_same_as_the_folder(tmp_path: Path) -> None:
    model = write_pair(tmp_path)
    image = picture(100, 40)
    ours, theirs = processor_of(model), processor_of(tmp_path / "hf")
    assert ours.placeholder_token_id == 2
    assert ours.max_tokens_per_image == theirs.max_tokens_per_image
    processed, expected = ours.process(image), theirs.process(image)
    assert processed.prompt == expected.prompt
    np.testing.assert_array_equal(processed.pixels, expected.pixels)
    rows = []
    for path in (model, tmp_path / "hf"):
        source = open_vision(path)
        assert source is not None
        rows.append(ImageEncoder(source, NativeBackend, num_threads=1).encode(processed.pixels))
    np.testing.assert_array_equal(rows[0], rows[1][:, :32])


def test_older_names_of_mlps(tmp_path: Path) -> None:
    """Files that call the first matrix ``ffn_down``."""
    model = write_pair(tmp_path)
    swap = {"up": "down", "down": "up"}
    tensors = {
        re.sub(r"ffn_(up|down)", lambda m: f"ffn_{swap[m[1]]}", name): values
        for name, values in tensors_of(tmp_path / "hf").items()
    }
    write_gguf(tmp_path / "mmproj-model.gguf", metadata(), tensors)
    source = open_vision(model)
    assert source is not None
    assert source.tower.tensors["layers.1.mlp.up_proj.weight"].shape == (80, 48)


def test_a_file_named_by_the_user(tmp_path: Path) -> None:
    model = write_pair(tmp_path)
    moved = (tmp_path / "mmproj-model.gguf").rename(tmp_path / "encoder.gguf")
    assert load_image_processor(model) is None
    processor = load_image_processor(model, moved)
    assert processor is not None
    assert processor.placeholder_token_id == 2
    with pytest.raises(ModelNotFoundError, match="nothing"):
        load_image_processor(model, tmp_path / "nothing.gguf")
    with pytest.raises(ModelLoadError, match="in its own files"):
        load_image_processor(tmp_path / "hf", moved)


def test_a_folder_with_both_files(tmp_path: Path) -> None:
    """The encoder's file is not taken for a second model."""
    model = write_pair(tmp_path)
    with open_model(tmp_path) as source:
        assert source.path == model
    assert load_image_processor(tmp_path) is not None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clip.projector_type": "pixtral"}, "projector 'pixtral'"),
        ({"clip.use_silu": True}, "silu"),
    ],
)
def test_one_that_does_not_run_is_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, changes: dict[str, Any], message: str
) -> None:
    """Its text model does run; who names it is told."""
    model = write_pair(tmp_path)
    file = write_gguf(
        tmp_path / "mmproj-model.gguf", metadata(**changes), {"a": np.ones((2, 2), np.float32)}
    )
    with caplog.at_level(logging.WARNING, "tellin.loading"):
        assert load_image_processor(model) is None
    assert message in caplog.text
    with pytest.raises(UnsupportedModelError, match=message):
        load_image_processor(model, file)


def test_tensors_that_do_not_fit_the_sizes(tmp_path: Path) -> None:
    """A table for other tiles would give patches the places of others; a bias is part of it."""
    model = write_pair(tmp_path)
    tensors = tensors_of(tmp_path / "hf")
    tensors["mm.model.fc.weight"] = tensors["mm.model.fc.weight"][:32].copy()
    table = tensors["v.position_embd.weight"]
    larger = tensors | {"v.position_embd.weight": np.concatenate([table, table[:1]])}
    write_gguf(tmp_path / "mmproj-model.gguf", metadata(), larger)
    with pytest.raises(ModelLoadError, match=r"\(17, 48\); expected \(16, 48\) for 4 x 4 patches"):
        open_vision(model)
    del tensors["v.patch_embd.bias"]
    write_gguf(tmp_path / "mmproj-model.gguf", metadata(), tensors)
    source = open_vision(model)
    assert source is not None
    with pytest.raises(ModelLoadError, match=r"patch_embed\.bias' is missing"):
        build_vision_plans(source)


def test_a_vocabulary_without_images(tmp_path: Path) -> None:
    model = write_pair(tmp_path, specials=("<|bos|>", "<|eos|>"))
    assert load_image_processor(model) is None
    with pytest.raises(UnsupportedModelError, match="no <image>"):
        load_image_processor(model, tmp_path / "mmproj-model.gguf")


def test_several_encoders(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = write_pair(tmp_path)
    write_gguf(tmp_path / "mmproj-2.gguf", metadata(), {"a": np.ones((2, 2), np.float32)})
    assert load_image_processor(model) is None
    assert "mmproj-2.gguf, mmproj-model.gguf" in caplog.text


@pytest.mark.parametrize(
    "changes",
    [
        {"clip.vision.attention.head_count": 5},
        {"clip.vision.image_size": 1 << 20},
        {"clip.vision.projector.scale_factor": 0},
        {"clip.vision.patch_size": 0},
        {"clip.vision.feed_forward_length": 0},
    ],
)
def test_impossible_values(tmp_path: Path, changes: dict[str, Any]) -> None:
    model = write_pair(tmp_path)
    write_gguf(
        tmp_path / "mmproj-model.gguf", metadata(**changes), {"a": np.ones((2, 2), np.float32)}
    )
    with pytest.raises(ModelLoadError):
        load_image_processor(model)
