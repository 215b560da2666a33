"""What a plan's operations are made of: buffers, what a model keeps of a request, and their base.

Part of `tellin.models.plan.ir`, which explains the plan and is where other modules take them from.
An operation is a frozen struct: the types of its fields say which buffers it reads and writes
and which weights it uses.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator

import msgspec

from tellin.loading.tensors import TensorRef


class Rows(enum.Enum):
    """What a buffer has one row for."""

    TOKENS = "tokens"
    LOGITS = "logits"


class Buffer(msgspec.Struct, frozen=True):
    """A numbered activation buffer, float32 ``[num_rows, width]``."""

    id: int
    width: int
    rows: Rows
    name: str

    def __hash__(self) -> int:
        return self.id  # the passes look buffers up all the time


class RotaryTable(msgspec.Struct, frozen=True):
    """Rotary embedding of one kind of layer.

    ``inv_freq`` holds rope_dim / 2 angular frequencies (radians per position), scaling applied;
    ``attention_factor`` multiplies sine and cosine (1 for most models, yarn and longrope differ).
    ``axes``: by frequency, which of a row's three `StepBatch.rope_positions` it turns by (time,
    height, width); empty: all turn by its position.
    """

    inv_freq: tuple[float, ...]
    attention_factor: float = 1.0
    axes: tuple[int, ...] = ()


class KVCacheLayer(msgspec.Struct, frozen=True):
    """Shape of one attention layer's cache."""

    num_kv_heads: int
    head_dim: int
    sliding_window: int | None = None
    value_dim: int | None = None
    """Of values; None: as of keys."""

    @property
    def values_per_token(self) -> int:
        """Numbers that the layer holds of a token."""
        return self.num_kv_heads * (self.head_dim + (self.value_dim or self.head_dim))


class StateLayer(msgspec.Struct, frozen=True):
    """What one recurrence keeps of a request: ``num_values`` float32, however long it is."""

    num_values: int


class Op(msgspec.Struct, frozen=True):
    """Base of all operations.

    Fields of type `Buffer` are operands: ``out`` is written, every other one is read; an operation
    without ``out`` changes ``x`` in place (it reads and writes it).
    """

    @property
    def reads(self) -> tuple[Buffer, ...]:
        """Buffers whose previous contents the operation uses."""
        return tuple(value for name, value in self.operands() if name != "out")

    @property
    def writes(self) -> tuple[Buffer, ...]:
        """Buffers the operation fills."""
        outs = tuple(value for name, value in self.operands() if name == "out")
        return outs or tuple(value for name, value in self.operands() if name == "x")

    @property
    def weights(self) -> tuple[TensorRef, ...]:
        """Weights the operation uses, in field order."""
        values = (getattr(self, name) for name in self.__struct_fields__)
        return tuple(value for value in values if isinstance(value, TensorRef))

    def operands(self) -> Iterator[tuple[str, Buffer]]:
        """Fields that are buffers: name and value."""
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, Buffer):
                yield name, value
