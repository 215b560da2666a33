"""Pictures for LLaVA-1.5: scaled to the tower's size by their shortest edge, cut around the centre.

Source: preprocessor settings of llava-hf/llava-1.5-7b-hf; Radford et al. 2021 (CLIP). Sizes are
those of transformers 5.24, pixel by pixel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tellin.exceptions import ModelLoadError, UnsupportedModelError
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

_BICUBIC = 3
_MEAN = (0.48145466, 0.4578275, 0.40821073)
_STD = (0.26862954, 0.26130258, 0.27577711)
"""Of the pictures that CLIP was trained on."""
_MAX_SCALED = 1 << 24
"""Pixels of a scaled picture that are made in order to cut it."""


class CroppedImageProcessor:
    """See `tellin.loading.images.ImageProcessor`."""

    placeholder = "<image>"
    row_placeholder = placeholder
    rows_see_each_other = False

    def __init__(self, hparams: VisionHParams, settings: TypedMapping) -> None:
        require_on(settings, "do_resize", "do_rescale", "do_normalize", "do_convert_rgb")
        check_channels(settings, hparams)
        if settings.get_bool("do_pad", False):
            raise UnsupportedModelError(f"{settings.path}: do_pad is not supported")
        self._settings = settings
        self._hparams = hparams
        self._size = size_of(settings, "size", ("shortest_edge", "height", "width"))
        if not self._size:
            self._size = {"shortest_edge": 224}
        if "shortest_edge" not in self._size and len(self._size) < 2:
            raise ModelLoadError(
                f"{settings.path}: size must have shortest_edge, or height and width"
            )
        self._crops = settings.get_bool("do_center_crop", True)
        crop = size_of(settings, "crop_size", ("height", "width"))
        square = {"height": self._size.get("shortest_edge", self._size.get("height", 0))}
        square["width"] = self._size.get("shortest_edge", self._size.get("width", 0))
        self._crop = {**square, **crop} if self._crops else square
        side = self._crop["height"] // hparams.patch_size
        if self._crop["width"] // hparams.patch_size != side or side != hparams.table_side:
            raise ModelLoadError(
                f"{settings.path}: pictures become {self._crop['width']} x {self._crop['height']} "
                f"pixels, but the tower takes {hparams.table_side} x {hparams.table_side} patches "
                f"of {hparams.patch_size}"
            )
        if not self._crops and "shortest_edge" in self._size:
            raise UnsupportedModelError(f"{settings.path}: do_center_crop false is not supported")
        self.pixel_table = make_pixel_table(settings, _MEAN, _STD)
        self.placeholder_token_id = self.user_token_id = hparams.image_token_id
        self.tokens_per_tile = self.max_tokens_per_image = hparams.embeds_per_tile(side)

    def process(self, image: Image) -> ProcessedImage:
        """Scale, cut, normalise."""
        if image.mode != "RGB":  # a copy of a large picture is hundreds of megabytes
            image = image.convert("RGB")
        pixels = np.asarray(self._scaled(image), np.uint8)
        if self._crops:
            pixels = _cut_centre(pixels, self._crop["height"], self._crop["width"])
        hp = self._hparams
        patches = cut_patches(pixels, hp.patch_size, hp.group_side)
        count = self.max_tokens_per_image
        return ProcessedImage(patches[None], self.pixel_table, self.placeholder * count, count)

    def _scaled(self, image: Image) -> Image:
        """Scaled as a whole; of one that would be huge, a ribbon, only what the cut leaves."""
        width, height = self._scaled_size(image.width, image.height)
        resample = resampling(self._settings, _BICUBIC)
        if not self._crops or width * height <= _MAX_SCALED:
            return image.resize((width, height), resample)
        kept = min(width, self._crop["width"]), min(height, self._crop["height"])
        left, top = (width - kept[0]) // 2, (height - kept[1]) // 2
        right, bottom = left + kept[0], top + kept[1]
        across, down = image.width / width, image.height / height
        box = (left * across, top * down, right * across, bottom * down)
        return image.resize(
            kept, resample, (*box[:2], min(box[2], image.width), min(box[3], image.height))
        )

    def _scaled_size(self, width: int, height: int) -> tuple[int, int]:
        shortest = self._size.get("shortest_edge")
        if shortest is None:
            return self._size["width"], self._size["height"]
        if width <= height:
            return shortest, int(shortest * height / width)
        return int(shortest * width / height), shortest


def _cut_centre(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
    """The middle ``height * width`` pixels; what is missing of them is black."""
    missing = [max(0, height - pixels.shape[0]), max(0, width - pixels.shape[1])]
    if any(missing):
        before = [(size + 1) // 2 for size in missing]
        after = [size - first for size, first in zip(missing, before, strict=True)]
        pad = [*zip(before, after, strict=True), (0, 0)]
        pixels = np.pad(pixels, pad)
    top, left = (pixels.shape[0] - height) // 2, (pixels.shape[1] - width) // 2
    return pixels[top : top + height, left : left + width]
