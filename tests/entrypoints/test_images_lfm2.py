"""Images of LFM2-VL on a tiny model: tiles of several shapes, promise 1, Transformers' values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tellin import LLM, SamplingParams
from tellin.exceptions import InvalidParameterError, ModelLoadError, UnsupportedModelError
from tellin.kernels.batch import StepBatch
from tellin.kernels.native import NativeBackend
from tellin.kernels.reference import ReferenceBackend
from tellin.loading import load_image_processor, load_tokenizer, open_model, open_vision
from tellin.loading.images import ImageProcessor
from tellin.models import build_plan
from tellin.worker.image_encoder import ImageEncoder
from tests.loading.gguf_writer import write_gguf
from tests.loading.models import gguf_metadata, gguf_tensors
from tests.loading.test_images import edit, picture
from tests.loading.vocabularies import byte_level
from tests.models.lfm2_vl import (
    IMAGE_TOKEN_ID,
    PICTURES,
    PROMPT,
    write_lfm2_vl,
    write_pair,
)

FLOATS: dict[str, Any] = {"activation_precision": "float32", "kv_cache_dtype": "float32"}
STORED = Path(__file__).parents[1] / "data" / "lfm2_vl.npz"
SMALL: dict[str, Any] = {
    "num_threads": 1,
    "num_kv_blocks": 96,
    "max_model_len": 384,
    "max_num_batched_tokens": 256,
    "max_num_seqs": 4,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lfm2_vl(tmp_path_factory.mktemp("lfm2_vl") / "model")


def processor_of(folder: Path) -> ImageProcessor:
    processor = load_image_processor(folder)
    assert processor is not None
    return processor


@pytest.mark.parametrize("kind", [NativeBackend, ReferenceBackend])
def test_stored_logits(model: Path, kind: Any) -> None:
    """Encoder outputs of all tiles and logits behind two pictures, as Transformers has them."""
    stored = np.load(STORED)
    processor, source = processor_of(model), open_vision(model)
    assert source is not None
    images = [processor.process(image) for image in PICTURES]
    table = processor.pixel_table
    encoder = ImageEncoder(source, kind, pixel_table=table, activation_precision="float32")
    rows = np.concatenate([encoder.encode(image.values, image.shapes) for image in images])
    np.testing.assert_allclose(rows, stored["rows"], rtol=0, atol=3e-5)
    last = images[1].values[4:], (images[1].shapes or [])[4:]
    np.testing.assert_array_equal(encoder.encode(*last), rows[-16:])  # promise 1: tiles alone
    text = PROMPT.format(*(image.prompt for image in images))
    ids = np.array(load_tokenizer(model).encode(text), np.int32)
    with open_model(model) as opened:
        backend = kind(build_plan(opened), **FLOATS)
    backend.init_kv_cache(16)
    backend.init_state_cache(2)
    step = StepBatch(
        token_ids=ids,
        positions=np.arange(len(ids), dtype=np.int32),
        query_start_loc=np.array([0, len(ids)], np.int32),
        seq_lens=np.array([len(ids)], np.int32),
        block_table=np.arange(1, 16, dtype=np.int32)[None],
        logits_indices=np.arange(len(ids) - 4, len(ids), dtype=np.int32),
        embeds=rows,
        embed_rows=np.flatnonzero(ids == IMAGE_TOKEN_ID).astype(np.int32),
        state_slots=np.array([1], np.int32),
    )
    np.testing.assert_allclose(backend.forward(step), stored["logits"], rtol=0, atol=2e-4)


def test_gguf_files(model: Path, tmp_path: Path) -> None:
    """Rows are those of the folder, bit for bit, and so are texts; tiles have the model's sizes."""
    path = write_pair(tmp_path)
    rows = []
    for folder in (model, path):
        source = open_vision(folder)
        assert source is not None
        table = processor_of(folder).pixel_table
        encoder = ImageEncoder(source, NativeBackend, pixel_table=table, num_threads=1)
        image = processor_of(model).process(PICTURES[1])
        rows.append(encoder.encode(image.values, image.shapes))
    np.testing.assert_array_equal(rows[1], rows[0])
    assert processor_of(path).process(picture(200, 160)).shapes == [(14, 17)]
    assert processor_of(path).process(picture(1000, 500)).shapes[:-1] == [(64, 64)] * 2
    options = {"max_image_tokens": 16, "min_image_tokens": 4, "max_tiles": 1, "min_tiles": 1}
    prompt = {"prompt": "<image> and?", "multi_modal_data": {"image": picture(40, 30)}}
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    texts = []
    for folder in (model, path):
        with LLM(str(folder), mm_processor_kwargs=options, **{**SMALL, **FLOATS}) as llm:
            texts.append(llm.generate([prompt], params)[0].outputs[0].token_ids)
    assert texts[0] == texts[1]


def test_gguf_files_that_do_not_fit(tmp_path: Path) -> None:
    path = write_pair(tmp_path / "lfm2")
    (tmp_path / "other").mkdir()
    tokens = byte_level(specials=("<image>", "<|eos|>"))
    write_gguf(tmp_path / "other" / "model.gguf", gguf_metadata("llama") | tokens, gguf_tensors())
    with pytest.raises(UnsupportedModelError, match="does not go with a text model 'llama'"):
        load_image_processor(tmp_path / "other" / "model.gguf", path.parent / "mmproj-model.gguf")


def test_promise_1(model: Path) -> None:
    """Batches, chunks and caches change no bit of what is generated."""
    cut, whole = picture(100, 60, 3), picture(30, 20, 4)
    prompts: list[Any] = [
        {"prompt": "a <image>?", "multi_modal_data": {"image": cut}},
        {"prompt": "<image> and <image>", "multi_modal_data": {"image": [whole, cut]}},
        "no picture at all",
        {"prompt": "<image> and <image>", "multi_modal_data": {"image": [cut, whole]}},
    ]
    params = SamplingParams(max_tokens=6, temperature=0.7, seed=3, ignore_eos=True, logprobs=2)
    runs = []
    for options in (
        {"enable_prefix_caching": False, "max_num_seqs": 1},
        {"enable_prefix_caching": True},
        {"max_num_batched_tokens": 7},
        {"num_kv_blocks": 9, "max_model_len": 128},
    ):
        with LLM(str(model), **{**SMALL, **options}) as llm:
            for _ in range(2):
                outputs = llm.generate(prompts, params)
                runs.append([(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs])
    for run in runs[1:]:
        assert run == runs[0]
    assert runs[0][1] != runs[0][3]


@pytest.mark.parametrize(
    ("size", "shapes", "marks"),
    [
        ((32, 24), [(3, 4)], []),
        ((10, 9), [(2, 3)], []),  # scaled up to 4 rows or more
        ((100, 60), [(4, 4), (4, 4), (3, 5)], [(1, 1), (1, 2)]),
        ((200, 20), [(4, 4)] * 4 + [(1, 12)], [(1, 1), (1, 2), (1, 3), (1, 4)]),
        ((33, 90), [(4, 4)] * 3 + [(6, 2)], [(1, 1), (2, 1), (3, 1)]),
        ((64, 64), [(4, 4)] * 5, [(1, 1), (1, 2), (2, 1), (2, 2)]),
    ],
)
def test_sizes(
    model: Path, size: tuple[int, int], shapes: list[tuple[int, int]], marks: list[tuple[int, int]]
) -> None:
    """Shapes and prompts are those of Transformers' processor for the same settings."""
    image = processor_of(model).process(picture(*size))
    assert image.shapes == shapes
    assert image.num_embeds == sum(rows * columns for rows, columns in shapes)
    assert image.values.shape == (len(shapes), 4 * max(r * c for r, c in shapes), 48)
    names = [f"<|img_row_{row}_col_{column}|>" for row, column in marks]
    names += ["<|img_thumbnail|>"] if marks else [""]
    parts = [n + "<image>" * r * c for n, (r, c) in zip(names, shapes, strict=True)]
    assert image.prompt == "<|image_start|>" + "".join(parts) + "<|image_end|>"


def test_settings(tmp_path: Path) -> None:
    folder = write_lfm2_vl(tmp_path / "a", use_thumbnail=False)
    assert processor_of(folder).process(picture(100, 60)).shapes == [(4, 4), (4, 4)]
    folder = write_lfm2_vl(tmp_path / "b", do_image_splitting=False)
    assert processor_of(folder).process(picture(100, 60)).shapes == [(3, 5)]
    folder = write_lfm2_vl(tmp_path / "c", max_image_tokens=64)
    with pytest.raises(InvalidParameterError, match="cut it"):
        processor_of(folder).process(picture(60000, 1))


@pytest.mark.parametrize(
    "changes",
    [
        {"tile_size": 36}, {"max_tiles": 1000}, {"min_tiles": 5}, {"min_image_tokens": 17},
        {"encoder_patch_size": 16}, {"downsample_factor": 4}, {"max_image_tokens": 1 << 20},
    ],
)  # fmt: skip
def test_impossible_settings(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(ModelLoadError, match=next(iter(changes))):
        load_image_processor(write_lfm2_vl(tmp_path, **changes))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("vision_feature_layer", -2, "vision_feature_layer is -2"),
        ("downsample_factor", 0, "downsample_factor is 0"),
        ("projector_hidden_act", "selu", "projector_hidden_act 'selu'"),
        ("vision_config", {"num_patches": 24}, "num_patches 24"),
    ],
)
def test_impossible_encoders(tmp_path: Path, key: str, value: Any, message: str) -> None:
    folder = write_lfm2_vl(tmp_path)
    edit(folder, "config.json", **{key: value})
    with pytest.raises((ModelLoadError, UnsupportedModelError), match=message):
        load_image_processor(folder)


@pytest.mark.slow
def test_texts_like_transformers(model: Path) -> None:
    """Greedy ids of a whole engine."""
    import torch
    from transformers import AutoModelForImageTextToText

    from tests.data.make.make_lfm2_vl import tiles_of

    images = [picture(100, 60, 3), picture(30, 20, 4)]
    prompt = {"prompt": "<image> and <image>?", "multi_modal_data": {"image": images}}
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    with LLM(str(model), **{**SMALL, **FLOATS}) as llm:
        found = llm.generate([prompt], params)[0]
    tiles = tiles_of([processor_of(model).process(image) for image in images])
    ids = torch.tensor([found.prompt_token_ids])
    theirs = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32).eval()
    expected = theirs.generate(
        input_ids=ids, **tiles, max_new_tokens=24, do_sample=False, eos_token_id=None,
        pad_token_id=0,
    )[0, ids.shape[1] :]  # fmt: skip
    assert found.outputs[0].token_ids == expected.tolist()
