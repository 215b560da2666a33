"""Models that take images, from their files to text: SmolVLM, LLaVA, and GGUF with an mmproj."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tellin import LLM, SamplingParams
from tellin.entrypoints.cli import main
from tellin.exceptions import InvalidParameterError, InvalidTypeError
from tellin.worker.image_encoder import ImageEncoder
from tests.loading.test_images import picture
from tests.loading.test_vision_gguf import write_pair
from tests.models.vision import IMAGE_TOKEN_ID, write_llava, write_smolvlm

PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
MODELS: dict[str, Callable[[Path], Path]] = {
    "smolvlm": write_smolvlm,
    "llava": write_llava,
    "gguf": write_pair,
}


def engine(path: Path, **options: Any) -> LLM:
    return LLM(str(path), num_threads=2, **options)


def prompt(text: str, *images: Image.Image) -> dict[str, Any]:
    return {"prompt": text, "multi_modal_data": {"image": list(images)}}


@pytest.mark.parametrize("name", MODELS)
def test_images_through_the_whole_engine(tmp_path: Path, name: str) -> None:
    """Promise 1: alone, in a batch, in chunks, and from the prefix cache: the same ids."""
    path = MODELS[name](tmp_path)
    prompts = [
        prompt("a<image>b", picture(60, 24)),
        prompt("<image>, <image>?", picture(20, 20, 1), picture(60, 24)),
        "no image",
        prompt("a<image>b", picture(24, 60)),
    ]
    llm = engine(path)
    alone = [llm.generate(one, PARAMS)[0].outputs[0].token_ids for one in prompts]
    assert len({tuple(ids) for ids in alone}) == 4
    again = llm.generate(prompts, PARAMS)
    assert [output.outputs[0].token_ids for output in again] == alone
    assert again[0].num_cached_tokens > 0
    chunked = engine(path, max_num_batched_tokens=32, max_num_seqs=4, enable_prefix_caching=False)
    outputs = chunked.generate(prompts, PARAMS)
    assert [output.outputs[0].token_ids for output in outputs] == alone


def test_a_step_encodes_one_tile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that others' decodes do not wait for all tiles of somebody's picture."""
    sizes: list[int] = []
    encode = ImageEncoder.encode

    def counted(self: ImageEncoder, pixels: np.ndarray, grid: None) -> np.ndarray:
        sizes.append(len(pixels))
        return encode(self, pixels)

    monkeypatch.setattr(ImageEncoder, "encode", counted)
    llm = engine(write_smolvlm(tmp_path))
    llm.generate([prompt("<image>", picture(64, 64)), "text", prompt("<image>", picture(9, 64))])
    assert max(sizes) == 1
    assert len(sizes) == 17 + 5


def test_the_listing_of_an_image_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(write_llava(tmp_path))]) == 0
    shown = capsys.readouterr().out
    titles = [line.partition(":")[0] for line in shown.splitlines() if "parameters," in line]
    assert titles == ["llama (generator)", "clip (encoder)", "projector (encoder)"]
    assert "quick_gelu" in shown
    assert "layer 1 is like layer 0" in shown.partition("clip (encoder)")[2]


def test_mm_processor_kwargs(tmp_path: Path) -> None:
    """An image of 17 tiles becomes one of 5; what is no option is refused."""
    path = write_smolvlm(tmp_path)
    one = SamplingParams(temperature=0, max_tokens=1)
    numbers = []
    for options in (None, {"size": {"longest_edge": 32}}):
        llm = engine(path, mm_processor_kwargs=options)
        output = llm.generate(prompt("<image>", picture(64, 64)), one)[0]
        numbers.append(output.prompt_token_ids.count(IMAGE_TOKEN_ID))
    assert numbers == [17 * 4, 5 * 4]
    with pytest.raises(InvalidParameterError, match="mm_processor_kwargs has 'tiles'"):
        engine(path, mm_processor_kwargs={"tiles": 2})
    with pytest.raises(InvalidTypeError, match="must be a dict"):
        engine(path, mm_processor_kwargs=3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smolvlm", "llava"])
def test_greedy_ids_of_transformers(tmp_path: Path, name: str) -> None:
    import torch
    from transformers import AutoModelForImageTextToText

    from tests.loading.test_images import processor_of
    from tests.models.test_vision import as_picture, opened

    path = MODELS[name](tmp_path)
    image = picture(60, 24)
    llm = engine(path, activation_precision="float32", kv_cache_dtype="float32")
    output = llm.generate(prompt("What is it? <image>", image), PARAMS)[0]
    model = AutoModelForImageTextToText.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    pixels = torch.tensor(as_picture(processor_of(path).process(image).pixels, opened(path)))
    ids = np.array(output.prompt_token_ids)
    with torch.no_grad():
        theirs = model.generate(
            input_ids=torch.tensor(ids)[None],
            attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
            pixel_values=pixels[None] if name == "smolvlm" else pixels,
            max_new_tokens=12,
            min_new_tokens=12,
            do_sample=False,
        )
    assert output.outputs[0].token_ids == theirs[0, -12:].tolist()
