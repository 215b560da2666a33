"""Pictures for Gemma 3: scaled to the tower's square, whatever their shape.

With ``do_pan_and_scan`` a picture that is long is also cut into two or more parts along its longer
side, each of which becomes a square of its own behind that of the whole. Every square has marks
before and behind its rows.

Source: preprocessor settings of google/gemma-3-4b-it; Gemma Team 2025 (Gemma 3), section 2.1.
Sizes and prompts are those of transformers 5.24, pixel by pixel.
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

_BILINEAR = 2
_END = "<end_of_image>"
_MAX_CROPS = 64


class SquareImageProcessor:
    """See `tellin.loading.images.ImageProcessor`."""

    placeholder = "<start_of_image>"
    row_placeholder = "<image_soft_token>"
    rows_see_each_other = True

    def __init__(self, hparams: VisionHParams, settings: TypedMapping) -> None:
        require_on(settings, "do_resize", "do_rescale", "do_normalize", "do_convert_rgb")
        check_channels(settings, hparams)
        self._settings = settings
        self._hparams = hparams
        side = hparams.table_side * hparams.patch_size
        size = size_of(settings, "size", ("height", "width")) or {"height": 224, "width": 224}
        wanted = range(side, side + hparams.patch_size)  # a part of a patch is left out
        if len(size) < 2 or size["height"] not in wanted or size["width"] not in wanted:
            raise ModelLoadError(
                f"{settings.path}: size is {size}, but the image encoder takes pictures of "
                f"{side} x {side} pixels"
            )
        self._size = size["width"], size["height"]
        self._cuts = settings.get_bool("do_pan_and_scan", False)
        self._min_crop = settings.get_int("pan_and_scan_min_crop_size", 256)
        self._max_crops = settings.get_int("pan_and_scan_max_num_crops", 4)
        self._min_ratio = settings.get_float("pan_and_scan_min_ratio_to_activate", 1.2)
        if self._min_crop < 1 or not 1 <= self._max_crops <= _MAX_CROPS:
            raise ModelLoadError(
                f"{settings.path}: pan_and_scan_min_crop_size is {self._min_crop}, which must be "
                f"positive, and pan_and_scan_max_num_crops {self._max_crops}, which must be 1 to "
                f"{_MAX_CROPS}"
            )
        self.pixel_table = make_pixel_table(settings, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
        self.placeholder_token_id = hparams.image_token_id
        self.user_token_id = hparams.begin_token_id or hparams.image_token_id
        self.tokens_per_tile = hparams.embeds_per_tile(hparams.table_side)
        self.max_tokens_per_image = self.tokens_per_tile
        if self._cuts:
            self.max_tokens_per_image *= 1 + self._max_crops
        rows = self.row_placeholder * self.tokens_per_tile
        self._square_text = f"\n\n{self.placeholder}{rows}{_END}\n\n"

    def process(self, image: Image) -> ProcessedImage:
        """Scale, cut, normalise."""
        if image.mode != "RGB":  # a copy of a large picture is hundreds of megabytes
            image = image.convert("RGB")
        boxes = self._boxes(image.width, image.height) if self._cuts else []
        squares = [image, *(image.crop(box) for box in boxes)]
        patches = np.stack([self._patches(square) for square in squares])
        text = self._square_text
        if boxes:
            crops = " ".join([text] * len(boxes))
            text = f"Here is the original image {text} and here are some crops to help you see "
            text += f"better {crops}"
        count = len(squares) * self.tokens_per_tile
        return ProcessedImage(patches, self.pixel_table, text, count)

    def _patches(self, image: Image) -> np.ndarray:
        scaled = image.resize(self._size, resampling(self._settings, _BILINEAR))
        hp = self._hparams
        side = hp.table_side * hp.patch_size
        return cut_patches(np.asarray(scaled, np.uint8)[:side, :side], hp.patch_size, hp.group_side)

    def _boxes(self, width: int, height: int) -> list[tuple[int, int, int, int]]:
        """The parts of a long picture, first to last; none of one that is nearly square."""
        longer, shorter = max(width, height), min(width, height)
        ratio = longer / shorter
        if ratio < self._min_ratio:
            return []
        count = min(longer // self._min_crop, math.floor(ratio + 0.5))
        count = min(self._max_crops, max(2, count))
        length = math.ceil(longer / count)
        if min(length, shorter) < self._min_crop:
            return []
        parts = [(at, min(at + length, longer)) for at in range(0, longer, length)]
        if width >= height:
            return [(begin, 0, end, height) for begin, end in parts]
        return [(0, begin, width, end) for begin, end in parts]
