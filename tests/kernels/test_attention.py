"""Attention: values against float64, and promise 1 bit for bit.

The plan under test looks q, k and v up in tables, so every value is known; expected values use keys
and values rounded as the cache stores them, so tolerances are those of float32 arithmetic.
"""

from __future__ import annotations

import functools
from itertools import pairwise

import numpy as np
import pytest

from tellin.kernels import _C
from tellin.kernels.native import NativeBackend
from tests.kernels.runtime_plans import AttentionCase, Cache, random_ids

VARIANTS = _C.linear_variants()
KV_DTYPES = ("float32", "float16", "int16", "int8")
LONG = 700
"""Tokens: over two partition borders (256, 512), no multiple of a block or tile."""


def make_backend(case: AttentionCase, **kwargs: object) -> NativeBackend:
    return NativeBackend(case.plan(), **{"num_threads": 2, **kwargs})  # type: ignore[arg-type]


def run(case: AttentionCase, ids: list[int], chunk: int = 10**9, **kwargs: object) -> np.ndarray:
    return Cache(make_backend(case, **kwargs)).feed("r", ids, chunk)


CASES = {
    "mha": AttentionCase(num_kv_heads=3, group=1, head_dim=64),
    "group3": AttentionCase(group=3, head_dim=64),
    "group4": AttentionCase(group=4, head_dim=128),
    "group8": AttentionCase(group=8, head_dim=40),
    "group24": AttentionCase(num_kv_heads=1, group=24, head_dim=32),
    "head256": AttentionCase(num_kv_heads=1, group=4, head_dim=256),
    "head512": AttentionCase(num_kv_heads=1, group=1, head_dim=512),
    "head576": AttentionCase(num_kv_heads=1, group=2, head_dim=576, value_dim=512),
    "latent": AttentionCase(num_kv_heads=1, group=16, head_dim=72, value_dim=56),
    "head8": AttentionCase(group=2, head_dim=8),
    "head24": AttentionCase(group=2, head_dim=24),
    "window": AttentionCase(group=3, head_dim=32, window=100),
    "window1": AttentionCase(group=2, head_dim=32, window=1),
    "window600": AttentionCase(group=2, head_dim=32, window=600),
    "softcap": AttentionCase(group=2, head_dim=64, softcap=2.5, scale=1.0),
    "sinks": AttentionCase(group=4, head_dim=64, window=100, sinks=True),
    "sharp": AttentionCase(group=2, head_dim=64, scale=20.0),
}


@functools.cache
def expected_of(name: str, kv_dtype: str) -> np.ndarray:
    """Once for all variants: it takes longer than any of them."""
    return CASES[name].expected(random_ids(520), kv_dtype=kv_dtype)


@pytest.mark.parametrize("isa", VARIANTS)
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_prefill_and_decode_match_float64(isa: str, kv_dtype: str, name: str) -> None:
    """A prompt in one step, then single tokens across a partition border."""
    case = CASES[name]
    ids = random_ids(520)
    cache = Cache(make_backend(case, isa=isa, kv_cache_dtype=kv_dtype))
    out = np.concatenate([cache.feed("r", ids[:505], 505), cache.feed("r", ids[505:], 1)])
    expected = expected_of(name, kv_dtype)
    # A score of magnitude s has an absolute error of about s * 2^-23, and so has its exponential.
    scores = min(case.softcap or np.inf, 6.0 * case.scale * case.head_dim**0.5)
    # int16: each weight is rounded to 1 / 16383 of the largest. That is 3e-5 of a value, 16 times
    # that over 256 positions with errors of either sign, and here 100,000 values.
    rounded = 2e-3 if kv_dtype == "int16" else 0.0
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-6 * (4 + scores) + rounded)


@pytest.mark.parametrize("isa", VARIANTS)
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize(
    "name", ["group3", "window", "softcap", "sinks", "head24", "head256", "latent"]
)
def test_chunks_do_not_change_bits(isa: str, kv_dtype: str, name: str) -> None:
    if isa == "portable" and name == "head256":
        return  # slow, and nothing in the portable loops depends on the width beyond head24
    ids = random_ids(LONG)
    case = CASES[name]
    whole = run(case, ids, isa=isa, kv_cache_dtype=kv_dtype)
    for chunk in (17, 48, 333):
        np.testing.assert_array_equal(
            whole, run(case, ids, chunk, isa=isa, kv_cache_dtype=kv_dtype)
        )


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_one_token_at_a_time_does_not_change_bits(kv_dtype: str) -> None:
    ids = random_ids(300)
    whole = run(CASES["group4"], ids, kv_cache_dtype=kv_dtype)
    np.testing.assert_array_equal(whole, run(CASES["group4"], ids, 1, kv_cache_dtype=kv_dtype))


@pytest.mark.parametrize("isa", VARIANTS)
@pytest.mark.parametrize("group", range(1, 10))
def test_blocks_of_rows_do_not_change_bits(isa: str, group: int) -> None:
    """How many rows and positions run side by side depends on the rows of a step (1.6.3)."""
    case = AttentionCase(num_kv_heads=1, group=group, head_dim=56)
    ids = random_ids(100)
    whole = run(case, ids, isa=isa)
    np.testing.assert_array_equal(run(case, ids, chunk=1, isa=isa), whole)
    np.testing.assert_array_equal(run(case, ids, chunk=3, isa=isa), whole)


@pytest.mark.parametrize("isa", VARIANTS)
@pytest.mark.parametrize("num_threads", [1, 3, 7])
def test_threads_do_not_change_bits(isa: str, num_threads: int) -> None:
    """Whether an item is split into partitions depends on the number of threads."""
    ids = random_ids(LONG)
    case = CASES["group3"]
    outs = []
    for threads in (2, num_threads):
        cache = Cache(make_backend(case, isa=isa, num_threads=threads))
        outs.append(np.concatenate([cache.feed("r", ids[:-3], 640), cache.feed("r", ids[-3:], 1)]))
    np.testing.assert_array_equal(outs[0], outs[1])


def test_block_size_and_order_do_not_change_bits() -> None:
    ids = random_ids(LONG)
    case = CASES["group3"]
    expected = run(case, ids)
    for block_size in (16, 48, 512):
        backend = make_backend(case, block_size=block_size)
        blocks = np.random.default_rng(1).permutation(64)[: -(-LONG // block_size)].tolist()
        out = Cache(backend, num_blocks=64, block_order=blocks).feed("r", ids, 100)
        np.testing.assert_array_equal(expected, out)


def test_neighbours_do_not_change_bits() -> None:
    """Decodes, a chunk and a fresh prompt in one step: each row as if it were alone."""
    case = CASES["group3"]
    backend = make_backend(case)
    prompts = {
        "a": random_ids(301, seed=1),
        "b": random_ids(17, seed=2),
        "c": random_ids(90, seed=3),
    }
    alone = {name: run(case, ids) for name, ids in prompts.items()}
    cache = Cache(backend)
    cache.step(("a", prompts["a"][:300]))
    cache.step(("b", prompts["b"][:16]), ("c", prompts["c"][:40]))
    rows = cache.step(("a", prompts["a"][300:]), ("c", prompts["c"][40:]), ("b", prompts["b"][16:]))
    np.testing.assert_array_equal(rows[0], alone["a"][300:])
    np.testing.assert_array_equal(rows[1], alone["c"][40:])
    np.testing.assert_array_equal(rows[2], alone["b"][16:])


@pytest.mark.parametrize("isa", VARIANTS)
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_stale_cache_does_not_leak(isa: str, kv_dtype: str) -> None:
    """Blocks full of NaN from another request contribute nothing (P25-like faults stay local)."""
    poison = AttentionCase(group=3, head_dim=24)
    backends = [make_backend(poison, isa=isa, kv_cache_dtype=kv_dtype) for _ in range(2)]
    poison.table("k")[7] = np.nan  # after loading, which refuses it; tables are read at every step
    poison.table("v")[7] = np.nan
    cache = Cache(backends[0], num_blocks=8)
    cache.step(("bad", [7] * 100))
    cache.free = list(cache.tables["bad"])
    ids = [i + 8 for i in random_ids(37, vocab_size=500)]
    clean = Cache(backends[1]).feed("r", ids, 10**9)
    assert np.isfinite(clean).all()
    np.testing.assert_array_equal(
        clean, cache.feed("good", ids[:20], 20).tolist() + cache.feed("good", ids[20:], 1).tolist()
    )


def test_later_tokens_of_a_prompt_do_not_leak() -> None:
    """A NaN at position 50 leaves the rows before it as they are."""
    case = AttentionCase(group=3, head_dim=24)
    ids = [i + 8 for i in random_ids(50, vocab_size=500)]
    expected = run(case, ids)
    cache = Cache(make_backend(case))
    case.table("v")[7] = np.nan  # after loading, which refuses it; tables are read at every step
    case.table("k")[7] = np.nan
    out = cache.feed("r", [*ids, 7, 7, 7], 10**9)
    np.testing.assert_array_equal(out[:50], expected)
    assert np.isnan(out[50:]).all()


def test_float16_cache_saturates() -> None:
    """Values beyond float16 become its largest, not infinity."""
    case = AttentionCase(group=1, head_dim=16)
    case.table("v")[3] = 1e6
    case.table("v")[4] = -1e6
    out = run(case, [3, 4], kv_cache_dtype="float16")
    assert np.isfinite(out).all()
    assert (out[0] == 65504).all()


@pytest.mark.parametrize("isa", VARIANTS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_int16_cache_keeps_nan_and_infinity(isa: str, value: float, where: str) -> None:
    """Whoever sees a value that is no number gets NaN; what comes before it stays."""
    case = AttentionCase(num_kv_heads=2, group=2, head_dim=40)
    ids = [i + 8 for i in random_ids(50, vocab_size=500)]
    backend = make_backend(case, isa=isa, kv_cache_dtype="int16")
    expected = Cache(backend).feed("r", ids, 10**9)
    case.table(where)[7, 0] = value  # the first head alone; after loading, which refuses it
    out = Cache(backend).feed("r", [*ids, 7, ids[0]], 10**9)
    first = 2 * case.head_dim  # outputs of the first kv head
    np.testing.assert_array_equal(out[:50], expected)
    assert np.isnan(out[50, : case.head_dim]).all()
    assert np.isfinite(out[50:, first:]).all()
    if where == "q":
        assert np.isfinite(out[51]).all()
    else:
        assert np.isnan(out[51, :first]).all()


@pytest.mark.parametrize("isa", VARIANTS)
def test_int16_cache_of_zeros_and_extremes(isa: str) -> None:
    """Zero vectors, tiny ones and the largest floats; scales differ by 60 orders of magnitude."""
    case = AttentionCase(num_kv_heads=1, group=1, head_dim=16)
    backend = make_backend(case, isa=isa, kv_cache_dtype="int16")
    case.table("k")[:8] = 0.0  # equal weights
    case.table("v")[0] = 0.0
    case.table("v")[1] = 1e-31
    case.table("v")[2] = 1e-20
    case.table("v")[3] = 3e38
    out = Cache(backend).step(("a", [0, 0]), ("b", [1]), ("c", [2, 2]), ("d", [3, 2]))
    assert (out[0] == 0).all()
    assert (out[1] == 0).all()  # below 1e-30
    np.testing.assert_allclose(out[2], 1e-20, rtol=1e-3)
    np.testing.assert_allclose(out[3][0], 3e38, rtol=1e-3)
    np.testing.assert_allclose(out[3][1], 1.5e38, rtol=1e-3)


@pytest.mark.parametrize("isa", VARIANTS)
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_encoder_attention_matches_float64(isa: str, softcap: float | None) -> None:
    """Not causal: every token sees the whole request, and no cache exists."""
    case = AttentionCase(num_kv_heads=2, group=2, head_dim=40, causal=False, softcap=softcap)
    backend = make_backend(case, isa=isa)
    assert backend.kv_bytes_per_block() == 0
    work = {"a": random_ids(5, seed=1), "b": random_ids(700, seed=2), "c": random_ids(1, seed=3)}
    rows = Cache(backend).step(*work.items())
    for out, ids in zip(rows, work.values(), strict=True):
        np.testing.assert_allclose(out, case.expected(ids), rtol=0, atol=1e-5)
        np.testing.assert_array_equal(out, Cache(backend).step(("alone", ids))[0])


def test_copied_blocks_hold_the_same_cache() -> None:
    case = CASES["group3"]
    backend = make_backend(case)
    cache = Cache(backend, num_blocks=32)
    ids = random_ids(40)
    cache.step(("a", ids))
    target = cache.free[:3]
    backend.copy_kv_blocks(zip(cache.tables["a"], target, strict=True))
    cache.tables["copy"], cache.lengths["copy"] = target, 40
    cache.free = cache.free[3:]
    one, other = cache.step(("a", [5]), ("copy", [5]))
    np.testing.assert_array_equal(one, other)


def test_positions_around_every_border() -> None:
    """Steps that end at tile, block and partition borders, inside and outside the window."""
    case = CASES["window600"]
    ids = random_ids(800)
    whole = run(case, ids)
    cache = Cache(make_backend(case))
    for start, stop in pairwise([0, 255, 256, 257, 511, 512, 599, 600, 601, 767, 768, 769, 800]):
        np.testing.assert_array_equal(cache.step(("r", ids[start:stop]))[0], whole[start:stop])
