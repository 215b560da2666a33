"""Images of Qwen2-VL, Qwen2.5-VL and Qwen3-VL on tiny models: Transformers' values, promise 1."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tellin import LLM, SamplingParams
from tellin.exceptions import (
    ModelLoadError,
    TellinError,
    UnsupportedFeatureError,
    UnsupportedModelError,
)
from tellin.kernels.native import NativeBackend
from tellin.kernels.reference import ReferenceBackend
from tellin.loading import load_image_processor, open_model
from tellin.metrics import Counter
from tellin.models import build_plan
from tellin.models.plan.listing import format_plan
from tellin.worker.image_encoder import window_order
from tests.loading.test_images import edit, picture
from tests.models.qwen_vl import CASES, FLOATS, HIDDEN, PAD, Prompt, config, write_qwen_vl

SMALL: dict[str, Any] = {
    "num_threads": 1,
    "num_kv_blocks": 96,
    "max_model_len": 256,
    "max_num_batched_tokens": 128,
    "max_num_seqs": 4,
}
WIDE, TALL = picture(48, 17, 1), picture(20, 41, 2)
STORED = Path(__file__).parents[1] / "data" / "qwen_vl.npz"
PARAMS = SamplingParams(max_tokens=6, temperature=0.7, seed=3, ignore_eos=True, logprobs=2)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("qwen_vl")
    return {case: write_qwen_vl(folder / case, case) for case in CASES}


@pytest.mark.parametrize("kind", [NativeBackend, ReferenceBackend])
@pytest.mark.parametrize("case", CASES)
def test_stored_logits(models: dict[str, Path], case: str, kind: Any) -> None:
    """Encoder outputs of two pictures and logits behind them, as Transformers has them."""
    stored = np.load(STORED)
    prompt = Prompt(models[case])
    rows = prompt.rows(kind)
    np.testing.assert_allclose(rows, stored[f"{case}_rows"], rtol=0, atol=3e-5)
    logits = prompt.logits(kind, rows)[-4:]
    np.testing.assert_allclose(logits, stored[f"{case}_logits"], rtol=0, atol=5e-5)


@pytest.mark.parametrize("kind", [NativeBackend, ReferenceBackend])
def test_chunks_take_their_part_of_deepstack(models: dict[str, Path], kind: Any) -> None:
    """Promise 1: what pictures add to later layers belongs to their positions."""
    prompt = Prompt(models["qwen3_vl"])
    rows = np.random.RandomState(1).standard_normal((22, 3 * HIDDEN)).astype(np.float32)
    whole = prompt.logits(kind, rows)
    if kind is NativeBackend:
        for chunk in (1, 5, 16):
            np.testing.assert_array_equal(prompt.logits(kind, rows, chunk), whole)
    for level in (1, 2):
        changed = rows.copy()
        changed[-1, level * HIDDEN] += 1
        logits = prompt.logits(kind, changed)
        last = int(prompt.at[-1])
        np.testing.assert_array_equal(logits[:last], whole[:last])
        assert np.abs(logits[last:] - whole[last:]).max() > 1e-2


@pytest.mark.parametrize("case", CASES)
def test_promise_1(models: dict[str, Path], case: str) -> None:
    """Batches, chunks and caches change no bit of what is generated."""
    prompts: list[Any] = [
        {"prompt": f"a {PAD}?", "multi_modal_data": {"image": WIDE}},
        {"prompt": f"{PAD} and then {PAD}", "multi_modal_data": {"image": [TALL, WIDE]}},
        "no picture at all",
        {"prompt": f"{PAD} and then {PAD}", "multi_modal_data": {"image": [WIDE, TALL]}},
    ]
    runs = []
    for options in (
        {"enable_prefix_caching": False, "max_num_seqs": 1},
        {"enable_prefix_caching": True},
        {"max_num_batched_tokens": 7},
        {"num_kv_blocks": 7, "max_model_len": 96},
    ):
        with LLM(str(models[case]), disable_log_stats=False, **{**SMALL, **options}) as llm:
            for _ in range(2):
                outputs = llm.generate(prompts, PARAMS)
                runs.append([(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs])
            metrics = {metric.name: metric for metric in llm.get_metrics()}
            preemptions = metrics["tellin:num_preemptions"]
            assert isinstance(preemptions, Counter)
            assert bool(preemptions.value) == ("num_kv_blocks" in options)
    for run in runs[1:]:
        assert run == runs[0]
    assert runs[0][1] != runs[0][3]


def test_prompts_of_embeddings_beside_deepstack(models: dict[str, Path]) -> None:
    """They have nothing for later layers: the same as their ids."""
    with open_model(models["qwen3_vl"]) as source:
        table = source.tensors["embed_tokens.weight"].data.view(np.float32).reshape(-1, HIDDEN)
    ids = [65, 66, 67, 68]
    seen = {"prompt": f"a {PAD}?", "multi_modal_data": {"image": WIDE}}
    with LLM(str(models["qwen3_vl"]), enable_prompt_embeds=True, **SMALL) as llm:
        outputs = llm.generate(
            [{"prompt_token_ids": ids}, {"prompt_embeds": table[ids]}, seen], PARAMS
        )
        texts, embeds = (output.outputs[0] for output in outputs[:2])
        assert (texts.token_ids, texts.logprobs) == (embeds.token_ids, embeds.logprobs)


@pytest.mark.parametrize("case", ["qwen2_5_vl", "qwen3_vl"])
def test_conversations(models: dict[str, Path], case: str) -> None:
    """A PIL image, a data URL in the middle: what the same prompt as text gives."""
    file = io.BytesIO()
    TALL.save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    parts = [
        {"type": "image_pil", "image_pil": WIDE},
        {"type": "text", "text": "and"},
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": "?"},
    ]
    with LLM(str(models[case]), **SMALL) as llm:
        chat = llm.chat([{"role": "user", "content": parts}], PARAMS)[0]
        text = f"<|im_start|>user:{PAD}and{PAD}?"
        images = {"image": [WIDE, TALL]}
        plain = llm.generate([{"prompt": text, "multi_modal_data": images}], PARAMS)[0]
        assert chat.prompt_token_ids == plain.prompt_token_ids
        assert chat.outputs[0].logprobs == plain.outputs[0].logprobs
        video = [{"type": "video_url", "video_url": {"url": url}}]
        with pytest.raises(TellinError, match="video"):
            llm.chat([{"role": "user", "content": video}], PARAMS)
        with pytest.raises(UnsupportedFeatureError, match="'video'"):
            llm.generate([{"prompt": text, "multi_modal_data": {"video": [WIDE]}}], PARAMS)


def test_windows() -> None:
    """3 x 5 groups in squares of 2: those at the edges hold what is left."""
    order, sizes = window_order((3, 5), 2)
    assert order.tolist() == [0, 1, 5, 6, 2, 3, 7, 8, 4, 9, 10, 11, 12, 13, 14]
    assert sizes.tolist() == [4, 4, 2, 2, 2, 1]
    assert window_order((2, 3), 7)[1].tolist() == [6]


def test_listings(models: dict[str, Path]) -> None:
    with open_model(models["qwen3_vl"]) as source:
        plan = build_plan(source)
    assert plan.given_width == 3 * HIDDEN
    assert "given[64:128]" in format_plan(plan)
    with open_model(models["qwen2_vl"]) as source:
        assert build_plan(source).given_width == HIDDEN


@pytest.mark.parametrize(
    ("case", "part", "values", "message"),
    [
        (
            "qwen2_vl",
            "",
            {"rope_scaling": {"type": "mrope", "mrope_section": [2, 2, 3]}},
            "makes 7",
        ),
        ("qwen2_vl", "", {"rope_scaling": {"type": "mrope", "mrope_section": [8]}}, "three sizes"),
        ("qwen2_5_vl", "vision_config", {"fullatt_block_indexes": [1, 4]}, "has layer 4"),
        ("qwen2_5_vl", "vision_config", {"window_size": 7}, "window_size is 7"),
        ("qwen3_vl", "vision_config", {"deepstack_visual_indexes": [0, 9]}, "has layer 9"),
        ("qwen3_vl", "vision_config", {"deepstack_visual_indexes": [2, 0]}, "must ascend"),
        ("qwen3_vl", "vision_config", {"deepstack_visual_indexes": [0]}, "it has 1 for layers"),
        ("qwen3_vl", "vision_config", {"deepstack_visual_indexes": [0, 1, 2]}, r"'tap_2|norm"),
        ("qwen3_vl", "vision_config", {"deepstack_visual_indexes": [0, 1, 2, 3]}, "which has 3"),
        ("qwen3_vl", "vision_config", {"num_position_embeddings": 24}, "must be a square"),
        ("qwen3_vl", "vision_config", {"num_position_embeddings": 0}, "must be a square"),
    ],
)
def test_files_that_do_not_fit(
    tmp_path: Path, case: str, part: str, values: dict[str, Any], message: str
) -> None:
    folder = write_qwen_vl(tmp_path / "model", case)
    edit(folder, "config.json", **({part: {**config(case)[part], **values}} if part else values))
    with pytest.raises((ModelLoadError, UnsupportedModelError), match=message):
        LLM(str(folder), **SMALL)


def test_sections_that_are_not_interleaved(tmp_path: Path) -> None:
    folder = write_qwen_vl(tmp_path / "model", "qwen3_vl")
    text = config("qwen3_vl")["text_config"]
    text["rope_scaling"]["mrope_interleaved"] = False
    edit(folder, "config.json", text_config=text)
    with pytest.raises(UnsupportedModelError, match="mrope_interleaved is False"):
        LLM(str(folder), **SMALL)


def test_text_without_the_encoder(models: dict[str, Path]) -> None:
    """Promise 1: a text's logprobs are those of the engine that sees."""
    runs = []
    for limits in ({"image": 0}, {"image": 2}):
        with LLM(str(models["qwen3_vl"]), limit_mm_per_prompt=limits, **SMALL) as llm:
            runs.append(llm.generate(["no picture"], PARAMS)[0].outputs[0].logprobs)
    assert runs[0] == runs[1]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_like_transformers(models: dict[str, Path], case: str) -> None:
    """Pictures that are scaled: pixels, positions, rows, and the logits of a whole prompt."""
    from tests.data.make.make_qwen_vl import reference

    pictures = (picture(50, 30, 3), picture(100, 41, 4))
    prompt = Prompt(models[case], pictures=pictures)
    theirs = reference(models[case], prompt.ids, pictures)
    grids = [[1, 2 * i.grid[0], 2 * i.grid[1]] for i in prompt.images if i.grid is not None]
    assert theirs["grids"].tolist() == grids
    ours = np.concatenate([image.pixels[0] for image in prompt.images]).reshape(-1, 3, 16)
    frames = theirs["pixels"].reshape(-1, 3, 2, 16)
    np.testing.assert_allclose(frames[:, :, 1], ours, rtol=0, atol=1e-6)
    np.testing.assert_array_equal(prompt.positions, theirs["positions"])
    for kind in (NativeBackend, ReferenceBackend):
        rows = prompt.rows(kind)
        np.testing.assert_allclose(rows, theirs["rows"], rtol=0, atol=5e-5)
        np.testing.assert_allclose(prompt.logits(kind, rows), theirs["logits"], rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [{}, {"min_pixels": 3136, "max_pixels": 12845056}, {"size": {"longest_edge": 60000}}],
)
def test_pixels_of_the_models_own_sizes(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Patches of 14 pixels, and settings as the models' files have them."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    folder = write_qwen_vl(tmp_path / "model", "qwen2_vl")
    tower = {**config("qwen2_vl")["vision_config"], "patch_size": 14}
    edit(folder, "config.json", vision_config=tower)
    own = {"min_pixels": None, "max_pixels": None, "patch_size": 14, **settings}
    if "size" in own:
        own["size"] = {"shortest_edge": 3136, **own["size"]}
    edit(folder, "preprocessor_config.json", **own)
    processor = load_image_processor(folder)
    assert processor is not None
    theirs = Qwen2VLImageProcessorPil.from_pretrained(folder)
    for size in ((30, 30), (333, 500), (900, 61), (28, 28), (1400, 1000)):
        image = picture(*size)
        ours = processor.process(image)
        given = theirs([image], return_tensors="np")
        assert ours.grid is not None
        assert given["image_grid_thw"].tolist() == [[1, 2 * ours.grid[0], 2 * ours.grid[1]]]
        frames = given["pixel_values"].reshape(-1, 3, 2, 196)
        np.testing.assert_allclose(
            frames[:, :, 0], ours.pixels.reshape(-1, 3, 196), rtol=0, atol=1e-6
        )


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_texts_like_transformers(models: dict[str, Path], case: str) -> None:
    """Greedy ids of a whole engine, which goes on counting behind the pictures."""
    import torch
    from transformers import AutoModelForImageTextToText
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    folder = models[case]
    prompt = {"prompt": f"{PAD} and {PAD}?", "multi_modal_data": {"image": [WIDE, TALL]}}
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    with LLM(str(folder), **{**SMALL, **FLOATS}) as llm:
        found = llm.generate([prompt], params)[0]
    given = Qwen2VLImageProcessorPil.from_pretrained(folder)([WIDE, TALL], return_tensors="pt")
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([found.prompt_token_ids])
    expected = model.generate(
        input_ids=ids,
        mm_token_type_ids=(ids == model.config.image_token_id).int(),
        **given,
        max_new_tokens=24,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )[0, ids.shape[1] :]
    assert found.outputs[0].token_ids == expected.tolist()
