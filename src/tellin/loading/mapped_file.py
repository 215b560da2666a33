"""A file mapped read-only into memory, and views of it.

Views are NumPy arrays whose base is the map: the map lives as long as the last view, whoever holds
it. `close` therefore only lets go of this object's own reference; it can never pull memory from
under a view. Nothing here knows what the bytes mean.
"""

from __future__ import annotations

import mmap
import os
import stat
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tellin.exceptions import ModelLoadError, ModelNotFoundError


class MappedFile:
    """A regular file, mapped read-only. Not writable through any view.

    Raises:
        ModelNotFoundError: there is no such file.
        ModelLoadError: it cannot be read, is empty, or is not a regular file (a FIFO would block).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            # O_NONBLOCK: opening a FIFO without a writer must not hang before its type is checked.
            descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        except FileNotFoundError:
            raise ModelNotFoundError(f"{path}: no such file") from None
        except OSError as error:
            raise ModelLoadError(f"{path}: cannot be opened: {error.strerror or error}") from None
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise ModelLoadError(f"{path}: is not a regular file")
            if status.st_size == 0:
                raise ModelLoadError(f"{path}: is empty")
            self.num_bytes: int = status.st_size
            self._map: mmap.mmap | None = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ModelLoadError(f"{path}: cannot be mapped: {error.strerror or error}") from None
        finally:
            os.close(descriptor)
        self._bytes: npt.NDArray[np.uint8] | None = np.frombuffer(self._map, dtype=np.uint8)

    @property
    def map(self) -> mmap.mmap:
        """The map itself, for parsers."""
        if self._map is None:
            raise ValueError(f"{self.path}: the file was closed")
        return self._map

    def view(self, start: int, num_bytes: int) -> npt.NDArray[np.uint8]:
        """Read-only uint8 view of ``[start, start + num_bytes)``; the caller checked the bounds."""
        if self._bytes is None:
            raise ValueError(f"{self.path}: the file was closed")
        return self._bytes[start : start + num_bytes]

    def release_pages(self, view: npt.NDArray[np.uint8] | None = None) -> bool:
        """Tell the system that the pages of ``view`` (None: of the whole file) are not needed now.

        The content stays readable; it is fetched from the page cache or disk again. Returns whether
        ``view`` belongs to this file. Only whole pages inside the view are released.
        """
        if self._map is None or self._bytes is None:
            return False
        start, end = 0, self.num_bytes
        if view is not None:
            start = view.ctypes.data - self._bytes.ctypes.data
            end = start + view.nbytes
            if start < 0 or end > self.num_bytes:
                return False
            start = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
            if end != self.num_bytes:
                end = end // mmap.PAGESIZE * mmap.PAGESIZE
        if start < end and hasattr(self._map, "madvise"):
            self._map.madvise(mmap.MADV_DONTNEED, start, end - start)
        return True

    def close(self) -> None:
        """Let go of the map; it is unmapped when the last view of it is gone. Idempotent."""
        self._bytes = None
        self._map = None
