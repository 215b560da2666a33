"""Logits processors that users plug in: the base class, the batch diff they are told, the loader.

Engine-wide processors see the logits of all requests of a step as one matrix; row i belongs to the
request that the diffs say is at index i. A processor of a single request is just a callable in
``SamplingParams.logits_processors``. Nothing here imports NumPy or knows the sampler.
"""

from __future__ import annotations

import enum
import functools
import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tellin.exceptions import InvalidParameterError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from tellin.config import EngineConfig
    from tellin.sampling_params import SamplingParams

ENTRY_POINT_GROUP = "tellin.logits_processors"


class MoveDirectionality(enum.Enum):
    """``UNIDIRECTIONAL``: the source index is empty afterwards. ``SWAP``: both hold a request."""

    UNIDIRECTIONAL = 0
    SWAP = 1


AddedRequest = tuple[int, "SamplingParams", "list[int] | None", "list[int]"]
"""(index, parameters, prompt ids, output ids). The last is live: it grows as ids are sampled."""
MovedRequest = tuple[int, int, MoveDirectionality]


@dataclass
class BatchUpdate:
    """How the batch differs from the previous step's; apply removed, added, moved in this order.

    An index that was freed and filled again in the same step is in ``added`` only.
    """

    batch_size: int
    removed: list[int] = field(default_factory=list)
    added: list[AddedRequest] = field(default_factory=list)
    moved: list[MovedRequest] = field(default_factory=list)


class LogitsProcessor(ABC):
    """Base of engine-wide processors. One instance per engine, made with its configuration.

    An exception ends the requests of the step it was raised in, and no others.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raise `ValueError` if a request's parameters do not suit this processor."""
        return

    @abstractmethod
    def apply(self, logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Change logits ``[batch_size, num_ids]`` in place, or return new ones of that shape."""

    @abstractmethod
    def is_argmax_invariant(self) -> bool:
        """True if `apply` never changes which id is the best of a row; asked once.

        Such processors run after the temperature, and not for greedy requests' choice.
        """

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Called before each forward pass; None if the batch is as it was."""
        return


def load_logits_processors(specs: Iterable[Any]) -> list[type[LogitsProcessor]]:
    """Classes of the installed plug-ins (entry points), then of ``specs``.

    Args:
        specs: classes, or names such as ``"package.module:Class"``.

    Raises:
        InvalidParameterError: a spec is no `LogitsProcessor` subclass, or cannot be imported.
    """
    import importlib.metadata  # not at the top: it is slow to import

    plugins = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
    return [_resolve(spec) for spec in [*(plugin.value for plugin in plugins), *specs]]


def check_by_processors(params: SamplingParams, specs: tuple[Any, ...]) -> None:
    """Ask every engine-wide processor whether it accepts a request's parameters.

    Raises:
        InvalidParameterError: one does not.
    """
    for cls in _cached_classes(specs):
        try:
            cls.validate_params(params)
        except ValueError as error:
            raise InvalidParameterError(
                f"{cls.__name__} refuses these parameters: {error}",
                parameter="sampling_params",
                value=params,
            ) from error


@functools.lru_cache(maxsize=16)
def _cached_classes(specs: tuple[Any, ...]) -> tuple[type[LogitsProcessor], ...]:
    return tuple(load_logits_processors(specs))


def _resolve(spec: Any) -> type[LogitsProcessor]:
    candidate = spec
    if isinstance(spec, str):
        module_name, separator, class_name = spec.partition(":")
        if not separator:
            raise InvalidParameterError(
                f"logits processor {spec!r} must be a class or 'module:Class'",
                parameter="logits_processors",
                value=spec,
            )
        try:
            candidate = importlib.import_module(module_name)
            for part in class_name.split("."):
                candidate = getattr(candidate, part)
        except Exception as error:
            raise InvalidParameterError(
                f"logits processor {spec!r} cannot be imported: {error}",
                parameter="logits_processors",
                value=spec,
            ) from error
    if not (isinstance(candidate, type) and issubclass(candidate, LogitsProcessor)):
        raise InvalidParameterError(
            f"logits processor {spec!r} is not a subclass of "
            "tellin.logits_processor.LogitsProcessor",
            parameter="logits_processors",
            value=spec,
        )
    return candidate
