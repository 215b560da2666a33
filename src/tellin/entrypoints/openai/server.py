"""Runs the server: binds, loads, serves, drains.

The port is taken before the model is loaded, so that a taken one is known at once. SIGTERM and the
first Ctrl-C end it in an orderly way: no new requests, open ones get `drain_timeout_s`, then they
are aborted. A second signal ends it now. A dead engine ends it with exit code 1.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import logging
import math
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator

import uvicorn

from tellin.engine.async_llm import AsyncLLM
from tellin.entrypoints.openai.server_config import ServerConfig
from tellin.entrypoints.openai.serving import ServingContext
from tellin.exceptions import InvalidParameterError

logger = logging.getLogger("tellin.server")

EXIT_OK = 0
EXIT_ENGINE_DIED = 1
WATCH_INTERVAL_S = 0.5
LOG_INTERVAL_S = 10.0
KEEP_ALIVE_S = 75
ABORT_GRACE_S = 1
"""For the answers of requests that the end of the drain aborts; then tasks are cancelled."""
APP_MODULE = "tellin.entrypoints.openai.app"


def bind(config: ServerConfig) -> socket.socket:
    """A socket on the wanted address, not yet listening.

    Raises:
        InvalidParameterError: the address cannot be had.
    """
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((config.host, config.port))
    except OSError as error:
        sock.close()
        raise InvalidParameterError(
            f"cannot listen on {config.host}:{config.port}: {error.strerror or error}; "
            "choose another --host or --port (0 = any free port)",
            parameter="port",
            value=config.port,
        ) from None
    return sock


def url_of(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(
    config: ServerConfig,
    sock: socket.socket,
    make_engine: Callable[[], AsyncLLM],
    on_start: Callable[[ServingContext, str], None] | None = None,
) -> int:
    """Serve until a signal comes or the engine dies.

    Args:
        sock: from `bind`; closed at the end.
        make_engine: called once, in the event loop's thread.
        on_start: called when requests are accepted.

    Returns:
        The exit code.
    """
    with contextlib.closing(sock):
        return asyncio.run(_serve(config, sock, make_engine, on_start))


async def _serve(
    config: ServerConfig,
    sock: socket.socket,
    make_engine: Callable[[], AsyncLLM],
    on_start: Callable[[ServingContext, str], None] | None,
) -> int:
    # The engine's child starts meanwhile; the web framework takes as long to import.
    warm_up = threading.Thread(target=importlib.import_module, args=(APP_MODULE,), daemon=True)
    warm_up.start()
    engine = make_engine()
    try:
        warm_up.join()
        context = ServingContext(engine, config)
        await context.adapters.load_static()
        server = _Server(context, sock, on_start)
        with _signals(server.stop):
            await server.run()
        return EXIT_ENGINE_DIED if server.engine_died else EXIT_OK
    finally:
        engine.shutdown()


class _Server(uvicorn.Server):
    """Uvicorn without its signal handlers, and with a watch on the engine."""

    def __init__(
        self,
        context: ServingContext,
        sock: socket.socket,
        on_start: Callable[[ServingContext, str], None] | None,
    ) -> None:
        self.engine_died = False
        self._context = context
        self._sock = sock
        self._on_start = on_start
        self._drain: asyncio.Task[None] | None = None
        from tellin.entrypoints.openai.app import make_app
        from tellin.entrypoints.openai.connection import http_protocol

        super().__init__(
            uvicorn.Config(
                make_app(context),
                http=http_protocol(context.config.header_timeout_s),
                log_config=None,
                access_log=False,
                lifespan="off",
                ws="none",
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=math.ceil(context.config.drain_timeout_s) + ABORT_GRACE_S,
            )
        )

    async def run(self) -> None:  # type: ignore[override]
        watch = asyncio.create_task(self._watch(), name="tellin-watch")
        try:
            await self._serve([self._sock])
        finally:
            tasks = [task for task in (watch, self._drain) if task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        # What is loaded by now stays: the garbage collector need not look at it again and again.
        gc.collect()
        gc.freeze()
        if self._on_start is not None:
            self._on_start(self._context, url_of(self._sock))

    def stop(self) -> None:
        """A signal came: drain; a second one: end now."""
        if self.should_exit:
            self.force_exit = True
            return
        logger.info("shutting down: open requests have %g s", self._context.config.drain_timeout_s)
        self._context.is_draining = True
        self.should_exit = True
        self._drain = asyncio.create_task(self._end_drain(), name="tellin-drain")

    async def _end_drain(self) -> None:
        """Abort what the drain leaves, so that every stream ends with an error and not midway."""
        await asyncio.sleep(self._context.config.drain_timeout_s)
        await self._context.engine.pause_generation(mode="abort", clear_cache=False)

    async def _watch(self) -> None:
        """End when the engine is dead; log statistics now and then."""
        since_log = 0.0
        while True:
            await asyncio.sleep(WATCH_INTERVAL_S)
            if self._context.engine.errored and not self.should_exit:
                logger.error(
                    "the engine died; the server ends: %s", self._context.engine.dead_error
                )
                self.engine_died = True
                self._context.is_draining = True
                self.should_exit = True
                return
            since_log += WATCH_INTERVAL_S
            if since_log >= LOG_INTERVAL_S:
                since_log = 0.0
                await self._context.engine.do_log_stats()


@contextlib.contextmanager
def _signals(on_signal: Callable[[], None]) -> Iterator[None]:
    """Call ``on_signal`` in the event loop for SIGTERM and SIGINT."""
    loop = asyncio.get_running_loop()
    wanted = (signal.SIGTERM, signal.SIGINT)
    if sys.platform == "win32":
        previous = {
            number: signal.signal(number, lambda *_: loop.call_soon_threadsafe(on_signal))
            for number in wanted
        }
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
        return
    for number in wanted:
        loop.add_signal_handler(number, on_signal)
    try:
        yield
    finally:
        for number in wanted:
            loop.remove_signal_handler(number)
