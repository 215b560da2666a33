"""What ends with an engine that was dropped without `shutdown`: run by weak-reference finalizers.

Nothing here may refer to the engine, or it would never be collected.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from tellin.engine.core_client import CoreClient
from tellin.engine.output_processor import OutputProcessor

if TYPE_CHECKING:
    from tellin.engine.dp_group import DataParallelGroup


def close_engine(
    client: CoreClient, output_processor: OutputProcessor, dp_group: DataParallelGroup | None = None
) -> None:
    """End the core, export what is left of traces, and leave the data-parallel group."""
    client.shutdown()
    output_processor.close()
    if dp_group is not None:
        dp_group.close()


@contextlib.contextmanager
def close_on_error(*closers: Callable[[], None]) -> Iterator[None]:
    """Close what was started before if the core cannot start."""
    try:
        yield
    except BaseException:
        for close in closers:
            close()
        raise


def get_executor(client: CoreClient) -> Any | None:
    """The core's executor, if the core is in this process and the client shows it."""
    return getattr(getattr(client, "engine_core", None), "executor", None)


def finalize_driver_model(engine: object, executor: Any) -> weakref.finalize[..., object] | None:
    """Have the driver model's caches cleaned up when ``engine`` is collected, if there is one."""
    model = get_driver_model(executor)
    return None if model is None else weakref.finalize(engine, cleanup_instance_caches, model)


def get_driver_model(executor: Any) -> Any | None:
    """The model of the driving worker, if the executor is here and shows it."""
    found = executor
    for name in ("driver_worker", "model_runner", "model"):
        found = getattr(found, name, None)
    return found


def cleanup_instance_caches(model: Any) -> None:
    """Let a model drop artefacts that would keep its memory alive, if it has any."""
    release = getattr(model, "release_cached_artefacts", None)
    if release is not None:
        release()
