"""Images of Qwen3.5 on a tiny model: sizes, positions, promise 1, and Transformers' values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tellin import LLM, SamplingParams
from tellin.exceptions import InvalidParameterError, UnsupportedModelError
from tellin.kernels.batch import StepBatch
from tellin.kernels.native import NativeBackend
from tellin.kernels.reference import ReferenceBackend
from tellin.loading import load_image_processor, load_tokenizer, open_model
from tellin.loading.images import ImageProcessor
from tellin.loading.vision import open_vision
from tellin.models import build_plan
from tellin.protocol import MultiModalFeature
from tellin.worker.image_encoder import ImageEncoder
from tellin.worker.mtp import PredictorDrafter
from tellin.worker.rope_positions import rope_positions
from tests.loading.test_images import edit, picture
from tests.models import predictors
from tests.models.qwen_images import IMAGE_TOKEN_ID, write_qwen

SMALL: dict[str, Any] = {
    "num_threads": 1,
    "num_kv_blocks": 96,
    "max_model_len": 256,
    "max_num_batched_tokens": 128,
    "max_num_seqs": 4,
}
PAD = "<|image_pad|>"
WIDE, TALL = picture(48, 17, 1), picture(20, 41, 2)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen(tmp_path_factory.mktemp("qwen") / "model")


def processor_of(folder: Path) -> ImageProcessor:
    processor = load_image_processor(folder)
    assert processor is not None
    return processor


def encoder_of(folder: Path, kind: Any, table: np.ndarray) -> ImageEncoder:
    source = open_vision(folder)
    assert source is not None
    return ImageEncoder(source, kind, pixel_table=table, activation_precision="float32")


def features_of(ids: list[int], images: list[Any]) -> list[MultiModalFeature]:
    features, at = [], 0
    for image in images:
        at = ids.index(IMAGE_TOKEN_ID, at)
        features.append(MultiModalFeature("image", "i", at, image.num_embeds, grid=image.grid))
        at += image.num_embeds
    return features


@pytest.mark.parametrize(
    ("size", "grid"),
    [
        ((48, 17), (2, 6)),
        ((5, 5), (2, 2)),  # scaled up to 128 pixels
        ((300, 100), (3, 9)),  # scaled down to 2048
        ((12, 20), (2, 2)),  # 1.5 groups and 2.5: halves go to the even one
    ],
)
def test_sizes(qwen: Path, size: tuple[int, int], grid: tuple[int, int]) -> None:
    image = processor_of(qwen).process(picture(*size))
    assert image.grid == grid
    assert image.num_embeds == grid[0] * grid[1]
    assert image.prompt == PAD * image.num_embeds
    assert image.values.shape == (1, 4 * image.num_embeds, 48)


def test_what_is_refused(qwen: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidParameterError, match="200 times"):
        processor_of(qwen).process(picture(401, 2))
    folder = write_qwen(tmp_path / "deep")
    vision = {"num_position_embeddings": 16, "deepstack_visual_indexes": [1]}
    edit(folder, "config.json", vision_config=vision)
    with pytest.raises(UnsupportedModelError, match="deepstack_visual_indexes"):
        load_image_processor(folder)


def test_positions() -> None:
    """Two tokens of text, 2 x 3 rows, text, a column of 3, text; whatever the chunk."""
    features = [
        MultiModalFeature("image", "a", 2, 6, grid=(2, 3)),
        MultiModalFeature("image", "b", 9, 3, grid=(3, 1)),
    ]
    expected = [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 6, 6, 9, 10],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 7, 8, 9, 10],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 6, 6, 9, 10],
    ]
    np.testing.assert_array_equal(rope_positions(features, 0, 14), expected)
    for start in range(14):
        for end in range(start + 1, 15):
            np.testing.assert_array_equal(
                rope_positions(features, start, end - start), np.array(expected)[:, start:end]
            )


def test_drafts_of_the_models_own_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No result changes; rows turn by the positions of pictures and of text behind them."""
    layer, inputs = predictors.layer_arrays("qwen35"), predictors.input_arrays("qwen35")
    extra = predictors.predictor_arrays(layer, inputs, "qwen35")
    path = write_qwen(tmp_path / "model", extra=extra)
    prompts: list[Any] = [
        {"prompt": f"a {PAD}?", "multi_modal_data": {"image": WIDE}},
        {"prompt": f"{PAD} and then {PAD}", "multi_modal_data": {"image": [TALL, WIDE]}},
    ]
    params = SamplingParams(max_tokens=12, temperature=0.7, seed=3, ignore_eos=True, logprobs=1)
    turned: list[Any] = []
    original = PredictorDrafter._live

    def live(self: PredictorDrafter) -> Any:
        backend = original(self)
        backend.forward = lambda step: turned.append(step) or type(backend).forward(backend, step)
        return backend

    runs = []
    for spec in (None, {"method": "mtp", "num_speculative_tokens": 3, "adaptive": False}):
        with LLM(path, **SMALL | {"max_num_batched_tokens": 24}, speculative_config=spec) as llm:
            outputs = llm.generate(prompts, params)
            runs.append([(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs])
            if spec is not None:
                monkeypatch.setattr(PredictorDrafter, "_live", live)
                (output,) = llm.generate(prompts[:1], params)
                ids = [*output.prompt_token_ids, *output.outputs[0].token_ids]
                image = processor_of(path).process(WIDE)
                expected = rope_positions(features_of(ids, [image]), 0, len(ids) + 3)
    assert runs[0] == runs[1]
    assert max(step.positions.max() for step in turned) > len(ids) - 6
    for step in turned:
        np.testing.assert_array_equal(step.rope_positions, expected[:, step.positions])


def test_promise_1(qwen: Path) -> None:
    """Batches, chunks and caches change no bit of what is generated."""
    prompts: list[Any] = [
        {"prompt": f"a {PAD}?", "multi_modal_data": {"image": WIDE}},
        {"prompt": f"{PAD} and then {PAD}", "multi_modal_data": {"image": [TALL, WIDE]}},
        "no picture at all",
        {"prompt": f"{PAD} and then {PAD}", "multi_modal_data": {"image": [WIDE, TALL]}},
    ]
    params = SamplingParams(max_tokens=6, temperature=0.7, seed=3, ignore_eos=True, logprobs=2)
    runs = []
    for options in (
        {"enable_prefix_caching": False, "max_num_seqs": 1},
        {"enable_prefix_caching": True},
        {"max_num_batched_tokens": 7},
        {"num_kv_blocks": 7, "max_model_len": 96},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
    ):
        with LLM(str(qwen), **{**SMALL, **options}) as llm:
            for _ in range(2):
                outputs = llm.generate(prompts, params)
                runs.append([(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs])
    for run in runs[1:]:
        assert run == runs[0]
    assert runs[0][1] != runs[0][3]


def test_long_steps_turn_as_short_ones(qwen: Path) -> None:
    """Native passes within a step and chunks give the same bits, and what the formulas give."""
    count = 600
    random = np.random.RandomState(7)
    ids = random.randint(0, 256, count).astype(np.int32)
    turns = random.randint(0, 900, (3, count)).astype(np.int32)
    turns[:, -1] = count - 1
    results = []
    for kind, chunk, given in (
        (NativeBackend, count, turns),
        (NativeBackend, 100, turns),
        (ReferenceBackend, count, turns),
        (NativeBackend, count, np.tile(np.arange(count, dtype=np.int32), (3, 1))),
        (NativeBackend, count, None),
    ):
        with open_model(qwen) as source:
            backend = kind(
                build_plan(source), activation_precision="float32", kv_cache_dtype="float32"
            )
        backend.init_kv_cache(40)
        backend.init_state_cache(2)
        for start in range(0, count, chunk):
            rows = slice(start, start + chunk)
            step = StepBatch(
                token_ids=ids[rows],
                positions=np.arange(count, dtype=np.int32)[rows],
                query_start_loc=np.array([0, chunk], np.int32),
                seq_lens=np.array([start + chunk], np.int32),
                block_table=np.arange(1, 40, dtype=np.int32)[None],
                logits_indices=np.array([chunk - 41, chunk - 1], np.int32),
                state_slots=np.array([1], np.int32),
                rope_positions=None if given is None else given[:, rows].copy(),
            )
            logits = np.array(backend.forward(step))
        results.append(logits)
    native, chunked, reference, counted, absent = results
    np.testing.assert_array_equal(chunked, native)
    np.testing.assert_allclose(native, reference, rtol=0, atol=1e-3)
    np.testing.assert_array_equal(counted, absent)
    assert np.abs(counted - native).max() > 1e-2


@pytest.mark.parametrize("shape", [(2, 3), (3,)])
def test_refused_rope_positions(qwen: Path, shape: tuple[int, ...]) -> None:
    with open_model(qwen) as source:
        backend = NativeBackend(build_plan(source), num_threads=1)
    backend.init_kv_cache(4)
    backend.init_state_cache(2)
    three = np.arange(3, dtype=np.int32)
    step = StepBatch(
        three, three, three[[0, 0]] + [0, 3], three[:1] + 3, three[None], three,
        state_slots=three[1:2], rope_positions=np.zeros(shape, np.int32),
    )  # fmt: skip
    with pytest.raises((ValueError, TypeError)):
        backend.forward(step)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [NativeBackend, ReferenceBackend])
def test_like_transformers(qwen: Path, kind: Any) -> None:
    """Pixels, encoder outputs, positions, and all logits of a prompt, in float32."""
    import torch
    from transformers import AutoModelForImageTextToText
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    processor, tokenizer = processor_of(qwen), load_tokenizer(qwen)
    images = [processor.process(image) for image in (WIDE, TALL)]
    given = Qwen2VLImageProcessorPil.from_pretrained(qwen)([WIDE, TALL], return_tensors="pt")
    grids = given["image_grid_thw"]
    assert grids.tolist() == [
        [1, 2 * rows, 2 * columns] for rows, columns in (image.grid or (0, 0) for image in images)
    ]
    frames = given["pixel_values"].numpy().reshape(-1, 3, 2, 16)
    ours = np.concatenate([image.pixels[0] for image in images]).reshape(-1, 3, 16)
    np.testing.assert_allclose(frames[:, :, 0], ours, rtol=0, atol=1e-6)
    ids = tokenizer.encode(f"A{images[0].prompt}and{images[1].prompt}? Yes, it is")
    encoder = encoder_of(qwen, kind, processor.pixel_table)
    rows = np.concatenate([encoder.encode(image.values, image.shapes) for image in images])
    positions = rope_positions(features_of(ids, images), 0, len(ids))
    model = AutoModelForImageTextToText.from_pretrained(
        qwen, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    types = torch.tensor([[int(i == IMAGE_TOKEN_ID) for i in ids]])
    tokens = torch.tensor([ids])
    with torch.no_grad():
        features = model.model.get_image_features(given["pixel_values"], grids).pooler_output
        theirs, _ = model.model.get_rope_index(tokens, types, grids)
        expected = model(
            input_ids=tokens,
            pixel_values=given["pixel_values"],
            image_grid_thw=grids,
            mm_token_type_ids=types,
        ).logits[0]
    np.testing.assert_array_equal(positions, theirs[:, 0].numpy())
    np.testing.assert_allclose(rows, torch.cat(list(features)).numpy(), rtol=0, atol=1e-4)
    with open_model(qwen) as source:
        backend = kind(build_plan(source), activation_precision="float32", kv_cache_dtype="float32")
    backend.init_kv_cache(16)
    backend.init_state_cache(2)
    count = len(ids)
    step = StepBatch(
        token_ids=np.array(ids, np.int32),
        positions=np.arange(count, dtype=np.int32),
        query_start_loc=np.array([0, count], np.int32),
        seq_lens=np.array([count], np.int32),
        block_table=np.arange(1, 16, dtype=np.int32)[None],
        logits_indices=np.arange(count, dtype=np.int32),
        embeds=rows,
        embed_rows=np.flatnonzero(np.array(ids) == IMAGE_TOKEN_ID).astype(np.int32),
        state_slots=np.array([1], np.int32),
        rope_positions=positions,
    )
    logits = np.array(backend.forward(step))
    np.testing.assert_allclose(logits, expected.numpy(), rtol=0, atol=5e-4)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["qwen35", "qwen35moe"])
def test_texts_like_transformers(tmp_path: Path, case: str) -> None:
    """Greedy ids of a whole engine, which goes on counting behind the pictures."""
    import torch
    from transformers import AutoModelForImageTextToText
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    qwen = write_qwen(tmp_path / "model", case)
    prompt = {"prompt": f"{PAD} and {PAD}?", "multi_modal_data": {"image": [WIDE, TALL]}}
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    options = {"activation_precision": "float32", "kv_cache_dtype": "float32"}
    with LLM(str(qwen), **{**SMALL, **options}) as llm:
        found = llm.generate([prompt], params)[0]
    given = Qwen2VLImageProcessorPil.from_pretrained(qwen)([WIDE, TALL], return_tensors="pt")
    model = AutoModelForImageTextToText.from_pretrained(qwen, dtype=torch.float32).eval()
    ids = torch.tensor([found.prompt_token_ids])
    expected = model.generate(
        input_ids=ids,
        mm_token_type_ids=(ids == IMAGE_TOKEN_ID).int(),
        **given,
        max_new_tokens=24,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )[0, ids.shape[1] :]
    assert found.outputs[0].token_ids == expected.tolist()
