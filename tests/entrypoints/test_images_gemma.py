"""Images of Gemma 3 on a tiny model: rows that see each other, promise 1, Transformers' values."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tellin import LLM, SamplingParams
from tellin.config import EngineArgs
from tellin.engine.arg_utils import DEFAULT_MAX_NUM_BATCHED_TOKENS, create_engine_config
from tellin.exceptions import InvalidParameterError, ModelLoadError, UnsupportedModelError
from tellin.kernels.batch import StepBatch
from tellin.kernels.native import NativeBackend
from tellin.kernels.reference import ReferenceBackend
from tellin.loading import load_image_processor, load_tokenizer, open_model
from tellin.loading.images import ImageProcessor
from tellin.loading.vision import open_vision
from tellin.models import build_plan
from tellin.worker.image_encoder import ImageEncoder
from tests.loading.gguf_writer import write_gguf
from tests.loading.test_images import edit, picture
from tests.models.gemma_images import (
    BEGIN,
    END,
    EXPANDED,
    HIDDEN,
    ROWS,
    SOFT_ID,
    SOFT_TOKEN,
    TALL,
    WIDE,
    mmproj_metadata,
    write_gemma,
    write_gemma_gguf,
)

SMALL: dict[str, Any] = {
    "num_threads": 1,
    "num_kv_blocks": 96,
    "max_model_len": 384,
    "max_num_batched_tokens": 128,
    "max_num_seqs": 4,
}
DATA = Path(__file__).parents[1] / "data" / "gemma_images.npz"
ONE_PART = f"\n\n{BEGIN}{SOFT_TOKEN * ROWS}{END}\n\n"
PROMPTS: list[Any] = [
    {"prompt": f"a {BEGIN}?", "multi_modal_data": {"image": WIDE}},
    {"prompt": f"{BEGIN} and then {BEGIN}", "multi_modal_data": {"image": [TALL, WIDE]}},
    "no picture at all",
    {"prompt": f"{BEGIN} and then {BEGIN}", "multi_modal_data": {"image": [WIDE, TALL]}},
    {"prompt": f"{BEGIN} and then {BEGIN}", "multi_modal_data": {"image": [WIDE, WIDE]}},
]
PARAMS = SamplingParams(max_tokens=20, temperature=0.7, seed=3, ignore_eos=True, logprobs=2)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gemma(tmp_path_factory.mktemp("gemma") / "model")


@pytest.fixture(scope="module")
def llm(gemma: Path) -> Iterator[LLM]:
    with LLM(str(gemma), **SMALL) as made:
        yield made


@pytest.fixture(scope="module")
def alone(gemma: Path) -> list[Any]:
    """Every request alone and in one chunk, in an engine that caches nothing."""
    options = {**SMALL, "enable_prefix_caching": False, "mm_processor_cache_gb": 0}
    with LLM(str(gemma), **options) as made:
        return [results(made.generate([prompt], PARAMS))[0] for prompt in PROMPTS]


def results(outputs: list[Any]) -> list[Any]:
    return [
        (o.prompt_token_ids, o.prompt_logprobs, o.outputs[0].token_ids, o.outputs[0].logprobs)
        for o in outputs
    ]


def processor_of(folder: Path) -> ImageProcessor:
    processor = load_image_processor(folder)
    assert processor is not None
    return processor


def encoder_of(folder: Path, kind: Any) -> ImageEncoder:
    source = open_vision(folder)
    assert source is not None
    table = processor_of(folder).pixel_table
    return ImageEncoder(source, kind, pixel_table=table, activation_precision="float32")


# ---- promise 1 -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"enable_prefix_caching": False, "max_num_seqs": 1},
        {"max_num_batched_tokens": 19},
        {"max_num_batched_tokens": 23, "long_prefill_token_threshold": 5},
        {"num_kv_blocks": 9, "max_model_len": 128},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 384},
        {"block_size": 32},
    ],
    ids=["together", "one by one", "chunks", "threshold", "preempted", "drafts", "whole", "blocks"],
)
def test_promise_1(gemma: Path, alone: list[Any], options: dict[str, Any]) -> None:
    """Batches, chunks and caches change no bit of a result."""
    with LLM(str(gemma), **{**SMALL, **options}, disable_log_stats=False) as made:
        for _ in range(2):
            assert results(made.generate(PROMPTS, PARAMS)) == alone
        preempted = [m for m in made.get_metrics() if m.name == "tellin:num_preemptions"]
        assert bool(preempted[0].value) == ("num_kv_blocks" in options)  # type: ignore[union-attr]
    assert alone[1] != alone[3]


def test_prompt_logprobs(gemma: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes of few logits do not cut an image; what follows it changes its rows' logits not."""
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1)
    with LLM(str(gemma), **SMALL) as made:
        whole = results(made.generate(PROMPTS, params))
    monkeypatch.setattr("tellin.worker.prompt_passes._LOGITS_BYTES", 1)
    for budget in (128, 19):
        with LLM(str(gemma), **{**SMALL, "max_num_batched_tokens": budget}) as made:
            assert results(made.generate(PROMPTS, params)) == whole


@pytest.mark.parametrize("budget", [128, ROWS + 3])
def test_rows_of_logits_for_prompts_are_bounded(
    gemma: Path, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where an image, whose rows are computed in one pass, has more of them."""
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1)
    with LLM(str(gemma), **{**SMALL, "max_num_batched_tokens": budget}) as made:
        whole = results(made.generate(PROMPTS, params))
    most, seen, forward = 5, list[int](), NativeBackend.forward

    def watched(self: NativeBackend, batch: StepBatch) -> Any:
        seen.append(len(batch.logits_indices))
        return forward(self, batch)

    monkeypatch.setattr(NativeBackend, "forward", watched)
    with LLM(str(gemma), **{**SMALL, "max_num_batched_tokens": budget}) as made:
        core = made.llm_engine.engine_core.engine_core  # type: ignore[attr-defined]
        core.executor.worker.runner.prompts.max_logits = most
        assert results(made.generate(PROMPTS, params)) == whole
    # One more for each of four requests' first id, and for an end of each of their prompts.
    assert most <= max(seen) <= most + 8 < ROWS


def test_other_text_behind_the_same_image(gemma: Path, alone: list[Any]) -> None:
    """A cached prefix that ends in an image is used up to the image's beginning only."""
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    prompts: list[Any] = [
        {"prompt": f"{'x' * 30}{BEGIN}{text}", "multi_modal_data": {"image": WIDE}}
        for text in ("", "and more of it", "other words")
    ]
    fresh = []
    with LLM(str(gemma), **SMALL, enable_prefix_caching=False) as made:
        fresh = [made.generate(prompt, params)[0].outputs[0] for prompt in prompts]
    with LLM(str(gemma), **SMALL) as made:
        outputs = [made.generate(prompt, params)[0] for prompt in prompts]
    assert [o.outputs[0].token_ids for o in outputs] == [o.token_ids for o in fresh]
    # 30 letters and three marks, then the rows at 33 to 49: three blocks of 16 end among them.
    assert [o.num_cached_tokens for o in outputs] == [0, 32, 32]


def test_a_prompt_that_ends_with_an_image(gemma: Path) -> None:
    """Nothing of it may come from the cache but what is before the image."""
    text = f"what is this: {BEGIN}{SOFT_TOKEN * ROWS}"
    prompt = {"prompt": text, "multi_modal_data": {"image": WIDE}}
    params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True, logprobs=1)
    with LLM(str(gemma), **SMALL) as made:
        first, again = (made.generate(prompt, params)[0] for _ in range(2))
        assert again.outputs[0].logprobs == first.outputs[0].logprobs
        assert again.num_cached_tokens == 0
        (first_of_two, _) = made.generate([prompt, prompt], params)
    assert first_of_two.outputs[0].logprobs == first.outputs[0].logprobs


def test_a_budget_too_small_for_an_image(gemma: Path) -> None:
    """An image's tokens and those that others decode must fit into a step."""
    options = {**SMALL, "max_num_batched_tokens": 18}
    with pytest.raises(InvalidParameterError, match=r"max_num_batched_tokens=18 .* raise it to 19"):
        LLM(str(gemma), **options)
    with LLM(str(gemma), **options, limit_mm_per_prompt={"image": 0}) as made:
        assert made.generate("text", SamplingParams(max_tokens=1))


def test_a_budget_that_nobody_named_holds_an_image_beside_drafts(gemma: Path) -> None:
    """128 requests with 24 drafts each are more than the default, which then is what is needed."""
    drafts = {"method": "suffix", "num_speculative_tokens": 24}
    args = EngineArgs(model=str(gemma), max_model_len=384, speculative_config=drafts)
    config = create_engine_config(args)
    assert config.scheduler_config.max_num_batched_tokens == ROWS + 127 * 25
    assert config.multimodal_config is not None
    plain = create_engine_config(EngineArgs(model=str(gemma), max_model_len=384))
    assert plain.scheduler_config.max_num_batched_tokens == DEFAULT_MAX_NUM_BATCHED_TOKENS


# ---- prompts ---------------------------------------------------------------------------------


def test_prompts(llm: LLM) -> None:
    """A mark in a user's prompt becomes an image's tokens; what is expanded already stays."""
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, logprobs=1)
    tokenizer: Any = llm.get_tokenizer()
    forms = [
        {"prompt": f"a {BEGIN}?"},
        {"prompt": f"a {ONE_PART}?"},
        {"prompt_token_ids": tokenizer.encode(f"a {BEGIN}?")},
        {"prompt_token_ids": tokenizer.encode(f"a {ONE_PART}?")},
    ]
    outputs = llm.generate(
        [{**form, "multi_modal_data": {"image": WIDE}} for form in forms], params
    )
    assert outputs[0].prompt_token_ids == tokenizer.encode(f"a {ONE_PART}?")
    assert (outputs[0].prompt_token_ids or []).count(SOFT_ID) == ROWS
    assert len({str(results([output])) for output in outputs}) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no mark", "0 placeholders '<start_of_image>' for 1 images"),
        (f"{BEGIN}{BEGIN}", "2 placeholders"),
        (f"{BEGIN}{SOFT_TOKEN}", "1 placeholders"),
        (f"{BEGIN}{SOFT_TOKEN * 5} {SOFT_TOKEN * 11}", "other tokens among"),
    ],
)
def test_malformed_prompts(llm: LLM, text: str, message: str) -> None:
    with pytest.raises(InvalidParameterError, match=message):
        llm.generate({"prompt": text, "multi_modal_data": {"image": WIDE}})


def test_chat(llm: LLM) -> None:
    content = [{"type": "text", "text": "what?"}, {"type": "image_pil", "image_pil": WIDE}]
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    (output,) = llm.chat([{"role": "user", "content": content}], params)
    assert output.prompt == (
        f"<|im_start|><|im_start|>user\nwhat?{BEGIN}<end_of_utterance>\n<|im_start|>model\n"
    )
    assert (output.prompt_token_ids or []).count(SOFT_ID) == ROWS
    buffer = io.BytesIO()
    WIDE.save(buffer, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    content[1] = {"type": "image_url", "image_url": {"url": url}}
    assert results(llm.chat([{"role": "user", "content": content}], params)) == results([output])


def test_pan_and_scan(gemma: Path) -> None:
    """Off unless asked for; then a long picture has parts behind it, each of which is whole."""
    options: dict[str, Any] = {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 8}
    long, square = picture(60, 20, 3), picture(20, 22, 4)
    prompts: list[Any] = [
        {"prompt": f"a {BEGIN}?", "multi_modal_data": {"image": image}} for image in (long, square)
    ]
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    ids = []
    for small in ({}, {"max_num_batched_tokens": 19, "enable_prefix_caching": False}):
        with LLM(str(gemma), **{**SMALL, **small}, mm_processor_kwargs=options) as made:
            outputs = made.generate(prompts, params)
        counts = [(output.prompt_token_ids or []).count(SOFT_ID) for output in outputs]
        assert counts == [4 * ROWS, ROWS]
        ids.append([output.outputs[0].token_ids for output in outputs])
    assert ids[0] == ids[1]


# ---- GGUF ------------------------------------------------------------------------------------


def test_the_gguf_pair_is_the_folder(tmp_path: Path, gemma: Path) -> None:
    """The same weights in two files: the same bits of what the encoder makes, and of results."""
    model = write_gemma_gguf(tmp_path)
    ours, theirs = (processor_of(path).process(WIDE) for path in (model, gemma))
    assert ours.prompt == theirs.prompt
    np.testing.assert_array_equal(ours.pixels, theirs.pixels)
    rows = [encoder_of(path, NativeBackend).encode(ours.values) for path in (model, gemma)]
    np.testing.assert_array_equal(*rows)
    runs = []
    for path in (model, gemma):
        with LLM(str(path), **SMALL) as made:
            runs.append(results(made.generate(PROMPTS, PARAMS)))
    assert [[r[0], r[2], r[3]] for r in runs[0]] == [[r[0], r[2], r[3]] for r in runs[1]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clip.vision.projector.scale_factor": 3}, "8 patches on a side .* scale_factor 3"),
        ({"clip.vision.embedding_length": 24}, r"has shape \(48, 64\); expected \(24, 64\)"),
    ],
)
def test_damaged_gguf(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    model = write_gemma_gguf(tmp_path)
    tensors = {"mm.input_projection.weight": np.ones((48, 64), np.float32)}
    tensors["v.patch_embd.weight"] = np.ones((changes.get("clip.vision.embedding_length", 48), 48))
    tensors["v.position_embd.weight"] = np.ones((64, 48), np.float32)
    tensors = {name: values.astype(np.float32) for name, values in tensors.items()}
    write_gguf(tmp_path / "mmproj-model.gguf", mmproj_metadata(**changes), tensors)
    with pytest.raises(ModelLoadError, match=message):
        open_vision(model)


@pytest.mark.parametrize(
    ("file", "changes", "error", "message"),
    [
        ("config.json", {"mm_tokens_per_image": 15}, ModelLoadError, "mm_tokens_per_image is 15"),
        ("config.json", {"mm_tokens_per_image": 9}, ModelLoadError, "8 x 8 patches"),
        ("config.json", {"image_token_index": 1 << 20}, ModelLoadError, "image token has id 1048"),
        ("config.json", {"vision_config": {"model_type": "x"}}, UnsupportedModelError, "type 'x'"),
        ("preprocessor_config.json", {"size": {"height": 32}}, ModelLoadError, "32 x 32 pixels"),
        ("preprocessor_config.json", {"do_resize": False}, UnsupportedModelError, "do_resize"),
        ("preprocessor_config.json", {"pan_and_scan_min_crop_size": 0}, ModelLoadError, "is 0"),
    ],
)
def test_refused_files(
    tmp_path: Path, file: str, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    folder = write_gemma(tmp_path)
    edit(folder, file, **changes)
    with pytest.raises(error, match=message):
        load_image_processor(folder)


# ---- Transformers ----------------------------------------------------------------------------


def step_of(ids: list[int], rows: np.ndarray) -> StepBatch:
    """A whole prompt; rows of pictures stand together, `ROWS` by `ROWS`."""
    count = len(ids)
    at = np.flatnonzero(np.array(ids) == SOFT_ID).astype(np.int32)
    ends = np.arange(1, count + 1, dtype=np.int32)
    for part in at.reshape(-1, ROWS):
        ends[part] = part[-1] + 1
    return StepBatch(
        token_ids=np.array(ids, np.int32),
        positions=np.arange(count, dtype=np.int32),
        query_start_loc=np.array([0, count], np.int32),
        seq_lens=np.array([count], np.int32),
        block_table=np.arange(1, 20, dtype=np.int32)[None],
        logits_indices=np.arange(count, dtype=np.int32),
        embeds=rows,
        embed_rows=at,
        seen_ends=ends,
    )


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_stored_values(gemma: Path, backend: str) -> None:
    """The whole engine's log-probabilities are Transformers', and its encoder's rows."""
    stored = np.load(DATA)
    kind = NativeBackend if backend == "native" else ReferenceBackend
    encoder, processor = encoder_of(gemma, kind), processor_of(gemma)
    rows = np.concatenate([encoder.encode(processor.process(i).values) for i in (WIDE, TALL)])
    np.testing.assert_allclose(rows, stored["rows"], rtol=0, atol=1e-5)
    params = SamplingParams(
        max_tokens=1, temperature=0, prompt_logprobs=0, logprobs=5, ignore_eos=True
    )
    prompt = {"prompt": f"{BEGIN} and then {BEGIN}?", "multi_modal_data": {"image": [WIDE, TALL]}}
    options = {"activation_precision": "float32", "kv_cache_dtype": "float32", "backend": backend}
    with LLM(str(gemma), **SMALL, **options) as made:
        output = made.generate([prompt], params)[0]
    ids = output.prompt_token_ids or []
    given = (output.prompt_logprobs or [])[1:]
    found = [(entry or {})[i].logprob for entry, i in zip(given, ids[1:], strict=True)]
    np.testing.assert_allclose(found, stored["prompt_logprobs"], rtol=0, atol=3e-5)
    last = stored["last_logits"]
    expected = last - np.log(np.exp(last).sum())
    for token_id, logprob in (output.outputs[0].logprobs or [])[0].items():
        assert logprob.logprob == pytest.approx(expected[token_id], abs=3e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [NativeBackend, ReferenceBackend])
def test_like_transformers(gemma: Path, kind: Any) -> None:
    """Pixels, encoder outputs, and all logits of a prompt, in float32."""
    import torch
    from transformers import AutoModelForImageTextToText
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    from tests.models.test_vision import as_picture

    processor, tokenizer = processor_of(gemma), load_tokenizer(gemma)
    images = [processor.process(image) for image in (WIDE, TALL)]
    given = Gemma3ImageProcessorPil.from_pretrained(gemma)([WIDE, TALL], return_tensors="pt")
    source = open_vision(gemma)
    assert source is not None
    pixels = np.concatenate([image.pixels for image in images])
    np.testing.assert_array_equal(as_picture(pixels, source), given["pixel_values"].numpy())
    ids = tokenizer.encode(EXPANDED)
    assert ids == tokenizer.encode(f"{images[0].prompt} and then {images[1].prompt}?")
    encoder = encoder_of(gemma, kind)
    rows = np.concatenate([encoder.encode(image.values) for image in images])
    model = AutoModelForImageTextToText.from_pretrained(
        gemma, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    tokens = torch.tensor([ids])
    with torch.no_grad():
        features = model.model.get_image_features(given["pixel_values"]).pooler_output
        logits = model(
            input_ids=tokens,
            pixel_values=given["pixel_values"],
            token_type_ids=(tokens == SOFT_ID).int(),
        ).logits[0]
    np.testing.assert_allclose(rows, features.reshape(-1, HIDDEN).numpy(), rtol=0, atol=1e-5)
    with open_model(gemma) as opened:
        backend = kind(build_plan(opened), activation_precision="float32", kv_cache_dtype="float32")
    backend.init_kv_cache(20)
    ours = np.array(backend.forward(step_of(ids, rows)))
    np.testing.assert_allclose(ours, logits.numpy(), rtol=0, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("size", [(60, 20), (19, 90), (24, 20), (200, 10), (33, 40)])
def test_pan_and_scan_like_transformers(gemma: Path, size: tuple[int, int]) -> None:
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    from tests.models.test_vision import as_picture

    options = {
        "do_pan_and_scan": True,
        "pan_and_scan_min_crop_size": 9,
        "pan_and_scan_max_num_crops": 4,
        "pan_and_scan_min_ratio_to_activate": 1.2,
    }
    processor, source = load_image_processor(gemma, None, options), open_vision(gemma)
    assert processor is not None
    assert source is not None
    image = picture(*size)
    theirs = Gemma3ImageProcessorPil.from_pretrained(gemma)([image], return_tensors="pt", **options)
    ours = processor.process(image)
    np.testing.assert_array_equal(as_picture(ours.pixels, source), theirs["pixel_values"].numpy())
    assert len(ours.values) == 1 + int(theirs["num_crops"][0])
