"""Images end to end, on a tiny model with random weights: `LLM`, `AsyncLLM`, processes, commands.

Promise 1 holds for images too: what a request gets is the same bit for bit whatever runs beside it,
however its prompt is cut into chunks, and whatever is cached.
"""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tellin import LLM, AsyncLLM, BeamSearchParams, SamplingParams
from tellin.config import EngineArgs
from tellin.entrypoints import cli
from tellin.exceptions import ContextLengthError, InvalidParameterError, UnsupportedFeatureError
from tellin.outputs import RequestOutput
from tests.models.vision import write_llava, write_smolvlm

SMALL: dict[str, Any] = {
    "num_threads": 1,
    "num_kv_blocks": 128,
    "max_model_len": 512,
    "max_num_batched_tokens": 128,
    "max_num_seqs": 8,
}


def picture(seed: int, width: int, height: int) -> Image.Image:
    pixels = np.random.RandomState(seed).randint(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels)


SQUARE, WIDE, TINY = picture(1, 64, 64), picture(2, 90, 20), picture(3, 5, 7)
PROMPTS: list[Any] = [
    {"prompt": "a <image>?", "multi_modal_data": {"image": SQUARE}},
    {"prompt": "<image><image> and then?", "multi_modal_data": {"image": [WIDE, TINY]}},
    "no picture at all, but some words that take a while to read",
    {"prompt": "a <image>?", "multi_modal_data": {"image": WIDE}},
    {"prompt": "it ends with <image>", "multi_modal_data": {"image": TINY}},
    {"prompt": "<image> twice <image>", "multi_modal_data": {"image": [SQUARE, SQUARE]}},
]
PARAMS = [
    SamplingParams(max_tokens=12, temperature=t, seed=s, ignore_eos=True, logprobs=2)
    for s, t in enumerate((0.0, 0.8, 0.0, 1.0, 0.0, 0.7))
]


@pytest.fixture(scope="module")
def smolvlm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_smolvlm(tmp_path_factory.mktemp("models") / "smolvlm")


@pytest.fixture(scope="module")
def llm(smolvlm: Path) -> Iterator[LLM]:
    with LLM(str(smolvlm), disable_log_stats=False, **SMALL) as made:
        yield made


def results(outputs: list[RequestOutput]) -> list[Any]:
    return [(o.prompt_token_ids, o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs]


@pytest.fixture(scope="module")
def alone(smolvlm: Path) -> list[Any]:
    """Every request alone in an engine that caches nothing."""
    options: dict[str, Any] = {"enable_prefix_caching": False, "mm_processor_cache_gb": 0}
    with LLM(str(smolvlm), **{**SMALL, **options}) as made:
        return [
            results(made.generate(prompt, params))[0]
            for prompt, params in zip(PROMPTS, PARAMS, strict=True)
        ]


def test_an_image_is_seen(llm: LLM) -> None:
    """Other pixels under the same ids give another distribution."""
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, logprobs=5)
    images = (picture(5, 64, 64), picture(6, 64, 64))
    prompts = [{"prompt": "<image>x", "multi_modal_data": {"image": image}} for image in images]
    one, other = llm.generate(prompts, params)
    assert one.prompt_token_ids == other.prompt_token_ids
    assert one.outputs[0].logprobs != other.outputs[0].logprobs
    again = llm.generate(prompts[0], params)[0]
    assert again.outputs[0].logprobs == one.outputs[0].logprobs
    assert again.num_cached_tokens == len(one.prompt_token_ids or ()) - 1


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"enable_prefix_caching": False},
        {"max_num_batched_tokens": 9},
        {"max_num_batched_tokens": 33, "num_kv_blocks": 16, "max_model_len": 238},
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 512},
        {"backend": "reference"},
    ],
    ids=["together", "no prefix cache", "small chunks", "preempted", "whole", "reference"],
)
def test_promise_1(smolvlm: Path, alone: list[Any], options: dict[str, Any]) -> None:
    with LLM(str(smolvlm), disable_log_stats=False, **{**SMALL, **options}) as made:
        together = results(made.generate(PROMPTS, PARAMS))
        preempted = [m for m in made.get_metrics() if m.name == "tellin:num_preemptions"]
        assert preempted[0].value == int("num_kv_blocks" in options)  # type: ignore[union-attr]
        again = results(made.generate(PROMPTS, PARAMS))
    assert again == together
    if "backend" not in options:
        assert together == alone
    else:
        assert [r[:2] for r in together] == [r[:2] for r in alone]


def test_token_ids_and_other_forms(llm: LLM, alone: list[Any]) -> None:
    tokenizer: Any = llm.get_tokenizer()
    buffer = io.BytesIO()
    SQUARE.save(buffer, "PNG")
    for image in (buffer.getvalue(), np.asarray(SQUARE)):
        prompt = {
            "prompt_token_ids": tokenizer.encode("a <image>?"),
            "multi_modal_data": {"image": [image]},
        }
        assert results(llm.generate(prompt, PARAMS[0])) == [alone[0]]


def test_chat(llm: LLM) -> None:
    message = {
        "role": "user",
        "content": [{"type": "image_pil", "image_pil": WIDE}, {"type": "text", "text": "what?"}],
    }
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    (output,) = llm.chat([message], params)
    assert output.prompt == ("<|im_start|>User:<image>what?<end_of_utterance>\nAssistant:")
    by_hand = {"prompt": output.prompt, "multi_modal_data": {"image": WIDE}}
    assert results(llm.generate(by_hand, params)) == results([output])
    pieces = [piece.outputs[0].token_ids for piece in llm.stream([message], params)]
    assert [i for piece in pieces for i in piece] == output.outputs[0].token_ids


def test_n_samples_share_the_image(llm: LLM) -> None:
    params = SamplingParams(n=3, max_tokens=5, temperature=1.0, seed=3, ignore_eos=True)
    (output,) = llm.generate(PROMPTS[0], params)
    assert len({tuple(o.token_ids) for o in output.outputs}) > 1
    singles = [
        llm.generate(PROMPTS[0], SamplingParams(max_tokens=5, temperature=1.0, seed=3 + i,
                                                ignore_eos=True))[0].outputs[0].token_ids
        for i in range(3)
    ]  # fmt: skip
    assert [o.token_ids for o in output.outputs] == singles


def test_beam_search_sees_the_image(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=3, ignore_eos=True)
    prompts = [{"prompt": "<image>", "multi_modal_data": {"image": i}} for i in (SQUARE, WIDE)]
    one, other = llm.beam_search(prompts, params)
    assert one.sequences[0].logprobs != other.sequences[0].logprobs
    greedy = llm.generate(
        prompts[0], SamplingParams(max_tokens=1, temperature=0, logprobs=4, ignore_eos=True)
    )
    found = (greedy[0].outputs[0].logprobs or [])[0]
    first = one.sequences[0].logprobs[0]
    assert {i: p.logprob for i, p in first.items()} == {i: p.logprob for i, p in found.items()}


def test_prompt_logprobs_of_a_prompt_with_an_image(llm: LLM) -> None:
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1)
    (output,) = llm.generate(PROMPTS[0], params)
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids or ())
    again = llm.generate(PROMPTS[0], params)[0]
    assert again.prompt_logprobs == output.prompt_logprobs


def test_metrics_count_images(smolvlm: Path) -> None:
    with LLM(str(smolvlm), disable_log_stats=False, **SMALL) as made:
        made.generate([PROMPTS[0], PROMPTS[3], PROMPTS[0]], PARAMS[0])
        values = {m.name: m.value for m in made.get_metrics() if "mm_cache" in m.name}  # type: ignore[union-attr]
    assert values == {"tellin:mm_cache_queries": 3, "tellin:mm_cache_hits": 1}


def test_s71_sleep_resets_and_wakes(llm: LLM, alone: list[Any]) -> None:
    for forget in (
        lambda: (llm.sleep(1), llm.wake_up()),
        lambda: (llm.sleep(2), llm.wake_up()),
        llm.reset_mm_cache,
        lambda: llm.llm_engine.reset_encoder_cache(),
        llm.reset_prefix_cache,
    ):
        forget()
        assert results(llm.generate(PROMPTS[1], PARAMS[1])) == [alone[1]]


def test_refusals(llm: LLM, smolvlm: Path) -> None:
    with pytest.raises(InvalidParameterError, match=r"1 placeholders.*2 images"):
        llm.generate({"prompt": "<image>", "multi_modal_data": {"image": [TINY, TINY]}})
    many = {"prompt": "<image>" * 9, "multi_modal_data": {"image": [SQUARE] * 9}}
    with pytest.raises(ContextLengthError, match=r"images take \d+ tokens"):
        llm.generate(many)
    outputs = llm.generate([{"prompt": "<image>", "multi_modal_data": {"image": b"x"}}, "b"],
                           SamplingParams(max_tokens=2), on_error="return")  # fmt: skip
    assert "no picture" in str(outputs[0].error)
    assert outputs[1].error is None
    with LLM(str(smolvlm), limit_mm_per_prompt={"image": 0}, **SMALL) as text_only:
        with pytest.raises(UnsupportedFeatureError, match="limit_mm_per_prompt"):
            text_only.generate(PROMPTS[0])
        assert text_only.generate("words", SamplingParams(max_tokens=2))[0].outputs[0].token_ids


def test_files_of_one_folder_can_be_allowed(smolvlm: Path, tmp_path: Path, llm: LLM) -> None:
    SQUARE.save(tmp_path / "a.png")
    part = {"type": "image_url", "image_url": {"url": (tmp_path / "a.png").as_uri()}}
    params = SamplingParams(max_tokens=2)
    with pytest.raises(UnsupportedFeatureError, match="allowed_local_media_path"):
        llm.chat([{"role": "user", "content": [part]}], params)
    with LLM(str(smolvlm), allowed_local_media_path=tmp_path, **SMALL) as made:
        (output,) = made.chat([{"role": "user", "content": [part]}], params)
    assert len(output.prompt_token_ids or ()) > 64


@pytest.mark.parametrize("max_bytes", [0, 20_000, 80_000])
def test_a_long_list_is_prepared_as_it_is_computed(
    llm: LLM, alone: list[Any], max_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pixels of all its images need not fit into memory together."""
    monkeypatch.setattr("tellin.entrypoints.offline_runner.MAX_IMAGE_BYTES", max_bytes)
    most = 0
    core: Any = llm.llm_engine.engine_core
    add = core.add_request

    def add_request(request: Any) -> None:
        nonlocal most
        add(request)
        live = core.engine_core.scheduler.requests.values()
        most = max(most, sum(f.data.nbytes for r in live for f in r.mm_features))

    monkeypatch.setattr(core, "add_request", add_request)
    assert results(llm.generate(PROMPTS * 2, PARAMS * 2)) == alone * 2
    largest = 2 * 17 * 16 * 48
    assert 0 < most <= max_bytes + largest
    outputs = llm.generate([*PROMPTS, {"prompt": "<image>"} | {"multi_modal_data": {"image": 5}}],
                           SamplingParams(max_tokens=1), on_error="return")  # fmt: skip
    assert [output.error is None for output in outputs] == [True] * len(PROMPTS) + [False]


def test_llava(tmp_path: Path) -> None:
    path = write_llava(tmp_path / "llava")
    prompts = [
        {"prompt": "USER: <image>\nWhat?", "multi_modal_data": {"image": image}}
        for image in (SQUARE, WIDE)
    ]
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, logprobs=2)
    with LLM(str(path), enable_prefix_caching=False, **SMALL) as made:
        single = [results(made.generate(prompt, params))[0] for prompt in prompts]
        assert results(made.generate(prompts, params)) == single
    assert single[0][0].count(single[0][0][6]) >= 25
    assert single[0][2] != single[1][2]


def test_inp58_a_core_in_a_process_gets_every_image_once(
    smolvlm: Path, alone: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second time only its name travels; after a sleep its pixels do again (S72)."""
    monkeypatch.setenv("TELLIN_ENABLE_MULTIPROCESSING", "1")
    with LLM(str(smolvlm), disable_log_stats=False, **SMALL) as made:
        client: Any = made.llm_engine.engine_core
        sizes: list[int] = []
        original = client._encoder.encode

        def encode(message: Any) -> Any:
            frames = original(message)
            sizes.append(sum(map(len, frames)))
            return frames

        client._encoder.encode = encode

        def run(index: int) -> int:
            sizes.clear()
            assert results(made.generate(PROMPTS[index], PARAMS[index])) == [alone[index]]
            return max(sizes)

        first, second = run(0), run(0)
        assert first > 10 * second
        assert run(5) < first, "it has the same picture twice"
        made.sleep(1)
        made.wake_up()
        assert run(0) == first
        made.reset_mm_cache()
        assert run(0) == first
        assert run(0) == second


async def _answers(engine: AsyncLLM) -> list[Any]:
    async def one(index: int) -> Any:
        last: Any = None
        async for output in engine.generate(PROMPTS[index], PARAMS[index]):
            last = output
        return last

    return results(await asyncio.gather(*map(one, range(len(PROMPTS)))))


@pytest.mark.parametrize("multiprocess_mode", [False, True])
def test_async_engine(smolvlm: Path, alone: list[Any], multiprocess_mode: bool) -> None:
    async def main() -> None:
        engine = AsyncLLM.from_engine_args(
            EngineArgs(model=str(smolvlm), **SMALL), multiprocess_mode=multiprocess_mode
        )
        try:
            assert [r[:2] for r in await _answers(engine)] == [r[:2] for r in alone]
            await engine.sleep(1)
            await engine.wake_up()
            assert [r[:2] for r in await _answers(engine)] == [r[:2] for r in alone]
        finally:
            engine.shutdown()

    asyncio.run(main())


# ---------------------------------------------------------------------- commands


def test_tellin_generate_image(
    smolvlm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    SQUARE.save(tmp_path / "a.png")
    model = ["--model", str(smolvlm), "--threads", "1", "-n", "2", "--set", "num_kv_blocks=64"]
    options = [*model, "--json", "--image", str(tmp_path / "a.png")]
    assert cli.main(["generate", *options, "what?"]) == 0
    chat = json.loads(capsys.readouterr().out)
    assert cli.main(["generate", *options, "--raw", "<image>what?"]) == 0
    raw = json.loads(capsys.readouterr().out)
    assert chat["num_prompt_tokens"] > raw["num_prompt_tokens"] > 64
    assert cli.main(["generate", *model, "--image", str(tmp_path / "none.png"), "x"]) != 0
    assert "none.png: No such file" in capsys.readouterr().err
    assert cli.main(["generate", *options, "--raw", "no place"]) != 0
    assert "0 placeholders" in capsys.readouterr().err


def test_tellin_chat_image(
    smolvlm: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    SQUARE.save(tmp_path / "a.png")
    monkeypatch.setattr("sys.stdin", io.StringIO("what is it?\nand now?\n"))
    arguments = ["--model", str(smolvlm), "--threads", "1", "-n", "3", "--set", "num_kv_blocks=64"]
    assert cli.main(["chat", *arguments, "--image", str(tmp_path / "a.png")]) == 0
    assert len(capsys.readouterr().out.strip("\n").splitlines()) >= 1
