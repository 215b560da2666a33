"""Pictures for LFM2-VL: as they are, or cut into square tiles with the whole behind them.

A picture of middle size is one tile of nearly its own shape. A large one is scaled to the grid of
tiles whose shape is nearest to its own, and the whole, scaled down, follows as a tile of nearly its
own shape. In the prompt every tile has a mark with its row and column.

Source: preprocessor settings and special tokens of LiquidAI/LFM2-VL-1.6B; sizes are those of
transformers 5.24.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from tellin.exceptions import InvalidParameterError, ModelLoadError
from tellin.loading.images import (
    ProcessedImage,
    check_channels,
    cut_patches,
    make_pixel_table,
    require_on,
    resampling,
)
from tellin.loading.typed_mapping import TypedMapping
from tellin.loading.vision_hparams import VisionHParams

if TYPE_CHECKING:
    from PIL.Image import Image

Shape = tuple[int, int]

_BILINEAR = 2
_MAX_TILES = 64
_MAX_ROWS = 1 << 14
_DEFAULTS = {
    "tile_size": 512, "min_tiles": 2, "max_tiles": 10, "min_image_tokens": 64,
    "max_image_tokens": 256,
}  # fmt: skip
_START, _WHOLE, _END = "<|image_start|>", "<|img_thumbnail|>", "<|image_end|>"


class MixedImageProcessor:
    """See `tellin.loading.images.ImageProcessor`."""

    placeholder = "<image>"
    row_placeholder = placeholder
    rows_see_each_other = False

    def __init__(self, hparams: VisionHParams, settings: TypedMapping) -> None:
        require_on(settings, "do_resize", "do_rescale", "do_normalize", "do_convert_rgb")
        check_channels(settings, hparams)
        own = {"encoder_patch_size": hparams.patch_size, "downsample_factor": hparams.group_side}
        for key, wanted in own.items():
            if settings.get_int(key, wanted) != wanted:
                raise ModelLoadError(
                    f"{settings.path}: {key} is {settings[key]}, but the image encoder's is "
                    f"{wanted}"
                )
        self._settings = settings
        self._hparams = hparams
        self._block = hparams.patch_size * hparams.group_side
        sizes = {key: settings.get_int(key, value) for key, value in _DEFAULTS.items()}
        self._tile = sizes["tile_size"]
        self._tiles = sizes["min_tiles"], sizes["max_tiles"]
        self._least, self._most = sizes["min_image_tokens"], sizes["max_image_tokens"]
        self._too_large = settings.get_float("max_pixels_tolerance", 2.0)
        rows = (self._tile // self._block) ** 2
        if (
            self._tile % self._block
            or not 1 <= max(rows, self._most) <= _MAX_ROWS
            or not 1 <= self._least <= self._most
            or not 1 <= self._tiles[0] <= self._tiles[1] <= _MAX_TILES
        ):
            raise ModelLoadError(
                f"{settings.path}: {sizes} do not go together: tile_size must be a multiple of "
                f"{self._block}, max_tiles at most {_MAX_TILES}, and a tile has at most "
                f"{_MAX_ROWS} tokens"
            )
        self._splits = settings.get_bool("do_image_splitting", True) and self._tiles != (1, 1)
        self._has_whole = settings.get_bool("use_thumbnail", True)
        self.pixel_table = make_pixel_table(settings, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
        self.placeholder_token_id = self.user_token_id = hparams.image_token_id
        # Long pictures have more rows than they should: a side is never less than one.
        whole = max(self._most, 4 * self._least, 1 << 10)
        self._longest = whole
        self.tokens_per_tile = max(whole, rows)
        cut = self._tiles[1] * rows + whole * self._has_whole if self._splits else 0
        self.max_tokens_per_image = max(cut, whole)

    def process(self, image: Image) -> ProcessedImage:
        """Scale, cut, normalise."""
        resample = resampling(self._settings, _BILINEAR)
        if image.mode != "RGB":  # a copy of a large picture is hundreds of megabytes
            image = image.convert("RGB")
        rows, columns = self._grid(image.width, image.height)
        tiles: list[Image] = []
        shapes: list[Shape] = []
        if rows * columns > 1:
            size = columns * self._tile, rows * self._tile
            tiles = _cut(image.resize(size, resample), self._tile)
            shapes = [(self._tile // self._block,) * 2] * len(tiles)
        if rows * columns == 1 or self._has_whole:
            whole = self._whole_shape(image.width, image.height)
            tiles.append(image.resize((whole[1] * self._block, whole[0] * self._block), resample))
            shapes.append(whole)
        counts = [high * wide for high, wide in shapes]
        values = self._patches(tiles, max(counts))
        prompt = self._prompt(rows, columns, counts)
        return ProcessedImage(values, self.pixel_table, prompt, sum(counts), None, shapes)

    def _patches(self, tiles: list[Image], most: int) -> np.ndarray:
        hp = self._hparams
        values = np.zeros((len(tiles), most * hp.group_side**2, hp.patch_dim), np.uint8)
        for own, tile in zip(values, tiles, strict=True):
            patches = cut_patches(np.asarray(tile, np.uint8), hp.patch_size, hp.group_side)
            own[: len(patches)] = patches
        return values

    def _prompt(self, rows: int, columns: int, counts: list[int]) -> str:
        if rows * columns == 1:
            return _START + self.placeholder * counts[0] + _END
        marks = [
            f"<|img_row_{row}_col_{column}|>"
            for row in range(1, rows + 1)
            for column in range(1, columns + 1)
        ]
        marks += [_WHOLE] * self._has_whole
        parts = [mark + self.placeholder * n for mark, n in zip(marks, counts, strict=True)]
        return _START + "".join(parts) + _END

    def _whole_shape(self, width: int, height: int) -> Shape:
        """Rows and columns of a picture that is not cut."""
        block = self._block
        # Python rounds halves to even, as the models' sizes were made.
        wide, high = max(1, round(width / block)), max(1, round(height / block))
        if wide * high > self._most:
            ratio = math.sqrt(height * width / (self._most * block**2))
            wide = max(1, math.floor(width / ratio / block))
            high = max(1, math.floor(height / ratio / block))
        elif wide * high < self._least:
            ratio = math.sqrt(self._least * block**2 / (height * width))
            wide = math.ceil(width * ratio / block)
            high = math.ceil(height * ratio / block)
        if wide * high > self._longest:
            raise InvalidParameterError(
                f"an image is {width} x {height} pixels; this model takes none that is so much "
                "longer than it is wide; cut it",
                parameter="multi_modal_data",
            )
        return high, wide

    def _grid(self, width: int, height: int) -> Shape:
        """Rows and columns of tiles; 1 x 1: the picture is not cut."""
        block, patch = self._block, self._hparams.patch_size
        wide, high = (max(patch, round(size / block) * block) for size in (width, height))
        if not self._splits or wide * high <= self._most * block**2 * self._too_large:
            return 1, 1
        best, least = (1, 1), math.inf
        for rows, columns in self._grids:
            difference = abs(width / height - columns / rows)
            is_larger = width * height > 0.5 * self._tile**2 * rows * columns
            if difference < least or (difference == least and is_larger):
                best, least = (rows, columns), difference
        return best

    @cached_property
    def _grids(self) -> list[Shape]:
        """Grids of so many tiles, small ones first."""
        low, high = self._tiles
        grids = [
            (rows, columns)
            for columns in range(1, high + 1)
            for rows in range(1, high + 1)
            if low <= rows * columns <= high
        ]
        return sorted(grids, key=lambda grid: grid[0] * grid[1])


def _cut(image: Image, tile: int) -> list[Image]:
    return [
        image.crop((left, top, left + tile, top + tile))
        for top in range(0, image.height, tile)
        for left in range(0, image.width, tile)
    ]
