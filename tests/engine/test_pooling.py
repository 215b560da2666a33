"""Embeddings from text to vector, with real models: rules POOL-*, 9.2 to 9.5, P51, promise 1.

Reference values are those of `transformers` in float32 (tests/data/make).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tellin import LLM, EngineArgs, LLMEngine, PoolingParams, PoolingRequestOutput, SamplingParams
from tellin.engine.arg_utils import create_engine_config
from tellin.engine.async_llm import AsyncLLM
from tellin.exceptions import (
    ContextLengthError,
    InvalidParameterError,
    RequestError,
    UnsupportedFeatureError,
)
from tests.models.adapters import base_weights, write_llama_folder

DATA = Path(__file__).parents[1] / "data"
TEXTS = [f"Sentence {i}: " + "the tide comes in and goes out. " * (i % 7) for i in range(24)]
EMBED = PoolingParams(task="embed")
DECODER: dict[str, Any] = {
    "runner": "pooling",
    "max_model_len": 512,
    "num_kv_blocks": 200,
    "activation_precision": "float32",
    "kv_cache_dtype": "float32",
}


@pytest.fixture(scope="module")
def minilm(minilm_path: Path) -> Iterator[LLM]:
    with LLM(minilm_path) as llm:
        yield llm


@pytest.fixture(scope="module")
def decoder(smollm2_path: Path) -> Iterator[LLM]:
    """SmolLM2 as an embedder, in float32."""
    with LLM(smollm2_path, **DECODER) as llm:
        yield llm


def vectors(llm: LLM, prompts: Any, **options: Any) -> np.ndarray:
    return np.array([o.outputs.embedding for o in llm.embed(prompts, **options)])


# ---------------------------------------------------------------------- values


def golden(name: str) -> dict[str, np.ndarray]:
    with np.load(DATA / name) as stored:
        return dict(stored)


def test_values_of_an_encoder(minilm: LLM) -> None:
    """Mean pooling and L2 norm, as the model's sentence-transformers files say."""
    stored = golden("minilm.npz")
    for i in range(2):
        expected = stored[f"mean_{i}"].astype(np.float64)
        expected /= np.linalg.norm(expected)
        prompt = {"prompt_token_ids": stored[f"ids_{i}"].tolist()}
        np.testing.assert_allclose(vectors(minilm, prompt)[0], expected, rtol=0, atol=1e-5)
        (raw,) = minilm.encode(prompt, PoolingParams(use_activation=False), pooling_task="embed")
        np.testing.assert_allclose(raw.outputs.data, stored[f"mean_{i}"], rtol=0, atol=1e-4)
    (tokens,) = minilm.encode(
        {"prompt_token_ids": stored["ids_0"].tolist()},
        PoolingParams(use_activation=False),
        pooling_task="token_embed",
    )
    np.testing.assert_allclose(tokens.outputs.data, stored["hidden_0"], rtol=0, atol=1e-4)


def test_values_of_a_decoder(decoder: LLM) -> None:
    stored = golden("embeddings.npz")
    for i in range(3):
        prompt = {"prompt_token_ids": stored[f"ids_{i}"].tolist()}
        np.testing.assert_allclose(
            vectors(decoder, prompt)[0], stored[f"last_{i}"], rtol=0, atol=2e-5
        )


def test_9_5_2_score_is_the_cosine(minilm: LLM) -> None:
    query, near, far = "A cat sat on the mat.", "A kitten lay on a rug.", "Interest rates rose."
    a, b, c = vectors(minilm, [query, near, far])
    scores = [output.outputs.score for output in minilm.score(query, [near, far])]
    np.testing.assert_allclose(scores, [a @ b, a @ c], atol=1e-6)
    assert scores[0] > scores[1] + 0.3
    assert minilm.score(query, query)[0].outputs.score == pytest.approx(1)


# ---------------------------------------------------------------------- promise 1


def test_p51_alone_is_as_in_a_batch(minilm: LLM, decoder: LLM) -> None:
    for llm in (minilm, decoder):
        together = vectors(llm, TEXTS)
        alone = np.concatenate([vectors(llm, text) for text in TEXTS])
        assert (together == alone).all()
        assert np.abs(np.linalg.norm(alone, axis=1) - 1).max() < 1e-5
        assert len({vector.tobytes() for vector in alone}) == len(TEXTS)


def test_p51_chunks_and_prefix_cache_change_no_bit(decoder: LLM, smollm2_path: Path) -> None:
    """A prompt longer than ``max_num_batched_tokens``, for both kinds of result."""
    text = " ".join(TEXTS[:8])
    (whole,) = decoder.embed(text)
    (again,) = decoder.embed(text)
    assert (again.num_cached_tokens or 0) > 0
    assert again.outputs.embedding == whole.outputs.embedding
    (tokens,) = decoder.encode(text, pooling_task="token_embed")
    assert tokens.num_cached_tokens == 0  # 9.1.2: every row is needed
    chunked_args = {"max_num_batched_tokens": 48, "max_num_seqs": 8, "enable_prefix_caching": False}
    with LLM(smollm2_path, **DECODER, **chunked_args) as small:
        outputs = small.embed([text, *TEXTS])
        assert len(whole.prompt_token_ids) > 2 * 48
        assert outputs[0].outputs.embedding == whole.outputs.embedding
        assert (
            np.array([o.outputs.embedding for o in outputs[1:]]) == vectors(decoder, TEXTS)
        ).all()
        (chunked,) = small.encode(text, pooling_task="token_embed")
        assert (chunked.outputs.data == tokens.outputs.data).all()


def run_engine(engine: LLMEngine) -> list[list[float]]:
    for i, text in enumerate(TEXTS):
        engine.add_request(str(i), engine.renderer.render_cmpl([text])[0], EMBED)
    results: dict[int, list[float]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step(timeout=60):
            assert isinstance(output, PoolingRequestOutput)
            assert output.finished
            results[int(output.request_id)] = output.outputs.data.tolist()
    return [results[i] for i in range(len(TEXTS))]


@pytest.mark.parametrize("kind", ["sync_mp", "async_mp", "async_thread"])
def test_all_clients_give_the_same_bits(minilm: LLM, minilm_path: Path, kind: str) -> None:
    expected = vectors(minilm, TEXTS).tolist()
    args = EngineArgs(model=minilm_path)
    if kind == "sync_mp":
        with LLMEngine.from_engine_args(args, enable_multiprocessing=True) as engine:
            assert set(engine.get_supported_tasks()) == {"embed", "token_embed"}
            assert run_engine(engine) == expected
        return

    async def run() -> list[list[float]]:
        engine = AsyncLLM.from_engine_args(args, multiprocess_mode=kind == "async_mp")

        async def one(text: str) -> list[float]:
            prompt = engine.renderer.render_cmpl([text])[0]
            (output,) = [output async for output in engine.encode(prompt, EMBED)]
            result: list[float] = output.outputs.data.tolist()
            return result

        try:
            return list(await asyncio.gather(*map(one, TEXTS)))
        finally:
            engine.shutdown()

    assert asyncio.run(run()) == expected


# ---------------------------------------------------------------------- lengths


def test_9_6_2_too_long_is_refused_never_cut(minilm: LLM) -> None:
    """The context is the 256 tokens that the model's embeddings were made for."""
    with pytest.raises(ContextLengthError, match=r"402 tokens.*256.*truncate_prompt_tokens"):
        minilm.embed("word " * 400)
    good, bad = minilm.embed(["word", "word " * 400], on_error="return")
    assert good.error is None
    assert isinstance(bad.error, ContextLengthError)


def test_truncation_keeps_the_special_tokens(minilm: LLM) -> None:
    cut = {"truncate_prompt_tokens": 6}
    (output,) = minilm.embed("one two three four five six", tokenization_kwargs=cut)
    ids = minilm.get_tokenizer().encode("one two three four")
    assert output.prompt_token_ids == ids
    assert output.num_truncated_prompt_tokens == 2
    left = cut | {"truncation_side": "left"}
    (output,) = minilm.embed("one two three four five six", tokenization_kwargs=left)
    assert output.prompt_token_ids == minilm.get_tokenizer().encode("three four five six")
    (output,) = minilm.embed("word " * 400, tokenization_kwargs={"truncate_prompt_tokens": -1})
    assert len(output.prompt_token_ids) == 256
    for limit in (2, 257):
        with pytest.raises(InvalidParameterError, match="truncate_prompt_tokens"):
            minilm.embed("one two", tokenization_kwargs={"truncate_prompt_tokens": limit})


def test_a_longer_context_on_demand(minilm_path: Path) -> None:
    config = create_engine_config(EngineArgs(model=minilm_path, max_model_len=512))
    assert config.model_config.max_model_len == 512
    assert not config.scheduler_config.enable_chunked_prefill
    assert not config.cache_config.enable_prefix_caching


# ---------------------------------------------------------------------- refusals


def test_9_1_6_each_model_says_what_it_can_do(minilm: LLM, smollm2_path: Path) -> None:
    with pytest.raises(UnsupportedFeatureError, match="embed"):
        minilm.generate("x")
    with pytest.raises(UnsupportedFeatureError, match=r"classify.*embed, token_embed"):
        minilm.classify("x")
    with pytest.raises(RequestError):
        minilm.llm_engine.add_request("x", "x", SamplingParams())
    with LLM(smollm2_path, max_model_len=64) as llm:
        for call in (llm.embed, lambda text: llm.score(text, text)):
            with pytest.raises(ValueError, match="runner='pooling'"):
                call("x")
        with pytest.raises(ValueError, match="runner='pooling'"):
            llm.llm_engine.add_request("x", "x", EMBED)


def test_token_embed_cannot_read_the_prefix_cache(decoder: LLM) -> None:
    params = PoolingParams(skip_reading_prefix_cache=False)
    with pytest.raises(InvalidParameterError, match="skip_reading_prefix_cache"):
        decoder.encode("x", params, pooling_task="token_embed")
    assert len(decoder.embed("x", pooling_params=params)) == 1


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama folder of random weights, without a tokenizer."""
    return write_llama_folder(tmp_path_factory.mktemp("tiny") / "llama", base_weights())


TINY: dict[str, Any] = {"skip_tokenizer_init": True, "max_model_len": 300, "num_threads": 1}
PROMPTS = [
    {"prompt_token_ids": [(i * 7 + j * 3) % 64 for j in range(30 + 41 * i)]} for i in range(6)
]


def test_token_embed_of_preempted_prompts(tiny: Path) -> None:
    """A pool too small for all: prompts that are thrown out begin anew, without a trace."""
    results = []
    for options in (
        {"num_kv_blocks": 200},
        {"num_kv_blocks": 24, "max_num_batched_tokens": 64, "max_num_seqs": 8},
    ):
        with LLM(tiny, runner="pooling", enable_prefix_caching=False, **TINY, **options) as llm:
            outputs = llm.encode(PROMPTS, pooling_task="token_embed")
            results.append([output.outputs.data for output in outputs])
    for free, tight, prompt in zip(*results, PROMPTS, strict=True):
        assert len(free) == len(prompt["prompt_token_ids"])
        assert (free == tight).all()


def test_9_1_4_dimensions(minilm: LLM, minilm_path: Path) -> None:
    with pytest.raises(InvalidParameterError, match="matryoshka"):
        minilm.embed("x", pooling_params=PoolingParams(dimensions=64))
    with LLM(
        minilm_path, pooler_config={"matryoshka_dimensions": [64, 128], "is_matryoshka": True}
    ) as llm:
        (short,) = llm.embed("x", pooling_params=PoolingParams(dimensions=64))
        full = vectors(minilm, "x")[0][:64]
        np.testing.assert_allclose(short.outputs.embedding, full / np.linalg.norm(full), atol=1e-6)
        with pytest.raises(InvalidParameterError, match="64, 128"):
            llm.embed("x", pooling_params=PoolingParams(dimensions=65))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"runner": "generate"}, "encoder"),
        ({"max_num_batched_tokens": 200}, "at least max_model_len"),
        ({"long_prefill_token_threshold": 64}, "long_prefill_token_threshold"),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, "speculative"),
        ({"pooler_config": {"pooling_type": "max"}}, "pooling_type"),
        ({"pooler_config": {"pooling": "MEAN"}}, "pooling"),
    ],
)
def test_9_2_4_what_does_not_go_with_pooling(
    minilm_path: Path, values: dict[str, Any], words: str
) -> None:
    with pytest.raises(RequestError, match=words):
        create_engine_config(EngineArgs(model=minilm_path, **values))


def test_9_2_2_the_user_overrules_the_model(minilm: LLM, minilm_path: Path) -> None:
    with LLM(minilm_path, pooler_config={"pooling_type": "cls", "use_activation": False}) as llm:
        (tokens,) = minilm.encode(
            TEXTS[3], PoolingParams(use_activation=False), pooling_task="token_embed"
        )
        assert (vectors(llm, TEXTS[3])[0] == tokens.outputs.data[0]).all()


# ---------------------------------------------------------------------- both


@pytest.mark.parametrize(
    "options",
    [{}, {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}],
    ids=["plain", "speculation"],
)
def test_b12_one_engine_generates_and_embeds(tiny: Path, options: dict[str, Any]) -> None:
    """The same bits as engines that do one of the two, and in batches with both kinds."""
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    with LLM(tiny, runner="pooling", **TINY) as llm:
        expected_vectors = vectors(llm, PROMPTS)
    with LLM(tiny, runner="generate", **TINY) as llm:
        expected_ids = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, greedy)]
    with LLM(tiny, runner="both", **TINY, **options) as llm:
        assert set(llm.supported_tasks) == {"generate", "embed"}
        engine = llm.llm_engine
        done: dict[str, Any] = {}
        for i, prompt in enumerate(engine.renderer.render_cmpl(PROMPTS)):
            engine.add_request(f"generate {i}", prompt, greedy)
            # Steps between, so that vectors join running generations.
            done |= {o.request_id: o for o in engine.step() if o.finished}
            engine.add_request(f"embed {i}", prompt, EMBED)
        while engine.has_unfinished_requests():
            done |= {o.request_id: o for o in engine.step() if o.finished}
        for i in range(6):
            assert done[f"generate {i}"].outputs[0].token_ids == expected_ids[i]
            assert (done[f"embed {i}"].outputs.data == expected_vectors[i]).all()
        assert (vectors(llm, PROMPTS) == expected_vectors).all()
        assert [o.outputs[0].token_ids for o in llm.generate(PROMPTS, greedy)] == expected_ids
        with pytest.raises(UnsupportedFeatureError, match="token_embed"):
            llm.encode(PROMPTS[0], pooling_task="token_embed")


def test_b12_what_cannot_do_both_says_so(minilm_path: Path, tiny: Path) -> None:
    for path, pooler in ((minilm_path, None), (tiny, {"pooling_type": "MEAN"})):
        args = EngineArgs(model=path, runner="both", pooler_config=pooler)
        with pytest.raises(UnsupportedFeatureError, match="runner='both'"):
            create_engine_config(args)
