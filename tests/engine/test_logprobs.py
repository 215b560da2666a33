"""Logprobs and their texts: rules LGP-*, LOG-*, report P06; the flat container."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tellin.engine.logprobs import LogprobsProcessor
from tellin.engine.token_table import TokenTable
from tellin.outputs import FlatLogprobs, Logprob
from tellin.sampling_params import SamplingParams
from tellin.step_protocol import LogprobsLists
from tests.engine.test_detokenizer import byte_pieces, deltas, make
from tests.engine.tokenizers_for_tests import get


def sample(
    ids: list[list[int]], params: SamplingParams, kind: str | None = "byte_level"
) -> LogprobsProcessor:
    processor = LogprobsProcessor(params, None if kind is None else TokenTable(get(kind)))
    values = [[-1.0 - 0.5 * i for i in range(len(row))] for row in ids]
    processor.update_sample(LogprobsLists(ids, values, [7] * len(ids)), len(ids))
    return processor


def test_lgp1_only_what_was_asked_for() -> None:
    processor = sample([[1]], SamplingParams(prompt_logprobs=0))
    assert processor.logprobs is None
    assert processor.cumulative_logprob is None
    assert processor.prompt_logprobs == [None]
    processor = sample([[1]], SamplingParams(logprobs=0))
    assert processor.pop_prompt_logprobs() is None
    assert processor.prompt_logprobs is None


def test_lgp2_lgp3_ranks_order_and_sum() -> None:
    """The sampled token comes first with its true rank; the others follow with 1, 2, ..."""
    processor = sample([[9, 5, 6], [9, 5, 6]], SamplingParams(logprobs=2))
    assert processor.logprobs is not None
    assert list(processor.logprobs[0]) == [9, 5, 6]
    assert [entry.rank for entry in processor.logprobs[0].values()] == [7, 1, 2]
    assert [entry.logprob for entry in processor.logprobs[0].values()] == [-1.0, -1.5, -2.0]
    assert processor.cumulative_logprob == -2.0


def test_lgp2_sampled_token_among_the_most_likely_is_one_entry() -> None:
    processor = sample([[5, 5, 6]], SamplingParams(logprobs=2))
    assert processor.logprobs is not None
    assert list(processor.logprobs[0]) == [5, 6]
    assert processor.logprobs[0][5].rank == 1


def test_ranks_of_chosen_ids_are_not_invented() -> None:
    processor = sample([[9, 5]], SamplingParams(logprob_token_ids=[5]))
    assert processor.logprobs is not None
    assert [entry.rank for entry in processor.logprobs[0].values()] == [7, None]


@pytest.mark.parametrize("kind", ["byte_level", "gemma_like", "llama2_like"])
def test_p06_texts_are_human(kind: str) -> None:
    """A leading space is a space, never a vocabulary's own letter for it."""
    token_id = get(kind).encode(" sea", add_special_tokens=False)[0]
    processor = sample([[token_id]], SamplingParams(logprobs=0), kind)
    assert processor.logprobs is not None
    assert processor.logprobs[0][token_id].decoded_token == " sea"


def test_special_tokens_have_a_text_here() -> None:
    token_id = get("byte_level").backend.token_to_id("<|im_end|>")
    processor = sample([[token_id]], SamplingParams(logprobs=0))
    assert processor.logprobs is not None
    assert processor.logprobs[0][token_id].decoded_token == "<|im_end|>"


def test_lgp4_the_completing_token_gets_the_whole_character() -> None:
    ids = [get("byte_level").backend.token_to_id(piece) for piece in byte_pieces("a汉")]
    processor = sample([[token_id] for token_id in ids], SamplingParams(logprobs=0))
    assert processor.logprobs is not None
    texts = [p[i].decoded_token for p, i in zip(processor.logprobs, ids, strict=True)]
    assert texts == ["a", "", "", "汉"]


@given(st.text(max_size=12).filter(lambda text: "\ufffd" not in text))
@settings(max_examples=150, deadline=None)
def test_texts_of_sampled_tokens_join_to_the_text(text: str) -> None:
    ids = get("byte_level").encode(text, add_special_tokens=False)
    processor = sample([[token_id] for token_id in ids], SamplingParams(logprobs=0))
    assert processor.logprobs is not None
    texts = [p[i].decoded_token for p, i in zip(processor.logprobs, ids, strict=True)]
    assert "".join(t or "" for t in texts) == text
    assert "".join(deltas(make("byte_level"), [ids])[0]) == text


def test_lgp5_no_tokenizer_no_text() -> None:
    processor = sample([[1, 2]], SamplingParams(logprobs=1), None)
    assert processor.logprobs is not None
    assert [entry.decoded_token for entry in processor.logprobs[0].values()] == [None, None]


def test_cut_positions_are_not_counted() -> None:
    processor = LogprobsProcessor(SamplingParams(logprobs=0), None)
    processor.update_sample(LogprobsLists([[1], [2]], [[-1.0], [-2.0]], [1, 1]), 1)
    assert processor.cumulative_logprob == -1.0
    assert processor.logprobs is not None
    assert len(processor.logprobs) == 1


@pytest.mark.parametrize("flat", [False, True])
def test_lgp6_log2_prompt_logprobs(flat: bool) -> None:
    processor = LogprobsProcessor(SamplingParams(prompt_logprobs=1, flat_logprobs=flat), None)
    processor.update_prompt(LogprobsLists([[4, 5]], [[-1.0, -0.5]], [3]))
    copied = processor.prompt_logprobs
    popped = processor.pop_prompt_logprobs()
    assert popped == copied
    assert popped is not None
    assert not popped[0]
    assert popped[1] == {4: Logprob(-1.0, 3), 5: Logprob(-0.5, 1)}
    again = processor.pop_prompt_logprobs()
    assert again is not None
    assert len(again) == 0


def test_log3_flat_container_reads_like_a_list() -> None:
    positions = [
        None,
        {1: Logprob(-1.0, 1, "a"), 2: Logprob(-2.0, None, None)},
        {3: Logprob(-0.5, 2, "c")},
    ]
    flat = FlatLogprobs()
    flat.extend(positions)
    assert len(flat) == 3
    assert flat[0] == {}
    assert flat[1] == positions[1]
    assert flat[-1] == positions[2]
    assert list(flat) == [{}, positions[1], positions[2]]
    part = flat[1:]
    assert isinstance(part, FlatLogprobs)
    assert list(part) == [positions[1], positions[2]]
    assert part.start_indices == [0, 2]
    assert flat[:0] == FlatLogprobs()
    part.append(None)
    assert len(flat) == 3, "a slice is a copy"
    with pytest.raises(IndexError):
        flat[3]
    for change in (
        lambda: flat.__setitem__(0, {}),
        lambda: flat.__delitem__(0),
        lambda: flat.insert(0, {}),
        lambda: flat.pop(),
    ):
        with pytest.raises(TypeError):
            change()
