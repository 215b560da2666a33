"""Fetching a model from the Hugging Face Hub, with the optional package ``huggingface_hub``.

Takes what tellin can open and no more: a safetensors checkpoint with its JSON files, or one GGUF
model of a repository that may hold many. The revision is fixed first, so that all files belong
together.
"""

from __future__ import annotations

import importlib
import re
import shutil
from pathlib import Path
from typing import Any

from tellin.exceptions import (
    LoadError,
    ModelDownloadError,
    ModelNotFoundError,
    UnsupportedModelError,
)
from tellin.loading.pip_download import ProgressCallback
from tellin.loading.safetensors import PICKLE_HINT
from tellin.loading.store_files import store_errors

_FOLDER_FILES = re.compile(
    r"[^/]+\.(json|jinja|model|txt)\Z|model[^/]*\.safetensors\Z|1_Pooling/config\.json\Z"
)
_PICKLED = re.compile(r"pytorch_model[^/]*\.bin")
_PART = re.compile(r"-\d{5}-of-\d{5}\Z")
_DEFAULT_TAGS = ("Q4_K_M", "Q4_1", "Q4_0", "Q8_0")
"""Which GGUF of a repository is taken if none is named; the first that exists."""


def pull_repository(name: str, folder: Path, progress: ProgressCallback | None = None) -> None:
    """Fetch ``org/model`` or ``org/model:TAG`` into ``folder``.

    Raises:
        ModelNotFoundError: no such repository, or none of its files fits the tag.
        ModelDownloadError: the extra is missing, or the Hub cannot be reached.
    """
    repository, _, tag = name.partition(":")
    hub = _import_hub(name)
    try:
        info = hub.HfApi().model_info(repository, files_metadata=True)
        sizes = {file.rfilename: file.size or 0 for file in info.siblings}
        chosen = choose_files(name, list(sizes), tag)
        total, done = sum(sizes[file] for file in chosen), 0
        for file in chosen:
            with store_errors(folder, name):
                hub.hf_hub_download(repository, file, revision=info.sha, local_dir=folder)
            done += sizes[file]
            if progress is not None:
                progress(done, total)
        shutil.rmtree(folder / ".cache", ignore_errors=True)
    except LoadError:
        raise
    except (hub.errors.RepositoryNotFoundError, hub.errors.GatedRepoError) as error:
        raise ModelNotFoundError(f"cannot pull {name}: {_first_line(error)}") from None
    except Exception as error:
        # The library lets its HTTP client's exceptions through, and that client has changed before.
        raise ModelDownloadError(f"cannot pull {name}: {_first_line(error)}") from error


def choose_files(name: str, files: list[str], tag: str) -> list[str]:
    """The files of a repository that make up the model.

    Raises:
        ModelNotFoundError: no GGUF file has the tag, or several could be meant.
        UnsupportedModelError: the repository holds no format that can be opened.
    """
    has_safetensors = any(re.fullmatch(r"model[^/]*\.safetensors", file) for file in files)
    if "config.json" in files and has_safetensors and not tag:
        return sorted(file for file in files if _FOLDER_FILES.match(file))
    models: dict[str, list[str]] = {}
    for file in sorted(files):
        if file.endswith(".gguf") and "/" not in file:
            models.setdefault(_PART.sub("", file.removesuffix(".gguf")), []).append(file)
    if not models:
        raise UnsupportedModelError(
            f"{name}: has neither a GGUF file nor config.json with model.safetensors"
            f"{PICKLE_HINT if any(map(_PICKLED.fullmatch, files)) else ''}"
        )
    if len(models) == 1 and not tag:
        return next(iter(models.values()))
    for wanted in (tag,) if tag else _DEFAULT_TAGS:
        fitting = [stem for stem in models if stem.lower().endswith(wanted.lower())]
        if len(fitting) == 1:
            return models[fitting[0]]
    raise ModelNotFoundError(
        f"{name}: which file? add the end of its name, as in {name.partition(':')[0]}:Q4_K_M; "
        f"there are {', '.join(models)}"
    )


def _import_hub(name: str) -> Any:
    try:
        hub = importlib.import_module("huggingface_hub")
        importlib.import_module("huggingface_hub.errors")
        return hub
    except ImportError:
        raise ModelDownloadError(
            f"cannot pull {name}: the Hugging Face Hub needs the 'hf' extra; "
            "install it with: pip install 'tellin[hf]'"
        ) from None


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
