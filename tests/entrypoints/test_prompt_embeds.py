"""Prompts as embeddings through the whole engine: the same bits as the tokens in their place."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tellin import LLM, AsyncLLM, EngineArgs, SamplingParams
from tellin.entrypoints.beam_search import BeamSearchParams
from tellin.exceptions import UnsupportedFeatureError
from tellin.loading import open_model
from tellin.loading.dequantize import dequantize
from tellin.sampling_params import RequestOutputKind
from tests.models.tiny_files import write_tiny_gguf
from tests.models.tiny_hybrids import write_tiny_hybrid

OPTIONS: dict[str, Any] = {
    "enable_prompt_embeds": True,
    "skip_tokenizer_init": True,
    "max_model_len": 128,
    "num_kv_blocks": 64,
    "num_threads": 2,
    "max_logprobs": -1,
}
FAMILIES = ("llama", "gemma", "granite")
"""One that scales nothing, one that scales its embeddings, one that scales what it is given."""


def params(**fields: Any) -> SamplingParams:
    defaults = {"max_tokens": 8, "temperature": 0.0, "logprobs": 2, "ignore_eos": True}
    return SamplingParams(**(defaults | fields))


def input_embeddings(path: Path) -> np.ndarray:
    """What transformers' ``get_input_embeddings()`` holds, or gives where it scales."""
    with open_model(path) as source:
        table = dequantize(source.tensors["embed_tokens.weight"])
        scales = source.hparams.architecture.startswith("gemma")
        scale = np.float32(source.hparams.embedding_scale if scales else 1.0)
    return np.asarray(table * scale)


def token_prompts(vocab_size: int) -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [rng.integers(0, vocab_size, size).tolist() for size in (40, 3, 33, 17)]


def results(outputs: list[Any]) -> list[Any]:
    return [[(o.token_ids, o.logprobs) for o in output.outputs] for output in outputs]


@pytest.mark.parametrize("name", FAMILIES)
def test_same_bits_as_tokens(tmp_path: Path, name: str) -> None:
    """Promise 1: alone, in a batch with tokens, in chunks, preempted, from the prefix cache."""
    path = write_tiny_gguf(tmp_path / "model.gguf", name)
    table = input_embeddings(path)
    ids = token_prompts(len(table))
    embeds = [{"prompt_embeds": table[prompt]} for prompt in ids]
    with LLM(str(path), **OPTIONS) as llm:
        expected = results(llm.generate(ids, params()))
        assert results([llm.generate(prompt, params())[0] for prompt in embeds]) == expected
        mixed = llm.generate([embeds[0], ids[1], embeds[2], ids[3]], params())
        assert results(mixed) == expected
        assert [output.num_cached_tokens for output in mixed] == [39, 2, 32, 16]
        assert mixed[0].prompt_token_ids == [0] * 40  # OUT-16
        half = table[ids[0]].copy()
        half[20:] = 0
        assert llm.generate({"prompt_embeds": half}, params())[0].num_cached_tokens == 16
    chunks: dict[str, Any] = {"max_num_batched_tokens": 16, "max_num_seqs": 4}
    with LLM(str(path), **OPTIONS | chunks, enable_prefix_caching=False) as llm:
        assert results(llm.generate(embeds, params())) == expected
    with LLM(str(path), **OPTIONS | {"num_kv_blocks": 10, "max_model_len": 64}) as llm:
        longer = params(max_tokens=20)
        assert results(llm.generate(embeds, longer)) == results(llm.generate(ids, longer))


def test_recurrent_states_too(tmp_path: Path) -> None:
    """Snapshots of states are found by the rows before them."""
    path = write_tiny_hybrid(tmp_path / "model", "lfm2")
    table = input_embeddings(path)
    ids = token_prompts(len(table))
    embeds = [{"prompt_embeds": table[prompt]} for prompt in ids]
    with LLM(str(path), **OPTIONS) as llm:
        expected = results(llm.generate(ids, params()))
        assert results(llm.generate(embeds, params())) == expected
        again = llm.generate(embeds, params())
        assert results(again) == expected
        assert [output.num_cached_tokens for output in again] == [32, 0, 32, 0]


def test_rows_too_large_for_the_model_fail_alone(tmp_path: Path) -> None:
    """What scaling makes infinite neither warns nor hurts neighbours, nor who comes after."""
    path = write_tiny_hybrid(tmp_path / "model", "granitehybrid")
    table = input_embeddings(path)
    ids = token_prompts(len(table))[0]
    largest = {"prompt_embeds": np.full((40, table.shape[1]), 3e38, np.float32)}
    with LLM(str(path), **OPTIONS | {"num_kv_blocks": 10, "max_num_seqs": 2}) as llm:
        expected = results(llm.generate([ids], params()))
        bad, good = llm.generate([largest, ids], params(), on_error="return")
        assert bad.outputs[0].finish_reason == "error"
        assert results([good]) == results(llm.generate([ids], params())) == expected


def test_sampling_drafts_and_copies(tmp_path: Path) -> None:
    """Penalties see the output alone: a prompt of rows has no tokens that could be repeated."""
    path = write_tiny_gguf(tmp_path / "model.gguf", "llama")
    table = input_embeddings(path)
    ids = token_prompts(len(table))[0]
    embeds = {"prompt_embeds": table[ids]}
    seeded = params(temperature=1.0, seed=5, n=3)
    with LLM(str(path), **OPTIONS) as llm:
        assert results(llm.generate(embeds, seeded)) == results(llm.generate(ids, seeded))
        # Id 0, which stands for the rows, is not held against it.
        [first] = llm.generate(embeds, params(max_tokens=1, logprobs=-1))[0].outputs[0].logprobs
        lead = max(entry.logprob for entry in first.values()) - first[0].logprob
        barely = {"max_tokens": 1, "logit_bias": {0: lead + 1e-3}, "repetition_penalty": 2.0}
        assert llm.generate(embeds, params(**barely))[0].outputs[0].token_ids == [0]
        with pytest.raises(UnsupportedFeatureError, match="beam search"):
            llm.beam_search([embeds], BeamSearchParams(beam_width=2, max_tokens=2))
    for method in ("ngram", "suffix"):
        drafting = {"method": method, "num_speculative_tokens": 3}
        with LLM(str(path), **OPTIONS, speculative_config=drafting) as llm:
            longer = params(max_tokens=40)
            assert results(llm.generate(embeds, longer)) == results(llm.generate(ids, longer))


def test_from_another_process(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "model.gguf", "llama")
    table = input_embeddings(path)
    ids = token_prompts(len(table))[0]

    async def run() -> list[Any]:
        args = EngineArgs(str(path), **OPTIONS)
        async with AsyncLLM.from_engine_args(args, multiprocess_mode=True) as engine:
            seeded = params(n=2, temperature=1.0, seed=3, output_kind=RequestOutputKind.FINAL_ONLY)
            prompts = ({"prompt_embeds": table[ids]}, {"prompt_token_ids": ids})
            return [[o async for o in engine.generate(p, seeded)][-1] for p in prompts]

    embeds, tokens = results(asyncio.run(run()))
    assert embeds == tokens
