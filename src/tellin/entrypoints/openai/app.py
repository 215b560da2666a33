"""Builds the ASGI application from its parts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic import ValidationError
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from tellin.entrypoints.openai.errors import ApiError, bad_request, to_api_error
from tellin.entrypoints.openai.http import error_reply
from tellin.entrypoints.openai.middleware import OPEN_PATHS, Gate, RequestLog
from tellin.entrypoints.openai.page.routes import page_paths, page_routes
from tellin.entrypoints.openai.routes import (
    DOCUMENTED_BODIES,
    admin_routes,
    api_routes,
    status_routes,
)
from tellin.entrypoints.openai.serving import ServingContext
from tellin.exceptions import TellinError

Endpoint = Callable[[Request], Awaitable[Response]]
OWN_ERRORS = (ApiError, TellinError, ValidationError)
"""What endpoints raise for requests that cannot be served."""


def make_app(context: ServingContext) -> FastAPI:
    """The application that serves ``context``."""
    config = context.config
    # FastAPI's pages of documentation load scripts from other servers; the document itself is ours.
    app = FastAPI(title="tellin", docs_url=None, redoc_url=None, openapi_url="/openapi.json")
    api = api_routes(context)
    routers = [api, status_routes(context)]
    if config.enable_admin:
        routers.append(admin_routes(context))
    open_paths = OPEN_PATHS
    if config.enable_page:
        routers.append(page_routes(context))
        open_paths |= page_paths()
    for router in routers:
        app.include_router(router)
    for error_type in OWN_ERRORS:
        app.add_exception_handler(error_type, _on_error)
    app.add_exception_handler(RequestValidationError, _on_query_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    app.add_middleware(DirectRoutes, endpoints=_endpoints(api))
    app.add_middleware(Gate, config=config, open_paths=open_paths)
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(config.allowed_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    context.http_metrics.set_paths(
        route.path for router in routers for route in router.routes if isinstance(route, APIRoute)
    )
    app.add_middleware(RequestLog, metrics=context.http_metrics)
    return app


class DirectRoutes:
    """Calls the endpoints that run the model, without FastAPI's machinery.

    They take the request, and need nothing of what that machinery does for each call, which takes
    a fifth of the time from a request to its engine. Other paths and methods are FastAPI's.
    """

    def __init__(self, app: ASGIApp, endpoints: Mapping[tuple[str, str], Endpoint]) -> None:
        """``endpoints``: by method and path."""
        self._app = app
        self._endpoints = endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = None
        if scope["type"] == "http":
            endpoint = self._endpoints.get((scope["method"], scope["path"]))
        if endpoint is None:
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive, send)
        try:
            response = await endpoint(request)
            await response(scope, receive, send)
        except OWN_ERRORS as error:
            response = await _on_error(request, error)
            await response(scope, receive, send)


def _endpoints(router: APIRouter) -> dict[tuple[str, str], Endpoint]:
    return {
        (method, route.path): route.endpoint
        for route in router.routes
        if isinstance(route, APIRoute)
        for method in route.methods or ()
    }


async def _on_error(request: Request, error: Exception) -> Response:
    answer = to_api_error(error)
    if answer.status == 500:
        # Logged and answered where every request ends.
        raise error
    return error_reply(answer, request.url.path)


async def _on_query_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    fault = error.errors()[0]
    name = str(fault["loc"][-1])
    return error_reply(
        bad_request(f"{name}: {fault['msg']}", name, "invalid_value"), request.url.path
    )


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{error.detail}: {request.method} {request.url.path}"
    answer = ApiError(error.status_code, message, code="not_found")
    if error.status_code == 405:
        answer.code = "method_not_allowed"
    answer.headers = dict(error.headers or {})
    return error_reply(answer, request.url.path)


def _openapi(app: FastAPI) -> dict[str, Any]:
    """FastAPI's document with the schemas of the bodies, which are read by our own reader."""
    if app.openapi_schema is None:
        from tellin import __version__

        document = get_openapi(title="tellin", version=str(__version__), routes=app.routes)
        _, schemas = models_json_schema(
            [(model, "validation") for model in DOCUMENTED_BODIES],
            ref_template="#/components/schemas/{model}",
        )
        components = document.setdefault("components", {}).setdefault("schemas", {})
        components.update(schemas["$defs"])
        app.openapi_schema = document
    return app.openapi_schema
