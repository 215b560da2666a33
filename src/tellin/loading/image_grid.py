"""Pictures for Qwen2-VL to Qwen3.5: one piece of nearly the picture's own shape, in whole groups.

Source: preprocessor settings of Qwen/Qwen3.5 and Qwen2-VL; Wang et al. 2024 (Qwen2-VL), section
2.1. Sizes are those of transformers 5.24, pixel by pixel.
"""

from __future__ import annotations

import math
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

_BICUBIC = 3
_MEAN = (0.48145466, 0.4578275, 0.40821073)
_STD = (0.26862954, 0.26130258, 0.27577711)
_LEAST, _MOST = 56 * 56, 28 * 28 * 1280
"""Pixels of a scaled picture where the settings do not say."""
_MAX_PIXELS = 1 << 26
_MAX_RATIO = 200


class GridImageProcessor:
    """See `tellin.loading.images.ImageProcessor`."""

    placeholder = "<|image_pad|>"
    row_placeholder = placeholder
    rows_see_each_other = False

    def __init__(self, hparams: VisionHParams, settings: TypedMapping) -> None:
        require_on(settings, "do_resize", "do_rescale", "do_normalize", "do_convert_rgb")
        check_channels(settings, hparams)
        own = {
            "patch_size": hparams.patch_size,
            "merge_size": hparams.group_side,
            "temporal_patch_size": hparams.num_frames,
        }
        for key, wanted in own.items():
            if settings.get_int(key, wanted) != wanted:
                raise ModelLoadError(
                    f"{settings.path}: {key} is {settings[key]}, but the image encoder's is "
                    f"{wanted}"
                )
        self._settings = settings
        self._hparams = hparams
        self._block = hparams.patch_size * hparams.group_side
        size = settings.get_mapping("size") if settings.has("size") else settings
        least, most = (
            settings.get_int(key, size.get_int(name, size.get_int(key, default)))
            for key, name, default in (
                ("min_pixels", "shortest_edge", _LEAST),
                ("max_pixels", "longest_edge", _MOST),
            )
        )
        if not 1 <= least <= most <= _MAX_PIXELS or most < self._block**2:
            raise ModelLoadError(
                f"{settings.path}: pictures of {least} to {most} pixels; allowed are 1 to "
                f"{_MAX_PIXELS}, and at least one group of {self._block} x {self._block}"
            )
        self._least, self._most = least, most
        self.pixel_table = make_pixel_table(settings, _MEAN, _STD)
        self.placeholder_token_id = self.user_token_id = hparams.image_token_id
        # A picture that is scaled up to the least number of pixels is rounded up to whole groups.
        most = max(most, 4 * least, _MAX_RATIO * self._block**2)
        self.tokens_per_tile = self.max_tokens_per_image = most // self._block**2

    def process(self, image: Image) -> ProcessedImage:
        """Scale, cut, normalise."""
        if image.mode != "RGB":  # a copy of a large picture is hundreds of megabytes
            image = image.convert("RGB")
        width, height = self._scaled_size(image.width, image.height)
        image = image.resize((width, height), resampling(self._settings, _BICUBIC))
        hp = self._hparams
        patches = cut_patches(np.asarray(image, np.uint8), hp.patch_size, hp.group_side)
        grid = height // self._block, width // self._block
        count = grid[0] * grid[1]
        return ProcessedImage(
            patches[None], self.pixel_table, self.placeholder * count, count, grid, [grid]
        )

    def _scaled_size(self, width: int, height: int) -> tuple[int, int]:
        if max(width, height) > _MAX_RATIO * min(width, height):
            raise InvalidParameterError(
                f"an image is {width} x {height} pixels; this model takes none that is more than "
                f"{_MAX_RATIO} times as long as it is wide; cut it",
                parameter="multi_modal_data",
            )
        block = self._block
        # Python rounds halves to even, as the models' sizes were made.
        wide, high = round(width / block) * block, round(height / block) * block
        if wide * high > self._most:
            ratio = math.sqrt(height * width / self._most)
            wide = max(block, math.floor(width / ratio / block) * block)
            high = max(block, math.floor(height / ratio / block) * block)
        elif wide * high < self._least:
            ratio = math.sqrt(self._least / (height * width))
            wide = math.ceil(width * ratio / block) * block
            high = math.ceil(height * ratio / block) * block
        if not wide or not high:
            raise InvalidParameterError(
                f"an image of {width} x {height} pixels is too small for this model",
                parameter="multi_modal_data",
            )
        return wide, high
