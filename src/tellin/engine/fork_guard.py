"""What becomes of an engine's client in a copy of its process that ``os.fork`` makes.

The copy has none of the threads that bring results, and shares sockets with the original: whoever
waited there would wait for ever. So the client is closed in the copy, and left alone in the
original.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol

from tellin.exceptions import EngineClosedError


class Owner(Protocol):
    """A client's inner state."""

    dead: Exception | None
    """What every later call raises."""


_owners: weakref.WeakSet[Owner] = weakref.WeakSet()


def close_in_forks(owner: Owner) -> None:
    """From now on ``owner.dead`` is set in forks of this process."""
    _owners.add(owner)


def _close_all(pid: int) -> None:
    for owner in list(_owners):
        if owner.dead is None:
            owner.dead = EngineClosedError(
                f"the engine belongs to process {pid}, of which this one is a fork; make another "
                "engine here, or fork first"
            )


if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=lambda: _close_all(os.getppid()))
