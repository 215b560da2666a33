"""A client of many streams that costs little of the machine which it shares with the server.

All connections belong to one thread; pieces are kept as they come and read when all streams have
ended. Knows HTTP/1.1 and server-sent events, no more of either than servers of chats use.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import msgspec

PIECE_BYTES = 1 << 12
PAUSE_S = 1e-3
"""Between two looks at the connections. A client elsewhere takes none of this machine's time; one
that is woken for each of many streams' tokens would measure itself and the scheduler."""


@dataclass
class Answers:
    """What came, as it came."""

    pieces: list[list[bytes]]
    """Of each stream, its head first."""
    cpu_s: float = 0.0
    """CPU time of the client."""

    def num_tokens(self) -> int:
        """Tokens that the servers say they generated; else events with text."""
        return sum(_num_tokens(b"".join(pieces)) for pieces in self.pieces)


class BadAnswerError(Exception):
    """A stream is no stream, or has an error in it."""


@dataclass
class _Stream:
    connection: socket.socket
    pieces: list[bytes] = field(default_factory=list)

    def read(self) -> bool:
        """Take what has come; whether the answer has ended."""
        piece = self.connection.recv(PIECE_BYTES)
        self.pieces.append(piece)
        return not piece


def stream_all(
    base_url: str,
    path: str,
    bodies: Sequence[bytes],
    timeout_s: float,
    pause_s: float = PAUSE_S,
) -> Answers:
    """Ask everything at once and read until all answers have ended.

    Args:
        pause_s: seconds between two looks at the connections; 0 = woken by each piece.

    Raises:
        OSError: a connection could not be made, or broke.
        TimeoutError: ``timeout_s`` seconds were not enough.
    """
    cpu_before = time.thread_time()
    deadline = time.monotonic() + timeout_s
    parts = urlsplit(base_url)
    address = (parts.hostname or "127.0.0.1", parts.port or 80)
    streams: list[_Stream] = []
    with selectors.DefaultSelector() as selector:
        try:
            for body in bodies:
                connection = socket.create_connection(address, timeout_s)
                streams.append(_Stream(connection))
                selector.register(connection, selectors.EVENT_READ, streams[-1])
                connection.sendall(_message(parts.netloc, path, body))
                connection.setblocking(False)  # with a time limit, reading takes two system calls
            num_open = len(streams)
            while num_open:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{num_open} streams did not end within {timeout_s:g} s")
                for key, _ in selector.select(1.0):
                    if key.data.read():
                        selector.unregister(key.fileobj)
                        num_open -= 1
                if pause_s:
                    time.sleep(pause_s)
        finally:
            for stream in streams:
                stream.connection.close()
    return Answers([stream.pieces for stream in streams], time.thread_time() - cpu_before)


def _message(host: str, path: str, body: bytes) -> bytes:
    head = [
        f"POST {path} HTTP/1.1",
        f"Host: {host}",
        "Connection: close",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
    ]
    return "\r\n".join([*head, "", ""]).encode() + body


def _num_tokens(answer: bytes) -> int:
    head, _, content = answer.partition(b"\r\n\r\n")
    status = head.split(b" ", 2)[1:2]
    if status != [b"200"]:
        raise BadAnswerError(f"the answer is {answer[:300]!r}")
    if b"transfer-encoding: chunked" in head.lower():
        content = _unchunked(content)
    num_events = num_tokens = 0
    for line in content.split(b"\n"):
        if line.startswith(b"data: {"):
            event = msgspec.json.decode(line[6:])
            if "error" in event:
                raise BadAnswerError(f"error in the stream: {event['error']}")
            num_tokens = (event.get("usage") or {}).get("completion_tokens", num_tokens)
            num_events += any(
                choice.get("text") or (choice.get("delta") or {}).get("content")
                for choice in event["choices"]
            )
    if not num_events:
        raise BadAnswerError(f"the answer has no text: {content[:300]!r}")
    return num_tokens or num_events


def _unchunked(content: bytes) -> bytes:
    parts = []
    position = 0
    while size := int(content[position : (line := content.index(b"\r\n", position))], 16):
        parts.append(content[line + 2 : line + 2 + size])
        position = line + 2 + size + 2
    return b"".join(parts)
