"""2.4: what a block's hash depends on, and what it must not depend on."""

from __future__ import annotations

import struct
from hashlib import sha256
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tellin.core.block_hash import ROOT_HASH, BlockHasher
from tellin.core.request import Request
from tellin.exceptions import InvalidParameterError
from tellin.protocol import LoRARequest, MultiModalFeature
from tellin.sampling_params import SamplingParams


def hashes(token_ids: list[int], block_size: int = 4, **kwargs: Any) -> list[bytes]:
    params = SamplingParams(max_tokens=1)
    request = Request("r", token_ids, params, None, max_model_len=100, **kwargs)
    BlockHasher(block_size).extend(request)
    return request.block_hashes


def test_encoding_is_canonical() -> None:
    """COR-56, 2.4.4: parent, then ids as u32 LE; the root is the same in every process."""
    first, second = hashes([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert sha256(b"tellin kv block hash v1").digest() == ROOT_HASH
    assert first == sha256(ROOT_HASH + struct.pack("<4I", 1, 2, 3, 4)).digest()
    assert second == sha256(first + struct.pack("<4I", 5, 6, 7, 8)).digest()


def test_only_full_blocks_are_hashed() -> None:
    """2.4.2."""
    assert len(hashes([1, 2, 3])) == 0
    assert len(hashes([1, 2, 3, 4])) == 1


def test_appended_ids_extend_the_chain() -> None:
    """COR-57: the same chain, however it grew."""
    params = SamplingParams(max_tokens=9)
    request = Request("r", [1, 2, 3], params, None, max_model_len=100)
    hasher = BlockHasher(4)
    for token_id in range(4, 13):
        request.append_output_token_ids(token_id)
        hasher.extend(request)
    assert request.block_hashes == hashes(list(range(1, 13)))


@settings(deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1), min_size=4, max_size=12), st.integers(0, 11))
def test_a_changed_id_changes_its_block_and_all_after(ids: list[int], index: int) -> None:
    index %= len(ids)
    changed = [*ids[:index], ids[index] ^ 1, *ids[index + 1 :]]
    for i, (a, b) in enumerate(zip(hashes(ids), hashes(changed), strict=True)):
        assert (a == b) == (i < index // 4)


def test_salt_separates_everything() -> None:
    """COR-55, 2.4.3 Check: different salts share no block; only the first block's keys hold it."""
    ids = list(range(12))
    a, b, none = hashes(ids, cache_salt="a"), hashes(ids, cache_salt="b"), hashes(ids)
    assert not set(a) & set(b)
    assert not set(a) & set(none)
    request = Request(
        "r", ids, SamplingParams(max_tokens=1), None, max_model_len=99, cache_salt="a"
    )
    hasher = BlockHasher(4)
    assert hasher.extra_keys(request, 0)
    assert hasher.extra_keys(request, 4) == b""


def test_lora_is_keyed_by_name_and_generation() -> None:
    """2.4 Wart, T11: a new adapter under an old name does not meet stale KV."""
    ids = list(range(8))
    lora = LoRARequest("fr", 1, "/a")
    old = hashes(ids, lora_request=lora, lora_generation=1)
    new = hashes(ids, lora_request=lora, lora_generation=2)
    other = hashes(ids, lora_request=LoRARequest("de", 1, "/b"), lora_generation=1)
    assert not set(old) & set(new)
    assert not set(old) & set(other)
    assert old == hashes(ids, lora_request=lora, lora_generation=1)


def test_multimodal_items_name_the_blocks_they_overlap() -> None:
    """2.4.3 Check: item at offset 6, length 10, blocks of 4."""
    item = MultiModalFeature("image", "id", 6, 10)
    params = SamplingParams(max_tokens=1)
    request = Request("r", [0] * 20, params, None, max_model_len=99, mm_features=[item])
    hasher = BlockHasher(4)
    keys = [hasher.multimodal_keys(request, start) for start in range(0, 20, 4)]
    assert keys == [[], [("id", 2)], [("id", -2)], [("id", -6)], []]


def test_every_multimodal_item_counts() -> None:
    """2.4.5 Wart, T6: not only the last item."""
    one = MultiModalFeature("image", "x", 0, 2)
    two = MultiModalFeature("image", "y", 2, 2)
    both = hashes([0] * 8, mm_features=[one, two])
    assert both != hashes([0] * 8, mm_features=[two])
    assert both != hashes([0] * 8, mm_features=[one])


def test_extra_keys_cannot_be_confused() -> None:
    """Length prefixes: a salt is never read as part of a name."""
    ids = list(range(4))
    a = hashes(ids, lora_request=LoRARequest("ab", 1, "/"), cache_salt="c")
    b = hashes(ids, lora_request=LoRARequest("a", 1, "/"), cache_salt="bc")
    assert a != b


def test_unknown_algorithm_is_refused() -> None:
    with pytest.raises(InvalidParameterError, match="xxhash"):
        BlockHasher(4, "xxhash")
