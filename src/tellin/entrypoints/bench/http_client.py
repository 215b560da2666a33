"""A small HTTP/1.1 client for streams, so that measuring costs little of what is measured.

Connections are kept and used again. Knows nothing of OpenAI.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

from tellin.exceptions import InvalidParameterError

MAX_LINE_BYTES = 1 << 22
_Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class HttpError(Exception):
    """The connection failed, or what came is no HTTP."""


class HttpResponse:
    """A response whose body is read piece by piece."""

    def __init__(
        self, status: int, headers: Mapping[str, str], reader: asyncio.StreamReader
    ) -> None:
        self.status = status
        self.headers = headers
        self._reader = reader
        self.is_read = False
        """Whether the body has been read to its end."""

    @property
    def keeps_alive(self) -> bool:
        """Whether the connection can be used again."""
        bounded = "content-length" in self.headers or self._is_chunked
        return self.is_read and bounded and self.headers.get("connection", "").lower() != "close"

    @property
    def _is_chunked(self) -> bool:
        return "chunked" in self.headers.get("transfer-encoding", "").lower()

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it comes."""
        reader = self._reader
        if self._is_chunked:
            while size := int((await reader.readline()).partition(b";")[0], 16):
                yield (await reader.readexactly(size + 2))[:-2]
            while (await reader.readline()).strip():
                pass  # trailers
        elif "content-length" in self.headers:
            left = int(self.headers["content-length"])
            while left:
                piece = await reader.read(min(left, 1 << 16))
                if not piece:
                    raise HttpError("the body ended early")
                left -= len(piece)
                yield piece
        else:
            while piece := await reader.read(1 << 16):
                yield piece
        self.is_read = True

    async def read(self) -> bytes:
        """The whole body."""
        return b"".join([piece async for piece in self.pieces()])

    async def events(self) -> AsyncIterator[bytes]:
        """Data of server-sent events, one line each."""
        rest = b""
        async for piece in self.pieces():
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                if line.startswith(b"data:"):
                    yield line[5:].strip()


class HttpClient:
    """A client of one server."""

    def __init__(self, base_url: str, headers: Mapping[str, str] | None = None) -> None:
        """
        Raises:
            InvalidParameterError: this is no http or https address.
        """
        parts = urlsplit(base_url)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            raise InvalidParameterError(
                f"the address must look like http://127.0.0.1:8000, got {base_url!r}",
                parameter="--base-url",
                value=base_url,
            )
        self._host = parts.hostname
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = port or (80 if self._ssl is None else 443)
        self._path = parts.path.rstrip("/")
        self._headers = {"Host": parts.netloc.rpartition("@")[2], **(headers or {})}
        self._idle: list[_Connection] = []

    @asynccontextmanager
    async def request(
        self, method: str, path: str, body: bytes = b""
    ) -> AsyncIterator[HttpResponse]:
        """Send a request; the response's head has arrived.

        Raises:
            HttpError: the server cannot be reached, or breaks off.
        """
        head = [f"{method} {self._path}{path} HTTP/1.1"]
        head += [f"{name}: {value}" for name, value in self._headers.items()]
        head += ["Content-Type: application/json", f"Content-Length: {len(body)}", "", ""]
        response: HttpResponse | None = None
        connection: _Connection | None = None
        try:
            connection, response = await self._exchange("\r\n".join(head).encode() + body)
            yield response
        except (OSError, ValueError, asyncio.IncompleteReadError) as error:
            raise HttpError(f"{type(error).__name__}: {error}") from None
        finally:
            if connection is not None:
                if response is not None and response.keeps_alive:
                    self._idle.append(connection)
                else:
                    connection[1].close()

    async def _exchange(self, message: bytes) -> tuple[_Connection, HttpResponse]:
        """Send and read the head; an idle connection that the server has closed is replaced."""
        while True:
            is_used = bool(self._idle)
            connection = self._idle.pop() if is_used else await self._connect()
            reader, writer = connection
            try:
                writer.write(message)
                await writer.drain()
                status_line = await reader.readline()
                if not status_line:
                    raise ConnectionResetError("the server closed the connection")
                return connection, await self._head(status_line, reader)
            except ConnectionError:
                writer.close()
                if not is_used:
                    raise
            except BaseException:
                writer.close()
                raise

    async def _connect(self) -> _Connection:
        return await asyncio.open_connection(
            self._host, self._port, ssl=self._ssl, limit=MAX_LINE_BYTES
        )

    async def _head(self, status_line: bytes, reader: asyncio.StreamReader) -> HttpResponse:
        words = status_line.split(None, 2)
        if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not words[1].isdigit():
            raise HttpError(f"this is no HTTP: {status_line[:60]!r}")
        headers = {}
        while (line := await reader.readline()).strip():
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.strip().lower()] = value.strip()
        return HttpResponse(int(words[1]), headers, reader)

    async def aclose(self) -> None:
        """Close idle connections."""
        while self._idle:
            _, writer = self._idle.pop()
            writer.close()
            try:
                await writer.wait_closed()
            except OSError:
                pass  # it was closed by the other side
