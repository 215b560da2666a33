"""`MultiModalProcessor`: from a prompt with pictures to token ids, pixels and their places.

Every placeholder in the prompt is replaced by what the model's image processor says (marks, and one
placeholder per embedding row), then the places are found among the ids. Owns the frontend's cache
of processed pictures. Does not know how a model's pixels are made: `tellin.loading.images` does.
"""

from __future__ import annotations

import hashlib
import struct
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from tellin.config import MultiModalConfig
from tellin.engine.image_input import read_url, to_rgb
from tellin.engine.mm_cache import ProcessorCache
from tellin.engine.mm_inputs import ImageItem, ImageUrl
from tellin.engine.prompts import MultiModalItems
from tellin.exceptions import ContextLengthError, InvalidParameterError
from tellin.protocol import CacheStats

if TYPE_CHECKING:
    from PIL.Image import Image

    from tellin.loading.images import ImageProcessor, ProcessedImage

T = TypeVar("T")

Encode = Callable[[str], list[int]]

_PIXELS_AT_ONCE = 1 << 20
"""Hashed in one go."""


@dataclass(frozen=True)
class PreparedImage:
    """A picture that is ready, under the key of its content (or of the user's name for it)."""

    key: str
    image: ProcessedImage


class MultiModalProcessor:
    """Pictures of one engine's prompts."""

    def __init__(self, config: MultiModalConfig, processor: ImageProcessor, model: str) -> None:
        self.config = config
        self.processor = processor
        self.placeholder = processor.placeholder
        self._model = model
        self._cache = ProcessorCache(int(config.processor_cache_gb * (1 << 30)))
        # Decoded pictures are large, and threads would not make them faster.
        self._one_at_a_time = threading.Lock()
        self._thread: ThreadPoolExecutor | None = None
        self._thread_lock = threading.Lock()

    # ------------------------------------------------------------------ pictures

    def prepare(
        self, items: Sequence[ImageItem], max_embeds: int, salt: str | None = None
    ) -> list[PreparedImage]:
        """Process pictures, or find them in the cache.

        Args:
            max_embeds: rows that fit into the context; nothing is prepared beyond them.
            salt: keeps names that users gave apart from those of others (``cache_salt``).

        Raises:
            InvalidParameterError: too many, a broken one, or a name of none that is known.
            ContextLengthError: they do not fit into the context.
            InvalidTypeError, UnsupportedFeatureError: a form that is not accepted.
        """
        limit = self.config.limit_per_prompt.get("image", 0)
        if len(items) > limit:
            raise InvalidParameterError(
                f"the prompt has {len(items)} images, but at most {limit} are allowed; send fewer, "
                "or raise limit_mm_per_prompt",
                parameter="multi_modal_data",
                value=len(items),
            )
        prepared: list[PreparedImage] = []
        num_embeds = 0
        for index, item in enumerate(items):
            prepared.append(self._prepare(item, f"image {index}", salt))
            num_embeds += prepared[-1].image.num_embeds
            if num_embeds > max_embeds:
                raise ContextLengthError(
                    f"the first {index + 1} of {len(items)} images take {num_embeds} tokens, but "
                    f"the context (max_model_len) is {max_embeds}; send fewer, or raise "
                    "max_model_len"
                )
        return prepared

    def _prepare(self, item: ImageItem, where: str, salt: str | None) -> PreparedImage:
        if item.uuid is not None:
            return self._prepare_named(item, item.uuid, where, salt)
        if item.data is None:
            raise InvalidParameterError(
                f"{where} is missing: only one that was sent before under a uuid may be None",
                parameter="multi_modal_data",
            )
        data = self._read(item.data, where)
        with self._one_at_a_time:
            return self._find_or_process(data, where)

    def _find_or_process(self, data: Any, where: str) -> PreparedImage:
        digest = hashlib.sha256(data).digest() if isinstance(data, bytes) else None
        key = None if digest is None else self._cache.hash_of_file(digest)
        rgb = None
        if key is None:
            rgb = to_rgb(data, where)
            key = self._content_key(rgb)
            if digest is not None:
                self._cache.note_file(digest, key)
        found = self._cache.get(key)
        if found is None:
            found = self._process(key, to_rgb(data, where) if rgb is None else rgb)
        return PreparedImage(key, found)

    def _prepare_named(
        self, item: ImageItem, uuid: str, where: str, salt: str | None
    ) -> PreparedImage:
        """A picture that the user names: whatever was sent first under the name counts.

        The name only finds it: its key is that of its content, so that two pictures that were sent
        under one name, when the first was no longer cached, never pass for each other.
        """
        name = bytes.fromhex(_hash("name", self._model, salt or "", uuid))
        key = self._cache.hash_of_file(name)
        found = None if key is None else self._cache.get(key)
        if key is not None and found is not None:
            return PreparedImage(key, found)
        if item.data is None:
            raise InvalidParameterError(
                f"{where} has the uuid {uuid!r} and no data, but no such image is cached; send "
                "it with its data",
                parameter="multi_modal_uuids",
                value=uuid,
            )
        data = self._read(item.data, where)
        with self._one_at_a_time:
            prepared = self._find_or_process(data, where)
        self._cache.note_file(name, prepared.key)
        return prepared

    def _read(self, data: Any, where: str) -> Any:
        if isinstance(data, ImageUrl):
            return read_url(data.url, where, self.config.allowed_local_media_path)
        if isinstance(data, str):
            return read_url(data, where, self.config.allowed_local_media_path)
        return bytes(data) if isinstance(data, bytearray | memoryview) else data

    def _process(self, key: str, rgb: Image) -> ProcessedImage:
        image = self.processor.process(rgb)
        image.values.flags.writeable = False  # several requests may hold it
        self._cache.put(key, image)
        return image

    def _content_key(self, rgb: Image) -> str:
        width, height = rgb.size
        pixels = hashlib.sha256()
        rows = max(1, _PIXELS_AT_ONCE // width)
        for top in range(0, height, rows):  # a copy of a large picture is hundreds of megabytes
            pixels.update(rgb.crop((0, top, width, min(top + rows, height))).tobytes())
        return _hash("rgb", self._model, struct.pack("<QQ", width, height), pixels.digest())

    # ------------------------------------------------------------------ prompts

    def expand_text(self, text: str, images: Sequence[PreparedImage]) -> str:
        """The prompt with every placeholder replaced by its picture's text.

        A text that has a placeholder for every embedding row already stays as it is.

        Raises:
            InvalidParameterError: other numbers of placeholders and pictures.
        """
        parts = text.split(self.placeholder)
        num_rows = text.count(self.processor.row_placeholder)
        if self._is_expanded(len(parts) - 1, num_rows, images):
            return text
        pieces = [parts[0]]
        for image, part in zip(images, parts[1:], strict=True):
            pieces += [image.image.prompt, part]
        return "".join(pieces)

    def expand_ids(
        self, token_ids: Sequence[int], images: Sequence[PreparedImage], encode: Encode
    ) -> list[int]:
        """`expand_text` for token ids; ``encode`` makes ids of a picture's text."""
        placeholder = self.processor.user_token_id
        num_rows = sum(1 for i in token_ids if i == self.processor.placeholder_token_id)
        num_found = sum(1 for i in token_ids if i == placeholder)
        if self._is_expanded(num_found, num_rows, images):
            return list(token_ids)
        rest = iter(images)
        result: list[int] = []
        for token_id in token_ids:
            if token_id == placeholder:
                result += encode(next(rest).image.prompt)
            else:
                result.append(token_id)
        return result

    def _is_expanded(self, num_found: int, num_rows: int, images: Sequence[PreparedImage]) -> bool:
        """Whether there is a placeholder for each row, and not for each picture only."""
        is_same = self.processor.row_placeholder == self.placeholder
        if num_found == len(images) and (is_same or num_rows == 0):
            return False
        if num_rows == sum(image.image.num_embeds for image in images):
            return True
        raise InvalidParameterError(
            f"the prompt has {num_found} placeholders {self.placeholder!r} for {len(images)} "
            "images; write one for each image, where it belongs",
            parameter="prompt",
            value=num_found,
        )

    def find_places(
        self, token_ids: Sequence[int], images: Sequence[PreparedImage]
    ) -> dict[str, MultiModalItems]:
        """Where the pictures' rows go in an expanded prompt.

        Raises:
            InvalidParameterError: the tokenizer does not keep placeholders apart.
        """
        placeholder = self.processor.placeholder_token_id
        places = [i for i, token_id in enumerate(token_ids) if token_id == placeholder]
        wanted = sum(image.image.num_embeds for image in images)
        if len(places) != wanted:
            raise InvalidParameterError(
                f"the prompt has {len(places)} placeholder tokens (id {placeholder}) after its "
                f"{len(images)} images were put in, but they need {wanted}; text that comes with "
                f"images must not contain {self.processor.row_placeholder!r}, and prompts must "
                "not be truncated",
                parameter="prompt",
            )
        items = MultiModalItems(
            data=[], hashes=[], placeholders=[], embed_runs=[], grids=[], shapes=[]
        )
        start = 0
        for image in images:
            own = places[start : start + image.image.num_embeds]
            start += len(own)
            items["data"].append(image.image.values)
            items["hashes"].append(image.key)
            items["placeholders"].append((own[0], own[-1] + 1 - own[0]))
            items["embed_runs"].append(_runs(own))
            items["grids"].append(image.image.grid)
            items["shapes"].append(image.image.shapes)
            self._check_runs(items["embed_runs"][-1], image.image)
        return {"image": items}

    def _check_runs(self, runs: Sequence[tuple[int, int]], image: ProcessedImage) -> None:
        """Refuse other tokens where the model wants all rows of a picture's part in succession."""
        size = image.num_embeds // len(image.values)
        wants_whole = image.grid is not None or self.processor.rows_see_each_other
        if wants_whole and any(count != size for _, count in runs):
            raise InvalidParameterError(
                "the prompt has other tokens among the placeholders of an image, or none between "
                f"its parts; this model takes them in one row of {size} for each part",
                parameter="prompt",
            )

    # ------------------------------------------------------------------ beside an event loop

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """``function(*args)`` in the one thread that is there for pictures.

        The threads for texts would all wait for the pictures that come before theirs.
        """
        import asyncio

        with self._thread_lock:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, "tellin-images")
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    def shutdown(self) -> None:
        """Release the cache and the thread. Idempotent."""
        with self._thread_lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.shutdown(wait=False, cancel_futures=True)
        self.clear()

    # ------------------------------------------------------------------ cache

    def clear(self) -> None:
        """Forget processed pictures."""
        self._cache.clear()

    def take_stats(self) -> CacheStats:
        """Hits since the last call, in pictures."""
        return self._cache.take_stats()


def _runs(positions: Sequence[int]) -> list[tuple[int, int]]:
    """``(start, count)`` of consecutive positions, relative to the first."""
    runs: list[tuple[int, int]] = []
    for position in positions:
        relative = position - positions[0]
        if runs and sum(runs[-1]) == relative:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((relative, 1))
    return runs


def _hash(*parts: str | bytes) -> str:
    """Digest of parts with their lengths, so that no two lists of parts are the same bytes."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        digest.update(struct.pack("<Q", len(data)))
        digest.update(data)
    return digest.hexdigest()
