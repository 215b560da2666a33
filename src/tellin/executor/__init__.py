"""Executors: how the core reaches its workers."""

from tellin.executor.executor import Executor

__all__ = ["Executor"]
