"""Pictures as an image encoder takes them: `load_image_processor` and what all processors share.

A processor turns a picture into normalised patches and into the text that stands for it in a
prompt. It runs in the process that tokenizes and reads small files only; the encoder's weights are
`tellin.loading.vision`'s. Pillow (the extra ``images``) is needed only where there is a picture.

Patches of a tile are ordered by the group that becomes one row for the text model: group by group,
row by row within each. So grouping is a reshape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from tellin.exceptions import InvalidParameterError, ModelLoadError, UnsupportedModelError
from tellin.loading.json_file import read_optional_json_object
from tellin.loading.typed_mapping import TypedMapping
from tellin.loading.vision import find_vision
from tellin.loading.vision_hparams import VisionHParams

if TYPE_CHECKING:
    from PIL.Image import Image, Resampling


@dataclass(frozen=True)
class ProcessedImage:
    """A picture, ready for the encoder and for the prompt."""

    values: npt.NDArray[np.uint8]
    """``[num_tiles, num_patches, patch_dim]``: bytes, a quarter of what they become; a patch is
    ordered by channel, then row, then column."""
    pixel_table: npt.NDArray[np.float32]
    """``[3, 256]``: what the bytes of each channel mean, normalised."""
    prompt: str
    """What stands for the picture in a prompt: marks, and a placeholder for each embedding row."""
    num_embeds: int
    """Placeholders in ``prompt``: rows that the encoder makes."""
    grid: tuple[int, int] | None = None
    """Rows and columns of them, for a model that counts its positions in two dimensions."""
    shapes: list[tuple[int, int]] | None = None
    """Rows and columns of what each tile becomes, where tiles have shapes of their own; what is
    behind a tile's own patches is unused."""

    @property
    def pixels(self) -> npt.NDArray[np.float32]:
        """The normalised values, which the encoder takes, in the shape of ``values``."""
        return normalise(self.values, self.pixel_table)


def normalise(
    values: npt.NDArray[np.uint8], table: npt.NDArray[np.float32]
) -> npt.NDArray[np.float32]:
    """Bytes of patches, ``[..., 3 * n]`` by channel, as the floats that ``table`` has for them."""
    result = np.empty(values.shape, np.float32)
    channels = (*values.shape[:-1], 3, values.shape[-1] // 3)
    given, made = values.reshape(channels), result.reshape(channels)
    for channel in range(3):
        made[..., channel, :] = table[channel][given[..., channel, :]]
    return result


class ImageProcessor(Protocol):
    """Prepares pictures for one model."""

    placeholder: str
    """What stands for one picture in a user's prompt."""
    user_token_id: int
    """Its token, in a user's prompt of ids."""
    row_placeholder: str
    """In an expanded prompt there is one for each embedding row. It may be ``placeholder``."""
    placeholder_token_id: int
    """The token of that."""
    rows_see_each_other: bool
    """Rows of a part of a picture are attended to by each other, so that they must be computed
    together."""
    pixel_table: npt.NDArray[np.float32]
    """``[3, 256]``: see `ProcessedImage`."""
    tokens_per_tile: int
    """Embedding rows of each part of a picture that is encoded by itself."""
    max_tokens_per_image: int
    """Most embedding rows of one picture."""

    def process(self, image: Image) -> ProcessedImage:
        """Prepare a picture, of any mode and size."""


_OPTIONS = (
    "do_image_splitting", "do_pan_and_scan", "image_mean", "image_std", "max_image_size",
    "max_image_tokens", "max_pixels", "max_tiles", "min_image_tokens", "min_pixels", "min_tiles",
    "pan_and_scan_max_num_crops", "pan_and_scan_min_crop_size",
    "pan_and_scan_min_ratio_to_activate", "resample", "rescale_factor", "size", "use_thumbnail",
)  # fmt: skip
"""Settings that a user may change."""


def load_image_processor(
    path: Path, mmproj: Path | None = None, options: Mapping[str, Any] | None = None
) -> ImageProcessor | None:
    """The processor of the model at ``path``; None for a model that takes no pictures.

    Args:
        path: a folder with safetensors, or a GGUF file.
        mmproj: GGUF file of its image encoder; None = the one that lies beside a GGUF model.
        options: settings in the place of those in the model's files, ``mm_processor_kwargs``.

    Raises:
        InvalidParameterError: there is no such option.
        ModelNotFoundError: there is nothing at ``path``, or at ``mmproj``.
        ModelLoadError: its files are damaged, or do not fit together.
        UnsupportedModelError: it wants its pictures prepared in a way that does not run here.
    """
    from tellin.loading.image_crop import CroppedImageProcessor
    from tellin.loading.image_grid import GridImageProcessor
    from tellin.loading.image_mixed import MixedImageProcessor
    from tellin.loading.image_square import SquareImageProcessor
    from tellin.loading.image_tiles import TiledImageProcessor

    found = find_vision(path, mmproj)
    if found is None:
        return None
    hparams, settings = found.hparams, found.image_settings
    if settings is None:
        settings = _read_settings(found.path)
    if options:
        settings = _changed(settings, options)
    if hparams.takes_grids:
        if hparams.turns:
            return GridImageProcessor(hparams, settings)
        return MixedImageProcessor(hparams, settings)
    if hparams.pools:
        return SquareImageProcessor(hparams, settings)
    if hparams.has_class_row:
        return CroppedImageProcessor(hparams, settings)
    return TiledImageProcessor(hparams, settings)


def _changed(settings: TypedMapping, options: Mapping[str, Any]) -> TypedMapping:
    for name in options:
        if name not in _OPTIONS:
            raise InvalidParameterError(
                f"mm_processor_kwargs has {name!r}; images can be prepared otherwise by "
                f"{', '.join(_OPTIONS)}",
                parameter="mm_processor_kwargs",
                value=name,
            )
    source = Path(f"{settings.path} with mm_processor_kwargs")
    return TypedMapping(source, {**settings, **options})


def _read_settings(folder: Path) -> TypedMapping:
    """Settings of the image processor: a file of their own, or part of the processor's."""
    own = read_optional_json_object(folder / "preprocessor_config.json")
    if own is not None:
        return own
    whole = read_optional_json_object(folder / "processor_config.json")
    if whole is not None and whole.has("image_processor"):
        return whole.get_mapping("image_processor")
    raise ModelLoadError(
        f"{folder}: has no preprocessor_config.json, which says how pictures are prepared; "
        "limit_mm_per_prompt={'image': 0} runs the text model"
    )


_GREATEST_VALUE = 1e6
"""Of a normalised pixel; usual are 1 to 3."""


# ---- pixels ----------------------------------------------------------------------------------


def resampling(settings: TypedMapping, default: int) -> Resampling:
    """The filter that ``resample`` names, by Pillow's number."""
    from PIL.Image import Resampling

    number = settings.get_int("resample", default)
    try:
        return Resampling(number)
    except ValueError:
        raise ModelLoadError(f"{settings.path}: resample is {number}, no filter") from None


def size_of(settings: TypedMapping, key: str, names: Sequence[str]) -> dict[str, int]:
    """Positive sizes in pixels under ``key``: an object, or one number for all ``names``.

    Names that are not there are left out.
    """
    if not settings.has(key):
        return {}
    if isinstance(settings[key], int):
        sizes = dict.fromkeys(names, settings.get_int(key))
    else:
        values = settings.get_mapping(key)
        sizes = {name: values.get_int(name) for name in names if values.has(name)}
    for name, size in sizes.items():
        if not 1 <= size <= 1 << 16:
            raise ModelLoadError(f"{settings.path}: {key} has {name} {size}")
    return sizes


def require_on(settings: TypedMapping, *keys: str) -> None:
    """Refuse settings that switch off a step which is always done here."""
    for key in keys:
        if not settings.get_bool(key, True):
            raise UnsupportedModelError(f"{settings.path}: {key} false is not supported")


def make_pixel_table(
    settings: TypedMapping, mean: Sequence[float], std: Sequence[float]
) -> npt.NDArray[np.float32]:
    """Normalised values of the 256 bytes, by channel: ``(byte * rescale_factor - mean) / std``."""
    if settings.has("image_mean"):
        mean = settings.get_numbers("image_mean").tolist()
    if settings.has("image_std"):
        std = settings.get_numbers("image_std").tolist()
    if len(mean) != 3 or len(std) != 3 or min(std) <= 0:
        raise ModelLoadError(f"{settings.path}: image_mean and image_std must be of 3 channels")
    scaled = np.arange(256) * settings.get_float("rescale_factor", 1 / 255)
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        values = scaled.astype(np.float32)[None] - np.array(mean, np.float32)[:, None]
        table = np.asarray(values / np.array(std, np.float32)[:, None], np.float32)
    if not np.abs(table).max() <= _GREATEST_VALUE:  # not: NaN is refused, too
        raise ModelLoadError(
            f"{settings.path}: rescale_factor, image_mean {list(mean)} and image_std {list(std)} "
            f"make values of up to {np.abs(table).max():g} of pixels, allowed are "
            f"{_GREATEST_VALUE:g}"
        )
    return table


def cut_patches(
    tile: npt.NDArray[np.uint8], patch_size: int, group_side: int
) -> npt.NDArray[np.uint8]:
    """Patches of a tile, in groups.

    Args:
        tile: ``[height, width, 3]``; rows and columns beyond the last whole group are left out.
        patch_size: pixels.
        group_side: patches on a side of a group.

    Returns:
        ``[num_patches, 3 * patch_size ** 2]``.
    """
    block = patch_size * group_side
    rows, columns = tile.shape[0] // block, tile.shape[1] // block
    cut = tile[: rows * block, : columns * block]
    split = cut.reshape(rows, group_side, patch_size, columns, group_side, patch_size, 3)
    ordered = split.transpose(0, 3, 1, 4, 6, 2, 5)
    return np.ascontiguousarray(ordered).reshape(-1, 3 * patch_size**2)


def check_channels(settings: TypedMapping, hparams: VisionHParams) -> None:
    """Refuse a tower that is not for red, green and blue."""
    if hparams.num_channels != 3:
        raise UnsupportedModelError(
            f"{settings.path}: an image encoder of {hparams.num_channels} channels (num_channels) "
            "is not supported"
        )
