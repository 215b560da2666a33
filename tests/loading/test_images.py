"""Pictures as encoders take them: tiles, patches, marks; the same by transformers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tellin.exceptions import InvalidParameterError, ModelLoadError, UnsupportedModelError
from tellin.loading import load_image_processor, load_tokenizer
from tellin.loading.images import ImageProcessor
from tests.loading.models import config, hf_tensors, pack_safetensors
from tests.models.vision import IMAGE_TOKEN_ID, write_llava, write_smolvlm

SIZES = ((100, 40), (33, 90), (16, 16), (5, 5), (64, 64), (640, 7), (3, 200), (65, 63))
"""Widths and heights."""


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    pixels = np.random.RandomState(seed).randint(0, 256, (height, width, 3))
    return Image.fromarray(pixels.astype(np.uint8))


def processor_of(folder: Path) -> ImageProcessor:
    processor = load_image_processor(folder)
    assert processor is not None
    return processor


@pytest.fixture(scope="module")
def smolvlm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_smolvlm(tmp_path_factory.mktemp("smolvlm"))


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llava(tmp_path_factory.mktemp("llava"))


def edit(folder: Path, file: str, **changes: object) -> Path:
    path = folder / file
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


# ---- SmolVLM -------------------------------------------------------------------------------------


def test_tiles_of_a_wide_picture(smolvlm: Path) -> None:
    """100 x 40 becomes 64 x 26, then 64 x 32: four columns and two rows of tiles of 16 pixels."""
    processed = processor_of(smolvlm).process(picture(100, 40))
    assert processed.pixels.shape == (9, 16, 48)
    assert processed.values.dtype == np.uint8
    assert processed.pixels.dtype == np.float32
    assert processed.num_embeds == 36
    four = "<image>" * 4
    lines = [
        "".join(f"<fake_token_around_image><row_{r}_col_{c}>{four}" for c in range(1, 5)) + "\n"
        for r in (1, 2)
    ]
    whole = f"\n<fake_token_around_image><global-img>{four}<fake_token_around_image>"
    assert processed.prompt == "".join(lines) + whole


def test_a_model_that_does_not_cut(tmp_path: Path) -> None:
    processor = processor_of(write_smolvlm(tmp_path, splits=False))
    processed = processor.process(picture(100, 40))
    assert processed.pixels.shape == (1, 16, 48)
    assert processor.max_tokens_per_image == 4
    four = "<image>" * 4
    around = "<fake_token_around_image>"
    assert processed.prompt == f"{around}<global-img>{four}{around}"


def test_a_picture_of_one_tile_is_not_cut(tmp_path: Path) -> None:
    processor = processor_of(write_smolvlm(tmp_path, longest_edge=16))
    assert processor.process(picture(16, 16)).num_embeds == processor.max_tokens_per_image == 4


def test_options_in_the_place_of_settings(smolvlm: Path) -> None:
    """``mm_processor_kwargs``: half the length, fewer tiles; or one tile."""
    half = load_image_processor(smolvlm, options={"size": {"longest_edge": 32}})
    assert half is not None
    assert half.max_tokens_per_image == 5 * 4
    assert half.process(picture(64, 64)).num_embeds == 5 * 4
    one = load_image_processor(smolvlm, options={"do_image_splitting": False})
    assert one is not None
    assert one.process(picture(64, 64)).num_embeds == one.max_tokens_per_image == 4
    with pytest.raises(InvalidParameterError, match="mm_processor_kwargs has 'tile'"):
        load_image_processor(smolvlm, options={"tile": 3})
    with pytest.raises(ModelLoadError, match="with mm_processor_kwargs: size has longest_edge -1"):
        load_image_processor(smolvlm, options={"size": {"longest_edge": -1}})


def test_limits(smolvlm: Path) -> None:
    processor = processor_of(smolvlm)
    assert processor.placeholder == "<image>"
    assert processor.placeholder_token_id == IMAGE_TOKEN_ID
    counts = [processor.process(picture(*size)).num_embeds for size in SIZES]
    assert max(counts) == processor.max_tokens_per_image == 17 * 4


def test_patches_lie_in_groups(smolvlm: Path) -> None:
    """The first four patches are the upper left 8 x 8 pixels, by channel, row, column."""
    image = picture(64, 64)
    patches = processor_of(smolvlm).process(image).pixels[0]
    values = np.asarray(image, np.float32)[:16, :16] / 255 * 2 - 1
    np.testing.assert_allclose(
        patches[1].reshape(3, 4, 4), values[:4, 4:8].transpose(2, 0, 1), atol=1e-6
    )
    np.testing.assert_allclose(
        patches[2].reshape(3, 4, 4), values[4:8, :4].transpose(2, 0, 1), atol=1e-6
    )
    np.testing.assert_allclose(
        patches[4].reshape(3, 4, 4), values[:4, 8:12].transpose(2, 0, 1), atol=1e-6
    )


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "1", "CMYK"])
def test_any_mode(smolvlm: Path, mode: str) -> None:
    image = picture(20, 30)
    expected = processor_of(smolvlm).process(image.convert(mode).convert("RGB"))
    processed = processor_of(smolvlm).process(image.convert(mode))
    np.testing.assert_array_equal(processed.pixels, expected.pixels)


def test_settings_inside_of_the_processors(tmp_path: Path) -> None:
    folder = write_smolvlm(tmp_path)
    expected = processor_of(folder).process(picture(30, 20))
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    (folder / "preprocessor_config.json").unlink()
    (folder / "processor_config.json").write_text(json.dumps({"image_processor": settings}))
    processed = processor_of(folder).process(picture(30, 20))
    np.testing.assert_array_equal(processed.pixels, expected.pixels)


# ---- LLaVA ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_llava_takes_the_middle(llava: Path, size: tuple[int, int]) -> None:
    processor = processor_of(llava)
    processed = processor.process(picture(*size))
    assert processed.pixels.shape == (1, 25, 108)
    assert processed.prompt == "<image>" * 25
    assert processed.num_embeds == processor.max_tokens_per_image == 25


@pytest.mark.parametrize("size", [(30000, 1), (1, 30000), (900, 40), (40, 900), (30, 31)])
def test_llava_takes_the_middle_of_a_ribbon(
    llava: Path, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """30000 x 1 would be 900000 x 30 when it is scaled as a whole, and 336 pixels high 3.4e9."""
    processor, image = processor_of(llava), picture(*size)
    monkeypatch.setattr("tellin.loading.image_crop._MAX_SCALED", 1 << 30)
    whole = processor.process(image).values
    monkeypatch.setattr("tellin.loading.image_crop._MAX_SCALED", 0)
    middle = processor.process(image).values
    assert np.abs(whole.astype(int) - middle).max() <= 1


# ---- errors --------------------------------------------------------------------------------------


def test_a_text_model_has_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config()))
    (tmp_path / "model.safetensors").write_bytes(pack_safetensors(hf_tensors()))
    assert load_image_processor(tmp_path) is None


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        ("preprocessor_config.json", {"do_rescale": False}, "do_rescale false"),
        ("preprocessor_config.json", {"max_image_size": {"longest_edge": 12}}, "3 patches wide"),
        ("preprocessor_config.json", {"image_std": [0.5, 0.5, 0]}, "of 3 channels"),
        ("preprocessor_config.json", {"image_std": [1e-300, 1, 1]}, "1e-300.*up to inf"),
        ("preprocessor_config.json", {"image_mean": [1e38, 1e308, 1]}, "1e.308.*up to inf"),
        ("preprocessor_config.json", {"rescale_factor": 65536}, "allowed are 1e.06"),
        ("preprocessor_config.json", {"size": {"longest_edge": 0}}, "longest_edge 0"),
        ("config.json", {"image_token_id": 9999}, "image token has id 9999"),
        ("config.json", {"scale_factor": 0}, "scale_factor is 0"),
        ("config.json", {"vision_config": {"hidden_act": "mish"}}, "'mish'"),
        ("config.json", {"vision_config": {"patch_size": 0}}, "patch_size 0"),
    ],
)
def test_refused_settings(
    tmp_path: Path, file: str, changes: dict[str, object], message: str
) -> None:
    folder = edit(write_smolvlm(tmp_path), file, **changes)
    with pytest.raises((ModelLoadError, UnsupportedModelError), match=message):
        load_image_processor(folder)


def test_a_llava_with_another_size(tmp_path: Path) -> None:
    folder = edit(
        write_llava(tmp_path), "preprocessor_config.json", crop_size={"height": 36, "width": 36}
    )
    with pytest.raises(ModelLoadError, match="pictures become 36 x 36 pixels"):
        load_image_processor(folder)


def test_no_settings(tmp_path: Path) -> None:
    folder = write_smolvlm(tmp_path)
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(ModelLoadError, match=r"preprocessor_config\.json"):
        load_image_processor(folder)


# ---- transformers --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("splits", [True, False])
def test_smolvlm_like_transformers(tmp_path: Path, size: tuple[int, int], splits: bool) -> None:
    """Equal prompts; equal pixels, once they are put in our order."""
    from transformers import PreTrainedTokenizerFast
    from transformers.models.idefics3.image_processing_pil_idefics3 import (
        Idefics3ImageProcessorPil,
    )
    from transformers.models.idefics3.processing_idefics3 import Idefics3Processor

    folder = write_smolvlm(tmp_path, splits=splits)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    theirs = Idefics3Processor(
        Idefics3ImageProcessorPil.from_pretrained(folder), tokenizer, image_seq_len=4
    )
    image = picture(*size)
    inputs = theirs(images=[image], text="a<image>b", return_tensors="np")
    processed = processor_of(folder).process(image)
    ids = load_tokenizer(folder).encode("a<image>b".replace("<image>", processed.prompt))
    assert ids == inputs["input_ids"][0].tolist()
    pixels = inputs["pixel_values"][0]
    np.testing.assert_array_equal(_in_groups(pixels, 4, 2), processed.pixels)
    assert inputs["pixel_attention_mask"].all()


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_llava_like_transformers(llava: Path, size: tuple[int, int]) -> None:
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    image = picture(*size)
    theirs = CLIPImageProcessorPil.from_pretrained(llava)
    pixels = np.stack(theirs(images=[image])["pixel_values"])
    processed = processor_of(llava).process(image)
    np.testing.assert_array_equal(_in_groups(pixels, 6, 1), processed.pixels)


def _in_groups(pixels: np.ndarray, patch: int, group: int) -> np.ndarray:
    """``[n, 3, height, width]`` to patches, by a loop."""
    block = patch * group
    tiles = [
        [
            tile[:, y + i * patch :, x + j * patch :][:, :patch, :patch].reshape(-1)
            for y in range(0, tile.shape[1] - block + 1, block)
            for x in range(0, tile.shape[2] - block + 1, block)
            for i in range(group)
            for j in range(group)
        ]
        for tile in pixels
    ]
    return np.array(tiles)
