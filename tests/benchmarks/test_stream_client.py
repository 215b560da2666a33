"""The benchmark's own client reads whole answers and counts what is in them."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from benchmarks.stream_client import BadAnswerError, stream_all

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def text(content: str) -> bytes:
    return b'data: {"choices":[{"text":"%b"}]}\n\n' % content.encode()


@contextmanager
def serving(*pieces: bytes) -> Iterator[str]:
    """Answers each connection with the pieces, one by one."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for _ in range(2):
                connection, _ = listener.accept()
                with connection:
                    assert connection.recv(1 << 16).startswith(b"POST /path HTTP/1.1\r\n")
                    for piece in pieces:
                        connection.sendall(piece)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join(10)


@pytest.mark.parametrize(
    ("events", "num_tokens"),
    [
        ([text("a"), text(""), text("b")], 2),
        ([text("a"), b'data: {"choices":[],"usage":{"completion_tokens":7}}\n\n'], 7),
        ([text("a") + text("b"), b"data: [DONE]\n\n"], 2),
    ],
)
def test_tokens_are_counted(events: list[bytes], num_tokens: int) -> None:
    body = b"".join(map(chunk, events)) + b"0\r\n\r\n"
    with serving(HEAD, body[:9], body[9:]) as url:
        answers = stream_all(url, "/path", [b"{}", b"{}"], timeout_s=10)
    assert answers.num_tokens() == 2 * num_tokens
    assert 0 < answers.cpu_s < 10


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"HTTP/1.1 503 Busy\r\n\r\n", "503"),
        (HEAD + chunk(b'data: {"error":{"message":"broken"}}\n\n') + b"0\r\n\r\n", "broken"),
        (HEAD + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n", "no text"),
    ],
)
def test_what_is_no_answer(answer: bytes, message: str) -> None:
    with serving(answer) as url:
        answers = stream_all(url, "/path", [b"{}", b"{}"], timeout_s=10)
    with pytest.raises(BadAnswerError, match=message):
        answers.num_tokens()
