"""Beam search and pooling with `LLM` over a scripted core: rules BEAM-*, POOL-*."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import pytest

from tellin.entrypoints.beam_search import beam_score
from tellin.entrypoints.llm import LLM
from tellin.exceptions import (
    InvalidParameterError,
    UnsupportedFeatureError,
)
from tellin.outputs import BeamSearchSequence
from tellin.protocol import EngineCoreRequest, FinishReason
from tellin.sampling_params import (
    BeamSearchParams,
    PoolingParams,
)
from tellin.step_protocol import LogprobsLists
from tests.engine.fakes import EngineMaker, FakeClient, text_ids
from tests.engine.tokenizers_for_tests import get
from tests.entrypoints.conftest import is_idle

# ---------------------------------------------------------------------- beam search

WORDS = text_ids("abcd")


class BeamClient(FakeClient):
    """A language model of a few words: next-token logprobs depend on the last token only."""

    TABLE: ClassVar[dict[str, dict[str, float]]] = {
        "a": {"b": 0.6, "c": 0.4},
        "b": {"a": 0.5, "d": 0.5},
        "c": {"d": 0.9, "a": 0.1},
        "d": {"a": 1.0},
    }

    def _next(self, request_id: str, steps: list[Any]) -> Any:
        output = super()._next(request_id, steps)
        request = next(r for r in self.requests if r.request_id == request_id)
        last = get("byte_level").decode((request.prompt_token_ids or [])[-1:])
        entries = [(text_ids(word)[0], math.log(p)) for word, p in self.TABLE[last].items()]
        best = max(entries, key=lambda entry: entry[1])
        rows = [best, *entries]
        output.new_token_ids = [best[0]]
        output.new_logprobs = LogprobsLists([[i for i, _ in rows]], [[p for _, p in rows]], [1])
        return output


EOS_TEXT = get("byte_level").decode(
    [get("byte_level").eos_token_id or 0], skip_special_tokens=False
)


class EndingClient(FakeClient):
    """Ends every sequence at once."""

    def _next(self, request_id: str, steps: list[Any]) -> Any:
        output = super()._next(request_id, steps)
        eos = get("byte_level").eos_token_id or 0
        output.new_token_ids = [eos]
        output.new_logprobs = LogprobsLists([[eos, eos]], [[0.0, 0.0]], [1])
        return output


def best_paths(start: str, length: int, width: int) -> list[tuple[str, float]]:
    paths = [(start, 0.0)]
    for _ in range(length):
        paths = [
            (p + w, s + math.log(q)) for p, s in paths for w, q in BeamClient.TABLE[p[-1]].items()
        ]
        paths = sorted(paths, key=lambda path: -path[1])[:width]
    return [(path[len(start) :], score) for path, score in paths]


@pytest.mark.parametrize("limit", [None, 1])
def test_beam_search(make_engine: EngineMaker, limit: int | None) -> None:
    llm = LLM.from_engine(make_engine([[0]], client_class=BeamClient))
    params = BeamSearchParams(beam_width=3, max_tokens=4)
    outputs = llm.beam_search(["a", "c"], params, concurrency_limit=limit)
    for start, output in zip("ac", outputs, strict=True):
        expected = best_paths(start, 4, 3)
        assert [beam.text for beam in output.sequences] == [text for text, _ in expected]
        for beam, (_, score) in zip(output.sequences, expected, strict=True):
            assert beam.cum_logprob == pytest.approx(score)
            assert beam.tokens[0] == text_ids(start)[0]
            assert beam.finish_reason == "length"
    assert llm.beam_search([], params) == []
    assert is_idle(llm)


def test_beam4_end_of_sequence_completes_a_beam(make_engine: EngineMaker) -> None:
    eos = text_ids("d")[0]
    llm = LLM.from_engine(make_engine([[0]], client_class=BeamClient, eos_token_ids=(eos,)))
    (output,) = llm.beam_search("c", BeamSearchParams(beam_width=2, max_tokens=2))
    best = output.sequences[0]
    assert best.tokens == [*text_ids("c"), eos]
    assert best.finish_reason == "stop"
    ignoring = BeamSearchParams(beam_width=2, max_tokens=2, ignore_eos=True)
    (output,) = llm.beam_search("c", ignoring)
    assert all(len(beam.tokens) == 3 for beam in output.sequences)


def test_beam5_no_end_of_sequence_counts_in_the_length(make_engine: EngineMaker) -> None:
    """A model may have several; the score of a beam that ends with any of them is the same."""
    beam = BeamSearchSequence([5, 6, 7], cum_logprob=-4.0)
    assert beam_score(beam, 1.0, (9,)) == pytest.approx(-4 / 3)
    assert beam_score(beam, 1.0, (9, 7)) == beam_score(beam, 1.0, (7,)) == -2.0
    c, d, b = text_ids("cdb")
    llm = LLM.from_engine(make_engine([[0]], client_class=BeamClient, eos_token_ids=(d, b)))
    (output,) = llm.beam_search("a", BeamSearchParams(beam_width=2, max_tokens=1))
    # log(0.4) / 2 > log(0.6) / 1, but log(0.6) / 2 would be the best.
    assert [beam.tokens[-1] for beam in output.sequences] == [c, b]


def test_beam1_text_shows_the_end_of_sequence_if_asked(make_engine: EngineMaker) -> None:
    eos = get("byte_level").eos_token_id
    assert eos is not None
    engine = make_engine([[0]], client_class=EndingClient, eos_token_ids=(eos,))
    llm = LLM.from_engine(engine)
    for include in (False, True):
        params = BeamSearchParams(beam_width=1, max_tokens=2, include_stop_str_in_output=include)
        (output,) = llm.beam_search("a", params)
        assert output.sequences[0].tokens[-1] == eos
        assert output.sequences[0].text == (EOS_TEXT if include else "")


def test_beam3_a_width_beyond_max_logprobs_is_refused_by_its_name(make_engine: EngineMaker) -> None:
    llm = LLM.from_engine(make_engine([[0]], client_class=BeamClient))
    with pytest.raises(InvalidParameterError, match=r"beam_width=11 needs max_logprobs=22 or more"):
        llm.beam_search("a", BeamSearchParams(beam_width=11, max_tokens=1))
    assert is_idle(llm)


# ---------------------------------------------------------------------- pooling

VECTORS = {"a": [1.0, 0.0], "b": [0.6, 0.8], "c": [0.0, 1.0]}


@pytest.fixture
def embedder(make_engine: EngineMaker) -> LLM:
    def script(request: EngineCoreRequest) -> list[dict[str, Any]]:
        text = get("byte_level").decode(request.prompt_token_ids or [])
        return [
            {
                "new_token_ids": [],
                "pooling_output": VECTORS[text],
                "finish_reason": FinishReason.STOP,
            }
        ]

    engine = make_engine(script, runner_type="pooling")
    make_engine.client.utilities["get_supported_tasks"] = ["embed", "token_embed"]
    return LLM.from_engine(engine)


def test_pool4_embed(embedder: LLM) -> None:
    outputs = embedder.embed(["a", "b"])
    assert [output.outputs.embedding for output in outputs] == [VECTORS["a"], VECTORS["b"]]
    assert outputs[0].outputs.hidden_size == 2
    assert embedder.embed([]) == []
    (raw,) = embedder.encode("c", pooling_task="embed")
    assert raw.outputs.data == VECTORS["c"]


def test_pool1_pool2_pool3_refusals(embedder: LLM, llm: LLM) -> None:
    with pytest.raises(InvalidParameterError, match="pooling_task"):
        embedder.encode("a")
    with pytest.raises(UnsupportedFeatureError, match="classify"):
        embedder.classify("a")
    with pytest.raises(InvalidParameterError, match="token_embed"):
        embedder.encode("a", PoolingParams(task="token_embed"), pooling_task="embed")
    with pytest.raises(UnsupportedFeatureError, match="generate"):
        embedder.generate("a")
    with pytest.raises(UnsupportedFeatureError, match="generate text"):
        llm.embed("a")


def test_scores_are_made_of_embeddings_alone(make_engine: EngineMaker) -> None:
    engine = make_engine(lambda request: [], runner_type="pooling")
    make_engine.client.utilities["get_supported_tasks"] = ["token_embed"]
    with pytest.raises(
        UnsupportedFeatureError,
        match="does not embed, which scores are made of; it supports: token_embed",
    ):
        LLM.from_engine(engine).score("a", "b")


def test_pool5_score(embedder: LLM) -> None:
    scores = [output.outputs.score for output in embedder.score("a", ["a", "b", "c"])]
    assert scores == pytest.approx([1.0, 0.6, 0.0])
    paired = embedder.score(["a", "b"], ["b", "b"])
    assert [output.outputs.score for output in paired] == pytest.approx([0.6, 1.0])
    assert "_" in paired[0].request_id
    for bad in (([], ["a"]), (["a", "b"], ["a"]), (["a", "b"], ["a"] * 3)):
        with pytest.raises(InvalidParameterError, match="score"):
            embedder.score(*bad)
