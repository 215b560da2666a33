"""Pictures of a raw prompt, as the user gave them, before anything is read or decoded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tellin.exceptions import InvalidParameterError, InvalidTypeError, UnsupportedFeatureError

MODALITIES = ("image",)


@dataclass(frozen=True)
class ImageUrl:
    """A picture given as a URL; read when it is processed."""

    url: str


@dataclass(frozen=True)
class ImageItem:
    """A picture of a prompt: ``data`` as the user gave it, or None with the ``uuid`` of one that
    was given before."""

    data: Any
    uuid: str | None = None


def holds_images(prompt: Any) -> bool:
    """Whether a raw prompt comes with pictures that are still to be processed."""
    return isinstance(prompt, Mapping) and bool(prompt.get("multi_modal_data"))


def read_items(data: Any, uuids: Any) -> list[ImageItem]:
    """Pictures of a raw prompt's ``multi_modal_data`` and ``multi_modal_uuids``.

    Raises:
        InvalidTypeError, InvalidParameterError: they are malformed, or do not fit together.
        UnsupportedFeatureError: another modality than images.
    """
    images = _of_modality("multi_modal_data", data)
    names = _of_modality("multi_modal_uuids", uuids)
    if names is None:
        return [ImageItem(image) for image in images or ()]
    if images is None:
        images = [None] * len(names)
    if len(names) != len(images):
        raise InvalidParameterError(
            f"multi_modal_uuids has {len(names)} names for {len(images)} images",
            parameter="multi_modal_uuids",
            value=len(names),
        )
    for name in names:
        if name is not None and (not isinstance(name, str) or not name):
            raise InvalidTypeError(
                f"multi_modal_uuids must be non-empty strings or None, got {name!r:.80}",
                parameter="multi_modal_uuids",
            )
    return [ImageItem(image, name) for image, name in zip(images, names, strict=True)]


def _of_modality(parameter: str, given: Any) -> list[Any] | None:
    """The images in a dict of modalities, as a list; None if there is none."""
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise InvalidTypeError(
            f"{parameter} must be a dict like {{'image': ...}}, got {type(given).__name__}",
            parameter=parameter,
        )
    for modality, value in given.items():
        if modality not in MODALITIES and value is not None:
            raise UnsupportedFeatureError(
                f"{parameter} has the modality {modality!r}; this engine takes only 'image'"
            )
    value = given.get("image")
    if value is None:
        return None
    return list(value) if isinstance(value, list | tuple) else [value]
