"""The whole engine with SmolLM2: what users reported about other engines must not happen here.

Self-calibration: a greedy run without the feature gives the text from which stop strings, lengths
and expected results are derived. After every refusal a normal request must work (survivor check).
"""

from __future__ import annotations

import asyncio
import gc
import math
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from tellin import LLM, RequestOutputKind, SamplingParams, StructuredOutputsParams
from tellin.exceptions import ContextLengthError, RequestError
from tellin.metrics import Counter, Gauge, Metric

PROMPT = "The lighthouse keeper looked at the sea and"
MAX_MODEL_LEN = 256


@pytest.fixture(scope="module")
def llm(smollm2_path: Path) -> Iterator[LLM]:
    with LLM(
        smollm2_path, max_model_len=MAX_MODEL_LEN, max_num_seqs=16, num_kv_blocks=129
    ) as model:
        yield model


@pytest.fixture(scope="module")
def greedy(llm: LLM) -> Any:
    """A greedy continuation to derive expectations from."""
    return llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=48))[0].outputs[0]


@pytest.fixture(autouse=True)
def survivor(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test the engine is empty and still answers as before."""
    if "llm" not in request.fixturenames:
        yield
        return
    model: LLM = request.getfixturevalue("llm")
    expected = request.getfixturevalue("greedy").text
    yield
    assert not model.llm_engine.has_unfinished_requests()
    assert model.llm_engine.output_processor.parent_requests == {}
    (output,) = model.generate(PROMPT, SamplingParams(temperature=0, max_tokens=4))
    assert expected.startswith(output.text)


def text_of(llm: LLM, **params: Any) -> Any:
    return llm.generate(PROMPT, SamplingParams(temperature=0, **params))[0].outputs[0]


# ---------------------------------------------------------------------- text and stop strings


def test_s09_s11_p57_p63_the_core_is_here_and_nothing_else(smollm2_path: Path) -> None:
    """No thread of Python's, no child, no socket, no transport, not a word on either stream."""
    code = (
        "import sys, threading, psutil\n"
        "from tellin import LLM, SamplingParams\n"
        "from tellin.core.engine_core import EngineCore\n"
        "with LLM(sys.argv[1], max_model_len=64, num_kv_blocks=9) as llm:\n"
        "    llm.generate('x', SamplingParams(max_tokens=2))\n"
        "    assert isinstance(llm.llm_engine.engine_core.engine_core, EngineCore)\n"
        "    process = psutil.Process()\n"
        "    assert threading.active_count() == 1\n"
        "    assert process.children() == [] and process.net_connections('all') == []\n"
        "    unwanted = {'zmq', 'fastapi', 'prometheus_client', 'torch', 'asyncio'}\n"
        "    assert not unwanted & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, str(smollm2_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(("start", "end"), [(5, 17), (0, 3), (20, 60), (7, 8)])
@pytest.mark.parametrize("include", [False, True])
def test_p01_p02_stop_strings_anywhere(
    llm: LLM, greedy: Any, start: int, end: int, include: bool
) -> None:
    text = greedy.text
    stop = text[start:end]
    first = text.index(stop)
    params = SamplingParams(
        temperature=0, max_tokens=48, stop=[stop], include_stop_str_in_output=include
    )
    expected = text[: first + len(stop) * include]
    (output,) = llm.generate(PROMPT, params)
    assert output.outputs[0].text == expected
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", stop)
    pieces = list(llm.stream(PROMPT, params))
    assert "".join(piece.text for piece in pieces) == expected
    assert sum(len(piece.outputs[0].token_ids) for piece in pieces) == len(
        output.outputs[0].token_ids
    )


def test_p02_the_earliest_match_in_the_text_wins(llm: LLM, greedy: Any) -> None:
    text = greedy.text
    late, early = text[40:46], text[12:18]
    completion = text_of(llm, max_tokens=48, stop=[late, early])
    assert completion.text == text[: text.index(early)]
    assert completion.stop_reason == early


def test_p04_every_character_arrives_whole(llm: LLM) -> None:
    """Forced output whose characters span several tokens."""
    text = "ď 👩🏽\u200d🚀 汉 the end"
    params = SamplingParams(
        temperature=0, max_tokens=64, structured_outputs=StructuredOutputsParams(choice=[text])
    )
    pieces = list(llm.stream(PROMPT, params))
    assert "".join(piece.text for piece in pieces) == text
    assert not any("\ufffd" in piece.text for piece in pieces)
    assert any(piece.text == "" for piece in pieces), "some tokens complete no character"
    (output,) = llm.generate(PROMPT, params)
    assert output.text == text


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_p54_p55_streamed_equals_not_streamed(
    llm: LLM, greedy: Any, kind: RequestOutputKind
) -> None:
    engine = llm.llm_engine
    (prompt,) = engine.renderer.render_cmpl([PROMPT])
    engine.add_request("x", prompt, SamplingParams(temperature=0, max_tokens=48, output_kind=kind))
    outputs: list[Any] = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    reasons = [output.outputs[0].finish_reason for output in outputs]
    assert reasons == [None] * (len(outputs) - 1) + ["length"]
    if kind == RequestOutputKind.DELTA:
        assert "".join(output.text for output in outputs) == greedy.text
        assert [i for output in outputs for i in output.outputs[0].token_ids] == greedy.token_ids
    else:
        assert outputs[-1].text == greedy.text
        assert outputs[-1].outputs[0].token_ids == greedy.token_ids


# ---------------------------------------------------------------------- logprobs


def test_p06_p08_prompt_logprobs(llm: LLM) -> None:
    (output,) = llm.generate(
        "in that place", SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=2)
    )
    assert output.prompt_logprobs is not None
    assert output.prompt_token_ids is not None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    assert output.prompt_logprobs[0] is None
    texts = []
    for token_id, position in zip(
        output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True
    ):
        assert position is not None
        assert token_id in position
        texts.append(position[token_id].decoded_token)
        assert all("Ġ" not in str(entry.decoded_token) for entry in position.values())
    assert texts == [" that", " place"]


def test_p07_logprobs_do_not_depend_on_sampling_parameters(llm: LLM) -> None:
    seen = []
    for params in (
        {"temperature": 0},
        {"temperature": 0.5, "top_k": 1},
        {"temperature": 2.0, "top_p": 0.1},
    ):
        (output,) = llm.generate(PROMPT, SamplingParams(max_tokens=1, logprobs=5, seed=1, **params))
        assert output.outputs[0].logprobs is not None
        position = output.outputs[0].logprobs[0]
        assert output.outputs[0].token_ids[0] in position
        seen.append({i: e.logprob for i, e in position.items() if e.rank and e.rank <= 5})
    assert seen[0] == seen[1] == seen[2]


# ---------------------------------------------------------------------- n, seeds, exactness


def test_p10_p12_n_and_seeds(llm: LLM) -> None:
    """Per-request seeds decide alone; child i of seed s is the request with seed s + i."""
    params = SamplingParams(n=3, temperature=1.0, seed=11, max_tokens=8)
    (output,) = llm.generate(PROMPT, params)
    assert [c.index for c in output.outputs] == [0, 1, 2]
    assert all(c.finish_reason in ("length", "stop") for c in output.outputs)
    assert len({tuple(c.token_ids) for c in output.outputs}) == 3
    for index, completion in enumerate(output.outputs):
        single = SamplingParams(temperature=1.0, seed=11 + index, max_tokens=8)
        (alone,) = llm.generate(PROMPT, single)
        assert alone.outputs[0].token_ids == completion.token_ids


def test_p12_global_random_state_is_untouched(llm: LLM) -> None:
    random.seed(1)
    np.random.seed(1)
    before = (random.getstate(), np.random.get_state()[1].tolist())  # type: ignore[index, union-attr]
    llm.generate(PROMPT, SamplingParams(temperature=1.0, max_tokens=4))
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before  # type: ignore[index, union-attr]


def test_s08_batch_equals_one_by_one(llm: LLM, greedy: Any) -> None:
    """Promise 1 through the whole shell: ids and logprobs bit for bit."""
    prompts = [PROMPT, "One, two, three,", "def main():", "In the year 1900", "x"]
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=2)
    together = llm.generate(prompts, params)
    for prompt, output in zip(prompts, together, strict=True):
        (alone,) = llm.generate(prompt, params)
        assert alone.outputs[0].token_ids == output.outputs[0].token_ids
        assert alone.outputs[0].logprobs == output.outputs[0].logprobs


def test_threads_get_the_results_of_lone_calls(llm: LLM) -> None:
    prompts = [f"Number {number} is" for number in range(6)]
    params = SamplingParams(temperature=0, max_tokens=10)
    expected = [output.text for output in llm.generate(prompts, params)]
    results: dict[int, str] = {}

    def work(number: int) -> None:
        if number % 2:
            results[number] = llm.generate(prompts[number], params)[0].text
        else:
            results[number] = "".join(d.text for d in llm.stream(prompts[number], params))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert [results[number] for number in range(6)] == expected


# ---------------------------------------------------------------------- limits and hostile input


def test_p13_p14_an_overlong_prompt_among_others(llm: LLM) -> None:
    prompts = ["short", "long " * 10_000, "short2"]
    with pytest.raises(ContextLengthError, match=str(MAX_MODEL_LEN)):
        llm.generate(prompts, SamplingParams(max_tokens=4))
    assert len(llm.generate(["hello"], SamplingParams(max_tokens=4))) == 1
    outputs = llm.generate(prompts, SamplingParams(max_tokens=4), on_error="return")
    assert [output.error is None for output in outputs] == [True, False, True]
    assert [len(output.outputs[0].token_ids) for output in outputs] == [4, 0, 4]


def test_p15_prompts_at_the_limit(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    (output,) = llm.generate([[100] * (MAX_MODEL_LEN - 1)], params)
    assert output.outputs[0].finish_reason == "length"
    assert len(output.outputs[0].token_ids) == 1
    assert len(output.prompt_logprobs or ()) == MAX_MODEL_LEN - 1
    with pytest.raises(ContextLengthError, match="no room"):
        llm.generate([[100] * MAX_MODEL_LEN], params)


def test_p17_generation_ends_at_the_window(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=500, ignore_eos=True)
    (output,) = llm.generate([[100] * (MAX_MODEL_LEN - 10)], params)
    assert len(output.outputs[0].token_ids) == 10
    assert output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize(
    "params",
    [
        {"logit_bias": {49152: 1.0}},
        {"logit_bias": {-1: 1.0}},
        {"logit_bias": {"abc": 1.0}},
        {"logit_bias": {5: math.nan}},
        {"temperature": math.nan},
        {"top_p": math.inf},
        {"max_tokens": 0},
        {"allowed_token_ids": [49152]},
        {"stop_token_ids": [10**9]},
        {"prompt_logprobs": 10**6},
        {"min_tokens": 1000, "max_tokens": None},
        {"structured_outputs": {"regex": "("}},
        {"structured_outputs": {"json": {"$ref": "#"}}},
        {"stop": [""]},
        {"n": 10**9},
    ],
    ids=str,
)
def test_p27_p28_p36_p52_hostile_parameters(llm: LLM, params: dict[str, Any]) -> None:
    with pytest.raises(ValueError) as info:
        llm.generate(PROMPT, SamplingParams(**params))
    assert isinstance(info.value, RequestError)
    assert next(iter(params)) in str(info.value)


@pytest.mark.parametrize(
    "prompt", ["", [], [""], [[]], [-1], [10**9], {"prompt_token_ids": [49152]}], ids=str
)
def test_p26_hostile_prompts(llm: LLM, prompt: Any) -> None:
    if prompt == []:
        assert llm.generate(prompt) == []
        return
    with pytest.raises(ValueError):
        llm.generate(prompt)


def test_p30_contradicting_masks(llm: LLM) -> None:
    token_id = llm.get_tokenizer().encode("sea", add_special_tokens=False)[0]
    with pytest.raises(RequestError, match="allowed_token_ids"):
        llm.generate(PROMPT, SamplingParams(allowed_token_ids=[token_id], bad_words=["sea"]))


def test_p44_chat_and_templated_text_are_the_same_prompt(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    params = SamplingParams(temperature=0, max_tokens=4)
    (chat,) = llm.chat(messages, params)
    (templated,) = llm.generate(chat.prompt, params)
    assert chat.prompt_token_ids == templated.prompt_token_ids
    assert chat.outputs[0].token_ids == templated.outputs[0].token_ids


def test_p53_ignore_eos_and_min_tokens(llm: LLM) -> None:
    (eos, *_) = llm.model_config.eos_token_ids
    forced = {"logit_bias": {eos: 100.0}, "temperature": 0, "max_tokens": 6}
    (output,) = llm.generate(PROMPT, SamplingParams(**forced))
    assert output.outputs[0].token_ids == [eos]
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", None)
    assert output.text == ""
    (ignoring,) = llm.generate(PROMPT, SamplingParams(**forced, ignore_eos=True))
    assert ignoring.outputs[0].token_ids == [eos] * 6
    (late,) = llm.generate(PROMPT, SamplingParams(**forced, min_tokens=4))
    assert len(late.outputs[0].token_ids) == 5
    assert late.outputs[0].token_ids[-1] == eos


def test_abandoned_stream_frees_its_blocks(llm: LLM) -> None:
    for _ in llm.stream(PROMPT, SamplingParams(max_tokens=200, ignore_eos=True)):
        break
    gc.collect()
    assert not llm.llm_engine.has_unfinished_requests()


# ---------------------------------------------------------------------- where it can run


def test_p33_in_a_thread_and_inside_an_event_loop(smollm2_path: Path) -> None:
    """No signal handlers are installed, no event loop is needed or disturbed."""
    results: list[str] = []

    def work() -> None:
        with LLM(smollm2_path, max_model_len=64, num_kv_blocks=9) as model:
            results.append(model.generate("a", SamplingParams(temperature=0, max_tokens=3))[0].text)

    async def main() -> None:
        work()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(120)
    asyncio.run(main())
    assert len(results) == 2
    assert results[0] == results[1]


def test_p31_memory_comes_back(smollm2_path: Path) -> None:
    """Build, use, drop: memory does not grow from round to round."""

    def one_round(explicit: bool) -> int:
        model = LLM(smollm2_path, max_model_len=256, num_kv_blocks=65)
        model.generate(PROMPT, SamplingParams(max_tokens=4))
        if explicit:
            model.shutdown()
            model.shutdown()
        del model
        gc.collect()
        return psutil.Process().memory_info().rss

    one_round(True)
    sizes = [one_round(explicit) for explicit in (True, False, True)]
    assert max(sizes) - sizes[0] < 20e6, sizes


def value(metrics: list[Metric], name: str, **labels: str) -> float:
    (metric,) = [
        m for m in metrics if m.name == "tellin:" + name and labels.items() <= m.labels.items()
    ]
    assert isinstance(metric, Counter | Gauge)
    return metric.value


def test_p56_metrics_of_a_real_engine(smollm2_path: Path) -> None:
    with LLM(smollm2_path, max_model_len=128, num_kv_blocks=33, disable_log_stats=False) as model:
        params = SamplingParams(temperature=1.0, max_tokens=5, ignore_eos=True, seed=1)
        outputs = model.generate(["a b c", "d e f"], params)
        many = SamplingParams(n=3, temperature=1.0, max_tokens=5, ignore_eos=True, seed=1)
        outputs += model.generate("a b c", many)
        stream = model.stream("x y z", SamplingParams(max_tokens=50))
        next(stream)
        stream.close()
        metrics = model.get_metrics()
        assert value(metrics, "request_success", finished_reason="length") == 5
        assert value(metrics, "request_success", finished_reason="abort") == 1
        assert value(metrics, "generation_tokens") == 5 * 5 + 1
        num_prompt = len(model.get_tokenizer().encode("a b c"))
        assert value(metrics, "prompt_tokens") == 6 * num_prompt
        assert value(metrics, "num_requests_running") == 0
        assert value(metrics, "num_requests_waiting") == 0
        assert outputs[0].metrics is not None
        assert outputs[0].metrics.first_token_latency > 0
