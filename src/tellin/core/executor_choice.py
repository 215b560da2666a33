"""The executor class that a configuration names, for callers that must not know executors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tellin.config import EngineConfig

if TYPE_CHECKING:
    from tellin.executor.executor import Executor


def get_executor_class(config: EngineConfig) -> type[Executor]:
    """See `Executor.get_class`."""
    from tellin.executor.executor import Executor

    return Executor.get_class(config)
