"""Pictures for SmolVLM, SmolVLM2 and Idefics3: cut into square tiles, with the whole behind them.

A picture is scaled until its longest edge is the wanted one, then to whole tiles, and cut; the
scaled picture as one more tile follows the others. In the prompt every tile has a mark with its row
and column. A model that was made without cutting gets the whole as its only tile.

Source: preprocessor settings and special tokens of HuggingFaceTB/SmolVLM-256M-Instruct; Marafioti
et al. 2025 (SmolVLM), section 2. Sizes are those of transformers 5.24, pixel by pixel.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from tellin.exceptions import ModelLoadError
from tellin.loading.images import (
    ProcessedImage,
    check_channels,
    cut_patches,
    make_pixel_table,
    require_on,
    resampling,
    size_of,
)
from tellin.loading.typed_mapping import TypedMapping
from tellin.loading.vision_hparams import VisionHParams

if TYPE_CHECKING:
    from PIL.Image import Image

_LANCZOS = 1
_MAX_EDGE = 4096
"""Longest edge of a scaled picture, whatever the settings say."""
_AROUND = "<fake_token_around_image>"
_WHOLE = "<global-img>"


class TiledImageProcessor:
    """See `tellin.loading.images.ImageProcessor`."""

    placeholder = "<image>"
    row_placeholder = placeholder
    rows_see_each_other = False

    def __init__(self, hparams: VisionHParams, settings: TypedMapping) -> None:
        require_on(settings, "do_resize", "do_rescale", "do_normalize", "do_convert_rgb")
        check_channels(settings, hparams)
        self._settings = settings
        self._hparams = hparams
        self._splits = settings.get_bool("do_image_splitting", True)
        self._tile = size_of(settings, "max_image_size", ("longest_edge",)).get("longest_edge", 364)
        self._longest = size_of(settings, "size", ("longest_edge",)).get("longest_edge", 4 * 364)
        side = self._tile // hparams.patch_size
        if side < 1 or side % hparams.group_side or side > hparams.table_side:
            raise ModelLoadError(
                f"{settings.path}: tiles of {self._tile} pixels are {side} patches wide, which "
                f"must be a multiple of {hparams.group_side} and at most {hparams.table_side}"
            )
        self.pixel_table = make_pixel_table(settings, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
        self.tokens_per_tile = hparams.embeds_per_tile(side)
        self.placeholder_token_id = self.user_token_id = hparams.image_token_id
        tiles = math.ceil(min(self._longest, _MAX_EDGE) / self._tile)
        num_tiles = tiles**2 + 1 if self._splits and tiles > 1 else 1
        self.max_tokens_per_image = num_tiles * self.tokens_per_tile

    def process(self, image: Image) -> ProcessedImage:
        """Scale, cut, normalise."""
        resample = resampling(self._settings, _LANCZOS)
        if image.mode != "RGB":  # a copy of a large picture is hundreds of megabytes
            image = image.convert("RGB")
        image = image.resize(_scaled_size(image.size, self._longest), resample)
        square = (self._tile, self._tile)
        tiles: list[Image] = []
        columns = rows = 0
        if self._splits:
            image = image.resize(_whole_tiles(image.size, self._tile), resample)
            columns, rows = image.width // self._tile, image.height // self._tile
            if columns * rows > 1:
                tiles = [
                    self._cut(image, row, col) for row in range(rows) for col in range(columns)
                ]
        tiles.append(image.resize(square, resample))
        patches = np.stack([self._patches(tile) for tile in tiles])
        prompt = self._prompt(rows, columns) if len(tiles) > 1 else self._mark(_WHOLE) + _AROUND
        num_embeds = len(tiles) * self.tokens_per_tile
        return ProcessedImage(patches, self.pixel_table, prompt, num_embeds)

    def _cut(self, image: Image, row: int, column: int) -> Image:
        left, top = column * self._tile, row * self._tile
        return image.crop((left, top, left + self._tile, top + self._tile))

    def _patches(self, tile: Image) -> np.ndarray:
        values = np.asarray(tile, np.uint8)
        return cut_patches(values, self._hparams.patch_size, self._hparams.group_side)

    def _mark(self, name: str) -> str:
        return _AROUND + name + self.placeholder * self.tokens_per_tile

    def _prompt(self, rows: int, columns: int) -> str:
        lines = [
            "".join(self._mark(f"<row_{row}_col_{col}>") for col in range(1, columns + 1)) + "\n"
            for row in range(1, rows + 1)
        ]
        return "".join(lines) + "\n" + self._mark(_WHOLE) + _AROUND


def _scaled_size(size: tuple[int, int], longest: int) -> tuple[int, int]:
    """Width and height with the longest edge as wanted, the other one even."""
    width, height = size
    ratio = width / height
    if width >= height:
        width, height = longest, int(longest / ratio)
        height += height % 2
    else:
        width, height = int(longest * ratio), longest
        width += width % 2
    width, height = max(width, 1), max(height, 1)
    ratio = width / height
    if width >= height and width > _MAX_EDGE:
        width, height = _MAX_EDGE, int(_MAX_EDGE / ratio)
    elif height > width and height > _MAX_EDGE:
        width, height = int(_MAX_EDGE * ratio), _MAX_EDGE
    return max(width, 1), max(height, 1)


def _whole_tiles(size: tuple[int, int], tile: int) -> tuple[int, int]:
    """Width and height rounded up to whole tiles: the longer edge first."""
    width, height = size
    ratio = width / height
    if width >= height:
        width = math.ceil(width / tile) * tile
        height = math.ceil(int(width / ratio) / tile) * tile
    else:
        height = math.ceil(height / tile) * tile
        width = math.ceil(int(height * ratio) / tile) * tile
    return max(width, tile), max(height, tile)
