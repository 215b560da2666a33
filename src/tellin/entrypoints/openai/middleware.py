"""What every request passes: an id and a line in the log, host, keys, the limit of the body.

Plain ASGI, so that a stream costs nothing per event. Logs hold no text of prompts or answers, and
no keys.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import time
import uuid
from collections.abc import Iterable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tellin.entrypoints.openai.errors import ApiError, not_ready, to_api_error
from tellin.entrypoints.openai.hosts import host_check
from tellin.entrypoints.openai.http import CLIENT_CLOSED_REQUEST, error_reply
from tellin.entrypoints.openai.http_metrics import HttpMetrics
from tellin.entrypoints.openai.server_config import ServerConfig

logger = logging.getLogger("tellin.server")

OPEN_PATHS = frozenset({"/health", "/ready"})
"""Probes of orchestrators, which have no key."""
ADMIN_PATHS = frozenset(
    {
        "/sleep",
        "/wake_up",
        "/is_sleeping",
        "/reset_prefix_cache",
        "/start_profile",
        "/stop_profile",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
    }
)
MAX_DISCARD_BYTES = 64 << 20
MAX_DISCARD_S = 2.0
"""How much of a refused body is read, and how long."""
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")


class RequestLog:
    """Gives each request an id, logs its end, and turns what nobody caught into an answer."""

    def __init__(self, app: ASGIApp, metrics: HttpMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        wanted = Headers(scope=scope).get("x-request-id", "")
        request_id = wanted if _REQUEST_ID.fullmatch(wanted) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        start = time.monotonic()
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            answer = to_api_error(error)
            if answer.status == 500:
                logger.exception("request %s failed", request_id)
            if status:
                raise  # the answer has begun: all that is left is to cut it off
            await error_reply(answer, scope["path"])(scope, receive, send_with_id)
        except asyncio.CancelledError:
            if status:
                raise
            # The server ends, and the time that open requests had is over.
            answer = not_ready("the server is shutting down, and did not finish this request")
            await error_reply(answer, scope["path"])(scope, receive, send_with_id)
        finally:
            path = scope["path"]
            status = status or CLIENT_CLOSED_REQUEST
            self._metrics.count(path, status)
            is_noise = path in OPEN_PATHS or path == "/metrics" or path.startswith("/page/")
            level = logging.DEBUG if is_noise else logging.INFO
            logger.log(
                level,
                "%s %s %s %d %.0f ms",
                request_id,
                scope["method"],
                path.encode("unicode_escape").decode(),
                status,
                (time.monotonic() - start) * 1000,
            )


class Gate:
    """Refuses requests to a strange host, without a key, and bodies that are too large."""

    def __init__(
        self, app: ASGIApp, config: ServerConfig, open_paths: frozenset[str] = OPEN_PATHS
    ) -> None:
        self._app = app
        self._open_paths = open_paths
        self._is_our_host = host_check(config)
        self._api_keys = _digests(config.api_keys)
        self._admin_keys = _digests(() if config.admin_key is None else (config.admin_key,))
        self._max_body_bytes = config.max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        refusal = self._refusal(scope["path"], headers)
        if refusal is not None:
            await _discard_body(receive)
            await error_reply(refusal, scope["path"])(scope, receive, send)
            return
        num_bytes = 0

        async def receive_limited() -> Message:
            nonlocal num_bytes
            message = await receive()
            if message["type"] == "http.request":
                num_bytes += len(message.get("body", b""))
                if num_bytes > self._max_body_bytes:
                    if message.get("more_body", False):
                        await _discard_body(receive)
                    raise self._too_large()
            return message

        await self._app(scope, receive_limited, send)

    def _refusal(self, path: str, headers: Headers) -> ApiError | None:
        host = headers.get("host", "")
        if path not in OPEN_PATHS and not self._is_our_host(host):
            return ApiError(
                403,
                f"this server does not answer to the host {host!r:.100}; if it should, start it "
                "with --allowed-host NAME (a web page may have pointed its own name here)",
                code="host_not_allowed",
            )
        if not self._has_key(path, headers):
            return ApiError(
                401,
                "no valid API key; send one as 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
                code="invalid_api_key",
                type="authentication_error",
                headers={"WWW-Authenticate": "Bearer"},
            )
        length = headers.get("content-length", "0")
        if length.isdigit() and int(length) > self._max_body_bytes:
            return self._too_large()
        return None

    def _has_key(self, path: str, headers: Headers) -> bool:
        keys = self._admin_keys if path in ADMIN_PATHS and self._admin_keys else self._api_keys
        if path in self._open_paths or not keys:
            return True
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and _is_among(key.strip(), keys):
            return True
        return _is_among(headers.get("x-api-key", ""), keys)  # Anthropic's clients send this

    def _too_large(self) -> ApiError:
        return ApiError(
            413,
            f"the body is larger than this server takes ({self._max_body_bytes} bytes)",
            code="body_too_large",
            headers={"Connection": "close"},
        )


async def _discard_body(receive: Receive) -> None:
    """Read on for a while: a client that is still sending would see a reset, not the answer."""
    num_bytes = 0
    try:
        async with asyncio.timeout(MAX_DISCARD_S):
            while num_bytes < MAX_DISCARD_BYTES:
                message = await receive()
                num_bytes += len(message.get("body", b""))
                if not message.get("more_body", False):
                    return
    except TimeoutError:
        pass  # then it is reset after all


def _digests(keys: Iterable[str]) -> list[bytes]:
    return [hashlib.sha256(key.encode()).digest() for key in keys]


def _is_among(key: str, digests: list[bytes]) -> bool:
    """Compare with every key, in a time that tells nothing about any of them."""
    digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
    matches = [hmac.compare_digest(digest, known) for known in digests]
    return any(matches)
