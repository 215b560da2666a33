"""Paths of the page: its files, and the engine's state for it (and for scripts).

The files are read once and served from memory by name, so no path leads out of their folder. They
hold no secrets and need no key; the state does, where the API has keys.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from importlib import resources

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from tellin.entrypoints.openai.http import EventStream, json_reply
from tellin.entrypoints.openai.page.view import EngineView
from tellin.entrypoints.openai.serving import ServingContext

MEDIA_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
}
SECURITY_HEADERS = {
    # Everything comes from this server, no text becomes a script, and no other site frames it.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
INDEX = "index.html"
MIN_INTERVAL_S = 0.1
MAX_INTERVAL_S = 60.0


def page_paths() -> frozenset[str]:
    """All paths that serve files."""
    return frozenset({"/", *(f"/page/{name}" for name in _read_files() if name != INDEX)})


def page_routes(context: ServingContext) -> APIRouter:
    """The page, and ``/engine``."""
    router = APIRouter()
    for name, content in _read_files().items():
        path = "/" if name == INDEX else f"/page/{name}"
        router.add_api_route(
            path,
            _file_handler(content, MEDIA_TYPES[name.rpartition(".")[2]]),
            methods=["GET", "HEAD"],
            include_in_schema=False,
        )
    view = EngineView(context)

    @router.get("/engine/state")
    async def engine_state() -> Response:
        return json_reply((await view.look())[1])

    @router.get("/engine/events")
    async def engine_events(
        interval: float = Query(0.5, ge=MIN_INTERVAL_S, le=MAX_INTERVAL_S),
    ) -> Response:
        context.check_accepts()
        return EventStream(view.events(interval))

    return router


def _read_files() -> dict[str, bytes]:
    folder = resources.files(__package__) / "static"
    return {
        item.name: item.read_bytes()
        for item in folder.iterdir()
        if item.name.rpartition(".")[2] in MEDIA_TYPES
    }


def _file_handler(content: bytes, media_type: str) -> Callable[[Request], Awaitable[Response]]:
    tag = f'"{hashlib.sha256(content).hexdigest()[:24]}"'
    headers = SECURITY_HEADERS | {"ETag": tag, "Cache-Control": "no-cache"}

    async def serve_file(request: Request) -> Response:
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers, media_type=media_type)

    return serve_file
