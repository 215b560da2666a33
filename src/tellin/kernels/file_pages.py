"""Pages of mapped model files: dropped once what lies on them was packed.

So a model is in memory once while it is loaded, not twice. Only what can be read again is dropped.
"""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

_UNIT_BYTES = 2 << 20
"""Reading a page may bring its neighbours back, which were released with the bytes before: up to
this much, the largest page that a file is mapped in. So what is released begins at a multiple."""


def release_pages(view: npt.NDArray[np.uint8]) -> None:
    """Drop the pages of packed bytes from this process if they are those of a file.

    Only a read-only `mmap` qualifies: discarding its pages loses nothing, they would be read again.
    """
    base: Any = view
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, memoryview):
        base = base.obj
    if not isinstance(base, mmap.mmap) or not memoryview(base).readonly:
        return
    first = np.frombuffer(base, dtype=np.uint8, count=1).ctypes.data
    start = (view.ctypes.data - first) // _UNIT_BYTES * _UNIT_BYTES
    stop = view.ctypes.data - first + view.nbytes
    if hasattr(mmap, "MADV_DONTNEED"):
        base.madvise(mmap.MADV_DONTNEED, start, stop - start)
