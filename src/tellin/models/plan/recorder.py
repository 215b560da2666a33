"""`Recorder`: what recording a plan needs whatever the operations are.

Looks weights up by name, checks shapes, numbers buffers and ends the plan. The operations
themselves are methods of its subclasses. It computes nothing and reads no tensor data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import numpy as np

from tellin.exceptions import ModelLoadError, UnsupportedModelError
from tellin.loading.tensors import ModelHParams, QuantType, TensorRef
from tellin.models.plan import ir
from tellin.models.plan.ir import Buffer, Rows

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "quick_gelu", "relu")
GATED_ACTIVATIONS = (*ACTIVATIONS, "swiglu_oai", "sigmoid", "identity")


def ones(name: str, width: int) -> TensorRef:
    """The weight of a norm that has none."""
    values = np.ones(width, dtype=np.float32).view(np.uint8)
    return TensorRef(f"{name}.ones", (width,), QuantType.F32, values)


class WeightSource(Protocol):
    """What recording needs of a model: `tellin.loading.ModelSource` has it."""

    @property
    def path(self) -> Path: ...

    @property
    def hparams(self) -> ModelHParams: ...

    @property
    def tensors(self) -> Mapping[str, TensorRef]: ...


class Recorder:
    """Weights, buffers and the end of a plan that is being recorded from ``source``.

    ``all_hidden``: a generator's hidden states are wanted of every token.
    """

    def __init__(
        self,
        source: WeightSource,
        max_model_len: int | None = None,
        pooling: bool = False,
        all_hidden: bool = False,
    ) -> None:
        self.source = source
        self.pooling = pooling
        self.all_hidden = all_hidden
        self.hparams = source.hparams
        self.max_model_len = max_model_len
        self._ops: list[ir.Op] = []
        self._buffers: list[Buffer] = []
        self._kv_layers: list[ir.KVCacheLayer] = []
        self._state_layers: list[ir.StateLayer] = []
        self._used: set[str] = set()

    # ---- weights -----------------------------------------------------------------------------

    def has(self, name: str) -> bool:
        """Whether the model has the tensor ``name`` (full name, with ``.weight`` or ``.bias``)."""
        return name in self.source.tensors

    def weight(self, name: str, rows: tuple[int, int] | None = None) -> TensorRef:
        """The tensor ``name``, or rows ``[start, stop)`` of it as a tensor of its own (no copy)."""
        tensor = self.source.tensors.get(name)
        if tensor is None:
            raise self._error(f"tensor {name!r} is missing")
        self._used.add(name)
        if rows is None:
            return tensor
        start, stop = rows
        if not 0 <= start < stop <= tensor.shape[0]:
            raise self._error(
                f"tensor {name!r} has {tensor.shape[0]} rows; rows {start} to {stop} are needed"
            )
        return replace(tensor.row_range(start, stop), name=f"{name}[{start}:{stop}]")

    def leave_out(self, *names: str) -> None:
        """The model may have these tensors, and does not use them."""
        self._used.update(names)

    # ---- the end -----------------------------------------------------------------------------

    def finish(
        self, output: Buffer, hidden: Buffer | None = None, ignore: tuple[str, ...] = ()
    ) -> ir.Plan:
        """The recorded plan.

        Args:
            output: logits of a generator, hidden states of an encoder.
            hidden: final hidden states for pooling.
            ignore: beginnings of tensor names that the architecture leaves out on purpose.

        Raises:
            UnsupportedModelError: the model has further tensors, so it computes something else.
        """
        unused = [
            name
            for name in self.source.tensors
            if name not in self._used and not name.startswith(ignore)
        ]
        hp = self.hparams
        if unused:
            more = f" and {len(unused) - 3} more" if len(unused) > 3 else ""
            raise UnsupportedModelError(
                f"{self.source.path}: architecture {hp.architecture!r} as built here does not use "
                f"the tensors {', '.join(sorted(unused)[:3])}{more}; "
                "this is a variant that tellin does not support"
            )
        return ir.Plan(
            architecture=hp.architecture,
            ops=tuple(self._ops),
            buffers=tuple(self._buffers),
            kv_layers=tuple(self._kv_layers),
            output=output,
            vocab_size=hp.vocab_size,
            hidden_size=hp.hidden_size,
            hidden=hidden,
            state_layers=tuple(self._state_layers),
        )

    # ---- checks ------------------------------------------------------------------------------

    def _buffer(self, width: int, rows: Rows, name: str) -> Buffer:
        buffer = Buffer(len(self._buffers), width, rows, name)
        self._buffers.append(buffer)
        return buffer

    def _matrix(self, name: str, width: int) -> TensorRef:
        tensor = self.weight(name)
        if len(tensor.shape) != 2 or tensor.shape[1] != width:
            raise self._shape_error(tensor, f"(n, {width})")
        return tensor

    def _vector(self, name: str, width: int) -> TensorRef:
        tensor = self.weight(name)
        if tensor.shape != (width,):
            raise self._shape_error(tensor, f"({width},)")
        return tensor

    def _optional_vector(self, name: str, width: int) -> TensorRef | None:
        return self._vector(name, width) if self.has(name) else None

    def _activation(self, known: tuple[str, ...] = ACTIVATIONS, act: str | None = None) -> str:
        """``act``, or the model's activation; must be a known one."""
        act = act or self.hparams.hidden_act
        if act not in known:
            raise UnsupportedModelError(
                f"{self.source.path}: activation {act!r} is not supported; "
                f"supported are {', '.join(known)}"
            )
        return act

    def _same_shape(self, x: Buffer, y: Buffer) -> None:
        if (x.width, x.rows) != (y.width, y.rows):
            raise self._error(
                f"{x.name} [{x.rows.value}, {x.width}] and {y.name} [{y.rows.value}, {y.width}] "
                "must have the same shape"
            )

    def _needs_token_rows(self, x: Buffer, what: str) -> None:
        if x.rows is not Rows.TOKENS:
            raise self._error(f"{what} needs one row per token; {x.name} has one per logit row")

    def _shape_error(self, tensor: TensorRef, expected: str) -> ModelLoadError:
        return self._error(f"tensor {tensor.name!r} has shape {tensor.shape}; expected {expected}")

    def _error(self, message: str) -> ModelLoadError:
        return ModelLoadError(
            f"{self.source.path}: {message} (architecture {self.hparams.architecture!r})"
        )
