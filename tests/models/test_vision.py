"""Image encoders on both backends, and given rows: against each other, and transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tellin.exceptions import EngineError, ModelLoadError, UnsupportedModelError
from tellin.kernels.batch import StepBatch
from tellin.kernels.native import NativeBackend
from tellin.kernels.reference import ReferenceBackend
from tellin.loading import load_image_processor, load_tokenizer, open_model, open_vision
from tellin.loading.vision import VisionSource
from tellin.models import build_plan
from tellin.models.plan.listing import format_plan
from tellin.models.vision import build_vision_plans
from tellin.worker.image_encoder import ImageEncoder, tile_positions
from tests.loading.models import pack_safetensors
from tests.models.gemma_images import write_gemma
from tests.models.tiny import tiny_source, tiny_token_ids
from tests.models.vision import IMAGE_TOKEN_ID, write_llava, write_smolvlm

Write = Callable[[Path], Path]
TOLERANCE = 2e-5


def write_smaller_tiles(folder: Path) -> Path:
    """Tiles of 6 x 6 patches where positions are for 7 x 7, as in Idefics3-8B."""
    return write_smolvlm(folder, model_type="idefics3", tile=24, image_size=28)


MODELS: dict[str, Write] = {
    "smolvlm": write_smolvlm,
    "idefics3": write_smaller_tiles,
    "llava": write_llava,
    "gemma": write_gemma,
}


def opened(folder: Path) -> VisionSource:
    source = open_vision(folder)
    assert source is not None
    return source


def encoder_of(folder: Path, kind: Any = NativeBackend, **options: Any) -> ImageEncoder:
    if kind is NativeBackend:
        options.setdefault("num_threads", 2)
    return ImageEncoder(opened(folder), kind, **options)


def random_pixels(source: VisionSource, num_tiles: int, side: int | None = None) -> np.ndarray:
    hp = source.hparams
    shape = (num_tiles, (side or hp.table_side) ** 2, hp.patch_dim)
    return np.random.RandomState(3).standard_normal(shape).astype(np.float32)


# ---- encoders --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_native_encoder_like_the_reference(tmp_path: Path, name: str) -> None:
    folder = MODELS[name](tmp_path)
    pixels = random_pixels(opened(folder), 3, side=6 if name == "idefics3" else None)
    expected = encoder_of(folder, ReferenceBackend).encode(pixels)
    rows = encoder_of(folder).encode(pixels)
    assert expected.std() > 0.5
    np.testing.assert_allclose(rows, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["smolvlm", "llava", "gemma"])
@pytest.mark.parametrize("kind", [NativeBackend, ReferenceBackend])
def test_promise_1_of_tiles(tmp_path: Path, name: str, kind: Any) -> None:
    """A tile's rows have the same bits alone and among others."""
    folder = MODELS[name](tmp_path)
    encoder = encoder_of(folder, kind)
    pixels = random_pixels(opened(folder), 5)
    together = encoder.encode(pixels).reshape(5, -1, 64)
    for tile in (0, 3):
        np.testing.assert_array_equal(encoder.encode(pixels[tile : tile + 1]), together[tile])


def test_passes_of_few_tiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_smolvlm(tmp_path)
    encoder = encoder_of(folder)
    pixels = random_pixels(opened(folder), 5)
    together = encoder.encode(pixels)
    monkeypatch.setattr("tellin.worker.image_encoder._ROWS_PER_PASS", 32)
    np.testing.assert_array_equal(encoder.encode(pixels), together)
    assert encoder.encode(pixels[:0]).shape == (0, 64)


def test_positions_of_whole_tiles(tmp_path: Path) -> None:
    """In the order of pixels: group by group, row by row within each."""
    hp = opened(write_smolvlm(tmp_path)).hparams
    expected = [0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15]
    assert tile_positions(hp, 4).tolist() == expected


def test_positions_of_smaller_tiles(tmp_path: Path) -> None:
    """Six places of seven: the first of each group of two are 0, 2, 4."""
    hp = opened(write_smaller_tiles(tmp_path)).hparams
    positions = tile_positions(hp, 6).reshape(9, 4)
    assert positions[0].tolist() == [0, 1, 7, 8]
    assert positions.max() == 5 * 7 + 5


@pytest.mark.parametrize("shape", [(1, 16, 47), (1, 15, 48), (1, 9, 48), (1, 36, 48), (16, 48)])
def test_wrong_pixels(tmp_path: Path, shape: tuple[int, ...]) -> None:
    with pytest.raises(EngineError, match="tiles"):
        encoder_of(write_smolvlm(tmp_path)).encode(np.zeros(shape, np.float32))


@pytest.mark.parametrize("name", MODELS)
def test_fusion_changes_no_bit(tmp_path: Path, name: str) -> None:
    source = opened(MODELS[name](tmp_path))
    for plain, fused in zip(
        build_vision_plans(source, fuse=False), build_vision_plans(source), strict=True
    ):
        assert len(fused.buffers) < len(plain.buffers) or len(plain.buffers) <= 2
        assert "given rows" in format_plan(fused)
        width = plain.ops[0].writes[0].width
        rows = np.random.RandomState(1).standard_normal((9, width)).astype(np.float32)
        results = [np.array(ReferenceBackend(p).forward(given(rows))) for p in (plain, fused)]
        np.testing.assert_array_equal(*results)


def test_a_tensor_that_is_missing(tmp_path: Path) -> None:
    folder = write_smolvlm(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"]["num_hidden_layers"] = 4
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match=r"layers\.3\.input_layernorm\.weight' is missing"):
        build_vision_plans(opened(folder))


def test_a_tower_with_more_layers_than_it_says(tmp_path: Path) -> None:
    folder = write_smolvlm(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"]["num_hidden_layers"] = 2
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match="does not use the tensors"):
        build_vision_plans(opened(folder))


def test_no_vision_tensors(tmp_path: Path) -> None:
    folder = write_smolvlm(tmp_path)
    (folder / "model.safetensors").write_bytes(
        pack_safetensors({"lm_head.weight": np.zeros((2, 2), np.float32)})
    )
    with pytest.raises(ModelLoadError, match=r"patch_embed\.weight' is missing"):
        open_vision(folder)


# ---- given rows ------------------------------------------------------------------------------


def given(rows: np.ndarray, at: list[int] | None = None) -> StepBatch:
    count = len(rows)
    return StepBatch(
        token_ids=np.zeros(count, np.int32),
        positions=np.arange(count, dtype=np.int32),
        query_start_loc=np.array([0, count], np.int32),
        seq_lens=np.array([count], np.int32),
        block_table=np.array([[1, 2, 3, 4]], np.int32),
        logits_indices=np.arange(count, dtype=np.int32),
        embeds=rows,
        embed_rows=np.arange(count, dtype=np.int32) if at is None else np.array(at, np.int32),
    )


def with_rows(ids: np.ndarray, rows: np.ndarray, at: list[int]) -> StepBatch:
    count = len(ids)
    return StepBatch(
        token_ids=ids.astype(np.int32),
        positions=np.arange(count, dtype=np.int32),
        query_start_loc=np.array([0, count], np.int32),
        seq_lens=np.array([count], np.int32),
        block_table=np.array([[1, 2, 3, 4]], np.int32),
        logits_indices=np.arange(count, dtype=np.int32),
        embeds=np.ascontiguousarray(rows, np.float32),
        embed_rows=np.array(at, np.int32),
    )


@pytest.mark.parametrize("kind", [NativeBackend, ReferenceBackend])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_rows_that_are_the_tables_own(kind: Any, name: str) -> None:
    """Rows given as the table has them (with the scale) change no bit of the logits."""
    source = tiny_source(name)
    backend = kind(build_plan(source))
    backend.init_kv_cache(8)
    ids = tiny_token_ids()
    table = source.tensors["embed_tokens.weight"].data.view(np.float32).reshape(64, 64)
    none = with_rows(ids, np.zeros((0, 64)), [])
    expected = np.array(backend.forward(none))
    at = [2, 3, 4, 11]
    rows = table[ids[at]] * np.float32(source.hparams.embedding_scale)
    other = ids.copy()
    other[at] = 0
    np.testing.assert_array_equal(backend.forward(with_rows(other, rows, at)), expected)
    assert not np.array_equal(backend.forward(with_rows(ids, rows + 1, at)), expected)
    np.testing.assert_array_equal(backend.forward(none), expected)


def test_given_rows_in_a_long_step() -> None:
    """More rows than one pass of the native program takes."""
    source = tiny_source("llama")
    backend = NativeBackend(build_plan(source), num_threads=2)
    backend.init_kv_cache(64)
    ids = tiny_token_ids(700)
    table = source.tensors["embed_tokens.weight"].data.view(np.float32).reshape(64, 64)
    at = [3, 511, 512, 650]
    steps = [
        with_rows(ids, np.zeros((0, 64)), []),
        with_rows(ids * 0 + 5, table[ids], [*range(700)]),
    ]
    changed = ids.copy()
    changed[at] = 1
    steps.append(with_rows(changed, table[ids[at]], at))
    results = []
    for step in steps:
        step.block_table.resize((1, 44), refcheck=False)
        step.block_table[:] = np.arange(1, 45)
        results.append(np.array(backend.forward(step)))
    np.testing.assert_array_equal(results[1], results[0])
    np.testing.assert_array_equal(results[2], results[0])


@pytest.mark.parametrize(
    ("rows", "at", "message"),
    [
        (np.zeros((1, 63)), [0], "rows of 63 values; the plan takes 64"),
        (np.zeros((2, 64)), [1, 1], r"embed_rows\[1\] is 1"),
        (np.zeros((1, 64)), [20], r"embed_rows\[0\] is 20"),
        (np.zeros((1, 64)), [-1], r"embed_rows\[0\] is -1"),
        (np.zeros((2, 64)), [0], "as many entries"),
    ],
)
def test_refused_rows(rows: np.ndarray, at: list[int], message: str) -> None:
    backend = NativeBackend(build_plan(tiny_source("llama")), num_threads=1)
    backend.init_kv_cache(8)
    with pytest.raises(ValueError, match=message):
        backend.forward(with_rows(tiny_token_ids(), rows, at))


@pytest.mark.parametrize("kind", [NativeBackend, ReferenceBackend])
def test_a_tower_needs_all_rows(tmp_path: Path, kind: Any) -> None:
    backend = kind(build_vision_plans(opened(write_smolvlm(tmp_path)))[0])
    with pytest.raises(ValueError, match="plan needs"):
        backend.forward(with_rows(np.zeros(3, np.int32), np.zeros((2, 48)), [0, 2]))


# ---- transformers ----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smolvlm", "idefics3", "llava"])  # Gemma: test_images_gemma.py
@pytest.mark.parametrize("kind", [NativeBackend, ReferenceBackend])
def test_logits_like_transformers(tmp_path: Path, name: str, kind: Any) -> None:
    """A prompt with two pictures: encoder outputs and all logits, in float32."""
    import torch
    from PIL import Image
    from transformers import AutoModelForImageTextToText

    folder = MODELS[name](tmp_path)
    processor, tokenizer = load_image_processor(folder), load_tokenizer(folder)
    assert processor is not None
    random = np.random.RandomState(4)
    shapes = ((40, 100), (30, 30)) if name != "llava" else ((33, 50), (90, 31))
    images = [
        processor.process(Image.fromarray(random.randint(0, 256, (*shape, 3)).astype(np.uint8)))
        for shape in shapes
    ]
    ids = tokenizer.encode(f"A{images[0].prompt}and{images[1].prompt}?")
    encoder = encoder_of(folder, kind)
    rows = np.concatenate([encoder.encode(image.pixels) for image in images])
    model = AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    pixels = torch.tensor(np.concatenate([as_picture(i.pixels, opened(folder)) for i in images]))
    if name != "llava":
        pixels = pixels[None]
    with torch.no_grad():
        theirs = torch.cat(list(model.get_image_features(pixels).pooler_output)).numpy()
        expected = model(input_ids=torch.tensor([ids]), pixel_values=pixels).logits[0].numpy()
    np.testing.assert_allclose(rows, theirs, rtol=0, atol=TOLERANCE)
    with open_model(folder) as source:
        options = {"activation_precision": "float32", "kv_cache_dtype": "float32"}
        backend = kind(build_plan(source), **options)
    at = np.flatnonzero(np.array(ids) == IMAGE_TOKEN_ID).tolist()
    step = with_rows(np.array(ids), rows, at)
    blocks = -(-len(ids) // 16)
    step.block_table.resize((1, blocks), refcheck=False)
    step.block_table[:] = np.arange(1, blocks + 1)
    backend.init_kv_cache(blocks + 1)
    np.testing.assert_allclose(backend.forward(step), expected, rtol=0, atol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_folder_that_transformers_saves(tmp_path: Path, name: str) -> None:
    """Its names and its form of configurations give the same rows and the same plan."""
    import torch
    from transformers import AutoModelForImageTextToText

    folder, saved = MODELS[name](tmp_path / "ours"), tmp_path / "saved"
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    model.save_pretrained(saved)
    assert opened(saved).hparams == opened(folder).hparams
    pixels = random_pixels(opened(folder), 2, side=6 if name == "idefics3" else None)
    rows = [encoder_of(path).encode(pixels) for path in (folder, saved)]
    np.testing.assert_array_equal(*rows)
    plans = []
    for path in (folder, saved):
        with open_model(path) as source:
            plans.append(format_plan(build_plan(source)))
    assert plans[0] == plans[1]


def as_picture(pixels: np.ndarray, source: VisionSource) -> np.ndarray:
    """``[tiles, 3, height, width]`` of patches in groups."""
    hp = source.hparams
    group, patch = hp.group_side, hp.patch_size
    count = int(np.sqrt(pixels.shape[1])) // group
    split = pixels.reshape(-1, count, count, group, group, 3, patch, patch)
    edge = count * group * patch
    return split.transpose(0, 5, 1, 3, 6, 2, 4, 7).reshape(-1, 3, edge, edge)


@pytest.mark.slow
@pytest.mark.parametrize("table", [7, 14, 24, 26, 27, 32])
def test_positions_like_transformers(tmp_path: Path, table: int) -> None:
    """Every size of tile that fits, in the order of pixels."""
    import torch
    from transformers import SmolVLMConfig
    from transformers.models.smolvlm.modeling_smolvlm import SmolVLMVisionEmbeddings

    config = SmolVLMConfig().vision_config
    config.image_size, config.patch_size, config.hidden_size = table * 4, 4, 1
    embeddings = SmolVLMVisionEmbeddings(config)
    embeddings.patch_embedding.weight.data[:] = 0
    embeddings.patch_embedding.bias.data[:] = 0
    embeddings.position_embedding.weight.data[:, 0] = torch.arange(table**2)
    for side in range(2, table + 1):
        for group in (1, 2, 3):
            if side % group:
                continue
            source = opened(write_smolvlm(tmp_path))
            hp = source.hparams
            object.__setattr__(hp, "table_side", table)
            object.__setattr__(hp, "group_side", group)
            mask = torch.ones((1, side, side), dtype=torch.bool)
            with torch.no_grad():
                rows = embeddings(torch.zeros(1, 3, side * 4, side * 4), mask)
            square = rows[0, :, 0].numpy().astype(int).reshape(side // group, group, -1, group)
            expected = square.transpose(0, 2, 1, 3).reshape(-1)
            np.testing.assert_array_equal(tile_positions(hp, side), expected)
