"""Merges that make BPE give the ids of SentencePiece's score-greedy algorithm.

SentencePiece joins, again and again, the neighbours whose concatenation is the token with the best
score, the leftmost first. BPE joins the pair with the lowest rank, the leftmost first. Give a merge
to every split of every token into two tokens, ranked by the token's score, and the two agree: a
token's own characters, merged greedily without their surroundings, meet in one last pair, and in
any text only that pair can ever form the token, so the order among a token's splits never matters.
(Two tokens of exactly the same score are the exception; trained vocabularies have none.)

A vocabulary of 262,144 tokens has half a million splits out of 1.1 million places to cut, so they
are looked up by hash, in NumPy. A false hit cannot pass unnoticed: the tokenizer's constructor
refuses a merge whose result is no token. Two tokens of equal hash would be, so they are looked for.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Hashes = npt.NDArray[np.uint64]
Indices = npt.NDArray[np.int64]

_BASE = 0x9E37_79B9_7F4A_7C15
_BASE_INVERSE = pow(_BASE, -1, 1 << 64)
_SPREAD = np.uint64(0xD6E8_FEB8_6659_FD93)
"""Odd constants with well-mixed bits; any would do."""
_MAX_TABLES = 16


def spm_merges(tokens: Sequence[str], scores: npt.NDArray[np.float32]) -> list[tuple[str, str]]:
    """All splits of tokens into two tokens, best score of the whole first.

    Args:
        tokens: the tokens that text can become, without control, unknown and byte tokens; distinct
            and not empty.
        scores: float32 ``[num_tokens]``; higher is merged earlier.
    """
    if not tokens:
        return []
    text = "".join(tokens)
    points = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32).astype(np.uint64)
    lengths = np.fromiter(map(len, tokens), dtype=np.int64, count=len(tokens))
    ends = np.cumsum(lengths)
    starts = ends - lengths
    hasher = _SubstringHasher(points)
    table = _HashTable(hasher(starts, ends))
    if not table.is_usable:
        return _plain_splits(tokens, scores)

    cuts = np.arange(len(points), dtype=np.int64)
    owners = np.repeat(np.arange(len(tokens), dtype=np.int64), lengths)
    inner = cuts != starts[owners]
    cuts, owners = cuts[inner], owners[inner]
    left = table.find(hasher(starts[owners], cuts))
    found = left >= 0
    cuts, owners, left = cuts[found], owners[found], left[found]
    right = table.find(hasher(cuts, ends[owners]))
    found = right >= 0
    owners, left, right = owners[found], left[found], right[found]

    order = np.argsort(-scores[owners], kind="stable")
    strings = np.array(tokens, dtype=object)
    return list(zip(strings[left[order]].tolist(), strings[right[order]].tolist(), strict=True))


def _plain_splits(tokens: Sequence[str], scores: npt.NDArray[np.float32]) -> list[tuple[str, str]]:
    """The same by search, for a vocabulary with two tokens of equal hash."""
    known = set(tokens)
    return [
        (token[:cut], token[cut:])
        for token in (tokens[i] for i in np.argsort(-scores, kind="stable").tolist())
        for cut in range(1, len(token))
        if token[:cut] in known and token[cut:] in known
    ]


class _SubstringHasher:
    """Polynomial hashes modulo 2**64 of substrings of one text, from prefix sums."""

    def __init__(self, points: Hashes) -> None:
        powers = _powers(_BASE, len(points))
        self._prefix = np.concatenate(([np.uint64(0)], np.cumsum((points + 1) * powers)))
        self._inverse_powers = _powers(_BASE_INVERSE, len(points) + 1)

    def __call__(self, starts: Indices, ends: Indices) -> Hashes:
        difference = self._prefix[ends] - self._prefix[starts]
        hashes: Hashes = difference * self._inverse_powers[starts]
        return hashes


def _powers(base: int, count: int) -> Hashes:
    powers = np.full(count, np.uint64(base))
    powers[:1] = 1
    result: Hashes = np.multiply.accumulate(powers)
    return result


class _HashTable:
    """Index of each of a set of hashes, with batched lookups.

    A stack of direct-mapped tables: what collides in one goes to the next, smaller one.
    """

    def __init__(self, hashes: Hashes) -> None:
        self._hashes = hashes
        self._tables: list[npt.NDArray[np.int32]] = []
        rest = np.arange(len(hashes))
        while len(rest) and len(self._tables) < _MAX_TABLES:
            table = np.full(1 << (4 * len(rest)).bit_length(), -1, dtype=np.int32)
            slots = _slots(hashes[rest], table, len(self._tables))
            table[slots] = rest
            self._tables.append(table)
            is_loser = table[slots] != rest
            losers, winners = rest[is_loser], table[slots[is_loser]]
            if (hashes[losers] == hashes[winners]).any():
                break
            rest = losers
        self.is_usable = len(rest) == 0
        """False if two hashes are equal."""

    def find(self, queries: Hashes) -> Indices:
        """Index of each query, -1 where it is unknown."""
        result = np.full(len(queries), -1, dtype=np.int64)
        pending = np.arange(len(queries))
        for level, table in enumerate(self._tables):
            wanted = queries[pending]
            candidates = table[_slots(wanted, table, level)]
            hit = (candidates >= 0) & (self._hashes[candidates] == wanted)
            result[pending[hit]] = candidates[hit]
            pending = pending[~hit & (candidates >= 0)]
        return result


def _slots(hashes: Hashes, table: npt.NDArray[np.int32], level: int) -> Indices:
    """Where hashes go in a table.

    Polynomial hashes of similar strings differ by a simple amount, and what is linear in them would
    collide again in the next table; the folding in between is what parts them.
    """
    mixed = (hashes ^ np.uint64(level * _BASE % (1 << 64))) * _SPREAD
    mixed ^= mixed >> np.uint64(32)
    mixed *= _SPREAD
    slots: Indices = (mixed >> np.uint64(65 - len(table).bit_length())).astype(np.int64)
    return slots
