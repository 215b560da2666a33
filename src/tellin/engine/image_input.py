"""Pictures as users give them: objects, arrays, files' bytes, ``data:`` URLs; made RGB, or refused.

Pillow (the extra ``images``) is imported when the first picture comes. What a stranger sends is
judged by its header before anything is decoded. Nothing is ever fetched from a network.
"""

from __future__ import annotations

import base64
import binascii
import io
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, unquote_to_bytes, urlsplit

from tellin.exceptions import InvalidParameterError, InvalidTypeError, UnsupportedFeatureError

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_PIXELS = 1 << 26
"""Of one picture (67 million): a small file can claim more than memory holds."""

MAX_SIDE = 1 << 16
"""Longest side: what scaling takes of memory grows with it."""

_PIXELS_AT_ONCE = 1 << 20
"""Freed of transparency in one go."""

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Pillow's names of the formats that are decoded; its rarer decoders are left alone."""

_DATA_URL = re.compile(r"data:(?P<kind>[\w.+-]+/[\w.+-]+)?(?P<options>(;[^,;]*)*),", re.ASCII)


def to_rgb(given: Any, where: str = "image") -> Image:
    """A picture of mode RGB.

    Args:
        given: a PIL image, an array (`uint8`, ``[height, width, 3]`` or ``[3, height, width]``), or
            the bytes of an encoded file, of which the first frame counts.
        where: names it in errors.

    Raises:
        InvalidTypeError: it is none of these.
        InvalidParameterError: it is broken, empty, or too large.
        UnsupportedFeatureError: Pillow is not installed.
    """
    pil = _pillow(where)
    if isinstance(given, bytes | bytearray | memoryview):
        return _decode(bytes(given), where)
    if isinstance(given, pil.Image):
        _check_size(given.size, where)
        try:
            given.load()
            return _flatten(given)
        except Exception as error:  # a lazily opened file may be broken in any way
            raise _broken(where, error) from None
    if hasattr(given, "__array_interface__"):
        return _from_array(given, where)
    raise InvalidTypeError(
        f"{where} must be a PIL image, a uint8 array of shape [height, width, 3], or the bytes of "
        f"an image file, got {type(given).__name__}",
        parameter="multi_modal_data",
    )


def read_url(url: Any, where: str, allowed_local_media_path: Path | None = None) -> bytes:
    """Bytes of the file that a URL holds, or names in the one folder that is allowed.

    Raises:
        InvalidTypeError: it is no string.
        InvalidParameterError: a broken ``data:`` URL, or a file that cannot be read.
        UnsupportedFeatureError: another kind of URL.
    """
    if not isinstance(url, str):
        raise InvalidTypeError(
            f"{where} must be a data: URL, got {type(url).__name__}", parameter="image_url"
        )
    scheme = url.partition(":")[0].strip().lower()
    if scheme == "data":
        return _read_data_url(url, where)
    if scheme == "file":
        return _read_file_url(url, where, allowed_local_media_path)
    raise UnsupportedFeatureError(
        f"{where} must be a data: URL (data:image/png;base64,...), got {url[:40]!r}: nothing is "
        "fetched from a network; read the picture and send its bytes"
    )


def _read_data_url(url: str, where: str) -> bytes:
    match = _DATA_URL.match(url)
    if match is None:
        raise InvalidParameterError(
            f"{where} is no valid data: URL; write data:image/png;base64, and the encoded file",
            parameter="image_url",
        )
    body = url[match.end() :]
    if ";base64" not in match["options"].lower():
        return unquote_to_bytes(body)
    body = unquote(body) if "%" in body else body
    try:
        return base64.b64decode("".join(body.split()), validate=True)  # encoders break lines
    except (binascii.Error, ValueError) as error:
        raise InvalidParameterError(
            f"{where} is not valid base64: {error}", parameter="image_url"
        ) from None


def _read_file_url(url: str, where: str, allowed: Path | None) -> bytes:
    if allowed is None:
        raise UnsupportedFeatureError(
            f"{where} names a file, and none may be read: send a data: URL, or start the engine "
            "with allowed_local_media_path"
        )
    parts = urlsplit(url)
    try:
        path = Path(unquote(parts.path)).resolve(strict=True)
        if parts.netloc not in ("", "localhost") or not path.is_relative_to(allowed.resolve()):
            raise InvalidParameterError(
                f"{where} names a file outside of allowed_local_media_path", parameter="image_url"
            )
        return path.read_bytes()
    except (OSError, ValueError) as error:
        if isinstance(error, InvalidParameterError):
            raise
        raise InvalidParameterError(
            f"{where} names a file that cannot be read", parameter="image_url"
        ) from error


def _pillow(where: str) -> Any:
    try:
        import PIL.Image
        import PIL.ImageOps
    except ImportError:
        raise UnsupportedFeatureError(
            f"{where}: pictures need Pillow; install it with: pip install 'tellin[images]'"
        ) from None
    return PIL.Image


def _decode(data: bytes, where: str) -> Image:
    pil = _pillow(where)
    if not data:
        raise InvalidParameterError(f"{where} is empty", parameter="multi_modal_data")
    try:
        pil.init()
        formats = [name for name in FORMATS if name in pil.OPEN]  # some builds lack one
        image: Image = pil.open(io.BytesIO(data), formats=formats)
    except Exception as error:  # decoders raise whatever a broken header makes them
        raise InvalidParameterError(
            f"{where} is no picture that can be read ({', '.join(FORMATS)}): "
            f"{type(error).__name__}",
            parameter="multi_modal_data",
        ) from None
    _check_size(image.size, where)
    try:
        image.load()
        return _flatten(image)
    except Exception as error:  # likewise
        raise _broken(where, error) from None


def _broken(where: str, error: Exception) -> InvalidParameterError:
    return InvalidParameterError(
        f"{where} is broken: {type(error).__name__}: {error}", parameter="multi_modal_data"
    )


def _check_size(size: tuple[int, int], where: str) -> None:
    width, height = size
    if width < 1 or height < 1:
        raise InvalidParameterError(
            f"{where} has no pixels: it is {width} x {height}", parameter="multi_modal_data"
        )
    if width * height > MAX_PIXELS:
        raise InvalidParameterError(
            f"{where} has {width} x {height} pixels, more than the {MAX_PIXELS} that are decoded; "
            "make it smaller",
            parameter="multi_modal_data",
        )
    if max(size) > MAX_SIDE:
        raise InvalidParameterError(
            f"{where} is {width} x {height} pixels, and no side may have more than {MAX_SIDE}; "
            "make it smaller",
            parameter="multi_modal_data",
        )


def _flatten(image: Image) -> Image:
    """Upright, and without transparency: what is transparent becomes white."""
    import PIL.Image
    import PIL.ImageOps

    upright = _to_bytes(PIL.ImageOps.exif_transpose(image))
    if upright.mode == "RGB" and "transparency" not in upright.info:
        return upright
    if "A" not in upright.getbands() and "transparency" not in upright.info:
        return upright.convert("RGB")
    flat = PIL.Image.new("RGB", upright.size)
    rows = max(1, _PIXELS_AT_ONCE // upright.width)
    for top in range(0, upright.height, rows):  # copies of all of it would take a gigabyte
        part = upright.crop((0, top, upright.width, min(top + rows, upright.height)))
        rgba = part.convert("RGBA")
        white = PIL.Image.new("RGBA", rgba.size, (255, 255, 255, 255))
        flat.paste(PIL.Image.alpha_composite(white, rgba).convert("RGB"), (0, top))
    return flat


def _to_bytes(image: Image) -> Image:
    """Of 16 bits the upper 8, as the decoders do with colours; other numbers must be bytes.

    Pillow would cut off what is more than a byte, so that a picture of 16 bits were white.

    Raises:
        ValueError: the numbers have no range that says what is black and what is white.
    """
    if image.mode.startswith("I;16"):
        import numpy as np
        import PIL.Image

        return PIL.Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode == "F":
        raise ValueError("pixels are floats; convert it to mode L or RGB")
    if image.mode == "I":
        extrema: Any = image.getextrema()
        low, high = extrema
        if not 0 <= low <= high <= 255:
            raise ValueError(f"pixels are {low} to {high}, not bytes; convert it to mode L or RGB")
    return image


def _from_array(given: Any, where: str) -> Image:
    import numpy as np
    import PIL.Image

    array = np.asarray(given)
    if array.ndim == 3 and array.shape[2] != 3 and array.shape[0] == 3:
        array = array.transpose(1, 2, 0)
    if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] != 3:
        raise InvalidTypeError(
            f"{where} must be a uint8 array of shape [height, width, 3], got {array.dtype} of "
            f"shape {list(np.shape(given))}",
            parameter="multi_modal_data",
        )
    _check_size((array.shape[1], array.shape[0]), where)
    return PIL.Image.fromarray(np.ascontiguousarray(array))
