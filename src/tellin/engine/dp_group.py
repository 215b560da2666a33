"""A group of engines, one per process, that agree on whether anyone still has work.

Lockstep data parallelism (experts spread over ranks) needs every rank to run a step while any rank
has work; an idle rank runs a dummy batch. The group offers the one collective that this takes.
"""

from __future__ import annotations

from typing import Protocol

import zmq

from tellin.exceptions import EngineError


class DataParallelGroup(Protocol):
    """A collective over ``size`` ranks. Every rank must call it the same number of times."""

    rank: int
    size: int

    def all_reduce_max(self, value: int) -> int:
        """Largest ``value`` over all ranks; blocks until every rank has called."""

    def close(self) -> None:
        """Leave the group. Idempotent."""


class ZmqDataParallelGroup:
    """`DataParallelGroup` over ZeroMQ: rank 0 gathers the values and answers everybody."""

    def __init__(self, rank: int, size: int, address: str, timeout_s: float = 60.0) -> None:
        """Join the group.

        Args:
            rank: this rank, ``0 <= rank < size``.
            size: number of ranks.
            address: ZeroMQ endpoint (``ipc://…`` or ``tcp://…``) that rank 0 binds.
            timeout_s: a collective that takes longer raises.

        Raises:
            ValueError: ``rank`` is not in ``[0, size)``.
        """
        if not 0 <= rank < size:
            raise ValueError(f"data parallel rank must be in [0, {size}), got {rank}")
        self.rank = rank
        self.size = size
        self._timeout_s = timeout_s
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER if rank == 0 else zmq.DEALER)
        self._early: dict[int, list[tuple[bytes, int]]] = {}
        self._round = 0
        if rank == 0:
            self._socket.bind(address)
        else:
            self._socket.setsockopt(zmq.IDENTITY, rank.to_bytes(2, "little"))
            self._socket.connect(address)

    def all_reduce_max(self, value: int) -> int:
        """Largest ``value`` over all ranks.

        Raises:
            EngineError: another rank did not take part within the time limit.
        """
        self._round += 1
        return self._gather(value) if self.rank == 0 else self._contribute(value)

    def _gather(self, value: int) -> int:
        arrived = self._early.pop(self._round, [])
        while len(arrived) < self.size - 1:
            self._wait(f"{len(arrived) + 1} of {self.size} ranks arrived")
            identity, message = self._socket.recv_multipart()
            round_, other = _unpack(message)
            entry = (identity, other)
            if round_ == self._round:
                arrived.append(entry)
            else:
                self._early.setdefault(round_, []).append(entry)
        result = max([value, *(other for _, other in arrived)])
        for identity, _ in arrived:
            self._socket.send_multipart([identity, _pack(self._round, result)])
        return result

    def _contribute(self, value: int) -> int:
        self._socket.send(_pack(self._round, value))
        self._wait("rank 0 did not answer")
        _, result = _unpack(self._socket.recv())
        return result

    def _wait(self, state: str) -> None:
        if not self._socket.poll(timeout=int(self._timeout_s * 1000)):
            raise EngineError(
                f"data parallel rank {self.rank} waited {self._timeout_s:g} s for the other "
                f"ranks: {state}"
            )

    def close(self) -> None:
        """Leave the group. Idempotent."""
        self._context.destroy(linger=1000)


def _pack(round_: int, value: int) -> bytes:
    return round_.to_bytes(8, "little") + value.to_bytes(8, "little", signed=True)


def _unpack(message: bytes) -> tuple[int, int]:
    return int.from_bytes(message[:8], "little"), int.from_bytes(message[8:], "little", signed=True)
