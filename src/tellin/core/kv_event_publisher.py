"""Sends KV cache events to whoever subscribes: a PUB socket, and a ROUTER socket for replays.

Each batch is three frames: topic, sequence number (8 bytes, big-endian), msgpack payload. A
subscriber that missed some asks the replay socket with the first number it wants and gets
``(number, payload)`` pairs up to the newest, then ``(-1, empty)``. One daemon thread owns both
sockets; the engine only puts batches into a queue and never waits for a subscriber.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from typing import Any

import msgspec

from tellin.core.kv_events import KVEventBatch
from tellin.exceptions import InvalidParameterError

logger = logging.getLogger("tellin.core")

REPLAY_BATCHES = 10_000
"""Newest batches kept for replays."""

MAX_UNSENT_BATCHES = 100_000
"""High-water mark of the sockets: what a slow subscriber may leave unread."""

POLL_S = 0.05
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)


class KVEventPublisher:
    """Publishes on ``endpoint`` (bound if it has ``*``, ``::``, ``ipc:`` or ``inproc:``)."""

    def __init__(self, endpoint: str, replay_endpoint: str | None = None, topic: str = "") -> None:
        """Open the sockets.

        Raises:
            ImportError: pyzmq is not installed (``pip install 'tellin[mp]'``).
            InvalidParameterError: an endpoint is not usable.
        """
        import zmq

        self._zmq = zmq
        self._topic = topic.encode()
        self._queue: queue.SimpleQueue[KVEventBatch | None] = queue.SimpleQueue()
        self._sent: deque[tuple[bytes, bytes]] = deque(maxlen=REPLAY_BATCHES)
        self._context = zmq.Context()
        self._replay: Any = None
        try:
            self._publisher = self._open(zmq.PUB, "kv_events_endpoint", endpoint)
            if replay_endpoint is not None:
                name = "kv_events_replay_endpoint"
                self._replay = self._open(zmq.ROUTER, name, replay_endpoint)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._thread = threading.Thread(target=self._run, name="tellin-kv-events", daemon=True)
        self._thread.start()

    def _open(self, kind: int, name: str, endpoint: str) -> Any:
        socket = self._context.socket(kind)
        socket.set_hwm(MAX_UNSENT_BATCHES)
        socket.linger = 0
        binds = "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc:", "inproc:"))
        try:
            (socket.bind if binds else socket.connect)(endpoint)
        except self._zmq.ZMQError as error:
            raise InvalidParameterError(
                f"{name}={endpoint!r} cannot be used: {error.strerror}; write, for example, "
                "tcp://*:5557",
                parameter=name,
                value=endpoint,
            ) from None
        return socket

    def publish(self, batch: KVEventBatch) -> None:
        """Send a batch, unless it is empty. Returns at once."""
        if batch.events:
            self._queue.put(batch)

    def shutdown(self) -> None:
        """Send what is queued and close the sockets. Idempotent."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join(timeout=5.0)
        self._context.destroy(linger=0)

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        encoder = msgspec.msgpack.Encoder()
        number = 0
        while True:
            try:
                batch = self._queue.get(timeout=POLL_S)
            except queue.Empty:
                self._serve_replays()
                continue
            if batch is None:
                return
            frames = (number.to_bytes(8, "big"), encoder.encode(batch))
            number += 1
            self._sent.append(frames)
            self._publisher.send_multipart((self._topic, *frames))
            self._serve_replays()

    def _serve_replays(self) -> None:
        if self._replay is None:
            return
        while self._replay.poll(0):
            identity, *request = self._replay.recv_multipart()
            if not request or len(request[-1]) != 8:
                logger.warning("KV event replay: a request must be one number of 8 bytes")
                continue
            empty = [b""] if request[0] == b"" else []  # REQ sockets send a delimiter
            first = request[-1]
            for number, payload in self._sent:
                if number >= first:
                    self._replay.send_multipart((identity, *empty, number, payload))
            self._replay.send_multipart((identity, *empty, END_OF_REPLAY, b""))
