"""Merges from scores: BPE with them equals SentencePiece's greedy algorithm, token for token."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from tellin.loading import spm_merges as module
from tellin.loading.gguf import GGUFFile
from tellin.loading.spm_merges import spm_merges


def greedy(text: str, scores: dict[str, float]) -> list[str]:
    """Join the best-scoring neighbours, the leftmost first, until none are left.

    Source: Kudo & Richardson 2018 (SentencePiece), section 3.1, for BPE models.
    """
    symbols = list(text)
    while True:
        best: tuple[float, int] | None = None
        for i in range(len(symbols) - 1):
            score = scores.get(symbols[i] + symbols[i + 1])
            if score is not None and (best is None or score > best[0]):
                best = (score, i)
        if best is None:
            return symbols
        i = best[1]
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]


def bpe(text: str, scores: dict[str, float]) -> list[str]:
    tokens = list(scores)
    merges = spm_merges(tokens, np.array(list(scores.values()), np.float32))
    vocab = {token: i for i, token in enumerate(dict.fromkeys([*tokens, *text]))}
    return [] if not text else Tokenizer(models.BPE(vocab, merges)).encode(text).tokens


LETTERS = "abc"
VOCABULARIES = st.lists(
    st.text(LETTERS, min_size=1, max_size=6), min_size=1, max_size=40, unique=True
)


@settings(max_examples=300, deadline=None)
@given(VOCABULARIES, st.text(LETTERS, max_size=40), st.randoms(use_true_random=False))
@example(["a", "aa", "aaa", "aaaa"], "a" * 23, __import__("random").Random(0))
def test_equals_greedy_for_any_vocabulary(tokens: list[str], text: str, random: object) -> None:
    """Any vocabulary, in any order of scores: also those that no training would give."""
    tokens = [*LETTERS, *(token for token in tokens if token not in LETTERS)]
    scores = [-float(i) for i in range(len(tokens))]
    random.shuffle(scores)  # type: ignore[attr-defined]
    table = dict(zip(tokens, scores, strict=True))
    assert bpe(text, table) == greedy(text, table)


def test_all_splits_best_score_first() -> None:
    tokens = ["a", "b", "ab", "ba", "aba"]
    scores = np.array([-9, -9, -2, -1, -3], np.float32)
    assert spm_merges(tokens, scores) == [("b", "a"), ("a", "b"), ("a", "ba"), ("ab", "a")]


@pytest.mark.parametrize("count", [0, 1])
def test_tiny_vocabularies(count: int) -> None:
    assert spm_merges(["a"][:count], np.zeros(count, np.float32)) == []


def random_words() -> list[str]:
    generator = np.random.default_rng(3)
    letters = np.array([*"abcdeéß日🎉\u2581"])
    words = {"".join(generator.choice(letters, generator.integers(1, 7))) for _ in range(5000)}
    return sorted(words)


def all_words() -> list[str]:
    """Similar strings, whose polynomial hashes are similar too."""
    return [
        "".join(word) for size in range(1, 8) for word in itertools.product("abcd", repeat=size)
    ]


@pytest.mark.parametrize("make_tokens", [random_words, all_words])
def test_large_vocabulary_equals_a_plain_search(make_tokens: Callable[[], list[str]]) -> None:
    tokens = make_tokens()
    scores = -np.arange(len(tokens), dtype=np.float32)
    assert spm_merges(tokens, scores) == plain(tokens)


def plain(tokens: list[str]) -> list[tuple[str, str]]:
    known = set(tokens)
    return [
        (token[:cut], token[cut:])
        for token in tokens
        for cut in range(1, len(token))
        if token[:cut] in known and token[cut:] in known
    ]


def test_equal_hashes_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all hashes equal the plain search takes over."""
    tokens = ["b", "a", "aba", "ab", "ba"]
    scores = -np.arange(5, dtype=np.float32)
    hasher = module._SubstringHasher
    monkeypatch.setattr(
        hasher, "__call__", lambda self, starts, ends: (starts * 0).astype(np.uint64)
    )
    assert spm_merges(tokens, scores) == plain(tokens)


@pytest.mark.slow
def test_gemma3_equals_a_plain_search(gemma3_path: Path) -> None:
    metadata = GGUFFile(gemma3_path, read_tensors=False).metadata
    types = metadata.get_numbers("tokenizer.ggml.token_type")
    tokens = list(metadata.get_strings("tokenizer.ggml.tokens"))
    normal = [token for token, kind in zip(tokens, types.tolist(), strict=True) if kind == 1]
    scores = metadata.get_numbers("tokenizer.ggml.scores")[types == 1]
    assert (np.diff(scores) < 0).all()
    assert spm_merges(normal, scores) == plain(normal)
