"""Content hashes of full KV blocks, chained so that one hash names a whole prefix.

``h[i] = sha256(h[i-1] + ids as u32 LE + extra keys)``. The encoding is canonical: it depends on the
values only, not on the Python version or the process, so two engines with the same settings agree
on every hash (outside routers rely on it). Extra keys separate what equal ids do not: adapter,
cache salt, multimodal content, rows of embeddings in the place of ids.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from hashlib import sha256
from typing import TYPE_CHECKING

from tellin.exceptions import InvalidParameterError

if TYPE_CHECKING:
    from tellin.core.request import Request
    from tellin.protocol import MultiModalFeature

ROOT_HASH = sha256(b"tellin kv block hash v1").digest()
"""Parent of every first block."""

HASH_ALGORITHMS = ("sha256",)

# One tag per kind of extra key; each is followed by its length-prefixed fields.
_TAG_LORA = b"L"
_TAG_MULTIMODAL = b"M"
_TAG_SALT = b"S"
_TAG_EMBEDS = b"E"


def _text(value: str) -> bytes:
    data = value.encode("utf-8", "surrogatepass")
    return struct.pack("<I", len(data)) + data


class BlockHasher:
    """Extends a request's ``block_hashes``. Stateless apart from the block size."""

    def __init__(self, block_size: int, algorithm: str = "sha256") -> None:
        if algorithm not in HASH_ALGORITHMS:
            raise InvalidParameterError(
                "prefix_caching_hash_algo must be one of "
                f"{list(HASH_ALGORITHMS)}, got {algorithm!r}",
                parameter="prefix_caching_hash_algo",
                value=algorithm,
            )
        self.block_size = block_size
        self._pack = struct.Struct(f"<{block_size}I").pack

    def extend(self, request: Request) -> None:
        """Hash every full block of known ids that has no hash yet; costs O(new blocks)."""
        hashes = request.block_hashes
        block_size, pack = self.block_size, self._pack
        first, last = len(hashes), request.num_tokens // block_size
        if first >= last:
            return
        token_ids = request._all_token_ids
        parent = hashes[-1] if hashes else ROOT_HASH
        plain = not (
            request.lora_request
            or request.mm_features
            or request.cache_salt
            or request.prompt_embeds is not None
        )
        for index in range(first, last):
            start = index * block_size
            data = parent + pack(*token_ids[start : start + block_size])
            if not plain:
                data += self.extra_keys(request, start)
            parent = sha256(data).digest()
            hashes.append(parent)

    def tail_hash(self, request: Request) -> bytes:
        """Hash of all known ids whose last, incomplete block holds at least one of them.

        It tells prefixes that end at the same id apart from full blocks, which have their own map.
        """
        block_size = self.block_size
        num_full = request.num_tokens // block_size
        start = num_full * block_size
        token_ids = request._all_token_ids[start : request.num_tokens]
        parent = request.block_hashes[num_full - 1] if num_full else ROOT_HASH
        data = parent + struct.pack(f"<{len(token_ids) + 1}I", len(token_ids), *token_ids)
        return sha256(data + self.extra_keys(request, start)).digest()

    def extra_keys(self, request: Request, start: int) -> bytes:
        """Encoded extra keys of the block that begins at token ``start``; empty if there are none.

        An adapter is named together with its load generation, so that a new adapter under an old
        name cannot serve stale KV. Multimodal items carry their offset relative to the block.
        """
        keys = b""
        if request.lora_request is not None:
            keys += _TAG_LORA + _text(request.lora_request.lora_name)
            keys += struct.pack("<Q", request.lora_generation)
        for identifier, offset in self.multimodal_keys(request, start):
            keys += _TAG_MULTIMODAL + _text(identifier) + struct.pack("<q", offset)
        if request.cache_salt and start == 0:
            keys += _TAG_SALT + _text(request.cache_salt)
        if request.prompt_embeds is not None and start < request.num_prompt_tokens:
            keys += _TAG_EMBEDS + self.embeds_key(request, start)
        return keys

    def embeds_key(self, request: Request, start: int) -> bytes:
        """Hash of the rows that the block's tokens have in the place of ids."""
        values = memoryview(request.prompt_embeds).cast("B")
        row_bytes = len(values) // request.num_prompt_tokens
        return sha256(values[start * row_bytes : (start + self.block_size) * row_bytes]).digest()

    def multimodal_keys(self, request: Request, start: int) -> list[tuple[str, int]]:
        """``(identifier, item offset - start)`` of every item that overlaps the block."""
        items = request.mm_features  # one after the other
        first = bisect_right(items, start, key=_end_of)
        last = bisect_left(items, start + self.block_size, first, key=_offset_of)
        return [(item.identifier, item.offset - start) for item in items[first:last]]


def _offset_of(item: MultiModalFeature) -> int:
    return item.offset


def _end_of(item: MultiModalFeature) -> int:
    return item.offset + item.length
