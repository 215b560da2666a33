"""Connections that say nothing, or half of something, do not stay (P24: hard to hurt)."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvicorn

from tellin.entrypoints.openai.connection import http_protocol
from tellin.entrypoints.openai.shortcut import EXTENSION
from tests.openai.conftest import Server

LIMIT_S = 60.0
REQUEST = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
Exchange = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def application(scope: Any, receive: Any, send: Any) -> None:
    """Answers ``ok``; a POST takes longer than the deadline of heads."""
    if scope["method"] == "POST":
        await asyncio.sleep(1.5)
    headers = [(b"content-length", b"2")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"ok"})


def exchange(header_timeout_s: float, talk: Exchange, app: Any = application) -> None:
    async def main() -> None:
        config = uvicorn.Config(
            app,
            http=http_protocol(header_timeout_s),
            log_config=None,
            lifespan="off",
            ws="none",
        )
        server = uvicorn.Server(config)
        with socket.create_server(("127.0.0.1", 0)) as sock:
            task = asyncio.create_task(server._serve([sock]))
            reader, writer = await asyncio.open_connection(*sock.getsockname())
            await asyncio.wait_for(talk(reader, writer), LIMIT_S)
            writer.close()
            server.should_exit = True
            await asyncio.wait_for(task, LIMIT_S)

    asyncio.run(main())


async def answer(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    return head.split(b"\r\n")[0] + await reader.readexactly(2)


@pytest.mark.parametrize("sent", [b"", b"GET / HTT", REQUEST[:-2]])
def test_half_a_head_is_not_waited_for(sent: bytes) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(sent)
        assert await reader.read() == b""

    exchange(1.0, talk)


def test_nor_is_half_of_a_second_head() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(REQUEST)
        assert await answer(reader) == b"HTTP/1.1 200 OKok"
        writer.write(b"GET")
        assert await reader.read() == b""

    exchange(1.0, talk)


def test_whole_requests_may_take_their_time_and_idle_connections_stay() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(2):
            writer.write(REQUEST.replace(b"GET", b"POST"))
            assert await answer(reader) == b"HTTP/1.1 200 OKok"
            await asyncio.sleep(1.5)  # twice the deadline

    exchange(1.0, talk)


def test_chunks_are_written_until_the_client_is_too_slow() -> None:
    """What is written the short way and what is sent make one body, in order."""
    sent = bytearray()

    async def stream(scope: Any, receive: Any, send: Any) -> None:
        writer = scope["extensions"][EXTENSION]
        assert not writer.can_write()  # the answer has not begun
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for number in range(1 << 20):
            if not writer.can_write():
                break
            piece = b"%d " % number * 1000
            writer.write(piece)
            sent.extend(piece)
        await send({"type": "http.response.body", "body": b"end"})
        assert not writer.can_write()  # it has ended

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(REQUEST)
        await reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(0.2)
        body = bytearray()
        while size := int(await reader.readline(), 16):
            body += (await reader.readexactly(size + 2))[:-2]
        assert len(sent) > 1 << 16
        assert body == sent + b"end"

    exchange(60.0, talk, stream)


def test_no_chunks_are_written_to_a_client_that_went_away(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Also before the loop has had a turn to learn it; asyncio warns of each such write."""
    went = asyncio.Event()
    num_written = 0
    client: list[socket.socket] = []

    async def stream(scope: Any, receive: Any, send: Any) -> None:
        nonlocal num_written
        writer = scope["extensions"][EXTENSION]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"first", "more_body": True})
        client[0].shutdown(socket.SHUT_RDWR)
        while num_written < 100 and writer.can_write():
            writer.write(b"next")
            num_written += 1
        went.set()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        client.append(writer.get_extra_info("socket"))
        writer.write(REQUEST)
        await went.wait()

    exchange(60.0, talk, stream)
    assert 1 <= num_written < 10
    assert "socket.send() raised exception" not in caplog.text


@pytest.mark.slow
def test_the_server_does_not_keep_silent_connections(server: Server) -> None:
    """Half a minute after the connection was made."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=120) as silent:
        silent.sendall(b"GET / HTT")
        assert silent.recv(1) == b""
    assert server.http.get("/health").status_code == 200
